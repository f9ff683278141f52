"""Memory that several processes read, of which the machine holds one copy: parts of files.

A process that has a file mapped, or that owns a block, tells others where the bytes are (a `Region`);
they map them for themselves. Mappings that can be written are private: what a process writes stays
its own. Linux says which file lies at an address; elsewhere only what is known from the objects is
used, and what is not known travels by value.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import multiprocessing.util
import os
import stat
import sys
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from devsample.errors import LoaderError
from devsample.memory import Region, storage_over, storage_regions, write_storages

LINUX = sys.platform.startswith("linux")
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if LINUX else 0)
_SWAPPED, _PRESENT, _OF_FILE = (np.uint64(1 << bit) for bit in (62, 63, 61))  # in pagemap
_COMPARED_AT_ONCE = 1 << 22
_TRANSIENT = ("/dev/shm/torch_", "/dev/shm/psm_", "/dev/shm/sem.")
_LOCAL_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay", "bcachefs"}


# ---- mapping ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Area:
    """Addresses at which a file is mapped."""

    start: int
    stop: int
    offset: int
    path: str
    inode: int
    private: bool


_mapped_here: weakref.WeakKeyDictionary[mmap.mmap, _Area] = weakref.WeakKeyDictionary()


class MappedFiles:
    """Files mapped into this process, each once, so that what overlapped in them still does."""

    def __init__(self) -> None:
        self._maps: dict[tuple[str, int, bool], mmap.mmap] = {}

    def memory(self, region: Region, *, writable: bool = True) -> tuple[mmap.mmap, int]:
        """The mapping that holds a region, and where in it the region starts.

        Args:
            region: what to map.
            writable: map it so that writes are possible, and stay in this process.

        Raises:
            LoaderError: naming the file, if it is gone or too short.
        """
        key = region.path, region.inode, writable
        if key not in self._maps:
            self._maps[key] = _map(region, writable)
        mapped = self._maps[key]
        if region.offset + region.nbytes > len(mapped):
            raise LoaderError(
                f"{region.path}: the file is shorter than it was when it was memory-mapped "
                f"({len(mapped)} bytes, {region.offset + region.nbytes} are needed)."
            )
        return mapped, region.offset

    def storage(self, region: Region) -> torch.UntypedStorage:
        """A region as a storage; writes to it stay in this process."""
        mapped, start = self.memory(region)
        return storage_over(mapped, start, region.nbytes)


def _map(region: Region, writable: bool) -> mmap.mmap:
    try:
        descriptor = os.open(region.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise LoaderError(
            f"{region.path} cannot be opened ({error.strerror}). It was memory-mapped where this object was "
            "made, and travels by its path: keep the file for as long as the run lasts, where every "
            "process can read it."
        ) from error
    try:
        status = os.fstat(descriptor)
        if region.inode not in (0, status.st_ino):
            raise LoaderError(
                f"{region.path} is not the file that it was: another one has taken its place, or its process "
                "has closed it. Keep memory-mapped files as they are for as long as the run lasts."
            )
        if status.st_size == 0:
            raise LoaderError(f"{region.path}: the file is empty; it was memory-mapped before.")
        mapped = _map_descriptor(descriptor, writable)
    finally:
        os.close(descriptor)
    start = address_of(mapped)
    _mapped_here[mapped] = _Area(start, start + len(mapped), 0, region.path, region.inode, writable)
    return mapped


def _map_descriptor(descriptor: int, writable: bool) -> mmap.mmap:
    if not writable:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    if not LINUX:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    # A private mapping may be larger than the memory that is left: few of its pages are written.
    flags = mmap.MAP_PRIVATE | _NO_RESERVE
    return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def load_storages(path: Path, *, keep: bool = False) -> list[torch.UntypedStorage]:
    """The storages of a file, memory-mapped; writes stay private.

    Args:
        path: a file of `save_storages`.
        keep: keep it open, so that other processes can map it even after it lost its name.
    """
    regions = storage_regions(path)
    if not regions:
        return []
    mapped = map_and_keep(path) if keep else MappedFiles().memory(regions[0])[0]
    return [storage_over(mapped, region.offset, region.nbytes) for region in regions]


def address_of(buffer: Any) -> int:
    """Where the memory of a buffer starts."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def map_and_keep(path: Path) -> mmap.mmap:
    """Map a file for writes that stay private, and keep it open.

    Other processes can then be told of it by this process's descriptor, even after it lost its name.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    mapped = _map_descriptor(descriptor, writable=True)
    name, inode = _open_file_path(descriptor), os.fstat(descriptor).st_ino
    if name is None:
        os.close(descriptor)
        name, inode = str(path), 0
    else:
        weakref.finalize(mapped, os.close, descriptor)
    start = address_of(mapped)
    _mapped_here[mapped] = _Area(start, start + len(mapped), 0, name, inode, private=True)
    return mapped


def _open_file_path(descriptor: int) -> str | None:
    """A path by which other processes open this process's descriptor; None where there is none."""
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    return path if LINUX and os.path.exists(path) else None


