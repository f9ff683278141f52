"""How processes start, belong together and end here: threads, main module, parents, groups.

Everything that differs between platforms lives here, with a fallback that works anywhere.
"""

from __future__ import annotations

import _multiprocessing  # type: ignore[import-not-found]
import contextlib
import glob
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any

from devsample.limits import core_limits

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SOCKET_PATH_LIMIT = 100
_main_module_lock = threading.RLock()


def available_cores() -> int:
    """CPU cores that this process may use: affinity, cgroup quota and Slurm's share, at least 1."""
    return min(core_limits().values())


def thread_variables() -> tuple[str, ...]:
    """The environment variables that say how many threads a process computes with."""
    return (*_THREAD_VARIABLES, "OMP_WAIT_POLICY")


def thread_environment(threads: int) -> dict[str, str]:
    """Environment for a chain process that computes with ``threads`` threads.

    Must be set before torch is imported. OpenMP threads that have nothing to do sleep instead
    of spinning, unless the user says otherwise.
    """
    env = {name: str(threads) for name in _THREAD_VARIABLES}
    if "OMP_WAIT_POLICY" not in os.environ:
        env["OMP_WAIT_POLICY"] = "PASSIVE"
    return env


def default_worker_start_method() -> str:
    """How loader workers start: "forkserver" where it exists, else "spawn"."""
    methods = multiprocessing.get_all_start_methods()
    return "forkserver" if "forkserver" in methods else "spawn"


@contextlib.contextmanager
def hidden_main_module() -> Iterator[None]:
    """Keep processes started inside this block from running ``__main__`` again.

    A spawned child imports the parent's main module first, which runs an unguarded script a
    second time and fails for notebooks and standard input. Everything of ``__main__`` that a
    chain needs travels by value instead, so the import is switched off: the two attributes that
    tell the child where to find it are hidden while it starts.
    """
    main = sys.modules["__main__"]
    with _main_module_lock:
        hidden: dict[str, Any] = {
            name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__
        }
        main.__dict__.pop("__file__", None)
        main.__dict__["__spec__"] = None
        try:
            yield
        finally:
            main.__dict__.pop("__spec__", None)
            main.__dict__.update(hidden)


def leave_with_parent(folders: Sequence[str] = ()) -> None:
    """End this process as soon as the process that started it is gone.

    A thread waits on the parent's sentinel, so even SIGKILL of the parent leaves no orphan.

    Args:
        folders: temporary folders of that process, which are then removed.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, name="devsample-parent-watch", daemon=True).start()


def own_process_group() -> None:
    """Make this process the leader of a group of its own, so that it can be ended as a whole."""
    if hasattr(os, "setsid"):
        with contextlib.suppress(OSError):
            os.setsid()


def end_process_group(pid: int) -> None:
    """Kill what is left of the process group that ``pid`` led; nothing happens if none is."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def name_semaphores_after_this_process() -> None:
    """From here on, semaphores that this process makes have its number in their names."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"{config['semprefix']}-{os.getpid()}"


def remove_semaphores(pid: int) -> None:
    """Remove what a child that ended without a word has left of its semaphores, where they can be seen.

    The tracker that they share would do it only when this process ends, and complain.
    """
    prefix = multiprocessing.current_process()._config["semprefix"]  # type: ignore[attr-defined]
    for path in glob.glob(f"/dev/shm/sem.{prefix[1:]}-{pid}-*"):
        name = "/" + os.path.basename(path).removeprefix("sem.")
        with contextlib.suppress(OSError):
            _multiprocessing.sem_unlink(name)
            resource_tracker.unregister(name, "semaphore")


def describe_exit(exitcode: int | None) -> str:
    """How a process ended, in words: the signal's name, or the exit code.

    >>> describe_exit(-9)
    'killed by SIGKILL (often the system being out of memory)'
    >>> describe_exit(3)
    'ended with exit code 3'
    """
    if exitcode is None:
        return "did not end"
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (often the system being out of memory)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def socket_folder() -> str:
    """A new temporary folder whose path leaves room for the name of a socket.

    Such paths end at about 100 characters; a longer temporary folder is passed over for /tmp.
    """
    folder = tempfile.gettempdir()
    too_long = len(folder) + len("/ds-abcdefgh/listener-abcdefgh") > _SOCKET_PATH_LIMIT
    return tempfile.mkdtemp(prefix="ds-", dir="/tmp" if too_long and os.path.isdir("/tmp") else None)


_PRELOAD = ["torch", "torch.utils.data", "numpy", "cloudpickle", "devsample.data.worker"]


@contextlib.contextmanager
def worker_server(method: str) -> Iterator[None]:
    """While loader workers start by ``method``: a fork server with torch loaded, if it is one.

    A server that runs already is used as it is. One that starts in this block ends with it.
    """
    if method != "forkserver":
        yield
        return
    from multiprocessing import forkserver

    server = forkserver._forkserver
    if getattr(server, "_forkserver_pid", None) is not None:
        yield
        return
    before = list(getattr(server, "_preload_modules", ["__main__"]))
    forkserver.set_forkserver_preload(_PRELOAD)
    try:
        yield
    finally:
        forkserver.set_forkserver_preload(before)
        _end_server(server)


def _end_server(server: Any) -> None:
    """End a fork server that this process started.

    It would also leave once the pipe to it closes, but any process forked meanwhile holds that
    pipe open, so it is ended by its number.
    """
    pid = getattr(server, "_forkserver_pid", None)
    if pid is None:
        return
    with contextlib.suppress(OSError):
        os.close(server._forkserver_alive_fd)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        os.unlink(server._forkserver_address)
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
