"""What the baseline does to the spread of an estimate, for the same chains and the same draws.

    python benchmarks/baseline.py --seeds 100 --out baseline.json

One chain a seed on a linear regression (n = 512, 8 weights, noise 1, batches of 32) at lr 2e-4. From its
draws, four estimates:

* paired: the loss at w* on the samples of each draw,
* exact: L_n(w*) over all data,
* few batches: the mean loss at w* of as many random batches as there are chains (here: `--chains`),
* full data: loss and baseline over all data at each draw, the best that this chain could say.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary
from devsample.testing.potentials import LinearRegression

BATCH = 32
NBETA = 512 / math.log(512)


def square(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Mean squared error."""
    return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()


def estimates(seed: int, draws: int, chains: int) -> dict[str, float]:
    """The four estimates of a seed's chains."""
    one = LinearRegression(512, 8, noise=1.0, seed=0)
    x, y, best = one.x.float(), one.y.float(), one.center.float()
    model = torch.nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(best[None])
        each = (model(x)[:, 0] - y) ** 2
    result = estimate_learning_coeff_with_summary(
        model,
        loader_spec=LoaderSpec(TensorDataset(x, y), batch_size=BATCH),
        evaluate=square,
        optimizer_kwargs={"lr": 2e-4, "localization": 1.0, "nbeta": NBETA},
        num_chains=chains,
        num_draws=draws,
        num_burnin_steps=500,
        observables=("full_loss",),
        seed=seed,
        verbose=False,
    )
    random = np.random.default_rng(seed)
    few = float(np.mean([each.numpy()[random.choice(len(x), BATCH, False)].mean() for _ in range(chains)]))
    loss = result.draws["loss"].mean()
    exact = result.init_loss
    return {
        "paired": result.llc,
        "exact": NBETA * (loss - exact),
        "few batches": NBETA * (loss - few),
        "full data": NBETA * (result.draws["full_loss"].mean() - exact),
    }


def main() -> None:
    """Run all seeds and print the table."""
    from tqdm import trange

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--chains", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [estimates(seed, options.draws, options.chains) for seed in trange(options.seeds, mininterval=5)]
    spread = {name: float(np.std([one[name] for one in found], ddof=1)) for name in found[0]}
    mean = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    for name in spread:
        ratio = spread[name] / spread["paired"]
        print(f"{name:12} mean {mean[name]:6.3f}  sd {spread[name]:6.3f}  {ratio:5.2f} x paired")
    if options.out:
        options.out.write_text(json.dumps({"sd": spread, "mean": mean}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
