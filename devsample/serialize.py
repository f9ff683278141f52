"""Objects as bytes plus storages of tensors and arrays, and errors that name what cannot travel.

``cloudpickle`` carries functions, closures and classes of notebooks and of modules that other
processes do not find. Large data are taken out of the bytes: each storage is kept once, so ties and
views of tensors stay what they are, and a file of storages can be memory-mapped by every process
that needs it. What is memory-mapped from a file already travels by the file's path.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.nn.utils.parametrize import is_parametrized

from devsample.culprit import find_culprit, raises, short_error, type_name
from devsample.errors import NotPicklableError
from devsample.importable import found_elsewhere, has_home, home_module
from devsample.memory import Region, memory_of, save_storages
from devsample.outofband import (
    OUT_OF_BAND_BYTES,
    ArrayLayout,
    Storages,
    TensorLayout,
    is_plain_array,
    reduce_array,
)
from devsample.shared import MappedFiles, load_storages

__all__ = [
    "ByValuePickler",
    "Packed",
    "dumps",
    "find_culprit",
    "identify_classes",
    "load_storages",
    "loads",
    "pack",
    "pack_unproven",
    "packed_size",
    "save_storages",
    "short_error",
    "type_name",
    "unpack",
]

_SHORT_REDUCTION = 2  # of a builtin class; the definition of one has more parts


@dataclass(frozen=True)
class Packed:
    """An object as bytes and the storages of the tensors and arrays in it.

    Attributes:
        data: the bytes.
        storages: memory that is not in the bytes.
        tensors: the tensors of the object that use those storages.
    """

    data: bytes = field(repr=False)
    storages: tuple[torch.UntypedStorage, ...] = field(repr=False)
    tensors: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes in all; data that travel by the path of a file do not count."""
        return len(self.data) + sum(storage.nbytes() for storage in self.storages)


def pack(
    obj: Any, name: str, *, every_tensor: bool = False, keep_devices: bool = False, remedy: str = ""
) -> Packed:
    """Serialise ``obj``, and prove that it loads again.

    Args:
        obj: anything.
        name: what to call it in an error, e.g. ``"loader_spec"``.
        every_tensor: take every tensor out of the bytes, not only the large ones, and let nothing
            travel by the path of a file.
        keep_devices: leave tensors that are not on the CPU in the bytes; they come back on their
            device.
        remedy: last sentence of the error.

    Raises:
        NotPicklableError: naming the attribute path of what cannot travel.
    """
    try:
        return _pack_and_load(obj, every_tensor, keep_devices)
    except Exception as error:
        raise _explain(obj, name, error, remedy) from error


def unpack(
    data: bytes,
    storages: Sequence[torch.UntypedStorage],
    move: tuple[torch.device, torch.device] | None = None,
) -> Any:
    """The object of `pack`; its tensors and arrays share memory with ``storages``.

    Args:
        data: the bytes of a `Packed`.
        storages: its storages.
        move: ``(from, to)``: tensors that were on the first device come back on the second.

    Raises:
        LoaderError: a file that travels by its path is gone.
    """
    file = io.BytesIO(data)
    return _Unpickler(file, pickle.load(file), storages, move).load()


def dumps(obj: Any) -> bytes:
    """Serialise ``obj`` into bytes for `loads`, or ``pickle.loads``; everything is in them.

    Functions and classes that other processes cannot import travel by value.
    """
    file = io.BytesIO()
    ByValuePickler(file).dump(obj)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """The object of `dumps`; classes that this process has stay as they are."""
    return _CarefulUnpickler(io.BytesIO(data)).load()


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


def pack_unproven(obj: Any, *, known_classes: bool = False) -> Packed:
    """`pack` without the proof that it loads, and with plain errors.

    Args:
        obj: anything.
        known_classes: as for `ByValuePickler`.
    """
    return _packed(obj, False, False, known_classes)


def packed_size(obj: Any) -> int:
    """Bytes that ``obj`` takes to send, 0 if it cannot be sent."""
    try:
        return pack_unproven(obj).nbytes
    except Exception:  # it is reported elsewhere
        return 0


# ---- there --------------------------------------------------------------------------------------


def _pack_and_load(obj: Any, every_tensor: bool, keep_devices: bool) -> Packed:
    packed = _packed(obj, every_tensor, keep_devices)
    unpack(packed.data, packed.storages)
    return packed


def _packed(obj: Any, every_tensor: bool, keep_devices: bool, known_classes: bool = False) -> Packed:
    storages = Storages(by_path=not every_tensor)
    file = io.BytesIO()
    pickler = _Pickler(file, storages, every_tensor, keep_devices)
    pickler.known_classes = known_classes
    pickler.dump(obj)
    buffers = pickle.dumps(storages.buffers, protocol=pickle.HIGHEST_PROTOCOL)
    return Packed(buffers + file.getvalue(), tuple(storages.found), tuple(pickler.tensors))


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
        if name != "__main__" and name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)


