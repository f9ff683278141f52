"""The caller's own model: its loss at w* is what a chain must find, and it is left as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from devsample.data.batches import opened, to_device
from devsample.data.generators import seed_global_generators
from devsample.errors import ModelError
from devsample.losses import read_loss
from devsample.objective import preserved_process_state
from devsample.payload import Parts, home_device, unwrap
from devsample.seeds import Role, stream_seed
from devsample.specs import Prepared

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 3e-2
_DICTS = ("_parameters", "_buffers", "_modules")


def check_center_loss(
    model: torch.nn.Module, parts: Parts, batch: Any, prepared: Prepared, threads: int
) -> None:
    """An error unless the caller's model gives the loss that a chain found on the same batch.

    Args:
        model: the caller's.
        parts: evaluate and settings.
        batch: the batch, on the CPU.
        prepared: what a chain found.
        threads: CPU threads of the chain.

    Raises:
        ModelError: the losses differ.
    """
    home, in_chain = home_device(model), prepared.check_loss
    with torch.set_grad_enabled(prepared.needs_grad):
        loss = _loss(unwrap(model), parts, to_device(batch, home), threads)
    dtype = next((one.dtype for one in model.parameters()), torch.float32)
    half = parts.run.autocast_dtype is not None
    tolerance = _HALF_TOLERANCE if half else _TOLERANCE.get(dtype, _HALF_TOLERANCE)
    if abs(loss - in_chain) > tolerance * max(abs(loss), 1e-3):
        raise ModelError(
            f"the loss at w* is {in_chain:.8g} in the chain but {loss:.8g} with your model on the same "
            "batch. Something that the loss depends on did not travel with the model (a global, a cached "
            "tensor outside the module), or evaluate is random, or changes the model or its batch."
        )


def _loss(model: torch.nn.Module, parts: Parts, batch: Any, threads: int) -> float:
    key, dtype = parts.run.keys()[0], parts.run.autocast_dtype
    device = home_device(model).type
    with preserved_process_state(), left_as_it_was(model):
        torch.set_num_threads(threads)
        model.eval()
        seed_global_generators(stream_seed(key, Role.MODEL, 0, 0))
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            return float(read_loss(parts.evaluate(model, opened(batch))).detach())


@contextlib.contextmanager
def left_as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Put attributes, modes, buffers and parameters of a model back, whatever is done to it inside."""
    attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    entries = [
        (module.__dict__[name], dict(module.__dict__[name])) for module in model.modules() for name in _DICTS
    ]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    parameters = [(one, one.data, one.requires_grad) for one in model.parameters()]
    values = [(one.data, one.detach().clone()) for one in model.parameters()]
    try:
        yield
    finally:
        for module, saved in attributes:
            for name in [name for name in module.__dict__ if name not in saved]:
                del module.__dict__[name]
            module.__dict__.update(saved)
        for held, saved in entries:
            held.clear()
            held.update(saved)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
            for parameter, data, requires_grad in parameters:
                parameter.data = data
                parameter.requires_grad_(requires_grad)
            for data, value in values:
                if not torch.equal(data, value):
                    data.copy_(value)
