"""The command line: ``devsample demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from devsample import __version__
from devsample.errors import DevsampleError

INTERRUPTED = 130

_DEMO_TEXT = """\
Train a small classifier on scikit-learn's 1797 handwritten digits, then estimate the
local learning coefficient of its weights with chains in spawned processes, each of
which builds its own DataLoader with its own workers from a LoaderSpec.

Printed at the end: a table with the estimate, its standard error and the draws of
each chain and of all; the settings; and a verdict in one sentence:
  trust    nothing speaks against the estimate
  caution  use it, and read the reasons that follow
  reject   do not use it; the reasons say what to change

Written into DIR: draws.csv (a row per chain and draw) and trace.png."""

_DEMO_EXAMPLES = """\
examples:
  devsample demo
  devsample demo --chains 8 --draws 1000        a smaller standard error, longer
  devsample demo --cores 1 --workers 0          all in this process; the same numbers
  devsample demo --seed 1 --out runs/seed-1     other weights, batches and noise"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0: done; 1: an error, told on stderr; 2: arguments that cannot be used; 130: Ctrl-C.

    Args:
        argv: the arguments; None: those of the program.
    """
    try:
        options = _parser().parse_args(argv)
    except SystemExit as done:  # argparse leaves like this: 0 after --help, 2 for bad usage
        return int(done.code or 0)
    try:
        return _demo(options)
    except DevsampleError as error:
        print(f"devsample: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndevsample: interrupted; every process it started has ended.", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="devsample",
        description="Local learning coefficients of PyTorch models, by parallel SGMCMC chains.",
        epilog="devsample COMMAND --help says more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"devsample {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="estimate the learning coefficient of a small digits classifier",
        description=_DEMO_TEXT,
        epilog=_DEMO_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("devsample-demo"),
        help="folder for the two files (default: devsample-demo); if it holds anything already, "
        "it is left alone and DIR-2, DIR-3, ... is taken",
    )
    numbers: tuple[tuple[str, int, int, str], ...] = (
        ("--chains", 4, 1, "independent chains, each from the trained weights"),
        ("--draws", 500, 1, "recorded draws per chain"),
        ("--cores", 2, 1, "processes that the chains are spread over; 1: this process"),
        ("--workers", 2, 0, "loader workers of each process"),
        ("--seed", 0, 0, "of training, batches and noise; the same seed gives the same draws"),
    )
    for name, default, least, text in numbers:
        demo.add_argument(
            name,
            type=_at_least(least),
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )


def _at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected an integer ≥ {least}, got {text!r}")
        return value

    return integer


def _demo(options: argparse.Namespace) -> int:
    from devsample.demo import DemoOptions, run_demo

    run_demo(DemoOptions(**vars(options)))
    return 0
