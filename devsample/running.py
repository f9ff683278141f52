"""Carries out a plan: run folder, slots, preparation, chains, and the draws they leave."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from devsample import ambient, errors
from devsample.arguments import Plan
from devsample.baseline import FILE as CENTER_FILE
from devsample.callbacks import merge_state
from devsample.caller import check_center_loss
from devsample.chain import RECORD
from devsample.checkpoints import write_json
from devsample.errors import (
    AllChainsFailedError,
    ChainProcessError,
    DevsampleError,
    RunFolderError,
)
from devsample.executors.inline import InlineExecutor
from devsample.executors.processes import ProcessExecutor
from devsample.executors.progress import Progress
from devsample.executors.supervisor import supervise
from devsample.observables import columns_of, record_type
from devsample.payload import Skeleton, home_device, pack_model, pack_parts, write_payload
from devsample.records import read_records
from devsample.serialize import loads, pack, save_storages
from devsample.session import LocalObjects
from devsample.specs import Prepared
from devsample.types import ChainOutcome, Event, Executor, Job, Outcome, Task

if TYPE_CHECKING:
    import pandas as pd


_INPUTS = (
    "weights.safetensors",
    "data.safetensors",
    "payload.bin",
    "prepared.json",
    "manifest.json",
    CENTER_FILE,
)


@dataclass
class Finished:
    """What is left of a run when its chains are over."""

    prepared: Prepared
    outcomes: dict[int, ChainOutcome]
    draws: pd.DataFrame
    seconds: float
    run_dir: Path | None
    retries: list[str] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    num_draws: int = 0


class Rounds(Protocol):
    """Decides after each round of draws whether there is another."""

    def next(self, num_draws: int, traces: Sequence[np.ndarray], seconds: float) -> int | None:
        """Draws a chain is to have after the next round, or None.

        Args:
            num_draws: draws that a chain has.
            traces: llc of the chains that ended well, one array each.
            seconds: since the run began.
        """


def carry_out(plan: Plan, rounds: Rounds | None = None) -> Finished:
    """Run all chains of ``plan``; leaves no process and no temporary file behind.

    Args:
        plan: the run.
        rounds: whether chains go on after they have their draws; None: they do not.
    """
    started = time.monotonic()
    with _run_folder(plan) as folder:
        job = _write_inputs(plan, folder)
        executor = plan.executor or (ProcessExecutor() if plan.in_processes else InlineExecutor())
        run = _Run(plan, folder, executor)
        try:
            if plan.verbose and plan.in_processes:
                workers = plan.parts.loader_spec.num_workers
                slots = f"starting {len(plan.slots)} chain processes"
                sys.stderr.write(f"{slots}, {workers} loader workers each\n")
            executor.open(job, plan.slots, run.on_event)
            prepared = run.prepare()
            num_draws = run.sample(prepared, rounds)
        except BaseException:
            executor.cancel()
            raise
        finally:
            executor.close()
        draws = read_draws(folder, plan.parts.run.num_chains)
        finished = Finished(
            prepared, run.outcomes, draws, time.monotonic() - started, plan.run_dir, run.retries
        )
        finished.num_draws = num_draws
        finished.arrays = read_arrays(folder, plan, num_draws)
        _write_manifest(plan, folder, prepared, "complete", run.outcomes, num_draws)
        _check_outcomes(plan, finished)
        return finished


class _Run:
    """One run under way: its executor, its progress bar, and the outcomes so far."""

    def __init__(self, plan: Plan, folder: Path, executor: Executor) -> None:
        self._plan, self._folder, self._executor = plan, folder, executor
        self._progress: Progress | None = None
        self._said: set[str] = set()
        self._started = time.monotonic()
        self.outcomes: dict[int, ChainOutcome] = {}
        self.retries: list[str] = []

    def prepare(self) -> Prepared:
        """Let one slot measure at w*, check it against the caller's model, and write the manifest."""
        found: list[Outcome] = []
        supervise(
            self._executor,
            [Task("prepare")],
            retry=self._plan.on_failure == "retry",
            on_outcome=found.append,
            on_retry=self._note_retry,
        )
        outcome = found[0]
        if outcome.prepared is None:
            raise _as_error(outcome)
        batch = outcome.prepared.pop("check_batch")
        prepared = Prepared.from_dict(outcome.prepared)
        plan = self._plan
        same_kind = home_device(plan.model).type == torch.device(plan.slots[0]).type
        if batch and same_kind:  # else other kernels and random streams
            loaded = loads(batch)
            check_center_loss(plan.model, plan.parts, loaded, prepared, plan.threads)
        _write_manifest(self._plan, self._folder, prepared, "running", {})
        return prepared

    def sample(self, prepared: Prepared, rounds: Rounds | None) -> int:
        """Run all chains, in one round or several; returns the draws that each was to make."""
        run = self._plan.parts.run
        chains = range(run.num_chains)
        groups = [
            tuple(chains[start : start + run.group_size]) for start in range(0, len(chains), run.group_size)
        ]
        steps = prepared.num_burnin_steps + run.num_draws * run.num_steps_bw_draws
        with Progress(steps * run.num_chains, self._plan.verbose) as self._progress:
            self._progress.say(_settings_line(prepared))
            self._round([Task("chains", group) for group in groups])
            num_draws = run.num_draws
            while rounds is not None:
                more = rounds.next(num_draws, self._traces(), time.monotonic() - self._started)
                if more is None:
                    break
                steps += (more - num_draws) * run.num_steps_bw_draws
                num_draws = more
                self._progress.extend(steps * run.num_chains)
                good = [
                    tuple(one for one in group if self.outcomes[one].status == "done") for group in groups
                ]
                self._round([Task("chains", group, draws=more, resume=True) for group in good if group])
            return num_draws

    def _round(self, tasks: Sequence[Task]) -> None:
        supervise(
            self._executor,
            tasks,
            retry=self._plan.on_failure == "retry",
            on_outcome=self._take,
            on_retry=self._note_retry,
        )

    def _traces(self) -> list[np.ndarray]:
        """The llc of the chains that have ended well so far."""
        good = [chain for chain, one in sorted(self.outcomes.items()) if one.status == "done"]
        return [read_records(self._folder / "chains" / str(chain) / "draws.bin")[1]["llc"] for chain in good]

    def on_event(self, event: Event) -> None:
        """Progress from a chain."""
        if self._progress is not None:
            self._progress(event)
        if event.kind == "warning" and event.text not in self._said:
            self._said.add(event.text)
            kind = getattr(errors, event.category, errors.DevsampleWarning)
            warnings.warn(event.text, kind, stacklevel=2)
        if event.kind != "records":
            return
        rows = np.frombuffer(event.rows, record_type(self._plan.parts.observables))
        if self._progress is not None:
            self._progress.draws(rows["llc"])
        if self._plan.on_records is not None:
            self._plan.on_records(_frame(event.chain, rows))

    def _take(self, outcome: Outcome) -> None:
        for chain in outcome.chains:
            before = self.outcomes.get(chain.chain)
            if before is not None:  # an earlier round
                seconds = chain.seconds + before.seconds
                steps = chain.rerun_steps + before.rerun_steps
                self.outcomes[chain.chain] = dataclasses.replace(chain, seconds=seconds, rerun_steps=steps)
            else:
                self.outcomes[chain.chain] = chain
            if self._progress is not None:
                self._progress.advance(chain.chain, chain.steps)
                if chain.status != "done":
                    self._progress.say(f"chain {chain.chain} {chain.status}: {chain.message}")
        if outcome.callbacks is not None:
            done = [chain.chain for chain in outcome.chains]
            merge_state(self._plan.parts.callbacks, outcome.callbacks, done, self._plan.parts.run.num_chains)

    def _note_retry(self, outcome: Outcome) -> None:
        chains = ", ".join(str(chain) for chain in outcome.task.chains)
        text = f"chain {chains}: {outcome.error or outcome.chains[0].message}; trying again"
        self.retries.append(text)
        if self._progress is not None:
            self._progress.say(text)


