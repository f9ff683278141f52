"""Runs with every sampler: on all data, with a control variate, with what burn-in adapts."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset, IterableDataset, RandomSampler, TensorDataset

import devsample
from devsample import HMC, MALA, SGLD, AdamSGLD, LLCResult, RMSPropSGLD
from devsample.errors import AllChainsFailedError, InvalidArgumentError, LoaderWarning
from devsample.samplers import SAMPLERS
from tests.factories import estimate, linear_data, linear_model, squared_error

DOUBLE = torch.float64
N, NBETA, GAMMA = 64, 40.0, 2.0
X, Y = (one[:N] for one in linear_data(dtype=DOUBLE).tensors)
DATA = TensorDataset(X, Y)
STOCHASTIC = {name: one for name, one in SAMPLERS.items() if not one.kernel.full_data}


def design() -> torch.Tensor:
    """The columns that weight and bias multiply."""
    return torch.cat([X, torch.ones(N, 1, dtype=DOUBLE)], dim=1)


@functools.cache  # lstsq is not the same to the last bit every time
def solved(dtype: torch.dtype = DOUBLE) -> torch.nn.Module:
    """The model at its least-squares solution."""
    model = linear_model(dtype=dtype)
    solution = torch.linalg.lstsq(design(), Y).solution[:, 0].to(dtype)
    with torch.no_grad():
        model.weight.copy_(solution[None, :4])
        model.bias.copy_(solution[4:])
    return model


def exact(columns: torch.Tensor | None = None) -> float:
    """λ of the linear regression with these columns at nβ, γ: Σ nβ h / (2 (nβ h + γ))."""
    columns = design() if columns is None else columns
    h = torch.linalg.eigvalsh(2 * columns.T @ columns / N)
    return float((NBETA * h / (2 * (NBETA * h + GAMMA))).sum())


def run(kind: Any = SGLD, *, kwargs: Any = None, spec: Any = None, **changes: Any) -> LLCResult:
    """A run at the solution, in which the loss is taken on all data in one batch."""
    given = {"lr": 1e-2, "nbeta": NBETA, "localization": GAMMA} | (
        {"num_leapfrog_steps": 3} if kind is HMC else {}
    )
    settings = {
        "model": solved(),
        "spec": {"dataset": DATA, "batch_size": N} | (spec or {}),
        "sampling_method": kind,
        "optimizer_kwargs": given | (kwargs or {}),
        "threads_per_chain": 1,
    }
    return estimate(**(settings | changes))


def z(result: LLCResult, truth: float) -> float:
    return float((result.llc - truth) / result.se)


# ---- on all data --------------------------------------------------------------------------------


LONG = {"num_chains": 4, "num_draws": 800, "num_burnin_steps": 100, "chains_per_process": 4}
reference = pytest.mark.parametrize("kind", [HMC, MALA])


def hit(result: LLCResult, truth: float, relative: float = 0.03) -> None:
    assert abs(z(result, truth)) < 4
    assert result.se < relative * truth
    assert result.verdict == "trust", result.reasons


@reference
def test_the_exact_value(kind: Any) -> None:
    result = run(kind, **LONG)
    hit(result, exact())
    with pytest.raises(AssertionError):  # temperature 10 % off
        hit(run(kind, kwargs={"noise_level": 1.1**0.5}, **LONG), exact())


RUNS: dict[str, dict[str, Any]] = {
    "single precision": {
        "model": solved(torch.float32),
        "spec": {"dataset": TensorDataset(X.float(), Y.float())},
    },
    "batches": {"spec": {"batch_size": 24}},
    "micro-batches": {"spec": {"batch_size": 16}, "grad_accum_steps": 2},
    "epochs": {"spec": {"batch_size": 24, "sampling": "epoch"}},
    "the whole baseline": {"baseline": "full"},
    "alone": {"chains_per_process": 1},
    "weight in a box that is wide": {"kwargs": {"bounding_box_size": 30.0}},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name == "micro-batches" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_the_exact_value_whatever_the_batches(name: str) -> None:
    hit(run(HMC, **(LONG | {"num_draws": 400} | RUNS[name])), exact(), relative=0.04)


@pytest.mark.parametrize("size", [16, N])
def test_batches_are_only_a_way_to_read_the_data(size: int) -> None:
    expected = run(HMC, num_draws=20)
    found = run(HMC, num_draws=20, spec={"batch_size": size}, grad_accum_steps=N // size)
    np.testing.assert_allclose(found.draws["loss"], expected.draws["loss"], rtol=1e-9)
    assert found.draws["loss"].nunique() > 10


@reference
def test_masks(kind: Any) -> None:
    mask = torch.tensor([[True, False, True, False]])
    hit(run(kind, param_masks={"weight": mask}, **LONG), exact(X[:, [0, 2]]), relative=0.06)
    hit(run(kind, param_masks={"*ight": True}, **LONG), exact(X), relative=0.06)


def in_bfloat16(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return ((model(x.bfloat16()).double() - y) ** 2).mean()


def test_bfloat16_parameters_move_in_single_precision() -> None:
    result = run(HMC, model=solved(torch.bfloat16), evaluate=in_bfloat16, num_draws=50, num_burnin_steps=50)
    assert result.draws["loss"].nunique() > 50
    assert 0 < result.llc < 10


class Counting(Dataset[Any]):
    """Writes down in which process a sample is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return DATA[index]


