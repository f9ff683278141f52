"""Chains that are computed at once equal chains that are computed alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from devsample import LLCResult
from devsample.errors import AllChainsFailedError
from devsample.samplers import SAMPLERS
from tests.factories import classes, cross_entropy, estimate, linear_data, linear_model, mlp, small_conv_net

STEPS = 50
DOUBLE = torch.float64


def both_ways(*, cores: int = 1, chains: int = 3, **changes: Any) -> tuple[LLCResult, LLCResult]:
    """The same run with its chains alone and with its chains together."""
    settings = {"num_chains": chains, "num_draws": STEPS, "threads_per_chain": 1} | changes
    alone = estimate(chains_per_process=1, **settings)
    together = estimate(chains_per_process=chains, cores=cores, **settings)
    return alone, together


def agree(alone: LLCResult, together: LLCResult, rtol: float = 1e-9) -> None:
    assert together.settings["not_stackable"] == ""
    assert list(together.draws["chain"]) == list(alone.draws["chain"])
    assert alone.draws["loss"].nunique() > STEPS  # the chains differ, and they move
    for column in ("loss", "baseline"):
        np.testing.assert_allclose(together.draws[column], alone.draws[column], rtol=rtol)


def doubled(data: TensorDataset) -> TensorDataset:
    """Its floating point tensors in double precision."""
    return TensorDataset(*(one.double() if one.is_floating_point() else one for one in data.tensors))


class Tied(torch.nn.Module):
    """One weight for the way in and the way out."""

    def __init__(self) -> None:
        super().__init__()
        body = mlp(6, 6, 6)
        self.first, self.last = body[0], body[2]
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def same_input(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch[0]) - batch[0].roll(1, -1)) ** 2).mean()


def features() -> TensorDataset:
    return TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(3), dtype=DOUBLE))


CLASSIFIER = {
    "model": mlp(12, 16, 10).double(),
    "evaluate": cross_entropy,
    "spec": {"dataset": doubled(classes(256, 12)), "batch_size": 16},
    "optimizer_kwargs": {"lr": 1e-4, "localization": 10.0},
}
CONV = CLASSIFIER | {
    "model": small_conv_net().double(),
    "spec": {"dataset": doubled(classes(64, 1, 12, 12)), "batch_size": 8},
}
TIED = CLASSIFIER | {
    "model": Tied().double(),
    "evaluate": same_input,
    "spec": {"dataset": features(), "batch_size": 8},
}
REGRESSION = {
    "model": linear_model(dtype=DOUBLE),
    "spec": {"dataset": linear_data(dtype=DOUBLE), "batch_size": 128},
}


def some(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(4)) > 0.5


KWARGS = CLASSIFIER["optimizer_kwargs"]
EPOCHS = CLASSIFIER["spec"] | {"sampling": "epoch", "batch_size": 24}
CASES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "conv": CONV,
    "tied": TIED,
    "masks by pattern": {"param_masks": {"0.*": True}},
    "masks by tensor": {"param_masks": {"0.weight": some(16, 12), "2.*": True}},
    "a mask on a tied weight": TIED | {"param_masks": {"first.weight": some(6, 6)}},
    "micro-batches": {"grad_accum_steps": 3},
    "epochs with a ragged last batch": {"spec": EPOCHS},
    "the whole baseline": {"baseline": "full"},
    "from the prior": {"start": "prior"},
    "other draws": {"num_burnin_steps": 7, "num_steps_bw_draws": 2},
    "a control variate": {"optimizer_kwargs": KWARGS | {"control_variate": True}},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_chains_together_equal_chains_alone(case: dict[str, Any]) -> None:
    agree(*both_ways(**(CLASSIFIER | case)))


def test_in_other_processes() -> None:
    alone, together = both_ways(cores=2, **CLASSIFIER)
    agree(alone, together)
    two_and_one = estimate(chains_per_process=2, cores=2, num_chains=3, num_draws=STEPS, **CLASSIFIER)
    agree(alone, two_and_one)


@pytest.mark.parametrize("kind", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("masks", [None, {"weight": some(1, 4)}], ids=["whole", "masked"])
def test_every_sampler(kind: Any, masks: Any) -> None:
    kwargs = {"lr": 1e-3, "nbeta": 20.0, "localization": 2.0, "weight_decay": 0.1}
    run = {"sampling_method": kind, "optimizer_kwargs": kwargs, "param_masks": masks, "num_burnin_steps": 5}
    agree(*both_ways(**REGRESSION, **run))


# ---- precisions ---------------------------------------------------------------------------------


def test_single_precision() -> None:
    case = CLASSIFIER | {"model": mlp(12, 16, 10), "spec": {"dataset": classes(256, 12), "batch_size": 16}}
    agree(*both_ways(**case), rtol=1e-4)


def half_precision(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


def test_bfloat16_parameters() -> None:
    model = mlp(12, 16, 10).bfloat16()
    data = {"dataset": classes(256, 12), "batch_size": 16}
    alone, together = both_ways(**(CLASSIFIER | {"model": model, "spec": data, "evaluate": half_precision}))
    agree(alone, together, rtol=0.02)  # the rounding of a product of bfloat16 numbers
    assert abs(alone["loss/trace"] - together["loss/trace"]).mean() < 2e-3


def test_autocast() -> None:
    case = CLASSIFIER | {"model": mlp(12, 16, 10), "spec": {"dataset": classes(256, 12), "batch_size": 16}}
    agree(*both_ways(**case, use_amp=True), rtol=0.02)


# ---- batches ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "pair"


def as_dict(items: Any) -> dict[str, Any]:
    return {
        "inputs": {"x": torch.stack([x for x, _ in items])},
        "y": [torch.stack([y for _, y in items]), "names"],
    }


def as_dataclass(items: Any) -> Pair:
    return Pair(*torch.utils.data.default_collate(items))


def of_dict(model: torch.nn.Module, batch: Any) -> Any:
    loss = cross_entropy(model, (batch.pop("inputs")["x"], batch["y"][0]))  # a careless evaluate
    return {"loss": loss, "extra": batch["y"][1]}


def of_dataclass(model: torch.nn.Module, batch: Pair) -> Any:
    return F.cross_entropy(model(batch.x), batch.y, reduction="none"), batch.name


@pytest.mark.parametrize(("collate", "evaluate"), [(as_dict, of_dict), (as_dataclass, of_dataclass)])
def test_batches_with_structure(collate: Callable[..., Any], evaluate: Callable[..., Any]) -> None:
    spec = CLASSIFIER["spec"] | {"collate_fn": collate}
    agree(*both_ways(**(CLASSIFIER | {"spec": spec, "evaluate": evaluate})))


def test_streams() -> None:
    data = features().tensors[0]
    case = TIED | {"spec": {"dataset": Stream(data), "batch_size": 7, "num_samples": len(data)}}
    agree(*both_ways(**case))


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter((row,) for row in self.rows)


# ---- callbacks ----------------------------------------------------------------------------------


class Weights:
    """Keeps the weights, and the loss on the batch, that it is shown at every draw."""

    def __init__(self, chains: int, draws: int, size: int) -> None:
        self.weights, self.losses = np.zeros((chains, draws, size)), np.zeros((chains, draws))

    def __call__(self, chain: int, draw: int, model: torch.nn.Module, batch: Any) -> None:
        flat = torch.nn.utils.parameters_to_vector(model.parameters())
        self.weights[chain, draw] = flat.detach()
        self.losses[chain, draw] = cross_entropy(model, batch).item()


@pytest.mark.parametrize("masks", [None, {"0.weight": some(16, 12)}], ids=["whole", "masked"])
def test_callbacks_see_the_weights_and_the_batch_of_their_own_chain(masks: Any) -> None:
    size = sum(one.numel() for one in CLASSIFIER["model"].parameters())
    seen = [Weights(3, 10, size) for _ in range(2)]
    settings = CLASSIFIER | {"num_chains": 3, "num_draws": 10, "param_masks": masks}
    alone = estimate(callbacks=seen[0], **settings)
    together = estimate(callbacks=seen[1], chains_per_process=3, **settings)
    np.testing.assert_allclose(seen[1].weights, seen[0].weights, rtol=1e-9)
    np.testing.assert_allclose(seen[1].losses, together["loss/trace"], rtol=1e-12)
    np.testing.assert_allclose(together["loss/trace"], alone["loss/trace"], rtol=1e-9)
    assert len(np.unique(seen[0].weights[:, -1, 0])) == (3 if masks is None or some(16, 12)[0, 0] else 1)


# ---- what cannot be stacked ---------------------------------------------------------------------


def looks_at_the_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    loss = cross_entropy(model, batch)
    return loss if loss > 0 else -loss


def draws_numbers(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, (batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]))


def with_names(items: Any) -> Any:
    return *torch.utils.data.default_collate(items), [str(int(y)) for _, y in items]


def of_names(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, (batch[0], torch.tensor([int(one) for one in batch[2]])))


class Aside(torch.nn.Module):
    """Computes with a weight that it has put aside, beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(12, 16, 10)
        self.aside = [self.body[0].weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + F.linear(x, self.aside[0])[:, :10]


def with_dropout() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Dropout(0.2), *mlp(12, 16, 10).double())


