"""What the reruns of the chains say: the figure, its error, and the verdict on it."""

import math

import numpy as np
import pytest

from devsample.measured import MeasuredBias, measured_bias
from devsample.verdict import check_step_bias, examine
from tests.unit.test_diagnostics import evidence, healthy

LR = 1e-3


def judged(value, se=0.1, estimate=12.0):
    """The finding on a bias of this size."""
    rng = np.random.default_rng(0)
    given = evidence(healthy(rng, mean=estimate), lr=LR)
    object.__setattr__(given, "measured", MeasuredBias(value, se, value / estimate, LR / 3))
    found = [one for one in examine(given) if one.kind == "step bias"]
    assert found == ([check_step_bias(given)] if found else [])
    return found[0] if found else None


def test_a_small_bias_and_an_uncertain_one_pass():
    assert judged(1.1) is None
    assert judged(-1.1) is None
    assert judged(4.0, se=1.4) is None


@pytest.mark.parametrize(("value", "severity"), [(1.3, "caution"), (3.5, "caution"), (3.7, "reject")])
def test_a_large_bias_is_said_with_the_lr_to_take(value, severity):
    high, low = judged(value), judged(-value)
    assert high.severity == low.severity == severity
    assert f"{value:.2g} ± 0.1" in high.text
    assert "too high; lower lr from 0.001 to 0.00033." in high.text
    assert "too low; lower lr from 0.001 to 0.00033." in low.text


def test_no_rerun_no_bias():
    assert measured_bias([], 4.0, LR) is None
    assert measured_bias([None, None], 4.0, LR) is None
    assert check_step_bias(evidence(healthy(np.random.default_rng(0)))) is None


def test_the_error_is_that_of_independent_blocks():
    rng = np.random.default_rng(1)
    values, errors = [], []
    for _ in range(200):
        found = measured_bias(0.2 + rng.normal(size=(4, 20)), 4.0, LR)
        values.append(found.value)
        errors.append(found.se)
    assert np.mean(values) == pytest.approx(0.4, abs=4 * 2 / math.sqrt(80 * 200))
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.2)


def test_chains_that_differ_give_the_error():
    rng = np.random.default_rng(2)
    apart = np.array([[-1.0], [0.0], [1.0], [2.0]]) + 0.1 * rng.normal(size=(4, 20))
    spread = 2 * apart.mean(axis=1).std(ddof=1) / 2
    assert measured_bias(apart, 4.0, LR).se == pytest.approx(spread)


def test_a_chain_that_was_not_rerun_is_left_out():
    rows = [[0.1] * 20, None, [0.3] * 20]
    assert measured_bias(rows, 4.0, LR).value == pytest.approx(0.4)


def test_the_lr_that_it_names_has_a_bias_of_a_twentieth():
    found = measured_bias(np.full((2, 20), 0.5), 5.0, LR)
    bias, unbiased = found.lr_fit / LR * found.value, 5.0 - found.value
    assert bias / (unbiased + bias) == pytest.approx(0.05)
    assert measured_bias(np.zeros((2, 20)), 5.0, LR).lr_fit == math.inf
