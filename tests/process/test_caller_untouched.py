"""Whatever becomes of a run, everything of the caller's is as it was, and nothing is left behind."""

import contextlib
import copy
import gc
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from devsample.errors import EvaluateError
from tests.factories import FailsAt, estimate, linear_data, squared_error

ENDINGS = ["success", "evaluate raises", "interrupted"]


class Model(torch.nn.Module):
    """Modes mixed, one layer frozen, buffers of both kinds, gradients on some parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
        self.head = torch.nn.Linear(8, 1)
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)
        self.offset = torch.tensor(0.5)  # neither parameter nor buffer
        self.train()
        self.body[1].eval()
        self.body[0].bias.requires_grad_(False)
        self.body[0].weight.grad = torch.full((8, 4), 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale + self.offset


class Items(Dataset):
    """Counts in itself, as a data set with a cache would."""

    def __init__(self) -> None:
        self._data = linear_data()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors["offset"] = model.offset
    for name, tensor in tensors.items():
        state[f"{name} object"] = id(tensor)
        state[f"{name} memory"] = tensor.data_ptr()
        state[f"{name} values"] = tensor.detach().clone().numpy().tobytes()
        state[f"{name} requires_grad"] = tensor.requires_grad
        state[f"{name} grad"] = None if tensor.grad is None else tensor.grad.numpy().tobytes()
        state[f"{name} grad object"] = id(tensor.grad)
    for name, module in model.named_modules():
        state[f"{name} training"] = module.training
        state[f"{name} hooks"] = len(module._forward_hooks), len(module._forward_pre_hooks)
    return state


def process_state() -> dict[str, Any]:
    main = sys.modules["__main__"]
    return {
        "torch random state": torch.get_rng_state().numpy().tobytes(),
        "numpy random state": repr(np.random.get_state(legacy=False)),  # noqa: NPY002
        "python random state": random.getstate(),
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "environment": dict(os.environ),
        "working folder": Path.cwd(),
        "main module": {name: id(value) for name, value in vars(main).items()},
        "python threads": sorted(thread.name for thread in threading.enumerate()),
        "children": children(),
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What is not as it was, before and after."""
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def children() -> list[str]:
    """Child processes; Python's own resource tracker serves until the interpreter ends."""
    lines = [
        " ".join(child.cmdline())
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    ]
    return [line for line in lines if "resource_tracker" not in line]


def raise_in_evaluate(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    torch.rand(3)
    np.random.rand()  # noqa: NPY002
    random.random()
    raise ArithmeticError("evaluate does not work")


def random_evaluate(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Changes every global generator."""
    np.random.rand()  # noqa: NPY002
    random.random()
    return squared_error(model, (batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]))


def interrupt(draws: object) -> None:
    raise KeyboardInterrupt


def run_to(ending: str, cores: int, **given: Any) -> None:
    if ending == "success":
        estimate(evaluate=random_evaluate, cores=cores, **given)
        return
    if ending == "evaluate raises":
        with pytest.raises(EvaluateError, match="evaluate does not work"):
            estimate(evaluate=raise_in_evaluate, cores=cores, **given)
        return
    if cores == 1:
        given["callbacks"] = [FailsAt(0, 3, "interrupt")]
    else:  # in this process, while chains are at work in others
        given["on_records"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        estimate(cores=cores, **given)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("cores", [1, 2])
def test_everything_is_as_it_was(
    cores: int, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # also of the processes that are started
    monkeypatch.setattr("tempfile.tempdir", None)
    torch.manual_seed(5)
    model = Model()
    workers = 1 if (cores, ending) == (1, "interrupted") else 0
    loader = DataLoader(Items(), batch_size=32, shuffle=True, num_workers=workers)
    optimizer_kwargs = {"lr": 1e-4, "localization": 1.0, "nbeta": 20.0}
    kept = copy.deepcopy(optimizer_kwargs), dict(vars(loader)), dict(vars(loader.dataset))
    before = process_state() | model_state(model)

    run_to(ending, cores, model=model, loader=loader, optimizer_kwargs=optimizer_kwargs)

    after = process_state() | model_state(model)
    gc.collect()  # a file that was left open warns, and a warning is an error
    assert changes(before, after) == {}
    assert (optimizer_kwargs, vars(loader), vars(loader.dataset)) == kept
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    assert [path for path in left if not path.startswith("pymp-")] == []


def test_a_callback_of_another_process_that_is_interrupted_costs_its_chain_only() -> None:
    before = children()
    result = estimate(callbacks=[FailsAt(0, 3, "interrupt")], executor="processes", cores=1)
    assert list(result.chains["status"])[1] == "done"
    assert result.chains["status"][0] in ("died", "failed")
    assert result.verdict != "trust"
    assert children() == before


def test_a_model_in_training_mode_with_running_statistics_keeps_them() -> None:
    model = Model()
    model.train()
    before = model_state(model)
    estimate(model=model, train_mode=True)
    after = model_state(model)
    assert changes(before, after) == {}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(context: Any) -> None:
    expected = estimate()
    with context():
        found = estimate()
        assert not torch.is_grad_enabled()
    np.testing.assert_array_equal(found["loss/trace"], expected["loss/trace"])


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def error_against_new_tensor(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return squared_error(model, batch) * torch.tensor(1 / 3)  # of the default dtype


def test_chain_processes_have_the_callers_default_dtype() -> None:
    with default_dtype(torch.float64):
        given = {"evaluate": error_against_new_tensor, "spec": {"dataset": linear_data()}}
        here = estimate(**given)
        there = estimate(executor="processes", **given)
        assert torch.get_default_dtype() is torch.float64
    np.testing.assert_array_equal(there["loss/trace"], here["loss/trace"])
