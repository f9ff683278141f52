"""What each sampler's stationary law is on a quadratic: exact values, and laws of the bias.

Thousands of chains as rows of one state, all started from the exact law, are read in the end.
"""

import math

import pytest
import torch

from devsample.samplers import SAMPLERS
from devsample.samplers.sghmc import SGHMCKernel
from devsample.samplers.sgld import SGLDKernel
from devsample.samplers.sgnht import SGNHTKernel

SPREAD = torch.logspace(-2, 0, 10, dtype=torch.float64)  # curvatures h
NBETA = 1.0


def normals(seed):
    random = torch.Generator().manual_seed(seed)
    return lambda rows, size: torch.randn(rows, size, generator=random, dtype=torch.float64)


class Chains:
    """Rows of chains of L = Σ h w²/2 around w* = 0, with a = nβh + γ."""

    def __init__(self, kernel, h, rows=4000, seed=0, gradient_noise=0.0):
        self.kernel, self.h, self.noise_size = kernel, h, gradient_noise
        self.normal = normals(seed)
        self.rows, self.a = rows, kernel.nbeta * h + kernel.localization
        self.center = torch.zeros_like(h)
        self.position = self.from_the_law()
        self.buffers = kernel.init(self.position)
        self.before = self.normal(rows, len(h))

    def from_the_law(self):
        return self.normal(self.rows, len(self.h)) / self.a.sqrt()

    def advance(self, steps):
        for _ in range(steps):
            noise = self.normal(*self.position.shape)
            if self.kernel.noise_kind == "averaged":
                noise, self.before = (noise + self.before) / 2, noise
            gradient = self.h * self.position
            if self.noise_size:
                gradient += self.noise_size * self.normal(*self.position.shape)
            self.kernel.step(self.position, gradient, self.center, noise, self.buffers)

    def squares(self, times, apart):
        """a w², read ``times`` times: shape (times, K, P)."""
        read = []
        for _ in range(times):
            self.advance(apart)
            read.append(self.a * self.position**2)
        return torch.stack(read)


def check(values, expected, most):
    """Mean over chains within four standard errors, which are at most ``most`` of it."""
    chains = values.mean(0).mean(1)  # a chain's readings depend on each other
    error = float(chains.std() / math.sqrt(len(chains)))
    assert error < most * expected
    assert abs(float(chains.mean()) - expected) < 4 * error, (float(chains.mean()), expected, error)


# ---- exact at ε a = 1 ---------------------------------------------------------------------------


def frozen(kind, rows=4000, seed=0, lr=None, **values):
    """Chains of a preconditioned sampler, adapted and frozen, that start from the exact law again."""
    kernel = kind.kernel(lr=0.05 if lr is None else lr, nbeta=NBETA, **values)
    chains = Chains(kernel, SPREAD, rows, seed)
    chains.advance(300)
    kernel.freeze(chains.buffers)
    chains.position = chains.from_the_law()
    return chains


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("SGHMC", {}),
        ("SGNHT", {}),
        *(
            pytest.param(name, values, marks=pytest.mark.slow)
            for name, values in (
                ("SGLD", {}),
                ("SGHMC", {"friction": 0.5}),
                ("SGHMC", {"friction": 1.0}),
                ("SGNHT", {"friction": 1.0}),
                ("SGNHT", {"localization": 0.3}),
            )
        ),
    ],
)
def test_spread_curvatures_at_the_largest_step_are_exact(name, values):
    lr = 1 / (NBETA + values.get("localization", 0.0))
    chains = Chains(SAMPLERS[name].kernel(lr=lr, nbeta=NBETA, **values), SPREAD)
    chains.advance(200)
    check(chains.squares(8, 100), 1.0, most=0.003)


def test_one_parameter_has_a_thermostat_too():
    chains = Chains(SGNHTKernel(lr=1.0, nbeta=NBETA), torch.ones(1, dtype=torch.float64), rows=8000)
    chains.advance(4000)  # it answers within A·Q = 1000
    check(chains.squares(200, 5), 1.0, most=0.0025)


@pytest.mark.parametrize("form", ["hitchcock", "devinterp"])
def test_a_frozen_preconditioner_is_exact(form):
    chains = frozen(SAMPLERS["RMSPropSGLD"], form=form)
    largest = chains.buffers["scale"] * chains.a * chains.kernel.lr
    assert 0.03 < largest.mean(0).max() < 1
    check(chains.squares(8, 150), 1.0, most=0.004)


def test_a_frozen_preconditioner_at_the_largest_step_is_exact():
    kernel = SAMPLERS["RMSPropSGLD"].kernel(lr=1.0, nbeta=NBETA)
    chains = Chains(kernel, SPREAD)
    del chains.buffers["second_moment"]
    chains.buffers["scale"] = (1 / chains.a).expand(4000, -1).clone()  # every mode at ε G a = 1
    check(chains.squares(20, 10), 1.0, most=0.0025)


