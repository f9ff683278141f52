"""Stochastic gradient Hamiltonian Monte Carlo: Langevin dynamics with momentum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from devsample.samplers.base import Buffers, Range
from devsample.samplers.langevin import LangevinKernel
from devsample.samplers.optimizer import Sampler


@dataclass(frozen=True, kw_only=True)
class SGHMCKernel(LangevinKernel):
    """The hyperparameters of `SGHMC` and its update."""

    friction: Annotated[float, Range(above=0, most=1)] = 0.1

    @property
    def speed(self) -> float:
        """(2 − α)/α: with little friction slow directions are crossed by their momentum."""
        return (2 - self.friction) / self.friction

    def init(self, position: torch.Tensor) -> Buffers:
        """Every entry starts at rest."""
        return {"velocity": torch.zeros_like(position)}

    def step(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> None:
        """One step in place; ``gradient`` is that of the mean loss L."""
        velocity, h, kept = buffers["velocity"], math.sqrt(self.lr), 1 - self.friction
        velocity.sub_(self.slope(position, gradient, center), alpha=h)
        position.add_(velocity, alpha=h / 2)
        velocity.mul_(kept).add_(noise, alpha=math.sqrt(1 - kept**2) * self.noise_level)
        position.add_(velocity, alpha=h / 2)
        self.keep_in_box(position, center, velocity)

    def formula(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> tuple[torch.Tensor, Buffers]:
        """The step of one row, as in the docstring of `SGHMC`."""
        w, v, h = position, buffers["velocity"], math.sqrt(self.lr)
        alpha, sigma = self.friction, self.noise_level
        v = v - h * self.slope(w, gradient, center)
        w = w + h / 2 * v
        v = (1 - alpha) * v + math.sqrt(1 - (1 - alpha) ** 2) * sigma * noise
        w = w + h / 2 * v
        self.keep_in_box(w, center, v)
        return w, {"velocity": v}


class SGHMC(Sampler):
    r"""Langevin dynamics with momentum: kick, half a drift, friction and noise, half a drift.

    .. math::
        v &← v_k - h\,∇U(w_k), \qquad w ← w_k + \tfrac{h}{2} v \\
        v_{k+1} &= (1 - α)\,v + \sqrt{1 - (1-α)^2}\;σ R_k, \qquad w_{k+1} = w + \tfrac{h}{2} v_{k+1}

    with :math:`h = \sqrt{ε}`, :math:`∇U = nβ\,∇L_B + γ(w - w^*) + μ w`, :math:`v_0 = 0`. The law of w is
    exact on a Gaussian while ε·a < 4, for any friction. At α = 1 it is SGLD with averaged noise and the
    same lr; below, slow directions relax (2 − α)/α times faster, and the minibatch bias is that
    much larger: at equal bias lr is to be that much smaller.

    Args:
        params: parameters or groups.
        friction: α in (0, 1], the part of the velocity lost per step.
        lr, nbeta, localization, weight_decay, noise_level, bounding_box_size, bounding_box: as in `SGLD`.
        generator, masks: see `Sampler`.

    References:
        T. Chen, E. Fox, C. Guestrin, "Stochastic gradient Hamiltonian Monte Carlo", ICML 2014, eq. 13.
        B. Leimkuhler, C. Matthews, "Rational construction of stochastic numerical methods for
        molecular sampling", AMRX 2013 (1) (BAOAB; here both half kicks at one position are one).

    Examples:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> sampler = SGHMC([w], lr=0.01, nbeta=10.0, localization=1.0, friction=0.2)
        >>> (w**2).sum().backward()
        >>> sampler.step()
        >>> bool((w != 0).all())
        True
    """

    kernel = SGHMCKernel
