"""How objects travel between a chain process and its loader workers.

The user's objects go to workers as cloudpickle bytes inside small carriers, so that functions and
classes of any origin arrive, and no file descriptor rides along. Batches come back serialised by
the worker's main thread. This module is preloaded by the server that forks the workers: it stays
light.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
from torch.utils.data import get_worker_info

from devsample.data.generators import seed_global_generators
from devsample.data.spec import REMEDY, LoaderSpec
from devsample.errors import LoaderWorkerError, NotPicklableError
from devsample.serialize import find_culprit, pack, short_error, type_name


class Carried:
    """A user's object that is pickled as cloudpickle bytes."""

    def __init__(self, value: Any, data: bytes | None = None) -> None:
        self.value = value
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        data = self._data if self._data is not None else cloudpickle.dumps(self.value)
        return _arrive, (data,)


def _arrive(data: bytes) -> Carried:
    return Carried(cloudpickle.loads(data), data)


class Rebuilt(Carried):
    """A data set that is made again, from its recipe, in every worker."""

    def __init__(self, value: Any, recipe: bytes, seed: int) -> None:
        super().__init__(value)
        self._recipe, self._seed = recipe, seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._recipe, self._seed)


def _rebuild(recipe: bytes, seed: int) -> Carried:
    make = cloudpickle.loads(recipe)
    seed_global_generators(seed)  # what the factory draws is the same in every process
    return Carried(make())


def carry(dataset: Any, spec: LoaderSpec, seed: int) -> Carried:
    """A data set in the form in which workers that are not forked get it.

    Args:
        dataset: what the chain process built.
        spec: its recipe, for ``worker_dataset``.
        seed: of the global generators while a factory runs.
    """
    if spec.num_workers == 0 or spec.multiprocessing_context == "fork":
        return Carried(dataset)
    recipe = cloudpickle.dumps(spec.make_dataset) if spec.is_factory else b""
    if spec.worker_dataset == "rebuild":
        return Rebuilt(dataset, recipe, seed)
    try:
        pack(dataset, "dataset", remedy=REMEDY)
    except NotPicklableError:
        if spec.worker_dataset == "auto" and spec.is_factory:
            return Rebuilt(dataset, recipe, seed)
        raise
    return Carried(dataset, cloudpickle.dumps(dataset))


def pass_through(worker_init_fn: Callable[[int], None] | None) -> Carried | None:
    """Carrier for an optional function."""
    return None if worker_init_fn is None else Carried(worker_init_fn)


class PackedBatch:
    """A batch that was serialised by the worker's main thread.

    Left to itself a worker serialises in a background thread, whose errors nobody sees: the
    reader waits for ever. It is unpacked while the reader takes it from the queue.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return ForkingPickler.loads, (self._data,)


def send(batch: Any) -> Any:
    """``collate_fn`` of the wrapped loader: pack the batch if it has to leave this process."""
    if get_worker_info() is None:
        return batch
    try:
        return PackedBatch(bytes(ForkingPickler.dumps(batch)))
    except Exception as error:
        culprit, path, cause = find_culprit(batch, "batch", error, ForkingPickler.dumps)
        raise LoaderWorkerError(
            f"{path} is a {type_name(culprit)} and cannot be sent from a loader worker "
            f"({short_error(cause)}). Return tensors, arrays or plain values from the data set, "
            "convert it in collate_fn, or use num_workers=0."
        ) from None
