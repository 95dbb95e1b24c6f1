"""Shares from a short measurement, when the user names none.

A stand-in for the planner: it times main and each partner alone on a part of each distinct weight
shape and balances their rates. It knows nothing of contention, handoff or length.
"""

import time

import mlx.core as mx

from cleave._load import _core

GAIN_NEEDED = 1.02  # a split expected to gain less is not made
ROWS = 1024  # of a weight that are timed
ENOUGH_SECONDS = 0.01  # a sample at least this long needs no more tokens


def _seconds(call, x) -> float:
    begin = time.perf_counter()
    mx.eval(call(x))
    return time.perf_counter() - begin


def _rate(call, k, n, dtype, seq) -> float:
    """Multiply-adds per second of ``call`` on random x [m, k], m doubled until a call is long enough
    to be timed (mlx on a Linux CPU can need minutes for 512 tokens)."""
    m = 1
    while True:
        x = mx.random.normal((m, k)).astype(dtype)
        mx.eval(x)
        took = _seconds(call, x)
        if took >= ENOUGH_SECONDS or m >= seq:
            samples = sorted(_seconds(call, x) for _ in range(3 if took < 0.1 else 1))
            return m * k * n / min(samples[len(samples) // 2], took)
        m = min(seq, m * 2)


class Balancer:
    """Gives shares per site; measures each distinct weight shape once."""

    def __init__(self, units: list, seq: int):
        """units: (name, unit) pairs, main's unit None."""
        self._units, self._seq, self._known = units, seq, {}

    def shares(self, weight) -> tuple:
        """([(unit, share)], "") for a site of this weight, or (None, reason) when it should stay on
        main."""
        key = (weight.k, weight.n, weight.format)
        if key not in self._known:
            self._known[key] = self._measure(weight)
        return self._known[key]

    def _measure(self, weight):
        rows = min(weight.n, ROWS)
        part = weight.rows(0, rows)
        dtype = part.activation_dtype()
        main_rate = _rate(part.linear, part.k, rows, dtype, self._seq)
        rates = {}
        refusal = ""
        for name, unit in self._units:
            if unit is None:
                continue
            try:
                site = _core.LinearGroup([part], [(unit, 1.0)], name, self._seq, 0)
            except RuntimeError as e:
                refusal = str(e)
                continue
            if not site.splits:
                refusal = "; ".join(site.report()["refusals"])
                continue
            _seconds(site, mx.random.normal((self._seq, part.k)).astype(dtype))
            rates[unit] = _rate(site, part.k, rows, dtype, self._seq)
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
