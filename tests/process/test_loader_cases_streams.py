"""Which samples come, in which order, with which random numbers: never a matter of workers."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from devsample import LoaderSpec
from devsample.errors import LoaderWarning
from tests.process.loader_cases import items, streams
from tests.process.loader_cases.harness import batches, complete, row, run, same, says, start_methods, works
from tests.process.loader_cases.table import case

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.timeout(240)]
N = items.COUNT


def flat(dataset: Any, count: int, **fields: Any) -> list[Any]:
    """The items of the first batches of a loader that this process builds."""
    return list(itertools.chain.from_iterable(batches(LoaderSpec(dataset, **fields), count)))


def rows(batch: list[Any]) -> torch.Tensor:
    return torch.tensor(batch).double()


# --- generator objects -----------------------------------------------------------------------------


@case("random generator object in the data set")
@start_methods("forkserver")
@pytest.mark.parametrize("form", ["object", pytest.param("factory", marks=pytest.mark.slow)])
def test_generator_objects_are_seeded_like_the_global_ones(form: str, method: str) -> None:
    """Two chains, two workers each: what no workers draw, and no number twice."""
    dataset: Any = streams.Drawing() if form == "object" else streams.Drawing
    found = works(dataset, spec={"multiprocessing_context": method, "collate_fn": rows})
    drawn = found.seen[:, :, : 4 * 9].reshape(-1, 9)[:, 1:]
    assert len(np.unique(drawn)) == drawn.size
    if form == "object":
        fresh = streams.generator_objects()
        assert streams.drawn(dataset.generators["numpy"]) == streams.drawn(fresh["numpy"])  # as it was
        assert streams.drawn(dataset.generators["torch"]) == streams.drawn(fresh["torch"])


@case("random generator object in the data set")
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_same_numbers_for_any_number_of_workers(num_workers: int) -> None:
    fields: dict[str, Any] = {"batch_size": 4, "collate_fn": rows, "multiprocessing_context": "fork"}
    alone = flat(streams.Drawing(), 9, **fields)
    assert flat(streams.Drawing(), 9, num_workers=num_workers, **fields) == alone
    assert len({x for item in alone for x in item[1:]}) == 36 * 8


@case("random generator object in the data set")
def test_a_generator_in_the_collate_function() -> None:
    rng = np.random.default_rng(1)
    spec = {
        "collate_fn": lambda batch: torch.tensor(batch).double() + rng.random(),
        "batch_size": 4,
        "multiprocessing_context": "fork",
    }
    alone = flat(items.Numbers(), 8, **spec)
    assert flat(items.Numbers(), 8, num_workers=2, **spec) == alone
    assert len({round(x % 1, 9) for x in alone}) == 8


# --- iterables -------------------------------------------------------------------------------------


@case("iterable read by every worker")
@start_methods("forkserver")
@pytest.mark.parametrize(
    "kind",
    [streams.Plain, pytest.param(streams.PlainObject, marks=pytest.mark.slow)],
    ids=["Dataset", "object"],
)
def test_every_sample_comes_once_an_epoch(kind: Any, method: str) -> None:
    fields = {"num_samples": N, "multiprocessing_context": method}
    found = works(kind(), spec=fields, num_workers=3, num_draws=8)
    assert all(len(row(found, chain, draw)) == 4 for chain in range(2) for draw in range(8))
    once = [x for draw in range(8) for x in row(found, 0, draw)]
    assert sorted(once) == list(range(N))


@case("iterable read by every worker")
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize(("count", "size"), [(32, 4), (10, 4), (3, 4), (7, None)])
def test_the_stream_for_any_number_of_workers(num_workers: int, count: int, size: int | None) -> None:
    """Also with a ragged last batch, less than a batch, and items that are batches."""
    fields = {"batch_size": size, "num_samples": count, "multiprocessing_context": "fork"}
    if size is None:
        fields["collate_fn"] = lambda item: torch.tensor([item])
    alone = batches(LoaderSpec(streams.Plain(count), **fields), 12)
    assert batches(LoaderSpec(streams.Plain(count), num_workers=num_workers, **fields), 12) == alone
    per_epoch = -(-count // (size or 1))
    epoch = [x for batch in alone[:per_epoch] for x in batch]
    assert epoch == [float(x) for x in range(count)]


@case("iterable read by every worker")
@start_methods("fork")
def test_a_data_set_that_divides_itself_is_left_to_it(method: str) -> None:
    """Each sample once an epoch; the order is that of its shares, which take turns."""
    fields = {"num_samples": N, "multiprocessing_context": method, "num_workers": 2}
    found = run(streams.Dividing(), spec=fields, num_draws=8)
    complete(found)
    for chain in range(2):
        assert sorted(x for draw in range(8) for x in row(found, chain, draw)) == list(range(N))
        assert {x % 2 for x in row(found, chain, 0)} in ({0.0}, {1.0})  # a batch comes from one share


@case("iterable read by every worker")
@pytest.mark.parametrize(("count", "num_workers"), [(32, 3), (33, 2), (5, 4)])
def test_shares_of_different_length(count: int, num_workers: int) -> None:
    fields = {"batch_size": 4, "num_samples": count, "multiprocessing_context": "fork"}
    spec = LoaderSpec(streams.Dividing(count), num_workers=num_workers, **fields)
    sizes = [len(range(k, count, num_workers)) for k in range(num_workers)]
    per_epoch = sum(-(-size // 4) for size in sizes)
    seen = batches(spec, 2 * per_epoch)
    for epoch in (seen[:per_epoch], seen[per_epoch:]):
        assert sorted(x for batch in epoch for x in batch) == [float(x) for x in range(count)]


@case("iterable read by every worker")
def test_more_workers_than_shares_is_said() -> None:
    spec = LoaderSpec(
        streams.Dividing(2), batch_size=1, num_samples=2, num_workers=4, multiprocessing_context="fork"
    )
    with pytest.warns(LoaderWarning, match="2 of 4 loader workers got no data"):
        assert sorted(x for batch in batches(spec, 4) for x in batch) == [0, 0, 1, 1]


# --- epochs ----------------------------------------------------------------------------------------


@case("epoch frozen in persistent workers")
@start_methods("fork")
def test_the_epoch_reaches_persistent_workers(method: str) -> None:
    """Two steps an epoch; the recorded losses are read on other batches, of the same epoch or a later one."""
    fields = {"sampling": "epoch", "batch_size": N // 2, "multiprocessing_context": method}
    works(streams.Epochs(), spec=fields)


@case("epoch frozen in persistent workers")
@pytest.mark.parametrize(
    "num_workers", [0, 2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3))]
)
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", [streams.Epochs, streams.RemembersEpochs, streams.EpochStream])
def test_epochs_of_a_built_loader(kind: Any, persistent: bool, num_workers: int) -> None:
    fields: dict[str, Any] = {"num_samples": N} if kind is streams.EpochStream else {"sampling": "sequential"}
    spec = LoaderSpec(
        kind(),
        batch_size=N // 2,
        num_workers=num_workers,
        persistent_workers=persistent,
        multiprocessing_context="fork",
        **fields,
    )
    seen = batches(spec, 8)
    assert [x for batch in seen for x in batch] == [100.0 * epoch + x for epoch in range(4) for x in range(N)]


@case("epoch frozen in persistent workers")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_an_epoch_kept_in_shared_memory(method: str) -> None:
    """The remedy that people use elsewhere does no harm."""
    works(SharedEpoch, spec={"sampling": "sequential", "batch_size": 16, "multiprocessing_context": method})


class SharedEpoch(streams.Epochs):
    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.shared.fill_(epoch)
        self.epoch = int(self.shared)


# --- noise -----------------------------------------------------------------------------------------


def without_data(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model.weight.square().sum() + model.bias.square().sum()


@case("loader and sampler share a random stream")
def test_the_noise_of_a_chain_is_its_own() -> None:
    """The losses of a target without data show the noise alone."""
    given: dict[str, Any] = {
        "evaluate": without_data,
        "optimizer_kwargs": {"lr": 1e-3, "nbeta": 5.0, "localization": 1.0},
    }
    plain = run(items.Numbers(), cores=1, **given).result.draws
    assert plain["loss"].nunique() > 8
    for dataset, fields in (
        (items.Numbers(), {"sampling": "epoch"}),
        (items.Numbers(), {"batch_size": 3}),
        (streams.DrawingGlobally(), {"collate_fn": rows}),
        (streams.Augmenting(), {"num_samples": N}),
        (streams.Plain(), {"num_samples": N, "collate_fn": streams.jittered}),
    ):
        found = run(dataset, spec=fields, cores=1, **given).result.draws
        assert found["loss"].equals(plain["loss"])
    workers = {"num_workers": 2, "collate_fn": streams.jittered, "num_samples": N}
    workers["multiprocessing_context"] = "fork"
    assert run(streams.Augmenting(), spec=workers, **given).result.draws["loss"].equals(plain["loss"])


@case("loader and sampler share a random stream")
def test_a_loader_leaves_the_callers_generators_alone() -> None:
    for num_workers, dataset in itertools.product((0, 1), (streams.DrawingGlobally(), streams.Augmenting())):
        fields: dict[str, Any] = {"collate_fn": streams.jittered, "num_workers": num_workers, "batch_size": 4}
        if isinstance(dataset, streams.Augmenting):
            fields["num_samples"] = N
        torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
        before = torch.get_rng_state(), random.getstate(), np.random.rand()  # noqa: NPY002
        np.random.seed(1)  # noqa: NPY002
        batches(LoaderSpec(dataset, multiprocessing_context="fork", **fields), 5)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.random.rand() == before[2]  # noqa: NPY002


# --- augmentation ----------------------------------------------------------------------------------


@case("augmentation depends on the number of workers")
@start_methods("forkserver")
def test_augmentation_from_global_generators(method: str) -> None:
    found = works(
        streams.DrawingGlobally(), spec={"multiprocessing_context": method, "collate_fn": rows}, num_workers=2
    )
    drawn = found.seen[:, :, : 4 * 4].reshape(-1, 4)[:, 1:]
    assert len(np.unique(drawn)) == drawn.size


@case("augmentation depends on the number of workers")
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("kind", [streams.DrawingGlobally, streams.Augmenting])
def test_augmentation_for_any_number_of_workers(kind: Any, num_workers: int) -> None:
    fields: dict[str, Any] = {"batch_size": 4, "collate_fn": rows, "multiprocessing_context": "fork"}
    if kind is streams.Augmenting:
        fields["num_samples"] = N
    assert flat(kind(), 20, num_workers=num_workers, **fields) == flat(kind(), 20, **fields)


@case("augmentation depends on the number of workers")
def test_a_data_set_that_seeds_by_worker_is_seen_to_differ() -> None:
    """So the tests above can fail."""
    fields: dict[str, Any] = {"batch_size": 4, "multiprocessing_context": "fork"}
    alone = flat(streams.SeededByWorker(), 6, **fields)
    assert flat(streams.SeededByWorker(), 6, num_workers=2, **fields) != alone


# --- WebDataset ------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Callable[[int, int], list[str]]:
    return lambda count, each: streams.write_shards(tmp_path, count, each)


@case("WebDataset pipeline")
@start_methods("fork")
def test_a_pipeline_with_a_lambda(shards: Callable[[int, int], list[str]], method: str) -> None:
    names = shards(2, 16)
    fields = {"num_samples": N, "multiprocessing_context": method, "num_workers": 2}
    found = run(lambda: streams.web_dataset(names), spec=fields, num_draws=8)
    complete(found)
    for chain in range(2):
        assert sorted(x for draw in range(8) for x in row(found, chain, draw)) == list(range(N))


@case("WebDataset pipeline")
def test_fewer_shards_than_workers_are_named(
    shards: Callable[[int, int], list[str]], said: Callable[[str], str]
) -> None:
    names = shards(2, 16)
    fields = {"num_samples": N, "num_workers": 3, "multiprocessing_context": "fork"}
    with pytest.warns(LoaderWarning) as caught:
        found = run(streams.web_dataset(names), spec=fields, num_draws=8)
    complete(found)
    text = says(str(caught[0].message), r"\b2\b", r"\b3\b", "num_workers")
    said(text)
    assert sorted(x for draw in range(8) for x in row(found, 0, draw)) == list(range(N))


@case("WebDataset pipeline")
@pytest.mark.parametrize(
    ("count", "each", "num_workers"), [(4, 8, 3), (3, 5, 2), (5, 4, 2), (1, 8, 1), (1, 8, 2)]
)
def test_every_sample_of_every_shard(
    shards: Callable[[int, int], list[str]], count: int, each: int, num_workers: int
) -> None:
    names, total = shards(count, each), count * each
    dataset = streams.web_dataset(names)
    fields = {
        "batch_size": 4,
        "num_samples": total,
        "num_workers": num_workers,
        "multiprocessing_context": "fork",
    }
    sizes = [len(names[k::num_workers]) * each for k in range(num_workers)]
    per_epoch = sum(-(-size // 4) for size in sizes)
    with pytest.warns(LoaderWarning) if num_workers > count else contextlib.nullcontext():
        seen = batches(LoaderSpec(dataset, **fields), 2 * per_epoch)
    for epoch in (seen[:per_epoch], seen[per_epoch:]):
        assert sorted(x for batch in epoch for x in batch) == [float(x) for x in range(total)]


@case("WebDataset pipeline")
def test_a_pipeline_that_is_not_split_is_dealt_by_batches(shards: Callable[[int, int], list[str]]) -> None:
    """Every worker reads the same samples: elsewhere they come twice."""
    dataset = streams.web_dataset(shards(2, 8), split=False)
    fields = {"batch_size": 4, "num_samples": 16, "multiprocessing_context": "fork"}
    assert flat(dataset, 8, num_workers=2, **fields) == [float(x) for x in range(16)] * 2


# --- default device --------------------------------------------------------------------------------


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def make_and_set_default() -> items.Numbers:
    """A library that sets the default device when it is imported."""
    torch.set_default_device("meta")
    return items.Numbers()


@case("default device")
@pytest.mark.parametrize(
    "order", [{}, {"sampling": "epoch"}, {"sampler": "random"}], ids=["iid", "epoch", "sampler"]
)
def test_another_default_device_in_the_caller(order: dict[str, Any], request: pytest.FixtureRequest) -> None:
    if order.get("sampler"):
        order = {"sampler": torch.utils.data.RandomSampler(range(N))}
    expected = run(items.Numbers(), spec=order, cores=1)
    request.getfixturevalue("meta_by_default")
    same(run(items.Numbers(), spec=order, cores=1), expected)
    spec = LoaderSpec(items.Numbers(), batch_size=4, num_workers=1, multiprocessing_context="fork", **order)
    assert all(isinstance(x, float) for batch in batches(spec, 3) for x in batch)


@case("default device")
@start_methods("fork")
def test_a_default_device_in_chain_and_workers(meta_by_default: None, method: str) -> None:
    torch.set_default_device(None)
    expected = run(items.Numbers(), spec={"sampling": "epoch"}, cores=1)
    torch.set_default_device("meta")
    found = run(
        items.Numbers(),
        spec={"num_workers": 2, "multiprocessing_context": method, "sampling": "epoch"},
    )
    same(found, expected)


@case("default device")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_a_factory_that_sets_the_default_device(method: str) -> None:
    found = run(make_and_set_default, spec={"num_workers": 2, "multiprocessing_context": method})
    same(found, run(items.Numbers(), cores=1))
