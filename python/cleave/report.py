"""What patching did, and what ran."""

from dataclasses import dataclass, field

import mlx.core as mx


def table(rows, head) -> str:
    """Plain text columns; numbers to the right."""
    cells = [[str(c) for c in row] for row in [head, *rows]]
    widths = [max(len(r[i]) for r in cells) for i in range(len(head))]
    right = [all(_is_number(r[i]) for r in cells[1:]) and len(cells) > 1 for i in range(len(head))]

    def line(row):
        return "  ".join(
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)
        ).rstrip()

    return "\n".join([line(cells[0]), line(["-" * w for w in widths]), *map(line, cells[1:])])


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text in ("", "-")


def megabytes(n: int) -> str:
    return f"{n / 1e6:.1f} MB"


class SiteCounts:
    """A site and its calls, which outlive it."""

    def __init__(self, site):
        self.site = site
        self.dropped: str | None = None  # why the site no longer splits
        self._counts = (0, 0, 0)
        self._error = None

    def drop(self, reason: str) -> None:
        """Frees the site and what the partners hold of it."""
        self.dropped = reason
        self._counts, self._error = self.now(), self.error()
        self.site = None

    def error(self) -> float | None:
        """Of the products, relative to exact ones; None where they are exact or not measured yet."""
        return self._error if self.site is None else self.site.error

    def now(self) -> tuple:
        """Calls so far: engaged, original, rescued."""
        site = self.site
        return self._counts if site is None else (site.engaged, site.originals, site.rescued)


