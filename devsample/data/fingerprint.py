"""A hash of what a recipe says: the same in every process, another one if the numbers may differ.

Every value is written out by type, length and content, and nested values by the hash of their own
text, so the hash does not depend on the order of sets, on addresses or on who made the object.
Functions and classes of installed packages count by name, the user's own by what they do.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import hashlib
import io
import logging
import math
import multiprocessing.process
import multiprocessing.shared_memory
import random
import struct
import subprocess
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from devsample.data.generators import find_generators
from devsample.data.importing import ImportPath
from devsample.data.sources import class_parts, code_parts, contents, referred
from devsample.errors import InvalidArgumentError
from devsample.importable import is_installed

if TYPE_CHECKING:
    from devsample.data.spec import LoaderSpec

_FORMAT = 1
_HANDLES = (
    Executor,
    io.IOBase,
    logging.Filterer,
    logging.LoggerAdapter,
    multiprocessing.process.BaseProcess,
    multiprocessing.shared_memory.SharedMemory,
    subprocess.Popen,
    threading.Thread,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
)


def fingerprint(spec: LoaderSpec, *, seconds: float = math.inf) -> str:
    """SHA-256 of everything in a recipe that the batches depend on, as 64 hex digits.

    Raises:
        TimeoutError: it takes longer than ``seconds``.
    """
    functions = {
        name: value.resolve() if isinstance(value, ImportPath) else value
        for name in ("dataset", "collate_fn", "worker_init_fn")
        for value in [getattr(spec, name)]
    }
    if functions["collate_fn"] is None:
        functions["collate_fn"] = default_convert if spec.batch_size is None else default_collate
    parts = functions | {
        "format": _FORMAT,
        "dataset_args": spec.dataset_args,
        "dataset_kwargs": spec.dataset_kwargs,
        "batch_size": spec.batch_size,
        "drop_last": spec.drop_last,
        "num_samples": spec.num_samples,
        "order": spec.order,
        "sampler": spec.sampler,
        "batch_sampler": spec.batch_sampler,
    }
    rekeyed = find_generators(functions["dataset"], functions["collate_fn"], spec.sampler, spec.batch_sampler)
    try:
        return content_hash(parts, ignored=rekeyed, seconds=seconds)
    except RecursionError:
        raise InvalidArgumentError("loader_spec: is nested too deeply to be fingerprinted.") from None


def content_hash(value: Any, ignored: Iterable[Any] = (), *, seconds: float = math.inf) -> str:
    """SHA-256 of a value's content, as 64 hex digits.

    Args:
        value: anything.
        ignored: objects whose state does not count.
        seconds: how long it may take; a single large array is always hashed to its end.

    Raises:
        TimeoutError: it takes longer.
    """
    writer = _Writer(ignored, time.monotonic() + seconds)
    return hashlib.sha256(writer.write(value)).hexdigest()


def _text(tag: bytes, content: bytes) -> bytes:
    return tag + struct.pack(">Q", len(content)) + content


def _name(value: Any) -> bytes:
    return _text(b"n", str(value).encode("utf-8", "surrogatepass"))


_SCALARS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    type(...): lambda _: b"E",
    bool: lambda value: b"B1" if value else b"B0",
    int: lambda value: _text(b"I", str(value).encode()),
    float: lambda value: b"F" + struct.pack(">d", value),
    complex: lambda value: b"C" + struct.pack(">dd", value.real, value.imag),
    str: lambda value: _text(b"S", value.encode("utf-8", "surrogatepass")),
    bytes: lambda value: _text(b"Y", value),
}
_OPAQUE = b"O"


class _Writer:
    """Writes values; what was written once is remembered, what is being written is a reference."""

    def __init__(self, ignored: Iterable[Any], until: float = math.inf) -> None:
        self._until = until
        self._ignored = {id(one): one for one in ignored}
        self._open: dict[int, int] = {}  # what is being written, with its depth
        self._done: MutableMapping[int, bytes] = {}
        self._kept: list[Any] = []  # ids stay valid while their objects live

    def write(self, value: Any) -> bytes:
        """The text of a value: short for a scalar, else its hash."""
        scalar = _SCALARS.get(type(value))
        if scalar is not None:
            return scalar(value)
        key = id(value)
        if key in self._open:
            return _text(b"R", str(self._open[key]).encode())
        if key in self._done:
            return self._done[key]
        if time.monotonic() > self._until:
            raise TimeoutError("the content is too large to be fingerprinted in the time given")
        self._open[key] = len(self._open)
        try:
            parts = None if key in self._ignored else self._parts(value)
        finally:
            del self._open[key]
        if parts is None:
            text = _text(_OPAQUE, _class_name(type(value)))
        else:
            hashed = hashlib.sha256()
            for part in parts:
                hashed.update(part)
            text = b"H" + hashed.digest()
        self._done[key] = text
        self._kept.append(value)
        return text

    def _parts(self, value: Any) -> list[bytes] | None:
        """The pieces of a value's text; None if it has no content that lasts."""
        exact = _EXACT.get(type(value))
        if exact is not None:
            return exact(self, value)
        for kinds, method in _METHODS:
            if isinstance(value, kinds):
                return method(self, value)
        if isinstance(value, _HANDLES) or (
            isinstance(value, Iterator) and is_installed(type(value).__module__)
        ):
            return None
        return self._object(value)

    # ---- containers

    def _sequence(self, values: Iterable[Any], tag: bytes = b"list") -> list[bytes]:
        written = [self.write(one) for one in values]
        return [_text(b"q", tag), struct.pack(">Q", len(written)), *written]

    def _set(self, values: Iterable[Any]) -> list[bytes]:
        written = sorted(self._apart(one) for one in values)
        return [_text(b"q", b"set"), struct.pack(">Q", len(written)), *written]

    def _mapping(self, values: Mapping[Any, Any]) -> list[bytes]:
        keys = sorted(((self._apart(key), key) for key in values), key=lambda pair: pair[0])
        parts = [_text(b"q", b"dict"), struct.pack(">Q", len(keys))]
        for written, key in keys:
            parts += [written, self.write(values[key])]
        return parts

    def _apart(self, value: Any) -> bytes:
        """A value's text, whatever was written before: sets have no order."""
        if type(value) in _SCALARS:
            return self.write(value)
        before = self._done
        self._done = collections.ChainMap({}, before)
        try:
            return self.write(value)
        finally:
            self._done = before

    # ---- tensors and arrays

    def _tensor(self, tensor: torch.Tensor) -> list[bytes]:
        kind = type(tensor)
        if tensor.is_nested:
            return [_name("nested"), *self._sequence(tensor.unbind())]
        head = [_name("tensor"), _name(tensor.dtype), _name(tuple(tensor.shape))]
        if kind not in (torch.Tensor, torch.nn.Parameter):
            head.append(self.write(kind))
        if tensor.__dict__:
            head.append(self._state(tensor, tensor.__dict__))
        return head + self._values(tensor.detach())

    def _values(self, tensor: torch.Tensor) -> list[bytes]:
        if tensor.is_meta:
            return []
        if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            tensor = tensor.to_sparse()
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce()
            return [self.write(tensor.indices()), self.write(tensor.values())]
        if tensor.is_quantized or tensor.layout is not torch.strided:
            return [self.write(tensor.__reduce_ex__(4))]  # type: ignore[no-untyped-call]
        plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        return [_raw(plain.view(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0))]

    def _array(self, array: np.ndarray) -> list[bytes]:
        kind = type(array)
        head = [_name("array"), _dtype_name(array.dtype), _name(array.shape)]
        if kind not in (np.ndarray, np.memmap):
            head += [self.write(kind), self._state(array, array.__dict__)]
        mapped = _mapped_file(array)
        if mapped is not None:
            return [*head, _name(mapped), _name(array.strides)]
        if array.dtype.hasobject:
            return head + self._sequence(array.ravel().tolist())
        return [*head, _raw(array)]

    def _numpy_scalar(self, value: np.generic) -> list[bytes]:
        return [_name("scalar"), _dtype_name(value.dtype), _text(b"y", value.tobytes())]

    def _storage(self, storage: Any) -> list[bytes]:
        untyped = getattr(storage, "_untyped_storage", storage)
        return [_name("storage"), *self._values(torch.empty(0, dtype=torch.uint8).set_(untyped.cpu()))]

    def _generator(self, generator: Any) -> list[bytes]:
        state: Any
        if isinstance(generator, torch.Generator):
            state = generator.get_state()
        elif isinstance(generator, np.random.Generator):
            state = generator.bit_generator.state
        elif isinstance(generator, np.random.RandomState):
            state = generator.get_state(legacy=False)
        else:
            state = generator.getstate()
        return [_name(type(generator).__name__), self.write(state)]

    # ---- functions and classes

    def _function(self, function: types.FunctionType) -> list[bytes]:
        module, code = function.__globals__.get("__name__"), function.__code__
        if module is not None and is_installed(module):
            parts = [_name("function"), _name(module), _name(code.co_qualname)]
            if "<locals>" not in code.co_qualname:
                return parts
        else:
            parts = [_name("own function"), self.write(code)]
            parts += [part for name, value in referred(function) for part in (_name(name), self.write(value))]
        cells = [contents(cell) for cell in function.__closure__ or ()]
        own = {name: value for name, value in function.__dict__.items() if name != "__wrapped__"}
        for value in (cells, function.__defaults__, function.__kwdefaults__, own):
            parts.append(self.write(value))
        return parts

    def _code(self, code: types.CodeType) -> list[bytes]:
        return [_name("code"), *(self.write(one) for one in code_parts(code))]

    def _method(self, method: types.MethodType) -> list[bytes]:
        return [_name("method"), self.write(method.__func__), self.write(method.__self__)]

    def _builtin(self, function: types.BuiltinFunctionType) -> list[bytes]:
        owner = function.__self__
        name = [_name("builtin"), _name(function.__qualname__)]
        of_module = owner is None or isinstance(owner, types.ModuleType)
        return [*name, _name(function.__module__) if of_module else self.write(owner)]

    def _wrapped(self, one: Any) -> list[bytes]:
        inner = getattr(one, "__func__", None) or one.__wrapped__
        return [_name(type(one).__name__), self.write(inner)]

    def _property(self, one: property) -> list[bytes]:
        return [_name("property"), *(self.write(part) for part in (one.fget, one.fset, one.fdel))]

    def _class(self, kind: type) -> list[bytes]:
        if is_installed(kind.__module__):
            return [_name("class"), _class_name(kind)]
        parts = [_name("own class"), _name(kind.__qualname__), self.write(type(kind))]
        parts += [self.write(base) for base in kind.__bases__]
        for name, value in class_parts(kind):
            parts += [_name(name), self.write(value)]
        return parts

    def _module(self, module: types.ModuleType) -> list[bytes]:
        return [_name("module"), _name(module.__name__)]

    def _plain_name(self, value: Any) -> list[bytes]:
        return [_name(type(value).__name__), _name(value)]

    # ---- everything else

    def _object(self, value: Any) -> list[bytes] | None:
        """An object by its class and by what pickle would keep of it."""
        kind = type(value)
        own = not is_installed(kind.__module__)
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception:  # it refuses to be pickled
            if not own:
                return None
            reduced = (kind, (), getattr(value, "__dict__", {}))
        parts = [_name("object"), self.write(kind)]
        if isinstance(reduced, str):
            return [*parts, _name(reduced)]
        function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        parts += [self.write(function), self.write(arguments), self._state(value, state)]
        if items is not None:
            parts += self._sequence(items)
        if pairs is not None:
            parts += self._mapping(dict(pairs))
        return parts

    def _state(self, value: Any, state: Any) -> bytes:
        """Attributes that are None, a handle or some package's cache count as missing: they come with use."""
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            return self._state(value, state[0]) + self._state(value, state[1])
        if not isinstance(state, dict):
            return self.write(state)
        kind: Any = type(value)
        changing = _changing_names(kind)
        kept = {name: one for name, one in state.items() if one is not None and name not in changing}
        if is_installed(kind.__module__):
            kept = {name: one for name, one in kept.items() if not str(name).endswith("cache")}
        written = {name: self.write(one) for name, one in sorted(kept.items(), key=lambda pair: str(pair[0]))}
        pieces = [_name(name) + text for name, text in written.items() if not text.startswith(_OPAQUE)]
        return _text(b"state", b"".join(pieces))


