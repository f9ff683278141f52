"""Dashboards of a run that one can believe and of one that one cannot, as on the page on diagnostics.

A linear regression with 8 weights, whose learning coefficient is 4. The second run has a step size that is
much too small and no burn-in: its chains are still on their way from w* when it ends.

Needs matplotlib.

    python docs/examples/dashboards.py [folder]
"""

import sys
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import TensorDataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary, plots

SAMPLES, WEIGHTS = 512, 8
RUNS = {
    "good": dict(lr=3e-4, num_burnin_steps=500),
    "bad": dict(lr=5e-6, num_burnin_steps=0),
}


def regression():
    """Inputs, noisy targets, and the model at the minimum of its loss."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, WEIGHTS, generator=generator)
    targets = inputs.sum(1, keepdim=True) + torch.randn(SAMPLES, 1, generator=generator)
    model = torch.nn.Linear(WEIGHTS, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(inputs, targets).solution.T)
    return TensorDataset(inputs, targets), model


def evaluate(model, batch):
    """Mean squared error."""
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def run(lr, num_burnin_steps):
    """Four chains of 300 draws, every fifth step one."""
    data, model = regression()
    return estimate_learning_coeff_with_summary(
        model,
        loader_spec=LoaderSpec(data, batch_size=128),
        evaluate=evaluate,
        optimizer_kwargs=dict(lr=lr, localization=1.0),
        num_chains=4,
        num_draws=300,
        num_burnin_steps=num_burnin_steps,
        num_steps_bw_draws=5,
        observables=("distance", "virial", "second_batch"),
        seed=0,
        verbose=False,
    )


def main():
    """Write dashboard-good.png and dashboard-bad.png."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, settings in RUNS.items():
        result = run(**settings)
        path = folder / f"dashboard-{name}.png"
        plots.dashboard(result, path, dpi=80)
        with Image.open(path) as picture:  # 64 colours are enough, and make it a third as large
            picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
        print(name, result.headline)


if __name__ == "__main__":
    main()
