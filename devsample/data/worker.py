"""What runs where batches are made: in a loader worker, or in the chain process without workers.

This module is preloaded by the server that forks the workers: it stays light.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, TensorDataset, _utils, default_collate, get_worker_info

from devsample.data.carriers import Carried, send
from devsample.data.generators import (
    find_generators,
    preserved_global_generators,
    reseed,
    seed_global_generators,
    set_state,
    state_of,
)
from devsample.data.sending import is_no_space, remove_failed_memory
from devsample.data.streams import StreamBatch, StreamEnd, StreamReader, Ticket, own_cells, set_epoch
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
    indices: Sequence[int]
    """The items; of a stream's batch, filled in when it has come: as many numbers as samples."""
    seed: int
    epoch: int = 0
    place: int = 0
    """In a stream: which of its batches this is."""


class BatchMaker(Dataset[Any]):
    """Makes the batches that are asked for; the data set of the wrapped DataLoader.

    Args:
        dataset: the user's data set.
        collate: its collate function.
        batched: whether a request is a batch of items (else its single item is the batch).
    """

    def __init__(self, dataset: Carried, collate: Carried, *, batched: bool) -> None:
        self.dataset, self.collate, self.batched = dataset, collate, batched
        self.preserves = False  # whether all generators are as before after every batch
        self._kept: dict[int, tuple[Any, Any]] = {}

    def __getitem__(self, request: Any) -> Any:
        """The batch that was asked for, packed if it has to leave this process."""
        if self.preserves and get_worker_info() is None:
            with preserved_global_generators():
                self._kept = {key: (one, state_of(one)) for key, (one, _) in self._kept.items()}
                try:
                    return self._guarded(request)
                finally:
                    self.put_back()
        return self._handed_over(request, self._guarded(request))

    def put_back(self) -> None:
        """Put the generators that the user's objects hold into the state in which they were found."""
        for generator, state in self._kept.values():
            set_state(generator, state)

    def make(self, request: Any) -> Any:
        """The batch; whatever the user's code raises comes as it is."""
        raise NotImplementedError

    def where(self, request: Any) -> tuple[str, str]:
        """The place of a request in words, and the items it is about."""
        raise NotImplementedError

    def _keep(self, generators: Iterable[Any]) -> None:
        """Note the state of generators that will be seeded."""
        for one in generators:
            if id(one) not in self._kept:
                self._kept[id(one)] = one, state_of(one)

    def _collated(self, items: Any) -> Any:
        try:
            return self.collate.value(items)
        except Exception as error:
            if get_worker_info() is None or not is_no_space(error):
                raise
        remove_failed_memory()
        with _as_in_no_worker():  # so that torch's function collates into memory of its own
            return self.collate.value(items)

    def _guarded(self, request: Any) -> Any:
        try:
            return self.make(request)
        except LoaderError:
            raise
        except (Exception, SystemExit) as error:
            kind = LoaderError if get_worker_info() is None else LoaderWorkerError
            raise kind(self._describe(request, error)) from None

    def _handed_over(self, request: Any, made: Any) -> Any:
        if get_worker_info() is None or made is None or isinstance(made, StreamEnd):
            return made
        try:
            if isinstance(made, StreamBatch):
                return made._replace(batch=send(made.batch))
            return send(made)
        except LoaderWorkerError as error:
            raise LoaderWorkerError(f"{self._place(request)}: {error}") from None

    def _place(self, request: Any) -> str:
        info = get_worker_info()
        worker = "" if info is None else f", loader worker {info.id} (pid {os.getpid()})"
        return self.where(request)[0] + worker

    def _describe(self, request: Any, error: BaseException) -> str:
        _, items = self.where(request)
        return (
            f"{self._place(request)}: the data set or its collate_fn "
            f"raised {short_error(error)}\n  {items}\n{traceback.format_exc()}"
        )


