"""The closed form for deep linear networks, against independent formulas and its own laws."""

import importlib.resources
import itertools
import json
from fractions import Fraction

import pytest

from devsample.errors import InvalidArgumentError
from devsample.testing import all_cases, dln_learning_coefficient

LISTED = json.loads(
    importlib.resources.files("devsample.testing").joinpath("cases.json").read_text(encoding="utf-8")
)["deep_linear"]


@pytest.mark.parametrize("one", LISTED, ids=lambda one: f"{len(one['widths'])}-{one['rank']}")
def test_listed_values(one):
    found = dln_learning_coefficient(one["widths"], one["rank"])
    assert found == (Fraction(one["value"]), one["multiplicity"])


def test_there_are_twenty_three_listed_values():
    assert len(LISTED) == 23


def strata(m, h, n):
    """One hidden layer, truth 0: k singular values of W_1 are small.

    That costs k (k + |m − h|) entries of W_1, and W_2 has to vanish on the other directions, at n
    entries each. The least cost is 2λ; with several least ones, as many powers of ln nβ come up.
    """
    few = min(m, h)
    costs = [k * (k + abs(m - h)) + n * (few - k) for k in range(few + 1)]
    return Fraction(min(costs), 2), costs.count(min(costs))


def diversity(widths):
    """A product of Gaussian matrices is small in norm with probability ε^(2λ), by another closed form.

    The exponents c_i of the outage of a Rayleigh product channel (S. Yang and J.-C. Belfiore,
    "Diversity-multiplexing tradeoff of double scattering MIMO channels", IEEE Trans. Inf. Theory 57
    (2011)), c_i = 1 − i + min_k ⌊(n_0 + … + n_k − i)/k⌋, widths in ascending order.
    """
    n = sorted(widths)
    sums = list(itertools.accumulate(n))
    return sum(1 - i + min((sums[k] - i) // k for k in range(1, len(n))) for i in range(1, n[0] + 1))


def test_one_hidden_layer_agrees_with_strata_of_reduced_rank_regression():
    for m, h, n in itertools.product(range(1, 9), repeat=3):
        for r in range(min(m, h, n) + 1):
            value, multiplicity = strata(m - r, h - r, n - r)
            regular = Fraction(r * (m + n - r), 2)
            assert dln_learning_coefficient([m, h, n], r) == (value + regular, multiplicity), (m, h, n, r)


def test_any_depth_agrees_with_the_diversity_of_product_channels():
    for depth in range(2, 6):
        for widths in itertools.product(range(1, 6), repeat=depth + 1):
            r = sum(widths) % (min(widths) + 1)
            regular = Fraction(r * (widths[0] + widths[-1] - r), 2)
            singular = Fraction(diversity([d - r for d in widths]), 2)
            assert dln_learning_coefficient(widths, r).value == regular + singular, (widths, r)


@pytest.mark.parametrize("one", LISTED, ids=lambda one: f"{len(one['widths'])}-{one['rank']}")
def test_reversed_widths_have_the_same_coefficient(one):
    assert dln_learning_coefficient(one["widths"][::-1], one["rank"]) == dln_learning_coefficient(
        one["widths"], one["rank"]
    )


def test_rises_with_the_rank_and_with_every_width_and_is_bounded():
    for widths in itertools.product(range(1, 5), repeat=4):
        values = [dln_learning_coefficient(widths, r).value for r in range(min(widths) + 1)]
        assert values == sorted(values)
        for i in range(4):
            wider = [d + (i == j) for j, d in enumerate(widths)]
            for r, value in enumerate(values):
                assert dln_learning_coefficient(wider, r).value >= value
        parameters = sum(a * b for a, b in itertools.pairwise(widths))
        assert values[-1] <= Fraction(min(parameters, widths[0] * widths[-1]), 2)


@pytest.mark.parametrize("widths", [[4, 4], [3, 7], [3, 5, 4, 4], [2, 9, 2]])
def test_full_rank_is_regular_over_the_products(widths):
    """Where the product can be any matrix near the truth, λ is half of its number of entries."""
    full = min(widths)
    assert full in (widths[0], widths[-1])
    expected = (Fraction(widths[0] * widths[-1], 2), 1)
    assert dln_learning_coefficient(widths, full) == expected


def test_no_hidden_layer_is_linear_regression():
    assert dln_learning_coefficient([6, 4], 0) == dln_learning_coefficient([6, 4], 3) == (12, 1)


@pytest.mark.parametrize("layers", [1, 2, 3, 7])
def test_width_one_is_a_normal_crossing(layers):
    assert dln_learning_coefficient([1] * (layers + 1), 0) == (Fraction(1, 2), layers)
    assert dln_learning_coefficient([1] * (layers + 1), 1) == (Fraction(1, 2), 1)


def test_cases_of_the_suite_have_these_limits():
    count = 0
    for one in all_cases():
        given = one.parameters
        if one.kind in ("rrr_zero", "rrr_rank1"):
            widths, rank = [given["m"], given["h"], given["n"]], int(one.kind == "rrr_rank1")
        elif one.kind in ("dln_deep1", "dln_hmc_reference"):
            widths, rank = given["widths"], given.get("rank", 0)
        else:
            continue
        found = dln_learning_coefficient(widths, rank)
        assert (float(found.value), found.multiplicity) == (one.asymptotic_lambda, one.multiplicity)
        count += 1
    assert count == 28


def test_values_are_exact_at_any_size():
    d = 10**9 + 1
    assert dln_learning_coefficient([d] * 4, 0) == (Fraction(d * d, 3) + Fraction(1, 6), 3)


@pytest.mark.parametrize(
    ("widths", "rank", "named"),
    [
        ([3], 0, "widths"),
        ([], 0, "widths"),
        ([3, 0, 3], 0, "widths"),
        ([3, 2.5], 0, "widths"),
        ([3, True], 0, "widths"),
        ([3, 2, 3], 3, "rank"),
        ([3, 2, 3], -1, "rank"),
        ([3, 2, 3], 0.5, "rank"),
    ],
)
def test_values_out_of_range_are_named(widths, rank, named):
    with pytest.raises(InvalidArgumentError, match=rf"^{named}: "):
        dln_learning_coefficient(widths, rank)
