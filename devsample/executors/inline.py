"""Chains one after the other in the caller's process."""

from __future__ import annotations

from collections.abc import Sequence

from devsample.session import Session
from devsample.types import Emit, Job, Outcome, Task


class InlineExecutor:
    """Runs each task in ``poll``, in the caller's process, with the caller's own objects."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._waiting: Task | None = None

    def open(self, job: Job, slots: Sequence[str], emit: Emit) -> None:
        """Build the session; there is one slot."""
        self._emit = emit
        self._session = Session(job, slots[0])

    def capacity(self) -> int:
        """One task at a time."""
        return 0 if self._waiting else 1

    def submit(self, task: Task) -> None:
        """Keep ``task`` for the next ``poll``."""
        assert self._waiting is None
        self._waiting = task

    def poll(self, timeout: float) -> list[Outcome]:
        """Run the task that waits."""
        if self._waiting is None or self._session is None:
            return []
        task, self._waiting = self._waiting, None
        return [self._session.run(task, self._emit)]

    def cancel(self) -> None:
        """Forget the task that waits."""
        self._waiting = None

    def close(self) -> None:
        """End the loader's workers."""
        if self._session is not None:
            self._session.close()
        self._session = None
