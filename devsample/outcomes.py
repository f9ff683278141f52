"""Outcomes of what went wrong, as plain values that say where."""

from __future__ import annotations

import traceback
from pathlib import Path

from devsample.errors import DevsampleError, LoaderError, LoaderWorkerError
from devsample.serialize import short_error
from devsample.types import ChainOutcome, Outcome, Task


def failed(task: Task, error: Exception) -> Outcome:
    """The outcome of a task that failed as a whole."""
    return Outcome(
        task,
        tuple(failed_chain(chain, error, task.attempt) for chain in task.chains),
        error=str(error) if isinstance(error, DevsampleError) else short_error(error),
        error_type=type(error).__name__,
        traceback=_root_traceback(error),
        retryable=isinstance(error, LoaderWorkerError) and error.lost,
    )


def _root_traceback(error: BaseException) -> str:
    """The traceback of the first cause, from where it left this package's code."""
    if isinstance(error, LoaderError) and (error.__cause__ is None or isinstance(error, LoaderWorkerError)):
        return ""  # the message says where, and what the data set's own code raised
    while error.__cause__ is not None:
        error = error.__cause__
    package = str(Path(__file__).parent)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(package):
        trace = trace.tb_next
    if trace is None and isinstance(error, DevsampleError):
        return ""  # the message says it all
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__, chain=False))


def failed_chain(chain: int, error: Exception, attempt: int) -> ChainOutcome:
    """The outcome of a chain that failed with ``error``."""
    return ChainOutcome(
        chain,
        "failed",
        attempt=attempt,
        message=f"{type(error).__name__}: {error}",
        traceback=_root_traceback(error),
    )
