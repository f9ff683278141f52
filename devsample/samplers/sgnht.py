"""Stochastic gradient Nosé–Hoover thermostat: the friction adapts to the gradient's noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from devsample.samplers.base import Buffers, Positive
from devsample.samplers.langevin import LangevinKernel
from devsample.samplers.optimizer import Sampler

_PIECE = 1 << 14
_LEAST_MASS, _SWINGS = 100.0, 100.0  # √100 standard deviations of ξ are A


@dataclass(frozen=True, kw_only=True)
class SGNHTKernel(LangevinKernel):
    """The hyperparameters of `SGNHT` and its update."""

    friction: Positive = 0.1
    thermal_mass: Positive | None = None

    def mass(self, size: int) -> float:
        """Q for P = ``size`` entries; by default the swings of ξ, of variance 1/(QP), are small against A."""
        if self.thermal_mass is not None:
            return self.thermal_mass
        return max(_LEAST_MASS, _SWINGS / (self.friction**2 * max(size, 1)))

    @property
    def speed(self) -> float:
        """coth(A/2), as of friction A that is constant."""
        return 1 / math.tanh(self.friction / 2)

    def init(self, position: torch.Tensor) -> Buffers:
        """At rest, with the friction that balances the injected noise."""
        return {
            "velocity": torch.zeros_like(position),
            "thermostat": torch.full_like(position[:, :1], self.friction),
        }

    def step(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> None:
        """One step in place; ``gradient`` is that of the mean loss L."""
        velocity, thermostat, h = buffers["velocity"], buffers["thermostat"], math.sqrt(self.lr)
        velocity.sub_(self.slope(position, gradient, center), alpha=h)
        position.add_(velocity, alpha=h / 2)
        self._regulate(thermostat, velocity)
        velocity.mul_(torch.exp(-thermostat)).addcmul_(noise, self._spread(thermostat))
        self._regulate(thermostat, velocity)
        position.add_(velocity, alpha=h / 2)
        self.keep_in_box(position, center, velocity)

    def _regulate(self, thermostat: torch.Tensor, velocity: torch.Tensor) -> None:
        """Half a step of the thermostat, driven by the excess of the kinetic energy."""
        excess = _mean_square(velocity).sub_(self.noise_level**2)
        thermostat.add_(excess, alpha=1 / (2 * self.mass(velocity.shape[1])))

    def _spread(self, thermostat: torch.Tensor) -> torch.Tensor:
        """Standard deviation of the noise; ξ may be negative or 0."""
        ratio = torch.expm1(-2 * thermostat).div_(thermostat).neg_()
        ratio.masked_fill_(thermostat == 0, 2.0)
        return ratio.mul_(self.friction).sqrt_().mul_(self.noise_level)

    def formula(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> tuple[torch.Tensor, Buffers]:
        """The step of one row, as in the docstring of `SGNHT`."""
        w, v, xi = position, buffers["velocity"], buffers["thermostat"]
        h, friction, mass, sigma = math.sqrt(self.lr), self.friction, self.mass(w.shape[-1]), self.noise_level
        v = v - h * self.slope(w, gradient, center)
        w = w + h / 2 * v
        xi = xi + ((v**2).mean() - sigma**2) / (2 * mass)
        v = torch.exp(-xi) * v + sigma * torch.sqrt(friction * (1 - torch.exp(-2 * xi)) / xi) * noise
        xi = xi + ((v**2).mean() - sigma**2) / (2 * mass)
        w = w + h / 2 * v
        self.keep_in_box(w, center, v)
        return w, {"velocity": v, "thermostat": xi}


def _mean_square(rows: torch.Tensor) -> torch.Tensor:
    """Mean square of each row, (K, 1): summed in pieces, for a long float32 sum stands still in the end."""
    size = rows.shape[1]
    whole = size - size % _PIECE
    total = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True).square_()
    if whole:
        pieces = rows[:, :whole].view(len(rows), -1, _PIECE)
        total.add_(torch.linalg.vector_norm(pieces, dim=2).square_().sum(1, keepdim=True))
    mean: torch.Tensor = total.div_(size)
    return mean


class SGNHT(Sampler):
    r"""Langevin dynamics whose friction ξ, one for all P entries, holds the kinetic energy at its value.

    .. math::
        v &← v_k - h\,∇U(w_k), \qquad w ← w_k + \tfrac{h}{2} v, \qquad
        ξ ← ξ_k + \frac{|v|^2/P - σ^2}{2Q} \\
        v_{k+1} &= e^{-ξ} v + σ \sqrt{A\,\frac{1 - e^{-2ξ}}{ξ}}\;R_k, \qquad
        ξ_{k+1} = ξ + \frac{|v_{k+1}|^2/P - σ^2}{2Q}, \qquad w_{k+1} = w + \tfrac{h}{2} v_{k+1}

    with :math:`h = \sqrt{ε}`, :math:`∇U = nβ\,∇L_B + γ(w - w^*) + μ w`, :math:`v_0 = 0, ξ_0 = A`; ξ and A
    are per step. Noise of the gradient that is of equal size in all directions raises ξ until the
    law of w is right again, whatever that size; of unequal noise only the mean is met. In equilibrium
    ξ has mean A and variance 1/(QP). Exact on a Gaussian as Q grows; at the defaults and
    ε·a = 1 within 0.2 %.

    Args:
        params: parameters or groups; one thermostat for each group.
        friction: A > 0, the friction of exact gradients, which sets the size of the noise.
        thermal_mass: Q > 0; the thermostat answers within about A·Q steps. Its own swings disturb the law if
            they are not small against A: at P = 2, A = 0.1 and Q = 100 the expectation of
            :math:`w_1^4 w_2^4` is 1.6 % too large. None: 100/(A²P), 100 at least.
        lr, nbeta, localization, weight_decay, bounding_box_size, bounding_box: as in `SGLD`.
        noise_level: σ ≥ 0 sets temperature σ² for noise and thermostat; 1 is right.
        generator, masks: see `Sampler`.

    References:
        N. Ding et al., "Bayesian sampling using stochastic gradient thermostats", NeurIPS 2014.
        B. Leimkuhler, X. Shang, "Adaptive thermostats for noisy gradient systems", 2015,
        arXiv 1505.06889 (BADODAB; here both half kicks at one position are one).

    Examples:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> sampler = SGNHT([w], lr=0.01, nbeta=10.0, localization=1.0)
        >>> (w**2).sum().backward()
        >>> sampler.step()
        >>> bool((w != 0).all())
        True
    """

    kernel = SGNHTKernel
