"""Losses with weights: Σ w ℓ / Σ w over a step, over all data, and in a whole run."""

from __future__ import annotations

import collections
import functools
import math
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from devsample import HMC, LLCResult, LoaderSpec, estimate_learning_coeff_with_summary
from devsample.averages import Watch
from devsample.errors import AllChainsFailedError, EvaluateError
from devsample.flat import FlatParameters
from devsample.losses import find_losses, read_loss
from devsample.objective import Objective
from devsample.observables import LossOn, SampleLosses
from devsample.observing.losses import PerSample
from devsample.seeds import IndexBlocks, Role, chain_keys
from devsample.stacked import RowByRow, Stacked, why_not_stackable

DOUBLE = torch.float64
N, LENGTH, WIDTH = 41, 6, 3
KEYS = chain_keys(0, 2)

# ---- what evaluate returns ----------------------------------------------------------------------

LOSSES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
Output = collections.namedtuple("Output", ["weights", "loss"])


@pytest.mark.parametrize(
    ("output", "mean"),
    [
        ({"loss": LOSSES, "weights": torch.tensor([[1.0, 1, 0], [1, 0, 2]])}, 75 / 5),
        ({"loss": LOSSES, "weights": torch.tensor([[True, True, False], [True, False, False]])}, 11 / 3),
        ({"loss": LOSSES, "weights": torch.tensor([1, 3])}, (7 + 3 * 56) / 12),
        ({"loss": LOSSES, "weights": torch.tensor([[1.0], [3.0]])}, (7 + 3 * 56) / 12),
        ({"loss": LOSSES, "weights": None}, 63 / 6),
        ({"loss": LOSSES[0], "weights": torch.tensor([0.0, 0.5, 1.5])}, 7 / 2),
        ({"loss": LOSSES[0, 2], "weights": torch.tensor(5)}, 4.0),
        (types.SimpleNamespace(loss=LOSSES[0], weights=torch.tensor([0, 1, 3])), 14 / 4),
        (Output(torch.tensor([0, 1, 3]), LOSSES[0]), 14 / 4),
        ({"loss_sum": torch.tensor(9.0), "count": 4}, 9 / 4),
        ({"loss_sum": torch.tensor(9.0), "count": torch.tensor(4)}, 9 / 4),
        ({"loss_sum": torch.tensor([9.0, 3.0]), "count": torch.tensor([4, 1])}, 12 / 5),
    ],
)
def test_every_form_of_weights_is_read(output: Any, mean: float) -> None:
    assert float(read_loss(output)) == pytest.approx(mean, rel=1e-7)


def test_what_has_no_weight_may_be_anything_and_gets_no_gradient() -> None:
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = read_loss({"loss": torch.where(torch.tensor([True, False, True]), w**2, math.nan),
                      "weights": torch.tensor([True, False, True])})  # fmt: skip
    loss.backward()
    assert loss.item() == 5.0
    assert w.grad.tolist() == [1.0, 0.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single(dtype: torch.dtype) -> None:
    """70 000 ones have no sum in float16, and bfloat16 counts to 256."""
    ones = torch.ones(70_000, dtype=dtype)
    assert float(read_loss({"loss": ones, "weights": torch.ones(70_000, dtype=torch.bool)})) == 1.0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(3), r"weights of shape \(3,\) for losses of shape \(2, 3\)"),
        (torch.ones(1, 3), r"weights of shape \(1, 3\)"),
        (torch.ones(2, 3, 1), r"weights of shape \(2, 3, 1\)"),
        (torch.ones(()), r"weights of shape \(\)"),
        (torch.ones(2, 2), r"weights of shape \(2, 2\)"),
        ([1.0, 2.0], "weights that are a list"),
        (torch.ones(2, requires_grad=True), "depend on the parameters"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(EvaluateError, match=message):
        read_loss({"loss": LOSSES, "weights": weights})


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"loss_sum": torch.tensor(1.0)}, 'a "loss_sum" without a "count"'),
        ({"loss_sum": 1.0, "count": 3}, "no floating point tensor"),
        ({"loss_sum": torch.ones(2), "count": 3}, r"a count 3 for sums of shape \(2,\)"),
        ({"loss_sum": torch.ones(2), "count": torch.ones(3)}, r"a count of shape \(3,\)"),
        ({"loss_sum": torch.tensor(1.0), "count": None}, "a count None"),
    ],
)
def test_sums_without_a_count_of_their_own_are_refused(output: Any, message: str) -> None:
    with pytest.raises(EvaluateError, match=message):
        read_loss(output)


