"""Where a result comes from: versions, time, fingerprints of what went in, and what it cost."""

from __future__ import annotations

import itertools
import platform
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from devsample.arguments import Plan
from devsample.data.fingerprint import content_hash
from devsample.data.importing import ImportPath
from devsample.data.spec import LoaderSpec
from devsample.payload import unwrap
from devsample.running import Finished
from devsample.samplers.reference import ReferenceKernel

FINGERPRINT_SECONDS = 5.0


@dataclass(frozen=True)
class Origin:
    """What is known before the first chain starts."""

    started: str
    fingerprints: dict[str, str | None]


def note_origin(plan: Plan) -> Origin:
    """The time, and the fingerprints of weights, data, evaluate and masks.

    Fingerprints are SHA-256, the same in every process. One that cannot be made is None: an object
    without a content that lasts, one that takes longer than 5 seconds, or a data set by an import path
    whose module this process has not loaded (it is the chains' to load).
    """
    parts = plan.parts
    makers: dict[str, Callable[[], str | None]] = {
        "weights": lambda: weights_hash(plan.model),
        "data": lambda: _data_hash(parts.loader_spec),
        "evaluate": lambda: content_hash(parts.evaluate, seconds=FINGERPRINT_SECONDS),
        "masks": lambda: content_hash(dict(parts.masks), seconds=FINGERPRINT_SECONDS),
    }
    return Origin(
        datetime.now(UTC).isoformat(timespec="seconds"), {name: _try(make) for name, make in makers.items()}
    )


def weights_hash(model: torch.nn.Module) -> str:
    """SHA-256 of a model's parameters and buffers, names, shapes and dtypes included."""
    plain = unwrap(model)
    named = itertools.chain(plain.named_parameters(), plain.named_buffers())
    return content_hash({name: tensor.detach() for name, tensor in named}, seconds=FINGERPRINT_SECONDS)


def make_provenance(origin: Origin, plan: Plan, finished: Finished) -> dict[str, Any]:
    """The provenance of a run in JSON's types; see `LLCResult.provenance` for its keys."""
    cost, size = _cost(plan, finished)
    return {
        "versions": versions(),
        "started": origin.started,
        "fingerprints": dict(origin.fingerprints),
        "seconds": finished.seconds,
        "device_seconds": _device_seconds(finished, plan.parts.run.group_size),
        **cost,
        "samples_per_gradient": size,
    }


def versions() -> dict[str, str]:
    """Of devsample, torch, numpy and Python, and the platform."""
    import devsample

    return {
        "devsample": devsample.__version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }


def _try(make: Callable[[], str | None]) -> str | None:
    """What ``make`` gives; hashing runs code of the user's objects, so anything may go wrong in it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()
    except Exception:
        return None


def _data_hash(spec: LoaderSpec) -> str | None:
    paths = [getattr(spec, name) for name in ("dataset", "collate_fn", "worker_init_fn")]
    modules = [path.module for path in paths if isinstance(path, ImportPath)]
    if any(module not in sys.modules for module in modules):
        return None
    from devsample.data.fingerprint import fingerprint

    return fingerprint(spec, seconds=FINGERPRINT_SECONDS)


def _device_seconds(finished: Finished, group_size: int) -> float:
    """Chains of a group are computed together, so their time counts once."""
    groups: dict[int, float] = {}
    for chain, outcome in finished.outcomes.items():
        groups[chain // group_size] = max(groups.get(chain // group_size, 0.0), outcome.seconds)
    return sum(groups.values())


def _cost(plan: Plan, finished: Finished) -> tuple[Mapping[str, int], int | None]:
    """Gradients and further forward passes of all chains, and the samples in one."""
    run, prepared, spec = plan.parts.run, finished.prepared, plan.parts.loader_spec
    kernel = plan.parts.sampler.kernel(
        lr=prepared.lr, nbeta=prepared.nbeta, localization=prepared.localization
    )
    steps = sum(outcome.steps for outcome in finished.outcomes.values())
    again = sum(outcome.rerun_steps for outcome in finished.outcomes.values())
    draws = sum(outcome.num_draws for outcome in finished.outcomes.values())
    if isinstance(kernel, ReferenceKernel):
        return {"gradients": steps * kernel.num_gradients, "forwards": 0}, prepared.num_samples
    control = bool(getattr(kernel, "control_variate", False))
    separate = prepared.sampling != "iid"  # the loss is then read on a batch of its own
    paired = run.baseline == "paired" and not prepared.baseline_cache
    per_draw = int(paired and (separate or not control)) + int(separate)
    return {
        "gradients": (steps * (2 if control else 1) + again * (5 if control else 3)) * run.grad_accum_steps,
        "forwards": draws * run.grad_accum_steps * per_draw,
    }, None if spec.batch_sampler is not None else spec.batch_size
