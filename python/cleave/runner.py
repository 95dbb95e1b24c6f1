"""Runner: a model folder or GGUF file in the native decoder, its prefill on all units."""

import operator
import time
from random import Random

import mlx.core as mx

from cleave._load import _core
from cleave.balance import OneToken
from cleave.report import SiteCounts
from cleave.team import MIN_ROWS, Team

PROBE_TOKENS, PROBE_TOKENS_MOST = 64, 2048  # of the prompt that errors are measured on


class Runner:
    """A decoder of the Llama, Qwen2, Qwen3 or Qwen3-VL-text kind, without mlx_lm.

    Its numbers are those of mlx_lm on the same folder. ``report`` says what the units did.
    """

    def __init__(
        self, path, units="auto", shares=None, tile: int = 512, min_rows=None, precision="exact"
    ):
        """Reads the model at ``path``.

        Args:
            path: a model folder in the form of mlx_lm or Hugging Face, or a .gguf file.
            units, shares, precision: those of :func:`cleave.patch_model`.
            tile: tokens that the programs are tuned for; any other length works too.
            min_rows: calls with fewer tokens run main's ops. None: 192, but 1, decode included,
                where main is a CPU that a short measurement finds slower at one token too.

        Raises:
            ValueError: a model that is missing, damaged or of another kind, an unknown unit or
                precision, or shares that are not legal; one sentence that names what it is.
            RuntimeError: a unit that this machine lacks.
        """
        for name, value, least in (("tile", tile, 1), ("min_rows", min_rows, 0)):
            if value is not None and (type(value) is not int or not least <= value < 2**31):
                raise ValueError(
                    f"[Runner] got {name} {value!r} and needs a number of tokens of at least {least}"
                )
        begin = time.perf_counter()
        team = Team("Runner", units, shares, tile, precision)
        one_token = None
        if min_rows is None and mx.default_device() == mx.cpu:
            one_token = OneToken(precision)
        self._load(
            str(path),
            team,
            1 if one_token else MIN_ROWS if min_rows is None else min_rows,
            one_token,
        )
        if one_token and not one_token.split_wins:
            self.report.min_rows = MIN_ROWS
            for site in self._decoder.sites:
                site.set_min_rows(MIN_ROWS)
        if precision != "exact":
            self._measure_errors()
        self.report.load_seconds = time.perf_counter() - begin

    def _load(self, path: str, team: Team, min_rows: int, one_token: OneToken | None) -> None:
        """Sets decoder and report; tells one_token of each site."""
        kept_on_main = {}

        def choose(site, weight):
            try:
                shares, reason = team.shares(weight)
                if shares is not None and one_token:
                    one_token.add(weight, shares)
            except (ValueError, RuntimeError) as e:
                shares, reason = None, str(e)
            if shares is None:
                kept_on_main[site] = reason
            return shares or []

        self._decoder = _core.load_decoder(
            path, choose, team.seq, min_rows, precision=team.precision
        )
        self.report = team.report("auto", min_rows)
        for site in self._decoder.sites:
            info = site.report()
            if info["splits"]:
                self.report.add(SiteCounts(site))
            else:
                reason = kept_on_main.get(info["name"]) or "; ".join(info["refusals"])
                self.report.refused.append((info["name"], reason or "all its rows are main's"))
        self.report.verify_main_rows()
        self.report.fast_ops = _core.ops_serve()

    def _measure_errors(self) -> None:
        """Lets each site see activations, so that its error is known, and the cost of knowing paid,
        before the first prompt."""
        context = self.config.context or PROBE_TOKENS_MOST
        count = min(max(PROBE_TOKENS, self.report.min_rows), context, PROBE_TOKENS_MOST)
        random = Random(0)
        ids = [random.randrange(self.config.vocab) for _ in range(count)]
        _core.Session(self._decoder).feed_for_logits(ids)
        self.report.reset()

    @property
    def config(self) -> "_core.ModelConfig":
        """model_type, vocab, context (0: not limited), layers and end_tokens."""
        return self._decoder.config

    @property
    def nbytes(self) -> int:
        """Bytes of the model's own arrays, without what partners hold."""
        return self._decoder.nbytes

    def logits(self, ids) -> mx.array:
        """ids, S token ids -> logits [1, S, vocab] of every position, evaluated.

        Raises ValueError for no ids, ids outside the vocabulary or more than the context.
        """
        return _core.Session(self._decoder).feed_for_logits(self._checked(ids))

    def generate(
        self,
        ids,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
        progress=None,
    ) -> "Generation":
        """Reads ids and continues them. The work is done as the result is iterated.

        Args:
            ids: the prompt's token ids.
            max_tokens: at most so many are generated; 0 reads the prompt only.
            temperature, top_p, top_k: as in mlx_lm's make_sampler; temperature 0 is greedy.
            seed: of the sampling.
            progress: called with the number of prompt tokens read, after each chunk of 2048.
                What it raises ends the reading there.

        Raises:
            ValueError: no ids, ids outside the vocabulary, a prompt longer than the context, or a
                number out of range.
        """
        if type(max_tokens) is not int or max_tokens < 0:
            raise ValueError(
                f"[generate] got max_tokens {max_tokens!r} and needs a number of at least 0"
            )
        if type(seed) is not int or not 0 <= seed < 2**64:
            raise ValueError(f"[generate] got seed {seed!r} and needs a number from 0 to 2^64 - 1")
        session = _core.Session(self._decoder, temperature, top_p, top_k, seed)
        return Generation(session, self.config, self._checked(ids), max_tokens, progress)

    def _checked(self, ids) -> list:
        """ids as a list of ints that the decoder can read."""
        vocab = self.config.vocab
        try:
            ids = [operator.index(i) for i in (ids.tolist() if hasattr(ids, "tolist") else ids)]
        except TypeError:
            raise ValueError("[prefill] got ids of another kind and needs a list of ints") from None
        for i in ids:  # here, since not every int fits C++'s
            if not 0 <= i < vocab:
                raise ValueError(f"[prefill] got token id {i} and needs ids from 0 to {vocab - 1}")
        _core.check_ids(ids, self.config)
        return ids