def test_losses_of_samples() -> None:
    found = find_losses({"loss": LOSSES, "weights": torch.tensor([[1.0, 1, 0], [1, 0, 2]])}).by_sample()
    assert found.losses().tolist() == [1.5, 24.0]
    assert found.weights.tolist() == [2.0, 3.0]


# ---- a step -------------------------------------------------------------------------------------


def sequences(dtype: torch.dtype = DOUBLE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs (N, T, F), targets (N, T) and a mask: very unequal lengths, from 1 token on."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, LENGTH, WIDTH, generator=generator, dtype=DOUBLE)
    y = x.sum(2) + torch.randn(N, LENGTH, generator=generator, dtype=DOUBLE)
    lengths = torch.where(torch.arange(N) < 25, 1, 1 + torch.arange(N) % LENGTH)
    return x.to(dtype), y.to(dtype), torch.arange(LENGTH) < lengths[:, None]


def by_mask(model: torch.nn.Module, batch: Any) -> Any:
    x, y, mask = batch
    return {"loss": (torch.tanh(model(x)[..., 0]) - y) ** 2, "weights": mask}


def by_count(model: torch.nn.Module, batch: Any) -> Any:
    found = by_mask(model, batch)
    return {"loss_sum": (found["loss"] * found["weights"]).sum(), "count": found["weights"].sum()}


def by_fraction(model: torch.nn.Module, batch: Any) -> Any:
    """Weights that are neither 0 nor 1, in the batch's own precision."""
    found = by_mask(model, batch)
    return types.SimpleNamespace(loss=found["loss"], weights=found["weights"] * batch[1].abs())


def linear(dtype: torch.dtype = DOUBLE) -> torch.nn.Module:
    model = torch.nn.utils.skip_init(torch.nn.Linear, WIDTH, 1, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.3, 0.2]]))
        model.bias.fill_(0.1)
    return model


def cut(data: Any, sizes: list[int]) -> list[tuple[int, list[torch.Tensor]]]:
    return [
        (size, list(part)) for size, *part in zip(sizes, *(one.split(sizes) for one in data), strict=True)
    ]


forms = pytest.mark.parametrize("evaluate", [by_mask, by_count, by_fraction])
precisions = pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (DOUBLE, 1e-12)])
CUTS = {"even": [10, 10, 10, 11], "ragged": [25, 15, 1], "one by one": [1] * N}
cuts = pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS)


def objective_for(evaluate: Any, dtype: torch.dtype) -> tuple[Objective, torch.Tensor]:
    """An objective, and two states."""
    model = linear(dtype)
    objective = Objective(
        model, evaluate, FlatParameters(model, {"weight": True, "bias": True}), seeded=False
    )
    center = objective.flat.read()
    return objective, torch.stack([center, center + 0.1])


@forms
@precisions
@cuts
@pytest.mark.parametrize("kind", [RowByRow, Stacked])
def test_accumulation_equals_the_big_batch(
    evaluate: Any, dtype: torch.dtype, rtol: float, sizes: list[int], kind: Any
) -> None:
    objective, position = objective_for(evaluate, dtype)
    states = kind(objective, position, position[0], KEYS)
    data = sequences(dtype)
    flipped = [one.flip(0) for one in data]
    found, expected = [], []
    for result, batches in (
        (found, [cut(data, sizes), cut(flipped, sizes)]),
        (expected, [cut(data, [N]), cut(flipped, [N])]),
    ):
        gradient = torch.zeros_like(position)
        result += [states.losses_and_gradients(gradient, batches, 0), gradient]
        result += [states.losses(batches, 0), states.center_losses(batches, 0)]
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= rtol * float(other.norm())
    assert getattr(states, "given_up", "") == ""
    x, y, mask = sequences(DOUBLE)  # and by hand
    weights = mask * (y.abs() if evaluate is by_fraction else 1.0)
    for row, state in enumerate(position.double()):
        losses = (torch.tanh(x @ state[:WIDTH] + state[WIDTH]) - y) ** 2
        truth = float((weights * losses).sum() / weights.sum())
        assert float(found[0][row]) == pytest.approx(truth, rel=rtol)
        assert float(found[2][row]) == pytest.approx(truth, rel=rtol)


