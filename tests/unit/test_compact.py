"""A list of Python objects in one block of memory."""

import pickle
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from devsample.data import CompactList
from devsample.errors import NotPicklableError
from devsample.serialize import pack

ITEMS = [{"text": f"row {index}", "label": index, "more": [index, None]} for index in range(50)]


def test_it_reads_like_the_list_that_it_was_made_of():
    rows = CompactList(ITEMS)
    assert isinstance(rows, Sequence)
    assert len(rows) == 50
    assert rows[0] == ITEMS[0]
    assert rows[-1] == ITEMS[-1]
    assert rows[np.int64(7)] == ITEMS[7]
    assert rows[3:40:7] == ITEMS[3:40:7]
    assert rows[::-1] == ITEMS[::-1]
    assert rows[40:100] == ITEMS[40:]
    assert list(rows) == ITEMS
    assert list(reversed(rows)) == ITEMS[::-1]
    assert ITEMS[5] in rows
    assert rows.index(ITEMS[5]) == 5
    assert rows.__getitems__([4, 2]) == [ITEMS[4], ITEMS[2]]


@pytest.mark.parametrize("index", [50, -51])
def test_beyond_the_end(index):
    with pytest.raises(IndexError):
        CompactList(ITEMS)[index]


def test_items_of_every_size_from_any_iterable():
    items = [None, b"", bytes(100_000), "x", (1, 2), torch.arange(3)]
    rows = CompactList(iter(items))
    assert rows[:5] == items[:5]
    assert torch.equal(rows[5], items[5])
    assert list(CompactList([])) == []
    assert len(CompactList([])) == 0


def test_every_read_gives_a_new_object():
    same = {"a": 1}
    rows = CompactList([same, same])
    rows[0]["a"] = 2
    assert rows[0] == rows[1] == same == {"a": 1}


def test_objects_of_local_classes_and_functions():
    class Local:
        def __init__(self, x):
            self.x = x

    rows = CompactList([Local(1), lambda: 2, Local(3), lambda: 4])
    assert (rows[0].x, rows[1](), rows[2].x, rows[3]()) == (1, 2, 3, 4)


def test_what_cannot_be_kept_is_named_with_its_place():
    with pytest.raises(NotPicklableError, match=r"^items\[1\]\['a'\] is a _thread.lock"):
        CompactList([{"a": 1}, {"a": threading.Lock()}])


def test_it_travels_as_two_pieces_of_memory():
    rows = CompactList("abcdefgh" * 10 for _ in range(20_000))
    packed = pack(rows, "rows")
    assert len(packed.data) < 2000
    assert [one.nbytes() for one in packed.storages] == [rows._offsets.nbytes, rows._bytes.nbytes]
    assert list(pickle.loads(pickle.dumps(rows))) == list(rows)


def test_what_it_shows():
    assert repr(CompactList([bytes(1_000_000)])) == "CompactList(1 items, 1.0 MB)"
