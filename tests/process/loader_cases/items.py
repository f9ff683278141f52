"""Data sets whose items are their own numbers, each with something about it that used to break."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

COUNT = 32


class Numbers(Dataset[Any]):
    """0 … n-1."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return float(index)


class Holding(Numbers):
    """Keeps an object two containers away."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.helper = {"live": [thing]}

    @property
    def thing(self) -> Any:
        return self.helper["live"][0]


class Using(Holding):
    """Keeps what a function makes, in the process that makes the data set."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make())


# --- (process group) -------------------------------------------------------------------------------


class Distributed:
    def __init__(self, world_group: object) -> None:
        self.world_group = world_group


class Sampling:
    def __init__(self, world_group: object) -> None:
        self.distributed = Distributed(world_group)


class Sampled(Numbers):
    """The configuration that a training framework hands to its data sets."""

    def __init__(self, world_group: object) -> None:
        super().__init__()
        self.sampling = Sampling(world_group)


class Slotted:
    """Without a ``__dict__``."""

    __slots__ = ("group", "rank")

    def __init__(self, group: object) -> None:
        self.rank, self.group = 0, group


@dataclass
class Config:
    """A dataclass with something deep inside."""

    name: str = "config"
    parts: dict[str, Any] = field(default_factory=dict)


# --- (tensors made while pickling) -----------------------------------------------------------------


class Generators(Numbers):
    """Generators, whose state becomes a new tensor when they are pickled."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(seed) for seed in range(count)]

    def __getitem__(self, index: int) -> Any:
        drawn = {float(torch.rand((), generator=one)) for one in self.generators}
        assert len(drawn) == len(self.generators)
        return float(index)


class PacksItself(Numbers):
    """Keeps parts, and travels as one new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [torch.arange(100) + k for k in range(COUNT)]

    def __getitem__(self, index: int) -> Any:
        return float(self.parts[index][0])

    def __getstate__(self) -> dict[str, Any]:
        sizes = torch.tensor([len(part) for part in self.parts])
        return {"all": torch.cat(self.parts), "sizes": sizes, "count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.parts = list(torch.split(state["all"], state["sizes"].tolist()))
        self.count = state["count"]


class ReducesToTensors(PacksItself):
    """As before, through ``__reduce__``."""

    def __reduce__(self) -> Any:
        return _from_tensors, tuple(part.clone() for part in self.parts)


def _from_tensors(*parts: torch.Tensor) -> ReducesToTensors:
    made = ReducesToTensors()
    made.parts = list(parts)
    return made


class ManyTensors(Numbers):
    """Views, ties, a sparse tensor, a parameter, a module and a quantity of small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.arange(float(COUNT))
        self.view = self.base[4:]
        self.same = self.base
        self.sparse = torch.eye(3).to_sparse()
        self.module = torch.nn.Linear(2, 2)
        self.small = [torch.tensor(float(k)) for k in range(300)]

    def __getitem__(self, index: int) -> Any:
        assert self.same.data_ptr() == self.base.data_ptr()
        assert self.view.data_ptr() == self.base[4:].data_ptr()
        assert self.sparse.to_dense().sum() == 3
        assert self.module(torch.zeros(2)).shape == (2,)
        return float(self.small[index] + self.base[index]) / 2


# --- functions without a home ----------------------------------------------------------------------


class Transformed(Numbers):
    """Applies a function to every item."""

    def __init__(self, transform: Callable[[float], Any]) -> None:
        super().__init__()
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(float(index))


class Trainer:
    """Makes its collate function where nobody can import it from."""

    def __init__(self) -> None:
        scale = 2.0

        def data_collator(features: list[float]) -> torch.Tensor:
            return scale * torch.tensor(features)

        self.collate = data_collator

    def method(self, features: list[float]) -> torch.Tensor:
        return self.collate(features)


class CallableCollate:
    """A collate function that is an object."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, features: list[float]) -> torch.Tensor:
        return self.scale * torch.tensor(features)


def scaled(features: list[float], scale: float) -> torch.Tensor:
    return scale * torch.tensor(features)


# --- where am I ------------------------------------------------------------------------------------


def start_method() -> str:
    """How this worker was started."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    if get_worker_info() is None or parent is None:
        return "none"
    if os.getppid() != parent.pid:
        return "forkserver"
    mine, theirs = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in ("self", parent.pid))
    return "fork" if mine == theirs else "spawn"


class Noting(Numbers):
    """Leaves a file in a folder for every worker, with what ``note`` says there."""

    def __init__(self, folder: Path, note: Callable[[], Any]) -> None:
        super().__init__()
        self.folder, self.note, self.noted = folder, note, 0

    def __getitem__(self, index: int) -> Any:
        if self.noted != os.getpid():
            self.noted = os.getpid()
            (self.folder / str(os.getpid())).write_text(str(self.note()))
        return float(index)


def notes(folder: Path) -> list[str]:
    """What was noted."""
    return [path.read_text() for path in sorted(folder.iterdir())]


class Opened(Numbers):
    """Made ready by ``worker_init_fn`` through `get_worker_info`."""

    handle: float | None = None

    def open(self) -> None:
        self.handle = 100.0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return 100.0 + index
        assert info.dataset is self
        assert self.handle is not None
        return self.handle + index


def open_in_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    info.dataset.open()


# --- what does not load ----------------------------------------------------------------------------


class Forgets:
    """Pickles, but its recipe leaves out an argument."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Forgets, ()


class RefusesState:
    """Pickles, but does not take its state back."""

    def __init__(self) -> None:
        self.path = "a"

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise OSError("the file behind this is not open")


class Delegates(Numbers):
    """Hands every unknown attribute on to another data set; while it is loaded there is none yet."""

    def __init__(self, inner: Numbers) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class OnlyHere:
    """Loads in the process that made it, and in no other."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["home"] != os.getpid():
            raise RuntimeError("this belongs to another process")
        self.__dict__.update(state)


def make_only_here() -> Dataset[Any]:
    return Holding(OnlyHere())


def make_forgets() -> Dataset[Any]:
    return Holding(Forgets("a"))