def test_the_average_is_not_that_of_the_samples() -> None:
    """What the equality above would miss: micro-batches weighted by their samples."""
    objective, position = objective_for(by_mask, DOUBLE)
    objective.flat.point_to(position[0])
    batches = cut(sequences(), [25, 16])
    each = [float(objective.loss([one], KEYS[0], 0)) for one in batches]
    whole = float(objective.loss(batches, KEYS[0], 0))
    assert abs(whole - (25 * each[0] + 16 * each[1]) / N) > 0.01 * whole
    assert float(objective.weight) == float(sequences()[2].sum())


def test_a_micro_batch_without_weight_counts_nothing() -> None:
    objective, position = objective_for(by_mask, DOUBLE)
    objective.flat.point_to(position[0])
    data = sequences()
    x, y, mask = (one[:4] for one in data)
    nothing = (4, [x, y, torch.zeros_like(mask)])
    (one,) = cut(data, [N])
    gradients = torch.zeros(2, 4, dtype=DOUBLE)
    expected = objective.loss_and_gradient(gradients[0], [one], KEYS[0], 0)
    for batches in ([nothing, one], [one, nothing]):
        found = objective.loss_and_gradient(gradients[1], batches, KEYS[0], 0)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-15)
    with pytest.raises(EvaluateError, match=r"weights \(or a count\) that are all 0 for a batch"):
        objective.loss([nothing], KEYS[0], 0)


@pytest.mark.parametrize(
    ("mask", "message"), [(0.0, "all 0 for a batch"), (-1.0, "with the value -1"), (math.nan, "value nan")]
)
def test_where_looking_waits_for_the_device_weights_are_looked_at_later(mask: float, message: str) -> None:
    objective, position = objective_for(by_mask, DOUBLE)
    objective.watch = Watch(at_once=False)
    objective.flat.point_to(position[0])
    (good,) = cut(sequences(), [N])
    bad = (N, [*good[1][:2], good[1][2] * mask])
    objective.loss([good], KEYS[0], 0)
    objective.watch.check()
    objective.loss([bad], KEYS[0], 1)
    objective.loss([good], KEYS[0], 2)
    with pytest.raises(EvaluateError, match=message):
        objective.watch.check()


def test_chains_with_weights_can_be_stacked() -> None:
    objective, position = objective_for(by_mask, DOUBLE)
    data = sequences()
    steps = [cut([one[:20] for one in data], [10, 10]), cut([one[20:40] for one in data], [10, 10])]
    assert why_not_stackable(objective, position[0], steps, KEYS[0]) == ""


def test_weights_now_and_then_are_refused() -> None:
    def evaluate(model: torch.nn.Module, batch: Any) -> Any:
        found = by_mask(model, batch)
        return found if len(batch[0]) > 1 else found["loss"]

    objective, position = objective_for(evaluate, DOUBLE)
    objective.flat.point_to(position[0])
    with pytest.raises(EvaluateError, match="weights .* for some batches and none for others"):
        objective.loss(cut(sequences(), [N - 1, 1]), KEYS[0], 0)


# ---- runs ---------------------------------------------------------------------------------------


