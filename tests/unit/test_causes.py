"""Checks that find a cause: what each sees, what it leaves alone, and what it says to do."""

import numpy as np
import pytest

from devsample.causes import (
    check_large_step,
    check_moves,
    check_noise,
    check_order,
    check_precision_of_weights,
    check_samples,
    check_shared,
    check_small_step,
    check_training,
)
from devsample.diagnostics import describe
from devsample.evidence import Evidence

SETTINGS = {
    "sampler": "SGLD",
    "lr": 1e-3,
    "nbeta": 100.0,
    "localization": 1.0,
    "speed": 1.0,
    "num_burnin_steps": 100,
    "num_steps_bw_draws": 1,
    "num_samples": 640,
    "batch_size": 64,
    "grad_accum_steps": 1,
    "sampling": "iid",
    "baseline": "paired",
    "weights_dtype": "float32",
    "in_training": (),
}


def evidence(baseline=None, *, curvature=2.0, moved=1.0, draws=300, **settings):
    """A healthy run's evidence, with something changed."""
    rng = np.random.default_rng(0)
    if baseline is None:
        baseline = 0.5 + 0.1 * rng.normal(size=(4, draws))
    llc = 4 + rng.normal(size=baseline.shape)
    loss = baseline + llc / 100
    values = SETTINGS | settings
    return Evidence(llc, loss, baseline, describe(llc), (), None, values, curvature=curvature, moved=moved)


CHECKS = (
    check_samples,
    check_training,
    check_precision_of_weights,
    check_moves,
    check_shared,
    check_order,
    check_small_step,
    check_large_step,
)


@pytest.mark.parametrize("check", CHECKS)
def test_a_healthy_run_shows_nothing(check):
    assert check(evidence()) is None
    assert check(evidence(curvature=None, moved=None)) is None
    assert check(evidence(sampler="RMSPropSGLD", sampling="stream")) is None


def test_training_mode_names_who_set_it():
    by_argument = check_training(evidence(in_training=("dropout",), train_mode=True))
    assert "Dropout ran in training mode (train_mode=True)" in by_argument.text
    by_evaluate = check_training(evidence(in_training=("dropout", "batch norm")))
    assert "evaluate sets model.train()" in by_evaluate.text
    assert by_evaluate.severity == "caution"


def test_half_precision_that_rounds_back():
    found = check_precision_of_weights(evidence(weights_dtype="bfloat16", moved=0.1))
    assert found.severity == "reject"
    assert "Only 10 %" in found.text
    assert "float32" in found.text
    assert check_precision_of_weights(evidence(weights_dtype="bfloat16", moved=0.9)) is None
    assert check_precision_of_weights(evidence(moved=0.1)) is None


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_batches_that_two_chains_share(share):
    rng = np.random.default_rng(1)
    baseline = rng.normal(size=(4, 200))
    baseline[3] = share * baseline[1] + np.sqrt(1 - share**2) * baseline[3]
    found = check_shared(evidence(baseline))
    assert found.severity == "reject"
    assert "same batches" in found.text
    assert check_shared(evidence(baseline[:3])) is None
    assert check_shared(evidence(baseline[1:2])) is None
    assert check_shared(evidence(np.ones((4, 200)))) is None


def dealt(rng, chains, epochs, size, between=1, offset=0):
    """Losses of batches dealt without replacement, of which every ``between``-th is drawn."""
    rows = []
    for _ in range(chains):
        losses = rng.normal(size=size)
        order = np.concatenate([rng.permutation(losses) for _ in range(epochs)])
        rows.append(order[offset::between])
    return np.array(rows)


@pytest.mark.parametrize(("between", "offset"), [(1, 0), (1, 4), (2, 1)])
def test_batches_dealt_by_epochs(between, offset):
    rng = np.random.default_rng(2)
    baseline = dealt(rng, 4, 40 * between, 10, between, offset)
    found = check_order(evidence(baseline, num_steps_bw_draws=between))
    assert found.kind == "epoch order"
    assert "epoch" in found.text
    assert check_order(evidence(baseline, num_steps_bw_draws=between, sampling="epoch")) is None


def test_sorted_data():
    level = np.sin(np.arange(600) / 60)
    baseline = level + 0.3 * np.random.default_rng(3).normal(size=(2, 600))
    found = check_order(evidence(baseline, sampling="stream"))
    assert found.kind == "data order"
    assert "shuffle" in found.text


def test_independent_batches_are_hardly_ever_taken_for_ordered():
    rng = np.random.default_rng(4)
    wrong = sum(check_order(evidence(rng.normal(size=(4, 200)))) is not None for _ in range(500))
    wrong += sum(check_order(evidence(rng.exponential(size=(1, 100)))) is not None for _ in range(500))
    wrong += sum(check_shared(evidence(rng.normal(size=(8, 50)))) is not None for _ in range(500))
    assert wrong == 0


def test_a_step_too_small_says_how_far_the_chains_came():
    found = check_small_step(evidence(lr=1e-6))
    assert found.severity == "reject"
    assert "400 steps of lr = 1e-06 are 0.0402 relaxation times" in found.text or "0.04 relax" in found.text
    assert "raise lr" in found.text
    assert "0.0015" in found.text  # 0.3/201
    short = check_small_step(evidence(draws=4, num_burnin_steps=0, lr=2e-3))
    assert "raise num_draws and num_burnin_steps" in short.text


@pytest.mark.parametrize(("lr", "severity"), [(1.2e-2, "caution"), (1.6e-2, "reject")])
def test_a_step_too_large_says_what_fits(lr, severity):
    found = check_large_step(evidence(lr=lr))
    assert found.severity == severity
    assert "0.0015" in found.text


def test_weights_that_do_not_move():
    still = evidence()
    frozen = Evidence(
        np.zeros((2, 50)),
        still.baseline[:2, :50],
        still.baseline[:2, :50],
        still.estimate,
        (),
        None,
        SETTINGS,
    )
    found = check_moves(frozen)
    assert found.kind == "frozen"
    assert "requires_grad" in found.text


def test_noise_of_another_size_is_another_temperature():
    found = check_noise(evidence(noise_level=0.5))
    assert "0.25 times as hot" in found.text
    assert check_noise(evidence(noise_level=1.0)) is None


@pytest.mark.parametrize("sampler", ["SGLD", "SGHMC", "SGNHT", "RMSPropSGLD"])
def test_steps_are_checked_for_samplers_whose_relaxation_is_known(sampler):
    assert check_large_step(evidence(sampler=sampler, lr=1.6e-2)) is not None
    assert check_small_step(evidence(sampler=sampler, lr=1e-6)) is not None
    assert check_small_step(evidence(sampler="AdamSGLD", step_bias=18.0, lr=1e-6)) is not None
    # What Adam's steps do at lr of this size is in their predicted bias; others are not known.
    assert check_large_step(evidence(sampler="AdamSGLD", step_bias=18.0, lr=1.6e-2)) is None
    assert check_large_step(evidence(sampler="HMC", lr=1.6e-2)) is None
