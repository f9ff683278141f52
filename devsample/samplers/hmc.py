"""Hamiltonian Monte Carlo on the full data set: a reference for small models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from devsample.samplers.base import Range
from devsample.samplers.reference import ReferenceKernel, ReferenceSampler


@dataclass(frozen=True, kw_only=True)
class HMCKernel(ReferenceKernel):
    """The hyperparameters of `HMC` and its transition."""

    num_leapfrog_steps: Annotated[int, Range(least=1)] = 10
    jitter: Annotated[float, Range(least=0, below=1)] = 0.2

    @property
    def num_gradients(self) -> int:
        """One a leapfrog step; the first gradient is that of the last transition's end."""
        return self.num_leapfrog_steps

    @property
    def speed(self) -> float:
        """L²: a trajectory is L leapfrog steps long, where SGLD would walk at random."""
        return float(self.num_leapfrog_steps**2)


class HMC(ReferenceSampler):
    r"""Hamiltonian Monte Carlo: L leapfrog steps from a fresh momentum, accepted or rejected.

    .. math::
        p ∼ N(0, σ^2 I), \qquad
        p ← p - \tfrac{h}{2} ∇U(w),\; w ← w + h p,\; p ← p - \tfrac{h}{2} ∇U(w) \quad (L \text{ times})

    with :math:`h = \sqrt{ε}` and :math:`U = nβ L_n + γ/2 |w - w^*|^2 + μ/2 |w|^2` over **all** data; the
    end is accepted with probability :math:`\min(1, e^{-ΔH/σ^2})`, :math:`H = U + |p|^2/2`. The law is exact
    for every step size. A run reads the data once and keeps them on the device; every transition
    costs L passes over them.

    A trajectory is L·h long; about 1.5/√γ reaches from one end of the slowest direction to the other.

    Args:
        params: parameters or groups.
        num_leapfrog_steps: L ≥ 1.
        lr, nbeta, localization, weight_decay, noise_level, bounding_box_size, adapt, target_acceptance,
            jitter: see `ReferenceKernel`.
        generator, masks: see `Sampler`.

    References:
        S. Duane et al., "Hybrid Monte Carlo", Phys. Lett. B 195 (1987).
        R. Neal, "MCMC using Hamiltonian dynamics", Handbook of MCMC (2011), ch. 5.
        M. Hoffman, A. Gelman, "The No-U-Turn sampler", JMLR 15 (2014), sec. 3.2 (dual averaging).

    Examples:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> sampler = HMC([w], lr=0.01, nbeta=10.0, localization=1.0, generator=torch.Generator())
        >>> def closure():
        ...     sampler.zero_grad()
        ...     loss = (w**2).sum()
        ...     loss.backward()
        ...     return loss
        >>> _ = sampler.step(closure)
        >>> bool((w != 0).all())
        True
    """

    kernel = HMCKernel
