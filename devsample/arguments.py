"""The arguments of a run, checked before any work starts, and the plan that follows from them."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from devsample.callbacks import check_callbacks
from devsample.data.spec import LoaderSpec
from devsample.errors import (
    FeatureNotAvailableError,
    InvalidArgumentError,
    ModelError,
    RunFolderError,
)
from devsample.executors.devices import slot_devices
from devsample.flat import resolve_masks
from devsample.losses import resolve_evaluate
from devsample.machine import available_cores
from devsample.observables import check_observables, columns_of, stepbias
from devsample.payload import Parts, home_device, unwrap
from devsample.samplers import Sampler
from devsample.seeds import check_seed, fresh_seed
from devsample.specs import DECIDED_LATER, Precision, RunSpec, SamplerSpec, sampler_spec
from devsample.types import Executor

_COUNTS = {
    "num_draws": 1,
    "num_chains": 1,
    "num_burnin_steps": 0,
    "num_steps_bw_draws": 1,
    "grad_accum_steps": 1,
}
_LATER = {"timeout": None, "compile": False}


@dataclass(frozen=True)
class Arguments:
    """The arguments of `estimate_learning_coeff_with_summary`, as given."""

    model: Any
    loader: Any
    callbacks: Any
    evaluate: Any
    sampling_method: Any
    optimizer_kwargs: Any
    num_draws: Any
    num_chains: Any
    num_burnin_steps: Any
    num_steps_bw_draws: Any
    init_loss: Any
    grad_accum_steps: Any
    cores: Any
    seed: Any
    device: Any
    gpu_idxs: Any
    verbose: Any
    optimize_over_per_model_param: Any
    online: Any
    use_amp: Any
    loader_spec: Any
    settings: Any
    param_masks: Any
    baseline: Any
    start: Any
    train_mode: Any
    autocast_dtype: Any
    observables: Any
    until: Any
    devices: Any
    threads_per_chain: Any
    chains_per_process: Any
    executor: Any
    run_dir: Any
    on_failure: Any
    timeout: Any
    compile: Any
    on_records: Any


@dataclass(frozen=True)
class Plan:
    """A run that can start.

    Attributes:
        model: the caller's model; only read.
        parts: everything else that a chain needs.
        slots: device of each slot.
        in_processes: whether slots are other processes.
        executor: the user's own executor, or None.
        threads: CPU threads of a chain process.
        run_dir: where the run folder goes, or None for a temporary one.
        cores: what ``cores`` came to.
        seeds: seed of each chain, where each has its own.
        until: the precision that is asked for, if any.
    """

    model: torch.nn.Module
    parts: Parts
    slots: tuple[str, ...]
    in_processes: bool
    executor: Executor | None
    threads: int
    run_dir: Path | None
    on_failure: str
    on_records: Callable[..., None] | None
    verbose: bool
    online: bool
    cores: int
    seeds: tuple[int, ...] | None
    until: Precision | None = None


def make_plan(given: Arguments) -> Plan:
    """Check every argument and decide the layout of the run.

    Raises:
        InvalidArgumentError: naming the argument and what to give instead.
    """
    for name, default in _LATER.items():
        if getattr(given, name) != default:
            raise FeatureNotAvailableError(
                f"{name}: this version of devsample does not have it yet; leave it out."
            )
    model = _check_model(given.model)
    sampler = sampler_spec(given.sampling_method, given.optimizer_kwargs)
    kernel = sampler.kernel(**DECIDED_LATER)
    observables = check_observables(given.observables, kernel)
    run = _run_spec(given, sampler, tuple(name for name, _ in columns_of(observables)))
    slots = slot_devices(
        given.cores, given.device, given.gpu_idxs, given.devices, home_device(model), run.num_chains
    )
    executor, in_processes = _check_executor(given.executor, slots)
    callbacks = check_callbacks(given.callbacks, run.num_chains, travels=in_processes)
    masks = resolve_masks(unwrap(model), *_masks(given))
    loader_spec = _loader_spec(given)
    stepbias.check_sampling(observables, loader_spec.order)
    if stepbias.wanted(observables) is not None:
        stepbias.check_kernel(kernel, None if run.auto else run.num_burnin_steps)
    if in_processes or loader_spec.num_workers > 0:
        _check_may_have_children()
    evaluate = resolve_evaluate(given.evaluate)
    parts = Parts(loader_spec, evaluate, callbacks, sampler, run, masks, observables)
    if given.on_failure not in ("retry", "keep", "raise"):
        raise InvalidArgumentError(
            f'on_failure: expected "retry", "keep" or "raise", got {given.on_failure!r}.'
        )
    if given.on_records is not None and not callable(given.on_records):
        raise InvalidArgumentError(
            f"on_records: expected a function of a DataFrame, got {given.on_records!r}."
        )
    return Plan(
        model=model,
        parts=parts,
        slots=tuple(slots),
        in_processes=in_processes,
        executor=executor,
        threads=_threads(given.threads_per_chain, run.num_chains),
        run_dir=_check_run_dir(given.run_dir),
        on_failure=given.on_failure,
        on_records=given.on_records,
        verbose=bool(given.verbose),
        online=bool(given.online),
        cores=len(slots),
        seeds=run.seed if isinstance(run.seed, tuple) else None,
        until=_check_until(given.until, parts, in_processes),
    )


def _check_until(until: object, parts: Parts, in_processes: bool) -> Precision | None:
    if until is None:
        return None
    if not isinstance(until, Precision):
        raise InvalidArgumentError(f"until: expected devsample.Precision(...) or None, got {until!r}.")
    if until.max_draws < parts.run.num_draws:
        raise InvalidArgumentError(
            f"until, num_draws: max_draws={until.max_draws} is less than num_draws={parts.run.num_draws}, "
            "the draws of the first round; lower num_draws."
        )
    if not issubclass(parts.sampler.kind, Sampler):
        raise InvalidArgumentError(f"until: {parts.sampler.kind.__name__} samples nothing; take a sampler.")
    if parts.callbacks and in_processes:
        raise InvalidArgumentError(
            "until, callbacks: the state of callbacks does not go from one round to the next in other "
            "processes; take on_records or observables, or cores=1."
        )
    return until


def _check_may_have_children() -> None:
    if multiprocessing.current_process().daemon:
        raise InvalidArgumentError(
            "cores: this process is daemonic (a worker of multiprocessing.Pool or of a DataLoader) and may "
            "not start processes. Call from one that may, e.g. of concurrent.futures.ProcessPoolExecutor, "
            "or use cores=1 and a LoaderSpec with num_workers=0."
        )


def _check_model(model: object) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(f"model.{name} is on the meta device and has no values; load its weights first.")
    return model


def _run_spec(given: Arguments, sampler: SamplerSpec, observables: tuple[str, ...]) -> RunSpec:
    counts = {name: check_integer(name, getattr(given, name), least) for name, least in _COUNTS.items()}
    if given.start not in ("center", "prior"):
        raise InvalidArgumentError(f'start: expected "center" or "prior", got {given.start!r}.')
    auto = _is_auto(given.settings, sampler)
    pull = sampler.options.get("localization", 1.0 if auto else 0.0)
    if given.start == "prior" and not pull:
        raise InvalidArgumentError('start: "prior" draws from N(w*, 1/γ); give localization > 0.')
    seed = check_seed(given.seed, counts["num_chains"])
    group = 1 if given.chains_per_process == "auto" else given.chains_per_process
    baseline, init_loss = _check_baseline(given.baseline, given.init_loss)
    return RunSpec(
        **counts,
        seed=fresh_seed() if seed is None else seed,
        baseline=baseline,  # type: ignore[arg-type]
        init_loss=init_loss,
        start=given.start,
        train_mode=bool(given.train_mode),
        autocast_dtype=_autocast(given),
        auto=auto,
        group_size=check_integer("chains_per_process", group, 1),
        observables=observables,
    )


def check_integer(name: str, value: object, least: int) -> int:
    """The integer ``value``, an error unless it is one ≥ ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InvalidArgumentError(f"{name}: expected an integer ≥ {least}, got {value!r}.")
    return int(value)


