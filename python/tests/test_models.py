"""Model folders: what is wrong with one is said in one sentence."""

import json
import shutil

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
