"""How close the native runner is to float32 on real weights and real text.

The other side is a forward pass in numpy on the same weights, unpacked: float32 from the first sum to the last.
"""

import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from llama_in_numpy import Llama

import cleave
from cleave.quality import compare
from cleave.tokenizer import load_tokenizer

TEXT = Path(__file__).parents[2] / "data" / "origin_of_species.txt"
TOKENS = 512
CONTINUED = 64
# Logits of the folder as published are float16, of about 1e-2 where they are 8 to 32, and so are its activations.
FLOAT16_TIE = 2e-2
QUESTIONS = (
    "Why is the sky blue?",
    "Name three oceans.",
    "Write a short poem about rain.",
    "What is 17 plus 25?",
    "How do I boil an egg?",
    "Explain what a fossil is to a child.",
    "Translate 'good morning' into French.",
    "Who wrote Hamlet?",
)


@pytest.fixture(scope="module")
def reference(smollm2):
    return Llama(smollm2)


@pytest.fixture(scope="module")
def in_float32(smollm2, tmp_path_factory):
    """The same packed weights with float32 scales, so that every activation is float32."""
    folder = tmp_path_factory.mktemp("float32") / "model"
    shutil.copytree(smollm2, folder)
    weights = mx.load(str(smollm2 / "model.safetensors"))
    wide = {k: a if a.dtype == mx.uint32 else a.astype(mx.float32) for k, a in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide)
    return cleave.Runner(folder)


@pytest.fixture(scope="module")
def as_published(smollm2):
    return cleave.Runner(smollm2)


@pytest.fixture(scope="module")
def continued(smollm2, reference) -> list:
    """(prompt, the 64 tokens that follow by the reference, the logits that they were chosen from) of the beginnings of
    twelve sentences of Darwin and of eight questions in the model's chat form."""
    tokenizer = load_tokenizer(smollm2)
    sentences = TEXT.read_text(encoding="utf-8").replace("\n", " ").split(". ")
    begun = [" ".join(s.split()[:12]) for s in sentences if len(s.split()) > 12][:12]
    chats = [tokenizer.chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    prompts = [tokenizer.encode(b) for b in begun] + chats
    assert len(prompts) == 20
    return list(zip(prompts, *reference.greedy(prompts, CONTINUED)))


@pytest.fixture(scope="module")
def text(smollm2, reference) -> tuple:
    """-> (512 tokens of Darwin, the reference's logits of them)"""
    ids = load_tokenizer(smollm2).encode(TEXT.read_text(encoding="utf-8"))[:TOKENS]
    return ids, mx.array(reference.logits(ids))


def logits_of_the_answer(runner, prompt: list, answer: list) -> np.ndarray:
    """Where the runner would choose each token of the answer, had it chosen those before: if the largest is the answer's
    at each place, then its own greedy answer is this one."""
    logits = runner.logits(prompt + answer[:-1])[0, len(prompt) - 1 :]
    return np.array(logits.astype(mx.float32))


# ---- exact, the default --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runner, cos, largest",
    [("in_float32", 1 - 1e-9, 1e-3), ("as_published", 0.9999, 0.5)],
)
def test_logits_of_a_real_text(runner, cos, largest, request, text):
    ids, expected = text
    got = compare(request.getfixturevalue(runner).logits(ids)[0], expected)
    assert got["cos"] >= cos and got["max_abs"] <= largest, got
    assert got["rms_ratio"] == pytest.approx(1, abs=1e-3) and got["top1"] >= 0.99, got


def test_greedy_tokens_are_those_of_float32(in_float32, continued):
    for prompt, answer, _ in continued:
        chosen = logits_of_the_answer(in_float32, prompt, answer).argmax(-1)
        assert chosen.tolist() == answer, prompt


def test_tokens_one_by_one_are_those_of_float32(in_float32, continued):
    """The other kernels, those of one token, on four of the prompts; the runner alone stops at the end token."""
    for prompt, answer, _ in continued[::6]:
        tokens = list(in_float32.generate(prompt, CONTINUED))
        assert tokens == answer[: len(tokens)], prompt
        assert len(tokens) == CONTINUED or answer[len(tokens)] in in_float32.config.end_tokens


def test_greedy_tokens_as_published_differ_at_ties_alone(as_published, continued):
    """Of two tokens whose float32 logits lie within float16's rounding, float16 activations may choose the other."""
    for prompt, answer, logits in continued:
        chosen = logits_of_the_answer(as_published, prompt, answer).argmax(-1)
        places = np.arange(CONTINUED)
        lost = logits[places, answer] - logits[places, chosen]
        assert lost.max() < FLOAT16_TIE, (prompt, lost)
