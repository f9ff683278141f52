"""Whatever evaluate returns becomes one loss, and n becomes nβ."""

import collections
import dataclasses
import math
import types

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from devsample import LoaderSpec, nbeta_for
from devsample.errors import EvaluateError, InvalidArgumentError
from devsample.losses import default_evaluate, read_loss, resolve_evaluate

LOSS = torch.tensor(2.5)
Output = collections.namedtuple("Output", ["loss", "logits"])


class ModelOutput(collections.OrderedDict):
    """Like Hugging Face's: a mapping whose items are attributes, too."""

    def __getattr__(self, name):
        return self[name]


@dataclasses.dataclass
class Result:
    loss: torch.Tensor | None
    logits: torch.Tensor | None = None


@pytest.mark.parametrize(
    "output",
    [
        LOSS,
        torch.tensor([2.0, 3.0]),
        torch.tensor([[2.0], [3.0]]),
        torch.tensor([2.5]),
        (LOSS, {"accuracy": 0.5}),
        (torch.tensor([2.0, 3.0]), None),
        {"loss": LOSS, "logits": None},
        {"loss": torch.tensor([2.0, 3.0])},
        types.MappingProxyType({"loss": LOSS}),
        Output(LOSS, None),
        Result(LOSS),
        types.SimpleNamespace(loss=LOSS),
        ModelOutput(logits=torch.zeros(3), loss=LOSS),
    ],
    ids=lambda output: type(output).__name__,
)
def test_every_form_of_loss_is_read(output):
    loss = read_loss(output)
    assert loss.ndim == 0
    assert float(loss) == 2.5


def test_the_gradient_of_per_sample_losses_is_that_of_their_mean():
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    read_loss((w**2, {})).backward()
    torch.testing.assert_close(w.grad, 2 * torch.tensor([1.0, 2.0, 3.0]) / 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_of_a_loss_is_kept(dtype):
    assert read_loss(torch.ones(3, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (None, "NoneType"),
        (2.5, "float"),
        (torch.tensor(3), "Tensor"),
        (torch.tensor([]), "Tensor"),
        ((), "tuple"),
        ([LOSS, LOSS], "list"),  # losses of samples, or a loss and something else?
        ((2.5, LOSS), "tuple"),
        ({"logits": LOSS}, "dict"),
        ({"loss": None}, "dict"),
        (Result(None, LOSS), "Result"),
        (types.SimpleNamespace(), "SimpleNamespace"),
        ("loss", "str"),
    ],
)
def test_what_holds_no_loss_is_refused(output, kind):
    with pytest.raises(EvaluateError, match=f"evaluate returned a {kind} without a loss"):
        read_loss(output)


def test_without_evaluate_the_model_is_called_on_the_batch():
    assert resolve_evaluate(None) is default_evaluate
    model = lambda *args, **kwargs: (args, kwargs)  # noqa: E731
    assert default_evaluate(model, [1, 2]) == (([1, 2],), {})
    assert default_evaluate(model, {"x": 1}) == ((), {"x": 1})
    assert default_evaluate(model, collections.UserDict(x=1)) == ((), {"x": 1})


def test_evaluate_must_be_callable():
    with pytest.raises(InvalidArgumentError, match="evaluate: expected evaluate"):
        resolve_evaluate("mse")
    assert resolve_evaluate(len) is len


# ---- nbeta --------------------------------------------------------------------------------------

DATA = TensorDataset(torch.zeros(1000, 2))
N_OVER_LOG = 1000 / math.log(1000)


@pytest.mark.parametrize("rule", [None, "n/ln n"])
@pytest.mark.parametrize(
    "data",
    [1000, np.int64(1000), range(1000), DATA, DataLoader(DATA, batch_size=7), LoaderSpec(DATA)],
    ids=["int", "int64", "sized", "data set", "loader", "spec"],
)
def test_n_over_ln_n(data, rule):
    assert nbeta_for(data, rule) == pytest.approx(N_OVER_LOG, rel=1e-12)


class Lengthless:
    def __getitem__(self, index):
        return torch.zeros(2)


@pytest.mark.parametrize(
    "spec",
    [
        LoaderSpec(lambda: DATA, batch_size=4),
        LoaderSpec(TensorDataset(torch.zeros(20, 2)), batch_size=None, num_samples=1000),
    ],
    ids=["factory", "num_samples"],
)
def test_n_of_a_spec_is_the_one_that_a_run_uses(spec):
    assert nbeta_for(spec) == pytest.approx(N_OVER_LOG, rel=1e-12)


def test_the_rule_of_the_batch():
    expected = 64 / math.log(64)
    assert nbeta_for(1000, "batch", batch_size=64) == pytest.approx(expected)
    assert nbeta_for(DataLoader(DATA, batch_size=64), "batch") == pytest.approx(expected)
    assert nbeta_for(LoaderSpec(DATA, batch_size=64), "batch") == pytest.approx(expected)
    assert nbeta_for(LoaderSpec(DATA, batch_size=8), "batch", batch_size=64) == expected
    with pytest.raises(InvalidArgumentError, match='nbeta: the rule "batch" needs a batch size'):
        nbeta_for(1000, "batch")


def test_numbers_and_functions():
    assert nbeta_for(1000, 12) == 12.0
    assert isinstance(nbeta_for(1000, 12), float)
    assert nbeta_for(DATA, lambda n: n / 4) == 250.0
    assert nbeta_for(DATA, math.sqrt) == pytest.approx(1000**0.5)
    assert nbeta_for(DATA, np.float32(3)) == 3.0


def test_one_sample_and_no_sample():
    assert nbeta_for(1) == 1.0
    with pytest.raises(InvalidArgumentError, match="nbeta: expected n ≥ 1, got 0"):
        nbeta_for(0)


@pytest.mark.parametrize("rule", [0, -1.0, math.nan, math.inf, "n log n", True, lambda n: 0.0, lambda n: "x"])
def test_rules_that_are_refused(rule):
    with pytest.raises(InvalidArgumentError, match="nbeta: expected a number > 0"):
        nbeta_for(1000, rule)


def test_data_without_a_length_is_refused():
    with pytest.raises(InvalidArgumentError, match="data: generator has no length"):
        nbeta_for(i for i in range(3))
