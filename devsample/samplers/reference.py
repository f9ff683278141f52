"""What the Metropolis-corrected samplers share: energy, leapfrog trajectories, acceptance, adaptation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import torch

from devsample.errors import InvalidArgumentError
from devsample.samplers.base import Buffers, Kernel, NonNegative, Positive, Range
from devsample.samplers.langevin import reflect
from devsample.samplers.optimizer import Sampler
from devsample.samplers.rows import Row


class Potential(Protocol):
    """L and ∇L on all data. What a call returns may be overwritten by the next one."""

    def __call__(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (K, P) to L (K,) and ∇L (K, P)."""

    def gradient(self, position: torch.Tensor) -> torch.Tensor:
        """∇L (K, P) alone, where L is not needed."""


_SHRINKAGE, _DELAY, _FORGETTING = 0.05, 10.0, 0.75  # γ, t₀ and κ of dual averaging


@dataclass(frozen=True, kw_only=True)
class ReferenceKernel(Kernel):
    """Trajectories of the full-data potential, accepted or rejected as a whole: no bias of the step.

    The stationary law is :math:`e^{-U/σ^2}`, :math:`U = nβ L + γ/2 |w - w^*|^2 + μ/2 |w|^2`, for every
    step size. Each row is a chain of its own, with its own step size if that adapts.

    Attributes:
        lr: ε > 0; the leapfrog's time step is h = √ε. Where burn-in adapts, its first value.
        nbeta: nβ > 0, the inverse temperature times the number of samples.
        localization: γ ≥ 0, strength of the pull to w*, the parameters at the start.
        weight_decay: μ ≥ 0, a Gaussian prior at 0.
        noise_level: σ > 0; 1 is right, anything else samples at temperature σ².
        bounding_box_size: half width of a box around w*, at whose walls trajectories are reflected.
        adapt: let burn-in adapt each chain's step size to ``target_acceptance``.
        target_acceptance: the rate of acceptance that adaptation aims at.
        jitter: each trajectory's h is multiplied by a number from [1 − jitter, 1 + jitter], which
            breaks resonance with a period of the potential.
    """

    full_data: ClassVar[bool] = True

    lr: Positive
    nbeta: Positive
    localization: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    noise_level: Positive = 1.0
    bounding_box_size: Positive | None = None
    adapt: bool = True
    target_acceptance: Annotated[float, Range(above=0, below=1)] = 0.8
    jitter: Annotated[float, Range(least=0, below=1)] = 0.0

    @property
    def num_gradients(self) -> int:
        """Gradients a transition takes."""
        return 1

    @property
    def adapts(self) -> bool:
        """Whether burn-in adapts the step size."""
        return self.adapt

    def step(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> None:
        """Not how this one moves: see `transition`."""
        raise TypeError(f"{type(self).__name__} moves by transition(), which evaluates the full data itself.")

    def start(self, position: torch.Tensor, potential: Potential) -> Buffers:
        """Buffers at the first position: L and ∇L there, and the state of the adaptation."""
        one = torch.ones_like(position[:, :1], dtype=_exact(position))
        buffers = self.here(position, potential)
        buffers |= {"log_lr": math.log(self.lr) * one, "acceptance": one.clone()}
        if self.adapt:
            buffers |= {"log_lr_mean": math.log(self.lr) * one, "error": 0 * one, "count": 0 * one}
        return buffers

    def here(self, position: torch.Tensor, potential: Potential) -> Buffers:
        """The buffers that belong to a position: L (K, 1) and ∇L (K, P)."""
        loss, gradient = potential(position)
        return {
            "loss": loss.detach().to(_exact(position)).unsqueeze(1).clone(),
            "gradient": gradient.clone(),
        }

    def transition(
        self,
        position: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        uniform: torch.Tensor,
        potential: Potential,
        buffers: Buffers,
    ) -> None:
        """One trajectory of every row, in place.

        Args:
            position: w, shape (K, P).
            center: w*, shape (P,).
            noise: standard normal, the momenta, shape (K, P).
            uniform: numbers from (0, 1), shape (K, 2): acceptance and jitter.
            potential: L and ∇L on all data.
            buffers: what `start` gave, as the transitions since have left it.
        """
        h = self._time_step(uniform[:, 1:], buffers).to(position.dtype)
        momentum = noise * self.noise_level
        before = self._energy(position, buffers["loss"], momentum, center)
        proposal = position.clone()
        kick = self._kick(momentum, proposal, center, h)
        kick(buffers["gradient"], 0.5)
        for _ in range(self.num_gradients - 1):
            proposal.addcmul_(momentum, h)
            self._reflect(proposal, momentum, center)
            kick(potential.gradient(proposal), 1.0)
        proposal.addcmul_(momentum, h)
        self._reflect(proposal, momentum, center)
        loss, gradient = potential(proposal)
        kick(gradient, 0.5)
        loss = loss.to(before.dtype).unsqueeze(1)
        rise = (self._energy(proposal, loss, momentum, center) - before) / self.noise_level**2
        chance = torch.exp(-rise).clamp(max=1.0).nan_to_num(nan=0.0)
        accepted = uniform[:, :1] < chance
        torch.where(accepted, proposal, position, out=position)
        torch.where(accepted, loss, buffers["loss"], out=buffers["loss"])
        torch.where(accepted, gradient, buffers["gradient"], out=buffers["gradient"])
        buffers["acceptance"].copy_(chance)
        if "error" in buffers:
            self._adapt(chance, buffers)

    def freeze(self, buffers: Buffers) -> None:
        """From here on the step size is the average that adaptation has come to."""
        if "error" in buffers:
            buffers["log_lr"] = buffers.pop("log_lr_mean")
            del buffers["error"], buffers["count"]

    def is_frozen(self, buffers: Buffers) -> bool:
        """Whether the step size is fixed."""
        return "error" not in buffers

    def _kick(
        self, momentum: torch.Tensor, position: torch.Tensor, center: torch.Tensor, h: torch.Tensor
    ) -> Callable[[torch.Tensor, float], None]:
        """A function of ∇L at ``position`` and a share c: p ← p − c h ∇U, in place."""
        by_gradient, pull = h * self.nbeta, self.localization + self.weight_decay
        by_position, anchor = h * pull, h * self.localization * center

        def kick(gradient: torch.Tensor, share: float) -> None:
            momentum.addcmul_(gradient, by_gradient, value=-share)
            if pull:
                momentum.addcmul_(position, by_position, value=-share).add_(anchor, alpha=share)

        return kick

    def _energy(
        self, position: torch.Tensor, loss: torch.Tensor, momentum: torch.Tensor, center: torch.Tensor
    ) -> torch.Tensor:
        """U + |p|²/2 of every row, shape (K, 1), in double precision."""
        total = loss * self.nbeta + momentum.to(loss.dtype).square().sum(1, keepdim=True) / 2
        if self.localization:
            offset = (position - center).to(loss.dtype)
            total.add_(offset.square().sum(1, keepdim=True), alpha=self.localization / 2)
        if self.weight_decay:
            squares = position.to(loss.dtype).square().sum(1, keepdim=True)
            total.add_(squares, alpha=self.weight_decay / 2)
        return total

    def _time_step(self, uniform: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        h = torch.exp(buffers["log_lr"] / 2)
        return h * (1 + self.jitter * (2 * uniform - 1)) if self.jitter else h

    def _reflect(self, position: torch.Tensor, momentum: torch.Tensor, center: torch.Tensor) -> None:
        if self.bounding_box_size is not None:
            reflect(position, center, self.bounding_box_size, momentum)

    def _adapt(self, chance: torch.Tensor, buffers: Buffers) -> None:
        """Dual averaging of log ε towards the target (Hoffman & Gelman 2014, eq. 6, for √ε)."""
        count, error = buffers["count"].add_(1), buffers["error"]
        weight = 1 / (count + _DELAY)
        error.mul_(1 - weight).add_(weight * (self.target_acceptance - chance))
        log_h = math.log(self.lr) / 2 - count.sqrt() / _SHRINKAGE * error
        buffers["log_lr"] = 2 * log_h
        mean = buffers["log_lr_mean"]
        mean.lerp_(2 * log_h, count.pow(-_FORGETTING))


class ReferenceSampler(Sampler):
    """A `Sampler` whose step evaluates all data several times, by a closure.

    ``step(closure)``: the closure clears the gradients, computes the mean loss over **all** data, calls
    ``backward`` and returns the loss. All parameters are in one group, on one device.
    """

    kernel: ClassVar[type[Kernel]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One transition; returns the loss where the parameters are now, as a float."""
        name = type(self).__name__
        if closure is None:
            raise InvalidArgumentError(
                f"closure: {name} evaluates the loss several times a step; give a function that clears the "
                "gradients, computes the mean loss over all data, calls backward() and returns it."
            )
        if len(self.param_groups) > 1:
            raise InvalidArgumentError(
                f"params: {name} accepts or rejects all parameters at once: one group."
            )
        kernel = self._kernel(0)
        assert isinstance(kernel, ReferenceKernel)
        members = [one.parameter for row in self._rows for one in row.members]
        if not members or any(one.grad is None for one in members):  # the first step, or after loading
            with torch.enable_grad():
                closure()  # says which parameters get a gradient
        rows = self._moving_rows(0, kernel)
        if len(rows) != 1:
            raise InvalidArgumentError(
                f"params: {name} needs parameters that all get a gradient in every step, on one device "
                "and of one precision."
            )
        self._move(rows[0], kernel, closure)
        if rows[0].steps == self.param_groups[0]["freeze_after"]:
            kernel.freeze(rows[0].buffers)
        return float(rows[0].buffers["loss"])

    def _move(self, row: Row, kernel: ReferenceKernel, closure: Callable[[], Any]) -> None:
        potential = _Closure(row, closure)
        before = row.position.clone()
        row.load()
        position = row.position.clone()
        if not row.buffers:
            row.buffers = kernel.start(position, potential)
        elif not torch.equal(before, position):  # set from outside
            row.buffers |= kernel.here(position, potential)
        like = torch.empty((1, 2), dtype=_exact(position), device=position.device)
        uniform = torch.special.ndtr(self._draw(like))
        kernel.transition(position, row.center, self._draw(position), uniform, potential, row.buffers)
        row.position.copy_(position)
        row.store()
        row.steps += 1


class _Closure:
    """The potential that a closure computes at a row's parameters."""

    def __init__(self, row: Row, closure: Callable[[], Any]) -> None:
        self._row, self._closure = row, closure

    def __call__(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """L (1,) and ∇L (1, P)."""
        self._row.position.copy_(position)
        self._row.store()
        with torch.enable_grad():
            loss = self._closure()
        self._row.load()
        return torch.as_tensor(loss).detach().reshape(1), self._row._gradient

    def gradient(self, position: torch.Tensor) -> torch.Tensor:
        """∇L (1, P)."""
        return self(position)[1]


def _exact(position: torch.Tensor) -> torch.dtype:
    """Double precision where the device has it."""
    return torch.float32 if position.device.type == "mps" else torch.float64
