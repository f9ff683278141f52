"""Locks, queues and shared values of multiprocessing, which a process gets only while it is started."""

from __future__ import annotations

import multiprocessing.connection
import multiprocessing.context
import multiprocessing.queues
import multiprocessing.sharedctypes
import multiprocessing.synchronize
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

_KINDS = (
    multiprocessing.synchronize.SemLock,
    multiprocessing.synchronize.Condition,
    multiprocessing.synchronize.Event,
    multiprocessing.synchronize.Barrier,
    multiprocessing.queues.Queue,
    multiprocessing.queues.SimpleQueue,
    multiprocessing.sharedctypes.SynchronizedBase,
    multiprocessing.connection.Connection,
)


def is_inheritable(obj: Any) -> bool:
    """Whether ``obj`` is shared with a process by being given to it while it is started."""
    return isinstance(obj, _KINDS)


def check_inheritance(objects: Sequence[Any]) -> None:
    """Try whether a process that is not forked could be given ``objects``.

    Raises:
        RuntimeError: multiprocessing refuses, for example what was made for forked processes only.
    """
    if not objects:
        return
    before = multiprocessing.context.get_spawning_popen()
    multiprocessing.context.set_spawning_popen(_Rehearsal())  # type: ignore[arg-type]
    try:
        ForkingPickler.dumps(tuple(objects))
    finally:
        multiprocessing.context.set_spawning_popen(before)


class _Rehearsal:
    """Stands where multiprocessing keeps the process that is being started; nothing is started."""

    def duplicate_for_child(self, handle: int) -> int:
        """Called for each descriptor that the process would be given."""
        return handle

    def DupFd(self, handle: int) -> int:  # noqa: N802 - multiprocessing's name
        """Called for the place of a descriptor in what the process is given."""
        return handle
