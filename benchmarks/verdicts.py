"""Planted faults: does the first reason name the fault, and is a healthy run trusted?

    python benchmarks/verdicts.py --seeds 200 --out verdicts.json

Runs every scenario with that many seeds and prints, for each, how often the first reason was of the kind
that was planted (or the verdict "trust", for healthy runs), and what it was otherwise.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from devsample import SGHMC, SGNHT, LLCResult, LoaderSpec, RMSPropSGLD, estimate_learning_coeff_with_summary
from devsample.samplers import AdamSGLD

N, D = 512, 8
NBETA = N / math.log(N)


def regression(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets with noise, and the least-squares weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator) * torch.logspace(-0.3, 0.3, D)
    y = x @ torch.randn(D, generator=generator) + 0.3 * scale * torch.randn(N, generator=generator)
    return x, y, torch.linalg.lstsq(x, y[:, None]).solution[:, 0]


X, Y, BEST = regression()
STIFFEST = NBETA * 2 * float(torch.linalg.eigvalsh(X.T @ X / N)[-1])


def linear(shift: float = 0.0) -> torch.nn.Module:
    """The regression at its minimum, or beside it."""
    model = torch.nn.Linear(D, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(BEST[None] + shift)
    return model


def square(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Mean squared error."""
    return ((model(batch[0].to(model.weight.dtype))[:, 0] - batch[1]) ** 2).mean()


def tanh_net(dropout: float = 0.0) -> torch.nn.Module:
    """A teacher of two units that fits `TANH` exactly, up to noise."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(D, 4), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(4, 1)
    )


with torch.no_grad():
    _noise = 0.3 * torch.randn(N, generator=torch.Generator().manual_seed(2))
    TANH = TensorDataset(X, tanh_net()(X)[:, 0] + _noise)


def fit_tanh(dropout: float = 0.0) -> torch.nn.Module:
    """The teacher, trained on its noisy data to the minimum."""
    model = tanh_net(dropout)
    plain = torch.nn.Sequential(*(one for one in model if not isinstance(one, torch.nn.Dropout)))
    optimizer = torch.optim.LBFGS(plain.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((plain(TANH.tensors[0])[:, 0] - TANH.tensors[1]) ** 2).mean() + 1e-4 * sum(
            (one**2).sum() for one in plain.parameters()
        )
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def half_trained() -> torch.nn.Module:
    """The trained network on its way to the minimum."""
    model = fit_tanh()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return model


def net_square(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Mean squared error of a network."""
    return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()


_X = torch.randn(2048, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-0.3, 0.3, 64)
_Y = _X.sum(1) + torch.randn(2048, generator=torch.Generator().manual_seed(4))
WIDE = TensorDataset(_X, _Y)


def wide() -> torch.nn.Module:
    """A regression of 64 weights at its minimum."""
    model = torch.nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(_X, _Y[:, None]).solution.T)
    return model


class Interrupted:
    """An evaluate whose loss is spoilt at some of its calls."""

    def __init__(self, first: int, last: int, factor: float) -> None:
        self.calls, self.first, self.last, self.factor = 0, first, last, factor

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Welsch's loss, which is flat far away, times the factor at those calls."""
        self.calls += 1
        error = (model(batch[0])[:, 0] - batch[1]) ** 2
        loss = (2 * (1 - torch.exp(-error / 2))).mean()
        return loss * self.factor if self.first <= self.calls < self.last else loss


class OwnOrder(Dataset):
    """A data set that deals out its items by shuffled epochs, whatever index it is asked for."""

    def __init__(self) -> None:
        self.epoch = 0
        self.left: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.left:
            self.epoch += 1
            order = np.random.Generator(np.random.PCG64(self.epoch))  # in nobody's hands but its own
            self.left = order.permutation(N).tolist()
        number = self.left.pop()
        return X[number], Y[number]


class Dealt(IterableDataset):
    """A stream of shuffled epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        for number in torch.randperm(N, generator=generator).tolist():
            yield X[number], Y[number]


def plain_spec(**keywords: Any) -> LoaderSpec:
    """The regression's data."""
    return LoaderSpec(TensorDataset(X, Y), **({"batch_size": 64} | keywords))


