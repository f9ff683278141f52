"""The losses of all samples at w*, kept by index: the paired baseline of a draw without a forward pass.

They are read with L_n(w*), and used only if they give the losses of other batches at w* to rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import numpy as safetensors_numpy

from devsample.averages import Weighted
from devsample.checkpoints import write_bytes
from devsample.data.worker import BatchRequest
from devsample.losses import find_losses
from devsample.objective import Batch, Objective
from devsample.seeds import ChainKey
from devsample.stacked import Stacked

FILE = "center_losses.safetensors"
ROUNDING = 4.0  # in units of the precision of the losses: what two ways to take a mean may differ by
SMALL_LLC = 1e-3  # what they may change nβ · (loss − baseline) by, where single losses are rounded more
LARGEST_ROUNDING = 1024.0  # ... but by no more than this


@dataclass(frozen=True)
class CenterLosses:
    """Losses of all samples at w*.

    Attributes:
        sums: the loss of each sample, or its Σ w ℓ; float64, shape (n,).
        weights: its Σ w; None: the mean is by sample.
    """

    sums: np.ndarray
    weights: np.ndarray | None = None

    def mean(self, indices: Iterable[int]) -> float:
        """The loss at w* of the samples with these numbers, one of them as often as it is named."""
        chosen = indices if isinstance(indices, np.ndarray) else np.fromiter(indices, dtype=np.int64)
        if self.weights is None:
            return float(self.sums[chosen].mean())
        weight = float(self.weights[chosen].sum())
        return float(self.sums[chosen].sum()) / weight if weight > 0 else np.nan

    def save(self, folder: Path) -> None:
        """Write the file of a run folder, whole or not at all."""
        arrays = {"sums": self.sums} | ({} if self.weights is None else {"weights": self.weights})
        write_bytes(folder / FILE, safetensors_numpy.save(arrays))

    @classmethod
    def load(cls, folder: Path) -> CenterLosses:
        """Read what `save` wrote."""
        arrays = safetensors_numpy.load((folder / FILE).read_bytes())
        return cls(arrays["sums"], arrays.get("weights"))


class Collector:
    """Keeps the samples' losses that ``evaluate`` returns while all data are read once.

    Args:
        count: n.
    """

    def __init__(self, count: int) -> None:
        self._sums, self._weights = np.full(count, np.nan), np.full(count, np.nan)
        self._last: torch.Tensor | Weighted | None = None
        self._weighted = False
        self.dtype = torch.float64
        self.failed = False

    def __call__(self, output: Any) -> None:
        """Note what ``evaluate`` has returned."""
        self._last = None if self.failed else find_losses(output)

    def take(self, indices: Sequence[int]) -> None:
        """What was noted last are the losses of these samples, if it is one for each."""
        found, self._last = self._last, None
        losses = found.products if isinstance(found, Weighted) else found
        if self.failed or losses is None or losses.ndim == 0 or len(losses) != len(indices):
            self.failed = True
            return
        self.dtype, place = losses.dtype, np.asarray(indices, dtype=np.int64)
        if isinstance(found, Weighted):
            self._weighted = True
            each = Weighted(*(_exact(one) for one in found)).by_sample()
            self._sums[place], self._weights[place] = each.products.numpy(), each.weights.numpy()
        else:
            self._sums[place] = _exact(losses).reshape(len(losses), -1).mean(1).numpy()

    def result(self) -> CenterLosses | None:
        """The losses, if there is one of every sample, and they are not of half precision."""
        kept = CenterLosses(self._sums, self._weights if self._weighted else None)
        exact = self.dtype in (torch.float32, torch.float64)
        complete = np.isfinite(self._sums).all() and (kept.weights is None or np.isfinite(kept.weights).all())
        return kept if exact and complete and not self.failed else None


def _exact(values: torch.Tensor) -> torch.Tensor:
    return values.detach().cpu().double()


def reproduces(
    kept: CenterLosses,
    collected: torch.dtype,
    objective: Objective,
    center: torch.Tensor,
    steps: Sequence[Sequence[Batch]],
    requests: Sequence[BatchRequest],
    nbeta: float,
    key: ChainKey,
    *,
    together: bool,
) -> bool:
    """Whether the kept losses give those of other batches at w*, to rounding.

    Args:
        kept: the losses.
        collected: their precision, as they came.
        objective: of the run.
        center: w*.
        steps: batches that were drawn and read on their own.
        requests: of their micro-batches, one after the other.
        nbeta: nβ.
        key: of a chain.
        together: chains are computed at once, so the losses are compared with those of stacked states.
    """
    precision, following = torch.finfo(collected).eps, iter(requests)
    objective.flat.point_to(center)
    states = Stacked(objective, center.expand(2, -1).clone(), center, [key, key]) if together else None
    for number, batches in enumerate(steps):
        indices = np.fromiter(chain.from_iterable(next(following).indices for _ in batches), dtype=np.int64)
        expected = [float(objective.loss(batches, key, number))]
        if states is not None:
            expected += states.losses([batches, batches], number).tolist()
        scale = float(np.abs(kept.sums[indices]).sum())
        scale /= len(indices) if kept.weights is None else float(kept.weights[indices].sum())
        allowed = min(SMALL_LLC / nbeta, LARGEST_ROUNDING * precision * scale)
        allowed = max(ROUNDING * precision * scale, allowed)
        if not all(abs(kept.mean(indices) - one) <= allowed for one in expected):
            return False
    return True


def same_items(steps: Sequence[Sequence[Batch]], again: Iterator[tuple[BatchRequest, Any]]) -> bool:
    """Whether batches are the same when their items are read for other steps."""
    return all(_equal(data, next(again)[1]) for batches in steps for _, data in batches)


def _equal(one: Any, other: Any) -> bool:
    """Whether two batches hold the same; False for what cannot be looked into."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return one.dtype != object and np.array_equal(one, other)
    if isinstance(one, (str, bytes, bool, int, float, complex, type(None), np.generic)):
        return bool(one == other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one)]
        return all(_equal(getattr(one, name), getattr(other, name)) for name in names)
    return False
