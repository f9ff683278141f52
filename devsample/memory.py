"""The memory of tensor storages: as bytes, over other memory, and in files of storages."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

_ALIGNMENT = 64
_PADDING = "padding"


@dataclass(frozen=True)
class Region:
    """Bytes of a file.

    Attributes:
        path: the file, or the open file of another process.
        offset: of the first byte.
        nbytes: how many.
        inode: the file's number, if it must be this very file; else 0.
    """

    path: str
    offset: int
    nbytes: int
    inode: int = 0


def memory_of(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage of the CPU, without a mark on it (``numpy()`` would leave one)."""
    block = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    block.owner = storage  # type: ignore[attr-defined]
    return memoryview(block).cast("B")


def storage_over(buffer: Any, offset: int = 0, nbytes: int | None = None) -> torch.UntypedStorage:
    """A storage that uses a buffer's memory, and keeps the buffer."""
    nbytes = memoryview(buffer).nbytes - offset if nbytes is None else nbytes
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    tensor = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset)
    return tensor.untyped_storage()


def storage_at(owner: Any, address: int, nbytes: int) -> torch.UntypedStorage:
    """A storage that uses the memory at ``address``, which belongs to ``owner``."""
    block = (ctypes.c_ubyte * nbytes).from_address(address)
    block.owner = owner  # type: ignore[attr-defined]
    return storage_over(block)


def on_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The storage itself, or its copy on the CPU."""
    if storage.device.type == "cpu":
        return storage
    copied: torch.UntypedStorage = storage.cpu()  # type: ignore[no-untyped-call]
    return copied


def write_storages(file: IO[bytes], storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """Write storages one after the other, each at a multiple of 64 bytes; returns their offsets."""
    offsets = []
    for storage in storages:
        file.write(b"\0" * (-file.tell() % _ALIGNMENT))
        offsets.append(file.tell())
        if storage.nbytes():
            file.write(memory_of(on_cpu(storage)))
    return offsets


def save_storages(storages: Sequence[torch.UntypedStorage], path: Path) -> None:
    """Write storages to a safetensors file, beside it first and then renamed.

    Each starts at a multiple of 64 bytes, so that mapped tensors and arrays are aligned.
    """
    entries: dict[str, Any] = {}
    end = 0
    for index, storage in enumerate(storages):
        start = end + -end % _ALIGNMENT
        if start > end:
            entries[f"{_PADDING}{index}"] = _entry(end, start)
        end = start + storage.nbytes()
        entries[str(index)] = _entry(start, end)
    header = json.dumps(entries).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        write_storages(file, storages)
    os.replace(temporary, path)


def storage_regions(path: Path) -> list[Region]:
    """Where the storages of a file of `save_storages` are."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    spans = [value["data_offsets"] for name, value in entries.items() if not name.startswith(_PADDING)]
    return [Region(str(path), 8 + length + start, stop - start) for start, stop in spans]


def _entry(start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
