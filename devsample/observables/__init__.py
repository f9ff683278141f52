"""What is recorded at a draw besides its loss, and what follows from it.

`LossOn`, `SampleLosses` and `StepBias` are given to a run as ``observables``, next to names and functions;
the other functions take its result. They load statistics, which a chain process does without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from devsample.observables.acceptance import mala_acceptance as mala_acceptance
from devsample.observables.checks import check_observables as check_observables
from devsample.observables.checks import columns_of as columns_of
from devsample.observables.checks import record_type as record_type
from devsample.observables.declared import LossOn as LossOn
from devsample.observables.declared import SampleLosses as SampleLosses
from devsample.observables.stepbias import StepBias as StepBias

if TYPE_CHECKING:
    from devsample.derived import (
        functional_variance,
        loss_variance,
        refined_llc,
        singular_fluctuation,
        wbic,
    )

__all__ = [
    "LossOn",
    "SampleLosses",
    "StepBias",
    "functional_variance",
    "loss_variance",
    "mala_acceptance",
    "refined_llc",
    "singular_fluctuation",
    "wbic",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'devsample.observables' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module("devsample.derived"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
