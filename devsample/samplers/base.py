"""What every sampler is: checked hyperparameters and a pure update of stacked flat states."""

from __future__ import annotations

import abc
import functools
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch

from devsample.errors import InvalidArgumentError

Buffers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Range:
    """Bounds of a hyperparameter, written into its type: ``lr: Annotated[float, Range(above=0)]``."""

    above: float = -math.inf
    least: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.above < number < self.below and self.least <= number <= self.most

    def __str__(self) -> str:
        bounds = ((">", self.above), ("≥", self.least), ("<", self.below), ("≤", self.most))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))


Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(least=0)]
Averaging = Annotated[float, Range(least=0, below=1)]  # what an exponential average keeps of its past


@dataclass(frozen=True, kw_only=True)
class Kernel(abc.ABC):
    """Hyperparameters of a sampler with its update on stacked flat states.

    A chain calls ``step`` with K rows of P moving entries. Everything random comes in as
    ``noise``, so the update itself is a pure function that works in place. All that a chain
    carries from step to step is the position and the tensors of ``init``.

    A field's type says what it may be, and is checked when a kernel is made: ``bool``, a
    ``Literal`` of strings, or ``Annotated[float, Range(...)]``, with ``| None`` where None is allowed.
    """

    full_data: ClassVar[bool] = False
    """Whether it moves by ``transition`` on all data; see `ReferenceKernel`."""

    def __post_init__(self) -> None:
        for name, kind in _field_types(type(self)).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), kind))

    @property
    def noise_kind(self) -> Literal["plain", "averaged"]:
        """Which noise ``step`` expects: R_k, or (R_k + R_{k+1}) / 2."""
        return "plain"

    @property
    def adapts(self) -> bool:
        """Whether burn-in adapts the sampler itself, so that `freeze` must end it."""
        return False

    @property
    def step_bias(self) -> float:
        """First-order bias of exact gradients' steps, in units of Euler SGLD's: ε·a/4 for precision a."""
        return 0.0

    @property
    def scale(self) -> float:
        """The largest factor by which a step's lr may be scaled."""
        return 1.0

    @property
    def speed(self) -> float:
        """How many times faster than SGLD with the same lr slow directions relax.

        The bias from the minibatch gradient's noise grows by the same factor.
        """
        return 1.0

    def init(self, position: torch.Tensor) -> Buffers:
        """Buffers for states of this shape (K, P): each of shape (K, P), or (K, 1) for one value a row."""
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
        """Update ``position`` (K, P) and buffers in place; the rest is read.

        Args:
            position: w, shape (K, P).
            gradient: ∇L of each row, shape (K, P).
            center: w*, shape (P,).
            noise: standard normal, or averaged, as `noise_kind` says; shape (K, P).
            buffers: what `init` gave, as the steps since have left it.
        """

    def step_scales(self, buffers: Buffers) -> torch.Tensor | None:
        """G, by which each entry's lr is scaled, shape (K, P); None if there is none."""
        return None

    def freeze(self, buffers: Buffers) -> None:  # noqa: B027  most samplers have nothing to do here
        """End what burn-in adapts, in place; at least one step must have been made."""

    def is_frozen(self, buffers: Buffers) -> bool:
        """Whether the sampler's law is fixed from here on."""
        return not self.adapts


def can_freeze(kernel: Kernel) -> bool:
    """Whether `freeze` ends what the kernel adapts; it can be set to go on."""
    buffers = kernel.init(torch.ones(1, 1))
    kernel.freeze(buffers)
    return kernel.is_frozen(buffers)


def check_range(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> float:
    """``value`` as a float; an error unless it is a finite number within the bounds."""
    return float(_number(name, value, float, Range(above, least, most, below)))


def checked(name: str, value: Any, kind: Any) -> Any:
    """``value`` in its plain form; an error unless it is of the annotated ``kind``."""
    if get_origin(kind) is types.UnionType or str(get_origin(kind)) == "typing.Union":
        if value is None:
            return None
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Annotated:
        base, bounds = get_args(kind)
        return _number(name, value, base, bounds)
    if get_origin(kind) is Literal:
        if not (isinstance(value, str) and value in get_args(kind)):
            choices = " or ".join(f'"{one}"' for one in get_args(kind))
            raise InvalidArgumentError(f"{name}: expected {choices}, got {value!r}.")
        return value
    assert kind is bool, f"{name}: {kind} is no type of a hyperparameter"
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name}: expected True or False, got {value!r}.")
    return value


def _number(name: str, value: Any, base: type, bounds: Range) -> float | int:
    allowed = Integral if base is int else Real
    number = base(value) if isinstance(value, allowed) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number in bounds):
        noun = "an integer" if base is int else "a number"
        raise InvalidArgumentError(f"{name}: expected {noun} {bounds}, got {value!r}.")
    return base(number)  # type: ignore[no-any-return]


@functools.cache
def _field_types(kernel: type[Kernel]) -> Mapping[str, Any]:
    hints = get_type_hints(kernel, include_extras=True)
    return {one.name: hints[one.name] for one in fields(kernel)}
