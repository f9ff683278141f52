"""Losses of linear networks: what is learned is a product of matrices, and its fibres are singular."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from devsample.errors import InvalidArgumentError
from devsample.testing.potentials import Potential, largest_eigenvalue

__all__ = ["DeepLinear", "NormProduct", "RankOne", "ReducedRank", "check_widths", "deepest_point"]


def check_widths(widths: Sequence[int], rank: int) -> tuple[int, ...]:
    """Widths of a deep linear network as a tuple.

    Raises:
        InvalidArgumentError: fewer than two widths, one below 1, or a rank that no product has.
    """
    sizes = tuple(widths)
    if len(sizes) < 2 or any(isinstance(d, bool) or d != int(d) or d < 1 for d in sizes):
        raise InvalidArgumentError(f"widths: expected two or more integers ≥ 1, got {widths!r}.")
    if isinstance(rank, bool) or rank != int(rank) or not 0 <= rank <= min(sizes):
        raise InvalidArgumentError(
            f"rank: a product through widths {sizes} has rank 0 … {min(sizes)}, got {rank!r}."
        )
    return tuple(int(d) for d in sizes)


def deepest_point(widths: Sequence[int], rank: int) -> list[torch.Tensor]:
    """Layers W_l = diag(1_r) (widths[l], widths[l−1]), float64.

    Among the weights with this product it is where the learning coefficient is least, the value
    that `devsample.testing.dln_learning_coefficient` gives.
    """
    layers = []
    for before, after in itertools.pairwise(check_widths(widths, rank)):
        layer = torch.zeros(after, before, dtype=torch.float64)
        layer.diagonal()[:rank] = 1
        layers.append(layer)
    return layers


def _squared_norm(w: torch.Tensor) -> torch.Tensor:
    """|w|² over the last axis, which stays: (…, 1)."""
    return (w * w).sum(-1, keepdim=True)


class NormProduct(Potential):
    r"""A linear network with hidden layers of one unit that has to be zero: a product of norms.

    .. math:: L(w_1, …, w_S) = c \prod_s |w_s|^2, \qquad w^* = 0

    Args:
        sizes: entries of each w_s, each ≥ 1.
        scale: c > 0.
    """

    def __init__(self, sizes: Sequence[int], scale: float = 1.0) -> None:
        self.sizes, self.scale = list(sizes), scale
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise InvalidArgumentError(f"sizes: expected two or more integers ≥ 1, got {sizes!r}.")
        super().__init__(torch.zeros(sum(self.sizes), dtype=torch.float64))

    def _others(self, norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """2c times the product of all norms but one, for each of them."""
        others = []
        for skipped in range(len(norms)):
            first, *rest = (norm for s, norm in enumerate(norms) if s != skipped)
            for norm in rest:
                first = first * norm
            others.append((2 * self.scale) * first)
        return others

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        first, *rest = (_squared_norm(part) for part in torch.split(w, self.sizes, dim=1))
        for norm in rest:
            first = first * norm
        return self.scale * first.squeeze(1)

    def _gradient(self, w: torch.Tensor) -> torch.Tensor:
        parts = torch.split(w, self.sizes, dim=1)
        others = self._others([_squared_norm(part) for part in parts])
        return torch.cat([part * other for part, other in zip(parts, others, strict=True)], dim=1)

    def _hessian_trace(self, w: torch.Tensor) -> torch.Tensor:
        others = self._others([_squared_norm(part) for part in torch.split(w, self.sizes, dim=1)])
        traces = [size * other for size, other in zip(self.sizes, others, strict=True)]
        return torch.cat(traces, dim=1).sum(1)

    def _hessian_max(self, w: torch.Tensor) -> torch.Tensor:
        """The exact value: directions along and across each w_s decouple.

        Along them, the Hessian is a matrix (S, S) over the norms; across w_s it is 2c Π_{t≠s} |w_t|².
        """
        norms = [_squared_norm(part) for part in torch.split(w, self.sizes, dim=1)]
        across = torch.cat(self._others(norms), dim=1)
        lengths = torch.cat(norms, dim=1).sqrt()
        along = torch.diag_embed(across)
        for s, t in itertools.combinations(range(len(norms)), 2):
            rest = math.prod(norms[i].squeeze(1) for i in range(len(norms)) if i not in (s, t))
            along[:, s, t] = along[:, t, s] = 4 * self.scale * lengths[:, s] * lengths[:, t] * rest
        return largest_eigenvalue(along)


class ReducedRank(Potential):
    r"""Reduced rank regression with target 0: a linear network with one hidden layer.

    .. math:: L(A, B) = c\,|B A|_F^2, \qquad A: (h, m),\ B: (n, h),\ w^* = 0

    the population loss, summed over outputs, of x ~ N(0, I) ↦ BAx. Entries of w are A, then B.

    Args:
        m: inputs.
        h: hidden units.
        n: outputs.
        scale: c > 0; 1/n for a loss that is the mean over outputs.
    """

    def __init__(self, m: int, h: int, n: int, scale: float = 1.0) -> None:
        check_widths((m, h, n), 0)
        self.m, self.h, self.n, self.scale = m, h, n, scale
        super().__init__(torch.zeros(h * (m + n), dtype=torch.float64))

    def _layers(self, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = torch.split(w, [self.h * self.m, self.n * self.h], dim=1)
        return first.view(len(w), self.h, self.m), second.view(len(w), self.n, self.h)

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        first, second = self._layers(w)  # |BA|² = tr(BᵀB · AAᵀ): only (h, h) matrices
        return self.scale * ((second.mT @ second) * (first @ first.mT)).sum((1, 2))

    def _gradient(self, w: torch.Tensor) -> torch.Tensor:
        first, second = self._layers(w)
        by_first = (second.mT @ second) @ first
        by_second = second @ (first @ first.mT)
        return (2 * self.scale) * torch.cat([by_first.flatten(1), by_second.flatten(1)], dim=1)

    def _hessian_trace(self, w: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(w, [self.h * self.m, self.n * self.h], dim=1)
        norms = self.n * _squared_norm(first) + self.m * _squared_norm(second)
        return (2 * self.scale) * norms.squeeze(1)

    def _hessian_max(self, w: torch.Tensor) -> torch.Tensor:
        """A bound, 2c (|A|² + |B|² + |BA|) in spectral norms; attained for h = 1 and |A| = |B|."""
        first, second = self._layers(w)
        return _curvature_bound([first, second], second @ first, self.scale)


class RankOne(Potential):
    r"""Reduced rank regression with one hidden unit and a target of rank one.

    .. math:: L(a, b) = c\,|b a^T - σ e_1 e_1^T|_F^2, \qquad a^* = \sqrt{σ} e_1,\ b^* = \sqrt{σ} e_1

    Entries of w are a (m), then b (n). Any unit vectors for e_1 give the same values: the target
    density is the same after rotations of a and of b.

    Args:
        m: inputs.
        n: outputs.
        sigma: σ > 0, the target's singular value.
        scale: c > 0.
    """

    def __init__(self, m: int, n: int, sigma: float = 1.0, scale: float = 1.0) -> None:
        check_widths((m, 1, n), 1)
        self.m, self.n, self.sigma, self.scale = m, n, sigma, scale
        center = torch.zeros(m + n, dtype=torch.float64)
        center[0] = center[m] = math.sqrt(sigma)
        super().__init__(center)

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(w, [self.m, self.n], dim=1)
        rest_a, rest_b = _squared_norm(first[:, 1:]), _squared_norm(second[:, 1:])
        a, b = first[:, :1], second[:, :1]
        miss = a * b - self.sigma  # no difference of large numbers near the minimum
        return self.scale * (miss * miss + b * b * rest_a + rest_b * (a * a + rest_a)).squeeze(1)

    def _gradient(self, w: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(w, [self.m, self.n], dim=1)
        gradient = torch.cat([first * _squared_norm(second), second * _squared_norm(first)], dim=1)
        gradient[:, 0] -= self.sigma * second[:, 0]
        gradient[:, self.m] -= self.sigma * first[:, 0]
        return (2 * self.scale) * gradient

    def _hessian_trace(self, w: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(w, [self.m, self.n], dim=1)
        norms = self.n * _squared_norm(first) + self.m * _squared_norm(second)
        return (2 * self.scale) * norms.squeeze(1)

    def _hessian_max(self, w: torch.Tensor) -> torch.Tensor:
        """A bound, 2c (|a|² + |b|² + |R|), R = b aᵀ − σ e_1 e_1ᵀ."""
        first, second = torch.split(w, [self.m, self.n], dim=1)
        residual = (self(w) / self.scale).sqrt()
        norms = (_squared_norm(first) + _squared_norm(second)).squeeze(1)
        return (2 * self.scale) * (norms + residual)


class DeepLinear(Potential):
    r"""A deep linear network: population loss of x ~ N(0, I), summed over outputs.

    .. math:: L(W) = c\,|W_L \cdots W_1 - T|_F^2, \qquad T = \operatorname{diag}(1_r)

    at its deepest point, see `deepest_point`. Entries of w are W_1 … W_L, rows first.

    Args:
        widths: d_0 … d_L.
        rank: r.
        scale: c > 0.
    """

    def __init__(self, widths: Sequence[int], rank: int, scale: float = 1.0) -> None:
        layers = deepest_point(widths, rank)
        target = torch.zeros(widths[-1], widths[0], dtype=torch.float64)
        target.diagonal()[:rank] = 1
        super().__init__(torch.cat([layer.flatten() for layer in layers]), target=target)
        self.scale = scale
        self._shapes = [tuple(layer.shape) for layer in layers]
        self._sizes = [layer.numel() for layer in layers]

    def _layers(self, w: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(w, self._sizes, dim=1)
        return [part.view(len(w), *shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _products(self, layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """W_1, W_2 W_1, …, W_L … W_1."""
        return list(itertools.accumulate(layers, lambda product, layer: layer @ product))

    def _value(self, w: torch.Tensor) -> torch.Tensor:
        residual = self._products(self._layers(w))[-1] - self._like("target", w)
        return self.scale * (residual * residual).sum((1, 2))

    def _gradient(self, w: torch.Tensor) -> torch.Tensor:
        layers = self._layers(w)
        products = self._products(layers)
        pull = (2 * self.scale) * (products[-1] - self._like("target", w))
        parts = []
        for below, layer in zip(reversed(products[:-1]), reversed(layers[1:]), strict=True):
            parts.append((pull @ below.mT).flatten(1))
            pull = layer.mT @ pull
        parts.append(pull.flatten(1))
        return torch.cat(parts[::-1], dim=1)

    def _hessian_trace(self, w: torch.Tensor) -> torch.Tensor:
        r"""The exact value, :math:`2c \sum_l |W_L \cdots W_{l+1}|_F^2\,|W_{l-1} \cdots W_1|_F^2`."""
        layers = self._layers(w)
        below = [w.new_full((len(w),), self._shapes[0][1])]
        below += [(one * one).sum((1, 2)) for one in self._products(layers)[:-1]]
        above = [w.new_full((len(w),), self._shapes[-1][0])]
        products = list(itertools.accumulate(reversed(layers), lambda product, layer: product @ layer))
        above += [(one * one).sum((1, 2)) for one in products[:-1]]
        return (2 * self.scale) * (torch.stack(below) * torch.stack(above[::-1])).sum(0)

    def _hessian_max(self, w: torch.Tensor) -> torch.Tensor:
        """A bound from the layers' spectral norms, see the source."""
        layers = self._layers(w)
        residual = self._products(layers)[-1] - self._like("target", w)
        return _curvature_bound(layers, residual, self.scale)


