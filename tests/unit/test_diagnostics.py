"""The error bar against known answers, and every check against a planted fault."""

import doctest
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from devsample import diagnostics, verdict
from devsample.diagnostics import align, describe, drift, predict_bias
from devsample.verdict import Evidence, LostChain, examine, format_number, verdict_of

SETTINGS = {
    "sampler": "SGLD",
    "integrator": "averaged",
    "lr": 1e-4,
    "nbeta": 239.85,
    "nbeta_rule": "n/ln n",
    "nbeta_batch": 15.39,
    "num_burnin_steps": 200,
    "num_steps_bw_draws": 2,
}


def ar1(num_chains, num_draws, rho, rng):
    """Stationary series of mean 0, variance 1 and autocorrelation rho**lag."""
    noise = rng.normal(size=(num_chains, num_draws))
    out = noise.copy()
    for t in range(1, num_draws):
        out[:, t] = rho * out[:, t - 1] + math.sqrt(1 - rho**2) * noise[:, t]
    return out


def exact_se(num_chains, num_draws, rho):
    lags = np.arange(1, num_draws)
    inflation = 1 + 2 * np.sum((1 - lags / num_draws) * rho**lags)
    return math.sqrt(inflation / (num_chains * num_draws))


def healthy(rng, rho=0.6, mean=12.0, shape=(4, 500)):
    """Skewed like nβ (loss − loss at w*): the square of a few Gaussian coordinates."""
    return mean * np.mean([ar1(*shape, math.sqrt(rho), rng) ** 2 for _ in range(6)], axis=0)


def evidence(llc, lost=(), bias=None, baseline=0.1, **settings):
    values = SETTINGS | settings
    level = np.full_like(llc, baseline)
    loss = level + llc / values["nbeta"]
    return Evidence(llc, loss, level, describe(llc), tuple(lost), bias, values)


def kinds(findings):
    return [finding.kind for finding in findings]


def bias_of(estimate=10.0, gradient_noise=1.0, lr=1e-4, nbeta=239.85, **rest):
    return predict_bias(
        estimate, lr=lr, nbeta=nbeta, gradient_noise=gradient_noise, **({"step_bias": 0.0} | rest)
    )


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_standard_error_is_that_of_an_autocorrelated_mean(rho):
    rng = np.random.default_rng(1)
    results = [describe(ar1(4, 1000, rho, rng)) for _ in range(40)]
    exact = exact_se(4, 1000, rho)
    assert np.mean([result.se for result in results]) == pytest.approx(exact, rel=0.08)
    assert np.mean([result.ess for result in results]) == pytest.approx(exact**-2, rel=0.12)
    # Negative control: an error that takes the draws as independent misses it.
    naive = 1 / math.sqrt(4 * 1000)
    assert (abs(naive / exact - 1) > 0.3) == (rho > 0)


def test_standard_error_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(2)
    results = [describe(ar1(4, 500, 0.9, rng)) for _ in range(200)]
    covered = np.mean([abs(result.mean) < 1.96 * result.se for result in results])
    assert 0.90 <= covered <= 0.99


def test_numbers_do_not_depend_on_location_and_scale():
    draws = ar1(3, 200, 0.5, np.random.default_rng(3))
    plain = describe(draws)
    for scale, shift in [(1e-20, 0.0), (1e200, 0.0), (1e-3, 5.0)]:
        moved = describe(draws * scale + shift)
        assert moved.ess == pytest.approx(plain.ess, rel=1e-6)
        assert moved.rhat == pytest.approx(plain.rhat, rel=1e-6)
        assert moved.se == pytest.approx(plain.se * scale, rel=1e-6)
        assert moved.mean == pytest.approx(plain.mean * scale + shift, rel=1e-6)


@pytest.mark.parametrize("num_draws", [1, 2, 3])
def test_few_draws_take_the_error_from_the_chains(num_draws):
    draws = np.random.default_rng(4).normal(size=(5, num_draws))
    result = describe(draws)
    assert result.se == pytest.approx(draws.mean(axis=1).std(ddof=1) / math.sqrt(5))
    assert math.isnan(result.ess)
    assert math.isnan(result.rhat)
    assert math.isnan(describe(draws[:1]).se)


def test_constant_draws_have_no_error_and_no_rhat():
    result = describe(np.full((3, 50), 0.1))
    assert (result.mean, result.se, result.ess) == (0.1, 0.0, 150.0)
    assert math.isnan(result.rhat)


def test_constant_chains_that_differ_have_infinite_rhat():
    assert describe(np.repeat([[1.0], [2.0]], 50, axis=1)).rhat == math.inf


