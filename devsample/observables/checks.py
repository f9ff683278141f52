"""From the argument ``observables`` to a tuple of observables, and to the record of a draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from devsample.errors import InvalidArgumentError
from devsample.observables import stepbias
from devsample.observables.declared import Function, LossOn, SampleLosses
from devsample.observables.named import Acceptance, Measure, SecondBatch, check_kernel, parse
from devsample.observables.stepbias import StepBias
from devsample.records import BASE_FIELDS
from devsample.samplers import Kernel

Observable = Measure | SecondBatch | Acceptance | LossOn | SampleLosses | StepBias | Function
_TAKEN = ("chain", *(name for name, _ in BASE_FIELDS))


def check_observables(given: object, kernel: Kernel) -> tuple[Observable, ...]:
    """The observables as a tuple, if this sampler has them all.

    Args:
        given: None; a name, `LossOn`, `SampleLosses` or `StepBias`; several of these, (name, function)
            among them; or a mapping from names to functions.
        kernel: the sampler.

    Raises:
        InvalidArgumentError: naming what cannot be recorded.
    """
    found = [_one(entry) for entry in listed(given)]
    for one in found:
        if isinstance(one, Measure | SecondBatch | Acceptance):
            check_kernel(one, kernel)
        elif isinstance(one, StepBias):
            stepbias.check_kernel(kernel)
    names = [name for name, _ in columns_of(found)]
    names += [one.name for one in found if isinstance(one, StepBias)]
    for name, count in Counter(names).items():
        if name in _TAKEN:
            raise InvalidArgumentError(f"observables: {name!r} is a column of every draw; take another name.")
        if count > 1:
            raise InvalidArgumentError(f"observables: a name comes twice: {name}.")
    return tuple(found)


def columns_of(observables: Iterable[Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of everything that is recorded, in order."""
    return [column for one in observables for column in one.columns]


def record_type(observables: Iterable[Any]) -> np.dtype:
    """The record of a draw with these observables."""
    return np.dtype([*BASE_FIELDS, *((name, "<f8", shape) for name, shape in columns_of(observables))])


def listed(given: object) -> list[Any]:
    """The entries of the argument ``observables``, as they were given."""
    if given is None:
        return []
    if isinstance(given, str | LossOn | SampleLosses | StepBias):
        return [given]
    if isinstance(given, Mapping):
        return list(given.items())
    if isinstance(given, Sequence):
        return list(given)
    raise InvalidArgumentError(f"observables: {_EXPECTED}, got {given!r}.")


def _one(entry: Any) -> Observable:
    if isinstance(entry, str):
        return StepBias() if entry == "step_bias" else parse(entry)
    if isinstance(entry, LossOn | SampleLosses | StepBias):
        return entry
    if isinstance(entry, tuple) and len(entry) == 2:
        name, function = entry
        if isinstance(name, str) and name and callable(function):
            return Function(name, function)
    raise InvalidArgumentError(f"observables: {_EXPECTED}, got {entry!r}.")


_EXPECTED = (
    'expected names such as ("gradient_norm", "distance"), (name, function), {name: function}, LossOn(...), '
    "SampleLosses(...) or StepBias(...)"
)
