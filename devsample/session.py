"""A chain process's work: build model and loader once, then prepare the run or run chains.

`run_chain` is the one entry of every executor. It never raises: what goes wrong is its outcome.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from devsample import ambient, rerun
from devsample.baseline import CenterLosses
from devsample.callbacks import Caller, dump_state
from devsample.chain import PROBE_STEPS, Group
from devsample.checkpoints import Checkpoint, load_checkpoint, write_json
from devsample.data.loader import ChainLoader
from devsample.data.worker import BatchRequest
from devsample.errors import LoaderWorkerError
from devsample.flat import FlatParameters
from devsample.fulldata import FullData
from devsample.objective import Objective, preserved_process_state
from devsample.observables import record_type, stepbias
from devsample.observing.center import look_at_center
from devsample.observing.sources import Sources
from devsample.outcomes import failed, failed_chain
from devsample.payload import Parts, PayloadReader, Skeleton, load_model
from devsample.prepare import Setting, prepare
from devsample.probes import Probe
from devsample.records import RecordWriter
from devsample.samplers import Kernel
from devsample.samplers.langevin import LangevinKernel
from devsample.schedule import Row
from devsample.serialize import dumps, short_error
from devsample.specs import Prepared
from devsample.stacked import quiet
from devsample.types import ChainOutcome, Emit, Event, Job, Outcome, Task

_LARGEST_CHECK_BATCH = 1 << 26
_CURVATURE_CHAINS = (0, 1)  # whose last states show the largest curvature, in 48 gradients each
_CURVATURE_ITERATIONS, _CURVATURE_STEPS = 6, 4


@dataclass(frozen=True)
class LocalObjects:
    """The caller's own objects, for chains that run in the caller's process."""

    model: Skeleton
    parts: Parts


class Session:
    """Model, loader and evaluate of one process, built once and used for all its tasks.

    Args:
        job: where the payload is, or the caller's own objects.
        device: where this process computes.
    """

    def __init__(self, job: Job, device: str) -> None:
        self._job, self._device = job, torch.device(device)
        self._name = device
        if isinstance(job.local, LocalObjects):
            self._reader, model, self._parts = None, job.local.model, job.local.parts
        else:
            self._reader = PayloadReader(job.run_dir, job.payload_sha256)
            ambient.apply(self._reader.load("ambient"))
            model, self._parts = self._reader.load("model"), self._reader.parts()
        self._keys = self._parts.run.keys()
        self._full: FullData | None = None
        self._not_stackable = ""
        with _plain_mode(self._device):
            self._model = load_model(model, job.run_dir, self._device)
            self._loader = ChainLoader(
                self._parts.loader_spec,
                self._keys,
                grad_accum_steps=self._parts.run.grad_accum_steps,
                device=self._device,
            )
        spec = self._parts.loader_spec
        self._sources = Sources(self._parts.observables, spec, self._keys, self._device)

    def run(self, task: Task, emit: Emit) -> Outcome:
        """Do one task. Never raises, except for an interrupt from the keyboard."""
        try:
            with preserved_process_state(), _plain_mode(self._device):
                torch.set_num_threads(self._job.threads)
                if task.kind == "prepare":
                    return self._prepare(task)
                return self._run_chains(task, emit)
        except Exception as error:
            return failed(task, error)

    def close(self) -> None:
        """End the loader's workers."""
        self._loader.close()
        self._sources.close()

    def _prepare(self, task: Task) -> Outcome:
        parts = self._parts
        setting = Setting(
            self._model,
            parts.evaluate,
            parts.masks,
            parts.sampler,
            parts.run,
            self._keys[0],
            self._loader,
        )
        prepared, batch, kept = prepare(setting)
        stepbias.check_sampling(parts.observables, prepared.sampling)
        prepared = self._observe_center(prepared, batch)
        if kept is not None:
            kept.save(self._job.run_dir)
        write_json(self._job.run_dir / "prepared.json", prepared.to_dict())
        return Outcome(task, prepared=prepared.to_dict() | {"check_batch": _batch_bytes(batch)})

    def _observe_center(self, prepared: Prepared, batch: Any) -> Prepared:
        """Add what the observables are at w*; what is wrong with them is an error before the first chain."""
        observables, key = self._parts.observables, self._keys[0]
        if not observables:
            return prepared
        objective, kernel = self._objective(prepared), self._kernel(prepared)
        found = look_at_center(observables, objective, self._sources, key, prepared, kernel, batch)
        return dataclasses.replace(prepared, observed=found)

    def _run_chains(self, task: Task, emit: Emit) -> Outcome:
        size = self._parts.run.group_size
        groups = [task.chains[start : start + size] for start in range(0, len(task.chains), size)]
        callbacks = self._parts.callbacks
        if self._reader is not None and callbacks:
            callbacks = self._reader.load("callbacks")
        outcomes: list[ChainOutcome] = []
        lost = False
        for group in groups:
            done, error = self._run_group(group, callbacks, task, emit)
            outcomes += done
            lost = lost or (isinstance(error, LoaderWorkerError) and error.lost)
        return Outcome(
            task,
            tuple(outcomes),
            retryable=lost,
            callbacks=dump_state(callbacks) if self._reader is not None else None,
        )

    def _run_group(
        self, chains: Sequence[int], callbacks: Sequence[Any], task: Task, emit: Emit
    ) -> tuple[list[ChainOutcome], Exception | None]:
        started, attempt = time.monotonic(), task.attempt
        group: Group | None = None
        error: Exception | None = None
        noise: dict[int, dict[str, Any]] = {}
        try:
            group = self._group(chains, callbacks, task, emit)
            noise = self._draw(group)
        except Exception as caught:
            error = caught
        finally:  # what was drawn before an error or an interrupt is kept
            if group is not None:
                group.close()
        if group is None:
            reason = error or RuntimeError("not started")
            ended = [failed_chain(chain, reason, attempt) for chain in chains]
        else:
            seconds = time.monotonic() - started
            ended = [
                self._outcome(row, group, error, noise.get(row.chain, {}), attempt, seconds)
                for row in group.rows
            ]
        for outcome in ended:
            self._write_outcome(outcome)
        return ended, error

    def _folder(self, chain: int) -> Path:
        return self._job.run_dir / "chains" / str(chain)

    def _row(self, chain: int, resumed: Checkpoint | None) -> Row:
        folder = self._folder(chain)
        folder.mkdir(parents=True, exist_ok=True)
        record = record_type(self._parts.observables)
        offset = None if resumed is None else resumed.offset
        writer = RecordWriter(folder / "draws.bin", chain, record, offset=offset)
        return Row(chain, self._keys[chain], folder, writer)

    def _checkpoints(self, chains: Sequence[int]) -> list[Checkpoint]:
        """Where the chains of a group go on: all at the same step, or, if one has no state, at the start."""
        paths = [self._folder(chain) / "checkpoint.safetensors" for chain in chains]
        if not all(path.exists() for path in paths):
            return []
        found = [load_checkpoint(path) for path in paths]
        return found if len({one.step for one in found}) == 1 else []

    def _group(self, chains: Sequence[int], callbacks: Sequence[Any], task: Task, emit: Emit) -> Group:
        parts, prepared = self._parts, self._read_prepared()
        self._not_stackable = prepared.not_stackable
        objective = self._objective(prepared)
        resumed = self._checkpoints(chains) if task.resume else []
        rows = [self._row(chain, resumed[number] if resumed else None) for number, chain in enumerate(chains)]
        for row in rows:
            emit(Event("started", row.chain, device=self._name))
        return Group(
            rows,
            objective,
            self._loader,
            self._kernel(prepared),
            parts.run,
            prepared,
            objective.flat.read(),
            full=self._full,
            kept=CenterLosses.load(self._job.run_dir) if prepared.baseline_cache else None,
            observables=parts.observables,
            sources=self._sources,
            on_draw=Caller(callbacks) if callbacks else None,
            emit=emit,
            draws=task.draws,
            resumed=resumed,
        )

    def _kernel(self, prepared: Prepared) -> Kernel:
        return self._parts.sampler.kernel(
            lr=prepared.lr, nbeta=prepared.nbeta, localization=prepared.localization
        )

    def _objective(self, prepared: Prepared) -> Objective:
        parts = self._parts
        return Objective(
            self._model,
            parts.evaluate,
            FlatParameters(self._model, {name: parts.masks[name] for name in prepared.moving}),
            train_mode=parts.run.train_mode,
            autocast_dtype=parts.run.autocast_dtype,
            seeded=prepared.uses_randomness,
            needs_grad=prepared.needs_grad,
            weighted=prepared.averaged_by == "weight",
        )

    def _draw(self, group: Group) -> dict[int, dict[str, Any]]:
        """All steps of a group, then what is measured at its last states, by chain."""
        found: dict[int, dict[str, Any]] = {}
        try:
            steps = self._rerun_steps(group)
            asked = itertools.chain(group.requests(), rerun.requests(self._loader, group.rows, steps))
            served = self._loader.serve(asked)
            group.run(served)
            self._full = group.full
            group.save()
            if not all(row.alive for row in group.rows):
                return {}
            try:  # the draws are there; the measurement is an extra
                what = "gradient noise"
                found = self._probe(group, served)
                what = "step bias"
                return self._rerun(group, served, steps, found) if steps else found
            except Exception as error:
                for row in group.rows:
                    row.note = f"its {what} could not be measured ({short_error(error)})"
                return found
        finally:  # the next group starts from the same model
            group.objective.flat.point_to(group.center)
            group.objective.reset_buffers()

    def _rerun_steps(self, group: Group) -> int:
        asked = stepbias.wanted(self._parts.observables)
        return 0 if asked is None else asked.steps(group.schedule.total)

    def _rerun(
        self, group: Group, served: Any, steps: int, found: dict[int, dict[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """What was found so far, with the step bias of each chain."""
        with quiet():
            measured = rerun.measure(group, served, steps, group.kernel.nbeta)  # type: ignore[attr-defined]
        for row, values in zip(group.rows, measured, strict=True):
            found[row.chain]["rerun_steps"] = steps
            if all(map(math.isfinite, values)):
                found[row.chain]["step_bias"] = values
            else:
                row.note = "its step bias could not be measured (the loss did not stay finite)"
        return found

    def _probe(self, group: Group, served: Any) -> dict[int, dict[str, Any]]:
        """Gradient noise, curvature and, if the steps have a bias, tr H at each chain's last state.

        With a preconditioner G all of it is in the coordinates in which G is 1, and the curvature that of
        L + (γ + μ)/2nβ |w|².
        """
        moved = {
            row.chain: group.objective.flat.share_moved(group.center, position)
            for row, position in zip(group.rows, group.position, strict=True)
        }
        if group.kernel.full_data:
            return {chain: {"gradient_noise": 0.0, "moved": share} for chain, share in moved.items()}
        anchor = group.center if getattr(group.kernel, "control_variate", False) else None
        scales, pull = group.step_scales(), _pull(group.kernel)
        found: dict[int, dict[str, Any]] = {}
        for number, row in enumerate(group.rows):
            steps: list[list[tuple[int, Any]]] = [[] for _ in range(PROBE_STEPS)]
            for step in steps:
                request: BatchRequest | None = None
                while request is None or not request.last:
                    request, data = next(served)
                    step.append((len(request.indices), data))
            probe = Probe(group.objective, steps, row.key)
            scale = None if scales is None else scales[number]
            found[row.chain] = {
                "gradient_noise": probe.gradient_noise(group.position[number], anchor, scale),
                "moved": moved[row.chain],
            }
            if group.kernel.step_bias:
                found[row.chain]["hessian_trace"] = probe.hessian_trace(group.position[number], scale=scale)
            if row.chain in _CURVATURE_CHAINS:
                found[row.chain]["curvature"] = probe.largest_curvature(
                    group.position[number],
                    iterations=_CURVATURE_ITERATIONS,
                    steps=_CURVATURE_STEPS,
                    scale=scale,
                    pull=pull,
                )
        return found

    def _read_prepared(self) -> Prepared:
        import json

        return Prepared.from_dict(json.loads((self._job.run_dir / "prepared.json").read_text()))

    def _outcome(
        self,
        row: Row,
        group: Group,
        error: Exception | None,
        noise: dict[str, Any],
        attempt: int,
        seconds: float,
    ) -> ChainOutcome:
        if error is not None:
            base = failed_chain(row.chain, error, attempt)
        elif not row.alive:
            base = ChainOutcome(
                row.chain,
                "diverged",
                message=f"the loss was not finite at step {row.diverged_at}; lower lr or nbeta",
            )
        else:
            base = ChainOutcome(
                row.chain,
                "done",
                message=row.note,
                gradient_noise=noise.get("gradient_noise"),
                hessian_trace=noise.get("hessian_trace"),
                curvature=noise.get("curvature"),
                moved=noise.get("moved"),
                step_bias=noise.get("step_bias"),
                rerun_steps=noise.get("rerun_steps", 0),
            )
        return dataclasses.replace(
            base,
            num_draws=row.draws,
            steps=group.step,
            seconds=seconds,
            attempt=attempt,
            device=self._name,
        )

    def _write_outcome(self, outcome: ChainOutcome) -> None:
        folder = self._folder(outcome.chain)
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "outcome.json", dataclasses.asdict(outcome))
            with (folder / "log.txt").open("a") as log:
                if self._not_stackable:
                    log.write(
                        f"Its process computes its chains one after the other: {self._not_stackable}.\n"
                    )
                log.write(
                    f"{time.strftime('%Y-%m-%dT%H:%M:%S')} attempt {outcome.attempt} on {outcome.device}: "
                    f"{outcome.status} after {outcome.steps} steps, {outcome.num_draws} draws, "
                    f"{outcome.seconds:.1f} s. {outcome.message}\n{outcome.traceback}"
                )


def run_chain(
    payload_sha256: str,
    chains: Sequence[int],
    run_dir: Path,
    attempt: int,
    emit: Emit,
    *,
    device: str = "cpu",
    threads: int = 1,
) -> Outcome:
    """Run ``chains`` of the run in ``run_dir`` in this process; never raises.

    Args:
        payload_sha256: hash of the run's ``payload.bin``, as the one who started the run gave it.
        chains: chain numbers.
        run_dir: the run folder, already prepared.
        attempt: how often these chains were tried before.
        emit: called with events; files are the truth.
        device: where to compute.
        threads: CPU threads.
    """
    task = Task("chains", tuple(chains), attempt)
    try:
        session = Session(Job(run_dir, payload_sha256, threads), device)
    except Exception as error:
        return failed(task, error)
    try:
        return session.run(task, emit)
    finally:
        session.close()


def _pull(kernel: Kernel) -> float:
    """(γ + μ)/nβ: what localization and prior add to the curvature of L."""
    if not isinstance(kernel, LangevinKernel):
        return 0.0
    return (kernel.localization + kernel.weight_decay) / kernel.nbeta


@contextlib.contextmanager
def _plain_mode(device: torch.device) -> Iterator[None]:
    """The modes of a new process, whatever the caller has switched on around the call.

    torch keeps the casts of weights that autocast makes until the outermost block ends, the caller's or
    this one: a model would compute with the weights of its first step for ever. So nothing is kept, in
    blocks within this one either.
    """
    no_autocast = torch.autocast(device.type, enabled=False, cache_enabled=False)
    elsewhere = torch.get_default_device().type != "cpu"  # a mode costs time at every call of torch
    on_cpu = torch.device("cpu") if elsewhere else contextlib.nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), on_cpu, no_autocast:
        yield


def _batch_bytes(batch: Any) -> bytes:
    """A batch on the CPU as bytes, or nothing if it is large or cannot be sent."""
    from devsample.data.batches import to_device

    try:
        data = dumps(to_device(batch, torch.device("cpu")))
    except Exception:  # a check that cannot be made is left out
        return b""
    return data if len(data) <= _LARGEST_CHECK_BATCH else b""
