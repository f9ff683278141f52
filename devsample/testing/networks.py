"""Networks with known learning coefficients, from 30 to 10 million parameters, and their data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from devsample.errors import InvalidArgumentError
from devsample.testing.deep_linear import LearningCoefficient, dln_learning_coefficient
from devsample.testing.factors import deepest_point
from devsample.testing.potentials import NormalCrossing

__all__ = [
    "DeepLinearNetwork",
    "RandomNetwork",
    "TeacherData",
    "deep_linear_network",
    "normal_crossing",
    "random_deep_linear_networks",
    "squared_error",
]

EAGER_NUMBERS = 1 << 26  # a data set of more numbers is made item by item
CANDIDATES = 100  # random networks looked at for each one chosen
SIZE_TOLERANCE = 0.02
DEPTHS = (2, 3, 4, 5)


def squared_error(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Squared error, summed over outputs, mean over the samples of a batch (x, y); a scalar.

    For x ~ N(0, I) and noiseless targets its expectation is the population loss |W − T|² of
    a `DeepLinearNetwork`.
    """
    x, y = batch
    errors: torch.Tensor = model(x) - y
    return errors.square().sum(-1).mean()


class TeacherData(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """n samples x ~ scale · N(0, I), y = T x + noise · N(0, I), each made when it is read.

    Sample i depends on (seed, i) only. Only the teacher is held, so it costs the same to send to
    other processes for any n.

    Args:
        teacher: T (outputs, inputs), on the CPU; its dtype is that of the samples.
        n: samples, ≥ 1.
        noise: standard deviation of the noise, ≥ 0.
        scale: standard deviation of the inputs, > 0.
        seed: of the samples, 0 … 2^64 − 1.
    """

    def __init__(
        self, teacher: torch.Tensor, n: int, *, noise: float = 0.0, scale: float = 1.0, seed: int = 0
    ) -> None:
        if n < 1:
            raise InvalidArgumentError(f"n: expected at least one sample, got {n!r}.")
        if noise < 0 or scale <= 0:
            raise InvalidArgumentError(f"noise: expected ≥ 0, got {noise!r}; scale: > 0, got {scale!r}.")
        if not 0 <= seed < 1 << 64:
            raise InvalidArgumentError(f"seed: expected 0 … 2^64 − 1, got {seed!r}.")
        self.teacher, self.n, self.noise, self.scale, self.seed = teacher, n, noise, scale, seed

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The samples of a batch: one product with the teacher for all of them."""
        x, y = self.tensors(indices)
        return list(zip(x, y, strict=True))

    def tensors(self, indices: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (B, inputs) and targets (B, outputs) of these samples, or of all."""
        outputs, inputs = self.teacher.shape
        chosen = range(self.n) if indices is None else indices
        numbers = torch.empty(len(chosen), inputs + outputs, dtype=torch.float64)
        for row, index in zip(numbers.numpy(), chosen, strict=True):
            np.random.Generator(self._stream(index)).standard_normal(out=row)
        x, errors = torch.split(numbers.to(self.teacher.dtype), [inputs, outputs], dim=1)
        x = x * self.scale
        return x, x @ self.teacher.T + self.noise * errors

    def _stream(self, index: int) -> np.random.Philox:
        """The counter generator of one sample."""
        place = index + self.n if index < 0 else index
        if not 0 <= place < self.n:
            raise IndexError(f"sample {index} of a data set of {self.n}")
        return np.random.Philox(key=self.seed, counter=[0, 0, 0, place])


class DeepLinearNetwork(torch.nn.Module):
    """x ↦ W_L … W_1 x at its deepest point, with the teacher T that it equals; see `deep_linear_network`.

    Attributes:
        layers: W_1 … W_L as ``torch.nn.Linear`` without biases.
        teacher: T (d_L, d_0), the product of the layers when it was made.
        widths: d_0 … d_L.
        rank: r, the rank of T.
    """

    teacher: torch.Tensor

    def __init__(self, layers: Sequence[torch.Tensor], rank: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for weight in layers:
            layer = torch.nn.utils.skip_init(  # type: ignore[no-untyped-call]
                torch.nn.Linear, weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype
            )
            with torch.no_grad():
                layer.weight.copy_(weight)
            self.layers.append(layer)
        self.widths = (layers[0].shape[1], *(len(weight) for weight in layers))
        self.rank = rank
        self.register_buffer("teacher", self.product().detach())

    @property
    def learning_coefficient(self) -> LearningCoefficient:
        """λ and its multiplicity at these weights as they were made, in closed form."""
        return dln_learning_coefficient(self.widths, self.rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs (B, d_L) for inputs (B, d_0)."""
        for layer in self.layers:
            x = layer(x)
        return x

    def product(self) -> torch.Tensor:
        """W_L … W_1 (d_L, d_0), multiplied from the narrower end."""
        weights: list[torch.Tensor] = [layer.get_parameter("weight") for layer in self.layers]
        from_output = weights[0].shape[1] > weights[-1].shape[0]
        product, *rest = reversed(weights) if from_output else weights
        for weight in rest:
            product = product @ weight if from_output else weight @ product
        return product

    def population_loss(self, batch: Any = None) -> torch.Tensor:
        """|W_L … W_1 − T|², the expectation of `squared_error` over x ~ N(0, I); a scalar.

        Exact, and without data: for chains with full-batch gradients pass
        ``evaluate=lambda model, batch: model.population_loss()``.
        """
        return torch.square(self.product() - self.teacher).sum()

    def dataset(
        self, n: int, *, noise: float = 0.0, seed: int = 0, lazy: bool | None = None
    ) -> TensorDataset | TeacherData:
        """Samples labelled by the teacher: x ~ N(0, I), y = T x + noise · N(0, I).

        Args:
            n: samples, ≥ 1.
            noise: standard deviation of the noise, ≥ 0.
            seed: of the samples.
            lazy: make each sample when it is read, else all now (the same ones); None: lazily
                if they hold more than 2^26 numbers.
        """
        data = TeacherData(self.teacher.cpu(), n, noise=noise, seed=seed)
        if lazy is None:
            lazy = n * (self.widths[0] + self.widths[-1]) > EAGER_NUMBERS
        return data if lazy else TensorDataset(*data.tensors())


def deep_linear_network(
    widths: Sequence[int],
    rank: int,
    *,
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> DeepLinearNetwork:
    """A deep linear network at the deepest point of the fibre over a teacher of rank r.

    With two layers it is reduced rank regression.

    Args:
        widths: d_0 … d_L, each ≥ 1.
        rank: r, 0 ≤ r ≤ min(widths).
        seed: None: each layer is diag(1_r). A number: layer l is Q_l diag(1_r) Q_{l−1}ᵀ with random
            rotations Q_l, a network that looks like any other; no expected value changes, since
            the density is the same after rotations.
        dtype: of the weights.

    Raises:
        InvalidArgumentError: widths or rank out of range.

    Examples:
        >>> network = deep_linear_network([5, 3, 5], 2)
        >>> network.learning_coefficient
        LearningCoefficient(value=Fraction(19, 2), multiplicity=2)
        >>> len(network.dataset(100, noise=0.1)), network.population_loss().item()
        (100, 0.0)
    """
    layers = deepest_point(widths, rank)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        bases = [_orthonormal(d, rank, generator) for d in widths]
        layers = [after @ before.T for before, after in itertools.pairwise(bases)]
    return DeepLinearNetwork([layer.to(dtype) for layer in layers], int(rank))


def _orthonormal(size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """``count`` random orthonormal columns (size, count)."""
    columns: torch.Tensor
    columns, _ = torch.linalg.qr(torch.randn(size, count, generator=generator, dtype=torch.float64))
    return columns


class RandomNetwork(NamedTuple):
    """One rung of a ladder of networks.

    Attributes:
        widths: d_0 … d_L.
        rank: r.
        value: λ.
        multiplicity: m.
    """

    widths: tuple[int, ...]
    rank: int
    value: float
    multiplicity: int

    @property
    def num_params(self) -> int:
        """The number of weights."""
        return _num_params(self.widths)


def random_deep_linear_networks(
    num_params: int = 10_000, count: int = 20, *, seed: int = 0, depths: Sequence[int] = DEPTHS
) -> list[RandomNetwork]:
    """Deep linear networks of one size with λ spread evenly on a logarithmic scale, smallest first.

    Widths vary by a factor of a few, ranks are at most half of the smallest width. Each network has
    ``num_params`` weights to within 2 %.

    Args:
        num_params: weights of each network, ≥ 30.
        count: networks, ≥ 2.
        seed: of the choice.
        depths: numbers of layers to choose from, each ≥ 1.

    Raises:
        InvalidArgumentError: a value out of range, or more networks asked for than there are.

    Examples:
        >>> ladder = random_deep_linear_networks(1000, count=5)
        >>> all(abs(one.num_params - 1000) <= 20 for one in ladder)
        True
    """
    if num_params < 30 or count < 2 or not depths or min(depths) < 1:
        raise InvalidArgumentError(
            f"num_params, count, depths: expected ≥ 30, ≥ 2 and integers ≥ 1, got {num_params!r}, {count!r} "
            f"and {depths!r}."
        )
    random = np.random.default_rng(seed)
    found = {_candidate(num_params, depths, random) for _ in range(CANDIDATES * count)} - {None}
    left = sorted(
        (one for one in found if one is not None), key=lambda one: (one.value, one.widths, one.rank)
    )
    if len(left) < count:
        raise InvalidArgumentError(f"count: found only {len(left)} networks of {num_params} parameters.")
    lowest, highest = (left[int(part * (len(left) - 1))].value for part in (0.02, 0.98))
    chosen = []
    for target in np.geomspace(lowest, highest, count):
        nearest = min(left, key=lambda one: abs(np.log(one.value / target)))
        left.remove(nearest)
        chosen.append(nearest)
    return sorted(chosen, key=lambda one: one.value)


def _candidate(num_params: int, depths: Sequence[int], random: np.random.Generator) -> RandomNetwork | None:
    """A random network of about that size; None if rounding its widths missed it."""
    depth = int(random.choice(depths))
    shape = np.exp(0.6 * random.standard_normal(depth + 1))
    scale = np.sqrt(num_params / (shape[1:] * shape[:-1]).sum())
    widths = tuple(max(1, round(float(d))) for d in shape * scale)
    rank = int(random.integers(0, min(widths) // 2 + 1))
    if abs(_num_params(widths) / num_params - 1) > SIZE_TOLERANCE:
        return None
    coefficient = dln_learning_coefficient(widths, rank)
    return RandomNetwork(widths, rank, float(coefficient.value), coefficient.multiplicity)


def _num_params(widths: Sequence[int]) -> int:
    return sum(before * after for before, after in itertools.pairwise(widths))


class CrossingNetwork(torch.nn.Module):
    """x ↦ x Π w_i^{k_i}, whose squared error is a normal crossing; see `normal_crossing`.

    Attributes:
        w: the parameters (P,).
        powers: k.
    """

    def __init__(self, powers: Sequence[int], center: Sequence[float], dtype: torch.dtype) -> None:
        super().__init__()
        self.powers = tuple(powers)
        self.w = torch.nn.Parameter(torch.tensor(center, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of the shape of x."""
        return x * self.factor()

    def factor(self) -> torch.Tensor:
        """Π w_i^{k_i}; a scalar."""
        value = torch.ones_like(self.w[0])
        for entry, power in zip(self.w, self.powers, strict=True):
            value = value * torch.pow(entry, power)
        return value

    def population_loss(self, batch: Any = None) -> torch.Tensor:
        """Π w_i^{2 k_i}, for inputs of unit variance; a scalar."""
        return self.factor().square()

    def dataset(self, n: int, *, noise: float = 0.0, scale: float = 1.0, seed: int = 0) -> TensorDataset:
        """Samples with x ~ scale · N(0, 1) and y = noise · N(0, 1), each (n, 1)."""
        teacher = torch.zeros(1, 1, dtype=self.w.dtype)
        return TensorDataset(*TeacherData(teacher, n, noise=noise, scale=scale, seed=seed).tensors())


def normal_crossing(
    powers: Sequence[int], *, center: Sequence[float] | None = None, dtype: torch.dtype = torch.float32
) -> CrossingNetwork:
    """The network x ↦ x Π w_i^{k_i} with target 0, at a zero of the product.

    Args:
        powers: k (P,), integers ≥ 0, not all 0.
        center: where the parameters stand (P,); None: 0. λ there is the least 1/(2 k_i) over the
            entries that are 0.
        dtype: of the parameters.

    Raises:
        InvalidArgumentError: powers out of range, or a center where the product is not 0.

    Examples:
        >>> model = normal_crossing([1, 2])
        >>> x, y = model.dataset(50).tensors
        >>> squared_error(model, (x, y)).item()
        0.0
    """
    checked = NormalCrossing(powers, center=center)
    return CrossingNetwork(checked.powers, checked.center.tolist(), dtype)
