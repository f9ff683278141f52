"""Losses and networks with known learning coefficients, to check samplers and settings against.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from devsample.testing import potentials
    from devsample.testing.cases import Case, all_cases, case
    from devsample.testing.deep_linear import LearningCoefficient, dln_learning_coefficient
    from devsample.testing.networks import (
        deep_linear_network,
        normal_crossing,
        random_deep_linear_networks,
        squared_error,
    )
    from devsample.testing.relu import relu_network
    from devsample.testing.suite import plan, run, table

__all__ = [
    "Case",
    "LearningCoefficient",
    "all_cases",
    "case",
    "deep_linear_network",
    "dln_learning_coefficient",
    "normal_crossing",
    "plan",
    "potentials",
    "random_deep_linear_networks",
    "relu_network",
    "run",
    "squared_error",
    "table",
]

_HOMES = {
    "Case": "devsample.testing.cases",
    "all_cases": "devsample.testing.cases",
    "case": "devsample.testing.cases",
    "LearningCoefficient": "devsample.testing.deep_linear",
    "dln_learning_coefficient": "devsample.testing.deep_linear",
    "deep_linear_network": "devsample.testing.networks",
    "normal_crossing": "devsample.testing.networks",
    "random_deep_linear_networks": "devsample.testing.networks",
    "squared_error": "devsample.testing.networks",
    "relu_network": "devsample.testing.relu",
    "plan": "devsample.testing.suite",
    "run": "devsample.testing.suite",
    "table": "devsample.testing.suite",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in __all__:
        value = importlib.import_module(f"devsample.testing.{name}")
    else:
        raise AttributeError(f"module 'devsample.testing' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
