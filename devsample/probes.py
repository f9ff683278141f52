"""Local measurements of the loss: gradient noise, Hessian trace, largest curvature."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from devsample.flat import squared_norm
from devsample.objective import Batch, Objective
from devsample.seeds import ChainKey, NormalBlocks, Role

_RELATIVE_STEP = 1e-3
_ITERATIONS = 12


class Probe:
    """Measures at any point, on fixed steps of batches.

    Args:
        objective: loss and gradient.
        steps: the micro-batches of several steps, drawn independently.
        key: key for random directions and for whatever ``evaluate`` draws.
    """

    def __init__(self, objective: Objective, steps: Sequence[Sequence[Batch]], key: ChainKey) -> None:
        self._objective, self._steps, self._key = objective, steps, key
        flat = objective.flat
        self._buffer = torch.zeros(flat.size, dtype=flat.dtype, device=flat.device)
        self._normals = NormalBlocks([key], flat.size, flat.dtype, flat.device, Role.PROBE)

    def gradient_noise(
        self,
        position: torch.Tensor,
        anchor: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> float:
        r"""Trace of one step's gradient covariance, from independent pairs: E|g − g'|²/2.

        With ``anchor`` (w*), of the gradient less its control variate: g_B(w) − g_B(w*). With ``scale`` G,
        of √G times the gradient, as in the coordinates in which G is 1.
        """
        values = []
        for first in range(0, len(self._steps) - 1, 2):
            difference = self._difference(position, first)
            if anchor is not None:
                difference.sub_(self._difference(anchor, first))
            if scale is not None:
                difference.mul_(scale.sqrt())
            values.append(squared_norm(difference) / 2)
        return sum(values) / len(values) if values else math.nan

    def gradients(self, position: torch.Tensor) -> Iterator[torch.Tensor]:
        """The gradient of each step; the next one overwrites it."""
        self._objective.flat.point_to(position)
        for number in range(len(self._steps)):
            yield self._gradient(number)

    def loss(self, position: torch.Tensor) -> float:
        """Mean loss over the steps."""
        self._objective.flat.point_to(position)
        values = [self._objective.loss(step, self._key, n) for n, step in enumerate(self._steps)]
        return float(torch.stack(values).double().mean()) if values else math.nan

    def _difference(self, position: torch.Tensor, first: int) -> torch.Tensor:
        """G − g' of a pair of steps, a new tensor."""
        self._objective.flat.point_to(position)
        one = self._gradient(first).clone()
        return one.sub_(self._gradient(first + 1))

    def hessian_trace(
        self, position: torch.Tensor, directions: int = 4, scale: torch.Tensor | None = None
    ) -> float:
        """Trace of the Hessian by Hutchinson's estimator, with central differences of gradients.

        With ``scale`` G, that of √G H √G.

        References:
            M. Hutchinson, Comm. Statist. Simulation Comput. 18 (1989).
        """
        values = []
        for number in range(directions):
            direction = self._normals.plain(number)[0].sign()
            if scale is not None:
                direction = direction * scale.sqrt()
            values.append(
                float(direction @ self._times_hessian(position, direction, [number % len(self._steps)]))
            )
        return sum(values) / len(values)

    def largest_curvature(
        self,
        position: torch.Tensor,
        *,
        iterations: int = _ITERATIONS,
        steps: int | None = None,
        scale: torch.Tensor | None = None,
        pull: float = 0.0,
    ) -> float:
        """|h| of the Hessian's largest eigenvalue in size, by power iteration over this many steps.

        With ``scale`` G, that of √G (H + pull) √G.
        """
        root = None if scale is None else scale.sqrt()
        direction = self._normals.plain(0)[0].clone()
        value, used = 0.0, range(min(steps or len(self._steps), len(self._steps)))
        for _ in range(iterations):
            norm = math.sqrt(squared_norm(direction))
            if not 0 < norm < math.inf:
                break
            direction.div_(norm)
            if root is None:
                image = self._times_hessian(position, direction, used)
            else:
                direction.mul_(root)
                image = self._times_hessian(position, direction, used)
                image.add_(direction, alpha=pull).mul_(root)
            value = math.sqrt(squared_norm(image))
            direction = image
        return value

    def times_hessian(self, position: torch.Tensor, direction: torch.Tensor, steps: int) -> torch.Tensor:
        """H · direction, averaged over the first steps, by central differences of gradients."""
        return self._times_hessian(position, direction, range(min(steps, len(self._steps))))

    def _gradient(self, number: int) -> torch.Tensor:
        self._objective.loss_and_gradient(self._buffer, self._steps[number], self._key, number)
        return self._buffer

    def _times_hessian(
        self, position: torch.Tensor, direction: torch.Tensor, steps: Sequence[int]
    ) -> torch.Tensor:
        """H · direction, averaged over steps; |direction| sets the scale of the difference."""
        size = _RELATIVE_STEP * math.sqrt(
            max(squared_norm(position), 1.0) / max(squared_norm(direction), 1e-30)
        )
        result = torch.zeros_like(position)
        for sign in (1.0, -1.0):
            shifted = position.add(direction, alpha=sign * size)
            self._objective.flat.point_to(shifted)
            for number in steps:
                result.add_(self._gradient(number), alpha=sign / (2 * size * len(steps)))
        return result
