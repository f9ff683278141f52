"""The table of diagnostics: each figure against a run of known law, and what it says where it has none."""

import math

import numpy as np
import pytest

from devsample.autocorrelation import autocorrelation_time
from devsample.diagnosis import (
    below_baseline,
    diagnose,
    healthy_draws,
    plateau_slope,
    quantity,
    virial,
)
from devsample.diagnostics import describe, drift
from tests.unit.test_diagnostics import healthy
from tests.unit.test_results import make_result, table

NBETA, LOCALIZATION = 100.0, 20.0
CURVATURES = np.array([0.1, 0.5, 1.0, 3.0])
STIFFNESS = NBETA * CURVATURES / (NBETA * CURVATURES + LOCALIZATION)  # share of the loss in the potential
SLOPE = float(np.sum(STIFFNESS / 2 - STIFFNESS**2 / 2))  # of λ̂ = Σ STIFFNESS / 2, by the derivative


@pytest.fixture
def traces():
    return list(healthy(np.random.default_rng(0)))


def two_batches(rng, shape, noise=0.02):
    """Losses of two minibatches at draws of the exact law of a quadratic, with their baselines."""
    deviation = 1 / np.sqrt(NBETA * CURVATURES + LOCALIZATION)
    weights = deviation * rng.normal(size=(*shape, len(CURVATURES)))
    loss = 0.3 + (CURVATURES * weights**2).sum(axis=-1) / 2
    columns = {}
    for end in ("", "_b"):
        columns[f"baseline{end}"] = 0.3 + 0.1 * rng.normal(size=shape)
        columns[f"loss{end}"] = loss + (columns[f"baseline{end}"] - 0.3) + noise * rng.normal(size=shape)
    columns["llc"] = NBETA * (columns["loss"] - columns["baseline"])
    return columns


def test_the_slope_is_the_derivative_of_the_estimate():
    rng = np.random.default_rng(1)
    found = [plateau_slope(two_batches(rng, (4, 2000)), NBETA) for _ in range(40)]
    errors = [(one.value - SLOPE) / one.se for one in found]
    assert abs(np.mean(errors)) < 4 / math.sqrt(len(errors))
    assert 0.6 < np.std(errors) < 1.5
    # A check of the formula: the same slope from the law itself, at neighbouring nβ.
    step = 1e-5
    around = [
        np.sum(NBETA * f * CURVATURES / (NBETA * f * CURVATURES + LOCALIZATION)) / 2
        for f in (1 - step, 1 + step)
    ]
    assert (around[1] - around[0]) / (2 * step) == pytest.approx(SLOPE, rel=1e-6)


def test_one_batch_in_the_place_of_two_would_be_wrong():
    columns = two_batches(np.random.default_rng(2), (4, 2000))
    same = columns | {"loss_b": columns["loss"], "baseline_b": columns["baseline"]}
    found = plateau_slope(same, NBETA)
    assert found.value < SLOPE - 5 * found.se


def test_without_a_second_batch_there_is_no_slope_but_a_remedy(traces):
    found = diagnose(make_result(traces)).plateau_slope
    assert math.isnan(found.value)
    assert math.isnan(found.se)
    assert 'observables=("second_batch",)' in found.missing
    bad = two_batches(np.random.default_rng(3), (2, 50))
    bad["loss_b"][1, 7] = math.inf
    assert "not finite" in plateau_slope(bad, NBETA).missing


def recorded(traces, **columns):
    draws = table(traces)
    return draws.assign(**{name: np.ravel(values) for name, values in columns.items()})


def test_slope_and_virial_are_taken_from_the_draws(traces):
    rng = np.random.default_rng(4)
    columns = two_batches(rng, (4, 500))
    ones = 1 + 0.1 * rng.normal(size=(4, 500))
    result = make_result(list(columns["llc"]), draws=recorded(traces, **columns, virial=ones), nbeta=NBETA)
    found = diagnose(result)
    assert found.plateau_slope == plateau_slope(columns, NBETA)
    assert found.plateau_slope.missing == ""
    assert (found.virial.value, found.virial.se) == (describe(ones).mean, describe(ones).se)
    assert "virial" in found.quantities
    assert "loss_b" not in found.quantities


def test_samplers_on_all_data_need_no_second_batch():
    columns = two_batches(np.random.default_rng(5), (4, 500), noise=0.0)
    draws = recorded(list(columns["llc"]), loss=columns["loss"], baseline=columns["baseline"])
    found = diagnose(make_result(list(columns["llc"]), draws=draws, nbeta=NBETA, sampler="HMC")).plateau_slope
    assert abs(found.value - SLOPE) < 4 * found.se


