"""The data of observables, read in the chain process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from devsample.data.loader import ChainLoader
from devsample.data.spec import LoaderSpec
from devsample.errors import InvalidArgumentError, LoaderError
from devsample.objective import Batch
from devsample.observables.declared import Declared
from devsample.seeds import ChainKey

KEPT_BYTES = 1 << 26  # up to which the data of an observable stay on the device


class Source:
    """The samples of one observable: the same at every draw, in every process.

    Args:
        spec: the recipe.
        num_samples: how many; None: all.
        keys: the chains' keys.
        device: where batches end up.
        name: the observable's, for errors.
    """

    def __init__(
        self,
        spec: LoaderSpec,
        num_samples: int | None,
        keys: Sequence[ChainKey],
        device: torch.device,
        name: str,
    ) -> None:
        self._name = name
        self._loader = ChainLoader(spec, keys, grad_accum_steps=1, device=device)
        n = self._loader.num_samples
        self.count = n if num_samples is None else num_samples
        self._kept: list[Batch] | None = None
        if self.count > n:
            self.close()
            raise InvalidArgumentError(
                f"observables: {name!r}: num_samples={self.count}, but the data set has {n}."
            )

    def __iter__(self) -> Iterator[Batch]:
        """The batches, with their sample counts."""
        return self._read() if self._kept is None else iter(self._kept)

    def _read(self) -> Iterator[Batch]:
        kept: list[Batch] | None = []
        size = seen = 0
        for request, data in self._loader.serve(self._loader.full_pass(self.count)):
            count = len(request.indices)
            seen += count
            if kept is not None:
                size += nbytes(data)
                kept = [*kept, (count, data)] if size <= KEPT_BYTES else None
            yield count, data
        if seen != self.count:
            raise LoaderError(
                f"observables: {self._name!r}: the data set gave {seen} of {self.count} samples; give the "
                "right num_samples, or leave the sampler out."
            )
        if kept is not None:
            self._kept = kept
            self._loader.close()

    def close(self) -> None:
        """End the loader's workers."""
        self._loader.close()


class Sources:
    """The data of all observables of a run, read when they are first needed.

    Args:
        observables: of the run.
        spec: the run's own recipe.
        keys: the chains' keys.
        device: where batches end up.
    """

    def __init__(
        self, observables: Sequence[Any], spec: LoaderSpec, keys: Sequence[ChainKey], device: torch.device
    ) -> None:
        self._declared = {one.name: one for one in observables if isinstance(one, Declared)}
        self._spec, self._keys, self._device = spec, keys, device
        self._open: dict[str, Source] = {}

    def __getitem__(self, name: str) -> Source:
        """The data of the observable of this name."""
        if name not in self._open:
            one = self._declared[name]
            spec = one.loader_spec or self._spec
            self._open[name] = Source(spec, one.num_samples, self._keys, self._device, name)
        return self._open[name]

    def close(self) -> None:
        """End all workers."""
        for source in self._open.values():
            source.close()


def nbytes(batch: Any) -> int:
    """Bytes of the tensors in a batch; a great many if it holds what cannot be looked into."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, np.ndarray):
        return batch.nbytes
    if isinstance(batch, (str, bytes)):
        return len(batch)
    if isinstance(batch, Mapping):
        return sum(nbytes(value) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(nbytes(value) for value in batch)
    return 8 if isinstance(batch, (int, float, type(None))) else KEPT_BYTES + 1
