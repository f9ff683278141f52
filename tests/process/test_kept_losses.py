"""Baselines from kept losses are the same to the last bit in every process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.factories import estimate


def each(model: torch.nn.Module, batch: Any) -> Any:
    x, y = batch
    return {"loss": (model(x) - y) ** 2, "weights": 1.0 + (x[:, :1] > 0)}


def test_processes_and_workers_change_no_bit() -> None:
    settings: dict[str, Any] = {"evaluate": each, "threads_per_chain": 1, "chains_per_process": 1}
    inline = estimate(cores=1, **settings)
    spread = estimate(cores=2, spec={"num_workers": 1}, **settings)
    assert inline.settings["baseline_cache"]
    assert spread.settings["baseline_cache"]
    columns = ["loss", "baseline", "llc"]
    np.testing.assert_array_equal(spread.draws[columns], inline.draws[columns])
