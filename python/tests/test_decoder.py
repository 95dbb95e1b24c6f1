"""The native decoder against mlx_lm on the same model folder."""

import json

import mlx.core as mx
import pytest
from decoder_models import (
    CONFIGS,
    DTYPES,
    FORMATS,
    LLAMA,
    QWEN2,
    QWEN3,
    SMALLEST,
    check_against_exact,
    check_equal,
    largest,
    prompt,
    read_in_parts,
    save,
    session_in_parts,
)
from mlx_lm.utils import dequantize_model, load_model

from cleave import _core
from cleave.quality import compare


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
    # Attention that is one site gets the shares of its queries, keys and values.
    names = [s.report()["name"] for s in decoder.sites]
    qkv = ".q_proj+k_proj+v_proj"
    assert asked == [n + qkv if n.endswith("self_attn") else n for n in names]
    ids = prompt(CONFIGS[name], 45)
    expected = read_in_parts(load_model(folder)[0], ids, [45])
    # The last parts have fewer tokens than min_rows: main alone, over the cache that the units filled.
    check_equal(session_in_parts(decoder, ids, [40, 4, 1]), expected)
    partners = sum(unit is not None for unit, _ in UNITS[units])
    for site in decoder.sites:
        info = site.report()
        taking_part = sum(part["unit"] != "main" for part in info["parts"])
        # Attention is cut at whole heads, of which there may be fewer than units.
        assert taking_part == partners or (info["kind"] == "attention" and taking_part), info
        assert site.engaged == taking_part and site.rescued == 0, info


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