def read_draws(folder: Path, num_chains: int) -> pd.DataFrame:
    """All whole draws in a run folder: columns chain, draw, step, loss, baseline, llc."""
    import pandas as pd

    frames = []
    for chain in range(num_chains):
        path = folder / "chains" / str(chain) / "draws.bin"
        rows = read_records(path)[1] if path.exists() else np.empty(0, RECORD)
        frames.append(_frame(chain, rows))
    return pd.concat(frames, ignore_index=True)


def read_arrays(folder: Path, plan: Plan, num_draws: int) -> dict[str, np.ndarray]:
    """What a run records as arrays, by name: (num_chains, num_draws, ...), NaN where there is nothing."""
    run, found = plan.parts.run, {}
    for name, shape in columns_of(plan.parts.observables):
        if not shape:
            continue
        found[name] = np.full((run.num_chains, num_draws, *shape), np.nan)
        for chain in range(run.num_chains):
            path = folder / "chains" / str(chain) / "draws.bin"
            if path.exists():
                rows = read_records(path)[1]
                found[name][chain, rows["draw"]] = rows[name]
    return found


def _frame(chain: int, rows: np.ndarray) -> pd.DataFrame:
    import pandas as pd

    columns = {name: rows[name] for name in rows.dtype.names or () if rows[name].ndim == 1}
    return pd.DataFrame({"chain": np.full(len(rows), chain, dtype=np.int64), **columns})


