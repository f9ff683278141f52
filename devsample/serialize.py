"""Objects as bytes plus storages of tensors and arrays, and errors that name what cannot travel.

``cloudpickle`` carries functions, closures and classes of notebooks and of modules that other
processes do not find. Large data are taken out of the bytes: each storage is kept once, so ties and
views of tensors stay what they are, and a file of storages can be memory-mapped by every process
that needs it. What is memory-mapped from a file already travels by the file's path.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from devsample.byvalue import ByValuePickler, CarefulUnpickler, dumps, identify_classes, loads
from devsample.culprit import find_culprit, raises, short_error, type_name
from devsample.errors import NotPicklableError
from devsample.importable import is_installed
from devsample.inheritance import check_inheritance, is_inheritable
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


@dataclass(frozen=True)
class Packed:
    """An object as bytes and the storages of the tensors and arrays in it.

    Attributes:
        data: the bytes.
        storages: memory that is not in the bytes.
        tensors: the tensors of the object that use those storages.
        inherited: locks, queues and the like of multiprocessing, which a process can be given only
            while it is being started.
    """

    data: bytes = field(repr=False)
    storages: tuple[torch.UntypedStorage, ...] = field(repr=False)
    tensors: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    inherited: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes in all; data that travel by the path of a file do not count."""
        return len(self.data) + sum(storage.nbytes() for storage in self.storages)


def pack(
    obj: Any, name: str, *, every_tensor: bool = False, to_worker: bool = False, remedy: str = ""
) -> Packed:
    """Serialise ``obj``, and prove that it loads again.

    Args:
        obj: anything.
        name: what to call it in an error, e.g. ``"loader_spec"``.
        every_tensor: take every tensor out of the bytes, not only the large ones, and let nothing
            travel by the path of a file.
        to_worker: it goes to a process that this one starts. Tensors that are not on the CPU stay in
            the bytes and come back on their device, and what multiprocessing hands to a process that
            is being started is set aside, see `Packed.inherited`.
        remedy: last sentence of the error.

    Raises:
        NotPicklableError: naming the attribute path of what cannot travel.
    """
    try:
        return _pack_and_load(obj, _Options(every_tensor=every_tensor, to_worker=to_worker))
    except Exception as error:
        raise _explain(obj, name, error, remedy, to_worker) from error


def unpack(
    data: bytes,
    storages: Sequence[torch.UntypedStorage],
    move: tuple[torch.device, torch.device] | None = None,
    inherited: Sequence[Any] = (),
) -> Any:
    """The object of `pack`; its tensors and arrays share memory with ``storages``.

    Args:
        data: the bytes of a `Packed`.
        storages: its storages.
        move: ``(from, to)``: tensors that were on the first device come back on the second.
        inherited: what was set aside.

    Raises:
        LoaderError: a file that travels by its path is gone.
    """
    file = io.BytesIO(data)
    return _Unpickler(file, pickle.load(file), storages, move, inherited).load()


def pack_unproven(obj: Any, *, known_classes: bool = False) -> Packed:
    """`pack` without the proof that it loads, and with plain errors.

    Args:
        obj: anything.
        known_classes: as for `ByValuePickler`.
    """
    return _packed(obj, _Options(known_classes=known_classes))


def packed_size(obj: Any) -> int:
    """Bytes that ``obj`` takes to send, 0 if it cannot be sent."""
    try:
        return pack_unproven(obj).nbytes
    except Exception:  # it is reported elsewhere
        return 0


# ---- there --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    every_tensor: bool = False
    to_worker: bool = False
    known_classes: bool = False


def _pack_and_load(obj: Any, options: _Options) -> Packed:
    pickler, packed = _pickled(obj, options)
    check_inheritance(packed.inherited)
    storages: Sequence[torch.UntypedStorage] = packed.storages
    if pickler.runs_code:  # which may write to what it is given
        storages = [storage.clone() for storage in storages]  # type: ignore[no-untyped-call]
    unpack(packed.data, storages, inherited=packed.inherited)
    return packed


def _packed(obj: Any, options: _Options) -> Packed:
    return _pickled(obj, options)[1]


def _pickled(obj: Any, options: _Options) -> tuple[_Pickler, Packed]:
    storages = Storages(by_path=not options.every_tensor)
    file = io.BytesIO()
    pickler = _Pickler(file, storages, options)
    pickler.dump(obj)
    buffers = pickle.dumps(storages.buffers, protocol=pickle.HIGHEST_PROTOCOL)
    return pickler, Packed(
        buffers + file.getvalue(), tuple(storages.found), tuple(pickler.tensors), tuple(pickler.inherited)
    )


