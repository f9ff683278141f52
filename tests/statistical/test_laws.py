"""Laws of the bias: what a sampler's chain converges to at a finite step and with minibatches.

Every expected number is computed. On a loss that is quadratic around w* a step is linear in the state z
(w − w*, and what else the sampler keeps), so its second moment S solves a linear equation

    S = T S Tᵀ + N Nᵀ + K Cov(ξ) Kᵀ

with T the step without noise, N its factor of the injected noise and K that of the gradient's error ξ. A
batch of B samples drawn independently has Cov(ξ) = (M(W) − H W H + C)/B, W the block of S that is w's,
M(W) = 4 mean_i (x_iᵀ W x_i) x_i x_iᵀ and C = 4 mean_i r_i² x_i x_iᵀ, r the residuals at w*. The control
variate g_B(w) − g_B(w*) + g(w*) takes C out.
"""

import functools
import math

import pytest
import torch

from devsample.samplers import SAMPLERS
from devsample.testing import case
from devsample.testing.potentials import Quadratic
from tests.statistical import test_linear_regression
from tests.statistical.chains import Reading, around_center, chains, check, read

pytestmark = pytest.mark.truths

# ---- the laws -----------------------------------------------------------------------------------


def second_moment(step):
    """S = step(S) for an affine ``step`` of matrices."""

    def solve(size):
        zero = torch.zeros(size, size, dtype=torch.float64)
        turn = torch.autograd.functional.jacobian(step, zero).reshape(size**2, size**2)
        assert torch.linalg.eigvals(turn).abs().max() < 1, "no stationary law at this step"
        system = torch.eye(size**2, dtype=torch.float64) - turn
        return torch.linalg.solve(system, step(zero).flatten()).view(size, size)

    return solve


def linear_step(kernel, hessian, scale=1.0):
    """T, N and K of a kernel whose preconditioner, if it has one, is fixed at ``scale``."""
    size = len(hessian)
    eye = torch.eye(size, dtype=torch.float64)
    zero = torch.zeros_like(eye)
    pull = kernel.nbeta * hessian + kernel.localization * eye
    name = type(kernel).__name__
    if name == "SGHMCKernel":  # z = (w, v)
        h, kept = math.sqrt(kernel.lr), 1 - kernel.friction
        kick = torch.cat([zero, eye]) * -h * kernel.nbeta
        turn = torch.cat([torch.cat([eye, zero], 1), torch.cat([-h * pull, eye], 1)])
        drift = torch.cat([torch.cat([eye, h / 2 * eye], 1), torch.cat([zero, eye], 1)])
        damp = torch.block_diag(eye, kept * eye)
        noise = torch.cat([zero, eye]) * math.sqrt(1 - kept**2)
        return drift @ damp @ drift @ turn, drift @ noise, drift @ damp @ drift @ kick
    half, root = kernel.lr * scale / 2, math.sqrt(kernel.lr * scale)
    if name == "AdamSGLDKernel":  # z = (w, m), plain noise
        assert kernel.integrator == "euler"
        kept = kernel.momentum
        moment = torch.cat([(1 - kept) * hessian, kept * eye], 1)
        forced = torch.cat([eye - half * kernel.localization * eye, zero], 1) - half * kernel.nbeta * moment
        kick = torch.cat([-half * kernel.nbeta * (1 - kept) * eye, (1 - kept) * eye])
        return torch.cat([forced, moment]), torch.cat([root * eye, zero]), kick
    turn, kick = eye - half * pull, -half * kernel.nbeta * eye
    if kernel.integrator == "euler":
        return turn, root * eye, kick
    turn = torch.cat([torch.cat([turn, root / 2 * eye], 1), torch.cat([zero, zero], 1)])  # z = (w, R_k)
    return turn, torch.cat([root / 2 * eye, eye]), torch.cat([kick, zero])


def law(kernel, hessian, scale=1.0, covariance=None):
    """λ̂ of the stationary chain; ``covariance`` of the gradient's error is a function of E (w−w*)(w−w*)ᵀ."""
    size = len(hessian)
    turn, noise, kick = linear_step(kernel, hessian, scale)

    def step(s):
        forced = turn @ s @ turn.T + noise @ noise.T
        if covariance is not None:
            forced = forced + kick @ covariance(s[:size, :size]) @ kick.T
        return forced

    s = second_moment(step)(len(turn))
    return float(kernel.nbeta / 2 * (hessian * s[:size, :size]).sum())


