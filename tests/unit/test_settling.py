"""Burn-in advice on planted traces: level ones, those that settle, and those that do not."""

import math

import numpy as np
import pytest

from devsample.settling import burnin_advice
from tests.unit.test_diagnostics import ar1, healthy

TIME = np.arange(500)


def drops(make, count=40, seed=0):
    rng = np.random.default_rng(seed)
    return [burnin_advice(make(rng)).drop for _ in range(count)]


@pytest.mark.parametrize(
    ("num_chains", "rho"), [(1, 0.6), (2, 0.0), (4, 0.6), (4, 0.9), (10, 0.9), (64, 0.6)]
)
def test_of_level_traces_nothing_is_dropped(num_chains, rho):
    found = drops(lambda rng: healthy(rng, rho=rho, shape=(num_chains, 500)))
    assert sum(drop == 0 for drop in found) >= 38


@pytest.mark.parametrize("num_chains", [4, 10])
@pytest.mark.parametrize(("tau", "num_draws"), [(10, 200), (10, 500), (30, 500), (60, 500), (200, 2000)])
def test_an_exponential_approach_is_dropped_after_3_to_5_time_constants(num_chains, tau, num_draws):
    rise = 1 - np.exp(-np.arange(num_draws) / tau)
    found = drops(lambda rng: healthy(rng, shape=(num_chains, num_draws)) * rise, count=20)
    seen = [drop / tau for drop in found if drop is not None]
    assert len(seen) >= 17
    assert 3 <= np.median(seen) <= 5.5
    assert np.mean([1.5 <= times <= 10 for times in seen]) >= 0.9


@pytest.mark.parametrize("direction", [1, -1])
def test_a_falling_trace_is_seen_as_well(direction):
    fall = direction * 8 * np.exp(-TIME / 25)
    found = burnin_advice(12 + fall + ar1(4, 500, 0.5, np.random.default_rng(1)))
    assert 75 <= found.drop <= 250
    assert 12 <= found.time_constant <= 50
    assert found.why == f"level from draw {found.drop} on"


def test_without_noise_the_time_constant_is_found():
    found = burnin_advice(np.tile(1 - np.exp(-TIME / 30), (3, 1)))
    assert found.time_constant == pytest.approx(30, rel=0.1)
    assert found.drop == pytest.approx(math.log(100) * 30, rel=0.12)


def test_the_slower_of_two_time_constants_counts():
    both = 1 - 0.5 * np.exp(-TIME / 4) - 0.5 * np.exp(-TIME / 40)
    found = drops(lambda rng: both + 0.2 * rng.normal(size=(4, 500)), count=20)
    assert 80 <= np.median(found) <= 250


def test_a_small_slow_approach_is_found_behind_a_large_fast_one():
    both = 1 - 0.85 * np.exp(-TIME / 4) - 0.15 * np.exp(-TIME / 60)
    found = [drop for drop in drops(lambda rng: both + 0.1 * rng.normal(size=(4, 500))) if drop is not None]
    assert len(found) >= 24
    assert 3 * 60 <= np.median(found) <= 5.5 * 60


def test_halves_that_differ_are_not_level():
    found = drops(lambda rng: healthy(rng) + np.where(TIME < 250, 0.0, 3.0), count=80)
    assert sum(drop == 0 for drop in found) <= 10  # noise hides some: 3 is 0.6 of its standard deviation


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: healthy(rng) * (1 - np.exp(-TIME / 300)),
        lambda rng: np.linspace(0, 10, 500) + healthy(rng),
        lambda rng: np.sqrt(TIME) + rng.normal(size=(4, 500)),
        lambda rng: rng.normal(size=(4, 500)).cumsum(axis=1),
        lambda rng: np.tile(np.linspace(0.0, 1.0, 500), (4, 1)),
        lambda rng: np.where(TIME < 450, 0.0, 8.0) + healthy(rng),
    ],
    ids=["too short", "ramp", "square root", "random walk", "ramp without noise", "late step"],
)
def test_of_a_trace_that_never_levels_off_no_number_is_said(make):
    assert drops(make, count=20) == [None] * 20


def test_it_says_why_there_is_no_number():
    assert burnin_advice(np.tile(TIME / 500, (2, 1))).why == "still on its way at the last draw"
    few = burnin_advice(np.ones((4, 15)))
    assert (few.drop, few.why) == (None, "15 draws are too few to tell")
    assert math.isnan(few.time_constant)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e7])
def test_constant_draws_are_level(value):
    assert burnin_advice(np.full((4, 60), value)).drop == 0


def test_the_answer_does_not_depend_on_location_and_scale():
    draws = healthy(np.random.default_rng(2)) * (1 - np.exp(-TIME / 20))
    plain = burnin_advice(draws)
    assert plain.drop > 0
    assert burnin_advice(1e-20 * draws) == plain
    assert burnin_advice(1e150 * draws) == plain
    assert burnin_advice(5 - draws) == plain
