"""Rows of chains run to their stationary law, and what they are held against."""

import math
from typing import NamedTuple

import torch

from devsample.testing.driver import Drive


class Reading(NamedTuple):
    """nβ (E[L] − L(w*)), as rows of independent chains have read it."""

    value: float
    se: float

    def z(self, expected):
        return (self.value - expected) / self.se


def read(drive, nbeta, *, burnin, draws, between=1):
    """Burn in, of which the first half adapts; then the mean of ``draws`` losses of every row."""
    drive.advance(max(1, burnin // 2))
    drive.freeze()
    drive.advance(burnin - burnin // 2)
    return read_on(drive, nbeta, draws=draws, between=between)


def read_on(drive, nbeta, *, draws, between=1):
    """Read without burn-in, from where the chains are."""
    total = 0.0
    for _ in range(draws):
        drive.advance(between)
        total = total + drive.losses()
    means = nbeta * total / draws
    spread = float(means.std()) if len(means) > 1 else math.inf  # one chain does not know
    return Reading(float(means.mean()), spread / math.sqrt(len(means)))


def check(reading, expected, *, most, within=None, error=0.0):
    """|z| < 4 with a standard error ≤ ``most``, and a deviation ≤ ``within``; both relative.

    ``error`` is the standard error of the expected value, if that was measured.
    """
    assert reading.se <= most * abs(expected), f"the error bar is too large: {reading.se / expected:.2%}"
    z = (reading.value - expected) / math.hypot(reading.se, error)
    assert abs(z) < 4, f"{reading.value:.5g} is {z:+.1f} standard errors from {expected:.5g}"
    if within is not None:
        off = reading.value / expected - 1
        assert abs(off) <= within, f"{reading.value:.5g} is off from {expected:.5g} by {off:+.2%}"


def at_center(potential, rows, dtype=torch.float64):
    """Every row at w*."""
    return potential.center.to(dtype).expand(rows, -1).clone()


def around_center(potential, rows, precision, seed=0):
    """Rows w* + N(0, 1/precision), one precision or one an entry."""
    random = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, potential.num_parameters, generator=random, dtype=torch.float64)
    return potential.center + z / torch.as_tensor(precision, dtype=torch.float64).sqrt()


def chains(potential, kernel, rows, *, seed, start=None, gradient=None):
    """A `Drive` from w*, or from ``start``."""
    position = at_center(potential, rows) if start is None else start
    return Drive(potential, kernel, position, seed=seed, gradient=gradient)
