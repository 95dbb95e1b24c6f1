"""The program ``cleave``: its commands, and how each of them ends."""

import argparse
import os
import sys
from pathlib import Path

import cleave
from cleave import run

# A command is a module with SUMMARY, add_arguments(parser) and main(args) -> exit code.
COMMANDS = {"run": run}
INTERRUPTED, BROKEN_PIPE = 130, 141  # what shells report of programs that SIGINT and SIGPIPE end


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        "cleave", description="Language models on every compute unit of this machine."
    )
    top.add_argument("--version", action="version", version=f"cleave {cleave.__version__}")
    top.add_argument(
        "--cmake-dir",
        action="version",
        version=str(Path(__file__).parent / "share" / "cmake" / "cleave"),
        help="print where find_package(cleave) finds the C++ library",
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(main=module.main, refuse=command.error)
    return top


def main(argv=None) -> int:
    """Runs a command. -> 0, 1 after one sentence on stderr, 2 for wrong usage, 130 after Ctrl-C."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))
    try:
        code = _run(argv)
        sys.stdout.flush()  # here, where a full disk is still an error
        return code
    except KeyboardInterrupt:
        return _end(INTERRUPTED, "interrupted")
    except BrokenPipeError:  # whoever read our output has seen enough
        return _end(BROKEN_PIPE)
    except (ValueError, RuntimeError, OSError, MemoryError) as e:
        return _end(1, " ".join(str(e).split()) or "out of memory")


def _run(argv) -> int:
    try:
        args = parser().parse_args(argv)
        return args.main(args)
    except SystemExit as e:  # argparse has printed help, a version or what is wrong
        return e.code


def _end(code: int, sentence: str = "") -> int:
    """Leaves nothing in stdout that the interpreter would fail to write once more as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if sentence:
        print(f"cleave: {sentence}", file=sys.stderr)
    return code
