"""What the samplers with injected noise share: hyperparameters, potential, and the box."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Literal

import torch

from devsample.samplers.base import Buffers, Kernel, NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class LangevinKernel(Kernel):
    """Common hyperparameters of samplers that add noise to a (minibatch) gradient.

    They sample :math:`e^{-U}`, :math:`U = nβ L + γ/2 |w - w^*|^2 + μ/2 |w|^2`.

    Attributes:
        lr: ε > 0, the step size.
        nbeta: nβ > 0, the inverse temperature times the number of samples.
        localization: γ ≥ 0, strength of the pull to w*, the parameters at the first step.
        weight_decay: μ ≥ 0, a Gaussian prior at 0.
        noise_level: σ ≥ 0; 1 is right, anything else samples at temperature σ².
        bounding_box_size: half width of a box around w* that no entry leaves; None: no box.
        bounding_box: "reflect" at its walls, or "clamp" to them (another law).
        control_variate: take g_B(w) − g_B(w*) + g(w*) for the gradient; in runs only.
    """

    lr: Positive
    nbeta: Positive
    localization: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    noise_level: NonNegative = 1.0
    bounding_box_size: Positive | None = None
    bounding_box: Literal["reflect", "clamp"] = "reflect"
    control_variate: bool = False

    @abc.abstractmethod
    def formula(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> tuple[torch.Tensor, Buffers]:
        """The step as the sampler's docstring writes it, to be read: `step` is held equal to it by a test.

        Args:
            position: w of one row, shape (P,).
            gradient: ∇L, shape (P,).
            center: w*, shape (P,).
            noise: shape (P,).
            buffers: one row of each, shape (P,) or (1,).

        Returns:
            The new position and the new buffers.
        """

    def slope(self, position: torch.Tensor, gradient: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
        """∇U = nβ ∇L + γ (w − w*) + μ w, a new tensor."""
        total = gradient * self.nbeta
        if self.localization:
            total.add_(position - center, alpha=self.localization)
        if self.weight_decay:
            total.add_(position, alpha=self.weight_decay)
        return total

    def keep_in_box(
        self, position: torch.Tensor, center: torch.Tensor, velocity: torch.Tensor | None = None
    ) -> None:
        """Bring entries that have left the box back, in place.

        Reflection turns the velocity of a reflected entry round; clamping stops it.
        """
        if self.bounding_box_size is None:
            return
        size = self.bounding_box_size
        if self.bounding_box == "clamp":
            if velocity is not None:
                velocity.masked_fill_((position - center).abs() > size, 0.0)
            torch.clamp(position, center - size, center + size, out=position)
            return
        reflect(position, center, size, velocity)


@dataclass(frozen=True, kw_only=True)
class OverdampedKernel(LangevinKernel):
    """What the samplers without a velocity share: which noise a step adds.

    Attributes:
        integrator: "averaged" noise, or "euler": R_k alone.
    """

    integrator: Literal["averaged", "euler"] = "averaged"

    @property
    def noise_kind(self) -> Literal["plain", "averaged"]:
        """Averaged noise unless the integrator is Euler's."""
        return "averaged" if self.integrator == "averaged" else "plain"

    @property
    def step_bias(self) -> float:
        """1 for Euler steps, in preconditioned coordinates; averaged noise has none at first order."""
        return 0.0 if self.integrator == "averaged" else 1.0


def reflect(
    position: torch.Tensor, center: torch.Tensor, size: float, velocity: torch.Tensor | None = None
) -> None:
    """Reflect entries at the walls of the box of half width ``size`` around ``center``, in place.

    The velocity of an entry that has been reflected an odd number of times turns round.
    """
    offset = position - center
    outside = offset.abs() > size
    phase = (offset + size).remainder_(4 * size).sub_(2 * size)  # the path repeats every 4·size
    if velocity is not None:
        torch.where(outside & (phase >= 0), -velocity, velocity, out=velocity)
    torch.where(outside, center + (size - phase.abs_()), position, out=position)
