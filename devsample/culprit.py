"""Which part of an object cannot travel, or weighs most, by its attribute path."""

from __future__ import annotations

import functools
import itertools
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from devsample.importable import is_installed
from devsample.inheritance import is_inheritable

_MAX_DEPTH = 60
_MAX_PARTS = 100
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_WHOLES = (torch.Tensor, np.ndarray, str, bytes, bytearray)


def find_culprit(
    obj: Any, path: str, error: Exception, attempt: Callable[[Any], Any]
) -> tuple[Any, str, Exception]:
    """Descend to the deepest part of ``obj`` for which ``attempt`` raises on its own."""
    seen = {id(obj)}
    for _ in range(_MAX_DEPTH):
        for child, child_path in _children(obj, path):
            if isinstance(child, _PLAIN) or id(child) in seen:
                continue
            seen.add(id(child))
            failure = raises(functools.partial(attempt, child))
            if failure is not None:
                obj, path, error = child, child_path, failure
                break
        else:
            break
        if getattr(error, "culprit", None) is obj:  # refused as a whole
            break
    return obj, path, error


def find_heaviest(obj: Any, path: str, weigh: Callable[[Any], int]) -> tuple[Any, str, int]:
    """Descend to the part that makes up most of the weight of ``obj``, if there is one.

    Args:
        obj: the whole.
        path: its name.
        weigh: gives the weight of a part.

    Returns:
        The part, its path and its weight. The search stops where no part has more than half of
        the weight, and at collections of many parts.
    """
    weight = weigh(obj)
    for _ in range(_MAX_DEPTH):
        if isinstance(obj, _WHOLES):
            break
        parts = list(itertools.islice(_children(obj, path), _MAX_PARTS + 1))
        if len(parts) > _MAX_PARTS:
            break
        for child, child_path in parts:
            heavy = 0 if child is obj else weigh(child)
            if heavy > weight / 2:
                obj, path, weight = child, child_path, heavy
                break
        else:
            break
    return obj, path, weight


def raises(call: Callable[[], Any]) -> Exception | None:
    """What ``call`` raises, if it does."""
    try:
        call()
    except Exception as error:  # whatever a user's __reduce__ raises is the answer
        return error
    return None


def _children(obj: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Parts of ``obj`` that are pickled with it, each with its path."""
    if isinstance(obj, torch.Tensor) or is_inheritable(obj):
        return
    if isinstance(obj, torch.nn.Module):
        yield from _module_parts(obj, path)
    elif isinstance(obj, dict):
        yield from ((value, f"{path}[{key!r}]") for key, value in obj.items())
        yield from _attributes(obj, path)
    elif isinstance(obj, (list, tuple, set, frozenset)) and type(obj).__reduce__ is object.__reduce__:
        yield from ((value, f"{path}[{index}]") for index, value in enumerate(obj))
        yield from _attributes(obj, path)
    elif isinstance(obj, functools.partial):
        yield obj.func, f"{path}.func"
        yield from ((value, f"{path}.args[{index}]") for index, value in enumerate(obj.args))
        yield from ((value, f"{path}.keywords[{key!r}]") for key, value in obj.keywords.items())
    elif isinstance(obj, types.MethodType):
        yield (
            obj.__self__,
            path + (".__self__" if path.endswith(")") else f".{obj.__name__}.__self__"),
        )
        yield obj.__func__, f"{path}.__func__"
    elif isinstance(obj, types.FunctionType):
        yield from _function_parts(obj, path)
    elif isinstance(obj, type):
        yield from ((value, f"{path}.{key}") for key, value in vars(obj).items() if not key.startswith("__"))
    else:
        yield from _state_parts(obj, path)


def _attributes(obj: Any, path: str) -> Iterator[tuple[Any, str]]:
    """What a subclass of a container holds besides its items."""
    yield from ((value, f"{path}.{key}") for key, value in getattr(obj, "__dict__", {}).items())


def _module_parts(module: torch.nn.Module, path: str) -> Iterator[tuple[Any, str]]:
    """Parameters, buffers and submodules by the names that users know, then everything else."""
    inner = ("_parameters", "_buffers", "_modules")
    for name in inner:
        yield from ((value, f"{path}.{key}") for key, value in module.__dict__.get(name, {}).items())
    yield from ((value, f"{path}.{key}") for key, value in module.__dict__.items() if key not in inner)


def _function_parts(function: types.FunctionType, path: str) -> Iterator[tuple[Any, str]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        try:
            yield cell.cell_contents, f"{path}.<closure {name}>"
        except ValueError:
            continue  # an empty cell
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name], f"{path}.<global {name}>"
    for index, value in enumerate(function.__defaults__ or ()):
        yield value, f"{path}.<default {index}>"
    for name, value in (function.__kwdefaults__ or {}).items():
        yield value, f"{path}.<default {name}>"


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _state_parts(obj: Any, path: str) -> Iterator[tuple[Any, str]]:
    """What an object's own ``__reduce_ex__`` gives: its state first, by attribute name."""
    try:
        reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:  # it refuses as a whole; of the user's own classes an attribute may be why
        if is_installed(type(obj).__module__):
            return
        reduced = (None, (), getattr(obj, "__dict__", None))
    if not isinstance(reduced, tuple):
        return
    state = reduced[2] if len(reduced) > 2 else None
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            yield from ((value, f"{path}.{key}") for key, value in part.items())
        elif part is not None:
            yield part, f"{path}.<state>"
    for index, value in enumerate(reduced[1]):
        yield value, f"{path}.<argument {index}>"
    for items in reduced[3:5]:
        if items is not None:
            yield from ((value, f"{path}[{index}]") for index, value in enumerate(items))


def type_name(obj: Any) -> str:
    """An object's class, with its module unless it is a builtin."""
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def short_error(error: BaseException) -> str:
    """An error's class and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
