"""Bad arguments are named before any work starts; callbacks and their state."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import devsample
from devsample.errors import (
    CallbackStateWarning,
    EvaluateError,
    FeatureNotAvailableError,
    InvalidArgumentError,
    RunFolderError,
    UnreliableEstimateWarning,
)
from tests.factories import estimate, linear_data, linear_model, settings, squared_error

KWARGS = {"lr": 1e-4, "localization": 1.0}
TWO = torch.ones(2, dtype=torch.bool)

# Arguments, and what the message must say; its first word is the argument's name.
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # the model and what it is evaluated on
    "no module": ({"model": squared_error}, ("model", "torch.nn.Module", "function")),
    "a class": ({"model": torch.nn.Linear}, ("model", "torch.nn.Module")),
    "no data": ({"loader_spec": None}, ("loader, loader_spec", "exactly one")),
    "data twice": (
        {"loader": DataLoader(linear_data())},
        ("loader, loader_spec", "exactly one"),
    ),
    "a list as loader": ({"loader": [1], "loader_spec": None}, ("loader", "DataLoader", "list")),
    "a loader as spec": ({"loader_spec": DataLoader(linear_data())}, ("loader_spec", "loader=")),
    "a data set as spec": ({"loader_spec": linear_data()}, ("loader_spec", "LoaderSpec")),
    "evaluate": ({"evaluate": 3}, ("evaluate", "evaluate(model, batch)", "3")),
    # counts
    **{
        f"{name}={value!r}": ({name: value}, (name, "integer", repr(value)))
        for name, value in [
            ("num_draws", 0),
            ("num_draws", 2.0),
            ("num_draws", True),
            ("num_draws", "10"),
            ("num_draws", None),
            ("num_chains", 0),
            ("num_chains", -3),
            ("num_burnin_steps", -1),
            ("num_burnin_steps", 0.5),
            ("num_steps_bw_draws", 0),
            ("grad_accum_steps", 0),
            ("grad_accum_steps", 1.5),
            ("threads_per_chain", 0),
            ("threads_per_chain", "all"),
            ("chains_per_process", 0),
            ("chains_per_process", "max"),
        ]
    },
    # seeds
    "a real seed": ({"seed": 1.5}, ("seed", "integer", "1.5")),
    "a negative seed": ({"seed": -1}, ("seed", "-1")),
    "too large a seed": ({"seed": 2**128}, ("seed", "2^128")),
    "too few seeds": ({"seed": [1]}, ("seed", "num_chains=2")),
    "the same seed twice": ({"seed": [4, 4]}, ("seed", "same")),
    # the sampler
    "no sampler": ({"sampling_method": torch.nn.Linear}, ("sampling_method", "SGLD")),
    "a sampler's name": ({"sampling_method": "sgld"}, ("sampling_method", "'sgld'")),
    "no mapping": ({"optimizer_kwargs": 5}, ("optimizer_kwargs", "5")),
    "an unknown key": (
        {"optimizer_kwargs": {"lr": 1e-4, "learning_rate": 1}},
        ("optimizer_kwargs", "learning_rate", "localization"),
    ),
    **{
        f"{name}={value!r}": (
            {"optimizer_kwargs": KWARGS | {name: value}},
            ("optimizer_kwargs", name, repr(value)),
        )
        for name, value in [
            ("lr", 0),
            ("lr", -1e-3),
            ("lr", float("nan")),
            ("lr", "small"),
            ("lr", True),
            ("nbeta", 0),
            ("nbeta", -5.0),
            ("nbeta", float("inf")),
            ("nbeta", "lots"),
            ("nbeta", [1.0]),
            ("localization", -1.0),
            ("localization", None),
            ("weight_decay", -1.0),
            ("noise_level", "1"),
            ("bounding_box_size", 0.0),
            ("bounding_box", "bounce"),
            ("integrator", "leapfrog"),
        ]
    },
    "settings": ({"settings": "best"}, ("settings", "'best'")),
    "auto with lr": ({"settings": "auto"}, ("settings, optimizer_kwargs", "lr")),
    # the baseline and the start
    "baseline": ({"baseline": "mean"}, ("baseline", "'mean'", '"paired"')),
    "fixed without a value": ({"baseline": "fixed"}, ("baseline", "init_loss")),
    "full with a value": (
        {"baseline": "full", "init_loss": 1.0},
        ("init_loss, baseline", '"full"'),
    ),
    "init_loss of text": ({"init_loss": "x"}, ("init_loss", "'x'")),
    "init_loss nan": ({"init_loss": float("nan")}, ("init_loss", "nan")),
    "start": ({"start": "random"}, ("start", "'random'")),
    "prior without localization": (
        {"start": "prior", "optimizer_kwargs": {"lr": 1e-4}},
        ("start", "localization"),
    ),
    # masks
    "masks twice": (
        {"param_masks": {"weight": True}, "optimize_over_per_model_param": {"weight": True}},
        ("param_masks, optimize_over_per_model_param", "one of them"),
    ),
    "masks as a list": ({"param_masks": [True]}, ("param_masks", "[True]")),
    "an unknown parameter": ({"param_masks": {"wieght": True}}, ("param_masks", "'wieght'", "bias")),
    "a mask of another shape": (
        {"param_masks": {"weight": TWO}},
        ("param_masks['weight']", "(2,)", "(1, 4)"),
    ),
    "a mask of numbers": (
        {"param_masks": {"weight": torch.full((1, 4), 0.5)}},
        ("param_masks['weight']", "boolean"),
    ),
    "nothing moves": ({"param_masks": {"weight": False}}, ("param_masks", "no entry")),
    "the older name": (
        {"optimize_over_per_model_param": {"wieght": True}},
        ("optimize_over_per_model_param", "'wieght'"),
    ),
    # where it runs
    "cores=0": ({"cores": 0}, ("cores", "0")),
    "cores=1.5": ({"cores": 1.5}, ("cores", "1.5")),
    "cores=[]": ({"cores": []}, ("cores", "empty")),
    "an unknown device": ({"device": "abacus"}, ("device", "'abacus'")),
    "no device at all": ({"device": 1.5}, ("device", "1.5")),
    "a device that is not there": ({"device": "cuda:77"}, ("device", "cuda:77")),
    "device and devices": ({"device": "cpu", "devices": ["cpu"]}, ("device", "one of them")),
    "cores and devices": ({"cores": ["cpu"], "devices": ["cpu"]}, ("cores", "devices")),
    "devices as text": ({"devices": "cpu"}, ("devices", "list", "'cpu'")),
    "no devices": ({"devices": []}, ("devices", "empty")),
    "gpu_idxs as a number": ({"gpu_idxs": 0}, ("gpu_idxs", "0")),
    "no gpus": ({"gpu_idxs": []}, ("gpu_idxs", "empty")),
    "executor": ({"executor": "slurm"}, ("executor", "'slurm'", '"processes"')),
    "inline with two cores": ({"executor": "inline", "cores": 2}, ("executor, cores", "inline")),
    "run_dir": ({"run_dir": 5}, ("run_dir", "5")),
    # the rest
    "a callback": ({"callbacks": 3}, ("callbacks", "3")),
    "one of the callbacks": ({"callbacks": [print, "log"]}, ("callbacks[1]", "'log'")),
    "on_records": ({"on_records": 3}, ("on_records", "3")),
    "on_failure": ({"on_failure": "ignore"}, ("on_failure", "'ignore'", '"retry"')),
    "autocast_dtype": ({"autocast_dtype": torch.float32}, ("autocast_dtype", "float32")),
    "autocast_dtype as text": ({"autocast_dtype": "bf16"}, ("autocast_dtype", "'bf16'")),
    # what comes later
    "observables": ({"observables": ["length"]}, ("observables", "'length'")),
    "until": ({"until": 0.1}, ("until", "devsample.Precision")),
    "timeout": ({"timeout": 5}, ("timeout", "leave it out")),
    "compile": ({"compile": True}, ("compile", "leave it out")),
}


@pytest.mark.parametrize(("bad", "words"), BAD.values(), ids=BAD)
def test_a_bad_argument_is_named_before_any_work(
    bad: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    work: list[str] = []

    def make_data() -> Dataset:
        work.append("data")
        return linear_data()

    def evaluate(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        work.append("evaluate")
        return squared_error(model, batch)

    good = {
        "loader_spec": devsample.LoaderSpec(make_data, batch_size=16),
        "evaluate": evaluate,
        "run_dir": tmp_path / "run",
    }
    given = settings(**(good | bad))
    with pytest.raises(InvalidArgumentError) as caught:
        devsample.estimate_learning_coeff_with_summary(**given)
    message = str(caught.value)
    assert message.startswith(words[0].split("[")[0])
    assert [word for word in words if word not in message] == []
    assert work == []
    assert list(tmp_path.iterdir()) == []


def test_the_good_arguments_of_that_test_work(tmp_path: Path) -> None:
    result = estimate(run_dir=tmp_path / "run")
    assert len(result.draws) == 20
    assert (tmp_path / "run" / "manifest.json").exists()


def test_values_of_numpy_are_numbers_too() -> None:
    counts = {"num_draws": np.int64(10), "num_chains": np.int32(2), "seed": np.int64(0)}
    kwargs = {"lr": np.float32(1e-4), "nbeta": np.float64(20), "localization": np.float64(1)}
    found = estimate(**counts, optimizer_kwargs=kwargs, spec={"batch_size": np.int64(16)})
    expected = estimate(optimizer_kwargs={"lr": float(np.float32(1e-4)), "nbeta": 20, "localization": 1.0})
    np.testing.assert_array_equal(found["loss/trace"], expected["loss/trace"])


@pytest.mark.parametrize(
    "function", [devsample.estimate_learning_coeff, devsample.sample], ids=lambda one: one.__name__
)
def test_the_other_functions_check_as_well(function: Callable[..., Any]) -> None:
    spec = devsample.LoaderSpec(linear_data(), batch_size=16)
    with pytest.raises(InvalidArgumentError, match="num_draws"):
        function(**settings(loader_spec=spec, num_draws=0))
    with pytest.raises(TypeError, match="num_drawz"):
        function(**settings(loader_spec=spec), num_drawz=1)


def test_a_run_folder_that_is_in_use_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="not empty"):
        estimate(run_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="run_dir"):
        estimate(run_dir=tmp_path / "file" / "run")


def test_a_feature_of_a_later_version_is_told_apart() -> None:
    with pytest.raises(FeatureNotAvailableError):
        estimate(timeout=5)


# --- LoaderSpec ----------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield 1


class WithoutLength(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


DATA = linear_data()
BAD_SPECS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no data set": ({"dataset": 5}, ("dataset", "5")),
    "a loader": ({"dataset": DataLoader(DATA)}, ("dataset", "from_dataloader")),
    "a stream": ({"dataset": Stream()}, ("num_samples", "Stream", "num_samples=n")),
    "no length": ({"dataset": WithoutLength()}, ("dataset", "WithoutLength", "num_samples")),
    "empty": ({"dataset": []}, ("dataset", "empty")),
    "arguments for a data set": ({"dataset_args": (1,)}, ("dataset_args", "factory")),
    "too few arguments": ({"dataset": lambda n: DATA}, ("dataset_args", "'n'")),
    "unknown arguments": (
        {"dataset": lambda n: DATA, "dataset_kwargs": {"n": 1, "split": "train"}},
        ("dataset_args, dataset_kwargs", "'split'"),
    ),
    "dataset_args": ({"dataset": lambda n: DATA, "dataset_args": 5}, ("dataset_args", "5")),
    "dataset_kwargs": ({"dataset": lambda n: DATA, "dataset_kwargs": 5}, ("dataset_kwargs", "5")),
    "num_samples=0": ({"num_samples": 0}, ("num_samples", "0")),
    "shuffle=False": ({"shuffle": False}, ("shuffle", 'sampling="sequential"')),
    "sampling": ({"sampling": "random"}, ("sampling", "'random'", "epoch")),
    "two orders": ({"sampling": "iid", "shuffle": True}, ("sampling, shuffle", "one of them")),
    "sampler and shuffle": ({"sampler": [1, 2], "shuffle": True}, ("shuffle, sampler",)),
    "an iterator": ({"sampler": iter([1])}, ("sampler", "again")),
    "distributed": (
        {"sampler": DistributedSampler(DATA, num_replicas=2, rank=0)},
        ("sampler", "DistributedSampler"),
    ),
    "batch_sampler": ({"batch_sampler": [[1]], "batch_size": 2}, ("batch_sampler", "batch_size")),
    "drop_last": ({"batch_size": None, "drop_last": True}, ("drop_last", "batch_size=None")),
    "context": ({"multiprocessing_context": "thread"}, ("multiprocessing_context", "'thread'")),
    "context as a number": ({"multiprocessing_context": 5}, ("multiprocessing_context", "5")),
    "rebuild": ({"worker_dataset": "rebuild"}, ("worker_dataset", "factory")),
    "worker_dataset": ({"worker_dataset": "copy"}, ("worker_dataset", "'copy'")),
    **{
        f"{name}={value!r}": ({name: value}, (name, repr(value)))
        for name, value in [
            ("batch_size", 0),
            ("batch_size", 2.5),
            ("batch_size", True),
            ("num_workers", -1),
            ("num_workers", None),
            ("prefetch_factor", 0),
            ("timeout", -1),
            ("timeout", "long"),
            ("collate_fn", 3),
            ("worker_init_fn", "start"),
        ]
    },
    "in_order": ({"in_order": False}, ("in_order", "True")),
}


@pytest.mark.parametrize(("bad", "words"), BAD_SPECS.values(), ids=BAD_SPECS)
def test_a_bad_field_of_a_spec_is_named(bad: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        devsample.LoaderSpec(**({"dataset": DATA} | bad))
    message = str(caught.value)
    assert message.startswith(words[0])
    assert [word for word in words if word not in message] == []


# --- evaluate ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluate", "words"),
    [
        (lambda model, batch: 1.0, ("float", "without a loss")),
        (lambda model, batch: squared_error(model, batch).item(), ("float", "without a loss")),
        (lambda model, batch: None, ("NoneType", "without a loss")),
        (lambda model, batch: {"acc": 1}, ("dict", "without a loss")),
        (lambda model, batch: torch.tensor(3), ("Tensor", "floating point")),
        (lambda model, batch: squared_error(model, batch).detach(), ("does not depend", "model")),
        (lambda model, batch: squared_error(linear_model(), batch), ("moving parameter",)),
        (lambda model: 1.0, ("TypeError", "2 were given")),
        (None, ("evaluate was not given", "TypeError")),
    ],
    ids=[
        "a number", "an item", "nothing", "no loss key", "an integer", "detached",
        "another model", "one argument", "left out",
    ],
)  # fmt: skip
def test_an_evaluate_that_cannot_be_used(evaluate: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(EvaluateError) as caught:
        estimate(evaluate=evaluate)
    assert [word for word in words if word not in str(caught.value)] == []


def per_sample(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square()


class Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    "form",
    [
        per_sample,
        lambda model, batch: (squared_error(model, batch), {"accuracy": 1.0}),
        lambda model, batch: {"loss": squared_error(model, batch), "logits": None},
        lambda model, batch: Output(squared_error(model, batch)),
    ],
    ids=["per sample", "tuple", "mapping", "object"],
)
def test_every_form_of_a_loss_gives_the_same_numbers(form: Any) -> None:
    np.testing.assert_array_equal(estimate(evaluate=form)["loss/trace"], estimate()["loss/trace"])


# --- callbacks -----------------------------------------------------------------------------------


class Norms:
    """Keeps an array with one row a chain, as numpy and as torch."""

    def __init__(self, num_chains: int, num_draws: int) -> None:
        self.norms = np.zeros((num_chains, num_draws))
        self.losses = torch.zeros(num_chains, num_draws, dtype=torch.float64)

    def __call__(self, chain: int, draw: int, model: torch.nn.Module, loss: float) -> None:
        self.norms[chain, draw] = model.weight.detach().norm()
        self.losses[chain, draw] = loss

    def get_results(self) -> dict[str, Any]:
        return {"norms": self.norms}


class Largest:
    """Keeps one number and knows how to merge it."""

    def __init__(self) -> None:
        self.largest, self.calls = -np.inf, []

    def __call__(self, loss: float, chain: int) -> None:
        self.largest = max(self.largest, loss)
        self.calls.append(chain)

    def merge(self, other: "Largest") -> None:
        self.largest = max(self.largest, other.largest)
        self.calls += other.calls

    def get_results(self) -> dict[str, Any]:
        return {"largest": self.largest}


class Listing:
    """Keeps a list, which no rule brings back from another process."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def __call__(self, loss: float) -> None:
        self.losses.append(loss)


