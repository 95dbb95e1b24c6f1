"""``python -m cleave.demo``: real weights and a real text, stock MLX beside cleave."""

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path

import mlx.core as mx

import cleave
from cleave.measure import Samples, estimate_prefill, greedy, prefill
from cleave.models import ModelError, decode, encode, load_model, unpack_to_fp32
from cleave.quality import agreement, compare
from cleave.report import table


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
        "--seconds", type=float, default=150, help="limit for the stock runs (default 150)"
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


def write_whole(file: Path, text: str) -> None:
    """Writes a file completely or, as on a full disk, not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    try:
        part.write_text(text)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def say(text: str) -> None:
    print(text, flush=True)


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


class Contest:
    """Stock MLX and cleave on one model, interleaved, in one run."""

    def __init__(self, model, label, args, ids):
        self.model, self.label, self.args, self.ids = model, label, args, ids
        self.stock, self.split = Samples(), Samples()
        self.stock_logits = self.split_logits = self.report = None
        self.stock_tokens, self.split_tokens = [], []
        self.stock_name = "stock MLX"

    def _sample(self, samples: Samples, first: bool):
        result = prefill(self.model, self.ids)
        samples.seconds.append(result.seconds)
        logits = result.logits
        tokens = greedy(self.model, result, self.args.greedy) if first and self.args.greedy else []
        return logits, tokens

    def run_split(self, first: bool) -> None:
        args = self.args
        report = cleave.patch_model(
            self.model, units=args.units, seq=len(self.ids), shares=args.shares
        )
        try:
            if first:  # warm-up
                prefill(self.model, self.ids[: report.min_rows], keep_logits=False)
                report.reset()
            logits, tokens = self._sample(self.split, first)
            if first:
                self.split_logits, self.split_tokens = logits, tokens
                self.report, self.shown, self.data = report, str(report), report.as_dict()
        finally:
            cleave.unpatch_model(self.model)

    def run_stock(self, first: bool) -> None:
        logits, tokens = self._sample(self.stock, first)
        if first:
            self.stock_logits, self.stock_tokens = logits, tokens

    def run(self, budget: float) -> None:
        """Interleaved samples until ``rounds`` or until another stock run would pass the budget."""
        begin = time.perf_counter()
        for i in range(self.args.rounds):
            say(f"  {self.label}: sample {i + 1}")
            self.run_stock(i == 0)
            self.run_split(i == 0)
            used = time.perf_counter() - begin
            if used + used / (i + 1) > budget:
                break


def main(argv=None) -> int:
    args = arguments(argv)
    try:
        return run(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except Exception as e:
        if not isinstance(e, (ModelError, ValueError, RuntimeError, OSError)):
            raise
        print(e, file=sys.stderr)
        return 1


def run(args) -> int:
    folder = model_folder(args)
    model, tokenizer = load_model(folder)
    ids = prompt_ids(args, tokenizer)
    say(
        f"model {folder.name}, {len(ids)} tokens of {args.text.name}, mlx {mx.__version__} on {mx.default_device()}"
    )

    # One stock product can take a minute, and Python would see Ctrl-C only after it. Nothing is half
    # done from here on that a plain end would leave behind.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    figures = {
        "model": folder.name,
        "tokens": len(ids),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "mlx": mx.__version__,
        "contests": [],
    }
    expected = estimate_prefill(model, ids, len(ids))
    say(f"stock MLX as loaded: about {expected:.0f} s for {len(ids)} tokens, estimated from a few")
    figures["stock_as_loaded_estimated_seconds"] = expected
    contests = []
    if expected <= args.seconds:
        contests.append(Contest(model, "as loaded", args, ids))
        contests[0].run(args.seconds)
    else:
        contests = too_slow_as_loaded(args, folder, model, ids, figures)
    for c in contests:
        show(c, tokenizer, figures)
    write_whole(args.json, json.dumps(figures, indent=1) + "\n")
    say(f"figures: {args.json}")
    return 0


def too_slow_as_loaded(args, folder, model, ids, figures) -> list:
    """Stock MLX multiplies packed weights very slowly on a Linux CPU. The same weights unpacked to
    fp32 are the baseline then, for cleave on them and for cleave on the model as loaded."""
    say(
        f"that passes the limit of {args.seconds:.0f} s: the baseline is stock MLX on the same weights unpacked to fp32"
    )
    dense, _ = load_model(folder)
    unpack_to_fp32(dense)
    expected = estimate_prefill(dense, ids, len(ids))
    if expected > args.seconds:
        fits = int(len(ids) * args.seconds / expected)
        raise ModelError(
            f"[demo] stock MLX would need about {expected:.0f} s for {len(ids)} tokens in fp32: "
            f"allow more with --seconds, or try --tokens {max(fits, 1)}"
        )
    fp32 = Contest(dense, "unpacked to fp32", args, ids)
    fp32.run(args.seconds)
    loaded = Contest(model, "as loaded", args, ids)
    # Its decode is stock MLX on packed weights, at seconds a token: one token only.
    loaded.args = argparse.Namespace(**{**vars(args), "greedy": 1})
    for i in range(args.rounds):
        say(f"  as loaded, cleave only: sample {i + 1}")
        loaded.run_split(i == 0)
    loaded.stock, loaded.stock_logits = fp32.stock, fp32.stock_logits
    loaded.stock_name = "stock MLX in fp32"
    return [fp32, loaded]


def show(c: Contest, tokenizer, figures) -> None:
    q = compare(c.split_logits, c.stock_logits)
    ratio = c.stock.median / c.split.median
    against = c.stock_name
    say(f"\n{c.label}: {len(c.ids)} tokens, quality against {against} over all positions")
    rows = [
        (against, str(c.stock)),
        ("cleave", str(c.split)),
        (f"{against} / cleave", f"{ratio:.2f}x"),
        ("cos", f"{q['cos']:.6f}"),
        ("RMS ratio", f"{q['rms_ratio']:.6f}"),
        ("max abs", f"{q['max_abs']:.4g}"),
        ("top-1 agreement", f"{q['top1']:.1%}"),
    ]
    same = None
    if c.stock_tokens:
        same = agreement(c.split_tokens, c.stock_tokens)
        rows.append((f"greedy agreement over {len(c.stock_tokens)}", f"{same:.0%}"))
    rows += [
        ("sites engaged", f"{c.data['engaged']} of {len(c.data['sites'])}"),
        (
            "memory added",
            ", ".join(f"{n} {b / 1e6:.0f} MB" for n, b in c.data["memory"].items()) or "none",
        ),
    ]
    say(table(rows, ("figure", "value")))
    say("\n" + c.shown)
    if c.stock_tokens:
        say(f"\nstock:  …{decode(tokenizer, c.stock_tokens)!r}")
        say(f"cleave: …{decode(tokenizer, c.split_tokens)!r}")
    figures["contests"].append(
        {
            "label": c.label,
            "stock_seconds": c.stock.seconds,
            "cleave_seconds": c.split.seconds,
            "ratio": ratio,
            "quality_against": against,
            **q,
            "greedy_agreement": same,
            "report": c.data,
        }
    )


def machine() -> str:
    """Processor and core count."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


if __name__ == "__main__":
    sys.exit(main())
