"""Whether w* is at a minimum: how far one step of steepest descent lowers nβ L_n.

A chain that starts beside a minimum walks down to it, and the estimate lacks what L_n loses on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from devsample.errors import EvaluateError
from devsample.flat import squared_norm
from devsample.probes import Probe

_CURVATURE_STEPS = 4
_TRUSTED = 2.0  # a drop this many times the one that is seen is not believed
_LONGEST = 1.0  # length of the step, relative to |w*|


@dataclass(frozen=True)
class Descent:
    r"""What one step of steepest descent from w* does.

    .. math:: -t \nabla L_n(w^*), \qquad t = \frac{n\beta}{n\beta h + \gamma}, \qquad
        \mathrm{drop} = n\beta\, |\nabla L_n|^2\, t\, (1 - t h / 2)

    h is the curvature along the gradient, and t the exact line search of nβ L_n + γ/2 |w − w*|². On a
    quadratic loss the estimate is too low by the drop, and by what further steps would add.

    Attributes:
        drop: by which it lowers nβ L_n, ≥ 0.
        square: |∇L_n(w*)|², or its unbiased estimate, which may be negative.
        error: standard error of that; 0 if the gradient is that of all data.
        curvature: h; 0 where there is no gradient.
    """

    drop: float
    square: float
    error: float
    curvature: float


def measure_descent(
    probe: Probe, center: torch.Tensor, *, nbeta: float, pull: float, gradient: torch.Tensor | None
) -> Descent:
    """Measure it in about 24 gradients, or 8 if the gradient is given.

    Args:
        probe: measures on a few steps of batches.
        center: w*, shape (P,).
        nbeta: nβ.
        pull: γ + μ.
        gradient: ∇L_n(w*) of all data, shape (P,), if that is known; else it is estimated.
    """
    if gradient is None:
        gradient, square, error = squared_mean(lambda: probe.gradients(center))
    else:
        square, error = squared_norm(gradient), 0.0
    norm = math.sqrt(squared_norm(gradient))
    if not (math.isfinite(square) and math.isfinite(error) and norm < math.inf):
        return Descent(0.0, 0.0, 0.0, 0.0)
    if square <= 0 or norm == 0:
        return Descent(0.0, square, error, 0.0)
    image = probe.times_hessian(center, gradient, steps=_CURVATURE_STEPS)
    curvature = _dot(gradient, image) / norm**2
    if curvature <= 0:  # along a saddle's way down there is no minimum: be careful
        curvature = math.sqrt(squared_norm(image)) / norm
    longest = _LONGEST * max(math.sqrt(squared_norm(center)), 1.0) / norm
    stiffness = nbeta * curvature + pull
    length = min(nbeta / stiffness, longest) if stiffness > 0 else longest
    drop = nbeta * square * length * (1 - length * curvature / 2)
    try:
        seen = nbeta * (probe.loss(center) - probe.loss(center.sub(gradient, alpha=length)))
    except EvaluateError:  # so far from w* that evaluate refuses
        seen = math.nan
    drop = max(0.0, min(drop, _TRUSTED * seen)) if math.isfinite(seen) else 0.0
    return Descent(drop, square, error, curvature)


def squared_mean(vectors: Callable[[], Iterable[torch.Tensor]]) -> tuple[torch.Tensor, float, float]:
    r"""The mean of independent vectors, the unbiased square of what they estimate, and its standard error.

    .. math:: |\mu|^2 \approx \frac{1}{m (m-1)} \sum_j p_j, \qquad p_j = g_j \cdot \sum_{i \ne j} g_i

    The error is the jackknife's: without g_j the sum is less by 2 p_j. At μ = 0 it is √2 times too large.
    Only two vectors are held at a time, so that they are asked for twice.

    Args:
        vectors: gives them, each of shape (P,); one may be overwritten when the next is asked for.

    Returns:
        The mean of all, and two numbers, NaN for fewer than 3 vectors.
    """
    total: torch.Tensor | None = None
    for vector in vectors():
        total = vector.clone() if total is None else total.add_(vector)
    assert total is not None
    products = [_dot(total, vector) - squared_norm(vector) for vector in vectors()]
    count = len(products)
    if count < 3:
        return total.div_(count), math.nan, math.nan
    square = sum(products) / (count * (count - 1))
    mean = sum(products) / count
    spread = sum((product - mean) ** 2 for product in products) / ((count - 1) * (count - 2)) ** 2
    return total.div_(count), square, math.sqrt(4 * spread * (count - 1) / count)


def _dot(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first * second).sum(dtype=torch.float64 if first.device.type != "mps" else None))