class _Pickler(ByValuePickler):
    def __init__(self, file: io.BytesIO, storages: Storages, every_tensor: bool, keep_devices: bool) -> None:
        super().__init__(file, buffer_callback=storages.take_buffer)
        self._storages = storages
        self._smallest = 0 if every_tensor else OUT_OF_BAND_BYTES
        self._keep_devices = keep_devices
        self._kept: list[Any] = []  # ids stay valid while they live
        self._numbers: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if is_plain_array(obj) and obj.nbytes >= OUT_OF_BAND_BYTES:
            return reduce_array(obj)
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return self._tensor_id(obj)
        if is_plain_array(obj):
            return self._array_id(obj)
        return None

    def _array_id(self, array: np.ndarray[Any, Any]) -> Any:
        placed = self._storages.place_array(array) if array.nbytes else None
        if placed is None:
            return None
        region, start = placed
        return (
            self._number(array),
            ArrayLayout(
                region, start, array.dtype, array.shape, array.strides,
                array.flags.writeable, isinstance(array, np.memmap),
            ),
        )  # fmt: skip

    def _tensor_id(self, tensor: torch.Tensor) -> Any:
        _check_tensor(tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return None  # a subclass or a sparse tensor knows best how to pickle itself
        if tensor.nbytes < self._smallest and not isinstance(tensor, torch.nn.Parameter):
            return None
        if self._keep_devices and tensor.device.type != "cpu":
            return None
        new = id(tensor) not in self._numbers
        number = self._number(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        place = self._storages.place(plain.untyped_storage())
        if new and isinstance(place, int):
            self.tensors.append(tensor)
        return (
            number,
            TensorLayout(
                place, plain.dtype, int(plain.storage_offset()), tuple(plain.shape), plain.stride(),
                isinstance(tensor, torch.nn.Parameter), tensor.requires_grad, str(tensor.device),
                dict(tensor.__dict__),
            ),
        )  # fmt: skip

    def _number(self, obj: Any) -> int:
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self._kept)
            self._kept.append(obj)
        return self._numbers[id(obj)]


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
    culprit, path, cause = find_culprit(obj, name, error, lambda part: _pack_and_load(part, False, True))
    if isinstance(cause, NotPicklableError):
        reason = str(cause)
    elif raises(lambda: pack_unproven(culprit)):
        reason = f"is a {type_name(culprit)} and cannot be sent to another process ({short_error(cause)})."
    else:
        reason = f"is a {type_name(culprit)} that pickles but does not load again ({short_error(cause)})."
    return NotPicklableError(f"{path} {reason}" + (f"\n  {remedy}" if remedy else ""))


# ---- back ---------------------------------------------------------------------------------------


class _CarefulUnpickler(pickle.Unpickler):
    """Leaves classes that this process has as they are.

    Reading a class that was sent by value would set all its attributes again, and so give the class
    of the caller other methods.
    """

    def __init__(self, file: io.BytesIO, *, buffers: Iterable[Any] | None = None) -> None:
        super().__init__(file, buffers=buffers)
        self._new_classes: list[type] = []

    def find_class(self, module: str, name: str) -> Any:
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


class _Unpickler(_CarefulUnpickler):
    def __init__(
        self,
        file: io.BytesIO,
        buffers: Sequence[int | Region],
        storages: Sequence[torch.UntypedStorage],
        move: tuple[torch.device, torch.device] | None,
    ) -> None:
        self._files = MappedFiles()
        self._storages, self._move = storages, move
        super().__init__(file, buffers=[self._buffer(place) for place in buffers])
        self._moved: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, Any] = {}
        self._by_region: dict[Region, torch.UntypedStorage] = {}

    def persistent_load(self, reference: tuple[int, Any]) -> Any:
        number, layout = reference
        if number not in self._made:
            make = self._tensor if isinstance(layout, TensorLayout) else self._array
            self._made[number] = make(layout)
        return self._made[number]

    def _tensor(self, layout: TensorLayout) -> torch.Tensor:
        storage = self._storage(layout.place, layout.device)
        tensor = torch.empty(0, dtype=layout.dtype, device=storage.device)
        tensor = tensor.set_(storage, layout.offset, layout.shape, layout.stride)
        if layout.is_parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=layout.requires_grad)
        elif layout.requires_grad:
            tensor.requires_grad_()
        tensor.__dict__.update(layout.attributes)
        return tensor

    def _storage(self, place: int | Region, device: str) -> torch.UntypedStorage:
        storage = self._region(place) if isinstance(place, Region) else self._storages[place]
        if self._move is None or torch.device(device) != self._move[0]:
            return storage
        key = storage._cdata
        if key not in self._moved:
            self._moved[key] = storage.to(device=self._move[1])
        return self._moved[key]

    def _region(self, region: Region) -> torch.UntypedStorage:
        if region not in self._by_region:
            self._by_region[region] = self._files.storage(region)
        return self._by_region[region]

    def _array(self, layout: ArrayLayout) -> np.ndarray[Any, Any]:
        mapped, start = self._files.memory(layout.region, writable=layout.writeable)
        array: np.ndarray[Any, Any] = np.ndarray(
            layout.shape, layout.dtype, mapped, start + layout.start, layout.strides
        )
        if not layout.is_memory_map:
            return array
        memory_map = array.view(np.memmap)
        memory_map._mmap, memory_map.filename = mapped, layout.region.path  # type: ignore[attr-defined]
        memory_map.offset, memory_map.mode = 0, "c" if layout.writeable else "r"
        return memory_map

    def _buffer(self, place: int | Region) -> memoryview:
        if not isinstance(place, Region):
            return memory_of(self._storages[place])
        mapped, start = self._files.memory(place)
        return memoryview(mapped)[start : start + place.nbytes]
