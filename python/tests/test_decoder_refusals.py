"""What the native decoder cannot use is refused with one sentence that names the file or field."""

import json
import os
import random
import shutil
import struct

import mlx.core as mx
import pytest
from test_decoder import LLAMA, QWEN2, QWEN3, save, scaled

from cleave import _core


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
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


FIELDS = [
    ("llama", "model_type", "gpt2", "one of llama"),
    ("llama", "model_type", "left out", "a text"),
    ("llama", "model_type", ["llama"], "a text"),
    ("llama", "model_file", "model.py", "without code"),
    ("llama", "num_hidden_layers", 0, "from 1 to"),
    ("llama", "num_hidden_layers", "2", "an integer"),
    ("llama", "num_hidden_layers", 2.0, "an integer"),
    ("llama", "num_hidden_layers", True, "an integer"),
    ("llama", "num_hidden_layers", 10**9, "from 1 to"),
    ("llama", "num_hidden_layers", 2**63, "from 1 to"),
    ("llama", "num_hidden_layers", 2**64 + 2, "from 1 to"),
    ("llama", "hidden_size", -64, "from 1 to"),
    ("llama", "hidden_size", "left out", "from 1 to"),
    ("llama", "hidden_size", [[64]], "a list of 1"),
    ("llama", "intermediate_size", None, "from 1 to"),
    ("llama", "num_attention_heads", 0, "from 1 to"),
    ("llama", "num_key_value_heads", 3, "a divisor of 4"),
    ("llama", "num_key_value_heads", 8, "from 1 to 4"),
    ("llama", "num_key_value_heads", 0, "from 1 to 4"),
    ("llama", "head_dim", 15, "an even size"),
    ("llama", "head_dim", 0, "from 2 to"),
    ("llama", "vocab_size", 0, "from 1 to"),
    ("llama", "vocab_size", 2**31, "from 1 to"),
    ("llama", "rms_norm_eps", -1e-5, "above 0"),
    ("llama", "rms_norm_eps", 0, "above 0"),
    ("llama", "rms_norm_eps", "1e-5", "above 0"),
    ("llama", "rms_norm_eps", 1e300, "above 0"),
    ("llama", "rope_theta", 0, "above 1"),
    ("llama", "rope_theta", -1e4, "above 1"),
    ("llama", "max_position_embeddings", 0, "from 1 to"),
    ("llama", "max_position_embeddings", 2**40, "from 1 to"),
    ("llama", "hidden_act", "gelu", "silu"),
    ("llama", "attention_bias", "yes", "true or false"),
    ("llama", "tie_word_embeddings", 1, "true or false"),
    ("llama", "layer_types", ["full_attention"], "one entry for each of 2"),
    ("llama", "layer_types", ["full_attention", "linear_attention"], "sliding_attention"),
    ("llama", "layer_types", "full_attention", "one entry for each of 2"),
    ("llama", "eos_token_id", 300, "from 0 to 299"),
    ("llama", "eos_token_id", [1, -1], "from 0 to 299"),
    ("llama", "rope_scaling", "linear", "an object"),
    ("llama", "quantization", 4, "an object"),
    ("llama", "quantization_config", {"quant_method": "awq"}, "mlx_lm"),
    ("qwen2", "use_sliding_window", True, "full attention"),
    ("qwen2", "layer_types", ["sliding_attention", "full_attention"], "full_attention"),
    ("qwen3", "layer_types", 5, "full_attention"),
    ("qwen3", "head_dim", "left out", "an even number"),
    ("qwen3", "rope_theta", "left out", "above 1"),
    ("qwen3", "max_position_embeddings", "left out", "from 1 to"),
    ("qwen3", "tie_word_embeddings", "left out", "true or false"),
]


@pytest.mark.parametrize("name, field, value, needed", FIELDS)
def test_config_fields(folder, name, field, value, needed):
    path = folder(name, **{field: value})
    message = refusal(path)
    assert str(path / "config.json") in message and needed in message, message
    assert f"'{field}'" in message or f"'{field.split('_')[0]}" in message or field == "head_dim"


def test_fields_of_the_window(folder):
    types = ["full_attention", "sliding_attention"]
    assert "no 'sliding_window'" in refusal(folder(layer_types=types))


def test_window_of_nothing(folder):
    types = ["full_attention", "sliding_attention"]
    assert "'sliding_window': 0" in refusal(folder(layer_types=types, sliding_window=0))


