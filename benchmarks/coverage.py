"""Does estimate ± 1.96 se cover as often as it says, and is the estimate's mean right?

    python benchmarks/coverage.py --seeds 400 --out coverage.json

Runs a linear regression with independent minibatches and a reduced-rank regression with that many seeds
each, fixed draws and `until=Precision(...)`, and compares

* coverage: how often the interval contains the mean over all seeds,
* the spread of the estimates over seeds, against the mean standard error,
* the mean, against the exact stationary value of the discrete chain (linear regression), or against the
  value at this nβ (reduced rank; the same runs with half the step say whether the step still matters).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from devsample import LoaderSpec, Precision, estimate_learning_coeff_with_summary
from devsample.testing import case

BATCH = 64


@functools.cache
def regression() -> Any:
    """The case with its data."""
    return case("linreg_n512_d8")


def square(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Mean squared error."""
    return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()


def linear_run(seed: int, **changes: Any) -> Any:
    """Four chains on the regression, ε a_max = 0.2."""
    one = regression()
    x, y, best = one.potential.x.float(), one.potential.y.float(), one.potential.center.float()
    model = torch.nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(best[None])
    settings: dict[str, Any] = {
        "loader_spec": LoaderSpec(TensorDataset(x, y), batch_size=BATCH),
        "evaluate": square,
        "optimizer_kwargs": {"lr": linear_lr(), "localization": one.gamma, "nbeta": one.nbeta},
        "num_chains": 4,
        "num_draws": 500,
        "num_burnin_steps": 500,
        "num_steps_bw_draws": 2,
        "seed": seed,
        "verbose": False,
    }
    return estimate_learning_coeff_with_summary(model, **(settings | changes))


def linear_lr() -> float:
    """ε with ε a_max = 0.2."""
    one = regression()
    return 0.2 / (one.nbeta * float(one.potential.hessian_max(one.potential.center[None])) + one.gamma)


def linear_law() -> float:
    """λ̂ of the stationary chain: averaged noise, independent batches, at this step."""
    one, lr = regression(), linear_lr()
    x, y, best = (getattr(one.potential, name).numpy() for name in ("x", "y", "center"))
    n, d = x.shape
    h, r = 2 * x.T @ x / n, y - x @ best
    a = np.eye(d) - lr / 2 * (one.nbeta * h + one.gamma * np.eye(d))
    c = 4 * (x * (r**2)[:, None]).T @ x / n
    kick = (lr * one.nbeta / 2) ** 2 / BATCH

    def image(s: np.ndarray) -> np.ndarray:
        spread = 4 * (x * np.einsum("ni,ij,nj->n", x, s, x)[:, None]).T @ x / n
        return a @ s @ a.T + kick * (spread - h @ s @ h + c) + lr / 2 * (np.eye(d) + a)

    basis = np.eye(d * d).reshape(-1, d, d)
    constant = image(np.zeros((d, d)))
    matrix = np.stack([(image(one_basis) - constant).ravel() for one_basis in basis], axis=1)
    s = np.linalg.solve(np.eye(d * d) - matrix, constant.ravel()).reshape(d, d)
    return float(one.nbeta / 2 * np.trace(h @ s))


def reduced_run(seed: int, **changes: Any) -> Any:
    """Four chains on a reduced-rank regression with its population loss."""
    one = case("rrr_5_2_4_zero_nb1000")
    settings: dict[str, Any] = {
        "loader_spec": LoaderSpec(one.dataset(), batch_size=1),
        "evaluate": functools.partial(_own_loss),
        "optimizer_kwargs": {"lr": 5e-5, "localization": one.gamma, "nbeta": one.nbeta},
        "num_chains": 4,
        "num_draws": 1000,
        "num_burnin_steps": 10_000,
        "num_steps_bw_draws": 20,
        "chains_per_process": 4,
        "seed": seed,
        "verbose": False,
    }
    return estimate_learning_coeff_with_summary(one.model(), **(settings | changes))


def _own_loss(model: torch.nn.Module, _batch: Any) -> torch.Tensor:
    return model()


RUNS: dict[str, Callable[[int], Any]] = {
    "linear regression": linear_run,
    "linear regression, until": functools.partial(linear_run, num_draws=100, until=Precision(relative=0.05)),
    "reduced rank": reduced_run,
    "reduced rank, half step": functools.partial(
        reduced_run,
        optimizer_kwargs={"lr": 2.5e-5, "localization": 1.0, "nbeta": 1000.0},
        num_burnin_steps=20_000,
        num_steps_bw_draws=40,
    ),
}


def one_run(name: str, seed: int) -> tuple[float, float, str]:
    """Estimate, standard error and verdict of a seed."""
    torch.set_num_threads(1)
    result = RUNS[name](seed)
    return result.llc, result.se, result.verdict


def summary(name: str, found: list[tuple[float, float, str]]) -> dict[str, Any]:
    """Coverage and what it is compared with."""
    values, errors = (np.array([one[i] for one in found]) for i in (0, 1))
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    own = spread / math.sqrt(len(values))
    exact = linear_law() if name.startswith("linear") else case("rrr_5_2_4_zero_nb1000").expected
    return {
        "run": name,
        "seeds": len(values),
        "coverage": float((np.abs(values - mean) <= 1.96 * errors).mean()),
        "mean": mean,
        "error of the mean": own,
        "exact": exact,
        "z": (mean - exact) / own,
        "spread": spread,
        "mean se": float(errors.mean()),
        "off, in se": (mean - exact) / float(errors.mean()),
        "trust": sum(one[2] == "trust" for one in found) / len(found),
    }


def main() -> None:
    """Run all seeds and print the table."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", choices=list(RUNS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for name in options.only or RUNS:
            waiting = [pool.submit(one_run, name, seed) for seed in range(options.seeds)]
            with tqdm(total=len(waiting), desc=name, mininterval=5) as bar:
                for _ in as_completed(waiting):
                    bar.update()
            table.append(summary(name, [one.result() for one in waiting]))
            print(json.dumps(table[-1]))
    if options.out:
        options.out.write_text(json.dumps(table, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
