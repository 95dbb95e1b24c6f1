"""All contenders on one model and one number of threads: their processes, and samples taken in turn."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rivals.worker import Worker, WorkerError

PAUSE = 0.05  # seconds between samples, in which the last contender's threads stop spinning
JOB_SHARE = 1 / 2  # of a contender's budget: the longest that one request may take
START_SECONDS = 120  # in which a contender must be loaded


@dataclass
class Contender:
    """One configuration of cleave or of a rival, and what was measured of it.

    Attributes:
        family: "cleave", "llama.cpp", "PyTorch", "stock MLX" or "oneDNN", the peak.
        peak: names of the peaks that its products are held against, the first one that this processor has.
        command: starts its worker (serve.py); None with `why` for one that is not to be had.
        gigabytes: memory that it needs.
        longest: the longest prefill it is asked for, None: no limit; decode: tokens of a decode, 0: none.
        rounds: samples of each, None: all; warm_ups: first calls that are thrown away.
        extra_seconds: added to the budget, as for a compiler.
        samples: (what, tokens) -> seconds of each sample.
        why: why something, or all, was not measured; given_up: the jobs that failed.
    """

    name: str
    family: str
    peak: tuple = ()
    command: list | None = None
    environment: dict = field(default_factory=dict)
    gigabytes: float = 0.0
    longest: int | None = None
    decode: int = 32
    rounds: int | None = None
    warm_ups: int = 1
    extra_seconds: float = 0.0
    why: str = ""
    ready: str = ""
    samples: dict = field(default_factory=dict)
    given_up: set = field(default_factory=set)
    used: float = 0.0
    worker: Worker | None = None
    start_again: Callable = lambda: None

    def start(self, threads: int, log: Path) -> None:
        if self.command is None:
            return
        free = free_gigabytes()
        if self.gigabytes > free:
            self.why = f"it needs {self.gigabytes:.1f} GB of memory and {free:.1f} are free"
            return
        self.start_again = lambda: self.start(threads, log)
        try:
            self.worker = Worker(self.command, threads, log, self.environment, START_SECONDS)
            self.ready = self.worker.ready
        except (WorkerError, OSError) as error:
            self.why = self.why or str(error)

    def stop(self) -> None:
        if self.worker:
            self.worker.close()
            self.worker = None

    def expected(self, what: str, tokens: int) -> float:
        """Seconds that the next sample should take, by the slowest rate seen; 0 if none was."""
        seen = self.samples.get((what, tokens))
        if seen:
            return max(seen)
        rates = [max(s) / n for (w, n), s in self.samples.items() if w == what and s]
        return max(rates, default=0.0) * tokens * (1 + self.warm_ups)

    def sample(self, what: str, tokens: int, budget: float) -> None:
        """Takes one sample unless it would pass the budget; what goes wrong becomes `why`, and is not tried again."""
        left = budget + self.extra_seconds - self.used
        if self.worker is None or (what, tokens) in self.given_up:
            return
        if left <= 0 or self.expected(what, tokens) > left:
            self.why = self.why or f"not all samples: its budget of {self.used + left:.0f} s"
            return
        begin = time.monotonic()
        try:
            limit = min(left, budget * JOB_SHARE + self.extra_seconds)
            for _ in range(0 if (what, tokens) in self.samples else self.warm_ups):
                self.worker.run(what, tokens, limit)
            seconds = self.worker.run(what, tokens, limit)["seconds"]
            self.samples.setdefault((what, tokens), []).extend(seconds)
        except WorkerError as error:
            self.given_up.add((what, tokens))
            self.why = self.why or f"{what} of {tokens} tokens: {error}"
            if self.worker.ended:
                self.stop()
                self.start_again()
        finally:
            self.used += time.monotonic() - begin


def free_gigabytes() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1e6
    return float("inf")


def jobs_of(contender: Contender, lengths: list, round_: int) -> list:
    """(what, tokens) in a round: the lengths it goes to, then decode; the peak decodes nothing."""
    if contender.rounds is not None and round_ >= contender.rounds:
        return []
    jobs = [("prefill", n) for n in lengths if not contender.longest or n <= contender.longest]
    return jobs + ([("decode", contender.decode)] if contender.decode else [])


def compete(contenders: list, lengths: list, rounds: int, budget: float, say) -> None:
    """Rounds of one sample of everything: A B C, then C B A, so that a drift of the machine meets all alike."""
    for i in range(rounds):
        for what in [*lengths, "decode"]:
            say(f"round {i + 1} of {rounds}: {what if what == 'decode' else f'{what} tokens'}")
            for c in contenders if i % 2 == 0 else reversed(contenders):
                for job in jobs_of(c, lengths, i):
                    if what == (job[1] if job[0] == "prefill" else "decode"):
                        time.sleep(PAUSE)
                        c.sample(*job, budget)
