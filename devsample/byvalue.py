"""Functions and classes by value: what other processes cannot import travels with all it needs.

``cloudpickle`` does the work. Here it also learns of modules that only this process has, and leaves
the classes of a reader alone.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable
from multiprocessing.connection import _ConnectionBase
from typing import Any

import cloudpickle
import torch
from torch.nn.utils.parametrize import is_parametrized

from devsample.errors import NotPicklableError
from devsample.importable import found_elsewhere, has_home, home_module

_SHORT_REDUCTION = 2  # of a builtin class; the definition of one has more parts


def dumps(obj: Any) -> bytes:
    """Serialise ``obj`` into bytes for `loads`, or ``pickle.loads``; everything is in them.

    Functions and classes that other processes cannot import travel by value.
    """
    file = io.BytesIO()
    ByValuePickler(file).dump(obj)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """The object of `dumps`; classes that this process has stay as they are."""
    return CarefulUnpickler(io.BytesIO(data)).load()


def identify_classes() -> None:
    """Let processes that are forked from this one know which class is which.

    A class that has no home by name is known by an identity, which it gets when it is sent. It
    has to be the same in processes that are forked before that.
    """
    todo, seen = [object], set[type]()
    while todo:
        for kind in type.__subclasses__(todo.pop()):
            if kind not in seen:
                seen.add(kind)
                todo.append(kind)
                if not has_home(kind):
                    cloudpickle.cloudpickle._get_or_create_tracker_id(kind)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that sends by value also what comes from modules that others cannot import.

    Attributes:
        known_classes: the reader may have the classes that travel by value already: it then uses its
            own, which stay as they are.
    """

    known_classes = False

    def __init__(
        self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None
    ) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffer_callback)
        self._registered: list[Any] = []

    def dump(self, obj: Any) -> None:
        """Write ``obj``."""
        try:
            super().dump(obj)
        finally:
            with contextlib.suppress(ValueError):
                while self._registered:
                    cloudpickle.unregister_pickle_by_value(self._registered.pop())

    def reducer_override(self, obj: Any) -> Any:
        """Called for every object that is not of a simple builtin type."""
        _refuse_what_is_live(obj)
        if type(obj) is functools.cached_property:  # holds a lock up to Python 3.11
            return _cached_property, (obj.func, obj.attrname)
        if isinstance(obj, functools._lru_cache_wrapper) and not _has_home(obj):
            return _cached_function, (obj.__wrapped__, obj.cache_parameters())
        name = home_module(obj)
        if name in sys.modules and not found_elsewhere(name):
            self._send_by_value(name)
        if isinstance(obj, torch.nn.Module) and is_parametrized(obj):  # refuses to be pickled as a whole
            return _blank, (type(obj),), obj.__dict__
        reduced = super().reducer_override(obj)
        defined = self.known_classes and isinstance(obj, type) and isinstance(reduced, tuple)
        if defined and len(reduced) > _SHORT_REDUCTION:
            return _known_class, (cloudpickle.cloudpickle._get_or_create_tracker_id(obj), _definition(obj))
        return reduced

    def _send_by_value(self, name: str) -> None:
        module = sys.modules[name]
        if not isinstance(module, types.ModuleType) or name == "__main__":  # cloudpickle knows of it
            return
        if name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)


def _refuse_what_is_live(obj: Any) -> None:
    """Refuse what seems to travel: the copy would share, and close, what belongs to this process."""
    if isinstance(obj, _ConnectionBase):
        raise NotPicklableError("is an open connection, which belongs to this process.", culprit=obj)
    kind = type(obj)
    if kind.__module__.startswith("tqdm.") and hasattr(obj, "fp") and hasattr(obj, "close"):
        raise NotPicklableError(f"is a progress bar ({kind.__name__}), which writes here.", culprit=obj)


def _has_home(function: Any) -> bool:
    """Whether other processes find a function that is wrapped by a cache."""
    name = getattr(function, "__module__", None)
    nested = "<locals>" in getattr(function, "__qualname__", "<locals>")
    return isinstance(name, str) and not nested and found_elsewhere(name)


def _cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Callable[[Any], Any], name: str | None) -> Any:
    made = functools.cached_property(function)
    made.attrname = name
    return made


@functools.lru_cache(maxsize=256)
def _definition(kind: type) -> bytes:
    return dumps(kind)


def _known_class(tracker: str, definition: bytes) -> Any:
    """The reader's own class, if it sent it or was sent it before."""
    own = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    return pickle.loads(definition) if own is None else own


def _blank(kind: type[torch.nn.Module]) -> torch.nn.Module:
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    return module


class CarefulUnpickler(pickle.Unpickler):
    """Leaves classes that this process has as they are.

    Reading a class that was sent by value would set all its attributes again, and so give the class
    of the caller other methods.
    """

    def __init__(self, file: io.BytesIO, *, buffers: Iterable[Any] | None = None) -> None:
        super().__init__(file, buffers=buffers)
        self._new_classes: list[type] = []

    def find_class(self, module: str, name: str) -> Any:
        """Called for every name in the bytes."""
        found = super().find_class(module, name)
        if module == "cloudpickle.cloudpickle":
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return functools.partial(_class, self._new_classes, found)
            if name == "_class_setstate":
                return functools.partial(_define, self._new_classes, found)
        return found


def _class(new: list[type], make: Callable[..., type], *args: Any) -> type:
    *_, tracker, _ = args
    own: type | None = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    if own is None:
        own = make(*args)
        new.append(own)
    return own


def _define(new: list[type], define: Callable[..., type], kind: type, state: Any) -> type:
    return define(kind, state) if any(kind is one for one in new) else kind
