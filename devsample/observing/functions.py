"""Calls of the user's functions, and errors that name the observable."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from devsample.data.batches import opened
from devsample.errors import EvaluateError
from devsample.observables.declared import Function
from devsample.serialize import short_error


def call(one: Function, record: dict[str, Any], target: torch.Tensor) -> None:
    """Call a function and put its number into ``target``, without waiting for the device.

    Raises:
        EvaluateError: it raised, or returned something else.
    """
    try:
        value = one(record | {"batch": opened(record["batch"])})
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise EvaluateError(f"observables: {one.name!r} raised {short_error(error)}") from error
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            target.copy_(value.detach().reshape(()))
            return
    elif isinstance(value, (bool, int, float, np.generic)) or getattr(value, "shape", None) == ():
        target.fill_(float(value))
        return
    shape = getattr(value, "shape", None)
    what = f"{type(value).__name__} of shape {tuple(shape)}" if shape is not None else repr(value)[:80]
    raise EvaluateError(
        f"observables: {one.name!r} returned {what}; return one number, or a tensor with one."
    )


class named:  # noqa: N801 - read as a word of its with statement
    """Names the observable in errors of its evaluate."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, EvaluateError):
            raise EvaluateError(f"observables: {self._name!r}: {error}") from error.__cause__