def _check_baseline(baseline: object, init_loss: object) -> tuple[str, float | None]:
    if baseline not in ("paired", "full", "fixed"):
        raise InvalidArgumentError(f'baseline: expected "paired", "full" or "fixed", got {baseline!r}.')
    if init_loss is None:
        if baseline == "fixed":
            raise InvalidArgumentError('baseline: "fixed" needs init_loss, the loss at w*.')
        return str(baseline), None
    if baseline == "full":
        raise InvalidArgumentError('init_loss, baseline: "full" computes the loss at w*; drop one of them.')
    try:
        value = float(init_loss)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not math.isfinite(value):
        raise InvalidArgumentError(f"init_loss: expected a finite number, got {init_loss!r}.")
    return "fixed", value


def _autocast(given: Arguments) -> torch.dtype | None:
    dtype = given.autocast_dtype
    if dtype is None:
        return torch.bfloat16 if given.use_amp else None
    if dtype not in (torch.bfloat16, torch.float16):
        raise InvalidArgumentError(
            f"autocast_dtype: expected torch.bfloat16 or torch.float16, got {dtype!r}."
        )
    return torch.bfloat16 if dtype is torch.bfloat16 else torch.float16


def _is_auto(settings: object, sampler: SamplerSpec) -> bool:
    if settings not in (None, "auto"):
        raise InvalidArgumentError(f'settings: expected None or "auto", got {settings!r}.')
    if settings == "auto" and not issubclass(sampler.kind, Sampler):
        raise InvalidArgumentError(
            f'settings: "auto" chooses the settings of a sampler; {sampler.kind.__name__} is none. Drop it.'
        )
    if settings == "auto" and sampler.lr is not None:
        raise InvalidArgumentError('settings, optimizer_kwargs: "auto" chooses lr; drop lr or settings.')
    return sampler.lr is None


