"""Which samples a step of a chain reads: a function of (seed, chain, step)."""

from __future__ import annotations

import abc
import copy
import itertools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from devsample.data.generators import preserved_global_generators, seed_global_generators
from devsample.errors import LoaderError
from devsample.seeds import ChainKey, IndexBlocks, Role, philox, stream_seed

if TYPE_CHECKING:
    from devsample.data.spec import LoaderSpec

Order = Callable[[int], list[list[int]]]
"""The micro-batches of a step, as indices."""


def make_order(
    spec: LoaderSpec, key: ChainKey, num_samples: int, micro_size: int, grad_accum_steps: int
) -> Order:
    """The order of the gradient batches of one chain.

    Args:
        spec: the recipe: its sampling, sampler and drop_last.
        key: the chain's key.
        num_samples: length of the data set.
        micro_size: indices per micro-batch.
        grad_accum_steps: micro-batches per step.
    """
    if spec.batch_sampler is not None:
        return _UserBatches(spec.batch_sampler, key, grad_accum_steps)
    size = micro_size * grad_accum_steps
    if spec.order == "iid":
        return sliced(IndexBlocks(key, Role.ORDER, num_samples, size), micro_size)
    if spec.order == "user":
        return sliced(_UserOrder(spec.sampler, key, size, spec.drop_last), micro_size)
    shuffled = spec.order == "epoch"
    order = _EpochOrder(key, num_samples, size, shuffled=shuffled, drop_last=spec.drop_last)
    return sliced(order, micro_size)


def sliced(order: Callable[[int], Any], micro_size: int) -> Order:
    """Cut the indices of a step into micro-batches."""

    def pieces(step: int) -> list[list[int]]:
        indices = order(step)
        listed = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
        return [listed[start : start + micro_size] for start in range(0, len(listed), micro_size)]

    return pieces


def batch_length(spec: LoaderSpec, key: ChainKey) -> int:
    """Samples per micro-batch; of a batch sampler, the length of its first batch."""
    if spec.batch_sampler is not None:
        return len(_UserBatches(spec.batch_sampler, key, 1)(0)[0])
    return 1 if spec.batch_size is None else spec.batch_size


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


class _UserSampler(abc.ABC):
    """The user's sampler, epoch by epoch, its random state keyed by (seed, chain, epoch)."""

    def __init__(self, sampler: Any, key: ChainKey) -> None:
        self._sampler, self._key = _own_copy(sampler), key  # the user's own stays as it is
        self._first_step, self._epoch = 0, -1
        self._steps: list[Any] = []

    def __call__(self, step: int) -> Any:
        if step < self._first_step:  # start again: epochs are keyed, so the same ones come
            self._first_step, self._epoch, self._steps = 0, -1, []
        while step >= self._first_step + len(self._steps):
            self._first_step += len(self._steps)
            self._epoch += 1
            self._steps = self._cut(self._draw_epoch())
        return self._steps[step - self._first_step]

    def _draw_epoch(self) -> list[Any]:
        seed = stream_seed(self._key, Role.ORDER, self._epoch)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self._epoch)
        for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
            _rekey(sampler, seed)
        with preserved_global_generators():
            seed_global_generators(seed)
            drawn = list(itertools.islice(self._sampler, len(self._sampler)))  # some never end
        if not drawn:
            raise LoaderError("loader_spec: the sampler gave nothing; a chain needs at least one batch.")
        return drawn

    @abc.abstractmethod
    def _cut(self, drawn: list[Any]) -> list[Any]:
        """Steps of an epoch."""


def _own_copy(sampler: Any) -> Any:
    """A deep copy, but for the data that it may refer to."""
    inner = (sampler, getattr(sampler, "sampler", None))
    data = [getattr(one, "data_source", None) for one in inner]
    try:
        return copy.deepcopy(sampler, {id(one): one for one in data if one is not None})
    except Exception:  # it holds what cannot be copied
        return copy.copy(sampler)


def _rekey(sampler: Any, seed: int) -> None:
    """Give every generator that a sampler holds the state that ``seed`` stands for."""
    for name, value in getattr(sampler, "__dict__", {}).items():
        if isinstance(value, torch.Generator) or (name == "generator" and value is None):
            setattr(sampler, name, torch.Generator().manual_seed(seed))
        elif isinstance(value, np.random.Generator):
            setattr(sampler, name, np.random.Generator(type(value.bit_generator)(seed)))
        elif isinstance(value, np.random.RandomState):
            setattr(sampler, name, np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]))
        elif isinstance(value, random.Random):
            setattr(sampler, name, random.Random(seed))


class _UserOrder(_UserSampler):
    def __init__(self, sampler: Any, key: ChainKey, size: int, drop_last: bool) -> None:
        super().__init__(sampler, key)
        self._size, self._drop_last = size, drop_last

    def _cut(self, drawn: list[Any]) -> list[Any]:
        indices = [int(index) for index in drawn]
        steps = [indices[start : start + self._size] for start in range(0, len(indices), self._size)]
        if self._drop_last and len(steps) > 1 and len(steps[-1]) < self._size:
            steps.pop()
        return steps


class _UserBatches(_UserSampler):
    def __init__(self, sampler: Any, key: ChainKey, grad_accum_steps: int) -> None:
        super().__init__(sampler, key)
        self._accumulate = grad_accum_steps

    def _cut(self, drawn: list[Any]) -> list[Any]:
        batches = [[int(index) for index in batch] for batch in drawn]
        count = self._accumulate
        return [batches[start : start + count] for start in range(0, len(batches), count)]
