"""Every kind of data and of batch, end to end: in a chain process with two loader workers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from devsample import LoaderSpec
from tests.process.loader_cases import items, kinds, live, streams
from tests.process.loader_cases.harness import Run, batches, complete, line, misfit, numbers, row, run, same

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.timeout(240)]
N = items.COUNT
METHODS = pytest.mark.parametrize(
    "method", ["forkserver", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fork", "spawn"))]
)


def end_to_end(dataset: Any, *, method: str = "forkserver", **changes: Any) -> Run:
    """Two chains in a process of their own, with two workers: the same as in this process without any."""
    spec = dict(changes.pop("spec", {}))
    workers = {"num_workers": 2, "multiprocessing_context": method}
    found = run(dataset, spec=spec | workers, executor="processes", cores=1, **changes)
    complete(found)
    same(found, run(dataset, spec=spec, cores=1, **changes))
    return found


# --- map-style -------------------------------------------------------------------------------------


@METHODS
def test_arrays_tensors_memory_maps_and_stores(tmp_path: Path, method: str) -> None:
    """h5py, lmdb, sqlite, zarr and fsspec, in a data set that opens them when it is first read."""
    live.write_stores(tmp_path)
    stores = ("h5py", "lmdb", "sqlite3", "zarr", "fsspec file", "memory map")
    found = end_to_end(
        ConcatDataset([kinds.Arrays(tmp_path), live.Stores(tmp_path, stores, lazily=True)]), method=method
    )
    assert found.result.settings["num_samples"] == 2 * N


def make_in_memory_files() -> Any:
    """A file system that is part of the process, filled by the factory."""
    import fsspec

    memory = fsspec.filesystem("memory")
    for index in range(N):
        memory.pipe(f"/numbers/{index}", str(index).encode())
    return items.Transformed(functools.partial(_from_memory, memory))


def _from_memory(memory: Any, x: float) -> float:
    return float(memory.cat(f"/numbers/{int(x)}"))


def make_local_files(folder: Path) -> Any:
    import fsspec

    local = fsspec.filesystem("file")
    for index in range(N):
        local.pipe(f"{folder}/{index}", str(index).encode())
    return items.Transformed(lambda x: float(local.cat(f"{folder}/{int(x)}")))


def test_fsspec_file_systems(tmp_path: Path) -> None:
    found = end_to_end(
        lambda: ConcatDataset([make_in_memory_files(), make_local_files(tmp_path)]), method="fork"
    )
    assert found.result.settings["num_samples"] == 2 * N
    spec = LoaderSpec(make_in_memory_files, batch_size=4, num_workers=1, worker_dataset="rebuild")
    assert len(batches(spec, 4)) == 4


MAPS: dict[str, Callable[[], Any]] = {
    "list": lambda: [float(x) for x in range(N)],
    "array": lambda: np.arange(N, dtype=np.float32),
    "tensor": lambda: torch.arange(float(N)),
    "range": lambda: range(N),
    "several at once": kinds.AtOnce,
    "tensor data set": lambda: TensorDataset(torch.arange(float(N))),
    "subset": lambda: Subset(items.Numbers(2 * N), range(N)),
    "concatenated": lambda: ConcatDataset([items.Numbers(N // 2), items.Transformed(lambda x: x + N // 2)]),
    "stacked": lambda: StackDataset(x=items.Numbers(), y=torch.arange(float(N))),
    "records": kinds.Strings,
    "dictionary": lambda: {index: float(index) for index in range(N)},
}


@pytest.mark.parametrize("kind", MAPS)
def test_map_style_data_of_any_class(kind: str) -> None:
    collate = (lambda batch: torch.tensor([x for x, _ in batch])) if kind == "records" else None
    fields = {"batch_size": 4, "collate_fn": collate}
    alone = batches(LoaderSpec(MAPS[kind](), **fields), 10)
    workers = LoaderSpec(MAPS[kind](), num_workers=2, multiprocessing_context="fork", **fields)
    assert batches(workers, 10) == alone
    assert len(alone[0]) == 4


@pytest.mark.slow
def test_several_items_at_once_end_to_end() -> None:
    end_to_end(kinds.AtOnce(), method="fork")


# --- Hugging Face ----------------------------------------------------------------------------------


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets.disable_progress_bars()
    return datasets


def rows_of(datasets: Any) -> Any:
    return datasets.Dataset.from_dict(
        {"x": [float(x) for x in range(N)], "text": ["a" * x for x in range(N)]}
    )


def shifted(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A transform with random numbers in it."""
    return {"x": [x + float(np.random.rand()) for x in rows["x"]]}  # noqa: NPY002


