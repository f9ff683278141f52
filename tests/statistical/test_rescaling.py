"""Symmetries of the estimate, and samplers against each other where no exact value is known.

* A ReLU network's layers may be rescaled without changing its function. With step size and localization
  rescaled along the chain is the same; with one γ for all it is another question with another answer.
* The value of independent blocks is the sum of theirs.
* All samplers find what Hamiltonian Monte Carlo finds.
"""

import functools
import math

import pytest
import torch

from devsample.samplers import SAMPLERS
from devsample.testing import case, relu_network, squared_error
from devsample.testing.driver import settle
from devsample.testing.potentials import Blocks, Potential
from tests.statistical.chains import around_center, chains, check, read

pytestmark = pytest.mark.truths

# ---- a chain that does not see the scale --------------------------------------------------------

WIDTHS, LR, LOCALIZATION = [3, 6, 5, 2], 2e-4, 5.0


def loss_trace(kind, alpha, *, keep=(), steps=150):
    """Losses along a chain of a network at scale α, from an optimizer with rescaled groups.

    ``keep``: what the groups leave as it is at α = 1.
    """
    network = relu_network(WIDTHS, seed=1, alpha=alpha, dtype=torch.float64)
    data = relu_network(WIDTHS, seed=1, dtype=torch.float64).dataset(40, noise=0.1, seed=2).tensors
    as_it_is = {"lr": LR, "localization": LOCALIZATION}
    groups = [
        group | {key: as_it_is[key] for key in keep}
        for group in network.param_groups(lr=LR, localization=LOCALIZATION)
    ]
    sampler = kind(groups, lr=1.0, nbeta=50.0, generator=torch.Generator().manual_seed(3))
    losses = []
    for _ in range(steps):
        sampler.zero_grad()
        loss = squared_error(network, data)
        loss.backward()
        sampler.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize("alpha", [1e-2, 1e-1, 10.0, 1e2])
