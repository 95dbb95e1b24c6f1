"""Model folders: what is wrong with one is said in one sentence; the demo runs on any."""

import json
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest
from conftest import close, tokens

from cleave.models import ModelError, load_model, unpack_to_fp32
from cleave.quality import agreement, compare


def broken(model_folder, tmp_path, change):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    change(folder)
    return folder


def cut(name, share):
    def change(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return change


def config(**fields):
    def change(folder):
        data = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**data, **fields}))

    return change


FAULTS = [
    (lambda f: (f / "config.json").unlink(), "has no config.json"),
    (lambda f: (f / "config.json").write_text("{"), "is no JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "model_type"),
    (config(model_type="warpdrive"), "warpdrive"),
    (lambda f: (f / "model.safetensors").unlink(), "no .safetensors"),
    (cut("model.safetensors", 0.9), "cut short"),
    (cut("model.safetensors", 0.5), "cut short"),
    (cut("model.safetensors", 0.001), "cut short"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), "cut short"),
    (
        lambda f: (f / "model.safetensors").write_bytes(b"\4\0\0\0\0\0\0\0junk"),
        "no safetensors file",
    ),
    (config(hidden_size=128), "does not load"),
]


@pytest.mark.parametrize("change,text", FAULTS)
def test_a_broken_folder_is_one_sentence(model_folder, tmp_path, change, text):
    with pytest.raises(ModelError, match=text) as caught:
        load_model(broken(model_folder, tmp_path, change))
    assert str(caught.value).startswith("[load_model] ")


def test_unpacking_keeps_the_values(model_folder):
    packed, _ = load_model(model_folder)
    dense, _ = load_model(model_folder)
    unpack_to_fp32(dense)
    assert close(dense(tokens(8)), packed(tokens(8)))


def test_compare_sees_errors_of_scale():
    a = mx.random.normal((1, 6, 40), key=mx.random.key(0))
    same = compare(a, a)
    assert same["cos"] == pytest.approx(1) and same["rms_ratio"] == pytest.approx(1)
    assert same["max_abs"] == 0 and same["top1"] == 1
    doubled = compare(2 * a, a)
    assert doubled["cos"] == pytest.approx(1) and doubled["rms_ratio"] == pytest.approx(2)
    assert compare(-a, a)["top1"] < 1
    assert agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    with pytest.raises(ValueError):
        compare(a, a[:, :2])


def demo(tmp_path, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "cleave.demo", "--json", str(tmp_path / "demo.json"), *arguments],
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_demo_on_any_model_folder(model_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 10)
    done = demo(
        tmp_path,
        "--model",
        str(model_folder),
        "--text",
        str(text),
        "--tokens",
        "256",
        "--rounds",
        "2",
        "--greedy",
        "4",
        "--units",
        "main,cpu",
        "--shares",
        "0.4,0.6",
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "demo.json").read_text())
    (contest,) = figures["contests"]
    assert len(contest["stock_seconds"]) == len(contest["cleave_seconds"]) == 2
    assert contest["cos"] > 0.999 and contest["greedy_agreement"] is not None
    assert contest["report"]["engaged"] == len(contest["report"]["sites"]) > 0
    for word in (
        "RMS ratio",
        "max abs",
        "top-1",
        "sites engaged",
        "memory added",
        "stock:",
        "cleave:",
    ):
        assert word in done.stdout


@pytest.mark.parametrize(
    "arguments,text",
    [
        (("--model", "/nonexistent"), "needs a model folder"),
        (("--text", "/nonexistent"), "does not open"),
        (("--tokens", "100000"), "are needed"),
        (("--units", "warp"), "warp"),
    ],
)
def test_demo_refuses_bad_input_with_one_sentence(model_folder, tmp_path, arguments, text):
    story = tmp_path / "text.txt"
    story.write_text("word " * 80)
    base = ("--model", str(model_folder), "--text", str(story), "--tokens", "200", "--rounds", "1")
    done = demo(tmp_path, *base, *arguments)
    assert done.returncode == 1 and text in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "demo.json").exists()


def test_demo_ends_at_once_on_ctrl_c(model_folder, tmp_path):
    import signal
    import time

    story = tmp_path / "text.txt"
    story.write_text("word " * 400)
    command = [sys.executable, "-u", "-m", "cleave.demo", "--json", str(tmp_path / "demo.json")]
    command += ["--model", str(model_folder), "--text", str(story), "--tokens", "1500"]
    command += ["--rounds", "1000", "--units", "main,cpu", "--shares", "0.9,0.1"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "sample 1" not in running.stdout.readline():
        assert running.poll() is None, running.stderr.read()
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=60) in (-signal.SIGINT, 130)
    assert "Traceback" not in running.stderr.read() and not (tmp_path / "demo.json").exists()


def test_demo_on_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    from pathlib import Path

    from cleave.demo import write_whole

    def full(self, text):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "demo.json", "{}")
    assert list(tmp_path.iterdir()) == []