# ---- which file lies at an address --------------------------------------------------------------


class FileMaps:
    """What files this process has mapped, as of now.

    Args:
        ask_system: let the system say it, where it can; else only what devsample mapped itself, and
            what is noted from objects, is known.
    """

    def __init__(self, *, ask_system: bool = True) -> None:
        own = list(_mapped_here.values())
        told = _system_areas() if ask_system and LINUX else None
        self.complete = told is not None
        others = (area for area in told or () if not any(one.start <= area.start < one.stop for one in own))
        self._areas = sorted([*own, *others], key=lambda area: area.start)

    def note(self, mapped: np.memmap[Any, Any]) -> None:
        """Learn from a numpy memory map, where the system does not tell."""
        if self.complete or mapped._mmap is None or not isinstance(mapped.filename, (str, os.PathLike)):  # type: ignore[attr-defined]
            return
        start = address_of(mapped._mmap)  # type: ignore[attr-defined]
        self._note(
            _Area(
                start,
                start + len(mapped._mmap),  # type: ignore[attr-defined]
                mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY,
                os.path.abspath(mapped.filename),
                0,
                mapped.mode == "c",
            )
        )

    def note_storage(self, storage: torch.UntypedStorage) -> None:
        """Learn from a storage made by ``torch.from_file(..., shared=True)``."""
        if not self.complete and storage.filename is not None:
            start = storage.data_ptr()
            path = os.path.abspath(storage.filename)
            self._note(_Area(start, start + storage.nbytes(), 0, path, 0, private=False))

    def _note(self, area: _Area) -> None:
        if area not in self._areas:
            bisect.insort(self._areas, area, key=lambda one: one.start)

    def region(self, address: int, nbytes: int) -> Region | None:
        """The part of a file that lies at an address; None if it is not one, or was written to.

        Memory that is shared with its file is what the file holds. A private mapping counts only if
        none of it was written.
        """
        area = self._around(address, nbytes)
        if area is None:
            return None
        offset = area.offset + address - area.start
        region = _named(area, offset, nbytes)
        if region is None or (area.private and _was_written(address, region)):
            return None
        return region

    def _around(self, address: int, nbytes: int) -> _Area | None:
        """The area that holds all the bytes; neighbours that continue the file count as one."""
        place = bisect.bisect_right(self._areas, address, key=lambda area: area.start) - 1
        if place < 0 or address >= self._areas[place].stop:
            return None
        first = last = self._areas[place]
        while last.stop < address + nbytes:
            place += 1
            if place == len(self._areas):
                return None
            following = self._areas[place]
            reaches = following.start == last.stop
            continues = following.offset == last.offset + last.stop - last.start
            alike = (following.inode, following.private) == (first.inode, first.private)
            if not (reaches and continues and alike):
                return None
            last = following
        return replace(first, stop=last.stop)


