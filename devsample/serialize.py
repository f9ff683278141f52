"""Objects as bytes plus tensor storages, and errors that name what cannot travel.

``cloudpickle`` carries functions, closures and classes of notebooks. Tensors are taken out of the
bytes: each storage is kept once, so ties and views stay what they are, and a file of storages can
be memory-mapped by every process that needs it.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from safetensors.torch import load_file, save_file
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.nn.utils.parametrize import is_parametrized

from devsample.errors import NotPicklableError

_OUT_OF_BAND_BYTES = 1 << 16
_MAX_DEPTH = 60
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))


@dataclass(frozen=True)
class Packed:
    """An object as bytes and the storages of the tensors in it."""

    data: bytes
    storages: tuple[torch.UntypedStorage, ...]


def pack(obj: Any, name: str, *, every_tensor: bool = False, remedy: str = "") -> Packed:
    """Serialise ``obj``, and prove that it loads again.

    Args:
        obj: anything.
        name: what to call it in an error, e.g. ``"loader_spec"``.
        every_tensor: take every tensor out of the bytes, not only the large ones.
        remedy: last sentence of the error.

    Raises:
        NotPicklableError: naming the attribute path of what cannot travel.
    """
    try:
        return _pack_and_load(obj, every_tensor)
    except Exception as error:
        raise _explain(obj, name, error, remedy) from error


def unpack(
    data: bytes,
    storages: Sequence[torch.UntypedStorage],
    move: tuple[torch.device, torch.device] | None = None,
) -> Any:
    """The object of `pack`; its tensors share memory with ``storages``.

    Args:
        data: the bytes of a `Packed`.
        storages: its storages.
        move: ``(from, to)``: tensors that were on the first device come back on the second.
    """
    return _Unpickler(data, storages, move).load()


def save_storages(storages: Sequence[torch.UntypedStorage], path: Path) -> None:
    """Write storages to a safetensors file, beside it first and then renamed."""
    tensors = {
        str(index): torch.empty(0, dtype=torch.uint8, device="cpu").set_(_on_cpu(storage))
        for index, storage in enumerate(storages)
    }
    temporary = path.with_name(path.name + ".tmp")
    save_file(tensors, temporary)
    os.replace(temporary, path)


def load_storages(path: Path) -> list[torch.UntypedStorage]:
    """The storages of a file, memory-mapped where the platform can; writes stay private."""
    tensors = load_file(path)
    return [_own_storage(tensors[str(index)]) for index in range(len(tensors))]


def _on_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type == "cpu":
        return storage
    copied: torch.UntypedStorage = storage.cpu()  # type: ignore[no-untyped-call]
    return copied


def _own_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A storage that starts where the tensor does (a file's tensors may share one mapping)."""
    storage = tensor.untyped_storage()
    offset = tensor.storage_offset()
    if offset == 0 and storage.nbytes() == tensor.nbytes:
        return storage
    part: torch.UntypedStorage = storage[offset : offset + tensor.nbytes]
    return part


