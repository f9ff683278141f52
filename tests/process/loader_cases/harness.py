"""Short runs whose losses and recorded batches show which samples every chain has read."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

import devsample
from devsample.errors import DevsampleError, NotPicklableError

CHAINS, DRAWS, BATCH = 2, 6, 4
METHODS = ("forkserver", "fork", "spawn")
NEWS_SECONDS = 30.0  # how long a failure may take to be told; without our own check it is far longer


def start_methods(*default: str) -> pytest.MarkDecorator:
    """Runs a test once for every way to start loader workers; those not named here are slow."""
    return pytest.mark.parametrize(
        "method",
        [pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in METHODS],
    )


class Run(NamedTuple):
    """A result, and the numbers in the batch of every draw: (chains, draws, samples)."""

    result: devsample.LLCResult
    seen: np.ndarray


def line() -> torch.nn.Module:
    """One weight and one bias, near a minimum of `misfit`."""
    with torch.device("cpu"), torch.no_grad():
        model = torch.nn.utils.skip_init(torch.nn.Linear, 1, 1)
        model.weight.fill_(1.0)
        model.bias.zero_()
    return model


def misfit(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Squared error on the numbers of a batch of any shape: every other number, another loss."""
    x = numbers(batch).reshape(-1, 1).float() / 16
    return ((model(x) - x - 0.3 * torch.sin(37 * x)) ** 2).mean()


def numbers(batch: Any) -> torch.Tensor:
    """The first tensor in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, (np.ndarray, int, float)):
        return torch.as_tensor(batch)
    if isinstance(batch, Mapping):
        return numbers(next(iter(batch.values())))
    if dataclasses.is_dataclass(batch):
        return numbers(getattr(batch, dataclasses.fields(batch)[0].name))
    if hasattr(batch, "x"):
        return numbers(batch.x)
    return numbers(batch[0]) if isinstance(batch[0], torch.Tensor) else torch.as_tensor(batch)


class Seen:
    """A callback that keeps the numbers in the batch of every draw."""

    def __init__(self, draws: int = DRAWS, chains: int = CHAINS, width: int = 64) -> None:
        self.values = np.full((chains, draws, width), np.nan)

    def __call__(self, chain: int, draw: int, batch: Any) -> None:
        parts = batch if isinstance(batch, list) and not isinstance(batch[0], torch.Tensor) else [batch]
        found = torch.cat([numbers(part).detach().flatten() for part in parts]).double().numpy()
        self.values[chain, draw, : len(found)] = found


def run(dataset: Any, *, spec: Mapping[str, Any] | None = None, width: int = 64, **changes: Any) -> Run:
    """Estimate with a few draws; ``spec`` holds further fields of the LoaderSpec.

    Up to ``width`` numbers of each batch are kept.
    """
    given_order = spec is not None and "batch_sampler" in spec
    fields = ({} if given_order else {"batch_size": BATCH}) | dict(spec or {})
    seen = Seen(changes.get("num_draws", DRAWS), changes.get("num_chains", CHAINS), width)
    given = {
        "model": line(),
        "evaluate": misfit,
        "callbacks": [seen],
        "optimizer_kwargs": {"lr": 1e-4, "localization": 1.0},
        "num_chains": CHAINS,
        "num_draws": DRAWS,
        "cores": 2,
        "threads_per_chain": 1,
        "seed": 3,
        "verbose": False,
    }
    if not {"loader", "loader_spec"} & set(changes):
        given["loader_spec"] = devsample.LoaderSpec(dataset, **fields)
    result = devsample.estimate_learning_coeff_with_summary(**(given | changes))
    return Run(result, seen.values)


def works(
    dataset: Any, *, spec: Mapping[str, Any] | None = None, num_workers: int = 2, **changes: Any
) -> Run:
    """Two chain processes with loader workers read what one process reads without any.

    All chains are done, the batches are the same, and so are the draws to the last bit.
    """
    found = run(dataset, spec=dict(spec or {}) | {"num_workers": num_workers}, **changes)
    alone = {
        name: value for name, value in dict(spec or {}).items() if name not in ("multiprocessing_context",)
    }
    expected = run(dataset, spec=alone | {"num_workers": 0}, **(changes | {"cores": 1}))
    complete(found)
    same(found, expected)
    return found


def complete(one: Run) -> None:
    """Every chain has all of its draws, each with its batch."""
    chains, draws = one.seen.shape[:2]
    assert list(one.result.chains["status"]) == ["done"] * chains, list(one.result.chains["message"])
    assert len(one.result.draws) == chains * draws
    assert np.isfinite(one.result.draws["loss"]).all()
    assert np.isfinite(one.seen[:, :, 0]).all()


def same(found: Run, expected: Run) -> None:
    """The same batches in the same order, and the same draws."""
    complete(expected)
    np.testing.assert_array_equal(found.seen, expected.seen)
    pd.testing.assert_frame_equal(found.result.draws, expected.result.draws, check_exact=True)


def row(one: Run, chain: int, draw: int) -> list[float]:
    """The numbers in one batch."""
    values = one.seen[chain, draw]
    return values[np.isfinite(values)].tolist()


def batches(spec: devsample.LoaderSpec, count: int, **build: Any) -> list[Any]:
    """The first batches of a loader that this process builds; its workers are gone afterwards."""
    loader = spec.build(**build)
    try:
        return [numbers(batch).tolist() for batch in itertools.islice(iter(loader), count)]
    finally:
        loader.close()


@contextlib.contextmanager
def nothing_started() -> Iterator[None]:
    """Nothing in this block starts a process."""
    made = multiprocessing.Process()._identity[-1]
    children = psutil.Process().children(recursive=True)
    yield
    assert multiprocessing.Process()._identity[-1] == made + 1  # the one that the count itself takes
    assert psutil.Process().children(recursive=True) == children


def refused(make: Callable[[], Any], kind: type[DevsampleError] = NotPicklableError, *parts: str) -> str:
    """``make`` raises ``kind`` before any process starts, and its text has all of ``parts``."""
    with nothing_started(), pytest.raises(kind) as caught:
        make()
    return says(str(caught.value), *parts)


def says(text: str, *parts: str) -> str:
    """``text``, which has each of ``parts`` (regular expressions) in it."""
    for part in parts:
        assert re.search(part, text), f"{part!r} is not in:\n{text}"
    return text


def soon(since: float, text: str = "") -> None:
    """The news of something that happened at ``since`` (seconds since the epoch) came in time."""
    assert time.time() - since < NEWS_SECONDS, text
