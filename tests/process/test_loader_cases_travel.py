"""Loaders that plain PyTorch cannot start workers for: what travels, and on which hop."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset

import devsample
from devsample.errors import DevsampleError, InvalidArgumentError, LoaderWorkerError, NotPicklableError
from tests.process.loader_cases import items
from tests.process.loader_cases.harness import (
    METHODS,
    batches,
    complete,
    refused,
    run,
    says,
    start_methods,
    works,
)
from tests.process.loader_cases.table import case

pytestmark = [pytest.mark.usefixtures("fork_server", "clean"), pytest.mark.timeout(240)]
LIVE = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}


# --- a loader in use -----------------------------------------------------------------------------


@pytest.fixture
def live(clean: Path) -> Iterator[DataLoader[Any]]:
    """A loader with a live iterator and two idle workers."""
    loader = DataLoader(items.Numbers(), **LIVE)
    next(iter(loader))
    yield loader
    loader._iterator._shutdown_workers()


@case("live iterator in a persistent loader")
def test_a_loader_in_use_becomes_a_recipe(live: DataLoader[Any]) -> None:
    iterator = live._iterator
    found = run(None, loader=live)
    complete(found)
    expected = run(items.Numbers(), cores=1)
    assert found.result.draws.equals(expected.result.draws)
    assert live._iterator is iterator
    assert sum(map(len, live)) == items.COUNT  # it still serves its owner
    spec = devsample.LoaderSpec.from_dataloader(live)
    assert (spec.num_workers, spec.batch_size, spec.dataset) == (2, 4, live.dataset)
    spec.packed()


@case("live iterator in a persistent loader")
def test_a_loader_where_a_recipe_or_a_data_set_belongs(live: DataLoader[Any]) -> None:
    kind = InvalidArgumentError
    refused(lambda: run(live), kind, r"^dataset: .*DataLoader", r"LoaderSpec\.from_dataloader")
    refused(lambda: run(None, loader_spec=live, loader=None), kind, "loader_spec", "from_dataloader|loader=")
    refused(
        lambda: run(None, loader=iter(live)), kind, "loader: .*_MultiProcessingDataLoaderIter", "LoaderSpec"
    )


@case("live iterator in a persistent loader")
def test_a_live_iterator_inside_the_data_set(live: DataLoader[Any], said: Callable[[str], str]) -> None:
    dataset = items.Holding(live)
    text = refused(
        lambda: run(dataset), NotPicklableError, r"loader_spec\.dataset\.helper\['live'\]\[0\]\._iterator"
    )
    said(says(text, "factory"))


# --- daemonic processes --------------------------------------------------------------------------


@case("loader workers inside a daemonic process")
@start_methods()
def test_chain_processes_may_have_workers(method: str) -> None:
    works(items.Numbers(), spec={"multiprocessing_context": method})


def estimate_inside(spec: dict[str, Any], cores: int) -> str:
    try:
        complete(run(items.Numbers(), spec=spec, cores=cores))
    except DevsampleError as error:
        return f"{type(error).__name__}: {error}"
    return "complete"


@case("loader workers inside a daemonic process")
def test_a_daemonic_process_of_the_callers(said: Callable[[str], str]) -> None:
    """multiprocessing.Pool's workers are daemonic; those of ProcessPoolExecutor are not."""
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply(estimate_inside, ({}, 1)) == "complete"
        for spec, cores in (({}, 2), ({"num_workers": 1}, 1)):
            text = pool.apply(estimate_inside, (spec, cores))
            says(text, "InvalidArgumentError", "daemonic", "ProcessPoolExecutor")
    said(text)


class Pooled(items.Numbers):
    """Starts a process for every item."""

    def __getitem__(self, index: int) -> float:
        with get_context("fork").Pool(1) as pool:
            return pool.apply(float, (index,))