@dataclass
class Report:
    """What units did for a model: the result of :func:`cleave.patch_model`, and of a Runner.

    Attributes:
        units: name -> description of the units taking part; "main" is the one MLX runs on.
        memory: bytes added per partner unit.
        refused: (path or site, reason) for what stays on main.
        load_seconds: time that cutting, packing and compiling took.
        main_rows_max_difference: largest difference found between main's rows from the slices and
            the unsplit ops; 0.0 means bit-identical, None that main has no rows beside a partner's.
        precision: the coarsest arithmetic that partners may use; see :func:`cleave.patch_model`.
        fast_ops: whether long calls use cleave's RMSNorm, RoPE and attention (main on a CPU).
    """

    mode: str
    seq: int
    min_rows: int
    units: dict
    shares: dict
    memory: dict = field(default_factory=dict)
    refused: list = field(default_factory=list)
    load_seconds: float = 0.0
    main_rows_max_difference: float | None = None
    fast_ops: bool = False
    precision: str = "exact"
    _states: list = field(default_factory=list, repr=False)
    _infos: list = field(default_factory=list, repr=False)
    _units: dict = field(default_factory=dict, repr=False)
    _baseline: dict = field(default_factory=dict, repr=False)

    def add(self, state: SiteCounts) -> None:
        """Takes in a site that is split, with what its units refused and hold."""
        info = state.site.report()
        self._states.append(state)
        self._infos.append(info)
        self.refused += [(info["name"], r) for r in info["refusals"]]
        for part in info["parts"]:
            if part["unit"] != "main":
                self.memory[part["unit"]] = self.memory.get(part["unit"], 0) + part["bytes"]

    def verify_main_rows(self) -> None:
        """Compares main's rows with the unsplit ops, once per distinct shape: on a GPU a narrower
        output can select another kernel. A CPU's kernels do not depend on the number of tokens: two
        will do."""
        tokens = 2 if mx.default_device() == mx.cpu else max(self.min_rows, 1)
        seen = set()
        for state, info in zip(self._states, self._infos):
            rows = tuple(tuple(p["rows"]) for p in info["parts"])
            key = (info["k"], tuple(info["n"]), info["format"], rows)
            if info["kind"] != "linear group" or key in seen:
                continue
            seen.add(key)
            difference = state.site.main_rows_difference(tokens)
            if difference is not None:
                self.main_rows_max_difference = max(
                    self.main_rows_max_difference or 0.0, difference
                )

    @property
    def sites(self) -> list:
        """One dict per site: name, kind, k, n, format, parts (unit, rows, bytes), engaged, original,
        rescued (calls since reset()), error (of the products relative to exact ones, where precision
        is not exact and a call was measured, else None), wrong_dtype (calls that stayed unsplit since activations arrived
        in a dtype that no program accepts), and dropped, why it no longer splits, or None."""
        out = []
        for i, (info, state) in enumerate(zip(self._infos, self._states)):
            base = self._baseline.get(i, (0, 0, 0))
            since = (a - b for a, b in zip(state.now(), base))
            counts = dict(zip(("engaged", "original", "rescued"), since))
            wrong = state.site.wrong_dtype if state.site else 0
            seen = {"wrong_dtype": wrong, "error": state.error(), "dropped": state.dropped}
            out.append({**info, **counts, **seen})
        return out

    @property
    def engaged(self) -> int:
        """Sites that really ran split since patching or the last reset()."""
        return sum(1 for s in self.sites if s["engaged"])

    def reset(self) -> None:
        """Starts counting anew."""
        self._baseline = {i: state.now() for i, state in enumerate(self._states)}

    def __deepcopy__(self, memo):
        """A copied model runs its original modules, so the copy's report has no sites."""
        return Report(
            self.mode,
            self.seq,
            self.min_rows,
            dict(self.units),
            dict(self.shares),
            precision=self.precision,
        )

    @property
    def precision_line(self) -> str:
        """What the precision costs, in one sentence; empty for exact."""
        if self.precision == "exact":
            return ""
        used = sorted({p["arithmetic"] for i in self._infos for p in i["parts"][-1:]})
        found = sorted((s["error"], s["name"]) for s in self.sites if s["error"] is not None)
        text = f"precision {self.precision}: partners multiply in {', '.join(used) or 'nothing'}"
        if not found:
            return f"{text}; its error is measured in the first call"
        (middle, _), (most, where) = found[len(found) // 2], found[-1]
        return f"{text}, products differ from exact ones by {middle:.2%} (median site), at most {most:.2%} ({where})"

    @property
    def failures(self) -> dict:
        """Partner units that were switched off: name -> (failed calls, what the first said)."""
        return {n: (u.failures, u.failure) for n, u in self._units.items() if u.failed}

    def as_dict(self) -> dict:
        return {
            "mode": self.mode,
            "seq": self.seq,
            "min_rows": self.min_rows,
            "precision": self.precision,
            "units": self.units,
            "shares": self.shares,
            "sites": self.sites,
            "engaged": self.engaged,
            "refused": [list(r) for r in self.refused],
            "memory": self.memory,
            "load_seconds": self.load_seconds,
            "main_rows_max_difference": self.main_rows_max_difference,
            "fast_ops": self.fast_ops,
            "failures": {n: list(f) for n, f in self.failures.items()},
        }

    @property
    def line(self) -> str:
        """The units and what they did, in a few words."""
        partners = ", ".join(self._units) or "none"
        memory = ", ".join(f"{n} {megabytes(b)}" for n, b in self.memory.items()) or "none"
        rescued = sum(s["rescued"] for s in self.sites)
        failed = (
            f"; {', '.join(self.failures)} failed, {rescued} calls rescued" if self.failures else ""
        )
        return (
            f"partners: {partners}; {self.engaged} of {len(self.sites)} sites engaged "
            f"in calls of {self.min_rows} or more tokens; "
            f"memory added: {memory}{failed}" + (self.precision_line and f"; {self.precision_line}")
        )

    def __str__(self) -> str:
        shapes: dict = {}
        for s in self.sites:
            rows = ", ".join(f"{p['unit']} {'+'.join(map(str, p['rows']))}" for p in s["parts"])
            key = (
                s["kind"],
                _pattern(s["name"]),
                f"{s['k']} -> {'+'.join(map(str, s['n']))}",
                s["format"],
                rows,
            )
            count = shapes.setdefault(key, [0, 0, 0])
            count[0] += 1
            count[1] += bool(s["engaged"])
            count[2] += sum(p["bytes"] for p in s["parts"])
        lines = [
            table(
                [(c[0], *key, c[1], megabytes(c[2])) for key, c in shapes.items()],
                ("sites", "kind", "where", "channels", "weights", "rows", "engaged", "added"),
            )
            if shapes
            else "no site is split"
        ]
        lines += [f"unit {n}: {d}" for n, d in self.units.items()]
        memory = ", ".join(f"{n} {megabytes(b)}" for n, b in self.memory.items()) or "none"
        lines.append(f"memory added: {memory}; load time {self.load_seconds:.2f} s")
        if self.precision_line:
            lines.append(self.precision_line)
        if self.fast_ops:
            lines.append("RMSNorm, RoPE and attention of long calls: cleave's, on all cores")
        if self.main_rows_max_difference is not None:
            same = self.main_rows_max_difference == 0
            lines.append(
                "main's rows: "
                + (
                    "bit-identical to the unsplit ops"
                    if same
                    else f"differ by up to {self.main_rows_max_difference:.3g}"
                )
            )
        reasons: dict = {}
        for path, reason in self.refused:
            reasons.setdefault(reason, []).append(path)
        dropped = [(s["name"], s["dropped"]) for s in self.sites if s["dropped"]]
        for path, reason in dropped:
            reasons.setdefault(reason, []).append(path)
        for s in self.sites:
            if s["wrong_dtype"] and not s["engaged"]:
                text = "activations arrive in another dtype than its weights have"
                reasons.setdefault(text, []).append(s["name"])
        for reason, paths in reasons.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            lines.append(f"not split: {paths[0]}{more}: {reason}")
        for name, (count, text) in self.failures.items():
            lines.append(f"unit {name} failed {count} times and is switched off: {text}")
        return "\n".join(lines)


def _pattern(name: str) -> str:
    """A site's name with layer numbers replaced, so that equal layers share a line."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
