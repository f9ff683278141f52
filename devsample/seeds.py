"""Keyed randomness: every random number is a function of (seed, chain, role, step).

One contract for the whole library. Nothing is carried from step to step, so results do not
depend on the number of processes or loader workers, and a resumed chain needs no generator state.

A stream is a block of a Philox4x64 counter generator (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011). Its 128-bit key comes from the run's seed by numpy's ``SeedSequence``;
its 256-bit counter is ``[position, block, part, chain · 2^16 + role]``, so that no two blocks of a
run share numbers.

* Batch order: the indices of a step are one draw of ``grad_accum_steps × batch_size``, taken
  ``S = max(1, 2^12 // size)`` steps to the block (`IndexBlocks`).
* Noise: standard normals on one flat vector, in element parts of 2^20 and step blocks of
  ``S = max(1, 2^12 // elements)`` steps (`NormalBlocks`). torch fills a block: on the CPU its
  Mersenne twister, whose whole state is set from the Philox block (its integer seeds have 32 bits
  only); on other devices a generator with a 64-bit seed from the block. CPU and GPU noise differ.
* Items, dropout, a data set factory: a 64-bit seed per (chain, step, part), from `stream_seed`.
"""

from __future__ import annotations

import enum
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from devsample.errors import InvalidArgumentError

ELEMENTS_PER_PART = 1 << 20
NUMBERS_PER_BLOCK = 1 << 12
_MAX_SEED = 1 << 128
_STATE_HEADER = 24  # bytes of torch's CPU generator state before its 624 words
_STATE_WORDS = 624


class Role(enum.IntEnum):
    """What a stream is for. The numbers are part of the contract and never change."""

    NOISE = 1
    ORDER = 2
    LOSS_ORDER = 3
    PROBE_ORDER = 4
    ITEMS = 5
    MODEL = 6
    START = 7
    PROBE = 8
    FULL_ORDER = 9
    PILOT = 10
    DATASET = 11
    ACCEPT = 12
    SECOND_ORDER = 13
    OBSERVE = 14
    RERUN_ORDER = 15
    RERUN = 16


@dataclass(frozen=True)
class ChainKey:
    """Key of all streams of one chain: 128 bits of the seed and the chain's number."""

    low: int
    high: int
    chain: int


def fresh_seed() -> int:
    """A seed from the system's entropy, small enough to be typed again (63 bits)."""
    return secrets.randbits(63)


def chain_keys(seed: int | Sequence[int], num_chains: int) -> tuple[ChainKey, ...]:
    """Keys of chains 0 … ``num_chains − 1``.

    Args:
        seed: one seed for the run, or one seed a chain (all different). With a list, chain k
            draws what a chain with that seed draws at any place of any list.
        num_chains: number of chains.
    """
    if isinstance(seed, Sequence):
        return tuple(ChainKey(*_key_words(one), chain=0) for one in seed)
    low, high = _key_words(seed)
    return tuple(ChainKey(low, high, chain) for chain in range(num_chains))


def check_seed(seed: object, num_chains: int) -> int | tuple[int, ...] | None:
    """The seed argument as plain integers, or an error that says what is wrong with it."""
    if seed is None:
        return None
    if isinstance(seed, (np.ndarray, torch.Tensor)):
        seed = seed.tolist()
    if isinstance(seed, (list, tuple)):
        seeds = tuple(_check_one_seed(one) for one in seed)
        if len(seeds) != num_chains:
            raise InvalidArgumentError(
                f"seed: {len(seeds)} seeds for num_chains={num_chains}; give one a chain, or one for all."
            )
        if len(set(seeds)) != len(seeds):
            raise InvalidArgumentError(
                "seed: two chains have the same seed and would draw the same numbers; give different seeds."
            )
        return seeds
    return _check_one_seed(seed)


def philox(key: ChainKey, role: Role, block: int = 0, part: int = 0) -> np.random.Philox:
    """The counter generator at the start of one block."""
    words = np.array([key.low, key.high], dtype=np.uint64)
    counter = np.array([0, block, part, (key.chain << 16) | int(role)], dtype=np.uint64)
    return np.random.Philox(key=words, counter=counter)


def stream_seed(key: ChainKey, role: Role, block: int, part: int = 0) -> int:
    """One 64-bit seed for a foreign generator (items of a batch, dropout of a step)."""
    return _seeder(key, role, block, part)


class _Stream:
    """One counter generator that is set to the start of a block: cheaper than a new one a block."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self._state: Any = self._philox.state
        self._key, self._counter = np.zeros(2, np.uint64), np.zeros(4, np.uint64)
        self._state["state"] |= {"key": self._key, "counter": self._counter}
        self._generator = np.random.Generator(self._philox)

    def raw(self, key: ChainKey, role: Role, block: int, part: int, count: int) -> np.ndarray:
        """The first ``count`` words of a block, uint64."""
        self._go_to(key, role, block, part)
        return self._philox.random_raw(count)

    def generator(self, key: ChainKey, role: Role, block: int) -> np.random.Generator:
        """A generator at the start of a block, until the next call."""
        self._go_to(key, role, block, 0)
        return self._generator

    def _go_to(self, key: ChainKey, role: Role, block: int, part: int) -> None:
        self._key[0], self._key[1] = key.low, key.high
        self._counter[1], self._counter[2], self._counter[3] = block, part, (key.chain << 16) | role
        self._philox.state = self._state


class _Seeder(threading.local):
    """A stream of each thread's own."""

    def __init__(self) -> None:
        self._stream = _Stream()

    def __call__(self, key: ChainKey, role: Role, block: int, part: int) -> int:
        return int(self._stream.raw(key, role, block, part, 1)[0])


_seeder = _Seeder()


