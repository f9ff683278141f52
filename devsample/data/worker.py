"""What runs where batches are made: in a loader worker, or in the chain process without workers.

The user's objects travel to workers as cloudpickle bytes inside small carriers, so that functions
and classes of any origin arrive, and no file descriptor rides along. This module is preloaded by
the server that forks the workers: it stays light.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, _utils, default_collate, get_worker_info

from devsample.errors import LoaderError, LoaderWorkerError
from devsample.machine import leave_with_parent
from devsample.serialize import find_culprit, short_error, type_name


class BatchRequest(NamedTuple):
    """One micro-batch of one step of one chain."""

    chain: int
    step: int
    micro: int
    role: int
    last: bool
    indices: list[int]
    seed: int


class Carried:
    """A user's object that is pickled as cloudpickle bytes."""

    def __init__(self, value: Any, data: bytes | None = None) -> None:
        self.value = value
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        data = self._data if self._data is not None else cloudpickle.dumps(self.value)
        return _arrive, (data,)


def _arrive(data: bytes) -> Carried:
    return Carried(cloudpickle.loads(data), data)


class Rebuilt(Carried):
    """A data set that is made again, from its recipe, in every worker."""

    def __init__(self, value: Any, recipe: bytes, seed: int) -> None:
        super().__init__(value)
        self._recipe, self._seed = recipe, seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._recipe, self._seed)


def _rebuild(recipe: bytes, seed: int) -> Carried:
    make = cloudpickle.loads(recipe)
    seed_global_generators(seed)  # what the factory draws is the same in every process
    return Carried(make())


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


class PackedBatch:
    """A batch that was serialised by the worker's main thread.

    Left to itself a worker serialises in a background thread, whose errors nobody sees: the
    reader waits for ever. It is unpacked while the reader takes it from the queue.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return ForkingPickler.loads, (self._data,)


def send(batch: Any) -> Any:
    """``collate_fn`` of the wrapped loader: pack the batch if it has to leave this process."""
    if get_worker_info() is None:
        return batch
    try:
        return PackedBatch(bytes(ForkingPickler.dumps(batch)))
    except Exception as error:
        culprit, path, cause = find_culprit(batch, "batch", error, ForkingPickler.dumps)
        raise LoaderWorkerError(
            f"{path} is a {type_name(culprit)} and cannot be sent from a loader worker "
            f"({short_error(cause)}). Return tensors, arrays or plain values from the data set, "
            "convert it in collate_fn, or use num_workers=0."
        ) from None


def seed_global_generators(seed: int) -> None:
    """Seed torch, numpy and random of this process from one 64-bit number."""
    torch.default_generator.manual_seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002 - the global one is what users use
    random.seed(seed)


class preserved_global_generators:  # noqa: N801 - reads as a statement
    """Leave the global generators of torch's CPU, numpy and random as they were."""

    def __enter__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._numpy = np.random.get_state()  # noqa: NPY002 - the global one is what is kept
        self._random = random.getstate()

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._torch)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._random)


def pass_through(worker_init_fn: Callable[[int], None] | None) -> Carried | None:
    """Carrier for an optional function."""
    return None if worker_init_fn is None else Carried(worker_init_fn)
