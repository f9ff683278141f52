"""The process's own random generators: torch's on the CPU, numpy's and Python's."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_global_generators(seed: int) -> None:
    """Seed torch, numpy and random of this process from one 64-bit number."""
    torch.default_generator.manual_seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002 - the global one is what users use
    random.seed(seed)


class preserved_global_generators:  # noqa: N801 - reads as a statement
    """Leave the global generators of torch's CPU, numpy and random as they were."""

    def __enter__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._numpy = np.random.get_state()  # noqa: NPY002 - the global one is what is kept
        self._random = random.getstate()

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._torch)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._random)
