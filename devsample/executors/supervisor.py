"""Feeds tasks to an executor, watches them, and tries lost ones again. The same for every engine."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from devsample.types import Executor, Outcome, Task

MAX_RETRIES = 2
_POLL_SECONDS = 0.5


def supervise(
    executor: Executor,
    tasks: Sequence[Task],
    *,
    retry: bool,
    on_outcome: Callable[[Outcome], None],
    on_retry: Callable[[Outcome], None],
) -> None:
    """Run all tasks; returns when each has an outcome.

    Args:
        executor: opened.
        tasks: what to run, in order.
        retry: run a task again, at most twice, whose process was lost through no fault of its own.
        on_outcome: called with the last outcome of each task.
        on_retry: called with an outcome whose task is about to be tried again.
    """
    waiting = deque(tasks)
    running = 0
    while waiting or running:
        while waiting and executor.capacity():
            executor.submit(waiting.popleft())
            running += 1
        for outcome in executor.poll(_POLL_SECONDS):
            running -= 1
            if retry and outcome.retryable and outcome.task.attempt < MAX_RETRIES:
                on_retry(outcome)
                waiting.appendleft(dataclasses.replace(outcome.task, attempt=outcome.task.attempt + 1))
            else:
                on_outcome(outcome)
