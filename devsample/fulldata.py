"""What a chain needs of the whole data set: L_n and its gradient at w*, or at any state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from devsample.data.worker import BatchRequest
from devsample.errors import LoaderError
from devsample.objective import Batch, Objective
from devsample.seeds import ChainKey, Role
from devsample.stacked import RowByRow

Served = Iterator[tuple[BatchRequest, Any]]


@dataclass
class FullData:
    """The data set, read once.

    Attributes:
        batches: all of it on the device, if it was to be kept.
        gradient: ∇L_n(w*), shape (P,).
    """

    batches: tuple[Batch, ...]
    gradient: torch.Tensor

    @classmethod
    def read(
        cls,
        served: Served,
        num_samples: int,
        objective: Objective,
        center: torch.Tensor,
        key: ChainKey,
        *,
        keep: bool,
    ) -> FullData:
        """Take the requests of a full pass from ``served``.

        Raises:
            LoaderError: the pass ended before ``num_samples`` samples.
        """
        kept: list[Batch] = []
        total, piece = torch.zeros_like(center), torch.zeros_like(center)
        objective.flat.point_to(center)
        seen, weight = 0, 0.0
        while seen < num_samples:
            request, data = next(served, (None, None))
            if request is None or request.role != Role.FULL_ORDER:
                raise LoaderError(
                    f"the data set gave {seen} of num_samples={num_samples} samples, and this sampler needs "
                    "them all; give the right num_samples."
                )
            count = len(request.indices)
            if keep:
                kept.append((count, data))
            else:
                with objective.passing():
                    objective.loss_and_gradient(piece, [(count, data)], key, 0)
                if objective.weight is None:
                    total.add_(piece, alpha=count / num_samples)
                elif float(objective.weight) > 0:
                    weight += float(objective.weight)
                    total.lerp_(piece, float(objective.weight) / weight)
            seen += count
        return cls(tuple(kept), total)


class Potential:
    """L_n and its gradient at K states, for `ReferenceKernel`.

    Args:
        rows: computes at the rows of ``position``.
        position: scratch (K, P), where states are put.
        batches: all data.
    """

    def __init__(self, rows: RowByRow, position: torch.Tensor, batches: Sequence[Batch]) -> None:
        self._rows, self._position = rows, position
        self._batches = [list(batches)] * len(position)
        self._gradient = torch.zeros_like(position)

    def __call__(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """L_n (K,) and ∇L_n (K, P) at ``position`` (K, P); overwritten by the next call."""
        self._position.copy_(position)
        losses = self._rows.losses_and_gradients(self._gradient, self._batches, 0)
        return losses, self._gradient

    def gradient(self, position: torch.Tensor) -> torch.Tensor:
        """∇L_n (K, P) at ``position``; overwritten by the next call."""
        return self(position)[1]

    def at_center(self) -> torch.Tensor:
        """L_n(w*) of each row, shape (K,)."""
        return self._rows.center_losses(self._batches, 0)
