"""Losses whose nβ (E[L] − L(w*)) is known at a finite nβ: the cases of the truth suite."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import TensorDataset

from devsample.errors import InvalidArgumentError
from devsample.testing import factors, potentials
from devsample.testing.potentials import Potential

__all__ = ["KINDS", "Case", "Kind", "PotentialModel", "all_cases", "case"]

DATA = "cases.json"


@dataclass(frozen=True)
class Kind:
    """What cases of one kind have in common.

    Attributes:
        formula: L(w).
        derivation: how the expected value was found.
        build: the potential from a case's parameters.
    """

    formula: str
    derivation: str
    build: Callable[..., Potential]


@dataclass(frozen=True)
class Case:
    """A loss, an inverse temperature and a localization with a known value of the estimate.

    ``expected`` is nβ (E[L(w)] − L(w*)) for w ~ exp(−nβ L − γ/2 |w − w*|²), within the box if there
    is one; at this nβ, not in the limit.

    Attributes:
        name: the case.
        kind: the family it belongs to, a key of `KINDS`.
        parameters: of the family, as `Kind.build` takes them.
        nbeta: nβ.
        gamma: γ, the localization around w*.
        expected: the exact value.
        tolerance: the relative deviation that an estimate may have.
        asymptotic_lambda: λ, the limit of ``expected`` for nβ → ∞; None: w* is no minimum.
        multiplicity: m of that limit.
        box: half width of the box around w* outside of which the density is 0, or None.
        standard_error: of ``expected``, if it comes from a simulation.
    """

    name: str
    kind: str
    parameters: Mapping[str, Any] = field(compare=False)
    nbeta: float
    gamma: float
    expected: float
    tolerance: float
    asymptotic_lambda: float | None = None
    multiplicity: int | None = None
    box: float | None = None
    standard_error: float = 0.0

    @functools.cached_property
    def potential(self) -> Potential:
        """L − L(w*) on rows (K, P) → (K,), also with ``gradient``, ``hessian_max``, ``hessian_trace``."""
        return KINDS[self.kind].build(**self.parameters)

    @property
    def center(self) -> torch.Tensor:
        """w* (P,), float64."""
        return self.potential.center

    @property
    def num_parameters(self) -> int:
        """P."""
        return self.potential.num_parameters

    @property
    def formula(self) -> str:
        """L(w)."""
        return KINDS[self.kind].formula

    @property
    def derivation(self) -> str:
        """How the expected value was found."""
        return KINDS[self.kind].derivation

    def gradient(self, w: torch.Tensor) -> torch.Tensor:
        """∇L of each row: (K, P) → (K, P)."""
        return self.potential.gradient(w)

    def hessian_max(self, w: torch.Tensor) -> torch.Tensor:
        """The largest eigenvalue of ∇²L of each row, or a bound above it: (K, P) → (K,)."""
        return self.potential.hessian_max(w)

    def hessian_trace(self, w: torch.Tensor) -> torch.Tensor:
        """The trace of ∇²L of each row: (K, P) → (K,)."""
        return self.potential.hessian_trace(w)

    def model(self, dtype: torch.dtype = torch.float64) -> PotentialModel:
        """A module at w*, whose forward pass returns the loss: to try the whole library on it."""
        return PotentialModel(self.potential, dtype)

    def dataset(self) -> TensorDataset:
        """The data of a linear regression, x (n, d) and y (n,); else one row that nothing reads."""
        if isinstance(self.potential, potentials.LinearRegression):
            return TensorDataset(self.potential.x, self.potential.y)
        return TensorDataset(torch.zeros(1, 1))


class PotentialModel(torch.nn.Module):
    """A potential as a module with one parameter ``w`` (P,).

    Called with a batch (x, y) of a linear regression's data it returns that batch's mean squared
    error; any other batch is ignored.

    Args:
        potential: the loss.
        dtype: of the parameter.
    """

    def __init__(self, potential: Potential, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.potential = potential
        self.w = torch.nn.Parameter(potential.center.to(dtype, copy=True))

    def forward(self, batch: Any = None) -> torch.Tensor:
        """L(w) − L(w*), or the loss of a batch of the regression's data; a scalar."""
        if batch is not None and isinstance(self.potential, potentials.LinearRegression):
            x, y = batch
            return torch.square(x.to(self.w.dtype) @ self.w - y.to(self.w.dtype)).mean()
        return self.potential(self.w.unsqueeze(0))[0]


def _quadratic(
    h: list[float], copies: int = 1, zeros: int = 0, c: list[float] | None = None
) -> potentials.Quadratic:
    return potentials.Quadratic(h * copies + [0.0] * zeros, c)


def _crossing(k: list[int], c: float, center: list[float] | None = None) -> potentials.NormalCrossing:
    return potentials.NormalCrossing(k, c, center)


