"""Batches of any shape, moved to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with every tensor in it on ``device``.

    Tensors, mappings, lists, tuples, named tuples, dataclasses, nested in any way, and objects
    with a ``.to`` method; everything else is handed on as it is. Copies from pinned memory do not
    wait.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, (str, bytes, int, float, type(None))):
        return batch
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _like_mapping(batch, {key: to_device(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(part, device) for part in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = {one.name: to_device(getattr(batch, one.name), device) for one in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **{n: v for n, v in moved.items() if _is_init(batch, n)})
    return batch


def opened(batch: Any) -> Any:
    """A shallow copy of a container, so that who takes things out of it leaves the batch whole."""
    return copy.copy(batch) if isinstance(batch, (MutableMapping, list)) else batch


def _like_mapping(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return moved
    try:
        return type(batch)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved


def _is_init(batch: Any, name: str) -> bool:
    return next(one.init for one in dataclasses.fields(batch) if one.name == name)