def run_sample(cores: int, callbacks: Any, **changes: Any) -> dict[str, Any]:
    spec = devsample.LoaderSpec(linear_data(), batch_size=16)
    given = settings(loader_spec=spec, callbacks=callbacks, cores=cores, num_chains=3, **changes)
    return devsample.sample(**given)


def test_state_of_callbacks_comes_back_from_several_processes() -> None:
    found = {}
    for cores in (1, 2):
        callbacks = [Norms(3, 10), Largest()]
        results = run_sample(cores, callbacks)
        assert set(results) == {"norms", "largest", "draws"}
        assert results["norms"] is callbacks[0].norms
        draws = results["draws"]
        assert list(draws["chain"]) == [0] * 10 + [1] * 10 + [2] * 10
        np.testing.assert_array_equal(callbacks[0].losses.flatten(), draws["loss"])
        assert results["largest"] == draws["loss"].max()
        assert sorted(callbacks[1].calls) == list(draws["chain"])
        found[cores] = results
    np.testing.assert_array_equal(found[1]["norms"], found[2]["norms"])
    assert len(np.unique(found[1]["norms"])) == 28  # the first draws are at w*


def refused_callbacks() -> dict[str, tuple[Any, str]]:
    kept: list[float] = []
    listing = Listing()
    table = np.zeros((7, 10))

    def append(loss: float) -> None:
        kept.append(loss)

    def fill(loss: float, draw: int) -> None:
        table[0, draw] = loss

    return {
        "an attribute": (listing, ".losses"),
        "a method": (listing.__call__, ".losses"),
        "a partial": (functools.partial(append), "kept"),
        "a closure": (append, "kept"),
        "an array without rows": (fill, "table"),
        "a lambda": (lambda loss: kept.append(loss), "kept"),
    }


