"""Settings of torch in the caller's process that change numbers, repeated in chain processes."""

from __future__ import annotations

from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The settings now, as plain values."""
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
    }


def apply(settings: dict[str, Any]) -> None:
    """Repeat captured settings in this process."""
    torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    if settings["deterministic"]:  # the call imports much, so it is not made in vain
        torch.use_deterministic_algorithms(True, warn_only=settings["deterministic_warn_only"])
    torch.backends.mkldnn.enabled = settings["mkldnn"]
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    torch.backends.cudnn.allow_tf32 = settings["cudnn_allow_tf32"]
