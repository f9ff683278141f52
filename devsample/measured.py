"""What the reruns with lr and lr/2 say of the estimate's bias."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from devsample.diagnostics import BIAS_CAUTION, describe

__all__ = ["MeasuredBias", "measured_bias"]


@dataclass(frozen=True)
class MeasuredBias:
    """The bias of the estimate from the step size, as measured; see :func:`measured_bias`.

    Attributes:
        value: in units of the learning coefficient.
        se: its Monte Carlo standard error.
        relative: value / abs(estimate).
        lr_fit: the largest lr whose bias is 5 % of the estimate it would give, the bias taken as
            proportional to lr; infinite for a bias of 0.
    """

    value: float
    se: float
    relative: float
    lr_fit: float


def measured_bias(
    blocks: Sequence[Sequence[float] | None], estimate: float, lr: float
) -> MeasuredBias | None:
    r"""Twice the mean difference between chains with lr and with lr/2.

    .. math:: \mathrm{bias}(\varepsilon) = c\,\varepsilon + O(\varepsilon^2) \quad\Rightarrow\quad
        \mathrm{bias}(\varepsilon) \approx 2\,\big(\hat\lambda(\varepsilon) - \hat\lambda(\varepsilon/2)\big)

    The error comes from the blocks' spread and autocorrelation, or from the spread of the chains' means
    where that is larger, as that of the estimate does.

    Args:
        blocks: of each chain, means of nβ (L(w) − L(w')) over stretches of its rerun, all equally many; None
            for a chain that was not rerun.
        estimate: λ̂, bias included.
        lr: ε of the run.

    Returns:
        None if no chain was rerun.

    >>> found = measured_bias([[0.2, 0.1, 0.1, 0.2], [0.1, 0.2, 0.2, 0.1]], estimate=4.0, lr=1e-3)
    >>> round(found.value, 3), round(found.relative, 3), round(found.lr_fit, 6)
    (0.3, 0.075, 0.000649)
    """
    rows = [one for one in blocks if one is not None]
    if not rows:
        return None
    found = describe(2 * np.asarray(rows, dtype=np.float64))
    value = found.mean
    unbiased = max(abs(estimate - value), abs(estimate) / 4)
    allowed = unbiased * BIAS_CAUTION / (1 - BIAS_CAUTION)
    return MeasuredBias(
        value,
        found.se,
        value / abs(estimate) if estimate else math.nan,
        lr * allowed / abs(value) if value else math.inf,
    )
