"""The samplers on all data: acceptance, laws, adaptation, and their form for a loop of one's own."""

import copy
import io
import math

import pytest
import torch
from scipy import stats

from devsample import HMC, MALA
from devsample.errors import InvalidArgumentError
from devsample.samplers.base import can_freeze

DOUBLE = torch.float64
both = pytest.mark.parametrize("kind", [HMC, MALA])


class Quadratic:
    """L = Σ h (w − c)²/2 of every row, and how often it was asked."""

    def __init__(self, h, center=0.0):
        self.h, self.center, self.calls = torch.as_tensor(h, dtype=DOUBLE), center, 0

    def __call__(self, position):
        self.calls += 1
        offset = position - self.center
        return (self.h * offset**2).sum(1) / 2, self.h * offset

    def gradient(self, position):
        return self(position)[1]


class Chains:
    """Rows of chains that start from the exact law around w* = 0."""

    def __init__(self, kernel, h, rows=3000, seed=0, start=None):
        self.kernel, self.potential = kernel, Quadratic(h)
        self.random = torch.Generator().manual_seed(seed)
        self.a = kernel.nbeta * self.potential.h + kernel.localization + kernel.weight_decay
        self.center = torch.zeros(len(h), dtype=DOUBLE)
        self.position = self.normal(rows) / self.a.sqrt() if start is None else start
        self.buffers = kernel.start(self.position, self.potential)

    def normal(self, rows):
        return torch.randn(rows, len(self.center), generator=self.random, dtype=DOUBLE)

    def advance(self, steps):
        chances = []
        for _ in range(steps):
            uniform = torch.rand(len(self.position), 2, generator=self.random, dtype=DOUBLE)
            noise = self.normal(len(self.position))
            self.kernel.transition(self.position, self.center, noise, uniform, self.potential, self.buffers)
            chances.append(self.buffers["acceptance"].clone())
        return torch.stack(chances)

    def excess(self):
        """z of E[a w²] − 1."""
        squares = self.a * self.position**2
        return float((squares.mean() - 1) / math.sqrt(2 / squares.numel()))


FIXED = {"nbeta": 1.0, "adapt": False}


# ---- one transition -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "lr", "chance"),
    [([0.0, 0.0], [1.5, 5.5], 0.1, 0.6661436), ([1.0, 1.0], [1.5, 0.5], 0.5, 0.9692332)],
)
def test_the_chance_of_a_langevin_proposal(before, after, lr, chance):
    """min(1, π(w') q(w | w') / (π(w) q(w' | w))) for L = |w|²/2, and the proposal that was asked for."""
    kernel, potential = MALA.kernel(lr=lr, **FIXED), Quadratic([1.0, 1.0])
    position, target = (torch.tensor([one], dtype=DOUBLE) for one in (before, after))
    noise = (target - position + lr / 2 * position) / math.sqrt(lr)
    buffers = kernel.start(position, potential)
    uniform = torch.tensor([[0.5, 0.5]], dtype=DOUBLE)
    kernel.transition(position, torch.zeros(2, dtype=DOUBLE), noise, uniform, potential, buffers)
    assert buffers["acceptance"].item() == pytest.approx(chance, abs=1e-7)
    torch.testing.assert_close(position, target)  # 0.5 is below the chance
    assert buffers["loss"].item() == pytest.approx(float(target.square().sum() / 2))


def test_a_rejected_row_stays_with_all_that_belongs_to_it():
    kernel, potential = HMC.kernel(lr=1.0, **FIXED), Quadratic([1.0, 3.0])
    chains = Chains(kernel, [1.0, 3.0], rows=200)
    before = chains.position.clone()
    kept = {name: value.clone() for name, value in chains.buffers.items()}
    uniform = torch.full((200, 2), 0.9, dtype=DOUBLE)
    kernel.transition(chains.position, chains.center, chains.normal(200), uniform, potential, chains.buffers)
    stays = (chains.buffers["acceptance"] <= 0.9)[:, 0]
    assert 0 < stays.sum() < 200
    assert torch.equal(chains.position[stays], before[stays])
    assert not torch.isclose(chains.position[~stays], before[~stays]).all(1).any()
    loss, gradient = potential(chains.position)
    torch.testing.assert_close(chains.buffers["loss"][:, 0], loss)
    torch.testing.assert_close(chains.buffers["gradient"], gradient)
    assert torch.equal(chains.buffers["loss"][stays], kept["loss"][stays])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_proposal_without_a_finite_loss_is_refused(bad):
    class Cliff(Quadratic):
        def __call__(self, position):
            loss, gradient = super().__call__(position)
            return torch.where(position[:, 0] > 0.5, bad, loss), gradient

    kernel = HMC.kernel(lr=0.3, nbeta=1.0)
    chains = Chains(kernel, [1.0], start=torch.zeros(500, 1, dtype=DOUBLE))
    chains.potential = Cliff([1.0])
    chains.advance(30)
    assert chains.position.max() <= 0.5
    assert chains.position.min() < -1
    assert all(value.isfinite().all() for value in chains.buffers.values())


