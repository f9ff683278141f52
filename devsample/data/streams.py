"""Data that comes in an order of its own: iterable data sets, read where batches are made.

A stream belongs to one chain and one purpose, and goes through the data epoch after epoch. Its
batches are asked for by place, in a `Ticket`, and what a ticket brings depends on the ticket
alone: whichever process reads it gets there by reading from the start of the epoch, its
generators seeded for every batch on the way.

A data set that asks ``torch.utils.data.get_worker_info()`` for its share divides itself. It then
sees as many workers as the loader has, whichever process reads, and its shares take turns.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import _utils, get_worker_info

from devsample.data.fingerprint import content_hash
from devsample.data.generators import find_generators, reseed, seed_global_generators
from devsample.errors import LoaderError
from devsample.seeds import ChainKey, Role, stream_seed

_MOST_READINGS = 32
_MOST_OBJECTS = 1000
_NO_ITEMS: list[Any] = []


class Ticket(NamedTuple):
    """One place in the stream of a chain: batch ``position`` of an epoch, for a purpose."""

    chain: int
    key: ChainKey
    role: int
    epoch: int
    position: int
    wanted: bool

    def seed(self, position: int) -> int:
        """Of the generators at a position of this epoch; 0 is also the state the epoch opens with."""
        return stream_seed(self.key, Role.ITEMS, position, self.epoch << 8 | self.role)


class StreamBatch(NamedTuple):
    """A batch with the number of samples in it; nothing if it was only passed over."""

    batch: Any
    size: int
    divided: bool
    digest: str = ""
    """Of the first items of the epoch, or of the share, if this process has just opened it."""


class StreamEnd(NamedTuple):
    """There is no batch at the ticket's place: this share of the data has ended for the epoch."""

    items: int
    divided: bool