class Generation:
    """An iterator over generated token ids; the end token is not among them.

    Attributes:
        prompt_tokens: how many ids were read.
        tokens: the ids generated so far.
        prefill_s: seconds of reading them, the logits of the last included.
        first_token_s: the same with the choice of the first token; None before it.
        decode_s: seconds spent on the tokens after the first.
        finish: why it ended: "end" (of the answer), "length" (max_tokens), "context" (it is full),
            or None before.
    """

    def __init__(self, session, config, ids: list, max_tokens: int, progress):
        self.prompt_tokens = len(ids)
        self.tokens: list = []
        self.prefill_s = self.first_token_s = self.finish = None
        self.decode_s = 0.0
        self._steps = self._run(session, config, ids, max_tokens, progress)

    def __iter__(self):
        return self

    def __next__(self) -> int:
        return next(self._steps)

    @property
    def prefill_tokens_per_s(self):
        """None before the prompt is read."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self):
        """Of the tokens after the first; None before there are two."""
        return self._steps_taken / self.decode_s if self.decode_s else None

    _steps_taken = 0  # the end token is one too

    def _run(self, session, config, ids, max_tokens, progress):
        begin = time.perf_counter()
        expected = len(ids) + max_tokens
        session.feed(ids, min(expected, config.context or expected), progress)
        self.prefill_s = time.perf_counter() - begin
        end_tokens = set(config.end_tokens)
        while len(self.tokens) < max_tokens:
            full = config.context and session.length >= config.context
            step = time.perf_counter()
            token = session.next()
            now = time.perf_counter()
            if self.first_token_s is None:
                self.first_token_s = now - begin
            else:
                self.decode_s += now - step
                self._steps_taken += 1
            if token in end_tokens:
                self.finish = "end"
                return
            self.tokens.append(token)
            yield token
            if full:
                self.finish = "context"
                return
        self.finish = "length"
