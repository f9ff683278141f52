"""Every name of `devsample.compat.devinterp`: what it gives, and that several processes give the same."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import devsample
from devsample.compat import devinterp
from devsample.errors import FeatureNotAvailableError, InvalidArgumentError, UnreliableEstimateWarning
from tests.factories import linear_data, linear_model, squared_error

CHAINS, DRAWS = 3, 12


def run(function: Any = devinterp.sample, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "model": linear_model(),
        "loader": DataLoader(linear_data(), batch_size=32, shuffle=True),
        "evaluate": devinterp.evaluate_mse,
        "sampling_method": devinterp.SGLD,
        "optimizer_kwargs": {"lr": 1e-4, "nbeta": 30.0, "localization": 5.0},
        "num_chains": CHAINS,
        "num_draws": DRAWS,
        "seed": 0,
        "verbose": False,
        "threads_per_chain": 1,
    }
    return function(**(given | changes))


def callbacks() -> list[Any]:
    """One of each kind."""
    return [
        devinterp.LLCEstimator(CHAINS, DRAWS, init_loss=0.05),
        devinterp.OnlineLLCEstimator(CHAINS, DRAWS, init_loss=0.05),
        devinterp.WBIC(CHAINS, DRAWS, 256),
        devinterp.GradientNorm(CHAINS, DRAWS),
        devinterp.NoiseNorm(CHAINS, DRAWS, "cpu", 1),
        devinterp.WeightNorm(CHAINS, DRAWS, p_norm=3.5),
        devinterp.MalaAcceptanceRate(CHAINS, DRAWS, 30.0, 1e-4),
        Mean(CHAINS).share_memory_(),
    ]


def test_several_processes_give_the_same() -> None:
    here, there = callbacks(), callbacks()
    run(callbacks=here)
    run(callbacks=there, cores=2)
    for one, other in zip(here, there, strict=True):
        expected, found = one.get_results(), other.get_results()
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert np.isfinite(value).all(), key
            np.testing.assert_array_equal(found[key], value, err_msg=key)


def trace_of(draws: Any, name: str) -> np.ndarray:
    return draws[name].to_numpy().reshape(CHAINS, DRAWS)  # type: ignore[no-any-return]


# ---- estimators ---------------------------------------------------------------------------------


def test_llc_estimator() -> None:
    found = run(callbacks=devinterp.LLCEstimator(CHAINS, DRAWS, init_loss=0.05))
    losses = trace_of(found["draws"], "loss")
    each = 30.0 * (losses.mean(axis=1) - 0.05)
    assert list(found) == [
        "init_loss", "llc/mean", "llc/std", *(f"llc-chain/{i}" for i in range(CHAINS)), "loss/trace", "draws",
    ]  # fmt: skip
    np.testing.assert_array_equal(found["loss/trace"], losses)
    assert [found[f"llc-chain/{i}"] for i in range(CHAINS)] == pytest.approx(each)
    assert found["llc/mean"] == pytest.approx(each.mean())
    assert found["llc/std"] == pytest.approx(each.std(ddof=1))
    assert found["init_loss"] == 0.05


def test_an_estimators_own_temperature() -> None:
    own = run(callbacks=devinterp.LLCEstimator(CHAINS, DRAWS, 0.0, "cpu", nbeta=60.0))
    theirs = run(callbacks=devinterp.LLCEstimator(CHAINS, DRAWS, 0.0, "cpu"))
    assert own["llc/mean"] == pytest.approx(2 * theirs["llc/mean"])
    with pytest.raises(InvalidArgumentError, match="temperature: give nbeta"):
        devinterp.LLCEstimator(1, 1, 0.0, temperature=2.0)
    alone = devinterp.LLCEstimator(1, 1, 0.0)
    alone(0, 0, loss=0.1, nbeta=2.0)
    assert math.isnan(alone.get_results()["llc/std"])


def test_online_llc_estimator() -> None:
    found = run(callbacks=devinterp.OnlineLLCEstimator(CHAINS, DRAWS, init_loss=0.05))
    losses = trace_of(found["draws"], "loss")
    np.testing.assert_allclose(found["llc/trace"][:, 3], 30.0 * (losses[:, :4].mean(axis=1) - 0.05))
    np.testing.assert_allclose(found["llc/means"], found["llc/trace"].mean(axis=0))
    np.testing.assert_allclose(found["llc/stds"], found["llc/trace"].std(axis=0, ddof=1))
    assert found["init_loss"] == 0.05
    np.testing.assert_array_equal(found["loss/trace"], losses)


@pytest.mark.parametrize("kind", [devinterp.WBIC, devinterp.OnlineWBICEstimator])
def test_wbic(kind: Any) -> None:
    found = run(callbacks=[kind(CHAINS, DRAWS, 256)])
    losses = trace_of(found["draws"], "loss")
    np.testing.assert_allclose(found["wbic/trace"][:, -1], 256 * losses.mean(axis=1))
    np.testing.assert_allclose(found["wbic/means"], found["wbic/trace"].mean(axis=0))
    np.testing.assert_allclose(found["wbic/stds"], found["wbic/trace"].std(axis=0, ddof=1))


# ---- what comes with the draws ------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 1, 3.5])
@pytest.mark.parametrize("name", ["GradientNorm", "NoiseNorm", "WeightNorm"])
def test_norms(name: str, p: float) -> None:
    key = {"GradientNorm": "gradient_norm", "NoiseNorm": "noise_norm", "WeightNorm": "weight_norm"}[name]
    kind = getattr(devinterp, name)
    changes: dict[str, Any] = {"num_steps_bw_draws": 2}
    found = run(callbacks=[kind(CHAINS, DRAWS, "cpu", p)], **changes)
    column = key if p == 2 else f"{key}:{p:g}"
    expected = run(devsample.sample, observables=column, **changes)["draws"]
    np.testing.assert_array_equal(found[f"{key}/trace"], trace_of(expected, column))
    assert (found[f"{key}/trace"] > 0).all()


def test_mala_acceptance_rate() -> None:
    options = {"lr": 1e-3, "nbeta": 30.0, "localization": 5.0, "integrator": "euler", "save_mala_vars": True}
    callback = devinterp.MalaAcceptanceRate(CHAINS, DRAWS, 30.0, 1e-3)
    found = run(callbacks=callback, optimizer_kwargs=options)
    trace = found["mala_accept/trace"]
    assert trace.shape == (CHAINS, DRAWS)
    assert ((trace > 0.1) & (trace <= 1)).all()
    assert found["mala_accept/mean"] == pytest.approx(trace.mean())
    assert found["mala_accept/std"] == pytest.approx(trace.std())


def test_several_callbacks_observables_and_records_at_once() -> None:
    rows: list[Any] = []
    losses = devinterp.LLCEstimator(CHAINS, DRAWS, 0.0)
    norms = [devinterp.WeightNorm(CHAINS, DRAWS), devinterp.GradientNorm(CHAINS, DRAWS)]
    result = run(
        devinterp.estimate_learning_coeff_with_summary, callbacks=[losses, *norms],
        observables=["distance", "weight_norm"], on_records=rows.append, init_loss=0.0,
    )  # fmt: skip
    assert list(result.draws.columns[-3:]) == ["distance", "weight_norm", "gradient_norm"]
    for key in ("weight_norm/trace", "gradient_norm/trace"):
        assert np.isfinite(result[key]).all()
    assert sum(len(one) for one in rows) == CHAINS * DRAWS
    assert result["llc/mean"] == pytest.approx(losses.get_results()["llc/mean"])


def test_a_callback_that_got_nothing_says_so() -> None:
    with pytest.raises(
        InvalidArgumentError, match="GradientNorm got nothing. Use the functions of devsample.compat"
    ):
        run(devsample.sample, callbacks=devinterp.GradientNorm(CHAINS, DRAWS))
    with pytest.raises(InvalidArgumentError, match="p_norm: expected a number > 0, got 0"):
        devinterp.WeightNorm(1, 1, p_norm=0)


class Mean(devinterp.SamplerCallback):
    """A callback as scripts write them."""

    def __init__(self, num_chains: int, device: str = "cpu") -> None:
        super().__init__(device)
        self.sums = np.zeros(num_chains)

    def __call__(self, chain: int, loss: float, model: torch.nn.Module) -> None:
        assert isinstance(model, torch.nn.Module)
        self.sums[chain] += loss

    def get_results(self) -> dict[str, Any]:
        return {"sums": self.sums}


def test_sampler_callback() -> None:
    found = run(callbacks=Mean(CHAINS).share_memory_())
    np.testing.assert_allclose(found["sums"], trace_of(found["draws"], "loss").sum(axis=1))
    assert Mean(1, device="cuda:0").device == "cuda:0"
    with pytest.raises(NotImplementedError, match=r"needs a method get_results"):
        devinterp.SamplerCallback().get_results()


# ---- functions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["estimate_learning_coeff", "estimate_learning_coeff_with_summary", "sample"]
)
def test_the_functions_are_devsamples_own(name: str) -> None:
    own, here = getattr(devsample, name), getattr(devinterp, name)
    assert inspect.signature(here) == inspect.signature(own)
    options = {"lr": 1e-4, "nbeta": 30.0, "localization": 5.0}
    with warnings.catch_warnings(action="ignore", category=UnreliableEstimateWarning):  # it is too short
        found = run(here, optimizer_kwargs=options | {"save_noise": True})
        expected = run(own, optimizer_kwargs=options)
    if name == "sample":
        np.testing.assert_array_equal(found["draws"], expected["draws"])
    elif name == "estimate_learning_coeff":
        assert found == expected
    else:
        np.testing.assert_array_equal(found["loss/trace"], expected["loss/trace"])


def test_samplers() -> None:
    assert devinterp.SGLD is devsample.SGLD
    assert devinterp.SGNHT is devsample.SGNHT
    for name, kind in (("sgld", "SGLD"), ("rmsprop_sgld", "RMSPropSGLD"), ("sgnht", "SGNHT")):
        method = getattr(devinterp.SGMCMC, name)
        assert method is getattr(devsample, kind)
        options = {"lr": 1e-5, "nbeta": 30.0}
        result = run(
            devinterp.estimate_learning_coeff_with_summary, sampling_method=method, optimizer_kwargs=options
        )
        assert result.settings["sampler"] == kind
    with pytest.raises(
        FeatureNotAvailableError, match="use SGMCMC.sgld, SGMCMC.rmsprop_sgld or SGMCMC.sgnht"
    ):
        devinterp.SGMCMC([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize("function", [devinterp.default_nbeta, devinterp.optimal_nbeta])
def test_the_rule_of_the_batch(function: Any) -> None:
    assert function(64) == 64 / math.log(64)
    assert function(DataLoader(linear_data(), batch_size=32), 2) == function(64)


@torch.no_grad()
def test_evaluates() -> None:
    x, y = linear_data().tensors
    loss, more = devinterp.evaluate_mse(linear_model(), (x, y))
    assert float(loss) == pytest.approx(float(squared_error(linear_model(), (x, y))))
    assert torch.equal(more["output"], linear_model()(x))
    classes = torch.zeros(len(x), dtype=torch.long)
    model = torch.nn.Linear(4, 3)
    loss, more = devinterp.evaluate_ce(model, (x, classes))
    assert float(loss) == pytest.approx(float(-model(x).log_softmax(1)[:, 0].mean()), rel=1e-5)
    assert torch.equal(more["logits"], model(x))


@torch.no_grad()
def test_initial_losses() -> None:
    model, loader = linear_model(), DataLoader(linear_data(), batch_size=64)
    each = [float(squared_error(model, batch)) for batch in loader]
    given = (model, devinterp.evaluate_mse, "cpu")
    assert devinterp.get_init_loss_one_batch(loader, *given) == pytest.approx(each[0])
    assert devinterp.get_init_loss_multi_batch(loader, 3, *given) == pytest.approx(np.mean(each[:3]))
    assert devinterp.get_init_loss_full_batch(loader, *given) == pytest.approx(np.mean(each))
    with pytest.raises(InvalidArgumentError, match="n_batches: there is no batch"):
        devinterp.get_init_loss_multi_batch(loader, 0, *given)


def test_mala_acceptance_probability() -> None:
    one, other = [torch.ones(1), torch.ones(1)], [torch.tensor([1.5]), torch.tensor([0.5])]
    found = devinterp.mala_acceptance_probability(one, one, 1.0, other, other, torch.tensor(1.25), 0.5)
    assert found == pytest.approx(0.9692332, abs=1e-6)


def test_plot_trace() -> None:
    trace = np.arange(12.0).reshape(3, 4)
    figure = devinterp.plot_trace(trace, "loss", x_axis="draw", title="A title", true_lc=2.5, fig_size=(6, 4))
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("draw", "loss", "A title")
    np.testing.assert_allclose(axes.lines[3].get_ydata(), trace.mean(axis=0))
    assert axes.lines[4].get_ydata()[0] == 2.5
    assert len(axes.collections) == 1
    assert tuple(figure.get_size_inches()) == (6, 4)
    (bare,) = devinterp.plot_trace(trace[0], "loss", plot_mean=False, plot_std=False).axes
    assert (len(bare.lines), len(bare.collections), bare.get_legend()) == (1, 0, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GradientDistribution", "has no GradientDistribution: write it as a callback"),
        ("OnlineLossStatistics", r'read result.draws\["loss"\]'),
        ("CovarianceAccumulator", "write it as a callback"),
        ("WithinHeadCovariance", "write it as a callback"),
        ("BetweenLayerCovariance", "write it as a callback"),
        ("EpsilonBetaAnalyzer", "one estimate for each lr and nbeta"),
        ("optimal_temperature", "give nbeta"),
        ("sample_single_chain", "num_chains=1"),
        ("set_seed", "torch.manual_seed"),
        ("validate_callbacks", "leave it out"),
    ],
)
def test_names_that_are_not_there_say_what_to_use(name: str, message: str) -> None:
    with pytest.raises(FeatureNotAvailableError, match=message):
        exec(f"from devsample.compat.devinterp import {name}")


def test_each_name_has_a_test() -> None:
    source = inspect.getsource(inspect.getmodule(run))  # type: ignore[arg-type]
    for name in devinterp.__all__:
        assert hasattr(devinterp, name)
        assert name in source
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        devinterp.nothing  # noqa: B018