@contextlib.contextmanager
def _run_folder(plan: Plan) -> Iterator[Path]:
    """The run folder; a temporary one is removed whatever happens."""
    if plan.run_dir is not None:
        try:
            plan.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"run_dir: {plan.run_dir} cannot be made: {error}.") from error
        try:
            yield plan.run_dir
        except BaseException:
            if not (plan.run_dir / "chains").exists():  # nothing was drawn: the folder can be used again
                for name in _INPUTS:
                    (plan.run_dir / name).unlink(missing_ok=True)
            raise
        return
    folder = Path(tempfile.mkdtemp(prefix="devsample-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_inputs(plan: Plan, folder: Path) -> Job:
    """Weights and payload; for chains in this process the objects themselves are used."""
    packed = pack_model(plan.model)
    skeleton = Skeleton(packed.data, str(home_device(plan.model)))
    if not plan.in_processes:
        save_storages(packed.storages, folder / "weights.safetensors")
        return Job(folder, "", plan.threads, local=LocalObjects(skeleton, plan.parts))
    parts = pack_parts(plan.parts)
    parts["model"] = pack(skeleton, "model")
    parts["ambient"] = pack(ambient.capture(), "ambient")
    save_storages(packed.storages, folder / "weights.safetensors")
    temporary = plan.run_dir is None
    sha256 = write_payload(folder, parts, temporary=temporary)
    return Job(folder, sha256, plan.threads, temporary=temporary)


def _settings_line(prepared: Prepared) -> str:
    """What was decided, in two lines."""
    text = f"n = {prepared.num_samples}, nbeta = {prepared.nbeta:.5g} ({prepared.nbeta_rule})"
    if prepared.nbeta_rule == "n/ln n" and prepared.nbeta_batch is not None:
        text += f'; devinterp\'s rule, nbeta="batch": {prepared.nbeta_batch:.5g}'
    text += f"\nlr = {prepared.lr:.3g}, localization = {prepared.localization:.3g}"
    if prepared.curvature is not None:
        text += f", burn-in = {prepared.num_burnin_steps}"
        text += f" (chosen from the largest curvature, {prepared.curvature:.3g})"
    if prepared.not_stackable:
        text += f"\nthe chains of a process are computed one after the other: {prepared.not_stackable}"
    if prepared.unused:
        listed = ", ".join(prepared.unused[:4]) + (" …" if len(prepared.unused) > 4 else "")
        text += f"\n{len(prepared.unused)} parameters get no gradient and stay: {listed}"
    return text


def _check_outcomes(plan: Plan, finished: Finished) -> None:
    """Raise if nothing can be estimated, or if a failure was to be an error."""
    bad = [chain for chain in finished.outcomes.values() if chain.status != "done"]
    if not bad:
        return
    listed = "\n".join(f"  chain {chain.chain} {chain.status}: {chain.message}" for chain in bad[:8])
    first = next((chain.traceback for chain in bad if chain.traceback), "")
    details = f"{listed}\n\nIn chain {bad[0].chain}:\n{first}" if first else listed
    failure: errors.RunError
    if len(bad) == plan.parts.run.num_chains:
        failure = AllChainsFailedError(f"no chain gave a usable trace.\n{details}")
    elif plan.on_failure == "raise":
        failure = ChainProcessError(f"{len(bad)} of {plan.parts.run.num_chains} chains failed.\n{details}")
    else:
        return
    failure.draws = finished.draws
    raise failure


def _as_error(outcome: Outcome) -> DevsampleError:
    """The error of a task that failed in its process, of the same kind here."""
    kind = getattr(errors, outcome.error_type, ChainProcessError)
    text = outcome.error
    if kind is ChainProcessError and outcome.error_type not in ("ChainProcessError", ""):
        text = f"{outcome.error_type}: {text}" if not text.startswith(outcome.error_type) else text
    if outcome.traceback:
        text += f"\n\nWhere it was raised:\n{outcome.traceback}"
    error: DevsampleError = kind(text)
    return error


def _write_manifest(
    plan: Plan,
    folder: Path,
    prepared: Prepared,
    status: str,
    outcomes: dict[int, ChainOutcome],
    num_draws: int | None = None,
) -> None:
    import devsample

    run = dataclasses.asdict(plan.parts.run) | {"autocast_dtype": str(plan.parts.run.autocast_dtype)}
    manifest = {
        "format": 1,
        "status": status,
        "versions": {
            "devsample": devsample.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": sys.version.split()[0],
        },
        "sampler": {
            "name": plan.parts.sampler.kind.__name__,
            "options": {k: repr(v) for k, v in plan.parts.sampler.options.items()},
        },
        "run": run | ({} if num_draws is None else {"num_draws": num_draws}),
        "until": None if plan.until is None else repr(plan.until),
        "layout": {
            "threads_per_chain": plan.threads,
            "chains_per_process": plan.parts.run.group_size,
        },
        "slots": list(plan.slots),
        "prepared": prepared.to_dict(),
        "chains": {str(chain): one.status for chain, one in sorted(outcomes.items())},
    }
    write_json(folder / "manifest.json", manifest)
