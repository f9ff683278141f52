"""What runs where batches are made: in a loader worker, or in the chain process without workers.

This module is preloaded by the server that forks the workers: it stays light.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, TensorDataset, _utils, default_collate, get_worker_info

from devsample.data.carriers import Carried
from devsample.data.generators import preserved_global_generators, seed_global_generators
from devsample.errors import LoaderError, LoaderWorkerError
from devsample.machine import leave_with_parent
from devsample.serialize import short_error


class BatchRequest(NamedTuple):
    """One micro-batch of one step of one chain."""

    chain: int
    step: int
    micro: int
    role: int
    last: bool
    indices: list[int]
    seed: int


class BatchDataset(Dataset[Any]):
    """Turns a `BatchRequest` into a batch: seeds, fetches the items, collates them.

    Args:
        dataset: the user's map-style data set.
        collate: its collate function.
        batched: whether a request is a batch of items (else its single item is the batch).
        seeded: whether torch, numpy and random are seeded for each request.
    """

    def __init__(self, dataset: Carried, collate: Carried, *, batched: bool, seeded: bool) -> None:
        self.dataset, self.collate = dataset, collate
        self.batched, self.seeded = batched, seeded
        self.preserves = False  # whether the process's own generators stay as they are

    @property
    def _rows(self) -> tuple[torch.Tensor, ...] | None:
        """Tensors that can be indexed at once, which gives what collating their rows would."""
        plain = self.batched and type(self.dataset.value) is TensorDataset
        return self.dataset.value.tensors if plain and self.collate.value is default_collate else None

    def __getitem__(self, request: BatchRequest) -> Any:
        """The batch that was asked for."""
        if self.preserves and self.seeded and get_worker_info() is None:
            with preserved_global_generators():
                return self._make(request)
        return self._make(request)

    def _make(self, request: BatchRequest) -> Any:
        if self.seeded:
            seed_global_generators(request.seed)
        try:
            if self._rows is not None:
                index = torch.tensor(request.indices, device="cpu")
                return [rows[index] for rows in self._rows]
            return self.collate.value(self._items(request.indices))
        except Exception as error:
            kind = LoaderError if get_worker_info() is None else LoaderWorkerError
            raise kind(self._describe(request, error)) from None

    def _items(self, indices: list[int]) -> Any:
        dataset = self.dataset.value
        if not self.batched:
            return dataset[indices[0]]
        if hasattr(dataset, "__getitems__"):
            return dataset.__getitems__(indices)
        return [dataset[index] for index in indices]

    def _describe(self, request: BatchRequest, error: Exception) -> str:
        info = get_worker_info()
        where = "" if info is None else f", loader worker {info.id} (pid {os.getpid()})"
        shown = ", ".join(map(str, request.indices[:8])) + (" …" if len(request.indices) > 8 else "")
        return (
            f"chain {request.chain}, step {request.step}{where}: the data set or its collate_fn "
            f"raised {short_error(error)}\n  items {shown}\n{traceback.format_exc()}"
        )


class WorkerStart:
    """``worker_init_fn``: ties the worker to its parent, then runs the user's own function."""

    def __init__(self, user: Carried | None) -> None:
        self._user = user

    def __call__(self, worker_id: int) -> None:
        """Called by torch in the new worker."""
        leave_with_parent()
        sys.excepthook = _quiet_about_readers
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, BatchDataset):
            own = replace(info, dataset=info.dataset.dataset.value)  # the user's, as they expect
            _utils.worker._worker_info = own
        if self._user is not None:
            self._user.value(worker_id)


def _quiet_about_readers(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """A reader that left in the middle of a batch is no news of a worker's."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