class Minibatches:
    """Gradients of a linear regression on batches drawn independently, for every row and step.

    Also their covariance. With the control variate, g_B(w) − g_B(w*) + g(w*) is the gradient of the
    same batch without its residuals, since g(w*) = 0.
    """

    def __init__(self, potential, batch_size, *, control_variate=False, seed=0):
        self.x, self.batch_size, self.seed = potential.x, batch_size, seed
        self.center, self.hessian = potential.center, potential.hessian(potential.center[None])[0]
        residual = potential.y - potential.x @ potential.center
        self.residual = torch.zeros_like(residual) if control_variate else residual
        self.random = torch.Generator()

    def __call__(self, w, step):
        self.random.manual_seed(self.seed << 32 | step)
        rows = torch.randint(len(self.x), (len(w), self.batch_size), generator=self.random)
        x = self.x[rows]
        miss = (x @ (w - self.center).unsqueeze(2)).squeeze(2) - self.residual[rows]
        return (miss.unsqueeze(1) @ x).squeeze(1) * (2 / self.batch_size)

    def covariance(self, w):
        weights = ((self.x @ w) * self.x).sum(1) + self.residual**2
        spread = 4 * (self.x.T * weights) @ self.x / len(self.x)
        return (spread - self.hessian @ w @ self.hessian) / self.batch_size


@functools.cache
def regression():
    return case("linreg_n512_d8").potential


def regression_kernel(name, nbeta, stiffness, **values):
    """A kernel with ε a_max = ``stiffness`` on the regression, γ = 1."""
    largest = nbeta * float(regression().hessian_max(regression().center[None])) + 1.0
    return SAMPLERS[name].kernel(lr=stiffness / largest, nbeta=nbeta, localization=1.0, **values)


def regression_law(kernel, batch_size=None, control_variate=False):
    hessian = regression().hessian(regression().center[None])[0]
    batches = batch_size and Minibatches(regression(), batch_size, control_variate=control_variate)
    return law(kernel, hessian, covariance=batches.covariance if batches else None)


# ---- the step: a Gaussian with precisions over two decades --------------------------------------

SPREAD = Quadratic(torch.logspace(-2, 0, 10, dtype=torch.float64).tolist())
CURVATURES = torch.logspace(-2, 0, 10, dtype=torch.float64)
NBETA, GAMMA = 1000.0, 1.0
PRECISIONS = NBETA * CURVATURES + GAMMA
EXACT = float((NBETA * CURVATURES / (2 * PRECISIONS)).sum())


def spread(integrator, stiffness, rows=1000, **values):
    """SGLD with ε a_max = ``stiffness``, from the exact law."""
    lr = stiffness / float(PRECISIONS.max())
    kernel = SAMPLERS["SGLD"].kernel(lr=lr, nbeta=NBETA, localization=GAMMA, integrator=integrator, **values)
    start = around_center(SPREAD, rows, PRECISIONS)
    return chains(SPREAD, kernel, rows, seed=1, start=start)


def euler(stiffness):
    lr = stiffness / float(PRECISIONS.max())
    return float((NBETA * CURVATURES / (2 * PRECISIONS * (1 - lr * PRECISIONS / 4))).sum())


def test_averaged_noise_is_exact_at_a_stiffness_of_two_where_euler_is_a_fifth_off():
    assert euler(2.0) / EXACT - 1 == pytest.approx(0.19, abs=0.01)
    right = read(spread("averaged", 2.0), NBETA, burnin=400, draws=320, between=8)
    check(right, EXACT, most=0.0016, within=0.005)
    wrong = read(spread("euler", 2.0), NBETA, burnin=400, draws=100, between=8)
    check(wrong, euler(2.0), most=0.003)
    with pytest.raises(AssertionError, match="standard errors from"):
        check(wrong, EXACT, most=0.003)


@pytest.mark.parametrize("stiffness", [0.5, 1.0, 2.0])
def test_eulers_bias_is_its_law(stiffness):
    between = round(8 / stiffness)
    expected = euler(stiffness)
    assert expected > 1.02 * EXACT
    reading = read(spread("euler", stiffness), NBETA, burnin=60 * between, draws=150, between=between)
    check(reading, expected, most=0.003)


def test_the_step_rules_first_order_is_eulers_law():
    kernel = spread("euler", 0.05, rows=1).kernel
    first = kernel.step_bias * kernel.lr / 8 * NBETA * float(SPREAD.hessian_trace(torch.zeros(1, 10)))
    assert euler(0.05) - EXACT == pytest.approx(first, rel=0.02)
    assert spread("averaged", 0.05, rows=1).kernel.step_bias == 0


