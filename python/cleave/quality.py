"""How close two results are. Cosine alone does not see errors of scale, so it never stands alone."""

import mlx.core as mx


def compare(result: mx.array, reference: mx.array) -> dict:
    """Compares logits [..., vocabulary] in double precision.

    Returns:
        cos: cosine of the two as vectors; rms_ratio: rms(result) / rms(reference);
        max_abs: largest difference; top1: share of positions with the same largest logit.
    """
    if result.shape != reference.shape:
        raise ValueError(
            f"[compare] got {result.shape} and {reference.shape} and needs equal shapes"
        )
    width = result.shape[-1]
    # Sums over millions of logits: in double precision, which mlx has on the CPU only.
    with mx.stream(mx.cpu):
        a, b = (v.astype(mx.float64).reshape(-1, width) for v in (result, reference))
        aa, bb, ab = (mx.sum(p).item() for p in (a * a, b * b, a * b))
        top1 = mx.mean((mx.argmax(a, -1) == mx.argmax(b, -1)).astype(mx.float32)).item()
        max_abs = mx.max(mx.abs(a - b)).item()
    return {
        "cos": ab / (aa * bb) ** 0.5 if aa and bb else float(aa == bb),
        "rms_ratio": (aa / bb) ** 0.5 if bb else float("nan"),
        "max_abs": max_abs,
        "top1": top1,
    }


def agreement(a: list, b: list) -> float:
    """Share of equal tokens before the first difference."""
    same = 0
    for x, y in zip(a, b):
        if x != y:
            break
        same += 1
    return same / max(len(a), len(b), 1)