@pytest.mark.parametrize("num_chains", [1, 2, 4])
def test_rhat_sees_a_shift_also_within_one_chain(num_chains):
    draws = np.random.default_rng(5).normal(size=(num_chains, 400))
    assert describe(draws).rhat < 1.03
    draws[-1, 200:] += 5
    assert describe(draws).rhat > 1.2


def test_align_cuts_to_the_draws_that_all_chains_have():
    assert align([np.arange(5.0), np.arange(3.0)]).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_drift_is_the_difference_of_the_halves():
    draws = ar1(4, 500, 0.5, np.random.default_rng(6))
    shifted = draws + np.where(np.arange(500) < 250, 0.0, 1.0)
    difference, z = drift(shifted)
    assert difference - drift(draws)[0] == pytest.approx(1.0)
    assert z > 5
    assert drift(-shifted) == pytest.approx((-difference, -z))


@pytest.mark.parametrize("num_chains", [1, 2, 4])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_steady_rise_does_not_hide_in_its_own_autocorrelation(num_chains, noise):
    rng = np.random.default_rng(7)
    rise = np.linspace(0, 1, 500) + noise * ar1(num_chains, 500, 0.5, rng)
    assert drift(rise)[1] > 5


@pytest.mark.parametrize(("num_chains", "rho"), [(1, 0.0), (2, 0.8), (4, 0.9), (10, 0.5)])
def test_drift_of_stationary_chains_is_rarely_significant(num_chains, rho):
    rng = np.random.default_rng(7)
    z = [drift(ar1(num_chains, 500, rho, rng))[1] for _ in range(100)]
    assert np.mean(np.abs(z) > verdict.DRIFT_Z) <= 0.03


def test_drift_without_spread_is_infinite_and_of_few_draws_unknown():
    assert drift(np.repeat([[0.0, 1.0]], 8, axis=1).reshape(1, -1)) == (1.0, math.inf)
    assert drift(np.ones((2, 20))) == (0.0, 0.0)
    assert all(math.isnan(value) for value in drift(np.ones((2, 7))))


def test_predicted_bias_is_the_first_order_of_the_exact_gaussian_law():
    h, nbeta, noise = 0.7, 50.0, 0.9  # curvature, nβ, variance of one gradient estimate
    a = nbeta * h

    def exact(lr, *, euler):
        # Stationary variance of the discrete chain on a quadratic, without localization.
        variance = (1 / a + lr / 4 * nbeta**2 * noise / a) / ((1 - lr * a / 4) if euler else 1)
        return nbeta * h * variance / 2

    lr = 1e-6
    for euler in (False, True):
        bias = predict_bias(
            0.5, lr=lr, nbeta=nbeta, step_bias=float(euler), gradient_noise=noise, hessian_trace=h
        )
        assert bias.absolute == pytest.approx(exact(lr, euler=euler) - 0.5, rel=1e-3)
    assert bias.absolute == pytest.approx(bias.step + bias.minibatch)
    assert float(bias) == bias.absolute


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_at_the_lr_that_fits_the_bias_is_five_percent(noise):
    bias = bias_of(gradient_noise=noise)
    unbiased = 10.0 - bias.absolute
    smaller = bias_of(gradient_noise=noise, lr=bias.lr_fit)
    assert smaller.absolute / (unbiased + smaller.absolute) == pytest.approx(0.05)


def test_without_measured_noise_or_a_positive_estimate_no_bias_is_predicted():
    assert bias_of(gradient_noise=None) is None
    assert bias_of(gradient_noise=math.nan) is None
    assert bias_of(estimate=-1.0) is None
    assert bias_of(gradient_noise=0.0).lr_fit == math.inf


# --- verdict -------------------------------------------------------------------------------------


def test_healthy_runs_are_trusted():
    rng = np.random.default_rng(8)
    verdicts = [verdict_of(examine(evidence(healthy(rng)))) for _ in range(100)]
    assert np.mean([verdict != "trust" for verdict in verdicts]) < 0.05


@pytest.mark.parametrize(("lost", "severity"), [(1, "caution"), (2, "reject")])
def test_lost_chains_are_named(lost, severity):
    # 1 of 5 and 2 of 6 chains.
    gone = [LostChain(7 + i, "diverged", "loss is nan at step 40") for i in range(lost)]
    (finding,) = examine(evidence(healthy(np.random.default_rng(9)), lost=gone))
    assert (finding.kind, finding.severity) == ("lost", severity)
    assert "7 diverged (loss is nan at step 40)" in finding.text
    assert "lower lr" in finding.text


def test_a_quarter_of_the_chains_may_be_lost_but_never_silently():
    llc = healthy(np.random.default_rng(10))[:3]
    (finding,) = examine(evidence(llc, lost=[LostChain(3, "died", "killed by SIGKILL")]))
    assert (finding.kind, finding.severity) == ("lost", "caution")


