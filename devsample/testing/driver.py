"""Runs a sampler on a potential: thousands of chains as rows of one state, by the library's own kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from devsample.samplers.base import Buffers, Kernel
from devsample.samplers.hmc import HMC
from devsample.samplers.reference import ReferenceKernel
from devsample.seeds import NormalBlocks, Role, chain_keys
from devsample.testing.potentials import Potential

__all__ = ["Drive", "Ensemble", "Gradient", "settle"]

Gradient = Callable[[torch.Tensor, int], torch.Tensor]
"""Rows (K, P) and a step to gradients (K, P), exact or of minibatches."""

_PILOT_ROWS = 512
_SETTLED = 1.1  # growth of the largest curvature below which a round of the pilot changes nothing
_MOST_LEAPFROGS = 20_000


class Drive:
    """K chains of one kernel on one potential.

    Args:
        potential: L − L(w*).
        kernel: the sampler's update.
        position: first states (K, P); not changed.
        seed: of all chains' noise.
        gradient: in place of the potential's own, for minibatches.
    """

    def __init__(
        self,
        potential: Potential,
        kernel: Kernel,
        position: torch.Tensor,
        *,
        seed: int,
        gradient: Gradient | None = None,
    ) -> None:
        self.kernel, self.position = kernel, position.clone()
        self.step = self.gradients = 0
        self._potential, self._gradient = potential, gradient or (lambda w, step: potential.gradient(w))
        self._full = _Full(potential)
        self._center = potential.center.to(position)
        keys = chain_keys(seed, len(position))
        self._noise = NormalBlocks(keys, position.shape[1], position.dtype, position.device)
        self._chances = NormalBlocks(keys, 2, torch.float64, position.device, Role.ACCEPT)
        if isinstance(kernel, ReferenceKernel):
            self._buffers = kernel.start(self.position, self._full)
        else:
            self._buffers = kernel.init(self.position)

    def advance(self, steps: int) -> None:
        """Make ``steps`` steps, or transitions."""
        for _ in range(steps):
            self._advance()

    def losses(self) -> torch.Tensor:
        """L − L(w*) of every chain now, (K,), in double precision."""
        if isinstance(self.kernel, ReferenceKernel):
            return self._buffers["loss"][:, 0].clone()
        return self._potential(self.position.double())

    @property
    def buffers(self) -> Buffers:
        """What the sampler keeps beside the positions."""
        return self._buffers

    def freeze(self) -> None:
        """End the burn-in."""
        self.kernel.freeze(self._buffers)

    def acceptance(self) -> float:
        """Mean chance of acceptance of the last transition."""
        return float(self._buffers["acceptance"].mean())

    def _advance(self) -> None:
        kernel, step = self.kernel, self.step
        self.step += 1
        if isinstance(kernel, ReferenceKernel):
            uniform = torch.special.ndtr(self._chances.plain(step))
            noise = self._noise.plain(step)
            kernel.transition(self.position, self._center, noise, uniform, self._full, self._buffers)
            self.gradients += kernel.num_gradients
            return
        averaged = kernel.noise_kind == "averaged"
        noise = self._noise.averaged(step) if averaged else self._noise.plain(step)
        gradient = self._gradient(self.position, step)
        kernel.step(self.position, gradient, self._center, noise, self._buffers)
        self.gradients += 1


class _Full:
    """A potential as `ReferenceKernel` calls it."""

    def __init__(self, potential: Potential) -> None:
        self._potential, self.gradient = potential, potential.gradient

    def __call__(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._potential(position), self._potential.gradient(position)


@dataclass(frozen=True)
class Ensemble:
    """What a pilot has found of the law: rows that look like draws, and its scales.

    Attributes:
        position: rows (K, P).
        largest: the largest precision a = nβ h + γ that any row met.
        typical: nine tenths of L − L(w*) come from rows with no larger precision.
        trace: mean of nβ tr ∇²L + γ P over the rows.
        value: mean of nβ (L − L(w*)).
        gradients: what the pilot cost, in gradients of one row.
    """

    position: torch.Tensor
    largest: float
    typical: float
    trace: float
    value: float
    gradients: int


@dataclass
class _Scales:
    """Precisions of rows at an inverse temperature."""

    potential: Potential
    nbeta: float
    gamma: float
    largest: float = field(default=0.0)

    def look_at(self, position: torch.Tensor) -> float:
        """The largest precision so far, these rows included."""
        self.largest = max(self.largest, float(self.of(position).max()))
        return self.largest

    def of(self, position: torch.Tensor) -> torch.Tensor:
        """The largest precision of each row, (K,)."""
        return self.potential.hessian_max(position).clamp(min=0) * self.nbeta + self.gamma


def settle(
    potential: Potential,
    *,
    nbeta: float,
    gamma: float,
    box: float | None,
    seed: int,
    rounds: int = 12,
    rows: int = _PILOT_ROWS,
) -> Ensemble:
    """Bring rows from w* to the posterior by HMC, and measure its scales on the way.

    The rows start as w* + s z, with s such that none has more energy than a draw is likely to have, and
    make trajectories of 1.5/√γ (half the box where γ = 0) with steps ε = 1/a_max, a_max the largest
    precision that any row has met so far.
    """
    size = potential.num_parameters
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    position = potential.center.double() + _spread(potential, z, nbeta, gamma, box) * z
    scales = _Scales(potential, nbeta, gamma)
    scales.look_at(position)
    length = 1.5 / math.sqrt(gamma) if gamma else (box or math.sqrt(size / scales.largest))
    gradients, calm, number = 0, 0, 0
    while calm < rounds and number < 4 * rounds:
        before = scales.largest
        lr = 1 / before
        leapfrogs = min(_MOST_LEAPFROGS, max(1, math.ceil(length / math.sqrt(lr))))
        kernel = HMC.kernel(
            lr=lr,
            nbeta=nbeta,
            localization=gamma,
            num_leapfrog_steps=leapfrogs,
            bounding_box_size=box,
            adapt=False,
        )
        drive = Drive(potential, kernel, position, seed=seed + 1 + number)
        drive.advance(1)
        position, gradients = drive.position, gradients + drive.gradients * rows
        calm = calm + 1 if scales.look_at(position) <= _SETTLED * before else 0
        number += 1
    trace = float(potential.hessian_trace(position).mean()) * nbeta + gamma * size
    typical = _weighted_quantile(scales.of(position), potential(position).abs(), 0.9)
    value = float(potential(position).mean()) * nbeta
    return Ensemble(position, scales.largest, typical, trace, value, gradients)


def _spread(potential: Potential, z: torch.Tensor, nbeta: float, gamma: float, box: float | None) -> float:
    """The s at which the largest energy of w* + s z is P/2 + 4, by bisection of ln s."""

    def energy(s: float) -> float:
        w = potential.center.double() + s * z
        return float((nbeta * potential(w) + gamma / 2 * (s * z).square().sum(1)).max())

    low, high = math.log(1e-8), math.log(box / 4 if box else 1e2)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if energy(math.exp(middle)) < z.shape[1] / 2 + 4 else (low, middle)
    return math.exp(low)


def _weighted_quantile(values: torch.Tensor, weights: torch.Tensor, share: float) -> float:
    """The smallest value up to which the values have this share of the weight."""
    order = values.argsort()
    below = weights[order].cumsum(0)
    return float(values[order][torch.searchsorted(below, share * below[-1]).clamp(max=len(values) - 1)])
