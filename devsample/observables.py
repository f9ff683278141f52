"""What is recorded at a draw besides the loss: norms and products of the vectors of its step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from devsample.errors import InvalidArgumentError
from devsample.records import BASE_FIELDS
from devsample.samplers import Kernel
from devsample.samplers.base import Buffers
from devsample.samplers.foreign import ForeignKernel

VECTORS = ("gradient", "noise", "localization", "weight", "offset")
NORMS = {f"{name}_norm": name for name in VECTORS} | {"distance": "offset"}


@dataclass(frozen=True)
class Observable:
    """One number of a draw: a norm of a vector, a product of two, or what the sampler says.

    Attributes:
        name: as it was asked for; its column in the table of draws.
        vectors: one, two, or none.
        p: of the norm.
    """

    name: str
    vectors: tuple[str, ...]
    p: float = 2.0


def parse(name: str) -> Observable:
    """The observable of this name.

    Raises:
        InvalidArgumentError: there is none.
    """
    base, colon, power = name.partition(":")
    first, dot, second = name.partition("_dot_")
    if base in NORMS:
        p = _power(power) if colon else 2.0
        if p > 0:
            return Observable(name, (NORMS[base],), p)
    elif dot and first in VECTORS and second in VECTORS:
        return Observable(name, (first, second))
    elif name == "acceptance":
        return Observable(name, ())
    raise InvalidArgumentError(
        f"observables: there is no {name!r}. There are {', '.join(NORMS)}, each also with another p > 0, as "
        f'in "gradient_norm:1" or "distance:inf"; products such as "gradient_dot_noise" of two of '
        f'{", ".join(VECTORS)}; and "acceptance" of HMC and MALA.'
    )


def check_observables(given: object, kernel: Kernel) -> tuple[str, ...]:
    """The names as a tuple, if this sampler has them all.

    Raises:
        InvalidArgumentError: naming what it has not.
    """
    if given is None:
        return ()
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
        raise InvalidArgumentError(
            f'observables: expected names such as ("gradient_norm", "distance"), got {given!r}.'
        )
    for name in names:
        wanted = parse(name)
        if "noise" in wanted.vectors and isinstance(kernel, ForeignKernel):
            raise InvalidArgumentError(f"observables: {name!r}: {kernel.kind.__name__} gets no noise.")
        if not wanted.vectors and not kernel.full_data:
            raise InvalidArgumentError(f"observables: {name!r} is of HMC and MALA only; leave it out.")
    if len(set(names)) < len(names):
        raise InvalidArgumentError(f"observables: a name comes twice: {', '.join(names)}.")
    return tuple(names)


def record_type(names: Sequence[str]) -> np.dtype:
    """The record of a draw with these observables."""
    return np.dtype([*BASE_FIELDS, *((name, "<f8") for name in names)])


class Observer:
    r"""Measures K rows at one step, before their update; nothing waits for the device.

    All vectors are those of the P moving entries: "gradient" is nβ ĝ with the estimate ĝ of ∇L that
    the step uses, "noise" is σ R with the standard normals R that it is given (their average, where
    neighbouring steps share them), "localization" γ (w − w*), "weight" w and "offset" w − w*. Norms are

    .. math:: |x|_p = \Big(\sum_i |x_i|^p\Big)^{1/p}

    Args:
        names: of the observables.
        kernel: the sampler.
        center: w*, shape (P,).
    """

    def __init__(self, names: Sequence[str], kernel: Kernel, center: torch.Tensor) -> None:
        self._wanted = [parse(name) for name in names]
        self._center = center
        self._exact = torch.float32 if center.device.type == "mps" else torch.float64
        self._factors = {
            "gradient": getattr(kernel, "nbeta", 1.0),
            "noise": getattr(kernel, "noise_level", 1.0),
            "localization": getattr(kernel, "localization", 0.0),
        }
        self._offset = any({"localization", "offset"} & set(one.vectors) for one in self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def __call__(
        self,
        target: torch.Tensor,
        position: torch.Tensor,
        gradient: torch.Tensor,
        noise: torch.Tensor | None,
        buffers: Buffers,
    ) -> None:
        """Write the values of all rows into ``target``, shape (number of observables, K).

        Args:
            target: what is written.
            position: w, shape (K, P).
            gradient: ĝ, shape (K, P).
            noise: R, shape (K, P), if there is any.
            buffers: the sampler's.
        """
        vectors = {"gradient": gradient, "weight": position}
        if noise is not None:
            vectors["noise"] = noise
        if self._offset:
            vectors["offset"] = vectors["localization"] = position - self._center
        for one, values in zip(self._wanted, target, strict=True):
            values.copy_(self._value(one, vectors) if one.vectors else buffers[one.name][:, 0])

    def _value(self, one: Observable, vectors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        factor = math.prod(self._factors.get(name, 1.0) for name in one.vectors)
        first, *rest = (vectors[name] for name in one.vectors)
        if rest:
            return (first * rest[0]).sum(1, dtype=self._exact).mul_(factor)
        norm: torch.Tensor = torch.linalg.vector_norm(first, one.p, dim=1, dtype=self._exact)
        return norm.mul_(factor)


def _power(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
