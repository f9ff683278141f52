"""Loaders of any origin in spawned chain processes, each with two persistent loader workers."""

import multiprocessing
import os
from pathlib import Path

import psutil
import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset

import devsample
from devsample.errors import NotPicklableError
from tests.factories import estimate, linear_data, squared_error

WORKERS = {"num_workers": 2, "persistent_workers": True}


def complete(result: devsample.LLCResult) -> bool:
    """Both chains have all of their draws."""
    return list(result.chains["status"]) == ["done", "done"] and len(result.draws) == 20


# --- (a) a loader that is in use -----------------------------------------------------------------


def test_a_loader_that_was_iterated_already() -> None:
    loader = DataLoader(linear_data(), batch_size=16, shuffle=True, **WORKERS)
    next(iter(loader))
    iterator = loader._iterator
    workers = [process.pid for process in iterator._workers]
    try:
        result = estimate(loader=loader, cores=2)
        assert complete(result)
        assert loader._iterator is iterator
        assert [process.pid for process in iterator._workers] == workers
        assert all(process.is_alive() for process in iterator._workers)
        assert sum(len(x) for x, _ in loader) == 256  # it still serves its owner
    finally:
        iterator._shutdown_workers()


# --- (b) a data set that reaches a process group -------------------------------------------------


class Distributed:
    def __init__(self, world_group: object) -> None:
        self.world_group = world_group


class Sampling:
    def __init__(self, world_group: object) -> None:
        self.distributed = Distributed(world_group)


class Grouped(Dataset):
    """Items of `linear_data`; holds a process group two attributes away."""

    def __init__(self, world_group: object, must_have: bool = False) -> None:
        self._data = linear_data()
        self.sampling = Sampling(world_group)
        self._must_have = must_have

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> object:
        if self._must_have:  # its own group, usable in the process that reads the items
            count = torch.ones(1)
            distributed.all_reduce(count, group=self.sampling.distributed.world_group)
            assert count.item() == 1
        return self._data[index]


def make_without_group() -> Dataset:
    return Grouped(None)


def make_with_group(folder: Path) -> Dataset:
    """Joins a group of one in the process that calls it."""
    if not distributed.is_initialized():
        join_group_of_one(folder / f"store-{os.getpid()}")
    return Grouped(distributed.group.WORLD, must_have=True)


def join_group_of_one(store: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


@pytest.fixture
def world_group(tmp_path: Path):
    join_group_of_one(tmp_path / "store")
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def processes_made() -> int:
    """How many processes this one has made with multiprocessing so far."""
    return multiprocessing.Process()._identity[-1]


@pytest.mark.parametrize("form", ["spec", "loader"])
def test_a_process_group_in_the_data_set_is_refused_before_start(world_group, form: str) -> None:
    dataset = Grouped(world_group)
    given = (
        {"spec": {"dataset": dataset, **WORKERS}}
        if form == "spec"
        else {"loader": DataLoader(dataset, batch_size=16, **WORKERS)}
    )
    made = processes_made()
    children = psutil.Process().children(recursive=True)
    with pytest.raises(NotPicklableError) as caught:
        estimate(cores=2, **given)
    message = str(caught.value)
    assert message.startswith("loader_spec.dataset.sampling.distributed.world_group ")
    assert "ProcessGroup" in message
    assert "factory" in message
    assert "__getstate__" in message
    assert processes_made() == made + 1  # the one that the count itself takes
    assert psutil.Process().children(recursive=True) == children


def test_a_factory_that_drops_the_process_group(world_group) -> None:
    spec = {"dataset": make_without_group, **WORKERS}
    assert complete(estimate(cores=2, spec=spec))


def test_a_factory_that_builds_a_process_group_of_its_own(world_group, tmp_path: Path) -> None:
    spec = {"dataset": make_with_group, "dataset_kwargs": {"folder": tmp_path}, **WORKERS}
    assert complete(estimate(cores=2, spec=spec))
    assert distributed.is_initialized()  # the caller's is as it was
    assert distributed.group.WORLD is world_group


class TwoGenerators(Dataset):
    def __init__(self) -> None:
        self._data = linear_data()
        self.first = torch.Generator().manual_seed(11)
        self.second = torch.Generator().manual_seed(12)
        self.last = 0.0

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> object:
        first = torch.rand((), generator=self.first).item()
        second = torch.rand((), generator=self.second).item()
        if first == second or first == self.last:
            raise ValueError("generators that do not go on, or are one")
        self.last = first
        return self._data[index]


def test_a_data_set_with_two_generators() -> None:
    dataset = TwoGenerators()
    before = dataset.first.get_state(), dataset.second.get_state()
    assert complete(estimate(cores=2, spec={"dataset": dataset, **WORKERS}))
    assert torch.equal(dataset.first.get_state(), before[0])
    assert torch.equal(dataset.second.get_state(), before[1])


# --- (c) functions and classes without a home ----------------------------------------------------


def test_local_functions_a_lambda_and_a_local_data_set_class(tmp_path: Path) -> None:
    class Shifted(Dataset):
        def __init__(self, by: float) -> None:
            self._data, self._by = linear_data(), by

        def __len__(self) -> int:
            return len(self._data)

        def __getitem__(self, index: int) -> object:
            x, y = self._data[index]
            return x + self._by, y

    def collate(items: list) -> dict:
        return {
            "x": torch.stack([x for x, _ in items]) - 1,
            "y": torch.stack([y for _, y in items]),
            "kind": type(items[0]).__name__,
        }

    def evaluate(model: torch.nn.Module, batch: dict) -> torch.Tensor:
        assert batch["kind"] == "tuple"
        return squared_error(model, (batch["x"], batch["y"]))

    fields = {
        "collate_fn": collate,
        "worker_init_fn": lambda worker: (tmp_path / f"{os.getpid()}-{worker}").touch(),
        **WORKERS,
    }
    result = estimate(cores=2, evaluate=evaluate, spec={"dataset": Shifted(1.0), **fields})
    assert complete(result)
    plain = estimate(cores=1)  # shifted and shifted back: the same numbers but for rounding
    torch.testing.assert_close(result["loss/trace"], plain["loss/trace"], rtol=1e-4, atol=1e-5)
    assert 2 <= started(tmp_path) <= 4  # two for each chain process that made batches


@pytest.mark.slow
def test_lambdas_and_a_local_worker_init(tmp_path: Path) -> None:
    def start(worker: int) -> None:
        (tmp_path / f"{os.getpid()}-{worker}").touch()

    result = estimate(
        cores=2,
        evaluate=lambda model, batch: squared_error(model, batch).mean(),
        spec={
            "dataset": lambda n: linear_data(n),
            "dataset_kwargs": {"n": 128},
            "collate_fn": lambda items: torch.utils.data.default_collate(items),
            "worker_init_fn": start,
            **WORKERS,
        },
    )
    assert complete(result)
    assert result.settings["num_samples"] == 128
    assert 2 <= started(tmp_path) <= 4


def started(folder: Path) -> int:
    """Loader workers that left a mark; their numbers are 0 and 1."""
    marks = [path.name.split("-") for path in folder.iterdir()]
    assert {number for _, number in marks} == {"0", "1"}
    return len({pid for pid, _ in marks})
