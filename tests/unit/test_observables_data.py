"""Losses on other data and on a second batch, against a computation by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from devsample import HMC, LLCResult, LoaderSpec, Precision
from devsample.data.loader import ChainLoader
from devsample.errors import (
    EvaluateError,
    InvalidArgumentError,
    LoaderError,
    LoaderWarning,
    NotPicklableError,
)
from devsample.observables import (
    LossOn,
    SampleLosses,
    functional_variance,
    loss_variance,
    refined_llc,
    singular_fluctuation,
    wbic,
)
from devsample.seeds import IndexBlocks, Role, chain_keys
from tests.factories import estimate, linear_data, linear_model, squared_error
from tests.process.test_sampler_runs import (
    DATA,
    DOUBLE,
    GAMMA,
    NBETA,
    N,
    Steps,
    X,
    Y,
    design,
    run,
    solved,
)

OTHER_X, OTHER_Y = (
    one[100:137] for one in linear_data(dtype=DOUBLE).tensors
)  # 37 samples: a ragged last batch
OTHER = LoaderSpec(TensorDataset(OTHER_X, OTHER_Y), batch_size=8)
MASK = torch.tensor([[True, False, True, True]])


def losses(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Squared error of every sample."""
    return ((x @ weights[:4] + weights[4]) - y[:, 0]) ** 2


