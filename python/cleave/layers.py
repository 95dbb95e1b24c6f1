"""The modules a patched model runs: the original objects under a class that asks its site first.

A patched module stays the same object with the same parameters; only its class changes. So parameter
names, saving, loading, quantising and ``isinstance`` see what they saw before, and unpatching is
setting the class back.
"""

from threading import get_ident
from typing import Optional

import mlx.core as mx
import mlx.nn as nn

from cleave import fast_ops
from cleave._load import _core
from cleave.report import SiteCounts

_classes: dict = {}  # (mixin, original class) -> class
_splitting = True  # the seed's global switch, SplitLinear.set_prefill


class SiteState(SiteCounts):
    """What the modules of one site share: the site, and whether the modules still are what it was
    made of."""

    def __init__(self, site, callers: list, modules: dict):
        """callers: the modules that get a split class, in the order of the site's outputs; modules:
        path -> module with weights. Of a linear group they are the same."""
        super().__init__(site)
        self.callers = callers
        self.modules = modules
        self._prints = [_core.Fingerprint(m) for m in modules.values()]

    def output(self, index: int, caller: nn.Module, x: mx.array) -> Optional[mx.array]:
        """The caller's output for x, or None when it is to run its original code."""
        raise NotImplementedError

    def ready(self, index: int, caller: nn.Module, x: mx.array) -> bool:
        """Whether a call is to be split; it counts as original otherwise."""
        site = self.site
        if site is None or caller is not self.callers[index]:  # a copy may have weights of its own
            return False
        if not _splitting or not site.engages(x):
            site.count_original()
            return False
        return self.intact()

    def intact(self) -> bool:
        """Whether all modules still have the weights that the site holds; drops the site if not."""
        if all(p.matches(m) for p, m in zip(self._prints, self.modules.values())):
            return True
        self.drop("its weights were replaced after patching: patch the model again")
        return False

    def __deepcopy__(self, memo):
        return None  # a copied model has weights of its own: it runs the original modules

    def __reduce__(self):
        return (type(None), ())


class GroupState(SiteState):
    """A linear group: the first member's call computes all, the others take theirs for the same x."""

    def __init__(self, site, modules: dict):
        super().__init__(site, list(modules.values()), modules)
        self._slots: dict = {}  # thread -> [x, outputs, how many are left]
        self._wasted = 0

    def output(self, index, caller, x):
        thread = get_ident()
        slot = self._slots.get(thread) if self._slots else None
        if slot is not None and slot[1][index] is not None and _core.same_array(slot[0], x):
            if caller is not self.callers[index] or not self.intact():
                return None
            y, slot[1][index] = slot[1][index], None
            slot[2] -= 1
            if slot[2] == 0:
                del self._slots[thread]
            return y
        if not self.ready(index, caller, x):
            return None
        if slot is not None:
            self._wasted += 1
            if self._wasted > 2:
                self.drop("its members are not called with one input")
                return None
        outputs = self.site(x)
        y, outputs[index] = outputs[index], None
        if len(outputs) > 1:
            self._slots[thread] = [x, outputs, len(outputs) - 1]
        return y

    def drop(self, reason: str) -> None:
        self._slots.clear()
        super().drop(reason)


class MlpState(SiteState):
    """An mlp: its owner's call is the site's call, while the owner still has the same children."""

    def __init__(self, site, owner: nn.Module, modules: dict):
        super().__init__(site, [owner], modules)
        self._children = [(path.rsplit(".", 1)[-1], m) for path, m in modules.items()]

    def output(self, index, caller, x):
        return self.site(x)[0] if self.ready(index, caller, x) else None

    def intact(self) -> bool:
        if all(self.callers[0].get(name) is m for name, m in self._children):
            return super().intact()
        self.drop("its layers were replaced after patching: patch the model again")
        return False


class _Split:
    """Mixin: how a module finds its site. ``_cleave`` is (state, index) and not a parameter."""

    _cleave = None

    def _split_output(self, x):
        link = self._cleave
        if link is None or link[0] is None:
            return None
        return link[0].output(link[1], self, x)

    @staticmethod
    def set_prefill(on: bool) -> None:
        """The seed's global switch. Each call decides by its own length, so nothing needs it; False
        makes every call run the original modules."""
        global _splitting
        _splitting = bool(on)


class SplitLinear(_Split, nn.Module):
    """A linear layer whose rows are computed by several units.

    ``SplitLinear(linear, units="auto", seq=512, shares=None, min_rows=192)`` wraps one nn.Linear or
    nn.QuantizedLinear; the arguments are those of :func:`cleave.patch_model`. The result shares the
    layer's arrays and is an instance of its class too.
    """

    def __init__(self, linear, units="auto", seq=512, shares=None, min_rows=192):
        from cleave.patch import split_one

        super().__init__()
        dict.update(self, linear)
        self.__dict__.update(linear.__dict__)
        self.__class__ = type(linear)
        split_one(self, units, seq, shares, min_rows)

    def __call__(self, x: mx.array) -> mx.array:
        y = self._split_output(x)
        return super().__call__(x) if y is None else y


class SplitEmbedding(_Split, nn.Module):
    """An embedding whose use as the output projection (``as_linear``) is split; look-ups are not."""

    def as_linear(self, x: mx.array) -> mx.array:
        y = self._split_output(x)
        return super().as_linear(x) if y is None else y


class SplitMLP(_Split, nn.Module):
    """A gated MLP whose intermediate channels are computed by several units, activation included."""

    def __call__(self, x: mx.array, *args, **kwargs) -> mx.array:
        y = None if args or kwargs else self._split_output(x)
        return super().__call__(x, *args, **kwargs) if y is None else y


class CallState:
    """What a model under ``FastCalls`` needs to know."""

    def __init__(self, min_rows: int):
        self.min_rows = min_rows

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return (type(None), ())


class FastCalls(_Split, nn.Module):
    """A text model whose long calls use cleave's RMSNorm, RoPE and attention."""

    def __call__(self, *args, **kwargs):
        link = self._cleave
        if link is None or link[0] is None or not _splitting:
            return super().__call__(*args, **kwargs)
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("inputs_embeds"))
        if not isinstance(ids, mx.array) or ids.ndim < 2:
            return super().__call__(*args, **kwargs)
        if ids.shape[0] * ids.shape[1] < link[0].min_rows:
            return super().__call__(*args, **kwargs)
        with fast_ops.Scope():
            return super().__call__(*args, **kwargs)


def attach(module: nn.Module, mixin: type, state: SiteState, index: int) -> None:
    """Puts a module under its split class."""
    base = type(module)
    key = (mixin, base)
    if key not in _classes:
        namespace = {"__module__": mixin.__module__, "_original_class": base}
        _classes[key] = type(mixin.__name__, (mixin, base), namespace)
    module.__class__ = _classes[key]
    object.__setattr__(module, "_cleave", (state, index))


def detach(module: nn.Module) -> None:
    """Gives a module its original class back."""
    module.__class__ = type(module)._original_class
    module.__dict__.pop("_cleave", None)


def is_split(module: nn.Module) -> bool:
    return isinstance(module, _Split)
