"""A decoder's products and their floating-point operations, from its config.json."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What the forward pass of a Llama or Qwen3 model multiplies."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, config: dict) -> "Shape":
        heads = config["num_attention_heads"]
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads", heads),
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
        )

    def products(self) -> list:
        """(outputs n, inputs k, how many of them) of the products over all tokens; q, k, v are one, gate and up too."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (q + 2 * kv, self.hidden, self.layers),
            (self.hidden, q, self.layers),
            (2 * self.intermediate, self.hidden, self.layers),
            (self.hidden, self.intermediate, self.layers),
        ]

    @property
    def weights(self) -> int:
        """Values of all matrices; the head is the embedding."""
        return self.vocab * self.hidden + sum(n * k * count for n, k, count in self.products())

    def op_flops(self, tokens: int) -> dict:
        """Floating-point operations of a prefill by op. The head works on the last position; in attention, position i
        sees i + 1 positions, by q k^T and a product with v."""
        qkv, o, gate_up, down = (2 * tokens * n * k * count for n, k, count in self.products())
        pairs = tokens * (tokens + 1) // 2
        return {
            "qkv": qkv,
            "o": o,
            "mlp": gate_up + down,
            "head": 2 * self.vocab * self.hidden,
            "attention": 4 * self.layers * self.heads * self.head_dim * pairs,
        }

    def flops(self, tokens: int) -> int:
        return sum(self.op_flops(tokens).values())