def _raw(array: np.ndarray) -> bytes:
    data = np.ascontiguousarray(array).reshape(-1)
    hashed = hashlib.sha256(data.view(np.uint8).data if data.nbytes else b"")
    return struct.pack(">Q", data.nbytes) + hashed.digest()


def _class_name(kind: type) -> bytes:
    return _name(f"{kind.__module__}:{kind.__qualname__}")


def _dtype_name(dtype: np.dtype[Any]) -> bytes:
    return _name(f"{dtype.str} {dtype}")


def _mapped_file(array: np.ndarray) -> tuple[Any, ...] | None:
    """File, size, time of change and offset of an array that shows a memory-mapped file."""
    root: Any = array
    while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or root.filename is None:
        return None
    path = Path(root.filename).absolute()
    try:
        found = path.stat()
    except OSError:  # it was removed; the mapping lives on
        return None
    start = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return str(path), found.st_size, found.st_mtime_ns, root.offset + start


@functools.cache
def _changing_names(kind: type) -> frozenset[str]:
    """Attributes that hold what a cached property computed, or the number of the epoch."""
    epoch = ("epoch", "_epoch") if hasattr(kind, "set_epoch") else ()
    return frozenset(epoch) | frozenset(
        name
        for one in kind.__mro__
        for name, value in vars(one).items()
        if isinstance(value, functools.cached_property)
    )


_Method = Callable[[_Writer, Any], list[bytes]]
_EXACT: dict[type, _Method] = {
    list: _Writer._sequence,
    tuple: lambda writer, value: writer._sequence(value, b"tuple"),
    dict: _Writer._mapping,
    set: _Writer._set,
    frozenset: _Writer._set,
}
_METHODS: tuple[tuple[Any, _Method], ...] = (
    (torch.Tensor, _Writer._tensor),
    (np.ndarray, _Writer._array),
    (np.generic, _Writer._numpy_scalar),
    ((torch.Generator, np.random.Generator, np.random.RandomState, random.Random), _Writer._generator),
    (types.FunctionType, _Writer._function),
    (types.MethodType, _Writer._method),
    (types.BuiltinFunctionType, _Writer._builtin),
    ((staticmethod, classmethod, functools._lru_cache_wrapper), _Writer._wrapped),
    (property, _Writer._property),
    (types.CodeType, _Writer._code),
    (types.ModuleType, _Writer._module),
    (type, _Writer._class),
    ((torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype), _Writer._plain_name),
    ((torch.UntypedStorage, torch.TypedStorage), _Writer._storage),
    (types.MappingProxyType, _Writer._mapping),
)
