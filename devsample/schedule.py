"""The rows of a group of chains, the steps at which they are drawn, and the batches of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from devsample.fulldata import Served
from devsample.objective import Batch
from devsample.records import RecordWriter
from devsample.seeds import ChainKey, Role


@dataclass
class Row:
    """One chain of a group: where its records go and how it fares."""

    chain: int
    key: ChainKey
    folder: Path
    writer: RecordWriter
    draws: int = 0
    diverged_at: int | None = None
    note: str = ""

    @property
    def alive(self) -> bool:
        """Whether its loss has stayed finite."""
        return self.diverged_at is None


@dataclass
class Schedule:
    """Which steps are drawn: the last of every ``num_steps_bw_draws`` after burn-in."""

    burnin: int
    between: int
    draws: int
    total: int = field(init=False)
    freeze: int = field(init=False)  # steps after which the sampler no longer adapts

    def __post_init__(self) -> None:
        self.total = self.burnin + self.between * self.draws
        self.freeze = math.ceil(self.burnin / 2)  # the rest of burn-in forgets what it was before

    def draw(self, step: int) -> int | None:
        """The number of the draw recorded at ``step`` (before its update), or None."""
        after = step - self.burnin + 1
        if after < 1 or after % self.between:
            return None
        return after // self.between - 1

    def draws_before(self, step: int) -> int:
        """How many draws are recorded before ``step``."""
        return max(0, step - self.burnin) // self.between

    def steps_of(self, draws: np.ndarray) -> np.ndarray:
        """The step at which each draw is recorded."""
        return self.burnin + (draws + 1) * self.between - 1


def take(served: Served, chain: int, step: int, role: Role, items: list[Sequence[int]]) -> list[Batch]:
    """The micro-batches of one step, which are the next in line; their items go to ``items``."""
    batches: list[Batch] = []
    for request, data in served:
        assert (request.chain, request.step, request.role) == (chain, step, role), request
        batches.append((len(request.indices), data))
        items.append(request.indices)
        if request.last:
            return batches
    raise AssertionError("the loader ended before the chain")