@pytest.mark.parametrize("kwargs", [{}, {"control_variate": True}], ids=["HMC", "control variate"])
def test_every_process_reads_the_data_once(kwargs: dict[str, Any], tmp_path: Path) -> None:
    kind = SGLD if kwargs else HMC
    run(
        kind, kwargs=kwargs, spec={"dataset": Counting(tmp_path / "reads"), "batch_size": 16},
        num_chains=4, num_draws=2, cores=2,
    )  # fmt: skip
    reads = pd.Series((tmp_path / "reads").read_text().split()).value_counts().tolist()
    steps = 4 * (2 + 8) * 16 if kwargs else 0  # gradients, and the measurement at the end
    prepared = 8 * 16 + N
    assert len(reads) == 2
    assert sum(reads) == 2 * N + steps + prepared


@reference
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers_and_other_processes(kind: Any, workers: int) -> None:
    expected = run(kind, num_draws=10)
    found = run(kind, num_draws=10, executor="processes", spec={"num_workers": workers, "batch_size": N})
    pd.testing.assert_frame_equal(found.draws, expected.draws, check_exact=True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(list(DATA))


def test_streams() -> None:
    spec = {"dataset": Stream(), "batch_size": 24, "num_samples": N}
    np.testing.assert_allclose(run(HMC, spec=spec).llc, run(HMC).llc, rtol=1e-9)
    short = pytest.raises(AllChainsFailedError, match="64 of num_samples=100 samples")
    with short, pytest.warns(LoaderWarning, match="an epoch of the data set had 64"):
        run(HMC, spec=spec | {"num_samples": 100}, init_loss=0.1)


@pytest.mark.parametrize(("kind", "kwargs"), [(HMC, {}), (MALA, {}), (SGLD, {"control_variate": True})])
def test_a_sampler_of_the_users_own_is_refused(kind: Any, kwargs: dict[str, Any]) -> None:
    spec = {"sampler": RandomSampler(DATA, num_samples=32), "batch_size": 16}
    with pytest.raises(InvalidArgumentError, match=r"needs every sample once.*leave sampler"):
        run(kind, kwargs=kwargs, spec=spec)


def test_settings_that_are_left_open() -> None:
    result = estimate(
        model=solved(), spec={"dataset": DATA, "batch_size": N}, sampling_method=HMC,
        optimizer_kwargs={"nbeta": NBETA, "localization": GAMMA}, num_chains=4, num_draws=500,
    )  # fmt: skip
    assert result.settings["num_burnin_steps"] < 100  # transitions cross the slow directions fast
    hit(result, exact(), relative=0.05)


def test_without_burn_in_the_step_size_goes_on_adapting() -> None:
    assert "adapting" in kinds(run(MALA))
    assert "adapting" not in kinds(run(MALA, num_burnin_steps=20))
    assert "adapting" not in kinds(run(MALA, kwargs={"adapt": False}))


def kinds(result: LLCResult) -> set[str]:
    return {one.kind for one in result.findings}


# ---- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (SGLD, {"lr": 1e-3, "integrator": "euler"}),
        (AdamSGLD, {"lr": 1e-4}),
        (HMC, {"localization": 1.0}),
    ],
)
def test_the_same_bits_in_other_processes(kind: Any, kwargs: dict[str, Any]) -> None:
    settings = {"sampling_method": kind, "optimizer_kwargs": kwargs, "num_draws": 5, "num_burnin_steps": 3}
    settings |= {"threads_per_chain": 1, "spec": {"dataset": linear_data(), "batch_size": 64}}
    here, there = estimate(**settings), estimate(cores=2, **settings)
    pd.testing.assert_frame_equal(there.draws, here.draws, check_exact=True)


