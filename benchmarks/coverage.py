"""Does estimate ± 1.96 se cover as often as it says, and is the estimate's mean right?

    python benchmarks/coverage.py --seeds 400 --out coverage.json

Runs a linear regression with independent minibatches (fixed draws, and `until=Precision(...)`) and a
reduced-rank regression with that many seeds each, and compares

* coverage: how often the interval contains the mean over all seeds,
* the spread of the estimates over seeds, against the mean standard error,
* the mean, against the exact stationary value of the discrete chain (linear regression), or against the
  value at this nβ (reduced rank; the same sampler at lr and lr/2, as thousands of rows on the exact loss,
  says how much the step still matters).
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
from devsample.samplers.sgld import SGLDKernel
from devsample.testing import case
from devsample.testing.driver import Drive, settle

N, D, BATCH, GAMMA = 512, 8, 64, 1.0
NBETA = N / math.log(N)
STEP = 0.5  # ε a_max of the linear regression
REDUCED, REDUCED_LR = "rrr_4_1_3_rank1_nb100", 2e-4


@functools.cache
def regression() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs with scales from 0.56 to 1.78, noisy targets, and the least-squares weights."""
    random = np.random.RandomState(0)
    x = random.randn(N, D) * np.logspace(-0.25, 0.25, D)
    y = x @ random.randn(D) + 0.5 * random.randn(N)
    return x, y, np.linalg.lstsq(x, y, rcond=None)[0]


def square(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Mean squared error."""
    return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()


def linear_run(seed: int, **changes: Any) -> Any:
    """Four chains on the regression."""
    x, y, best = regression()
    model = torch.nn.Linear(D, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(best)[None])
    data = TensorDataset(torch.from_numpy(x).float(), torch.from_numpy(y).float())
    settings: dict[str, Any] = {
        "loader_spec": LoaderSpec(data, batch_size=BATCH),
        "evaluate": square,
        "optimizer_kwargs": {"lr": linear_lr(), "localization": GAMMA, "nbeta": NBETA},
        "num_chains": 4,
        "num_draws": 300,
        "num_burnin_steps": 400,
        "num_steps_bw_draws": 3,
        "chains_per_process": 4,
        "seed": seed,
        "verbose": False,
    }
    return estimate_learning_coeff_with_summary(model, **(settings | changes))


def linear_lr() -> float:
    """ε with ε a_max = `STEP`."""
    x, _, _ = regression()
    return STEP / (NBETA * float(np.linalg.eigvalsh(2 * x.T @ x / N)[-1]) + GAMMA)


def linear_law() -> float:
    """λ̂ of the stationary chain: averaged noise, independent batches, at this step."""
    (x, y, best), lr = regression(), linear_lr()
    h, r = 2 * x.T @ x / N, y - x @ best
    a = np.eye(D) - lr / 2 * (NBETA * h + GAMMA * np.eye(D))
    c = 4 * (x * (r**2)[:, None]).T @ x / N
    kick = (lr * NBETA / 2) ** 2 / BATCH

    def image(s: np.ndarray) -> np.ndarray:
        spread = 4 * (x * np.einsum("ni,ij,nj->n", x, s, x)[:, None]).T @ x / N
        return a @ s @ a.T + kick * (spread - h @ s @ h + c) + lr / 2 * (np.eye(D) + a)

    basis = np.eye(D * D).reshape(-1, D, D)
    constant = image(np.zeros((D, D)))
    matrix = np.stack([(image(one_basis) - constant).ravel() for one_basis in basis], axis=1)
    s = np.linalg.solve(np.eye(D * D) - matrix, constant.ravel()).reshape(D, D)
    return float(NBETA / 2 * np.trace(h @ s))


def reduced_run(seed: int, **changes: Any) -> Any:
    """Four chains on a reduced-rank regression with its population loss, from the prior."""
    one = case(REDUCED)
    settings: dict[str, Any] = {
        "loader_spec": LoaderSpec(one.dataset(), batch_size=1),
        "evaluate": _own_loss,
        "optimizer_kwargs": {"lr": REDUCED_LR, "localization": one.gamma, "nbeta": one.nbeta},
        "num_chains": 4,
        "num_draws": 250,
        "num_burnin_steps": 1500,
        "num_steps_bw_draws": 10,
        "chains_per_process": 4,
        "start": "prior",
        "seed": seed,
        "verbose": False,
    }
    return estimate_learning_coeff_with_summary(one.model(), **(settings | changes))


def _own_loss(model: torch.nn.Module, _batch: Any) -> torch.Tensor:
    return model()


def step_effect(rows: int = 4096, steps: int = 4000) -> tuple[float, float]:
    """λ̂ at lr less that at lr/2 of the reduced-rank run, as rows on the exact loss, and its error."""
    one, found = case(REDUCED), []
    start = settle(one.potential, nbeta=one.nbeta, gamma=one.gamma, box=None, seed=1, rows=rows)
    for halves in (1, 2):
        kernel = SGLDKernel(lr=REDUCED_LR / halves, nbeta=one.nbeta, localization=one.gamma)
        drive = Drive(one.potential, kernel, start.position, seed=2)
        drive.advance(500 * halves)
        total = torch.zeros(rows, dtype=torch.float64)
        for _ in range(steps // 10):
            drive.advance(10 * halves)
            total += drive.losses()
        found.append(one.nbeta * total / (steps // 10))
    difference = found[0] - found[1]
    return float(difference.mean()), float(difference.std() / math.sqrt(rows))


RUNS: dict[str, Callable[[int], Any]] = {
    "linear regression": linear_run,
    "linear regression, until": functools.partial(linear_run, num_draws=100, until=Precision(relative=0.025)),
    "reduced rank": reduced_run,
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
    exact = linear_law() if name.startswith("linear") else case(REDUCED).expected
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
            if name == "reduced rank":
                effect, error = step_effect()
                table[-1] |= {"lr less lr/2": effect, "its error": error}
            print(json.dumps(table[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(table, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
