"""Local learning coefficients of any PyTorch model, by independent chains of SGMCMC.

Names are loaded when they are first used, so that a chain process imports only what it runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from devsample import errors, observables, plots, samplers, testing
    from devsample.data.spec import LoaderSpec
    from devsample.estimate import (
        estimate_learning_coeff,
        estimate_learning_coeff_with_summary,
        sample,
    )
    from devsample.losses import nbeta_for
    from devsample.results import LLCResult
    from devsample.samplers import HMC, MALA, SGHMC, SGLD, SGNHT, AdamSGLD, RMSPropSGLD
    from devsample.specs import Precision

__version__ = "0.1.0.dev0"

__all__ = [
    "HMC",
    "MALA",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "AdamSGLD",
    "LLCResult",
    "LoaderSpec",
    "Precision",
    "RMSPropSGLD",
    "errors",
    "estimate_learning_coeff",
    "estimate_learning_coeff_with_summary",
    "nbeta_for",
    "observables",
    "plots",
    "sample",
    "samplers",
    "testing",
]

_HOMES = {
    "LoaderSpec": "devsample.data.spec",
    "estimate_learning_coeff": "devsample.estimate",
    "estimate_learning_coeff_with_summary": "devsample.estimate",
    "sample": "devsample.estimate",
    "nbeta_for": "devsample.losses",
    "LLCResult": "devsample.results",
    "Precision": "devsample.specs",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in __all__ and name.islower():
        value = importlib.import_module(f"devsample.{name}")
    else:
        value = _sampler(name)
    globals()[name] = value
    return value


def _sampler(name: str) -> Any:
    """A sampler of the registry, whose classes are all public here."""
    if name[:1].isupper():
        samplers = importlib.import_module("devsample.samplers").SAMPLERS
        if name in samplers:
            return samplers[name]
    raise AttributeError(f"module 'devsample' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
