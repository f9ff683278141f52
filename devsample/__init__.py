"""Local learning coefficients of any PyTorch model, by independent chains of SGMCMC.

Names are loaded when they are first used, so that a chain process imports only what it runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from devsample import errors, plots, samplers
    from devsample.data.spec import LoaderSpec
    from devsample.estimate import (
        estimate_learning_coeff,
        estimate_learning_coeff_with_summary,
        sample,
    )
    from devsample.losses import nbeta_for
    from devsample.results import LLCResult
    from devsample.samplers import SGLD

__version__ = "0.1.0.dev0"

__all__ = [
    "SGLD",
    "LLCResult",
    "LoaderSpec",
    "errors",
    "estimate_learning_coeff",
    "estimate_learning_coeff_with_summary",
    "nbeta_for",
    "plots",
    "sample",
    "samplers",
]

_HOMES = {
    "LoaderSpec": "devsample.data.spec",
    "estimate_learning_coeff": "devsample.estimate",
    "estimate_learning_coeff_with_summary": "devsample.estimate",
    "sample": "devsample.estimate",
    "nbeta_for": "devsample.losses",
    "LLCResult": "devsample.results",
    "SGLD": "devsample.samplers",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in __all__:
        value = importlib.import_module(f"devsample.{name}")
    else:
        raise AttributeError(f"module 'devsample' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
