"""Objects that live in one process: locks, pools, files, databases, clients, multiprocessing's own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import http.client
import http.server
import inspect
import logging
import mmap
import multiprocessing
import os
import queue
import socket
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.process.loader_cases.items import COUNT, Numbers


class Anything:
    """Can be referred to weakly."""


class Writer:
    """A summary writer: a queue, and a thread that empties it into a file."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Any] = queue.Queue()
        self.thread = threading.Thread(target=print, daemon=True)
        self.file = _closed_later(tempfile.TemporaryFile())  # noqa: SIM115


class Cached:
    """Keeps a lock in a slot."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()


_kept: list[Any] = []  # so that nothing complains about not being closed while a test looks at it


def _closed_later(value: Any) -> Any:
    _kept.append(value)
    return value


def _entered(stack: contextlib.ExitStack) -> contextlib.ExitStack:
    stack.enter_context(threading.Lock())
    return stack


def _bar() -> Any:
    import tqdm

    return tqdm.tqdm(total=3, file=sys.stderr, disable=False, delay=1e9)


STAYS: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "reentrant lock": threading.RLock,
    "condition": threading.Condition,
    "event": threading.Event,
    "barrier": lambda: threading.Barrier(1),
    "thread": lambda: threading.Thread(target=print),
    "thread pool": lambda: concurrent.futures.ThreadPoolExecutor(1),
    "process pool": lambda: concurrent.futures.ProcessPoolExecutor(1),
    "future": concurrent.futures.Future,
    "thread-local": threading.local,
    "queue": queue.Queue,
    "simple queue": queue.SimpleQueue,
    "log handler": logging.StreamHandler,
    "bar": _bar,
    "summary writer": Writer,
    "lock in a slot": Cached,
    "weak reference": lambda: weakref.ref(Anything),
    "weak dictionary": lambda: weakref.WeakValueDictionary({"a": Anything}),
    "memory map": lambda: _closed_later(mmap.mmap(-1, 8)),
    "generator": lambda: (number for number in range(3)),
    "frame": inspect.currentframe,
    "binary file": lambda: _closed_later(open(__file__, "rb")),  # noqa: SIM115
    "file to write": lambda: _closed_later(open(os.devnull, "w")),  # noqa: SIM115
    "folder listing": lambda: _closed_later(os.scandir("/")),
    "exit stack": lambda: _closed_later(_entered(contextlib.ExitStack())),
    "event loop": lambda: _closed_later(asyncio.new_event_loop()),
    "context variable": lambda: contextvars.ContextVar("a"),
    "socket": lambda: _closed_later(socket.socket()),
    "SSL context": ssl.create_default_context,
    "subprocess": lambda: _closed_later(_ended()),
    "database": lambda: _closed_later(sqlite3.connect(":memory:")),
}

TRAVELS: dict[str, Callable[[], Any]] = {
    "logger": lambda: logging.getLogger("loader-cases"),
    "module": lambda: torch,
    "memory view": lambda: memoryview(b"abc"),
    "dictionary view": lambda: {"a": 1}.keys(),
    "type": lambda: Numbers,
    "numpy generator": lambda: np.random.default_rng(0),
    "shared tensor": lambda: torch.zeros(3).share_memory_(),
    "path": lambda: Path("/"),
    "compiled pattern": lambda: __import__("re").compile("a"),
}


def _ended() -> Any:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process


def close_kept() -> None:
    """Close what was made."""
    while _kept:
        value = _kept.pop()
        if hasattr(value, "close"):
            value.close()


# --- everything at once, made where it is used ------------------------------------------------------

USABLE = tuple(
    name for name in STAYS if name not in ("frame", "subprocess", "process pool", "summary writer")
)


class Lively(Numbers):
    """Makes live objects where it is made, and uses some of them for every item."""

    def __init__(self) -> None:
        super().__init__()
        self.live = {name: STAYS[name]() for name in USABLE} | {"log": logging.getLogger("loader-cases")}
        self.home = os.getpid()

    def __getitem__(self, index: int) -> Any:
        with self.live["lock"], self.live["condition"], self.live["reentrant lock"]:
            self.live["thread-local"].last = index
            self.live["queue"].put(index)
            doubled = self.live["thread pool"].submit(lambda: 2.0 * self.live["queue"].get()).result()
            self.live["bar"].update(1)
        self.live["log"].debug("item %d", index)
        (zero,) = self.live["database"].execute("select 0").fetchone()
        return doubled / 2 + zero


# --- primitives of multiprocessing ----------------------------------------------------------------

PRIMITIVES: dict[str, Callable[[Any], Any]] = {
    "Lock": lambda context: context.Lock(),
    "RLock": lambda context: context.RLock(),
    "Semaphore": lambda context: context.Semaphore(),
    "Condition": lambda context: context.Condition(),
    "Event": lambda context: context.Event(),
    "Value": lambda context: context.Value("i", 7),
    "Array": lambda context: context.Array("d", 3),
    "Queue": lambda context: _closed_later(context.Queue()),
    "SimpleQueue": lambda context: _closed_later(context.SimpleQueue()),
    "Connection": lambda context: _closed_later(context.Pipe()[0]),
    "Process": lambda context: context.Process(target=print),
}


class Primitives(Numbers):
    """Counts its items in shared memory, under a lock."""

    def __init__(self, method: str | None = None) -> None:
        super().__init__()
        context = multiprocessing.get_context(method)
        self.value, self.lock, self.queue = context.Value("i", 7), context.Lock(), context.Queue()
        self.event, self.array = context.Event(), context.Array("d", [1.0, 2.0])

    def __getitem__(self, index: int) -> Any:
        with self.lock, self.value.get_lock():
            self.value.value += 1
            assert self.value.value > 7
            assert not self.event.is_set()
        return index * self.array[0]


# --- stores ---------------------------------------------------------------------------------------


def write_stores(folder: Path) -> None:
    """The numbers 0 … n-1 in every kind of store."""
    import h5py
    import lmdb
    import zarr

    values = np.arange(COUNT, dtype=np.int64)
    with h5py.File(folder / "numbers.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(4,), compression="gzip")
    with lmdb.open(str(folder / "numbers.lmdb"), map_size=1 << 20) as store, store.begin(write=True) as txn:
        for index in range(COUNT):
            txn.put(str(index).encode(), str(index).encode())
    array = zarr.open(str(folder / "numbers.zarr"), mode="w", shape=(COUNT,), chunks=(4,), dtype="i8")
    array[:] = values
    with contextlib.closing(sqlite3.connect(folder / "numbers.db")) as base:
        base.execute("create table numbers (i integer primary key, x real)")
        base.executemany("insert into numbers values (?, ?)", [(k, float(k)) for k in range(COUNT)])
        base.commit()
    values.tofile(folder / "numbers.bin")


def open_store(kind: str, folder: Path) -> Any:
    """An open handle."""
    if kind == "h5py":
        import h5py

        return h5py.File(folder / "numbers.h5", "r")
    if kind == "h5py data set":
        return open_store("h5py", folder)["x"]
    if kind == "lmdb":
        import lmdb

        return lmdb.open(str(folder / "numbers.lmdb"), readonly=True, lock=False)
    if kind == "lmdb transaction":
        return open_store("lmdb", folder).begin()
    if kind == "zarr":
        import zarr

        return zarr.open(str(folder / "numbers.zarr"), mode="r")
    if kind == "sqlite3":
        return sqlite3.connect(folder / "numbers.db")
    if kind == "fsspec file":
        import fsspec

        return fsspec.filesystem("file").open(str(folder / "numbers.bin"), "rb")
    if kind == "memory file":
        import fsspec

        return fsspec.filesystem("memory").open("/numbers.bin", "rb")
    return np.memmap(folder / "numbers.bin", dtype=np.int64, mode="r")


def read_store(kind: str, handle: Any, index: int) -> float:
    """A number from a handle."""
    if kind == "h5py":
        return float(handle["x"][index])
    if kind == "lmdb":
        with handle.begin() as txn:
            return float(txn.get(str(index).encode()))
    if kind == "lmdb transaction":
        return float(handle.get(str(index).encode()))
    if kind == "sqlite3":
        return float(handle.execute("select x from numbers where i = ?", (index,)).fetchone()[0])
    if kind.endswith("file"):
        handle.seek(8 * index)
        return float(np.frombuffer(handle.read(8), dtype=np.int64)[0])
    return float(handle[index])


class Stores(Numbers):
    """Reads each item from several stores, opened at once or when the first item is read."""

    def __init__(self, folder: Path, kinds: tuple[str, ...], *, lazily: bool) -> None:
        super().__init__()
        self.folder, self.kinds = folder, kinds
        self.handles: dict[str, Any] | None = None
        if not lazily:
            self.open()

    def open(self) -> None:
        self.handles = {kind: open_store(kind, self.folder) for kind in self.kinds}

    def __getitem__(self, index: int) -> Any:
        if self.handles is None:
            self.open()
        assert self.handles is not None
        found = {kind: read_store(kind, handle, index) for kind, handle in self.handles.items()}
        assert set(found.values()) == {float(index)}, found
        return float(index)

    def close(self) -> None:
        for handle in (self.handles or {}).values():
            if hasattr(handle, "close"):
                handle.close()


# --- a network client -----------------------------------------------------------------------------


class _Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # the connection stays open

    def do_GET(self) -> None:
        body = self.path[1:].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Echo)
        self.callers: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.callers.add(client_address)
        super().process_request(request, client_address)


@contextlib.contextmanager
def echo_server() -> Iterator[_Server]:
    """Answers a request for /7 with 7."""
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Remote(Numbers):
    """Asks a server for every item, over one connection that stays open."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        self.client.connect()

    def __del__(self) -> None:
        if hasattr(self, "client"):
            self.client.close()

    def __getitem__(self, index: int) -> Any:
        self.client.request("GET", f"/{index}")
        return float(self.client.getresponse().read())
