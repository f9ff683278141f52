"""Chains that are slow, have not spread, or spread too far: what each check sees and says."""

from dataclasses import replace

import numpy as np
import pytest

from devsample.diagnostics import predict_bias
from devsample.evidence import stiffness
from devsample.pace import check_overspread, check_slow, check_spread, fitting_lr
from tests.unit.test_causes import evidence
from tests.unit.test_diagnostics import ar1

RNG = np.random.default_rng(5)


def slow(**settings):
    """Chains whose draws hardly differ: R-hat well above 1.05."""
    healthy = evidence(**settings)
    llc = 4 + ar1(4, 300, 0.99, np.random.default_rng(3))
    return replace(healthy, llc=llc, estimate=replace(healthy.estimate, rhat=1.2, ess=20.0))


def with_virial(mean, spread=0.2, **settings):
    return replace(evidence(**settings), virial=mean + spread * RNG.normal(size=(4, 300)))


@pytest.mark.parametrize("check", [check_slow, check_spread, check_overspread])
def test_a_healthy_run_shows_nothing(check):
    assert check(evidence()) is None
    assert check(with_virial(1.0)) is None
    assert check(replace(evidence(), distance=2 + 0.1 * RNG.normal(size=(4, 300)))) is None


@pytest.mark.parametrize("sampler", ["SGLD", "SGHMC", "SGNHT", "RMSPropSGLD"])
def test_slow_chains_of_small_steps_are_told_to_raise_lr(sampler):
    found = check_slow(slow(sampler=sampler, lr=1e-5))
    assert (found.kind, found.severity) == ("small step", "caution")
    assert "R-hat is 1.20, there are 20 effective draws" in found.text
    assert "raise lr from 1e-05 towards 0.0015" in found.text  # 0.3/(nβ h + γ)


def test_slow_chains_with_no_room_for_lr_are_not():
    assert check_slow(slow(lr=1e-3)) is None
    assert check_slow(slow(lr=1e-5, sampler="HMC")) is None
    # nor those whose minibatch bias would grow
    bias = predict_bias(4.0, lr=1e-4, nbeta=100.0, step_bias=0.0, gradient_noise=1.4)
    assert check_slow(replace(slow(lr=1e-4), bias=bias)) is None
    assert check_slow(slow(lr=1e-4)) is not None


def test_the_lr_of_adam_is_smaller_by_its_bias():
    adam = evidence(sampler="AdamSGLD", step_bias=18.0)
    assert fitting_lr(adam, stiffness(adam)) == pytest.approx(0.3 / (100 * 2.0) / 18)


@pytest.mark.parametrize(
    ("mean", "severity"), [(0.3, "caution"), (0.7, "caution"), (0.85, None), (1.05, None), (1.3, None)]
)
def test_a_virial_below_1_means_that_chains_have_not_spread(mean, severity):
    found = check_spread(with_virial(mean))
    assert (found and found.severity) == severity
    if found:
        assert f"the virial is {mean:.1f}" in found.text
        assert "raise num_burnin_steps from 100 to 400 or more" in found.text


def test_the_remedy_for_it_is_lr_where_there_is_room_and_localization_where_there_is_none():
    assert (
        "raise lr from 1e-05 towards 0.0015, or raise num_burnin"
        in check_spread(with_virial(0.5, lr=1e-5)).text
    )
    assert "give some localization" in check_spread(with_virial(0.5, localization=0.0)).text


@pytest.mark.parametrize(("mean", "severity"), [(0.3, None), (1.05, None), (1.2, "caution"), (1.5, "reject")])
def test_a_virial_above_1_means_that_they_spread_too_far(mean, severity):
    found = check_overspread(with_virial(mean))
    assert (found and found.severity) == severity
    if found:
        assert "lower lr (now 0.001) or raise batch_size" in found.text


def test_a_virial_within_its_error_or_under_another_law_is_let_be():
    assert check_spread(with_virial(0.7, spread=8.0)) is None
    assert check_overspread(with_virial(1.5, noise_level=1.3)) is None
    assert check_spread(with_virial(0.3, bounding_box_size=0.1)) is None


def test_a_distance_that_grows_is_seen():
    growing = replace(evidence(), distance=np.linspace(1, 2, 300) + 0.05 * RNG.normal(size=(4, 300)))
    found = check_spread(growing)
    assert "their distance is 33 % larger in the second half" in found.text
    # with a virial besides, one reason is enough
    assert check_spread(replace(growing, virial=with_virial(0.3).virial)).text.count("virial") == 1
