r"""Where a trace levels off: how many of the first draws to leave out.

Chains start at w*, where the loss is lowest, and climb to the level of the posterior. Seen from the mean
over the chains that is about

.. math:: \bar x_t = \mu + A e^{-t/\tau} + \text{noise}

The rule of :func:`burnin_advice` fits it, asks whether A is more than noise, and drops ln(100) τ draws,
after which 1 % of A is left; then it looks at what remains in the same way, since a network has more than
one time constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from devsample.autocorrelation import autocorrelation_time
from devsample.diagnostics import DRIFT_Z, Draws, drift

__all__ = ["BurninAdvice", "burnin_advice"]

LEFT = 0.01  # share of the distance that may be left after burn-in
NEGLIGIBLE = 0.03  # share of the first distance below which a later one is not looked at
CHANCE = 3e-4  # that noise alone gives A; small, since the fit has its pick of τ
KEPT = 0.25  # least share of the draws that must be left to see that the trace is level
MIN_KEPT = 8  # and their least number, that of `drift`
MIN_TIMES = 10.0  # autocorrelation times in each chain, below which no level can be told from a wave
ROUNDS = 4  # time constants that are looked for one after the other
TIMES_PER_FACTOR_OF_TEN = 24  # values of τ that are tried


@dataclass(frozen=True)
class BurninAdvice:
    """How many of the first draws to leave out.

    Attributes:
        drop: number of draws; 0 if the trace is level from the first on; None if it is not seen to level off
            within the draws, or if there are too few to tell.
        time_constant: of the slowest approach that was found, in draws; NaN if there is none.
        why: in a few words.
    """

    drop: int | None
    time_constant: float
    why: str


def burnin_advice(draws: Draws) -> BurninAdvice:
    r"""How many of the first draws to drop, until the chains have reached their level.

    1. Fit :math:`\mu + A e^{-t/\tau}` to the mean trace by least squares, over a grid of τ.
    2. A counts if chance (:math:`A^2/\mathrm{var}(A)` against :math:`\chi^2_1`) is below 3e-4, with var(A)
       from the autocovariance of the chains' residuals. If it does not count, stop: nothing to drop.
    3. Drop ln(100) τ draws, and repeat on the rest, until A does not count or is below 3 % of the first A.
    4. There is an answer only if a quarter of the draws is left, they have no such approach read backwards
       either (a late change), their halves agree within 3 standard errors, and each chain is 10
       autocorrelation times long: a shorter one may be part of a slow wave.

    An approach that the noise of the draws hides is not found. Its effect on the mean is small then: below
    about :math:`5 \sqrt{\tau / D}` standard errors of the mean of D draws.

    Args:
        draws: shape (num_chains, num_draws), of healthy chains.

    Returns:
        The number of draws, or None where the trace is not seen to level off.

    >>> t, noise = np.arange(400), np.random.default_rng(0).normal(size=(4, 400))
    >>> burnin_advice(12 + noise).drop
    0
    >>> rising = burnin_advice(12 * (1 - np.exp(-t / 20)) + noise)
    >>> 60 < rising.drop < 140
    True
    >>> burnin_advice(t / 100 + noise).drop is None
    True
    """
    num_draws = draws.shape[1]
    if num_draws < 2 * MIN_KEPT:
        return BurninAdvice(None, math.nan, f"{num_draws} draws are too few to tell")
    least = max(MIN_KEPT, math.ceil(KEPT * num_draws))
    drop, slowest, first = 0, math.nan, 0.0
    scaled = draws - draws.flat[0]  # equal draws become zeros, without rounding
    scaled /= float(np.abs(scaled).max()) or 1.0
    for _ in range(ROUNDS):
        fit = _fit(scaled[:, drop:])
        first = first or abs(fit.amplitude)
        if not fit.counts(NEGLIGIBLE * first):
            break
        drop += math.ceil(-math.log(LEFT) * fit.time_constant)
        slowest = max(fit.time_constant, 0.0 if math.isnan(slowest) else slowest)
        if num_draws - drop < least:
            return BurninAdvice(None, slowest, "still on its way at the last draw")
    rest = scaled[:, drop:]
    if not _is_level(rest, NEGLIGIBLE * first):
        return BurninAdvice(None, slowest, "not level, or slower than the draws can show")
    return BurninAdvice(
        drop, slowest, "level from the first draw on" if not drop else f"level from draw {drop} on"
    )


@dataclass(frozen=True)
class _Fit:
    """An exponential fitted to a mean trace, and the chance that noise alone gives it."""

    amplitude: float
    time_constant: float
    chance: float

    def counts(self, negligible: float) -> bool:
        """Whether the amplitude is more than noise, and not too small to matter."""
        return self.chance <= CHANCE and abs(self.amplitude) > negligible


def _fit(draws: Draws) -> _Fit:
    from scipy.stats import chi2

    num_chains, num_draws = draws.shape
    mean = draws.mean(axis=0)
    steps = math.ceil(TIMES_PER_FACTOR_OF_TEN * math.log10(4 * num_draws)) + 1
    times = np.geomspace(1.0, 4.0 * num_draws, steps)
    shapes = np.exp(-np.arange(num_draws) / times[:, None])
    shapes -= shapes.mean(axis=1, keepdims=True)
    squares = (shapes**2).sum(axis=1)
    amplitudes = shapes @ mean / squares
    best = int(np.argmax(amplitudes**2 * squares))
    amplitude, shape = float(amplitudes[best]), shapes[best]
    residual = draws - draws.mean(axis=1, keepdims=True) - amplitude * shape
    variance = _variance(shape / squares[best], residual) / num_chains
    chance = float(chi2.sf(amplitude**2 / variance, 1)) if variance > 0 else float(amplitude == 0)
    return _Fit(amplitude, float(times[best]), chance)


def _variance(weights: Draws, residual: Draws) -> float:
    """Variance of the weighted sum of one chain, from the autocovariance of all of them."""
    covariance = _autocovariance(residual)
    # Beyond the first pair of lags whose sum is not positive there is noise only (Geyer 1992).
    pairs = covariance[: len(covariance) // 2 * 2].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    lags = 2 * int(ends[0]) if len(ends) else len(covariance)
    products = _autocovariance(weights[None])[:lags] * len(weights)
    return float(2 * covariance[:lags] @ products - covariance[0] * products[0]) if lags else 0.0


def _autocovariance(rows: Draws) -> Draws:
    """Mean over the rows of the products at each lag, divided by the number of columns; 0 is the mean."""
    length = rows.shape[1]
    spectrum = np.fft.rfft(rows, 2 * length, axis=1)
    products = np.fft.irfft(np.abs(spectrum) ** 2, axis=1)[:, :length]
    return np.asarray(products.mean(axis=0) / length)


def _is_level(draws: Draws, negligible: float) -> bool:
    if np.ptp(draws) <= negligible:
        return True
    if _fit(draws[:, ::-1]).counts(negligible):
        return False
    own = draws - draws.mean(axis=1, keepdims=True)  # where the chains are is not asked here
    long = autocorrelation_time(own) * MIN_TIMES <= draws.shape[1]
    difference, z = drift(draws)
    return long and (abs(z) <= DRIFT_Z or abs(difference) <= negligible)