@pytest.mark.parametrize("integrator", ["averaged", "euler"])
def test_the_matrix_law_is_the_scalar_one(integrator):
    found = law(spread(integrator, 2.0, rows=1).kernel, torch.diag(CURVATURES))
    assert found == pytest.approx(EXACT if integrator == "averaged" else euler(2.0), rel=1e-10)


# ---- minibatches --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbeta", "batch_size", "stiffness", "percents"),
    [(512.0, 16, 0.1, (10.20, 9.57, 0.97, 0.34)), (512 / math.log(512), 64, 0.3, (3.40, 1.42, 2.25, 0.26))],
)
def test_the_law_of_minibatches(nbeta, batch_size, stiffness, percents):
    """Percent above the exact value: Euler, averaged, and both with control variate."""
    kernels = [regression_kernel("SGLD", nbeta, stiffness, integrator=one) for one in ("euler", "averaged")]
    exact = regression_law(kernels[1])
    if batch_size == 64:
        assert exact == pytest.approx(case("linreg_n512_d8").expected, rel=1e-12)
    found = [
        100 * (regression_law(kernel, batch_size, variate) / exact - 1)
        for variate in (False, True)
        for kernel in kernels
    ]
    assert found == pytest.approx(percents, abs=0.006)


def regression_chains(kernel, batch_size, rows, control_variate=False):
    gradient = Minibatches(regression(), batch_size, control_variate=control_variate, seed=3)
    hessian = regression().hessian(regression().center[None])[0]
    eye = torch.eye(len(hessian), dtype=torch.float64)
    root = torch.linalg.cholesky(torch.linalg.inv(kernel.nbeta * hessian + eye))
    random = torch.Generator().manual_seed(4)
    z = torch.randn(rows, len(hessian), generator=random, dtype=torch.float64)
    start = regression().center + z @ root.T  # the law of exact gradients
    return chains(regression(), kernel, rows, seed=5, start=start, gradient=gradient)


@pytest.mark.parametrize("control_variate", [False, True])
@pytest.mark.parametrize("integrator", ["averaged", pytest.param("euler", marks=pytest.mark.slow)])
def test_minibatches_widen_sgld_by_their_law(integrator, control_variate):
    """ε a_max = 1 with B = 16: each of the four laws is told from the others and from full batches."""
    kernels = [regression_kernel("SGLD", 512.0, 1.0, integrator=one) for one in ("averaged", "euler")]
    kernel = next(one for one in kernels if one.integrator == integrator)
    expected = regression_law(kernel, 16, control_variate)
    others = [regression_law(kernel)]
    others += [regression_law(one, 16, variate) for one in kernels for variate in (False, True)]
    assert sorted(abs(one / expected - 1) for one in others)[1] > 0.03  # [0] is this one
    drive = regression_chains(kernel, 16, 500, control_variate)
    check(read(drive, 512.0, burnin=800, draws=130, between=20), expected, most=0.006)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("control_variate", "percent"), [(False, 9.57), (True, 0.34)])
def test_small_minibatches_and_the_control_variate(control_variate, percent):
    """B = 16, nβ = n, ε a_max = 0.1, to 0.2 %."""
    kernel = regression_kernel("SGLD", 512.0, 0.1)
    exact, expected = regression_law(kernel), regression_law(kernel, 16, control_variate)
    assert 100 * (expected / exact - 1) == pytest.approx(percent, abs=0.006)
    drive = regression_chains(kernel, 16, 1024, control_variate)
    reading = read(drive, 512.0, burnin=6000, draws=900, between=40)
    check(reading, expected, most=0.002)


def test_the_control_variate_of_a_run_has_its_law():
    """By the public function, with 16 copies of the regression in one model."""
    kernel = regression_kernel("SGLD", 512.0, 1.0)
    exact, without, expected = (16 * regression_law(kernel, *one) for one in [(), (16, False), (16, True)])
    assert 1.03 * exact < expected < without / 2
    result = test_linear_regression.run(
        test_linear_regression.regression(),
        batch_size=16,
        lr=kernel.lr,
        copies=16,
        optimizer_kwargs={"nbeta": 512.0, "control_variate": True},
        num_chains=4,
        num_burnin_steps=300,
        num_draws=600,
        num_steps_bw_draws=5,
        seed=1,
    )
    check(Reading(result.llc, result.se), expected, most=0.02, within=0.05)