@pytest.mark.parametrize("name", ["SGLD", "SGHMC", "SGNHT"])
def test_rescaled_layers_with_rescaled_steps_give_the_same_losses(name, alpha):
    reference = loss_trace(SAMPLERS[name], 1.0)
    assert reference.std() > 0.01
    torch.testing.assert_close(loss_trace(SAMPLERS[name], alpha), reference, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("key", ["lr", "localization"])
def test_rescaled_layers_with_the_same_steps_give_other_losses(key):
    """Negative control."""
    reference = loss_trace(SAMPLERS["SGLD"], 1.0)
    assert (loss_trace(SAMPLERS["SGLD"], 2.0, keep=[key]) - reference).abs().max() > 1e-4


# ---- networks with data -------------------------------------------------------------------------


class OneHiddenLayer(Potential):
    """L(w) − L(w*) of a network with one hidden layer on its own data, on rows (K, P).

    Entries of w are the network's parameters in their order. The targets are the network's own outputs
    and some noise, so that w* is near a minimum but not at it.
    """

    def __init__(self, widths, alpha=1.0, activation=torch.relu, n=40, noise=0.1):
        network = relu_network(widths, seed=5, alpha=alpha, dtype=torch.float64)
        random = torch.Generator().manual_seed(6)
        self.inputs, self.units, outputs = widths
        assert outputs == 1
        self.activation = activation
        x = torch.randn(n, self.inputs, generator=random, dtype=torch.float64)
        center = torch.cat([one.detach().flatten() for one in network.parameters()])
        super().__init__(center, x=x, y=torch.zeros(n, dtype=torch.float64))
        errors = noise * torch.randn(n, generator=random, dtype=torch.float64)
        self._constants["y"] = self._outputs(center[None])[0] + errors
        self._converted.clear()
        self.shift = float(errors.square().mean())

    def _outputs(self, w):
        sizes = [self.units * self.inputs, self.units, self.units, 1]
        first, bias, second, last = torch.split(w, sizes, dim=1)
        first = first.reshape(len(w), self.units, self.inputs)
        hidden = self.activation(first @ self._like("x", w).T + bias.unsqueeze(2))
        return (second.unsqueeze(1) @ hidden).squeeze(1) + last

    def _value(self, w):
        return (self._outputs(w) - self._like("y", w)).square().mean(1) - self.shift

    def _gradient(self, w):
        with torch.enable_grad():
            leaf = w if w.requires_grad else w.detach().requires_grad_()
            loss = self._value(leaf).sum()
            return torch.autograd.grad(loss, leaf, create_graph=w.requires_grad)[0]


def measured(potential, name, *, nbeta, gamma, rows, rounds, **values):
    """A sampler's value with steps by rule: ε G a ≤ 1 for nine of ten rows of a pilot.

    A round is a relaxation time of the directions that only γ holds.
    """
    found = settle(potential, nbeta=nbeta, gamma=gamma, box=None, seed=7, rows=64)
    given = {"nbeta": nbeta, "localization": gamma, **values}
    trial = SAMPLERS[name].kernel(lr=1.0, **given)
    lr = min(1 / found.typical, 3 / found.largest) / trial.scale
    round_ = 2 / (lr * gamma * trial.speed * trial.scale)
    if trial.full_data:
        given["adapt"] = False
        round_ = 1.0 if name == "HMC" else 2 / (lr * gamma)
    if name == "HMC":
        lr, given["num_leapfrog_steps"] = lr / 4, math.ceil(1.5 / math.sqrt(lr / 4 * gamma))
    kernel = SAMPLERS[name].kernel(lr=lr, **given)
    start = found.position[torch.arange(rows) % len(found.position)]
    drive = chains(potential, kernel, rows, seed=8, start=start)
    between = max(1, round(round_ / 4))
    burnin = max(200 if name != "RMSPropSGLD" else 2000, 4 * between)
    if name == "HMC":
        burnin = 10
    return read(drive, nbeta, burnin=burnin, draws=4 * rounds, between=between)


def agree(one, other, most, within):
    """Two measurements of one value."""
    check(one, other.value, most=most, within=within, error=other.se)


def network_value(name, alpha, activation, rows, rounds, **values):
    """One γ for all parameters."""
    potential = OneHiddenLayer([2, 3, 1], alpha, activation)
    return measured(potential, name, nbeta=100.0, gamma=10.0, rows=rows, rounds=rounds, **values)


@functools.cache
def by_hmc(alpha, activation, rows, rounds):
    """The reference."""
    return network_value("HMC", alpha, activation, rows, rounds)


def test_the_gradient_of_the_network_is_that_of_its_loss():
    potential = OneHiddenLayer([2, 3, 1], activation=torch.tanh)
    w = around_center(potential, 2, 1.0)
    shift = torch.zeros_like(w)
    shift[:, 4] = 1e-6
    slope = (potential(w + shift) - potential(w - shift)) / 2e-6
    torch.testing.assert_close(potential.gradient(w)[:, 4], slope, rtol=1e-6, atol=1e-8)
    assert potential.hessian(w).abs().sum() > 0
    assert potential(potential.center[None]).abs() < 1e-12


# ---- one γ for all, and samplers against each other ---------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rounds"), [("SGLD", 8), ("SGHMC", 30)])
def test_samplers_agree_with_hmc(name, rounds):
    reference = by_hmc(1.0, torch.tanh, 192, 40)
    agree(network_value(name, 1.0, torch.tanh, 192, rounds), reference, most=0.012, within=0.04)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "rounds"), [("SGLD", 12), ("SGHMC", 60), ("SGNHT", 60), ("RMSPropSGLD", 12), ("MALA", 20)]
)
def test_all_samplers_agree_with_hmc(name, rounds):
    reference = by_hmc(1.0, torch.tanh, 512, 80)
    assert reference.se < 0.003 * reference.value
    agree(network_value(name, 1.0, torch.tanh, 512, rounds), reference, most=0.006, within=0.02)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "rounds"), [("SGLD", 8), ("SGHMC", 30)])
def test_with_one_localization_for_all_the_value_depends_on_the_scale(name, rounds):
    """The question changes, and samplers follow: α = 0.3, 1 and 3 against HMC at each."""
    values = []
    for alpha in (0.3, 1.0, 3.0):
        reference = by_hmc(alpha, torch.relu, 512, 30)
        agree(network_value(name, alpha, torch.relu, 512, rounds), reference, most=0.007, within=0.02)
        values.append(reference.value)
    assert values[0] > 1.1 * values[1]
    assert values[1] > 1.1 * values[2]


# ---- additivity ---------------------------------------------------------------------------------

BLOCKS = ("rrr_4_1_3_rank1_nb100", "tanh_H1_nb100", "crossing_11_nb100", "quad_1d")


@pytest.mark.parametrize(
    "name", ["SGHMC", *(pytest.param(one, marks=pytest.mark.slow) for one in ("SGLD", "HMC"))]
)
def test_the_value_of_independent_blocks_is_the_sum_of_theirs(name):
    parts = [case(one) for one in BLOCKS]
    assert {(one.nbeta, one.gamma) for one in parts} == {(100.0, 1.0)}
    expected = math.fsum(one.expected for one in parts)
    blocks = Blocks([one.potential for one in parts])
    reading = measured(blocks, name, nbeta=100.0, gamma=1.0, rows=384, rounds=12)
    check(reading, expected, most=0.007, within=0.02)
