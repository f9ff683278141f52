"""SGLD with RMSProp's diagonal preconditioner, which burn-in adapts and fixes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from devsample.samplers.base import Averaging, Buffers, Positive
from devsample.samplers.langevin import OverdampedKernel
from devsample.samplers.optimizer import Sampler


@dataclass(frozen=True, kw_only=True)
class RMSPropSGLDKernel(OverdampedKernel):
    """The hyperparameters of `RMSPropSGLD` and its update.

    While it adapts, ``buffers`` holds "second_moment"; `freeze` puts the fixed "scale" in its place.
    """

    alpha: Averaging = 0.99
    eps: Positive = 0.1
    form: Literal["hitchcock", "devinterp"] = "hitchcock"
    preconditioner: Literal["frozen", "moving"] = "frozen"

    @property
    def adapts(self) -> bool:
        """The preconditioner does."""
        return True

    @property
    def scale(self) -> float:
        """1/a: the preconditioner of an entry without gradient."""
        return 1 / self.eps

    def init(self, position: torch.Tensor) -> Buffers:
        """Second moment 0, or 1 in Hitchcock and Hoogland's form, and the number of steps."""
        start = 1.0 if self.form == "hitchcock" else 0.0
        return {
            "second_moment": torch.full_like(position, start),
            "count": torch.zeros_like(position[:, :1]),
        }

    def freeze(self, buffers: Buffers) -> None:
        """Keep the preconditioner as it is from now on, unless ``preconditioner="moving"``."""
        if self.preconditioner == "frozen" and "second_moment" in buffers:
            buffers["scale"] = self._scale(buffers)
            del buffers["second_moment"]

    def step_scales(self, buffers: Buffers) -> torch.Tensor:
        """G as it is now; at least one step must have been made."""
        return buffers["scale"] if "scale" in buffers else self._scale(buffers)

    def is_frozen(self, buffers: Buffers) -> bool:
        """Whether `freeze` has fixed the preconditioner."""
        return "scale" in buffers

    def step(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> None:
        """One step in place; ``gradient`` is that of the mean loss L."""
        buffers["count"].add_(1)
        if "second_moment" in buffers:
            buffers["second_moment"].mul_(self.alpha).addcmul_(gradient, gradient, value=1 - self.alpha)
            scale = self._scale(buffers)
        else:
            scale = buffers["scale"]
        slope = self.slope(position, self._direction(gradient, buffers), center)
        position.addcmul_(slope, scale, value=-self.lr / 2)
        if self.noise_level:
            position.addcmul_(noise, scale.sqrt(), value=math.sqrt(self.lr) * self.noise_level)
        self.keep_in_box(position, center)

    def _direction(self, gradient: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        """What stands for ∇L in the drift."""
        return gradient

    def _scale(self, buffers: Buffers) -> torch.Tensor:
        """The diagonal G, a new tensor."""
        root = buffers["second_moment"].sqrt()
        if self.form == "hitchcock":
            root.div_(remaining(self.alpha, buffers["count"]).sqrt_())
        return root.add_(self.eps).reciprocal_()

    def formula(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> tuple[torch.Tensor, Buffers]:
        """The step of one row, as in the docstring of `RMSPropSGLD`."""
        scale, new = self._formula_scale(gradient, buffers)
        w, lr, sigma = position, self.lr, self.noise_level
        w = w - lr / 2 * scale * self.slope(w, gradient, center) + torch.sqrt(lr * scale) * sigma * noise
        self.keep_in_box(w, center)
        return w, new

    def _formula_scale(self, gradient: torch.Tensor, buffers: Buffers) -> tuple[torch.Tensor, Buffers]:
        """G of one row, and the new buffers that it comes from."""
        new = {"count": buffers["count"] + 1}
        if "scale" in buffers:
            new["scale"] = buffers["scale"]
            return buffers["scale"], new
        new["second_moment"] = v = self.alpha * buffers["second_moment"] + (1 - self.alpha) * gradient**2
        v_hat = v / (1 - self.alpha ** new["count"]) if self.form == "hitchcock" else v
        return 1 / (torch.sqrt(v_hat) + self.eps), new


def remaining(kept: float, count: torch.Tensor) -> torch.Tensor:
    """1 − kept^count: the weight of all terms of an exponential average after ``count`` of them."""
    return -torch.expm1(count * math.log(kept)) if kept else torch.ones_like(count)


class RMSPropSGLD(Sampler):
    r"""SGLD with step sizes ε·G_i that follow the size of each entry's gradient during burn-in.

    .. math::
        v_t &= α v_{t-1} + (1-α)\,g_t^2, \qquad g_t = ∇L_B(w_t), \qquad
        G_t = \frac{1}{\sqrt{\hat v_t} + a} \\
        w_{t+1} &= w_t - \frac{ε}{2} G_t \Big(nβ\,g_t + μ\,w_t + γ (w_t - w^*)\Big)
                  + \sqrt{ε G_t}\,σ\,\frac{R_t + R_{t+1}}{2}

    ``form="hitchcock"``: :math:`v_{-1} = 1`, :math:`\hat v_t = v_t / (1 - α^{t+1})`.
    ``form="devinterp"``: :math:`v_{-1} = 0`, :math:`\hat v_t = v_t`.

    A preconditioner that goes on moving depends on where the chain has been, and the chain then
    misses its target however small ε is. So a run adapts G in the first half of burn-in and then
    fixes it; in a loop of one's own ``freeze()`` or ``freeze_after=`` does. From there it is SGLD in
    rescaled coordinates: exact on a Gaussian with diagonal precision a while ε·G·a < 4.

    Args:
        params: parameters or groups.
        alpha: α in [0, 1), what v keeps of its past.
        eps: a > 0, bounds G by 1/a.
        form: "hitchcock" or "devinterp".
        preconditioner: "frozen" (in a run: after the first half of burn-in), or "moving", which does not
            sample the target.
        integrator: "averaged" or "euler".
        lr, nbeta, localization, weight_decay, noise_level, bounding_box_size, bounding_box: as in `SGLD`.
        generator, masks, freeze_after: see `Sampler`.

    References:
        C. Li et al., "Preconditioned stochastic gradient Langevin dynamics for deep neural networks",
        AAAI 2016.
        R. Hitchcock, J. Hoogland, "From global to local: a scalable benchmark for local posterior
        sampling", 2025, arXiv 2507.21449.

    Examples:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> sampler = RMSPropSGLD([w], lr=0.01, nbeta=10.0, localization=1.0, freeze_after=100)
        >>> (w**2).sum().backward()
        >>> sampler.step()
        >>> bool((w != 0).all())
        True
    """

    kernel = RMSPropSGLDKernel
