"""patch_model and unpatch_model: the sites of a model under their split classes, and back."""

import time

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from cleave import fast_ops
from cleave._load import _core
from cleave.balance import OneToken
from cleave.discover import Found, discover, linear_weight
from cleave.layers import (
    CallState,
    FastCalls,
    GroupState,
    MlpState,
    SplitEmbedding,
    SplitLinear,
    SplitMLP,
    attach,
    detach,
    is_split,
)
from cleave.models import text_model
from cleave.report import Report
from cleave.team import MIN_ROWS, Team

MODES = ("auto", "group", "linear", "seed")
# The routing of the seed's split_linear.py.
SEED_ALIGN = 64
SEED_PARTNER_SHARE = 0.65
_MIXINS = {"mlp": SplitMLP, "head": SplitEmbedding, "linear group": SplitLinear}


def patch_model(
    model: nn.Module,
    units="auto",
    seq: int = 512,
    shares=None,
    mode: str = "auto",
    min_rows: int | None = None,
    precision: str = "exact",
) -> Report:
    """Splits the linear layers of a model over several units. Decode runs the original layers.

    Args:
        model: an mlx_lm or mlx_vlm model (of the latter, the language model's layers), or any
            nn.Module with Linear or QuantizedLinear layers.
        units: "auto" (main and what else this machine has), or names such as "main,cpu" or
            ["cpu:0", "cpu:1"]. Main is the unit MLX runs on ("gpu" where that is one); left out, it
            has share 0 unless shares are to be measured.
        seq: tokens that the programs are tuned for; any other length works too.
        shares: None (measured), or one number per unit in the order of ``units``, or a dict by name,
            or one number, the share of the only partner. They lie in [0, 1] and sum to 1.
        mode: "auto" (whole MLPs where a probe proves the formula, groups of Linears with one input,
            single Linears, tied heads), "group" (without MLPs), "linear" (each Linear alone), or
            "seed" (each Linear alone with the seed's routing: more than twice as many input as
            output channels stay on main, shares aligned to 64, 0.65 to the partner unless told).
        min_rows: calls with fewer tokens run the original modules. None: 192, but 1, decode included,
            where shares are measured too and main is a CPU found slower at one token as well.
        precision: the coarsest arithmetic that partners may use where it is faster: "exact" (nothing
            of the activations is lost), "bf16" (operands rounded to bfloat16) or "int8" (to 8 bits,
            one scale per token and per output channel). The report tells its error, measured in each
            site's first call.

    Returns:
        A Report; ``print(report)`` shows it as a table.

    Raises:
        ValueError: unknown unit, mode or precision, shares that are not legal, or a model without Linear layers.
        RuntimeError: a unit that this machine lacks, or a model already patched.
        TypeError: ``model`` is no nn.Module.

    When it raises, the model is as it was.
    """
    begin = time.perf_counter()
    if not isinstance(model, nn.Module):
        raise TypeError(f"[patch_model] got {type(model).__name__} and needs an mlx.nn.Module")
    if mode not in MODES:
        raise ValueError(f"[patch_model] got mode {mode!r} and needs one of {', '.join(MODES)}")
    if not isinstance(seq, int) or isinstance(seq, bool) or seq < 1:
        raise ValueError(
            f"[patch_model] got seq {seq!r} and needs a number of tokens of at least 1"
        )
    if "_cleave_report" in model.__dict__:
        raise RuntimeError("[patch_model] the model is already patched: unpatch_model(model) first")
    found = discover(model, mode)
    if not found.sites:
        raise ValueError("[patch_model] got a model with no Linear or QuantizedLinear layer")
    if mode == "seed" and shares is None:
        shares = SEED_PARTNER_SHARE
    team = Team("patch_model", units, shares, seq, precision)
    one_token = None
    if min_rows is None:
        measure = shares is None and mx.default_device() == mx.cpu
        one_token, min_rows = (OneToken(precision), 1) if measure else (None, MIN_ROWS)
    plan = _Plan(team, mode, min_rows, _activation_dtype(model), one_token)
    built = [(f, *plan.build(f)) for f in found.sites]
    if one_token and not one_token.split_wins:
        min_rows = MIN_ROWS
        for _, site, _ in built:
            if site is not None:
                site.set_min_rows(min_rows)
    report = team.report(mode, min_rows)
    report.refused += found.refused
    for f, site, reason in built:
        if site is None:
            report.refused.append((f.name, reason))
            continue
        mlp = f.kind == "mlp"
        state = MlpState(site, f.owner, f.modules) if mlp else GroupState(site, f.modules)
        for index, module in enumerate(state.callers):
            attach(module, _MIXINS[f.kind], state, index)
        report.add(state)
    report.verify_main_rows()
    root = text_model(model)
    if report._states and _core.ops_serve() and not is_split(root):
        fast_ops.acquire()
        attach(root, FastCalls, CallState(min_rows), 0)
        report.fast_ops = True
    report.load_seconds = time.perf_counter() - begin
    object.__setattr__(model, "_cleave_report", report)
    return report