def run(evaluate: Any = by_mask, *, batch_size: int = 10, data: Any = None, **changes: Any) -> LLCResult:
    given = {
        "optimizer_kwargs": {"lr": 1e-3, "nbeta": 20.0, "localization": 5.0},
        "num_chains": 2, "num_draws": 6, "seed": 0, "verbose": False, "threads_per_chain": 1,
    } | changes  # fmt: skip
    data = TensorDataset(*sequences()) if data is None else data
    spec = LoaderSpec(data, batch_size=batch_size)
    return estimate_learning_coeff_with_summary(linear(), loader_spec=spec, evaluate=evaluate, **given)


@functools.cache
def losses_at_center() -> tuple[np.ndarray, np.ndarray]:
    """Loss and weight of every token at w*."""
    x, y, mask = sequences()
    with torch.no_grad():
        return by_mask(linear(), (x, y, mask))["loss"].numpy(), mask.numpy().astype(float)


def mean_at_center(indices: Any = slice(None)) -> float:
    losses, weights = (one[indices] for one in losses_at_center())
    return float((losses * weights).sum() / weights.sum())


@pytest.mark.parametrize("layout", [{}, {"chains_per_process": 2}], ids=["alone", "together"])
@pytest.mark.parametrize("evaluate", [by_mask, by_count])
def test_a_run_is_averaged_by_token(evaluate: Any, layout: dict[str, Any]) -> None:
    """L_n(w*), the baselines of draws, and losses on all data, against a computation by hand."""
    few = [0, 20, 40]
    result = run(evaluate, grad_accum_steps=2, **layout,
                 observables=["full_loss", LossOn("few", num_samples=3)])  # fmt: skip
    assert result.init_loss == pytest.approx(mean_at_center(), rel=1e-12)
    assert result.settings["averaged_by"] == "weight"
    assert "averaged by weight" in result.summary()
    assert result.settings["not_stackable"] == ""
    observed = result.settings["observables"]
    assert observed["full_loss"]["center"] == pytest.approx(mean_at_center(), rel=1e-12)
    assert observed["few"]["center"] == pytest.approx(mean_at_center(few), rel=1e-12)
    blocks = IndexBlocks(KEYS[0], Role.ORDER, N, 20)
    draws = result.draws.query("chain == 0")
    for step, baseline in zip(draws["step"], draws["baseline"], strict=True):
        indices = blocks(step)
        assert baseline == pytest.approx(mean_at_center(indices), rel=1e-12)
    assert draws["loss"].iloc[0] == pytest.approx(draws["baseline"].iloc[0], rel=1e-12)
    first = draws["full_loss"].iloc[0]
    assert first == pytest.approx(mean_at_center(), rel=1e-12)
    assert draws["full_loss"].iloc[-1] != first


def test_a_run_without_weights_says_so() -> None:
    result = run(lambda model, batch: by_mask(model, batch)["loss"])
    assert result.settings["averaged_by"] == "sample"
    assert "averaged by sample" in result.summary()


@pytest.mark.parametrize("size", [7, N])
def test_hmc_samples_the_mean_by_token_however_it_is_read(size: int) -> None:
    kwargs = {"lr": 1e-2, "nbeta": 20.0, "localization": 5.0, "num_leapfrog_steps": 2}
    result = run(batch_size=size, sampling_method=HMC, optimizer_kwargs=kwargs, num_draws=5)
    np.testing.assert_allclose(result.draws["baseline"], mean_at_center(), rtol=1e-12)
    whole = run(batch_size=N, sampling_method=HMC, optimizer_kwargs=kwargs, num_draws=5)
    np.testing.assert_allclose(result.draws["loss"], whole.draws["loss"], rtol=1e-9)


def test_with_a_control_variate_the_first_gradient_is_that_of_all_tokens() -> None:
    """At w* the gradient is g_B − g_B + g: the full one, of Σ w ℓ / Σ w."""
    kwargs = {"lr": 1e-3, "nbeta": 20.0, "localization": 5.0, "control_variate": True}
    result = run(batch_size=7, optimizer_kwargs=kwargs, observables=["gradient_norm"], num_draws=2)
    model = linear()
    x, y, mask = sequences()
    read_loss(by_mask(model, (x, y, mask))).backward()
    norm = math.hypot(*(float(one.grad.norm()) for one in model.parameters()))
    assert result.draws["gradient_norm"].iloc[0] == pytest.approx(20.0 * norm, rel=1e-10)


