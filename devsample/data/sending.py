"""How batches travel from a loader worker to its chain process.

They are serialised by the worker's main thread, tensors in shared memory. This module is preloaded
by the server that forks the workers: it stays light.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import os
import pickle
import warnings
from collections import ChainMap
from collections.abc import Iterator
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import get_worker_info

from devsample.errors import LoaderWarning, LoaderWorkerError
from devsample.memory import memory_of, storage_over
from devsample.serialize import (
    ByValuePickler,
    find_culprit,
    pack_unproven,
    short_error,
    type_name,
    unpack,
)

_SHARED_MEMORY = "/dev/shm"
_MUCH_UNUSED = 1 << 20
_told: set[int] = set()  # processes that have said that shared memory is full


class PackedBatch:
    """A batch that was serialised by the worker's main thread.

    Left to itself a worker serialises in a background thread, whose errors nobody sees: the
    reader waits for ever. It is unpacked while the reader takes it from the queue.

    Args:
        data: the batch as bytes.
        memory: its large data, if they do not lie in shared memory.
        warning: what the reader is to be told.
    """

    def __init__(self, data: bytes, memory: tuple[bytes, ...] | None = None, warning: str = "") -> None:
        self._data, self._memory, self._warning = data, memory, warning

    def __reduce__(self) -> tuple[Any, ...]:
        if self._memory is None:
            return ForkingPickler.loads, (self._data,)
        return _open, (self._data, self._memory, self._warning)


def _open(data: bytes, memory: tuple[bytes, ...], warning: str) -> Any:
    if warning:
        warnings.warn(warning, LoaderWarning, stacklevel=2)
    return unpack(data, [storage_over(bytearray(one)) for one in memory])


def send(batch: Any) -> Any:
    """``collate_fn`` of the wrapped loader: pack the batch if it has to leave this process."""
    if get_worker_info() is None:
        return batch
    try:
        return _packed(batch)
    except Exception as error:
        culprit, path, cause = find_culprit(batch, "batch", error, _try_to_pack)
        remedy = "Return tensors, arrays or plain values from the data set, convert it in collate_fn"
        if isinstance(culprit, torch.Tensor) and culprit.requires_grad:
            remedy = "It carries a graph that ends in this process: .detach() it in the data set"
        raise LoaderWorkerError(
            f"{path} is a {type_name(culprit)} and cannot be sent from a loader worker "
            f"({short_error(cause)}). {remedy}, or use num_workers=0."
        ) from None


def _packed(batch: Any) -> PackedBatch:
    try:
        return PackedBatch(_in_shared_memory(batch))
    except Exception as error:
        if not is_no_space(error):
            raise
    remove_failed_memory()
    packed = pack_unproven(batch, known_classes=True)
    memory = tuple(bytes(memory_of(storage)) for storage in packed.storages)
    return PackedBatch(packed.data, memory, _warning(packed.nbytes))


def _in_shared_memory(batch: Any) -> bytes:
    """The batch as bytes, its tensors in shared memory."""
    try:
        return _dump(_ByName, batch)
    except Exception as error:  # the reader may not find a class by its name
        if is_no_space(error):
            raise
    return _dump(_ByValue, batch)


def _dump(kind: type[Any], batch: Any) -> bytes:
    file = io.BytesIO()
    with _released_on_error():
        kind(file).dump(batch)
    return file.getvalue()


class _ByName(ForkingPickler):
    """The pickler of multiprocessing: quick; classes and functions are found by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table[torch.Tensor] = _reduce_tensor


class _ByValue(ByValuePickler):
    """Carries classes that only this process has; the reader uses its own where it has them."""

    known_classes = True

    def __init__(self, file: io.BytesIO) -> None:
        own: dict[type, Any] = {torch.Tensor: _reduce_tensor}
        shared = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        self.dispatch_table = ChainMap(own, shared, cloudpickle.Pickler.dispatch_table)
        super().__init__(file)  # which reads the table


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """A tensor in shared memory; a small part of a large one leaves the large one where it is."""
    if tensor.is_quantized:  # torch's own way through shared memory forgets how
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    if not tensor.requires_grad:
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type == "cpu" and tensor.layout is torch.strided:
        unused = tensor.untyped_storage().nbytes() - 2 * tensor.nbytes
        if unused > _MUCH_UNUSED and not tensor.requires_grad:
            tensor = tensor.clone()
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _released_on_error() -> Iterator[None]:
    """What a batch was about to share is let go if packing it fails."""
    before = set(_waiting())
    try:
        yield
    except BaseException:
        _release(set(_waiting()) - before)
        raise


def _try_to_pack(part: Any) -> None:
    before = set(_waiting())
    _packed(part)
    _release(set(_waiting()) - before)


def _waiting() -> dict[int, Any]:
    """Descriptors that this process holds until a reader asks for them, by number."""
    held: dict[int, Any] = getattr(resource_sharer._resource_sharer, "_cache", {})  # type: ignore[attr-defined]
    return held


def _release(numbers: set[int]) -> None:
    for number in numbers:
        _, close = _waiting().pop(number)
        close()


def remove_failed_memory() -> None:
    """Remove the files that torch leaves in shared memory when there was no room for them.

    By default torch takes the name from a piece of memory at once, so one of this process that still
    has its name was never used.
    """
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        return
    for path in glob.glob(f"{_SHARED_MEMORY}/torch_{os.getpid()}_*"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def is_no_space(error: Exception) -> bool:
    """Whether shared memory was full."""
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    return full or "No space left on device" in str(error)


def _warning(nbytes: int) -> str:
    """What to tell, once a worker, when shared memory is full."""
    pid = os.getpid()
    if pid in _told:
        return ""
    _told.add(pid)
    info = get_worker_info()
    size = ""
    with contextlib.suppress(OSError):
        status = os.statvfs(_SHARED_MEMORY)
        size = f" ({status.f_frsize * status.f_blocks / 1e6:.0f} MB)"
    return (
        f"loader worker {'' if info is None else info.id} (pid {pid}): {_SHARED_MEMORY}{size} is full, so "
        f"batches ({nbytes / 1e6:.1f} MB each) go through a pipe, which is slower. Give it more room (docker "
        "run --shm-size=8g), use fewer workers or a lower prefetch_factor, or num_workers=0."
    )
