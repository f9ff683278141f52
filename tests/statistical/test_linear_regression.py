"""The estimate against exact values: a linear regression with iid minibatches at a finite step.

L(w) = mean_i (y_i − x_i·w)² is quadratic around the least-squares solution w*, so

* the target's value is Σ_i nβ h_i / (2 (nβ h_i + γ)), h the eigenvalues of H = 2 XᵀX/n, and
* the chain's own stationary second moment S = E[(w − w*)(w − w*)ᵀ] solves a linear equation:
  w⁺ − w* = A (w − w*) − (ε nβ/2) (g_B − ∇L) + √ε R with A = I − (ε/2)(nβ H + γ I), where the
  minibatch's error has covariance (M(S) − H S H + C)/B for B independent samples,
  M(S) = 4 mean_i (x_iᵀ S x_i) x_i x_iᵀ and C = 4 mean_i r_i² x_i x_iᵀ, r the residuals. Hence

      S = A S A + (ε nβ/2)²/B · (M(S) − H S H + C) + N,    λ̂ = (nβ/2) tr(H S),

  N = ε I for R_k, and (ε/2)(I + A) for (R_k + R_{k+1})/2: half the variance, and the shared term
  E[w_k R_kᵀ] = (√ε/2) I comes twice.
"""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch.utils.data import TensorDataset

from devsample import LLCResult, LoaderSpec, estimate_learning_coeff_with_summary

N, D, NOISE = 512, 8, 0.5
NBETA = N / math.log(N)
GAMMA = 1.0
EXACT = 3.936335908474202


@dataclasses.dataclass(frozen=True)
class Regression:
    x: np.ndarray
    y: np.ndarray
    solution: np.ndarray

    @property
    def hessian(self):
        return 2 * self.x.T @ self.x / len(self.x)

    @property
    def curvatures(self):
        return np.linalg.eigvalsh(self.hessian)

    def value(self, nbeta=NBETA, gamma=GAMMA):
        h = self.curvatures
        return float((nbeta * h / (2 * (nbeta * h + gamma))).sum())

    def step_size(self, stiffness, nbeta=NBETA, gamma=GAMMA):
        """ε with ε a_max = stiffness."""
        return float(stiffness / (nbeta * self.curvatures[-1] + gamma))

    def law(self, lr, batch_size, integrator, nbeta=NBETA, gamma=GAMMA, noise_level=1.0):
        """λ̂ of the stationary chain; ``batch_size=None`` for the whole data without choice."""
        x, h, d = self.x, self.hessian, self.x.shape[1]
        residual = self.y - x @ self.solution
        eye = np.eye(d)
        a = eye - lr / 2 * (nbeta * h + gamma * eye)
        size = (lr * nbeta / 2) ** 2 / batch_size if batch_size else 0.0
        fourth = 4 * np.einsum("ij,ik,il,im->jklm", x, x, x, x).reshape(d * d, d * d) / len(x)
        second = 4 * np.einsum("i,ij,ik->jk", residual**2, x, x) / len(x)
        noise = noise_level**2 * (lr * eye if integrator == "euler" else lr / 2 * (eye + a))
        turn = np.kron(a, a) + size * (fourth - np.kron(h, h))
        assert np.abs(np.linalg.eigvals(turn)).max() < 1, "no stationary law at this step"
        s = np.linalg.solve(np.eye(d * d) - turn, (size * second + noise).ravel())
        return float(nbeta / 2 * (h.ravel() @ s))


@functools.cache
def regression(n=N, d=D, low=-0.5, high=0.5) -> Regression:
    random = np.random.RandomState(0)
    x = random.randn(n, d) * np.logspace(low, high, d)
    y = x @ random.randn(d) + NOISE * random.randn(n)
    return Regression(x, y, np.linalg.lstsq(x, y, rcond=None)[0])


def mse(model, batch):
    """One output: mean squared error. Several with the same target: the sum of theirs."""
    outputs = model(batch[0])
    return F.mse_loss(outputs, batch[1].expand_as(outputs)) * outputs.shape[1]


class WholeBatch(torch.nn.Module):
    """L on all data for any batch, as a quadratic form: a gradient without minibatch noise."""

    def __init__(self, problem, copies):
        super().__init__()
        self.register_buffer("hessian", torch.tensor(problem.hessian))
        self.register_buffer("center", torch.tensor(problem.solution))
        self.w = torch.nn.Parameter(torch.tensor(problem.solution).repeat(copies, 1))

    def forward(self, batch):
        offset = self.w - self.center
        return ((offset @ self.hessian) * offset).sum() / 2 + 0 * batch[0][0, 0]


