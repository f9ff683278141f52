"""The loop that draws: K chains as K rows of one stacked state, step by step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from devsample.checkpoints import save_checkpoint
from devsample.data.loader import ChainLoader
from devsample.data.worker import BatchRequest
from devsample.objective import Batch, Objective
from devsample.records import BASE_FIELDS, RecordWriter
from devsample.samplers import Kernel
from devsample.seeds import ChainKey, NormalBlocks, Role
from devsample.specs import Prepared, RunSpec
from devsample.types import Emit, Event

FLUSH_DRAWS = 256
FLUSH_SECONDS = 0.5
CHECKPOINT_SECONDS = 60.0
PROBE_STEPS = 8

RECORD = np.dtype(list(BASE_FIELDS))

OnDraw = Callable[..., None]


@dataclass
class Row:
    """One chain of a group: where its records go and how it fares."""

    chain: int
    key: ChainKey
    folder: Path
    writer: RecordWriter
    draws: int = 0
    diverged_at: int | None = None
    note: str = ""

    @property
    def alive(self) -> bool:
        """Whether its loss has stayed finite."""
        return self.diverged_at is None


@dataclass
class Schedule:
    """Which steps are drawn: the last of every ``num_steps_bw_draws`` after burn-in."""

    burnin: int
    between: int
    draws: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.burnin + self.between * self.draws

    def draw(self, step: int) -> int | None:
        """The number of the draw recorded at ``step`` (before its update), or None."""
        after = step - self.burnin + 1
        if after < 1 or after % self.between:
            return None
        return after // self.between - 1

    def steps_of(self, draws: np.ndarray) -> np.ndarray:
        """The step at which each draw is recorded."""
        return self.burnin + (draws + 1) * self.between - 1


class Group:
    """Runs K chains in lockstep.

    Args:
        rows: the chains.
        objective: loss and gradient, shared by the rows.
        loader: serves the batches.
        kernel: the sampler's update.
        run: settings.
        prepared: what was decided from the data.
        center: w*, shape (P,).
        on_draw: called with the record of each draw, or None.
        emit: where progress goes.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        objective: Objective,
        loader: ChainLoader,
        kernel: Kernel,
        run: RunSpec,
        prepared: Prepared,
        center: torch.Tensor,
        *,
        on_draw: OnDraw | None,
        emit: Emit,
    ) -> None:
        self.rows, self.objective, self._loader = rows, objective, loader
        self.kernel, self._run, self._prepared = kernel, run, prepared
        self._on_draw, self._emit = on_draw, emit
        self.schedule = Schedule(prepared.num_burnin_steps, run.num_steps_bw_draws, run.num_draws)
        self.center = center
        keys = [row.key for row in rows]
        self.position = self._start(keys)
        self._gradient = torch.zeros_like(self.position)
        self._noise = NormalBlocks(keys, center.numel(), center.dtype, center.device)
        self._buffers = kernel.init(self.position)
        exact = torch.float64 if center.device.type != "mps" else torch.float32
        self._losses = torch.zeros((FLUSH_DRAWS, 2, len(rows)), dtype=exact, device=center.device)
        self._pending = 0
        self._flushed = 0
        self._last_flush = self._last_checkpoint = time.monotonic()
        self._separate = loader.order != "iid"
        self.step = 0

    def run(self, served: Iterator[tuple[BatchRequest, Any]]) -> None:
        """Make all steps. ``served`` gives the batches of `requests`, in its order."""
        noise = self._noise.averaged if self.kernel.noise_kind == "averaged" else self._noise.plain
        flat, several = self.objective.flat, len(self.rows) > 1
        point_to, copied = flat.point_to, any(not one.direct for one in flat.segments)
        rows, gradients = list(self.position), list(self._gradient)
        point_to(rows[0])
        for step in range(self.schedule.total):
            draw = self.schedule.draw(step)
            for number, row in enumerate(self.rows):
                if several or copied:
                    point_to(rows[number])
                batches = _take(served, row.chain, step, Role.ORDER)
                loss = self.objective.loss_and_gradient(gradients[number], batches, row.key, step)
                if draw is not None:
                    self._record(number, step, draw, loss, batches, served)
            self.kernel.step(self.position, self._gradient, self.center, noise(step), self._buffers)
            self.step = step + 1
            if draw is not None:
                self._pending += 1
            self._flush_if_due(step)
            if not any(row.alive for row in self.rows):
                return
        self.flush()

    def requests(self) -> Iterator[BatchRequest]:
        """Everything that `run` will take, then the probe steps of each chain."""
        for step in range(self.schedule.total):
            for row in self.rows:
                yield from self._loader.requests(row.chain, step)
                draw = self.schedule.draw(step)
                if self._separate and draw is not None:
                    yield from self._loader.requests(row.chain, step, Role.LOSS_ORDER, draw=draw)
        for row in self.rows:
            for step in range(PROBE_STEPS):
                yield from self._loader.requests(row.chain, step, Role.PROBE_ORDER)

    def flush(self) -> None:
        """Write pending draws: the one place where the loop waits for the device."""
        if not self._pending:
            return
        values = self._losses[: self._pending].cpu().numpy()
        numbers = np.arange(self._flushed, self._flushed + self._pending)
        for number, row in enumerate(self.rows):
            if row.alive:
                self._write(row, numbers, values[:, 0, number], values[:, 1, number])
        self._flushed += self._pending
        self._pending = 0
        self._last_flush = time.monotonic()

    def close(self) -> None:
        """Write what is pending, if the device still answers, and close the files."""
        with contextlib.suppress(Exception):
            self.flush()
        for row in self.rows:
            row.writer.close()

    def save(self) -> None:
        """Write every chain's checkpoint."""
        for number, row in enumerate(self.rows):
            buffers = {name: value[number] for name, value in self._buffers.items()}
            save_checkpoint(
                row.folder / "checkpoint.safetensors",
                self.position[number],
                buffers,
                step=self.step,
                offset=row.writer.offset,
            )
        self._last_checkpoint = time.monotonic()

    def _start(self, keys: Sequence[ChainKey]) -> torch.Tensor:
        position = self.center.expand(len(keys), -1).clone()
        if self._run.start == "prior":
            normals = NormalBlocks(keys, position.shape[1], position.dtype, position.device, Role.START)
            position.add_(normals.plain(0), alpha=1 / math.sqrt(self._prepared.localization))
        return position

    def _record(
        self,
        number: int,
        step: int,
        draw: int,
        loss: torch.Tensor,
        batches: list[Batch],
        served: Iterator[tuple[BatchRequest, Any]],
    ) -> None:
        """Put loss and baseline of one chain's draw into the buffer; the model is at w_t again after."""
        row = self.rows[number]
        if self._separate:  # the gradient's own batch is not one that w_t has not seen
            batches = _take(served, row.chain, step, Role.LOSS_ORDER)
            loss = self.objective.loss(batches, row.key, step)
        target = self._losses[self._pending, :, number]
        target[0] = loss
        if self._run.baseline == "paired":
            self.objective.flat.point_to(self.center)
            target[1] = self.objective.loss(batches, row.key, step)
            self.objective.flat.point_to(self.position[number])
        else:
            target[1] = self._prepared.init_loss
        if self._on_draw is not None:
            self._call_back(row, step, draw, target, batches)

    def _call_back(self, row: Row, step: int, draw: int, target: torch.Tensor, batches: list[Batch]) -> None:
        assert self._on_draw is not None
        loss, baseline = target.tolist()
        data = [one for _, one in batches]
        self._on_draw(
            chain=row.chain,
            draw=draw,
            step=step,
            loss=loss,
            baseline=baseline,
            llc=self._prepared.nbeta * (loss - baseline),
            init_loss=self._prepared.init_loss,
            nbeta=self._prepared.nbeta,
            model=self.objective.model,
            optimizer=self.kernel,
            batch=data[0] if len(data) == 1 else data,
            device=self.center.device,
        )

    def _flush_if_due(self, step: int) -> None:
        now = time.monotonic()
        if self._pending == FLUSH_DRAWS or now - self._last_flush > FLUSH_SECONDS:
            if self._pending:
                self.flush()
            else:
                self._last_flush = now
            for row in self.rows:
                self._emit(Event("progress", row.chain, step + 1))
            if now - self._last_checkpoint > CHECKPOINT_SECONDS:
                self.save()

    def _write(self, row: Row, numbers: np.ndarray, loss: np.ndarray, baseline: np.ndarray) -> None:
        bad = np.flatnonzero(~(np.isfinite(loss) & np.isfinite(baseline)))
        if len(bad):  # the first bad draw is kept, as evidence
            numbers, loss, baseline = (
                numbers[: bad[0] + 1],
                loss[: bad[0] + 1],
                baseline[: bad[0] + 1],
            )
            row.diverged_at = int(self.schedule.steps_of(numbers[-1:])[0])
        rows = np.zeros(len(numbers), RECORD)
        rows["draw"], rows["step"] = numbers, self.schedule.steps_of(numbers)
        rows["loss"], rows["baseline"] = loss, baseline
        rows["llc"] = self._prepared.nbeta * (loss - baseline)
        row.writer.append(rows)
        row.draws += len(rows)
        self._emit(Event("records", row.chain, int(rows["step"][-1]), rows.tobytes()))


def _take(served: Iterator[tuple[BatchRequest, Any]], chain: int, step: int, role: Role) -> list[Batch]:
    """The micro-batches of one step, which are the next in line."""
    batches: list[Batch] = []
    for request, data in served:
        assert (request.chain, request.step, request.role) == (chain, step, role), request
        batches.append((len(request.indices), data))
        if request.last:
            return batches
    raise AssertionError("the loader ended before the chain")