def _zero_map(m: int, h: int, n: int, c: float) -> Potential:
    return factors.NormProduct((m, n), c) if h == 1 else factors.ReducedRank(m, h, n, c)


def _rank_one(m: int, h: int, n: int, sig: float, c: float) -> Potential:
    return factors.RankOne(m, n, sig, c)


def _thin(widths: list[int]) -> Potential:
    return factors.NormProduct((widths[0], *[1] * (len(widths) - 3), widths[-1]))


def _tanh(H: int) -> Potential:
    return potentials.TanhNetwork(H)


def _deep(widths: list[int], rank: int, c: float) -> Potential:
    return factors.DeepLinear(widths, rank, c)


_CROSSING = "L = c Π w_i^(2 k_i)"
KINDS: Mapping[str, Kind] = {
    "quadratic": Kind("L = ½ Σ h_i w_i²", "Gaussian: Σ nβ h_i / (2 (nβ h_i + γ))", _quadratic),
    "quadratic_offset": Kind(
        "L = ½ Σ h_i (w_i − c_i)², w* = 0",
        "Gaussian with mean nβ h_i c_i / a_i and variance 1/a_i, a_i = nβ h_i + γ",
        _quadratic,
    ),
    "linear_regression": Kind(
        "L = mean (y − x·w)², w* the least-squares solution",
        "Gaussian: Σ nβ h_i / (2 (nβ h_i + γ)), h the eigenvalues of 2 XᵀX/n",
        potentials.LinearRegression,
    ),
    "normal_crossing": Kind(
        f"{_CROSSING}, w* = 0",
        "trapezoid rule in ln w_i; one factor with k = 1 integrated in closed form",
        _crossing,
    ),
    "normal_crossing_shifted": Kind(
        f"{_CROSSING}, w* on its zero set, not at the crossing",
        "w_1 is Gaussian given w_2; one integral over w_2",
        _crossing,
    ),
    "normal_crossing_box": Kind(
        f"{_CROSSING} on the box |w_i| ≤ 1, γ = 0",
        "the density of x = Π w_i^(2 k_i) is known; one integral over x",
        _crossing,
    ),
    "rrr_zero": Kind(
        "L = c |BA|², A (h, m), B (n, h), w* = 0",
        "B is Gaussian given A; the eigenvalues of AAᵀ are those of a Wishart matrix",
        _zero_map,
    ),
    "rrr_rank1": Kind(
        "L = c |b aᵀ − σ e_1 e_1ᵀ|², w* = √σ (e_1, e_1)",
        "b is Gaussian given a; two integrals over |a| and its angle to e_1",
        _rank_one,
    ),
    "dln_deep1": Kind(
        "L = |b|² w² |a|², w* = 0",
        "b is Gaussian given w and a; integrals over ln |w| and ln |a|",
        _thin,
    ),
    "tanh_zero": Kind(
        "L = E_x (Σ a_i tanh(b_i x))², x ~ N(0, 1), w* = 0",
        "a is Gaussian given b; integrals over b in logarithmic coordinates",
        _tanh,
    ),
    "dln_hmc_reference": Kind(
        "L = |W_L … W_1 − diag(1_r)|², w*: every layer diag(1_r)",
        "Hamiltonian Monte Carlo with Metropolis correction, many chains",
        _deep,
    ),
}


@functools.cache
def _all() -> Mapping[str, Case]:
    text = importlib.resources.files(__package__).joinpath(DATA).read_text(encoding="utf-8")
    return {one["name"]: Case(**one) for one in json.loads(text)["cases"]}


def all_cases(kind: str | None = None) -> tuple[Case, ...]:
    """All cases, or those of one kind, in a fixed order.

    Args:
        kind: a key of `KINDS`; None: all.

    Raises:
        InvalidArgumentError: there is no such kind.

    Examples:
        >>> len(all_cases()), all_cases("quadratic")[0].name
        (82, 'quad_1d')
    """
    if kind is not None and kind not in KINDS:
        raise InvalidArgumentError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}.")
    return tuple(one for one in _all().values() if kind in (None, one.kind))


def case(name: str) -> Case:
    """The case of that name.

    Raises:
        InvalidArgumentError: there is none; the message names similar ones.

    Examples:
        >>> one = case("rrr_5_2_4_zero_nb1000")
        >>> one.num_parameters, round(one.expected, 4), one.asymptotic_lambda
        (18, 3.8148, 4.0)
    """
    if name not in _all():
        close = difflib.get_close_matches(name, _all(), n=3) or list(KINDS)
        raise InvalidArgumentError(f"name: there is no case {name!r}; similar: {', '.join(close)}.")
    return _all()[name]
