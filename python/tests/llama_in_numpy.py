"""The Llama forward pass in numpy, float32 throughout: a second opinion that shares no code with MLX or cleave."""

import json

import mlx.core as mx
import numpy as np


class Llama:
    """A model folder in mlx_lm's form, its weights unpacked to float32. Sequences of any lengths are read together."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        self._weights = _unpacked(folder, self.config["quantization"])
        c = self.config
        self._d = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        self._kv = c["num_key_value_heads"]
        pairs = np.arange(0, self._d, 2, dtype=np.float64) / self._d
        self._frequencies = c["rope_theta"] ** -pairs

    def logits(self, ids: list) -> np.ndarray:
        """[len(ids), vocabulary]"""
        return self._project(self._hidden([ids], self._caches(1, len(ids)), [0]))

    def greedy(self, prompts: list, count: int) -> tuple:
        """-> (``count`` tokens for each prompt, the logits that each was chosen from [prompts, count, vocabulary])"""
        caches = self._caches(len(prompts), max(map(len, prompts)) + count)
        hidden = self._hidden(prompts, caches, [0] * len(prompts))
        ends = np.cumsum([len(p) for p in prompts]) - 1
        chosen_from = [self._project(hidden[ends])]
        lengths = [len(p) for p in prompts]
        for step in range(count - 1):
            new = [[int(t)] for t in chosen_from[-1].argmax(-1)]
            hidden = self._hidden(new, caches, [n + step for n in lengths])
            chosen_from.append(self._project(hidden))
        logits = np.stack(chosen_from, 1)
        return logits.argmax(-1).tolist(), logits

    def _caches(self, sequences: int, positions: int) -> list:
        """Per layer keys and values [sequence, position, head, d]."""
        shape = (sequences, positions, self._kv, self._d)
        layers = range(self.config["num_hidden_layers"])
        return [(np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for _ in layers]

    def _hidden(self, sequences: list, caches: list, offsets: list) -> np.ndarray:
        """The rows of all new tokens, one sequence after the other, before the head."""
        counts = [len(s) for s in sequences]
        spans = np.cumsum([0, *counts])
        positions = np.concatenate([o + np.arange(n) for o, n in zip(offsets, counts)])
        angles = positions[:, None] * self._frequencies
        turn = (
            np.cos(angles)[:, None].astype(np.float32),
            np.sin(angles)[:, None].astype(np.float32),
        )
        x = self._weights["model.embed_tokens.weight"][np.concatenate(sequences)]
        for i, (keys, values) in enumerate(caches):
            layer = f"model.layers.{i}."
            y = self._norm(x, layer + "input_layernorm")
            q, k, v = (
                (y @ self._weights[f"{layer}self_attn.{p}_proj.weight"].T).reshape(
                    len(y), -1, self._d
                )
                for p in "qkv"
            )
            q, k = _rotated(q, *turn), _rotated(k, *turn)
            out = np.empty_like(q)
            for s, offset in enumerate(offsets):
                new = slice(spans[s], spans[s + 1])
                end = offset + counts[s]
                keys[s, offset:end], values[s, offset:end] = k[new], v[new]
                out[new] = _attention(q[new], keys[s, :end], values[s, :end])
            x = x + out.reshape(len(x), -1) @ self._weights[layer + "self_attn.o_proj.weight"].T
            y = self._norm(x, layer + "post_attention_layernorm")
            gate, up = (y @ self._weights[f"{layer}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            x = (
                x
                + (gate / (1 + np.exp(-gate)) * up)
                @ self._weights[layer + "mlp.down_proj.weight"].T
            )
        return x

    def _project(self, hidden: np.ndarray) -> np.ndarray:
        return self._norm(hidden, "model.norm") @ self._weights["model.embed_tokens.weight"].T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(x * x, -1, keepdims=True)
        return (
            x
            / np.sqrt(mean + np.float32(self.config["rms_norm_eps"]))
            * self._weights[name + ".weight"]
        )


def _rotated(x, cosine, sine):
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)


def _attention(q, k, v):
    """q [tokens, heads, d] sees k, v [all, kv heads, d] up to its own position, which ends with the last."""
    tokens, heads, d = q.shape
    group = heads // k.shape[1]
    q = q.transpose(1, 0, 2).reshape(k.shape[1], group * tokens, d)
    scores = q @ k.transpose(1, 2, 0) / np.float32(d**0.5)
    hidden = np.arange(len(k)) > len(k) - tokens + np.arange(tokens)[:, None]
    scores = np.where(np.tile(hidden, (group, 1)), np.float32(-np.inf), scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ v.transpose(1, 0, 2)
    return out.reshape(heads, tokens, d).transpose(1, 0, 2)


def _unpacked(folder, quantization: dict) -> dict:
    """All weights in float32; scales are widened first, so that nothing is rounded on the way."""
    packed = mx.load(str(folder / "model.safetensors"))
    out = {}
    for name, array in packed.items():
        base, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        if f"{base}.scales" in packed:
            form = {k: quantization[k] for k in ("group_size", "bits")}
            form |= quantization.get(base, {})
            parts = (packed[f"{base}.{p}"].astype(mx.float32) for p in ("scales", "biases"))
            array = mx.dequantize(array, *parts, **form)
        out[name] = np.array(array.astype(mx.float32))
    return out
