"""What is observed of a draw, before its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from devsample.data.generators import seed_global_generators
from devsample.objective import Objective
from devsample.observables import columns_of, mala_acceptance, record_type
from devsample.observables.declared import Declared, Function
from devsample.observables.named import Acceptance, Measure, SecondBatch
from devsample.observables.vectors import Observer
from devsample.observing.functions import call
from devsample.observing.losses import BATCH, OnData, objective_of
from devsample.observing.sources import Sources
from devsample.samplers import Kernel, SGLDKernel
from devsample.samplers.base import Buffers
from devsample.seeds import ChainKey, NormalBlocks, Role, stream_seed
from devsample.stacked import RowByRow, Rows


@dataclass
class AtDraw:
    """A draw, before its update.

    Attributes:
        step: its step.
        draw: its number.
        position: w, shape (K, P).
        gradient: the estimate of ∇L that the step uses, shape (K, P).
        noise: what the step adds, shape (K, P), if anything.
        buffers: the sampler's.
        batches: of the gradient.
        losses: on them, shape (K,).
        second: a second batch of each row, if it is wanted.
        correction: what was added to the gradient of ``batches``, shape (K, P), or None.
        record: what a row's functions are called with.
    """

    step: int
    draw: int
    position: torch.Tensor
    gradient: torch.Tensor
    noise: torch.Tensor | None
    buffers: Buffers
    batches: Rows
    losses: torch.Tensor
    second: Rows | None
    correction: torch.Tensor | None
    record: Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """The group of chains that is observed.

    Attributes:
        kernel: the sampler.
        center: w*, shape (P,).
        position: w, shape (K, P), as the chains move it.
        keys: the chains' keys.
        evaluator: makes what computes losses at stacked states.
        noise: the chains' normals.
        objective: of the run.
        sources: data of the observables.
        about: what `look_at_center` found.
    """

    kernel: Kernel
    center: torch.Tensor
    position: torch.Tensor
    keys: Sequence[ChainKey]
    evaluator: Callable[[torch.Tensor], RowByRow]
    noise: NormalBlocks
    objective: Objective
    sources: Sources
    about: Mapping[str, Mapping[str, Any]]


class DrawObserver:
    """Writes everything that is observed of a draw.

    Args:
        observables: of the run.
        setting: whom it observes.
    """

    def __init__(self, observables: Sequence[Any], setting: Setting) -> None:
        self.record = record_type(observables)
        self.columns = columns_of(observables)
        self.width = sum(math.prod(shape) for _, shape in self.columns)
        self.second_batch = any(isinstance(one, SecondBatch) for one in observables)
        self._keys = setting.keys
        self._parts: list[tuple[slice, Callable[[torch.Tensor, AtDraw], None]]] = []
        start = 0
        for number, one in enumerate(observables):
            if not one.columns:  # measured after the last draw
                continue
            stop = start + sum(math.prod(shape) for _, shape in one.columns)
            self._parts.append((slice(start, stop), self._part(one, setting, number)))
            start = stop

    def __call__(self, target: torch.Tensor, at: AtDraw) -> None:
        """Write the values of all rows into ``target``, shape (width, K)."""
        for place, part in self._parts:
            part(target[place], at)

    def split(self, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Name and values of each column, from (draws, width)."""
        start = 0
        for name, shape in self.columns:
            stop = start + math.prod(shape)
            yield name, values[:, start:stop].reshape(len(values), *shape)
            start = stop

    def _part(self, one: Any, setting: Setting, number: int) -> Callable[[torch.Tensor, AtDraw], None]:
        if isinstance(one, Measure):
            measure = Observer([one], setting.kernel, setting.center)
            return lambda target, at: measure(target, at.position, at.gradient, at.noise, at.buffers)
        if isinstance(one, SecondBatch):
            states = setting.evaluator(setting.position)
            return lambda target, at: _second_batch(states, target, at)
        if isinstance(one, Acceptance):
            return EulerAcceptance(setting)
        if isinstance(one, Function):
            states = setting.evaluator(setting.position)
            return lambda target, at: self._call(one, states, setting, target, at, number)
        on_data = OnData(one, _states(one, setting), setting.sources[one.name], setting.keys)
        return lambda target, at: on_data(target, at.step)

    def _call(
        self,
        one: Function,
        states: RowByRow,
        setting: Setting,
        target: torch.Tensor,
        at: AtDraw,
        number: int,
    ) -> None:
        for row, key in enumerate(self._keys):
            states.go_to(row)
            seed_global_generators(stream_seed(key, Role.OBSERVE, at.step, number))
            with setting.objective.guarded(setting.position[row]):
                call(one, at.record(row), target[0, row])


class EulerAcceptance:
    """Acceptance of w' = w − ε/2 ∇U(w) + √ε σ R_k, U with the loss on the step's own batch at both ends.

    With the Euler integrator, w' is where the step leads (but for a box); with averaged noise it is
    another one. One more gradient a draw.

    Args:
        setting: whom it observes.
    """

    def __init__(self, setting: Setting) -> None:
        assert isinstance(setting.kernel, SGLDKernel)
        self._kernel, self._center, self._noise = setting.kernel, setting.center, setting.noise
        self._proposal = torch.zeros_like(setting.position)
        self._gradient = torch.zeros_like(setting.position)
        self._states = setting.evaluator(self._proposal)

    def __call__(self, target: torch.Tensor, at: AtDraw) -> None:
        """Write into ``target``, shape (1, K)."""
        kernel = self._kernel
        noise = at.noise if kernel.noise_kind == "plain" else self._noise.plain(at.step)
        assert noise is not None
        slope = kernel.slope(at.position, at.gradient, self._center)
        self._proposal.copy_(at.position).add_(slope, alpha=-kernel.lr / 2)
        self._proposal.add_(noise, alpha=math.sqrt(kernel.lr) * kernel.noise_level)
        losses = self._states.losses_and_gradients(self._gradient, at.batches, at.step)
        if at.correction is not None:
            self._gradient.add_(at.correction)
        values = mala_acceptance(
            at.position,
            slope,
            self._potential(at.position, at.losses, at, target.dtype),
            self._proposal,
            kernel.slope(self._proposal, self._gradient, self._center),
            self._potential(self._proposal, losses, at, target.dtype),
            kernel.lr,
            kernel.noise_level,
        )
        target[0].copy_(values)

    def _potential(
        self, position: torch.Tensor, losses: torch.Tensor, at: AtDraw, exact: torch.dtype
    ) -> torch.Tensor:
        """U of the rows, shape (K,)."""
        kernel, offset = self._kernel, position - self._center
        total = losses.to(exact) * kernel.nbeta
        if at.correction is not None:
            total += kernel.nbeta * (at.correction * offset).sum(1, dtype=exact)
        if kernel.localization:
            total += kernel.localization / 2 * offset.square().sum(1, dtype=exact)
        if kernel.weight_decay:
            total += kernel.weight_decay / 2 * position.square().sum(1, dtype=exact)
        return total


def _second_batch(states: RowByRow, target: torch.Tensor, at: AtDraw) -> None:
    assert at.second is not None
    other = at.step + (1 << BATCH)
    target[0].copy_(states.losses(at.second, other))
    target[1].copy_(states.center_losses(at.second, other))


def _states(one: Declared, setting: Setting) -> RowByRow:
    """What computes an observable's losses at the chains' states; at once only for the run's own evaluate."""
    if one.evaluate is None and not one.by_sample:
        return setting.evaluator(setting.position)
    objective = objective_of(one, setting.objective, setting.about[one.name])
    return RowByRow(objective, setting.position, setting.center, setting.keys)