class IndexBlocks:
    """Independent, uniform indices of the batches of one chain.

    Args:
        key: the chain's key.
        role: ``Role.ORDER`` for the gradient, ``Role.LOSS_ORDER`` for separate losses.
        num_samples: indices are in ``[0, num_samples)``.
        size: indices per step.

    Attributes:
        steps: S, steps per block.
    """

    def __init__(self, key: ChainKey, role: Role, num_samples: int, size: int) -> None:
        self._key, self._role = key, role
        self._num_samples, self._size = num_samples, size
        self._stream = _Stream()
        self.steps = max(1, NUMBERS_PER_BLOCK // size)
        self._block = -1
        self._rows = np.empty((0, size), dtype=np.int64)

    def __call__(self, step: int) -> np.ndarray:
        """Indices of ``step``, shape ``(size,)``, int64."""
        block, row = divmod(step, self.steps)
        if block != self._block:
            self._rows, self._block = self.block(block), block
        indices: np.ndarray = self._rows[row]
        return indices

    def block(self, number: int) -> np.ndarray:
        """Indices of the steps of a block, shape ``(steps, size)``."""
        generator = self._stream.generator(self._key, self._role, number)
        return generator.integers(0, self._num_samples, size=(self.steps, self._size))


class NormalBlocks:
    """Standard normals for K chains over P elements, step by step.

    Args:
        keys: the keys of the K chains, one row each.
        size: P, elements per chain.
        dtype: float32 or float64.
        device: where the numbers are made and stay.
        role: the stream, ``Role.NOISE`` unless something else is sampled.
    """

    def __init__(
        self,
        keys: Sequence[ChainKey],
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        role: Role = Role.NOISE,
    ) -> None:
        self._keys, self._size, self._role = tuple(keys), size, role
        self._dtype, self._device = dtype, device
        self._steps = max(1, NUMBERS_PER_BLOCK // max(1, min(size, ELEMENTS_PER_PART)))
        self._fill = _Filler(device)
        self._raw: dict[int, torch.Tensor] = {}
        self._averaged: tuple[int, tuple[torch.Tensor, ...]] | None = None

    def plain(self, step: int) -> torch.Tensor:
        """R_step, shape (K, P)."""
        block, row = divmod(step, self._steps)
        return self._block(block)[:, row]

    def averaged(self, step: int) -> torch.Tensor:
        """(R_step + R_{step+1}) / 2, shape (K, P); neighbouring steps share a term."""
        block, row = divmod(step, self._steps)
        if self._averaged is None or self._averaged[0] != block:
            self._averaged = None  # free it first
            self._averaged = (block, self._average(block).unbind(1))
        return self._averaged[1][row]

    def _average(self, block: int) -> torch.Tensor:
        now, following = self._block(block), self._block(block + 1)
        if self._steps == 1:  # now is not needed again: one buffer less for a large model
            del self._raw[block]
            return now.add_(following).mul_(0.5)
        shifted = torch.cat([now[:, 1:], following[:, :1]], dim=1)
        return shifted.add_(now).mul_(0.5)

    def _block(self, block: int) -> torch.Tensor:
        found = self._raw.get(block)
        if found is None:
            for old in [other for other in self._raw if abs(other - block) != 1]:
                del self._raw[old]
            found = self._raw[block] = self._make(block)
        return found

    def _make(self, block: int) -> torch.Tensor:
        shape = (len(self._keys), self._steps, self._size)
        numbers = torch.empty(shape, dtype=self._dtype, device=self._device)
        if self._size <= ELEMENTS_PER_PART:
            for piece, key in zip(numbers.unbind(0), self._keys, strict=True):
                self._fill(piece, key, self._role, block, 0)
            return numbers
        for row, key in zip(numbers, self._keys, strict=True):
            for part, start in enumerate(range(0, self._size, ELEMENTS_PER_PART)):
                self._fill(row[:, start : start + ELEMENTS_PER_PART], key, self._role, block, part)
        return numbers


class _Filler:
    """Fills a contiguous tensor with the normals of one block."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device=device)
        self._stream = _Stream()
        self._on_cpu = device.type == "cpu"
        if self._on_cpu:
            self._state = _checked_state(self._generator)
            self._words = self._state.numpy()[_STATE_HEADER:][: 8 * _STATE_WORDS].view(np.uint64)

    def __call__(self, out: torch.Tensor, key: ChainKey, role: Role, block: int, part: int) -> None:
        if self._on_cpu:
            self._words[:] = self._stream.raw(key, role, block, part, _STATE_WORDS // 2).view(np.uint32)
            self._generator.set_state(self._state)
        else:
            self._generator.manual_seed(int(self._stream.raw(key, role, block, part, 1)[0]))
        out.normal_(generator=self._generator)


def _checked_state(generator: torch.Generator) -> torch.Tensor:
    """A fresh generator state whose words lie where they are about to be written."""
    generator.manual_seed(12345)
    state = generator.get_state()
    words = state.numpy()[_STATE_HEADER:][: 8 * _STATE_WORDS].view(np.uint64)
    if words[0] != 12345 or words[1] != 2003863422:
        raise RuntimeError(
            f"torch {torch.__version__} keeps its CPU generator's state in another layout than "
            "devsample knows; please report it and use torch 2.13 until then."
        )
    return state


def _key_words(seed: int) -> tuple[int, int]:
    low, high = np.random.SeedSequence(seed).generate_state(2, np.uint64).tolist()
    return low, high


def _check_one_seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise InvalidArgumentError(
            f"seed: expected an integer, a list with one integer a chain, or None, got {seed!r}."
        )
    if not 0 <= int(seed) < _MAX_SEED:
        raise InvalidArgumentError(f"seed: expected 0 ≤ seed < 2^128, got {seed}.")
    return int(seed)
