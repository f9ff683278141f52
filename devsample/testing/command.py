"""``devsample truths``: the truth suite from the command line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatchcase
from pathlib import Path

from devsample.errors import InvalidArgumentError

TEXT = """\
Run samplers on losses whose nβ (E[L] − L(w*)) is known at a finite nβ, with step size and
length by rule, and print what they find. A sampler passes a case if it is within four
standard errors of the exact value and within the case's tolerance (1 or 2 %), with a
standard error of at most 0.4 %. It must pass wherever the rule predicts at most 1e8
chain-steps (1e10 gradients for HMC); SGLD, SGHMC, SGNHT and RMSPropSGLD must also
pass the quadratic cases, linear regression, and reduced rank with λ ≥ 1 and nβ ≤ 1e4. Each
case must be passed by some sampler. The exit code is 1 if that does not hold."""

EXAMPLES = """\
examples:
  devsample truths --list                              the cases, nothing is run
  devsample truths --sampler SGLD --case 'quad_*'      one sampler on some cases
  devsample truths --jobs 2 --out truths               everything; also truths.md and truths.json, which
                                                       grow case by case and replace older ones"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``devsample truths``."""
    parser.add_argument("--case", action="append", metavar="NAME", help="a case, or a pattern; repeatable")
    parser.add_argument("--sampler", action="append", metavar="NAME", help="a sampler; repeatable")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument(
        "--all", action="store_true", help="run what is not required, too; this may take days"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and leave")
    parser.add_argument("--out", type=Path, metavar="STEM", help="write STEM.md and STEM.json")


def main(options: argparse.Namespace) -> int:
    """Carry out ``devsample truths``; returns the exit code."""
    from devsample.samplers import SAMPLERS
    from devsample.testing.cases import all_cases

    names = _chosen([one.name for one in all_cases()], options.case, "--case")
    samplers = _chosen(list(SAMPLERS), options.sampler, "--sampler")
    if options.jobs < 1:
        raise InvalidArgumentError(f"--jobs: expected a number ≥ 1, got {options.jobs}.")
    if options.list:
        for one in all_cases():
            if one.name in names:
                scales = f"P={one.num_parameters:<5} nβ={one.nbeta:<10.6g} γ={one.gamma:<6g}"
                print(f"{one.name:38} {scales} {one.expected:.6g}")
        return 0
    all_samplers, started = len(samplers) == len(SAMPLERS), time.monotonic()
    out = None if options.out is None else _Files(options.out)
    lines: list[Line] = []
    for found in _run(names, samplers, options.jobs, options.all):
        lines += found
        if out is not None:
            out.write(lines, _report(lines, names, all_samplers=False))
    text = _report(lines, names, all_samplers=all_samplers)
    text += f"\nWall time with {options.jobs} process(es): {(time.monotonic() - started) / 60:.1f} minutes."
    print(text)
    if out is not None:
        out.write(lines, text)
    return 1 if failures(lines, names, all_samplers=all_samplers) else 0


Line = dict[str, object]
_HEADING = "| case | sampler | exact |"  # in a table of ours
_MARK = '"case": '  # in a JSON file of ours


class _Files:
    """STEM.md and STEM.json, whole at any time.

    Raises:
        InvalidArgumentError: there is no such folder, or another file has the name.
    """

    def __init__(self, stem: Path) -> None:
        self.text, self.rows = (stem.with_name(stem.name + ending) for ending in (".md", ".json"))
        if not stem.parent.is_dir():
            raise InvalidArgumentError(f"--out: there is no folder {stem.parent}.")
        for path, mark in ((self.text, _HEADING), (self.rows, _MARK)):
            if path.exists() and mark not in path.read_text(encoding="utf-8", errors="replace"):
                raise InvalidArgumentError(f"--out: {path} is another file; it was left as it is.")

    def write(self, lines: Sequence[Line], text: str) -> None:
        """Replace both."""
        from devsample.checkpoints import write_bytes

        rows = [{key: value for key, value in line.items() if key != "row"} for line in lines]
        write_bytes(self.text, (text + "\n").encode())
        write_bytes(self.rows, json.dumps(rows, indent=1).encode())


def _chosen(known: Sequence[str], patterns: Iterable[str] | None, option: str) -> list[str]:
    if patterns is None:
        return list(known)
    chosen: list[str] = []
    for pattern in patterns:
        hits = [name for name in known if fnmatchcase(name, pattern)]
        if not hits:
            raise InvalidArgumentError(f"{option}: {pattern!r} names none of {', '.join(known)}.")
        chosen += [name for name in hits if name not in chosen]
    return chosen


def _run(names: Sequence[str], samplers: Sequence[str], jobs: int, everything: bool) -> Iterator[list[Line]]:
    """A line for each sampler, case by case as they come; the slowest cases start first."""
    from tqdm import tqdm

    from devsample.testing.cases import case

    names = sorted(names, key=lambda name: -case(name).nbeta * case(name).num_parameters)
    with (
        _single_threads(),
        _pool(min(jobs, len(names))) as pool,
        tqdm(total=len(names), unit="case", file=sys.stderr) as bar,
    ):
        waiting = [pool.submit(run_case, name, tuple(samplers), everything) for name in names]
        for done in as_completed(waiting):
            for line in done.result():
                tqdm.write(str(line["row"]), file=sys.stderr)
            bar.update()
            yield done.result()


@contextlib.contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with this one, and at once if it is interrupted."""
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
        raise
    finally:
        pool.shutdown()


def _start_worker() -> None:
    from devsample.machine import leave_with_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends them
    leave_with_parent()


class _single_threads:  # noqa: N801 - read as a word
    """Processes that start within compute with one thread each."""

    def __enter__(self) -> None:
        self._before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = self._before


def run_case(name: str, samplers: Sequence[str], everything: bool = False) -> list[Line]:
    """Run the samplers on a case, where they are required to pass it; a line for each."""
    from devsample.testing.cases import case
    from devsample.testing.suite import Outcome, plan, row, run

    lines: list[Line] = []
    for sampler in samplers:
        planned = plan(case(name), sampler)
        one = run(planned) if planned.is_required or everything else planned
        line: Line = {
            "case": name,
            "sampler": sampler,
            "exact": planned.case.expected,
            "predicted": planned.predicted,
            "required": planned.is_required,
            "lr": planned.kernel.lr,  # type: ignore[attr-defined]
            "rows": planned.rows,
            "row": row(one),
        }
        if isinstance(one, Outcome):
            line |= {key: value for key, value in dataclasses.asdict(one).items() if key != "plan"}
            line |= {"z": one.z, "deviation": one.deviation, "passed": one.passed}
        lines.append(line)
    return lines


def failures(lines: Sequence[Line], names: Sequence[str], *, all_samplers: bool) -> list[str]:
    """What must not be: required runs that did not pass, and cases that no sampler passed."""
    failed = [
        f"{line['sampler']} does not pass {line['case']}"
        for line in lines
        if line["required"] and not line.get("passed")
    ]
    solved = {line["case"] for line in lines if line.get("passed")}
    if all_samplers:
        failed += [f"no sampler passes {name}" for name in names if name not in solved]
    return failed


def _report(lines: Sequence[Line], names: Sequence[str], *, all_samplers: bool) -> str:
    from devsample.testing.suite import HEADER

    order = {name: number for number, name in enumerate(names)}
    ordered = sorted(lines, key=lambda line: (order[str(line["case"])], str(line["sampler"])))
    done = [line for line in ordered if "passed" in line]
    passed = sum(bool(line["passed"]) for line in done)
    text = [*HEADER, *(str(line["row"]) for line in ordered), ""]
    left = len(ordered) - len(done)
    text.append(f"{passed} of {len(done)} runs passed; {left} that the rule does not ask for were not run.")
    text += failures(lines, names, all_samplers=all_samplers)
    return "\n".join(text)
