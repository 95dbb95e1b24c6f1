"""The demo: it runs on any model folder, says what is wrong in one sentence, and ends when it is told to."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BASE, FAMILIES, make_model
from mlx_lm.utils import save_model

from cleave.figures import write_whole


def demo(tmp_path, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "cleave.demo", "--json", str(tmp_path / "demo.json"), *arguments],
        capture_output=True,
        text=True,
        timeout=180,
    )


def prompt(tmp_path, words: str):
    file = tmp_path / "text.txt"
    file.write_text(words)
    return "--text", str(file)


SMALL = ("--tokens", "256", "--rounds", "2", "--greedy", "4")
SPLIT = ("--units", "main,cpu", "--shares", "0.4,0.6")


def test_the_runner_and_the_patched_model_beside_stock(model_folder, tmp_path):
    text = prompt(tmp_path, "the quick brown fox jumps over the lazy dog. " * 10)
    done = demo(tmp_path, "--model", str(model_folder), *text, *SMALL, *SPLIT)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert [c["label"] for c in figures["contests"]] == ["cleave.Runner", "patched mlx_lm"]
    for contest in figures["contests"]:
        assert len(contest["stock_seconds"]) == len(contest["cleave_seconds"]) == 2
        assert contest["quality_against"] == "stock MLX"
        assert contest["cos"] > 0.999 and contest["greedy_agreement"] == 1
        assert contest["report"]["engaged"] == len(contest["report"]["sites"]) > 0
    for word in ("RMS ratio", "max abs", "top-1", "100% of 4", "sites engaged", "memory added"):
        assert word in done.stdout
    names, texts = zip(*(line.split(": ", 1) for line in done.stdout.splitlines()[-4:-1]))
    assert names == ("stock MLX", "cleave.Runner", "patched mlx_lm") and len(set(texts)) == 1


def test_a_baseline_in_fp32_where_stock_is_too_slow_as_loaded(model_folder, tmp_path, monkeypatch):
    """An estimate of hours for packed weights, as on a Linux CPU; the runner is held to stock in fp32."""
    from cleave import demo as module

    estimates = iter([9000.0, 1.0])
    monkeypatch.setattr(module, "estimate_prefill", lambda *_: next(estimates))
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    text = prompt(tmp_path, "the quick brown fox jumps over the lazy dog. " * 10)
    file = tmp_path / "demo.json"
    args = ["--json", str(file), "--model", str(model_folder), *text, *SMALL, *SPLIT]
    assert module.main(args) == 0
    runner, patched = json.loads(file.read_text())["contests"]
    assert runner["quality_against"] == patched["quality_against"] == "stock MLX in fp32"
    assert runner["cos"] > 0.999 < patched["cos"]
    assert runner["greedy_agreement"] == 1 and patched["greedy_agreement"] is None
    assert json.loads(file.read_text())["stock_as_loaded_estimated_seconds"] == 9000


def test_stock_stops_where_its_time_is_over():
    from cleave.contest import hold

    class Count:
        rounds = 0

        def round(self, ids):
            self.rounds += 1

    stock, other = Count(), Count()
    hold(stock, [other], [1], 3, 0.0, lambda text: None)
    assert (stock.rounds, other.rounds) == (1, 3)


def test_a_model_that_the_runner_does_not_take(tmp_path, model_folder):
    """Gemma: the patched model alone is beside stock."""
    folder = tmp_path / "gemma"
    shutil.copytree(model_folder, folder)
    (folder / "model.safetensors").unlink()
    model = make_model("gemma")
    save_model(folder, model)
    config = {"model_type": "gemma", **BASE, **FAMILIES["gemma"][1]}
    (folder / "config.json").write_text(json.dumps(config))
    text = prompt(tmp_path, "the quick brown fox jumps over the lazy dog. " * 10)
    done = demo(tmp_path, "--model", str(folder), *text, *SMALL, *SPLIT)
    assert done.returncode == 0, done.stderr
    assert "cleave.Runner does not take this model: " in done.stdout and "gemma" in done.stdout
    (contest,) = json.loads((tmp_path / "demo.json").read_text())["contests"]
    assert contest["label"] == "patched mlx_lm" and contest["cos"] > 0.999


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("--model", "/nonexistent"), "needs a model folder"),
        (("--text", "/nonexistent"), "does not open"),
        (("--tokens", "100000"), "are needed"),
        (("--units", "warp"), "warp"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(model_folder, tmp_path, arguments, message):
    text = prompt(tmp_path, "word " * 80)
    base = ("--model", str(model_folder), *text, "--tokens", "200", "--rounds", "1")
    done = demo(tmp_path, *base, *arguments)
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "demo.json").exists()


def test_it_ends_at_once_on_ctrl_c(model_folder, tmp_path):
    text = prompt(tmp_path, "word " * 400)
    command = [sys.executable, "-u", "-m", "cleave.demo", "--json", str(tmp_path / "demo.json")]
    command += ["--model", str(model_folder), *text, "--tokens", "1500"]
    command += ["--rounds", "1000", "--units", "main,cpu", "--shares", "0.9,0.1"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "sample 1" not in running.stdout.readline():
        assert running.poll() is None, running.stderr.read()
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=60) in (-signal.SIGINT, 130)
    assert "Traceback" not in running.stderr.read() and not (tmp_path / "demo.json").exists()


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    def full(self, text):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "demo.json", "{}")
    assert list(tmp_path.iterdir()) == []
