"""How objects travel between a chain process and its loader workers.

The user's objects go to workers as bytes inside small carriers, so that functions and classes of
any origin arrive, and no file descriptor rides along. Large data in them are mapped by the workers:
from the file they came from, or from a block of memory of the chain process. This module is preloaded
by the server that forks the workers: it stays light.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from devsample.data.generators import seed_global_generators
from devsample.data.sending import send
from devsample.data.spec import REMEDY, LoaderSpec
from devsample.errors import LoaderWorkerError, NotPicklableError
from devsample.large import warn_if_large
from devsample.memory import Region
from devsample.repoint import repoint
from devsample.serialize import Packed, identify_classes, pack, short_error, unpack
from devsample.shared import MappedFiles, SharedBlock

__all__ = ["Carried", "Rebuilt", "Shipment", "carry", "pass_through", "send"]


@dataclass(frozen=True)
class Shipment:
    """An object as bytes, where its large data are, and what is handed over as it is."""

    data: bytes
    regions: tuple[Region, ...]
    inherited: tuple[Any, ...]

    def unpack(self) -> Any:
        """The object; its large data are mapped, and writes to them stay in this process."""
        files = MappedFiles()
        storages = [files.storage(region) for region in self.regions]
        return unpack(self.data, storages, inherited=self.inherited)


class Carried:
    """A user's object that is pickled as a `Shipment`, made once and used for every worker.

    Args:
        value: the object.
        name: what to call it in an error.
        packed: the object, packed already.
    """

    def __init__(self, value: Any, name: str = "collate_fn", packed: Packed | None = None) -> None:
        self._value: Any = value
        self._arrives: Callable[[], Any] | None = None
        self._name, self._packed = name, packed
        self._shipment: Shipment | None = None
        self._block: SharedBlock | None = None

    @classmethod
    def arriving(cls, name: str, arrives: Callable[[], Any]) -> Carried:
        """A carrier on the other side, where the object is made when it is first asked for.

        A worker that fails while it starts says nothing but its exit code; later it can say why.
        """
        carried = cls(None, name)
        carried._arrives = arrives
        return carried

    def load(self) -> None:
        """Make the object now."""
        _ = self.value

    @property
    def value(self) -> Any:
        """The object.

        Raises:
            LoaderWorkerError: it cannot be made in this process.
        """
        if self._arrives is not None:
            try:
                self._value = self._arrives()
            except Exception as error:
                raise LoaderWorkerError(
                    f"the {self._name} could not be made in a loader worker ({short_error(error)}). "
                    'With a factory, worker_dataset="rebuild" makes it anew in each worker; or let '
                    "__getstate__ drop what belongs to one process, or use num_workers=0.\n"
                    f"{traceback.format_exc()}"
                ) from None
            self._arrives = None
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._ship(), self._name)

    def close(self) -> None:
        """Let go of the memory that workers map; no worker can be started any more."""
        if self._block is not None:
            self._block.close()

    def _ship(self) -> Shipment:
        if self._shipment is None:
            packed = self._packed or pack(self.value, self._name, to_worker=True, remedy=REMEDY)
            self._packed = None
            self._shipment = Shipment(packed.data, self._lay_out(packed), packed.inherited)
        return self._shipment

    def _lay_out(self, packed: Packed) -> tuple[Region, ...]:
        """Put large data where workers can map them, and use that memory here too if possible."""
        if not packed.storages:
            return ()
        self._block = SharedBlock(packed.storages)
        files = MappedFiles()
        repoint([packed], [[files.storage(region) for region in self._block.regions]])
        return self._block.regions


def _arrive(shipment: Shipment, name: str) -> Carried:
    return Carried.arriving(name, shipment.unpack)


class Rebuilt(Carried):
    """A data set that is made again, from its recipe, in every worker."""

    def __init__(self, value: Any, recipe: Carried, seed: int) -> None:
        super().__init__(value, "dataset")
        self._recipe, self._seed = recipe, seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._recipe, self._seed)

    def load(self) -> None:
        """In a forked worker, which got the chain process's own: make it again."""
        self._value = _rebuild(self._recipe, self._seed).value

    def close(self) -> None:
        """Let go of the memory that workers map; no worker can be started any more."""
        self._recipe.close()


def _rebuild(recipe: Carried, seed: int) -> Carried:
    def make() -> Any:
        seed_global_generators(seed)  # what the factory draws is the same in every process
        return recipe.value()

    return Carried.arriving("dataset", make)


def carry(dataset: Any, spec: LoaderSpec, seed: int) -> Carried:
    """A data set in the form in which workers that are not forked get it.

    Args:
        dataset: what the chain process built.
        spec: its recipe, for ``worker_dataset``.
        seed: of the global generators while a factory runs.
    """
    if spec.multiprocessing_context == "fork":
        identify_classes()
    if spec.num_workers > 0 and spec.worker_dataset == "rebuild":
        return Rebuilt(dataset, Carried(spec.make_dataset, "loader_spec"), seed)
    if spec.num_workers == 0 or spec.multiprocessing_context == "fork":
        return Carried(dataset, "dataset")
    try:
        packed = pack(dataset, "dataset", to_worker=True, remedy=REMEDY)
    except NotPicklableError:
        if spec.worker_dataset == "auto" and spec.is_factory:
            return Rebuilt(dataset, Carried(spec.make_dataset, "loader_spec"), seed)
        raise
    warn_if_large(
        dataset, "dataset", packed, readers=f"each of the {spec.num_workers} loader workers", shared=False
    )
    return Carried(dataset, "dataset", packed)


def pass_through(worker_init_fn: Callable[[int], None] | None) -> Carried | None:
    """Carrier for an optional function."""
    return None if worker_init_fn is None else Carried(worker_init_fn, "worker_init_fn")
