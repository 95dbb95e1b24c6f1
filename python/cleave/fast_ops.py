"""cleave's CPU versions of mlx.fast's RMSNorm, RoPE and attention, for the models that are patched.

Models call these functions through the module ``mx.fast``, so that is where they are exchanged: once,
when the first model is patched, for functions that do as before except inside a long call of a patched
model (the *scope*), and back when the last one is unpatched.
"""

import threading

import mlx.core as mx

from cleave._load import _core

_NAMES = ("rms_norm", "rope", "scaled_dot_product_attention")
_lock = threading.Lock()
_users = 0
_originals: dict = {}
_scope = threading.local()
_ropes: dict = {}  # arguments -> _core.Rope; freqs arrays are kept alive by it


def acquire() -> None:
    """Exchanges the functions for the first user."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for name, function in zip(_NAMES, (_rms_norm, _rope, _attention)):
                _originals[name] = getattr(mx.fast, name)
                setattr(mx.fast, name, function)


def release() -> None:
    """Puts mlx's functions back after the last user."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            for name in _NAMES:
                setattr(mx.fast, name, _originals[name])
            _ropes.clear()


class Scope:
    """Inside it, on this thread, the functions are cleave's."""

    def __enter__(self):
        _scope.depth = getattr(_scope, "depth", 0) + 1

    def __exit__(self, *_):
        _scope.depth -= 1


def _inside(stream) -> bool:
    return stream is None and getattr(_scope, "depth", 0) > 0


def _rms_norm(x, weight, eps, *, stream=None):
    if _inside(stream):
        return _core.rms_norm(x, weight, eps)
    return _originals["rms_norm"](x, weight, eps, stream=stream)


def _rope(a, dims, *, traditional, base, scale, offset, freqs=None, stream=None):
    if _inside(stream) and isinstance(offset, int) and a.ndim == 4:
        key = (dims, traditional, base, scale, id(freqs))
        found = _ropes.get(key)
        if found is None:
            if freqs is not None:
                mx.eval(freqs)
            found = _ropes[key] = (_core.Rope(dims, traditional, base, scale, freqs), freqs)
        return found[0](a, offset)
    return _originals["rope"](
        a,
        dims,
        traditional=traditional,
        base=base,
        scale=scale,
        offset=offset,
        freqs=freqs,
        stream=stream,
    )


def _attention(q, k, v, *, scale, mask=None, sinks=None, stream=None):
    causal = isinstance(mask, str) and mask == "causal"
    if _inside(stream) and sinks is None and (mask is None or causal):
        return _core.attention(q, k, v, scale, causal)
    return _originals["scaled_dot_product_attention"](
        q, k, v, scale=scale, mask=mask, sinks=sinks, stream=stream
    )
