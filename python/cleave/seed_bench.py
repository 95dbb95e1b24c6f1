"""The seed's benchmark on cleave: a prefill of seq tokens, unsplit and split with the seed's routing.

``MODEL_PATH=/path/to/model python3 bench.py [seq]``. Variables: MODEL_PATH, a model folder; UNITS,
such as "main,cpu"; SHARE, the partner's share (0.65); SECONDS, the limit for one unsplit run (120).
"""

import os
import sys

import mlx.core as mx

from cleave.measure import Samples, estimate_prefill, prefill
from cleave.models import ModelError, encode, load_model, unpack_to_fp32
from cleave.quality import compare

ROUNDS = 3
# Any text will do for timing; the ids are repeated to the length asked for.
TEXT = "Each linear layer is cut along its output channels, and the units compute their rows together. "


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        return run(argv)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ModelError, ValueError, RuntimeError) as e:
        print(e, file=sys.stderr)
        return 1


def run(argv) -> int:
    from split_linear import SplitLinear, patch_model

    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if len(argv) > 1 or not (argv[:1] or ["512"])[0].isdigit() or int((argv or ["512"])[0]) < 1:
        raise ModelError(
            f"[bench] got {' '.join(argv)!r} and needs at most one length of 1 or more"
        )
    seq = int(argv[0]) if argv else 512
    path = os.environ.get("MODEL_PATH")
    if not path:
        raise ModelError("[bench] MODEL_PATH is not set and needs to be a model folder")
    model, tokenizer = load_model(path)
    ids = encode(tokenizer, TEXT)
    ids = (ids * (seq // len(ids) + 1))[:seq]

    limit = float(os.environ.get("SECONDS", "120"))
    expected = estimate_prefill(model, ids, seq)
    if expected > limit:
        print(
            f"unsplit, as loaded: about {expected:.0f} s, over the limit: weights unpacked to fp32"
        )
        unpack_to_fp32(model)
        expected = estimate_prefill(model, ids, seq)
        if expected > limit:
            raise ModelError(
                f"[bench] the unsplit run would take about {expected:.0f} s: "
                "raise SECONDS or give a smaller length"
            )

    shares = float(os.environ["SHARE"]) if "SHARE" in os.environ else None
    bridge = patch_model(model, seq=seq, units=os.environ.get("UNITS"), shares=shares)
    print(bridge)
    unsplit, split = Samples(), Samples()
    rounds = ROUNDS if expected < 30 else 1
    for _ in range(rounds):
        SplitLinear.set_prefill(False)
        a = prefill(model, ids)
        SplitLinear.set_prefill(True)
        b = prefill(model, ids)
        unsplit.seconds.append(a.seconds)
        split.seconds.append(b.seconds)
    quality = compare(b.logits, a.logits)
    print(
        f"\nseq {seq}, mlx {mx.__version__} on {mx.default_device()}, {rounds} interleaved samples"
    )
    print(f"unsplit   {unsplit}")
    print(f"split     {split}")
    print(f"speed-up  {unsplit.median / split.median:.3f}x")
    print(f"cos       {quality['cos']:.6f}")
    print(f"top-1     {quality['top1']:.1%}")
    print(f"engaged   {bridge.engaged} of {len(bridge.sites)} layers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
