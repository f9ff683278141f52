"""A chain's numbers depend on (seed, chain, data, settings), not on where and how it runs."""

import itertools
import random
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from tests.factories import (
    Augmented,
    classes,
    cross_entropy,
    digits,
    estimate,
    linear_data,
    linear_model,
    mlp,
    small_conv_net,
    squared_error,
)

MODELS = {
    "digits": (lambda: mlp(64, 32, 10), digits),
    "mlp": (lambda: mlp(784, 128, 10), lambda: classes(512, 784)),
    "conv": (small_conv_net, lambda: classes(512, 1, 12, 12)),
}
LAYOUTS = [*itertools.product((1, 2), (0, 1, 2))]
CHOSEN = {("digits", 1, 2), ("digits", 2, 2), ("mlp", 2, 0), ("conv", 2, 1)}


def draws_of(model: str, cores: int, num_workers: int) -> pd.DataFrame:
    """50 draws of two chains at batch size 64."""
    make_model, make_data = MODELS[model]
    result = estimate(
        model=make_model(),
        evaluate=cross_entropy,
        spec={"dataset": make_data(), "batch_size": 64, "num_workers": num_workers},
        optimizer_kwargs={"lr": 1e-5, "localization": 10.0},
        num_draws=50,
        cores=cores,
        seed=7,
    )
    return result.draws


@pytest.fixture(scope="module")
def in_place():
    """Draws of each model in the caller's process without loader workers, made once."""
    known: dict[str, pd.DataFrame] = {}

    def get(model: str) -> pd.DataFrame:
        if model not in known:
            known[model] = draws_of(model, 1, 0)
        return known[model]

    return get


def same_bits(left: pd.DataFrame, right: pd.DataFrame) -> None:
    assert len(left) > 0
    pd.testing.assert_frame_equal(left, right, check_exact=True)


@pytest.mark.parametrize(
    ("model", "cores", "num_workers"),
    [
        pytest.param(model, *layout, marks=() if (model, *layout) in CHOSEN else pytest.mark.slow)
        for model in MODELS
        for layout in LAYOUTS
    ],
)
def test_bit_identical_draws_for_any_layout(in_place, model: str, cores: int, num_workers: int) -> None:
    expected = in_place(model)
    assert len(expected) == 100
    assert expected["loss"].nunique() == 100
    same_bits(draws_of(model, cores, num_workers), expected)


def test_another_seed_gives_other_draws() -> None:
    one, other = (estimate(seed=seed).draws for seed in (0, 1))
    assert not set(one["loss"]) & set(other["loss"])


def test_chains_do_not_share_draws() -> None:
    draws = estimate(num_chains=3).draws
    assert draws["loss"].nunique() == len(draws)


# --- workers and random augmentation -------------------------------------------------------------


@pytest.fixture(scope="module")
def augmented() -> pd.DataFrame:
    return estimate(spec={"dataset": Augmented()}).draws


def test_augmentation_changes_the_losses(augmented: pd.DataFrame) -> None:
    assert not set(augmented["loss"]) & set(estimate().draws["loss"])


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_augmentation_is_the_same_in_workers(augmented: pd.DataFrame, method: str) -> None:
    spec = {"dataset": Augmented(), "num_workers": 2, "multiprocessing_context": method}
    same_bits(estimate(executor="processes", spec=spec).draws, augmented)


def test_augmentation_does_not_depend_on_the_callers_generators(augmented: pd.DataFrame) -> None:
    torch.manual_seed(123)
    np.random.seed(4)  # noqa: NPY002
    random.seed(5)
    same_bits(estimate(spec={"dataset": Augmented()}).draws, augmented)


def noisy_error(model: torch.nn.Module, batch: object) -> torch.Tensor:
    """A loss with torch's, numpy's and random's global generators in it."""
    x, y = batch
    scale = float(np.random.rand()) + random.random()  # noqa: NPY002
    return squared_error(model, (x + 0.1 * scale * torch.randn_like(x), y))


def test_an_evaluate_that_draws_random_numbers() -> None:
    torch.manual_seed(1)
    here = estimate(evaluate=noisy_error).draws
    torch.manual_seed(2)
    again = estimate(evaluate=noisy_error).draws
    elsewhere = estimate(evaluate=noisy_error, cores=2).draws
    same_bits(again, here)
    same_bits(elsewhere, here)
    assert not set(here["loss"]) & set(estimate().draws["loss"])


# --- which chains run together -------------------------------------------------------------------


