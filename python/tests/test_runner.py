"""Runner against mlx_lm, alone and with its model patched."""

import json
import re

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import BASE, FAMILIES, close, make_model, tokens
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_model, save_model

import cleave

ON_MAIN = {"units": "main,cpu", "shares": [1, 0], "min_rows": 1}
SPLIT = {"units": "main,cpu", "shares": [0.4, 0.6], "min_rows": 64}


def save(folder, family: str, bits: int = 0, **changes):
    """A tiny random model as a folder."""
    module, extra = FAMILIES[family]
    config = {"model_type": module, **BASE, **extra, **changes}
    model = make_model(family, **changes)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def by_mlx_lm(model, ids, count: int, **sampling) -> list:
    steps = generate_step(mx.array(ids), model, max_tokens=count, sampler=make_sampler(**sampling))
    return [token for token, _ in steps]


@pytest.mark.parametrize("family", ["llama", "llama-untied", "qwen2", "qwen3"])
@pytest.mark.parametrize("bits", [0, 4])
def test_greedy_tokens_are_those_of_mlx_lm(family, bits, tmp_path):
    folder = save(tmp_path / "model", family, bits)
    ids = tokens(100)[0].tolist()
    expected = by_mlx_lm(load_model(folder)[0], ids, 12)
    assert len(set(expected)) > 1
    for options in (ON_MAIN, SPLIT, {}):
        runner = cleave.Runner(folder, **options)
        assert list(runner.generate(ids, 12)) == expected, options


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.9},
    ],
)
def test_sampled_tokens_are_those_of_mlx_lm(sampling, model_folder):
    ids = tokens(30)[0].tolist()
    renamed = {"temperature": "temp"}
    model = load_model(model_folder)[0]
    mx.random.seed(5)
    expected = by_mlx_lm(model, ids, 10, **{renamed.get(k, k): v for k, v in sampling.items()})
    runner = cleave.Runner(model_folder, **ON_MAIN)
    assert list(runner.generate(ids, 10, seed=5, **sampling)) == expected
    assert list(runner.generate(ids, 10, seed=8, **sampling)) != expected


def test_logits_and_report_are_those_of_the_patched_model(tmp_path):
    """With one unit: several have the runner's attention as sites of their own."""
    options = {**SPLIT, "shares": [0, 1]}
    folder = save(tmp_path / "model", "llama")
    ids = tokens(200)
    model, _ = load_model(folder)
    expected = model(ids)
    report = cleave.patch_model(model, **options)
    runner = cleave.Runner(folder, **options)
    logits = runner.logits(ids[0])
    assert logits.shape == (1, 200, BASE["vocab_size"]) and close(logits, expected)
    mx.eval(model(ids))
    mine, other = runner.report.as_dict(), report.as_dict()
    for d in (mine, other):
        del d["load_seconds"], d["refused"]
        d["sites"].sort(key=lambda site: site["name"])
    assert mine == other
    assert runner.report.engaged == len(mine["sites"]) == 7
    assert "7 of 7 sites engaged in calls of 64 or more tokens" in runner.report.line
    assert str(runner.report).count("engaged") == 1


def test_calls_below_min_rows_are_mains(tmp_path):
    folder = save(tmp_path / "model", "llama")
    ids = tokens(63)
    runner = cleave.Runner(folder, **SPLIT)
    assert close(runner.logits(ids[0]), load_model(folder)[0](ids))
    assert runner.report.engaged == 0
    assert all(s["original"] == 1 for s in runner.report.sites)


def test_what_main_keeps_is_reported_with_its_reason(tmp_path):
    runner = cleave.Runner(save(tmp_path / "model", "llama"), **ON_MAIN)
    assert runner.report.sites == []
    assert len(runner.report.refused) == 7 and runner.report.refused[0][1]


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="of a main on the CPU")
def test_one_token_goes_where_it_is_quicker(model_folder, monkeypatch):
    """min_rows is measured: 1 where main loses at one token too. The model is loaded once either way."""
    loads = []
    load = cleave._core.load_decoder
    monkeypatch.setattr(
        "cleave.runner._core.load_decoder", lambda *a, **k: loads.append(a) or load(*a, **k)
    )
    for times, expected in (((2.0, 1.0), 1), ((1.0, 1.0), 192)):
        monkeypatch.setattr("cleave.balance.one_token", lambda weight, shares, precision: times)
        runner = cleave.Runner(model_folder, units="main,cpu", shares=[0.0, 1.0])
        assert runner.report.min_rows == expected
        list(runner.generate([40, 41, 42], 2))
        assert bool(runner.report.engaged) == (expected == 1)
        runner.logits([40] * 192)
        assert runner.report.engaged == len(runner.report.sites)
    assert len(loads) == 2


