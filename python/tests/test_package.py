"""The installed package as others meet it: from C++, from mlx_lm's generation, beside a wrong mlx."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import make_model, tokens
from mlx_lm.generate import generate_step

import cleave

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("c++")), reason="needs cmake and c++"
)
def test_another_cpp_program_finds_the_package(tmp_path):
    where = subprocess.run(
        [sys.executable, "-m", "cleave", "--cmake-dir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for command in (
        ["cmake", "-S", str(ROOT / "examples"), "-B", str(tmp_path), f"-Dcleave_DIR={where}"],
        ["cmake", "--build", str(tmp_path)],
        [str(tmp_path / "split_layer")],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "768 rows" in done.stdout
    bad = subprocess.run([str(tmp_path / "split_layer"), "warp"], capture_output=True, text=True)
    assert bad.returncode == 1 and "warp" in bad.stderr
    assert len((ROOT / "examples" / "split_layer.cpp").read_text().splitlines()) < 60


@pytest.mark.parametrize("chosen", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_the_environment_is_as_it_was_after_the_import(chosen):
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    code = f"import cleave, os; print({{n: os.environ[n] for n in {names} if n in os.environ}})"
    env = {k: v for k, v in os.environ.items() if k not in names} | chosen
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(chosen)


@pytest.mark.parametrize("step", [64, 256, 2048])
def test_mlx_lm_generates_the_same_tokens(step):
    model = make_model()
    prompt = tokens(600)[0]

    def generated():
        steps = generate_step(prompt, model, max_tokens=12, prefill_step_size=step)
        return [token for token, _ in steps]

    expected = generated()
    report = cleave.patch_model(model, units="main,cpu", shares=[0.4, 0.6], min_rows=64)
    assert generated() == expected
    # Prefill only fills the cache: of the last layer's sites and the head, mlx evaluates q,k,v alone.
    ran = {s["name"] for s in report.sites if s["engaged"]}
    first = {s["name"] for s in report.sites if ".layers.0." in s["name"]}
    assert ran == first | {"model.layers.1.self_attn.q_proj+k_proj+v_proj"}


def test_import_beside_another_mlx_is_one_sentence(tmp_path):
    code = (
        "import mlx.core as mx\n"
        "from cleave import _core\n"  # imports cleave; then pretend that arrays do not cross
        "import cleave._load as load\n"
        "def foreign(a, b): raise TypeError('incompatible function arguments')\n"
        "_core.same_array = foreign\n"
        "try:\n    load._load()\n"
        "except ImportError as e:\n    print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    assert mx.__version__ in done.stdout and "nanobind" in done.stdout


def test_units_are_listed_with_reasons():
    listed = {a.name: a for a in cleave.available_units()}
    assert listed.keys() == {"cpu", "mlx-cpu", "reference"}
    assert all(a.text for a in listed.values())


def test_no_thread_pile_up_over_many_patchings():
    """mlx never ends a stream's thread: units of one name must share theirs."""
    model, x = make_model(), tokens(200)

    def threads():
        return len(list(Path("/proc/self/task").iterdir()))

    counts = []
    for _ in range(6):
        cleave.patch_model(model, units="main,cpu", shares=[0.5, 0.5])
        mx.eval(model(x))
        cleave.unpatch_model(model)
        counts.append(threads())
    assert counts[-1] <= counts[1], counts
