"""Data sets that write down how much memory their process has to itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from tests.process.loader_cases.items import Numbers

MIB = 1 << 20


def private_bytes() -> int:
    """Memory of this process that it shares with nobody."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = [int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:"))]
    return sum(found) << 10


class Weighed(Numbers):
    """Looks at all of its rows for every item, and notes the memory afterwards.

    Args:
        rows: anything with items by index.
        read: what to do with a row; gives a number.
        folder: where the notes go.
    """

    def __init__(self, rows: Any, read: Any, folder: Path) -> None:
        super().__init__()
        self.rows, self.read, self.folder = rows, read, folder

    def __getitem__(self, index: int) -> Any:
        assert sum(self.read(self.rows[k]) for k in range(0, len(self.rows), 7)) > 0
        kind = "chain" if get_worker_info() is None else "worker"
        (self.folder / f"{kind}-{os.getpid()}").write_text(str(private_bytes()))
        return float(index)


def largest(folder: Path) -> int:
    """The largest note, in bytes."""
    return max(int(path.read_text()) for path in folder.iterdir())
