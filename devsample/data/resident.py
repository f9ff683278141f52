"""Data that lie in memory as a whole: the batches of all chains of a step are taken at once, by index.

They are the batches that the data set and its collate function would have made, without a row ever
being touched on its own. A tensor data set is there as it is. Another map-style data set is read once
and kept, if it is small and its items are shown to depend on their number alone: no generator moved
while all were read, and some of them, read again, were the same.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate

from devsample.data.batches import leaves_of, rebuilt
from devsample.data.generators import (
    find_generators,
    global_random_state,
    preserved_global_generators,
    seed_global_generators,
    set_state,
    state_of,
)
from devsample.data.orders import is_independent
from devsample.data.spec import LoaderSpec
from devsample.data.worker import IndexedBatches
from devsample.errors import LoaderError
from devsample.seeds import ChainKey, IndexBlocks, Role
from devsample.serialize import short_error

LARGEST_COLLECTED = 64 << 20  # bytes that a process keeps of a data set that it has read item by item
LARGEST_SHARE = 0.25  # of a device's free memory that data may take
_ITEMS_AT_ONCE = 256
_ITEMS_READ_AGAIN = 16
_NUMBERS = (bool, int, float, complex, np.generic)

Batch = tuple[int, Any]
Pieces = Callable[[int, int, Role, int | None], list[list[int]]]


class NotResident(Exception):  # noqa: N818 - says why batches are made item by item
    """The data set cannot be kept as tensors."""


class Columns(NamedTuple):
    """All items of a data set: a batch's structure, and its tensors with a row for each item."""

    like: Any
    leaves: list[torch.Tensor]
    in_place: bool
    """They are the data set's own tensors, which have a meaning for negative numbers too."""

    @property
    def in_rows(self) -> bool:
        """Whether an item's values lie side by side, so that a batch does."""
        return all(one.is_contiguous() for one in self.leaves)

    @classmethod
    def of(cls, maker: IndexedBatches, device: torch.device) -> Columns:
        """Those of a data set whose tensors are there.

        Raises:
            NotResident: it is no such data set, or too large for the device.
        """
        tensors = maker.columns
        if tensors is None:
            raise NotResident("it is no TensorDataset with the collate function of torch")
        for one in tensors:
            if type(one) is not torch.Tensor or one.layout is not torch.strided or one.requires_grad:
                raise NotResident("its tensors are not plain ones")
        _check_room(sum(one.numel() * one.element_size() for one in tensors), device)
        return cls(list(tensors), [one.to(device) for one in tensors], in_place=True)

    @classmethod
    def collect(cls, maker: IndexedBatches, count: int, device: torch.device) -> Columns:
        """Those of a data set that is read here, item by item.

        Raises:
            NotResident: they depend on more than their number, do not fit together, or are large.
        """
        dataset = maker.dataset.value
        if not maker.batched or maker.collate.value is not default_collate:
            raise NotResident("its batches are made by a collate_fn, or by itself")
        if hasattr(dataset, "set_epoch"):
            raise NotResident("its items may depend on the epoch")
        with preserved_global_generators(), _watched(find_generators(dataset)) as states:
            seed_global_generators(0)
            before = states()
            parts = list(_read(maker, count))
            if states() != before:
                raise NotResident("its items are random")
            whole = [torch.cat(one) for one in zip(*map(leaves_of, parts), strict=True)]
            found = cls(parts[0], whole, in_place=False)
            _check_again(maker, found, count)
        return found._replace(leaves=[one.to(device) for one in whole])

    def take(self, index: torch.Tensor) -> list[torch.Tensor]:
        """The rows with these numbers, of shape (*index.shape, …) each."""
        return [_rows(one, index) for one in self.leaves]


class Together(Sequence[list[Batch]]):
    """The micro-batches of K chains that came as one; a chain's own are cut out when asked for.

    Attributes:
        like: a batch, for its structure.
        micros: of each micro-batch its length and its tensors, shape (K, …).
    """

    def __init__(self, like: Any, micros: list[tuple[int, list[torch.Tensor]]], count: int) -> None:
        self.like, self.micros, self._count = like, micros, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: Any) -> Any:
        if not isinstance(row, int):
            raise TypeError("rows are taken one by one")
        if row >= self._count:
            raise IndexError(row)
        return [(count, rebuilt(self.like, [one[row] for one in leaves])) for count, leaves in self.micros]


