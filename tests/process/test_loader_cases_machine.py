"""What a loader takes of the machine: memory, threads, pinned memory; and handles across a fork."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from devsample import LoaderSpec
from devsample.data import CompactList
from devsample.machine import available_cores
from tests.process.loader_cases import items, live, memory, trouble
from tests.process.loader_cases.harness import (
    batches,
    complete,
    misfit,
    run,
    same,
    start_methods,
    works,
)
from tests.process.loader_cases.table import case

pytestmark = [pytest.mark.usefixtures("fork_server", "clean"), pytest.mark.timeout(240)]

# --- memory ----------------------------------------------------------------------------------------

ROWS, WIDTH = 1 << 16, 128  # 64 MiB of float64


def first(row: Any) -> float:
    return 1.0 + float(row[0])


def length(row: dict[str, Any]) -> int:
    return len(row["name"])


def tensor() -> torch.Tensor:
    return torch.zeros(ROWS, WIDTH, dtype=torch.float64)


def array() -> np.ndarray:
    return np.zeros((ROWS, WIDTH))


def compact() -> CompactList[dict[str, Any]]:
    return CompactList({"name": str(k).zfill(600), "place": k} for k in range(1 << 16))


@case("memory per worker")
@pytest.mark.parametrize(
    ("make", "read", "method"),
    [
        (tensor, first, "forkserver"),
        pytest.param(array, first, "forkserver", marks=pytest.mark.slow),
        pytest.param(compact, length, "forkserver", marks=pytest.mark.slow),
        pytest.param(tensor, first, "fork", marks=pytest.mark.slow),
        pytest.param(compact, length, "fork", marks=pytest.mark.slow),
        pytest.param(tensor, first, "spawn", marks=pytest.mark.slow),
    ],
    ids=["tensor", "array", "compact list", "tensor, forked", "compact list, forked", "tensor, spawned"],
)
def test_captured_data_are_shared(make: Callable[[], Any], read: Any, method: str, tmp_path: Path) -> None:
    """A worker of a chain process has far less to itself than a copy, compared with one without data."""
    little, much = tmp_path / "little", tmp_path / "much"
    little.mkdir(), much.mkdir()
    spec = {"num_workers": 2, "multiprocessing_context": method}
    complete(run(memory.Weighed(make(), read, much), spec=spec, num_draws=2))
    small = LoaderSpec(memory.Weighed([[1.0]], first, little), batch_size=4, **spec)
    batches(small, 4)
    if method == "fork":  # its workers are copies of this process
        assert memory.largest(much) < 150 * memory.MIB
    else:
        assert memory.largest(much) - memory.largest(little) < 24 * memory.MIB


def growth(folder: Path) -> int:
    """By how much a copy of the rows makes this process grow."""
    before = memory.private_bytes()
    dataset = memory.Weighed(torch.ones(ROWS, WIDTH, dtype=torch.float64), first, folder)
    dataset[0]
    return memory.largest(folder) - before


@case("memory per worker")
def test_the_measure_sees_a_copy(tmp_path: Path) -> None:
    """So the test above can fail. In a new process: an old one may have as much left over."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(growth, tmp_path).result() > 48 * memory.MIB


@case("memory per worker")
@pytest.mark.slow
def test_the_check_says_what_is_copied_and_what_is_shared() -> None:
    spec = LoaderSpec(items.Holding(torch.zeros(1 << 21)), batch_size=4, num_workers=2)
    report = spec.check([2], seconds=2, progress=False)
    assert report.shared_bytes >= 8 << 20
    assert report.recipe_bytes < 1 << 20
    assert all(timing.worker_memory for timing in report.timings if timing.num_workers and not timing.error)


# --- threads ---------------------------------------------------------------------------------------


class CountsThreads:
    """An evaluate that notes with how many threads its chain computes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        (self.folder / f"chain-{os.getpid()}").write_text(str(torch.get_num_threads()))
        return misfit(model, batch)


def threads_of(folder: Path, kind: str) -> set[int]:
    return {int(path.read_text()) for path in folder.iterdir() if path.name.startswith(kind)}


@case("too many threads")
@start_methods("fork")
def test_cores_are_divided_among_chains(method: str, tmp_path: Path) -> None:
    found = run(
        trouble.Threads(tmp_path),
        spec={"num_workers": 2, "multiprocessing_context": method},
        evaluate=CountsThreads(tmp_path),
        threads_per_chain=None,
    )
    complete(found)
    (tmp_path / f"chain-{os.getpid()}").unlink()  # the caller looked at the loss as well
    assert threads_of(tmp_path, "chain") == {max(1, available_cores() // 2)}
    assert threads_of(tmp_path, "worker") == {1}
    assert torch.get_num_threads() > 0


@case("too many threads")
@pytest.mark.slow
def test_threads_that_were_asked_for(tmp_path: Path) -> None:
    complete(run(items.Numbers(), evaluate=CountsThreads(tmp_path), threads_per_chain=3))
    (tmp_path / f"chain-{os.getpid()}").unlink()
    assert threads_of(tmp_path, "chain") == {3}


# --- pinned memory ---------------------------------------------------------------------------------


@case("pinned memory without an accelerator")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("pin_memory", [True, None])
def test_pinning_without_an_accelerator_is_silent(pin_memory: bool | None) -> None:
    """Warnings are errors here; those of chain processes come to the caller."""
    plain = run(items.Numbers(), cores=1)
    fields = {"pin_memory": pin_memory, "num_workers": 1, "multiprocessing_context": "fork"}
    assert len(batches(LoaderSpec(items.Numbers(), batch_size=4, **fields), 20)) == 20
    same(run(items.Numbers(), spec={"pin_memory": pin_memory}, cores=1), plain)
    if pin_memory:
        same(run(items.Numbers(), spec=fields), plain)


# --- zarr ------------------------------------------------------------------------------------------


def open_and_read(folder: Path) -> live.Stores:
    """The event loop of zarr runs in a thread once something was read."""
    made = live.Stores(folder, ("zarr",), lazily=False)
    assert made[5] == 5
    return made


@case("zarr array read before a fork")
@start_methods("fork")
def test_a_zarr_array_that_was_read_before_workers_start(method: str, tmp_path: Path) -> None:
    live.write_stores(tmp_path)
    works(open_and_read, spec={"dataset_args": [tmp_path], "multiprocessing_context": method})


@case("zarr array read before a fork")
def test_a_zarr_array_that_the_caller_read(tmp_path: Path) -> None:
    live.write_stores(tmp_path)
    dataset = open_and_read(tmp_path)
    alone = batches(LoaderSpec(dataset, batch_size=4), 8)
    assert len({x for batch in alone for x in batch}) > 8
    for method in ("fork", "forkserver"):
        spec = LoaderSpec(dataset, batch_size=4, num_workers=2, multiprocessing_context=method)
        assert batches(spec, 8) == alone
