"""``python -m cleave.demo``: real weights and a real text, stock MLX beside cleave."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import mlx.core as mx

from cleave.contest import Contender, Native, Patched, Stock, hold
from cleave.figures import machine, write_whole
from cleave.measure import estimate_prefill
from cleave.models import ModelError, decode, encode, load_model, unpack_to_fp32
from cleave.quality import agreement, compare
from cleave.report import table
from cleave.team import Team

HEAD = ("", "prefill", "gain", "cos", "RMS ratio", "max abs", "top-1", "greedy", "sites engaged")


def arguments(argv):
    p = argparse.ArgumentParser(prog="demo", description=__doc__)
    p.add_argument(
        "--model", default=os.environ.get("MODEL_PATH"), help="a model folder (or MODEL_PATH)"
    )
    p.add_argument("--text", type=Path, default=Path("data/origin_of_species.txt"))
    p.add_argument("--tokens", type=int, default=512, help="length of the prompt (default 512)")
    p.add_argument("--units", default="auto", help='such as "main,cpu" (default auto)')
    p.add_argument("--shares", help="one number per unit, such as 0.4,0.6 (default: measured)")
    p.add_argument("--greedy", type=int, default=32, help="tokens to continue with (default 32)")
    p.add_argument("--rounds", type=int, default=3, help="samples of each contender (default 3)")
    p.add_argument(
        "--seconds", type=float, default=120, help="limit for the stock runs (default 120)"
    )
    p.add_argument("--json", type=Path, default=Path("build/demo.json"))
    args = p.parse_args(argv)
    if args.tokens < 1 or args.rounds < 1 or args.greedy < 1:
        p.error("tokens, rounds and greedy need to be at least 1")
    try:
        args.shares = [float(s) for s in args.shares.split(",")] if args.shares else None
    except ValueError:
        p.error(f"got shares {args.shares!r} and needs numbers with commas between them")
    return args


def say(text: str) -> None:
    print(text, flush=True)


def main(argv=None) -> int:
    args = arguments(argv)
    try:
        return run(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as e:
        print(e, file=sys.stderr)
        return 1


def run(args) -> int:
    Team("demo", args.units, args.shares, args.tokens)  # refuses both before any work is done
    folder = model_folder(args)
    model, tokenizer = load_model(folder)
    ids = prompt_ids(args, tokenizer)
    where = f"mlx {mx.__version__} on {mx.default_device()}"
    say(f"model {folder.name}, {len(ids)} tokens of {args.text.name}, {where}")
    # One stock product can take a minute, and Python would see Ctrl-C only after it. Nothing is half
    # done from here on that a plain end would leave behind.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    expected = estimate_prefill(model, ids, len(ids))
    say(f"stock MLX as loaded: about {expected:.0f} s for {len(ids)} tokens, estimated from a few")
    slow = expected > args.seconds
    stock = stock_in_fp32(args, folder, ids) if slow else Stock("stock MLX", args.greedy, model)
    # A patched model decodes by stock MLX, where that is slow at seconds a token.
    others = [Patched("patched mlx_lm", 0 if slow else args.greedy, model, args.units, args.shares)]
    try:
        native = Native("cleave.Runner", args.greedy, folder, len(ids), args.units, args.shares)
        others.insert(0, native)
    except ValueError as e:
        say(f"cleave.Runner does not take this model: {e}")
    hold(stock, others, ids, args.rounds, args.seconds, say)
    contests = [contest(c, stock) for c in others]
    show(stock, others, contests, ids, tokenizer)
    figures = {
        "model": folder.name,
        "tokens": len(ids),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "mlx": mx.__version__,
        "stock_as_loaded_estimated_seconds": expected,
        "contests": contests,
    }
    write_whole(args.json, json.dumps(figures, indent=1) + "\n")
    say(f"figures: {args.json}")
    return 0


def model_folder(args) -> Path:
    """The user's folder, or the packaged SmolLM2 after its import, which is kept."""
    if args.model:
        return Path(args.model)
    from cleave.import_gguf import import_gguf

    folder = Path("build/models/SmolLM2-135M-Instruct-Q4_1")
    if not (folder / "config.json").exists():
        say(f"importing SmolLM2-135M-Instruct: cleave-import-gguf smollm2 {folder}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        import_gguf("smollm2", folder)
    return folder


def prompt_ids(args, tokenizer) -> list:
    try:
        ids = encode(tokenizer, args.text.read_text(encoding="utf-8"))
    except OSError as e:
        raise ModelError(f"[demo] the text does not open: {e}") from e
    if len(ids) < args.tokens:
        raise ModelError(f"[demo] {args.text} has {len(ids)} tokens and {args.tokens} are needed")
    return ids[: args.tokens]


def stock_in_fp32(args, folder: Path, ids: list) -> Stock:
    """The baseline where stock MLX multiplies packed weights very slowly, as on a Linux CPU: the same
    weights unpacked."""
    say(f"that passes the limit of {args.seconds:.0f} s: stock MLX gets the same weights in fp32")
    dense, _ = load_model(folder)
    unpack_to_fp32(dense)
    expected = estimate_prefill(dense, ids, len(ids))
    if expected > args.seconds:
        fits = int(len(ids) * args.seconds / expected)
        raise ModelError(
            f"[demo] stock MLX would need about {expected:.0f} s for {len(ids)} tokens in fp32: "
            f"allow more with --seconds, or try --tokens {max(fits, 1)}"
        )
    return Stock("stock MLX in fp32", args.greedy, dense)


def contest(c: Contender, stock: Contender) -> dict:
    """One of cleave's contenders beside stock, in figures."""
    return {
        "label": c.name,
        "stock_seconds": stock.samples.seconds,
        "cleave_seconds": c.samples.seconds,
        "ratio": stock.samples.median / c.samples.median,
        "quality_against": stock.name,
        **compare(c.logits, stock.logits),
        "greedy_agreement": agreement(c.tokens, stock.tokens) if c.tokens else None,
        "report": c.report,
    }


def show(stock: Contender, others: list, contests: list, ids: list, tokenizer) -> None:
    rows = [(stock.name, str(stock.samples), "1.00x", *["-"] * (len(HEAD) - 3))]
    for c, figures in zip(others, contests):
        greedy, report = figures["greedy_agreement"], figures["report"]
        rows.append(
            (
                c.name,
                str(c.samples),
                f"{figures['ratio']:.2f}x",
                f"{figures['cos']:.6f}",
                f"{figures['rms_ratio']:.6f}",
                f"{figures['max_abs']:.4g}",
                f"{figures['top1']:.1%}",
                "-" if greedy is None else f"{greedy:.0%} of {len(c.tokens)}",
                f"{report['engaged']} of {len(report['sites'])}",
            )
        )
    say(f"\n{len(ids)} tokens; quality is against {stock.name}, over all positions")
    say(table(rows, HEAD))
    for c in others:
        say(f"\n{c.name}\n{c.shown}")
    say(f"\n…{decode(tokenizer, ids[-16:])!r} is continued")
    for c in [stock, *others]:
        if c.tokens:
            say(f"{c.name}: {decode(tokenizer, c.tokens)!r}")


if __name__ == "__main__":
    sys.exit(main())
