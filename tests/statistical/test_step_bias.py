"""The bias from the step size, measured by reruns at lr and lr/2, against the exact law of both steps.

The linear regression of `test_linear_regression`, and for samplers with a memory, z = (w − w*, memory), in
the same way: it moves as z⁺ = T z + K ξ + c R, ξ the error of the minibatch's gradient, so that

    E[z zᵀ] = T E[z zᵀ] Tᵀ + K (M(S) − H S H + C) Kᵀ / B + c cᵀ,    S the part of E[z zᵀ] for w.
"""

import dataclasses
import math
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch

from devsample import SGHMC, SGLD, AdamSGLD, RMSPropSGLD
from devsample.observables import StepBias
from devsample.rerun import DROPPED, Pair
from devsample.seeds import NormalBlocks, Role, chain_keys
from tests.statistical.test_linear_regression import GAMMA, NBETA, D, regression, run

MOMENT = np.linspace(0.0, 1.0, D)  # √v of RMSProp, in the direction of growing curvature
BATCH, STIFFNESS = 16, 0.3

# ---- the laws -----------------------------------------------------------------------------------


def stationary(turn, kick, noise, batch_size):
    """λ̂ of a linear chain whose first D entries are w − w*."""
    problem = regression()
    x, h, size = problem.x, problem.hessian, len(turn)
    residual = problem.y - x @ problem.solution
    fourth = 4 * np.einsum("ij,ik,il,im->jklm", x, x, x, x).reshape(D * D, D * D) / len(x)
    second = 4 * np.einsum("i,ij,ik->jk", residual**2, x, x) / len(x)
    weights = np.eye(D, size)
    map_ = np.kron(turn, turn)
    map_ += np.kron(kick, kick) @ (fourth - np.kron(h, h)) @ np.kron(weights, weights) / batch_size
    assert np.abs(np.linalg.eigvals(map_)).max() < 1, "no stationary law at this step"
    constant = kick @ second @ kick.T / batch_size + noise @ noise.T
    s = np.linalg.solve(np.eye(size**2) - map_, constant.ravel()).reshape(size, size)
    return float(NBETA / 2 * np.trace(h @ s[:D, :D]))


def sghmc_law(lr, friction):
    """v ← v − h ∇U, w ← w + h/2 v, v ← κ v + √(1 − κ²) R, w ← w + h/2 v."""
    one, h, kept = np.eye(D), math.sqrt(lr), 1 - friction
    slope = NBETA * regression().hessian + GAMMA * one
    out, sigma = h / 2 * (1 + kept), math.sqrt(1 - kept**2)
    turn = np.block([[one - h * out * slope, out * one], [-kept * h * slope, kept * one]])
    kick = np.vstack([-h * out * NBETA * one, -kept * h * NBETA * one])
    return stationary(turn, kick, np.vstack([h / 2 * sigma * one, sigma * one]), BATCH)


def adam_law(lr, momentum, eps=0.1):
    """M ← β M + (1 − β) g, w ← w − ε/2 G (nβ M + γ (w − w*)) + √(ε G) (R + R')/2; the memory is M and R."""
    one, nothing, scale = np.eye(D), np.zeros((D, D)), np.diag(1 / (MOMENT + eps))
    new, half, root = 1 - momentum, lr / 2 * scale, np.sqrt(lr * scale)
    h = regression().hessian
    turn = np.block(
        [
            [one - half @ (NBETA * new * h + GAMMA * one), -NBETA * momentum * half, root / 2],
            [new * h, momentum * one, nothing],
            [nothing, nothing, nothing],
        ]
    )
    kick = np.vstack([-NBETA * new * half, new * one, nothing])
    return stationary(turn, kick, np.vstack([root / 2, nothing, one]), BATCH)


def test_the_laws_without_memory_are_the_known_one():
    problem = regression()
    lr = problem.step_size(STIFFNESS)
    law = problem.law(lr, BATCH, "averaged")
    assert sghmc_law(lr, 1.0) == pytest.approx(law, rel=1e-10)
    assert adam_law(lr, 0.5) > adam_law(lr, 0.0) > problem.value()


# ---- many pairs, with a loss of their own -------------------------------------------------------


class Squares:
    """Mean squared error of the rows' batches, given as indices (K, B); None: of all data, without choice."""

    def __init__(self, position):
        problem = regression()
        self.x, self.y = torch.tensor(problem.x), torch.tensor(problem.y)
        self.hessian, self.center = torch.tensor(problem.hessian), torch.tensor(problem.solution)
        self.position = position

    def losses_and_gradients(self, gradient, batches, _step):
        if batches is None:
            offset = self.position - self.center
            torch.matmul(offset, self.hessian, out=gradient)
            return (gradient * offset).sum(1) / 2
        x = self.x[batches]
        residual = torch.einsum("kbd,kd->kb", x, self.position) - self.y[batches]
        torch.mul(torch.einsum("kb,kbd->kd", residual, x), 2 / batches.shape[1], out=gradient)
        return residual.square().mean(1)


class Difference(NamedTuple):
    """λ̂(lr) − λ̂(lr/2) over many rows."""

    value: float
    se: float


