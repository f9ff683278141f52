"""The rerun at lr/2 in a run: what it leaves alone, what it refuses, where its figures go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from devsample import (
    HMC,
    MALA,
    SGHMC,
    SGNHT,
    AdamSGLD,
    LLCResult,
    LoaderSpec,
    Precision,
    RMSPropSGLD,
    estimate_learning_coeff_with_summary,
)
from devsample.errors import InvalidArgumentError
from devsample.observables import StepBias
from tests.factories import estimate, linear_data, linear_model, squared_error
from tests.process.test_until import Endless

KWARGS = {"lr": 1e-3, "localization": 1.0}


def measured(**changes: Any) -> LLCResult:
    return estimate(**({"observables": "step_bias", "optimizer_kwargs": KWARGS, "num_draws": 20} | changes))


def blocks(result: LLCResult) -> np.ndarray:
    """What each chain measured, shape (num_chains, 20)."""
    return np.array([one.step_bias for one in result._recorded.chains])


def test_the_draws_are_those_without_it() -> None:
    plain = estimate(optimizer_kwargs=KWARGS, num_draws=20)
    result = measured()
    assert plain.draws.equals(result.draws)
    assert plain.measured_bias is None
    assert blocks(result).shape == (2, 20)
    assert (blocks(result)[0] != blocks(result)[1]).all(), "chains have noise and batches of their own"


def test_chains_in_lockstep_measure_the_same() -> None:
    double = {
        "model": linear_model(dtype=torch.float64),
        "spec": {"dataset": linear_data(dtype=torch.float64)},
    }
    together = measured(**double, chains_per_process=2)
    assert together.settings["not_stackable"] == ""
    np.testing.assert_allclose(blocks(together), blocks(measured(**double)), rtol=1e-8, atol=1e-12)


@pytest.mark.slow
def test_chains_in_processes_measure_the_same() -> None:
    assert (blocks(measured(cores=2, threads_per_chain=1)) == blocks(measured(threads_per_chain=1))).all()


def test_rounds_measure_at_the_end_what_one_run_does() -> None:
    rounds = measured(until=Precision(se=1e-9, max_draws=70))
    assert (blocks(rounds) == blocks(measured(num_draws=70))).all()
    gradients = 2 * (70 + 3 * 3 * 60)  # after 20, 40 and 70 draws
    assert rounds.provenance["gradients"] == gradients


@pytest.mark.parametrize(
    ("changes", "steps", "cost"),
    [
        ({}, 60, 3),
        ({"observables": [StepBias(75)], "grad_accum_steps": 2}, 75, 3),
        ({"optimizer_kwargs": KWARGS | {"control_variate": True}}, 60, 5),
    ],
    ids=["the least", "given", "control variate"],
)
def test_its_gradients_are_counted(changes: dict[str, Any], steps: int, cost: int) -> None:
    plain = estimate(**({"optimizer_kwargs": KWARGS, "num_draws": 20} | changes | {"observables": None}))
    extra = measured(**changes).provenance["gradients"] - plain.provenance["gradients"]
    assert extra == 2 * steps * cost * changes.get("grad_accum_steps", 1)


def test_a_rerun_is_a_fifth_of_the_gradients_of_a_long_run() -> None:
    assert StepBias().steps(1800) == 1800 / 5 / 3
    assert StepBias().steps(100) == 60
    assert StepBias(200).steps(100) == 200


def test_a_control_variate_holds_in_the_rerun() -> None:
    """On all data at once, g_B(w) − g_B(w*) + g(w*) is g_B(w), so nothing changes but rounding."""
    double = {
        "model": linear_model(dtype=torch.float64),
        "spec": {"dataset": Whole(), "batch_size": 1},
    }
    plain = measured(**double)
    controlled = measured(**double, optimizer_kwargs=KWARGS | {"control_variate": True})
    np.testing.assert_allclose(blocks(controlled), blocks(plain), rtol=1e-8, atol=1e-12)
    assert np.abs(blocks(plain)).min() > 1e-9


class Whole(torch.utils.data.Dataset[Any]):
    """One item: all data."""

    def __init__(self) -> None:
        self.x, self.y = linear_data(64, dtype=torch.float64).tensors

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x, self.y


@pytest.mark.parametrize("kind", [SGHMC, RMSPropSGLD, AdamSGLD])
def test_samplers_with_a_memory_go_on_from_it(kind: Any) -> None:
    result = measured(sampling_method=kind, num_burnin_steps=10)
    assert np.isfinite(blocks(result)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_method": SGNHT}, "SGNHT has a state that changes with lr.*run again with half the lr"),
        ({"sampling_method": HMC}, "HMC accepts or rejects its steps, so they have no bias; leave it out"),
        ({"sampling_method": MALA}, "MALA accepts or rejects"),
        (
            {"sampling_method": torch.optim.SGD, "optimizer_kwargs": {"lr": 1e-3}},
            "SGD samples nothing, so its steps have no bias; leave it out",
        ),
        ({"optimizer_kwargs": KWARGS | {"noise_level": 0.0}}, "with noise_level=0 nothing is sampled"),
        ({"sampling_method": RMSPropSGLD}, "RMSPropSGLD adapts in .* burn-in only; give num_burnin_steps"),
        (
            {
                "sampling_method": AdamSGLD,
                "num_burnin_steps": 10,
                "optimizer_kwargs": KWARGS | {"preconditioner": "moving"},
            },
            'AdamSGLD goes on adapting.*take preconditioner="frozen"',
        ),
        ({"spec": {"sampling": "epoch"}}, r'read in an order \("epoch"\).*sampling="iid"'),
        ({"observables": ["step_bias", "step_bias"]}, "a name comes twice: step_bias"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"observables: .*{message}"):
        measured(**changes)


def test_a_stream_is_refused_before_the_first_chain(tmp_path: Path) -> None:
    spec = LoaderSpec(Endless(), batch_size=8, num_samples=64)
    with pytest.raises(InvalidArgumentError, match=r'observables: .step_bias.: .*order \("stream"\)'):
        estimate_learning_coeff_with_summary(
            linear_model(3),
            loader_spec=spec,
            evaluate=squared_error,
            optimizer_kwargs=KWARGS,
            num_chains=1,
            observables="step_bias",
            run_dir=tmp_path / "run",
            verbose=False,
        )
    assert not (tmp_path / "run" / "chains").exists()


@pytest.mark.parametrize("steps", [59, 100.0, True, "many"])
def test_the_number_of_steps_is_checked(steps: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="StepBias: num_steps: expected an integer ≥ 60 or None"):
        StepBias(steps)


class FailsLate:
    """A loss that cannot be computed any more after so many calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise ValueError("too late")
        return squared_error(model, batch)


