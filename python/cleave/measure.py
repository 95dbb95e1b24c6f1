"""Prefill and greedy decoding, timed: what demo, bench and the benchmarks share."""

import time
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from cleave.models import logits_of, text_model


@dataclass
class Prefill:
    seconds: float
    logits: mx.array  # [1, tokens, vocabulary]
    cache: list


def prefill(model, ids: list, keep_logits: bool = True) -> Prefill:
    """One pass over all ids with a fresh KV cache, all logits evaluated."""
    lm = text_model(model)
    cache = make_prompt_cache(lm)
    begin = time.perf_counter()
    logits = logits_of(lm(mx.array(ids)[None], cache=cache))
    mx.eval(logits, [c.state for c in cache])
    took = time.perf_counter() - begin
    return Prefill(took, logits if keep_logits else None, cache)


def greedy(model, start: Prefill, count: int) -> list:
    """``count`` tokens that follow a prefill; uses up its cache."""
    lm = text_model(model)
    token = mx.argmax(start.logits[:, -1], -1)
    out = [token.item()]
    while len(out) < count:
        logits = logits_of(lm(token[None], cache=start.cache))
        token = mx.argmax(logits[:, -1], -1)
        out.append(token.item())
    return out


def estimate_prefill(model, ids: list, tokens: int) -> float:
    """Seconds that a prefill of ``tokens`` would take, from short ones: linear in the length, so an
    under-estimate where attention weighs."""
    count = 1
    while True:
        took = prefill(model, ids[:count], keep_logits=False).seconds
        if took > 0.5 or count * 2 > min(tokens, 64):
            return took * tokens / count
        count *= 2


@dataclass
class Samples:
    """Times of one contender, in seconds."""

    seconds: list = field(default_factory=list)

    @property
    def median(self) -> float:
        s = sorted(self.seconds)
        middle = len(s) // 2
        return s[middle] if len(s) % 2 else (s[middle - 1] + s[middle]) / 2

    @property
    def spread(self) -> float:
        """(largest - smallest) / median"""
        return (max(self.seconds) - min(self.seconds)) / self.median if self.seconds else 0.0

    def __str__(self) -> str:
        ms = self.median * 1e3
        spread = f" ±{self.spread / 2:.0%}" if len(self.seconds) > 1 else ""
        return f"{ms:.1f} ms{spread} ({len(self.seconds)}x)"
