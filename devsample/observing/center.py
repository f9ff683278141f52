"""What is known of the observables before the first chain: their values at w*."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from devsample.data.generators import global_random_state, seed_global_generators
from devsample.errors import EvaluateError
from devsample.objective import Batch, Objective
from devsample.observables.declared import Declared, Function
from devsample.observing.functions import call, named
from devsample.observing.losses import OnData, PerSample, objective_of
from devsample.observing.sources import Source, Sources
from devsample.samplers import Kernel
from devsample.seeds import ChainKey, Role, stream_seed
from devsample.specs import Prepared
from devsample.stacked import RowByRow


def look_at_center(
    observables: Sequence[Any],
    objective: Objective,
    sources: Sources,
    key: ChainKey,
    prepared: Prepared,
    kernel: Kernel,
    batch: Any,
) -> dict[str, dict[str, Any]]:
    """Compute the losses on other data at w*, and try the functions there once.

    Args:
        observables: of the run.
        objective: of the run, whose model is at w*.
        sources: the data.
        key: of a chain.
        prepared: what else is known of the run.
        kernel: its sampler.
        batch: one of its batches, for functions.

    Returns:
        By name: "center" (the loss at w*), "num_samples", "random" and "needs_grad" (of its own evaluate).

    Raises:
        EvaluateError: naming the observable that fails or gives something else than it should.
    """
    found: dict[str, dict[str, Any]] = {}
    device, center = objective.flat.device, objective.flat.read()
    objective.flat.point_to(center)
    record = {
        "chain": 0,
        "draw": 0,
        "step": prepared.num_burnin_steps,
        "loss": prepared.init_loss,
        "baseline": prepared.init_loss,
        "llc": 0.0,
        "init_loss": prepared.init_loss,
        "nbeta": prepared.nbeta,
        "model": objective.model,
        "optimizer": kernel,
        "batch": batch,
        "device": device,
    }
    for one in observables:
        if isinstance(one, Function):
            seed_global_generators(stream_seed(key, Role.OBSERVE, 0))
            with objective.guarded(center):
                call(one, record, torch.zeros((), device=device))
        elif isinstance(one, Declared):
            found[one.name] = _center(one, objective, sources[one.name], key)
    objective.flat.point_to(objective.flat.read())
    objective.reset_buffers()
    return found


def _center(one: Declared, run: Objective, source: Source, key: ChainKey) -> dict[str, Any]:
    center = run.flat.read()
    about = {"random": run.seeded, "needs_grad": run.needs_grad}
    objective = objective_of(one, run, about)
    if one.evaluate is not None:
        count, data = next(iter(source))
        about = _try_evaluate(one, objective, [(count, data)], key)
        objective = objective_of(one, run, about)
    rows = RowByRow(objective, center[None], center, [key])
    width = source.count if one.by_sample else 1
    values = torch.zeros((width, 1), dtype=torch.float64, device="cpu")
    if center.device.type != "mps":
        values = values.to(center.device)
    with named(one.name):
        OnData(one, rows, source, [key])(values, 0)
        objective.watch.check()
        _check_weights(objective, source.count)
    mean = float(values.mean())
    if not math.isfinite(mean):
        raise EvaluateError(f"observables: {one.name!r}: the loss at w* is {mean}.")
    return about | {"center": mean, "num_samples": source.count}


def _check_weights(objective: Objective, count: int) -> None:
    """Every sample whose own loss is wanted must have one."""
    empty = objective.evaluate.empty if isinstance(objective.evaluate, PerSample) else None
    if empty is not None and int(empty):
        raise EvaluateError(
            f"evaluate returned weights that are all 0 for {int(empty)} of {count} samples, which thus have "
            "no loss of their own; give a loader_spec without such samples."
        )


def _try_evaluate(
    one: Declared, objective: Objective, batch: Sequence[Batch], key: ChainKey
) -> dict[str, Any]:
    """Whether an evaluate draws random numbers, and whether it differentiates by itself."""
    objective.seeded, objective.needs_grad = False, False
    before = global_random_state()
    try:
        objective.loss(batch, key, 0)
    except EvaluateError:
        objective.needs_grad = True
        with named(one.name):
            objective.loss(batch, key, 0)
    return {"random": global_random_state() != before, "needs_grad": objective.needs_grad}
