"""Acceptance of Euler steps, the virial, and functions of one's own, against a computation by hand."""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from devsample import HMC, MALA, SGHMC, SGLD, LoaderSpec, RMSPropSGLD, sample
from devsample.errors import AllChainsFailedError, EvaluateError, InvalidArgumentError, NotPicklableError
from devsample.observables import mala_acceptance
from devsample.seeds import NormalBlocks, chain_keys
from tests.factories import estimate, linear_data, linear_model, settings
from tests.process.test_sampler_runs import DOUBLE, GAMMA, NBETA, Steps, X, Y, run, slope

START = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=DOUBLE)
MOVING = torch.tensor([True, False, True, True, True])

# ---- acceptance ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("w", "v", "lr", "expected"),
    [
        ([0.0, 0.0], [1.5, 5.5], 0.1, 0.6661436),
        ([1.0, 1.0], [1.5, 0.5], 0.5, 0.9692332),
        ([1.5, 0.5], [1.0, 1.0], 0.5, 1.0),
        ([0.0, 0.0], [math.nan, 1.0], 0.1, 0.0),
    ],
)
def test_the_acceptance_of_a_step_on_half_the_square(
    w: list[float], v: list[float], lr: float, expected: float
) -> None:
    one, other = torch.tensor(w, dtype=DOUBLE), torch.tensor(v, dtype=DOUBLE)
    found = mala_acceptance(one, one, (one**2).sum() / 2, other, other, (other**2).sum() / 2, lr)
    assert float(found) == pytest.approx(expected, abs=1e-7)


def densities(w: torch.Tensor, v: torch.Tensor, energy: Any, lr: float, noise_level: float) -> float:
    """π(v) q(w | v) / π(w) q(v | w) at most 1, written out."""
    temperature = noise_level**2

    def drawn(start: torch.Tensor, end: torch.Tensor) -> float:
        mean = start - lr / 2 * energy(start)[1]
        return -float((end - mean).square().sum()) / (2 * lr * temperature)

    ratio = (energy(w)[0] - energy(v)[0]) / temperature + drawn(v, w) - drawn(w, v)
    return min(1.0, math.exp(ratio))


