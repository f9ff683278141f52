"""Data sets with an order, an epoch or random numbers of their own."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests.process.loader_cases.items import COUNT, Numbers

# --- iterables -------------------------------------------------------------------------------------


class Plain(IterableDataset[Any]):
    """0 … n-1, in order."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter([float(index) for index in range(self.count)])


class PlainObject:
    """The same without being an IterableDataset: an object that can be iterated again."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from map(float, range(self.count))


class Dividing(Plain):
    """Takes every k-th item in worker k, as the documentation of PyTorch advises."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from map(float, range(start, self.count, step))


class Augmenting(Plain):
    """Shuffles, and adds noise from every kind of generator."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self.rng = np.random.default_rng(0)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(self.count).tolist():
            noise = random.random() + np.random.rand() + float(torch.rand(())) + self.rng.random()  # noqa: NPY002
            yield index + 100 * self.epoch + noise / 8


class Counting(Plain):
    """Shuffles by a count of epochs that it keeps for itself."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        order = np.random.RandomState(self.epoch).permutation(self.count)
        self.epoch += 1
        yield from map(float, order)


# --- epochs ----------------------------------------------------------------------------------------


class Epochs(Numbers):
    """Items that say which epoch it is."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return 100.0 * self.epoch + index


class EpochStream(Plain):
    """Items of a stream that say which epoch it is."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            yield 100.0 * self.epoch + index


class RemembersEpochs(Epochs):
    """Counts for itself how often it was told."""

    told = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.told += 1


# --- random numbers --------------------------------------------------------------------------------


class Noise:
    """A transform with a generator in it."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, x: float) -> float:
        return x + drawn(self.rng)


class Composed:
    """A transform made of transforms."""

    def __init__(self, *parts: Callable[[float], float]) -> None:
        self.parts = list(parts)

    def __call__(self, x: float) -> float:
        for part in self.parts:
            x = part(x)
        return x


def drawn(rng: Any) -> float:
    """A number between 0 and 1 from any kind of generator."""
    if isinstance(rng, torch.Generator):
        return float(torch.rand((), generator=rng))
    if isinstance(rng, random.Random):
        return rng.random()
    return float(rng.random() if isinstance(rng, np.random.Generator) else rng.rand())


class Slots:
    """Keeps a generator in a slot."""

    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)


def generator_objects() -> dict[str, Any]:
    """One of every kind."""
    return {
        "numpy": np.random.default_rng(0),
        "philox": np.random.Generator(np.random.Philox(1)),
        "RandomState": np.random.RandomState(2),
        "random": random.Random(3),
        "torch": torch.Generator().manual_seed(4),
    }


class Drawing(Numbers):
    """Every item gets a number from each generator object, wherever it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = generator_objects()
        captured = np.random.default_rng(5)
        self.closure = lambda: drawn(captured)
        self.transform = Composed(Noise(random.Random(6)), Composed(Noise(torch.Generator().manual_seed(7))))
        self.slots = Slots()

    def __getitem__(self, index: int) -> Any:
        own = [drawn(one) for one in self.generators.values()]
        return [index / 8, *own, self.closure(), self.transform(0.0), drawn(self.slots.rng)]


class DrawingGlobally(Numbers):
    """Every item gets a number from each global generator."""

    def __getitem__(self, index: int) -> Any:
        return [index / 8, float(torch.rand(())), float(np.random.rand()), random.random()]  # noqa: NPY002


class SeededByWorker(Numbers):
    """Breaks the rule: what it draws depends on who reads."""

    def __init__(self) -> None:
        super().__init__()
        self.own: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.own is None:
            info = get_worker_info()
            self.own = iter(np.random.SeedSequence(0 if info is None else info.id + 1).generate_state(10_000))
        return index + float(next(self.own)) / 2**33


def jittered(batch: list[Any]) -> torch.Tensor:
    """A collate function that draws."""
    x = torch.tensor(batch)
    return x + torch.rand(x.shape) + float(np.random.rand())  # noqa: NPY002


# --- WebDataset ------------------------------------------------------------------------------------


def write_shards(folder: Path, shards: int, each: int) -> list[str]:
    """Tar files whose samples are the numbers 0 … shards·each-1."""
    names = []
    for shard in range(shards):
        names.append(f"{folder}/{shard:02}.tar")
        with tarfile.open(names[-1], "w") as archive:
            for index in range(shard * each, (shard + 1) * each):
                data = str(index).encode()
                member = tarfile.TarInfo(f"{index:05}.txt")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return names


def web_dataset(names: list[str], *, split: bool = True) -> Any:
    """A pipeline with a lambda in it; split over workers as WebDataset does by default, or not."""
    import webdataset

    options: dict[str, Any] = {} if split else {"workersplitter": None}
    made = webdataset.WebDataset(names, shardshuffle=False, empty_check=False, **options)
    return made.map(lambda sample: float(sample["txt"]))