def test_a_virial_that_is_off_is_said_so_and_burn_in_is_not_enough(traces):
    noise = 0.1 * np.random.default_rng(4).normal(size=(4, 500))
    low = make_result(traces, draws=recorded(traces, virial=0.23 + noise))
    assert "burn-in              too short: the virial is 0.23" in str(diagnose(low))
    assert "too low, 1 is right" in str(diagnose(low))
    assert [one.kind for one in low.findings] == ["not spread"]
    high = make_result(traces, draws=recorded(traces, virial=1.4 + noise))
    assert "enough: level" in str(diagnose(high))
    assert "too high, 1 is right" in str(diagnose(high))
    assert [one.kind for one in high.findings] == ["spread too far"]
    assert make_result(traces, draws=recorded(traces, virial=1 + noise)).verdict == "trust"


def test_what_descent_from_w_star_gains_is_in_the_table(traces):
    assert "descent from w*      not measured" in str(diagnose(make_result(traces)))
    given = {"drop": 3.0, "square": 2.0, "error": 0.5, "curvature": 1.0}
    found = diagnose(make_result(traces, descent=given))
    assert (found.descent.value, found.descent.se) == (3.0, 0.75)
    assert "descent from w*      3 ± 0.75" in str(found)


def test_the_virial_that_is_missing_says_how_to_have_it(traces):
    assert 'observables=("virial",)' in virial({}).missing
    assert virial({"virial": np.array([[1.0, math.nan]])}).missing == "a value is not finite"


def test_draws_below_the_baseline_are_counted(traces):
    assert below_baseline(np.array([[1.0, 2.0, 3.0, 4.0]]), np.full((1, 4), 3.0)) == 0.5
    result = make_result([trace - 12 for trace in traces])
    share = np.mean(np.array(traces) < 12)
    assert diagnose(result).below_baseline == pytest.approx(share)


def test_every_figure_of_a_quantity_is_that_of_its_function(traces):
    draws = np.array(traces)
    found = quantity(draws, 4)
    assert found.estimate == describe(draws)
    assert (found.drift, found.drift_z) == drift(draws)
    assert found.autocorrelation_time == autocorrelation_time(draws)
    assert found.autocorrelation_steps == pytest.approx(4 * found.autocorrelation_time)
    assert found.spread.sd == pytest.approx(draws.mean(axis=1).std(ddof=1))
    assert found.burnin.drop == 0


def test_left_out_chains_and_surplus_draws_are_in_no_figure(traces):
    traces[1] = np.concatenate([traces[1][:30], [1e300, np.inf, np.nan]])
    traces[2] = traces[2][:400]
    result = make_result(traces, c1={"status": "diverged"}, c2={"status": "stopped"})
    kept = healthy_draws(result, "llc")
    assert np.array_equal(kept, [traces[i][:400] for i in (0, 2, 3)])
    found = diagnose(result)
    assert (found.num_chains, found.num_draws) == (3, 400)
    assert found.quantities["llc"].estimate == result.estimate


def test_observables_are_quantities_unless_they_hold_no_number(traces):
    draws = recorded(traces, distance=np.ones(2000), broken=np.full(2000, np.nan), name=["a"] * 2000)
    found = diagnose(make_result(traces, draws=draws))
    assert list(found.quantities) == ["loss", "baseline", "llc", "distance"]
    assert found.quantities["distance"].estimate.se == 0


def test_the_table_has_a_row_for_each_quantity_and_the_advice(traces):
    text = str(diagnose(make_result(traces, num_steps_bw_draws=4)))
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["llc"][1] == "12.28"
    assert rows["llc"][-1] == "0"
    assert "4 chains × 500 draws, 4 steps a draw" in text
    assert "enough: level from the first draw on" in text
    assert "nan" not in text


def test_the_burn_in_sentence_names_the_steps_to_set():
    rise = 1 - np.exp(-np.arange(500) / 20)
    result = make_result(list(healthy(np.random.default_rng(6)) * rise), num_steps_bw_draws=3)
    found = diagnose(result)
    drop = found.quantities["llc"].burnin.drop
    assert f"drop {drop} draws: raise num_burnin_steps from 500 to {500 + 3 * drop}" in str(found)
    rise = np.linspace(0, 1, 500)
    slow = make_result(list(healthy(np.random.default_rng(7)) * rise))
    assert "not within the draws: still on its way at the last draw" in str(diagnose(slow))


@pytest.mark.parametrize(
    "traces",
    [np.zeros((4, 50)), np.ones((1, 1)), np.ones((2, 3)), np.full((12, 300), 7.0)],
    ids=["frozen", "one draw", "three draws", "many"],
)
def test_degenerate_runs_have_a_table_without_nan(traces):
    text = str(diagnose(make_result(list(traces))))
    assert "nan" not in text
    assert "llc" in text
