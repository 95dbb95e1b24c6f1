"""Which units take part, and the share of each at a site: what patch_model and Runner both ask first."""

import mlx.core as mx

from cleave._load import _core
from cleave.balance import Balancer
from cleave.report import Report

MIN_ROWS = 192  # the seed's threshold, until calibrated
PRECISIONS = ("exact", "bf16", "int8")


class Team:
    """Main and its partners."""

    def __init__(self, op: str, units, shares, seq: int, precision: str = "exact"):
        """units, shares, precision: those of :func:`cleave.patch_model`; op: who asks, for messages.

        Raises ValueError for an unknown unit or precision or shares that are not legal, RuntimeError
        for a unit that this machine lacks.
        """
        if precision not in PRECISIONS:
            raise ValueError(
                f"[{op}] got precision {precision!r} and needs one of {', '.join(PRECISIONS)}"
            )
        self.seq, self.precision = seq, precision
        self.members, self.fixed = _resolve(op, units, shares)  # (name, unit or None for main)
        self._balancer = None if self.fixed else Balancer(self.members, seq, precision)

    def shares(self, weight) -> tuple:
        """([(unit, share)], "") for a site of this weight, or (None, reason) when it should stay on
        main."""
        if self.fixed:
            return [(u, s) for (_, u), s in zip(self.members, self.fixed)], ""
        return self._balancer.shares(weight)

    def report(self, mode: str, min_rows: int) -> Report:
        """A report without sites yet."""
        main = f"mlx on {mx.default_device()}"
        report = Report(
            mode=mode,
            seq=self.seq,
            min_rows=min_rows,
            precision=self.precision,
            units={n: u.description if u else main for n, u in self.members},
            shares={n: s for (n, _), s in zip(self.members, self.fixed)} if self.fixed else {},
        )
        report._units = {n: u for n, u in self.members if u is not None}
        return report


def _resolve(op, units, shares):
    """-> ([(name, unit or None for main)], [share] or None when they are to be measured)."""
    if isinstance(units, str) and units == "auto":
        team = [("main", None)]
        for name in _core.automatic_units():
            try:
                team.append((name, _core.make_unit(name)))
            except RuntimeError:  # this machine lacks it; cleave.available_units() says why
                pass
    else:
        names = [u.strip() for u in units.split(",")] if isinstance(units, str) else list(units)
        if not names or not all(isinstance(n, str) and n for n in names):
            raise ValueError(f"[{op}] got units {units!r} and needs names such as 'main,cpu'")
        if len(set(names)) != len(names):
            raise ValueError(f"[{op}] got units {units!r} and needs each unit once")
        team = [(n, None if _core.is_main_unit(n) else _core.make_unit(n)) for n in names]
        if sum(u is None for _, u in team) > 1:
            raise ValueError(f"[{op}] got units {units!r}, in which main is named twice")
    partners = [n for n, u in team if u is not None]
    if shares is None:
        if all(u is not None for _, u in team):
            team.insert(0, ("main", None))
        return team, None
    return _with_shares(op, team, partners, shares)


def _with_shares(op, team, partners, shares):
    names = [n for n, _ in team]
    if isinstance(shares, (int, float)) and not isinstance(shares, bool):
        if len(partners) != 1:
            raise ValueError(
                f"[{op}] got one share and {len(partners)} partner units; it needs one per unit"
            )
        if "main" not in names and all(u is not None for _, u in team):
            team = [("main", None), *team]
        fixed = [1 - shares if u is None else shares for _, u in team]
    elif isinstance(shares, dict):
        unknown = [n for n in shares if n not in names]
        if unknown:
            raise ValueError(f"[{op}] got a share for {unknown[0]!r}, and the units are {names}")
        fixed = [shares.get(n, 0.0) for n in names]
    else:
        fixed = list(shares)
        if len(fixed) != len(team):
            raise ValueError(f"[{op}] got {len(fixed)} shares for {len(team)} units: {names}")
    if not all(isinstance(s, (int, float)) and not isinstance(s, bool) for s in fixed):
        raise ValueError(f"[{op}] got shares {shares!r} and needs numbers")
    _core.check_shares([(u, float(s)) for (_, u), s in zip(team, fixed)])
    return team, [float(s) for s in fixed]
