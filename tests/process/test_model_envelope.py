"""A model arrives in a chain process as it is with the caller: the same loss at w*."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from devsample.errors import DevsampleError, NotPicklableError
from tests.factories import estimate, linear_data, linear_model, squared_error

IN_A_PROCESS = {"executor": "processes", "num_chains": 1, "num_draws": 2}


# --- Hugging Face --------------------------------------------------------------------------------


class Tokens(Dataset):
    """Random token sequences as a causal language model takes them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._ids = torch.randint(0, 50, (16, 12), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def llama(tied: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def test_a_llama_gives_the_same_loss_in_a_chain() -> None:
    model = llama(tied=True)
    buffers = {name for name, _ in model.named_buffers()}
    assert any("inv_freq" in name for name in buffers)
    assert not any("inv_freq" in name for name in model.state_dict())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    data = Tokens()
    with torch.no_grad():
        batches = (torch.stack([data[i]["input_ids"] for i in part]) for part in halves(16))
        expected = np.mean([model(input_ids=ids, labels=ids).loss.item() for ids in batches])
    result = estimate(
        model=model,
        evaluate=None,
        spec={"dataset": data, "batch_size": 8},
        optimizer_kwargs={"lr": 1e-5},
        **IN_A_PROCESS,
    )
    assert result.init_loss == pytest.approx(expected, rel=1e-6)
    first = result.draws.iloc[0]
    assert first["loss"] == first["baseline"]  # the first draw is at w*
    assert result.draws["loss"].iloc[1] != result.draws["baseline"].iloc[1]
    moving = sum(parameter.numel() for parameter in model.parameters())
    assert result.settings["num_moving_parameters"] == moving


def halves(n: int) -> tuple[range, range]:
    return range(n // 2), range(n // 2, n)


# --- everything a module can hold ----------------------------------------------------------------


class Peculiar(torch.nn.Module):
    """Tied weights, a buffer that is in no state_dict, a plain tensor, a hook: all matter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(4, 4, bias=False)
        self.decoder = torch.nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.last = torch.nn.Linear(4, 1)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 4), persistent=False)
        self.register_buffer("shift", torch.tensor([0.1, 0.2, 0.3, 0.4]))
        self.plain = torch.tensor([1.0, -1.0, 2.0, 0.5])
        self.window = self.plain[1:3]  # a view into it
        self.last.register_forward_hook(double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.encoder(x * self.table)) + self.shift
        return self.last(self.decoder(hidden) * self.plain + self.window.sum())


def double(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def error_of_a_whole_model(model: Peculiar, batch: Any) -> torch.Tensor:
    """Fails unless ties and views are what they were, at w* and at every step."""
    assert model.encoder.weight is model.decoder.weight
    assert model.plain[1:3].data_ptr() == model.window.data_ptr()
    assert type(model) is Peculiar
    return squared_error(model, batch)


@pytest.mark.parametrize("where", [{"executor": "inline"}, {"executor": "processes"}])
def test_a_peculiar_model_gives_the_same_loss_in_a_chain(where: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = Peculiar()
    with torch.no_grad():
        x, y = linear_data().tensors
        expected = float(((model(x) - y) ** 2).mean())
    result = estimate(
        model=model,
        evaluate=error_of_a_whole_model,
        spec={"batch_size": 64},
        **(IN_A_PROCESS | where | {"num_draws": 5}),
    )
    assert result.init_loss == pytest.approx(expected, rel=1e-6)
    assert result.settings["num_moving_parameters"] == 4 * 4 + 5  # the tied weight counts once


def storages_stay_tied(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    assert torch.equal(model[0].weight, model[1].weight)
    return squared_error(model, batch)


def test_parameters_tied_by_their_storage_stay_tied_or_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model[1].weight = torch.nn.Parameter(model[0].weight.data)
    try:
        estimate(model=model, evaluate=storages_stay_tied)
    except DevsampleError as error:
        message = str(error)
        assert "0.weight" in message
        assert "1.weight" in message


# --- wrappers ------------------------------------------------------------------------------------


def plain_error(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    assert type(model) is torch.nn.Linear, type(model)
    return squared_error(model, batch)


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": torch.nn.DataParallel,
    "both": lambda model: torch.nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_is_unwrapped(wrap: Any) -> None:
    model = linear_model()
    found = estimate(model=wrap(model), evaluate=plain_error)
    expected = estimate(model=model, evaluate=plain_error)
    np.testing.assert_array_equal(found["loss/trace"], expected["loss/trace"])


# --- what cannot travel --------------------------------------------------------------------------


def two_layers(last: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), last)


def with_attribute(value: Any) -> torch.nn.Module:
    model = two_layers(torch.nn.Linear(4, 1))
    model[1].cache = value(model) if callable(value) else value
    return model


def with_gradient_hook() -> torch.nn.Module:
    model = two_layers(torch.nn.Linear(4, 1))
    model[1].weight.register_hook(lambda gradient: gradient * 2)
    return model


REFUSED = {
    "lazy": (lambda: two_layers(torch.nn.LazyLinear(1)), "model.1.weight", "lazy"),
    "meta": (lambda: two_layers(torch.nn.Linear(4, 1, device="meta")), "model.1.weight", "meta"),
    "all meta": (lambda: torch.nn.Linear(4, 1, device="meta"), "weight", "meta"),
    "non-leaf": (
        lambda: with_attribute(lambda model: model[0].weight * 2),
        "model.1.cache",
        "detach",
    ),
    "generator": (
        lambda: with_attribute(number for number in range(3)),
        "model.1.cache",
        "generator",
    ),
    "gradient hook": (with_gradient_hook, "model.1.weight", "hook"),
}


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(("make", "path", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_travel_is_named(make: Any, path: str, why: str, cores: int) -> None:
    calls = []

    def evaluate(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        return squared_error(model, batch)

    with pytest.raises(DevsampleError) as caught:
        estimate(model=make(), evaluate=evaluate, cores=cores)
    assert path in str(caught.value)
    assert why in str(caught.value)
    assert not calls


def test_an_evaluate_with_something_that_cannot_travel() -> None:
    handle = (number for number in range(3))

    def evaluate(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        next(handle)
        return squared_error(model, batch)

    with pytest.raises(NotPicklableError, match=r"evaluate\.<closure handle> is a generator"):
        estimate(evaluate=evaluate, cores=2)


# --- precision -----------------------------------------------------------------------------------


def half_error(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    assert next(model.parameters()).dtype is torch.bfloat16
    return (model(x.bfloat16()).float() - y).square().mean()


def test_a_model_in_half_precision() -> None:
    model = linear_model().bfloat16()
    result = estimate(model=model, evaluate=half_error, executor="processes", num_draws=20)
    assert list(result.chains["status"]) == ["done", "done"]
    exact = estimate(num_draws=20)
    assert result.init_loss == pytest.approx(exact.init_loss, rel=0.02)
    assert result.draws["loss"].to_numpy() == pytest.approx(exact.draws["loss"].to_numpy(), rel=0.1)
    assert result.draws["llc"].nunique() > 10  # it moves by less than bfloat16 resolves


def test_autocast() -> None:
    result = estimate(use_amp=True)
    exact = estimate()
    assert result.init_loss != exact.init_loss
    assert result.init_loss == pytest.approx(exact.init_loss, rel=0.02)
