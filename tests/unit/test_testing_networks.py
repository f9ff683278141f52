"""Networks with known coefficients: their losses, data, ladders and rescalings."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary
from devsample.errors import InvalidArgumentError
from devsample.samplers import SGLD
from devsample.testing import (
    deep_linear_network,
    dln_learning_coefficient,
    normal_crossing,
    random_deep_linear_networks,
    relu_network,
    squared_error,
)
from devsample.testing.factors import DeepLinear
from devsample.testing.networks import TeacherData


def moved(model, size=0.3):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


# --- deep linear networks ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("widths", [[5, 3, 5], [6, 4, 7, 3], [3, 4]])
def test_the_network_is_its_teacher_at_a_minimum(widths, seed):
    network = deep_linear_network(widths, 2, seed=seed, dtype=torch.float64)
    assert sum(p.numel() for p in network.parameters()) == sum(a * b for a, b in itertools.pairwise(widths))
    assert network.widths == tuple(widths)
    assert network.learning_coefficient == dln_learning_coefficient(widths, 2)
    x = torch.randn(9, widths[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network(x), x @ network.teacher.T)
    values = torch.linalg.svdvals(network.teacher)
    torch.testing.assert_close(values, torch.tensor([1.0, 1.0] + [0.0] * (len(values) - 2)).double())
    for layer in network.layers:  # balanced and with unit singular values: the deepest point
        values = torch.linalg.svdvals(layer.weight)
        torch.testing.assert_close(values, torch.tensor([1.0, 1.0] + [0.0] * (len(values) - 2)).double())
    loss = network.population_loss()
    loss.backward()
    assert loss.item() == 0
    assert all(float(p.grad.abs().max()) == 0 for p in network.parameters())


def test_a_rotated_network_is_another_one_with_the_same_law():
    plain, turned = (deep_linear_network([4, 3, 4], 1, seed=seed) for seed in (None, 7))
    assert float((plain.teacher - turned.teacher).norm()) > 0.5
    assert torch.equal(deep_linear_network([4, 3, 4], 1, seed=7).teacher, turned.teacher)
    assert [layer.weight.norm().item() for layer in turned.layers] == pytest.approx([1, 1], rel=1e-6)


@pytest.mark.parametrize("widths", [[4, 3, 5], [5, 3, 3, 4]])
def test_population_loss_is_the_potential_and_the_mean_over_data(widths):
    network = moved(deep_linear_network(widths, 2, dtype=torch.float64))
    flat = torch.cat([p.detach().flatten() for p in network.parameters()])
    torch.testing.assert_close(network.population_loss(), DeepLinear(widths, 2)(flat[None])[0])
    x, y = network.dataset(20_000, noise=0.5, seed=1).tensors
    per_sample = ((network(x) - y) ** 2).sum(1).detach()
    expected = network.population_loss().item() + widths[-1] * 0.25
    assert abs(float(per_sample.mean()) - expected) < 4 * float(per_sample.std()) / 20_000**0.5
    torch.testing.assert_close(squared_error(network, (x, y)), per_sample.mean())


def test_lazy_and_eager_data_are_the_same_samples():
    network = deep_linear_network([5, 3, 4], 2)
    eager, lazy = (network.dataset(50, noise=0.1, seed=3, lazy=lazy) for lazy in (False, True))
    assert isinstance(eager, TensorDataset)
    assert isinstance(lazy, TeacherData)
    assert len(lazy) == len(eager) == 50
    for i in (0, 17, -1):
        for one, other in zip(lazy[i], eager[i], strict=True):
            torch.testing.assert_close(one, other)
    copy = pickle.loads(pickle.dumps(lazy))
    batch = next(iter(DataLoader(copy, batch_size=8)))
    torch.testing.assert_close(batch[0], eager.tensors[0][:8])
    torch.testing.assert_close(batch[1], eager.tensors[1][:8])
    assert batch[1].dtype == torch.float32
    other = network.dataset(50, noise=0.1, seed=4)
    assert not torch.equal(other.tensors[0], eager.tensors[0])
    with pytest.raises(IndexError, match="sample 50 of a data set of 50"):
        lazy[50]


def test_large_data_sets_are_lazy():
    network = deep_linear_network([5, 3, 4], 2)
    large = network.dataset(10**9)
    assert isinstance(large, TeacherData)
    x, y = large[10**9 - 1]
    torch.testing.assert_close(y, network.teacher @ x)
    assert len(pickle.dumps(large)) < 2000


def test_a_run_on_lazy_data():
    network = deep_linear_network([4, 2, 3], 1)
    result = estimate_learning_coeff_with_summary(
        network,
        loader_spec=LoaderSpec(network.dataset(10**8), batch_size=16),
        evaluate=squared_error,
        optimizer_kwargs={"lr": 1e-4, "nbeta": 100.0, "localization": 1.0},
        num_chains=2,
        num_draws=10,
        seed=0,
        verbose=False,
    )
    assert result["init_loss"] == pytest.approx(0, abs=1e-10)
    assert result.settings["num_samples"] == 10**8
    assert (result.chains["status"] == "done").all()


def test_a_ladder_of_random_networks():
    ladder = random_deep_linear_networks(10_000, 20, seed=0)
    values = [one.value for one in ladder]
    assert len(set(ladder)) == 20
    assert values == sorted(values)
    assert min(np.diff(np.log(values))) > 0.05  # an order that estimates can keep
    assert values[-1] / values[0] > 10
    for one in ladder:
        assert abs(one.num_params / 10_000 - 1) <= 0.02
        assert (one.value, one.multiplicity) == dln_learning_coefficient(one.widths, one.rank)
    assert {len(one.widths) for one in ladder} <= {3, 4, 5, 6}
    assert random_deep_linear_networks(10_000, 20, seed=0) == ladder
    assert random_deep_linear_networks(10_000, 20, seed=1) != ladder
    assert {len(one.widths) for one in random_deep_linear_networks(1000, 5, depths=[2])} == {3}


def test_ladders_of_all_sizes():
    for size in (30, 1000, 10_000_000):
        ladder = random_deep_linear_networks(size, 10)
        assert all(abs(one.num_params / size - 1) <= 0.02 for one in ladder)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: deep_linear_network([3, 2], 3), "rank: "),
        (lambda: random_deep_linear_networks(10), "num_params"),
        (lambda: random_deep_linear_networks(1000, 1), "num_params, count"),
        (lambda: random_deep_linear_networks(30, 500, depths=[1]), "count: "),
        (lambda: TeacherData(torch.eye(2), 0), "n: "),
        (lambda: TeacherData(torch.eye(2), 5, noise=-1), "noise: "),
        (lambda: TeacherData(torch.eye(2), 5, seed=-1), "seed: "),
        (lambda: normal_crossing([1, 1], center=[1, 2]), "center: "),
        (lambda: relu_network([3, 1]), "widths: "),
        (lambda: relu_network([3, 3, 1], alpha=0), "alpha: "),
    ],
)
def test_what_is_wrong_is_named(wrong, named):
    with pytest.raises(InvalidArgumentError, match=f"^{named}"):
        wrong()


# --- a normal crossing as a network --------------------------------------------------------------


def test_a_crossing_as_a_network_with_data():
    model = moved(normal_crossing([1, 3, 0], center=[0, 1, 5], dtype=torch.float64))
    w = model.w.detach()
    expected = float(w[0] ** 2 * w[1] ** 6)
    assert model.population_loss().item() == pytest.approx(expected)
    x, y = model.dataset(4000, noise=0.25, scale=2.0).tensors
    assert x.shape == y.shape == (4000, 1)
    assert float(x.std()) == pytest.approx(2, rel=0.05)
    assert float(y.std()) == pytest.approx(0.25, rel=0.05)
    assert squared_error(model, (x, torch.zeros_like(y))).item() == pytest.approx(
        expected * float((x**2).mean())
    )


# --- rescaled ReLU networks ----------------------------------------------------------------------


@pytest.mark.parametrize("widths", [[3, 5, 2], [3, 5, 4, 2], [3, 4, 4, 4, 1]])
@pytest.mark.parametrize("alpha", [1e-2, 0.3, 3.0, 1e2])
def test_rescaling_keeps_the_function(widths, alpha):
    one, other = (relu_network(widths, alpha=a, seed=1, dtype=torch.float64) for a in (1.0, alpha))
    x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(one(x), other(x))
    for (name, plain), scaled in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(scaled, plain * other.factors[name])
    assert set(other.factors.values()) >= {alpha, 1 / alpha}


def trace(alpha, steps=50, factors=True):
    data = relu_network([3, 5, 2], seed=1, dtype=torch.float64).dataset(40, noise=0.1)
    model = relu_network([3, 5, 2], seed=1, alpha=alpha, dtype=torch.float64)
    sampler = SGLD(
        model.param_groups(lr=1e-3, localization=2.0) if factors else model.parameters(),
        lr=1e-3,
        localization=2.0,
        nbeta=20.0,
        generator=torch.Generator().manual_seed(0),
    )
    losses = []
    for _ in range(steps):
        sampler.zero_grad()
        loss = squared_error(model, data.tensors)
        loss.backward()
        losses.append(loss.item())
        sampler.step()
    return losses


@pytest.mark.parametrize("alpha", [1e-2, 1e2])
def test_rescaled_groups_give_the_same_trace(alpha):
    assert trace(alpha) == pytest.approx(trace(1.0), rel=1e-8)


def test_groups_carry_the_factors():
    model = relu_network([3, 5, 2], seed=1, alpha=4.0)
    groups = model.param_groups(lr=1.0, localization=1.0, nbeta=7.0)
    assert [(group["lr"], group["localization"]) for group in groups] == [
        (16.0, 1 / 16),
        (16.0, 1 / 16),
        (1 / 16, 16.0),
        (1.0, 1.0),
    ]
    assert {group["nbeta"] for group in groups} == {7.0}


def test_without_the_factors_the_trace_is_another_one():
    one, other = trace(1.0), trace(3.0, factors=False)
    assert one[0] == pytest.approx(other[0])
    assert abs(one[-1] / other[-1] - 1) > 0.01
