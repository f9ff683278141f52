"""Autocorrelation, its time, and the chains' spread, against series of known law."""

import math

import numpy as np
import pytest
from arviz_stats.base import array_stats

from devsample.autocorrelation import (
    autocorrelation,
    autocorrelation_time,
    chain_spread,
    pooled_autocorrelation,
)
from devsample.diagnostics import describe
from tests.unit.test_diagnostics import ar1


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.6, 0.9])
def test_the_time_is_that_of_the_series(rho):
    rng = np.random.default_rng(0)
    times = [autocorrelation_time(ar1(4, 2000, rho, rng)) for _ in range(30)]
    assert np.mean(times) == pytest.approx((1 + rho) / (1 - rho), rel=0.08)


@pytest.mark.parametrize("num_chains", [1, 4])
def test_time_and_effective_draws_are_one_figure(num_chains):
    draws = ar1(num_chains, 400, 0.7, np.random.default_rng(1))
    assert autocorrelation_time(draws) * describe(draws).ess == pytest.approx(
        draws.size
    )  # no odd spread here
    assert autocorrelation_time(draws) == pytest.approx(draws.size / array_stats.ess(draws, method="mean"))


def test_autocorrelation_of_each_chain_is_its_own():
    rng = np.random.default_rng(2)
    draws = np.concatenate([ar1(1, 20_000, rho, rng) + 100 * rho for rho in (0.3, 0.8)])
    found = autocorrelation(draws)
    assert found.shape == draws.shape
    assert found[:, 0] == pytest.approx(1.0)
    assert found[:, 1] == pytest.approx([0.3, 0.8], abs=0.03)
    assert found[:, 3] == pytest.approx([0.3**3, 0.8**3], abs=0.05)


def test_pooled_autocorrelation_does_not_vanish_where_chains_disagree():
    draws = ar1(4, 5000, 0.5, np.random.default_rng(3))
    assert pooled_autocorrelation(draws)[:4] == pytest.approx([1, 0.5, 0.25, 0.125], abs=0.05)
    apart = draws + np.array([-1.0, 1.0, -1.0, 1.0])[:, None]  # variance 4/3 between, 1 within
    assert pooled_autocorrelation(apart)[50:100].mean() == pytest.approx(4 / 7, abs=0.03)
    assert abs(autocorrelation(apart)[:, 50:100].mean()) < 0.03


def test_numbers_do_not_depend_on_location_and_scale():
    draws = ar1(3, 200, 0.5, np.random.default_rng(4))
    moved = 1e200 * (draws + 1)
    assert autocorrelation(moved) == pytest.approx(autocorrelation(draws), abs=1e-9)
    assert pooled_autocorrelation(moved) == pytest.approx(pooled_autocorrelation(draws), abs=1e-9)
    assert chain_spread(moved).ratio == pytest.approx(chain_spread(draws).ratio)
    assert chain_spread(1e-20 * draws).ratio == pytest.approx(chain_spread(draws).ratio)


def test_constant_and_few_draws_have_no_autocorrelation():
    constant = np.full((2, 30), 0.1)
    assert np.isnan(autocorrelation(constant)).all()
    assert np.isnan(pooled_autocorrelation(constant)).all()
    assert math.isnan(autocorrelation_time(constant))
    assert math.isnan(autocorrelation_time(np.array([[1.0, 2.0, 4.0]])))
    assert np.isnan(pooled_autocorrelation(np.ones((3, 1)))).all()


def test_chains_of_one_law_spread_as_their_errors_say():
    rng = np.random.default_rng(5)
    found = [chain_spread(ar1(4, 400, 0.6, rng)) for _ in range(100)]
    assert np.mean([one.ratio**2 for one in found]) == pytest.approx(1.0, abs=0.25)
    assert np.mean([one.chance < 0.01 for one in found]) <= 0.04
    one = found[0]
    assert one.ratio == one.sd / one.expected


def test_chains_that_disagree_spread_wider():
    draws = ar1(4, 400, 0.6, np.random.default_rng(6)) + np.array([0.0, 0, 0, 1])[:, None]
    found = chain_spread(draws)
    assert found.ratio > 3
    assert found.chance < 1e-6
    assert found.sd == pytest.approx(draws.mean(axis=1).std(ddof=1))


def test_spread_where_there_is_little_to_compare():
    assert math.isnan(chain_spread(np.ones((1, 50))).sd)
    few = chain_spread(np.array([[1.0, 3.0], [5.0, 7.0]]))
    assert few.sd == pytest.approx(math.sqrt(8))
    assert math.isnan(few.expected)
    assert math.isnan(few.chance)
    same = chain_spread(np.full((3, 50), 0.3))
    assert (same.sd, same.chance) == (0.0, 1.0)
    assert math.isnan(same.ratio)
    apart = chain_spread(np.repeat([[1.0], [2.0]], 50, axis=1))
    assert (apart.ratio, apart.chance) == (math.inf, 0.0)
