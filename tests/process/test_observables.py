"""Norms and products that are recorded at every draw, against a computation by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from devsample import HMC, SGLD, LoaderSpec, sample
from devsample.errors import InvalidArgumentError
from devsample.observables import LossOn, SampleLosses, refined_llc
from devsample.records import read_records
from devsample.samplers import SAMPLERS
from devsample.seeds import NormalBlocks, chain_keys
from tests.factories import estimate, linear_data, linear_model, settings
from tests.process.test_sampler_runs import DOUBLE, GAMMA, NBETA, Steps, X, Y, run, slope

INF = math.inf
NORMS = {
    "gradient_norm": ("gradient", 2.0),
    "gradient_norm:1": ("gradient", 1.0),
    "noise_norm": ("noise", 2.0),
    "noise_norm:3": ("noise", 3.0),
    "localization_norm": ("localization", 2.0),
    "weight_norm": ("weight", 2.0),
    "weight_norm:0.5": ("weight", 0.5),
    "distance": ("offset", 2.0),
    "distance:inf": ("offset", INF),
    "offset_norm:1.0": ("offset", 1.0),
}
PRODUCTS = ("gradient_dot_noise", "gradient_dot_offset", "localization_dot_gradient", "weight_dot_weight")
ALL = (*NORMS, *PRODUCTS)
MOVING = torch.tensor([True, False, True, True, True])
START = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=DOUBLE)


def vectors(
    kind: Any, steps: Steps, moving: torch.Tensor, options: dict[str, Any], spacing: int
) -> list[dict[str, torch.Tensor]]:
    """The vectors of chain 1 at every draw, from the weights and batches that a callback saw."""
    kernel = kind.kernel(lr=1e-3, nbeta=NBETA, **options)
    blocks = NormalBlocks([chain_keys(0, 2)[1]], int(moving.sum()), DOUBLE, torch.device("cpu"))
    normals = blocks.averaged if kernel.noise_kind == "averaged" else blocks.plain
    found = []
    for number, (w, batch) in enumerate(zip(steps.weights, steps.batches, strict=True)):
        x, y = (torch.cat(parts) for parts in zip(*batch, strict=True))
        g, offset = slope(w, x, y), (w - START)[moving]
        if options.get("control_variate"):
            g = g - slope(START, x, y) + slope(START, X, Y)
        noise = normals((number + 1) * spacing - 1)[0] * options.get("noise_level", 1.0)
        found.append(
            {
                "gradient": NBETA * g[moving],
                "noise": noise,
                "localization": GAMMA * offset,
                "weight": w[moving],
                "offset": offset,
            }
        )
    return found


def norm(vector: torch.Tensor, p: float) -> float:
    return float(vector.abs().max() if p == INF else (vector.abs() ** p).sum() ** (1 / p))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"masked": True},
    "together": {"chains_per_process": 2},
    "together and masked": {"chains_per_process": 2, "masked": True},
    "control variate": {"options": {"control_variate": True}},
    "micro-batches, few draws": {"grad_accum_steps": 2, "num_steps_bw_draws": 3},
    "another temperature": {"options": {"noise_level": 0.7, "integrator": "euler"}},
    "SGHMC": {"kind": SAMPLERS["SGHMC"]},
    "RMSPropSGLD": {"kind": SAMPLERS["RMSPropSGLD"], "masked": True},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_norms_and_products(case: dict[str, Any]) -> None:
    changes, steps = dict(case), Steps()
    kind, options = changes.pop("kind", SGLD), changes.pop("options", {})
    moving, masks = torch.ones(5, dtype=torch.bool), None
    if changes.pop("masked", False):
        moving, masks = MOVING, {"weight": MOVING[None, :4], "bias": True}
    result = run(
        kind, kwargs={"lr": 1e-3} | options, model=linear_model(dtype=DOUBLE), param_masks=masks,
        num_draws=300, spec={"batch_size": 8}, callbacks=steps, observables=ALL, **changes,
    )  # fmt: skip
    draws = result.draws.query("chain == 1")
    assert len(draws) == 300  # more than is written at once
    expected = vectors(kind, steps, moving, options, changes.get("num_steps_bw_draws", 1))
    for name, (vector, p) in NORMS.items():
        by_hand = [norm(one[vector], p) for one in expected]
        np.testing.assert_allclose(draws[name], by_hand, rtol=1e-9, atol=1e-13, err_msg=name)
    for name in PRODUCTS:
        first, second = name.split("_dot_")
        by_hand = [float(one[first] @ one[second]) for one in expected]
        np.testing.assert_allclose(draws[name], by_hand, rtol=1e-9, atol=1e-10, err_msg=name)
    assert result["distance/trace"].shape == (2, 300)
    np.testing.assert_array_equal(result["distance/trace"][1], draws["distance"])


def test_off_unless_asked_for_and_without_effect_on_the_draws() -> None:
    plain, observed = estimate(), estimate(observables="distance")
    assert list(plain.draws.columns) == ["chain", "draw", "step", "loss", "baseline", "llc"]
    assert list(observed.draws.columns) == [*plain.draws.columns, "distance"]
    np.testing.assert_array_equal(observed.draws[plain.draws.columns], plain.draws)
    assert "distance/trace" not in plain


def test_they_are_in_the_record_files_and_come_from_other_processes(tmp_path: Path) -> None:
    names = ("gradient_norm", "distance:inf")
    here = estimate(observables=names)
    there = estimate(observables=names, cores=2, run_dir=tmp_path / "run")
    np.testing.assert_allclose(there.draws[list(names)], here.draws[list(names)], rtol=1e-5)
    _, rows = read_records(tmp_path / "run" / "chains" / "1" / "draws.bin")
    assert rows.dtype.names == ("draw", "step", "loss", "baseline", "llc", *names)
    np.testing.assert_array_equal(rows["distance:inf"], there.draws.query("chain == 1")["distance:inf"])


def bias_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model.bias  # type: ignore[return-value]


def test_everything_else_is_the_same_from_other_processes(tmp_path: Path) -> None:
    other = LoaderSpec(linear_data, dataset_kwargs={"n": 50}, batch_size=8, num_workers=1)
    observables = [
        "full_loss", "second_batch", "mala_acceptance", "virial", ("bias", bias_of),
        ("random", lambda model, batch: torch.randn(())), LossOn("other", other), SampleLosses(num_samples=7),
    ]  # fmt: skip
    frames: list[Any] = []
    changes: dict[str, Any] = {
        "observables": observables, "evaluate": by_sample, "num_chains": 3, "threads_per_chain": 1,
    }  # fmt: skip
    here = estimate(**changes)
    there = estimate(**changes, cores=2, run_dir=tmp_path / "run", on_records=frames.append)
    np.testing.assert_array_equal(there.draws, here.draws)
    assert list(here.draws.columns[6:]) == [
        "full_loss", "loss_b", "baseline_b", "mala_acceptance", "virial", "bias", "random", "other",
    ]  # fmt: skip
    assert here.draws["random"].nunique() == 30
    assert here["sample_losses/trace"].shape == (3, 10, 7)
    np.testing.assert_array_equal(there["sample_losses/trace"], here["sample_losses/trace"])
    assert np.isfinite(here["sample_losses/trace"]).all()
    assert refined_llc(there, "other") == refined_llc(here, "other")
    assert set(frames[0].columns) == set(here.draws.columns)
    together = estimate(**changes, chains_per_process=3)
    np.testing.assert_allclose(together.draws, here.draws, rtol=1e-3, atol=1e-5)


def by_sample(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return (model(x) - y) ** 2


def test_sample_has_them_in_its_table() -> None:
    spec = LoaderSpec(linear_data(), batch_size=16)
    draws = sample(**settings(loader_spec=spec, observables=["weight_norm"]))["draws"]
    assert draws["weight_norm"].nunique() > 10


def test_on_all_data() -> None:
    names = ("gradient_norm", "distance", "acceptance")
    result = run(HMC, observables=names, num_draws=30, num_burnin_steps=20, chains_per_process=2)
    accepted = result["acceptance/trace"]
    assert ((accepted > 0) & (accepted <= 1)).all()
    assert 0.5 < accepted.mean() < 1
    steps = Steps()
    result = run(
        HMC, model=linear_model(dtype=DOUBLE), observables=names, num_draws=10, callbacks=steps,
        kwargs={"lr": 1e-3},
    )  # fmt: skip
    by_hand = [float((NBETA * slope(w, X, Y)).norm()) for w in steps.weights]
    np.testing.assert_allclose(result["gradient_norm/trace"][1], by_hand, rtol=1e-9)


def test_of_an_optimizer() -> None:
    names = ["distance", "gradient_norm"]
    result = run(torch.optim.SGD, kwargs={"lr": 1e-4}, observables=names, num_draws=5, spec={"batch_size": 8})
    distance = result["distance/trace"]
    assert (distance[:, 0] == 0).all()
    assert (distance[:, 1:] > 0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("length", "there is no 'length'. There are gradient_norm, noise_norm"),
        ("gradient_norm:0", "there is no 'gradient_norm:0'"),
        ("gradient_norm:two", "there is no 'gradient_norm:two'"),
        ("gradient_dot_loss", "there is no 'gradient_dot_loss'"),
        (("distance", "distance"), "a name comes twice"),
        ([lambda model: 0.0], "expected names such as"),
        (
            "Virial",
            'there is no \'Virial\'. .*"virial"; "second_batch"; "full_loss"; "mala_acceptance" of SGLD',
        ),
        ("acceptance", "'acceptance' is of HMC and MALA only"),
    ],
)
def test_what_there_is_not(given: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"observables: {message}"):
        estimate(observables=given)


def test_an_optimizer_has_no_noise_to_observe() -> None:
    with pytest.raises(InvalidArgumentError, match="'gradient_dot_noise': SGD gets no noise"):
        estimate(sampling_method=torch.optim.SGD, observables="gradient_dot_noise")


def meddle(model: torch.nn.Module, **_: Any) -> float:
    """A function that leaves the model in another state than it found it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.train()
    return 1.0


def evaluate_and_train(model: torch.nn.Module, **_: Any) -> None:
    """A callback that evaluates as in training loops."""
    model.train()
    model(X[:8].float())


COLUMNS = ["chain", "draw", "loss", "baseline", "llc"]


def test_what_a_function_does_to_the_model_is_undone() -> None:
    alone = run()
    meddled = run(observables={"meddled": meddle})
    assert meddled.draws[COLUMNS].equals(alone.draws[COLUMNS])


def test_modes_and_buffers_are_as_they_were_after_a_callback() -> None:
    def network() -> torch.nn.Module:
        torch.manual_seed(0)
        norm, dropout = torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5)
        return torch.nn.Sequential(torch.nn.Linear(4, 3), norm, dropout, torch.nn.Linear(3, 1))

    given = {"optimizer_kwargs": {"lr": 1e-3, "nbeta": 20.0}, "num_draws": 20}
    alone = estimate(model=network(), **given)
    seen = estimate(model=network(), **given, callbacks=[evaluate_and_train])
    assert seen.draws[COLUMNS].equals(alone.draws[COLUMNS])
