"""ReLU networks whose layers are rescaled without changing the function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from devsample.errors import InvalidArgumentError

__all__ = ["ReLUNetwork", "relu_network"]


class ReLUNetwork(torch.nn.Module):
    """A multilayer perceptron with ReLU; layers stand rescaled, see `relu_network`.

    Attributes:
        layers: the ``torch.nn.Linear`` layers, with biases.
        factors: by what each parameter (by name) stands multiplied.
    """

    def __init__(self, widths: Sequence[int], seed: int, alpha: float, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.widths, self.alpha = tuple(widths), alpha
        self.layers = torch.nn.ModuleList()
        self.factors: dict[str, float] = {}
        reached = 1.0
        for number, (before, after) in enumerate(itertools.pairwise(widths)):
            factor = self._factor(number)
            reached *= factor
            layer = torch.nn.utils.skip_init(torch.nn.Linear, before, after, dtype=dtype)  # type: ignore[no-untyped-call]
            weight = torch.randn(after, before, generator=generator, dtype=torch.float64)
            bias = torch.randn(after, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                layer.weight.copy_(weight * (2 / before) ** 0.5 * factor)
                layer.bias.copy_(bias * 0.1 * reached)
            self.layers.append(layer)
            self.factors |= {f"layers.{number}.weight": factor, f"layers.{number}.bias": reached}

    def _factor(self, number: int) -> float:
        """α, 1/α, α, …; 1 for the last layer if it has no partner."""
        if number % 2:
            return 1 / self.alpha
        return self.alpha if number < len(self.widths) - 2 else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs (B, widths[-1]) for inputs (B, widths[0])."""
        *hidden, last = self.layers
        for layer in hidden:
            x = torch.relu(layer(x))
        return last(x)  # type: ignore[no-any-return]

    def param_groups(self, *, lr: float, localization: float = 0.0, **others: Any) -> list[dict[str, Any]]:
        """A group for each parameter, with the step size ε f² and localization γ f⁻² of its factor f.

        A sampler with these groups and one seed makes the same moves, up to f, for every α.

        Args:
            lr: ε at factor 1.
            localization: γ at factor 1.
            **others: further values of all groups.
        """
        return [
            {
                "params": [parameter],
                "lr": lr * self.factors[name] ** 2,
                "localization": localization / self.factors[name] ** 2,
                **others,
            }
            for name, parameter in self.named_parameters()
        ]

    def dataset(self, n: int, *, noise: float = 0.0, seed: int = 0) -> TensorDataset:
        """Samples x ~ N(0, I), y = f(x) + noise · N(0, I), with f as the network stands now."""
        generator = torch.Generator().manual_seed(seed)
        dtype = next(self.parameters()).dtype
        x = torch.randn(n, self.widths[0], generator=generator, dtype=torch.float64).to(dtype)
        errors = torch.randn(n, self.widths[-1], generator=generator, dtype=torch.float64).to(dtype)
        with torch.no_grad():
            return TensorDataset(x, self(x) + noise * errors)


def relu_network(
    widths: Sequence[int], *, seed: int = 0, alpha: float = 1.0, dtype: torch.dtype = torch.float32
) -> ReLUNetwork:
    """A ReLU network with random weights, its layers multiplied by α, 1/α, α, … in turn.

    ReLU(α z) = α ReLU(z), so the function is the same for every α > 0 (up to rounding), and so is
    its learning coefficient; the value at a finite nβ with one γ for all parameters is not.

    Args:
        widths: from the input to the output, at least three, each ≥ 1.
        seed: of the weights.
        alpha: α > 0.
        dtype: of the weights.

    Raises:
        InvalidArgumentError: a value out of range.

    Examples:
        >>> x = torch.ones(1, 3, dtype=torch.float64)
        >>> one, other = (relu_network([3, 4, 1], alpha=a, dtype=torch.float64) for a in (1, 100))
        >>> bool(torch.allclose(one(x), other(x)))
        True
    """
    if len(widths) < 3 or min(widths) < 1:
        raise InvalidArgumentError(f"widths: expected three or more integers ≥ 1, got {widths!r}.")
    if not alpha > 0:
        raise InvalidArgumentError(f"alpha: expected a number > 0, got {alpha!r}.")
    return ReLUNetwork(widths, seed, float(alpha), dtype)
