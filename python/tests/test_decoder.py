"""The native decoder against mlx_lm on the same model folder."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import BASE, MAX_POSITIONS, identical
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, dequantize_model, load_model

from cleave import _core
from cleave.quality import compare

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


@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_as_mlx_lm(name, tmp_path):
    config = CONFIGS[name]
    folder = save(tmp_path / "model", config)
    model, _ = load_model(folder)
    decoder = _core.load_decoder(str(folder))
    ids = prompt(config, 45)
    expected = read_in_parts(model, ids, [45])
    check_equal(session_in_parts(decoder, ids, [45]), expected)
    parts = [20, 1, 17, 1, 1, 5]
    # Not the same as in one call where rope depends on the length.
    expected = read_in_parts(model, ids, parts)
    check_equal(session_in_parts(decoder, ids, parts), expected)
    # The same split over two units: whole attention where rope and heads allow it.
    units = [_core.make_unit(name) for name in ("reference", "cpu")]
    split = _core.load_decoder(str(folder), lambda *_: [(u, 0.5) for u in units], 16, 1)
    kinds = {site.report()["kind"] for site in split.sites}
    even = config.get("text_config", config).get("num_key_value_heads", 4) % 2 == 0
    assert ("attention" in kinds) == (even and "dynamic" not in name)
    check_equal(session_in_parts(split, ids, parts), expected)
    assert all(site.engaged and not site.rescued for site in split.sites)


def check_against_exact(folder: Path, ids: list[int], decoder, parts=None):
    """Compares with mlx_lm in the model's dtype, both measured by mlx_lm in float32."""
    model, _ = load_model(folder)
    parts = parts or [len(ids)]
    expected = read_in_parts(model, ids, parts)
    model.set_dtype(mx.float32)
    exact = read_in_parts(model, ids, [len(ids)])
    check_equal(session_in_parts(decoder, ids, parts), expected, exact)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", ["llama biases", "qwen2", "qwen3", "yarn mscale", "windows"])
