"""What `LoaderSpec.check` found: the batches, how fast they come, and what to set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from devsample.serialize import type_name

_WORTH_A_WORKER = 1.2  # times faster than without any, or with fewer
_BURSTY = 4.0  # times the middle one that a late batch takes
_MOST_SHARED = 0.5  # of the free shared memory


@dataclass(frozen=True)
class Leaf:
    """One thing in a batch: a tensor, an array or anything else that holds no other."""

    path: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    bytes: int = 0


@dataclass(frozen=True)
class Timing:
    """How fast batches came with so many workers.

    Attributes:
        num_workers: loader workers.
        method: how they started, "" without any.
        first_batch: seconds until the first batch, the start of the workers with it.
        per_batch: seconds per batch after that.
        batches: how many were read.
        longest: the longest that one took to come, in seconds.
        worker_memory: bytes of memory per worker, its part of what it shares included; None: not
            known here.
        data_set: how the data set came to the workers.
        error: why it could not be measured, or "".
    """

    num_workers: int
    method: str = ""
    first_batch: float = 0.0
    per_batch: float = 0.0
    batches: int = 0
    longest: float = 0.0
    worker_memory: int | None = None
    data_set: str = ""
    error: str = ""


@dataclass(frozen=True)
class LoaderReport:
    """What a chain process would get from a LoaderSpec. ``print(report)`` shows it as a table.

    Attributes:
        num_samples: n.
        batch: the leaves of the first batch.
        batch_bytes: bytes of a batch.
        build_seconds: how long the data set took to make.
        repeatable: whether the first batch comes out the same when all is built again; None: it
            was not tried.
        timings: seconds per batch by number of workers and start method.
        recipe_bytes: what travels to every chain process by value.
        shared_bytes: large tensors and arrays, once per machine.
        cores: CPU cores that this process may use.
        num_workers: recommended number of workers.
        prefetch_factor: recommended batches ahead per worker; None without workers.
        multiprocessing_context: recommended start method; None without workers.
        reason: why, in words.
        shared_memory_needed: bytes of batches under way at once per chain process, with that.
        shared_memory_free: bytes free for them; None: not limited, or not known here.
        notes: what else is worth knowing.
    """

    num_samples: int
    batch: tuple[Leaf, ...]
    batch_bytes: int
    build_seconds: float
    repeatable: bool | None
    timings: tuple[Timing, ...]
    recipe_bytes: int
    shared_bytes: int
    cores: int
    num_workers: int
    prefetch_factor: int | None
    multiprocessing_context: str | None
    reason: str
    shared_memory_needed: int
    shared_memory_free: int | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as JSON can hold them."""
        values = dataclasses.asdict(self)
        for leaf in values["batch"]:
            leaf["shape"] = None if leaf["shape"] is None else list(leaf["shape"])
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def __str__(self) -> str:
        batches = [
            (
                leaf.path,
                leaf.kind,
                leaf.dtype,
                "" if leaf.shape is None else str(leaf.shape),
                _size(leaf.bytes),
            )
            for leaf in self.batch
        ]
        free = "" if self.shared_memory_free is None else f" of {_size(self.shared_memory_free)} free"
        repeats = {True: "the same when built again", False: "NOT the same when built again", None: ""}
        lines = [
            f"{self.num_samples} samples, data set made in {self.build_seconds:.2g} s, "
            f"{self.cores} CPU cores",
            "",
            *_table(("batch", "type", "dtype", "shape", "size"), batches),
            f"{_size(self.batch_bytes)} a batch" + _after(", ", repeats[self.repeatable]),
            "",
            *_table(
                ("workers", "start", "first batch", "per batch", "memory each", "data set"),
                [_row(timing) for timing in self.timings],
            ),
            "",
            f"travels by value: {_size(self.recipe_bytes)} to each chain process; "
            f"shared on this machine: {_size(self.shared_bytes)}",
            f"shared memory for batches under way: {_size(self.shared_memory_needed)}{free}",
            *(
                f"note: {_workers(one.num_workers)} ({one.method}): {one.error}"
                for one in self.timings
                if one.error
            ),
            *(f"note: {note}" for note in self.notes),
            "",
            f"recommended: {self._recommended()}",
            self.reason,
        ]
        return "\n".join(lines)

    def _recommended(self) -> str:
        text = f"num_workers={self.num_workers}"
        if self.num_workers:
            text += (
                f", prefetch_factor={self.prefetch_factor}, "
                f'multiprocessing_context="{self.multiprocessing_context}"'
            )
        return text


@dataclass(frozen=True)
class Recommendation:
    """What to set, and why."""

    num_workers: int
    prefetch_factor: int | None
    multiprocessing_context: str | None
    reason: str


