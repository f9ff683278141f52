"""CompactList: a list of Python objects in one block of memory."""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch

from devsample.errors import NotPicklableError
from devsample.serialize import ByValuePickler, pack

Item = TypeVar("Item")


class CompactList(Sequence[Item]):
    """A list that keeps its items as bytes in one tensor, and makes an item when it is asked for.

    A list of Python objects is copied into every process that is not forked, and in forked ones its
    memory is copied bit by bit, since reading an object writes its reference count. Items in bytes
    are read without being written: all chain processes and loader workers share one copy.

    Every read gives a new object, equal to the item that was put in; changing it changes nothing here.

    Args:
        items: what to keep; everything in them must be picklable.

    Raises:
        NotPicklableError: an item cannot be kept; the message names its place and the part of it.

    Examples:
        >>> rows = CompactList([{"text": "one"}, {"text": "two"}, {"text": "three"}])
        >>> rows[-1], len(rows)
        ({'text': 'three'}, 3)
        >>> rows[:2]
        [{'text': 'one'}, {'text': 'two'}]
    """

    def __init__(self, items: Iterable[Item]) -> None:
        file = io.BytesIO()
        pickler = ByValuePickler(file)
        ends = [0]
        for index, item in enumerate(items):
            try:
                pickler.dump(item)
            except Exception as error:
                raise _refusal(item, index, error) from error
            pickler.clear_memo()  # each item stands for itself
            ends.append(file.tell())
        self._offsets = torch.tensor(ends, dtype=torch.int64, device="cpu")
        self._bytes = torch.empty(ends[-1], dtype=torch.uint8, device="cpu")
        if ends[-1]:
            self._bytes.copy_(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self._item(place) for place in range(*index.indices(len(self)))]
        return self._item(range(len(self))[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Several items at once."""
        return [self[index] for index in indices]

    def __iter__(self) -> Iterator[Item]:
        return (self._item(place) for place in range(len(self)))

    def __repr__(self) -> str:
        return f"CompactList({len(self)} items, {self._bytes.nbytes / 1e6:.1f} MB)"

    def _item(self, place: int) -> Item:
        start, stop = self._offsets[place : place + 2].tolist()
        item: Item = pickle.loads(ctypes.string_at(self._bytes.data_ptr() + start, stop - start))
        return item


def _refusal(item: Any, index: int, error: Exception) -> Exception:
    """The error that names the part of the item."""
    try:
        pack(item, f"items[{index}]")
    except NotPicklableError as named:
        return named
    return NotPicklableError(f"items[{index}] cannot be kept: {error}.")