# ---- Adam ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("integrator", "momentum"), [("averaged", 0.9), ("averaged", 0.5), ("euler", 0.9)])
def test_adams_averaged_drift_has_the_bias_that_its_law_says(integrator, momentum):
    kernel = SAMPLERS["AdamSGLD"].kernel(lr=1.0, nbeta=NBETA, momentum=momentum, integrator=integrator)
    expected_factor = 2 * momentum / (1 - momentum) + (integrator == "euler")
    assert kernel.step_bias == pytest.approx(expected_factor)
    chains = Chains(kernel, SPREAD)
    step = 0.04  # ε G a
    del chains.buffers["second_moment"]
    chains.buffers["scale"] = (step / chains.a).expand(4000, -1).clone()
    chains.advance(300)
    if integrator == "averaged":
        law = 1 + step / 4 * expected_factor  # without higher orders
        if momentum == 0.9:
            assert law == pytest.approx(1.18)
    else:  # the variance of w' = w − (ε/2) a m + √ε R in closed form, by its 2 × 2 recursion
        law = _recursion(step, momentum)
        assert law == pytest.approx(1 + step / 4 * expected_factor, rel=2e-3)
    check(chains.squares(8, 100), law, most=0.003)


def _recursion(step, momentum):
    a = torch.tensor([[1 - step / 2 * (1 - momentum), -step / 2 * momentum], [1 - momentum, momentum]])
    a, noise = a.double(), torch.diag(torch.tensor([step, 0.0])).double()
    system = torch.eye(4, dtype=torch.float64) - torch.kron(a, a)
    return float(torch.linalg.solve(system, noise.flatten())[0])


# ---- samplers among each other, and noisy gradients ---------------------------------------------


def test_sghmc_without_memory_is_sgld_with_averaged_noise():
    """The first step has half of a pair, R_0; step k ≥ 1 has (R_{k−1} + R_k)/2."""
    values = {"lr": 0.3, "nbeta": 2.0, "localization": 0.5, "weight_decay": 0.2, "noise_level": 1.2}
    normal = normals(1)
    center = normal(1, 7)[0]
    one = center.expand(3, -1).clone()
    two = one.clone()
    sghmc, sgld = SGHMCKernel(friction=1.0, **values), SGLDKernel(**values)
    buffers, before = sghmc.init(one), torch.zeros(3, 7, dtype=torch.float64)
    for _ in range(30):
        noise = normal(3, 7)
        sghmc.step(one, one.cos(), center, noise, buffers)
        sgld.step(two, two.cos(), center, (before + noise) / 2, {})
        before = noise
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("friction", [1.0, 0.3])
def test_noise_of_the_gradient_widens_sghmc_by_its_law(friction):
    """Variance c of nβ·g: excess (ε/4)·c·speed, exactly."""
    h = torch.tensor([0.3, 1.0], dtype=torch.float64)
    kernel = SGHMCKernel(lr=0.1, nbeta=NBETA, friction=friction)
    assert kernel.speed == pytest.approx((2 - friction) / friction)
    size = 1.5
    law = 1 + 0.1 / 4 * size**2 * kernel.speed
    chains = Chains(kernel, h, gradient_noise=size, rows=8000)
    chains.advance(300)
    check(chains.squares(40, 20), law, most=0.004)


def test_speed_is_how_fast_slow_directions_forget_their_start():
    """E w decays as e^{−ε a speed/2}."""
    h = torch.tensor([1e-4], dtype=torch.float64)
    for kernel in (
        SGLDKernel(lr=1.0, nbeta=1.0, noise_level=0.0),
        SGHMCKernel(lr=1.0, nbeta=1.0, noise_level=0.0),
        SAMPLERS["AdamSGLD"].kernel(lr=1.0, nbeta=1.0, noise_level=0.0, eps=1.0, form="devinterp", alpha=0.0),
    ):
        chains = Chains(kernel, h, rows=1)
        chains.position.fill_(1e-4)  # so small that G = 1/(|g| + 1) is 1
        chains.advance(100)
        start = float(chains.position)
        chains.advance(200)
        rate = -math.log(float(chains.position) / start) / 200
        assert rate == pytest.approx(1e-4 / 2 * kernel.speed, rel=0.02)


