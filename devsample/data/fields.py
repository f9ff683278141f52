"""The fields of a LoaderSpec, checked one group at a time; each check gives the values to keep."""

from __future__ import annotations

import math
import multiprocessing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DistributedSampler

from devsample.data.importing import ImportPath, plain_arguments, signature_of
from devsample.errors import InvalidArgumentError, LoaderWarning
from devsample.machine import available_cores, default_worker_start_method

if TYPE_CHECKING:
    import inspect

    from devsample.data.spec import LoaderSpec

FUNCTIONS = ("dataset", "collate_fn", "worker_init_fn")
_SAMPLINGS = ("iid", "epoch", "sequential")
_WORKERS_A_CORE = 4
_COUNTS = {"batch_size": 1, "num_samples": 1, "num_workers": 0, "prefetch_factor": 1}
_WITHOUT_WORKERS: dict[str, Any] = {
    "prefetch_factor": None,
    "persistent_workers": True,
    "timeout": 0.0,
    "multiprocessing_context": None,
}


def import_paths(spec: LoaderSpec) -> dict[str, ImportPath]:
    """The fields that hold an import path as text."""
    given = {name: getattr(spec, name) for name in FUNCTIONS}
    paths = {name: ImportPath(value) for name, value in given.items() if isinstance(value, str)}
    for name, path in paths.items():
        path.check(name)
    return paths


def factory_arguments(spec: LoaderSpec) -> dict[str, Any]:
    """``dataset_args`` as a tuple and ``dataset_kwargs`` as a dict of the spec's own."""
    args, kwargs = spec.dataset_args, spec.dataset_kwargs
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise InvalidArgumentError(f"dataset_args: expected a list of arguments, got {args!r}.")
    if not isinstance(kwargs, Mapping | None):
        raise InvalidArgumentError(f"dataset_kwargs: expected a mapping, got {kwargs!r}.")
    if isinstance(spec.dataset, ImportPath):
        args, kwargs = plain_arguments(args, kwargs or {})
    return {"dataset_args": tuple(args), "dataset_kwargs": dict(kwargs or {})}


def check_call(spec: LoaderSpec) -> None:
    """An error unless the factory takes its arguments, as far as it tells without being called."""
    factory, shown = spec.dataset, repr(spec.dataset)
    signature: inspect.Signature | None
    if isinstance(factory, ImportPath):
        signature, shown = factory.check("dataset"), factory.path
    else:
        signature = signature_of(factory)
    if signature is None:
        return
    try:
        signature.bind(*spec.dataset_args, **(spec.dataset_kwargs or {}))
    except TypeError as error:
        raise InvalidArgumentError(
            f"dataset_args, dataset_kwargs: do not fit {shown}{signature}: {error}."
        ) from error


def numbers(spec: LoaderSpec) -> dict[str, Any]:
    """Counts as integers, ``timeout`` as seconds."""
    kept: dict[str, Any] = {}
    for name, least in _COUNTS.items():
        value = getattr(spec, name)
        if value is None and name != "num_workers":
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise InvalidArgumentError(f"{name}: expected an integer ≥ {least}, got {value!r}.")
        kept[name] = int(value)
    seconds = spec.timeout
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 <= seconds < math.inf:
        raise InvalidArgumentError(
            f"timeout: expected seconds ≥ 0 (0: no limit) that a batch may take, got {seconds!r}."
        )
    return kept | {"timeout": float(seconds)}


def switches(spec: LoaderSpec) -> dict[str, Any]:
    """What is on or off as bools; the names of a device and of functions are checked."""
    kept: dict[str, Any] = {}
    for name in ("pin_memory", "drop_last", "persistent_workers", "in_order", "resident"):
        value, may_be_open = getattr(spec, name), name in ("pin_memory", "resident")
        if value is None and may_be_open:
            continue
        if not isinstance(value, (bool, np.bool_)):
            choice = "True, False or None" if may_be_open else "True or False"
            raise InvalidArgumentError(f"{name}: expected {choice}, got {value!r}.")
        kept[name] = bool(value)
    if not kept["in_order"]:
        raise InvalidArgumentError("in_order: a stream of batches has an order; leave it True.")
    if kept["drop_last"] and spec.batch_size is None:
        raise InvalidArgumentError("drop_last: has no meaning with batch_size=None; drop it.")
    if kept.get("resident") and spec.num_workers > 0:
        raise InvalidArgumentError(
            f"resident: True leaves the loader workers (num_workers={spec.num_workers}) nothing to do; give "
            "one of the two."
        )
    if not isinstance(spec.pin_memory_device, str):
        raise InvalidArgumentError(
            f'pin_memory_device: expected the name of a device, e.g. "cuda", got {spec.pin_memory_device!r}.'
        )
    for name in ("collate_fn", "worker_init_fn"):
        if getattr(spec, name) is not None and not callable(getattr(spec, name)):
            raise InvalidArgumentError(f"{name}: expected a function, got {getattr(spec, name)!r}.")
    return kept