def unpatch_model(model: nn.Module) -> None:
    """Gives every module its original class back and frees what the partners held.

    Raises RuntimeError when the model is not patched.
    """
    report = model.__dict__.pop("_cleave_report", None) if isinstance(model, nn.Module) else None
    if report is None:
        raise RuntimeError("[unpatch_model] the model is not patched")
    for _, module in model.named_modules():
        if is_split(module):
            detach(module)
    if report.fast_ops:
        fast_ops.release()
    for state in report._states:  # the report may outlive the patch, and must not hold its memory
        state.drop("the model was unpatched")


def split_one(module, units, seq, shares, min_rows) -> None:
    """Puts one Linear or QuantizedLinear under its split class; what SplitLinear(...) does."""
    team = Team("SplitLinear", units, shares, seq)
    site, reason = _Plan(team, "linear", min_rows).build(
        Found("linear group", "linear", {"linear": module})
    )
    if site is None:
        raise RuntimeError(f"[SplitLinear] nothing to split: {reason}")
    attach(module, SplitLinear, GroupState(site, {"linear": module}), 0)


class _Plan:
    """Decides and builds one site after another."""

    def __init__(self, team: Team, mode, min_rows, dtype=None, one_token: OneToken | None = None):
        self._team, self._one_token = team, one_token
        self._seed = mode == "seed"
        self._dtype = dtype
        self._options = {
            "tile": team.seq,
            "min_rows": MIN_ROWS if self._seed else min_rows,
            "align": SEED_ALIGN if self._seed else 1,
            "precision": team.precision,
        }

    def build(self, f: Found):
        """-> (site, "") or (None, reason)."""
        weights = [linear_weight(m) for m in f.modules.values()]
        if self._seed:
            if f.kind == "head":
                return None, "the seed splits no tied head"
            if weights[0].k > 2 * weights[0].n:
                return (
                    None,
                    "the seed leaves layers with more than twice as many inputs as outputs to main",
                )
        try:
            shares, reason = self._team.shares(weights[0])
            if shares is None:
                return None, reason
            if self._one_token:
                self._one_token.add(weights[0], shares)
            options = dict(self._options)
            if weights[0].format.startswith(
                ("mxfp", "nvfp")
            ):  # their scales name no activation dtype
                # mlx decodes them to bfloat16, which promotes to float32 beside any other dtype.
                options["dtype"] = mx.bfloat16 if self._dtype == mx.bfloat16 else mx.float32
            if f.kind == "mlp":
                site = _core.Mlp(*weights, f.activation, shares, f.name, **options)
            else:
                site = _core.LinearGroup(weights, shares, f.name, **options)
        except (ValueError, RuntimeError) as e:
            return None, str(e)
        if not site.splits:
            return None, "; ".join(site.report()["refusals"]) or "all its rows are main's"
        return site, ""


def _activation_dtype(model):
    """The dtype of the model's first vector of floats, usually a norm's weight; None without one."""
    floats = (mx.float32, mx.float16, mx.bfloat16)
    vectors = (a for _, a in tree_flatten(model.parameters()) if a.ndim == 1 and a.dtype in floats)
    return next((a.dtype for a in vectors), None)
