"""Baselines from the losses of all samples at w*, which are kept by index; and when they are not used."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from devsample import HMC, LLCResult, Precision
from devsample.baseline import FILE, CenterLosses
from devsample.seeds import IndexBlocks, Role, chain_keys
from tests.factories import Augmented, estimate, linear_data, linear_model, mlp

DOUBLE = torch.float64
N = 64
X, Y = (one[:N] for one in linear_data(dtype=DOUBLE).tensors)
WEIGHTS = torch.arange(N) % 5 / 2.0  # some are 0
DATA = TensorDataset(X, Y, WEIGHTS.double())
SINGLE = TensorDataset(X.float(), Y.float(), WEIGHTS)
LOSSES = ((X.sum(1) - Y[:, 0]) ** 2).numpy()


def mean(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def each(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]) ** 2


def weighted(model: torch.nn.Module, batch: Any) -> Any:
    return {"loss": each(model, batch)[:, 0], "weights": batch[2]}


def counted(model: torch.nn.Module, batch: Any) -> Any:
    """The same in sums and counts, one a sample."""
    return {"loss_sum": each(model, batch)[:, 0] * batch[2], "count": batch[2]}


def weighted_mean(model: torch.nn.Module, batch: Any) -> Any:
    """The same for a whole batch, so that nothing is known of its samples."""
    return {"loss_sum": (each(model, batch)[:, 0] * batch[2]).sum(), "count": batch[2].sum()}


def run(evaluate: Any = each, *, spec: Any = None, **changes: Any) -> LLCResult:
    given = {
        "model": linear_model(dtype=DOUBLE), "spec": {"dataset": DATA, "batch_size": 8} | (spec or {}),
        "evaluate": evaluate, "optimizer_kwargs": {"lr": 1e-3, "nbeta": 20.0, "localization": 1.0},
        "threads_per_chain": 1,
    }  # fmt: skip
    return estimate(**(given | changes))


def test_means_of_kept_losses(tmp_path: Any) -> None:
    kept = CenterLosses(np.array([1.0, 2.0, 6.0]))
    assert kept.mean([0, 2, 2, 1]) == 15 / 4
    weighted = CenterLosses(np.array([1.0, 4.0, 0.0]), np.array([1.0, 2.0, 0.0]))
    assert weighted.mean(iter([0, 1, 1, 2])) == 9 / 5
    assert math.isnan(weighted.mean([2]))
    for one in (kept, weighted):
        one.save(tmp_path)
        found = CenterLosses.load(tmp_path)
        np.testing.assert_array_equal(found.sums, one.sums)
        assert (found.weights is None) == (one.weights is None)
    np.testing.assert_array_equal(found.weights, weighted.weights)


LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "together": {"chains_per_process": 2},
    "micro-batches": {"grad_accum_steps": 3, "num_steps_bw_draws": 2, "num_burnin_steps": 3},
    "together, micro-batches": {"grad_accum_steps": 3, "chains_per_process": 2},
    "a part moves": {"param_masks": {"bias": True}},
    "no ragged batch": {"spec": {"batch_size": 7}},
    "rounds": {"until": Precision(se=1e-9, max_draws=20)},
    "observed": {"observables": ["second_batch", "full_loss", "mala_acceptance"]},
}
PAIRS = {"samples": (each, mean), "weights": (weighted, weighted_mean), "sums": (counted, weighted_mean)}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_kept_losses_give_what_a_forward_pass_gives(pair: Any, layout: dict[str, Any]) -> None:
    kept, forward = run(pair[0], **layout), run(pair[1], **layout)
    assert kept.settings["baseline_cache"]
    assert not forward.settings["baseline_cache"]
    np.testing.assert_allclose(kept.draws["loss"], forward.draws["loss"], rtol=1e-12)
    np.testing.assert_allclose(kept.draws["baseline"], forward.draws["baseline"], rtol=1e-12)
    assert kept.draws["baseline"].nunique() > 10


def test_the_baseline_is_the_mean_over_the_samples_of_the_draw() -> None:
    result = run(grad_accum_steps=2)
    for number, key in enumerate(chain_keys(0, 2)):
        samples = IndexBlocks(key, Role.ORDER, N, 16)
        draws = result.draws[result.draws["chain"] == number]
        by_hand = [LOSSES[samples(step)].mean() for step in draws["step"]]
        np.testing.assert_allclose(draws["baseline"], by_hand, rtol=1e-13)


def test_single_precision_and_autocast() -> None:
    given = {"model": linear_model(), "spec": {"dataset": SINGLE}}
    for extra in ({}, {"autocast_dtype": torch.bfloat16}):
        kept, forward = run(each, **given, **extra), run(mean, **given, **extra)
        assert kept.settings["baseline_cache"], extra
        np.testing.assert_array_equal(kept.draws["loss"], forward.draws["loss"])
        np.testing.assert_allclose(kept.draws["baseline"], forward.draws["baseline"], rtol=5e-7)


def test_the_layout_changes_no_bit_of_a_baseline() -> None:
    alone, together = run(num_chains=4), run(num_chains=4, chains_per_process=4)
    np.testing.assert_array_equal(alone.draws["baseline"], together.draws["baseline"])


@pytest.mark.parametrize(("evaluate", "passes"), [(each, 1), (mean, 2)])
def test_there_is_no_forward_pass_at_a_draw(tmp_path: Any, evaluate: Any, passes: int) -> None:
    calls: list[str] = []

    def noted(model: torch.nn.Module, batch: Any) -> Any:
        calls.append("evaluate")
        return evaluate(model, batch)

    def drawn(draw: int) -> None:
        calls.append("draw")

    result = run(noted, callbacks=drawn, run_dir=tmp_path / "run", num_draws=30, num_chains=1)
    between = calls[calls.index("draw") : len(calls) - calls[::-1].index("draw")]
    assert between.count("draw") == 30
    assert between.count("evaluate") == 29 * passes
    assert result.provenance["gradients"] == 30
    assert result.provenance["forwards"] == 30 * (passes - 1)
    assert (tmp_path / "run" / FILE).exists() == (passes == 1)


# ---- when they are not used ---------------------------------------------------------------------


def compared(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A loss that depends on who else is in the batch."""
    losses = each(model, batch)
    return (losses - losses.mean()) ** 2