def run(problem, *, batch_size, lr, whole_batch=False, copies=1, **options) -> LLCResult:
    """A run at the least-squares solution.

    With ``copies`` the model has as many outputs, all with the same target: each has the law of
    one alone, λ̂ is their sum, and a step gives the draws of that many.
    """
    model = torch.nn.Linear(problem.x.shape[1], copies, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(problem.solution).expand(copies, -1))
    data = TensorDataset(torch.tensor(problem.x), torch.tensor(problem.y)[:, None])
    kwargs = {"lr": lr, "localization": GAMMA} | options.pop("optimizer_kwargs", {})
    return estimate_learning_coeff_with_summary(
        WholeBatch(problem, copies) if whole_batch else model,
        loader_spec=LoaderSpec(data, batch_size=batch_size),
        evaluate=None if whole_batch else mse,
        optimizer_kwargs=kwargs,
        verbose=False,
        **options,
    )


def check(result, expected, *, se, within=0.02):
    """The estimate is within 4 standard errors and 2 %, and the error bar is small enough to tell."""
    assert result.se < se * expected, f"the error bar is too large: {result.se / expected:.2%}"
    z = (result.llc - expected) / result.se
    assert abs(z) < 4, f"{result.llc:.4f} is {z:+.1f} standard errors from {expected:.4f}"
    assert abs(result.llc / expected - 1) < within, f"{result.llc:.4f} against {expected:.4f}"


# ---- the law itself -----------------------------------------------------------------------------


def test_the_value_is_the_known_one():
    assert regression().value() == pytest.approx(EXACT, rel=1e-12)


@pytest.mark.parametrize(
    ("nbeta", "batch_size", "stiffness", "euler", "averaged"),
    # percent above the value, from an independent computation
    [(512.0, 16, 0.1, 10.20, 9.57), (NBETA, 64, 0.3, 3.40, 1.42)],
)
def test_the_law_has_the_known_bias(nbeta, batch_size, stiffness, euler, averaged):
    problem = regression()
    lr = problem.step_size(stiffness, nbeta)
    for integrator, percent in (("euler", euler), ("averaged", averaged)):
        law = problem.law(lr, batch_size, integrator, nbeta)
        assert 100 * (law / problem.value(nbeta) - 1) == pytest.approx(percent, abs=0.006)


def test_the_law_without_minibatches_is_the_scalar_one():
    problem = regression()
    a = NBETA * problem.curvatures + GAMMA
    lr = problem.step_size(1.0)
    scalar = (NBETA * problem.curvatures / (2 * a * (1 - lr * a / 4))).sum()
    assert problem.law(lr, None, "euler") == pytest.approx(scalar, rel=1e-10)
    assert problem.law(lr, None, "averaged") == pytest.approx(problem.value(), rel=1e-10)


# ---- the estimate -------------------------------------------------------------------------------

# Batches of 512 (drawn with replacement) at ε a_max = 1.5: averaged noise is 1.1 % above the
# value, Euler 14 %. The slowest mode forgets in 1/(ε a_min) = 70 steps; burn-in is 7 times that.
BATCH, STIFFNESS, BURNIN, COPIES = 512, 1.5, 500, 16


def estimate(integrator="averaged", noise_level=1.0, *, steps, seed, copies=COPIES, cores=2):
    problem = regression()
    return run(
        problem,
        batch_size=BATCH,
        lr=problem.step_size(STIFFNESS),
        copies=copies,
        optimizer_kwargs={"integrator": integrator, "noise_level": noise_level},
        num_chains=4,
        num_burnin_steps=BURNIN,
        num_draws=steps // 5,
        num_steps_bw_draws=5,
        seed=seed,
        cores=cores,
    )


def law(integrator="averaged", noise_level=1.0, copies=COPIES):
    problem = regression()
    lr = problem.step_size(STIFFNESS)
    return copies * problem.law(lr, BATCH, integrator, noise_level=noise_level)


@pytest.mark.truths
def test_the_estimate_is_the_laws_value():
    result = estimate(steps=7000, seed=1)
    check(result, law(), se=0.006)
    assert abs(result.llc / (COPIES * EXACT) - 1) < 0.02 + 0.0115  # the step's own 1.15 %
    assert result.verdict == "trust"


@pytest.mark.truths
def test_a_tenth_more_noise_is_noticed():
    """Negative control: a sampler with its noise scaled by 1.1 fails the same check."""
    result = estimate(noise_level=1.1, steps=3000, seed=1)
    with pytest.raises(AssertionError, match="standard errors from"):
        check(result, law(), se=0.02)
    # The noise alone is scaled, so its own law has 1.21 times the noise, not the minibatches'.
    check(result, law(noise_level=1.1), se=0.01, within=0.03)