Rows = Sequence[Sequence[Batch]]
Items = Any
"""The indices of a step's samples, an array (or sequence) for each chain."""


class ResidentRows:
    """The batches of K chains, step by step.

    Args:
        columns: the data.
        spec: the recipe.
        chains: the chains' numbers.
        keys: their keys.
        count: items in the data set.
        sizes: the length of a micro-batch, and how many there are in a step.
        pieces: the micro-batches of (chain, step, role, draw), where they are not independent.
    """

    def __init__(
        self,
        columns: Columns,
        spec: LoaderSpec,
        chains: Sequence[int],
        keys: Sequence[ChainKey],
        *,
        count: int,
        sizes: tuple[int, int],
        pieces: Pieces,
    ) -> None:
        self._columns, self._spec, self._chains, self._keys = columns, spec, tuple(chains), tuple(keys)
        self._count, (self._size, self._micros), self._pieces = count, sizes, pieces
        self._blocks: dict[Role, _Blocks] = {}

    def take(self, step: int, role: Role, draw: int | None) -> tuple[Rows, Items]:
        """The batches of a step for a purpose, and the items that are in them."""
        if is_independent(self._spec, role):
            blocks = self._blocks.get(role)
            if blocks is None:
                orders = [
                    IndexBlocks(key, role, self._count, self._size * self._micros) for key in self._keys
                ]
                blocks = self._blocks[role] = _Blocks(orders, self._columns.leaves[0].device)
            index, numbers = blocks(step)
            return self._together(index, [self._size] * self._micros), numbers
        pieces = [self._checked(self._pieces(chain, step, role, draw), chain, step) for chain in self._chains]
        lengths = [[len(one) for one in row] for row in pieces]
        items = [np.concatenate(row) for row in pieces]
        if all(one == lengths[0] for one in lengths):
            return self._together(self._sent(np.stack(items)), lengths[0]), items
        return [[(len(piece), self._batch(self._sent(piece))) for piece in row] for row in pieces], items

    def _together(self, index: torch.Tensor, lengths: Sequence[int]) -> Rows:
        """What the columns of ``index``, shape (K, samples of a step), stand for, cut into micro-batches."""
        parts = [index]
        if len(lengths) > 1:
            ends = list(itertools.accumulate(lengths))
            parts = [index[:, end - length : end] for end, length in zip(ends, lengths, strict=True)]
        if len(index) == 1 or not self._columns.in_rows:
            return [
                [(length, self._batch(part[row])) for length, part in zip(lengths, parts, strict=True)]
                for row in range(len(index))
            ]
        micros = [(length, self._columns.take(part)) for length, part in zip(lengths, parts, strict=True)]
        return Together(self._columns.like, micros, len(index))

    def _checked(self, pieces: Sequence[Sequence[int]], chain: int, step: int) -> list[np.ndarray]:
        found = [np.asarray(one, dtype=np.int64) for one in pieces]
        for one in found:
            least = -self._count if self._columns.in_place else 0
            if one.min() < least or one.max() >= self._count:
                raise LoaderError(
                    f"chain {chain}, step {step}: the sampler gave items from {one.min()} to {one.max()}, "
                    f"but the data set has items {least} to {self._count - 1}."
                )
        return [one % self._count for one in found]  # -1 is the last, as for any list

    def _batch(self, index: torch.Tensor) -> Any:
        return rebuilt(self._columns.like, self._columns.take(index))

    def _sent(self, items: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(items).to(self._columns.leaves[0].device, non_blocking=True)


class _Blocks:
    """The independent indices of K chains, a block of steps at a time: one copy to the device for many."""

    def __init__(self, orders: Sequence[IndexBlocks], device: torch.device) -> None:
        self._orders, self._device = orders, device
        self._steps, self._block = orders[0].steps, -1
        self._items = np.empty((0, 0, 0), dtype=np.int64)
        self._index: tuple[torch.Tensor, ...] = ()

    def __call__(self, step: int) -> tuple[torch.Tensor, np.ndarray]:
        """Indices of a step, shape (K, size), on the device and here."""
        block, row = divmod(step, self._steps)
        if block != self._block:
            self._items = np.stack([one.block(block) for one in self._orders], axis=1)
            index = torch.from_numpy(self._items).to(self._device, non_blocking=True)
            self._index, self._block = index.unbind(0), block
        return self._index[row], self._items[row]


def _rows(column: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``column[index]``, in the fast way where that gives the same layout."""
    if not column.is_contiguous():
        return column[index]
    found = column.index_select(0, index.reshape(-1))
    return found if index.ndim == 1 else found.view(*index.shape, *column.shape[1:])


def _check_room(size: int, device: torch.device) -> None:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if size > LARGEST_SHARE * free:
            raise NotResident(
                f"its {size / 2**30:.1f} GiB are more than {LARGEST_SHARE:.0%} of what {device} has free"
            )


def _read(maker: IndexedBatches, count: int) -> Iterator[Any]:
    """All items, some at a time, as batches."""
    kind: Any = None
    for start in range(0, count, _ITEMS_AT_ONCE):
        numbers = range(start, min(start + _ITEMS_AT_ONCE, count))
        items = maker.items(list(numbers))
        for one in items:
            found = _kind(one)
            kind = kind or found
            if found != kind:
                raise NotResident("its items differ in shape or kind")
        batch = default_collate(list(items))
        size = sum(one.numel() * one.element_size() for one in leaves_of(batch)) * count / len(numbers)
        if size > LARGEST_COLLECTED:
            raise NotResident(f"its items are {size / 2**20:.0f} MiB")
        yield batch


def _check_again(maker: IndexedBatches, found: Columns, count: int) -> None:
    """Whether some items, spread over the data set, are what they were."""
    numbers = np.linspace(count - 1, 0, min(count, _ITEMS_READ_AGAIN)).round().astype(np.int64)
    seed_global_generators(1)
    again = leaves_of(default_collate(list(maker.items(numbers.tolist()))))
    kept = found.take(torch.from_numpy(numbers))
    if not all(
        torch.equal(one, other) or _both_nan(one, other) for one, other in zip(again, kept, strict=True)
    ):
        raise NotResident("its items are not the same when they are read again")


def _both_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _kind(item: Any) -> Any:
    """What must be the same for all items, so that their batches are rows of one tensor each."""
    if isinstance(item, torch.Tensor):
        return item.dtype, item.shape
    if isinstance(item, np.ndarray):
        return type(item), item.dtype, item.shape
    if isinstance(item, _NUMBERS):
        return type(item)
    if isinstance(item, dict):
        return type(item), tuple((name, _kind(value)) for name, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item), tuple(_kind(value) for value in item)
    raise NotResident(f"its items hold a {type(item).__name__}")


@contextlib.contextmanager
def _watched(generators: Sequence[Any]) -> Iterator[Callable[[], list[bytes]]]:
    """A function that tells in which states all generators are; those given are put back at the end."""
    held = [state_of(one) for one in generators]
    try:
        yield lambda: [*global_random_state(), *(pickle.dumps(state_of(one)) for one in generators)]
    finally:
        for generator, state in zip(generators, held, strict=True):
            set_state(generator, state)


def columns_of(
    maker: IndexedBatches, spec: LoaderSpec, count: int, reads: float, device: torch.device
) -> Columns:
    """The data as tensors.

    Args:
        maker: makes batches item by item.
        spec: the recipe.
        count: items in the data set.
        reads: how many items will be read at least; fewer than ``count`` do not pay for reading all.
        device: where they are to lie.

    Raises:
        NotResident: they are not to be, or cannot be.
    """
    if spec.resident is False or (spec.resident is None and spec.num_workers > 0):
        raise NotResident("the recipe says so")
    if type(maker.dataset.value) is TensorDataset:
        return Columns.of(maker, device)
    if reads < count:
        raise NotResident("fewer items are read than there are")
    try:
        return Columns.collect(maker, count, device)
    except (NotResident, torch.OutOfMemoryError):
        raise
    except Exception as error:  # it comes again, named, if the item is asked for
        raise NotResident(f"reading its items raised {short_error(error)}") from error
