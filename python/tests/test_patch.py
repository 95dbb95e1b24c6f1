"""The contracts of patch_model, each by name."""

import copy
import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import close, identical, make_model, tokens
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import cleave
from cleave.measure import greedy, prefill

SPLIT = {"units": "main,cpu", "shares": [0.4, 0.6], "seq": 128}


def test_calls_below_min_rows_run_the_original_modules_bit_for_bit(model):
    expected = [model(tokens(n)) for n in (1, 5, 191)]
    report = cleave.patch_model(model, **SPLIT)
    for n, e in zip((1, 5, 191), expected):
        assert identical(model(tokens(n)), e)
    assert report.engaged == 0 and all(s["engaged"] == 0 for s in report.sites)
    model_out = model(tokens(192))
    mx.eval(model_out)
    assert report.engaged == len(report.sites)


@pytest.mark.parametrize("length", [191, 192, 193, 255, 256, 257, 511, 513])
def test_lengths_around_thresholds_match(model, length):
    x = tokens(length)
    expected = model(x)
    cleave.patch_model(model, **SPLIT)
    assert close(model(x), expected)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="of a main on the CPU")
def test_min_rows_is_measured_with_the_shares(monkeypatch):
    for times, expected in (((2.0, 1.0), 1), ((1.0, 1.0), 192)):
        monkeypatch.setattr("cleave.balance.one_token", lambda weight, shares, precision: times)
        monkeypatch.setattr(
            "cleave.balance.Balancer.shares",
            lambda self, weight: ([(unit, 1.0) for _, unit in self._units if unit], ""),
        )
        model = make_model()
        outputs = model(tokens(3)), model(tokens(192))
        report = cleave.patch_model(model, "main,cpu")
        assert report.min_rows == expected
        assert close(model(tokens(3)), outputs[0])
        assert bool(report.engaged) == (expected == 1)
        assert close(model(tokens(192)), outputs[1])
        assert report.engaged == len(report.sites)
        cleave.unpatch_model(model)
    report = cleave.patch_model(model, "main,cpu", shares=[0.0, 1.0])
    assert report.min_rows == 192, "who gives shares is not measured"
    cleave.unpatch_model(model)


def test_share_zero_is_the_original_without_calls_or_memory(model):
    x = tokens(200)
    expected = model(x)
    report = cleave.patch_model(model, units="main,cpu", shares=[1.0, 0.0])
    assert identical(model(x), expected)
    assert report.sites == [] and report.memory == {} and report.engaged == 0
    assert "all its rows are main's" in str(report)
    cleave.unpatch_model(model)


def test_batches_and_chunked_prefill_with_growing_cache(model):
    batch = mx.concatenate([tokens(150, 1), tokens(150, 2)])
    expected = model(batch)
    x = tokens(500)

    def chunked(step):
        cache = make_prompt_cache(model)
        outs = [model(x[:, i : i + step], cache=cache) for i in range(0, 500, step)]
        return mx.concatenate(outs, 1)

    whole = model(x)
    cleave.patch_model(model, **SPLIT)
    assert close(model(batch), expected)
    for step in (64, 200, 256, 500):
        assert close(chunked(step), whole, 1e-3)


def test_greedy_tokens_equal_the_unsplit_models(model):
    ids = tokens(220).tolist()[0]
    expected = greedy(model, prefill(model, ids), 16)
    cleave.patch_model(model, **SPLIT)
    assert greedy(model, prefill(model, ids), 16) == expected


def test_nothing_runs_while_the_graph_is_built(model):
    report = cleave.patch_model(model, **SPLIT)
    y = model(tokens(200))
    assert report.engaged == 0
    mx.eval(y)
    assert report.engaged == len(report.sites)


def test_compile_plain_and_shapeless(model):
    lengths = (200, 250, 200)
    expected = [model(tokens(n)) for n in lengths]
    cleave.patch_model(model, **SPLIT)
    compiled = mx.compile(lambda x: model(x))
    for n, e in zip(lengths, expected):
        assert close(compiled(tokens(n)), e)
    layer = model.model.layers[0].mlp
    shapeless = mx.compile(lambda x: layer(x), shapeless=True)
    for n in (200, 300, 193):
        x = mx.random.normal((1, n, 64), key=mx.random.key(n))
        assert close(shapeless(x), type(layer)._original_class.__call__(layer, x))


