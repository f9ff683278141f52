"""The names that scripts written for devinterp 1.x import.

Change the import line to ``from devsample.compat.devinterp import ...``; the calls stay as they
are. Everything here is devsample's own, under the name that such scripts use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from devsample.errors import InvalidArgumentError
from devsample.estimate import (
    estimate_learning_coeff,
    estimate_learning_coeff_with_summary,
    sample,
)
from devsample.losses import nbeta_for
from devsample.samplers import SGLD

__all__ = [
    "SGLD",
    "default_nbeta",
    "estimate_learning_coeff",
    "estimate_learning_coeff_with_summary",
    "evaluate_ce",
    "evaluate_mse",
    "sample",
]


def default_nbeta(dataloader: DataLoader[Any] | int, grad_accum_steps: int = 1) -> float:
    r"""Inverse temperature by devinterp's rule, from the number of samples in a step.

    .. math:: n\beta = \frac{m}{\ln m}, \qquad m = \text{batch size} \times \text{grad\_accum\_steps}

    devsample's own default is n/ln n of the whole data set: see `devsample.nbeta_for`.

    Args:
        dataloader: a loader, whose batch size is used, or a number of samples ≥ 1 itself.
        grad_accum_steps: batches per step, ≥ 1.

    Raises:
        InvalidArgumentError: the loader has no batch size.

    Examples:
        >>> round(default_nbeta(64), 2)
        15.39
        >>> default_nbeta(32, grad_accum_steps=2) == default_nbeta(64)
        True
    """
    size = dataloader if isinstance(dataloader, int) else getattr(dataloader, "batch_size", None)
    if size is None:
        raise InvalidArgumentError(
            f"dataloader: expected a DataLoader with a batch size or a number of samples, got "
            f"{dataloader!r}. With a batch_sampler, give the number of samples in a batch."
        )
    return nbeta_for(size * grad_accum_steps)


def evaluate_ce(
    model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Mean cross-entropy of ``model(x)`` against the classes y.

    Args:
        model: gives logits of shape (B, C, ...).
        data: x, and y of shape (B, ...).

    Returns:
        The loss, and ``{"logits": model(x)}``.
    """
    x, y = data
    logits = model(x)
    return F.cross_entropy(logits, y), {"logits": logits}


def evaluate_mse(
    model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Mean squared error of ``model(x)`` against y.

    Args:
        model: gives predictions of y's shape.
        data: x and y.

    Returns:
        The loss, and ``{"output": model(x)}``.
    """
    x, y = data
    output = model(x)
    return F.mse_loss(output, y), {"output": output}