class IndexedBatches(BatchMaker):
    """Batches of a map-style data set: seeds, fetches the items, collates them.

    Args:
        seeded: whether generators are seeded for each request: torch's, numpy's and Python's
            global ones, and those that the data set or its collate function holds.
    """

    def __init__(self, dataset: Carried, collate: Carried, *, batched: bool, seeded: bool) -> None:
        super().__init__(dataset, collate, batched=batched)
        self.seeded = seeded
        self._epoch = -1
        self._generators: list[Any] | None = None  # not looked for yet

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_generators": None, "_epoch": -1, "_kept": {}}

    @property
    def columns(self) -> tuple[torch.Tensor, ...] | None:
        """Tensors that can be indexed at once, which gives what collating their rows would."""
        plain = self.batched and type(self.dataset.value) is TensorDataset
        return self.dataset.value.tensors if plain and self.collate.value is default_collate else None

    def __getitem__(self, request: BatchRequest) -> Any:
        """The batch that was asked for, packed if it has to leave this process."""
        if self.seeded:
            return super().__getitem__(request)
        return self._handed_over(request, self._guarded(request))

    def make(self, request: BatchRequest) -> Any:
        """The batch; whatever the user's code raises comes as it is."""
        if self.seeded:
            self._seed(request)
        columns = self.columns
        if columns is not None:
            index = torch.tensor(request.indices, device="cpu")
            return [one[index] for one in columns]
        return self._collated(self.items(request.indices))

    def where(self, request: BatchRequest) -> tuple[str, str]:
        """The place of a request in words, and the items it is about."""
        shown = ", ".join(map(str, request.indices[:8])) + (" …" if len(request.indices) > 8 else "")
        return f"chain {request.chain}, step {request.step}", f"items {shown}"

    def _seed(self, request: BatchRequest) -> None:
        if self._generators is None:
            self._generators = find_generators(self.dataset.value, self.collate.value)
            self._keep(self._generators)
            if get_worker_info() is not None and hasattr(self.dataset.value, "set_epoch"):
                own_cells(self.dataset.value)
        if request.epoch != self._epoch:
            set_epoch(self.dataset.value, request.epoch)
            self._epoch = request.epoch
        seed_global_generators(request.seed)
        reseed(self._generators, request.seed)

    def items(self, indices: Sequence[int]) -> Any:
        """What the data set gives for these numbers; whatever it raises comes as it is."""
        dataset = self.dataset.value
        if not self.batched:
            return dataset[indices[0]]
        if hasattr(dataset, "__getitems__"):
            return dataset.__getitems__(indices)
        return [dataset[index] for index in indices]


class StreamedBatches(BatchMaker):
    """Batches of an iterable data set, asked for by ticket.

    Args:
        batch_size: items per batch; None: an item is a batch.
        drop_last: leave out a ragged last batch of an epoch.
        shares: in how many shares a data set that divides itself is read.
    """

    def __init__(
        self,
        dataset: Carried,
        collate: Carried,
        *,
        batch_size: int | None,
        drop_last: bool,
        shares: int,
    ) -> None:
        super().__init__(dataset, collate, batched=batch_size is not None)
        self._batch_size, self._drop_last, self._shares = batch_size, drop_last, shares
        self._reader: StreamReader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None, "_kept": {}}

    def make(self, request: Ticket | None) -> StreamBatch | StreamEnd | None:
        """The batch; whatever the user's code raises comes as it is. Nothing, if none is asked for."""
        if request is None:
            return None
        if self._reader is None:
            self._keep(find_generators(self.dataset.value, self.collate.value))
            self._reader = StreamReader(
                self.dataset.value,
                self._batch_size,
                self.collate.value,
                drop_last=self._drop_last,
                shares=self._shares,
            )
        items = self._reader.items(request)
        if isinstance(items, StreamEnd):
            return items
        if not request.wanted:
            return StreamBatch(None, 0, self._reader.divided, self._reader.new_digest())
        with self._reader.shown():
            batch = self._collated(items if self.batched else items[0])
        size = len(items) if self.batched else _rows_of(batch)
        return StreamBatch(batch, size, self._reader.divided, self._reader.new_digest())

    def where(self, request: Ticket) -> tuple[str, str]:
        """The place of a request in words, and the items it is about."""
        return f"chain {request.chain}", f"batch {request.position} of epoch {request.epoch}"


@contextlib.contextmanager
def _as_in_no_worker() -> Iterator[None]:
    worker: Any = _utils.worker
    info = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info


def _rows_of(batch: Any) -> int:
    """Samples in a batch that the data set made: the length of its first tensor or array."""
    waiting = [batch]
    while waiting:
        one = waiting.pop(0)
        if getattr(one, "ndim", 0) > 0:
            return int(one.shape[0])
        if isinstance(one, dict) or hasattr(one, "values"):
            waiting += list(one.values())
        elif isinstance(one, (list, tuple)):
            waiting += one
    return 1


class WorkerStart:
    """``worker_init_fn``: ties the worker to its parent, then runs the user's own function."""

    def __init__(self, user: Carried | None) -> None:
        self._user = user

    def __call__(self, worker_id: int) -> None:
        """Called by torch in the new worker."""
        leave_with_parent()
        sys.excepthook = _quiet_about_readers
        info = get_worker_info()
        try:
            if info is not None and isinstance(info.dataset, BatchMaker):
                info.dataset.dataset.load()
                own = replace(info, dataset=info.dataset.dataset.value)  # the user's, as they expect
                _utils.worker._worker_info = own
                info.dataset.collate.load()
            user = None if self._user is None else self._user.value
        except LoaderWorkerError as error:
            raise LoaderWorkerError(f"loader worker {worker_id} (pid {os.getpid()}): {error}") from None
        if user is not None:
            user(worker_id)


def _quiet_about_readers(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """A reader that left in the middle of a batch is no news of a worker's."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def as_it_is(made: Any) -> Any:
    """``collate_fn`` of the wrapped loader."""
    return made
