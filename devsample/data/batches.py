"""Batches of any shape, moved to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
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
        return like_mapping(batch, {key: to_device(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(part, device) for part in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return like_dataclass(
            batch,
            {one.name: to_device(getattr(batch, one.name), device) for one in dataclasses.fields(batch)},
        )
    return batch


def opened(batch: Any) -> Any:
    """A shallow copy of a container, so that who takes things out of it leaves the batch whole."""
    return copy.copy(batch) if isinstance(batch, (MutableMapping, list)) else batch


def like_mapping(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """A mapping of the class of ``batch`` with other values, or a dict if it cannot be made."""
    if type(batch) is dict:
        return moved
    try:
        return type(batch)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved


def like_dataclass(batch: Any, moved: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with other fields."""
    settable = {one.name for one in dataclasses.fields(batch) if one.init}
    return dataclasses.replace(batch, **{name: value for name, value in moved.items() if name in settable})


def children_of(batch: Any) -> list[tuple[Any, Any]] | None:
    """What a container holds, by name or place; None if it is none that is known."""
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, (list, tuple)):
        return list(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(one.name, getattr(batch, one.name)) for one in dataclasses.fields(batch)]
    return None


def leaves_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in a fixed order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    children = None if isinstance(batch, (str, bytes)) else children_of(batch)
    return [leaf for _, child in children or () for leaf in leaves_of(child)]


def rebuilt(batch: Any, leaves: Sequence[torch.Tensor]) -> Any:
    """``batch`` with other tensors, in the order of `leaves_of`."""
    if (
        type(batch) is list
        and len(batch) == len(leaves)
        and all(isinstance(one, torch.Tensor) for one in batch)
    ):
        return list(leaves)
    given = iter(leaves)
    return _with(batch, lambda _: next(given))


def _with(batch: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return replace(batch)
    children = None if isinstance(batch, (str, bytes)) else children_of(batch)
    if children is None:
        return batch
    new = {key: _with(value, replace) for key, value in children}
    if isinstance(batch, Mapping):
        return like_mapping(batch, new)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*new.values())
    if isinstance(batch, (list, tuple)):
        return type(batch)(new.values())
    return like_dataclass(batch, new)
