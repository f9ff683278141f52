"""Point tensors at another copy of their memory, where nobody can tell the difference.

Data that are written to a file for other processes, or laid into shared memory, exist twice. A
tensor whose memory nobody but itself uses can use that copy from then on, and its own is freed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import numpy as np
import torch

from devsample.memory import memory_of
from devsample.serialize import Packed

_COMPARED_AT_ONCE = 1 << 24
SMALLEST_BYTES = 1 << 25
"""Smaller blocks of memory do not go back to the system when they are freed."""


def repoint(packs: Sequence[Packed], replacements: Sequence[Sequence[torch.UntypedStorage]]) -> int:
    """Let tensors use ``replacements`` as their memory; values, objects and layout stay.

    A storage is replaced if it has 32 MiB or more and its memory is used by nothing but the plain
    tensors found in ``packs``: no view, numpy array, graph, handle or running operation, in any
    thread. Otherwise everything stays as it is.

    Args:
        packs: objects that were packed; their tensors may change their memory.
        replacements: for each of them, storages with the same bytes, in private mappings.

    Returns:
        How many storages were replaced.
    """
    if not hasattr(torch._C, "_storage_Use_Count") or not hasattr(torch.Tensor, "_use_count"):
        return 0
    replaced = 0
    seen: set[int] = set()
    for pack, news in zip(packs, replacements, strict=True):
        for number, new in enumerate(news):
            key = pack.storages[number]._cdata
            if key in seen or pack.storages[number].nbytes() < SMALLEST_BYTES:
                continue
            seen.add(key)
            replaced += _replace(packs, key, new)
    return replaced


def _replace(packs: Sequence[Packed], key: int, new: torch.UntypedStorage) -> bool:
    tensors = _tensors_on(packs, key)
    if not all(_is_simple(tensor) for tensor in tensors):
        return False
    with torch.inference_mode(False), torch.no_grad():
        copies = [_copy_on(tensor, new) for tensor in tensors]
    if not _unshared(packs, key, tensors):
        gc.collect()  # copies made to prove that it loads may wait for it
        if not _unshared(packs, key, tensors):
            return False
    versions = [tensor._version for tensor in tensors]
    if not _same_bytes(tensors[0].untyped_storage(), new):
        return False
    if not _unshared(packs, key, tensors) or versions != [tensor._version for tensor in tensors]:
        return False  # another thread writes to it
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.data = copy  # keeps the version counter: a graph that saved it stays valid
    return True


def _same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    mine, theirs = (np.frombuffer(memory_of(storage), np.uint8) for storage in (one, other))
    pieces = range(0, len(mine), _COMPARED_AT_ONCE)
    return all(
        np.array_equal(mine[start : start + _COMPARED_AT_ONCE], theirs[start : start + _COMPARED_AT_ONCE])
        for start in pieces
    )


def _tensors_on(packs: Sequence[Packed], key: int) -> list[torch.Tensor]:
    found = {id(one): one for pack in packs for one in pack.tensors if one.untyped_storage()._cdata == key}
    return list(found.values())


def _copy_on(tensor: torch.Tensor, new: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_simple(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor._is_view()
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _unshared(packs: Sequence[Packed], key: int, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether only ``tensors`` use the storage, and only their Python objects use the tensors.

    Counts are compared with those of memory made here, of which everything is known.
    """
    if not tensors:
        return False
    storage = tensors[0].untyped_storage()
    own_memory = storage.resizable() and not storage.is_shared() and not storage.is_pinned()
    if not own_memory:
        return False
    handles = sum(one._cdata == key for pack in packs for one in pack.storages)
    model = torch.empty(1, device="cpu")
    model_storage = model.untyped_storage()
    holders = (model_storage,) * handles
    same_handles = sys.getrefcount(storage) == sys.getrefcount(model_storage)
    count = torch._C._storage_Use_Count
    users = count(storage._cdata) - count(model_storage._cdata)  # one tensor more or less is one user
    busy = any(tensor._use_count() != model._use_count() for tensor in tensors)  # type: ignore[attr-defined]
    del holders
    return bool(same_handles and users == len(tensors) - 1 and not busy)
