"""Weight files that the native decoder refuses, and files damaged at random."""

import json
import os
import random
import struct

import mlx.core as mx
import pytest
from decoder_models import loads_and_runs, refusal


def test_no_weights(folder):
    path = folder()
    (path / "model.safetensors").unlink()
    assert "without a model*.safetensors file" in refusal(path)


def test_missing_shard(folder):
    path = folder("shards")
    (path / "model-00002-of-00002.safetensors").unlink()
    message = refusal(path)
    assert "without model-00002-of-00002.safetensors" in message and "index.json names" in message


@pytest.mark.parametrize(
    "index, words",
    [
        ("{", "no JSON at line 1"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": 5}}', "'a': 5"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "../model.safetensors"),
        ('{"weight_map": {"a": ".."}}', ".."),
        ('{"weight_map": {"a": ""}}', "'a': \"\""),
    ],
)
def test_damaged_index(folder, index, words):
    path = folder()
    (path / "model.safetensors.index.json").write_text(index)
    message = refusal(path)
    assert "model.safetensors.index.json" in message or words == "..", message
    assert words in message, message


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.5, 0.99999])
def test_truncated_weights(folder, share):
    file = folder("shards") / "model-00001-of-00002.safetensors"
    os.truncate(file, int(file.stat().st_size * share))
    assert str(file) in refusal(file.parent)


def header_of(file) -> dict:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def with_header(file, header: bytes, length=None):
    data = file.read_bytes()
    (old,) = struct.unpack("<Q", data[:8])
    length = len(header) if length is None else length
    file.write_bytes(struct.pack("<Q", length) + header + data[8 + old :])


@pytest.mark.parametrize(
    "header", [b"", b"nonsense", b"[]", b'{"a": 5}', b"\xff" * 40, b"{" * 99999]
)
def test_header_that_is_none(folder, header):
    file = folder() / "model.safetensors"
    with_header(file, header)
    assert str(file) in refusal(file.parent)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40])
def test_header_beyond_the_file(folder, length):
    file = folder() / "model.safetensors"
    with_header(file, b"{}", length)
    assert "no room for its header" in refusal(file.parent)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F4"},
        {"dtype": 5},
        {"shape": [65]},
        {"shape": [-64]},
        {"shape": [2**63]},
        {"shape": [2**32, 2**32]},
        {"shape": [0, 2**63]},
        {"shape": 64},
        {"data_offsets": [0]},
        {"data_offsets": [256, 0]},
        {"data_offsets": [2**63, 2**63 + 256]},
        {"data_offsets": [2**64 - 256, 0]},
        {"data_offsets": None},
    ],
)
def test_entry_of_a_tensor(folder, change):
    file = folder() / "model.safetensors"
    header = header_of(file)
    header[NORM].update(change)
    with_header(file, json.dumps(header).encode())
    message = refusal(file.parent)
    assert str(file) in message and f"'{NORM}'" in message, message


def test_dtype_that_no_layer_takes(folder):
    file = folder() / "model.safetensors"
    header = header_of(file)
    header[NORM]["dtype"] = "I32"
    with_header(file, json.dumps(header).encode())
    message = refusal(file.parent)
    assert f"'{NORM}' of int32" in message and "[64] in float32" in message


def change_weights(path, **changes):
    """Tensors by name: an array in place of the old one, or None for none."""
    file = str(path / "model.safetensors")
    weights = mx.load(file)
    mx.eval(weights)
    for name, array in changes.items():
        weights[name] = array
    mx.save_safetensors(file, {k: v for k, v in weights.items() if v is not None})
    return path


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("llama", "model.norm.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("llama", "model.layers.1.mlp.down_proj.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("packed", "lm_head.weight"),
    ],
)
def test_missing_tensor(folder, name, tensor):
    path = change_weights(folder(name), **{tensor: None})
    message = refusal(path)
    assert f"without tensor '{tensor}'" in message and str(path) in message


@pytest.mark.parametrize("shape", [(160, 63), (159, 64), (64, 160), (160, 64, 1), (160 * 64,)])
def test_wrong_shape(folder, shape):
    path = change_weights(folder(), **{"model.layers.0.mlp.up_proj.weight": mx.zeros(shape)})
    message = refusal(path)
    assert "'model.layers.0.mlp.up_proj.weight'" in message and "[160, 64]" in message