def _masks(given: Arguments) -> tuple[Mapping[str, Any] | None, str]:
    both = given.param_masks is not None and given.optimize_over_per_model_param is not None
    if both:
        raise InvalidArgumentError("param_masks, optimize_over_per_model_param: give one of them.")
    old = given.optimize_over_per_model_param is not None
    masks = given.optimize_over_per_model_param if old else given.param_masks
    name = "optimize_over_per_model_param" if old else "param_masks"
    if masks is not None and not isinstance(masks, Mapping):
        raise InvalidArgumentError(
            f"{name}: expected {{parameter name: boolean tensor or True}}, got {masks!r}."
        )
    return masks, name


def _loader_spec(given: Arguments) -> LoaderSpec:
    if (given.loader is None) == (given.loader_spec is None):
        raise InvalidArgumentError(
            "loader, loader_spec: give exactly one of them: a DataLoader, or a LoaderSpec."
        )
    if given.loader_spec is None:
        return (
            given.loader if isinstance(given.loader, LoaderSpec) else LoaderSpec.from_dataloader(given.loader)
        )
    if isinstance(given.loader_spec, DataLoader):
        raise InvalidArgumentError("loader_spec: this is a DataLoader; pass it as loader=.")
    if not isinstance(given.loader_spec, LoaderSpec):
        raise InvalidArgumentError(
            f"loader_spec: expected a LoaderSpec, got {type(given.loader_spec).__name__}."
        )
    return given.loader_spec


def _check_executor(executor: object, slots: Sequence[str]) -> tuple[Executor | None, bool]:
    if executor == "auto":
        return None, len(slots) > 1
    if executor in ("inline", "processes"):
        if executor == "inline" and len(slots) > 1:
            raise InvalidArgumentError('executor, cores: "inline" has one slot; use cores=1 or "processes".')
        return None, executor == "processes"
    if all(callable(getattr(executor, name, None)) for name in ("open", "submit", "poll", "cancel", "close")):
        return executor, True  # type: ignore[return-value]
    raise InvalidArgumentError(
        f'executor: expected "auto", "inline", "processes" or an Executor, got {executor!r}.'
    )


def _threads(threads: object, num_chains: int) -> int:
    if threads is None:
        return max(1, available_cores() // num_chains)
    return check_integer("threads_per_chain", threads, 1)


def _check_run_dir(run_dir: object) -> Path | None:
    if run_dir is None:
        return None
    if not isinstance(run_dir, (str, os.PathLike)) or not os.fspath(run_dir):
        raise InvalidArgumentError(f"run_dir: expected a path or None, got {run_dir!r}.")
    path = Path(os.fspath(run_dir)).absolute()  # evaluate may change the working folder
    try:
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"run_dir: {run_dir!r} cannot be used: {error}.") from error
    if taken:
        raise RunFolderError(
            f"run_dir: {path} is not empty. Give a new folder; this version does not continue a run, and "
            "nothing in the folder was changed."
        )
    return path
