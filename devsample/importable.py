"""Which modules another process can import by their name.

A module that was made in memory, or loaded from a file under a name of its own, is in this
process's ``sys.modules`` only. What comes from it has to travel by value.
"""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any

_HERE_ONLY = ("__main__", "__mp_main__")


def found_elsewhere(name: str) -> bool:
    """Whether another process with this one's ``sys.path`` finds the module ``name``.

    The finders are asked, not ``sys.modules``: a module loaded from a file under another name has a
    perfectly good ``__spec__`` and is found by nobody.
    """
    return _found(name, tuple(sys.path), tuple(map(id, sys.meta_path)))


def home_module(obj: Any) -> str | None:
    """The name of the module of a function, class or module in this process; None for others."""
    if isinstance(obj, types.ModuleType):
        return obj.__name__
    if isinstance(obj, (types.FunctionType, type)):
        name = getattr(obj, "__module__", None)
        return name if isinstance(name, str) else None
    return None


def has_home(kind: type) -> bool:
    """Whether another process finds a class by its name."""
    name = home_module(kind)
    if name is None:
        return True  # made by an extension, which knows it
    found: Any = sys.modules.get(name)
    for part in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr(found, part) may import something
    return found is kind and found_elsewhere(name)


@functools.lru_cache(maxsize=4096)
def _found(name: str, path: tuple[str, ...], finders: tuple[int, ...]) -> bool:
    """The answer for a state of ``sys.path`` and ``sys.meta_path``, which it changes with."""
    if name in _HERE_ONLY:
        return False
    parent, _, _ = name.rpartition(".")
    if not parent:
        return _spec(name, None) is not None
    if not _found(parent, path, finders):
        return False
    search = getattr(sys.modules.get(parent), "__path__", None)
    if search is not None and _spec(name, search) is not None:
        return True
    return not _has_file(name)  # without one, importing the parent makes it


def _spec(name: str, search: Any) -> Any:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if find is None or not _is_standing(finder):
            continue
        try:
            spec = find(name, search)
        except (ImportError, ValueError):
            continue
        if spec is not None:
            return spec
    return None


def _is_standing(finder: Any) -> bool:
    """Whether a finder may be there in another process: not if its class was defined in the script."""
    kind = finder if isinstance(finder, type) else type(finder)
    return kind.__module__ not in _HERE_ONLY


def _has_file(name: str) -> bool:
    module = sys.modules.get(name)
    return getattr(getattr(module, "__spec__", None), "has_location", False)


@functools.cache
def is_installed(module: Any) -> bool:
    """Whether a module is Python's own, or of an installed package: then its name says what it does.

    Args:
        module: its name; anything else is what classes written in C may answer.
    """
    if not isinstance(module, str):
        return True
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("builtins", "devsample"):
        return True
    if top in ("__main__", "__mp_main__"):
        return False
    loaded = sys.modules.get(module) or sys.modules.get(top)
    folders = Path(getattr(loaded, "__file__", None) or "").parts
    return "site-packages" in folders or "dist-packages" in folders
