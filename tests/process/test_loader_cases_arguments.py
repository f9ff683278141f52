"""Arguments that plain PyTorch refuses inside the chain, late or never: refused where the spec is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from devsample import LoaderSpec
from devsample.errors import InvalidArgumentError, LoaderError
from tests.process.loader_cases import items
from tests.process.loader_cases.harness import complete, nothing_started, refused, row, run, same
from tests.process.loader_cases.table import case

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.timeout(240)]
CONTRADICTION = case("DataLoader arguments that contradict each other")
SIZE = case("data set without a known size")


def table() -> TensorDataset:
    return TensorDataset(torch.arange(8.0))


class Unsized:
    """Items by index, without a length."""

    def __getitem__(self, index: int) -> float:
        return float(index % 8)


class Stream(IterableDataset[Any]):
    """The numbers 0 … 7."""

    def __iter__(self) -> Iterator[float]:
        return iter([float(number) for number in range(8)])


class Sized(Stream):
    """Says how many there are."""

    def __len__(self) -> int:
        return 8


class Boasting(Stream):
    """Says that there are more than there are."""

    def __len__(self) -> int:
        return 1000


ORDER = SequentialSampler(range(8))
BATCHES = BatchSampler(ORDER, 4, drop_last=False)
ONCE = {"num_samples": 8}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "batch_sampler and batch_size": (table, {"batch_sampler": BATCHES, "batch_size": 4}, "batch_size"),
    "batch_sampler and drop_last": (table, {"batch_sampler": BATCHES, "drop_last": True}, "drop_last"),
    "batch_sampler and shuffle": (table, {"batch_sampler": BATCHES, "shuffle": True}, "shuffle"),
    "batch_sampler and sampler": (table, {"batch_sampler": BATCHES, "sampler": ORDER}, "sampler"),
    "sampler and shuffle": (table, {"sampler": ORDER, "shuffle": True}, "shuffle"),
    "sampler and sampling": (table, {"sampler": ORDER, "sampling": "epoch"}, "sampling"),
    "iterable and shuffle": (Stream(), {"shuffle": True} | ONCE, "shuffle"),
    "iterable and sampler": (Stream(), {"sampler": ORDER} | ONCE, "sampler"),
    "iterable and batch_sampler": (Stream(), {"batch_sampler": BATCHES} | ONCE, "batch_sampler"),
    "iterable and sampling": (Stream(), {"sampling": "epoch"} | ONCE, "sampling"),
    "unknown start method": (
        table,
        {"num_workers": 1, "multiprocessing_context": "thread"},
        "multiprocessing_context",
    ),
    "no context": (table, {"num_workers": 1, "multiprocessing_context": 3}, "multiprocessing_context"),
    "batch_size=None and drop_last": (
        table(),
        {"batch_size": None, "drop_last": True, "num_samples": 8},
        "drop_last",
    ),
    "negative workers": (table, {"num_workers": -1}, "num_workers"),
    "half a worker": (table, {"num_workers": 1.5}, "num_workers"),
    "a number as text": (table, {"num_workers": "2"}, "num_workers"),
    "batch of none": (table, {"batch_size": 0}, "batch_size"),
    "batch of a fraction": (table, {"batch_size": 2.5}, "batch_size"),
    "batch of True": (table, {"batch_size": True}, "batch_size"),
    "no prefetching": (table, {"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor"),
    "negative timeout": (table, {"timeout": -1}, "timeout"),
    "timeout as text": (table, {"timeout": "5"}, "timeout"),
    "collate_fn is no function": (table, {"collate_fn": 3}, "collate_fn"),
    "worker_init_fn is no function": (table, {"worker_init_fn": 3}, "worker_init_fn"),
    "sampler that ends": (table, {"sampler": iter(range(8))}, "sampler"),
    "sampler is no sampler": (table, {"sampler": 3}, "sampler"),
    "sampler without a length": (table, {"sampler": Stream()}, "sampler"),
    "a part of the data": (
        table,
        {"sampler": DistributedSampler(table(), num_replicas=2, rank=0)},
        "sampler: a DistributedSampler",
    ),
    "persistent_workers as text": (table, {"persistent_workers": "yes"}, "persistent_workers"),
    "batches in any order": (table, {"num_workers": 1, "in_order": False}, "in_order"),
    "arguments that do not fit": (table, {"dataset_args": [1]}, "dataset_args"),
    "arguments without a factory": (table(), {"dataset_args": [1]}, "dataset_args"),
    "data set is None": (None, {}, "dataset"),
    "data set is a number": (3, {}, "dataset"),
    "data set is a loader": (DataLoader(table()), {}, "dataset.*from_dataloader"),
    "data set is a tuple of tensors": ((torch.zeros(3), torch.zeros(3)), {}, "dataset.*TensorDataset"),
    "empty data set": ([], {}, "dataset: an empty list"),
    "empty data set, shuffled": ([], {"shuffle": True}, "dataset: an empty list"),
    "no length": (Unsized(), {}, r"num_samples=n"),
    "items are batches": (table(), {"batch_size": None}, "num_samples"),
    "n is another length": (table(), {"num_samples": 3}, "num_samples"),
    "iterable": (Stream(), {}, "^num_samples: "),
    "iterable with a length": (Sized(), {}, "^num_samples: "),
    "stream that is read once": ((float(x) for x in range(8)), ONCE, "read only once"),
    "map object": (map(float, range(8)), ONCE, "read only once"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=SIZE if name in {"no length", "iterable", "iterable with a length"} else CONTRADICTION
        )
        for name in REFUSED
    ],
)
def test_what_is_refused_where_the_spec_is_made(name: str, said: Callable[[str], str]) -> None:
    dataset, fields, text = REFUSED[name]
    said(refused(lambda: LoaderSpec(dataset, **fields), InvalidArgumentError, text))


@CONTRADICTION
@pytest.mark.parametrize("name", ["num_worker", "batchsize", "shufle", "worker_init", "pin"])
def test_an_unknown_argument_is_named(name: str) -> None:
    with nothing_started(), pytest.raises(TypeError, match=name):
        LoaderSpec(table, **{name: 2})


HARMLESS = {
    "prefetch_factor": 2,
    "persistent_workers": True,
    "multiprocessing_context": "spawn",
    "timeout": 5,
    "generator": torch.Generator(),
    "pin_memory": False,
}


@CONTRADICTION
def test_leftovers_that_are_harmless_without_workers() -> None:
    plain = run(items.Numbers(), cores=1)
    with nothing_started():
        same(run(items.Numbers(), spec=HARMLESS, cores=1), plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, value in HARMLESS.items():
            LoaderSpec(table, **{name: value})


@CONTRADICTION
def test_a_loader_with_leftovers_and_defaults_of_its_own() -> None:
    """What a DataLoader fills in by itself is no contradiction."""
    loader = DataLoader(items.Numbers(), batch_size=4, shuffle=True, generator=torch.Generator())
    same(run(None, loader=loader, cores=1), run(items.Numbers(), cores=1))
    batched = DataLoader(items.Numbers(), batch_sampler=BatchSampler(RandomSampler(range(32)), 4, True))
    assert LoaderSpec.from_dataloader(batched).batch_size in (1, 4)
    complete(run(None, loader=batched, cores=1))
    given = DataLoader(items.Numbers(), batch_size=4, num_workers=1, collate_fn=default_collate, timeout=5)
    assert LoaderSpec.from_dataloader(given).timeout == 5


@SIZE
@pytest.mark.parametrize("kind", [Stream, Sized, Boasting])
def test_an_iterable_with_num_samples_goes_round_and_round(kind: type[Stream]) -> None:
    """Four epochs of four batches; what it says about its length does not count."""
    spec = LoaderSpec(kind(), batch_size=2, num_samples=8)
    loader = spec.build(num_steps=16)
    seen = [x for batch in loader for x in batch.tolist()]
    loader.close()
    assert seen == [float(x) for x in range(8)] * 4


@SIZE
def test_the_size_that_was_given_enters_the_estimate() -> None:
    fields = {"num_samples": 8, "batch_size": 2, "num_workers": 2, "multiprocessing_context": "fork"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(Sized(), spec=fields, num_draws=10)
    complete(found)
    assert found.result.settings["num_samples"] == 8
    assert len({tuple(row(found, 0, draw)) for draw in range(10)}) == 4


@SIZE
def test_a_loader_over_a_stream_is_told_where_n_goes() -> None:
    loader = DataLoader(Stream(), batch_size=2)
    text = r"num_samples.*LoaderSpec\.from_dataloader\(loader, num_samples=n"
    refused(lambda: run(None, loader=loader), InvalidArgumentError, text)
    spec = LoaderSpec.from_dataloader(loader, num_samples=8)
    complete(run(None, loader_spec=spec, cores=1))


@SIZE
def test_a_data_set_without_a_length_takes_num_samples() -> None:
    found = run(Unsized(), spec={"num_samples": 8}, cores=1)
    complete(found)
    assert found.result.settings["num_samples"] == 8
    assert set(found.seen[0, :, :4].flatten()) <= set(range(8))


@SIZE
@pytest.mark.parametrize(
    ("make", "cores"),
    [(lambda: (float(x) for x in range(8)), 1), (lambda: iter(Stream()), 2)],
    ids=["generator", "iterator"],
)
def test_a_factory_that_gives_a_stream_to_be_read_once(make: Callable[[], Any], cores: int) -> None:
    with pytest.raises((InvalidArgumentError, LoaderError), match="read only once"):
        run(make, spec={"num_samples": 8}, cores=cores)
