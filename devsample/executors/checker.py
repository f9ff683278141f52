"""The main function of a process that tries a LoaderSpec. Imports nothing heavy before it is set up."""

from __future__ import annotations

import contextlib
import faulthandler
import pickle
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from devsample.executors.child import become_chain_process

STACKS = "stacks.txt"
_IMPORT_SECONDS = 60.0
_MARGIN = 0.9  # of the time that is allowed, after which it is written down where everything stands


def main(
    connection: Connection,
    environment: Mapping[str, str],
    device: str,
    payload: tuple[str, str],
    wanted: Any,
    scratch: str,
) -> None:
    """Try the recipe and send what was found, or what went wrong, as pickled plain values.

    Args:
        connection: pipe to the parent. Messages: ("stage", text, seconds that it may take),
            ("warning", kind, text), ("report", LoaderReport), ("error", class name, text, traceback).
        environment: set before torch is imported.
        device: where batches go.
        payload: folder and hash of the payload.
        wanted: a `devsample.data.check.Wanted`, pickled.
        scratch: the parent's folder for sockets; both folders are removed if it dies without a word.
    """
    become_chain_process(environment, scratch, payload[0])

    def send(*message: Any) -> None:
        connection.send_bytes(pickle.dumps(message))

    with (
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
        (Path(payload[0]) / STACKS).open("w") as stacks,
        _forwarded_warnings(send),
    ):
        _examine(send, device, payload, pickle.loads(wanted), stacks)


def _examine(send: Any, device: str, payload: tuple[str, str], wanted: Any, stacks: Any) -> None:
    import torch

    from devsample import ambient
    from devsample.data.check import examine
    from devsample.outcomes import failed
    from devsample.payload import PayloadReader
    from devsample.types import Task

    def say(text: str, extra: float = 0.0) -> None:
        limit = wanted.limit + extra
        faulthandler.dump_traceback_later(_MARGIN * limit, file=stacks)
        send("stage", text, limit)

    try:
        say("reading the recipe", extra=_IMPORT_SECONDS)
        torch.set_num_threads(1)
        reader = PayloadReader(Path(payload[0]), payload[1])
        ambient.apply(reader.load("ambient"))
        send("report", examine(reader.load("loader_spec").spec(), device, wanted, say))
    except Exception as error:
        outcome = failed(Task("prepare"), error)
        send("error", outcome.error_type, outcome.error, outcome.traceback)
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _forwarded_warnings(send: Any) -> Iterator[None]:
    """Send warnings to the parent, each once."""
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        text = f"{message}"
        if text not in seen:
            seen.add(text)
            send("warning", category.__name__, text)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
