"""The demonstration: the learning coefficient of a small classifier of handwritten digits.

Chain processes and loader workers import this module for `digits` and `evaluate`, so it loads
nothing heavy besides torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from devsample.errors import DevsampleError, RunFolderError

if TYPE_CHECKING:
    from devsample.results import LLCResult

TRAIN_SAMPLES = 1437
EPOCHS = 60
# Settings of SGLD that fit this model: a chain forgets where it was after about
# 2 / (lr · localization) = 400 steps, and the predicted bias from lr stays near 2 %.
LR, LOCALIZATION, BATCH_SIZE = 5e-4, 10.0, 128
BURNIN_STEPS, STEPS_PER_DRAW = 1000, 4
_NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


@dataclass(frozen=True)
class DemoOptions:
    """What can be chosen; the same names as on the command line."""

    out: Path
    chains: int
    draws: int
    cores: int
    workers: int
    seed: int


def digits(split: str) -> TensorDataset:
    """scikit-learn's handwritten digits: images (N, 64) in [0, 1], and classes 0 … 9.

    Args:
        split: "train" (1437 images) or "test" (the other 360), always the same ones.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    chosen = order[:TRAIN_SAMPLES] if split == "train" else order[TRAIN_SAMPLES:]
    images = torch.from_numpy(data.data).float() / 16
    return TensorDataset(images[chosen], torch.from_numpy(data.target).long()[chosen])


def evaluate(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Mean cross-entropy of a batch (images, classes)."""
    images, classes = batch
    return F.cross_entropy(model(images), classes)


def new_classifier(seed: int) -> torch.nn.Module:
    """An untrained multilayer perceptron 64-32-10."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def train(model: torch.nn.Module, dataset: TensorDataset, seed: int) -> None:
    """Train ``model`` in place with Adam."""
    images, classes = dataset.tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images), generator=generator).split(64):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            evaluate(model, (images[rows], classes[rows])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()


def run_demo(options: DemoOptions) -> LLCResult:
    """Train, estimate, print, and write ``draws.csv`` and ``trace.png``.

    Raises:
        DevsampleError: a package is missing, the folder cannot be made, or the run failed.
    """
    _check_packages()
    with _new_folder(options.out) as folder:
        model = _trained_classifier(options.seed)
        result = _estimate(model, options)
        result.draws.to_csv(folder / "draws.csv", index=False)
        result.plot(folder / "trace.png")
    print(f"\n{result.summary()}\n")
    print(f"In {folder}{os.sep}")
    print(f"  draws.csv  {len(result.draws)} rows: {', '.join(result.draws.columns)}")
    print("  trace.png  the draws, and the running estimate of each chain")
    return result


def _trained_classifier(seed: int) -> torch.nn.Module:
    started, dataset = time.monotonic(), digits("train")
    model = new_classifier(seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"Training a 64-32-10 network ({size} parameters) on {len(dataset)} handwritten digits.",
        flush=True,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more make so small a model slower
    try:
        train(model, dataset, seed)
        _report(model, time.monotonic() - started)
    finally:
        torch.set_num_threads(threads)
    return model


def _report(model: torch.nn.Module, seconds: float) -> None:
    figures = []
    for split in ("train", "test"):
        images, classes = digits(split).tensors
        with torch.no_grad():
            loss = float(evaluate(model, (images, classes)))
            right = float((model(images).argmax(1) == classes).float().mean())
        figures.append(f"{split} loss {loss:.4f}, accuracy {right:.1%}")
    print(f"  {'; '.join(figures)} ({EPOCHS} epochs, {seconds:.1f} s)\n", flush=True)


def _estimate(model: torch.nn.Module, options: DemoOptions) -> LLCResult:
    from devsample import LoaderSpec, estimate_learning_coeff_with_summary

    where = f"{options.cores} processes" if options.cores > 1 else "this process"
    print(
        f"Sampling: {options.chains} chains of {options.draws} draws in {where}, "
        f"{options.workers} loader workers each.",
        flush=True,
    )
    return estimate_learning_coeff_with_summary(
        model,
        loader_spec=LoaderSpec(
            digits,
            dataset_kwargs={"split": "train"},
            batch_size=BATCH_SIZE,
            num_workers=options.workers,
        ),
        evaluate=evaluate,
        optimizer_kwargs={"lr": LR, "localization": LOCALIZATION},
        num_draws=options.draws,
        num_chains=options.chains,
        num_burnin_steps=BURNIN_STEPS,
        num_steps_bw_draws=STEPS_PER_DRAW,
        cores=options.cores,
        seed=options.seed,
    )


def _check_packages() -> None:
    missing = [name for module, name in _NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        raise DevsampleError(f"the demo needs {' and '.join(missing)}: pip install 'devsample[demo]'")


@contextlib.contextmanager
def _new_folder(wanted: Path) -> Iterator[Path]:
    """``wanted``, or ``wanted-2``, ``wanted-3``, …: the first that does not exist or is empty.

    It is removed again if nothing was written into it.
    """
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            taken = any(folder.iterdir())
        except FileExistsError:  # a file of that name
            taken = True
        except OSError as error:
            raise RunFolderError(f"--out: cannot use {folder}: {error.strerror}.") from error
        if not taken:
            break
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
