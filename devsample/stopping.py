"""When a run that was asked for a precision has it: rounds of draws, and the rule that ends them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from devsample.diagnostics import Draws, align, describe
from devsample.specs import Precision

MIN_ESS = 100.0  # below, the standard error is itself too uncertain to stop on
LEAST_GROWTH, LARGEST_GROWTH = 1.25, 2.0  # of the draws, from one look to the next
MARGIN = 1.1  # draws beyond those that the last standard error asks for


class Stopping:
    r"""Looks at all draws after each round and says how many draws a chain is to have next.

    A rule that looks at its own error bar stops early where chance has made the bar small. Looks are
    few, therefore: after a round that fell short, the draws grow to

    .. math:: T' = 1.1\,T\,(\mathrm{se}/\mathrm{goal})^2

    but at least by a quarter and at most twofold; and none ends a run with fewer than 100 effective
    draws. The mean itself is that of all draws, so looking does not move it.

    Args:
        until: what was asked for.

    Attributes:
        reason: why the rounds ended: "reached", "max_draws" or "max_seconds"; "" until then.
        goal: the standard error that was asked for, with the last estimate; NaN before the first look.
    """

    def __init__(self, until: Precision) -> None:
        self._until = until
        self._seconds = 0.0
        self.reason = ""
        self.goal = math.nan

    def next(self, num_draws: int, traces: Sequence[Draws], seconds: float) -> int | None:
        """The number of draws a chain is to have after another round, or None: it is over.

        Args:
            num_draws: draws that a chain has.
            traces: llc of each chain that can be used, one array (num_draws,) each.
            seconds: since the run began.
        """
        round_seconds, self._seconds = seconds - self._seconds, seconds
        usable = [trace for trace in traces if np.isfinite(trace).all()]
        if not usable:
            self.reason = "no chain"
            return None
        found = describe(align(usable))
        self.goal = self._until.goal(found.mean)
        if found.se <= self.goal and found.ess >= MIN_ESS:
            self.reason = "reached"
            return None
        ratio = min(found.se / self.goal, LARGEST_GROWTH) if self.goal > 0 else LARGEST_GROWTH
        factor = MARGIN * max(ratio**2, MIN_ESS / found.ess) if found.se > 0 else LARGEST_GROWTH
        factor = min(LARGEST_GROWTH, max(LEAST_GROWTH, factor)) if math.isfinite(factor) else LARGEST_GROWTH
        return self._limited(num_draws, math.ceil(factor * num_draws), round_seconds)

    def settings(self) -> dict[str, float | str | None]:
        """What was asked for and how it ended, in JSON's types."""
        until = self._until
        seconds = until.max_seconds if math.isfinite(until.max_seconds) else None
        asked = {"se": until.se, "relative": until.relative, "max_draws": until.max_draws}
        return asked | {"max_seconds": seconds, "goal": self.goal, "ended": self.reason}

    def _limited(self, num_draws: int, wanted: int, round_seconds: float) -> int | None:
        """What the limits leave of the next round."""
        if num_draws >= self._until.max_draws:
            self.reason = "max_draws"
            return None
        wanted = min(wanted, self._until.max_draws)
        if math.isfinite(self._until.max_seconds):
            rate = num_draws / max(self._seconds, round_seconds, 1e-9)
            wanted = min(wanted, num_draws + math.floor(rate * (self._until.max_seconds - self._seconds)))
            if wanted <= num_draws:
                self.reason = "max_seconds"
                return None
        return wanted
