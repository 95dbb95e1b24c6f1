"""Where cleave's RMSNorm, RoPE and attention stand in for mlx's: in long calls of a patched model, and nowhere else."""

import threading

import mlx.core as mx
import pytest
from conftest import close, make_model, tokens

import cleave
from cleave import _core, fast_ops

pytestmark = pytest.mark.skipif(not _core.ops_serve(), reason="of a main on the CPU")

NAMES = ("rms_norm", "rope", "scaled_dot_product_attention")
SPLIT = {"units": "main,cpu", "shares": [0.4, 0.6], "min_rows": 64}
LONG, SHORT = tokens(64), tokens(63)


@pytest.fixture
def calls(monkeypatch):
    """Names of cleave's ops, a line for each call of one."""
    seen = []

    def watched(name, function):
        return lambda *args: seen.append(name) or function(*args)

    for name in ("rms_norm", "attention"):
        monkeypatch.setattr(fast_ops._core, name, watched(name, getattr(_core, name)))
    return seen


@pytest.fixture
def nobody_patched(monkeypatch):
    """As in a new process: other tests may have dropped a model while it was patched."""
    monkeypatch.setattr(fast_ops, "_users", 0)
    for name, function in fast_ops._originals.items():
        monkeypatch.setattr(mx.fast, name, function)


@pytest.fixture
def patched(nobody_patched):
    """Function that gives a patched model; it is unpatched in the end."""
    models = []

    def make():
        models.append(make_model())
        cleave.patch_model(models[-1], **SPLIT)
        return models[-1]

    yield make
    for model in models:
        if "_cleave_report" in model.__dict__:
            cleave.unpatch_model(model)


def functions() -> list:
    return [getattr(mx.fast, name) for name in NAMES]


def norm_alone() -> mx.array:
    """A call that is no model's."""
    return mx.fast.rms_norm(mx.ones((64, 8)), mx.ones(8), 1e-5)


def test_they_are_exchanged_for_the_first_model_and_put_back_after_the_last(patched):
    originals = functions()
    first, second = patched(), patched()
    assert all(a is not b for a, b in zip(functions(), originals))
    cleave.unpatch_model(first)
    assert all(a is not b for a, b in zip(functions(), originals))
    cleave.unpatch_model(second)
    assert functions() == originals


def test_they_serve_long_calls_of_patched_models_alone(patched, calls):
    model, other = patched(), make_model()
    mx.eval(model(LONG))
    assert calls.count("rms_norm") == 5 and calls.count("attention") == 2  # of two layers
    calls.clear()
    mx.eval(model(SHORT), other(LONG), norm_alone())
    assert calls == []
    cleave.unpatch_model(model)
    mx.eval(model(LONG))
    assert calls == []


def test_after_an_exception_the_scope_is_left(patched, calls, monkeypatch):
    model = patched()

    class Broken:
        def __call__(self, *args, **kwargs):
            mx.eval(norm_alone())
            raise KeyError("broken")

    monkeypatch.setattr(model.model, "norm", Broken())
    with pytest.raises(KeyError, match="broken"):
        model(LONG)
    assert "rms_norm" in calls
    calls.clear()
    mx.eval(norm_alone())
    assert calls == []


def test_a_failed_patch_leaves_mlx_as_it_was():
    originals = functions()
    with pytest.raises(ValueError):
        cleave.patch_model(make_model(), units="warp")
    assert functions() == originals


def test_leaving_an_inner_scope_keeps_the_outer_one(patched, calls):
    patched()
    with fast_ops.Scope():
        with fast_ops.Scope():
            norm_alone()
        norm_alone()
        assert calls == ["rms_norm"] * 2
    norm_alone()
    assert calls == ["rms_norm"] * 2


def test_a_scope_is_of_its_own_thread(patched, calls):
    """Each thread calls while the other one is inside, or just outside."""
    patched()
    counts = {}
    inside, counted = threading.Barrier(2, timeout=30), threading.Barrier(2, timeout=30)

    def other():
        inside.wait()
        norm_alone()
        counts["beside"] = len(calls)
        counted.wait()

    thread = threading.Thread(target=other)
    thread.start()
    with fast_ops.Scope():
        inside.wait()
        counted.wait()
        norm_alone()
    thread.join()
    assert counts["beside"] == 0 and len(calls) == 1


def test_two_threads_with_a_patched_model_each(patched):
    """A model's results do not depend on what another thread does. Streams are a thread's own."""
    models = [patched(), patched()]
    expected = models[0](LONG)
    mx.eval(expected)
    wrong = []

    def work(model):
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(5):
                logits = model(LONG)
                mx.eval(logits)
                if not close(logits, expected):
                    wrong.append(model)

    threads = [threading.Thread(target=work, args=(m,)) for m in models]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert wrong == [] and not any(t.is_alive() for t in threads)


def test_what_cleave_has_no_kernel_for_stays_with_mlx(patched, calls):
    patched()
    q, k = mx.random.normal((1, 4, 9, 16)), mx.random.normal((1, 2, 9, 16))
    expected = mx.fast.scaled_dot_product_attention(q, k, k, scale=0.3, mask="causal")
    causal = mx.tri(9, dtype=mx.bool_)
    with fast_ops.Scope():
        mx.fast.rms_norm(q, None, 1e-5, stream=mx.cpu)
        masked = mx.fast.scaled_dot_product_attention(q, k, k, scale=0.3, mask=causal)
        rope = {"traditional": False, "base": 1e4, "scale": 1.0}
        by_array = mx.fast.rope(q, 16, offset=mx.array(3), **rope)
        by_number = mx.fast.rope(q, 16, offset=3, **rope)
        assert calls == []
        own = mx.fast.scaled_dot_product_attention(q, k, k, scale=0.3, mask="causal")
        assert calls == ["attention"]
    assert close(masked, expected) and close(own, expected) and close(by_number, by_array)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("freqs", [None, mx.array([1.0, 3.0, 10.0, 70.0])])
def test_rope_is_that_of_mlx(patched, traditional, freqs):
    x = mx.random.normal((2, 3, 5, 10))
    how = {"traditional": traditional, "base": None if freqs is not None else 1e4, "scale": 0.5}
    expected = mx.fast.rope(x, 8, offset=7, freqs=freqs, **how)
    patched()
    with fast_ops.Scope():
        assert close(mx.fast.rope(x, 8, offset=7, freqs=freqs, **how), expected)