NOT_STACKABLE: dict[str, tuple[dict[str, Any], str]] = {
    "control flow": ({"evaluate": looks_at_the_loss}, "torch.vmap refuses it"),
    "random evaluate": ({"evaluate": draws_numbers}, "evaluate draws random numbers"),
    "dropout": ({"model": with_dropout(), "train_mode": True}, "evaluate draws random numbers"),
    "strings": (
        {"evaluate": of_names, "spec": CLASSIFIER["spec"] | {"collate_fn": with_names}},
        "the chains' batches differ in shape or in what is not a tensor",
    ),
    "a weight put aside": ({"model": Aside().double()}, "its vectorised form gives other"),
}


@pytest.mark.parametrize(("change", "reason"), NOT_STACKABLE.values(), ids=NOT_STACKABLE)
def test_what_cannot_be_stacked_runs_one_by_one(change: dict[str, Any], reason: str, tmp_path: Any) -> None:
    settings = CLASSIFIER | change | {"num_chains": 3, "num_draws": 10}
    alone = estimate(**settings)
    together = estimate(chains_per_process=3, run_dir=tmp_path / "run", **settings)
    assert together.settings["not_stackable"].startswith(reason)
    assert "not_stackable" in alone.settings
    assert alone.settings["not_stackable"] == ""
    np.testing.assert_array_equal(together.draws, alone.draws)
    assert reason in (tmp_path / "run" / "chains" / "1" / "log.txt").read_text()


