"""cleave: its native decoder, or mlx_lm's model after patch_model.

serve_cleave.py FOLDER native|patched exact|bf16|int8 [MIN_ROWS]
"""

import sys

from profile_ops import profile
from serve import serve, timed, token_ids
from serve_mlx import handlers_of


def native(folder, precision, min_rows):
    from cleave import Runner
    from cleave._load import _core

    runner = Runner(folder, units="cpu", shares=[1.0], min_rows=min_rows, precision=precision)

    def prefill(tokens):
        ids = token_ids(tokens, runner.config.vocab)
        return timed(lambda: list(runner.generate(ids, 0)))

    def decode(tokens):
        session = _core.Session(runner._decoder)  # a Generation would stop at an end token
        session.feed([1], tokens + 1)
        return timed(lambda: [session.next() for _ in range(tokens)])

    return runner.report, {"prefill": prefill, "decode": decode}


def patched(folder, precision, min_rows):
    from pathlib import Path

    from mlx_lm.utils import load_model

    import cleave

    model, config = load_model(Path(folder))
    report = cleave.patch_model(model, units="cpu", min_rows=min_rows, precision=precision)
    return report, handlers_of(model, config["vocab_size"])


def load():
    import cleave

    folder, how, precision = sys.argv[1:4]
    min_rows = int(sys.argv[4]) if len(sys.argv) > 4 else None
    report, handlers = {"native": native, "patched": patched}[how](folder, precision, min_rows)
    unit = next(a.text for a in cleave.available_units() if a.name == "cpu")
    handlers["profile"] = lambda tokens: {"profile": profile(folder, handlers["prefill"], tokens)}
    ready = f"cleave {cleave.__version__} {how}, min_rows {report.min_rows}; cpu: {unit}"
    return ready + (report.precision_line and f"; {report.precision_line}"), handlers


serve(load)