def test_a_transition_takes_the_gradients_that_it_says():
    for kernel in (HMC.kernel(lr=0.1, nbeta=1.0, num_leapfrog_steps=7), MALA.kernel(lr=0.1, nbeta=1.0)):
        chains = Chains(kernel, [1.0], rows=2)
        before = chains.potential.calls
        chains.advance(5)
        assert chains.potential.calls - before == 5 * kernel.num_gradients


def test_one_leapfrog_step_without_jitter_is_mala():
    options = {"lr": 0.7, "localization": 0.5, "weight_decay": 0.1, "nbeta": 2.0, "adapt": False}
    one = Chains(HMC.kernel(num_leapfrog_steps=1, jitter=0.0, **options), [1.0, 0.2], rows=50)
    other = Chains(MALA.kernel(**options), [1.0, 0.2], rows=50)
    one.advance(10)
    other.advance(10)
    assert torch.equal(one.position, other.position)


# ---- laws ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("stiffness", [0.3, 2.0])
def test_the_law_of_a_gaussian_at_any_step(kind, stiffness):
    options = {"nbeta": 1.3, "localization": 0.1, "weight_decay": 0.05, "adapt": False}
    h = [0.3, 1.0]
    lr = stiffness / (1.3 + 0.15)
    right = Chains(kind.kernel(lr=lr, **options), h)
    assert right.advance(60).mean() < 0.999
    assert abs(right.excess()) < 4
    warm = Chains(kind.kernel(lr=lr, noise_level=1.05, **options), h)
    warm.advance(60)
    assert warm.excess() > 4


@both
def test_the_law_in_a_box_is_the_truncated_one(kind):
    chains = Chains(kind.kernel(lr=0.5, bounding_box_size=0.8, **FIXED), [1.0], rows=20_000)
    chains.position.clamp_(-0.8, 0.8)
    chains.buffers = chains.kernel.start(chains.position, chains.potential)
    chains.advance(40)
    assert chains.position.abs().max() <= 0.8
    law = stats.truncnorm(-0.8, 0.8)
    squares = chains.position**2
    z = (squares.mean() - law.var()) / (squares.std() / math.sqrt(len(squares)))
    assert abs(float(z)) < 4


# ---- adaptation ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("lr", [1e-4, 30.0])
def test_burn_in_brings_every_chain_to_the_target(kind, lr):
    kernel = kind.kernel(lr=lr, nbeta=1.0)
    h = [0.25, 0.5, 0.75, 1.0]
    chains = Chains(kernel, h, rows=100)
    assert not kernel.is_frozen(chains.buffers)
    chains.advance(600)
    kernel.freeze(chains.buffers)
    assert kernel.is_frozen(chains.buffers)
    steps = chains.buffers["log_lr"].clone()
    assert 0 < steps.std() < 0.5  # each has its own
    rate = chains.advance(200).mean()
    # Fixed is the average of the steps that were tried; the rate bends down with them, so it gets higher.
    assert -0.05 < rate - kernel.target_acceptance < 0.08
    assert torch.equal(chains.buffers["log_lr"], steps)
    assert abs(chains.excess()) < 4


def test_without_adaptation_the_step_stays():
    kernel = MALA.kernel(lr=0.2, **FIXED)
    assert not kernel.adapts
    chains = Chains(kernel, [1.0], rows=3)
    assert kernel.is_frozen(chains.buffers)
    chains.advance(5)
    assert torch.allclose(chains.buffers["log_lr"].exp(), torch.tensor(0.2, dtype=DOUBLE))
    assert can_freeze(MALA.kernel(lr=0.2, nbeta=1.0))


