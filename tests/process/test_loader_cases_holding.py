"""Data sets that hold something alive: made by the factory it works, captured by the caller it is named."""

from __future__ import annotations

import functools
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from devsample import LoaderSpec
from devsample.errors import InvalidArgumentError, NotPicklableError
from tests.process.loader_cases import items, live
from tests.process.loader_cases.harness import batches, complete, refused, run, says, start_methods, works
from tests.process.loader_cases.table import case

pytestmark = [pytest.mark.usefixtures("fork_server", "clean"), pytest.mark.timeout(240)]
NAMED = [r"^loader_spec\.dataset\.helper\['live'\]\[0\]", "is an? ", "factory", "__getstate__"]


@pytest.fixture(autouse=True)
def closed(clean: Path) -> Iterator[None]:
    yield
    live.close_kept()


# --- locks, pools, bars, files ---------------------------------------------------------------------


@case("lock, pool, bar or open file in the data set")
@pytest.mark.parametrize("thing", live.STAYS)
def test_a_live_object_is_named_by_its_path(thing: str, said: Callable[[str], str]) -> None:
    dataset = items.Holding(live.STAYS[thing]())
    text = refused(lambda: run(dataset, spec={"num_workers": 2}), NotPicklableError, *NAMED)
    said(text)


def with_lock(position: str, lock: Any) -> tuple[Any, dict[str, Any]]:
    """A spec with a lock somewhere, and where an error should say that it is."""

    def make(held: Any = None) -> items.Holding:
        return items.Holding((lock, held))

    def collate(batch: list[float]) -> torch.Tensor:
        with lock:
            return torch.tensor(batch)

    class Collator:
        def __init__(self) -> None:
            self.state = {"lock": lock}

        def collate(self, batch: list[float]) -> torch.Tensor:
            return torch.tensor(batch)

    class Ordered(list):
        """A sampler with an attribute."""

    ordered = Ordered(range(items.COUNT))
    ordered.lock = lock
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        "closure of the factory": (make, {}),
        "default of the factory": (lambda held=lock: items.Holding(held), {}),
        "argument": (items.Holding, {"dataset_args": [lock]}),
        "keyword": (items.Holding, {"dataset_kwargs": {"thing": {"a": lock}}}),
        "partial": (functools.partial(items.Holding, thing=lock), {}),
        "method": (Made(lock).make, {}),
        "collate_fn": (items.Numbers(), {"collate_fn": collate}),
        "object of collate_fn": (items.Numbers(), {"collate_fn": Collator().collate}),
        "worker_init_fn": (items.Numbers(), {"worker_init_fn": lambda worker: lock.acquire()}),
        "sampler": (items.Numbers(), {"sampler": ordered}),
        "class attribute": (type("Local", (items.Numbers,), {"lock": lock})(), {}),
        "transform": (items.Transformed(lambda x: x + bool(lock)), {}),
        "key": (items.Holding({(1, lock): 2}), {}),
    }
    return given[position]


class Made:
    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def make(self) -> items.Numbers:
        return items.Numbers()


@case("lock, pool, bar or open file in the data set")
@pytest.mark.parametrize(
    ("position", "path"),
    [
        ("closure of the factory", r"dataset\.<closure lock>"),
        ("default of the factory", r"dataset\.<default 0>"),
        ("argument", r"dataset_args\[0\]"),
        ("keyword", r"dataset_kwargs\['thing'\]\['a'\]"),
        ("partial", r"dataset\.keywords\['thing'\]"),
        ("method", r"dataset\.make\.__self__\.lock"),
        ("collate_fn", r"collate_fn\.<closure lock>"),
        ("object of collate_fn", r"collate_fn\.collate\.__self__\.state\['lock'\]"),
        ("worker_init_fn", r"worker_init_fn\.<closure lock>"),
        ("sampler", r"sampler\.lock"),
        ("class attribute", r"dataset\..*lock"),
        ("transform", r"dataset\.transform\.<closure lock>"),
        ("key", r"dataset\.helper\['live'\]\[0\]"),
    ],
)
def test_a_lock_anywhere_in_the_spec(position: str, path: str) -> None:
    dataset, fields = with_lock(position, threading.Lock())
    text = refused(
        lambda: run(dataset, spec=fields), NotPicklableError, rf"^loader_spec\.{path} ", "_thread.lock"
    )
    says(text, "factory")


