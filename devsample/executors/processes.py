"""Chains in spawned processes: one supervised, non-daemonic process per slot."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from devsample.executors.child import main
from devsample.executors.devices import child_device
from devsample.machine import (
    describe_exit,
    end_process_group,
    hidden_main_module,
    remove_semaphores,
    socket_folder,
    thread_environment,
)
from devsample.types import ChainOutcome, Emit, Job, Outcome, Task

_GRACE_SECONDS = 15.0


@dataclass
class _Slot:
    device: str
    process: BaseProcess
    connection: Connection
    task: Task | None = None


class ProcessExecutor:
    """One process a slot; the death of one costs only the chains that it was running.

    A slot is a non-daemonic process started with "spawn", so that it may have loader workers of
    its own. It is done with a task when its outcome has arrived, whatever its exit code. A slot
    that dies is started anew.
    """

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._scratch = ""

    def open(self, job: Job, slots: Sequence[str], emit: Emit) -> None:
        """Start one process per device name in ``slots``."""
        self._job, self._emit = job, emit
        self._scratch = socket_folder()
        for device in slots:
            self._slots.append(self._start(device))

    def capacity(self) -> int:
        """Slots without a task."""
        return sum(slot.task is None for slot in self._slots)

    def submit(self, task: Task) -> None:
        """Send ``task`` to a free slot."""
        slot = next(slot for slot in self._slots if slot.task is None)
        slot.task = task
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is seen by poll
            slot.connection.send_bytes(pickle.dumps(task))

    def poll(self, timeout: float) -> list[Outcome]:
        """Outcomes that have arrived; a dead slot gives one too."""
        outcomes: list[Outcome] = []
        watched: dict[Any, _Slot] = {slot.connection: slot for slot in self._slots}
        watched |= {slot.process.sentinel: slot for slot in self._slots}
        ready = wait(list(watched), timeout)
        for slot in {id(watched[one]): watched[one] for one in ready}.values():
            alive = self._receive(slot, outcomes)
            if not alive:
                self._bury(slot, outcomes)
        return outcomes

    def cancel(self) -> None:
        """End all processes now."""
        for slot in self._slots:
            if slot.process.is_alive():
                slot.process.terminate()  # it ends its loader workers and leaves

    def close(self) -> None:
        """Let idle processes leave, end the others; none is left behind."""
        for slot in self._slots:
            if slot.task is not None:
                slot.process.terminate()
            else:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    slot.connection.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + _GRACE_SECONDS
        for slot in self._slots:
            slot.process.join(max(0.0, deadline - time.monotonic()))
            if slot.process.is_alive():
                slot.process.kill()
                slot.process.join()
            self._release(slot)
        self._slots = []
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _start(self, device: str) -> _Slot:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        inside, environment = child_device(device)
        environment |= thread_environment(self._job.threads)
        run = self._job
        job = (str(run.run_dir), run.payload_sha256, run.threads, run.temporary)
        process = context.Process(
            target=main,
            args=(theirs, environment, inside, job, self._scratch),
            name=f"devsample-{device}",
            daemon=False,
        )
        with hidden_main_module():
            process.start()
        theirs.close()
        return _Slot(device, process, ours)

    def _receive(self, slot: _Slot, outcomes: list[Outcome]) -> bool:
        """Take all messages of a slot; False once it is dead."""
        try:
            while slot.connection.poll():
                kind, *content = pickle.loads(slot.connection.recv_bytes())
                if kind == "event":
                    self._emit(content[0])
                elif kind == "outcome":
                    slot.task = None
                    outcomes.append(content[0])
        except (EOFError, OSError):  # also a message that was cut off
            slot.process.join(_GRACE_SECONDS)
            return False
        return slot.process.is_alive()

    def _bury(self, slot: _Slot, outcomes: list[Outcome]) -> None:
        """Report what a dead slot was doing, and start it anew."""
        how = describe_exit(slot.process.exitcode)
        task, pid = slot.task, slot.process.pid
        self._release(slot)
        if task is not None:
            message = f"the chain process (pid {pid}, {slot.device}) {'was ' if 'killed' in how else ''}{how}"
            died = tuple(
                ChainOutcome(chain, "died", attempt=task.attempt, device=slot.device, message=message)
                for chain in task.chains
            )
            outcomes.append(
                Outcome(
                    task,
                    died,
                    error=message,
                    error_type="ChainProcessError",
                    retryable="killed" in how,
                )
            )
        if task is None and len(self._slots) > 1:
            self._slots.remove(slot)  # it dies on its own: the others do the work
        else:
            self._slots[self._slots.index(slot)] = self._start(slot.device)

    def _release(self, slot: _Slot) -> None:
        if slot.process.pid is not None:
            end_process_group(slot.process.pid)  # loader workers that are still leaving
            remove_semaphores(slot.process.pid)
        slot.connection.close()
        slot.process.close()