@pytest.mark.parametrize("friction", [pytest.param(0.1, marks=pytest.mark.slow), 0.2])
def test_minibatches_widen_sghmc_by_its_speed(friction):
    """The exact law, and that its first order is SGLD's times the speed."""
    small, sgld = (
        regression_kernel(name, 512.0, 1e-4, **values)
        for name, values in (("SGHMC", {"friction": friction}), ("SGLD", {}))
    )
    exact = regression_law(sgld)
    excess = [regression_law(one, 64, control_variate=False) - exact for one in (small, sgld)]
    assert excess[0] == pytest.approx(small.speed * excess[1], rel=0.01)

    kernel = regression_kernel("SGHMC", 512.0, 0.1, friction=friction)
    expected = regression_law(kernel, 64)
    assert expected > 1.02 * exact
    drive = regression_chains(kernel, 64, 400)
    steps = math.ceil(200 / kernel.speed)
    check(read(drive, 512.0, burnin=10 * steps, draws=70, between=steps), expected, most=0.006)


# ---- preconditioners ----------------------------------------------------------------------------


NARROW = torch.tensor([0.4, 0.7, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("form", ["hitchcock", pytest.param("devinterp", marks=pytest.mark.slow)])
def test_adams_averaged_drift_has_the_bias_of_its_law(form):
    """With the preconditioner that burn-in has come to in each row, ε G a ≤ 0.08.

    The excess is about (ε G a/2) β₁/(1 − β₁), 18 times Euler's, and Euler's own.
    """
    potential, precisions = Quadratic(NARROW.tolist()), NBETA * NARROW + GAMMA
    lr = 0.08 * 0.1 / float(precisions.max())  # G ≤ 1/eps
    kernel = SAMPLERS["AdamSGLD"].kernel(
        lr=lr, nbeta=NBETA, localization=GAMMA, form=form, integrator="euler"
    )
    drive = chains(potential, kernel, 1000, seed=6, start=around_center(potential, 1000, precisions))
    drive.advance(500)
    drive.freeze()
    scale = drive.buffers["scale"]
    assert 0.03 < float((lr * scale * precisions).max()) <= 0.08
    expected = float(sum(laws_of_scales(kernel, *pair) for pair in zip(NARROW, scale.T, strict=True)))
    exact = float((NBETA * NARROW / (2 * precisions)).sum())
    first = float((lr * scale * NBETA * NARROW / 8).sum(1).mean()) * kernel.step_bias
    assert expected - exact == pytest.approx(first, rel=0.1)
    assert expected > 1.1 * exact
    check(read(drive, NBETA, burnin=500, draws=200, between=20), expected, most=0.005)


def laws_of_scales(kernel, curvature, scale):
    """Mean of λ̂ over frozen preconditioners (K,) of one direction: a parabola through three laws."""
    nodes = torch.linspace(float(scale.min()), float(scale.max()), 3, dtype=torch.float64)
    laws = torch.tensor([law(kernel, curvature.view(1, 1), float(one)) for one in nodes], dtype=torch.float64)
    powers = torch.arange(3)
    coefficients = torch.linalg.solve(nodes[:, None] ** powers, laws)
    return (scale[:, None] ** powers @ coefficients).mean()


@pytest.mark.parametrize("form", [pytest.param("hitchcock", marks=pytest.mark.slow), "devinterp"])
def test_a_moving_preconditioner_does_not_converge_and_a_frozen_one_does(form):
    """One Gaussian: the bias of a moving preconditioner grows as the step shrinks.

    With steps so small that v follows the gradient, its law tends to (|g| + a) e^{−U}.
    """
    one = case("quad_1d")
    w = torch.linspace(-1, 1, 100_001, dtype=torch.float64)
    weight = (w.abs() + 0.1) * torch.exp(-(one.nbeta + one.gamma) * w**2 / 2)
    limit = float((weight * one.nbeta * w**2 / 2).sum() / weight.sum())
    excess = {}
    for preconditioner in ("frozen", "moving"):
        for lr in (1e-3, 2.5e-4):
            kernel = SAMPLERS["RMSPropSGLD"].kernel(
                lr=lr,
                nbeta=one.nbeta,
                localization=one.gamma,
                alpha=0.9,
                form=form,
                preconditioner=preconditioner,
            )
            start = around_center(one.potential, 1000, one.nbeta + one.gamma)
            drive = chains(one.potential, kernel, 1000, seed=7, start=start)
            reading = read(drive, one.nbeta, burnin=800, draws=300, between=round(0.005 / lr))
            if preconditioner == "frozen":
                check(reading, one.expected, most=0.006)
            assert reading.se < 0.006 * one.expected
            excess[preconditioner, lr] = reading.value / one.expected - 1
    assert 0.05 < excess["moving", 1e-3] + 0.05 < excess["moving", 2.5e-4] < limit / one.expected - 1