@case("lock, pool, bar or open file in the data set")
def test_what_a_script_has_at_its_top_level() -> None:
    """The globals of a function that travels by value go with it."""
    space: dict[str, Any] = {"__name__": "__main__", "LOCK": threading.Lock(), "items": items}
    exec("def make():\n    with LOCK:\n        return items.Numbers()", space)
    refused(
        lambda: run(space["make"]),
        NotPicklableError,
        r"^loader_spec\.dataset\.<global LOCK> ",
        "_thread.lock",
    )


@case("lock, pool, bar or open file in the data set")
@pytest.mark.parametrize("thing", live.TRAVELS)
def test_what_travels_is_not_refused(thing: str) -> None:
    LoaderSpec(items.Holding(live.TRAVELS[thing]()), batch_size=4).packed()


@case("lock, pool, bar or open file in the data set")
@start_methods("forkserver")
def test_a_factory_may_make_them(method: str) -> None:
    works(live.Lively, spec={"multiprocessing_context": method})


@case("lock, pool, bar or open file in the data set")
def test_an_insisted_pickle_of_what_the_factory_makes() -> None:
    spec = LoaderSpec(live.Lively, batch_size=4, num_workers=1, worker_dataset="pickle")
    with pytest.raises(NotPicklableError) as caught:
        batches(spec, 1)
    says(str(caught.value), r"^dataset\.live\['lock'\] is a _thread\.lock", "rebuild|factory")


# --- stores ----------------------------------------------------------------------------------------

KINDS = ("h5py", "h5py data set", "lmdb", "sqlite3", "zarr", "fsspec file", "memory map")


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    live.write_stores(tmp_path)
    return tmp_path


@case("open database or array file in the data set")
@start_methods("forkserver")
def test_a_factory_may_open_stores(stores: Path, method: str) -> None:
    kinds = KINDS if method != "fork" else ("h5py", "zarr", "memory map")  # the others mind being forked
    works(
        functools.partial(live.Stores, stores, kinds, lazily=False),
        spec={"multiprocessing_context": method},
    )


@case("open database or array file in the data set")
@start_methods("fork")
@pytest.mark.parametrize("form", ["object", pytest.param("factory", marks=pytest.mark.slow)])
def test_stores_that_are_opened_when_they_are_first_read(stores: Path, form: str, method: str) -> None:
    make = functools.partial(live.Stores, stores, KINDS, lazily=True)
    dataset = make()
    works(dataset if form == "object" else make, spec={"multiprocessing_context": method})
    dataset.close()


@case("open database or array file in the data set")
@pytest.mark.slow
def test_stores_that_were_read_in_the_caller_before(stores: Path) -> None:
    """np.memmap and zarr handles travel; they are read in all processes."""
    dataset = live.Stores(stores, ("zarr", "memory map"), lazily=False)
    assert dataset[3] == 3
    works(dataset)


@case("open database or array file in the data set")
@pytest.mark.parametrize("kind", ["h5py", "h5py data set", "lmdb", "lmdb transaction", "sqlite3"])
def test_an_open_store_is_named_by_its_path(stores: Path, kind: str, said: Callable[[str], str]) -> None:
    dataset = live.Stores(stores, (kind,), lazily=False)
    try:
        text = refused(
            lambda: run(dataset, spec={"num_workers": 2}),
            NotPicklableError,
            rf"^loader_spec\.dataset\.handles\['{kind}'\] is a ",
            "factory",
            "__getstate__",
        )
        said(text)
    finally:
        dataset.close()


@case("open database or array file in the data set")
def test_an_open_h5py_file_is_told_to_be_opened_later(stores: Path) -> None:
    dataset = live.Stores(stores, ("h5py",), lazily=False)
    try:
        refused(
            lambda: run(dataset),
            NotPicklableError,
            r"open it (when|in|at|on)|first (item|read|access)|lazily",
        )
    finally:
        dataset.close()


