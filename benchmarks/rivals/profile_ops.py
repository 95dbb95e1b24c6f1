"""Where the time of a prefill goes, op by op."""

import json
from pathlib import Path

from serve import timed
from shapes import Shape

# The end of a site's name -> the op it is shown as.
SITES = {"v_proj": "qkv", "o_proj": "o", "mlp": "mlp", "embed_tokens": "head", "lm_head": "head"}


def profile(folder: str, prefill, tokens: int) -> dict:
    """Seconds of one prefill by op: linear sites by their spans, inside the pass; norm, rope, attention and sums
    timed alone on arrays of the pass's shapes, times their number; "rest" is what the total has beyond these.
    """
    from cleave._load import _core

    prefill(tokens)
    _core.trace_take()
    _core.trace_enable(True)
    total = prefill(tokens)
    _core.trace_enable(False)
    seconds = {}
    for span in _core.trace_take():
        last = span.site.rpartition(".")[2]
        op = SITES.get(last.rpartition("+")[2], "other sites")
        seconds[op] = seconds.get(op, 0.0) + (span.end_ns - span.begin_ns) / 1e9
    config = json.loads((Path(folder) / "config.json").read_text())
    seconds |= between_sites(Shape.of(config), config, tokens)
    seconds["rest"] = total - sum(seconds.values())
    return {"total": total, "ops": seconds}


def between_sites(shape: Shape, config: dict, tokens: int) -> dict:
    """Seconds of all the norms, ropes, attentions and residual sums of a pass."""
    import mlx.core as mx

    from cleave._load import _core

    dtype = getattr(mx, config.get("torch_dtype") or config.get("dtype") or "float16")

    def array(*dims):
        a = mx.random.normal(dims).astype(dtype)
        mx.eval(a)
        return a

    def heads(
        count,
    ):  # as a product leaves them: [1, tokens, heads, d], seen as [1, heads, tokens, d]
        return array(1, tokens, count, shape.head_dim).transpose(0, 2, 1, 3)

    def best(call) -> float:
        return min(timed(lambda: mx.eval(call())) for _ in range(4))

    x, weight = array(1, tokens, shape.hidden), array(shape.hidden)
    q, k, v = heads(shape.heads), heads(shape.kv_heads), heads(shape.kv_heads)
    rope = _core.Rope(shape.head_dim, False, config.get("rope_theta", 1e4), 1.0, None)
    norm = 2 * best(lambda: _core.rms_norm(x, weight, 1e-5))
    if config["model_type"] == "qwen3":
        short = array(shape.head_dim)
        norm += sum(best(lambda: _core.rms_norm(a, short, 1e-5)) for a in (q, k))
    return {
        "attention": shape.layers
        * best(lambda: _core.attention(q, k, v, shape.head_dim**-0.5, True)),
        "norm": shape.layers * norm,
        "rope": shape.layers * sum(best(lambda: rope(a, 0)) for a in (q, k)),
    }
