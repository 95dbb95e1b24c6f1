"""Runs build/release/benchmarks/bench_sites and writes docs/measurements.md and build/bench-sites.json.

``./run bench-sites [Google Benchmark options]``; with --benchmark_filter only the JSON is written.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
from docs_page import processor_flags, replace_section

import cleave
from cleave.figures import machine
from cleave.report import table

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "build" / "release" / "benchmarks" / "bench_sites"
JSON = ROOT / "build" / "bench-sites.json"
PAGE = ROOT / "docs" / "measurements.md"
BEGIN, END = "<!-- bench-sites begin -->", "<!-- bench-sites end -->"


NODE_COLUMNS = ("plain_us", "split_us", "added_us", "added_while_building_us")


def section(results: list) -> str:
    by_kind = {"graph_nodes": [], "rows_per_second": [], "two_units": []}
    for r in results:
        if "error_message" not in r:
            by_kind[r["name"].split("/")[0]].append((r["name"].split("/")[1:], r))
    unit = next(a.text for a in cleave.available_units() if a.name == "cpu")
    lines = [
        BEGIN,
        f"## Sites ({time.strftime('%Y-%m-%d')})",
        "",
        f"{machine()} ({' '.join(processor_flags())}); mlx {mx.__version__} on {mx.default_device()}; cpu: {unit}. By",
        "`./run bench-sites`; contenders sampled in turn within one run, medians.",
        "",
    ]
    rows = [
        (name[0].replace("_", " "), *(f"{r[c]:.1f}" for c in NODE_COLUMNS))
        for name, r in by_kind["graph_nodes"]
    ]
    head = ("64 layers", "plain us", "split us", "added us", "of it while building us")
    lines += [
        "**A split site's graph nodes**, per layer, the partner computing nothing. Side by side is the",
        "nodes' own cost; a chain also has the handoff, two wake-ups of a stream's thread per layer:",
        "",
        *fenced(rows, head),
        "",
    ]
    rows = [
        (
            name[0],
            f"{r['tokens']:.0f}",
            f"{r['stock_rows_per_s'] / 1e3:.1f}",
            f"{r['unit_rows_per_s'] / 1e3:.1f}",
            f"{r['ratio']:.0f}x",
            f"{r['unit_512_gflops']:.0f}",
        )
        for name, r in by_kind["rows_per_second"]
    ]
    head = ("weights", "tokens", "stock rows/ms", "cpu rows/ms", "ratio", "cpu GFLOPS at 512")
    lines += [
        "**Rows of the output per millisecond**, 2048 -> 2048 channels:",
        "",
        *fenced(rows, head),
        "",
    ]
    rows = [
        (
            name[0].rsplit("_", 1)[0],
            name[0].rsplit("_", 1)[1],
            name[1],
            f"{r['a_ms']:.1f}",
            f"{r['b_ms']:.1f}",
            f"{r['both_ms']:.1f}",
            f"{r['bound_ms']:.1f}",
            f"{r['achieved_pct']:.1f}",
            f"{r['achieved_low_pct']:.1f}-{r['achieved_high_pct']:.1f}",
        )
        for name, r in by_kind["two_units"]
    ]
    head = (
        "site",
        "dtype",
        "tokens",
        "cpu:0 ms",
        "cpu:1 ms",
        "both ms",
        "bound ms",
        "% of bound",
        "quartiles",
    )
    lines += [
        "**Two CPU units of one core each**, layer shapes of Qwen3-VL-2B; the bound is TaTb/(Ta+Tb) of the",
        "unsplit times in the same run, join included in `both`:",
        "",
        *fenced(rows, head),
        "",
        END,
    ]
    return "\n".join(lines)


def fenced(rows, head) -> list:
    return ["```", table(rows, head), "```"]


def main() -> int:
    if not PROGRAM.exists():
        print(f"[bench-sites] {PROGRAM} is missing: ./run build", file=sys.stderr)
        return 1
    JSON.parent.mkdir(exist_ok=True)
    out = [f"--benchmark_out={JSON}", "--benchmark_out_format=json"]
    code = subprocess.run([str(PROGRAM), *out, *sys.argv[1:]]).returncode
    if code != 0 or any(a.startswith("--benchmark_filter") for a in sys.argv[1:]):
        return code
    text = section(json.loads(JSON.read_text())["benchmarks"])
    replace_section(PAGE, BEGIN, END, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
