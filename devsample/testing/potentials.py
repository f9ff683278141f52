"""Losses with known learning coefficients, as functions of K stacked parameter vectors.

Every potential is L(w) − L(w*) for rows w (K, P), with its gradient written out: a sampler calls
it at each of very many steps, and a row costs a few operations. All of it is made of differentiable
torch operations, in the dtype and on the device of w.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from devsample.errors import InvalidArgumentError

__all__ = ["Blocks", "LinearRegression", "NormalCrossing", "Potential", "Quadratic", "TanhNetwork"]

# Nodes for E over N(0, 1), see `half_normal_rule`: within 1e-10 for |b| ≤ 6.
TANH_NODES, TANH_SCALE = 32, 2.8
TANH_ROWS = 1024  # at a time: what is kept at the nodes stays in the processor's cache
TAIL = 8.7  # a standard normal is further out with probability 3e-18


class Potential(abc.ABC):
    """A loss L, shifted to 0 at w*, on stacked parameter vectors.

    Attributes:
        center: w* (P,), float64.
    """

    def __init__(self, center: torch.Tensor, **constants: torch.Tensor) -> None:
        self.center = center
        self._constants = constants
        self._converted: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    @property
    def num_parameters(self) -> int:
        """P."""
        return len(self.center)

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        """L(w) − L(w*) of each row: (K, P) → (K,)."""
        return self._value(w)

    def gradient(self, w: torch.Tensor) -> torch.Tensor:
        """∇L of each row: (K, P) → (K, P)."""
        return self._gradient(w)

    def hessian(self, w: torch.Tensor) -> torch.Tensor:
        """∇²L of each row by differentiating the gradient: (K, P) → (K, P, P); P backward passes."""
        with torch.enable_grad():
            leaf = w.detach().requires_grad_()
            gradient = self.gradient(leaf)
            if not gradient.requires_grad:
                return leaf.new_zeros(*leaf.shape, leaf.shape[-1])
            rows = [
                torch.autograd.grad(column.sum(), leaf, retain_graph=True)[0] for column in gradient.unbind(1)
            ]
        return torch.stack(rows, dim=1)

    def hessian_trace(self, w: torch.Tensor) -> torch.Tensor:
        """The trace of ∇²L of each row: (K, P) → (K,)."""
        return self._hessian_trace(w)

    def hessian_max(self, w: torch.Tensor) -> torch.Tensor:
        """The largest eigenvalue of ∇²L of each row, or a bound above it: (K, P) → (K,)."""
        return self._hessian_max(w)

    @abc.abstractmethod
    def _value(self, w: torch.Tensor) -> torch.Tensor: ...

    @abc.abstractmethod
    def _gradient(self, w: torch.Tensor) -> torch.Tensor: ...

    def _hessian_trace(self, w: torch.Tensor) -> torch.Tensor:
        return self.hessian(w).diagonal(dim1=1, dim2=2).sum(1)

    def _hessian_max(self, w: torch.Tensor) -> torch.Tensor:
        return largest_eigenvalue(self.hessian(w))

    def _like(self, name: str, w: torch.Tensor) -> torch.Tensor:
        """A constant in the dtype and on the device of ``w``."""
        key = (name, w.dtype, w.device)
        if key not in self._converted:
            self._converted[key] = self._constants[name].to(w)
        return self._converted[key]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_converted": {}}


class Quadratic(Potential):
    r"""Independent quadratic directions; the minimum need not be w* = 0.

    .. math:: L(w) - L(0) = \tfrac12 \sum_i h_i \big((w_i - c_i)^2 - c_i^2\big)

    Args:
        curvatures: h (P,), each ≥ 0.
        minimum: c (P,); None: 0.
    """

    def __init__(self, curvatures: Sequence[float], minimum: Sequence[float] | None = None) -> None:
        h = torch.tensor(curvatures, dtype=torch.float64)
        if h.ndim != 1 or not len(h) or bool((h < 0).any()):
            raise InvalidArgumentError(f"curvatures: expected numbers ≥ 0, got {curvatures!r}.")
        at = torch.zeros_like(h) if minimum is None else torch.tensor(minimum, dtype=torch.float64)
        if at.shape != h.shape:
            raise InvalidArgumentError(f"minimum: expected {len(h)} numbers, got {minimum!r}.")
        super().__init__(torch.zeros_like(h), h=h, half=h / 2, slope=-h * at)
        self._shifted = bool((at != 0).any())
        self._trace, self._largest = float(h.sum()), float(h.max())

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        value = (w * w) @ self._like("half", w)
        return value + w @ self._like("slope", w) if self._shifted else value

    def _gradient(self, w: torch.Tensor) -> torch.Tensor:
        gradient = w * self._like("h", w)
        return gradient + self._like("slope", w) if self._shifted else gradient

    def _hessian_trace(self, w: torch.Tensor) -> torch.Tensor:
        return w.new_full((len(w),), self._trace)

    def _hessian_max(self, w: torch.Tensor) -> torch.Tensor:
        return w.new_full((len(w),), self._largest)


class LinearRegression(Potential):
    r"""Least squares, with its data for runs on minibatches; w* is the least-squares solution.

    .. math:: L(w) = \frac1n \sum_i (y_i - x_i \cdot w)^2

    The columns of x have scales 10^−½ … 10^½, y = x·v + ``noise``·N(0, 1) with v ~ N(0, 1).

    Args:
        n: samples.
        d: features.
        noise: standard deviation of the noise.
        seed: of numpy's ``RandomState``, whose numbers never change.

    Attributes:
        x: inputs (n, d), float64.
        y: targets (n,), float64.
        init_loss: L(w*).
    """

    def __init__(self, n: int, d: int, noise: float, seed: int) -> None:
        random = np.random.RandomState(seed)
        x = random.randn(n, d) * np.logspace(-0.5, 0.5, d)
        truth = random.randn(d)
        y = x @ truth + noise * random.randn(n)
        solution = np.linalg.lstsq(x, y, rcond=None)[0]
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        self.init_loss = float(np.mean((y - x @ solution) ** 2))
        hessian = 2 * self.x.T @ self.x / n
        super().__init__(torch.from_numpy(solution), hessian=hessian, at=torch.from_numpy(solution))
        self._trace = float(hessian.trace())
        self._largest = float(largest_eigenvalue(hessian))

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        away = w - self._like("at", w)
        return ((away @ self._like("hessian", w)) * away).sum(1) / 2

    def _gradient(self, w: torch.Tensor) -> torch.Tensor:
        return (w - self._like("at", w)) @ self._like("hessian", w)

    def _hessian_trace(self, w: torch.Tensor) -> torch.Tensor:
        return w.new_full((len(w),), self._trace)

    def _hessian_max(self, w: torch.Tensor) -> torch.Tensor:
        return w.new_full((len(w),), self._largest)


class NormalCrossing(Potential):
    r"""A monomial, the local form of every singular loss (resolution of singularities).

    .. math:: L(w) = c \prod_i w_i^{2 k_i}, \qquad λ = \min_i \frac{1}{2 k_i}

    at w* = 0, with the number of times that the minimum is taken as multiplicity.

    Args:
        powers: k (P,), integers ≥ 0, not all 0.
        scale: c > 0.
        center: w* (P,), a zero of L; None: 0.
    """

    def __init__(
        self, powers: Sequence[int], scale: float = 1.0, center: Sequence[float] | None = None
    ) -> None:
        self.powers = tuple(powers)
        if not any(self.powers) or any(k < 0 or k != int(k) for k in self.powers):
            raise InvalidArgumentError(f"powers: expected integers ≥ 0, one of them > 0, got {powers!r}.")
        at = [0.0] * len(self.powers) if center is None else center
        if len(at) != len(self.powers) or not any(
            k and not one for k, one in zip(self.powers, at, strict=True)
        ):
            raise InvalidArgumentError(
                f"center: {center!r} is no zero of the product with powers {self.powers!r}."
            )
        super().__init__(torch.tensor(at, dtype=torch.float64))
        self.scale = scale
        self._active = [i for i, k in enumerate(self.powers) if k]

    def _columns(self, w: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """k, w and w² of each entry that matters."""
        columns = w.unbind(1)
        return [(self.powers[i], columns[i], columns[i] * columns[i]) for i in self._active]

    def _others(self, factors: Sequence[torch.Tensor]) -> list[Any]:
        """Scale times the product of all factors but one, for each of them (a number for one factor)."""
        before: list[Any] = [self.scale]
        for factor in factors[:-1]:
            before.append(before[-1] * factor)
        others: list[Any] = []
        after: Any = None
        for start, factor in zip(reversed(before), reversed(factors), strict=True):
            others.append(start if after is None else start * after)
            after = factor if after is None else after * factor
        return others[::-1]

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        value: Any = self.scale
        for k, _, square in self._columns(w):
            value = value * square**k
        return torch.as_tensor(value)

    def _gradient(self, w: torch.Tensor) -> torch.Tensor:
        active = self._columns(w)
        others = self._others([square**k for k, _, square in active])
        parts = [torch.zeros_like(w[:, 0])] * len(self.powers)
        for i, (k, entry, square), rest in zip(self._active, active, others, strict=True):
            odd = entry if k == 1 else entry * square ** (k - 1)
            parts[i] = (2 * k) * odd * rest
        return torch.stack(parts, dim=1)

    def _hessian_trace(self, w: torch.Tensor) -> torch.Tensor:
        active = self._columns(w)
        others = self._others([square**k for k, _, square in active])
        total = torch.zeros_like(w[:, 0])
        for (k, _, square), rest in zip(active, others, strict=True):
            total = total + (2 * k * (2 * k - 1)) * square ** (k - 1) * rest
        return total


def half_normal_rule(nodes: int = TANH_NODES, scale: float = TANH_SCALE) -> tuple[np.ndarray, np.ndarray]:
    r"""Nodes x > 0 and weights for E f(x) over N(0, 1), f even: :math:`\sum_q ω_q f(x_q)`.

    tanh(b x) has poles at i π/(2b), so Gauss–Hermite, blind to the scale 1/b, needs some thousand
    nodes at b = 6. The map x = c (1 + u)/(1 − u) carries all of the imaginary axis to the unit
    circle, and Gauss–Legendre in u converges fast for all b at once.

    Args:
        nodes: of Gauss–Legendre; those further out than 8.7 are left out.
        scale: c, where half of the nodes lie below.
    """
    u, weights = np.polynomial.legendre.leggauss(nodes)
    x = scale * (1 + u) / (1 - u)
    weights = weights * 2 * scale / (1 - u) ** 2 * 2 * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    return x[x < TAIL], weights[x < TAIL]


class TanhNetwork(Potential):
    r"""H hidden tanh units that have to be silent: population loss of f(x) = 0.

    .. math:: L(a, b) = E_{x \sim N(0,1)} \Big(\sum_i a_i \tanh(b_i x)\Big)^2

    Entries of w are a_1 … a_H, b_1 … b_H; w* = 0.

    Args:
        units: H ≥ 1.
        nodes: of the quadrature over x, see `half_normal_rule`.
    """

    def __init__(self, units: int, nodes: int = TANH_NODES) -> None:
        x, weights = map(torch.from_numpy, half_normal_rule(nodes))
        self.units = units
        center = torch.zeros(2 * units, dtype=torch.float64)
        super().__init__(center, x=x, weights=weights, pull=2 * weights, pull_x=2 * weights * x)

    def _forward(self, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The second factor a (H, K), the units (Q, H, K) and the output (Q, 1, K) at the nodes."""
        a, b = torch.split(w.mT.contiguous(), self.units)
        units = torch.tanh(self._like("x", w)[:, None, None] * b)
        return a, units, (a * units).sum(1, keepdim=True)

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        _, _, output = self._forward(w)
        return self._like("weights", w) @ output.squeeze(1).square()

    def _gradient(self, w: torch.Tensor) -> torch.Tensor:
        parts = [self._gradient_of(rows) for rows in torch.split(w, TANH_ROWS)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _gradient_of(self, w: torch.Tensor) -> torch.Tensor:
        a, units, output = self._forward(w)
        product, pull_x = output * units, self._like("pull_x", w)
        by_a = self._like("pull", w) @ product.flatten(1)
        by_b = pull_x @ output.flatten(1) - (pull_x @ (product * units).flatten(1)).view_as(a)
        return torch.cat([by_a.view_as(a), a * by_b]).mT


class Blocks(Potential):
    """Potentials side by side on entries of their own: L is their sum, and so is λ.

    Args:
        parts: the potentials, in the order of their entries.
    """

    def __init__(self, parts: Sequence[Potential]) -> None:
        self.parts = tuple(parts)
        super().__init__(torch.cat([part.center for part in self.parts]))
        self._sizes = [part.num_parameters for part in self.parts]

    def _split(self, w: torch.Tensor) -> list[tuple[Potential, torch.Tensor]]:
        return list(zip(self.parts, torch.split(w, self._sizes, dim=1), strict=True))

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(rows) for part, rows in self._split(w)]).sum(0)

    def _gradient(self, w: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.gradient(rows) for part, rows in self._split(w)], dim=1)

    def _hessian_trace(self, w: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.hessian_trace(rows) for part, rows in self._split(w)]).sum(0)

    def _hessian_max(self, w: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.hessian_max(rows) for part, rows in self._split(w)]).amax(0)


def largest_eigenvalue(matrix: torch.Tensor) -> torch.Tensor:
    """The largest eigenvalue of symmetric matrices: (…, P, P) → (…)."""
    values: torch.Tensor = torch.linalg.eigvalsh(matrix)
    return values[..., -1]
