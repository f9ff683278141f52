"""The state of a chain on disk, and small files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as JSON beside ``path`` and rename it into place."""
    write_bytes(path, json.dumps(value, indent=1, allow_nan=True).encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and rename it into place."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(
    path: Path,
    position: torch.Tensor,
    buffers: Mapping[str, torch.Tensor],
    *,
    step: int,
    offset: int,
) -> None:
    """The state of one chain after ``step`` updates.

    Args:
        path: the file.
        position: moving entries, shape (P,).
        buffers: the sampler's buffers for this chain, each of shape (P,).
        step: updates made.
        offset: bytes of the record file at that moment.
    """
    tensors = {"position": position} | {f"buffer.{name}": value for name, value in buffers.items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    temporary = path.with_name(path.name + ".tmp")
    save_file(tensors, temporary, metadata={"step": str(step), "offset": str(offset)})
    os.replace(temporary, path)


@dataclass(frozen=True)
class Checkpoint:
    """The state of one chain, as `save_checkpoint` wrote it."""

    position: torch.Tensor
    buffers: dict[str, torch.Tensor]
    step: int
    offset: int


def load_checkpoint(path: Path) -> Checkpoint:
    """Read what `save_checkpoint` wrote, on the CPU."""
    prefix = "buffer."
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        metadata = file.metadata()
    buffers = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
    return Checkpoint(tensors["position"], buffers, int(metadata["step"]), int(metadata["offset"]))