def test_a_unit_that_fails_costs_no_answer(model_folder):
    ids = tokens(80)[0].tolist()
    expected = list(cleave.Runner(model_folder, **ON_MAIN).generate(ids, 8))
    runner = cleave.Runner(model_folder, units="main,fault:2", shares=[0.5, 0.5], min_rows=1)
    assert list(runner.generate(ids, 8)) == expected
    assert "fault:2" in runner.report.failures
    assert re.search("fault:2 failed, [1-7] calls rescued$", runner.report.line)


def test_end_tokens_end_it_and_are_not_among_the_tokens(tmp_path):
    folder = save(tmp_path / "model", "llama")
    ids = tokens(20)[0].tolist()
    expected = by_mlx_lm(load_model(folder)[0], ids, 12)
    end = expected[6]
    count = expected.index(end)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [299, end]}))
    generation = cleave.Runner(folder, **ON_MAIN).generate(ids, 12)
    assert list(generation) == generation.tokens == expected[:count]
    assert generation.finish == "end"


def test_a_full_context_ends_it(tmp_path):
    folder = save(tmp_path / "model", "qwen2", max_position_embeddings=24)
    runner = cleave.Runner(folder, **ON_MAIN)
    generation = runner.generate(list(range(20)), 12)
    # 24 positions are read; the token chosen after the last of them is still given.
    assert len(list(generation)) == 5 and generation.finish == "context"
    assert len(list(runner.generate(list(range(24)), 12))) == 1
    with pytest.raises(ValueError, match="25 tokens.*context of 24"):
        runner.generate(list(range(25)))


def test_times_and_counts(model_folder):
    generation = cleave.Runner(model_folder, **ON_MAIN).generate([40] * 30, 5)
    assert generation.first_token_s is generation.prefill_tokens_per_s is generation.finish is None
    next(generation)
    assert generation.decode_tokens_per_s is None
    assert 0 < generation.prefill_s < generation.first_token_s
    list(generation)
    assert generation.finish == "length" and len(generation.tokens) == 5
    assert generation.decode_tokens_per_s == 4 / generation.decode_s > 0
    assert generation.prefill_tokens_per_s == 30 / generation.prefill_s


def test_no_tokens_asked_for(model_folder):
    generation = cleave.Runner(model_folder, **ON_MAIN).generate([40], 0)
    assert list(generation) == [] and generation.prefill_s > 0 and generation.finish == "length"


def test_progress_by_chunk_and_what_it_raises(model_folder):
    runner = cleave.Runner(model_folder, units="cpu", shares=1, min_rows=1)
    ids, seen = [40] * 4100, []
    list(runner.generate(ids, 0, progress=seen.append))
    assert seen == [2048, 4096, 4100]

    def interrupt(done):
        seen.append(done)
        raise KeyboardInterrupt

    seen.clear()
    with pytest.raises(KeyboardInterrupt):
        list(runner.generate(ids, 1, progress=interrupt))
    assert seen == [2048]


@pytest.mark.parametrize(
    "ids, message",
    [
        ([], "empty prompt"),
        ([300], "token id 300 .* 0 to 299"),
        ([-1], "token id -1 "),
        ([2**70], f"token id {2**70} "),
        ([1.5], "list of ints"),
        ([[1, 2]], "list of ints"),
        (7, "list of ints"),
    ],
)
def test_bad_ids(ids, message, model_folder):
    runner = cleave.Runner(model_folder, **ON_MAIN)
    for call in (runner.logits, runner.generate):
        with pytest.raises(ValueError, match=message):
            call(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": -1},
        {"max_tokens": 2.5},
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_bad_options_of_generate(options, model_folder):
    runner = cleave.Runner(model_folder, **ON_MAIN)
    with pytest.raises(ValueError, match=r"^\[(generate|sample)\] got .* and needs "):
        runner.generate([40], **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"units": "warp"}, "warp"),
        ({"units": "main,cpu", "shares": [0.5]}, "1 shares for 2 units"),
        ({"units": "main,cpu", "shares": [0.5, 0.6]}, "shares"),
        ({"units": "main,cpu", "shares": float("nan")}, "nan"),
        ({"tile": 0}, "tile 0 "),
        ({"min_rows": -1}, "min_rows -1 "),
        ({"min_rows": True}, "min_rows True "),
    ],
)
def test_bad_options(options, message, model_folder):
    with pytest.raises(ValueError, match=message):
        cleave.Runner(model_folder, **options)


def test_missing_model(tmp_path):
    with pytest.raises(ValueError, match="absent.* does not exist"):
        cleave.Runner(tmp_path / "absent")


def test_smollm2_says_what_the_patched_mlx_lm_model_says(smollm2):
    """Every product on the unit: mlx's own would take seconds a token here."""
    from mlx_lm.utils import load

    options = {"units": "main,cpu", "shares": [0, 1], "min_rows": 1}
    model, tokenizer = load(str(smollm2))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three oceans."}], add_generation_prompt=True
    )
    cleave.patch_model(model, **options)
    runner = cleave.Runner(smollm2, **options)
    assert list(runner.generate(ids, 32)) == by_mlx_lm(model, ids, 32)
    assert runner.report.engaged == 91
