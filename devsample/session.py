"""A chain process's work: build model and loader once, then prepare the run or run chains.

`run_chain` is the one entry of every executor. It never raises: what goes wrong is its outcome.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from devsample import ambient
from devsample.callbacks import Caller, dump_state
from devsample.chain import PROBE_STEPS, Group, Row
from devsample.checkpoints import write_json
from devsample.data.loader import ChainLoader
from devsample.data.worker import BatchRequest
from devsample.errors import DevsampleError, LoaderError, LoaderWorkerError
from devsample.flat import FlatParameters
from devsample.fulldata import FullData
from devsample.objective import Objective, preserved_process_state
from devsample.observables import record_type
from devsample.payload import Parts, PayloadReader, Skeleton, load_model
from devsample.prepare import Setting, prepare
from devsample.probes import Probe
from devsample.records import RecordWriter
from devsample.serialize import dumps, short_error
from devsample.specs import Prepared
from devsample.types import ChainOutcome, Emit, Event, Job, Outcome, Task

_LARGEST_CHECK_BATCH = 1 << 26


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
        prepared, batch = prepare(setting)
        write_json(self._job.run_dir / "prepared.json", prepared.to_dict())
        return Outcome(task, prepared=prepared.to_dict() | {"check_batch": _batch_bytes(batch)})

    def _run_chains(self, task: Task, emit: Emit) -> Outcome:
        size = self._parts.run.group_size
        groups = [task.chains[start : start + size] for start in range(0, len(task.chains), size)]
        callbacks = self._parts.callbacks
        if self._reader is not None and callbacks:
            callbacks = self._reader.load("callbacks")
        outcomes: list[ChainOutcome] = []
        lost = False
        for group in groups:
            done, error = self._run_group(group, callbacks, task.attempt, emit)
            outcomes += done
            lost = lost or (isinstance(error, LoaderWorkerError) and error.lost)
        return Outcome(
            task,
            tuple(outcomes),
            retryable=lost,
            callbacks=dump_state(callbacks) if self._reader is not None else None,
        )

    def _run_group(
        self, chains: Sequence[int], callbacks: Sequence[Any], attempt: int, emit: Emit
    ) -> tuple[list[ChainOutcome], Exception | None]:
        started = time.monotonic()
        group: Group | None = None
        error: Exception | None = None
        noise: dict[int, dict[str, float]] = {}
        try:
            group = self._group(chains, callbacks, emit)
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

    def _row(self, chain: int) -> Row:
        folder = self._job.run_dir / "chains" / str(chain)
        folder.mkdir(parents=True, exist_ok=True)
        record = record_type(self._parts.run.observables)
        return Row(chain, self._keys[chain], folder, RecordWriter(folder / "draws.bin", chain, record))

    def _group(self, chains: Sequence[int], callbacks: Sequence[Any], emit: Emit) -> Group:
        parts, prepared = self._parts, self._read_prepared()
        self._not_stackable = prepared.not_stackable
        flat = FlatParameters(self._model, {name: parts.masks[name] for name in prepared.moving})
        objective = Objective(
            self._model,
            parts.evaluate,
            flat,
            train_mode=parts.run.train_mode,
            autocast_dtype=parts.run.autocast_dtype,
            seeded=prepared.uses_randomness,
            needs_grad=prepared.needs_grad,
        )
        rows = [self._row(chain) for chain in chains]
        for row in rows:
            emit(Event("started", row.chain, device=self._name))
        return Group(
            rows,
            objective,
            self._loader,
            parts.sampler.kernel(lr=prepared.lr, nbeta=prepared.nbeta, localization=prepared.localization),
            parts.run,
            prepared,
            flat.read(),
            full=self._full,
            on_draw=Caller(callbacks) if callbacks else None,
            emit=emit,
        )

    def _draw(self, group: Group) -> dict[int, dict[str, float]]:
        """All steps of a group, then what is measured at its last states, by chain."""
        try:
            served = self._loader.serve(group.requests())
            group.run(served)
            self._full = group.full
            group.save()
            try:  # the draws are there; the measurement is an extra
                return self._probe(group, served) if all(row.alive for row in group.rows) else {}
            except Exception as error:
                for row in group.rows:
                    row.note = f"its gradient noise could not be measured ({short_error(error)})"
                return {}
        finally:  # the next group starts from the same model
            group.objective.flat.point_to(group.center)
            group.objective.reset_buffers()

    def _probe(self, group: Group, served: Any) -> dict[int, dict[str, float]]:
        """Gradient noise and, if the steps have a bias, tr H at each chain's last state."""
        if group.kernel.full_data:
            return {row.chain: {"gradient_noise": 0.0} for row in group.rows}
        anchor = group.center if getattr(group.kernel, "control_variate", False) else None
        found: dict[int, dict[str, float]] = {}
        for number, row in enumerate(group.rows):
            steps: list[list[tuple[int, Any]]] = [[] for _ in range(PROBE_STEPS)]
            for step in steps:
                request: BatchRequest | None = None
                while request is None or not request.last:
                    request, data = next(served)
                    step.append((len(request.indices), data))
            probe = Probe(group.objective, steps, row.key)
            found[row.chain] = {"gradient_noise": probe.gradient_noise(group.position[number], anchor)}
            if group.kernel.step_bias:
                found[row.chain]["hessian_trace"] = probe.hessian_trace(group.position[number])
        return found

    def _read_prepared(self) -> Prepared:
        import json

        return Prepared.from_dict(json.loads((self._job.run_dir / "prepared.json").read_text()))

    def _outcome(
        self,
        row: Row,
        group: Group,
        error: Exception | None,
        noise: dict[str, float],
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
        folder = self._job.run_dir / "chains" / str(outcome.chain)
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


def failed(task: Task, error: Exception) -> Outcome:
    """The outcome of a task that failed as a whole."""
    return Outcome(
        task,
        tuple(failed_chain(chain, error, task.attempt) for chain in task.chains),
        error=str(error) if isinstance(error, DevsampleError) else short_error(error),
        error_type=type(error).__name__,
        traceback=_root_traceback(error),
        retryable=isinstance(error, LoaderWorkerError) and error.lost,
    )


def _root_traceback(error: BaseException) -> str:
    """The traceback of the first cause, from where it left this package's code."""
    if isinstance(error, LoaderError) and (error.__cause__ is None or isinstance(error, LoaderWorkerError)):
        return ""  # the message says where, and what the data set's own code raised
    while error.__cause__ is not None:
        error = error.__cause__
    package = str(Path(__file__).parent)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(package):
        trace = trace.tb_next
    if trace is None and isinstance(error, DevsampleError):
        return ""  # the message says it all
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__, chain=False))


def failed_chain(chain: int, error: Exception, attempt: int) -> ChainOutcome:
    """The outcome of a chain that failed with ``error``."""
    return ChainOutcome(
        chain,
        "failed",
        attempt=attempt,
        message=f"{type(error).__name__}: {error}",
        traceback=_root_traceback(error),
    )


def _batch_bytes(batch: Any) -> bytes:
    """A batch on the CPU as bytes, or nothing if it is large or cannot be sent."""
    from devsample.data.batches import to_device

    try:
        data = dumps(to_device(batch, torch.device("cpu")))
    except Exception:  # a check that cannot be made is left out
        return b""
    return data if len(data) <= _LARGEST_CHECK_BATCH else b""
