"""Tries a LoaderSpec in a process of its own, as a chain process would use it."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import pickle
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from devsample import ambient, errors
from devsample.data.check import Wanted
from devsample.data.report import LoaderReport
from devsample.data.spec import LoaderSpec
from devsample.errors import ChainProcessError, DevsampleError, InvalidArgumentError, LoaderError
from devsample.executors.checker import STACKS, main
from devsample.executors.devices import child_device, slot_devices
from devsample.machine import (
    describe_exit,
    end_process_group,
    hidden_main_module,
    remove_semaphores,
    socket_folder,
    thread_environment,
)
from devsample.payload import write_payload
from devsample.serialize import pack

_START_SECONDS = 120.0  # importing torch from a slow disk
_LIMIT = 10.0  # times the seconds of reading that one batch may take
_GRACE_SECONDS = 5.0


def check_loader(
    spec: LoaderSpec,
    num_workers: Sequence[int] | int | None,
    seconds: float,
    device: Any,
    progress: bool,
) -> LoaderReport:
    """See `LoaderSpec.check`."""
    counts = _counts(num_workers)
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < seconds < math.inf:
        raise InvalidArgumentError(f"seconds: expected a number > 0, got {seconds!r}.")
    (slot,) = slot_devices(1, device, None, None, torch.device("cpu"), 1)
    packed = spec.packed()
    wanted = Wanted(
        counts=counts,
        seconds=float(seconds),
        limit=max(10.0, _LIMIT * float(seconds)),
        recipe_bytes=len(packed.data),
        shared_bytes=sum(storage.nbytes() for storage in packed.storages),
    )
    with _folders() as (folder, scratch):
        parts = {"loader_spec": packed, "ambient": pack(ambient.capture(), "ambient")}
        payload = str(folder), write_payload(folder, parts)
        with _child(slot, payload, wanted, scratch) as (process, connection):
            return _Watch(process, connection, folder, progress=progress).report()


class _Watch:
    """Listens to the process until it has a result, fails, dies or hangs."""

    def __init__(self, process: BaseProcess, connection: Connection, folder: Path, *, progress: bool) -> None:
        self._process, self._connection, self._folder = process, connection, folder
        self._limit, self._progress = _START_SECONDS, progress
        self._stage = "starting"

    def report(self) -> LoaderReport:
        """The result."""
        while True:
            if not wait([self._connection, self._process.sentinel], self._limit):
                raise self._stuck()
            try:
                message = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                raise self._died() from None
            if message[0] == "report":
                report: LoaderReport = message[1]
                return report
            self._take(*message)

    def _take(self, kind: str, *content: Any) -> None:
        if kind == "stage":
            text, self._limit = content
            self._stage = text or self._stage
            if text and self._progress:
                sys.stderr.write(f"check: {text}\n")
        elif kind == "warning":
            category = getattr(errors, content[0], UserWarning)
            warnings.warn(content[1], category, stacklevel=5)
        elif kind == "error":
            raise _as_error(*content)

    def _died(self) -> DevsampleError:
        self._process.join(_GRACE_SECONDS)
        how = describe_exit(self._process.exitcode)
        was = "was " if "killed" in how else ""
        return ChainProcessError(
            f"the process that tried the loader (pid {self._process.pid}) {was}{how} while it was "
            f"{self._stage}; a chain process would have gone the same way."
        )

    def _stuck(self) -> DevsampleError:
        self._process.kill()
        self._process.join(_GRACE_SECONDS)
        return LoaderError(
            f"loader_spec: nothing came for {self._limit:.0f} s while the process that tried the loader was "
            f"{self._stage}. If the data set needs that long, raise seconds.{self._where()}"
        )

    def _where(self) -> str:
        """The innermost calls of the process's main thread, as it wrote them down itself."""
        with contextlib.suppress(OSError):
            threads = (self._folder / STACKS).read_text().split("(most recent call first):\n")
            lines = [line for line in threads[-1].splitlines() if line.startswith("  File")]
            if len(threads) > 1 and lines:
                return "\n  It stood at (innermost first):\n" + "\n".join(f"  {line}" for line in lines[:8])
        return ""


def _as_error(name: str, text: str, trace: str) -> DevsampleError:
    """The error that ended the try, of the same kind here."""
    kind = getattr(errors, name, LoaderError)
    told = not trace or "Traceback" in text
    error: DevsampleError = kind(text if told else f"{text}\n\nWhere it was raised:\n{trace}")
    return error


def _counts(num_workers: Any) -> tuple[int, ...] | None:
    if num_workers is None:
        return None
    if isinstance(num_workers, Integral) and not isinstance(num_workers, bool):
        num_workers = [num_workers]
    if not isinstance(num_workers, Sequence) or not all(
        isinstance(one, Integral) and not isinstance(one, bool) and int(one) >= 0 for one in num_workers
    ):
        raise InvalidArgumentError(
            f"num_workers: expected numbers of workers ≥ 0 to try, e.g. (0, 1, 2), got {num_workers!r}."
        )
    return tuple(sorted({int(one) for one in num_workers}))


@contextlib.contextmanager
def _folders() -> Iterator[tuple[Path, str]]:
    folder, scratch = tempfile.mkdtemp(prefix="devsample-check-"), socket_folder()
    try:
        yield Path(folder), scratch
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _child(
    slot: str, payload: tuple[str, str], wanted: Wanted, scratch: str
) -> Iterator[tuple[BaseProcess, Connection]]:
    """The process, started as those of chains are; nothing of it is left behind."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    inside, environment = child_device(slot)
    environment |= thread_environment(1)
    arguments = (theirs, environment, inside, payload, pickle.dumps(wanted), scratch)
    process = context.Process(target=main, args=arguments, name="devsample-check", daemon=False)
    with hidden_main_module():
        process.start()
    theirs.close()
    try:
        yield process, ours
        process.join(_GRACE_SECONDS)
    finally:
        if process.is_alive():
            process.terminate()  # it ends its loader workers and leaves
            process.join(_GRACE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        if process.pid is not None:
            end_process_group(process.pid)
            remove_semaphores(process.pid)
        ours.close()
        process.close()