def _system_areas() -> list[_Area] | None:
    """All mapped files; None where the system does not tell."""
    try:
        text = Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return None
    areas = []
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/"):
            continue
        start, stop = (int(number, 16) for number in fields[0].split("-"))
        path = fields[5].replace("\\012", "\n")
        areas.append(_Area(start, stop, int(fields[2], 16), path, int(fields[4]), fields[1][3] == "p"))
    return areas


def _named(area: _Area, offset: int, nbytes: int) -> Region | None:
    """The region, by a path under which other processes find the same file."""
    if area.path.startswith(_TRANSIENT):  # lives as long as its owner likes
        return None
    try:
        status = os.stat(area.path)
    except OSError:
        return None
    same = area.inode in (0, status.st_ino)
    if not same or not stat.S_ISREG(status.st_mode) or status.st_size < offset + nbytes:
        return None
    return Region(area.path, offset, nbytes, status.st_ino)


def _was_written(address: int, region: Region) -> bool:
    """Whether a private mapping differs from its file, or may."""
    first = address // mmap.PAGESIZE
    count = (address + region.nbytes - 1) // mmap.PAGESIZE - first + 1
    try:
        if not LINUX:
            raise OSError("no pagemap")
        pages = np.fromfile("/proc/self/pagemap", np.uint64, count, offset=first * 8)
        if len(pages) != count:
            raise OSError("pagemap is cut off")
    except OSError:
        return _differs(address, region)
    in_memory = (pages & _PRESENT != 0) & (pages & _OF_FILE == 0)
    return bool((in_memory | (pages & _SWAPPED != 0)).any())


def _differs(address: int, region: Region) -> bool:
    with open(region.path, "rb") as file:
        file.seek(region.offset)
        for start in range(0, region.nbytes, _COMPARED_AT_ONCE):
            size = min(_COMPARED_AT_ONCE, region.nbytes - start)
            if file.read(size) != ctypes.string_at(address + start, size):
                return True
    return False


# ---- blocks -------------------------------------------------------------------------------------


class SharedBlock:
    """Storages laid into memory that this process owns and other processes map.

    On Linux it is a file without a name, which others open through this process: nothing is left
    behind however the process ends, and /dev/shm is not touched. Elsewhere it is a temporary file.

    Args:
        storages: what to lay into it.
        in_file: use a temporary file in any case.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage], *, in_file: bool = False) -> None:
        descriptor, path = (-1, None) if in_file else _nameless_file()
        if path is None:
            folder = multiprocessing.util.get_temp_dir()
            descriptor, path = tempfile.mkstemp(prefix="devsample-", dir=folder)
            inode, unlink = 0, path
        else:
            inode, unlink = os.fstat(descriptor).st_ino, ""
        self._close = weakref.finalize(self, _discard, os.getpid(), descriptor, unlink)
        with open(descriptor, "wb", closefd=False) as file:
            offsets = write_storages(file, storages)
        self.regions = tuple(
            Region(path, offset, storage.nbytes(), inode)
            for offset, storage in zip(offsets, storages, strict=True)
        )

    def close(self) -> None:
        """Let go of it. Who has mapped it keeps it; nobody can map it any more."""
        self._close()


def _nameless_file() -> tuple[int, str | None]:
    if not LINUX or not hasattr(os, "memfd_create"):  # Linux with a C library that lacks it
        return -1, None
    try:
        descriptor = os.memfd_create("devsample")
    except OSError:
        return -1, None
    path = _open_file_path(descriptor)
    if path is None:
        os.close(descriptor)
    return descriptor, path


def _discard(owner: int, descriptor: int, path: str) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)
    if path and os.getpid() == owner:  # not in a process that was forked from it
        with contextlib.suppress(OSError):
            os.unlink(path)


def on_local_disk(path: Path) -> bool:
    """Whether a file is on a disk or in memory of this machine, as far as the system tells."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return False
    real, best, kind = os.path.realpath(path), "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].replace("\\040", " ")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind in _LOCAL_DISKS