class LooksLater:
    """Looks at its loss from some call on, when it has been taken for harmless."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.left -= 1
        return looks_at_the_loss(model, batch) if self.left < 0 else cross_entropy(model, batch)


def test_what_turns_out_later_goes_on_one_by_one() -> None:
    settings = CLASSIFIER | {"num_chains": 3, "num_draws": STEPS, "threads_per_chain": 1}
    alone = estimate(**settings)
    together = estimate(chains_per_process=3, **(settings | {"evaluate": LooksLater(80)}))
    agree(alone, together)
    assert all("one after the other from some step on" in one for one in together.chains["message"])


class FailsLater(LooksLater):
    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise ValueError("enough")
        return cross_entropy(model, batch)


def test_an_error_of_evaluate_is_named() -> None:
    with pytest.raises(AllChainsFailedError, match="EvaluateError: evaluate raised ValueError: enough"):
        estimate(
            **(
                CLASSIFIER
                | {"evaluate": FailsLater(80), "num_chains": 3, "num_draws": 100, "chains_per_process": 3}
            )
        )


class CountsAtEveryCall(torch.nn.Module):
    """Keeps the mean of what it has seen in a buffer, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(12, 16, 10)
        self.register_buffer("seen", torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.mean(0).detach()
        return self.body(x - self.seen)


def test_a_model_with_a_memory_runs_one_by_one() -> None:
    settings = CLASSIFIER | {"model": CountsAtEveryCall().double(), "num_chains": 3, "threads_per_chain": 1}
    together = estimate(chains_per_process=3, **settings)
    assert together.settings["not_stackable"]
