"""The CPU bench: its tables and ratios on made results, its protocol with a made worker, its budget."""

import importlib
import sys
import textwrap
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the bench measures on Linux alone")


@pytest.fixture(autouse=True)
def benchmarks_in_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name):
    return importlib.import_module(f"rivals.{name}")


# ---- shapes -----------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_operations_of_a_pass_are_counted_as_by_loops():
    shape, tokens = module("shapes").Shape.of(SMALL), 5
    weights = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)  # q, k and v, o, the mlp's three
    seen = sum(i + 1 for i in range(tokens))  # pairs of positions, causal
    ops = shape.op_flops(tokens)
    assert shape.weights == weights + 800
    assert ops["qkv"] + ops["o"] + ops["mlp"] == 2 * tokens * weights
    assert ops["head"] == 2 * 800
    assert ops["attention"] == 3 * 4 * seen * (2 * 2 + 2 * 2)  # two products of heads of 2
    assert shape.flops(tokens) == sum(ops.values())


# ---- tables -----------------------------------------------------------------------------------------


def contender(name, family, peak=(), why="", ready=None, **jobs):
    """jobs: p100=[seconds of a prefill of 100], d32=[seconds of a decode of 32]."""
    what = {"p": "prefill", "d": "decode"}
    samples = [[what[k[0]], int(k[1:]), seconds] for k, seconds in jobs.items()]
    about = {"name": name, "family": family, "peak": peak, "why": why, "ready": ready}
    return {**about, "samples": samples}


def result(*contenders, **more):
    ops = {"qkv": 40e9, "o": 10e9, "mlp": 50e9, "attention": 20e9, "head": 0}
    return {
        "lengths": [100, 200],
        "flops": {"100": 120e9, "200": 240e9},
        "product_flops": {"100": 100e9, "200": 200e9},
        "op_flops": {"100": ops},
        "contenders": list(contenders),
        "profiles": {},
        **more,
    }


OURS = contender("cleave native Q4_1", "cleave", ["fp16", "fp32"], p100=[1.0, 0.5, 0.6], d32=[2.0])
PEAK = contender("oneDNN fp32", "oneDNN", ["fp32"], p100=[0.4])
SAME = contender("llama.cpp Q4_1", "llama.cpp", ["s8"], p100=[2.4], d32=[1.0])
FAST = contender("llama.cpp F32", "llama.cpp", ["fp32"], p100=[0.8])
STOCK = contender("stock MLX fp32", "stock MLX", ["fp32"], d4=[4.0], why="too slow")


def test_rates_are_of_the_median_and_decodes_of_their_own_length():
    t = module("tables")
    assert t.rate(OURS, "prefill", 100) == pytest.approx(100 / 0.6)
    assert t.rate(OURS, "prefill", 200) is None
    assert t.rate(STOCK, "decode") == pytest.approx(1.0)
    assert "166.7 ±42%" in t.rate_table(result(OURS))


def test_ratios_and_the_best_rival():
    t = module("tables")
    r = result(OURS, SAME, FAST, STOCK)
    lines = t.ratio_table(r, OURS).splitlines()
    assert lines[2].split() == ["llama.cpp", "Q4_1", "4.00x", "-", "0.50x"]
    assert lines[3].split() == ["llama.cpp", "F32", "1.33x", "-", "-"]
    assert lines[4].split() == ["stock", "MLX", "fp32", "-", "-", "16.00x"]
    prefill, decode = t.verdicts(r, OURS)
    assert "4.00x llama.cpp on the same weights (Q4_1), 1.33x llama.cpp F32" in prefill
    assert "0.50x llama.cpp Q4_1, 16.00x stock MLX fp32" in decode


def test_gflops_against_the_first_peak_that_was_measured():
    t = module("tables")
    r = result(OURS, SAME, PEAK)
    assert t.peak_gflops(r, OURS["peak"], 100) == ("fp32", pytest.approx(250))
    assert t.gflops(r, OURS, 100) == pytest.approx(200)
    shown = t.flops_table(r)
    assert "200 (80% of fp32)" in shown
    assert shown.splitlines()[-1].split() == ["llama.cpp", "Q4_1", "50", "-"]  # no peak of its type


