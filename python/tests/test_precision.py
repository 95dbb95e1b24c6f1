"""precision="bf16" and "int8": opt-in, shown with their error, through every front."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import make_model, tokens
from test_runner import save

import cleave
from cleave.cli import main
from cleave.quality import compare

LEAST_COS = {"exact": 0.99999, "bf16": 0.9995, "int8": 0.99}


def narrow(text: str) -> bool:
    """Whether this machine's unit multiplies faster in something narrower, so that errors can show."""
    return "bfloat16" in text or "int8" in text


@pytest.mark.parametrize("precision", LEAST_COS)
def test_runner_is_as_near_as_its_precision_says(precision, tmp_path):
    folder = save(tmp_path / "model", "llama", 4)
    ids = tokens(100)[0].tolist()
    exact = cleave.Runner(folder, units="main,cpu", shares=[1, 0]).logits(ids)
    runner = cleave.Runner(folder, units="cpu", shares=[1], precision=precision, min_rows=1)
    logits = runner.logits(ids)
    assert logits.dtype == exact.dtype
    assert compare(logits, exact)["cos"] > LEAST_COS[precision]
    report = runner.report
    assert report.precision == report.as_dict()["precision"] == precision
    errors = [s["error"] for s in report.sites]
    if precision == "exact":
        assert errors == [None] * len(errors) and report.precision_line == ""
        return
    assert all(e is not None and 0 <= e < 0.1 for e in errors)
    assert f"precision {precision}: partners multiply in" in str(report)
    assert f"precision {precision}" in report.line
    used = {p["arithmetic"] for s in report.sites for p in s["parts"]}
    if narrow(str(used)):
        assert all(e > 0 for e in errors)
        assert not mx.array_equal(logits, exact)
        assert "products differ from exact ones by" in report.line


def test_measuring_errors_does_not_count_as_calls(tmp_path):
    folder = save(tmp_path / "model", "llama", 4)
    runner = cleave.Runner(folder, units="cpu", shares=[1], precision="int8")
    assert runner.report.engaged == 0
    runner.logits(tokens(200)[0].tolist())
    assert runner.report.engaged == len(runner.report.sites)


def test_patched_model_measures_its_error_in_the_first_call():
    model = make_model("llama")
    nn.quantize(model, group_size=32, bits=4)
    exact = model(tokens(70))
    report = cleave.patch_model(model, "cpu", shares=[1], min_rows=64, precision="bf16")
    assert report.precision == "bf16"
    assert "measured in the first call" in str(report)
    mx.eval(model(tokens(8)))  # too short
    assert all(s["error"] is None for s in report.sites)
    logits = model(tokens(70))
    assert compare(logits, exact)["cos"] > LEAST_COS["bf16"]
    assert all(0 <= s["error"] < 0.02 for s in report.sites)
    cleave.unpatch_model(model)
    assert all(0 <= s["error"] < 0.02 for s in report.sites), "kept after unpatching"
    assert mx.array_equal(model(tokens(70)), exact)


def test_default_is_exact():
    model = make_model("llama")
    report = cleave.patch_model(model, "cpu", shares=[1], min_rows=1)
    mx.eval(model(tokens(70)))
    assert report.precision == "exact"
    assert all(s["error"] is None for s in report.sites)


def test_unknown_precision_is_refused_by_every_front(tmp_path, capsys):
    folder = save(tmp_path / "model", "llama")
    with pytest.raises(ValueError, match=r"\[Runner\] got precision 'int4' and needs one of exact"):
        cleave.Runner(folder, precision="int4")
    with pytest.raises(ValueError, match=r"\[patch_model\] got precision None"):
        cleave.patch_model(make_model("llama"), precision=None)
    assert main(["run", str(folder), "--ids", "1,2", "--precision", "int4"]) == 2
    assert "invalid choice: 'int4'" in capsys.readouterr().err


def test_cleave_run_shows_the_precision(tmp_path, capsys):
    folder = str(save(tmp_path / "model", "llama", 4))
    ids = ",".join(map(str, tokens(40)[0].tolist()))
    assert main(["run", folder, "--ids", ids, "-n", "2", "--precision", "int8"]) == 0
    assert "precision int8: partners multiply in" in capsys.readouterr().err
    assert main(["run", folder, "--ids", ids, "-n", "2", "--precision", "int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["precision"] == "int8"
