"""A warning when much data travels by value: what it is, and how to do without."""

from __future__ import annotations

import warnings
from typing import Any

from devsample.culprit import find_heaviest, type_name
from devsample.errors import LargePayloadWarning
from devsample.serialize import Packed, pack_unproven, packed_size

LARGE_BYTES = 100_000_000
_SHARED = "All processes of this machine share one copy of it, which is written to the run folder first."
_REMEDY = (
    "Build it in the factory (LoaderSpec(make_dataset, ...)), or read it from a memory-mapped file "
    "(numpy.memmap, torch.from_file), which travels by its path"
)
_OBJECTS = ", or keep a list of Python objects in a devsample.data.CompactList"


def warn_if_large(obj: Any, name: str, packed: Packed, *, readers: str, shared: bool = True) -> None:
    """Warn if more than 100 MB of ``obj`` travel by value.

    Args:
        obj: what was packed.
        name: what to call it, e.g. ``"loader_spec"``.
        packed: the result.
        readers: who gets it, e.g. ``"every chain process"``.
        shared: whether memory outside of the bytes counts; it is not copied, but written out.
    """
    if (packed.nbytes if shared else len(packed.data)) <= LARGE_BYTES:
        return
    weigh = packed_size if shared else _size_in_bytes
    part, path, size = find_heaviest(obj, name, weigh)
    copied = _size_in_bytes(part) > size / 2
    fate = f"It is copied into {readers}." if copied else _SHARED
    warnings.warn(
        f"{path} is a {type_name(part)} of {size / 1e6:.0f} MB that travels by value. {fate} "
        f"{_REMEDY}{_OBJECTS if copied else ''}.",
        LargePayloadWarning,
        stacklevel=2,
    )


def _size_in_bytes(obj: Any) -> int:
    """Bytes of ``obj`` that every reader copies."""
    try:
        return len(pack_unproven(obj).data)
    except Exception:  # it is reported elsewhere
        return 0
