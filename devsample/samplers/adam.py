"""SGLD along Adam's averaged gradient, with its diagonal preconditioner, which burn-in adapts and fixes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from devsample.samplers.base import Averaging, Buffers
from devsample.samplers.optimizer import Sampler
from devsample.samplers.rmsprop import RMSPropSGLDKernel, remaining


@dataclass(frozen=True, kw_only=True)
class AdamSGLDKernel(RMSPropSGLDKernel):
    """The hyperparameters of `AdamSGLD` and its update: RMSProp's with the averaged gradient."""

    momentum: Averaging = 0.9

    @property
    def step_bias(self) -> float:
        """2 β₁/(1 − β₁), and 1 more for Euler steps: the averaged gradient is an old one."""
        return super().step_bias + 2 * self.momentum / (1 - self.momentum)

    def init(self, position: torch.Tensor) -> Buffers:
        """First moment 0, besides what RMSProp keeps."""
        return {"first_moment": torch.zeros_like(position), **super().init(position)}

    def _direction(self, gradient: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        mean = buffers["first_moment"].lerp_(gradient, 1 - self.momentum)
        if self.form == "hitchcock":
            return mean / remaining(self.momentum, buffers["count"])
        return mean

    def formula(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> tuple[torch.Tensor, Buffers]:
        """The step of one row, as in the docstring of `AdamSGLD`."""
        scale, new = self._formula_scale(gradient, buffers)
        new["first_moment"] = m = self.momentum * buffers["first_moment"] + (1 - self.momentum) * gradient
        m_hat = m / (1 - self.momentum ** new["count"]) if self.form == "hitchcock" else m
        w, lr, sigma = position, self.lr, self.noise_level
        w = w - lr / 2 * scale * self.slope(w, m_hat, center) + torch.sqrt(lr * scale) * sigma * noise
        self.keep_in_box(w, center)
        return w, new


class AdamSGLD(Sampler):
    r"""`RMSPropSGLD` whose drift follows an average of the gradients.

    .. math::
        m_t &= β_1 m_{t-1} + (1-β_1)\,g_t, \qquad m_{-1} = 0, \qquad g_t = ∇L_B(w_t) \\
        w_{t+1} &= w_t - \frac{ε}{2} G_t \Big(nβ\,\hat m_t + μ\,w_t + γ (w_t - w^*)\Big)
                  + \sqrt{ε G_t}\,σ\,\frac{R_t + R_{t+1}}{2}

    with G as in `RMSPropSGLD`. ``form="hitchcock"``: :math:`\hat m_t = m_t / (1 - β_1^{t+1})`.
    ``form="devinterp"``: :math:`\hat m_t = m_t`.

    The average is the gradient of some steps ago, on average β₁/(1 − β₁) steps, and pulls that much too
    late: on a Gaussian of precision a = nβh with a fixed G the variance of w is too large by the factor
    1 + (ε G a/2)·β₁/(1 − β₁), at β₁ = 0.9 that is 18 times the bias of Euler steps. The step size must be
    that much smaller for the same bias; what is left for it to do `RMSPropSGLD` does as well.

    Args:
        params: parameters or groups.
        momentum: β₁ in [0, 1), what m keeps of its past.
        alpha: α in [0, 1), what v keeps of its past.
        eps: a > 0, bounds G by 1/a.
        form: "hitchcock" or "devinterp".
        preconditioner: "frozen" (in a run: after the first half of burn-in), or "moving", which does not
            sample the target.
        integrator: "averaged" or "euler".
        lr, nbeta, localization, weight_decay, noise_level, bounding_box_size, bounding_box: as in `SGLD`.
        generator, masks, freeze_after: see `Sampler`.

    References:
        R. Hitchcock, J. Hoogland, "From global to local: a scalable benchmark for local posterior
        sampling", 2025, arXiv 2507.21449.
        S. Kim, Q. Song, F. Liang, "Stochastic gradient Langevin dynamics with adaptive drifts", 2022.

    Examples:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> sampler = AdamSGLD([w], lr=0.01, nbeta=10.0, localization=1.0, freeze_after=100)
        >>> (w**2).sum().backward()
        >>> sampler.step()
        >>> bool((w != 0).all())
        True
    """

    kernel = AdamSGLDKernel
