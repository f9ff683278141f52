"""The learning coefficient of deep linear networks in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from devsample.testing.factors import check_widths

__all__ = ["LearningCoefficient", "dln_learning_coefficient"]


class LearningCoefficient(NamedTuple):
    """A learning coefficient and its multiplicity.

    The free energy is nβ L(w*) + λ ln nβ − (m − 1) ln ln nβ + O(1), and
    nβ (E[L] − L(w*)) = λ − (m − 1)/ln nβ + … at large nβ.

    Attributes:
        value: λ.
        multiplicity: m ≥ 1.
    """

    value: Fraction
    multiplicity: int


def dln_learning_coefficient(widths: Sequence[int], rank: int) -> LearningCoefficient:
    r"""Learning coefficient of x ↦ W_L … W_1 x, where the truth has rank r.

    With excess widths :math:`M_s = d_s - r`, take the ℓ + 1 smallest of them, ℓ as large as
    :math:`\sum_{s \in \mathcal M} M_s ≥ ℓ \max_{s \in \mathcal M} M_s` allows, and
    :math:`S = \sum_{s \in \mathcal M} M_s`, :math:`a = S - (\lceil S/ℓ \rceil - 1)\,ℓ`. Then

    .. math::
        λ = \frac{r (d_0 + d_L) - r^2}{2} + \frac{a (ℓ - a)}{4ℓ} - \frac{ℓ - 1}{4ℓ} S^2
            + \frac12 \sum_{s < t \in \mathcal M} M_s M_t, \qquad m = a (ℓ - a) + 1.

    It is the least value over all weights with that product, taken where each layer is diag(1_r)
    (see `devsample.testing.factors.deepest_point`); elsewhere on the fibre the local value can be
    larger.

    Args:
        widths: d_0 … d_L, from the input to the output, each ≥ 1.
        rank: r, 0 ≤ r ≤ min(widths).

    Returns:
        λ (a Fraction) and its multiplicity.

    Raises:
        InvalidArgumentError: widths or rank out of range.

    References:
        M. Aoyagi, "Consideration on the learning efficiency of multiple-layered neural networks
        with linear units", Neural Networks 172 (2024), theorem 1; for one hidden layer M. Aoyagi
        and S. Watanabe, "Stochastic complexities of reduced rank regression in Bayesian
        estimation", Neural Networks 18 (2005).

    Examples:
        >>> dln_learning_coefficient([5, 3, 5], rank=0)
        LearningCoefficient(value=Fraction(13, 2), multiplicity=2)
        >>> float(dln_learning_coefficient([100, 50, 100], 20).value)
        2887.5
    """
    sizes = check_widths(widths, rank)
    excess = sorted(d - rank for d in sizes)
    count = 2  # ℓ + 1
    while count < len(excess) and sum(excess[:count]) >= (count - 1) * excess[count]:
        count += 1
    chosen, depth = excess[:count], count - 1
    total = sum(chosen)
    a = total - (-(-total // depth) - 1) * depth
    pairs = Fraction(total**2 - sum(one**2 for one in chosen), 2)  # the sum over s < t
    singular = Fraction(a * (depth - a), 4 * depth) - Fraction((depth - 1) * total**2, 4 * depth) + pairs / 2
    regular = Fraction(rank * (sizes[0] + sizes[-1]) - rank**2, 2)
    return LearningCoefficient(regular + singular, a * (depth - a) + 1)
