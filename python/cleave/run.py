"""Reads a prompt and continues it. The text goes to stdout as it comes, times and units to stderr.

examples:
  cleave run FOLDER --prompt "Once upon a time"
  cleave run FOLDER --chat --prompt "Why is the sky blue?" -n 200 --temp 0.7 --seed 1
  cat notes.txt | cleave run model.gguf --prompt-file - --json
"""

import argparse
import json
import math
import sys

from tqdm import tqdm

from cleave.runner import Generation, Runner
from cleave.team import PRECISIONS
from cleave.tokenizer import TextStream, Tokenizer, load_tokenizer

SUMMARY = "read a prompt and continue it"


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", metavar="MODEL", help="a model folder (mlx_lm's form) or .gguf file")
    given = p.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    given.add_argument("--prompt-file", metavar="FILE", help="a file with the text; - for stdin")
    given.add_argument("--ids", metavar="1,2,3", type=_ids, help="token ids instead of a text")

    answer = p.add_argument_group("the answer")
    answer.add_argument("--chat", action="store_true", help="put the prompt as a user's message")
    answer.add_argument("--system", metavar="TEXT", help="the system message of a chat")
    answer.add_argument(
        *("-n", "--max-tokens"),
        type=_number(int, 0),
        default=64,
        metavar="N",
        help="tokens at most (64)",
    )
    answer.add_argument(
        "--temp",
        type=_number(float, 0),
        default=0.0,
        metavar="T",
        help="0: the likeliest token (0)",
    )
    answer.add_argument(
        "--top-p",
        type=_number(float, 0, 1),
        default=0.0,
        metavar="P",
        help="from the likeliest tokens that reach this probability",
    )
    answer.add_argument(
        "--top-k", type=_number(int, 0), default=0, metavar="K", help="from the K likeliest tokens"
    )
    answer.add_argument(
        "--seed",
        type=_number(int, 0, 2**64 - 1),
        default=0,
        metavar="S",
        help="of the sampling (0)",
    )

    work = p.add_argument_group("the work")
    work.add_argument("--units", default="auto", help="such as main,cpu (auto: what there is)")
    work.add_argument("--shares", type=_shares, metavar="A,B", help="one per unit (measured)")
    work.add_argument(
        "--tile", type=_number(int, 1), default=512, metavar="N", help="tokens to tune for (512)"
    )
    work.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="exact",
        help="the coarsest arithmetic that partners may use where it is faster (exact)",
    )
    work.add_argument(
        "--min-rows",
        type=_number(int, 0),
        metavar="N",
        help="calls with fewer tokens stay on main (192; 1 where main is slower even then)",
    )

    output = p.add_argument_group("the output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead")
    output.add_argument(
        "--no-progress", action="store_true", help="no bar while the prompt is read"
    )


def main(args) -> int:
    if args.ids is not None and (args.chat or args.system is not None):
        args.refuse("--ids cannot be put into a chat: a text can")
    tokenizer, ids = (None, args.ids) if args.ids is not None else _prompt(args)
    runner = Runner(args.model, args.units, args.shares, args.tile, args.min_rows, args.precision)
    if args.ids is not None:
        tokenizer = _optional_tokenizer(args.model)
    else:
        tokenizer.check_ids(ids, runner.config.vocab)
    bar = tqdm(
        total=len(ids),
        unit=" tokens",
        desc="prefill",
        leave=False,
        disable=True if args.no_progress or args.json else None,  # None: unless stderr is a tty
    )
    with bar:

        def progress(done: int) -> None:
            bar.update(done - bar.n)
            if done == len(ids):
                bar.close()

        generation = runner.generate(
            ids, args.max_tokens, args.temp, args.top_p, args.top_k, args.seed, progress
        )
        text = _write(generation, tokenizer, quiet=args.json)
    if args.json:
        print(json.dumps(_figures(args.model, runner, generation, text)))
    else:
        print(_summary(runner, generation), file=sys.stderr)
    return 0


def _prompt(args) -> tuple:
    """-> (tokenizer, token ids of the text)."""
    text = args.prompt if args.prompt_file is None else _read(args.prompt_file)
    if not text:
        raise ValueError("[run] got an empty prompt and needs at least one token")
    tokenizer = load_tokenizer(args.model)
    if not args.chat and args.system is None:
        ids = tokenizer.encode(text)
        if not ids:
            raise ValueError(f"[run] got a prompt without any token: {text!r}")
        return tokenizer, ids
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    return tokenizer, tokenizer.chat([*messages, {"role": "user", "content": text}])


def _optional_tokenizer(model: str) -> Tokenizer | None:
    """What shows the answer to ids as text, or None after saying why there is none."""
    try:
        return load_tokenizer(model)
    except ValueError as e:
        print(f"cleave: {e}", file=sys.stderr)
        return None


def _read(file: str) -> str:
    try:
        if file == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(file, "rb") as f:
                data = f.read()
    except OSError as e:
        raise ValueError(f"[run] the prompt file does not open: {e}") from e
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(
            f"[run] got prompt file {file} with a byte {data[e.start]:#04x} at {e.start} that is not "
            "UTF-8, and needs UTF-8 text"
        ) from None


def _write(generation: Generation, tokenizer: Tokenizer | None, quiet: bool) -> str | None:
    """Writes the answer as it comes, ids where there is no tokenizer. -> its text."""
    written = []

    def write(piece: str) -> None:
        written.append(piece)
        if piece and not quiet:
            sys.stdout.write(piece)
            sys.stdout.flush()

    stream = TextStream(tokenizer) if tokenizer else None
    for i, token in enumerate(generation):
        write(stream.add(token) if stream else f"{',' if i else ''}{token}")
    write(stream.end() if stream else "")
    text = "".join(written)
    if text and not text.endswith("\n") and not quiet:
        print(flush=True)
    return text if tokenizer else None


def _figures(model: str, runner: Runner, g: Generation, text: str | None) -> dict:
    return {
        "model": model,
        "prompt_tokens": g.prompt_tokens,
        "tokens": g.tokens,
        "text": text,
        "finish": g.finish,
        "prefill_s": g.prefill_s,
        "first_token_s": g.first_token_s,
        "prefill_tokens_per_s": g.prefill_tokens_per_s,
        "decode_tokens_per_s": g.decode_tokens_per_s,
        "report": runner.report.as_dict(),
    }


def _summary(runner: Runner, g: Generation) -> str:
    first = g.first_token_s
    rate = g.decode_tokens_per_s
    return "\n".join(
        (
            f"prompt: {g.prompt_tokens} tokens in {g.prefill_s:.2f} s, "
            f"{g.prefill_tokens_per_s:.0f} tokens/s"
            + ("" if first is None else f"; first token after {first:.2f} s"),
            f"answer: {len(g.tokens)} tokens"
            + ("" if rate is None else f", {rate:.1f} tokens/s")
            + f"; ended by {_ENDS[g.finish]}",
            f"{runner.report.line}; loaded in {runner.report.load_seconds:.1f} s",
        )
    )


_ENDS = {"end": "the model", "length": "-n", "context": "a full context"}


def _ids(text: str) -> list:
    try:
        return [int(i) for i in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r} and needs numbers such as 1,2,3") from None


def _shares(text: str):
    try:
        numbers = [float(s) for s in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r} and needs numbers like 0.3,0.7") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _number(kind: type, least, most=2**31 - 1):
    """An argument's type: a finite number in [least, most]."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            whole = "whole " if kind is int else ""
            raise argparse.ArgumentTypeError(
                f"got {text!r} and needs a {whole}number from {least} to {most}"
            )
        return value

    return parse