def check_order(spec: LoaderSpec) -> None:
    """At most one thing that says which samples a batch holds."""
    if spec.sampling not in (None, *_SAMPLINGS):
        raise InvalidArgumentError(f"sampling: expected one of {_SAMPLINGS}, got {spec.sampling!r}.")
    if not isinstance(spec.shuffle, (bool, np.bool_, type(None))):
        raise InvalidArgumentError(f"shuffle: expected True or None, got {spec.shuffle!r}.")
    if spec.shuffle is not None and not spec.shuffle:
        raise InvalidArgumentError(
            'shuffle: False is ambiguous here. For data order say sampling="sequential"; leave it '
            "out for independent random batches."
        )
    names = ("sampling", "shuffle", "sampler", "batch_sampler")
    given = [name for name in names if getattr(spec, name) is not None]
    if len(given) > 1:
        raise InvalidArgumentError(f"{', '.join(given)}: mutually exclusive; give one of them.")
    for name in ("sampler", "batch_sampler"):
        _check_sampler(name, getattr(spec, name))
    if spec.batch_sampler is not None and (spec.batch_size != 1 or spec.drop_last):
        raise InvalidArgumentError(
            "batch_sampler: mutually exclusive with batch_size and drop_last; drop those."
        )


def _check_sampler(name: str, sampler: Any) -> None:
    if sampler is None:
        return
    if isinstance(sampler, DistributedSampler) or isinstance(
        getattr(sampler, "sampler", None), DistributedSampler
    ):
        raise InvalidArgumentError(
            f"{name}: a DistributedSampler gives a part of the data, but every chain needs all of "
            "it. Leave it out; chains already draw their own batches."
        )
    if not hasattr(sampler, "__iter__") or isinstance(sampler, (Iterator, str, bytes)):
        raise InvalidArgumentError(f"{name}: expected a sampler that can be iterated again, got {sampler!r}.")
    if not hasattr(sampler, "__len__"):
        raise InvalidArgumentError(f"{name}: {type(sampler).__name__} needs a __len__ (an epoch must end).")


def workers(spec: LoaderSpec) -> dict[str, Any]:
    """How workers start, by name; what they alone need is left out where there are none."""
    context = spec.multiprocessing_context
    if context is not None and not isinstance(context, str):
        if not hasattr(context, "get_start_method"):
            raise InvalidArgumentError(
                f"multiprocessing_context: expected a start method or a context, got {context!r}."
            )
        context = getattr(context, "_name", None) or context.get_start_method()
    methods = multiprocessing.get_all_start_methods()
    if context is not None and context not in methods:
        raise InvalidArgumentError(f"multiprocessing_context: expected one of {methods}, got {context!r}.")
    if spec.worker_dataset not in ("auto", "pickle", "rebuild"):
        raise InvalidArgumentError(
            f'worker_dataset: expected "auto", "pickle" or "rebuild", got {spec.worker_dataset!r}.'
        )
    if spec.worker_dataset == "rebuild" and not spec.is_factory:
        raise InvalidArgumentError('worker_dataset: "rebuild" needs a factory as dataset.')
    if spec.num_workers == 0:
        return dict(_WITHOUT_WORKERS)  # harmless leftovers
    _warn_of_many(spec.num_workers)
    return {"multiprocessing_context": context or default_worker_start_method()}


def _warn_of_many(num_workers: int) -> None:
    cores = available_cores()
    if num_workers > _WORKERS_A_CORE * cores:
        warnings.warn(
            f"num_workers: {num_workers} loader workers for each chain process, but this process may use "
            f"{cores} CPU cores. More workers than cores only wait for each other; spec.check() measures "
            "how many help.",
            LoaderWarning,
            stacklevel=5,
        )