@case("loader workers inside a daemonic process")
def test_a_data_set_that_starts_processes_in_its_workers() -> None:
    """torch's workers are daemonic: the error is the data set's own, and says where."""
    spec = devsample.LoaderSpec(Pooled(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(LoaderWorkerError) as caught:
        batches(spec, 1)
    says(
        str(caught.value), "chain 0, step 0, loader worker 0", "daemonic processes are not allowed", "items "
    )


@case("loader workers inside a daemonic process")
@pytest.mark.slow
def test_inside_a_pool_that_is_not_daemonic() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(estimate_inside, {"num_workers": 1}, 2).result() == "complete"


# --- deep inside ---------------------------------------------------------------------------------


@pytest.fixture
def world_group(clean: Path, tmp_path: Path) -> Iterator[Any]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@case("process group deep in the data set")
def test_a_process_group_is_named_by_its_path(world_group: Any, said: Callable[[str], str]) -> None:
    text = refused(
        lambda: run(items.Sampled(world_group), spec={"num_workers": 2}),
        NotPicklableError,
        r"^loader_spec\.dataset\.sampling\.distributed\.world_group is a .*ProcessGroup",
        "factory",
        "__getstate__",
    )
    said(text)


@case("process group deep in the data set")
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda group: items.Holding(items.Slotted(group)), r"dataset\.helper\['live'\]\[0\]\.group"),
        (lambda group: items.Holding(items.Config(parts={"a": (1, group)})), r"\[0\]\.parts\['a'\]\[1\]"),
        (lambda group: items.Holding({"x": {group}}), r"\[0\]\['x'\]"),
        (
            lambda group: items.Transformed(functools.partial(max, key=lambda x: (group, x))),
            r"dataset\.transform\.keywords\['key'\]\.<closure group>",
        ),
        (lambda group: functools.partial(items.Sampled, group), r"loader_spec\.dataset\.args\[0\]"),
        (lambda group: lambda: items.Sampled(group), r"loader_spec\.dataset\.<closure group>"),
    ],
    ids=["slots", "dataclass", "set", "partial", "factory argument", "factory closure"],
)
def test_wherever_it_is(world_group: Any, wrap: Callable[[Any], Any], path: str) -> None:
    refused(lambda: run(wrap(world_group)), NotPicklableError, path, "ProcessGroup")


def make_sampled(folder: Path) -> items.Sampled:
    """Joins a group of one, in every process that makes the data set."""
    if not distributed.is_initialized():
        store = f"file://{folder}/store-{os.getpid()}"
        distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    return items.Sampled(distributed.group.WORLD)


@case("process group deep in the data set")
def test_a_factory_may_make_it(world_group: Any, tmp_path: Path) -> None:
    works(make_sampled, spec={"dataset_args": [tmp_path], "multiprocessing_context": "fork"})


# --- tensors that come into being while something is pickled --------------------------------------


@case("random generators in the data set of a starting worker")
@start_methods("forkserver")
@pytest.mark.parametrize("form", ["object", pytest.param("factory", marks=pytest.mark.slow)])
def test_generators(form: str, method: str) -> None:
    works(
        items.Generators() if form == "object" else items.Generators,
        spec={"multiprocessing_context": method},
    )


@case("random generators in the data set of a starting worker")
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_one_two_or_three_generators(count: int, method: str) -> None:
    works(items.Generators(count), spec={"multiprocessing_context": method}, num_workers=1)


@case("data set that packs itself into new tensors")
@start_methods("forkserver")
def test_tensors_made_by_getstate(method: str) -> None:
    works(items.PacksItself(), spec={"multiprocessing_context": method})


@case("data set that packs itself into new tensors")
@pytest.mark.parametrize(
    "make",
    [items.ManyTensors, pytest.param(items.ReducesToTensors, marks=pytest.mark.slow)],
    ids=["many tensors", "reduce"],
)
def test_tensors_of_every_sort(make: Callable[[], Any]) -> None:
    alone = batches(devsample.LoaderSpec(make(), batch_size=4), 8)
    for method in ("forkserver", "fork"):
        spec = devsample.LoaderSpec(make(), batch_size=4, num_workers=2, multiprocessing_context=method)
        assert batches(spec, 8) == alone


# --- functions without a home ----------------------------------------------------------------------


def starts(folder: Path, worker: int) -> None:
    (folder / f"{os.getpid()}-{worker}").touch()


class Starter:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker: int) -> None:
        starts(self.folder, worker)

    def method(self, worker: int) -> None:
        starts(self.folder, worker)


