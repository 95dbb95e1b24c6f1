"""Imports the extension and checks that it shares mlx's type of array."""

import os
from contextlib import contextmanager

import mlx.core as mx

# How often a thread that waits for its team looks before it sleeps. GNU OpenMP's own count keeps a core for
# milliseconds, which another process that needs it makes the whole team wait for: with one busy neighbour on two
# cores, prefill ran at half the speed of this count and decode at 0.7x; alone they are within 3 %.
SPIN_COUNT = "1000"


@contextmanager
def _short_spins():
    """GNU OpenMP reads its environment when it is loaded; what the user or another library chose stays."""
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if not chosen:
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    try:
        yield
    finally:
        if not chosen:
            del os.environ["GOMP_SPINCOUNT"]


def _load():
    try:
        with _short_spins():
            from cleave import _core
    except ImportError as e:
        raise ImportError(
            f"[cleave] the extension does not load beside mlx {mx.__version__}: {e}; "
            "reinstall with `pip install --force-reinstall mlx-cleave`"
        ) from e
    try:
        _core.same_array(mx.array(0), mx.array(0))
    except TypeError:
        raise ImportError(
            f"[cleave] the extension was built for mlx {_core.mlx_version} with nanobind "
            f"{_core.nanobind_version}, and mlx {mx.__version__} here was built with another: "
            "install the mlx it was built for, or reinstall mlx-cleave"
        ) from None
    return _core


_core = _load()