def test_the_largest_loss_is_what_the_peak_does_not_explain():
    t = module("tables")
    ops = {"mlp": 0.25, "attention": 0.2, "norm": 0.1, "qkv": 0.16, "rest": 0.05}
    profiles = {OURS["name"]: {"100": {"total": 0.76, "ops": ops}}}
    rows, sentence = t.profile_rows(result(OURS, PEAK, profiles=profiles), OURS, 100)
    assert rows[0] == ("mlp", "250.0", "33%", "200")
    assert sentence == "largest loss at 100 tokens: attention, 120 ms of 760 beyond the fp32 peak"


def test_everything_missing_still_makes_tables():
    t = module("tables")
    missing = [contender(f"PyTorch {d}", "PyTorch", ["fp32"], why="no network") for d in "ab"]
    shown = t.show(result(contender("cleave native Q4_1", "cleave", ["fp32"], why="x"), *missing))
    assert "PyTorch a, PyTorch b: no network" in shown


def test_a_coarser_precision_shows_its_error():
    t = module("tables")
    ready = "cleave 1 native; cpu: oneDNN; precision int8: products differ by 2%"
    ours = contender("cleave int8 Q4_1", "cleave", ["s8"], ready=ready, p100=[0.1])
    shown = t.show(result(OURS, ours, SAME))
    assert "cleave int8 Q4_1: int8: products differ by 2%" in shown
    assert "100 tokens: cleave int8 Q4_1 is 24.00x llama.cpp on the same weights (Q4_1)" in shown
    assert "100 tokens: cleave native Q4_1 is 4.00x" in shown


# ---- workers ----------------------------------------------------------------------------------------

FAKE = """
import os, sys, time
sys.path.insert(0, {rivals!r})
from serve import serve

def load():
    print("noise")  # must not reach the protocol
    {load}
    return "fake", {{
        "prefill": lambda n: n / 1000,
        "decode": lambda n: [1.0, 2.0],
        "slow": lambda n: time.sleep(60),
        "wrong": lambda n: 1 // 0,
        "die": lambda n: os._exit(3),
    }}

serve(load)
"""


@pytest.fixture
def fake(tmp_path):
    def command(load="pass"):
        file = tmp_path / f"fake{len(list(tmp_path.glob('fake*')))}.py"
        file.write_text(textwrap.dedent(FAKE.format(rivals=str(BENCHMARKS / "rivals"), load=load)))
        return [sys.executable, file]

    return command


def test_a_worker_answers_and_says_what_went_wrong(fake, tmp_path):
    worker_module = module("worker")
    worker = worker_module.Worker(fake(), 1, tmp_path / "log")
    try:
        assert worker.ready == "fake"
        assert worker.run("prefill", 512, 10) == {"seconds": [0.512]}
        assert worker.run("decode", 8, 10) == {"seconds": [1.0, 2.0]}
        with pytest.raises(worker_module.WorkerError, match="ZeroDivisionError"):
            worker.run("wrong", 1, 10)
        assert worker.run("prefill", 1, 10) == {"seconds": [0.001]}  # it goes on
        with pytest.raises(worker_module.WorkerError, match="ended with code 3"):
            worker.run("die", 1, 10)
        assert worker.ended
    finally:
        worker.close()
    assert b"noise" in (tmp_path / "log").read_bytes()


def test_a_worker_that_is_late_is_ended(fake, tmp_path):
    worker_module = module("worker")
    worker = worker_module.Worker(fake(), 1, tmp_path / "log")
    begin = time.monotonic()
    with pytest.raises(worker_module.WorkerError, match="no answer within"):
        worker.run("slow", 1, 0.2)
    assert worker.ended and time.monotonic() - begin < 10


def test_a_contender_that_does_not_start_is_a_reason(fake, tmp_path):
    contest = module("contest")
    broken = contest.Contender("a", "PyTorch", command=fake("raise OSError('no weights here')"))
    absent = contest.Contender("b", "PyTorch", command=[tmp_path / "none"])
    large = contest.Contender("c", "PyTorch", command=fake(), gigabytes=1e6)
    never = contest.Contender("d", "PyTorch", why="not installed")
    for c in (broken, absent, large, never):
        c.start(1, tmp_path / "log")
        c.sample("prefill", 1, 10)
        c.stop()
        assert not c.samples
    assert "no weights here" in broken.why
    assert "No such file" in absent.why
    assert "1000000.0 GB of memory" in large.why
    assert never.why == "not installed"