@pytest.mark.parametrize("group", [2, 3])
def test_chains_in_lockstep_equal_chains_alone(group: int) -> None:
    double = {
        "model": linear_model(dtype=torch.float64),
        "spec": {"dataset": linear_data(dtype=torch.float64), "batch_size": 16},
        "num_chains": 3,
        "num_draws": 50,
    }
    alone = estimate(chains_per_process=1, **double).draws
    together = estimate(chains_per_process=group, **double).draws
    assert list(together["chain"]) == list(alone["chain"])
    np.testing.assert_allclose(together["loss"], alone["loss"], rtol=1e-9)
    np.testing.assert_allclose(together["baseline"], alone["baseline"], rtol=1e-9)


def test_a_chain_does_not_depend_on_how_many_there_are() -> None:
    fixed = {"threads_per_chain": 1}
    few = estimate(num_chains=1, **fixed).draws
    many = estimate(num_chains=3, **fixed).draws
    same_bits(many[many["chain"] == 0], few)


def test_a_chain_with_a_seed_of_its_own_is_the_same_at_any_place() -> None:
    fixed = {"threads_per_chain": 1}
    three = estimate(num_chains=3, seed=[5, 9, 7], **fixed)
    two = estimate(num_chains=2, seed=[7, 5], **fixed)
    np.testing.assert_array_equal(three["loss/trace"][[2, 0]], two["loss/trace"])
    assert list(two.chains["seed"]) == [7, 5]


def test_a_run_without_a_seed_can_be_repeated() -> None:
    first = estimate(seed=None)
    other = estimate(seed=None)
    assert first.settings["seed"] != other.settings["seed"]
    same_bits(estimate(seed=first.settings["seed"]).draws, first.draws)


# --- batches and noise ---------------------------------------------------------------------------


def test_micro_batches_equal_one_large_batch() -> None:
    double = {"model": linear_model(dtype=torch.float64), "num_draws": 50}
    data = linear_data(dtype=torch.float64)
    micro = estimate(grad_accum_steps=4, spec={"dataset": data, "batch_size": 16}, **double)
    large = estimate(grad_accum_steps=1, spec={"dataset": data, "batch_size": 64}, **double)
    for trace in ("loss/trace", "llc/trace"):
        np.testing.assert_allclose(micro[trace], large[trace], rtol=1e-12, atol=1e-13)


def without_data(model: torch.nn.Module, batch: object) -> torch.Tensor:
    return model.weight.square().sum() + model.bias.square().sum()


@pytest.mark.parametrize(
    "spec",
    [
        {"sampling": "epoch"},
        {"sampling": "sequential", "batch_size": 50},
        {"batch_size": 3},
        {"dataset": Augmented()},
    ],
    ids=["epoch", "sequential", "other batches", "augmented"],
)
def test_noise_does_not_depend_on_the_loader(spec: dict) -> None:
    kwargs = {"lr": 1e-3, "nbeta": 10.0, "localization": 1.0}
    expected = estimate(evaluate=without_data, optimizer_kwargs=kwargs)
    found = estimate(evaluate=without_data, optimizer_kwargs=kwargs, spec=spec)
    np.testing.assert_array_equal(found["loss/trace"], expected["loss/trace"])
    assert len(np.unique(found["loss/trace"])) == 19  # only the first draws, at w*, are the same


# --- fresh processes -----------------------------------------------------------------------------

PROGRAM = """
import sys

import torch
from torch.utils.data import TensorDataset

from devsample import LoaderSpec, estimate_learning_coeff

torch.manual_seed(1)
x = torch.randn(200, 6)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
with torch.no_grad():
    data = TensorDataset(x, model(x).argmax(1))
cores, workers = map(int, sys.argv[1:])
if workers:  # what this process has drawn so far is nobody's business
    torch.randn(1000)
llc = estimate_learning_coeff(
    model,
    loader_spec=LoaderSpec(data, batch_size=32, num_workers=workers),
    evaluate=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer_kwargs=dict(lr=1e-4, localization=10.0),
    num_chains=3,
    num_draws=20,
    cores=cores,
    seed=0,
    verbose=False,
)
assert type(llc) is float
print(llc.hex())
"""


def value_in_a_fresh_process(cores: int, workers: int) -> str:
    """What the program prints: the estimate, exactly."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(cores), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_float_is_the_same_in_fresh_processes_of_any_layout() -> None:
    values = [value_in_a_fresh_process(*layout) for layout in ((1, 0), (2, 1))]
    assert values[0] == values[1]
    assert float.fromhex(values[0]) != 0


@pytest.mark.slow
def test_a_float_is_the_same_in_more_layouts() -> None:
    layouts = ((1, 0), (1, 0), (2, 0), (3, 2), (1, 2))
    assert len({value_in_a_fresh_process(*layout) for layout in layouts}) == 1
