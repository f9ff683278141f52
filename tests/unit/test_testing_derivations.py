"""The expected value of every case, found again from its definition.

With Z(nβ) = ∫ exp(−nβ L − γ/2 |w − w*|²) dw and L(w*) = 0, nβ E[L] = −d ln Z / d ln nβ. Each kind
has its Z after all integrals that can be done on paper; the others are sums over grids. Z is analytic
in nβ, so its derivative is the imaginary part at nβ (1 + iδ) over δ, exact for tiny δ.
docs/truths.md has the mathematics.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import special

from devsample.testing import all_cases, case
from devsample.testing.potentials import half_normal_rule

DELTA = 1e-30


def estimate(log_partition, nbeta):
    """−d ln Z / d ln nβ."""
    return -log_partition(nbeta * (1 + 1j * DELTA)).imag / DELTA


def log_sum(exponents, weights=1.0):
    """ln Σ weights · exp(exponents), complex."""
    top = exponents.real.max()
    return top + np.log((weights * np.exp(exponents - top)).sum())


def panels(*edges, nodes=40):
    """Gauss–Legendre on every interval between edges: nodes and weights."""
    u, v = np.polynomial.legendre.leggauss(nodes)
    ends = np.array(edges, dtype=float)
    half = np.diff(ends) / 2
    return (half[:, None] * u + (ends[1:] + ends[:-1])[:, None] / 2).ravel(), (half[:, None] * v).ravel()


# --- one Z for each kind -------------------------------------------------------------------------


def quadratic(one, nbeta):
    h = np.array(one.parameters["h"] * one.parameters.get("copies", 1), dtype=float)
    return -np.log(nbeta * h + one.gamma).sum() / 2


def quadratic_offset(one, nbeta):
    """exp(−nβ Σ h (w − c)²/2 + nβ Σ h c²/2 − γ w²/2): complete the square."""
    h, c = (np.array(one.parameters[name]) for name in ("h", "c"))
    precision = nbeta * h + one.gamma
    return ((nbeta * h * c) ** 2 / precision - np.log(precision)).sum() / 2


def linear_regression(one, nbeta):
    random = np.random.RandomState(one.parameters["seed"])
    n, d = one.parameters["n"], one.parameters["d"]
    x = random.randn(n, d) * 10 ** np.linspace(-0.5, 0.5, d)
    h = np.linalg.svd(x, compute_uv=False) ** 2 * 2 / n
    return -np.log(nbeta * h + one.gamma).sum() / 2


def normal_crossing(one, nbeta):
    """In t = ln w; one entry with k = 1 is Gaussian given the others."""
    powers = sorted(k for k in one.parameters["k"] if k)
    given = powers[1:] if powers[0] == 1 else powers
    if not given:
        return -np.log(one.gamma + 2 * nbeta) / 2
    step = {1: 0.002, 2: 0.03, 3: 0.2}[len(given)]
    t = np.arange(-27, 2.7 - math.log(one.gamma) / 2, step)
    grids = np.meshgrid(*[t] * len(given), indexing="ij", sparse=True)
    loss = sum(2 * k * grid for k, grid in zip(given, grids, strict=True))
    prior = sum(grid - one.gamma / 2 * np.exp(2 * grid) for grid in grids)
    if powers[0] == 1:
        return log_sum(prior - np.log(one.gamma + 2 * nbeta * np.exp(loss)) / 2)
    return log_sum(prior - nbeta * np.exp(loss))


def normal_crossing_shifted(one, nbeta):
    """w_1 is Gaussian given w_2; its center is 1 or 0."""
    (_, k), (at, other) = one.parameters["k"], one.parameters["center"]
    small = 10.0 ** np.arange(-6, 0)
    w, weights = panels(*-small[::-1], 0, *small, *np.arange(0.2, 5, 0.2), nodes=30)
    left, left_weights = panels(*np.arange(-5, 0, 0.2), -0.1, nodes=30)
    w, weights = np.append(left, w), np.append(left_weights, weights)
    precision = one.gamma + 2 * nbeta * w ** (2 * k)
    shift = (one.gamma * at) ** 2 / (2 * precision) - one.gamma * at**2 / 2
    return log_sum(shift - one.gamma / 2 * (w - other) ** 2 - np.log(precision) / 2, weights)


def normal_crossing_box(one, nbeta):
    """x = Π w^{2k} = e^{−v} has density x^{μ−1} or a convolution of two of them, μ = 1/(2k)."""
    rates = [1 / (2 * k) for k in one.parameters["k"] if k]
    v, weights = panels(*np.arange(0, 40, 0.5), *10.0 ** np.arange(1.7, 3, 0.1), nodes=20)
    if len(rates) == 1:
        density = np.exp(-rates[0] * v)
    elif rates[0] == rates[1]:
        density = v * np.exp(-rates[0] * v)
    else:
        density = (np.exp(-rates[1] * v) - np.exp(-rates[0] * v)) / (rates[0] - rates[1])
    return log_sum(-nbeta * one.parameters["c"] * np.exp(-v), density * weights)


def rrr_zero(one, nbeta):
    """B integrated out; then ordered eigenvalues of AAᵀ, one nested integral for each."""
    m, h, n, c = (one.parameters[name] for name in "mhnc")
    t = np.linspace(-60, 6.5, 200_001)
    s = np.exp(t)
    f = (m - h + 1) / 2 * t - one.gamma * s / 2 - n / 2 * np.log(one.gamma + 2 * nbeta * c * s)
    f = np.exp(f - f.real.max())
    total = 0
    for order in itertools.permutations(range(h)):
        sign = np.linalg.det(np.eye(h)[list(order)])
        inner = np.ones_like(f)
        for power in order:  # from the least eigenvalue up
            steps = f * s**power * inner
            inner = np.append(0, np.cumsum(steps[1:] + steps[:-1])) * (t[1] - t[0]) / 2
        total = total + sign * inner[-1]
    return np.log(total)


def rrr_rank1(one, nbeta):
    """b integrated out; a = R (cos θ, sin θ · unit vector)."""
    m, n, sigma = one.parameters["m"], one.parameters["n"], one.parameters["sig"]
    gamma = one.gamma
    radius, radius_weights = panels(0, *2.0 ** np.arange(-6, 1), *np.arange(1.5, 16, 0.5), nodes=16)
    ends = math.pi / 2 * 2.0 ** np.arange(-9, 1)
    angle, angle_weights = panels(0, *ends, *(math.pi - ends[-2::-1]), math.pi, nodes=24)
    r, theta = radius[:, None], angle[None, :]
    precision = gamma + 2 * nbeta * r**2
    mean = 2 * nbeta * sigma * r * np.cos(theta) + gamma * math.sqrt(sigma)  # times precision
    exponent = mean**2 / (2 * precision) - nbeta * sigma**2 - n / 2 * np.log(precision)
    exponent = exponent - gamma / 2 * (r**2 - 2 * math.sqrt(sigma) * r * np.cos(theta))
    exponent = exponent + (m - 1) * np.log(r) + (m - 2) * np.log(np.sin(theta))
    return log_sum(exponent, radius_weights[:, None] * angle_weights)


def dln_deep1(one, nbeta):
    """b integrated out; w and |a| in logarithms."""
    size, _, _, outputs = one.parameters["widths"]
    t = np.arange(-27, 2.7, 0.05)
    w, a = t[:, None], t[None, :]
    prior = w + size * a - one.gamma / 2 * (np.exp(2 * w) + np.exp(2 * a))
    return log_sum(prior - outputs / 2 * np.log(one.gamma + 2 * nbeta * np.exp(2 * (w + a))))


X = np.arange(0.005, 9, 0.01)  # E over N(0, 1) of an even function: the midpoint rule
NORMAL = 2 * 0.01 * np.exp(-(X**2) / 2) / math.sqrt(2 * math.pi)


def tanh_zero(one, nbeta):
    """The second layer integrated out: det(γ I + 2 nβ G)^{−1/2}, G_ij = E tanh(b_i x) tanh(b_j x)."""
    gamma, t = one.gamma, np.arange(-27, 2.5, 0.1)
    if one.parameters["H"] == 1:
        gram = np.tanh(np.exp(t)[:, None] * X) ** 2 @ NORMAL
        return log_sum(t - gamma / 2 * np.exp(2 * t) - np.log(gamma + 2 * nbeta * gram) / 2)
    t = t[t > -17]  # b_1 > b_2 > 0: b_1 = e^t, b_2 = b_1 τ/(1 + τ)
    ln_tau = np.arange(-26, 26, 0.2)
    exponents = []
    for first, u in zip(np.exp(t), t, strict=True):
        second = first * special.expit(ln_tau)
        one_unit, other = np.tanh(first * X), np.tanh(second[:, None] * X)
        g11, g22, g12 = one_unit**2 @ NORMAL, other**2 @ NORMAL, (other * one_unit) @ NORMAL
        determinant = gamma**2 + 2 * nbeta * gamma * (g11 + g22) + 4 * nbeta**2 * (g11 * g22 - g12**2)
        area = 2 * u + np.log(special.expit(ln_tau)) + np.log(special.expit(-ln_tau))
        exponents.append(area - gamma / 2 * (first**2 + second**2) - np.log(determinant) / 2)
    return log_sum(np.concatenate(exponents))


def wishart_c_integral(alpha, beta, gamma):
    """∫ exp(−γc/2) (α + βc)^{−3/2} dc over c > 0."""
    x = gamma * alpha / (2 * beta)
    with np.errstate(invalid="ignore"):
        exact = 2 * alpha**-0.5 / beta * (1 - np.sqrt(np.pi * x) * special.erfcx(np.sqrt(x)))
    series = 2 / gamma * alpha**-1.5 * (1 - 1.5 / x + 3.75 / x**2)
    return np.where(x < 1e4, exact, series)


def three_layers(nbeta, gamma, step=0.35):
    """ln Z of |W_3 W_2 W_1|² for widths 3, 2, 2, 3 up to a constant; docs/truths.md has the steps."""
    first, ratio = np.arange(-9, 3.5, step), np.arange(-20, 7, step)  # ln l_1 γ, ln τ
    p, q = np.arange(-7, 3.5, step), np.arange(-20, 3.5, step)  # ln pγ, ln qγ
    first, ratio, p, q = np.meshgrid(first, ratio, p, q, indexing="ij", sparse=True)
    l1, part, p_, q_ = np.exp(first) / gamma, special.expit(ratio), np.exp(p) / gamma, np.exp(q) / gamma
    l2, kappa = l1 * part, 2 * nbeta
    alpha = gamma**2 + gamma * kappa * (l1 * p_ + l2 * q_)
    beta = gamma * kappa * l2 + kappa**2 * l1 * l2 * p_
    # (l_1 l_2)^{−½} (l_1 − l_2) dl_1 dl_2 p^{½} dp q^{−½} dq in the logarithms
    density = np.log(l1) * 2 + 0.5 * np.log(part) + 2 * special.log_expit(-ratio) + 1.5 * p + 0.5 * q
    weight = np.exp(density - gamma / 2 * (l1 + l2 + p_ + q_))
    return math.log((weight * wishart_c_integral(alpha, beta, gamma)).sum())


PARTITION = {
    function.__name__: function
    for function in (
        quadratic, quadratic_offset, linear_regression, normal_crossing, normal_crossing_shifted,
        normal_crossing_box, rrr_zero, rrr_rank1, dln_deep1, tanh_zero,
    )
}  # fmt: skip


def recomputed(one):
    return estimate(lambda nbeta: PARTITION[one.kind](one, nbeta), one.nbeta)


# --- tests ---------------------------------------------------------------------------------------

TYPICAL = [
    "quad_20d_spread", "quad_not_at_minimum_negative", "linreg_n512_d8", "crossing_3_nb1e+06",
    "crossing_23_nb100", "crossing_211_nb100", "crossing_12_at_1_0_nb1000",
    "crossing_box_13_devinterp_notebook", "rrr_1_1_1_zero_nb1e+06", "rrr_5_2_4_zero_nb1000",
    "rrr_8_3_4_zero_nb10000", "rrr_4_1_3_rank1_nb10000", "dln_5_1_1_4_zero_nb1e+06", "tanh_H1_nb1e+06",
]  # fmt: skip
DERIVED = [one for one in all_cases() if one.kind in PARTITION]
PLAIN = [one for one in DERIVED if one.name in TYPICAL]


def check(one):
    assert recomputed(one) == pytest.approx(one.expected, rel=2e-5)


@pytest.mark.parametrize("one", PLAIN, ids=lambda one: one.name)
def test_expected_value_follows_from_the_definition(one):
    check(one)


@pytest.mark.slow
@pytest.mark.truths
@pytest.mark.parametrize("one", [one for one in DERIVED if one not in PLAIN], ids=lambda one: one.name)
def test_every_other_expected_value_follows_too(one):
    check(one)


def test_each_kind_is_derived():
    kinds = {one.kind for one in all_cases()}
    assert kinds == {*PARTITION, "dln_hmc_reference"} == {one.kind for one in PLAIN} | {"dln_hmc_reference"}


def test_a_wrong_nbeta_is_seen():
    one = case("rrr_5_2_4_zero_nb1000")
    assert estimate(lambda nbeta: rrr_zero(one, nbeta), 1.05 * one.nbeta) != pytest.approx(
        one.expected, rel=2e-5
    )


@pytest.mark.parametrize("one", DERIVED, ids=lambda one: one.name)
def test_expected_value_lies_between_zero_and_its_bounds(one):
    """A nonnegative loss around its minimum gives 0 < λ̂ < P/2."""
    if one.kind != "quadratic_offset":
        assert 0 < one.expected <= one.num_parameters / 2


def test_scaling_laws_tie_cases_together():
    """nβ w^{2k} and γ w² keep their form when w is scaled: nβ/γ^Σk alone matters."""
    assert case("crossing_11_nb1e4_g10").expected == pytest.approx(case("crossing_11_nb100").expected)
    assert case("crossing_02_nb100").expected == case("crossing_2_nb100").expected
    # (1, 1, 1): |b|² |a|² is the crossing of two
    assert case("rrr_1_1_1_zero_nb1e+06").expected == pytest.approx(
        case("crossing_11_nb1e+06").expected, rel=1e-6
    )


def test_three_layers_by_integrals():
    """The reference by simulation is within three of its standard errors of the exact value."""
    one, d = case("dln_hmc_3_2_2_3_r0"), 0.05
    f = {k: three_layers(one.nbeta * math.exp(k * d), one.gamma, 0.5) for k in (-2, -1, 1, 2)}
    exact = (f[2] - f[-2] - 8 * (f[1] - f[-1])) / (12 * d)
    assert exact == pytest.approx(1.09625, abs=2e-5)
    assert abs(one.expected - exact) < 3 * one.standard_error


def hamiltonian_monte_carlo(one, *, chains, burnin, trajectories, step, seed):
    """λ̂ of every chain by Metropolis-corrected HMC with random trajectory lengths; and the acceptance."""
    random = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(chains, one.num_parameters, generator=random, dtype=torch.float64)

    def energy(w):
        return one.nbeta * one.potential(w) + one.gamma / 2 * (w - one.center).square().sum(1)

    def force(w):
        return -one.nbeta * one.gradient(w) - one.gamma * (w - one.center)

    w = one.center + normal() / math.sqrt(one.nbeta)
    at, total, accepted = energy(w), torch.zeros(chains, dtype=torch.float64), 0.0
    for number in range(burnin + trajectories):
        momentum = normal()
        before = at + momentum.square().sum(1) / 2
        v, count = w, int(torch.randint(10, 60, (), generator=random))
        momentum = momentum + step / 2 * force(v)
        for i in range(count):
            v = v + step * momentum
            momentum = momentum + (step if i < count - 1 else step / 2) * force(v)
        there = energy(v)
        after = there + momentum.square().sum(1) / 2
        take = torch.rand(chains, generator=random, dtype=torch.float64).log() < before - after
        w, at = torch.where(take[:, None], v, w), torch.where(take, there, at)
        if number >= burnin:
            total += one.nbeta * one.potential(w) / trajectories
            accepted += float(take.double().mean()) / trajectories
    return total, accepted


@pytest.mark.slow
@pytest.mark.truths
@pytest.mark.parametrize("one", all_cases("dln_hmc_reference"), ids=lambda one: one.name)
def test_reference_by_simulation_is_found_again(one):
    estimates, accepted = hamiltonian_monte_carlo(
        one, chains=500, burnin=60, trajectories=200, step=0.012, seed=0
    )
    assert accepted > 0.6
    error = math.hypot(float(estimates.std()) / math.sqrt(len(estimates)), one.standard_error)
    assert error < 0.005 * one.expected
    assert abs(float(estimates.mean()) - one.expected) < 4 * error


def test_quadrature_over_inputs_has_converged():
    """The tanh potential's rule, against the midpoint rule, whose error is exp(−2π · distance/step)."""
    x, weights = half_normal_rule()
    b = np.array([1e-3, 0.03, 0.3, 1, 2, 3, 4, 5, 6])
    rule = (np.tanh(np.outer(b, x)) * weights) @ np.tanh(np.outer(b, x)).T
    exact = (np.tanh(np.outer(b, X)) * NORMAL) @ np.tanh(np.outer(b, X)).T
    assert np.abs(rule - exact).max() < 1e-10
    assert weights.sum() == pytest.approx(1, abs=1e-10)
    few, few_weights = half_normal_rule(nodes=16)
    assert np.abs((np.tanh(np.outer(b, few)) ** 2) @ few_weights - np.diag(exact)).max() > 1e-7
