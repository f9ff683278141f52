"""What is taken out of a pickle: memory of tensors, arrays and buffers, and how it was used."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from devsample.memory import Region, storage_at
from devsample.shared import FileMaps, address_of

OUT_OF_BAND_BYTES = 1 << 16
_ARRAYS = (np.ndarray, np.memmap)


class Storages:
    """Memory taken out of the bytes: each piece once, files that are mapped by their path."""

    def __init__(self, *, by_path: bool) -> None:
        self.found: list[torch.UntypedStorage] = []
        self.buffers: list[int | Region] = []  # the place of each buffer of the pickle
        self._indices: dict[Any, int] = {}
        self._by_path = by_path
        self._maps: FileMaps | None = None

    def place(self, storage: torch.UntypedStorage) -> int | Region:
        """The number of a storage, or the region of a file that it is."""
        if self._by_path and storage.device.type == "cpu" and storage.nbytes() >= OUT_OF_BAND_BYTES:
            self.maps.note_storage(storage)
            region = self.maps.region(storage.data_ptr(), storage.nbytes())
            if region is not None:
                return region
        return self._index(storage)

    def place_array(self, array: np.ndarray[Any, Any]) -> tuple[Region, int] | None:
        """The region of a file that an array lies in, and where in it the first item is."""
        mapped = _memory_map(array)
        if not self._by_path or (mapped is None and array.nbytes < OUT_OF_BAND_BYTES):
            return None
        if mapped is not None:
            self.maps.note(mapped)
        low, high = np.lib.array_utils.byte_bounds(array)
        region = self.maps.region(low, high - low)
        return None if region is None else (region, array.ctypes.data - low)

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer out of the bytes unless it is small: the pickler's callback."""
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        address = address_of(raw)
        region = self.maps.region(address, raw.nbytes) if self._by_path else None
        self.buffers.append(region or self._index(storage_at(raw, address, raw.nbytes)))
        return False

    @property
    def maps(self) -> FileMaps:
        """What is mapped, looked up when it is needed."""
        if self._maps is None:
            self._maps = FileMaps()
        return self._maps

    def _index(self, storage: torch.UntypedStorage) -> int:
        memory = (storage.device, storage.data_ptr(), storage.nbytes())
        key = memory if storage.nbytes() else storage._cdata
        if key not in self._indices:
            self._indices[key] = len(self.found)
            self.found.append(storage)
        return self._indices[key]


@dataclass(frozen=True)
class TensorLayout:
    """A tensor without its memory."""

    place: int | Region
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_parameter: bool
    requires_grad: bool
    device: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class ArrayLayout:
    """An array that lies in a file."""

    region: Region
    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writeable: bool
    is_memory_map: bool


def is_plain_array(obj: Any) -> bool:
    """Whether ``obj`` is a numpy array of which the bytes, type and layout are all there is."""
    return type(obj) in _ARRAYS and not obj.dtype.hasobject and obj.dtype.kind != "T"


def _memory_map(array: np.ndarray[Any, Any]) -> np.memmap[Any, Any] | None:
    """The numpy memory map whose memory an array uses."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap) and base._mmap is not None:  # type: ignore[attr-defined]
            return base
        base = base.base
    return None


def reduce_array(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """A plain array as a buffer; one that is not contiguous is copied."""
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    rows = np.ascontiguousarray(array.T if order == "F" else array)
    flat = rows.view(np.ndarray).reshape(-1).view(np.uint8)
    writeable = array.flags.writeable
    return _array_over, (pickle.PickleBuffer(flat.data), array.dtype, array.shape, order, writeable)


def _array_over(
    buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any, writeable: bool
) -> np.ndarray[Any, Any]:
    array = np.frombuffer(buffer, np.uint8).view(dtype).reshape(shape, order=order)
    if array.flags.writeable and not writeable:
        array.flags.writeable = False
    return array
