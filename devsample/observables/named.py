"""The observables that have a name: norms and products of a step's vectors, and some others."""

from __future__ import annotations

import math
from dataclasses import dataclass

from devsample.errors import InvalidArgumentError
from devsample.observables.declared import LossOn
from devsample.samplers import Kernel, SGLDKernel
from devsample.samplers.foreign import ForeignKernel

VECTORS = ("gradient", "noise", "localization", "weight", "offset")
NORMS = {f"{name}_norm": name for name in VECTORS} | {"distance": "offset"}


@dataclass(frozen=True)
class Measure:
    """One number of a step: a norm of a vector, a product of two, or what has a name of its own.

    Attributes:
        name: as it was asked for; its column in the table of draws.
        vectors: one, two, or none.
        p: of the norm.
    """

    name: str
    vectors: tuple[str, ...] = ()
    p: float = 2.0

    @property
    def columns(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of what is recorded."""
        return ((self.name, ()),)


@dataclass(frozen=True)
class SecondBatch:
    """Loss and baseline on a second batch that is independent of the draw's own."""

    name: str = "second_batch"
    columns = (("loss_b", ()), ("baseline_b", ()))


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of the Euler proposal from w_t, see `mala_acceptance`."""

    name: str = "mala_acceptance"
    columns = (("mala_acceptance", ()),)


def parse(name: str) -> Measure | SecondBatch | Acceptance | LossOn:
    """The observable of this name.

    Raises:
        InvalidArgumentError: there is none.
    """
    base, colon, power = name.partition(":")
    first, dot, second = name.partition("_dot_")
    if base in NORMS:
        p = _power(power) if colon else 2.0
        if p > 0:
            return Measure(name, (NORMS[base],), p)
    elif dot and first in VECTORS and second in VECTORS:
        return Measure(name, (first, second))
    elif name in ("acceptance", "virial"):
        return Measure(name)
    elif name == "second_batch":
        return SecondBatch()
    elif name == "mala_acceptance":
        return Acceptance()
    elif name == "full_loss":
        return LossOn(name)
    raise InvalidArgumentError(
        f"observables: there is no {name!r}. There are {', '.join(NORMS)}, each also with another p > 0, as "
        f'in "gradient_norm:1" or "distance:inf"; products such as "gradient_dot_noise" of two of '
        f'{", ".join(VECTORS)}; "step_bias"; "virial"; "second_batch"; "full_loss"; '
        '"mala_acceptance" of SGLD; and "acceptance" of HMC and MALA. Anything else is a function: '
        '{"name": function}.'
    )


def check_kernel(wanted: Measure | SecondBatch | Acceptance, kernel: Kernel) -> None:
    """Check that a sampler has what is asked for.

    Raises:
        InvalidArgumentError: it has not.
    """
    name, foreign = wanted.name, kernel if isinstance(kernel, ForeignKernel) else None
    if isinstance(wanted, Measure):
        if "noise" in wanted.vectors and foreign is not None:
            raise InvalidArgumentError(f"observables: {name!r}: {foreign.kind.__name__} gets no noise.")
        if name == "acceptance" and not kernel.full_data:
            raise InvalidArgumentError(f"observables: {name!r} is of HMC and MALA only; leave it out.")
    elif isinstance(wanted, SecondBatch) and kernel.full_data:
        raise InvalidArgumentError(
            f"observables: {name!r}: HMC and MALA read the loss on all data, so there is no second batch; "
            "leave it out."
        )
    elif isinstance(wanted, Acceptance):
        if not isinstance(kernel, SGLDKernel):
            own = ' They have "acceptance".' if kernel.full_data else ""
            raise InvalidArgumentError(
                f"observables: {name!r} is of the Euler steps of SGLD; other samplers make other "
                f"proposals.{own}"
            )
        if not kernel.noise_level:
            raise InvalidArgumentError(
                f"observables: {name!r}: with noise_level=0 nothing is proposed; leave it out."
            )


def _power(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
