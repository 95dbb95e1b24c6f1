"""Imports the extension and checks that it shares mlx's type of array."""

import mlx.core as mx


def _load():
    try:
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
