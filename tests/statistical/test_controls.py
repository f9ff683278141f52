"""Negative controls: samplers that are wrong in one way fail the checks that right ones pass.

The checks are Gaussian cases with known values, |z| < 4 at a standard error of at most 0.4 % and a
deviation of at most 1 %, at ε a_max = 1.
"""

import dataclasses

import pytest
import torch

from devsample.samplers import SAMPLERS
from devsample.samplers.sgld import SGLD, SGLDKernel
from devsample.testing import case
from devsample.testing.potentials import Quadratic
from tests.statistical.chains import chains, check, read, read_on

pytestmark = pytest.mark.truths

MOST, WITHIN = 0.004, 0.01

# Case, chains, steps of burn-in, draws and steps between them (HMC: a quarter of the steps).
CASES = {
    "quad_1d": (1000, 1000, 300, 8),
    "quad_10d_iso_g0": (200, 400, 150, 8),
    "quad_rankdef_100d_r10_g100": (64, 1000, 280, 20),
}


def make(kind, one, **values):
    """A kernel at ε G a ≤ 1; ``kind`` is a name or a kernel's class."""
    kind = SAMPLERS[kind].kernel if isinstance(kind, str) else kind
    given = {"nbeta": one.nbeta, "localization": one.gamma, **values}
    largest = one.nbeta * float(one.hessian_max(one.center[None])) + one.gamma
    return kind(lr=1 / (largest * kind(lr=1.0, **given).scale), **given)


def run(kind, name, **values):
    """Burn in and read one case."""
    one, (rows, burnin, draws, between) = case(name), CASES[name]
    kernel = make(kind, one, **values)
    if kernel.full_data:
        burnin, between = burnin // 4, between // 4
    return read(
        chains(one.potential, kernel, rows, seed=1), one.nbeta, burnin=burnin, draws=draws, between=between
    )


def passes(kind, name, **values):
    """Check one case."""
    check(run(kind, name, **values), case(name).expected, most=MOST, within=WITHIN)


def is_noticed(reading, expected):
    """Whether the check fails, and not for lack of draws."""
    with pytest.raises(AssertionError, match="standard errors from"):
        check(reading, expected, most=MOST, within=WITHIN)
    return True


# ---- right and wrong kernels --------------------------------------------------------------------

RIGHT = {
    "SGLD": {},
    "SGHMC": {"friction": 0.5},
    "SGNHT": {"friction": 0.5},
    "RMSPropSGLD": {},
    "HMC": {"num_leapfrog_steps": 2, "adapt": False},
}


def altered(kind, name, change):
    """A subclass of a sampler's kernel whose step gets other arguments: ``change`` makes them."""

    def step(self, position, gradient, center, noise, buffers):
        kind.step(self, position, *change(position, gradient, center, noise), buffers)

    return dataclasses.dataclass(frozen=True, kw_only=True)(type(name, (kind,), {"step": step}))


def too_much_noise(position, gradient, center, noise):
    return gradient, center, 1.05 * noise


def no_localization(position, gradient, center, noise):
    return gradient, position.clone(), noise


def too_cold(position, gradient, center, noise):
    return 1.05 * gradient, center, noise


def too_hot(position, gradient, center, noise):
    return 0.95 * gradient, center, noise


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", RIGHT)
def test_right_samplers_pass_every_check(kind, name):
    passes(kind, name, **RIGHT[kind])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (too_much_noise, "quad_10d_iso_g0"),
        (no_localization, "quad_rankdef_100d_r10_g100"),
        (too_cold, "quad_10d_iso_g0"),
        (too_hot, "quad_10d_iso_g0"),
    ],
)
@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "SGNHT", "RMSPropSGLD"])
def test_wrong_samplers_fail(kind, change, name):
    wrong = altered(SAMPLERS[kind].kernel, f"Wrong{kind}", change)
    if kind == "SGNHT" and change is too_much_noise:  # which is what its thermostat is for
        passes(wrong, name, **RIGHT[kind])
        assert is_noticed(run(kind, name, noise_level=1.05, **RIGHT[kind]), case(name).expected)
        return
    assert is_noticed(run(wrong, name, **RIGHT[kind]), case(name).expected)


