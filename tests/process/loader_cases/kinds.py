"""Data of every kind, and batches of every kind."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.process.loader_cases.items import COUNT, Numbers

# --- data ------------------------------------------------------------------------------------------


class AtOnce(Numbers):
    """Gives several items at once, and refuses to give one."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one at a time")

    def __getitems__(self, indices: list[int]) -> list[float]:
        return [float(index) for index in indices]


class Arrays(Dataset[Any]):
    """The same numbers from an array, a memory-mapped file, a shared tensor and a file-backed one."""

    def __init__(self, folder: Path) -> None:
        self.array = np.arange(COUNT, dtype=np.float32)
        self.folder = folder
        self.array.tofile(folder / "mapped")
        self.mapped = np.memmap(folder / "mapped", dtype=np.float32, mode="r")
        torch.arange(float(COUNT)).numpy().tofile(folder / "backed")
        self.backed = torch.from_file(str(folder / "backed"), shared=False, size=COUNT)
        self.shared = torch.arange(float(COUNT)).share_memory_()
        self.views = [self.array[4:], self.backed[4:]]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        found = [self.array[index], self.mapped[index], self.backed[index], self.shared[index]]
        if index >= 4:
            found += [view[index - 4] for view in self.views]
        assert {float(one) for one in found} == {float(index)}
        return np.float32(index)


class Strings(Numbers):
    """Not only numbers: text, bytes, None, a nested record of unequal length."""

    def __getitem__(self, index: int) -> Any:
        record = {
            "text": "ä" * (index % 3),
            "raw": bytes([index]),
            "none": None,
            "list": list(range(index % 4)),
        }
        return float(index), record


class WholeBatches(Dataset[Any]):
    """Items that are batches of four; for ``batch_size=None``."""

    def __len__(self) -> int:
        return COUNT // 4

    def __getitem__(self, index: int) -> Any:
        return np.arange(4 * index, 4 * index + 4, dtype=np.float32)


# --- batches ---------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ("x", "y"))


@dataclass
class Record:
    """A dataclass with a field that is made, not given."""

    x: torch.Tensor
    name: str = "record"
    made: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.made = self.x + 1


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: dict[str, torch.Tensor]


class Movable:
    """A class of its own, with ``to``."""

    def __init__(self, x: torch.Tensor, device: str = "made") -> None:
        self.x, self.device = x, device

    def to(self, device: Any) -> Movable:
        return Movable(self.x.to(device), str(device))


class Opaque:
    """A class of its own that cannot be moved."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def output(x: torch.Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x)


def encoding(x: torch.Tensor) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": x.long(), "x": x})


BATCHES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda x: x, lambda b: b),
    "tuple": (lambda x: (x, x + 1), lambda b: b[0] if type(b) is tuple else None),
    "list": (lambda x: [x, x + 1], lambda b: b[0] if type(b) is list else None),
    "named tuple": (lambda x: Pair(x, x + 1), lambda b: b.x if type(b) is Pair else None),
    "dict": (lambda x: {"y": x + 1, "x": x}, lambda b: b["x"] if list(b) == ["y", "x"] else None),
    "ordered dict": (lambda x: OrderedDict(x=x), lambda b: b["x"] if type(b) is OrderedDict else None),
    "dataclass": (lambda x: Record(x), lambda b: b.x if torch.equal(b.made, b.x + 1) else None),
    "frozen dataclass": (lambda x: Frozen(x, {"a": x}), lambda b: b.inner["a"]),
    "nested": (
        lambda x: {"a": [(x, None), Pair({"b": x}, "text")], "n": 3},
        lambda b: b["a"][1].x["b"] if b["n"] == 3 and b["a"][0][1] is None else None,
    ),
    "movable": (Movable, lambda b: b.x if b.device == "cpu" else None),
    "opaque": (Opaque, lambda b: b.x),
    "model output": (output, lambda b: b.last_hidden_state if "Output" in type(b).__name__ else None),
    "encoding": (encoding, lambda b: b["x"] if torch.equal(b["input_ids"], b["x"].long()) else None),
    "numpy": (lambda x: {"x": x.numpy()}, lambda b: torch.from_numpy(b["x"])),
    "integers": (lambda x: (x.long(), x.bool(), x.half()), lambda b: b[0].float()),
    "conjugated": (
        lambda x: (x, torch.complex(x, -x).conj(), torch.complex(x, -x).conj().imag),
        lambda b: b[2] if torch.equal(b[1].real, b[0]) else None,
    ),
    "sparse and complex": (
        lambda x: (x, x.diag().to_sparse(), x.to(torch.complex64)),
        lambda b: b[2].real if b[1].is_sparse else None,
    ),
}


class EveryKind:
    """A collate function that makes another kind of batch each time, by the numbers in it."""

    def __call__(self, batch: list[float]) -> Any:
        return BATCHES[kind_of(batch)][0](torch.tensor(batch)), torch.tensor(batch)


def kind_of(batch: list[float]) -> str:
    return list(BATCHES)[int(sum(batch)) % len(BATCHES)]


def opened(batch: tuple[Any, torch.Tensor]) -> torch.Tensor:
    """The numbers of such a batch; its kind is as it was made."""
    made, expected = batch
    x = BATCHES[kind_of(expected.tolist())][1](made)
    assert isinstance(x, torch.Tensor)
    assert torch.equal(x, expected)
    return x


def first_of(batch: Any) -> Any:
    return next(iter(batch.values())) if isinstance(batch, Mapping) else batch