def test_tensor_that_the_model_has_no_place_for(folder):
    path = change_weights(folder(), **{"model.layers.0.self_attn.q_proj.bias": mx.zeros(64)})
    assert "'model.layers.0.self_attn.q_proj.bias'" in refusal(path)


@pytest.mark.parametrize("rows", [299, 301])
def test_vocabulary_mismatch(folder, rows):
    path = change_weights(folder(), **{"model.embed_tokens.weight": mx.zeros((rows, 64))})
    message = refusal(path)
    assert "'model.embed_tokens.weight'" in message and "[300, 64]" in message


PACKED = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"scales": None}, PACKED),
        ({"biases": None}, PACKED),
        ({"scales": mx.zeros((160, 3), mx.float16)}, PACKED),
        ({"scales": mx.zeros((159, 2), mx.float16)}, PACKED),
        ({"scales": mx.zeros((160, 0), mx.float16)}, PACKED),
        ({"scales": mx.zeros((160, 2), mx.int32)}, PACKED),
        ({"scales": mx.zeros((160, 2), mx.uint8)}, PACKED),
        ({"biases": mx.zeros((160, 2), mx.float32)}, PACKED),
        ({"weight": mx.zeros((160, 7), mx.uint32)}, PACKED),
        ({"weight": mx.zeros((160, 14), mx.uint32)}, PACKED),
        ({"weight": mx.zeros((160, 0), mx.uint32)}, PACKED),
        ({"weight": mx.zeros((160, 8), mx.int32)}, PACKED),
        ({"weight": mx.zeros((160, 64), mx.float16)}, PACKED),
    ],
)
def test_packed_arrays_that_do_not_fit(folder, changes, words):
    path = change_weights(folder("packed"), **{f"{PACKED}.{k}": v for k, v in changes.items()})
    assert words in refusal(path)


def test_packed_weights_without_a_word_in_the_config(folder):
    message = refusal(folder("packed", quantization="left out"))
    assert "'quantization'" in message


def test_packed_otherwise_than_the_config_says(folder):
    entry = {"group_size": 32, "bits": 8}
    message = refusal(folder("packed", quantization={"group_size": 32, "bits": 4, PACKED: entry}))
    assert f"'{PACKED}.weight'" in message and "4-bit" in message


# ---------------------------------------------------------------- damage at random


def damaged_json(rng, value):
    """The value with one place changed into something else."""
    odd = [0, -1, 1, 3, 2**31, 2**63, 1e-300, 1e300, 0.5, "", "llama", True, None, [], {}, [1, 2]]
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: damaged_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = rng.randrange(len(value))
        return [*value[:i], damaged_json(rng, value[i]), *value[i + 1 :]]
    return rng.choice(odd)


def damaged_bytes(rng, data: bytes) -> bytes:
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 6])):
        data[rng.randrange(len(data))] = rng.choice(
            [0, 0x2C, 0x30, 0x39, 0x7B, 0xFF, rng.randrange(256)]
        )
    return bytes(data)


def count_usable(path) -> int:
    try:
        loads_and_runs(path)
        return 1
    except ValueError as error:
        assert str(error).startswith(("[load_model]", "[prefill]")), error
        return 0


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "packed"])
def test_damaged_configs(folder, name):
    rng, path = random.Random(7), folder(name)
    extras = {
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        "layer_types": ["full_attention", "full_attention"],
        "eos_token_id": [1, 2],
    }
    config = {**json.loads((path / "config.json").read_text()), **extras}
    usable = 0
    for i in range(150):
        text = json.dumps(damaged_json(rng, config)).encode()
        (path / "config.json").write_bytes(damaged_bytes(rng, text) if i % 3 == 0 else text)
        usable += count_usable(path)
    assert 0 < usable < 150


@pytest.mark.parametrize("name", ["llama", "packed"])
def test_damaged_weight_files(folder, name):
    rng, path = random.Random(8), folder(name)
    file, usable = path / "model.safetensors", 0
    original, header = file.read_bytes(), header_of(file)
    (length,) = struct.unpack("<Q", original[:8])
    for i in range(200):
        if i % 2:
            file.write_bytes(damaged_bytes(rng, original[: 8 + length]) + original[8 + length :])
        else:
            file.write_bytes(original)
            with_header(file, json.dumps(damaged_json(rng, header)).encode())
        usable += count_usable(path)
    assert usable < 200
