"""Data sets by name, for programs that get the name as an argument."""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.process.loader_cases import items, streams
from tests.process.loader_cases.leftovers import MARK, prefix_semaphores


class Captured(items.Numbers):
    """Holds 8 MiB, which lie in shared memory or a file while a run goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.data = torch.arange(2.0 * (1 << 20))

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def dataset_of(kind: str) -> tuple[Any, dict[str, Any]]:
    """The data set, and further fields of its LoaderSpec."""
    if MARK in os.environ:
        prefix_semaphores()
    if kind == "stream":
        return streams.Augmenting(), {"num_samples": items.COUNT}
    return Captured(), {}
