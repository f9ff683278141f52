"""What the checks of a run look at, and what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from devsample.diagnostics import Description, Draws, PredictedBias
from devsample.measured import MeasuredBias

__all__ = [
    "PRECONDITIONED",
    "Evidence",
    "Finding",
    "LostChain",
    "descent_of",
    "format_number",
    "percent",
    "stiffness",
]

STEPPING = ("SGLD", "SGHMC", "SGNHT")  # whose relaxation follows from lr (nβ h + γ)
PRECONDITIONED = ("RMSPropSGLD", "AdamSGLD")  # and with the scale G of their entries, from lr G (nβ h + γ)

Severity: TypeAlias = Literal["caution", "reject"]


@dataclass(frozen=True)
class Finding:
    """One thing that speaks against the estimate.

    Attributes:
        kind: its short name, e.g. ``"drift"``.
        severity: ``"caution"`` or ``"reject"``.
        text: one sentence with the figure, the likely cause and what to change.
    """

    kind: str
    severity: Severity
    text: str


@dataclass(frozen=True)
class LostChain:
    """A chain that is left out of the estimate, and why."""

    chain: int
    status: str
    why: str = ""


@dataclass(frozen=True)
class Evidence:
    """All that the checks look at.

    Attributes:
        llc: draws of the healthy chains, shape (num_chains, num_draws).
        loss: loss at the same draws, same shape.
        baseline: loss at w* that was subtracted, same shape.
        estimate: ``describe(llc)``.
        lost: the chains that are left out.
        bias: ``predict_bias(...)``, or None where no law is known.
        settings: of the run, as in ``LLCResult.settings``.
        curvature: the largest |h| of the Hessian that the chains ended at, None if it was not measured;
            with a preconditioner G, of √G (H + γ/nβ) √G.
        moved: share of the moving entries that differ from w* in the end, in the model's own dtype, the
            mean over chains; None if it was not measured.
        measured: the bias from the step size, None if the chains were not rerun.
        virial: (w − w*)·∇U / d at each draw, shaped as ``llc``; None if it was not recorded.
        distance: |w − w*| at each draw; None if it was not recorded.
    """

    llc: Draws
    loss: Draws
    baseline: Draws
    estimate: Description
    lost: tuple[LostChain, ...]
    bias: PredictedBias | None
    settings: Mapping[str, Any]
    curvature: float | None = None
    moved: float | None = None
    measured: MeasuredBias | None = None
    virial: Draws | None = None
    distance: Draws | None = None


def stiffness(evidence: Evidence) -> float | None:
    """nβ h + γ, or G (nβ h + γ), of the stiffest direction; None where it is not known."""
    settings, curvature = evidence.settings, evidence.curvature
    sampler = settings.get("sampler")
    if curvature is None or sampler not in (*STEPPING, *PRECONDITIONED):
        return None
    if sampler in PRECONDITIONED:
        return float(settings["nbeta"]) * curvature
    return float(settings["nbeta"]) * curvature + float(settings.get("localization", 0.0))


def descent_of(settings: Mapping[str, Any]) -> Mapping[str, float]:
    """What one step of descent from w* gains, see `devsample.descent.Descent`; of merged runs, the first."""
    found = settings.get("descent") or {}
    if isinstance(found, Mapping):
        return found
    return next((one for one in found if one), {})


def format_number(value: float, digits: int = 3) -> str:
    """A figure for people: ``digits`` significant digits, no exponent where one can do without.

    >>> format_number(1234.5), format_number(0.0123), format_number(1e-5), format_number(math.nan)
    ('1234', '0.0123', '1e-05', '–')
    """
    if math.isnan(value):
        return "–"
    if 1000 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def percent(share: float) -> str:
    """A share for people, in percent.

    >>> percent(0.256), percent(0.0123)
    ('26 %', '1.2 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"