def homeless(form: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A data set, a collate_fn and a worker_init_fn of which each is of another form."""

    def double(x: float) -> float:
        return 2 * x

    def begin(worker: int) -> None:
        starts(folder, worker)

    class Local(items.CallableCollate):
        def collate(self, features: list[float]) -> torch.Tensor:
            return self(features)

    class LocalNumbers(items.Transformed):
        pass

    if form == "local functions":
        return items.Transformed(double), {"collate_fn": items.Trainer().collate, "worker_init_fn": begin}
    if form == "lambdas":
        return (
            LocalNumbers(lambda x: double(x)),
            {"collate_fn": lambda b: torch.tensor(b), "worker_init_fn": lambda w: starts(folder, w)},
        )
    if form == "bound methods":
        return (
            items.Transformed((2.0).__mul__),
            {"collate_fn": Local(0.5).collate, "worker_init_fn": Starter(folder).method},
        )
    if form == "partials":
        return (
            functools.partial(LocalNumbers, double),
            {
                "collate_fn": functools.partial(items.scaled, scale=0.5),
                "worker_init_fn": functools.partial(lambda f, w: starts(f, w), folder),
            },
        )
    return items.Transformed(functools.partial(operator.mul, 2.0)), {
        "collate_fn": Local(0.25),
        "worker_init_fn": Starter(folder),
    }


FORMS = ("local functions", "lambdas", "bound methods", "partials", "callable objects")


@case("local function as collate_fn")
@case("lambda as worker_init_fn")
@pytest.mark.parametrize(
    ("form", "method"),
    [
        pytest.param(
            form,
            method,
            marks=[]
            if (form, method)
            in {
                ("local functions", "forkserver"),
                ("lambdas", "fork"),
            }
            else pytest.mark.slow,
        )
        for form in FORMS
        for method in ("forkserver", "fork", "spawn")
    ],
)
def test_functions_without_a_home(form: str, method: str, tmp_path: Path) -> None:
    dataset, fields = homeless(form, tmp_path)
    works(dataset, spec=fields | {"multiprocessing_context": method})
    assert {path.name.partition("-")[2] for path in tmp_path.iterdir()} == {"0", "1"}


@case("start method left to the default")
@pytest.mark.parametrize("method", [None, *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS)])
def test_workers_start_as_the_spec_says(method: str | None, tmp_path: Path) -> None:
    dataset = items.Noting(tmp_path, items.start_method)
    spec = {"multiprocessing_context": method, "collate_fn": lambda b: torch.tensor(b), "num_workers": 2}
    complete(run(dataset, spec=spec))
    assert set(items.notes(tmp_path)) == {method or "forkserver"}


@case("worker_init_fn that reaches its data set")
@start_methods("forkserver")
@pytest.mark.parametrize("form", ["object", pytest.param("factory", marks=pytest.mark.slow)])
def test_worker_info_has_the_users_data_set(form: str, method: str) -> None:
    found = works(
        items.Opened() if form == "object" else items.Opened,
        spec={"multiprocessing_context": method, "worker_init_fn": items.open_in_worker},
    )
    assert found.seen[0, 0, 0] >= 100


# --- what does not load again --------------------------------------------------------------------


@case("object that pickles but does not load again")
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: items.Forgets("a"), [r"items\.Forgets", "TypeError: .*'path'"]),
        (items.RefusesState, [r"items\.RefusesState", "OSError: the file behind this is not open"]),
        (lambda: [1, {"x": items.Forgets("a")}], [r"\[0\]\[1\]\['x'\]", "Forgets"]),
    ],
    ids=["reduce", "setstate", "deep"],
)
def test_what_does_not_load_again(
    make: Callable[[], Any], parts: list[str], said: Callable[[str], str]
) -> None:
    text = refused(
        lambda: run(items.Holding(make())),
        NotPicklableError,
        r"^loader_spec\.dataset\.helper\['live'\]\[0\]",
        "does not load again",
        "factory",
        *parts,
    )
    said(text)


@case("object that pickles but does not load again")
def test_a_data_set_that_hands_attributes_on() -> None:
    """``__getattr__`` without end while it is loaded."""
    dataset = items.Delegates(items.Numbers())
    refused(
        lambda: run(dataset), NotPicklableError, r"^loader_spec\.dataset is a .*Delegates", "RecursionError"
    )
    works(lambda: items.Delegates(items.Numbers()), spec={"multiprocessing_context": "fork"})


@case("object that pickles but does not load again")
@pytest.mark.parametrize("position", ["collate_fn", "worker_init_fn", "dataset_args", "dataset_kwargs"])
def test_wherever_it_does_not_load(position: str) -> None:
    thing = items.Forgets("a")
    fields: dict[str, Any] = {
        "collate_fn": {"collate_fn": lambda batch: (thing, batch)},
        "worker_init_fn": {"worker_init_fn": functools.partial(print, thing)},
        "dataset_args": {"dataset_args": [thing]},
        "dataset_kwargs": {"dataset_kwargs": {"thing": thing}},
    }[position]
    dataset = items.Numbers() if position.endswith("_fn") else items.Holding
    refused(lambda: run(dataset, spec=fields), NotPicklableError, rf"^loader_spec\.{position}", "Forgets")


@case("object that pickles but does not load again")
def test_what_the_factory_makes_is_made_again_in_workers() -> None:
    alone = batches(devsample.LoaderSpec(items.make_forgets, batch_size=4), 4)
    spec = devsample.LoaderSpec(
        items.make_forgets, batch_size=4, num_workers=2, multiprocessing_context="forkserver"
    )
    assert batches(spec, 4) == alone


@case("object that pickles but does not load again")
@pytest.mark.slow
def test_what_the_factory_makes_is_made_again_in_workers_of_chains() -> None:
    works(items.make_forgets)


@case("object that pickles but does not load again")
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (items.make_forgets, r"dataset\.helper\['live'\]\[0\] is a .*Forgets"),
        (items.make_only_here, "RuntimeError: this belongs to another process"),
    ],
    ids=["reduce", "process"],
)
def test_a_worker_that_cannot_load_the_data_set_says_so(make: Callable[[], Any], what: str) -> None:
    """Asked to send the factory's data set on, though it does not load again (or only where it was made)."""
    spec = devsample.LoaderSpec(make, batch_size=4, num_workers=1, worker_dataset="pickle")
    with pytest.raises(DevsampleError) as caught:
        batches(spec, 1)
    says(str(caught.value), what, "does not load|could not be made", "rebuild|factory|__getstate__")


@case("autograd tensor in the data set")
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda x: TensorDataset(x), r"loader_spec\.dataset\.tensors\[0\]"),
        (items.Holding, r"loader_spec\.dataset\.helper\['live'\]\[0\]"),
        (lambda x: items.Transformed(lambda i: x[int(i)]), r"loader_spec\.dataset\.transform\.<closure x>"),
        (lambda x: functools.partial(TensorDataset, x), r"loader_spec\.dataset\.args\[0\]"),
    ],
    ids=["TensorDataset", "attribute", "closure", "factory argument"],
)
def test_a_tensor_with_a_graph_is_named(
    wrap: Callable[[torch.Tensor], Any], path: str, said: Callable[[str], str]
) -> None:
    features = torch.nn.Linear(3, 3)(torch.ones(8, 3))
    text = refused(lambda: run(wrap(features)), NotPicklableError, rf"^{path}", r"\.detach\(\)", "graph")
    said(text)


def make_with_graph() -> TensorDataset:
    return TensorDataset(torch.nn.Linear(3, 1)(torch.ones(items.COUNT, 3)))


@case("autograd tensor in the data set")
def test_a_factory_that_makes_a_tensor_with_a_graph() -> None:
    with pytest.raises(DevsampleError) as caught:
        run(make_with_graph, spec={"num_workers": 1, "multiprocessing_context": "fork"})
    says(str(caught.value), r"\.detach\(\)", r"tensors\[0\]|batch\[0\]")


def test_a_leaf_that_requires_grad_travels() -> None:
    features = torch.arange(float(items.COUNT)).requires_grad_()
    spec = devsample.LoaderSpec(items.Holding(features), batch_size=4, num_workers=1)
    assert len(batches(spec, 2)) == 2


def test_the_refusal_is_tested_by_something_that_travels() -> None:
    with pytest.raises(pytest.fail.Exception):
        refused(lambda: devsample.LoaderSpec(items.Holding(1)).packed())
