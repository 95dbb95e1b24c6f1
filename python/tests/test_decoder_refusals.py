"""Configs and prompts that the native decoder refuses: one sentence names the file and the field."""

import pytest
from decoder_models import refusal, scaled

from cleave import _core

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
