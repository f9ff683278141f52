"""Loss and gradient of a model at flat states, on the batches of a step."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from devsample.data.worker import seed_global_generators
from devsample.errors import DevsampleError, EvaluateError
from devsample.flat import FlatParameters
from devsample.losses import read_loss
from devsample.seeds import ChainKey, Role, stream_seed
from devsample.types import EvaluateFn

Batch = tuple[int, Any]
"""Sample count and data of a micro-batch, on the device."""


class Objective:
    """L of a step's micro-batches, averaged by sample, for a model with redirected parameters.

    Args:
        model: a private copy.
        evaluate: the user's function.
        flat: its moving parameters.
        train_mode: leave dropout and batch norm in training mode.
        autocast_dtype: run forward passes under autocast with this dtype.
        seeded: seed the global generators for every micro-batch, for an ``evaluate`` that uses them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        evaluate: EvaluateFn,
        flat: FlatParameters,
        *,
        train_mode: bool = False,
        autocast_dtype: torch.dtype | None = None,
        seeded: bool = True,
    ) -> None:
        self.model, self.flat, self.seeded = model, flat, seeded
        self._evaluate = evaluate
        self._autocast_dtype = autocast_dtype
        self.touched: set[int] = set()  # positions of parameters that ever got a gradient
        model.train(train_mode)
        self.buffers = {name: value.detach().clone() for name, value in model.named_buffers()}

    def reset_buffers(self) -> None:
        """Give the model's buffers (running statistics) the values they have at w*."""
        for name, value in self.model.named_buffers():
            value.detach().copy_(self.buffers[name])

    def loss_and_gradient(
        self, gradient: torch.Tensor, batches: Sequence[Batch], key: ChainKey, step: int
    ) -> torch.Tensor:
        """Loss at the current point, detached; its gradient is written into ``gradient`` (P,)."""
        total = sum(count for count, _ in batches)
        value: torch.Tensor | None = None
        for micro, (count, data) in enumerate(batches):
            share = count / total
            loss = self._forward(data, key, step, micro)
            if not loss.requires_grad:
                raise EvaluateError(
                    "evaluate returned a loss that does not depend on the moving parameters of the model it "
                    "was given. Use its `model` argument, without torch.no_grad() or .item()."
                )
            scaled = loss if share == 1 else loss * share
            parts = torch.autograd.grad(scaled, self.flat.parameters, allow_unused=True)
            if len(self.touched) < len(parts):
                self.touched.update(n for n, part in enumerate(parts) if part is not None)
            self.flat.gather(parts, gradient, add=micro > 0)
            part = loss.detach() * share
            value = part if value is None else value + part
        assert value is not None
        return value

    @torch.no_grad()
    def loss(self, batches: Sequence[Batch], key: ChainKey, step: int) -> torch.Tensor:
        """Loss at the current point, without a gradient."""
        total = sum(count for count, _ in batches)
        parts = [
            self._forward(data, key, step, micro) * (count / total)
            for micro, (count, data) in enumerate(batches)
        ]
        return torch.stack(parts).sum()

    def _forward(self, data: Any, key: ChainKey, step: int, micro: int) -> torch.Tensor:
        if self.seeded:
            seed = stream_seed(key, Role.MODEL, step, micro)
            seed_global_generators(seed)
            if self.flat.device.type == "cuda":
                torch.cuda.manual_seed(seed)
        try:
            with self._autocast():
                return read_loss(self._evaluate(self.model, data))
        except (DevsampleError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise EvaluateError(f"evaluate raised {type(error).__name__}: {error}") from error

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.flat.device.type, dtype=self._autocast_dtype)


def cuda_is_used() -> bool:
    """Whether this process has a CUDA context already; asking makes none."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def global_random_state() -> tuple[bytes, ...]:
    """A fingerprint of the global generators, to see whether something drew from them."""
    kind, words, position, *_ = np.random.get_state()  # noqa: NPY002 - the global one is watched
    states = [
        torch.default_generator.get_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
    ]
    states += [np.asarray(words).tobytes(), f"{kind}{position}".encode()]
    if cuda_is_used():
        states += [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return tuple(states)


@contextlib.contextmanager
def preserved_process_state() -> Iterator[None]:
    """Leave global generators and thread counts of this process as they were."""
    devices = range(torch.cuda.device_count()) if cuda_is_used() else ()
    threads = torch.get_num_threads()
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
            torch.set_num_threads(threads)
