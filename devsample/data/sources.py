"""What a function or a class does, as far as it can be read off: code, constants, names it refers to."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from typing import Any

from devsample.importable import is_installed

_MEANING = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_BETWEEN = ("EXTENDED_ARG", "CACHE", "PUSH_NULL")
_BOOKKEEPING = frozenset(
    {
        "__abstractmethods__",
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__slotnames__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    }
)


def code_parts(code: types.CodeType) -> tuple[Any, ...]:
    """What a code object does, without where it stands: plain values and the code inside it."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return (
        code.co_code,
        code.co_consts,
        code.co_names,
        code.co_varnames[:count],
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags & _MEANING,
        code.co_exceptiontable,
    )


def class_parts(kind: type) -> Iterator[tuple[str, Any]]:
    """Name and value of what a class defines, by name."""
    for name, value in sorted(vars(kind).items()):
        if name not in _BOOKKEEPING:
            yield name, value


def referred(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The globals that a function uses, by name; of the user's own modules, what is used in them."""
    found: dict[str, Any] = {}
    known = function.__globals__ | _enclosed_modules(function)
    for chain in _chains(function.__code__):
        name, *rest = chain
        if name not in known or _is_dunder(name):
            continue  # builtins are in the code by name
        value = known[name]
        while rest and isinstance(value, types.ModuleType) and not is_installed(value.__name__):
            if not hasattr(value, rest[0]):
                break
            value = getattr(value, rest[0])
            name += f".{rest.pop(0)}"
        found[name] = value
    return sorted(found.items())


def _enclosed_modules(function: types.FunctionType) -> dict[str, Any]:
    """Modules that were imported in the function around this one."""
    names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: value for name, cell in names if isinstance(value := contents(cell), types.ModuleType)}


def contents(cell: types.CellType) -> Any:
    """What a cell holds; an ellipsis if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return ...


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _chains(code: types.CodeType) -> set[tuple[str, ...]]:
    """Globals that code loads, each with the attributes that it then takes of it."""
    found: set[tuple[str, ...]] = set()
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in _BETWEEN:
            continue
        if chain and step.opname in _ATTRIBUTES:
            chain = (*chain, step.argval)
            continue
        if chain:
            found.add(chain)
        chain = (step.argval,) if step.opname in _NAMES else ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _chains(constant)
    return found
