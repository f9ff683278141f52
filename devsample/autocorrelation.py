r"""How long draws remember: autocorrelation, and how far chains spread beyond their own errors.

Arrays of draws have shape (num_chains, num_draws), float64, and hold healthy chains only. A draw is a
recorded step: multiply a time in draws by ``num_steps_bw_draws`` to have it in steps.

The llc of a draw is read on a minibatch, whose noise is new at every draw. It hides part of the memory: the
times here are those of the recorded series, which is what its error bar depends on, and not those of the
weights, which are longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from devsample.diagnostics import MIN_DRAWS, Draws, describe

__all__ = [
    "Spread",
    "autocorrelation",
    "autocorrelation_time",
    "chain_spread",
    "pooled_autocorrelation",
]


def autocorrelation(draws: Draws) -> Draws:
    r"""Autocorrelation of each chain about its own mean, at every lag.

    .. math:: \rho_c(k) = \frac{\sum_t (x_{c,t} - \bar x_c)(x_{c,t+k} - \bar x_c)}
                               {\sum_t (x_{c,t} - \bar x_c)^2}

    Large lags rest on few products; their noise is of the order of the square root of the
    autocorrelation time over the number of draws.

    Args:
        draws: shape (num_chains, num_draws).

    Returns:
        Same shape, lag 0 (which is 1) first; NaN for a chain that is constant.

    References:
        Computed by arviz-stats.

    >>> autocorrelation(np.array([[1.0, -1.0, 1.0, -1.0], [5.0, 5.0, 5.0, 5.0]]))
    array([[ 1.  , -0.75,  0.5 , -0.25],
           [  nan,   nan,   nan,   nan]])
    """
    from arviz_stats.base import array_stats

    result = np.asarray(array_stats.autocorr(_scaled(draws)[0], axis=-1), dtype=np.float64)
    result[np.ptp(draws, axis=1) == 0] = np.nan
    return result


def pooled_autocorrelation(draws: Draws) -> Draws:
    r"""Autocorrelation about the mean of all chains: chains that disagree never forget.

    .. math:: \rho(k) = 1 - \frac{W - \frac{1}{M}\sum_c \hat\gamma_c(k)}{\mathrm{var}^+}

    W is the mean of the variances of the M chains, :math:`\hat\gamma_c(k)` a chain's autocovariance and
    :math:`\mathrm{var}^+` the variance of all draws, that between the chains included.

    Args:
        draws: shape (num_chains, num_draws).

    Returns:
        Shape (num_draws,), lag 0 (which is 1) first; NaN for fewer than 2 draws, or if all are equal.

    References:
        Vehtari et al. (2021), equation 10.

    >>> still_apart = np.array([[0.0, 0.1, 0.0, 0.1], [9.0, 9.1, 9.0, 9.1]])
    >>> bool(pooled_autocorrelation(still_apart).min() > 0.99)
    True
    """
    from arviz_stats.base import array_stats

    num_chains, num_draws = draws.shape
    if num_draws < 2 or np.ptp(draws) == 0:
        return np.full(num_draws, np.nan)
    scaled, _ = _scaled(draws)
    covariance = np.asarray(array_stats.autocov(scaled, axis=-1), dtype=np.float64).mean(axis=0)
    between = float(scaled.mean(axis=1).var(ddof=1)) if num_chains > 1 else 0.0
    within = covariance[0] * num_draws / (num_draws - 1)
    pooled = 1 - (within - covariance) / (covariance[0] + between)
    pooled[0] = 1.0
    return np.asarray(pooled)


def autocorrelation_time(draws: Draws) -> float:
    r"""Integrated autocorrelation time in draws: how many draws count as one independent one.

    .. math:: \tau = 1 + 2 \sum_{k \ge 1} \rho(k) = \frac{\text{number of draws}}{\mathrm{ESS}}

    The ESS is that of the autocorrelation alone, as arviz-stats computes it. That of
    :func:`devsample.diagnostics.describe` is smaller where the chains spread wider than their autocorrelation
    explains. Independent draws have a time of 1, alternating ones less.

    Args:
        draws: shape (num_chains, num_draws).

    Returns:
        NaN with fewer than 4 draws a chain, and for draws that are all equal.

    References:
        Vehtari et al. (2021), equations 10-13.

    >>> 0.8 < autocorrelation_time(np.random.default_rng(0).normal(size=(4, 500))) < 1.2
    True
    """
    from arviz_stats.base import array_stats

    if draws.shape[1] < MIN_DRAWS or np.ptp(draws) == 0:
        return math.nan
    return draws.size / float(array_stats.ess(_scaled(draws)[0], method="mean"))


@dataclass(frozen=True)
class Spread:
    """How far the chains' means lie apart.

    Attributes:
        sd: unbiased standard deviation of the means of the chains.
        expected: what the chains' own errors predict for it.
        chance: how often chains of one law would spread so far or farther, roughly.
    """

    sd: float
    expected: float
    chance: float

    @property
    def ratio(self) -> float:
        """``sd / expected``: about 1 for chains of one law; NaN if both are 0."""
        if self.expected:
            return self.sd / self.expected
        return math.inf if self.sd > 0 else math.nan


def chain_spread(draws: Draws) -> Spread:
    r"""Spread of the chain means, against what the chains' own standard errors predict.

    .. math:: s = \mathrm{sd}_c(\bar x_c), \qquad e = \sqrt{\tfrac1M \textstyle\sum_c \mathrm{se}_c^2}

    The chance is that of :math:`\chi^2_{M-1} \ge (M-1) s^2 / e^2`, as if the errors were exactly known.

    Args:
        draws: shape (num_chains, num_draws).

    Returns:
        All NaN for one chain; without ``expected`` and ``chance`` for fewer than 4 draws a chain.

    >>> apart = np.random.default_rng(0).normal(size=(4, 500)) + np.array([[0.0], [0], [0], [1]])
    >>> spread = chain_spread(apart)
    >>> spread.ratio > 5, spread.chance < 1e-6
    (True, True)
    """
    from scipy.stats import chi2

    num_chains, num_draws = draws.shape
    if num_chains < 2:
        return Spread(math.nan, math.nan, math.nan)
    scaled, scale = _scaled(draws)
    sd = scale * float(scaled.mean(axis=1).std(ddof=1))
    if num_draws < MIN_DRAWS:
        return Spread(sd, math.nan, math.nan)
    errors = np.array([describe(chain[None]).se for chain in draws])
    largest = float(errors.max())
    expected = largest * float(np.sqrt(np.mean((errors / largest) ** 2))) if largest else 0.0
    spread = Spread(sd, expected, math.nan)
    chance = float(chi2.sf((num_chains - 1) * spread.ratio**2, num_chains - 1)) if sd else 1.0
    return Spread(sd, expected, chance)


def _scaled(draws: Draws) -> tuple[Draws, float]:
    """Draws of order 1, and their scale: squares of huge draws overflow, those of tiny ones vanish."""
    moved = draws - draws.flat[0]
    scale = float(np.abs(moved).max()) or 1.0
    return moved / scale, scale