def test_async_eval_and_many_calls_before_one_eval(model):
    inputs = [tokens(200, seed) for seed in range(4)]
    cleave.patch_model(model, **SPLIT)
    one_by_one = [model(x) for x in inputs]
    for y in one_by_one:
        mx.eval(y)
    together = [model(x) for x in inputs]
    mx.async_eval(*together)
    assert all(identical(a, b) for a, b in zip(together, one_by_one))


def test_threads_share_a_patched_model(model):
    inputs = [tokens(192 + 10 * i, i) for i in range(4)]
    expected = [model(x) for x in inputs]
    mx.eval(expected)
    cleave.patch_model(model, **SPLIT)
    results, errors = {}, []

    def work(i):
        try:
            for _ in range(5):
                y = model(inputs[i])
                mx.eval(y)
            results[i] = y
        except Exception as e:  # shown below
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert all(close(results[i], expected[i]) for i in range(4))


def test_gradients_are_refused_with_a_sentence(model):
    cleave.patch_model(model, **SPLIT)
    with pytest.raises(RuntimeError, match="unpatch_model"):
        mx.eval(mx.grad(lambda x: model.model.layers[0].mlp(x).sum())(mx.ones((1, 200, 64))))


@pytest.mark.parametrize("call", [1, 2, 9])
def test_a_unit_that_fails_costs_time_never_an_answer(model, call, capfd):
    x = tokens(200)
    expected = model(x)
    report = cleave.patch_model(model, units=f"main,fault:{call}", shares=[0.5, 0.5])
    for _ in range(3):
        assert close(model(x), expected)
    assert list(report.failures) == [f"fault:{call}"]
    assert report.failures[f"fault:{call}"][0] == 1
    assert "switched off" in str(report)
    assert capfd.readouterr().err.count("switched off") == 1
    cleave.unpatch_model(model)


def test_a_unit_that_cannot_compile_leaves_the_rows_to_main(model):
    x = tokens(200)
    expected = model(x)
    report = cleave.patch_model(model, units="main,fault:0,cpu", shares=[0.2, 0.4, 0.4])
    assert any("compile failed as asked" in reason for _, reason in report.refused)
    assert close(model(x), expected)
    assert report.memory.keys() == {"cpu"} and report.engaged == len(report.sites)


def test_replaced_weights_are_noticed(model):
    x = tokens(200)
    report = cleave.patch_model(model, **SPLIT)
    mx.eval(model(x))
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight * 2
    model.model.layers[1].self_attn.k_proj.weight[3] = 0.0  # in place: the same Python object
    result = model(x)
    dropped = [s["name"] for s in report.sites if s["dropped"]]
    assert dropped == ["model.layers.0.mlp", "model.layers.1.self_attn.q_proj+k_proj+v_proj"]
    assert "weights were replaced" in str(report)
    cleave.unpatch_model(model)
    assert close(result, model(x))


def test_saving_loading_and_quantising_see_the_original_tree(model, tmp_path):
    x = tokens(200)
    plain = dict(tree_flatten(model.parameters()))
    cleave.patch_model(model, **SPLIT)
    model.save_weights(str(tmp_path / "w.safetensors"))
    saved = mx.load(str(tmp_path / "w.safetensors"))
    assert saved.keys() == plain.keys() and all(identical(saved[k], plain[k]) for k in plain)
    model.load_weights(str(tmp_path / "w.safetensors"))
    nn.quantize(model, group_size=32, bits=8)
    quantised = make_model()
    nn.quantize(quantised, group_size=32, bits=8)
    assert close(model(x), quantised(x))


