"""Runs a sampler on a potential: thousands of chains as rows of one state, by the library's own kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from devsample.samplers.base import Buffers, Kernel
from devsample.samplers.hmc import HMCKernel
from devsample.samplers.reference import ReferenceKernel
from devsample.seeds import NormalBlocks, Role, chain_keys
from devsample.testing.potentials import Potential

__all__ = ["Drive", "Ensemble", "Gradient", "rungs", "settle"]

Gradient = Callable[[torch.Tensor, int], torch.Tensor]
"""Rows (K, P) and a step to gradients (K, P), exact or of minibatches."""

_PILOT_ROWS = 512
_SETTLED = 1.5  # growth of the largest precision below which a round of the pilot changes little
_MOST_LEAPFROGS = 500
_FEW_ENTRIES = 24
_ROUNDS = 12  # at the end of a pilot
SHORT = 1 / 16  # length of a short trajectory
_MOST_SHORT = 64  # how many of them follow a long one
_SMALL_NBETA, _HEATING, _ROUNDS_PER_STAGE = 100.0, 4.0, 8
_RUNG = 4.0  # between the step sizes ε of two rungs


class Drive:
    """K chains of one kernel on one potential.

    Args:
        potential: L − L(w*).
        kernel: the sampler's update.
        position: first states (K, P); not changed.
        seed: of all chains' noise.
        gradient: in place of the potential's own, for minibatches.
        rungs: HMC only: kernels that share ``kernel``'s law, of which each transition takes one, with
            chances in inverse proportion to their gradients.
    """

    def __init__(
        self,
        potential: Potential,
        kernel: Kernel,
        position: torch.Tensor,
        *,
        seed: int,
        gradient: Gradient | None = None,
        rungs: Sequence[HMCKernel] = (),
    ) -> None:
        self.kernel, self.position = kernel, position.clone()
        self.step = self.gradients = 0
        self._potential, self._gradient = potential, gradient or (lambda w, step: potential.gradient(w))
        self._full = _Full(potential)
        self._center = potential.center.to(position)
        self._rungs, self._chance_of_rung = rungs, _chances(rungs)
        self._generator = np.random.default_rng(seed)
        keys = chain_keys(seed, len(position))
        # Single precision is enough of a normal number, and five times faster.
        self._noise = NormalBlocks(keys, position.shape[1], torch.float32, position.device)
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
            if len(self._rungs):
                kernel = self._rungs[self._generator.choice(len(self._rungs), p=self._chance_of_rung)]
                self._buffers["log_lr"].fill_(math.log(kernel.lr))
            uniform = torch.special.ndtr(self._chances.plain(step))
            noise = self._noise.plain(step).to(self.position)
            kernel.transition(self.position, self._center, noise, uniform, self._full, self._buffers)
            self.gradients += kernel.num_gradients
            return
        averaged = kernel.noise_kind == "averaged"
        noise = self._noise.averaged(step) if averaged else self._noise.plain(step)
        gradient = self._gradient(self.position, step)
        kernel.step(self.position, gradient, self._center, noise.to(self.position), self._buffers)
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

    def trace(self, position: torch.Tensor) -> float:
        """Mean over rows of the sum of precisions."""
        return (
            float(self.potential.hessian_trace(position).mean()) * self.nbeta + self.gamma * position.shape[1]
        )

    def typical(self, position: torch.Tensor) -> float:
        """Nine tenths of L − L(w*) come from rows with no larger precision."""
        return _weighted_quantile(self.of(position), self.potential(position).abs(), 0.9)

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
    rows: int = _PILOT_ROWS,
) -> Ensemble:
    """Bring rows from w* to the posterior by HMC, and measure its scales on the way.

    The rows start as w* + s z, with s such that none has more energy than a draw is likely to have, at a
    small nβ, which grows fourfold every eight rounds: where the loss is singular, valleys meet in points
    that are wide at small nβ only. At the end there are 12 rounds in which the largest precision that any
    row has met has not grown by half, 48 at most.
    """
    generator = torch.Generator().manual_seed(seed)
    stages = math.floor(max(0.0, math.log(nbeta / _SMALL_NBETA)) / math.log(_HEATING))
    scales = [_Scales(potential, nbeta / _HEATING ** (stages - n), gamma) for n in range(stages + 1)]
    z = torch.randn(rows, potential.num_parameters, generator=generator, dtype=torch.float64)
    position = potential.center.double() + _spread(potential, z, scales[0].nbeta, gamma, box) * z
    gradients = 0
    for stage in scales[:-1]:
        for _ in range(_ROUNDS_PER_STAGE):
            gradients += _round(position, stage, box, generator)
    last, calm, number = scales[-1], 0, 0
    last.look_at(position)
    while calm < _ROUNDS and number < 4 * _ROUNDS:
        before = last.largest
        gradients += _round(position, last, box, generator)
        calm = calm + 1 if last.largest <= _SETTLED * before else 0
        number += 1
    value = float(potential(position).mean()) * nbeta
    return Ensemble(position, last.largest, last.typical(position), last.trace(position), value, gradients)


def _round(position: torch.Tensor, scales: _Scales, box: float | None, generator: torch.Generator) -> int:
    """A trajectory at each rung, in place, cut short at rare rungs; returns the gradients it took.

    Where a product |a| |b| of d entries each has to vanish, its ratio |a|/|b| is free over decades, but
    moves by 1/√d at most in a trajectory, for the faster of the two keeps its action. So many entries
    take many trajectories, which may be short.
    """
    potential, gamma = scales.potential, scales.gamma
    full, (rows, size) = _Full(potential), position.shape
    largest = scales.look_at(position)
    slowest = gamma or (4 / box**2 if box else largest / size)
    ladder = rungs(scales.typical(position), largest, scales.trace(position), slowest)
    most = max(_MOST_LEAPFROGS, ladder[0][1])
    many = min(size // 3, _MOST_SHORT) if size > _FEW_ENTRIES else 0
    taken = [(lr, min(length, most)) for lr, length in ladder]
    taken += [(lr, math.ceil(length * SHORT)) for lr, length in taken for _ in range(many)]
    for lr, length in taken:
        kernel = HMCKernel(
            lr=lr,
            num_leapfrog_steps=length,
            nbeta=scales.nbeta,
            localization=gamma,
            bounding_box_size=box,
            adapt=False,
        )
        noise = torch.randn(rows, size, generator=generator, dtype=torch.float64)
        uniform = torch.rand(rows, 2, generator=generator, dtype=torch.float64)
        buffers = kernel.start(position, full)
        kernel.transition(position, potential.center.double(), noise, uniform, full, buffers)
    scales.look_at(position)
    return rows * sum(length for _, length in taken)


def rungs(typical: float, largest: float, trace: float, slowest: float) -> list[tuple[float, int]]:
    """Step sizes of HMC from that for the typical precision down to that for the largest, with lengths.

    Where the loss is singular, rare rows are stiffer than most by orders of magnitude: trajectories that
    are stable there are needed, but rarely. Which rung a transition takes does not depend on the state, so
    any mixture of them leaves the law as it is. ε is `_leapfrog_lr` and falls by quarters; a trajectory is
    1.5/√(slowest precision) long.
    """
    number = math.floor(math.log(max(1.0, largest / typical)) / math.log(_RUNG))
    steps = []
    for rung in range(number + 1):
        lr = _leapfrog_lr(largest / _RUNG ** (number - rung), trace)
        steps.append((lr, max(1, math.ceil(1.5 / math.sqrt(lr * slowest)))))
    return steps


def _leapfrog_lr(stiff: float, trace: float) -> float:
    r"""Step size ε = h² of trajectories: :math:`ε a = \min(1, \sqrt{8/N})` for the stiffest precision a.

    N = (Σ a)/a counts the directions that are about as stiff as the stiffest; each adds (ε a)²/32 to the
    mean rise of the energy (so h ~ N^−¼, Beskos et al. 2013), which is held at ¼.
    """
    return min(1.0, math.sqrt(8 * stiff / trace)) / stiff


def _chances(rungs: Sequence[HMCKernel]) -> np.ndarray | None:
    weights = np.array([1 / rung.num_gradients for rung in rungs])
    return weights / weights.sum() if len(rungs) else None


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