def healthy(**changes: Any) -> dict[str, Any]:
    """Arguments of a run with nothing wrong: burn-in of five relaxation times, small steps."""
    settings: dict[str, Any] = {
        "model": linear(),
        "loader_spec": plain_spec(),
        "evaluate": square,
        "optimizer_kwargs": {"lr": 0.2 / STIFFEST, "localization": 1.0, "nbeta": NBETA},
        "num_chains": 4,
        "num_draws": 400,
        "num_burnin_steps": 400,
        "num_steps_bw_draws": 4,
        "chains_per_process": 4,
        "verbose": False,
    }
    return settings | changes


def sgld(factor: float, **options: Any) -> dict[str, Any]:
    """Options with lr as a multiple of the stiffest direction's 1/a."""
    return {"lr": factor / STIFFEST, "localization": 1.0, "nbeta": NBETA} | options


@dataclass(frozen=True)
class Scenario:
    """A run with a fault, or without.

    Attributes:
        arguments: makes the arguments of the run, anew for each seed.
        kind: kinds of findings that name the fault; empty: the verdict must be "trust".
    """

    arguments: Callable[[], dict[str, Any]]
    kind: tuple[str, ...] = field(default=())


NETWORK_OPTIONS = {"localization": 10.0, "nbeta": NBETA}


def network(model: torch.nn.Module | None = None) -> dict[str, Any]:
    """The trained network, or another one, and its data."""
    return {
        "model": model or fit_tanh(),
        "evaluate": net_square,
        "loader_spec": LoaderSpec(TANH, batch_size=64),
    }


