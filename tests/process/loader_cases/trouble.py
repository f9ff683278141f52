"""Data sets that fail: batches that cannot be sent, workers that die, hang or eat memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info

from tests.process.loader_cases.items import COUNT, Numbers

# --- batches ---------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ("x", "extra"))


@dataclass
class Record:
    x: torch.Tensor
    extra: Any


class Bag:
    """A batch of a class of its own."""

    def __init__(self, x: torch.Tensor, extra: Any) -> None:
        self.x, self.extra = x, extra

    def to(self, device: Any) -> Bag:
        return Bag(self.x.to(device), self.extra)


def x_of(batch: list[float]) -> torch.Tensor:
    return torch.tensor(batch)


UNSENDABLE: dict[str, tuple[Callable[[list[float]], Any], str, str]] = {
    "dict of lists": (
        lambda b: {"x": x_of(b), "meta": [threading.Lock() for _ in b]},
        r"batch\['meta'\]\[0\]",
        r"_thread\.lock",
    ),
    "tuple": (
        lambda b: (x_of(b), {"a": [1, 2, {"b": threading.Lock()}]}),
        r"batch\[1\]\['a'\]\[2\]\['b'\]",
        "lock",
    ),
    "named tuple": (lambda b: Pair(x_of(b), threading.RLock()), r"batch\.extra|batch\[1\]", "RLock"),
    "dataclass": (lambda b: Record(x_of(b), (g for g in b)), r"batch\.extra", "generator"),
    "class": (lambda b: Bag(x_of(b), {"f": open(__file__, "rb")}), r"batch\.extra\['f'\]", "BufferedReader"),  # noqa: SIM115
    "the batch itself": (lambda b: threading.Lock(), "batch", "lock"),
    "tensor with a graph": (lambda b: (x_of(b).requires_grad_() * 2, 1), r"batch\[0\]", "detach"),
}

AWKWARD: dict[str, Callable[[list[float]], Any]] = {
    "lambda": lambda b: {"x": x_of(b), "f": lambda: 3},
    "local class": lambda b: (x_of(b), _local()),
    "generator state": lambda b: {"x": x_of(b), "g": torch.Generator().get_state()},
    "sparse": lambda b: [x_of(b), torch.eye(3).to_sparse()],
    "leaf with grad": lambda b: (x_of(b).requires_grad_(), 1),
    "empty tensor": lambda b: (x_of(b), torch.empty(0, 3)),
    "view of a large tensor": lambda b: (x_of(b), torch.zeros(1 << 20)[::1000]),
    "exception": lambda b: (x_of(b), ValueError("kept, not raised")),
}


def _local() -> Any:
    class Local:
        value = 7

    return Local()


class LocalError(Exception):
    """Cannot be made again from its arguments, and holds a lock."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.lock = threading.Lock()


def _raise_local(_: int) -> None:
    class NowhereError(Exception):
        pass

    raise NowhereError("the reader does not know this class")


def _raise_locked(_: int) -> None:
    raise LocalError(7, where="item")


def _raise_key(index: int) -> None:
    raise KeyError(f"column {index}")


def _raise_empty(_: int) -> None:
    raise RuntimeError


def _stop(_: int) -> None:
    raise StopIteration


def _system_exit(_: int) -> None:
    raise SystemExit(4)


def _interrupt(_: int) -> None:
    raise KeyboardInterrupt


RAISED: dict[str, tuple[Callable[[int], None], str]] = {
    "local class": (_raise_local, "NowhereError: the reader does not know this class"),
    "with a lock": (_raise_locked, "LocalError: code 7 at item"),
    "KeyError": (_raise_key, "KeyError: 'column 5'"),
    "without a text": (_raise_empty, "RuntimeError"),
    "StopIteration": (_stop, "StopIteration"),
}

# --- ends ------------------------------------------------------------------------------------------


def _signal(number: int) -> Callable[[int], None]:
    return lambda _: os.kill(os.getpid(), number)


def _segfault(_: int) -> None:
    ctypes.string_at(0)


def _exit(_: int) -> None:
    os._exit(7)


def _eat(_: int) -> None:
    """The allocator refuses, as under a memory limit."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    torch.zeros(8 << 30)


def _stop_process(_: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep(_: int) -> None:
    time.sleep(1000)


ENDS: dict[str, tuple[Callable[[int], None], str]] = {
    "SIGKILL": (_signal(signal.SIGKILL), "killed by SIGKILL.*memory"),
    "SIGTERM": (_signal(signal.SIGTERM), "killed by SIGTERM"),
    "SIGBUS": (_signal(signal.SIGBUS), "killed by SIGBUS"),
    "segmentation fault": (_segfault, "killed by SIGSEGV"),
    "exit": (_exit, "exit code 7"),
    "SystemExit": (_system_exit, "exit code 4|SystemExit"),
    "KeyboardInterrupt": (_interrupt, r"KeyboardInterrupt|exit code \d|SIGINT"),
    "allocation": (_eat, r"can't allocate memory|not enough memory|MemoryError"),
    "never answers": (_sleep, "no batch for|timeout"),
    "stopped": (_stop_process, "no batch for|timeout"),
}


class Fails(Numbers):
    """Something happens at item 5, in a loader worker only; the time is written to a file.

    Args:
        what: what happens.
        folder: where the files go.
        once: in the first process that comes there only.
    """

    def __init__(self, what: Callable[[int], None], folder: Path, *, once: bool = False) -> None:
        super().__init__()
        self.what, self.folder, self.once = what, folder, once

    def __getitem__(self, index: int) -> Any:
        if index == 5 and get_worker_info() is not None:
            mark = self.folder / ("once" if self.once else f"at-{os.getpid()}")
            try:
                with mark.open("x") as file:
                    file.write(repr(time.time()))
            except FileExistsError:
                return float(index)
            self.what(index)
        return float(index)


class FailsQuietly(Fails):
    """Without the traceback that CPython writes."""

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        return super().__getitem__(index)


class NotesTime:
    """A collate function that writes down when it was first called."""

    def __init__(self, collate: Callable[[list[float]], Any], folder: Path) -> None:
        self.collate, self.folder = collate, folder

    def __call__(self, batch: list[float]) -> Any:
        with contextlib.suppress(FileExistsError), (self.folder / f"at-{os.getpid()}").open("x") as file:
            file.write(repr(time.time()))
        return self.collate(batch)


def happened(folder: Path) -> float:
    """When it first happened, in seconds since the epoch."""
    return min(float(path.read_text()) for path in folder.iterdir() if path.name.startswith(("at-", "once")))


def pids(folder: Path) -> set[int]:
    """The processes to which it happened."""
    return {int(path.name[3:]) for path in folder.iterdir() if path.name.startswith("at-")}


class Slow(Numbers):
    """Takes its time."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return float(index)


class Large(Numbers):
    """Items of 2 MiB."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 << 19,), float(index))


class Threaded(Numbers):
    """Computes with autograd and several threads, where it is made and for every item."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(2)
        self.warm = self.work()

    def work(self) -> float:
        x = torch.ones(300, 300, requires_grad=True)
        (x @ x).sum().backward()
        assert x.grad is not None
        return float(x.grad.mean())

    def __getitem__(self, index: int) -> Any:
        assert self.work() == self.warm
        return float(index)


class Threads(Numbers):
    """Notes with how many threads its process computes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        kind = "chain" if get_worker_info() is None else "worker"
        with contextlib.suppress(FileExistsError), (self.folder / f"{kind}-{os.getpid()}").open("x") as file:
            file.write(str(torch.get_num_threads()))
        return float(index)
