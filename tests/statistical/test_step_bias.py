"""The bias from the step size, measured by a rerun at lr/2, against the exact law of both steps."""

import dataclasses
import math

import pytest
import torch

from devsample import SGHMC, SGLD, AdamSGLD, RMSPropSGLD
from devsample.rerun import DROPPED, Pair
from devsample.seeds import NormalBlocks, Role, chain_keys
from tests.statistical.test_linear_regression import GAMMA, NBETA, regression

# ---- pairs of many rows, with their own evaluator -----------------------------------------------


class Squares:
    """Mean squared error of the rows' batches, given as indices (K, B); None: of all data, without choice."""

    def __init__(self, position):
        problem = regression()
        self.x, self.y = torch.tensor(problem.x), torch.tensor(problem.y)
        self.position = position
        self.center = torch.tensor(problem.solution)
        self.hessian = torch.tensor(problem.hessian)

    def losses_and_gradients(self, gradient, batches, step):
        if batches is None:
            offset = self.position - self.center
            torch.matmul(offset, self.hessian, out=gradient)
            return (gradient * offset).sum(1) / 2
        x = self.x[batches]
        residual = torch.einsum("kbd,kd->kb", x, self.position) - self.y[batches]
        torch.mul(torch.einsum("kb,kbd->kd", residual, x), 2 / batches.shape[1], out=gradient)
        return residual.square().mean(1)


def difference(kernel, batch_size, *, rows, steps, seed=0, change=None):
    """Mean and standard error of λ̂(lr) − λ̂(lr/2), and the spread of a row's mean."""
    problem, random = regression(), torch.Generator().manual_seed(seed)
    center = torch.tensor(problem.solution)
    spread = torch.linalg.cholesky(
        torch.linalg.inv(kernel.nbeta * torch.tensor(problem.hessian) + GAMMA * torch.eye(8))
    )
    start = center + torch.randn(rows, 8, generator=random, dtype=torch.float64) @ spread.T
    buffers = kernel.init(start)
    normals = NormalBlocks(chain_keys(seed, rows), 8, torch.float64, start.device, Role.RERUN)
    if kernel.adapts:
        buffers["second_moment"] = torch.linspace(0.0, 1.0, 8).double().expand(rows, -1).clone()
        buffers["count"].fill_(1e6)
        kernel.freeze(buffers)
    pair = Pair(kernel, center, start, buffers, normals, Squares)
    if change is not None:
        change(pair)
    total = torch.zeros(rows, dtype=torch.float64)
    for number in range(steps):
        batches = [
            None if batch_size is None else torch.randint(512, (rows, batch_size), generator=random)
            for _ in range(2)
        ]
        values = pair.step(number, *batches)
        if number >= steps // DROPPED:
            total += kernel.nbeta * values
    means = total / (steps - steps // DROPPED)
    return float(means.mean()), float(means.std()) / math.sqrt(rows), float(means.std())


def check(measured, expected, *, most):
    """Within 4 standard errors, which are at most this share of what is expected."""
    value, se, _ = measured
    assert se <= most * abs(expected), f"the error bar is too large: {se / expected:.2%}"
    z = (value - expected) / se
    assert abs(z) < 4, f"{value:.5f} is {z:+.1f} standard errors from {expected:.5f}"
