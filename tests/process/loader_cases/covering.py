"""A few combinations of several factors in which every pair of levels occurs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Choice = dict[str, Any]


def pairs(choice: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
    """The pairs of levels in one combination."""
    return {(a, choice[a], b, choice[b]) for a, b in itertools.combinations(choice, 2)}


def product(factors: Mapping[str, Sequence[Any]]) -> Iterator[Choice]:
    """Every combination."""
    for levels in itertools.product(*factors.values()):
        yield dict(zip(factors, levels, strict=True))


def covering(factors: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Combinations with every pair, few of them: each is the one with the most pairs still missing."""
    everything = list(product(factors))
    missing = set().union(*map(pairs, everything))
    chosen: list[Choice] = []
    while missing:
        best = max(everything, key=lambda choice: len(pairs(choice) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