@pytest.mark.parametrize(
    "scaling, words",
    [
        (scaled("ntk", factor=2), "'type': \"ntk\""),
        ({"rope_scaling": {"rope_type": "ntk"}}, "'rope_type': \"ntk\""),
        (scaled("linear"), "no 'factor'"),
        (scaled("linear", factor=0), "'factor': 0"),
        (scaled("linear", factor="2"), "'factor': \"2\""),
        (scaled("dynamic", factor=2), "max_position_embeddings"),
        (
            scaled("llama3", factor=8, low_freq_factor=4, high_freq_factor=1),
            "'high_freq_factor': 1",
        ),
        (
            scaled("llama3", factor=8, low_freq_factor=4, high_freq_factor=4),
            "'high_freq_factor': 4",
        ),
        (
            scaled("llama3", factor=8, original_max_position_embeddings=0),
            "'original_max_position_embeddings': 0",
        ),
        (scaled("yarn", factor=-1), "'factor': -1"),
        (scaled("yarn", factor=2, beta_fast=0), "'beta_fast': 0"),
        (scaled("longrope", long_factor=1.0), "no 'original_max_position_embeddings'"),
        (scaled("longrope", original_max_position_embeddings=32), "no 'long_factor'"),
        (
            scaled("longrope", original_max_position_embeddings=32, long_factor=[1.0] * 7),
            "one for each of 8 pairs",
        ),
        (
            scaled("longrope", original_max_position_embeddings=32, long_factor=[1.0] * 7 + ["x"]),
            "finite numbers above 0",
        ),
        (
            scaled(
                "longrope", original_max_position_embeddings=32, long_factor=[1.0] * 7 + [1e300]
            ),
            "finite numbers above 0",
        ),
        (scaled("proportional", partial_rotary_factor=1.5), "'partial_rotary_factor': 1.5"),
    ],
)
def test_rope_scaling(folder, scaling, words):
    message = refusal(folder(**scaling))
    assert words in message and "'rope_scaling' of" in message, message


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no JSON at line 1"),
        ('{"model_type": "llama",\n "hidden_size": 64', "no JSON at line 2"),
        ('{"model_type": "llama",\n "rms_norm_eps": NaN}', "no JSON at line 2"),
        ("[]", "no JSON object"),
        ("null", "no JSON object"),
        ('{"rms_norm_eps": 1e999}', "no JSON object"),
        ("\udcff", "no JSON at line 1"),
        ('{"model_type": ' + "[" * 200000 + "]" * 200000 + "}", "'model_type': a list of 1"),
    ],
)
def test_config_that_is_no_json(folder, text, words):
    path = folder()
    (path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    message = refusal(path)
    assert str(path / "config.json") in message and words in message, message


def test_damaged_generation_config(folder):
    path = folder()
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 3000]}')
    assert "generation_config.json" in refusal(path)


def test_no_folder(tmp_path):
    assert "nothing-here, which does not exist" in refusal(tmp_path / "nothing-here")


def test_a_file_of_another_kind(folder):
    assert "config.json and needs a model folder" in refusal(folder() / "config.json")


def test_no_config(folder):
    path = folder()
    (path / "config.json").unlink()
    assert "config.json, which is no readable file" in refusal(path)


def test_config_is_a_folder(folder):
    path = folder()
    (path / "config.json").unlink()
    (path / "config.json").mkdir()
    assert "config.json, which is no readable file" in refusal(path)


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


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("method", ["feed", "feed_for_logits"])
def test_prompts(folder, method):
    session = _core.Session(_core.load_decoder(str(folder(max_position_embeddings=8))))
    feed = getattr(session, method)
    for ids, words in [
        ([], "an empty prompt"),
        ([1, 300], "token id 300"),
        ([-1], "token id -1"),
        ([1] * 9, "9 tokens and needs at most the model's context of 8"),
    ]:
        with pytest.raises(ValueError) as error:
            feed(ids)
        assert str(error.value).startswith("[prefill] got ") and words in str(error.value)
    feed([1, 2, 3, 4, 5])
    assert session.length == 5
    with pytest.raises(ValueError, match="9 tokens"):
        feed([1, 2, 3, 4])
    assert session.length == 5
    feed([1])
    # Two more are read, and what follows the last is known too.
    for _ in range(3):
        session.next()
    with pytest.raises(ValueError, match="context that is full"):
        session.next()


def test_next_without_a_prompt(folder):
    session = _core.Session(_core.load_decoder(str(folder())))
    with pytest.raises(ValueError, match="no tokens read so far"):
        session.next()
    with pytest.raises(ValueError, match="no tokens read so far"):
        session.last_logits


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"top_k": 300},
    ],
)
def test_sampling(folder, sampling):
    decoder = _core.load_decoder(str(folder()))
    with pytest.raises(ValueError, match=next(iter(sampling))):
        _core.Session(decoder, **sampling)


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
