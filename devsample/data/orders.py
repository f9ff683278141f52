"""Which samples a step of a chain reads: a function of (seed, chain, step)."""

from __future__ import annotations

import abc
import copy
import itertools
import operator
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


class Order:
    """Which samples each step of a chain reads.

    Args:
        indices: the indices of a step, or its micro-batches if ``micro_size`` is None.
        micro_size: indices per micro-batch.
        epoch: the epoch that a step belongs to.
    """

    def __init__(
        self, indices: Callable[[int], Any], micro_size: int | None, epoch: Callable[[int], int]
    ) -> None:
        self._indices, self._size, self.epoch = indices, micro_size, epoch

    def __call__(self, step: int) -> list[list[int]]:
        """The micro-batches of a step, as indices."""
        drawn = self._indices(step)
        if self._size is None:
            return drawn  # type: ignore[no-any-return]
        listed = drawn.tolist() if isinstance(drawn, np.ndarray) else list(drawn)
        return [listed[start : start + self._size] for start in range(0, len(listed), self._size)]


def make_order(
    spec: LoaderSpec,
    key: ChainKey,
    num_samples: int,
    micro_size: int,
    grad_accum_steps: int,
    role: Role = Role.ORDER,
) -> Order:
    """The order of the batches of one chain, for a purpose.

    Gradients follow the spec's order. What is read apart from them is drawn independently, by the
    user's own sampler if there is one: it says what the loss is an average over.

    Args:
        spec: the recipe: its sampling, sampler and drop_last.
        key: the chain's key.
        num_samples: length of the data set.
        micro_size: indices per micro-batch.
        grad_accum_steps: micro-batches per step.
        role: the purpose.
    """
    if spec.batch_sampler is not None:
        batches = _UserBatches(spec.batch_sampler, key, role, grad_accum_steps)
        return Order(batches, None, batches.epoch)
    size = micro_size * grad_accum_steps
    if spec.order == "user":
        user = _UserOrder(spec.sampler, key, role, size, spec.drop_last)
        return Order(user, micro_size, user.epoch)
    if is_independent(spec, role):
        blocks = IndexBlocks(key, role, num_samples, size)
        return Order(blocks, micro_size, lambda step: step * size // num_samples)
    shuffled = spec.order == "epoch"
    order = _EpochOrder(key, num_samples, size, shuffled=shuffled, drop_last=spec.drop_last)
    return Order(order, micro_size, order.epoch)


def is_independent(spec: LoaderSpec, role: Role) -> bool:
    """Whether what is read for a purpose is drawn independently and uniformly."""
    return spec.order == "iid" or (spec.order != "user" and role != Role.ORDER)


def batch_length(spec: LoaderSpec, key: ChainKey) -> int:
    """Samples per micro-batch; of a batch sampler, the length of its first batch."""
    if spec.batch_sampler is not None:
        return len(_UserBatches(spec.batch_sampler, key, Role.ORDER, 1)(0)[0])
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
        epoch, row = self.epoch(step), step % self._steps
        if self._shuffled and epoch != self._epoch:
            generator = np.random.Generator(philox(self._key, Role.ORDER, epoch))
            self._permutation = generator.permutation(self._num_samples)
            self._epoch = epoch
        return self._permutation[row * self._size : (row + 1) * self._size]

    def epoch(self, step: int) -> int:
        """The epoch of a step."""
        return step // self._steps


class _UserSampler(abc.ABC):
    """The user's sampler, epoch by epoch, its random state keyed by (seed, chain, purpose, epoch)."""

    field = "sampler"

    def __init__(self, sampler: Any, key: ChainKey, role: Role) -> None:
        self._sampler = _own_copy(sampler)  # the user's own stays as it is
        self._key, self._role = key, role
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

    def epoch(self, step: int) -> int:
        """The epoch of a step."""
        self(step)
        return self._epoch

    def _draw_epoch(self) -> list[Any]:
        seed = stream_seed(self._key, self._role, self._epoch)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self._epoch)
        for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
            _rekey(sampler, seed)
        with preserved_global_generators():
            seed_global_generators(seed)
            drawn = list(itertools.islice(self._sampler, len(self._sampler)))  # some never end
        if not drawn:
            raise LoaderError(
                f"loader_spec.{self.field}: the sampler gave nothing; a chain needs at least one batch."
            )
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
    def __init__(self, sampler: Any, key: ChainKey, role: Role, size: int, drop_last: bool) -> None:
        super().__init__(sampler, key, role)
        self._size, self._drop_last = size, drop_last

    def _cut(self, drawn: list[Any]) -> list[Any]:
        indices = [
            _index(one, "an integer. A sampler of whole batches goes to batch_sampler", "sampler")
            for one in drawn
        ]
        steps = [indices[start : start + self._size] for start in range(0, len(indices), self._size)]
        if self._drop_last and len(steps) > 1 and len(steps[-1]) < self._size:
            steps.pop()
        return steps


class _UserBatches(_UserSampler):
    field = "batch_sampler"

    def __init__(self, sampler: Any, key: ChainKey, role: Role, grad_accum_steps: int) -> None:
        super().__init__(sampler, key, role)
        self._accumulate = grad_accum_steps

    def _cut(self, drawn: list[Any]) -> list[Any]:
        batches = [_batch(one) for one in drawn]
        count = self._accumulate
        return [batches[start : start + count] for start in range(0, len(batches), count)]


def _index(value: Any, wanted: str, field: str) -> int:
    try:
        if not isinstance(value, (bool, np.bool_)):
            return operator.index(value)
    except TypeError:  # a float, for one
        pass
    raise LoaderError(f"loader_spec.{field}: the sampler gave {value!r}, expected {wanted}.")


def _batch(value: Any) -> list[int]:
    if not hasattr(value, "__iter__") or isinstance(value, str) or getattr(value, "ndim", 1) == 0:
        wanted = "a list of indices. A sampler of single indices goes to sampler"
        raise LoaderError(f"loader_spec.batch_sampler: the sampler gave {value!r}, expected {wanted}.")
    batch = [_index(one, "batches of integers", "batch_sampler") for one in value]
    if not batch:
        raise LoaderError("loader_spec.batch_sampler: the sampler gave an empty batch, which has no loss.")
    return batch
