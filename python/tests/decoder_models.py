"""Tiny decoders of every kind and format as folders, and what the native one is held to beside mlx_lm's."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import BASE, MAX_POSITIONS, identical
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model

from cleave import _core

QWEN3 = {
    "model_type": "qwen3",
    **BASE,
    **MAX_POSITIONS,
    "head_dim": 16,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
QWEN2 = {"model_type": "qwen2", **BASE, **MAX_POSITIONS}
LLAMA = {"model_type": "llama", **BASE}
SMALLEST = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}


def scaled(rope_type: str, **fields) -> dict:
    return {"rope_scaling": {"type": rope_type, **fields}}


def windows(*types: str, **fields) -> dict:
    names = {"f": "full_attention", "s": "sliding_attention"}
    return {"layer_types": [names[t] for t in types], "num_hidden_layers": len(types), **fields}


# What a model of each kind may differ in. Positions of the test pass the contexts named here.
CONFIGS = {
    "llama": LLAMA,
    "llama untied": {**LLAMA, "tie_word_embeddings": False},
    "llama biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama without context": {**LLAMA, "rope_theta": 500.0},
    "heads alone": {**LLAMA, "num_key_value_heads": 4},
    "no num_key_value_heads": {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"},
    "one kv head": {**LLAMA, "num_key_value_heads": 1},
    "odd heads": {**LLAMA, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 14},
    "narrow heads": {**LLAMA, "head_dim": 6},
    "wide heads": {**LLAMA, "head_dim": 40},
    "head_dim null": {**LLAMA, "head_dim": None, "rope_scaling": None, "attention_bias": False},
    "odd sizes": {
        **LLAMA,
        "hidden_size": 52,
        "intermediate_size": 77,
        "vocab_size": 301,
        "head_dim": 10,
    },
    "mistral": {**LLAMA, "model_type": "mistral", "head_dim": 24},
    "traditional": {**LLAMA, "rope_traditional": True},
    "linear": {**LLAMA, **scaled("linear", factor=4.0)},
    "rope_type": {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2}},
    "dynamic": {**LLAMA, **scaled("dynamic", factor=2.0), "max_position_embeddings": 24},
    "dynamic traditional": {
        **LLAMA,
        **scaled("dynamic", factor=3.0),
        "max_position_embeddings": 20,
        "rope_traditional": True,
    },
    "llama3": {
        **LLAMA,
        **scaled(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        "head_dim": 32,
    },
    "yarn": {
        **LLAMA,
        **scaled("yarn", factor=4.0, original_max_position_embeddings=32),
        "head_dim": 32,
        "max_position_embeddings": 128,
    },
    "yarn mscale": {
        **LLAMA,
        **scaled("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.3, beta_fast=16, beta_slow=2),
        "head_dim": 32,
        "rope_traditional": True,
    },
    "longrope": {
        **LLAMA,
        **scaled(
            "longrope",
            short_factor=[1.0] * 8,
            long_factor=[1 + 0.3 * i for i in range(8)],
            original_max_position_embeddings=32,
        ),
        "max_position_embeddings": 256,
    },
    "longrope one factor": {
        **LLAMA,
        **scaled(
            "longrope", short_factor=1.0, long_factor=2.5, original_max_position_embeddings=32
        ),
        "max_position_embeddings": 256,
    },
    "proportional": {
        **LLAMA,
        **scaled("proportional", factor=2.0, partial_rotary_factor=0.5),
    },
    "windows": {**LLAMA, **windows(*"fsfs", sliding_window=16)},
    "window of one": {**LLAMA, **windows(*"sf", sliding_window=1)},
    "wide window": {**LLAMA, **windows(*"sf", sliding_window=400)},
    "qwen2": QWEN2,
    "qwen2 untied": {**QWEN2, "tie_word_embeddings": False, "use_sliding_window": False},
    "qwen2 yarn": {**QWEN2, **scaled("yarn", factor=2.0, original_max_position_embeddings=64)},
    "qwen2 traditional": {**QWEN2, "rope_traditional": True, "rope_theta": 500.0},
    "qwen3": QWEN3,
    "qwen3 untied": {**QWEN3, "tie_word_embeddings": False, "head_dim": 32},
    "qwen3 odd": {**QWEN3, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10},
    "qwen3 yarn": {**QWEN3, **scaled("yarn", factor=2.0, original_max_position_embeddings=64)},
    "qwen3 rope_parameters": {
        **{k: v for k, v in QWEN3.items() if k != "rope_theta"},
        "rope_parameters": {"rope_theta": 3e4, "rope_type": "linear", "factor": 2.0},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {
            **QWEN3,
            "model_type": "qwen3_vl_text",
            **scaled("mrope", mrope_section=[3, 3, 2]),
        },
    },
    "qwen3_vl flat": {**QWEN3, "model_type": "qwen3_vl"},
}

FORMATS = {
    "4-bit": dict(group_size=32, bits=4),
    "8-bit": dict(group_size=64, bits=8),
    "3-bit": dict(group_size=32, bits=3),
    "6-bit": dict(group_size=64, bits=6),
    "mxfp4": dict(group_size=32, bits=4, mode="mxfp4"),
    "mxfp8": dict(group_size=32, bits=8, mode="mxfp8"),
    "nvfp4": dict(group_size=16, bits=4, mode="nvfp4"),
}
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def save(folder: Path, config: dict, dtype=mx.float32, quantization=None, predicate=None, shards=1):
    """Writes a random model of `config` as mlx_lm's save and convert do.

    Args:
        quantization: arguments of nn.quantize, or None.
        predicate: class_predicate of nn.quantize; its dicts and refusals go into the config.
        shards: number of weight files, with an index when there are several.
    """
    cls, args = _get_classes(config)
    mx.random.seed(3)
    model = cls(args.from_dict(config))

    def random_like(a):  # norms and biases too, so that each of them counts
        scale = a.shape[-1] ** -0.5 if a.ndim == 2 else 0.3
        return (mx.random.normal(a.shape) * scale + (a.ndim == 1)).astype(dtype)

    model.update(tree_map(random_like, model.parameters()))
    config = dict(config)
    if quantization:
        entries = {}

        def choose(path, module):
            if not hasattr(module, "to_quantized"):
                return False
            choice = predicate(path, module) if predicate else True
            if choice is not True:
                entries[path] = choice
            return choice

        nn.quantize(model, **quantization, class_predicate=choose)
        config["quantization"] = {**quantization, **entries}
    weights = sorted(tree_flatten(model.parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    names = names if shards > 1 else ["model.safetensors"]
    for i, name in enumerate(names):
        mx.save_safetensors(str(folder / name), dict(weights[i::shards]), {"format": "mlx"})
    if shards > 1:
        index = {name: names[i % shards] for i, (name, _) in enumerate(weights)}
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt(config: dict, count: int, seed: int = 1) -> list[int]:
    vocab = config.get("text_config", config)["vocab_size"]
    return mx.random.randint(0, vocab, (count,), key=mx.random.key(seed)).tolist()


def read_in_parts(model, ids: list[int], parts: list[int]) -> mx.array:
    """Logits [1, S, vocab] of mlx_lm's model, its cache fed with so many ids at a time."""
    cache, out, begin = make_prompt_cache(model), [], 0
    for count in parts:
        out.append(model(mx.array([ids[begin : begin + count]]), cache=cache))
        mx.eval(out, [c.state for c in cache])
        begin += count
    assert begin == len(ids)
    return mx.concatenate(out, 1)


