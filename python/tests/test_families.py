"""patch_model finds the sites of each model family and changes no answer."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import FAMILIES, close, identical, make_model, make_vlm, tokens
from mlx.utils import tree_flatten

import cleave

# The mlp of each family must have been proven by the probe, with this activation's site in 2 layers.
MLP_FAMILIES = [f for f in FAMILIES if f != "phi3"]


def parameters(model):
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["auto", "group", "linear"])
def test_same_logits_and_every_site_engaged(family, mode):
    model = make_model(family)
    x = tokens(200)
    expected = model(x)
    report = cleave.patch_model(model, units="main,cpu", shares=[0.4, 0.6], seq=128, mode=mode)
    result = model(x)
    assert result.dtype == expected.dtype and close(result, expected)
    assert report.engaged == len(report.sites) > 0, str(report)
    kinds = [s["kind"] for s in report.sites]
    assert kinds.count("mlp") == (2 if mode == "auto" and family in MLP_FAMILIES else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_bit_for_bit(family):
    model = make_model(family)
    before, x = parameters(model), tokens(200)
    expected, classes = model(x), [type(m) for m in model.modules()]
    cleave.patch_model(model, units="cpu", shares=1.0)
    patched = parameters(model)
    assert patched.keys() == before.keys()
    assert all(patched[k] is before[k] for k in before), "patching must not touch the parameters"
    cleave.unpatch_model(model)
    assert [type(m) for m in model.modules()] == classes
    assert all("_cleave" not in m.__dict__ for m in model.modules())
    assert identical(model(x), expected)


@pytest.mark.parametrize(
    "bits,group,mode",
    [
        (4, 64, "affine"),
        (8, 32, "affine"),
        (6, 64, "affine"),
        (4, 32, "mxfp4"),
        (8, 32, "mxfp8"),
        (4, 16, "nvfp4"),
    ],
)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_quantised_models(bits, group, mode, dtype):
    model = make_model(hidden_size=128, intermediate_size=192)
    model.set_dtype(dtype)
    nn.quantize(model, group_size=group, bits=bits, mode=mode)
    x = tokens(193)
    expected = model(x)
    report = cleave.patch_model(model, units="main,cpu", shares=[0.35, 0.65], seq=64)
    result = model(x)
    assert result.dtype == expected.dtype
    # Rounding of activations in the model's dtype differs by summation order.
    assert close(result, expected, {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 1e-1}[dtype])
    # The fp modes name no activation dtype, and fp16 or fp32 activations are as good as bf16 ones.
    assert report.engaged == len(report.sites) == 7, str(report)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_models(dtype):
    model = make_model("qwen3")
    model.set_dtype(dtype)
    x = tokens(256)
    expected = model(x)
    report = cleave.patch_model(model, units="cpu,reference", shares=[0.5, 0.5])
    result = model(x)
    assert result.dtype == expected.dtype == dtype
    assert close(result, expected, {mx.float16: 2e-2, mx.bfloat16: 1e-1}[dtype])
    assert report.engaged == len(report.sites)


def test_vision_language_model_splits_its_language_model():
    model = make_vlm()
    x = tokens(200)
    expected = model.language_model(x).logits
    report = cleave.patch_model(model, units="main,cpu", shares=[0.3, 0.7])
    assert all(s["name"].startswith("language_model.") for s in report.sites)
    result = model.language_model(x).logits
    assert close(result, expected)
    assert report.engaged == len(report.sites) == 7
    cleave.unpatch_model(model)
    assert identical(model.language_model(x).logits, expected)


def test_mixture_of_experts_stays_on_main_by_name():
    import mlx_lm.models.qwen3_moe as moe

    args = moe.ModelArgs.from_dict(
        dict(
            model_type="qwen3_moe",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=96,
            num_attention_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=32,
            rms_norm_eps=1e-5,
            vocab_size=300,
            num_key_value_heads=2,
            head_dim=16,
            rope_theta=1e4,
            tie_word_embeddings=True,
            max_position_embeddings=512,
            norm_topk_prob=True,
        )
    )
    model = moe.Model(args)
    mx.eval(model.parameters())
    x = tokens(200)
    expected = model(x)
    report = cleave.patch_model(model, units="cpu", shares=1.0)
    assert any("expert" in reason for _, reason in report.refused)
    assert close(model(x), expected)
    assert not any(s["kind"] == "mlp" for s in report.sites)
