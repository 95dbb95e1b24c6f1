"""Shares from a short measurement, when the user names none.

A stand-in for the planner: it times main and each partner alone on a part of each distinct weight
shape and balances their rates. It knows nothing of contention, handoff or length.
"""

import time

import mlx.core as mx

from cleave._load import _core

GAIN_NEEDED = 1.02  # a split expected to gain less is not made
ROWS = 1024  # of a weight that are timed
ENOUGH_SECONDS = 0.05  # a sample of main at least this long needs no more tokens


def _seconds(call, x) -> float:
    begin = time.perf_counter()
    mx.eval(call(x))
    return time.perf_counter() - begin


def _sample(call, weight, m) -> tuple:
    """(seconds of the quickest call, multiply-adds per second of the median one) for random x [m, k]."""
    x = mx.random.normal((m, weight.k), key=mx.random.key(m)).astype(weight.activation_dtype())
    mx.eval(x)
    first = _seconds(call, x)  # warm-up: it may compile, and start threads
    samples = [first] if first > 10 * ENOUGH_SECONDS else [_seconds(call, x) for _ in range(3)]
    return min(samples), m * weight.k * weight.n / sorted(samples)[len(samples) // 2]


def _main_rate(weight, seq) -> float:
    """m is doubled until a call is long enough: mlx on a Linux CPU can need minutes for 512 tokens."""
    m = 1
    while True:
        took, rate = _sample(weight.linear, weight, m)
        if took >= ENOUGH_SECONDS or m >= seq:
            return rate
        m = min(seq, m * 2)


class Balancer:
    """Gives shares per site; measures each distinct weight shape once."""

    def __init__(self, units: list, seq: int, precision: str = "exact"):
        """units: (name, unit) pairs, main's unit None; precision: of the partners."""
        self._units, self._seq, self._precision, self._known = units, seq, precision, {}

    def shares(self, weight) -> tuple:
        """([(unit, share)], "") for a site of this weight, or (None, reason) when it should stay on
        main."""
        key = (weight.k, weight.n, weight.format)
        if key not in self._known:
            self._known[key] = self._measure(weight)
        return self._known[key]

    def _measure(self, weight):
        part = weight.rows(0, min(weight.n, ROWS))
        main_rate = _main_rate(part, self._seq)
        rates = {}
        refusal = ""
        for name, unit in self._units:
            if unit is None:
                continue
            try:
                site = _core.LinearGroup(
                    [part], [(unit, 1.0)], name, self._seq, 0, precision=self._precision
                )
            except RuntimeError as e:
                refusal = str(e)
                continue
            if not site.splits:
                refusal = "; ".join(site.report()["refusals"])
                continue
            rates[unit] = _sample(site, part, self._seq)[1]
        if not rates:
            return None, refusal or "no partner unit takes part"
        together = sum(rates.values())
        # A main on the CPU runs on the partners' own cores: it and they cannot both count.
        shared_cores = mx.default_device() == mx.cpu
        best = together if shared_cores else together + main_rate
        if best < GAIN_NEEDED * main_rate:
            return None, f"expected gain {best / main_rate:.2f}x is under {GAIN_NEEDED:.2f}x"
        main_share = 0.0 if shared_cores else main_rate / best
        return [(None, main_share)] + [
            (u, (1 - main_share) * r / together) for u, r in rates.items()
        ], ""


class OneToken:
    """What one token costs at the sites told of: on main, and by their shares. A weight shape is timed once."""

    def __init__(self, precision: str = "exact"):
        self._precision, self._known = precision, {}
        self._main = self._split = 0.0

    def add(self, weight, shares) -> None:
        key = (weight.k, weight.n, weight.format)
        if key not in self._known:
            self._known[key] = one_token(weight, shares, self._precision)
        main, split = self._known[key]
        self._main += main
        self._split += split

    @property
    def split_wins(self) -> bool:
        return self._main >= GAIN_NEEDED * self._split


def one_token(weight, shares, precision: str = "exact") -> tuple:
    """(seconds of main alone, seconds of the shares) for one token, from a part of the weight."""
    part = weight.rows(0, min(weight.n, ROWS))
    site = _core.LinearGroup([part], shares, "one token", 1, 0, precision=precision)
    scale = weight.n / part.n
    return scale * _sample(part.linear, part, 1)[0], scale * _sample(site, part, 1)[0]
