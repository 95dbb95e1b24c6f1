"""Prefill and decode on the CPU: cleave beside llama.cpp, PyTorch and stock MLX, in turn within one run.

``./run bench-cpu [options]`` sets the rivals up in build/rivals, prints tables, and writes
build/bench-cpu.json and, when everything was measured, a section of docs/measurements.md.
"""

import argparse
import fcntl
import json
import os
import resource
import signal
import sys
import textwrap
import time
from pathlib import Path

import mlx.core as mx
from docs_page import replace_section
from rivals import contenders, setup
from rivals.contest import compete
from rivals.models import MODELS
from rivals.tables import show
from rivals.worker import WorkerError

import cleave
from cleave.figures import machine, write_whole

JSON = setup.ROOT / "build" / "bench-cpu.json"
PAGE = setup.ROOT / "docs" / "measurements.md"
BEGIN, END = "<!-- bench-cpu begin -->", "<!-- bench-cpu end -->"


def numbers(text: str) -> list:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"got {text} and needs numbers of at least 1")
    return sorted(set(values))


def arguments(argv=None):
    p = argparse.ArgumentParser(prog="./run bench-cpu", description=__doc__.splitlines()[0])
    cores = len(os.sched_getaffinity(0))
    p.add_argument(
        "--quick",
        action="store_true",
        help="smollm2 at 128,512 on all cores, 3 rounds, nothing compiled",
    )
    p.add_argument("--models", help=f"of {','.join(MODELS)} (default all)")
    p.add_argument("--lengths", type=numbers, help="default 128,512,1024,2048")
    p.add_argument(
        "--threads", type=numbers, help=f"default 1,{cores}" if cores > 1 else "default 1"
    )
    p.add_argument("--rounds", type=int, help="samples of each (default 5)")
    p.add_argument(
        "--budget",
        type=float,
        help="seconds for each contender on a model and threads (default 100)",
    )
    p.add_argument(
        "--only", help="contenders whose name has one of these words, such as cleave,F32"
    )
    p.add_argument(
        "--min-rows",
        type=int,
        help="cleave's calls of fewer tokens run mlx's own ops (default: native 1, patched measured)",
    )
    p.add_argument("--profile", action="store_true", help="where cleave's time goes, op by op")
    p.add_argument("--docs", action="store_true", help="write the docs also after a partial run")
    args = p.parse_args(argv)
    args.whole = not (args.quick or args.models or args.lengths or args.threads or args.only)
    args.models = (
        args.models.split(",") if args.models else (["smollm2"] if args.quick else list(MODELS))
    )
    unknown = [m for m in args.models if m not in MODELS]
    if unknown:
        p.error(f"got model {unknown[0]} and knows {', '.join(MODELS)}")
    args.lengths = args.lengths or ([128, 512] if args.quick else [128, 512, 1024, 2048])
    args.threads = args.threads or ([cores] if args.quick else sorted({1, cores}))
    if args.min_rows is not None and args.min_rows < 1:
        p.error(f"got min-rows {args.min_rows} and needs at least 1")
    if max(args.threads) > cores:
        p.error(f"got {max(args.threads)} threads and {cores} cores may be used")
    args.rounds = args.rounds or (3 if args.quick else 5)
    args.budget = args.budget or (25 if args.quick else 100)
    args.only = args.only.split(",") if args.only else []
    return args


def say(text: str) -> None:
    print(text, flush=True)


class Load:
    """How much of the machine others used, since it was made: the CPU time that was neither idle nor ours."""

    def __init__(self):
        self._begin, self.before = self._now(), os.getloadavg()

    @staticmethod
    def _now():
        ticks = [int(t) for t in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), busy, sum(u.ru_utime + u.ru_stime for u in used)

    def others(self) -> float:
        """Cores that others kept busy, on average. Ours count once they have ended."""
        wall, busy, own = (b - a for a, b in zip(self._begin, self._now()))
        return max(0.0, (busy - own) / wall)


