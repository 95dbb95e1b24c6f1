"""What the samples say: rates, ratios, GFLOPS and the share of the peak. Pure functions on results.

A result is one model on one number of threads, a dict as in build/bench-cpu.json:
{"model", "threads", "lengths",
 "flops", "product_flops": {length: operations of the pass, of its products}, "op_flops": {length: {op: n}},
 "contenders": [{"name", "family", "peak": [names], "why", "ready", "samples": [[what, tokens, [seconds]]]}],
 "profiles": {contender: {length: {"total", "ops": {op: seconds}}}}}
"""

from cleave.measure import Samples
from cleave.report import table

REST = "rest (embedding, sums, cache, and calls of fewer tokens than min_rows)"


def measured(contender: dict, what: str, tokens: int | None = None) -> tuple | None:
    """(tokens, Samples) of a job; tokens None: of any number, as a decode's is the contender's own."""
    for w, n, seconds in contender["samples"]:
        if w == what and seconds and tokens in (None, n):
            return n, Samples(seconds)
    return None


def samples(contender: dict, what: str, tokens: int | None = None) -> Samples | None:
    """Of a job, as in measured()."""
    found = measured(contender, what, tokens)
    return found and found[1]


def rate(contender: dict, what: str, tokens: int | None = None) -> float | None:
    """Tokens per second at the median, or None where nothing was measured."""
    found = measured(contender, what, tokens)
    return found and found[0] / found[1].median


def find(result: dict, name: str) -> dict | None:
    return next((c for c in result["contenders"] if c["name"] == name), None)


def of_family(result: dict, *families: str) -> list:
    return [c for c in result["contenders"] if c["family"] in families]


def rivals(result: dict) -> list:
    return of_family(result, "llama.cpp", "PyTorch", "stock MLX")


def best(contenders: list, what: str, tokens: int | None = None) -> dict | None:
    """The quickest of them at this job."""
    quick = [c for c in contenders if rate(c, what, tokens)]
    return max(quick, key=lambda c: rate(c, what, tokens), default=None)


def peak_gflops(result: dict, names: list, tokens: int) -> tuple | None:
    """(name, GFLOPS) of the first of these peaks that was measured on the products of this length."""
    for name in names:
        contender = find(result, f"oneDNN {name}")
        r = contender and rate(contender, "prefill", tokens)
        if r:
            # The peak's products have no head: that is one row.
            return name, result["product_flops"][str(tokens)] / (tokens / r) / 1e9
    return None


def gflops(result: dict, contender: dict, tokens: int) -> float | None:
    """Of the whole forward pass: linear layers and attention."""
    r = rate(contender, "prefill", tokens)
    return result["flops"][str(tokens)] / (tokens / r) / 1e9 if r else None


def jobs(result: dict) -> list:
    """(heading, what, tokens)"""
    lengths = [(f"{n}", "prefill", n) for n in result["lengths"]]
    return [*lengths, ("decode", "decode", None)]


def rate_table(result: dict) -> str:
    """Tokens per second, median and half the spread."""

    def cell(contender, what, tokens):
        s = samples(contender, what, tokens)
        if s is None:
            return "-"
        spread = f" ±{s.spread / 2:.0%}" if len(s.seconds) > 1 else ""
        return f"{rate(contender, what, tokens):.4g}{spread}"

    rows = [
        (c["name"], *(cell(c, w, n) for _, w, n in jobs(result)))
        for c in [*of_family(result, "cleave"), *rivals(result)]
    ]
    return table(rows, ("tokens/s", *(h for h, _, _ in jobs(result))))


def ratio_table(result: dict, reference: dict) -> str:
    """How many times the reference's rate is each rival's."""

    def cell(rival, what, tokens):
        ours, theirs = rate(reference, what, tokens), rate(rival, what, tokens)
        return f"{ours / theirs:.2f}x" if ours and theirs else "-"

    rows = [(c["name"], *(cell(c, w, n) for _, w, n in jobs(result))) for c in rivals(result)]
    return table(rows, (f"{reference['name']} /", *(h for h, _, _ in jobs(result))))


