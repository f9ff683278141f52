"""Stochastic gradient Langevin dynamics with localisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from devsample.samplers.base import Buffers
from devsample.samplers.langevin import OverdampedKernel
from devsample.samplers.optimizer import Sampler


@dataclass(frozen=True, kw_only=True)
class SGLDKernel(OverdampedKernel):
    """The hyperparameters of `SGLD` and its update."""

    def step(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> None:
        """One step in place; ``gradient`` is that of the mean loss L."""
        half, pull = self.lr / 2, self.localization + self.weight_decay
        if pull:  # towards the minimum of both quadratic terms
            target = center * (self.localization / pull) if self.weight_decay else center
            position.lerp_(target, half * pull)
        position.add_(gradient, alpha=-half * self.nbeta)
        if self.noise_level:
            position.add_(noise, alpha=math.sqrt(self.lr) * self.noise_level)
        self.keep_in_box(position, center)

    def formula(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> tuple[torch.Tensor, Buffers]:
        """The step of one row, as in the docstring of `SGLD`."""
        w, lr, sigma = position, self.lr, self.noise_level
        w = w - lr / 2 * self.slope(w, gradient, center) + math.sqrt(lr) * sigma * noise
        self.keep_in_box(w, center)
        return w, {}


class SGLD(Sampler):
    r"""Stochastic gradient Langevin dynamics, localised at the parameters it starts from.

    .. math::
        w_{k+1} = w_k - \frac{ε}{2}\Big(nβ\,∇L_B(w_k) + μ\,w_k + γ\,(w_k - w^*)\Big)
                  + \sqrt{ε}\,σ\,\frac{R_k + R_{k+1}}{2}

    with independent standard normal R. Neighbouring steps share a term of the noise, which takes
    the first-order step bias out of the full-batch dynamics (exact on a Gaussian while ε·a < 4, a
    its largest precision). ``integrator="euler"`` uses :math:`R_k` alone. The bias from the
    minibatch gradient's own noise stays with either.

    Args:
        params: parameters or groups.
        lr: ε > 0, the step size.
        nbeta: nβ > 0, the inverse temperature times the number of samples.
        localization: γ ≥ 0, strength of the pull to w*, the parameters at the first step.
        weight_decay: μ ≥ 0, a Gaussian prior at 0.
        noise_level: σ ≥ 0; 1 is right, anything else samples another temperature.
        bounding_box_size: half width of a box around w* that no entry leaves; None: no box.
        bounding_box: "reflect" at its walls, or "clamp" to them (another law).
        integrator: "averaged" or "euler".
        generator, masks: see `Sampler`.

    References:
        M. Welling, Y. W. Teh, "Bayesian learning via stochastic gradient Langevin dynamics", ICML 2011.
        B. Leimkuhler, C. Matthews, "Rational construction of stochastic numerical methods for
        molecular sampling", AMRX 2013 (1), eq. 1.4 (averaged noise).
        E. Lau et al., "The local learning coefficient", 2023, arXiv 2308.12108 (localisation).

    Examples:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> sampler = SGLD([w], lr=0.01, nbeta=10.0, localization=1.0)
        >>> (w**2).sum().backward()
        >>> sampler.step()
        >>> bool((w != 0).all())
        True
    """

    kernel = SGLDKernel