def test_an_estimate_survives_a_rerun_that_fails() -> None:
    plain = measured(num_chains=1)
    counted = FailsLate(10**9)
    measured(num_chains=1, evaluate=counted)
    calls = 10**9 - counted.left
    result = measured(num_chains=1, evaluate=FailsLate(calls - 30))
    assert result.draws.equals(plain.draws)
    assert result.measured_bias is None
    assert "step bias could not be measured (" in result.chains["message"][0]
    assert result.chains["gradient_noise"].notna().all(), "what was measured before is kept"
    assert "not measured" in result.diagnose().step_bias.missing


def test_it_is_saved_merged_and_shown(tmp_path: Path) -> None:
    result = measured()
    result.save(tmp_path / "one.safetensors")
    loaded = LLCResult.load(tmp_path / "one.safetensors")
    assert loaded.measured_bias == result.measured_bias
    bias = result.measured_bias
    assert bias is not None
    assert loaded.to_dict()["measured_bias"]["value"] == bias.value
    assert loaded.diagnose().step_bias.value == bias.value
    assert f"step bias (lr against lr/2): {bias.value:.2g} ± {bias.se:.2g} (" in str(result.diagnose())
    merged = LLCResult.merge(result, measured(seed=1))
    both = merged.measured_bias
    assert both is not None
    assert both.value == pytest.approx(2 * np.mean([blocks(result), blocks(measured(seed=1))]))