@pytest.mark.parametrize(
    "llc",
    [
        np.zeros((4, 500)),
        np.full((4, 500), 0.3),
        3e-7 * np.random.default_rng(11).normal(size=(4, 500)),
    ],
    ids=["equal to baseline", "constant", "rounding"],
)
def test_what_does_not_move_is_rejected(llc):
    first, *_ = examine(evidence(llc))
    assert (first.kind, first.severity) == ("frozen", "reject")


def test_a_w_star_that_is_no_minimum_is_rejected():
    first, *_ = examine(evidence(healthy(np.random.default_rng(12)) - 20))
    assert (first.kind, first.severity) == ("negative", "reject")
    assert "no minimum" in first.text


def test_an_estimate_negative_by_chance_is_not_called_negative():
    rng = np.random.default_rng(13)
    llc = ar1(4, 500, 0.0, rng)
    llc += -llc.mean() - 0.5 / math.sqrt(2000)  # half a standard error below zero
    found = examine(evidence(llc))
    assert kinds(found) == ["few draws"]
    assert "of the estimate" in found[0].text


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_chains", [1, 4, 10])
def test_under_burned_chains_are_named_before_their_symptoms(num_chains, seed):
    rng = np.random.default_rng(100 + seed)
    rise = 1 - np.exp(-np.arange(500) / 150)
    llc = healthy(rng, shape=(num_chains, 500)) * rise
    first, *_ = examine(evidence(llc))
    assert (first.kind, first.severity) == ("drift", "reject")
    assert "raise num_burnin_steps from 200 to 1200" in first.text


def test_a_small_but_significant_drift_is_a_caution():
    rng = np.random.default_rng(14)
    llc = 12 + ar1(4, 2000, 0.3, rng) + np.where(np.arange(2000) < 1000, 0.0, 1.0)
    first, *_ = examine(evidence(llc))
    assert (first.kind, first.severity) == ("drift", "caution")
    assert "above" in first.text


def test_a_falling_trace_says_so():
    llc = 12 + ar1(4, 500, 0.3, np.random.default_rng(15)) - np.arange(500) / 100
    first, *_ = examine(evidence(llc))
    assert "below" in first.text
    assert "train w* further" in first.text


@pytest.mark.parametrize(
    ("share", "severity"), [(0.04, None), (0.06, "caution"), (0.29, "caution"), (0.31, "reject")]
)
def test_bias_thresholds(share, severity):
    llc = healthy(np.random.default_rng(16))
    bias = bias_of(gradient_noise=1.0)
    bias = replace(bias, absolute=share * llc.mean(), relative=share)
    found = examine(evidence(llc, bias=bias))
    assert [finding.severity for finding in found] == ([severity] if severity else [])


def test_the_bias_sentence_names_the_lr_that_fits_and_both_values_of_nbeta():
    llc = healthy(np.random.default_rng(17))
    bias = bias_of(llc.mean(), gradient_noise=4.0)
    (finding,) = examine(evidence(llc, bias=bias))
    named = float(finding.text.split("lower lr from 0.0001 to ")[1].split(",")[0])
    assert 0.9 * bias.lr_fit < named <= bias.lr_fit
    assert 'nbeta="batch" (nβ 15.4 in place of 240)' in finding.text


@pytest.mark.parametrize("settings", [{"nbeta_rule": "given"}, {"nbeta_batch": None}, {"nbeta_batch": 1e4}])
def test_nbeta_batch_is_named_only_where_it_would_help(settings):
    llc = healthy(np.random.default_rng(18))
    bias = bias_of(llc.mean(), gradient_noise=4.0)
    (finding,) = examine(evidence(llc, bias=bias, **settings))
    assert "lower lr" in finding.text
    assert "nbeta=" not in finding.text


def test_where_the_euler_step_is_to_blame_averaged_noise_is_named():
    llc = healthy(np.random.default_rng(19))
    bias = bias_of(llc.mean(), gradient_noise=0.1, hessian_trace=2000.0, step_bias=1.0)
    (finding,) = examine(evidence(llc, bias=bias, integrator="euler"))
    assert 'integrator="averaged"' in finding.text
    assert "batch_size" not in finding.text


@pytest.mark.parametrize(("shift", "severity"), [(0.9, "caution"), (3.0, "reject")])
def test_chains_that_disagree(shift, severity):
    draws = ar1(4, 500, 0.3, np.random.default_rng(20))
    llc = 12 + draws + shift * np.array([0.0, 0, 0, 1])[:, None]
    found = {finding.kind: finding for finding in examine(evidence(llc))}
    assert found["rhat"].severity == severity
    assert "drift" not in found