def _curvature_bound(layers: Sequence[torch.Tensor], residual: torch.Tensor, scale: float) -> torch.Tensor:
    r"""A bound on the largest curvature of c|R|², R = W_L … W_1 − T: (K,).

    The second derivative along δ is 2c (|dR|² + ⟨R, d²R⟩). With spectral norms n_l of the layers
    and x_l = |δ_l|, |dR|² ≤ (Σ_l x_l Π_{j≠l} n_j)² ≤ Σ_l Π_{j≠l} n_j² for |x| = 1, and
    ⟨R, d²R⟩ ≤ |R| · 2 Σ_{l<k} x_l x_k Π_{j≠l,k} n_j, at most |R| times the largest row sum of that form.
    """
    norms = [_spectral_norm(layer) for layer in layers]
    count = range(len(norms))
    one = torch.ones_like(norms[0])
    first = sum(math.prod((norms[j] ** 2 for j in count if j != i), start=one) for i in count)
    rows = [
        sum(math.prod((norms[j] for j in count if j not in (i, k)), start=one) for k in count if k != i)
        for i in count
    ]
    second = torch.stack([torch.as_tensor(row) for row in rows]).amax(0)
    return (2 * scale) * (first + _spectral_norm(residual) * second)


def _spectral_norm(matrix: torch.Tensor) -> torch.Tensor:
    """The largest singular value of each matrix: (K, a, b) → (K,)."""
    small = matrix @ matrix.mT if matrix.shape[1] <= matrix.shape[2] else matrix.mT @ matrix
    return largest_eigenvalue(small).clamp_min(0).sqrt()