def by_sample(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return ((model(x) - y) ** 2)[:, 0]


LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "together": {"chains_per_process": 2},
    "masked": {"param_masks": {"weight": MASK, "bias": True}},
    "together, masked, few draws": {
        "chains_per_process": 2,
        "param_masks": {"weight": MASK, "bias": True},
        "num_steps_bw_draws": 3,
        "grad_accum_steps": 2,
    },
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@layouts
def test_losses_on_other_data(layout: dict[str, Any]) -> None:
    steps = Steps()
    result = run(
        model=linear_model(dtype=DOUBLE), spec={"batch_size": 16}, callbacks=steps, num_draws=12,
        observables=["full_loss", LossOn("other", OTHER), LossOn("three", OTHER, 3)], **layout,
    )  # fmt: skip
    draws = result.draws.query("chain == 1")
    few = [0, 18, 36]  # evenly spread
    for name, x, y in (
        ("full_loss", X, Y),
        ("other", OTHER_X, OTHER_Y),
        ("three", OTHER_X[few], OTHER_Y[few]),
    ):
        by_hand = [float(losses(w, x, y).mean()) for w in steps.weights]
        np.testing.assert_allclose(draws[name], by_hand, rtol=1e-12, err_msg=name)
        start = torch.tensor([1.0, 1, 1, 1, 0], dtype=DOUBLE)
        center = result.settings["observables"][name]
        assert center["center"] == pytest.approx(float(losses(start, x, y).mean()), rel=1e-12)
        assert center["num_samples"] == len(x)
    assert result["other/trace"].shape == (2, 12)


@pytest.mark.parametrize("sampling", ["iid", "epoch"])
def test_nothing_of_the_draws_changes(sampling: str) -> None:
    settings: dict[str, Any] = {"spec": {"sampling": sampling}, "num_steps_bw_draws": 2}
    names = ["loss", "baseline", "llc"]
    everything = ["second_batch", "mala_acceptance", "full_loss", "virial", SampleLosses(num_samples=5),
                  ("twice", lambda model, batch: 2.0)]  # fmt: skip
    plain = estimate(**settings, evaluate=per_sample)
    seen = estimate(**settings, evaluate=per_sample, observables=everything)
    np.testing.assert_array_equal(seen.draws[names], plain.draws[names])
    assert list(seen.draws.columns[6:]) == [
        "loss_b", "baseline_b", "mala_acceptance", "full_loss", "virial", "twice",
    ]  # fmt: skip


def per_sample(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """`squared_error`, sample by sample."""
    x, y = batch
    return (model(x) - y) ** 2


class Closed:
    """A batch that does not show what it holds, so that nobody can tell how large it is."""

    def __init__(self, items: Any) -> None:
        self.x, self.y = (torch.stack(column) for column in zip(*items, strict=True))

    def to(self, device: torch.device) -> Closed:
        return self


def closed_error(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return squared_error(model, (batch.x, batch.y))


def test_data_that_are_not_kept_are_read_again_at_every_draw() -> None:
    spec = LoaderSpec(OTHER.dataset, batch_size=8, collate_fn=Closed)
    kept = run(num_draws=5, observables=LossOn("other", OTHER, 20))
    read = run(num_draws=5, observables=LossOn("other", spec, 20, closed_error))
    np.testing.assert_array_equal(read.draws["other"], kept.draws["other"])


class Numbered(IterableDataset[Any]):
    """The samples of `OTHER`, one after the other."""

    def __iter__(self) -> Any:
        return iter(OTHER.dataset)


def test_data_with_an_order_of_their_own() -> None:
    stream = LoaderSpec(Numbered(), batch_size=8, num_samples=37)
    result = run(num_draws=5, observables=[LossOn("a", OTHER), LossOn("b", stream), LossOn("c", stream, 8)])
    np.testing.assert_allclose(result.draws["b"], result.draws["a"], rtol=1e-12)
    assert not np.allclose(result.draws["c"], result.draws["a"], rtol=1e-3)
    short = LoaderSpec(Numbered(), batch_size=8, num_samples=50)
    gave = pytest.raises(LoaderError, match="observables: 'c': the data set gave 37 of 50 samples")
    with warnings.catch_warnings(action="ignore", category=LoaderWarning), gave:
        run(observables=LossOn("c", short))


def rounded(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A figure that has no gradient."""
    return (model(batch[0]) > 0).double().mean()


def own_slope(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A figure that differentiates."""
    (found,) = torch.autograd.grad(squared_error(model, batch), model.bias)
    return found.abs().sum()


def noisy(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return squared_error(model, batch) + torch.randn(())


def test_an_evaluate_of_its_own() -> None:
    steps, again = Steps(), Steps()
    observables = [LossOn("positive", OTHER, evaluate=rounded), LossOn("slope", OTHER, evaluate=own_slope),
                   LossOn("noisy", OTHER, evaluate=noisy)]  # fmt: skip
    result = run(num_draws=6, callbacks=steps, observables=observables)
    draws = result.draws.query("chain == 1")
    positive = [float((OTHER_X @ w[:4] + w[4] > 0).double().mean()) for w in steps.weights]
    np.testing.assert_allclose(draws["positive"], positive, rtol=1e-12)
    assert (draws["slope"] > 0).all()
    assert draws["noisy"].nunique() == 6
    together = run(num_draws=6, callbacks=again, observables=observables, chains_per_process=2)
    np.testing.assert_allclose(together.draws["noisy"], result.draws["noisy"], rtol=1e-9)


def test_what_is_wrong_is_said_before_the_first_chain(tmp_path: Path) -> None:
    def refused(error: type[Exception], message: str, observables: Any, **changes: Any) -> None:
        with pytest.raises(error, match=message):
            run(observables=observables, run_dir=tmp_path / "run", **changes)
        assert not (tmp_path / "run" / "chains").exists()

    def broken(model: Any, batch: Any) -> Any:
        raise ValueError("no")

    def infinite(model: Any, batch: Any) -> Any:
        return squared_error(model, batch) * float("inf")

    refused(
        EvaluateError, "observables: 'a': evaluate raised ValueError: no", LossOn("a", OTHER, evaluate=broken)
    )
    refused(EvaluateError, "observables: 'a': the loss at w. is inf", LossOn("a", OTHER, evaluate=infinite))
    refused(
        InvalidArgumentError,
        "observables: 'a': num_samples=38, but the data set has 37",
        LossOn("a", OTHER, 38),
    )
    wrong = LoaderSpec(TensorDataset(torch.zeros(4, 3, dtype=DOUBLE), torch.zeros(4, 1)), batch_size=2)
    refused(EvaluateError, "observables: 'a': evaluate raised RuntimeError", LossOn("a", wrong))
    refused(
        EvaluateError,
        r"'sample_losses': evaluate returned a loss of shape \(\) for",
        SampleLosses(num_samples=4),
    )
    half = LoaderSpec(DATA, batch_size=8, sampler=WeightedRandomSampler(torch.ones(N), 20))
    refused(
        LoaderError,
        "'full_loss': the data set gave 20 of 64 samples",
        "full_loss",
        spec=None,
        loader_spec=half,
    )


def test_fields_are_checked_when_it_is_made() -> None:
    for values, message in (
        ({"name": ""}, "LossOn: name"),
        ({"name": "a", "loader_spec": [1]}, r"LossOn: loader_spec: expected a LoaderSpec or None, got \[1\]"),
        ({"name": "a", "num_samples": 0}, "LossOn: num_samples: expected an integer ≥ 1, got 0"),
        ({"name": "a", "evaluate": 1}, "LossOn: evaluate"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            LossOn(**values)  # type: ignore[arg-type]
    assert isinstance(LossOn("a", DataLoader(DATA)).loader_spec, LoaderSpec)  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgumentError, match="SampleLosses: num_samples: expected an integer ≥ 1, got None"
    ):
        SampleLosses(num_samples=None)  # type: ignore[arg-type]


# ---- what follows from them ---------------------------------------------------------------------

LONG: dict[str, Any] = {"num_chains": 4, "num_draws": 1500, "num_burnin_steps": 50, "chains_per_process": 4}


def covariance() -> torch.Tensor:
    """Of w under exp(−nβ L − γ/2 |w − w*|²)."""
    hessian = 2 * design().T @ design() / N
    return torch.linalg.inv(NBETA * hessian + GAMMA * torch.eye(5, dtype=DOUBLE))


def hits(found: Any, truth: float, relative: float) -> None:
    assert abs(found.mean - truth) < 4 * found.se, (found, truth)
    assert found.se < relative * truth


def test_refined_llc_and_the_functional_variance_have_their_exact_values() -> None:
    result = run(
        HMC, kwargs={"lr": 1e-1}, evaluate=by_sample,
        observables=["full_loss", LossOn("other", OTHER), SampleLosses(num_samples=N)], **LONG,
    )  # fmt: skip
    spread = covariance()
    columns = torch.cat([OTHER_X, torch.ones(37, 1, dtype=DOUBLE)], dim=1)
    # L' is quadratic, so E[L'] − L'(w*) is its Hessian's part alone: E[w] = w*.
    hits(refined_llc(result, "other"), NBETA * float((columns @ spread * columns).sum()) / 37, 0.05)
    hits(refined_llc(result, "other", nbeta=3.0), 3 * float((columns @ spread * columns).sum()) / 37, 0.05)
    np.testing.assert_allclose(refined_llc(result, "full_loss").mean, result.llc, rtol=1e-9)
    # ℓ_i = (r_i + x_i·δ)²: Var = 4 r² s + 2 s², s = x_i·Σ x_i
    s = (design() @ spread * design()).sum(1)
    weights = torch.cat([solved().weight[0], solved().bias]).detach()
    each = 4 * losses(weights, X, Y) * s + 2 * s**2
    hits(functional_variance(result), float(each.sum()), 0.1)
    hits(singular_fluctuation(result), NBETA / 2 * float(each.mean()), 0.1)
    assert result["sample_losses/trace"].shape == (4, 1500, N)
    assert "sample_losses" not in result.draws
    np.testing.assert_allclose(
        result["sample_losses/trace"].mean(2).ravel(), result.draws["full_loss"], rtol=1e-9
    )


def test_the_variance_of_the_loss_from_two_batches() -> None:
    result = run(
        kwargs={"lr": 2e-3}, spec={"batch_size": 16}, observables=["second_batch", "full_loss"], **LONG
    )
    full = result.draws["full_loss"].to_numpy().reshape(4, -1)
    found = loss_variance(result)
    # Of the very draws, by all data; a single batch's variance is several times that.
    assert abs(found.mean - full.var()) < 4 * found.se
    assert found.se < 0.3 * full.var()
    single = (result.draws["loss"] - result.draws["baseline"]).var()
    assert single > 1.5 * full.var()


def test_wbic() -> None:
    left_out = {"lr": 1e-3, "nbeta": None}
    result = run(kwargs=left_out, num_draws=40)
    assert wbic(result).mean == pytest.approx(N * result.draws["loss"].mean())
    with pytest.raises(InvalidArgumentError, match=r"this run has 40 \(given\); leave nbeta out"):
        wbic(run(num_draws=4))


def test_results_without_the_observable() -> None:
    result = run(num_draws=4, observables=LossOn("other", OTHER))
    with pytest.raises(InvalidArgumentError, match=r"observables=LossOn\('full_loss', \.\.\.\)"):
        refined_llc(result, "full_loss")
    with pytest.raises(InvalidArgumentError, match="nbeta: expected a number > 0, got -1"):
        refined_llc(result, "other", nbeta=-1)
    with pytest.raises(InvalidArgumentError, match='observables="second_batch"'):
        loss_variance(result)
    for name in ("other", "sample_losses"):
        with pytest.raises(InvalidArgumentError, match="observables=SampleLosses"):
            singular_fluctuation(result, name)


def test_a_run_that_goes_on_records_what_a_longer_one_does() -> None:
    observables = ["full_loss", "second_batch", "mala_acceptance", "virial", SampleLosses(num_samples=6),
                   ("random", lambda model, batch: torch.randn(()))]  # fmt: skip
    settings: dict[str, Any] = {
        "observables": observables, "spec": {"batch_size": 8, "sampling": "epoch"}, "evaluate": by_sample,
        "num_steps_bw_draws": 2, "num_burnin_steps": 3, "chains_per_process": 2,
    }  # fmt: skip
    once = run(num_draws=30, **settings)
    until = run(num_draws=8, until=Precision(se=1e-9, max_draws=30), **settings)
    assert until.draws["draw"].max() == 29
    np.testing.assert_array_equal(until.draws, once.draws)
    np.testing.assert_array_equal(until["sample_losses/trace"], once["sample_losses/trace"])


def test_arrays_are_saved_with_the_result(tmp_path: Path) -> None:
    result = run(num_draws=6, evaluate=by_sample, observables=["full_loss", SampleLosses(num_samples=6)])
    result.save(tmp_path / "result.safetensors")
    again = LLCResult.load(tmp_path / "result.safetensors")
    np.testing.assert_array_equal(again["sample_losses/trace"], result["sample_losses/trace"])
    assert singular_fluctuation(again) == singular_fluctuation(result)
    assert refined_llc(again, "full_loss") == refined_llc(result, "full_loss")


# ---- a second batch -----------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("sampling", ["iid", "epoch"])
def test_a_second_batch(layout: dict[str, Any], sampling: str) -> None:
    steps = Steps()
    result = run(
        model=linear_model(dtype=DOUBLE), spec={"batch_size": 8, "sampling": sampling}, callbacks=steps,
        num_draws=12, observables="second_batch", **layout,
    )  # fmt: skip
    draws = result.draws.query("chain == 1")
    size = 8 * layout.get("grad_accum_steps", 1)
    indices = IndexBlocks(chain_keys(0, 2)[1], Role.SECOND_ORDER, N, size)
    start = torch.tensor([1.0, 1, 1, 1, 0], dtype=DOUBLE)
    for name, weights in (("loss_b", steps.weights), ("baseline_b", [start] * 12)):
        by_hand = [
            float(losses(w, X[indices(step)], Y[indices(step)]).mean())
            for w, step in zip(weights, draws["step"], strict=True)
        ]
        np.testing.assert_allclose(draws[name], by_hand, rtol=1e-12, err_msg=name)
    assert not np.isclose(draws["loss_b"], draws["loss"], rtol=1e-6).any()


def test_a_second_batch_of_a_stream_is_another_one() -> None:
    stream = LoaderSpec(Numbered(), batch_size=4, num_samples=37)
    for seed in range(8):
        result = run(spec=None, loader_spec=stream, num_draws=8, observables="second_batch", seed=seed)
        assert not np.isclose(result.draws["baseline_b"], result.draws["baseline"], rtol=1e-9).any()


def test_a_second_batch_draws_other_dropout_masks() -> None:
    same = TensorDataset(torch.ones(64, 4), torch.full((64, 1), 4.0))  # every batch is the same
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), linear_model())
    result = estimate(model=model, train_mode=True, observables="second_batch", spec={"dataset": same})
    assert not np.isclose(result.draws["loss_b"], result.draws["loss"], rtol=1e-6).all()
    first = result.draws.query("draw == 0")  # at w*
    np.testing.assert_array_equal(first["loss_b"], first["baseline_b"])  # one mask for both


def test_there_is_no_second_batch_of_all_data() -> None:
    with pytest.raises(InvalidArgumentError, match="'second_batch': HMC and MALA read the loss on all data"):
        run(HMC, observables="second_batch")


def test_leads_of_a_fixed_order_differ() -> None:
    keys = chain_keys(0, 50)
    with ChainLoader(
        LoaderSpec(Numbered(), batch_size=8, num_samples=37),
        keys,
        grad_accum_steps=1,
        device=torch.device("cpu"),
    ) as loader:
        for chain in range(50):
            first, second = (
                loader.requests(chain, 0, role, draw=0)[0].place
                for role in (Role.LOSS_ORDER, Role.SECOND_ORDER)
            )
            assert (second - first) % 4 != 0  # 37 samples are 4 whole batches and a rest


def test_a_recipe_that_cannot_travel_is_named() -> None:
    import threading

    spec = LoaderSpec(TensorDataset(OTHER_X, OTHER_Y), batch_size=8, collate_fn=_Locked(threading.Lock()))
    with pytest.raises(NotPicklableError, match=r"observables\[0\]\.loader_spec\.collate_fn\.lock"):
        estimate(observables=[LossOn("a", spec)], executor="processes")


class _Locked:
    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __call__(self, items: Any) -> Any:
        return items