def test_a_contender_that_was_late_once_goes_on(fake, tmp_path):
    late = module("contest").Contender("a", "cleave", command=fake(), warm_ups=0)
    late.start(1, tmp_path / "log")
    try:
        late.sample("slow", 1, budget=2)  # a request may take half of it
        assert "slow of 1 tokens: no answer within 1 s" in late.why
        late.sample("slow", 1, budget=2)
        late.sample("prefill", 512, budget=2)
        assert late.samples == {("prefill", 512): [0.512]}
    finally:
        late.stop()


class Scripted:
    """A worker without a process, that notes its requests."""

    ended = False

    def __init__(self, log, name, seconds=0.0):
        self.log, self.name, self.seconds = log, name, seconds

    def run(self, what, tokens, seconds):
        self.log.append((self.name, what, tokens))
        return {"seconds": [self.seconds * tokens]}


def test_contenders_take_turns_within_their_budget(monkeypatch):
    contest, log = module("contest"), []
    monkeypatch.setattr(contest, "PAUSE", 0)
    a, b = (contest.Contender(n, "cleave", warm_ups=0) for n in "ab")
    stock = contest.Contender("s", "stock MLX", longest=10, decode=4, rounds=1, warm_ups=0)
    a.worker, b.worker, stock.worker = (Scripted(log, c.name) for c in (a, b, stock))
    contest.compete([a, b, stock], [10, 20], 2, 100, lambda text: None)
    first = [("a", 10), ("b", 10), ("s", 10), ("a", 20), ("b", 20), ("a", 32), ("b", 32), ("s", 4)]
    second = [("b", 10), ("a", 10), ("b", 20), ("a", 20), ("b", 32), ("a", 32)]
    assert [(n, t) for n, _, t in log] == first + second
    assert len(a.samples["prefill", 20]) == 2 and len(stock.samples["decode", 4]) == 1


def test_a_sample_that_would_pass_the_budget_is_not_taken():
    contest, log = module("contest"), []
    slow = contest.Contender("a", "cleave", warm_ups=1)
    slow.worker = Scripted(log, "a", seconds=1.0)  # a second a token
    slow.sample("prefill", 10, budget=100)
    assert len(log) == 2 and slow.samples["prefill", 10] == [10.0]  # a warm-up, thrown away
    slow.sample("prefill", 60, budget=100)  # 120 s with its warm-up
    assert len(log) == 2 and "budget of 100 s" in slow.why


# ---- set-up -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line,wrong",
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", True),
        ("g++ (GCC) 12.4.0", False),
        ("g++ (GCC) 13.2.1 20230801", True),
        ("g++ (Ubuntu 13.3.0-6ubuntu2) 13.3.0", False),
        ("c++ (GCC) 14.1.1 20240522 (Red Hat 14.1.1-4)", False),
        ("Debian clang version 14.0.6", False),
    ],
)
def test_compilers_that_drop_amx_configurations(line, wrong):
    assert module("setup").amx_is_miscompiled(line) == wrong


def test_the_list_names_the_source_package_apart():
    source, wheels = module("setup").requirements()
    assert source.startswith("llama-cpp-python==")
    assert not any("llama" in w for w in wheels) and any(w.startswith("torch==") for w in wheels)


def test_the_docs_section_is_replaced(monkeypatch, tmp_path):
    bench = importlib.import_module("bench_cpu")
    page = tmp_path / "measurements.md"
    monkeypatch.setattr(bench, "PAGE", page)
    page.write_text("# Measurements\n\nbefore\n")
    for text in ("one", "two"):
        bench.write_docs(f"{bench.BEGIN}\n{text}\n{bench.END}")
    assert page.read_text() == (f"# Measurements\n\nbefore\n\n{bench.BEGIN}\ntwo\n{bench.END}\n")


@pytest.mark.parametrize(
    "argv", [["--models", "none"], ["--threads", "9999"], ["--lengths", "0"], ["--lengths", "a"]]
)
def test_bad_options_are_refused(argv, capsys):
    bench = importlib.import_module("bench_cpu")
    with pytest.raises(SystemExit) as stopped:
        bench.arguments(argv)
    assert stopped.value.code == 2 and "error:" in capsys.readouterr().err
