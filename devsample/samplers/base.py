"""What every sampler is: a pure update of stacked flat states, and an optimizer around it."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal

import torch

from devsample.errors import InvalidArgumentError

Buffers = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Kernel(abc.ABC):
    """Hyperparameters of a sampler, checked, with its update on stacked flat states.

    A chain calls ``step`` with K rows of P moving entries. Everything random comes in as
    ``noise``, so the update itself is a pure function that works in place.
    """

    @property
    def noise_kind(self) -> Literal["plain", "averaged"]:
        """Which noise ``step`` expects: R_k, or (R_k + R_{k+1}) / 2."""
        return "plain"

    def init(self, position: torch.Tensor) -> Buffers:
        """Buffers of the sampler for states of this shape (K, P)."""
        return {}

    @abc.abstractmethod
    def step(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> None:
        """Update ``position`` (K, P) in place; the gradient of L, the center (P,) and noise are read."""


class Sampler(torch.optim.Optimizer):
    """A sampler as a ``torch.optim.Optimizer``, for use in one's own loop.

    It moves each parameter with a gradient by the kernel's update, one row of its own. Noise comes
    from ``generator``; the global random state is neither read nor moved.

    Args:
        params: parameters or groups, as for any optimizer; groups may override hyperparameters.
        generator: the source of noise, on the parameters' device; None: a new one with a fresh seed.
        **hyperparameters: the kernel's.
    """

    kernel: ClassVar[Callable[..., Kernel]]

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[Mapping[str, Any]],
        *,
        generator: torch.Generator | None = None,
        **hyperparameters: Any,
    ) -> None:
        filled = vars(type(self).kernel(**hyperparameters))
        super().__init__(params, dict(filled))  # type: ignore[arg-type]
        self._generator = generator
        self._names = tuple(filled)
        for group in self.param_groups:
            self._kernel(group)  # values of groups are checked here, not at the first step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            kernel = self._kernel(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, kernel)
        return loss

    def _kernel(self, group: Mapping[str, Any]) -> Kernel:
        return type(self).kernel(**{name: group[name] for name in self._names})

    def _move(self, parameter: torch.Tensor, kernel: Kernel) -> None:
        state = self.state[parameter]
        if not state:
            state["center"] = parameter.detach().clone().reshape(-1)
            state["buffers"] = kernel.init(state["center"].unsqueeze(0))
            if kernel.noise_kind == "averaged":
                state["noise"] = self._draw(parameter)
        noise = self._draw(parameter)
        if kernel.noise_kind == "averaged":
            noise, state["noise"] = (noise + state["noise"]) / 2, noise
        position = parameter.detach().reshape(1, -1)
        gradient = parameter.grad.reshape(1, -1)  # type: ignore[union-attr]
        kernel.step(position, gradient, state["center"], noise.reshape(1, -1), state["buffers"])
        if not parameter.is_contiguous():
            parameter.copy_(position.view(parameter.shape))

    def _draw(self, parameter: torch.Tensor) -> torch.Tensor:
        if self._generator is None:
            self._generator = torch.Generator(device=parameter.device)
            self._generator.seed()
        return torch.randn(
            parameter.shape,
            dtype=parameter.dtype,
            device=parameter.device,
            generator=self._generator,
        )


def check_range(name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf) -> float:
    """``value`` as a float; an error unless it is a finite number > ``above`` and ≥ ``least``."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number > above and number >= least):
        bound = f"> {above:g}" if above > -math.inf else f"≥ {least:g}"
        raise InvalidArgumentError(f"{name}: expected a number {bound}, got {value!r}.")
    return number
