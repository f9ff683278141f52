"""A singular minimum: L = (u v)² at u = v = 0, where the Hessian vanishes.

With v integrated out, p(u) ∝ exp(−γ u²/2) / √(nβ u² + γ/2) and E[nβ u² v² | u] =
nβ u² / (2 (nβ u² + γ/2)), so the value at finite nβ is a quotient of two integrals. It is 0.354
at nβ = 100 and γ = 1, where the learning coefficient, its limit, is 1/2.
"""

import math

import pytest
import torch
from scipy.integrate import quad
from torch.utils.data import TensorDataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary

NBETA, GAMMA, COPIES = 100.0, 1.0, 64


def exact(nbeta=NBETA, gamma=GAMMA) -> float:
    def density(u):
        return math.exp(-gamma * u * u / 2) / math.sqrt(nbeta * u * u + gamma / 2)

    def weighted(u):
        return density(u) * nbeta * u * u / (2 * (nbeta * u * u + gamma / 2))

    numerator, denominator = (quad(f, 0, 20, epsabs=1e-12, limit=500)[0] for f in (weighted, density))
    return numerator / denominator


class Crossings(torch.nn.Module):
    """Independent crossings side by side: λ̂ is the sum of theirs."""

    def __init__(self, copies):
        super().__init__()
        self.u = torch.nn.Parameter(torch.zeros(copies, dtype=torch.float64))
        self.v = torch.nn.Parameter(torch.zeros(copies, dtype=torch.float64))

    def forward(self, batch):
        return ((self.u * self.v) ** 2).sum() + 0 * batch[0][0, 0]


def run(copies=COPIES, **options):
    settings = {"num_chains": 2, "start": "prior", "verbose": False} | options
    return estimate_learning_coeff_with_summary(
        Crossings(copies), loader_spec=LoaderSpec(TensorDataset(torch.zeros(50, 1))), **settings
    )


def check(result, *, se):
    expected = COPIES * exact()
    assert result.se < se * expected
    assert abs(result.llc - expected) < 4 * result.se, f"{result!r} against {expected:.3f}"


def test_the_value_is_the_known_one():
    assert exact() == pytest.approx(0.3542038, abs=1e-6)
    assert exact(nbeta=1e12) == pytest.approx(0.48, abs=0.02)  # towards 1/2, like 1/ln nβ


@pytest.mark.truths
def test_the_estimate_is_the_value_at_finite_nbeta():
    result = run(
        optimizer_kwargs={"lr": 1e-3, "nbeta": NBETA, "localization": GAMMA},
        num_burnin_steps=2000,
        num_draws=1500,
        num_steps_bw_draws=5,
        seed=0,
    )
    check(result, se=0.05)
    assert abs(result.llc / COPIES - 0.5) > 4 * result.se / COPIES  # not its limit


@pytest.mark.slow
@pytest.mark.truths
def test_settings_chosen_at_a_singular_point_work():
    result = run(optimizer_kwargs={"nbeta": NBETA}, num_draws=1500, num_steps_bw_draws=5, seed=0)
    assert len(result.draws) == 3000
    assert result.draws["loss"].notna().all()
    check(result, se=0.1)


@pytest.mark.truths
@pytest.mark.slow
def test_settings_chosen_at_one_crossing_never_diverge():
    """One crossing, where the pilot sees little: many seeds, each of them within its error."""
    results = [
        run(1, optimizer_kwargs={"nbeta": NBETA}, num_draws=2000, start="center", seed=seed)
        for seed in range(12)
    ]
    assert all((one.chains["status"] == "done").all() for one in results)
    z = [(one.llc - exact()) / one.se for one in results]
    assert max(abs(one) for one in z) < 6  # error bars of two short chains are themselves rough
    mean = sum(one.llc for one in results) / len(results)
    spread = math.sqrt(sum((one.llc - mean) ** 2 for one in results) / 11 / 12)
    assert abs(mean - exact()) < 4 * spread
