"""Loss and gradient of a model at flat states, on the batches of a step."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from devsample.averages import Gathered, Sums, Watch
from devsample.data.batches import opened
from devsample.data.generators import cuda_is_used, seed_global_generators
from devsample.errors import DevsampleError, EvaluateError
from devsample.flat import FlatParameters
from devsample.losses import default_evaluate, read_output
from devsample.seeds import ChainKey, Role, stream_seed
from devsample.types import EvaluateFn

Batch = tuple[int, Any]
"""Sample count and data of a micro-batch, on the device."""


class Objective:
    """L of a step's micro-batches, averaged by sample or weight, for a model with redirected parameters.

    Args:
        model: a private copy.
        evaluate: the user's function.
        flat: its moving parameters.
        train_mode: leave dropout and batch norm in training mode.
        autocast_dtype: run forward passes under autocast with this dtype.
        seeded: seed the global generators for every micro-batch, for an ``evaluate`` that uses them.
        needs_grad: ``evaluate`` differentiates itself, so it always runs with grad enabled.
        weighted: whether ``evaluate`` returns weights; None: its first answer shows.

    Attributes:
        weight: Σ w of the last step that was computed; None if it was averaged by sample.
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
        needs_grad: bool = False,
        weighted: bool | None = None,
    ) -> None:
        self.model, self.flat, self.seeded, self.needs_grad = model, flat, seeded, needs_grad
        self.evaluate = evaluate
        self.weighted = weighted
        self.weight: torch.Tensor | None = None
        self.watch, self._may_be_empty = Watch(at_once=flat.device.type == "cpu"), False
        self.listener: Callable[[Any], None] | None = None  # told what evaluate returned
        self.autocast_dtype = autocast_dtype
        self.touched: set[int] = set()  # positions of parameters that ever got a gradient
        model.train(train_mode)
        self._buffers = [
            (
                module,
                dict(module._buffers),
                [one if one is None else one.detach().clone() for one in module._buffers.values()],
            )
            for module in model.modules()
        ]

    @contextlib.contextmanager
    def guarded(self, values: torch.Tensor, *, weights: bool = True) -> Iterator[None]:
        """Undo what is done within to the model that is at ``values``: to modes, buffers and ``weights``."""
        before = values.clone() if weights else None
        segments = self.flat.segments if weights else ()
        copied = [(one.parameter, one.parameter.detach().clone()) for one in segments if not one.direct]
        modules = [(module, module.training) for module in self.model.modules()]
        versions = [one._version for one in self.model.buffers()]
        try:
            yield
        finally:
            if before is not None:
                values.copy_(before)
            for parameter, held in copied:
                parameter.data.copy_(held)
            for module, training in modules:
                module.training = training
            if [one._version for one in self.model.buffers()] != versions:
                self.reset_buffers()
            if weights:
                self.flat.point_to(values)

    def reset_buffers(self) -> None:
        """Give the model the buffers (running statistics, caches) that it has at w*."""
        for module, held, values in self._buffers:
            module._buffers.clear()
            module._buffers.update(held)
            for buffer, value in zip(held.values(), values, strict=True):
                if buffer is not None and value is not None:
                    buffer.detach().resize_(value.shape).copy_(value)

    def loss_and_gradient(
        self, gradient: torch.Tensor, batches: Sequence[Batch], key: ChainKey, step: int
    ) -> torch.Tensor:
        """Loss at the current point, detached; its gradient is written into ``gradient`` (P,)."""
        total = sum(count for count, _ in batches)
        value: torch.Tensor | None = None
        gathered = Gathered()
        for micro, (count, data) in enumerate(batches):
            share = count / total
            found = self._forward(data, key, step, micro)
            if isinstance(found, Sums):
                loss, share = gathered.take(found), 1.0
            else:
                loss = found
            if not loss.requires_grad:
                raise EvaluateError(
                    "evaluate returned a loss that does not depend on the moving parameters of the model it "
                    "was given. Use its `model` argument, without torch.no_grad() or .item()."
                )
            scaled = loss if share == 1 else loss * share
            parts = self._gradients(scaled)
            if len(self.touched) < len(parts):
                self.touched.update(n for n, part in enumerate(parts) if part is not None)
            self.flat.gather(parts, gradient, add=micro > 0)
            part = loss.detach() * share
            value = part if value is None else value + part
        assert value is not None
        factor = self.finish(gathered)
        if factor is not None:
            gradient.mul_(factor)
            value = value * factor
        return value

    def finish(self, gathered: Gathered) -> torch.Tensor | None:
        """Note and check the weights of a step; what its sums are to be multiplied by, if anything."""
        if not self.weighted:
            self.weight = None
            return None
        self.weight = gathered.weight
        self.watch(gathered, may_be_empty=self._may_be_empty)
        return gathered.factor

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Within, the weights of a batch may all be 0: it is one of many that are averaged together."""
        self._may_be_empty = True
        try:
            yield
        finally:
            self._may_be_empty = False

    def _gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        try:
            return torch.autograd.grad(loss, self.flat.parameters, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EvaluateError(
                f"the loss that evaluate returned has no gradient: {error} Return the loss itself; do not "
                "call backward, and do not change requires_grad or the weights."
            ) from error

    def loss(self, batches: Sequence[Batch], key: ChainKey, step: int) -> torch.Tensor:
        """Loss at the current point, detached."""
        with torch.set_grad_enabled(self.needs_grad):
            return self._loss(batches, key, step).detach()

    def _loss(self, batches: Sequence[Batch], key: ChainKey, step: int) -> torch.Tensor:
        total = sum(count for count, _ in batches)
        parts, gathered = [], Gathered()
        for micro, (count, data) in enumerate(batches):
            found = self._forward(data, key, step, micro)
            parts.append(gathered.take(found) if isinstance(found, Sums) else found * (count / total))
        value, factor = torch.stack(parts).sum(), self.finish(gathered)
        return value if factor is None else value * factor

    def read(self, output: Any) -> torch.Tensor | Sums:
        """What ``evaluate`` returned, as a mean or as sums, always the same of the two."""
        if self.listener is not None:
            self.listener(output)
        found = read_output(output)
        weighted = isinstance(found, Sums)
        if self.weighted is None:
            self.weighted = weighted
        elif self.weighted != weighted:
            raise EvaluateError(
                "evaluate returned weights (or a count) for some batches and none for others; return them "
                "for all, or for none."
            )
        return found

    def _forward(self, data: Any, key: ChainKey, step: int, micro: int) -> torch.Tensor | Sums:
        if self.seeded:
            seed = stream_seed(key, Role.MODEL, step, micro)
            seed_global_generators(seed)
            if self.flat.device.type == "cuda":
                torch.cuda.manual_seed(seed)
        try:
            with self.autocast():
                return self.read(self.evaluate(self.model, opened(data)))
        except (DevsampleError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            called = "evaluate raised"
            if self.evaluate is default_evaluate:
                called = "evaluate was not given, so the model was called with the batch, which raised"
            raise EvaluateError(f"{called} {type(error).__name__}: {error}") from error

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of forward passes."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.flat.device.type, dtype=self.autocast_dtype)


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
