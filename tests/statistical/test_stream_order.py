"""Data in an order of their own: the estimate is that of independent batches.

Losses of a stream are read at another place of the data than gradients. Read on the gradient's own
batch, or in a fixed relation to it, they are biased: an epoch's batches are not independent.
"""

import functools

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler, TensorDataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary
from tests.statistical.test_linear_regression import GAMMA, check, mse, regression

BATCH, COPIES = 64, 8
STIFFNESS = 0.4
PROBLEM = regression(low=-0.05, high=0.05)


class InOrder(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return zip(self.x, self.y, strict=True)


class Shuffled(InOrder):
    def __iter__(self):
        for row in torch.randperm(len(self.x)).tolist():
            yield self.x[row], self.y[row]


class RowsInOrder(Sampler):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))

    def __len__(self):
        return self.count


def spec_of(kind, x, y):
    if kind == "sampler":
        return LoaderSpec(TensorDataset(x, y), batch_size=BATCH, sampler=RowsInOrder(len(x)))
    stream = InOrder(x, y) if kind == "in order" else Shuffled(x, y)
    return LoaderSpec(stream, batch_size=BATCH, num_samples=len(x))


@functools.cache
def result(kind):
    problem = PROBLEM
    model = torch.nn.Linear(problem.x.shape[1], COPIES, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(problem.solution).expand(COPIES, -1))
    return estimate_learning_coeff_with_summary(
        model,
        loader_spec=spec_of(kind, torch.tensor(problem.x), torch.tensor(problem.y)[:, None]),
        evaluate=mse,
        optimizer_kwargs={"lr": problem.step_size(STIFFNESS), "localization": GAMMA},
        num_chains=8 if kind != "shuffled" else 4,
        num_draws=500,
        num_burnin_steps=100,
        cores=2,
        seed=5,
        verbose=False,
    )


@pytest.mark.parametrize(
    ("kind", "se", "within"),
    [
        ("shuffled", 0.016, 0.05),
        # Each chain's lead is fixed, so its losses are biased, one up and one down: the spread of the
        # chains says so.
        pytest.param("in order", 0.05, 0.1, marks=pytest.mark.slow),
        pytest.param("sampler", 0.05, 0.1, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_of_a_stream(kind, se, within):
    found = result(kind)
    assert found.settings["sampling"] == ("user" if kind == "sampler" else "stream")
    check(found, COPIES * PROBLEM.value(), se=se, within=within)