def test_the_error_of_a_mean_over_some_of_the_data_is_that_of_a_ratio(monkeypatch: Any) -> None:
    monkeypatch.setattr("devsample.prepare.FULL_PASS_SAMPLES", 30)
    result = run(batch_size=3)
    indices = np.linspace(0, N - 1, 30).round().astype(int)
    assert result.init_loss == pytest.approx(mean_at_center(indices), rel=1e-12)
    losses, weights = (one[indices].reshape(10, -1) for one in losses_at_center())
    shares = weights.sum(1) / weights.sum()
    errors = shares * ((losses * weights).sum(1) / weights.sum(1) - result.init_loss)
    assert result.init_loss_se == pytest.approx(math.sqrt((errors**2).sum() * 10 / 9), rel=1e-9)


def test_losses_of_samples_are_their_own_means() -> None:
    result = run(observables=[SampleLosses(num_samples=N)], num_draws=2, num_chains=1)
    losses, weights = losses_at_center()
    np.testing.assert_allclose(
        result["sample_losses/trace"][0, 0], (losses * weights).sum(1) / weights.sum(1), rtol=1e-12
    )


def with_empty(*numbers: int) -> TensorDataset:
    x, y, mask = sequences()
    mask[list(numbers)] = False
    return TensorDataset(x, y, mask)


def test_samples_without_weight_have_no_loss_of_their_own() -> None:
    data = with_empty(3, 40)
    assert math.isfinite(run(data=data).llc)  # the last batch of the pass is sample 40 alone
    with pytest.raises(EvaluateError, match="observables: 'sample_losses': .* weights .* 0 for 2 of 41 samp"):
        run(data=data, observables=[SampleLosses(num_samples=N)])
    with pytest.raises(EvaluateError, match="observables: 'other': the loss at w\\* is nan"):
        run(observables=[LossOn("other", LoaderSpec(with_empty(*range(N)), batch_size=10))])


def scaled(value: float) -> Any:
    def evaluate(model: torch.nn.Module, batch: Any) -> Any:
        found = by_mask(model, batch)
        return {"loss": found["loss"], "weights": found["weights"] * value}

    return evaluate


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (scaled(0.0), r"weights \(or a count\) that are all 0 for a batch"),
        (scaled(-1.0), r"weights \(or a count\) with the value -1"),
        (scaled(math.nan), r"weights \(or a count\) with the value nan"),
        (scaled(math.inf), r"weights \(or a count\) with the value (nan|inf)"),
        (lambda model, batch: by_mask(model, batch) | {"weights": torch.ones(3)}, "weights of shape"),
        (
            lambda model, batch: by_mask(model, batch) | {"weights": model.bias * batch[2]},
            "depend on the par",
        ),
    ],
    ids=["all 0", "negative", "nan", "inf", "shape", "not constant"],
)
def test_weights_that_cannot_be_used_are_refused_before_the_first_chain(evaluate: Any, message: str) -> None:
    with pytest.raises(EvaluateError, match=message):
        run(evaluate)


@pytest.mark.parametrize("layout", [{"num_chains": 1}, {"chains_per_process": 2}], ids=["alone", "together"])
def test_a_batch_without_weight_that_a_chain_meets_is_named(layout: dict[str, Any]) -> None:
    data = with_empty(*range(1, N, 4))
    with pytest.raises(AllChainsFailedError, match=r"weights \(or a count\) that are all 0 for a batch"):
        run(data=data, batch_size=3, num_draws=1000, **layout)


def test_what_is_averaged_over_samples_keeps_what_evaluate_returned() -> None:
    evaluate = PerSample(by_mask)
    data = sequences()
    assert set(evaluate(linear(), data)) == {"loss", "weights"}
    assert evaluate.losses.shape == (N,)
    assert int(evaluate.empty) == 0