class Weights:
    """Keeps the weights that it is shown at every draw."""

    def __init__(self, chains: int, draws: int) -> None:
        self.weights = np.zeros((chains, draws, 5))

    def __call__(self, chain: int, draw: int, model: torch.nn.Module) -> None:
        flat = torch.nn.utils.parameters_to_vector(model.parameters())
        self.weights[chain, draw] = flat.detach()


@pytest.mark.parametrize("kind", SAMPLERS.values(), ids=SAMPLERS)
def test_chains_start_at_the_model_as_it_was_given(kind: Any) -> None:
    options = {"integrator": "euler"} if hasattr(kind.kernel, "integrator") else {}
    weights = Weights(2, 5)
    run(kind, kwargs={"lr": 1e-4} | options, num_draws=5, callbacks=weights)
    expected = torch.nn.utils.parameters_to_vector(solved().parameters()).detach().numpy()
    np.testing.assert_array_equal(weights.weights[:, 0], np.stack([expected] * 2))
    assert len(np.unique(weights.weights[:, -1])) > 5


# ---- control variate ----------------------------------------------------------------------------


class Steps:
    """Keeps weights and batches of every draw of one chain."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.batches: list[list[Any]] = []

    def __call__(self, chain: int, model: torch.nn.Module, batch: Any) -> None:
        if chain == 1:
            self.weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
            self.batches.append(list(batch) if isinstance(batch[0], (list, tuple)) else [batch])


def slope(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradient of the mean squared error of `linear_model`."""
    columns = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    return 2 * columns.T @ (columns @ weights[:, None] - y)[:, 0] / len(x)


CONTROLLED = {
    "model": linear_model(dtype=DOUBLE),  # not at the minimum: its gradient is not 0
    "spec": {"dataset": DATA, "batch_size": 8},
    "kwargs": {"lr": 1e-3, "control_variate": True, "noise_level": 0.0},
    "num_draws": 30,
}


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_control_variate_follows_its_formula(group: int, accumulate: int) -> None:
    steps = Steps()
    result = run(callbacks=steps, chains_per_process=group, grad_accum_steps=accumulate, **CONTROLLED)
    start = steps.weights[0]
    everything = slope(start, X, Y)
    differences = []
    for number, (w, batch) in enumerate(zip(steps.weights, steps.batches, strict=True)):
        assert len(batch) == accumulate
        x, y = (torch.cat(parts) for parts in zip(*batch, strict=True))
        g = slope(w, x, y) - slope(start, x, y) + everything
        differences.append([(one - slope(w, X, Y)).norm() for one in (g, slope(w, x, y))])
        if number + 1 < len(steps.weights):
            expected = w - 1e-3 / 2 * (NBETA * g + GAMMA * (w - start))
            torch.testing.assert_close(steps.weights[number + 1], expected, rtol=1e-10, atol=1e-12)
        at_center = squared_error(CONTROLLED["model"], (x, y)).item()
        found = result.draws.query("chain == 1")["baseline"].iloc[number]
        np.testing.assert_allclose(found, at_center, rtol=1e-12)
    controlled, plain = torch.tensor(differences).square().mean(0)
    assert controlled < 0.1 * plain