def contest(model, threads: int, args, missing: dict) -> dict:
    """Everything on one model and number of threads; a result of rivals/tables.py."""
    everyone = [
        *contenders.cleave(model, args.min_rows),
        *contenders.llama(model, threads, missing),
        *contenders.torch(model, threads, missing, compiled=not args.quick),
        *(contenders.stock(model) if threads == max(args.threads) else []),
        *contenders.peaks(model),
    ]
    everyone = contenders.select(everyone, args.only)
    say(
        f"\n{model.name}, {threads} thread{'s' if threads > 1 else ''}: {len(everyone)} contenders start"
    )
    log = setup.HOME / "workers.log"
    profiles = {}
    try:
        for c in everyone:
            c.start(threads, log)
            if c.why:
                say(f"  {c.name}: {c.why}")
        compete(everyone, args.lengths, args.rounds, args.budget, lambda text: say("  " + text))
        if args.profile:
            profiles = {c.name: profile(c, args) for c in everyone if c.family == "cleave"}
    finally:
        for c in everyone:
            c.stop()
    shape, lengths = model.shape, args.lengths
    return {
        "model": model.name,
        "threads": threads,
        "lengths": lengths,
        "flops": {str(n): shape.flops(n) for n in lengths},
        "product_flops": {
            str(n): sum(shape.op_flops(n)[o] for o in ("qkv", "o", "mlp")) for n in lengths
        },
        "op_flops": {str(n): shape.op_flops(n) for n in lengths},
        "contenders": [
            {
                "name": c.name,
                "family": c.family,
                "peak": list(c.peak),
                "ready": c.ready,
                "why": c.why,
                "used_seconds": c.used,
                "samples": [[*job, seconds] for job, seconds in c.samples.items()],
            }
            for c in everyone
        ],
        "profiles": profiles,
    }


def profile(contender, args) -> dict:
    out = {}
    for n in args.lengths:
        if contender.worker and ("prefill", n) in contender.samples:
            try:
                out[str(n)] = contender.worker.run("profile", n, args.budget)["profile"]
            except WorkerError as error:
                contender.why = contender.why or f"profile of {n} tokens: {error}"
    return out


def section(data: dict) -> str:
    """The bench's part of docs/measurements.md."""
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in data["notes"])
    about = (
        f"{data['machine']} ({data['flags']}); {data['versions']}. Load of the machine before and after: "
        f"{data['load']}; others kept {data['others']:.2f} cores busy. By `./run bench-cpu {data['options']}`: "
        "contenders sampled in turn within one run; median, ± half the spread. A prefill computes the last "
        "position's logits and keeps the cache (compiled PyTorch: no cache). GFLOPS: linear layers and attention of "
        f"the whole pass; the peak: oneDNN's matmul alone on the same products.{notes}"
    )
    head = f"## Prefill and decode beside rivals ({data['date']})"
    lines = [BEGIN, head, "", *textwrap.wrap(about, 118, break_on_hyphens=False), ""]
    for result in data["results"]:
        threads = result["threads"]
        lines += [f"**{result['model']}, {threads} thread{'s' if threads > 1 else ''}**", ""]
        lines += ["```", show(result), "```", ""]
    return "\n".join([*lines, END])


def write_docs(text: str) -> None:
    replace_section(PAGE, BEGIN, END, text)


def versions(results: list) -> str:
    ready = [c["ready"] for r in results for c in r["contenders"] if c["ready"]]
    torch = next((t.split(" ")[1] for t in ready if t.startswith("torch ")), None)
    onednn = next((t.split(" ")[1] for t in ready if t.startswith("oneDNN ")), None)
    cpu = next((t.partition("cpu: ")[2] for t in ready if t.startswith("cleave ")), "")
    cpu = cpu.partition("; precision ")[0]
    parts = [
        f"cleave {cleave.__version__}" + (f" (cpu: {cpu})" if cpu else ""),
        f"mlx {mx.__version__}",
        setup.requirements()[0].replace("==", " ") + f" built by {setup.compiler()}",
        torch and f"PyTorch {torch}",
        onednn and f"peak: oneDNN {onednn}",
    ]
    return "; ".join(p for p in parts if p)


def run(args) -> int:
    setup.HOME.mkdir(parents=True, exist_ok=True)
    lock = open(setup.HOME / ".lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    begin = time.monotonic()
    missing, notes = setup.install(say)
    for name, why in missing.items():
        say(f"without {name}: {why}")
    say(f"set-up: {time.monotonic() - begin:.0f} s")
    load, results = Load(), []
    data = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "flags": " ".join(setup.processor_flags()),
    }
    data |= {"options": " ".join(sys.argv[1:]), "notes": notes, "results": results}
    for name in args.models:
        model = MODELS[name]()
        for threads in args.threads:
            results.append(contest(model, threads, args, missing))
            say("\n" + show(results[-1]))
            before, after = (
                " ".join(f"{x:.1f}" for x in averages)
                for averages in (load.before, os.getloadavg())
            )
            data |= {
                "versions": versions(results),
                "load": f"{before} and {after}",
                "others": load.others(),
            }
            write_whole(JSON, json.dumps(data, indent=1) + "\n")
    if args.whole or args.docs:
        write_docs(section(data))
        say(f"section written to {PAGE.relative_to(setup.ROOT)}")
    others = data["others"]
    busy = ": the figures suffer" if others > 0.1 else ""
    say(f"\nfigures: {JSON.relative_to(setup.ROOT)}; others kept {others:.2f} cores busy{busy}")
    say(f"all: {time.monotonic() - begin:.0f} s")
    return 0


def interrupted(*_):
    raise KeyboardInterrupt


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, interrupted)
    try:
        return run(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