class StreamReader:
    """Reads all streams of one process.

    Args:
        dataset: the iterable data set, the process's own.
        batch_size: items per batch; None: an item is a batch.
        collate: makes a batch of items; generators that it holds are seeded with the rest.
        drop_last: leave out a ragged last batch.
        shares: in how many shares a data set that divides itself is read.
    """

    def __init__(
        self, dataset: Any, batch_size: int | None, collate: Any, *, drop_last: bool, shares: int
    ) -> None:
        self._dataset, self._batch_size, self._drop_last = dataset, batch_size, drop_last
        self._collate, self._shares = collate, max(1, shares)
        self._divided: bool | None = None if shares > 1 else False  # known after the first batch
        self._latest: _Reading | None = None
        self._taken = False  # whether the data set itself is read, since it cannot be copied
        self._readings: OrderedDict[tuple[ChainKey, int, int], _Reading] = OrderedDict()

    def items(self, ticket: Ticket) -> list[Any] | StreamEnd:
        """The items of a ticket's batch, generators left as its collate function should find them."""
        reading, place = self._find(ticket)
        self._latest = reading
        try:
            items = self._advance(reading, ticket, place)
        except BaseException:  # a generator that raised would seem to be at its end
            self._forget(reading)
            raise
        return items if items else StreamEnd(reading.count, bool(self._divided))

    @property
    def divided(self) -> bool:
        """Whether the data set was seen to divide itself."""
        return bool(self._divided)

    def new_digest(self) -> str:
        """The digest of the epoch that the latest items belong to, the first time it is asked for."""
        if self._latest is None:
            return ""
        digest, self._latest.digest = self._latest.digest, ""
        return digest

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """While a batch is collated, the user's code sees the share that its items came from."""
        assert self._latest is not None
        return self._latest.shown()

    def _find(self, ticket: Ticket) -> tuple[_Reading, int]:
        """The reading that a ticket is on, and the place of its batch there."""
        if self._divided is None:
            self._find_out(ticket)
        share, place = 0, ticket.position
        if self._divided:
            share, place = ticket.position % self._shares, ticket.position // self._shares
        known = self._readings.get((ticket.key, ticket.role, share))
        if known is None or known.epoch != ticket.epoch or known.place > place:
            known = self._go_to(ticket, share)
        self._readings.move_to_end(known.name)
        return known, place

    def _find_out(self, ticket: Ticket) -> None:
        """Whether the data set divides itself: whether it asks, and two shares begin differently.

        Every process looks at the same two shares, so that all come to the same answer.
        """
        first, second = (self._beginning(ticket._replace(epoch=0), share) for share in (0, 1))
        asked = first.info is not None and first.info.was_asked
        same = first.count > 0 and first.digest == second.digest
        self._divided = asked and not same

    def _beginning(self, ticket: Ticket, share: int) -> _Reading:
        """A share of which the first batch was read, to be thrown away."""
        reading = self._open(ticket, share, self._new_source())
        self._forget(reading)
        self._read(reading, ticket)
        reading.end()
        return reading

    def _go_to(self, ticket: Ticket, share: int) -> _Reading:
        """The epoch of a ticket, from its beginning.

        A data set may count its epochs itself. So one copy of it is read by one stream only, epoch
        after epoch and each to its end, also those epochs in which this process had no part.
        """
        reading = self._readings.get((ticket.key, ticket.role, share))
        if reading is not None and reading.epoch >= ticket.epoch:
            reading = None
        first, source = 0, None
        if reading is not None:
            first, source = reading.epoch + 1, reading.source
            self._drain(reading, ticket)
        source = self._new_source() if source is None else source
        for epoch in range(first, ticket.epoch):
            missed = ticket._replace(epoch=epoch)
            self._drain(self._open(missed, share, source), missed)
        return self._open(ticket, share, source)

    def _drain(self, reading: _Reading, ticket: Ticket) -> None:
        of_its_epoch = ticket._replace(epoch=reading.epoch)
        while self._pull(reading, of_its_epoch):
            pass

    def _open(self, ticket: Ticket, share: int, source: Any) -> _Reading:
        real = get_worker_info()
        shares = self._shares if self._divided is not False else 1
        info = None if real is None else _WatchedInfo(real, share, shares, source)
        generators = find_generators(source, self._collate)
        reading = _Reading((ticket.key, ticket.role, share), ticket.epoch, source, info, generators)
        self._seed(reading, ticket, 0)
        with reading.shown():
            reading.iterator = iter(source)
        self._keep(reading)
        return reading

    def _new_source(self) -> Any:
        """The data set for one stream: a copy, so that none disturbs another; else the only one."""
        try:
            source = _own_copy(self._dataset)
        except LoaderError:
            if self._taken:
                raise
            source, self._taken = self._dataset, True
        if get_worker_info() is not None:
            own_cells(source)
        return source

    def _advance(self, reading: _Reading, ticket: Ticket, place: int) -> list[Any]:
        while True:
            items = self._pull(reading, ticket)
            if not items or reading.place > place:
                return items

    def _pull(self, reading: _Reading, ticket: Ticket) -> list[Any]:
        """The next batch of items; nothing at the end of the epoch."""
        items = self._read(reading, ticket)
        reading.place += bool(items)
        return items

    def _read(self, reading: _Reading, ticket: Ticket) -> list[Any]:
        if reading.ended:
            return _NO_ITEMS
        if reading.place > 0:  # the first one goes on from the state in which the epoch was opened
            share = reading.name[2]
            position = reading.place * self._shares + share if self._divided else reading.place
            self._seed(reading, ticket, position)
        with reading.shown():
            items = _take(reading.iterator, self._batch_size or 1)
        if reading.place == 0 and reading.info is not None:
            reading.digest = content_hash(items)
        reading.count += len(items)
        ragged = self._batch_size is not None and len(items) < self._batch_size
        if not items or (ragged and self._drop_last and reading.place and ticket.role != Role.FULL_ORDER):
            reading.end()
            return _NO_ITEMS
        return items

    def _seed(self, reading: _Reading, ticket: Ticket, position: int) -> None:
        seed = ticket.seed(position)
        set_epoch(reading.source, _epoch_number(reading.source, ticket))
        seed_global_generators(seed)
        reseed(reading.generators, seed)

    def _keep(self, reading: _Reading) -> None:
        self._readings[reading.name] = reading
        self._readings.move_to_end(reading.name)
        while len(self._readings) > _MOST_READINGS * self._shares:
            self._readings.popitem(last=False)[1].end()

    def _forget(self, reading: _Reading) -> None:
        self._readings.pop(reading.name, None)


def _take(iterator: Iterator[Any], count: int) -> list[Any]:
    """Up to ``count`` items. It never calls ``iter``, which starts some iterators anew."""
    items: list[Any] = []
    try:
        while len(items) < count:
            items.append(next(iterator))
    except StopIteration:
        pass
    return items


