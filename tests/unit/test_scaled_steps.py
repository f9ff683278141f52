"""What a run measures of a sampler that scales its steps, against the scale that it ends with."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from devsample import LoaderSpec, RMSPropSGLD, estimate_learning_coeff_with_summary
from devsample.samplers import AdamSGLD
from tests.factories import linear_data, linear_model, squared_error

NBETA, GAMMA = 40.0, 5.0


def run(kind, folder, **options):
    """A linear regression on all of its data in each batch, whose Hessian is the same everywhere."""
    return estimate_learning_coeff_with_summary(
        linear_model(dtype=torch.float64),
        loader_spec=LoaderSpec(linear_data(dtype=torch.float64), batch_size=256, sampling="epoch"),
        evaluate=squared_error,
        sampling_method=kind,
        optimizer_kwargs={"lr": 1e-4, "nbeta": NBETA, "localization": GAMMA, **options},
        num_chains=2,
        num_draws=10,
        num_burnin_steps=20,
        seed=0,
        run_dir=folder,
        verbose=False,
    )


def hessian():
    """Of the mean squared error in weights and bias."""
    x = linear_data(dtype=torch.float64).tensors[0].numpy()
    inputs = np.column_stack([x, np.ones(len(x))])
    return 2 * inputs.T @ inputs / len(x)


def scales(folder, chain):
    """G of a chain at its end."""
    return load_file(folder / "chains" / str(chain) / "checkpoint.safetensors")["buffer.scale"].numpy()


@pytest.mark.parametrize("kind", [RMSPropSGLD, AdamSGLD])
def test_curvature_and_trace_are_those_in_the_scaled_coordinates(kind, tmp_path):
    result = run(kind, tmp_path / "run")
    for chain, row in result.chains.iterrows():
        root = np.sqrt(scales(tmp_path / "run", chain))
        whole = root[:, None] * (hessian() + GAMMA / NBETA * np.eye(5)) * root
        assert row.curvature == pytest.approx(np.linalg.eigvalsh(whole)[-1], rel=0.1)  # six iterations
    bias = result.predicted_bias
    assert (bias.step > 0) == (kind is AdamSGLD)
    if kind is AdamSGLD:  # Hutchinson's estimate: 4 directions a chain
        exact = np.mean([(scales(tmp_path / "run", chain) * np.diag(hessian())).sum() for chain in range(2)])
        assert bias.step == pytest.approx(1e-4 / 8 * 18 * NBETA * exact, rel=0.3)