def session_in_parts(decoder, ids: list[int], parts: list[int]) -> mx.array:
    session, out, begin = _core.Session(decoder), [], 0
    for count in parts:
        out.append(session.feed_for_logits(ids[begin : begin + count]))
        begin += count
    assert session.length == len(ids)
    assert identical(session.last_logits, out[-1][:, -1:])
    return mx.concatenate(out, 1)


def largest(a: mx.array) -> float:
    return mx.max(mx.abs(a.astype(mx.float32))).item()


def check_equal(result: mx.array, expected: mx.array, exact: mx.array | None = None):
    """Same dtype and shape; float32 the same to rounding, 16 bits as near to the exact numbers."""
    assert result.dtype == expected.dtype and result.shape == expected.shape
    result, expected = result.astype(mx.float32), expected.astype(mx.float32)
    if exact is None:
        assert largest(result - expected) <= 2e-5 * largest(expected)
        top = mx.argmax(expected, -1)
        assert mx.array_equal(mx.argmax(result, -1), top)
    else:
        own, theirs = largest(result - exact), largest(expected - exact)
        assert own <= 1.5 * theirs + 1e-5 * largest(exact)
        # The likeliest token is the same unless rounding leaves two that cannot be told apart.
        lost = (
            mx.max(exact, -1)
            - mx.take_along_axis(exact, mx.argmax(result, -1, keepdims=True), -1)[..., 0]
        )
        assert largest(lost) <= 2 * theirs


def check_against_exact(folder: Path, ids: list[int], decoder, parts=None):
    """Compares with mlx_lm in the model's dtype, both measured by mlx_lm in float32."""
    model, _ = load_model(folder)
    parts = parts or [len(ids)]
    expected = read_in_parts(model, ids, parts)
    model.set_dtype(mx.float32)
    exact = read_in_parts(model, ids, [len(ids)])
    check_equal(session_in_parts(decoder, ids, parts), expected, exact)


def refusal(path) -> str:
    with pytest.raises(ValueError) as error:
        _core.load_decoder(str(path))
    message = str(error.value)
    assert message.startswith("[load_model] got ") and " and needs " in message, message
    assert "\n" not in message and len(message) < 600
    return message


def loads_and_runs(path, ids=(1, 2, 3)):
    logits = _core.Session(_core.load_decoder(str(path))).feed_for_logits(list(ids))
    assert logits.shape[1] == len(ids)
