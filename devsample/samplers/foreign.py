"""Any ``torch.optim.Optimizer`` in the place of a sampler: it follows the slope, without noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from devsample.errors import InvalidArgumentError
from devsample.samplers.base import Buffers, Kernel, NonNegative, Positive, checked


@dataclass(frozen=True, kw_only=True)
class ForeignKernel(Kernel):
    """An optimizer's class with its keyword arguments; it is given the slope ∇U = nβ ∇L + γ (w − w*).

    Attributes:
        kind: the optimizer.
        options: its keyword arguments.
        nbeta: nβ > 0.
        localization: γ ≥ 0, strength of the pull to w*.
    """

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    nbeta: Positive
    localization: NonNegative = 0.0

    def __post_init__(self) -> None:
        for name, kind in (("nbeta", Positive), ("localization", NonNegative)):
            object.__setattr__(self, name, checked(name, getattr(self, name), kind))

    def step(
        self,
        position: torch.Tensor,
        gradient: torch.Tensor,
        center: torch.Tensor,
        noise: torch.Tensor,
        buffers: Buffers,
    ) -> None:
        """Not how this one moves: see `OptimizerRows`."""
        raise TypeError(f"{self.kind.__name__} keeps a state of its own.")

    def slope(self, position: torch.Tensor, gradient: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
        """∇U, a new tensor."""
        return torch.add(gradient * self.nbeta, position - center, alpha=self.localization)

    def optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of ``parameters``.

        Raises:
            InvalidArgumentError: it does not take the keyword arguments, or not these parameters.
        """
        try:
            return self.kind(list(parameters), **self.options)
        except Exception as error:
            text = str(error).split("__init__() ")[-1].rstrip(".")
            raise InvalidArgumentError(f"optimizer_kwargs: {self.kind.__name__}: {text}.") from error


def foreign_lr(kernel: ForeignKernel) -> float:
    """The optimizer's lr, NaN if it has none; tries on a small parameter whether a run can use it.

    Raises:
        InvalidArgumentError: it cannot be made, or its step needs more than gradients.
    """
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    with torch.random.fork_rng(devices=[]):
        optimizer = kernel.optimizer([parameter])
        try:
            optimizer.step()
        except Exception as error:
            name = kernel.kind.__name__
            why = "its step needs a closure, which evaluates the loss again and again"
            if "closure" not in str(error):
                why = f"a step from a dense gradient alone raised {type(error).__name__}: {error}"
            raise InvalidArgumentError(
                f"sampling_method: {name} cannot make the steps of a chain: {why}."
            ) from error
    lr = optimizer.param_groups[0].get("lr", math.nan)
    return float(lr)


class Segment(Protocol):
    """A piece of the flat state; see `FlatParameters`."""

    @property
    def parameter(self) -> torch.nn.Parameter:
        """What it is a piece of."""

    @property
    def start(self) -> int:
        """Where it begins."""

    @property
    def stop(self) -> int:
        """Where it ends."""

    @property
    def entries(self) -> torch.Tensor | None:
        """Positions of the moving entries; None: all of them."""


class OptimizerRows:
    """One optimizer for each of K rows, over that row's parameters in their true shapes.

    Entries that do not move have gradient 0 and are at w* before every step.

    Args:
        kernel: what is to be made.
        position: the rows (K, P).
        center: w*, shape (P,).
        segments: the moving parameters; those of the model hold w*.
    """

    def __init__(
        self,
        kernel: ForeignKernel,
        position: torch.Tensor,
        center: torch.Tensor,
        segments: Sequence[Segment],
    ) -> None:
        self._kernel, self._center, self._segments = kernel, center, segments
        dtype = position.dtype
        self._start = [one.parameter.detach().to(dtype, copy=True).contiguous() for one in segments]
        self._rows = [[torch.nn.Parameter(one.clone()) for one in self._start] for _ in position]
        self.optimizers = [kernel.optimizer(row) for row in self._rows]

    def step(self, row: int, position: torch.Tensor, gradient: torch.Tensor) -> None:
        """One step of ``row``: its position (P,) moves in place; ``gradient`` is that of the mean loss L."""
        slope = self._kernel.slope(position, gradient, self._center)
        for one, start, parameter in zip(self._segments, self._start, self._rows[row], strict=True):
            parameter.detach().copy_(_shaped(position, one, start))
            parameter.grad = _shaped(slope, one, torch.zeros_like(start))
        self.optimizers[row].step()
        for one, parameter in zip(self._segments, self._rows[row], strict=True):
            flat = parameter.detach().reshape(-1)
            position[one.start : one.stop].copy_(flat if one.entries is None else flat[one.entries])


def _shaped(values: torch.Tensor, one: Segment, rest: torch.Tensor) -> torch.Tensor:
    """A piece of a flat vector in the shape of its parameter; entries that do not move as in ``rest``."""
    piece = values[one.start : one.stop]
    if one.entries is None:
        return piece.view(rest.shape)
    return rest.flatten().index_copy(0, one.entries, piece).view(rest.shape)
