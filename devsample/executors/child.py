"""The main function of a chain process. Imports nothing heavy before its environment is set."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from devsample.errors import DevsampleWarning
from devsample.limits import raise_file_limit
from devsample.machine import leave_with_parent, name_semaphores_after_this_process, own_process_group

if TYPE_CHECKING:
    from devsample.types import Task


def main(
    connection: Connection,
    environment: Mapping[str, str],
    device: str,
    job: tuple[str, str, int, bool],
    scratch: str,
) -> None:
    """Serve tasks from ``connection`` until it says to stop, or its other end is gone.

    Args:
        connection: pipe to the parent; every message is pickled plain values.
        environment: set before torch is imported.
        device: where to compute.
        job: run folder, hash of the payload, CPU threads, whether the folder is temporary.
        scratch: a folder of the parent's for sockets, which it removes whatever happens here.
    """
    become_chain_process(environment, scratch, job[0] if job[3] else None)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(connection, device, job)


def become_chain_process(environment: Mapping[str, str], scratch: str, folder: str | None) -> None:
    """Set up this new process as one that may run chains; torch is not imported yet.

    Args:
        environment: variables to set.
        scratch: the parent's folder for sockets.
        folder: another temporary folder of the parent's; both are removed if it dies without a word.
    """
    multiprocessing.current_process()._config["tempdir"] = scratch  # type: ignore[attr-defined]
    os.environ.update(environment)
    name_semaphores_after_this_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    signal.signal(signal.SIGTERM, _leave)
    raise_file_limit()
    own_process_group()
    leave_with_parent([scratch] if folder is None else [scratch, folder])


def _leave(number: int, frame: object) -> None:
    """Unwind, so that loaders end their workers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.unraisablehook = lambda _: None  # half-built loaders complain while they go
    raise SystemExit(128 + number)


def _serve(connection: Connection, device: str, job: tuple[str, str, int, bool]) -> None:
    from devsample.outcomes import failed
    from devsample.session import Session
    from devsample.types import Event, Job

    def send(*message: Any) -> None:
        connection.send_bytes(pickle.dumps(message))

    def warn(category: str, text: str) -> None:
        send("event", Event("warning", text=text, category=category))

    session: Session | None = None
    broken: Exception | None = None
    with forwarded_warnings(warn), contextlib.ExitStack() as at_end:
        try:
            session = Session(Job(Path(job[0]), job[1], job[2]), device)
            at_end.callback(session.close)
        except Exception as error:
            broken = error
        send("ready")
        while True:
            task: Task | None = pickle.loads(connection.recv_bytes())
            if task is None:
                return
            if session is None:
                assert broken is not None
                outcome = failed(task, broken)
            else:
                outcome = session.run(task, lambda event: send("event", event))
            send("outcome", outcome)


@contextlib.contextmanager
def forwarded_warnings(tell: Callable[[str, str], None]) -> Iterator[None]:
    """Hand devsample's own warnings to ``tell(class name, text)``; whoever reads it decides about them."""
    show = warnings.showwarning

    def forward(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, DevsampleWarning):
            tell(category.__name__, str(message))
        else:
            show(message, category, *rest, **named)

    with warnings.catch_warnings():
        warnings.simplefilter("always", DevsampleWarning)
        warnings.showwarning = forward
        yield
