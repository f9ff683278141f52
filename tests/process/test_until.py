"""Runs that go on in rounds until they are precise enough: same draws as in one go, and a right end."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from devsample import (
    HMC,
    SGNHT,
    LoaderSpec,
    Precision,
    RMSPropSGLD,
    estimate_learning_coeff_with_summary,
)
from devsample.errors import InvalidArgumentError


class Endless(IterableDataset):
    """Pairs in an order of their own."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(7)
        while True:
            x = torch.randn(3, generator=generator)
            yield x, x.sum()[None]


def data():
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def square(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def run(spec=None, **changes):
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    settings = {
        "loader_spec": spec or LoaderSpec(data(), batch_size=16),
        "evaluate": square,
        "optimizer_kwargs": {"lr": 1e-3, "localization": 1.0, "nbeta": 40.0},
        "num_chains": 2,
        "num_draws": 40,
        "num_burnin_steps": 10,
        "seed": 3,
        "verbose": False,
        "threads_per_chain": 1,
    }
    return estimate_learning_coeff_with_summary(model, **(settings | changes))


ROUNDS = Precision(se=1e-9, max_draws=150)  # 40, 80, 150
WAYS = {
    "plain": {},
    "stacked": {"chains_per_process": 2},
    "processes": {"cores": 2},
    "thinned": {"num_steps_bw_draws": 3},
    "epochs": {"spec": LoaderSpec(data(), batch_size=16, sampling="epoch")},
    "stream": {"spec": LoaderSpec(Endless(), batch_size=16, num_samples=200)},
    "workers": {"spec": LoaderSpec(data(), batch_size=16, num_workers=1)},
    "thermostat": {"sampling_method": SGNHT},
    "preconditioned": {"sampling_method": RMSPropSGLD},
    "control variate": {
        "optimizer_kwargs": {"lr": 1e-3, "localization": 1.0, "nbeta": 40.0, "control_variate": True}
    },
    "hmc": {"sampling_method": HMC},
    "observables": {"observables": ("distance", "gradient_norm")},
}


@pytest.mark.parametrize("way", WAYS)
def test_rounds_draw_what_one_run_draws(way):
    changes = WAYS[way]
    whole = run(**changes, num_draws=150)
    rounds = run(**changes, until=ROUNDS)
    assert len(rounds.draws) == 300
    assert rounds.draws.equals(whole.draws)
    assert rounds.llc == whole.llc
    assert rounds["loss/trace"].shape == (2, 150)
    assert rounds.settings["num_draws"] == 150
    assert list(rounds.chains["steps"]) == list(whole.chains["steps"])


def test_it_ends_when_the_standard_error_is_reached():
    first = run(num_chains=4, num_draws=60)
    goal = first.se / 2.5
    found = run(num_chains=4, num_draws=60, until=Precision(se=goal))
    assert found.se <= goal
    assert found.ess >= 100
    assert found.settings["until"]["ended"] == "reached"
    assert 4 * 60 * 3 < len(found.draws) < 4 * 60 * 20
    assert not any(one.kind == "precision" for one in found.findings)


def test_a_relative_error_is_that_of_the_estimate():
    found = run(num_chains=4, num_draws=60, until=Precision(relative=0.1))
    assert found.se <= 0.1 * found.llc
    assert found.settings["until"]["goal"] == pytest.approx(0.1 * found.llc)


def test_what_was_not_reached_is_said():
    found = run(until=Precision(se=1e-6, max_draws=60))
    assert found.estimate.num_draws == 60
    (finding,) = [one for one in found.findings if one.kind == "precision"]
    assert "max_draws ended the run" in finding.text
    assert found.verdict != "trust"


def test_no_round_starts_after_the_time_is_over():
    found = run(until=Precision(se=1e-6, max_seconds=1.0))
    assert found.settings["until"]["ended"] == "max_seconds"
    assert 40 <= found.estimate.num_draws < 100_000


def test_a_diverged_chain_does_not_go_on():
    with pytest.raises(Exception, match="diverged"):
        run(optimizer_kwargs={"lr": 10.0, "nbeta": 1e4}, num_draws=400, until=ROUNDS_LONG)


ROUNDS_LONG = Precision(se=1e-3, max_draws=800)


def test_records_come_once_each():
    seen = []
    found = run(until=ROUNDS, on_records=seen.append)
    rows = np.concatenate([frame[["chain", "draw"]].to_numpy() for frame in seen])
    assert len(rows) == len(np.unique(rows, axis=0)) == len(found.draws)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"until": 0.1}, "until: expected devsample.Precision"),
        ({"until": Precision(se=0.1, max_draws=20)}, "max_draws=20 is less than num_draws=40"),
        ({"until": Precision(se=0.1), "sampling_method": torch.optim.SGD}, "SGD samples nothing"),
    ],
)
def test_what_cannot_be_is_an_error_at_once(changes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        run(**changes)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"se": 0.0},
        {"se": math.nan},
        {"relative": -1.0},
        {"se": "small"},
        {"se": True},
        {"se": 0.1, "max_draws": 1.5},
        {"se": 0.1, "max_draws": 0},
        {"se": 0.1, "max_seconds": 0.0},
        {"se": math.inf},
    ],
)
def test_a_precision_is_checked(given):
    with pytest.raises(InvalidArgumentError, match="until: "):
        Precision(**given)
