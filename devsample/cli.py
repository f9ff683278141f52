"""The command line: ``devsample demo``, ``check``, ``show``, ``doctor`` and ``truths``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from devsample import __version__
from devsample.errors import DevsampleError, InvalidArgumentError

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

_CHECK_TEXT = """\
Build the loader of a LoaderSpec in a process of its own, as a chain process would, take
batches from it with and without loader workers, and print their types and shapes, the
seconds they take, and the settings that are recommended.

TARGET is the import path of a function that makes the data set, or a TOML file with the
fields of the LoaderSpec (at its top, or in a table [loader_spec])."""

_CHECK_EXAMPLES = """\
examples:
  devsample check mypackage.data:make_dataset --kwargs '{"split": "train"}' --batch-size 64
  devsample check loader.toml --num-workers 0,2,4,8
  devsample check loader.toml --set num_workers=2 --set multiprocessing_context=spawn"""

_DOCTOR_TEXT = """\
Print what this machine offers a run: cores, memory, shared memory, open files, start
methods, accelerators. A line that says "warning" is followed by the remedy."""


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
        run: Callable[[argparse.Namespace], int] = vars(options).pop("run")
        code = run(options)
        sys.stdout.flush()
        return code
    except DevsampleError as error:
        print(f"devsample: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has gone, as in `devsample truths --list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
    _add_check(commands)
    _add_show(commands)
    _add_doctor(commands)
    _add_truths(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="estimate the learning coefficient of a small digits classifier",
        description=_DEMO_TEXT,
        epilog=_DEMO_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.set_defaults(run=_demo)
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


def _add_truths(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from devsample.testing import command

    truths = commands.add_parser(
        "truths",
        help="hold samplers against losses with a known learning coefficient",
        description=command.TEXT,
        epilog=command.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    truths.set_defaults(run=command.main)
    command.add_arguments(truths)


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="try a LoaderSpec and measure how fast its batches come",
        description=_CHECK_TEXT,
        epilog=_CHECK_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.set_defaults(run=_check)
    check.add_argument("target", metavar="TARGET", help="package.module:function, or a file spec.toml")
    check.add_argument("--args", type=_json, metavar="JSON", help="a list: arguments of the function")
    check.add_argument("--kwargs", type=_json, metavar="JSON", help="an object: its keyword arguments")
    check.add_argument("--batch-size", type=_at_least(1), metavar="N", help="samples per batch")
    check.add_argument("--num-samples", type=_at_least(1), metavar="N", help="n, for an iterable data set")
    check.add_argument(
        "--set",
        action="append",
        type=_setting,
        default=[],
        metavar="FIELD=VALUE",
        help="any other field of LoaderSpec; VALUE is JSON or plain text",
    )
    check.add_argument(
        "--num-workers",
        type=_numbers,
        metavar="N,N,...",
        help="numbers of workers to try (default: 0, 1, 2, ... up to the cores, at most 4)",
    )
    check.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="how long to read (default: 10)"
    )
    check.add_argument("--device", default="cpu", help="where batches end up (default: cpu)")
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.add_argument("--quiet", action="store_true", help="do not say what is being done")


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = commands.add_parser(
        "show",
        help="print a saved result",
        description="Print the summary of a result that LLCResult.save has written. Nothing in it is run.",
    )
    show.set_defaults(run=_show)
    show.add_argument("file", metavar="FILE", type=Path, help="the saved result")
    show.add_argument("--json", action="store_true", help="print everything but the draws as JSON")


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="show what this machine offers, and what to do about what is short",
        description=_DOCTOR_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected FIELD=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _numbers(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, got {text!r}") from None


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


def _check(options: argparse.Namespace) -> int:
    from devsample.data.spec import LoaderSpec

    sys.path.insert(0, os.getcwd())  # an installed program does not look there by itself
    spec = LoaderSpec.from_dict(_fields(options))
    report = spec.check(
        options.num_workers, seconds=options.seconds, device=options.device, progress=not options.quiet
    )
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of the spec: those of a file, and what was given besides."""
    target = str(options.target)
    fields = _read_file(target) if target.endswith(".toml") else {"dataset": target}
    given = {
        "dataset_args": options.args,
        "dataset_kwargs": options.kwargs,
        "batch_size": options.batch_size,
        "num_samples": options.num_samples,
    }
    return fields | dict(options.set) | {name: value for name, value in given.items() if value is not None}


def _read_file(target: str) -> dict[str, Any]:
    import tomllib

    try:
        values = tomllib.loads(Path(target).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{target} cannot be read: {error}") from error
    table = values.get("loader_spec")
    return table if isinstance(table, dict) else values


def _show(options: argparse.Namespace) -> int:
    from devsample.results import LLCResult

    result = LLCResult.load(options.file)
    print(json.dumps(result.to_dict(), indent=2) if options.json else result)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from devsample import doctor

    findings = doctor.examine()
    print(
        json.dumps([one.to_dict() for one in findings], indent=2) if options.json else doctor.text(findings)
    )
    return 0
