"""Which samples a step of a chain reads: a function of (seed, chain, step)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from devsample.data.worker import seed_global_generators
from devsample.errors import LoaderError
from devsample.seeds import ChainKey, IndexBlocks, Role, philox, stream_seed

Order = Callable[[int], "np.ndarray | list[int]"]
"""Indices of a step (all of its micro-batches)."""


def make_order(
    sampling: str,
    key: ChainKey,
    num_samples: int,
    size: int,
    *,
    drop_last: bool,
    sampler: Any = None,
) -> Order:
    """The order of the gradient batches of one chain.

    Args:
        sampling: "iid", "epoch", "sequential" or "user".
        key: the chain's key.
        num_samples: length of the data set.
        size: indices per step, ``grad_accum_steps × batch_size``.
        drop_last: leave out the ragged last step of an epoch.
        sampler: the user's sampler, for "user".
    """
    if sampling == "iid":
        return IndexBlocks(key, Role.ORDER, num_samples, size)
    if sampling == "user":
        return _UserOrder(sampler, key, size, drop_last)
    shuffled = sampling == "epoch"
    return _EpochOrder(key, num_samples, size, shuffled=shuffled, drop_last=drop_last)


class _EpochOrder:
    """Every sample once per epoch; the last step of an epoch may be shorter."""

    def __init__(
        self, key: ChainKey, num_samples: int, size: int, *, shuffled: bool, drop_last: bool
    ) -> None:
        whole, rest = divmod(num_samples, size)
        self._steps = whole + (1 if rest and not (drop_last and whole) else 0)
        self._key, self._num_samples, self._size = key, num_samples, size
        self._shuffled = shuffled
        self._epoch = -1
        self._permutation = np.arange(num_samples)

    def __call__(self, step: int) -> np.ndarray:
        epoch, row = divmod(step, self._steps)
        if self._shuffled and epoch != self._epoch:
            generator = np.random.Generator(philox(self._key, Role.ORDER, epoch))
            self._permutation = generator.permutation(self._num_samples)
            self._epoch = epoch
        return self._permutation[row * self._size : (row + 1) * self._size]


class _UserOrder:
    """The user's sampler, epoch by epoch, its random state keyed by (seed, chain, epoch)."""

    def __init__(self, sampler: Iterable[Any], key: ChainKey, size: int, drop_last: bool) -> None:
        self._sampler: Any = copy.copy(sampler)
        self._key, self._size, self._drop_last = key, size, drop_last
        self._first_step, self._epoch = 0, -1
        self._steps: list[list[int]] = []

    def __call__(self, step: int) -> list[int]:
        if step < self._first_step:  # start again: epochs are keyed, so the same ones come
            self._first_step, self._epoch, self._steps = 0, -1, []
        while step >= self._first_step + len(self._steps):
            self._first_step += len(self._steps)
            self._epoch += 1
            self._steps = self._draw_epoch()
        return self._steps[step - self._first_step]

    def _draw_epoch(self) -> list[list[int]]:
        seed = stream_seed(self._key, Role.ORDER, self._epoch)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self._epoch)
        if isinstance(getattr(self._sampler, "generator", self), torch.Generator | None):
            self._sampler.generator = torch.Generator().manual_seed(seed)
        with preserved_global_generators():
            seed_global_generators(seed)
            drawn = list(self._sampler)
        if drawn and not isinstance(drawn[0], (int, np.integer, torch.Tensor)):
            return [[int(index) for index in batch] for batch in drawn]
        indices = [int(index) for index in drawn]
        steps = [indices[start : start + self._size] for start in range(0, len(indices), self._size)]
        if self._drop_last and len(steps) > 1 and len(steps[-1]) < self._size:
            steps.pop()
        if not steps:
            raise LoaderError("loader_spec.sampler gave no index; a chain needs at least one batch.")
        return steps


class preserved_global_generators:  # noqa: N801 - reads as a statement
    """Leave the global generators of torch's CPU, numpy and random as they were."""

    def __enter__(self) -> None:
        import random

        self._torch = torch.default_generator.get_state()
        self._numpy = np.random.get_state()  # noqa: NPY002 - the global one is what is kept
        self._random = random.getstate()

    def __exit__(self, *_: object) -> None:
        import random

        torch.default_generator.set_state(self._torch)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._random)
