"""Stock MLX, cleave's runner and a patched mlx_lm model read one prompt, in turn, and continue it."""

import time

import cleave
from cleave._load import _core
from cleave.measure import Samples, greedy, prefill
from cleave.team import MIN_ROWS


class Contender:
    """One way to read the prompt.

    Attributes:
        name: for people.
        samples: the times of its rounds.
        logits, tokens: of its first round, tokens as many as it was asked to continue with.
        report, shown: cleave's report after that, as a dict and as text; None of stock MLX.
    """

    report = shown = _live = None

    def __init__(self, name: str, continues: int):
        self.name, self._continues = name, continues
        self.samples, self.logits, self.tokens = Samples(), None, []

    def round(self, ids: list) -> None:
        first = self.logits is None
        seconds, logits, rest = self._read(ids)
        self.samples.seconds.append(seconds)
        if first:
            self.logits = logits
            self.tokens = rest(self._continues) if self._continues else []
            if self._live:
                self.report, self.shown = self._live.as_dict(), str(self._live)

    def _read(self, ids: list) -> tuple:
        """-> (seconds, logits of all ids, a function that continues them by a count of tokens)"""
        raise NotImplementedError


class Stock(Contender):
    """A model of mlx_lm or mlx_vlm, as it is."""

    def __init__(self, name: str, continues: int, model):
        super().__init__(name, continues)
        self._model = model

    def _read(self, ids):
        if "_cleave_report" in self._model.__dict__:  # the patched contender has the same model
            cleave.unpatch_model(self._model)
        return _by_mlx_lm(self._model, ids)


class Patched(Contender):
    """The same, its linear layers split by patch_model."""

    def __init__(self, name: str, continues: int, model, units, shares):
        super().__init__(name, continues)
        self._model, self._options = model, {"units": units, "shares": shares}

    def _read(self, ids):
        if "_cleave_report" not in self._model.__dict__:
            self._live = cleave.patch_model(
                self._model, seq=len(ids), min_rows=min(MIN_ROWS, len(ids)), **self._options
            )
            prefill(self._model, ids[:MIN_ROWS], keep_logits=False)  # warm-up
            self._live.reset()
        return _by_mlx_lm(self._model, ids)


class Native(Contender):
    """The native decoder. Raises ValueError for a model that it does not know."""

    def __init__(self, name: str, continues: int, folder, tile: int, units, shares):
        super().__init__(name, continues)
        self._runner = cleave.Runner(folder, units=units, shares=shares, tile=tile)
        self._live = self._runner.report

    def _read(self, ids):
        if self.logits is None:
            self._runner.logits(ids[:MIN_ROWS])  # warm-up
            self._live.reset()
        begin = time.perf_counter()
        session = _core.Session(self._runner._decoder)
        logits = session.feed_for_logits(ids)
        seconds = time.perf_counter() - begin
        return seconds, logits, lambda count: [session.next() for _ in range(count)]


def hold(stock: Contender, others: list, ids: list, rounds: int, seconds: float, say) -> None:
    """All contenders in turn, round by round; stock only as long as its runs fit into ``seconds``."""
    used = 0.0
    for i in range(rounds):
        say(f"sample {i + 1}")
        if used + used / max(i, 1) <= seconds:
            begin = time.perf_counter()
            stock.round(ids)
            used += time.perf_counter() - begin
        for contender in others:
            contender.round(ids)


def _by_mlx_lm(model, ids: list) -> tuple:
    result = prefill(model, ids)
    return result.seconds, result.logits, lambda count: greedy(model, result, count)
