"""Who competes on a model: cleave's configurations, the rivals', and oneDNN's peak."""

import sys
from pathlib import Path

from rivals import setup
from rivals.contest import Contender
from rivals.models import FORMATS, Model, base_gguf

HERE = Path(__file__).parent
PEAK_TYPES = ("fp32", "bf16", "fp16", "s8", "u8")
HALF = {"float16": ("fp16", "fp32"), "bfloat16": ("bf16", "fp32"), "float32": ("fp32",)}
# llama.cpp quantises the activations for these formats and multiplies int8.
LLAMA_PEAKS = {"F32": ("fp32",), "F16": HALF["float16"], "BF16": HALF["bfloat16"]}
COMPILE_SECONDS = 240.0
STOCK_TOKENS = 128
STOCK_DECODE = 4
STOCK_SECONDS = 60.0


def cleave(model: Model, min_rows: int | None) -> list:
    """min_rows: calls with fewer tokens run mlx's own ops; None: 1 for the native decoder, measured for the patched
    model."""

    def one(folder, how, form, peak, rows, precision="exact"):
        command = [sys.executable, HERE / "serve_cleave.py", folder, how, precision]
        command += [] if rows is None else [rows]
        memory = model.gigabytes(4) + model.gigabytes(2)  # packed operands beside the model
        name = f"cleave {how} {form}" if precision == "exact" else f"cleave {precision} {form}"
        return Contender(name, "cleave", peak, command, gigabytes=memory)

    rows = min_rows or 1
    all_ = [
        one(model.packed, "native", model.form, HALF[model.dtype], rows),
        one(model.packed, "native", model.form, HALF["bfloat16"], rows, "bf16"),
        one(model.packed, "native", model.form, ("s8",), rows, "int8"),
        one(model.packed, "patched", model.form, HALF[model.dtype], min_rows),
    ]
    if model.dense != model.packed:
        all_.append(one(model.dense, "native", "fp32", HALF["float32"], rows))
    return all_


def llama(model: Model, threads: int, missing: dict) -> list:
    all_ = []
    for form in FORMATS:
        c = Contender(f"llama.cpp {form}", "llama.cpp", LLAMA_PEAKS.get(form, ("s8",)))
        c.warm_ups = 0  # llama-bench does it
        try:
            if "llama" in missing:
                raise setup.SetupError(missing["llama"])
            base_gguf(model)
            file = model.gguf(form)
            c.gigabytes = 2 * file.stat().st_size / 1e9
            program = setup.LLAMA / "llama-bench"
            c.command = [sys.executable, HERE / "serve_llama.py", program, file, threads]
        except (setup.SetupError, OSError) as error:
            c.why = str(error)
        all_.append(c)
    return all_


def torch(model: Model, threads: int, missing: dict, compiled: bool) -> list:
    all_ = []
    for how in ("eager", "compiled") if compiled else ("eager",):
        for dtype in ("float32", "bfloat16", "float16"):
            c = Contender(f"PyTorch {HALF[dtype][0]} {how}", "PyTorch", HALF[dtype])
            c.gigabytes = model.gigabytes(4 if dtype == "float32" else 2) * 1.5
            if how == "compiled":
                c.extra_seconds, c.decode = COMPILE_SECONDS, 0
                c.warm_ups = 2  # its second call compiles again
            if "torch" in missing:
                c.why = missing["torch"]
            else:
                program = [setup.PYTHON, HERE / "serve_torch.py"]
                c.command = [*program, model.dense, dtype, threads, how]
                # What the bench needs of them itself is of no use to another interpreter.
                c.environment = {"PYTHONPATH": "", "LD_LIBRARY_PATH": ""}
                # A pool of compilers would outlive its count as our own CPU time.
                c.environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
            all_.append(c)
    return all_


def stock(model: Model) -> list:
    """Stock MLX takes tens of seconds for a prefill here: once, short; packed weights only decode, a few tokens."""
    program = [sys.executable, HERE / "serve_mlx.py"]
    bounds = {"rounds": 1, "warm_ups": 0, "longest": STOCK_TOKENS, "decode": STOCK_DECODE}
    bounds["extra_seconds"] = STOCK_SECONDS
    dense = Contender(
        "stock MLX fp32", "stock MLX", ("fp32",), [*program, model.dense, "fp32"], **bounds
    )
    dense.gigabytes = model.gigabytes(4) * 1.5
    bounds["longest"] = 1
    name = f"stock MLX {model.form}"
    loaded = Contender(
        name, "stock MLX", HALF[model.dtype], [*program, model.packed, "loaded"], **bounds
    )
    return [dense, loaded]


def peaks(model: Model, types=PEAK_TYPES) -> list:
    built = setup.ROOT.glob("build/*/benchmarks/gemm_peak")
    program = max(built, key=lambda p: p.stat().st_mtime, default=None)
    shapes = [str(v) for product in model.shape.products() for v in product]
    all_ = []
    for type_ in types:
        c = Contender(f"oneDNN {type_}", "oneDNN", (type_,), decode=0, warm_ups=0)
        if program:
            c.command = [program, type_, *shapes]
        else:
            c.why = "gemm_peak is not built on this processor"
        all_.append(c)
    return all_


def select(contenders: list, only: list) -> list:
    """Those whose names contain one of the words, all without words; the peaks always."""
    return [
        c
        for c in contenders
        if not only or c.family == "oneDNN" or any(w.lower() in c.name.lower() for w in only)
    ]