def recommend(
    timings: Sequence[Timing], batch_bytes: int, free: int | None, prefetch: int | None, cores: int
) -> Recommendation:
    """The fewest workers that are about as fast as any number that was tried.

    Args:
        timings: measured; the first is without workers.
        batch_bytes: bytes of a batch.
        free: bytes of shared memory that are free; None: any number.
        prefetch: the recipe's prefetch_factor.
        cores: CPU cores that may be used.
    """
    measured = [one for one in timings if not one.error]
    alone = measured[0]
    chosen = alone
    for one in sorted(measured[1:], key=lambda one: (one.num_workers, one.method == "fork")):
        if one.num_workers > chosen.num_workers and one.per_batch * _WORTH_A_WORKER < chosen.per_batch:
            chosen = one
    tried = max(one.num_workers for one in timings)
    if chosen.num_workers == 0:
        why = f"a batch takes {_time(alone.per_batch)} in the chain process itself"
        best = min(measured[1:], key=lambda one: one.per_batch, default=None)
        if best is not None:
            why += f", and {_time(best.per_batch)} with {_workers(best.num_workers)}, which is no gain"
        elif tried:
            why += "; with workers it did not work"
        return Recommendation(0, None, None, f"{why}.")
    ahead, shortage = _prefetch(chosen, batch_bytes, free, prefetch)
    if ahead == 0:
        return Recommendation(0, None, None, shortage)
    why = (
        f"a batch takes {_time(alone.per_batch)} without workers and {_time(chosen.per_batch)} with "
        f"{_workers(chosen.num_workers)}; more do not make it much faster."
    )
    if chosen.num_workers == tried:
        why = why.replace("; more do not make it much faster", f", the most that was tried ({cores} cores)")
    why += " Each chain process has workers of its own: with several chains at once fewer may do."
    return Recommendation(chosen.num_workers, ahead, chosen.method, f"{why}{shortage}")


def _prefetch(chosen: Timing, batch_bytes: int, free: int | None, prefetch: int | None) -> tuple[int, str]:
    """Batches ahead per worker, as many as fit; 0 if not even one does."""
    wanted = prefetch or 2
    text = ""
    if prefetch is None and chosen.longest > _BURSTY * max(chosen.per_batch * chosen.num_workers, 1e-3):
        wanted, text = 4, " Some batches take much longer than others, so more are made ahead."
    if free is None or batch_bytes == 0:
        return wanted, text
    fitting = int(free * _MOST_SHARED / (batch_bytes * chosen.num_workers))
    if fitting >= wanted:
        return wanted, text
    remedy = "Give the machine more shared memory (docker run --shm-size=8g), or lower batch_size."
    if fitting == 0:
        return 0, (
            f"shared memory has {_size(free)} free, and {_workers(chosen.num_workers)} with a batch of "
            f"{_size(batch_bytes)} each would fill it. {remedy}"
        )
    return fitting, f" Shared memory has only {_size(free)} free. {remedy}"


def leaves_of(batch: Any, path: str = "batch") -> list[Leaf]:
    """The leaves of a batch with their paths."""
    if isinstance(batch, torch.Tensor):
        size = 0 if batch.is_sparse else batch.nbytes
        return [
            Leaf(path, type_name(batch), str(batch.dtype).removeprefix("torch."), tuple(batch.shape), size)
        ]
    if isinstance(batch, (np.ndarray, np.generic)):
        return [Leaf(path, type_name(batch), str(batch.dtype), tuple(batch.shape), batch.nbytes)]
    parts = list(_parts(batch, path))
    if not parts:
        size = len(batch) if isinstance(batch, (str, bytes)) else 0
        return [Leaf(path, type_name(batch), bytes=size)]
    leaves: list[Leaf] = []
    for part, part_path in parts[:_MOST_PARTS]:
        leaves += leaves_of(part, part_path)
    return _merged(leaves) if isinstance(batch, (list, tuple)) else leaves


_MOST_PARTS = 10_000


def _parts(batch: Any, path: str) -> list[tuple[Any, str]]:
    if isinstance(batch, Mapping):
        return [(value, f"{path}[{key!r}]") for key, value in batch.items()]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return [(value, f"{path}.{name}") for name, value in zip(batch._fields, batch, strict=True)]
    if isinstance(batch, (list, tuple)):
        return [(value, f"{path}[{index}]") for index, value in enumerate(batch)]
    if isinstance(batch, (str, bytes, int, float, complex, type(None), type)):
        return []
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [one.name for one in dataclasses.fields(batch)]
        return [(getattr(batch, name), f"{path}.{name}") for name in names]
    attributes = getattr(batch, "__dict__", {})
    return [
        (value, f"{path}.{name}")
        for name, value in attributes.items()
        if isinstance(value, (torch.Tensor, np.ndarray))
    ]


def _merged(leaves: list[Leaf]) -> list[Leaf]:
    """A long list of plain values as one line."""
    plain = [leaf for leaf in leaves if leaf.shape is None]
    if len(plain) < len(leaves) or len(leaves) <= 4 or len({leaf.kind for leaf in leaves}) > 1:
        return leaves
    first, last = leaves[0], leaves[-1]
    size = sum(leaf.bytes for leaf in leaves)
    return [Leaf(f"{first.path} … {last.path}", f"{first.kind} × {len(leaves)}", bytes=size)]


def _row(timing: Timing) -> tuple[str, ...]:
    start = timing.method or "-"
    if timing.error:
        return (str(timing.num_workers), start, "failed", "", "", "")
    memory = "" if timing.worker_memory is None else _size(timing.worker_memory)
    times = _time(timing.first_batch), _time(timing.per_batch)
    return (str(timing.num_workers), start, *times, memory, timing.data_set)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _after(separator: str, text: str) -> str:
    return separator + text if text else ""


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