class _Pickler(ByValuePickler):
    def __init__(self, file: io.BytesIO, storages: Storages, options: _Options) -> None:
        super().__init__(file, buffer_callback=storages.take_buffer)
        self.known_classes = options.known_classes
        self._storages, self._to_worker = storages, options.to_worker
        self._smallest = 0 if options.every_tensor else OUT_OF_BAND_BYTES
        self._kept: list[Any] = []  # ids stay valid while they live
        self._numbers: dict[int, int] = {}
        self.tensors: list[torch.Tensor] = []
        self.inherited: list[Any] = []
        self.runs_code = False  # whether code of the user's runs when it is loaded

    def reducer_override(self, obj: Any) -> Any:
        kind: Any = type(obj)
        self.runs_code = self.runs_code or _runs_code(kind)
        if is_plain_array(obj) and obj.nbytes >= OUT_OF_BAND_BYTES:
            return reduce_array(obj)
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return self._tensor_id(obj)
        if is_plain_array(obj):
            return self._array_id(obj)
        if self._to_worker and is_inheritable(obj):
            return self._inheritance_id(obj)
        return None

    def _inheritance_id(self, obj: Any) -> Any:
        new = id(obj) not in self._numbers
        number = self._number(obj)
        if new:
            self.inherited.append(obj)
        return number, next(place for place, one in enumerate(self.inherited) if one is obj)

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
        plain_kind = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain_kind or tensor.is_quantized:
            return None  # a subclass or a sparse tensor knows best how to pickle itself
        if not isinstance(tensor, torch.nn.Parameter) and self._is_small(tensor.untyped_storage()):
            return None
        if self._to_worker and tensor.device.type != "cpu":
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

    def _is_small(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage may stay in the bytes; one that several tensors use is kept together."""
        return storage.nbytes() < self._smallest and not _has_several_users(storage)

    def _number(self, obj: Any) -> int:
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self._kept)
            self._kept.append(obj)
        return self._numbers[id(obj)]


@functools.lru_cache(maxsize=1024)
def _runs_code(kind: type) -> bool:
    reducers = ("__reduce__", "__reduce_ex__", "__setstate__")
    own = any(getattr(kind, name, None) is not getattr(object, name, None) for name in reducers)
    return own and not is_installed(kind.__module__)


def _has_several_users(storage: torch.UntypedStorage) -> bool:
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return False
    alone = torch.empty(1, device="cpu")
    return bool(count(storage._cdata) > count(alone.untyped_storage()._cdata))


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


def _explain(obj: Any, name: str, error: Exception, remedy: str, to_worker: bool) -> NotPicklableError:
    options = _Options(to_worker=to_worker)
    culprit, path, cause = find_culprit(obj, name, error, lambda part: _pack_and_load(part, options))
    if isinstance(cause, NotPicklableError):
        reason = str(cause)
    elif raises(lambda: check_inheritance(_packed(culprit, options).inherited)):
        reason = f"is a {type_name(culprit)} and cannot be sent to another process ({short_error(cause)})."
    else:
        reason = f"is a {type_name(culprit)} that pickles but does not load again ({short_error(cause)})."
        if isinstance(cause, RecursionError):
            remedy = (
                "A __getattr__ that asks for another attribute finds none while the object is loaded: let it "
                'raise AttributeError for names that start with "__", and for the attribute it looks in.'
            )
    return NotPicklableError(f"{path} {reason}" + (f"\n  {remedy}" if remedy else ""))


# ---- back ---------------------------------------------------------------------------------------


class _Unpickler(CarefulUnpickler):
    def __init__(
        self,
        file: io.BytesIO,
        buffers: Sequence[int | Region],
        storages: Sequence[torch.UntypedStorage],
        move: tuple[torch.device, torch.device] | None,
        inherited: Sequence[Any],
    ) -> None:
        self._files = MappedFiles()
        self._storages, self._move, self._inherited = storages, move, inherited
        super().__init__(file, buffers=[self._buffer(place) for place in buffers])
        self._moved: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, Any] = {}
        self._by_region: dict[Region, torch.UntypedStorage] = {}

    def persistent_load(self, reference: tuple[int, Any]) -> Any:
        number, layout = reference
        if isinstance(layout, int):
            return self._inherited[layout]
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