def measure(kernel, batch_size, *, rows, steps, seed=0, reuse=False, change=lambda pair: None):
    """Pairs from the posterior; the first third of the steps is left out."""
    problem, random = regression(), torch.Generator().manual_seed(seed)
    center = torch.tensor(problem.solution)
    precision = NBETA * torch.tensor(problem.hessian) + GAMMA * torch.eye(D)
    spread = torch.linalg.cholesky(torch.linalg.inv(precision))
    start = center + torch.randn(rows, D, generator=random, dtype=torch.float64) @ spread.T
    buffers = kernel.init(start)
    if kernel.adapts:
        buffers["second_moment"] = torch.tensor(MOMENT**2).expand(rows, -1).clone()
        buffers["count"].fill_(1e6)
        kernel.freeze(buffers)
    normals = NormalBlocks(chain_keys(seed, rows), D, torch.float64, start.device, Role.RERUN)
    pair = Pair(kernel, center, start, buffers, normals, Squares)
    change(pair)
    total = torch.zeros(rows, dtype=torch.float64)

    def batch():
        return None if batch_size is None else torch.randint(512, (rows, batch_size), generator=random)

    for number in range(steps):
        first = batch()
        values = pair.step(number, first, first if reuse else batch())
        if number >= steps // DROPPED:
            total += kernel.nbeta * values
    means = total / (steps - steps // DROPPED)
    return Difference(float(means.mean()), float(means.std()) / math.sqrt(rows))


def check(measured, expected, *, most):
    """Within 4 standard errors, which are at most this share of what is expected."""
    assert measured.se <= most * abs(expected), f"the error bar is too large: {measured.se / expected:.2%}"
    z = (measured.value - expected) / measured.se
    assert abs(z) < 4, f"{measured.value:.5f} is {z:+.1f} standard errors from {expected:.5f}"


def made(kind, lr, **options):
    return kind.kernel(lr=lr, nbeta=NBETA, localization=GAMMA, **options)


def halving(law, lr):
    """λ̂(lr) − λ̂(lr/2)."""
    return law(lr) - law(lr / 2)


def regression_law(integrator, batch_size=BATCH):
    return lambda lr: regression().law(lr, batch_size, integrator)


@pytest.mark.parametrize("integrator", ["averaged", "euler"])
def test_sgld_with_minibatches(integrator):
    lr = regression().step_size(STIFFNESS)
    found = measure(made(SGLD, lr, integrator=integrator), BATCH, rows=512, steps=240)
    check(found, halving(regression_law(integrator), lr), most=0.08)


def test_euler_steps_without_minibatches():
    lr = regression().step_size(0.5)
    found = measure(made(SGLD, lr, integrator="euler"), None, rows=128, steps=240)
    check(found, halving(regression_law("euler", None), lr), most=0.03)


def test_averaged_noise_without_minibatches_has_no_bias():
    lr = regression().step_size(0.5)
    found = measure(made(SGLD, lr), None, rows=256, steps=240)
    assert abs(found.value) < 4 * found.se < 0.01 * regression().value()


@pytest.mark.parametrize("friction", [0.3, 1.0])
def test_sghmc_at_the_same_friction(friction):
    lr = regression().step_size(STIFFNESS * friction)
    found = measure(made(SGHMC, lr, friction=friction), BATCH, rows=512, steps=240)
    check(found, halving(lambda lr: sghmc_law(lr, friction), lr), most=0.09)


def test_rmsprop_with_a_frozen_preconditioner():
    lr = regression().step_size(STIFFNESS)
    found = measure(made(RMSPropSGLD, lr), BATCH, rows=512, steps=240)
    check(found, halving(lambda lr: adam_law(lr, 0.0), lr), most=0.09)


def test_adam_with_a_frozen_preconditioner():
    """Its averaged gradient gives it a bias of first order, many times that of the minibatches."""
    lr = regression().step_size(STIFFNESS / 10)
    found = measure(made(AdamSGLD, lr), BATCH, rows=256, steps=500)
    check(found, halving(lambda lr: adam_law(lr, 0.9), lr), most=0.1)


# ---- negative controls --------------------------------------------------------------------------


def same_lr(pair):
    pair.fine.kernel = pair.coarse.kernel


def more_noise(pair):
    pair.coarse.kernel = dataclasses.replace(pair.coarse.kernel, noise_level=1.05)


@pytest.mark.parametrize(
    "mistake",
    [{"change": same_lr}, {"change": more_noise}, {"reuse": True}],
    ids=["lr in the place of lr/2", "5 % more noise", "one batch for both steps"],
)
def test_a_mistake_in_the_rerun_is_noticed(mistake):
    """Negative control: the check that a right rerun passes fails."""
    lr = regression().step_size(STIFFNESS)
    found = measure(made(SGLD, lr), BATCH, rows=512, steps=240, **mistake)
    with pytest.raises(AssertionError, match="standard errors from"):
        check(found, halving(regression_law("averaged"), lr), most=0.5)


# ---- runs ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.truths
def test_a_run_measures_its_own_bias_and_says_what_to_do():
    """At ε a_max = 0.8 and batches of 16, 17 % above the target; the rerun is as long as the draws."""
    problem, copies, steps = regression(), 16, 500
    lr = problem.step_size(0.8)
    result = run(
        problem,
        batch_size=BATCH,
        lr=lr,
        copies=copies,
        num_chains=8,
        chains_per_process=8,
        num_draws=steps,
        num_burnin_steps=200,
        observables=[StepBias(steps)],
        seed=0,
    )
    found, exact = result.measured_bias, copies * 2 * halving(regression_law("averaged"), lr)
    check(Difference(found.value, found.se), exact, most=0.1)
    assert found.se < result.se  # noise and batches in common are worth it
    text = next(one.text for one in result.findings if one.kind == "step bias")
    fit = float(re.search(r"lower lr from \S+ to (\S+)\.$", text).group(1))
    better = problem.law(fit, BATCH, "averaged") / problem.value() - 1
    assert 0.03 < better < 0.06, "at the lr that it names, the bias is about 5 %"