def x_of(batch: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([float(row["x"]) for row in batch], dtype=torch.float64)


HUGGING_FACE: dict[str, Callable[[Any, Path], Any]] = {
    "in memory": lambda datasets, folder: rows_of(datasets),
    "on disk": lambda datasets, folder: (
        rows_of(datasets).save_to_disk(str(folder / "saved")),
        datasets.load_from_disk(str(folder / "saved")),
    )[1],
    "with a transform": lambda datasets, folder: rows_of(datasets).with_transform(shifted),
    "with a format": lambda datasets, folder: rows_of(datasets).select_columns("x").with_format("torch"),
    "mapped by a lambda": lambda datasets, folder: rows_of(datasets).map(
        lambda row: {"x": row["x"] + 1}, load_from_cache_file=False
    ),
}


@pytest.mark.parametrize("kind", HUGGING_FACE)
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_hugging_face_data(hugging_face: Any, kind: str, method: str, tmp_path: Path) -> None:
    dataset = HUGGING_FACE[kind](hugging_face, tmp_path)
    fields = {"batch_size": 4, "collate_fn": x_of}
    alone = batches(LoaderSpec(dataset, **fields), 10)
    workers = LoaderSpec(dataset, num_workers=2, multiprocessing_context=method, **fields)
    assert batches(workers, 10) == alone


def test_hugging_face_data_end_to_end(hugging_face: Any, tmp_path: Path) -> None:
    dataset = HUGGING_FACE["on disk"](hugging_face, tmp_path)
    dataset.set_transform(shifted)
    end_to_end(dataset, spec={"collate_fn": x_of})


@pytest.mark.parametrize("num_workers", [0, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_hugging_face_stream_gives_every_sample_once_an_epoch(hugging_face: Any, num_workers: int) -> None:
    """It divides its shards among the workers, and shuffles by its own seed and the epoch."""
    plain = rows_of(hugging_face).to_iterable_dataset(num_shards=4).map(lambda row: {"x": row["x"] + 1})
    for dataset in (plain, plain.shuffle(seed=1, buffer_size=8)):
        fields = {"batch_size": 4, "collate_fn": x_of, "num_samples": N, "num_workers": num_workers}
        spec = LoaderSpec(dataset, multiprocessing_context="fork", **fields)
        seen = [x for batch in batches(spec, 16) for x in batch]
        assert sorted(seen[:N]) == sorted(seen[N:]) == [x + 1.0 for x in range(N)]
        for _ in range(3):
            assert [x for batch in batches(spec, 16) for x in batch] == seen


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_hugging_face_stream_end_to_end(hugging_face: Any, method: str) -> None:
    """Its order is its own seed's, its epoch's and the chain's: the same again."""
    dataset = rows_of(hugging_face).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=8)
    fields = {"collate_fn": x_of, "num_samples": N, "num_workers": 2, "multiprocessing_context": method}
    given: dict[str, Any] = {"executor": "processes", "cores": 1, "num_draws": 8}
    found = run(dataset, spec=fields, **given)
    complete(found)
    assert row(found, 0, 0) != row(found, 1, 0)
    if method == "forkserver":
        same(run(dataset, spec=fields | {"multiprocessing_context": "fork"}, **given), found)


# --- streams ---------------------------------------------------------------------------------------


class Both(IterableDataset[Any]):
    """Has items by index as well; its own order is what counts."""

    def __iter__(self) -> Iterator[float]:
        return iter([float(x) for x in range(N)])

    def __getitem__(self, index: int) -> float:
        raise AssertionError("an iterable data set is iterated")


STREAMS: dict[str, Callable[[], Any]] = {
    "plain": streams.Plain,
    "object": streams.PlainObject,
    "chained": lambda: ChainDataset([streams.Plain(20), streams.Plain(12)]),
    "augmenting": streams.Augmenting,
    "counting its epochs": streams.Counting,
    "with items, too": Both,
    "factory": lambda: streams.Plain,
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_streams_of_any_class(kind: str, num_workers: int) -> None:
    fields = {"batch_size": 5, "num_samples": N}
    alone = batches(LoaderSpec(STREAMS[kind](), **fields), 15)
    workers = LoaderSpec(STREAMS[kind](), num_workers=num_workers, multiprocessing_context="fork", **fields)
    assert batches(workers, 15) == alone
    assert [len(batch) for batch in alone[:7]] == [5, 5, 5, 5, 5, 5, 2]


def test_streams_end_to_end() -> None:
    end_to_end(streams.Augmenting(), spec={"num_samples": N})
    end_to_end(
        streams.Augmenting(), spec={"num_samples": N, "drop_last": True, "batch_size": 5}, method="fork"
    )


def test_web_data_sets(tmp_path: Path) -> None:
    names = streams.write_shards(tmp_path, 4, 8)
    found = run(
        functools.partial(streams.web_dataset, names),
        spec={"num_samples": N, "num_workers": 2, "multiprocessing_context": "fork"},
        executor="processes",
        cores=1,
        num_draws=8,
    )
    complete(found)
    for chain in range(2):
        assert sorted(x for draw in range(8) for x in row(found, chain, draw)) == list(range(N))


# --- batches ---------------------------------------------------------------------------------------


class OpenedMisfit:
    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return misfit(model, kinds.opened(batch))


class KindsSeen:
    """Counts, by chain, which kinds of batch came."""

    def __init__(self) -> None:
        self.counts = np.zeros((2, len(kinds.BATCHES)))

    def __call__(self, chain: int, batch: Any) -> None:
        kind = kinds.kind_of(batch[1].tolist())
        self.counts[chain, list(kinds.BATCHES).index(kind)] += 1


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@METHODS
def test_batches_of_every_kind(method: str) -> None:
    """Their types survive the way from the worker and to the device; what a chain reads is the same."""
    seen = KindsSeen()
    given: dict[str, Any] = {"evaluate": OpenedMisfit(), "num_draws": 80, "model": line()}
    spec: dict[str, Any] = {"collate_fn": kinds.EveryKind(), "batch_size": 2}
    workers = {"num_workers": 2, "multiprocessing_context": method}
    found = run(
        items.Numbers(), spec=spec | workers, executor="processes", cores=1, callbacks=[seen], **given
    )
    alone = run(items.Numbers(), spec=spec, cores=1, callbacks=(), **given)
    assert list(found.result.chains["status"]) == ["done", "done"]
    assert found.result.draws.equals(alone.result.draws)
    assert (seen.counts.sum(0) > 0).all(), dict(zip(kinds.BATCHES, seen.counts.sum(0), strict=True))


@pytest.mark.parametrize("kind", kinds.BATCHES)
@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_a_batch_of_a_kind(kind: str) -> None:
    make, read = kinds.BATCHES[kind]
    if kind == "movable":
        read = lambda b: b.x  # noqa: E731 - nothing has moved it here
    spec = LoaderSpec(
        items.Numbers(),
        batch_size=4,
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=lambda b: make(torch.tensor(b)),
    )
    loader = spec.build()
    found = [read(batch).tolist() for batch in itertools.islice(iter(loader), 3)]
    loader.close()
    assert found == batches(LoaderSpec(items.Numbers(), batch_size=4), 3)


# --- orders ----------------------------------------------------------------------------------------

WEIGHTS = [float(x % 2) for x in range(N)]
ORDERS: dict[str, dict[str, Any]] = {
    "independent": {"batch_size": 5},
    "shuffle": {"batch_size": 5, "shuffle": True},
    "epoch": {"batch_size": 5, "sampling": "epoch"},
    "epoch, drop_last": {"batch_size": 5, "sampling": "epoch", "drop_last": True},
    "sequential": {"batch_size": 5, "sampling": "sequential"},
    "sampler": {"batch_size": 5, "sampler": RandomSampler(range(N))},
    "sampler, drop_last": {"batch_size": 5, "sampler": RandomSampler(range(N)), "drop_last": True},
    "subset sampler": {"batch_size": 3, "sampler": SubsetRandomSampler(range(0, N, 3))},
    "weighted sampler": {"batch_size": 5, "sampler": WeightedRandomSampler(WEIGHTS, N)},
    "list of indices": {"batch_size": 5, "sampler": list(range(N))[::-1]},
    "batch_sampler": {"batch_sampler": BatchSampler(RandomSampler(range(N)), 5, drop_last=False)},
    "batches of any size": {"batch_sampler": [[0, 1], [2], list(range(3, N))]},
    "sequential batches": {"batch_sampler": BatchSampler(SequentialSampler(range(N)), 5, drop_last=True)},
}
RAGGED = {"epoch", "sequential", "sampler", "weighted sampler", "list of indices", "batch_sampler"}


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: str) -> None:
    fields = ORDERS[order]
    alone = batches(LoaderSpec(items.Numbers(), **fields), 16)
    workers = LoaderSpec(items.Numbers(), num_workers=2, multiprocessing_context="fork", **fields)
    assert batches(workers, 16) == alone
    sizes = [len(batch) for batch in alone[:7]]
    if order in RAGGED:
        assert sizes == [5] * 6 + [2]
    elif "drop_last" in order or order == "sequential batches":
        assert sizes == [5] * 7
    if order == "weighted sampler":
        assert all(x % 2 for batch in alone for x in batch)


@pytest.mark.parametrize(
    "order", [pytest.param("epoch", marks=pytest.mark.slow), "batches of any size", "weighted sampler"]
)
def test_orders_end_to_end(order: str) -> None:
    end_to_end(items.Numbers(), spec=ORDERS[order], method="fork")


def test_items_that_are_batches() -> None:
    spec = {"batch_size": None, "num_samples": N}
    found = end_to_end(kinds.WholeBatches(), spec=spec, method="fork")
    assert all(len(row(found, chain, draw)) == 4 for chain in range(2) for draw in range(6))
    loader = LoaderSpec(kinds.WholeBatches(), **spec).build()
    batch = next(iter(loader))
    loader.close()
    assert isinstance(batch, torch.Tensor)  # as a DataLoader converts arrays
    assert numbers(batch).tolist()[0] % 4 == 0


def test_a_loss_over_a_ragged_batch_counts_each_sample_once() -> None:
    """L_n(w*) over all data does not depend on how they are cut."""
    init = {
        size: run(items.Numbers(), spec={"batch_size": size}, cores=1, baseline="full").result["init_loss"]
        for size in (1, 5, 32)
    }
    assert init[5] == pytest.approx(init[1], rel=1e-5)
    assert init[32] == pytest.approx(init[1], rel=1e-5)