def nothing_moves(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A loss that does not depend on the weights."""
    return (batch[1] ** 2).mean() + 0 * model(batch[0]).sum()


def half(model: torch.nn.Module) -> torch.nn.Module:
    """The model in bfloat16."""
    return model.to(torch.bfloat16)


SCENARIOS: dict[str, Scenario] = {
    "healthy": Scenario(healthy),
    "healthy, epochs": Scenario(lambda: healthy(loader_spec=plain_spec(sampling="epoch"))),
    "healthy, stream": Scenario(
        lambda: healthy(loader_spec=LoaderSpec(Dealt(), batch_size=64, num_samples=N))
    ),
    "healthy, SGHMC": Scenario(lambda: healthy(sampling_method=SGHMC, optimizer_kwargs=sgld(0.02))),
    "healthy, RMSPropSGLD": Scenario(
        lambda: healthy(sampling_method=RMSPropSGLD, optimizer_kwargs=sgld(0.1))
    ),
    "healthy, AdamSGLD": Scenario(
        lambda: healthy(
            sampling_method=AdamSGLD,
            optimizer_kwargs=sgld(0.03, momentum=0.5),
            num_steps_bw_draws=10,
            num_burnin_steps=1000,
        )
    ),
    "healthy, SGNHT": Scenario(lambda: healthy(sampling_method=SGNHT, optimizer_kwargs=sgld(0.02))),
    "healthy, observed": Scenario(lambda: healthy(observables=("virial", "distance"))),
    "healthy, SGHMC, settings chosen": Scenario(
        lambda: healthy(
            **network(),
            sampling_method=SGHMC,
            optimizer_kwargs=NETWORK_OPTIONS,
            num_burnin_steps=0,
            num_steps_bw_draws=10,
            observables=("virial", "distance"),
        )
    ),
    "healthy, network": Scenario(
        lambda: healthy(
            **network(),
            optimizer_kwargs={"lr": 2e-3, **NETWORK_OPTIONS},
        )
    ),
    "a chain turns NaN": Scenario(
        lambda: healthy(
            evaluate=Interrupted(2000, 2001, math.nan),
            optimizer_kwargs=sgld(0.2, localization=0.1),
            num_steps_bw_draws=2,
            chains_per_process=1,
        ),
        ("lost",),
    ),
    "a chain diverges": Scenario(
        lambda: healthy(
            evaluate=Interrupted(2000, 2040, -1e3),
            optimizer_kwargs=sgld(0.2, localization=1e-4),
            num_steps_bw_draws=2,
            chains_per_process=1,
        ),
        ("lost",),
    ),
    "under-burned": Scenario(
        lambda: healthy(
            model=wide(),
            loader_spec=LoaderSpec(WIDE, batch_size=256),
            num_burnin_steps=0,
            num_draws=600,
            num_steps_bw_draws=1,
            optimizer_kwargs={"lr": 2e-5, "localization": 1.0, "nbeta": 2048 / math.log(2048)},
        ),
        ("drift",),
    ),
    "not a minimum": Scenario(lambda: healthy(model=linear(0.5)), ("no minimum",)),
    "half-trained": Scenario(
        lambda: healthy(
            **network(half_trained()),
            optimizer_kwargs={"lr": 2e-3, **NETWORK_OPTIONS},
        ),
        ("no minimum",),
    ),
    "lr too large": Scenario(lambda: healthy(optimizer_kwargs=sgld(3.0)), ("large step",)),
    "lr too large, RMSPropSGLD": Scenario(
        lambda: healthy(sampling_method=RMSPropSGLD, optimizer_kwargs=sgld(4.0)), ("large step",)
    ),
    "lr too large, AdamSGLD": Scenario(
        lambda: healthy(sampling_method=AdamSGLD, optimizer_kwargs=sgld(0.2)), ("bias",)
    ),
    "lr too small, RMSPropSGLD": Scenario(
        lambda: healthy(
            **network(), sampling_method=RMSPropSGLD, optimizer_kwargs={"lr": 1e-5, **NETWORK_OPTIONS}
        ),
        ("small step",),
    ),
    "lr too small, SGHMC": Scenario(
        lambda: healthy(**network(), sampling_method=SGHMC, optimizer_kwargs={"lr": 1e-6, **NETWORK_OPTIONS}),
        ("small step",),
    ),
    "not spread": Scenario(
        lambda: healthy(
            **network(),
            optimizer_kwargs={"lr": 1e-3, **NETWORK_OPTIONS, "localization": 0.1},
            num_burnin_steps=0,
            observables=("virial",),
        ),
        ("not spread", "small step"),
    ),
    "lr too small": Scenario(lambda: healthy(optimizer_kwargs=sgld(1e-4)), ("small step",)),
    "shared batches": Scenario(
        lambda: healthy(
            loader_spec=LoaderSpec(OwnOrder(), batch_size=64),
            executor="processes",
            cores=4,
            num_draws=200,
            num_steps_bw_draws=2,
            chains_per_process=1,
        ),
        ("shared batches",),
    ),
    "dropout in training mode": Scenario(
        lambda: healthy(
            **network(fit_tanh(0.2)),
            optimizer_kwargs={"lr": 2e-3, **NETWORK_OPTIONS},
            train_mode=True,
        ),
        ("training mode",),
    ),
    "nothing moves": Scenario(lambda: healthy(evaluate=nothing_moves), ("frozen", "small step")),
    "too few draws": Scenario(lambda: healthy(num_draws=10), ("few draws",)),
    "half precision": Scenario(
        lambda: healthy(
            model=half(linear()), optimizer_kwargs={"lr": 1e-9, "localization": 1e4, "nbeta": NBETA}
        ),
        ("low precision",),
    ),
    "epoch order": Scenario(
        lambda: healthy(
            loader_spec=LoaderSpec(OwnOrder(), batch_size=64), num_steps_bw_draws=2, chains_per_process=1
        ),
        ("epoch order",),
    ),
}


def run(name: str, seed: int) -> LLCResult:
    """A scenario's run."""
    return estimate_learning_coeff_with_summary(seed=seed, **SCENARIOS[name].arguments())


def outcome(name: str, result: LLCResult) -> tuple[bool, str]:
    """Whether the verdict is right, and the kind of its first finding."""
    first = result.findings[0].kind if result.findings else "trust"
    wanted = SCENARIOS[name].kind
    return first in wanted if wanted else result.verdict == "trust", first


def one_run(name: str, seed: int) -> tuple[bool, str]:
    """A scenario's outcome, in a process of its own."""
    torch.set_num_threads(1)
    return outcome(name, run(name, seed))


def main() -> None:
    """Run all scenarios and print the table."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", help="names of scenarios")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.only or list(SCENARIOS)
    found: dict[str, dict[str, int]] = {}
    with (
        ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool,
        tqdm(total=len(names) * options.seeds, mininterval=5) as bar,
    ):
        for name in names:
            kinds: collections.Counter[str] = collections.Counter()
            right = 0
            for waiting in as_completed([pool.submit(one_run, name, s) for s in range(options.seeds)]):
                good, kind = waiting.result()
                right += good
                kinds[kind] += 1
                bar.update()
            found[name] = {"right": right, **dict(kinds.most_common())}
            bar.write(f"{name:28} {right:4} of {options.seeds}   {dict(kinds.most_common())}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
