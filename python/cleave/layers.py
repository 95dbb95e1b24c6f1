"""The modules a patched model runs: the original objects under a class that asks its site first.

A patched module stays the same object with the same parameters; only its class changes. So parameter
names, saving, loading, quantising and ``isinstance`` see what they saw before, and unpatching is
setting the class back.
"""

from threading import get_ident
from typing import Optional

import mlx.core as mx
import mlx.nn as nn

from cleave._load import _core

_classes: dict = {}  # (mixin, original class) -> class
_splitting = True  # the seed's global switch, SplitLinear.set_prefill


class SiteState:
    """What the members of one site share: the site and whether the modules still hold its weights."""

    def __init__(self, site, modules: dict):
        """modules: path -> module, in the order of the site's outputs."""
        self.site = site
        self.paths = list(modules)
        self.modules = list(modules.values())
        self.dropped: Optional[str] = None  # why the site no longer splits
        self.counts = (0, 0, 0)  # engaged, original, rescued, once the site is gone
        self._prints = [_core.Fingerprint(m) for m in self.modules]

    def drop(self, reason: str) -> None:
        self.dropped = reason
        self.counts = self.now()
        self.site = None  # frees the partners' copies

    def now(self) -> tuple:
        """Calls so far: engaged, original, rescued."""
        site = self.site
        return self.counts if site is None else (site.engaged, site.originals, site.rescued)

    def ready(self, x: mx.array) -> bool:
        """Whether a call with x is split; counts it as original otherwise."""
        site = self.site
        if site is None:
            return False
        if not _splitting or not site.engages(x):
            site.count_original()
            return False
        return all(self.holds(i, module) for i, module in enumerate(self.modules))

    def holds(self, index: int, module: nn.Module) -> bool:
        """Whether a module still has the weights of the site's member; drops the site if not."""
        if self._prints[index].matches(module):
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
        super().__init__(site, modules)
        self._slots: dict = {}  # thread -> [x, outputs, how many are left]
        self._wasted = 0

    def output(self, index: int, module: nn.Module, x: mx.array) -> Optional[mx.array]:
        if self.site is None or not self.holds(index, module):
            return None
        thread = get_ident()
        slot = self._slots.get(thread)
        if slot is not None and slot[1][index] is not None and _core.same_array(slot[0], x):
            y, slot[1][index] = slot[1][index], None
            slot[2] -= 1
            if slot[2] == 0:
                del self._slots[thread]
            return y
        if not self.ready(x):
            return None
        if slot is not None:
            self._wasted += 1
            if self._wasted > 2:
                self._slots.clear()
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


class MlpState(SiteState):
    def output(self, index: int, module: nn.Module, x: mx.array) -> Optional[mx.array]:
        return self.site(x)[0] if self.ready(x) else None


class SplitMLP(_Split, nn.Module):
    """A gated MLP whose intermediate channels are computed by several units, activation included."""

    def __call__(self, x: mx.array, *args, **kwargs) -> mx.array:
        y = None if args or kwargs else self._split_output(x)
        return super().__call__(x, *args, **kwargs) if y is None else y


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