@pytest.mark.truths
def test_euler_has_its_own_law():
    """The same step is 13 % above with plain noise, and the check tells the two apart."""
    result = estimate("euler", steps=3000, seed=3)
    check(result, law("euler"), se=0.01, within=0.03)
    with pytest.raises(AssertionError, match="standard errors from"):
        check(result, law("averaged"), se=0.02)


@pytest.mark.truths
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("integrator", ["averaged", "euler"])
def test_a_single_regression_is_the_laws_value(integrator):
    """The problem as it is, without copies: 500 000 steps for half a percent."""
    result = estimate(integrator, steps=125_000, seed=2, copies=1)
    check(result, law(integrator, copies=1), se=0.006)


@pytest.mark.truths
@pytest.mark.parametrize("integrator", ["averaged", "euler"])
def test_full_batch_steps_of_a_quadratic(integrator):
    """ε a_max = 1: averaged noise is exact, Euler is at Σ nβ h/(2 a (1 − ε a/4))."""
    problem = regression(n=64, d=4, low=-0.1, high=0.1)
    lr = problem.step_size(1.0, nbeta=20.0)
    copies = 50
    result = run(
        problem,
        batch_size=1,
        lr=lr,
        whole_batch=True,
        copies=copies,
        optimizer_kwargs={"integrator": integrator, "nbeta": 20.0},
        num_chains=2,
        num_burnin_steps=100,
        num_draws=800,
        num_steps_bw_draws=3,
        seed=4,
    )
    exact = copies * problem.value(nbeta=20.0)
    expected = copies * problem.law(lr, None, integrator, nbeta=20.0)
    check(result, expected, se=0.006)
    if integrator == "averaged":
        assert expected == pytest.approx(exact, rel=1e-10)
    else:
        assert expected > 1.1 * exact
        with pytest.raises(AssertionError, match="standard errors from"):
            check(result, exact, se=0.02)


# ---- the error bar ------------------------------------------------------------------------------


@functools.cache
def many_runs(count, draws, between=1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Errors of short runs with seeds of their own, their error bars, and naive ones.

    All curvatures are alike here: neighbouring states have correlation 1 − ε a/2 = 0.85, their
    squares 0.72, so that one draw in six is an independent one. Four chains: noise that they shared
    would make the spread of their mean twice as wide as the bars.
    """
    problem = regression(n=128, d=3, low=-0.05, high=0.05)
    lr = problem.step_size(0.3, nbeta=40.0)
    results = [
        run(
            problem,
            batch_size=64,
            lr=lr,
            optimizer_kwargs={"nbeta": 40.0},
            num_chains=4,
            num_burnin_steps=60,
            num_draws=draws,
            num_steps_bw_draws=between,
            seed=100 + seed,
        )
        for seed in range(count)
    ]
    expected = problem.law(lr, 64, "averaged", nbeta=40.0)
    errors = np.array([one.llc for one in results]) - expected
    bars = np.array([one.se for one in results])
    naive = np.array([one.draws["llc"].sem() for one in results])
    return errors, bars, naive


def check_error_bars(errors, bars):
    """Σ error² / Σ bar² is χ²/count if the bars are right; their own errors add a tenth."""
    count = len(errors)
    lowest, highest = stats.chi2(count).ppf([1e-4, 1 - 1e-4]) / count
    ratio = float((errors**2).mean() / (bars**2).mean())
    assert lowest / 1.1 < ratio < 1.1 * highest, f"spread²/bar² is {ratio:.2f}"


@pytest.mark.truths
def test_error_bars_are_as_wide_as_the_spread_over_seeds():
    errors, bars, _ = many_runs(30, 150)
    check_error_bars(errors, bars)
    assert abs(errors.mean()) < 4 * errors.std(ddof=1) / math.sqrt(30)  # and unbiased


@pytest.mark.truths
def test_wrong_error_bars_are_noticed():
    """Negative control: draws taken for independent, and bars that are twice as wide."""
    errors, bars, naive = many_runs(30, 150)
    with pytest.raises(AssertionError, match="spread²/bar²"):
        check_error_bars(errors, naive)
    with pytest.raises(AssertionError, match="spread²/bar²"):
        check_error_bars(errors, 2 * bars)


@pytest.mark.truths
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("draws", "between"), [(150, 1), (60, 6)])
def test_error_bars_over_a_hundred_seeds(draws, between):
    errors, bars, _ = many_runs(100, draws, between)
    check_error_bars(errors, bars)
    coverage = float((np.abs(errors) < 1.96 * bars).mean())
    assert coverage > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 100)
