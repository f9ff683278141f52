"""The Metropolis-adjusted Langevin algorithm on the full data set: a reference for small models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from devsample.samplers.base import Range
from devsample.samplers.reference import ReferenceKernel, ReferenceSampler


@dataclass(frozen=True, kw_only=True)
class MALAKernel(ReferenceKernel):
    """The hyperparameters of `MALA` and its transition."""

    target_acceptance: Annotated[float, Range(above=0, below=1)] = 0.574


class MALA(ReferenceSampler):
    r"""Langevin steps on the full data set, accepted or rejected: exact for every step size.

    .. math::
        w' = w_k - \frac{ε}{2} ∇U(w_k) + \sqrt{ε}\,σ R_k, \qquad
        \log a = \frac{1}{σ^2}\Big(H(w_k, σR_k) - H(w', p')\Big)

    with :math:`U = nβ L_n + γ/2 |w - w^*|^2 + μ/2 |w|^2` over **all** data. Proposal and acceptance are
    those of one leapfrog step of `HMC` with time step :math:`\sqrt{ε}`, which is the same algorithm:
    :math:`H = U + |p|^2/2`, and a is the ratio of target and proposal densities. A run reads the data
    once and keeps them on the device.

    Args:
        params: parameters or groups.
        lr, nbeta, localization, weight_decay, noise_level, bounding_box_size, adapt, target_acceptance,
            jitter: see `ReferenceKernel`; acceptance near 0.574 mixes fastest in many dimensions.
        generator, masks: see `Sampler`.

    References:
        G. Roberts, R. Tweedie, "Exponential convergence of Langevin distributions and their discrete
        approximations", Bernoulli 2 (1996).
        G. Roberts, J. Rosenthal, "Optimal scaling of discrete approximations to Langevin
        diffusions", JRSS B 60 (1998).

    Examples:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> sampler = MALA([w], lr=0.01, nbeta=10.0, localization=1.0, generator=torch.Generator())
        >>> def closure():
        ...     sampler.zero_grad()
        ...     loss = (w**2).sum()
        ...     loss.backward()
        ...     return loss
        >>> _ = sampler.step(closure)
        >>> bool((w != 0).all())
        True
    """

    kernel = MALAKernel