@pytest.mark.parametrize(("rho", "severity"), [(0.97, "reject"), (0.7, "caution")])
def test_too_few_effective_draws(rho, severity):
    rng = np.random.default_rng(21)
    found = examine(evidence(12 + ar1(2, 100, rho, rng)))
    few = next(finding for finding in found if finding.kind == "few draws")
    assert few.severity == severity
    assert "effective draws" in few.text


def test_reasons_that_are_of_no_use_are_left_out():
    """Of an optimizer that samples nothing, more draws would be no better."""
    llc = ar1(4, 100, 0.99, np.random.default_rng(21))
    assert set(kinds(examine(evidence(llc)))) >= {"rhat", "few draws"}
    found = kinds(examine(evidence(llc, samples=False, sampler="SGD")))
    assert found[0] == "no sampler"
    assert not {"rhat", "few draws"} & set(found)


def test_few_effective_draws_are_rounded_down():
    one = evidence(healthy(np.random.default_rng(21)))
    one = replace(one, estimate=replace(one.estimate, ess=49.7))
    assert "Only 49 effective draws" in verdict.check_draws(one).text


def test_raising_localization_is_said_to_change_the_quantity():
    rising = healthy(np.random.default_rng(23), shape=(4, 300)) * (1 - np.exp(-np.arange(300) / 150))
    apart = ar1(4, 300, 0.5, np.random.default_rng(2)) + 8 * np.arange(4)[:, None]
    above = evidence(healthy(np.random.default_rng(21)), num_moving_parameters=6)
    told = [
        verdict.check_drift(evidence(rising)),
        verdict.check_rhat(evidence(apart)),
        verdict.check_negative(evidence(-healthy(np.random.default_rng(21)))),
        verdict.check_dimension(above),
    ]
    for one in told:
        assert "localization, which is part of what is estimated" in one.text


def test_trajectories_of_hmc_can_be_longer():
    llc = 12 + ar1(4, 100, 0.98, np.random.default_rng(21))
    assert "num_leapfrog_steps" in verdict.check_rhat(evidence(llc, sampler="HMC")).text
    assert "num_leapfrog_steps" not in verdict.check_rhat(evidence(llc)).text


def test_the_bias_of_adam_is_that_of_its_averaged_gradient():
    bias = bias_of(gradient_noise=0.01, step_bias=18.0, hessian_trace=20.0)
    text = verdict.check_bias(evidence(np.full((2, 50), 10.0), bias=bias, sampler="AdamSGLD")).text
    assert "from its averaged gradient" in text
    assert "RMSPropSGLD" in text


def test_draws_too_few_for_any_error_bar_are_rejected():
    (finding,) = examine(evidence(np.random.default_rng(22).normal(12, 1, size=(4, 3))))
    assert (finding.kind, finding.severity) == ("few draws", "reject")


def test_causes_stand_before_symptoms_and_grave_before_light():
    rng = np.random.default_rng(23)
    llc = healthy(rng, shape=(4, 300)) * (1 - np.exp(-np.arange(300) / 150))
    bias = replace(bias_of(), relative=0.1)
    found = examine(evidence(llc, bias=bias, lost=[LostChain(4, "died")]))
    assert kinds(found)[:3] == ["lost", "drift", "bias"]
    assert set(kinds(found)[3:]) == {"rhat", "few draws"}
    assert verdict_of(found) == "reject"


def test_a_light_cause_stands_before_a_grave_symptom():
    noise = 0.3 * ar1(4, 500, 0.0, np.random.default_rng(25))
    llc = 12 + noise + np.where(np.arange(500) < 250, 0.0, 1.5)
    found = examine(evidence(llc))
    assert [(finding.kind, finding.severity) for finding in found][:2] == [
        ("drift", "caution"),
        ("rhat", "reject"),
    ]


def test_every_reason_is_one_sentence():
    rng = np.random.default_rng(24)
    llc = healthy(rng, shape=(2, 100), rho=0.95) * (1 - np.exp(-np.arange(100) / 50)) - 9
    bias = replace(bias_of(), relative=0.1)
    for finding in examine(evidence(llc, bias=bias, lost=[LostChain(4, "stopped", "after 2")])):
        assert finding.text.endswith(".")
        assert finding.text[0].isupper() or finding.text[0].isdigit()
        assert ". " not in finding.text
        assert "nan" not in finding.text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (999.9, "1e+03"), (1797.0, "1797"), (-0.5, "-0.5"), (1.25e9, "1.25e+09")],
)
def test_figures_read_well(value, text):
    assert format_number(value, 4 if value == 1797.0 else 3) == text


def test_docstring_examples():
    assert doctest.testmod(diagnostics).failed == 0


def test_importing_the_results_loads_nothing_heavy():
    heavy = "{'pandas', 'scipy', 'arviz_stats', 'matplotlib', 'xarray'}"
    code = (
        "import sys, devsample.results, devsample.plots; "
        f"sys.exit(repr({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
