"""Random generators: the process's own (torch's on the CPU, numpy's, Python's), and those of objects."""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
from collections import deque
from collections.abc import Iterable, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from devsample.data.sources import class_parts, contents, referred
from devsample.importable import is_installed

_numpy: Any = np.random  # the legacy global generator, which is what users' augmentation draws from
_TWISTER_BYTES = 4 * 624 + 4  # the Mersenne twister's words and its position


def seed_global_generators(seed: int) -> None:
    """Seed torch, numpy and random of this process from one 64-bit number."""
    torch.default_generator.manual_seed(seed)
    _numpy.seed(seed >> 32)
    random.seed(seed)


class preserved_global_generators:  # noqa: N801 - reads as a statement
    """Leave the global generators of torch's CPU, numpy and random as they were."""

    def __enter__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._random = random.getstate()
        self._numpy = _SetAside()

    def __exit__(self, *_: object) -> None:
        self._numpy.put_back()
        torch.default_generator.set_state(self._torch)
        random.setstate(self._random)


class _SetAside:
    """numpy's global bit generator, out of the way while another one stands in for it.

    That is cheaper than to copy its state, but forgets the second normal that the polar method has
    ready after an odd number of draws. Whether there is one shows in the next draw, which then
    leaves the bit generator's memory as it is; otherwise that memory is put back.
    """

    _stand_ins: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self._own: Any = _numpy.get_bit_generator()
        self._ready: float | None = None
        self._state: Any = None
        if isinstance(self._own, np.random.MT19937):
            address = self._own.ctypes.state_address
            before = ctypes.string_at(address, _TWISTER_BYTES)
            drawn = float(_numpy.standard_normal())
            if ctypes.string_at(address, _TWISTER_BYTES) == before:
                self._ready = drawn
            else:
                ctypes.memmove(address, before, _TWISTER_BYTES)
        else:
            self._state = _numpy.get_state(legacy=False)
        _numpy.set_bit_generator(self._stand_ins.pop() if self._stand_ins else np.random.MT19937(0))

    def put_back(self) -> None:
        self._stand_ins.append(_numpy.get_bit_generator())
        _numpy.set_bit_generator(self._own)
        if self._ready is not None:
            self._state = _numpy.get_state(legacy=False) | {"has_gauss": 1, "gauss": self._ready}
        if self._state is not None:
            _numpy.set_state(self._state)


def cuda_is_used() -> bool:
    """Whether this process has a CUDA context already; asking makes none."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def global_random_state() -> tuple[bytes, ...]:
    """A fingerprint of the global generators, to see whether something drew from them."""
    kind, words, position, *_ = _numpy.get_state()
    states = [
        torch.default_generator.get_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
    ]
    states += [np.asarray(words).tobytes(), f"{kind}{position}".encode()]
    if cuda_is_used():
        states += [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return tuple(states)


_LARGEST_SEARCH = 20_000  # objects looked at
_LARGEST_CONTAINER = 1_000  # longer lists hold data, not generators
_LEAVES = (str, bytes, int, float, complex, bool, type(None), np.ndarray, torch.Tensor, ModuleType)


def find_generators(*roots: Any) -> list[Any]:
    """The generator objects that ``roots`` hold, however deep, in a fixed order.

    These are numpy's ``Generator`` and ``RandomState``, ``random.Random`` and torch's generators
    on the CPU. Attributes, containers, closures and bound objects are followed, and what the user's
    own classes and functions have or use: class attributes, defaults, globals.
    """
    found: list[Any] = []
    seen: set[int] = set()
    waiting = list(reversed(roots))
    while waiting and len(seen) < _LARGEST_SEARCH:
        one = waiting.pop()
        if isinstance(one, _LEAVES) or id(one) in seen:
            continue
        seen.add(id(one))
        if _is_generator(one):
            found.append(one)
        else:
            waiting += reversed(_held_by(one))
    return found


def reseed(generators: Sequence[Any], seed: int) -> None:
    """Put each generator into the state that ``seed`` and its place in the list stand for."""
    for number, one in enumerate(generators):
        words = [seed & 0xFFFFFFFF, seed >> 32, number]
        if isinstance(one, np.random.Generator):
            one.bit_generator.state = type(one.bit_generator)(words).state
        elif isinstance(one, np.random.RandomState):
            one.seed(words)
        elif isinstance(one, random.Random):
            one.seed(seed << 32 | number)
        else:
            one.manual_seed((seed + 0x9E3779B97F4A7C15 * (number + 1)) & 0x7FFFFFFFFFFFFFFF)


def state_of(generator: Any) -> Any:
    """What `set_state` takes to put a generator of `find_generators` back."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Put a generator back into a state."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _is_generator(one: Any) -> bool:
    if isinstance(one, torch.Generator):
        return one.device.type == "cpu"
    return isinstance(one, (np.random.Generator, np.random.RandomState)) or (
        isinstance(one, random.Random) and not isinstance(one, random.SystemRandom)
    )


def _held_by(one: Any) -> list[Any]:
    """What an object holds or, if it is a function or class of the user's, uses; none of its code runs."""
    if isinstance(one, dict):
        return list(itertools.islice(one.values(), _LARGEST_CONTAINER))
    if isinstance(one, (list, tuple, set, frozenset, deque)):
        return list(itertools.islice(one, _LARGEST_CONTAINER))
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, (staticmethod, classmethod)):
        return [one.__func__]
    if isinstance(one, property):
        return [one.fget]
    if isinstance(one, FunctionType):
        return _used_by(one)
    if isinstance(one, type):
        return [value for _, value in class_parts(one)] + _users(one.__bases__)
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(one).__mro__]
    names = [name for listed in slots for name in ((listed,) if isinstance(listed, str) else listed)]
    held = [getattr(one, name, None) for name in names] + list(getattr(one, "__dict__", {}).values())
    return held + _users((type(one),))


def _used_by(function: FunctionType) -> list[Any]:
    """What a function has enclosed, its defaults, and the globals that it uses if it is the user's."""
    used = [contents(cell) for cell in function.__closure__ or ()]
    used += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not is_installed(function.__module__):
        used += [value for _, value in referred(function)]
    return used


def _users(kinds: Iterable[type]) -> list[Any]:
    return [kind for kind in kinds if not is_installed(kind.__module__)]
