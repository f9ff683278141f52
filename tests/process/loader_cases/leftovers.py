"""What a test has left behind: processes, shared memory, temporary files.

Other programs may run on the machine meanwhile. What belongs to a test is known by a mark in the
environment of its processes, by the prefix of its semaphores' names, and by its temporary folder.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker, util
from pathlib import Path

import psutil
import pytest

SHARED_MEMORY = Path("/dev/shm")
PATIENCE_SECONDS = 20.0
MARK = "LOADER_CASE"


@contextlib.contextmanager
def none_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is left of what starts in this block; gives the folder for its temporary files."""
    resource_tracker.ensure_running()  # Python's own lives until this process ends
    util.get_temp_dir()  # so does its folder
    folder = Path(tempfile.mkdtemp(prefix="lc-", dir="/tmp"))  # short: sockets lie in it
    mark = f"lc{uuid.uuid4().hex[:10]}"
    monkeypatch.setenv(MARK, mark)
    prefix_semaphores()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = _children()
    segments = _segments()
    try:
        yield folder
        gc.collect()  # a traceback may have kept a loader alive
        deadline = time.monotonic() + PATIENCE_SECONDS
        while left := _left(mark, before, segments, folder):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.1)
    finally:
        _kill(mark, before)
        shutil.rmtree(folder, ignore_errors=True)


def prefix_semaphores() -> None:
    """Name the semaphores of this process and of its children after the mark."""
    multiprocessing.current_process()._config["semprefix"] = f"/{os.environ[MARK]}"


def family(pid: int) -> list[psutil.Process]:
    """The living descendants of a process."""
    return alive(psutil.Process(pid).children(recursive=True))


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _left(mark: str, before: set[psutil.Process], segments: set[str], folder: Path) -> list[str]:
    left = [f"process {one.pid}: {_command(one)}" for one in _new_processes(mark, before)]
    left += [f"shared memory {name}" for name in sorted(_unowned(_segments() - segments, mark))]
    return left + [f"file {path}{_inside(path)}" for path in folder.iterdir()]


def _inside(path: Path) -> str:
    return f"/ with {[one.name for one in path.iterdir()][:5]}" if path.is_dir() else ""


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _new_processes(mark: str, before: set[psutil.Process]) -> list[psutil.Process]:
    """New descendants, and processes anywhere that were started from an environment with the mark."""
    found = {one for one in _children() if one not in before}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.add(process)
    return alive(list(found))


def _kill(mark: str, before: set[psutil.Process]) -> None:
    left = _new_processes(mark, before)
    if not left:
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises when a worker is killed
    try:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
    finally:
        signal.signal(signal.SIGCHLD, handler)


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.status()} {' '.join(process.cmdline())[:200]}"
    return "gone"


def _segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.exists() else set()


def _unowned(names: set[str], mark: str) -> set[str]:
    """Those of the test, and those that belong to nobody alive; semaphores of others do not count."""
    mine = {name for name in names if mark in name}
    names = {name for name in names - mine if not name.startswith("sem.")}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if not names:
            break
        with contextlib.suppress(OSError):
            text = maps.read_text()
            names = {name for name in names if f"/dev/shm/{name}" not in text}
    return mine | names
