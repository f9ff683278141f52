"""The loop that draws: K chains as K rows of one stacked state, step by step."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from devsample.baseline import CenterLosses
from devsample.checkpoints import Checkpoint, save_checkpoint
from devsample.data.generators import seed_global_generators
from devsample.data.loader import ChainLoader
from devsample.data.resident import ResidentRows
from devsample.data.worker import BatchRequest
from devsample.fulldata import FullData, Potential, Served
from devsample.objective import Batch, Objective
from devsample.observables import record_type
from devsample.observing.draws import AtDraw, DrawObserver, Setting
from devsample.observing.sources import Sources
from devsample.samplers import Kernel
from devsample.samplers.base import Buffers
from devsample.samplers.foreign import ForeignKernel, OptimizerRows
from devsample.samplers.reference import ReferenceKernel
from devsample.schedule import Row, Schedule, take
from devsample.seeds import ChainKey, NormalBlocks, Role, stream_seed
from devsample.specs import Prepared, RunSpec
from devsample.stacked import RowByRow, Rows, Stacked, quiet
from devsample.types import Emit, Event

FLUSH_DRAWS = 256
FLUSH_SECONDS = 0.5
CHECKPOINT_SECONDS = 60.0
PROBE_STEPS = 8

RECORD = record_type(())

OnDraw = Callable[..., None]


class _Own(NamedTuple):
    """The batches of a step's gradient, and the losses on them, shape (K,)."""

    batches: Rows
    losses: torch.Tensor


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
        kept: the losses of all samples at w*, from which baselines are taken, if they may be.
        full: the data set as an earlier group has read it, if the sampler needs all of it.
        observables: what to record besides the losses.
        sources: the data of observables.
        on_draw: called with the record of each draw, or None.
        emit: where progress goes.
        draws: that each chain is to have at the end.
        resumed: states, one a row, from which the chains go on; empty: from their start.
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
        full: FullData | None,
        kept: CenterLosses | None = None,
        observables: Sequence[Any],
        sources: Sources,
        on_draw: OnDraw | None,
        emit: Emit,
        draws: int | None = None,
        resumed: Sequence[Checkpoint] = (),
    ) -> None:
        self.rows, self.objective, self._loader = rows, objective, loader
        self.kernel, self._run, self._prepared = kernel, run, prepared
        self._on_draw, self._emit = on_draw, emit
        draws = run.num_draws if draws is None else draws
        self.schedule = Schedule(prepared.num_burnin_steps, run.num_steps_bw_draws, draws)
        self.center = center
        keys = [row.key for row in rows]
        self.position = self._start(keys)
        self._gradient = torch.zeros_like(self.position)
        self._noise = NormalBlocks(keys, center.numel(), center.dtype, center.device)
        self._buffers = kernel.init(self.position)
        self._optimizers: OptimizerRows | None = None
        if isinstance(kernel, ForeignKernel):
            self._optimizers = OptimizerRows(kernel, self.position, center, objective.flat.segments)
        exact = torch.float64 if center.device.type != "mps" else torch.float32
        self._losses = torch.zeros((FLUSH_DRAWS, 2, len(rows)), dtype=exact, device=center.device)
        self._pending = 0
        self._flushed = 0
        self._last_flush = self._last_checkpoint = time.monotonic()
        self._separate = loader.order != "iid"
        self._states = self._evaluator(self.position)
        self.full, self._kept = full, kept
        self._taken: Sequence[Any] = []  # items of the batches taken last, row by row
        anchored = getattr(kernel, "control_variate", False)
        self._needs_all = kernel.full_data or anchored
        setting = Setting(
            kernel,
            center,
            self.position,
            keys,
            self._evaluator,
            self._noise,
            objective,
            sources,
            prepared.observed,
        )
        self._observer = DrawObserver(observables, setting)
        shape = (FLUSH_DRAWS, self._observer.width, len(rows))
        self._observed = torch.zeros(shape, dtype=exact, device=center.device)
        self._anchor: RowByRow | None = None
        if anchored:
            self._anchor = self._evaluator(center.expand(len(rows), -1).clone())
            self._center_gradient = torch.zeros_like(self.position)
        if kernel.full_data:
            self._chances = NormalBlocks(keys, 2, exact, center.device, Role.ACCEPT)
        self.step = 0
        self._by_index = None if kernel.full_data else self._resident(loader)
        self._resumed = resumed
        if resumed:
            self.step = resumed[0].step
            for state, one in zip(self.position, resumed, strict=True):
                state.copy_(one.position)
            self._flushed = self.schedule.draws_before(self.step)
            for row in rows:
                row.draws = self._flushed

    def run(self, served: Served) -> None:
        """Make all steps. ``served`` gives the batches of `requests`, in its order."""
        with quiet():
            self._make_steps(served)
        if isinstance(self._states, Stacked) and self._states.given_up:
            for row in self.rows:
                row.note = f"computed one after the other from some step on ({self._states.given_up})"

    def _make_steps(self, served: Served) -> None:
        self._begin(served)
        move = self._transition if self.kernel.full_data else self._step
        for step in range(self.step, self.schedule.total):
            draw = self.schedule.draw(step)
            move(step, draw, served)
            self.step = step + 1
            if self.step == self.schedule.freeze:
                self.kernel.freeze(self._buffers)
            if draw is not None:
                self._pending += 1
            self._flush_if_due(step)
            if not any(row.alive for row in self.rows):
                return
        self.flush()

    def _begin(self, served: Served) -> None:
        """Read the data set, if the sampler needs all of it."""
        if self.full is None and self._needs_all:
            self.full = FullData.read(
                served,
                self._prepared.num_samples,
                self.objective,
                self.center,
                self.rows[0].key,
                keep=self.kernel.full_data,
            )
        if isinstance(self.kernel, ReferenceKernel):
            assert self.full is not None
            scratch = self.position.clone()
            self._potential = Potential(self._evaluator(scratch), scratch, self.full.batches)
            self._center_losses = self._potential.at_center()
            self._buffers = self.kernel.start(self.position, self._potential)
        if self._resumed:
            names = self._resumed[0].buffers
            self._buffers = {
                name: torch.stack([one.buffers[name] for one in self._resumed]).to(self.center.device)
                for name in names
            }

    def _step(self, step: int, draw: int | None, served: Served) -> None:
        """One step of every chain with a gradient of its own batch."""
        batches = self._take_all(served, step, Role.ORDER)
        losses = self._states.losses_and_gradients(self._gradient, batches, step)
        at_center = None if self._anchor is None else self._subtract_center(batches, step)
        own = _Own(batches, losses)
        if draw is not None:
            if self._separate:  # the gradient's own batch is not one that w_t has not seen
                batches = self._take_all(served, step, Role.LOSS_ORDER, draw)
                losses, at_center = self._states.losses(batches, step), None
            self._record(step, draw, losses, batches, at_center)
        if self._optimizers is not None:
            self._observe(step, draw, self._gradient, None, own, batches, served)
            self._optimize(step, self._optimizers)
            return
        averaged = self.kernel.noise_kind == "averaged"
        noise = self._noise.averaged(step) if averaged else self._noise.plain(step)
        self._observe(step, draw, self._gradient, noise, own, batches, served)
        self.kernel.step(self.position, self._gradient, self.center, noise, self._buffers)

    def _optimize(self, step: int, optimizers: OptimizerRows) -> None:
        """One step of every chain's optimizer; should it draw numbers, they are the chain's own."""
        for number, row in enumerate(self.rows):
            seed_global_generators(stream_seed(row.key, Role.NOISE, step))
            optimizers.step(number, self.position[number], self._gradient[number])

    def step_scales(self) -> torch.Tensor | None:
        """By what the lr of each entry is scaled now, shape (K, P), if by anything."""
        return self.kernel.step_scales(self._buffers)

    def _transition(self, step: int, draw: int | None, served: Served) -> None:
        """One transition of every chain on all data."""
        kernel, buffers = self.kernel, self._buffers
        assert isinstance(kernel, ReferenceKernel)
        assert self.full is not None
        everything = [list(self.full.batches)] * len(self.rows)
        if draw is not None:
            self._record(step, draw, buffers["loss"][:, 0], everything, self._center_losses)
        uniform, noise = torch.special.ndtr(self._chances.plain(step)), self._noise.plain(step)
        own = _Own(everything, buffers["loss"][:, 0])
        self._observe(step, draw, buffers["gradient"], noise, own, everything, served)
        kernel.transition(self.position, self.center, noise, uniform, self._potential, buffers)

    def _observe(
        self,
        step: int,
        draw: int | None,
        gradient: torch.Tensor,
        noise: torch.Tensor | None,
        own: _Own,
        batches: Rows,
        served: Served,
    ) -> None:
        """Put the observables of a draw into the buffer, before its update."""
        if draw is None or not self._observer.width:
            return
        correction = None
        if self._anchor is not None:
            assert self.full is not None
            correction = self.full.gradient - self._center_gradient
        second = (
            self._take_all(served, step, Role.SECOND_ORDER, draw) if self._observer.second_batch else None
        )
        recorded = self._losses[self._pending]
        at = AtDraw(
            step,
            draw,
            self.position,
            gradient,
            noise,
            self._buffers,
            own.batches,
            own.losses,
            second,
            correction,
            record=lambda row: self._describe(row, step, draw, recorded[:, row], batches[row]),
        )
        self._observer(self._observed[self._pending], at)

    def _subtract_center(self, batches: Rows, step: int) -> torch.Tensor:
        """Take the control variate g_B(w*) − g(w*) off the gradients; the losses at w* come with it."""
        assert self._anchor is not None
        assert self.full is not None
        losses = self._anchor.losses_and_gradients(self._center_gradient, batches, step)
        self._gradient.sub_(self._center_gradient).add_(self.full.gradient)
        return losses

    def _take_all(self, served: Served, step: int, role: Role, draw: int | None = None) -> Rows:
        if self._by_index is not None:
            batches, self._taken = self._by_index.take(step, role, draw)
            return batches
        taken: list[list[Sequence[int]]] = [[] for _ in self.rows]
        batches = [
            take(served, row.chain, step, role, items) for row, items in zip(self.rows, taken, strict=True)
        ]
        self._taken = [list(itertools.chain.from_iterable(items)) for items in taken]
        return batches

    def requests(self) -> Iterator[BatchRequest]:
        """Everything that `run` will take, then the probe steps of each chain."""
        if self._needs_all and self.full is None:
            yield from self._loader.full_pass(self._prepared.num_samples)
        if self.kernel.full_data:
            return
        if self._by_index is None:
            yield from self._requests_of_steps()
        for row in self.rows:
            for step in range(PROBE_STEPS):
                yield from self._loader.requests(row.chain, step, Role.PROBE_ORDER)

    def _requests_of_steps(self) -> Iterator[BatchRequest]:
        roles = [Role.LOSS_ORDER] if self._separate else []  # of what is read at draws
        roles += [Role.SECOND_ORDER] if self._observer.second_batch else []
        for step in range(self.step, self.schedule.total):
            for row in self.rows:
                yield from self._loader.requests(row.chain, step)
            draw = self.schedule.draw(step)
            if draw is not None:
                for role, row in itertools.product(roles, self.rows):
                    yield from self._loader.requests(row.chain, step, role, draw=draw)

    def flush(self) -> None:
        """Write pending draws: the one place where the loop waits for the device."""
        if not self._pending:
            return
        self.objective.watch.check()
        values = self._losses[: self._pending].cpu().numpy()
        observed = self._observed[: self._pending].cpu().numpy()
        numbers = np.arange(self._flushed, self._flushed + self._pending)
        for number, row in enumerate(self.rows):
            if row.alive:
                loss, baseline = values[:, 0, number], values[:, 1, number]
                self._write(row, numbers, loss, baseline, observed[..., number])
        self._flushed += self._pending
        self._pending = 0
        self._last_flush = time.monotonic()

    @property
    def buffers(self) -> Buffers:
        """The sampler's, at ``position``."""
        return self._buffers

    @property
    def evaluator(self) -> Callable[[torch.Tensor], RowByRow]:
        """Makes what computes losses and gradients of the rows at states (K, P)."""
        return self._evaluator

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

    def _evaluator(self, position: torch.Tensor) -> RowByRow:
        kind = Stacked if len(self.rows) > 1 and not self._prepared.not_stackable else RowByRow
        return kind(self.objective, position, self.center, [row.key for row in self.rows])

    def _resident(self, loader: ChainLoader) -> ResidentRows | None:
        chains = [row.chain for row in self.rows]
        return loader.by_index(chains, self.schedule.total)

    def _start(self, keys: Sequence[ChainKey]) -> torch.Tensor:
        position = self.center.expand(len(keys), -1).clone()
        if self._run.start == "prior":
            normals = NormalBlocks(keys, position.shape[1], position.dtype, position.device, Role.START)
            position.add_(normals.plain(0), alpha=1 / math.sqrt(self._prepared.localization))
        return position

    def _record(
        self,
        step: int,
        draw: int,
        losses: torch.Tensor,
        batches: Rows,
        at_center: torch.Tensor | None,
    ) -> None:
        """Put losses and baselines of a draw into the buffer."""
        target = self._losses[self._pending]
        target[0] = losses
        if self._run.baseline == "fixed" or (self._run.baseline == "full" and not self.kernel.full_data):
            target[1] = self._prepared.init_loss
        elif at_center is not None:
            target[1] = at_center
        elif self._kept is not None:
            means = [self._kept.mean(items) for items in self._taken]
            target[1] = torch.tensor(means, dtype=target.dtype, device="cpu")
        else:
            target[1] = self._states.center_losses(batches, step)
        if self._on_draw is not None:
            for number in range(len(self.rows)):
                self._states.go_to(number)
                with self.objective.guarded(self.position[number], weights=False):
                    self._on_draw(**self._describe(number, step, draw, target[:, number], batches[number]))

    def _describe(
        self, number: int, step: int, draw: int, target: torch.Tensor, batches: Sequence[Batch]
    ) -> dict[str, Any]:
        """What callbacks and functions are told of a row's draw."""
        loss, baseline = target.tolist()
        data = [one for _, one in batches]
        return {
            "chain": self.rows[number].chain,
            "draw": draw,
            "step": step,
            "loss": loss,
            "baseline": baseline,
            "llc": self._prepared.nbeta * (loss - baseline),
            "init_loss": self._prepared.init_loss,
            "nbeta": self._prepared.nbeta,
            "model": self.objective.model,
            "optimizer": self.kernel if self._optimizers is None else self._optimizers.optimizers[number],
            "batch": data[0] if len(data) == 1 else data,
            "device": self.center.device,
        }

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

    def _write(
        self, row: Row, numbers: np.ndarray, loss: np.ndarray, baseline: np.ndarray, observed: np.ndarray
    ) -> None:
        bad = np.flatnonzero(~(np.isfinite(loss) & np.isfinite(baseline)))
        count = int(bad[0]) + 1 if len(bad) else len(numbers)  # the first bad draw is kept, as evidence
        rows = np.zeros(count, self._observer.record)
        rows["draw"], rows["step"] = numbers[:count], self.schedule.steps_of(numbers[:count])
        rows["loss"], rows["baseline"] = loss[:count], baseline[:count]
        rows["llc"] = self._prepared.nbeta * (rows["loss"] - rows["baseline"])
        if len(bad):
            row.diverged_at = int(rows["step"][-1])
        for name, values in self._observer.split(observed):
            rows[name] = values[:count]
        row.writer.append(rows)
        row.draws += count
        self._emit(Event("records", row.chain, int(rows["step"][-1]), rows.tobytes()))