def _pack_and_load(obj: Any, every_tensor: bool) -> Packed:
    pickler = _Pickler(every_tensor)
    packed = Packed(pickler.dumps(obj), tuple(pickler.storages))
    unpack(packed.data, packed.storages)
    return packed


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, every_tensor: bool) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self._smallest = 0 if every_tensor else _OUT_OF_BAND_BYTES
        self._known: dict[int, int] = {}
        self.storages: list[torch.UntypedStorage] = []
        self._tensors: list[torch.Tensor] = []  # ids stay valid while they live
        self._numbers: dict[int, int] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.nn.Module) and is_parametrized(obj):  # refuses to be pickled as a whole
            return _blank, (type(obj),), obj.__dict__
        return super().reducer_override(obj)

    def dumps(self, obj: Any) -> bytes:
        self.dump(obj)
        return self._file.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        _check_tensor(obj)
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout is not torch.strided:
            return None  # a subclass or a sparse tensor knows best how to pickle itself
        if obj.nbytes < self._smallest and not isinstance(obj, torch.nn.Parameter):
            return None
        return self._reference(obj)

    def _reference(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        return (
            self._numbers[id(tensor)],
            isinstance(tensor, torch.nn.Parameter),
            self._storage_index(plain),
            plain.dtype,
            plain.storage_offset(),
            tuple(plain.shape),
            plain.stride(),
            tensor.requires_grad,
            str(tensor.device),
            dict(tensor.__dict__),
        )

    def _storage_index(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = len(self.storages)
            self.storages.append(storage)
        return self._known[key]


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        storages: Sequence[torch.UntypedStorage],
        move: tuple[torch.device, torch.device] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._storages = storages
        self._move = move
        self._moved: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def _storage(self, index: int, device: str) -> torch.UntypedStorage:
        if self._move is None or torch.device(device) != self._move[0]:
            return self._storages[index]
        if index not in self._moved:
            self._moved[index] = self._storages[index].to(device=self._move[1])
        return self._moved[index]

    def persistent_load(self, reference: Any) -> torch.Tensor:
        (
            number,
            is_parameter,
            index,
            dtype,
            offset,
            shape,
            stride,
            requires_grad,
            device,
            attributes,
        ) = reference
        if number not in self._tensors:
            storage = self._storage(index, device)
            tensor = torch.empty(0, dtype=dtype, device=storage.device)
            tensor = tensor.set_(storage, offset, shape, stride)
            if is_parameter:
                tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
            elif requires_grad:
                tensor.requires_grad_()
            tensor.__dict__.update(attributes)
            self._tensors[number] = tensor
        return self._tensors[number]


def _blank(kind: type[torch.nn.Module]) -> torch.nn.Module:
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    return module


def _check_tensor(tensor: torch.Tensor) -> None:
    """Refuse tensors that would silently become something else on the other side."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise NotPicklableError(
            "is a non-leaf tensor that requires grad; its graph cannot travel. Use .detach(); after pruning "
            "or the old weight norm, prune.remove or remove_weight_norm."
        )
    if isinstance(tensor, UninitializedTensorMixin):
        raise NotPicklableError("is a lazy parameter without values; run one forward pass first.")
    if tensor.is_meta:
        raise NotPicklableError("is on the meta device and has no values; load its weights first.")
    if type(tensor).__name__ == "DTensor":
        raise NotPicklableError("is a sharded DTensor; gather it with .full_tensor() first.")
    if getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise NotPicklableError("has a gradient hook, which cannot travel; remove the hook first.")


def _explain(obj: Any, name: str, error: Exception, remedy: str) -> NotPicklableError:
    culprit, path, cause = find_culprit(obj, name, error, lambda part: _pack_and_load(part, False))
    if isinstance(cause, NotPicklableError):
        reason = str(cause)
    elif _raises(lambda: _Pickler(False).dumps(culprit)):
        reason = f"is a {type_name(culprit)} and cannot be sent to another process ({short_error(cause)})."
    else:
        reason = f"is a {type_name(culprit)} that pickles but does not load again ({short_error(cause)})."
    return NotPicklableError(f"{path} {reason}" + (f"\n  {remedy}" if remedy else ""))


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
            failure = _raises(functools.partial(attempt, child))
            if failure is not None:
                obj, path, error = child, child_path, failure
                break
        else:
            break
    return obj, path, error


def _raises(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:  # whatever a user's __reduce__ raises is the answer
        return error
    return None


def _children(obj: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Parts of ``obj`` that are pickled with it, each with its path."""
    if isinstance(obj, torch.Tensor):
        return
    if isinstance(obj, torch.nn.Module):
        yield from _module_parts(obj, path)
    elif isinstance(obj, dict):
        yield from ((value, f"{path}[{key!r}]") for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)) and type(obj).__reduce__ is object.__reduce__:
        yield from ((value, f"{path}[{index}]") for index, value in enumerate(obj))
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
    except Exception:  # it refuses as a whole: it is the culprit itself, unless an attribute is
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
