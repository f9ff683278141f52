"""The probability with which Metropolis and Hastings would accept an Euler step."""

from __future__ import annotations

import torch


def mala_acceptance(
    position: torch.Tensor,
    slope: torch.Tensor,
    potential: torch.Tensor,
    proposal: torch.Tensor,
    proposal_slope: torch.Tensor,
    proposal_potential: torch.Tensor,
    lr: float,
    noise_level: float = 1.0,
) -> torch.Tensor:
    r"""Acceptance probability of the Langevin proposal w', drawn from N(w − ε/2 ∇U(w), ε σ²).

    .. math::
        a = \min\Big(1, \frac{π(w')\,q(w\,|\,w')}{π(w)\,q(w'\,|\,w)}\Big), \qquad π = e^{-U/σ^2}, \qquad
        \log a = \frac{1}{σ^2} \Big(U - U' + \tfrac12 δ\cdot(∇U + ∇U') - \tfrac{ε}{8}(|∇U'|^2 - |∇U|^2)\Big)

    with δ = w' − w; primes stand for values at w'. The second form is the first with the normals
    written out: the error of the trapezoidal rule along the step, which loses no digits where it is small.

    Args:
        position: w, shape (..., P).
        slope: ∇U(w), shape (..., P): nβ ∇L with all that is in the target besides.
        potential: U(w), shape (...).
        proposal: w', shape (..., P).
        proposal_slope: ∇U(w'), shape (..., P).
        proposal_potential: U(w'), shape (...).
        lr: ε > 0.
        noise_level: σ > 0.

    Returns:
        Probabilities in [0, 1], shape (...), in the potentials' dtype; 0 where something is not finite.

    References:
        G. Roberts, R. Tweedie, "Exponential convergence of Langevin distributions and their discrete
        approximations", Bernoulli 2 (1996), section 1.4.2.

    Examples:
        >>> w, v = torch.tensor([1.0, 1.0]), torch.tensor([1.5, 0.5])
        >>> round(float(mala_acceptance(w, w, (w**2).sum() / 2, v, v, (v**2).sum() / 2, lr=0.5)), 5)
        0.96923
    """
    exact = potential.dtype
    inner = ((proposal - position) * (slope + proposal_slope)).sum(-1, dtype=exact)
    squares = ((proposal_slope - slope) * (proposal_slope + slope)).sum(-1, dtype=exact)
    log_ratio = (potential - proposal_potential + inner / 2 - squares * (lr / 8)) / noise_level**2
    return torch.exp(log_ratio).clamp(max=1.0).nan_to_num(nan=0.0)