# --- clients ---------------------------------------------------------------------------------------


@case("network client in the data set")
@pytest.mark.parametrize(
    ("method", "worker_dataset"),
    [
        ("forkserver", "auto"),
        pytest.param("fork", "rebuild", marks=pytest.mark.slow),
        pytest.param("spawn", "auto", marks=pytest.mark.slow),
        pytest.param("forkserver", "rebuild", marks=pytest.mark.slow),
    ],
)
def test_every_worker_has_its_own_client(method: str, worker_dataset: str) -> None:
    with live.echo_server() as server:
        spec = {
            "dataset_args": [server.server_address[1]],
            "multiprocessing_context": method,
            "worker_dataset": worker_dataset,
        }
        found = run(live.Remote, spec=spec | {"num_workers": 2})
        asked = len(server.callers)
        expected = run(live.Remote, spec={"dataset_args": spec["dataset_args"]}, cores=1)
    complete(found)
    assert found.result.draws.equals(expected.result.draws)
    assert asked >= 2 * (1 + 2)  # a connection for each chain process and each of its workers


@case("network client in the data set")
def test_a_captured_client_is_named_by_its_path(said: Callable[[str], str]) -> None:
    with live.echo_server() as server:
        dataset = live.Remote(server.server_address[1])
        text = refused(
            lambda: run(dataset, spec={"num_workers": 2}),
            NotPicklableError,
            r"^loader_spec\.dataset\.client\.sock is a socket\.socket",
            "factory",
        )
        dataset.client.close()
    said(text)


# --- multiprocessing -------------------------------------------------------------------------------


@case("multiprocessing primitive in the data set")
@pytest.mark.parametrize("primitive", live.PRIMITIVES)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_captured_primitive_is_named_by_its_path(
    primitive: str, method: str, said: Callable[[str], str]
) -> None:
    dataset = items.Holding(live.PRIMITIVES[primitive](multiprocessing.get_context(method)))
    text = refused(lambda: run(dataset, spec={"num_workers": 2}), NotPicklableError, *NAMED)
    said(text)


@case("multiprocessing primitive in the data set")
@pytest.mark.parametrize(
    ("made", "method"),
    [
        (None, "forkserver"),
        pytest.param("fork", "fork", marks=pytest.mark.slow),
        pytest.param("fork", "forkserver", marks=pytest.mark.slow),
        pytest.param("fork", "spawn", marks=pytest.mark.slow),
        pytest.param("spawn", "spawn", marks=pytest.mark.slow),
        pytest.param("spawn", "fork", marks=pytest.mark.slow),
        pytest.param("forkserver", "forkserver", marks=pytest.mark.slow),
    ],
)
def test_a_factory_may_make_primitives(made: str | None, method: str) -> None:
    works(live.Primitives, spec={"dataset_args": [made], "multiprocessing_context": method})


@case("multiprocessing primitive in the data set")
@pytest.mark.slow
def test_a_managers_dictionary_travels() -> None:
    with multiprocessing.get_context("spawn").Manager() as manager:
        shared = manager.dict({"scale": 2.0})
        works(items.Transformed(lambda x: x * shared["scale"]))


@case("multiprocessing primitive in the data set")
def test_a_tensor_in_shared_memory_travels() -> None:
    shared = torch.full((), 2.0).share_memory_()
    fields = {"batch_size": 4, "multiprocessing_context": "forkserver"}
    dataset = items.Transformed(lambda x: x * float(shared))
    alone = batches(LoaderSpec(dataset, **fields), 4)
    assert batches(LoaderSpec(dataset, num_workers=2, **fields), 4) == alone


def test_rebuild_needs_a_factory() -> None:
    refused(
        lambda: run(items.Numbers(), spec={"num_workers": 1, "worker_dataset": "rebuild"}),
        InvalidArgumentError,
        "^worker_dataset: ",
        "factory",
    )