def by_feature(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """As many losses as samples, by chance: of the features of a batch of 4."""
    return (((model(batch[0]) - batch[1]) * batch[0]) ** 2).mean(0)


class Fresh(Dataset[Any]):
    """Adds noise that no seed reaches to one item in eight."""

    def __init__(self) -> None:
        self.random = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        random = np.random.default_rng()
        return X[index] + (random.normal() if index % 8 == 0 else 0.0), Y[index]


class Growing(Dataset[Any]):
    """Items that depend on the epoch."""

    epoch = 0

    def __len__(self) -> int:
        return N

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return X[index] + 1e-3 * self.epoch, Y[index]


class Numbered(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = torch.nn.BatchNorm1d(4, dtype=DOUBLE), linear_model(dtype=DOUBLE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x))


class Dropped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.last = torch.nn.Dropout(), linear_model(dtype=DOUBLE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(x))


KWARGS = {"lr": 1e-3, "nbeta": 20.0, "localization": 1.0}
OTHERWISE: dict[str, dict[str, Any]] = {
    "the whole baseline": {"baseline": "full"},
    "a given one": {"init_loss": 0.1},
    "epochs": {"spec": {"sampling": "epoch"}},
    "a sampler of one's own": {"spec": {"sampler": list(range(N))}},
    "a stream": {"spec": {"dataset": Numbered(), "num_samples": N}},
    "augmentation": {"spec": {"dataset": Augmented()}, "model": linear_model()},
    "fresh noise": {"spec": {"dataset": Fresh()}},
    "items of an epoch": {"spec": {"dataset": Growing()}},
    "a loss of the batch": {"evaluate": compared},
    "losses of something else": {"evaluate": by_feature, "spec": {"batch_size": 4}},
    "batch norm": {"model": Normed(), "train_mode": True},
    "dropout": {"model": Dropped(), "train_mode": True},
    "half precision": {"evaluate": lambda model, batch: each(model, batch).bfloat16()},
    "all data": {"sampling_method": HMC, "optimizer_kwargs": KWARGS | {"num_leapfrog_steps": 2}},
    "control variate": {"optimizer_kwargs": KWARGS | {"control_variate": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
@pytest.mark.filterwarnings("ignore::devsample.errors.LoaderWarning")
def test_else_the_baseline_is_computed(name: str) -> None:
    result = run(num_draws=3, **OTHERWISE[name])
    assert not result.settings["baseline_cache"]
    assert len(result.draws) == 6


def test_a_control_variate_has_the_same_baseline() -> None:
    plain = run(num_draws=1)
    anchored = run(num_draws=1, optimizer_kwargs=KWARGS | {"control_variate": True})
    np.testing.assert_allclose(anchored.draws["baseline"], plain.draws["baseline"], rtol=1e-12)


def test_data_that_are_not_read_whole_have_no_kept_losses(monkeypatch: Any) -> None:
    monkeypatch.setattr("devsample.prepare.FULL_PASS_SAMPLES", N - 1)
    assert not run(num_draws=3).settings["baseline_cache"]
    monkeypatch.setattr("devsample.prepare.FULL_PASS_SAMPLES", N)
    assert run(num_draws=3).settings["baseline_cache"]


def test_plain_items_are_compared_field_by_field() -> None:
    """Batches of a collate function of one's own, with names in them."""

    def collate(items: Any) -> Any:
        x, y, _ = (torch.stack(column) for column in zip(*items, strict=True))
        return {"x": x, "rest": (y, ["name"] * len(items), None)}

    def evaluate(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return each(model, (batch["x"], batch["rest"][0]))

    found, expected = run(evaluate, spec={"collate_fn": collate}), run()
    assert found.settings["baseline_cache"]
    np.testing.assert_array_equal(found.draws["baseline"], expected.draws["baseline"])


def test_a_frozen_model_is_still_found() -> None:
    """Its losses differ from the kept ones by rounding only."""
    result = run(
        model=linear_model(), spec={"dataset": SINGLE, "batch_size": 11}, grad_accum_steps=7, num_draws=60,
        optimizer_kwargs=KWARGS | {"lr": 1e-30},
    )  # fmt: skip
    assert result.settings["baseline_cache"]
    gap = (result.draws["loss"] - result.draws["baseline"]).abs().max()
    assert gap > 2**-23 * result.draws["baseline"].max()
    assert result.verdict == "reject"
    assert result.reasons[0].startswith("Nothing moves")


def test_a_network_that_fits_well_keeps_the_forward_pass_or_its_value() -> None:
    """Where residuals are small the rounding of the outputs is large in the loss."""
    model = mlp(4, 8, 1)
    with torch.no_grad():
        y = model(X.float()) + 1e-4 * Y.float()
    data = {"dataset": TensorDataset(X.float(), y)}
    one, other = (
        run(e, model=model, spec=data, optimizer_kwargs=KWARGS | {"nbeta": 1e4}) for e in (each, mean)
    )
    np.testing.assert_allclose(one["llc/mean"], other["llc/mean"], atol=2e-3)
