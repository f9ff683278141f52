r"""The bias from the step size, measured: a chain with lr and one with lr/2, side by side.

Both go on from a chain's last state. For each step with lr there are two with lr/2, and

* noise is common: :math:`R_k = (r_{2k} + r_{2k+1}) / \sqrt 2`, r the normals of the fine chain, which is a
  standard normal again, and both chains are moved by the same path of the noise;
* the coarse step has the first of the two batches of the fine ones. Each chain alone thus has one independent
  batch of the run's size a step, and the noise of its gradients is that of a run.

Before each coarse step both losses are read on the batch that comes next, which neither chain has met. After
the fine chain has gone over to its own law, their mean difference is bias(lr) − bias(lr/2), whatever the
coupling; the coupling makes the difference small, and its error with it.

References:
    M. Giles, "Multilevel Monte Carlo path simulation", Operations Research 56 (2008): levels of one path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from devsample.data.loader import ChainLoader
from devsample.data.worker import BatchRequest
from devsample.fulldata import Served
from devsample.samplers import Kernel
from devsample.samplers.base import Buffers
from devsample.schedule import Row, take
from devsample.seeds import NormalBlocks, Role
from devsample.stacked import RowByRow, Rows

if TYPE_CHECKING:
    from devsample.chain import Group

BLOCKS = 20  # means that are kept of what a chain measured
DROPPED = 3  # the first part of so many is left out: the fine chain goes over to its own law
_APART = 1 << 62  # numbers of steps, in the seeds of what evaluate draws, that no run has


class Follower:
    """K states with their sampler, moved step by step.

    Args:
        kernel: the sampler's update.
        position: where they start, shape (K, P); copied.
        buffers: the sampler's; copied.
        evaluator: makes what computes losses at stacked states.
    """

    def __init__(
        self,
        kernel: Kernel,
        position: torch.Tensor,
        buffers: Buffers,
        evaluator: Callable[[torch.Tensor], RowByRow],
    ) -> None:
        self.kernel, self.position = kernel, position.clone()
        self.buffers = {name: value.clone() for name, value in buffers.items()}
        self.states = evaluator(self.position)


class Pair:
    """The chains with lr and with lr/2 of K rows.

    Args:
        kernel: the sampler's update, with lr.
        center: w*, shape (P,).
        position: where both start, shape (K, P).
        buffers: the sampler's, at that position.
        normals: the fine chain's noise.
        evaluator: makes what computes losses at stacked states.
        full_gradient: ∇L_n(w*) of the control variate, shape (P,), or None without one.
    """

    def __init__(
        self,
        kernel: Kernel,
        center: torch.Tensor,
        position: torch.Tensor,
        buffers: Buffers,
        normals: NormalBlocks,
        evaluator: Callable[[torch.Tensor], RowByRow],
        full_gradient: torch.Tensor | None = None,
    ) -> None:
        self.coarse = Follower(kernel, position, buffers, evaluator)
        self.fine = Follower(
            replace(kernel, lr=kernel.lr / 2),  # type: ignore[attr-defined, call-arg]
            position,
            buffers,
            evaluator,
        )
        self._center, self._normals, self._full = center, normals, full_gradient
        self._gradient = torch.zeros_like(position)
        self._averaged = kernel.noise_kind == "averaged"
        if full_gradient is not None:
            self._anchor = evaluator(center.expand(len(position), -1).clone())
            self._at_center = torch.zeros_like(position)

    def step(self, number: int, first: Rows, second: Rows) -> torch.Tensor:
        """One step with lr and two with lr/2; the coarse loss less the fine one before them, shape (K,).

        Args:
            number: of the coarse step.
            first: batches of the coarse step and of the first fine one.
            second: batches of the second fine step.
        """
        here, follows = self._normal(number), self._normal(number + 1) if self._averaged else None
        coarse = self._move(self.coarse, _half_sum(here, follows), first, 2 * number)
        noise = here[0], here[1]
        if follows is not None:
            noise = (here[0] + here[1]) / 2, (here[1] + follows[0]) / 2
        fine = self._move(self.fine, noise[0], first, 2 * number, again=True)
        self._move(self.fine, noise[1], second, 2 * number + 1)
        return coarse - fine

    def _normal(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The fine chain's two normals of a coarse step."""
        return self._normals.plain(2 * number), self._normals.plain(2 * number + 1)

    def _move(
        self, who: Follower, noise: torch.Tensor, batches: Rows, number: int, again: bool = False
    ) -> torch.Tensor:
        """One step; the losses before it. ``again``: the gradients at w* are those of the call before."""
        losses = who.states.losses_and_gradients(self._gradient, batches, _APART + number)
        if self._full is not None:
            if not again:
                self._anchor.losses_and_gradients(self._at_center, batches, _APART + number)
            self._gradient.sub_(self._at_center).add_(self._full)
        who.kernel.step(who.position, self._gradient, self._center, noise, who.buffers)
        return losses


def _half_sum(
    here: tuple[torch.Tensor, torch.Tensor], follows: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """R_k of the coarse chain, or (R_k + R_{k+1}) / 2."""
    if follows is None:
        return (here[0] + here[1]) * math.sqrt(0.5)
    return (here[0] + here[1] + follows[0] + follows[1]) * math.sqrt(0.125)


def requests(loader: ChainLoader, rows: Sequence[Row], steps: int) -> Iterator[BatchRequest]:
    """All batches of a rerun, in the order in which `measure` takes them."""
    for step in range(2 * steps):
        for row in rows:
            yield from loader.requests(row.chain, step, Role.RERUN_ORDER)


def measure(group: Group, served: Served, steps: int, nbeta: float) -> list[tuple[float, ...]]:
    """Rerun a group from its last states.

    Args:
        group: its chains are over; nothing in it changes.
        served: what `requests` asks for.
        steps: with lr.
        nbeta: nβ.

    Returns:
        Of each row, means over 20 stretches of equal length of nβ (L(w) − L(w')), w with lr and w' with lr/2;
        the first third of the steps is left out. Their mean is bias(lr) − bias(lr/2) of the llc.
    """
    start, rows = group.position, group.rows
    normals = NormalBlocks([row.key for row in rows], start.shape[1], start.dtype, start.device, Role.RERUN)
    anchored = getattr(group.kernel, "control_variate", False)
    full = group.full.gradient if anchored and group.full is not None else None
    pair = Pair(group.kernel, group.center, start, group.buffers, normals, group.evaluator, full)
    exact = torch.float64 if start.device.type != "mps" else torch.float32
    found = torch.zeros((steps, len(rows)), dtype=exact, device=start.device)

    def batches(step: int) -> list[list[Any]]:
        return [take(served, row.chain, step, Role.RERUN_ORDER, []) for row in rows]

    for number in range(steps):
        found[number] = pair.step(number, batches(2 * number), batches(2 * number + 1))
    return [tuple(row) for row in (nbeta * block_means(found)).T.tolist()]


def block_means(values: torch.Tensor) -> torch.Tensor:
    """Means over 20 stretches of what is left without the first third: (steps, K) to (20, K)."""
    length = (len(values) - len(values) // DROPPED) // BLOCKS
    return values[len(values) - BLOCKS * length :].reshape(BLOCKS, length, -1).mean(1)