def test_lora_wrapped_before_or_after_keeps_its_effect():
    from mlx_lm.tuner.lora import LoRALinear

    x = mx.random.normal((1, 200, 64), key=mx.random.key(5))

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.o_proj = nn.Linear(64, 96)

    def wrap(holder):
        layer = LoRALinear.from_base(holder.o_proj, r=4)
        layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(6))
        layer.lora_a = mx.random.normal(layer.lora_a.shape, key=mx.random.key(7))
        holder.o_proj = layer

    before = Holder()
    wrap(before)
    expected = before.o_proj(x)
    report = cleave.patch_model(before, **SPLIT)
    assert close(before.o_proj(x), expected) and report.engaged == 1

    after = Holder()
    after.o_proj.weight, after.o_proj.bias = before.o_proj.linear.weight, before.o_proj.linear.bias
    report = cleave.patch_model(after, **SPLIT)
    wrap(after)
    assert close(after.o_proj(x), expected) and report.engaged == 1


def test_layers_replaced_after_patching_are_noticed(model):
    """As LoRA and nn.quantize replace them, whether they are called alone or as part of an mlp."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    x = tokens(200)
    quantised = copy.deepcopy(model)
    report = cleave.patch_model(quantised, **SPLIT)
    nn.quantize(quantised, group_size=32, bits=4)
    again = make_model()
    nn.quantize(again, group_size=32, bits=4)
    assert close(quantised(x), again(x))
    assert all(s["dropped"] for s in report.sites if s["kind"] == "mlp")

    report = cleave.patch_model(model, **SPLIT)
    keys = ["mlp.up_proj", "mlp.down_proj", "self_attn.k_proj"]
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": keys})
    for layer in model.model.layers:
        for lora in (layer.mlp.up_proj, layer.mlp.down_proj, layer.self_attn.k_proj):
            lora.lora_b = mx.random.normal(lora.lora_b.shape, key=mx.random.key(1))
    result = model(x)
    cleave.unpatch_model(model)
    assert close(result, model(x))


def test_a_copied_module_with_other_weights_runs_its_own(model):
    layer = model.model.layers[0].self_attn.o_proj
    x = mx.random.normal((1, 200, 64), key=mx.random.key(1))
    cleave.patch_model(model, **SPLIT)
    other = copy.copy(layer)
    other.weight = layer.weight * 2
    assert close(other(x), layer(x) * 2)


def test_a_deep_copy_runs_the_original_modules(model):
    x = tokens(200)
    expected = model(x)
    report = cleave.patch_model(model, **SPLIT)
    copied = copy.deepcopy(model)
    assert identical(copied(x), expected)
    assert report.engaged == 0
    cleave.unpatch_model(copied)
    assert not any(isinstance(m, cleave.SplitMLP) for m in copied.modules())
    mx.eval(model(x))
    assert report.engaged == len(report.sites)


def test_members_called_with_different_inputs_stay_right():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 48) for _ in range(3))

        def __call__(self, x):
            return self.q_proj(x) + self.k_proj(x + 1) * self.v_proj(x - 1)

    model, x = Odd(), mx.random.normal((200, 32), key=mx.random.key(1))
    expected = model(x)
    report = cleave.patch_model(model, **SPLIT)
    for _ in range(4):
        assert close(model(x), expected)
    assert report.sites[0]["dropped"] == "its members are not called with one input"


def test_an_mlp_that_computes_something_else_is_not_taken_as_one():
    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(32, 64), nn.Linear(32, 64)
            self.down_proj = nn.Linear(64, 32)

        def __call__(self, x):
            return self.down_proj(nn.silu(self.gate_proj(x)) ** 2 * self.up_proj(x))

    model, x = Squared(), mx.random.normal((200, 32), key=mx.random.key(1))
    before, expected = dict(tree_flatten(model.parameters())), model(x)
    report = cleave.patch_model(model, **SPLIT)
    assert [s["kind"] for s in report.sites] == ["linear group", "linear group"]
    assert any("as one mlp" in reason for _, reason in report.refused)
    assert all(dict(tree_flatten(model.parameters()))[k] is before[k] for k in before)
    assert close(model(x), expected)


def test_patching_leaves_mlx_random_state_alone(model):
    mx.random.seed(11)
    expected = mx.random.normal((3,))
    mx.random.seed(11)
    cleave.patch_model(model)
    assert identical(mx.random.normal((3,)), expected)


def test_unpatching_frees_the_partners_memory_and_keeps_the_counts():
    model = make_model(hidden_size=128, intermediate_size=256)
    nn.quantize(model, group_size=32, bits=4)
    report = cleave.patch_model(model, units="cpu", shares=1.0)
    mx.eval(model(tokens(200)))
    assert report.memory["cpu"] > 0
    cleave.unpatch_model(model)
    assert all(state.site is None for state in report._states)
    assert report.engaged == len(report.sites)
    assert "unpatched" in str(report)


def test_main_rows_are_bit_identical_on_the_cpu(model):
    report = cleave.patch_model(model, **SPLIT, mode="group")
    assert report.main_rows_max_difference == 0.0
    assert "bit-identical" in str(report)


def test_report_prints_and_serialises(model):
    import json

    report = cleave.patch_model(model, **SPLIT)
    mx.eval(model(tokens(200)))
    data = json.loads(json.dumps(report.as_dict()))
    assert data["engaged"] == len(data["sites"]) == 7
    assert data["memory"]["cpu"] >= 0 and data["load_seconds"] > 0
    text = str(report)
    for word in ("mlp", "q_proj+k_proj+v_proj", "cpu", "memory added", "load time"):
        assert word in text


def test_split_linear_wraps_one_layer():
    layer = nn.Linear(48, 80)
    x = mx.random.normal((2, 100, 48), key=mx.random.key(1))
    split = cleave.SplitLinear(layer, units="main,cpu", shares=[0.5, 0.5])
    assert isinstance(split, nn.Linear) and isinstance(split, cleave.SplitLinear)
    assert dict(tree_flatten(split.parameters())).keys() == {"weight", "bias"}
    assert close(split(x), layer(x)) and identical(split(x[:, :5]), layer(x[:, :5]))


BAD = [
    ({"units": "warp"}, ValueError, "warp"),
    ({"units": "main,main"}, ValueError, "once"),
    ({"units": ""}, ValueError, "units"),
    ({"units": "cpu:999"}, RuntimeError, "core 999"),
    ({"units": "cpu:x"}, ValueError, "cpu:x"),
    ({"units": "main,cpu", "shares": [0.5, 1.5]}, ValueError, r"\[0, 1\]"),
    ({"units": "main,cpu", "shares": [-0.1, 1.1]}, ValueError, r"\[0, 1\]"),
    ({"units": "main,cpu", "shares": [0.5, 0.6]}, ValueError, "sum to 1"),
    ({"units": "main,cpu", "shares": [float("nan"), 1.0]}, ValueError, r"\[0, 1\]"),
    ({"units": "main,cpu", "shares": [1.0]}, ValueError, "1 shares for 2 units"),
    ({"units": "main,cpu", "shares": {"gpu7": 1.0}}, ValueError, "gpu7"),
    ({"units": "main,cpu", "shares": ["half", "half"]}, ValueError, "numbers"),
    ({"mode": "turbo"}, ValueError, "turbo"),
    ({"seq": 0}, ValueError, "seq"),
    ({"seq": "many"}, ValueError, "seq"),
]


@pytest.mark.parametrize("arguments,error,text", BAD)
def test_bad_input_is_one_sentence_and_leaves_the_model_as_it_was(model, arguments, error, text):
    x = tokens(200)
    expected, classes = model(x), [type(m) for m in model.modules()]
    with pytest.raises(error, match=text) as caught:
        cleave.patch_model(model, **arguments)
    assert str(caught.value).startswith("[") and "\n" not in str(caught.value)
    assert [type(m) for m in model.modules()] == classes and identical(model(x), expected)


def test_other_bad_models(model):
    with pytest.raises(TypeError, match="mlx.nn.Module"):
        cleave.patch_model("model")
    with pytest.raises(ValueError, match="no Linear"):
        cleave.patch_model(nn.LayerNorm(4))
    with pytest.raises(RuntimeError, match="not patched"):
        cleave.unpatch_model(model)
    cleave.patch_model(model, **SPLIT)
    with pytest.raises(RuntimeError, match="already patched"):
        cleave.patch_model(model, **SPLIT)
    integers = nn.Linear(8, 8)
    integers.weight = mx.ones((8, 8), mx.int32)
    holder = nn.Sequential(integers)
    report = cleave.patch_model(holder, **SPLIT)  # refused by name, not half-split
    assert report.sites == [] and "int32" in str(report)