class _Reading:
    """One epoch of a stream, or of one share of it, under way."""

    def __init__(
        self,
        name: tuple[ChainKey, int, int],
        epoch: int,
        source: Any,
        info: _WatchedInfo | None,
        generators: list[Any],
    ) -> None:
        self.name, self.epoch, self.source, self.info = name, epoch, source, info
        self.generators = generators
        self.iterator: Iterator[Any] = iter(())
        self.place = 0  # of the batch that comes next
        self.count = 0  # items so far
        self.ended = False
        self.digest = ""

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """While the user's code runs, it sees the share that this reading is."""
        return contextlib.nullcontext() if self.info is None else _shown(self.info)

    def end(self) -> None:
        """Let go of the iterator."""
        self.ended, self.iterator = True, iter(())


class _WatchedInfo:
    """Stands in for torch's ``WorkerInfo``: shows the share that is read, and notes who asks."""

    def __init__(self, real: Any, share: int, shares: int, dataset: Any) -> None:
        self._real, self._share, self._shares = real, share, shares
        self.dataset, self.was_asked = dataset, False

    @property
    def id(self) -> int:
        self.was_asked = True
        return self._share

    @property
    def num_workers(self) -> int:
        self.was_asked = True
        return self._shares

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextlib.contextmanager
def _shown(info: _WatchedInfo) -> Iterator[None]:
    worker: Any = _utils.worker
    real = worker._worker_info
    worker._worker_info = info
    try:
        yield
    finally:
        worker._worker_info = real


def _own_copy(dataset: Any) -> Any:
    """A copy with iteration state of its own; the data in it, and what cannot be copied, is shared."""
    memo: dict[int, Any] = {}
    _share_data(dataset, memo)
    try:
        return copy.deepcopy(dataset, memo)
    except Exception:  # it holds a handle: iterators of one object it is, if they are independent
        if iter(dataset) is not dataset:
            return dataset
    raise LoaderError(
        f"loader_spec.dataset: a {type(dataset).__name__} is its own iterator and cannot be copied, but a "
        "chain needs two independent streams (gradient and loss). Let __iter__ return a new iterator."
    )


def _share_data(one: Any, memo: dict[int, Any]) -> None:
    """Tell deepcopy to keep tensors and arrays as they are."""
    for value in getattr(one, "__dict__", {}).values():
        parts = list(value.values()) if isinstance(value, dict) else value
        for part in (value, *(parts if isinstance(parts, (list, tuple)) else ())):
            if isinstance(part, (torch.Tensor, np.ndarray)) and not _is_cell(part):
                memo[id(part)] = part


def own_cells(dataset: Any) -> None:
    """Give a worker's data set numbers of its own where it shares them with other processes.

    Such a number is what others say to it, the epoch as a rule. Here each stream has its own epoch,
    and the workers are at different ones.
    """
    seen: set[int] = set()
    waiting = [dataset]
    while waiting and len(seen) < _MOST_OBJECTS:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        for name, value in list(getattr(one, "__dict__", {}).items()):
            if _is_cell(value):
                with contextlib.suppress(AttributeError):
                    setattr(one, name, value.clone())
            elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
                waiting.append(value)


def _is_cell(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_shared()  # type: ignore[no-untyped-call]


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tell the data set in which epoch it is, if it wants to know."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


def _epoch_number(dataset: Any, ticket: Ticket) -> int:
    """The epoch as the data set is told it.

    A ``datasets.IterableDataset`` shuffles by its own seed and the epoch, so the epoch is what makes
    the order of chains differ.
    """
    if type(dataset).__module__.partition(".")[0] != "datasets":
        return ticket.epoch
    start = stream_seed(ticket.key, Role.DATASET, 0, int(ticket.role)) >> 34  # leaves room to count
    return start + ticket.epoch


def known_shares(dataset: Any) -> int | None:
    """Into how many parts a data set can divide itself, if it says so: its files, as a rule."""
    for name in ("num_shards", "n_shards"):
        count = getattr(dataset, name, None)
        if isinstance(count, int):
            return count
    stages = getattr(dataset, "pipeline", None)
    urls = getattr(stages[0], "urls", None) if isinstance(stages, list) and stages else None
    return len(urls) if isinstance(urls, (list, tuple)) else None
