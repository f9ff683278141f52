"""What the draws say about the estimate: its error bar, drift, and predicted bias.

Arrays of draws have shape (num_chains, num_draws), float64, and hold healthy chains only.

References:
    Vehtari, Gelman, Simpson, Carpenter, Bürkner (2021), Rank-normalization, folding, and
    localization: an improved R-hat, Bayesian Analysis 16(2): split R-hat, ESS and MCSE, computed
    by arviz-stats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Description",
    "PredictedBias",
    "align",
    "describe",
    "drift",
    "predict_bias",
    "virial_is_off",
]

Draws: TypeAlias = NDArray[np.float64]

CHAINS_DIFFER = 0.1  # chance of the chain means' spread below which it gives the error bar
MIN_DRAWS = 4  # arviz-stats' least length for an autocorrelation
DRIFT_Z = 3.0  # standard errors between the halves; a healthy run exceeds it by chance about once in 300
VIRIAL_Z, VIRIAL_CLOSE = 4.0, (0.8, 1.1)  # standard errors from 1, and what is near enough
BIAS_CAUTION = 0.05  # predicted bias relative to the estimate that is still fine


def align(traces: Sequence[Draws]) -> Draws:
    """Stack traces of unequal length, cut to the first draws that all of them have.

    Args:
        traces: one array of shape (num_draws_i,) per chain, at least one.

    Returns:
        Shape (len(traces), min(num_draws_i)).

    >>> align([np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0])])
    array([[1., 2.],
           [4., 5.]])
    """
    shared = min(len(trace) for trace in traces)
    return np.stack([np.asarray(trace[:shared], dtype=np.float64) for trace in traces])


@dataclass(frozen=True)
class Description:
    r"""A mean over chains and draws with its Monte Carlo error.

    .. math:: \mathrm{se} = \mathrm{sd} / \sqrt{\mathrm{ESS}}

    Attributes:
        mean: over all draws of all chains.
        se: Monte Carlo standard error of the mean, autocorrelation and the spread between chains
            included. NaN for one chain with fewer than 4 draws.
        ess: effective number of draws for the mean, over all chains; NaN below 4 draws a chain.
        rhat: split R-hat; of one chain, over its two halves. NaN below 8 draws a chain and for
            draws that are all equal, inf for chains that are constant but differ.
    """

    mean: float
    se: float
    ess: float
    rhat: float
    num_chains: int
    num_draws: int


def describe(draws: Draws) -> Description:
    """Mean, standard error, effective draws and split R-hat of draws of healthy chains.

    The error comes from the draws' autocorrelation, unless the chain means spread wider than that
    allows (chance below 10 %): a slow movement below the noise of the draws is invisible to the
    autocorrelation, but not to independent chains. Their spread then gives the error.

    With fewer than 4 draws a chain there is no autocorrelation to estimate: the standard error
    then comes from the spread of the chain means, which needs two chains. Constant draws have
    standard error 0 and as many effective draws as draws.

    Args:
        draws: shape (num_chains, num_draws), finite, at least one draw.

    References:
        Vehtari et al. (2021), equations 3-4 (R-hat), 10-13 (ESS), 14 (MCSE).

    >>> result = describe(np.array([[1.0, 1.0, 4.0], [3.0, 3.0, 3.0]]))
    >>> result.mean, result.se
    (2.5, 0.5)
    """
    num_chains, num_draws = draws.shape
    center, scale = _location_scale(draws)
    scaled = (draws - center) / scale
    within, between = _mcse(scaled), _se_from_chains(scaled)
    differ = between > within > 0 and _chance(num_chains, between / within) < CHAINS_DIFFER
    return Description(
        mean=center + scale * float(scaled.mean()),
        se=scale * (between if differ else within),
        ess=_ess(scaled) * ((within / between) ** 2 if differ else 1.0),
        rhat=_split_rhat(scaled),
        num_chains=num_chains,
        num_draws=num_draws,
    )


def _location_scale(draws: Draws) -> tuple[float, float]:
    # ESS and R-hat do not depend on location and scale, but arviz-stats calls draws constant when
    # they differ by less than an absolute 1e-15, and squares of huge draws overflow.
    center = float(draws.flat[0])
    return center, float(np.abs(draws - center).max()) or 1.0


def _mcse(draws: Draws) -> float:
    from arviz_stats.base import array_stats

    if draws.shape[1] >= MIN_DRAWS:
        return float(array_stats.mcse(draws, method="mean"))
    return _se_from_chains(draws)


def _se_from_chains(draws: Draws) -> float:
    """Standard error from the spread of the chain means alone; it needs no autocorrelation."""
    num_chains = len(draws)
    return float(draws.mean(axis=1).std(ddof=1)) / math.sqrt(num_chains) if num_chains > 1 else math.nan


def _chance(num_chains: int, ratio: float) -> float:
    """Chance of chain means that spread ``ratio`` times wider than their errors say, or more."""
    from scipy.stats import chi2

    return float(chi2.sf((num_chains - 1) * ratio**2, num_chains - 1))


def _ess(draws: Draws) -> float:
    from arviz_stats.base import array_stats

    return float(array_stats.ess(draws, method="mean"))


def _split_rhat(draws: Draws) -> float:
    from arviz_stats.base import array_stats

    half = draws.shape[1] // 2
    if half < MIN_DRAWS or np.ptp(draws) == 0:
        return math.nan
    halves = np.vstack([draws[:, :half], draws[:, -half:]])  # here, since arviz-stats' "split"
    with np.errstate(divide="ignore", invalid="ignore"):  # refuses a single chain
        return float(array_stats.rhat(halves, method="identity"))


def drift(draws: Draws) -> tuple[float, float]:
    r"""How far the second half of the draws lies above the first, also in standard errors.

    .. math:: d = \bar x_{\mathrm{second}} - \bar x_{\mathrm{first}}, \qquad z = d / s

    s is the larger of two errors: √2 times the MCSE of the second half less its linear trend (a
    trend would count as autocorrelation and so hide itself), and the spread of d between the
    chains, which are independent whatever their autocorrelation.

    Args:
        draws: shape (num_chains, num_draws).

    Returns:
        (d, z), both NaN with fewer than 8 draws a chain.

    >>> d, z = drift(np.linspace(0.0, 1.0, 101)[None, :])
    >>> round(d, 3), z > 3
    (0.51, True)
    """
    num_chains, num_draws = draws.shape
    half = num_draws // 2
    if half < MIN_DRAWS:
        return math.nan, math.nan
    first, second = draws[:, :half], draws[:, num_draws - half :]
    steps = second.mean(axis=1) - first.mean(axis=1)
    time = np.arange(half) - (half - 1) / 2
    slope = float(second.mean(axis=0) @ time / (time @ time))
    error = math.sqrt(2.0) * describe(second - slope * time).se
    if num_chains > 1:
        error = max(error, float(steps.std(ddof=1)) / math.sqrt(num_chains))
    difference = float(steps.mean())
    if error == 0:
        return difference, math.copysign(math.inf, difference) if difference else 0.0
    return difference, difference / error


def virial_is_off(value: float, se: float) -> Literal["", "low", "high"]:
    """Whether a virial says that the chains have not spread, or spread too far.

    Args:
        value: mean of the draws; 1 is right.
        se: its standard error.

    >>> virial_is_off(0.23, 0.02), virial_is_off(0.97, 0.02), virial_is_off(1.3, 0.05)
    ('low', '', 'high')
    """
    if not abs(value - 1) > VIRIAL_Z * se or VIRIAL_CLOSE[0] <= value <= VIRIAL_CLOSE[1]:
        return ""
    return "low" if value < 1 else "high"


@dataclass(frozen=True)
class PredictedBias:
    """First-order bias of the estimate from the step size, see :func:`predict_bias`.

    Attributes:
        absolute: in units of the learning coefficient.
        relative: absolute / abs(estimate).
        step: the part that a full-batch chain would have too.
        minibatch: the part of the gradient noise.
        lr_fit: the largest lr whose predicted bias is 5 % of the estimate it would give.
    """

    absolute: float
    relative: float
    step: float
    minibatch: float
    lr_fit: float

    def __float__(self) -> float:
        return self.absolute


def predict_bias(
    estimate: float,
    *,
    lr: float,
    nbeta: float,
    step_bias: float,
    gradient_noise: float | None,
    hessian_trace: float | None = None,
    speed: float = 1.0,
) -> PredictedBias | None:
    r"""Predict the bias that a finite step gives the estimate, to first order in lr.

    .. math:: \frac{\varepsilon}{8}\left[ b\,n\beta\,\mathrm{tr}H + s\,(n\beta)^2 V \right]

    The term of the Hessian H is that of Euler steps (b = 1); averaged noise does not have it (b = 0).
    A sampler with momentum gathers gradient noise s times as long. V is the trace of the covariance
    of one step's gradient estimate. Localization makes the bias smaller
    than predicted. ``lr_fit`` uses that the bias is linear in lr: with λ = estimate − bias (at
    least a quarter of the estimate, beyond which the law says little), it solves
    bias(lr_fit) = 5 % of (λ + bias(lr_fit)).

    Args:
        estimate: λ̂, bias included.
        lr: ε.
        nbeta: nβ.
        step_bias: b ≥ 0, `Kernel.step_bias`.
        gradient_noise: V, of the loss without nβ; None if it was not measured.
        hessian_trace: tr H; None if it was not measured (its term is then left out).
        speed: s ≥ 1, `Kernel.speed`.

    Returns:
        None without gradient_noise, or if the estimate is not positive.

    References:
        Vollmer, Zygalakis, Teh (2016), (Non-)asymptotic properties of stochastic gradient Langevin
        dynamics, JMLR 17(159); on a Gaussian the first order of the exact stationary law.

    >>> bias = predict_bias(4.0, lr=1e-3, nbeta=100.0, step_bias=0, gradient_noise=0.8)
    >>> round(bias.absolute, 3), round(bias.relative, 3), round(bias.lr_fit, 6)
    (1.0, 0.25, 0.000158)
    """
    if gradient_noise is None or not math.isfinite(gradient_noise) or not estimate > 0:
        return None
    step = lr / 8 * nbeta * max(hessian_trace or 0.0, 0.0) * step_bias
    minibatch = lr / 8 * speed * nbeta**2 * gradient_noise
    absolute = step + minibatch
    unbiased = max(estimate - absolute, estimate / 4)
    allowed = unbiased * BIAS_CAUTION / (1 - BIAS_CAUTION)
    lr_fit = lr * allowed / absolute if absolute > 0 else math.inf
    return PredictedBias(absolute, absolute / estimate, step, minibatch, lr_fit)
