"""Models, data and losses that tests use and that the processes of a run import again.

Imports stay light: a chain process that gets a function of this module loads what stands here.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

import devsample


def linear_data(n: int = 256, features: int = 4, dtype: torch.dtype | None = None) -> TensorDataset:
    """y = x · 1 with a little noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, features, generator=generator, dtype=dtype)
    noise = torch.randn(n, 1, generator=generator, dtype=dtype)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.3 * noise)


def linear_model(features: int = 4, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The truth behind `linear_data`; made without a random number."""
    model = torch.nn.utils.skip_init(torch.nn.Linear, features, 1, dtype=dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    return model


def squared_error(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return ((model(x) - y) ** 2).mean()


def cross_entropy(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)


def settings(**changes: Any) -> dict[str, Any]:
    """Arguments of a short, quiet run on `linear_data`; with a ``model`` and without a spec."""
    return {
        "model": linear_model(),
        "evaluate": squared_error,
        "optimizer_kwargs": {"lr": 1e-4, "localization": 1.0},
        "num_chains": 2,
        "num_draws": 10,
        "seed": 0,
        "verbose": False,
    } | changes


def estimate(*, spec: dict[str, Any] | None = None, **changes: Any) -> devsample.LLCResult:
    """A short run; ``spec`` holds fields of its LoaderSpec."""
    given = settings(**changes)
    if "loader" not in given and "loader_spec" not in given:
        fields = {"dataset": linear_data(), "batch_size": 16} | (spec or {})
        given["loader_spec"] = devsample.LoaderSpec(**fields)
    return devsample.estimate_learning_coeff_with_summary(**given)


# --- models --------------------------------------------------------------------------------------


def mlp(*sizes: int) -> torch.nn.Module:
    """Linear layers with tanh between them, at reproducible weights."""
    layers: list[torch.nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(before, after), torch.nn.Tanh()]
    return fixed_weights(torch.nn.Sequential(*layers[:-1]))


def small_conv_net() -> torch.nn.Module:
    """Two convolutions with batch norm on images of 12 × 12, ten classes."""
    return fixed_weights(
        torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3, stride=2),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(4, 8, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(72, 10),
        )
    )


def fixed_weights(model: torch.nn.Module) -> torch.nn.Module:
    """The model with parameters drawn from a stream of their own."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            fan = max(1, parameter[0].numel()) if parameter.ndim > 1 else 100
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan**0.5)
    return model


# --- data ----------------------------------------------------------------------------------------


def classes(n: int, *shape: int) -> TensorDataset:
    """Random inputs of a shape with random labels 0 … 9."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(n, *shape, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 10, (n,), generator=generator))


def digits() -> TensorDataset:
    """scikit-learn's handwritten digits, 64 features."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))


class Augmented(Dataset[Any]):
    """Adds noise from torch's, numpy's and random's global generators to every item."""

    def __init__(self) -> None:
        self._data = linear_data()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        x, y = self._data[index]
        shift = torch.randn(4) + float(np.random.rand()) + random.random()  # noqa: NPY002
        return x + 0.1 * shift, y


# --- what goes wrong -----------------------------------------------------------------------------


class KilledOnce:
    """An evaluate whose chain process is killed at one call, in the first attempt only.

    Args:
        marker: a file that is made when it happens.
        call: at which call in a process.
    """

    def __init__(self, marker: Path, call: int) -> None:
        self._marker, self._left = marker, call

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self._left -= 1
        if self._left == 0 and multiprocessing.parent_process() is not None and _first(self._marker):
            os.kill(os.getpid(), signal.SIGKILL)
        return squared_error(model, batch)


class WorkerKilledOnce(Dataset[Any]):
    """A data set whose loader worker is killed at one item, in the first attempt only."""

    def __init__(self, marker: Path, item: int) -> None:
        self._data, self._marker, self._left = linear_data(), marker, item

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        self._left -= 1
        if self._left == 0 and get_worker_info() is not None and _first(self._marker):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._data[index]


def _first(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class FailsAt:
    """A callback that does something bad in one chain at one draw.

    Args:
        chain: the chain; None for all.
        draw: the draw.
        how: "raise", "kill" (SIGKILL to this process) or "interrupt" (KeyboardInterrupt).
    """

    def __init__(self, chain: int | None, draw: int, how: str) -> None:
        self.chain, self.draw, self.how = chain, draw, how

    def __call__(self, chain: int, draw: int) -> None:
        if draw != self.draw or self.chain not in (None, chain):
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "interrupt":
            raise KeyboardInterrupt
        raise ValueError(f"the callback does not like chain {chain}")


class BreaksWeights:
    """A callback that makes the model's weights NaN in one chain at one draw."""

    def __init__(self, chain: int, draw: int) -> None:
        self.chain, self.draw = chain, draw

    def __call__(self, chain: int, draw: int, model: torch.nn.Module) -> None:
        if (chain, draw) == (self.chain, self.draw):
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