def test_hmc_with_momenta_of_the_wrong_size_fails():
    """Accepted as if they were right."""

    class Wrong(SAMPLERS["HMC"].kernel):
        def transition(self, position, center, noise, uniform, potential, buffers):
            super().transition(position, center, 1.05 * noise, uniform, potential, buffers)

    name = "quad_10d_iso_g0"
    assert is_noticed(run(Wrong, name, **RIGHT["HMC"]), case(name).expected)


# ---- burn-in ------------------------------------------------------------------------------------


def test_draws_of_burn_in_are_noticed():
    """From w* without burn-in, over some relaxation times; the same number of draws after it is right."""
    one, (rows, *_) = case("quad_10d_iso_g0"), CASES["quad_10d_iso_g0"]

    def drive():
        return chains(one.potential, make("SGLD", one), 20 * rows, seed=2)

    early = read_on(drive(), one.nbeta, draws=20)
    assert is_noticed(early, one.expected)
    check(read(drive(), one.nbeta, burnin=40, draws=20), one.expected, most=MOST, within=WITHIN)


# ---- a preconditioner that goes on moving -------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_preconditioner_that_does_not_freeze_is_noticed(is_frozen):
    """At a fifth of the largest step, where its averages follow the gradient."""

    class Moving(SAMPLERS["RMSPropSGLD"].kernel):
        def freeze(self, buffers):
            """Forgotten."""

    one = case("quad_1d")
    kernel = make(SAMPLERS["RMSPropSGLD"].kernel if is_frozen else Moving, one)
    kernel = dataclasses.replace(kernel, lr=kernel.lr / 5)
    drive = chains(one.potential, kernel, 1000, seed=3)
    reading = read(drive, one.nbeta, burnin=3000, draws=280, between=30)
    if is_frozen:
        check(reading, one.expected, most=MOST, within=WITHIN)
    else:
        assert is_noticed(reading, one.expected)


# ---- frozen parameters --------------------------------------------------------------------------

MIXED = Quadratic([1.0, 0.5, 1.0, 2.0, 0.7, 1.5])
MOVING = torch.tensor([True, False, True, True, False, True])
NBETA, GAMMA, ROWS = 100.0, 100.0, 1000


class OnlyTheGradientIsMasked(SGLD):
    """Takes a mask for the gradient; noise and localization go everywhere."""

    def __init__(self, params, *, masks, **others):
        super().__init__(params, **others)
        self.still = masks

    def step(self, closure=None):
        for parameter, mask in self.still.items():
            parameter.grad.masked_fill_(~mask, 0.0)
        return super().step(closure)


def masked_run(kind):
    """Chains as the rows of one parameter of an optimizer."""
    w = torch.nn.Parameter(torch.zeros(ROWS, 6, dtype=torch.float64))
    sampler = kind(
        [w],
        masks={w: MOVING.expand(ROWS, -1)},
        lr=1 / (2 * NBETA + GAMMA),
        nbeta=NBETA,
        localization=GAMMA,
        generator=torch.Generator().manual_seed(4),
    )

    class Rows:
        """A `Drive` of the optimizer."""

        def advance(self, steps):
            for _ in range(steps):
                w.grad = MIXED.gradient(w.detach())
                sampler.step()

        def freeze(self):
            pass

        def losses(self):
            return MIXED(w.detach())

    return read(Rows(), NBETA, burnin=100, draws=250, between=5), w.detach()


def test_noise_on_frozen_parameters_is_noticed():
    h = torch.tensor([1.0, 1.0, 2.0, 1.5], dtype=torch.float64)  # those that move
    expected = float((NBETA * h / (2 * (NBETA * h + GAMMA))).sum())
    reading, w = masked_run(SGLD)
    check(reading, expected, most=MOST, within=WITHIN)
    assert not w[:, ~MOVING].any()
    reading, _ = masked_run(OnlyTheGradientIsMasked)
    assert is_noticed(reading, expected)


def test_the_checks_measure_what_they_say():
    """A check without draws enough to tell does not pass."""
    one = case("quad_1d")
    kernel = make(SGLDKernel, one)
    reading = read(chains(one.potential, kernel, 100, seed=5), one.nbeta, burnin=100, draws=5)
    with pytest.raises(AssertionError, match="the error bar is too large"):
        check(reading, one.expected, most=MOST, within=WITHIN)
