"""Protocols and plain values that cross module and process borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

EvaluateFn = Callable[[torch.nn.Module, Any], Any]
"""``evaluate(model, batch)``: a loss tensor, per-sample losses, ``(loss, extras)``, a mapping with
``"loss"`` (and ``"weights"``), an object with ``.loss`` (and ``.weights``), or
``{"loss_sum": ..., "count": ...}``."""

ChainStatus = Literal["done", "diverged", "failed", "died", "stopped"]


@dataclass(frozen=True)
class Task:
    """One piece of work for a slot: prepare the run, or run a group of chains."""

    kind: Literal["prepare", "chains"]
    chains: tuple[int, ...] = ()
    attempt: int = 0
    draws: int | None = None
    """Draws that each chain is to have in the end; None: as many as the run says."""
    resume: bool = False
    """Whether the chains go on from their checkpoints."""


@dataclass(frozen=True)
class ChainOutcome:
    """How one chain ended. Plain values only: it is written as JSON and sent as it is."""

    chain: int
    status: ChainStatus
    num_draws: int = 0
    steps: int = 0
    seconds: float = 0.0
    attempt: int = 0
    device: str = "cpu"
    message: str = ""
    traceback: str = ""
    gradient_noise: float | None = None
    hessian_trace: float | None = None
    curvature: float | None = None
    moved: float | None = None
    step_bias: tuple[float, ...] | None = None
    rerun_steps: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a slot says of a task when it is over.

    Attributes:
        task: the task.
        chains: one outcome for every chain of the task.
        prepared: result of a "prepare" task as plain values.
        error: why the task as a whole failed (with its class's name), or "".
        retryable: whether the same task may succeed in a new process.
        callbacks: serialised state of the callbacks after these chains.
    """

    task: Task
    chains: tuple[ChainOutcome, ...] = ()
    prepared: dict[str, Any] | None = None
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    retryable: bool = False
    callbacks: bytes | None = None


@dataclass(frozen=True)
class Event:
    """Progress of a running task. Files in the run folder are the truth; events may be lost."""

    kind: Literal["started", "progress", "records", "warning"]
    chain: int = -1
    step: int = 0
    rows: bytes = b""
    text: str = ""
    category: str = ""
    device: str = "cpu"


@dataclass(frozen=True)
class Job:
    """What an executor needs to know to start a slot: plain values, no user objects."""

    run_dir: Path
    payload_sha256: str
    threads: int
    temporary: bool = False
    """Whether the run folder goes with the process that made it."""
    local: Any = field(default=None, compare=False, repr=False)
    """Objects of the caller that an executor in the same process uses as they are."""


Emit = Callable[[Event], None]


class Executor(Protocol):
    """Where chains run. One slot runs one task at a time; tasks never affect each other."""

    def open(self, job: Job, slots: Sequence[str], emit: Emit) -> None:
        """Start one slot per device name in ``slots``."""

    def capacity(self) -> int:
        """How many tasks can be submitted now."""

    def submit(self, task: Task) -> None:
        """Hand ``task`` to a free slot."""

    def poll(self, timeout: float) -> list[Outcome]:
        """Outcomes that have arrived, waiting up to ``timeout`` seconds for the first."""

    def cancel(self) -> None:
        """End everything that runs."""

    def close(self) -> None:
        """Release all slots; nothing of them is left behind."""