def test_a_control_variate_with_epochs() -> None:
    settings = CONTROLLED | {"spec": {"dataset": DATA, "batch_size": 24, "sampling": "epoch"}}
    steps = Steps()
    run(callbacks=steps, **settings)
    whole = Steps()
    run(callbacks=whole, **(settings | {"spec": {"dataset": DATA, "batch_size": N, "sampling": "epoch"}}))
    plain = Steps()
    kwargs = {"kwargs": CONTROLLED["kwargs"] | {"control_variate": False}}
    run(callbacks=plain, **(settings | kwargs))
    error, large = ((one.weights[-1] - whole.weights[-1]).norm() for one in (steps, plain))
    assert 0 < error < 0.3 * large


def test_a_control_variate_counts_in_the_predicted_bias() -> None:
    kwargs = {"lr": 1e-3}
    spec = {"batch_size": 8}
    plain = run(kwargs=kwargs, spec=spec, num_draws=50)
    controlled = run(kwargs=kwargs | {"control_variate": True}, spec=spec, num_draws=50)
    assert controlled.predicted_bias.minibatch < 0.5 * plain.predicted_bias.minibatch


# ---- the five, with all that they take ----------------------------------------------------------


def on_all_data(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return squared_error(model, (X, Y))


def exact_with_decay(decay: float, columns: list[int]) -> float:
    """λ with a prior at 0, of a model of which only some columns move."""
    phi, w = design(), torch.cat([solved().weight[0], solved().bias]).detach()
    h = (2 * phi.T @ phi / N)[columns][:, columns]
    eye = torch.eye(len(columns), dtype=DOUBLE)
    precision = NBETA * h + (GAMMA + decay) * eye
    offset = -decay * torch.linalg.solve(precision, w[columns])
    return float(NBETA / 2 * ((h @ torch.linalg.inv(precision)).trace() + offset @ h @ offset))


@pytest.mark.parametrize(
    "kind",
    [
        devsample.SGHMC,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (SGLD, devsample.SGNHT, RMSPropSGLD)),
    ],
)
def test_the_exact_value_with_localization_decay_and_masks(kind: Any) -> None:
    def go(decay: float) -> LLCResult:
        return run(
            kind, evaluate=on_all_data, param_masks={"weight": torch.tensor([[True, True, False, True]])},
            kwargs={"lr": 2e-3, "weight_decay": decay}, spec={"batch_size": 1}, num_chains=24, num_draws=150,
            num_burnin_steps=300, num_steps_bw_draws=10, chains_per_process=24,
        )  # fmt: skip

    truth = exact_with_decay(4.0, [0, 1, 3])
    found = go(4.0)
    assert abs(z(found, truth)) < 4
    assert found.se < 0.03 * truth
    assert abs(z(go(0.0), truth)) > 4  # decay matters


@pytest.mark.parametrize("kind", STOCHASTIC.values(), ids=STOCHASTIC)
@pytest.mark.parametrize("group", [1, 2])
def test_no_entry_leaves_the_box_and_none_that_is_masked_moves(kind: Any, group: int) -> None:
    weights = Weights(2, 100)
    mask = torch.tensor([[True, False, True, True]])
    run(
        kind, kwargs={"lr": 1e-2, "bounding_box_size": 0.05}, param_masks={"weight": mask}, callbacks=weights,
        num_draws=100, num_burnin_steps=10, chains_per_process=group, spec={"batch_size": 8},
    )  # fmt: skip
    center = torch.nn.utils.parameters_to_vector(solved().parameters()).detach().numpy()
    offset = np.abs(weights.weights - center)
    assert (offset[..., [1, 4]] == 0).all()
    assert offset.max() <= 0.05 + 1e-12
    assert (offset[..., [0, 2, 3]].max((0, 1)) > 0.03).all()


# ---- what burn-in adapts ------------------------------------------------------------------------