@pytest.mark.parametrize(("callback", "name"), refused_callbacks().values(), ids=refused_callbacks())
def test_state_that_would_be_lost_is_refused_for_processes(callback: Any, name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        run_sample(2, [print, callback])
    message = str(caught.value)
    assert message.startswith("callbacks[1]: ")
    assert name in message
    assert "merge(self, other)" in message
    assert "cores=1" in message


def test_any_state_is_fine_in_place() -> None:
    listing = Listing()
    draws = run_sample(1, listing)["draws"]
    assert listing.losses == list(draws["loss"])


class Counts:
    """A number is not merged; the caller is told."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def test_a_number_that_does_not_come_back_is_told() -> None:
    with pytest.warns(CallbackStateWarning, match="Counts: calls changed in a chain process"):
        run_sample(1, Counts(), executor="processes")


def test_callbacks_get_what_they_ask_for() -> None:
    seen: list[dict[str, Any]] = []
    result = estimate(
        callbacks=[lambda **record: seen.append(record | {"batch": record["batch"][0].shape})],
        num_burnin_steps=3,
        num_steps_bw_draws=2,
        num_chains=1,
    )
    assert set(seen[0]) == {
        "chain", "draw", "step", "loss", "baseline", "llc", "init_loss", "nbeta", "model",
        "optimizer", "batch", "device",
    }  # fmt: skip
    assert [record["step"] for record in seen] == list(range(4, 24, 2))
    for name in ("draw", "step", "loss", "baseline", "llc"):
        assert [record[name] for record in seen] == pytest.approx(list(result.draws[name]))
    assert {record["batch"] for record in seen} == {(16, 4)}
    assert seen[0]["init_loss"] == result.init_loss


def test_the_model_of_a_callback_holds_the_weights_of_that_loss() -> None:
    gaps: list[float] = []

    def again(model: torch.nn.Module, batch: Any, loss: float) -> None:
        with torch.no_grad():
            gaps.append(abs(float(squared_error(model, batch)) - loss))

    estimate(callbacks=again)
    assert len(gaps) == 20
    assert max(gaps) == 0


def test_the_float_form_warns_when_the_estimate_is_rejected() -> None:
    far_from_a_minimum = linear_model()
    with torch.no_grad():
        far_from_a_minimum.weight.fill_(-3.0)
    spec = devsample.LoaderSpec(linear_data(), batch_size=16)
    given = settings(model=far_from_a_minimum, loader_spec=spec)
    with pytest.warns(UnreliableEstimateWarning) as caught:
        value = devsample.estimate_learning_coeff(**given)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert value < 0
    given["model"] = linear_model()
    given["num_draws"] = 400
    assert devsample.estimate_learning_coeff(**given) > 0  # and no warning, which would be an error
