"""What weighs most is named, with what becomes of it."""

import pickle
import types
import warnings

import numpy as np
import pytest
import torch

from devsample.culprit import find_heaviest
from devsample.errors import LargePayloadWarning
from devsample.large import warn_if_large
from devsample.serialize import pack, packed_size


class Box:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def said(obj, **options) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_large(obj, "loader_spec", pack(obj, "loader_spec"), readers="every reader", **options)
    assert all(one.category is LargePayloadWarning for one in caught)
    return str(caught[0].message) if caught else ""


TABLE = torch.zeros(30_000_000)
ARRAY = np.zeros(15_000_000)


def closure():
    table = TABLE

    def make():
        return table

    return make


@pytest.mark.parametrize(
    ("make", "start"),
    [
        (lambda: Box(dataset=Box(rows=TABLE)), "loader_spec.dataset.rows is a torch.Tensor of 120 MB"),
        (lambda: Box(dataset=closure()), "loader_spec.dataset.<closure table> is a torch.Tensor of 120 MB"),
        (lambda: Box(d={"train": [ARRAY], "x": 1}), "loader_spec.d['train'][0] is a numpy.ndarray of 120 MB"),
        (lambda: Box(d=[TABLE[:12_000_000].clone() for _ in range(3)]), "loader_spec.d is a list of 144 MB"),
    ],
)
def test_memory_that_all_share_is_named(make, start):
    text = said(make())
    assert text.startswith(start)
    assert "share one copy" in text
    assert "factory" in text
    assert "memory-mapped" in text
    assert "CompactList" not in text


def test_objects_that_everybody_copies_are_named():
    obj = Box(dataset=Box(rows=[f"{index}" * 40 for index in range(600_000)]), table=TABLE[:100])
    text = said(obj)
    assert text.startswith("loader_spec.dataset.rows is a list of ")
    assert "copied into every reader" in text
    assert "CompactList" in text


def test_bytes_are_named():
    text = said(Box(dataset=Box(blob=bytes(101_000_000))))
    assert text.startswith("loader_spec.dataset.blob is a bytes of 101 MB")


def test_less_than_100_mb_and_what_is_mapped_are_fine(tmp_path):
    mapped = np.memmap(tmp_path / "rows", np.float64, "w+", shape=(15_000_000,))
    assert said(Box(a=TABLE[:20_000_000].clone(), rows=mapped)) == ""


def test_where_only_copies_count():
    assert said(Box(dataset=TABLE), shared=False) == ""
    several = said(Box(dataset=[bytes(30_000_000), bytes(71_000_000)]), shared=False)
    assert several.startswith("loader_spec.dataset[1] is a bytes of 71 MB")


def test_the_warning_travels():
    warning = LargePayloadWarning("text")
    assert str(pickle.loads(pickle.dumps(warning))) == "text"


def test_the_search_ends_at_large_collections_and_at_itself():
    whole = types.SimpleNamespace(small=[0] * 3, rows=list(range(1000)))
    part, path, _ = find_heaviest(whole, "x", packed_size)
    assert (part, path) == (whole.rows, "x.rows")
    whole.me = whole
    assert find_heaviest(whole, "x", packed_size)[1] == "x.rows"
