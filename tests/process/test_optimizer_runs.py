"""Runs with any ``torch.optim.Optimizer`` in the place of a sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from devsample.errors import InvalidArgumentError
from tests.factories import estimate, linear_model
from tests.process.test_sampler_runs import (
    DOUBLE,
    GAMMA,
    NBETA,
    Steps,
    in_bfloat16,
    kinds,
    run,
    slope,
    solved,
)

BATCHES = {"batch_size": 8}


def test_torchs_sgd_is_sgld_without_noise_at_half_its_lr() -> None:
    sgld = run(kwargs={"lr": 2e-3, "noise_level": 0.0}, spec=BATCHES, model=linear_model(dtype=DOUBLE))
    sgd = run(torch.optim.SGD, kwargs={"lr": 1e-3}, spec=BATCHES, model=linear_model(dtype=DOUBLE))
    np.testing.assert_allclose(sgd.draws["loss"], sgld.draws["loss"], rtol=1e-10)
    assert sgd.draws["loss"].nunique() == len(sgd.draws)
    (finding,) = (one for one in sgd.findings if one.kind == "no sampler")
    assert sgd.verdict == "reject"
    assert sgd.reasons[0] == finding.text
    assert "SGD samples nothing" in finding.text
    assert "no sampler" not in kinds(sgld)
    assert (sgd.settings["lr"], sgd.settings["nbeta"], sgd.settings["localization"]) == (1e-3, NBETA, GAMMA)


@pytest.mark.parametrize("group", [1, 2])
def test_an_optimizer_has_parameters_of_its_own_in_their_shapes(group: int) -> None:
    """Adam with decoupled decay of a masked weight; the entries that do not move do not decay either."""
    model, steps = linear_model(dtype=DOUBLE), Steps()
    mask = torch.tensor([[True, False, True, True]])
    kwargs: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.5, 0.9)}
    run(
        torch.optim.AdamW, kwargs=kwargs, model=model, spec=BATCHES, num_draws=20,
        param_masks={"weight": mask, "bias": True}, callbacks=steps, chains_per_process=group,
    )  # fmt: skip
    moving = torch.tensor([True, False, True, True, True])
    start = steps.weights[0]
    w = torch.nn.Parameter(start[moving].clone())
    optimizer = torch.optim.AdamW([w], **kwargs)
    for found, ((x, y),) in zip(steps.weights, steps.batches, strict=True):
        expected = start.clone()
        expected[moving] = w.detach()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        w.grad = (NBETA * slope(expected, x, y) + GAMMA * (expected - start))[moving]
        optimizer.step()
    assert (w - start[moving]).abs().min() > 1e-3


class TwoShapes(torch.optim.Optimizer):
    """Needs matrices as matrices; draws numbers, which must be the chain's own."""

    def __init__(self, params: Any, lr: float, shapes: Any = None) -> None:
        super().__init__(params, {"lr": lr})
        self.shapes = [tuple(one.shape) for one in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.shapes in ([(2, 2)], [(1, 4), (1,)])
        for one in self.param_groups[0]["params"]:
            one.grad.mul_(torch.rand(())).div_(one.grad.norm() + 1)
            one.data = one.data - self.param_groups[0]["lr"] * one.grad
            one.grad = None


def test_a_users_own_optimizer_in_any_layout() -> None:
    settings = {"kwargs": {"lr": 1e-2}, "spec": BATCHES, "num_chains": 3, "model": linear_model(dtype=DOUBLE)}
    alone = run(TwoShapes, **settings)
    together = run(TwoShapes, chains_per_process=3, **settings)
    elsewhere = run(TwoShapes, cores=2, **settings)
    np.testing.assert_allclose(together.draws["loss"], alone.draws["loss"], rtol=1e-9)
    pd.testing.assert_frame_equal(elsewhere.draws, alone.draws, check_exact=True)
    assert alone.draws["loss"].nunique() == len(alone.draws)


def test_an_optimizer_moves_half_precision_in_single() -> None:
    model = solved(torch.bfloat16)
    kwargs = {"lr": 1e-6, "momentum": 0.9}  # one step alone is below the precision of a weight
    result = run(
        torch.optim.SGD, kwargs=kwargs, model=model, evaluate=in_bfloat16, num_draws=300, init_loss=0.0
    )
    assert result.draws["loss"].nunique() > 2


class WithoutLr(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one in self.param_groups[0]["params"]:
            one.sub_(one.grad, alpha=1e-4)


def test_an_optimizer_with_its_own_lr() -> None:
    assert estimate(sampling_method=torch.optim.SGD, optimizer_kwargs=None).settings["lr"] == 1e-3
    result = estimate(sampling_method=WithoutLr, optimizer_kwargs={"nbeta": 10.0})
    assert np.isnan(result.settings["lr"])
    assert result.draws["loss"].nunique() == len(result.draws)
    assert "WithoutLr" in result.summary()
    assert result.to_dict()["settings"]["lr"] is None


@pytest.mark.parametrize(
    ("kind", "kwargs", "message"),
    [
        (torch.optim.SGD, {"speed": 3}, "optimizer_kwargs: SGD: .*unexpected keyword argument 'speed'"),
        (torch.optim.SGD, {"noise_level": 0.0}, "optimizer_kwargs: SGD: .*'noise_level'"),
        (torch.optim.Adam, {"lr": -1.0}, "optimizer_kwargs: Adam: Invalid learning rate: -1"),
        (TwoShapes, {}, "optimizer_kwargs: TwoShapes: missing .*'lr'"),
        (torch.optim.LBFGS, {}, "sampling_method: LBFGS cannot .* needs a closure"),
        (torch.optim.SparseAdam, {}, "sampling_method: SparseAdam cannot .* dense gradient"),
        (torch.optim.SGD, {"nbeta": -2.0}, "optimizer_kwargs: nbeta: expected a number > 0"),
        (torch.optim.SGD, {"localization": -2.0}, "optimizer_kwargs: localization: expected a number ≥ 0"),
        (torch.nn.Linear, {}, "sampling_method: expected a sampler class"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused_before_anything_starts(
    kind: Any, kwargs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        estimate(sampling_method=kind, optimizer_kwargs=kwargs, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_are_not_chosen_for_an_optimizer() -> None:
    with pytest.raises(InvalidArgumentError, match='"auto" chooses the settings of a sampler; SGD is none'):
        estimate(sampling_method=torch.optim.SGD, optimizer_kwargs={}, settings="auto")