def energy_on(
    x: torch.Tensor, y: torch.Tensor, moving: torch.Tensor, options: dict[str, Any], moved: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """U and ∇U of the moving entries, with the loss on one batch."""
    at = START.clone()
    at[moving] = moved
    error = x @ at[:4] + at[4] - y[:, 0]
    g, loss = slope(at, x, y), float((error**2).mean())
    if options.get("control_variate"):
        shift = slope(START, X, Y) - slope(START, x, y)
        g, loss = g + shift, loss + float(shift @ (at - START))
    offset, decay = moved - START[moving], options.get("weight_decay", 0.0)
    value = NBETA * loss + GAMMA / 2 * float(offset @ offset) + decay / 2 * float(moved @ moved)
    return value, NBETA * g[moving] + GAMMA * offset + decay * moved


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "together": {"chains_per_process": 2},
    "masked": {"masked": True},
    "together and masked": {"chains_per_process": 2, "masked": True},
    "weight decay": {"options": {"weight_decay": 20.0}, "masked": True},
    "another temperature": {"options": {"noise_level": 0.7}},
    "averaged noise": {"options": {"integrator": "averaged"}},
    "control variate": {"options": {"control_variate": True}, "chains_per_process": 2},
    "micro-batches": {"grad_accum_steps": 2},
    "few draws": {"num_steps_bw_draws": 3, "options": {"integrator": "averaged"}},
    "few draws of euler": {"num_steps_bw_draws": 3},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_acceptance_of_every_draw(case: dict[str, Any]) -> None:
    changes, steps = dict(case), Steps()
    options = {"lr": 2e-3, "integrator": "euler"} | changes.pop("options", {})
    moving, masks = torch.ones(5, dtype=torch.bool), None
    if changes.pop("masked", False):
        moving, masks = MOVING, {"weight": MOVING[None, :4], "bias": True}
    result = run(
        kwargs=options, model=linear_model(dtype=DOUBLE), param_masks=masks, num_draws=15,
        spec={"batch_size": 8}, callbacks=steps, observables="mala_acceptance", **changes,
    )  # fmt: skip
    noise_level = options.get("noise_level", 1.0)
    normals = NormalBlocks([chain_keys(0, 2)[1]], int(moving.sum()), DOUBLE, torch.device("cpu"))
    found = result.draws.query("chain == 1")
    for row, (w, batch) in enumerate(zip(steps.weights, steps.batches, strict=True)):
        x, y = (torch.cat(parts) for parts in zip(*batch, strict=True))

        energy = functools.partial(energy_on, x, y, moving, options)
        here = w[moving]
        normal = normals.plain(int(found["step"].iloc[row]))[0]
        to = here - options["lr"] / 2 * energy(here)[1] + options["lr"] ** 0.5 * noise_level * normal
        if options["integrator"] == "euler" and "num_steps_bw_draws" not in case and row + 1 < 15:
            np.testing.assert_allclose(to, steps.weights[row + 1][moving], rtol=1e-9)  # where the chain went
        expected = densities(here, to, energy, options["lr"], noise_level)
        np.testing.assert_allclose(found["mala_acceptance"].iloc[row], expected, rtol=1e-8)
    assert found["mala_acceptance"].between(0, 1).all()
    assert 0.2 < found["mala_acceptance"].mean() < 0.9999


def test_the_acceptance_does_not_depend_on_which_steps_are_drawn() -> None:
    euler = {"lr": 2e-3, "integrator": "euler"}
    every = run(kwargs=euler, spec={"batch_size": 8}, num_draws=12, observables="mala_acceptance")
    third = run(
        kwargs=euler, spec={"batch_size": 8}, num_draws=4, num_steps_bw_draws=3, observables="mala_acceptance"
    )
    expected = every["mala_acceptance/trace"][:, 2::3]
    np.testing.assert_allclose(third["mala_acceptance/trace"], expected, rtol=1e-9)


def test_the_acceptance_is_of_the_gradients_batch_when_losses_are_read_on_others() -> None:
    iid = run(spec={"batch_size": N_ALL}, num_draws=6, observables="mala_acceptance", kwargs={"lr": 1e-3})
    epoch = run(
        spec={"batch_size": N_ALL, "sampling": "sequential"}, num_draws=6, observables="mala_acceptance",
        kwargs={"lr": 1e-3},
    )  # fmt: skip
    assert not np.allclose(iid["mala_acceptance/trace"], epoch["mala_acceptance/trace"], rtol=1e-6)
    hand = Steps()
    run(
        spec={"batch_size": N_ALL, "sampling": "sequential"}, num_draws=6, callbacks=hand, kwargs={"lr": 1e-3}
    )
    normals = NormalBlocks([chain_keys(0, 2)[1]], 5, DOUBLE, torch.device("cpu"))
    start = hand.weights[0]

    def energy(w: torch.Tensor) -> tuple[float, torch.Tensor]:
        error = X @ w[:4] + w[4] - Y[:, 0]
        value = NBETA * float((error**2).mean()) + GAMMA / 2 * float((w - start).square().sum())
        return value, NBETA * slope(w, X, Y) + GAMMA * (w - start)

    for step, w in enumerate(hand.weights):
        to = w - 1e-3 / 2 * energy(w)[1] + 1e-3**0.5 * normals.plain(step)[0]
        expected = densities(w, to, energy, 1e-3, 1.0)
        np.testing.assert_allclose(epoch["mala_acceptance/trace"][1, step], expected, rtol=1e-8)


N_ALL = len(X)


class Powers(torch.nn.Module):
    """Σ w^k, whatever the data."""

    def __init__(self, powers: list[int]) -> None:
        super().__init__()
        self.powers = powers
        self.w = torch.nn.Parameter(torch.zeros(len(powers), dtype=DOUBLE))

    def forward(self, batch: Any) -> torch.Tensor:
        return sum((w**k for w, k in zip(self.w, self.powers, strict=True)), torch.zeros((), dtype=DOUBLE))


@pytest.mark.parametrize(
    ("powers", "lr", "gamma", "rate"),
    [
        ([2], 0.01, 100.0, 0.59),
        pytest.param([2], 0.01, 0.1, 0.73, marks=pytest.mark.slow),
        ([4], 0.015, 100.0, 0.85),
        pytest.param([2, 2], 0.001, 100.0, 0.971, marks=pytest.mark.slow),
        pytest.param([4, 4], 0.01, 100.0, 0.87, marks=pytest.mark.slow),
    ],
)
def test_rates_on_sums_of_powers(powers: list[int], lr: float, gamma: float, rate: float) -> None:
    """The rates that devinterp states for these losses, lr and localization, to ± 0.01."""
    result = estimate(
        model=Powers(powers), evaluate=lambda model, batch: model(batch), spec={"batch_size": 2},
        optimizer_kwargs={"lr": lr, "nbeta": 144.76, "localization": gamma, "integrator": "euler"},
        num_chains=4, num_draws=2000, num_burnin_steps=100, chains_per_process=4, init_loss=0.0,
        observables="mala_acceptance",
    )  # fmt: skip
    assert result["mala_acceptance/trace"].mean() == pytest.approx(rate, abs=0.011)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (RMSPropSGLD, {}, "is of the Euler steps of SGLD; other samplers"),
        (SGHMC, {}, "is of the Euler steps of SGLD"),
        (MALA, {}, 'other samplers make other proposals. They have "acceptance"'),
        (SGLD, {"noise_level": 0.0}, "with noise_level=0 nothing is proposed"),
        (torch.optim.SGD, {"localization": 0.0, "nbeta": 1.0}, "is of the Euler steps of SGLD"),
    ],
)
def test_who_has_no_euler_steps(kind: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        run(kind, kwargs=changes, observables="mala_acceptance")


# ---- the virial ---------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2])
def test_the_virial(group: int) -> None:
    steps = Steps()
    result = run(
        kwargs={"lr": 1e-3, "weight_decay": 0.5}, model=linear_model(dtype=DOUBLE), callbacks=steps,
        param_masks={"weight": MOVING[None, :4], "bias": True}, spec={"batch_size": 8}, num_draws=10,
        observables="virial", chains_per_process=group,
    )  # fmt: skip
    for row, (w, (batch,)) in enumerate(zip(steps.weights, steps.batches, strict=True)):
        offset = w - START
        gradient = NBETA * slope(w, *batch) + GAMMA * offset + 0.5 * w
        expected = float((offset * gradient)[MOVING].sum()) / 4
        np.testing.assert_allclose(result["virial/trace"][1, row], expected, rtol=1e-9, atol=1e-12)


def test_the_virial_is_one_in_the_right_law() -> None:
    long: dict[str, Any] = {
        "num_chains": 4,
        "num_draws": 1000,
        "num_burnin_steps": 50,
        "chains_per_process": 4,
    }
    trace = run(HMC, kwargs={"lr": 1e-1}, observables="virial", **long)["virial/trace"]
    error = trace.mean(axis=1).std(ddof=1) / 2
    assert abs(trace.mean() - 1) < 4 * error
    assert error < 0.02
    hot = run(HMC, kwargs={"lr": 1e-1, "noise_level": 1.1}, observables="virial", **long)["virial/trace"]
    assert abs(hot.mean() - 1.21) < 4 * hot.mean(axis=1).std(ddof=1) / 2
    assert hot.mean() > trace.mean() + 0.1


# ---- functions ----------------------------------------------------------------------------------


def bias_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model.bias  # type: ignore[return-value]  # it requires grad, which a number does not


def twice_the_loss(loss: float, *, nbeta: float, unknown: float = 2.0) -> float:
    return unknown * loss


def drawn_numbers(**record: Any) -> Any:
    return torch.randn(1) if record["chain"] else np.float32(np.random.rand())  # noqa: NPY002


class Counting:
    """Counts its calls; its state stays in the process that calls it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: torch.nn.Module) -> int:
        self.calls += 1
        return self.calls


FUNCTIONS = {
    "bias": bias_of,
    "twice": twice_the_loss,
    "norm": lambda m, b: m.weight.norm(),
    "mean": lambda model, batch: float(batch[0].mean()),
    "step_again": lambda step: step,
    "random": drawn_numbers,
}


@pytest.mark.parametrize("changes", [{}, {"chains_per_process": 2}, {"num_steps_bw_draws": 3}], ids=str)
def test_functions(changes: dict[str, Any]) -> None:
    steps = Steps()
    result = run(
        model=linear_model(dtype=DOUBLE), spec={"batch_size": 8}, num_draws=10, callbacks=steps,
        observables=FUNCTIONS, **changes,
    )  # fmt: skip
    draws = result.draws.query("chain == 1")
    np.testing.assert_allclose(draws["bias"], [float(w[4]) for w in steps.weights], rtol=1e-12)
    np.testing.assert_allclose(draws["norm"], [float(w[:4].norm()) for w in steps.weights], rtol=1e-12)
    np.testing.assert_allclose(draws["twice"], 2 * draws["loss"], rtol=1e-12)
    by_hand = [float(batch[0][0].mean()) for batch in steps.batches]
    np.testing.assert_allclose(draws["mean"], by_hand, rtol=1e-12)
    np.testing.assert_array_equal(draws["step_again"], draws["step"])
    assert draws["random"].nunique() == 10
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)  # the state of the caller's generators does not matter
        again = run(model=linear_model(dtype=DOUBLE), spec={"batch_size": 8}, num_draws=10,
                    observables=FUNCTIONS, **changes)  # fmt: skip
    np.testing.assert_array_equal(again.draws, result.draws)


def test_functions_among_names_and_in_sample() -> None:
    counting = Counting()
    spec = LoaderSpec(linear_data(), batch_size=16)
    observables = ["distance", ("bias", bias_of), ("calls", counting)]
    draws = sample(**settings(loader_spec=spec, observables=observables))["draws"]
    assert list(draws.columns[-3:]) == ["distance", "bias", "calls"]
    assert counting.calls == 21  # two chains with ten draws, and once before the first
    assert draws["calls"].nunique() == 20


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda model, batch: [1.0], r"observables: 'mine' returned \[1\.0\]; return one number"),
        (lambda model, batch: model.weight, r"returned (Parameter|Tensor) of shape \(1, 4\)"),
        (lambda model, batch: np.ones(3), r"returned ndarray of shape \(3,\)"),
        (lambda model, batch: None, "returned None; return one number"),
        (lambda model, batch: 1 // 0, "observables: 'mine' raised ZeroDivisionError"),
    ],
)
def test_functions_that_give_something_else(function: Any, message: str) -> None:
    with pytest.raises(EvaluateError, match=message):
        estimate(observables={"mine": function})


def late(draw: int) -> Any:
    return 1.0 if draw < 5 else "text"


def test_a_function_that_fails_at_a_draw_fails_its_chain() -> None:
    with pytest.raises(AllChainsFailedError, match="'mine' returned 'text'") as caught:
        estimate(observables={"mine": late}, num_draws=8)
    assert caught.value.draws["draw"].max() == 4
    assert (caught.value.draws["mine"] == 1.0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mine": 3}, r"expected names such as .*, got \('mine', 3\)"),
        ({"mine": lambda a, b, c: 0.0}, r"'mine': the function takes a, b, c; it may take \(model, batch\)"),
        ({"mine": lambda *, a: 0.0}, "'mine': the function takes a; it may take"),
        ({"llc": bias_of}, "'llc' is a column of every draw; take another name"),
        ({"chain": bias_of}, "'chain' is a column of every draw"),
        (["second_batch", ("loss_b", bias_of)], "a name comes twice: loss_b"),
        (["full_loss", ("full_loss", bias_of)], "a name comes twice: full_loss"),
        (3, "expected names such as .*, got 3"),
        ([3], "expected names such as .*, got 3"),
    ],
)
def test_what_cannot_be_observed(given: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"observables: {message}"):
        estimate(observables=given)


def test_a_function_that_cannot_travel_is_named_before_anything_starts() -> None:
    lock = threading.Lock()
    with pytest.raises(NotPicklableError, match=r"observables\[0\]\.function.*lock"):
        estimate(observables={"mine": lambda model, batch: float(lock.locked())}, cores=2)