def flops_table(result: dict) -> str:
    """GFLOPS of the forward pass, and percent of the peak of the contender's type."""

    def cell(contender, tokens):
        achieved = gflops(result, contender, tokens)
        peak = peak_gflops(result, contender["peak"], tokens)
        if achieved is None:
            return "-"
        return f"{achieved:.0f}" + (f" ({achieved / peak[1]:.0%} of {peak[0]})" if peak else "")

    lengths = result["lengths"]
    rows = []
    for c in of_family(result, "oneDNN"):
        found = [peak_gflops(result, c["peak"], n) for n in lengths]
        if any(found):
            rows.append((c["name"] + " alone", *(f"{p[1]:.0f}" if p else "-" for p in found)))
    for c in [*of_family(result, "cleave"), *rivals(result)]:
        cells = [cell(c, n) for n in lengths]
        if set(cells) != {"-"}:
            rows.append((c["name"], *cells))
    return table(rows, ("GFLOPS", *map(str, lengths)))


def verdicts(result: dict, reference: dict) -> list:
    """One sentence each: the reference against a family's best, and against its own file in llama.cpp."""
    out = []
    for label, what, tokens in jobs(result):
        ours = rate(reference, what, tokens)
        found = []
        form = reference["name"].rpartition(" ")[2].upper()
        same = find(result, f"llama.cpp {form}")
        theirs = same and rate(same, what, tokens)
        if ours and theirs:
            found.append(f"{ours / theirs:.2f}x llama.cpp on the same weights ({form})")
        for family in ("llama.cpp", "PyTorch", "stock MLX"):
            rival = best(of_family(result, family), what, tokens)
            if ours and rival:
                found.append(f"{ours / rate(rival, what, tokens):.2f}x {rival['name']}")
        if found:
            at = "decode" if what == "decode" else f"{label} tokens"
            out.append(f"{at}: {reference['name']} is {', '.join(found)}")
    return out


def precisions(result: dict) -> list:
    """What a coarser precision costs, as cleave reports it; one line for each that was asked for."""
    ours = [c for c in of_family(result, "cleave") if "; precision " in (c["ready"] or "")]
    return [f"{c['name']}: {c['ready'].partition('; precision ')[2]}" for c in ours]


def reasons(result: dict) -> list:
    """Why something is missing, one line per reason."""
    by_reason = {}
    for c in result["contenders"]:
        if c["why"]:
            by_reason.setdefault(c["why"], []).append(c["name"])
    return [f"{', '.join(names)}: {why}" for why, names in by_reason.items()]


def profile_rows(result: dict, contender: dict, tokens: int) -> tuple:
    """(rows of op, ms, % of the pass, GFLOPS; the sentence on the largest loss). The loss of an op is the time beyond
    what its operations would take at the peak."""
    profile = result["profiles"][contender["name"]][str(tokens)]
    peak = peak_gflops(result, contender["peak"], tokens)
    rows, losses = [], {}
    for op, seconds in sorted(profile["ops"].items(), key=lambda item: -item[1]):
        flops = result["op_flops"][str(tokens)].get(op, 0)
        share = seconds / profile["total"]
        rate_ = f"{flops / seconds / 1e9:.0f}" if flops and seconds > 0 else "-"
        rows.append((op, f"{seconds * 1e3:.1f}", f"{share:.0%}", rate_))
        losses[op] = seconds - (flops / peak[1] / 1e9 if peak else 0)
    worst = max(losses, key=losses.get)
    name = REST if worst == "rest" else worst
    sentence = (
        f"largest loss at {tokens} tokens: {name}, {losses[worst] * 1e3:.0f} ms of "
        f"{profile['total'] * 1e3:.0f}" + (f" beyond the {peak[0]} peak" if peak else "")
    )
    return rows, sentence


def profile_table(result: dict, contender: dict, tokens: int) -> str:
    rows, sentence = profile_rows(result, contender, tokens)
    return table(rows, (f"{tokens} tokens", "ms", "%", "GFLOPS")) + "\n" + sentence


def show(result: dict) -> str:
    """All tables of a result, as text."""
    parts = [rate_table(result)]
    references = [c for c in of_family(result, "cleave") if rate(c, "prefill")]
    if references:
        parts += ["\n".join(verdicts(result, c)) for c in references]
        parts.append(ratio_table(result, references[0]))
    parts.append(flops_table(result))
    if precisions(result):
        parts.append("\n".join(precisions(result)))
    if reasons(result):
        parts.append("\n".join(reasons(result)))
    for c in of_family(result, "cleave"):
        for tokens in result["lengths"]:
            if str(tokens) in result["profiles"].get(c["name"], {}):
                parts.append(f"{c['name']}, by op\n" + profile_table(result, c, tokens))
    return "\n\n".join(p for p in parts if p)
