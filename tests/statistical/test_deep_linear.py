"""Deep linear networks of a thousand to a hundred thousand weights, by SGHMC on the population loss.

Chains start at the deepest point. The step is 1/(nβ h + γ) with h a bound on the curvature at draws of the
localization's Gaussian N(w*, 1/γ): more than w* has and more than the chain meets. γ is about the width of
the layers, so that their random part has singular values of about 1; then nβ/γ says how near the
asymptotic value is. With gradients of the exact loss the friction may be as small as the slowest
directions, held by γ, need it: 4 √(εγ), twice critical damping.
"""

import functools
import itertools
import math

import pytest
import torch
from scipy.stats import spearmanr

from devsample import LoaderSpec, estimate_learning_coeff_with_summary
from devsample.samplers import SAMPLERS
from devsample.testing import case, dln_learning_coefficient, random_deep_linear_networks
from devsample.testing.factors import DeepLinear
from tests.statistical.chains import Reading, around_center, at_center, chains, check, read

pytestmark = [pytest.mark.truths, pytest.mark.timeout(1800)]


def sampled(widths, rank, name, *, nbeta, gamma, rows, burnin, draws, between):
    """λ̂ of a network by one sampler."""
    potential = DeepLinear(widths, rank)
    scouts = around_center(potential, 4, gamma).float()
    lr = 1 / (nbeta * float(potential.hessian_max(scouts).max()) + gamma)
    values, dtype = {}, torch.float32
    if name == "SGHMC":
        values = {"friction": min(0.1, 4 * math.sqrt(lr * gamma))}
    elif name == "HMC":
        values, dtype = (
            {"adapt": False, "num_leapfrog_steps": round(1.5 / math.sqrt(lr * gamma))},
            torch.float64,
        )
    kernel = SAMPLERS[name].kernel(lr=lr, nbeta=nbeta, localization=gamma, **values)
    drive = chains(potential, kernel, rows, seed=3, start=at_center(potential, rows, dtype))
    return read(drive, nbeta, burnin=burnin, draws=draws, between=between)


# ---- a case with an exact value -----------------------------------------------------------------


@pytest.mark.slow
def test_averaged_noise_is_exact_on_a_network_at_a_step_of_1e_4():
    """Reduced rank regression 5–2–4 at nβ = 1000: ε a reaches 4 at times."""
    one = case("rrr_5_2_4_zero_nb1000")
    assert one.expected == pytest.approx(3.815, abs=1e-3)
    kernel = SAMPLERS["SGLD"].kernel(lr=1e-4, nbeta=one.nbeta, localization=one.gamma)
    drive = chains(one.potential, kernel, 256, seed=1, start=at_center(one.potential, 256, torch.float32))
    check(
        read(drive, one.nbeta, burnin=30_000, draws=140, between=500), one.expected, most=0.0035, within=0.01
    )


@pytest.mark.slow
def test_the_same_network_in_chains_of_the_public_function():
    """64 chains in lockstep in one process, with an error bar of a percent."""
    one = case("rrr_5_2_4_zero_nb1000")
    result = estimate_learning_coeff_with_summary(
        one.model(torch.float32),
        loader_spec=LoaderSpec(one.dataset()),
        evaluate=lambda model, batch: model(),
        optimizer_kwargs={"lr": 1e-4, "nbeta": one.nbeta, "localization": one.gamma},
        num_chains=64,
        chains_per_process=64,
        threads_per_chain=1,
        start="prior",
        baseline="fixed",
        init_loss=0.0,
        num_burnin_steps=3000,
        num_draws=240,
        num_steps_bw_draws=50,
        seed=1,
        verbose=False,
    )
    assert result.settings["chains_per_process"] == 64
    check(Reading(result.llc, result.se), one.expected, most=0.013, within=0.04)


# ---- a thousand weights: HMC at the same nβ and γ -----------------------------------------------

SMALL = {"three layers": ((20, 16, 20, 16), 4, 30.0), "two layers": ((24, 16, 40), 5, 10.0)}


@functools.cache
def small(network, name):
    widths, rank, gamma = SMALL[network]
    size, lengths = DeepLinear(widths, rank).num_parameters, {"HMC": (15, 200, 1), "SGHMC": (2000, 60, 25)}
    assert 950 < size < 1050
    burnin, draws, between = lengths.get(name, (20_000, 150, 100))
    return sampled(
        widths, rank, name, nbeta=1000.0, gamma=gamma, rows=16, burnin=burnin, draws=draws, between=between
    )


@pytest.mark.parametrize(
    ("network", "name"),
    [
        ("two layers", "SGHMC"),
        pytest.param("two layers", "SGLD", marks=pytest.mark.slow),
        pytest.param("three layers", "SGHMC", marks=pytest.mark.slow),
        pytest.param("three layers", "SGLD", marks=pytest.mark.slow),
    ],
)
def test_a_thousand_weights_are_as_hmc_has_them(network, name):
    reference, found = small(network, "HMC"), small(network, name)
    assert reference.se < 0.005 * reference.value
    check(found, reference.value, most=0.005, within=0.02, error=reference.se)
    widths, rank, _ = SMALL[network]
    assert found.value < float(dln_learning_coefficient(widths, rank).value)  # not there yet


# ---- many networks: towards the closed form -----------------------------------------------------

# Weights; γ; nβ with steps of burn-in and after it.
LADDERS = {
    10_000: (60.0, {1e3: (1000, 1000), 1e4: (1500, 1000), 1e5: (3000, 2000)}),
    100_000: (150.0, {1e3: (300, 200), 1e4: (600, 300), 1e5: (1500, 600)}),
}


@functools.cache
def ladder(num_params):
    """λ̂/λ (nβ, networks) of 20 random networks, and their λ."""
    gamma, schedule = LADDERS[num_params]
    networks = random_deep_linear_networks(num_params, 20, depths=(2, 3))
    rows = []
    for nbeta, (burnin, steps) in schedule.items():
        rows.append([])
        for one in networks:
            reading = sampled(
                one.widths,
                one.rank,
                "SGHMC",
                nbeta=nbeta,
                gamma=gamma,
                rows=1,
                burnin=burnin,
                draws=steps // 20,
                between=20,
            )
            rows[-1].append(reading.value / one.value)
    return torch.tensor(rows), torch.tensor([one.value for one in networks])


@pytest.mark.slow
@pytest.mark.parametrize("num_params", LADDERS)
def test_networks_come_to_the_closed_form_as_nbeta_grows(num_params):
    ratios, values = ladder(num_params)
    for lower, higher in itertools.pairwise(ratios):
        assert higher.mean() > lower.mean()
        assert ((higher > lower) | (higher > 0.98)).all()
    assert ((ratios[-1] - 1).abs() <= 0.05).all()
    assert spearmanr(ratios[-1] * values, values).statistic >= 0.99