@pytest.mark.parametrize("size", [1, 6])
def test_a_thermostat_takes_up_even_noise_of_the_gradient(size):
    """Without it the excess would be (ε/4)·c·speed = 25 %; localization is part of the target."""
    h = torch.full((size,), 0.8, dtype=torch.float64)
    kernel = SGNHTKernel(lr=0.1, nbeta=NBETA, localization=0.2, friction=0.2)
    chains = Chains(kernel, h, rows=8000, gradient_noise=1.0)
    assert kernel.lr / 4 * kernel.speed == pytest.approx(0.25, rel=0.01)
    chains.advance(3000)
    values = chains.squares(40, 10).mean(0).mean(1)
    assert float(values.std() / math.sqrt(8000)) < 0.005
    assert abs(float(values.mean()) - 1) < 0.008  # second order in ε is left
    thermostat = float(chains.buffers["thermostat"].mean())
    assert thermostat == pytest.approx(0.2 + 0.1 / 2, rel=0.1)  # A and half the variance of a kick


@pytest.mark.slow
def test_a_thermostat_of_two_entries_leaves_their_tails_alone():
    """E (a w₁²)² (a w₂²)² = 9; with swings of the friction as large as itself it is 1.6 % more."""
    deviations = []
    for mass in (None, 50.0):
        kernel = SGNHTKernel(lr=0.25, nbeta=NBETA, thermal_mass=mass)
        chains = Chains(kernel, torch.ones(2, dtype=torch.float64), rows=20_000)
        chains.advance(600)
        products = chains.squares(700, 5).prod(2).square().mean(0) / 9
        deviations.append((float(products.mean() - 1), float(products.std() / math.sqrt(20_000))))
    (right, error), (wrong, other) = deviations
    assert max(error, other) < 0.005
    assert abs(right) < 4 * error
    assert wrong > 4 * other


def test_a_thermostat_corrects_injected_noise_of_the_wrong_size():
    kernel = SGNHTKernel(lr=0.1, nbeta=NBETA, friction=0.2)
    chains = Chains(kernel, torch.full((6,), 1.0, dtype=torch.float64))
    exact, chains.normal = chains.normal, lambda *shape: 1.3 * exact(*shape)
    chains.advance(600)
    check(chains.squares(30, 20), 1.0, most=0.004)


def test_reflection_at_the_box_keeps_the_law_inside_it():
    """SGHMC and SGNHT with velocities turned round: the truncated Gaussian's variance."""
    for kind in (SGHMCKernel, SGNHTKernel):
        kernel = kind(lr=0.02, nbeta=1.0, bounding_box_size=1.0, friction=0.2)
        chains = Chains(kernel, torch.ones(2, dtype=torch.float64), rows=6000)
        chains.position.clamp_(-1, 1)
        chains.advance(200)
        inside = math.sqrt(2 / math.pi) * math.exp(-0.5) / math.erf(1 / math.sqrt(2))
        check(chains.squares(40, 25), 1 - inside, most=0.003)


# ---- corners ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SGHMCKernel, SGNHTKernel])
def test_a_wall_that_clamps_stops_the_entry_and_no_other(kind):
    kernel = kind(lr=1.0, nbeta=1.0, bounding_box_size=1.0, bounding_box="clamp", noise_level=0.0)
    position, center = torch.tensor([[0.0, 0.0]]), torch.zeros(2)
    buffers = kernel.init(position)
    kernel.step(position, torch.tensor([[-5.0, -0.1]]), center, torch.zeros(1, 2), buffers)
    assert position[0, 0] == 1.0
    assert buffers["velocity"][0, 0] == 0.0
    assert buffers["velocity"][0, 1] > 0.0


def test_a_thermostat_at_zero_adds_noise_and_takes_nothing():
    """The limit of (1 − e^{−2ξ})/ξ is 2."""
    kernel = SGNHTKernel(lr=1.0, nbeta=1.0, friction=0.5, thermal_mass=2.0)
    position, noise = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
    buffers = kernel.init(position)
    buffers["thermostat"].fill_(1 / 4)  # at rest the first half step takes 1/(2Q) off
    kernel.step(position, torch.zeros_like(position), position[0].clone(), noise, buffers)
    assert torch.equal(buffers["velocity"], noise)  # √(2A) = 1
    assert abs(float(buffers["thermostat"])) < 1e-15


def test_a_thermostat_of_many_single_precision_entries_is_precise():
    """One running sum would be off by 2e-5 here, and stand still at some 1e8 entries."""
    velocity = normals(3)(1, 1_000_000).float()
    kernel = SGNHTKernel(lr=1e-30, nbeta=1.0, noise_level=1e-20, friction=1e-20, thermal_mass=1.0)
    position = torch.zeros_like(velocity)
    buffers = {"velocity": velocity.clone(), "thermostat": torch.zeros(1, 1)}
    kernel.step(position, position.clone(), position[0].clone(), position.clone(), buffers)
    mean = float(velocity.double().square().mean())
    expected = mean / 2 * (1 + math.exp(-mean))  # two half steps, the velocity damped by e^{−ξ} between
    assert float(buffers["thermostat"]) == pytest.approx(expected, rel=1e-6)
