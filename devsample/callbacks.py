"""Callbacks of a run: how they are called, and how their state returns from other processes."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from devsample.errors import CallbackStateWarning, InvalidArgumentError
from devsample.serialize import dumps, loads

_IMMUTABLE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
)


class Caller:
    """Calls every callback with the keywords that it takes."""

    def __init__(self, callbacks: Sequence[Callable[..., Any]]) -> None:
        self.callbacks = tuple(callbacks)
        self._names = [_accepted(callback) for callback in self.callbacks]

    def __call__(self, **record: Any) -> None:
        """Hand the record of one draw to all callbacks."""
        for callback, names in zip(self.callbacks, self._names, strict=True):
            callback(
                **(record if names is None else {name: record[name] for name in names if name in record})
            )


def check_callbacks(callbacks: object, num_chains: int, *, travels: bool) -> tuple[Callable[..., Any], ...]:
    """The callbacks as a tuple, if their state can come back from where they run.

    Args:
        callbacks: one callable, or a sequence of them.
        num_chains: chains of the run.
        travels: whether chains run in other processes.

    Raises:
        InvalidArgumentError: not callable, or state that no rule brings back.
    """
    if callbacks is None:
        return ()
    listed = tuple(callbacks) if isinstance(callbacks, (list, tuple)) else (callbacks,)
    for index, callback in enumerate(listed):
        if not callable(callback):
            raise InvalidArgumentError(
                f"callbacks[{index}]: expected a function or callable, got {callback!r}."
            )
        if travels and not hasattr(callback, "merge"):
            lost = _lost_state(callback, num_chains)
            if lost:
                raise InvalidArgumentError(
                    f"callbacks[{index}]: {lost} would be filled in a chain process and lost. Keep "
                    f"arrays whose first axis is num_chains={num_chains} (they are merged by row), define "
                    "merge(self, other), or run with cores=1."
                )
    return listed


def dump_state(callbacks: Sequence[Any]) -> bytes | None:
    """The callbacks after some chains, for `merge_state`."""
    return dumps(tuple(callbacks)) if callbacks else None


def merge_state(callbacks: Sequence[Any], returned: bytes, chains: Sequence[int], num_chains: int) -> None:
    """Bring the state that ``chains`` built in a process back into the caller's callbacks.

    Arrays whose first axis is ``num_chains`` are merged by row; otherwise ``merge`` is called.
    """
    for mine, other in zip(callbacks, loads(returned), strict=True):
        if hasattr(mine, "merge"):
            mine.merge(other)
            continue
        changed = []
        for name, value in _attributes(other).items():
            own = _attributes(mine).get(name)
            if _has_rows(own, num_chains) and _has_rows(value, num_chains):
                own[list(chains)] = value[list(chains)]  # type: ignore[index]
            elif isinstance(value, _IMMUTABLE) and value != own:
                changed.append(name)
        if changed:
            warnings.warn(
                f"{type(mine).__name__}: {', '.join(changed)} changed in a chain process and did not come "
                "back; define merge(self, other), or run with cores=1.",
                CallbackStateWarning,
                stacklevel=2,
            )


def gather_results(callbacks: Sequence[Any]) -> dict[str, Any]:
    """What the callbacks report: ``finalize()`` is called, then ``get_results()`` or ``sample()``."""
    results: dict[str, Any] = {}
    for callback in callbacks:
        if hasattr(callback, "finalize"):
            callback.finalize()
        report = getattr(callback, "get_results", None) or getattr(callback, "sample", None)
        if report is not None:
            results.update(report())
    return results


def _accepted(callback: Callable[..., Any]) -> list[str] | None:
    """Keyword names that a callback takes; None: any."""
    try:
        parameters = inspect.signature(callback).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return [one.name for one in parameters if one.kind is not one.VAR_POSITIONAL]


def _attributes(callback: Any) -> Mapping[str, Any]:
    return getattr(callback, "__dict__", {})


def _has_rows(value: Any, num_chains: int) -> bool:
    return isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim > 0 and value.shape[0] == num_chains


def _lost_state(callback: Any, num_chains: int) -> str:
    """The first piece of state that would not come back, or ""."""
    if isinstance(callback, functools.partial):
        return _lost_state(callback.func, num_chains)
    if isinstance(callback, types.MethodType):
        return _lost_state(callback.__self__, num_chains)
    if isinstance(callback, types.FunctionType):
        held = {
            name: _cell(cell)
            for name, cell in zip(callback.__code__.co_freevars, callback.__closure__ or (), strict=True)
        }
        held |= {name: callback.__globals__.get(name) for name in callback.__code__.co_names}
        containers = (list, dict, set, np.ndarray, torch.Tensor)
        names = [f"the captured {name}" for name, value in held.items() if isinstance(value, containers)]
    else:
        names = [
            f".{name}"
            for name, value in _attributes(callback).items()
            if not (isinstance(value, _IMMUTABLE) or callable(value) or _has_rows(value, num_chains))
            and not (isinstance(value, tuple) and all(isinstance(one, _IMMUTABLE) for one in value))
        ]
    return names[0] if names else ""


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
