"""The rule that ends a run: how draws grow, what ends it, and that looking does no harm."""

import math

import numpy as np
import pytest

from devsample import Precision
from devsample.diagnostics import align, describe
from devsample.stopping import Stopping


def ar(rng, chains, draws, rho):
    """Stationary autoregressive chains around 0, of variance 1."""
    noise = rng.normal(size=(chains, draws)) * math.sqrt(1 - rho**2)
    out = np.empty((chains, draws))
    state = rng.normal(size=chains)
    for t in range(draws):
        out[:, t] = state = rho * state + noise[:, t]
    return out


def test_draws_grow_by_what_is_missing_within_a_quarter_and_twofold():
    rng = np.random.default_rng(0)
    traces = list(ar(rng, 4, 400, 0.0))
    se = describe(align(traces)).se
    for goal, expected in ((se / 10, 800), (se / 1.2, 400 * 1.1 * 1.44), (se / 1.01, 500)):
        more = Stopping(Precision(se=goal)).next(400, traces, 1.0)
        assert more == pytest.approx(expected, abs=2)
    reached = Stopping(Precision(se=se * 1.01))
    assert reached.next(400, traces, 1.0) is None
    assert reached.reason == "reached"


def test_few_effective_draws_end_no_run():
    traces = list(ar(np.random.default_rng(1), 2, 20, 0.0))
    stopping = Stopping(Precision(se=10.0))
    assert stopping.next(20, traces, 1.0) == 40
    assert stopping.reason == ""


def test_a_relative_goal_follows_the_estimate():
    traces = [5 + one for one in ar(np.random.default_rng(2), 4, 400, 0.0)]
    stopping = Stopping(Precision(relative=0.5, se=1.0))
    assert stopping.next(400, traces, 1.0) is None
    assert stopping.goal == 1.0
    stopping = Stopping(Precision(relative=0.1))
    assert stopping.next(400, traces, 1.0) is None
    assert stopping.goal == pytest.approx(0.1 * describe(align(traces)).mean)


def test_limits_end_it():
    traces = list(ar(np.random.default_rng(3), 4, 400, 0.0))
    limited = Stopping(Precision(se=1e-6, max_draws=600))
    assert limited.next(400, traces, 1.0) == 600
    assert limited.next(600, traces, 2.0) is None
    assert limited.reason == "max_draws"
    timed = Stopping(Precision(se=1e-6, max_seconds=15.0))
    assert timed.next(400, traces, 10.0) == 600  # 40 draws a second, 5 seconds left
    assert timed.next(600, traces, 15.0) is None
    assert timed.reason == "max_seconds"


def test_chains_that_are_not_finite_do_not_count():
    good = list(ar(np.random.default_rng(4), 4, 400, 0.0))
    bad = [*good, np.full(400, np.nan)]
    assert Stopping(Precision(se=1e-6)).next(400, bad, 1.0) == 800
    stopping = Stopping(Precision(se=1e-6))
    assert stopping.next(400, bad[-1:], 1.0) is None
    assert stopping.reason == "no chain"


def until_it_ends(rng, goal, rho):
    """The description at which a run with this goal ends."""
    whole = ar(rng, 4, 6400, rho)
    stopping, draws = Stopping(Precision(se=goal, max_draws=6400)), 50
    while (more := stopping.next(draws, list(whole[:, :draws]), 1.0)) is not None:
        draws = more
    return describe(whole[:, :draws])


@pytest.mark.parametrize("rho", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_looking_neither_moves_the_mean_nor_narrows_the_error_bar(rho):
    """Over 300 seeds: 1.96 standard errors cover the truth in 92 % or more; the bias is below 0.15 of one."""
    rng = np.random.default_rng(5)
    found = [until_it_ends(rng, 0.04, rho) for _ in range(300)]
    means, errors = np.array([one.mean for one in found]), np.array([one.se for one in found])
    assert max(errors) <= 0.04
    assert (np.abs(means) <= 1.96 * errors).mean() >= 0.92 - 2 * math.sqrt(0.92 * 0.08 / 300)
    assert abs(means.mean()) < 0.15 * errors.mean()