def test_16_bit_models(name, dtype, tmp_path):
    folder = save(tmp_path, CONFIGS[name], dtype)
    ids = prompt(CONFIGS[name], 40)
    check_against_exact(folder, ids, _core.load_decoder(str(folder)), [25, 14, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_quantised_models(form, dtype, tmp_path):
    config = {**(QWEN2 if form in ("4-bit", "nvfp4") else LLAMA), "intermediate_size": 192}
    config["tie_word_embeddings"] = form not in ("8-bit", "mxfp8")
    folder = save(tmp_path, config, dtype, FORMATS[form])
    check_against_exact(folder, prompt(config, 24), _core.load_decoder(str(folder)), [20, 3, 1])


def test_every_layer_may_be_packed_in_its_own_way(tmp_path):
    def choose(path, module):
        if path.endswith("v_proj"):
            return {"group_size": 32, "bits": 8}
        if path.endswith("layers.1.mlp.down_proj"):
            return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        return not path.endswith(("layers.0.self_attn.o_proj", "embed_tokens"))

    config = {**QWEN3, "tie_word_embeddings": False, "head_dim": 32, "intermediate_size": 192}
    folder = save(tmp_path, config, mx.float16, {"group_size": 64, "bits": 4}, choose)
    written = json.loads((folder / "config.json").read_text())["quantization"]
    assert sum(isinstance(entry, dict) for entry in written.values()) == 3
    decoder = _core.load_decoder(str(folder))
    check_against_exact(folder, prompt(config, 24), decoder)
    formats = {r["name"]: r["format"] for r in (s.report() for s in decoder.sites)}
    assert formats["model.layers.0.self_attn.o_proj"] == "float16"
    assert formats["model.layers.1.self_attn.o_proj"] == "affine 4-bit group 64"


def test_several_shards(tmp_path):
    folder = save(tmp_path, QWEN2, shards=3)
    ids = prompt(QWEN2, 9)
    expected = read_in_parts(load_model(folder)[0], ids, [9])
    check_equal(session_in_parts(_core.load_decoder(str(folder)), ids, [9]), expected)
    # Files beside those that the index names are none of the model's.
    (folder / "model-old.safetensors").write_bytes(b"")
    _core.load_decoder(str(folder))


def test_weights_named_as_in_the_original_qwen3_vl(tmp_path):
    """As Hugging Face publishes it: text part below model.language_model, vision tower beside it."""
    folder = save(tmp_path, CONFIGS["qwen3_vl"])
    file = str(folder / "model.safetensors")
    ours = mx.load(file)
    theirs = {
        k.replace("language_model.model.", "model.language_model."): v for k, v in ours.items()
    }
    mx.eval(theirs)
    mx.save_safetensors(file, {**theirs, "model.visual.blocks.0.bias": mx.zeros(3)})
    ids = prompt(QWEN3, 9)
    expected = load_model(folder, strict=False)[0](mx.array([ids]))
    check_equal(session_in_parts(_core.load_decoder(str(folder)), ids, [9]), expected)


def test_chunks_of_a_long_prompt(tmp_path):
    config = {**LLAMA, **SMALLEST, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = save(tmp_path, config)
    chunk = _core.Session.chunk
    ids = prompt(config, chunk + 60)
    expected = read_in_parts(load_model(folder)[0], ids, [chunk, 60])
    decoder = _core.load_decoder(str(folder))
    check_equal(session_in_parts(decoder, ids, [len(ids)]), expected)
    session = _core.Session(decoder)
    session.feed(ids, len(ids) + 5)
    check_equal(session.last_logits, expected[:, -1:])


UNITS = {
    "cpu": [("cpu", 1.0)],
    "main and cpu": [(None, 0.4), ("cpu", 0.6)],
    "main and reference": [(None, 0.5), ("reference", 0.5)],
    "three": [(None, 0.3), ("reference", 0.3), ("cpu", 0.4)],
}


@pytest.mark.parametrize("name", ["llama biases", "qwen3", "windows", "odd heads"])
@pytest.mark.parametrize("units", UNITS)
def test_units_take_part(units, name, tmp_path):
    folder = save(tmp_path, CONFIGS[name])
    asked = []

    def shares(site, weight):
        asked.append(site)
        return [(u and _core.make_unit(u), share) for u, share in UNITS[units]]

    decoder = _core.load_decoder(str(folder), shares, tile=32, min_rows=16)
    assert asked == [s.report()["name"] for s in decoder.sites]
    ids = prompt(CONFIGS[name], 45)
    expected = read_in_parts(load_model(folder)[0], ids, [45])
    # The last parts have fewer tokens than min_rows: main alone, over the cache that the units filled.
    check_equal(session_in_parts(decoder, ids, [40, 4, 1]), expected)
    partners = sum(unit is not None for unit, _ in UNITS[units])
    for site in decoder.sites:
        assert site.engaged == partners and site.rescued == 0, site.report()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("form", [None, "4-bit", "8-bit", "mxfp4"])
def test_units_with_16_bits_and_packed_weights(form, dtype, tmp_path):
    config = {**QWEN2, "intermediate_size": 192}
    folder = save(tmp_path, config, dtype, FORMATS.get(form))
    shares = [(None, 0.25), (_core.make_unit("cpu"), 0.75)]
    decoder = _core.load_decoder(str(folder), lambda site, weight: shares, min_rows=16)
    check_against_exact(folder, prompt(config, 32), decoder, [31, 1])


@pytest.fixture(scope="session")
def exact_smollm2(smollm2):
    """The same weights in float32, which mlx multiplies in a bearable time."""
    model, _ = load_model(smollm2, lazy=True)
    model.set_dtype(mx.float32)
    return dequantize_model(model)


# "The capital of France is Paris. The capital of Germany is"
CAPITALS = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 4521, 314]


def test_smollm2(smollm2, exact_smollm2):
    cpu = _core.make_unit("cpu")
    decoder = _core.load_decoder(str(smollm2), lambda site, weight: [(cpu, 1.0)], min_rows=1)
    exact = read_in_parts(exact_smollm2, CAPITALS, [12])
    result = session_in_parts(decoder, CAPITALS, [8, 3, 1])
    assert result.dtype == mx.float16
    quality = compare(result, exact)
    print(quality)
    assert quality["max_abs"] <= 0.02 * largest(exact) and quality["cos"] > 0.9999, quality
    assert quality["top1"] == 1, quality
    session, ids = _core.Session(decoder), list(CAPITALS)
    session.feed(ids)
    for _ in range(6):
        ids.append(session.next())
    # Each was the likeliest after those before it.
    logits = exact_smollm2(mx.array([ids[:-1]]))[0, len(CAPITALS) - 1 :]
    assert mx.argmax(logits, -1).tolist() == ids[len(CAPITALS) :]