# ---- in a loop of one's own ---------------------------------------------------------------------


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def setting(kind, ws, seed=5, **options):
    """A sampler with the closure of L = Σ (w − 1)²/2."""
    sampler = kind(ws, generator=seeded(seed), **({"lr": 0.3, "nbeta": 3.0, "localization": 1.0} | options))

    def closure():
        sampler.zero_grad()
        loss = sum(((w.float() - 1) ** 2).sum() / 2 for w in ws)
        loss.backward()
        return loss

    return sampler, closure


def parameters(dtype=torch.float32):
    random = seeded(11)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in ((3, 4), (5,))]


def flat(ws):
    return torch.cat([w.detach().flatten() for w in ws])


@both
def test_the_optimizer_samples_the_law(kind):
    """w* is the start, so the mean of an entry is (nβ + γ w*)/(nβ + γ)."""
    ws = [torch.nn.Parameter(torch.full((200,), 2.0))]
    sampler, closure = setting(kind, ws, freeze_after=100, target_acceptance=0.7)
    values, losses = [], []
    for step in range(700):
        losses.append(sampler.step(closure))
        if step >= 100:
            values.append(flat(ws).double())
    values = torch.stack(values)
    chains = values.mean(0)
    z = (chains.mean() - (3 + 2) / 4) / (chains.std() / math.sqrt(len(chains)))
    assert abs(float(z)) < 4
    variance = values.var(0).mean() * 4
    assert abs(float(variance) - 1) < 0.1
    assert losses[-1] == pytest.approx(float(((ws[0].detach() - 1) ** 2).sum() / 2), rel=1e-5)


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_saved_state_continues_bit_for_bit(kind, dtype):
    one, two = parameters(dtype), parameters(dtype)
    whole, half = setting(kind, one, freeze_after=4), setting(kind, two, freeze_after=4)
    for _ in range(8):
        whole[0].step(whole[1])
    for _ in range(3):
        half[0].step(half[1])
    file = io.BytesIO()
    torch.save(half[0].state_dict(), file)
    file.seek(0)
    third = [torch.nn.Parameter(w.detach().clone()) for w in two]
    resumed = setting(kind, third, seed=9, freeze_after=4)
    resumed[0].load_state_dict(torch.load(file, weights_only=True))
    for _ in range(5):
        resumed[0].step(resumed[1])
    assert torch.equal(flat(third), flat(one))
    assert not torch.equal(flat(two), flat(one))


@both
def test_masked_and_frozen_parameters_stay(kind):
    mask = torch.tensor([True, False, True])
    moving, frozen = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    frozen.requires_grad_(False)
    sampler = kind([moving, frozen], generator=seeded(), lr=0.3, nbeta=3.0, masks={moving: mask})

    def closure():
        sampler.zero_grad()
        loss = ((moving - 1) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(10):
        sampler.step(closure)
    assert torch.equal(frozen.detach(), torch.zeros(3))
    assert moving.detach()[1] == 0
    assert (moving.detach()[mask] != 0).all()


@both
def test_a_step_needs_a_closure_and_one_group(kind):
    ws = parameters()
    sampler, _ = setting(kind, ws)
    with pytest.raises(InvalidArgumentError, match="closure: .* evaluates the loss several times"):
        sampler.step()
    groups, closure = setting(kind, [{"params": [ws[0]]}, {"params": [ws[1]]}])
    with pytest.raises(InvalidArgumentError, match="one group"):
        groups.step(closure)


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0.0), ("noise_level", 0.0), ("target_acceptance", 1.0), ("jitter", 1.0), ("localization", -1.0)],
)
def test_a_value_out_of_its_range_is_named(kind, name, value):
    with pytest.raises(InvalidArgumentError, match=f"^{name}: expected a number"):
        kind.kernel(**({"lr": 0.1, "nbeta": 1.0} | {name: value}))


def test_leapfrog_steps_are_whole():
    with pytest.raises(InvalidArgumentError, match="num_leapfrog_steps: expected an integer ≥ 1"):
        HMC.kernel(lr=0.1, nbeta=1.0, num_leapfrog_steps=1.5)


@both
def test_a_copy_goes_its_own_way(kind):
    ws = parameters()
    sampler, closure = setting(kind, ws)
    sampler.step(closure)
    position = sampler.state_dict()["rows"][0]["buffers"]["loss"].clone()
    copy.deepcopy(sampler)
    assert torch.equal(sampler.state_dict()["rows"][0]["buffers"]["loss"], position)