def checkpoint(folder: Path, chain: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "chains" / str(chain) / "checkpoint.safetensors")


@pytest.mark.parametrize("kind", [RMSPropSGLD, AdamSGLD])
@pytest.mark.parametrize("group", [1, 2])
def test_the_preconditioner_freezes_in_the_middle_of_burn_in(kind: Any, group: int, tmp_path: Path) -> None:
    kwargs = {"lr": 1e-3, "noise_level": 0.0}
    model = linear_model(dtype=DOUBLE)
    result = run(
        kind, kwargs=kwargs, model=model, evaluate=on_all_data, num_burnin_steps=7, num_draws=20,
        chains_per_process=group, run_dir=tmp_path / "run",
    )  # fmt: skip
    kernel = kind.kernel(nbeta=NBETA, localization=GAMMA, **kwargs)
    center = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    position = center[None].clone()
    buffers = kernel.init(position)
    for _ in range(4):
        kernel.step(position, slope(position[0], X, Y)[None], center, torch.zeros_like(position), buffers)
    kernel.freeze(buffers)
    for chain in (0, 1):
        found = checkpoint(tmp_path / "run", chain)
        assert "buffer.second_moment" not in found
        torch.testing.assert_close(found["buffer.scale"], buffers["scale"][0], rtol=1e-10, atol=0)
        assert found["buffer.count"].item() == 27
    assert "adapting" not in kinds(result)


@pytest.mark.parametrize(
    ("options", "burnin", "remedy"),
    [({}, 0, "give num_burnin_steps"), ({"preconditioner": "moving"}, 10, 'take preconditioner="frozen"')],
)
def test_a_preconditioner_that_goes_on_moving(
    options: dict[str, Any], burnin: int, remedy: str, tmp_path: Path
) -> None:
    kwargs = {"lr": 1e-4} | options
    result = run(RMSPropSGLD, kwargs=kwargs, num_burnin_steps=burnin, run_dir=tmp_path / "run")
    (finding,) = (one for one in result.findings if one.kind == "adapting")
    assert finding.severity == "caution"
    assert remedy in finding.text
    assert "buffer.second_moment" in checkpoint(tmp_path / "run", 0)


# ---- autocast -----------------------------------------------------------------------------------


def by_itself(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return squared_error(model, batch)


class Losses:
    """Computes the loss of every draw again, with a model of its own, and keeps the largest difference."""

    def __init__(self) -> None:
        self.difference, self.values = 0.0, set[float]()

    def __call__(self, chain: int, loss: float, model: torch.nn.Module, batch: Any) -> None:
        other = torch.nn.Linear(4, 1)
        other.load_state_dict(model.state_dict())
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            again = squared_error(other, batch).item()
        self.difference = max(self.difference, abs(again - loss))
        self.values.add(loss)


@pytest.mark.parametrize("around", [False, True], ids=["", "called within autocast"])
@pytest.mark.parametrize("changes", [{"use_amp": True}, {"evaluate": by_itself}], ids=["use_amp", "evaluate"])
def test_autocast_computes_with_the_weights_of_the_step(changes: dict[str, Any], around: bool) -> None:
    """torch keeps its casts of weights to the end of the outermost block."""
    losses = Losses()
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        estimate(
            callbacks=losses, optimizer_kwargs={"lr": 1e-2}, num_draws=20, threads_per_chain=1, **changes
        )
    assert losses.difference < 1e-6
    assert len(losses.values) == 40


def test_the_chosen_step_is_smaller_where_a_sampler_has_a_bias_of_its_own():
    steps = {}
    for name in ("SGLD", "AdamSGLD"):
        chosen = run(sampling_method=SAMPLERS[name], optimizer_kwargs={"nbeta": 20.0}, num_draws=5)
        steps[name] = chosen.settings["lr"]
    bias = SAMPLERS["AdamSGLD"].kernel(lr=1.0, nbeta=1.0).step_bias
    assert bias > 10
    assert steps["AdamSGLD"] == pytest.approx(steps["SGLD"] / bias)
