"""Which device a slot computes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from devsample.errors import InvalidArgumentError


def slot_devices(
    cores: Any,
    device: Any,
    gpu_idxs: Sequence[int] | None,
    devices: Sequence[Any] | None,
    home: torch.device,
    num_chains: int,
) -> list[str]:
    """One device name per slot.

    Args:
        cores: number of chain processes, or a list of devices, one process each.
        device: the device of all slots; a bare "cuda" with ``gpu_idxs`` or several cores means
            cuda:0, cuda:1, … in turn over the GPUs.
        gpu_idxs: GPU of each slot, in turn.
        devices: devices of the slots, in turn.
        home: where the model is.
        num_chains: more slots than chains are of no use.
    """
    for name, value in (("devices", devices), ("gpu_idxs", gpu_idxs), ("cores", cores)):
        if isinstance(value, str) or (name != "cores" and not isinstance(value, Sequence | None)):
            wanted = "an integer ≥ 1 or a list of devices" if name == "cores" else "a list"
            raise InvalidArgumentError(f"{name}: expected {wanted}, got {value!r}.")
    if isinstance(cores, (list, tuple)):
        if not cores:
            raise InvalidArgumentError("cores: the list of devices is empty.")
        if devices is not None or gpu_idxs is not None:
            raise InvalidArgumentError("cores: a list of devices is given; drop devices and gpu_idxs.")
        devices, cores = list(cores), len(cores)
    if isinstance(cores, bool) or not isinstance(cores, Integral) or cores < 1:
        raise InvalidArgumentError(f"cores: expected an integer ≥ 1 or a list of devices, got {cores!r}.")
    given = [name for name, value in (("devices", devices), ("gpu_idxs", gpu_idxs)) if value is not None]
    if device is not None and devices is not None:
        given.append("device")
    if len(given) > 1:
        raise InvalidArgumentError(f"{' and '.join(given)}: give one of them.")
    chosen = [_checked(one) for one in _candidates(device, gpu_idxs, devices, home)]
    slots = max(int(cores), len(chosen)) if devices is not None else int(cores)
    return [chosen[slot % len(chosen)] for slot in range(min(slots, num_chains))]


def child_device(device: str) -> tuple[str, dict[str, str]]:
    """The device's name inside a process that sees only it, and the environment that does so.

    A process that sees one GPU puts a bare ``.cuda()`` of user code on the right one.

    >>> child_device("cpu")
    ('cpu', {})
    """
    parsed = torch.device(device)
    if parsed.type != "cuda":
        return device, {}
    index = parsed.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    tokens = visible.split(",") if visible else []
    token = tokens[index].strip() if index < len(tokens) else str(index)
    return "cuda:0", {"CUDA_VISIBLE_DEVICES": token}


def _candidates(
    device: Any,
    gpu_idxs: Sequence[int] | None,
    devices: Sequence[Any] | None,
    home: torch.device,
) -> list[Any]:
    if devices is not None:
        if not devices:
            raise InvalidArgumentError("devices: the list is empty.")
        return list(devices)
    if gpu_idxs is not None:
        if not gpu_idxs:
            raise InvalidArgumentError("gpu_idxs: the list is empty.")
        return [f"cuda:{int(index)}" for index in gpu_idxs]
    chosen = home if device is None else torch.device(_checked(device))
    if chosen.type == "cuda" and chosen.index is None:
        return [f"cuda:{index}" for index in range(max(1, torch.cuda.device_count()))]
    return [str(chosen)]


def _checked(device: Any) -> str:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(
            f"device: {device!r} is no device ({str(error).splitlines()[0]})."
        ) from error
    _check_there(parsed)
    return str(parsed)


def _check_there(device: torch.device) -> None:
    """An error unless this machine has the device."""
    problem = ""
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            problem = f"is not there; this machine has {count} CUDA devices"
    elif device.type == "mps":
        if not torch.backends.mps.is_available():
            problem = (
                "is not available: it takes macOS 12.3 or newer, an Apple GPU and a PyTorch built for them"
            )
        elif device.index:
            problem = "is not there; there is one, mps:0"
    elif device.type == "meta":
        problem = "holds no values"
    elif device.type != "cpu":
        module = getattr(torch, device.type, None)
        if module is None or not module.is_available():
            problem = "is not available; this PyTorch sees no such device"
    if problem:
        raise InvalidArgumentError(f"device: {device} {problem}.")
