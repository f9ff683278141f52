"""LoaderSpec: the recipe for a DataLoader that every chain process builds for itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from devsample.data import fields, recipes
from devsample.data.existing import fields_of
from devsample.data.importing import ImportPath
from devsample.errors import InvalidArgumentError, LoaderError
from devsample.serialize import Packed, pack, type_name

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from devsample.data.report import LoaderReport

Sampling = Literal["iid", "epoch", "sequential"]
REMEDY = (
    "Build it where it is used: pass a factory (LoaderSpec(make_dataset, ...)) that makes it in "
    "the chain process, open it when the first item is read, or drop it in __getstate__."
)


@dataclass(frozen=True, eq=False, repr=False)
class LoaderSpec:
    """A recipe for a DataLoader: a data set, or a function that makes it, and DataLoader keywords.

    Every chain process builds its own loader from it, with its own loader workers. What travels
    is the recipe, so the data set may hold what cannot be pickled if the factory makes it there.

    Each chain draws independent, uniform minibatches by default (with replacement), from a stream
    of its own that depends on (seed, chain, step) only: the same batches for any number of
    workers. torch, numpy and random are seeded once per batch where it is made, and so are the
    generators that the data set or its collate function holds: augmentation is part of that
    stream. Chains that shared batches would seem to agree more than they do.

    An iterable data set (an ``IterableDataset``, a stream of ``datasets``, a WebDataset) is read
    in its own order, epoch after epoch, by each chain for itself. Whole batches are dealt over the
    workers, the same ones for any number of them; each worker reads all the data for that. A data
    set that asks ``get_worker_info()`` for its share divides itself: its shares take turns, and
    its order depends on the number of workers.

    Args:
        dataset: a data set, map-style or iterable; or a function, class or closure that returns
            one when called with ``dataset_args`` and ``dataset_kwargs``; or the import path of
            such a function as text, ``"package.module:function"``.
        dataset_args: positional arguments of the factory; JSON values for an import path.
        dataset_kwargs: keyword arguments of the factory; JSON values for an import path.
        batch_size: samples per micro-batch, ≥ 1; None: an item of the data set is a batch.
        sampling: "iid" (the default), "epoch" (a new permutation per epoch and chain) or
            "sequential" (data order). With the last two the recorded losses are read on separate
            iid batches, since a loss read on the batch just fitted is biased.
        num_samples: n, the number of samples, where the data set is iterable (of an epoch), has no
            ``len``, or has items that are batches.
        shuffle: True means iid. False is refused: say ``sampling="sequential"``.
        sampler: a sampler object; keeps its order. Its random state is keyed by (seed, chain). One
            that favours some samples (``WeightedRandomSampler``) changes the target: gradients and
            losses, and so the posterior and the estimate, are then those of the weighted loss.
        batch_sampler: a sampler of lists of indices; keeps its order.
        num_workers: loader worker processes per chain process, ≥ 0.
        collate_fn: as for DataLoader, or the import path of such a function.
        pin_memory: None: on if the chain runs on CUDA.
        drop_last: leave out a ragged last batch of an epoch.
        timeout: seconds after which workers that give no batch are taken to be stuck, 0 for no limit.
            A worker that died is noticed within a second, whatever this says.
        worker_init_fn: called in each worker with its number; or its import path.
        multiprocessing_context: how workers start: "forkserver" (the default where it exists),
            "spawn" or "fork". "fork" starts fastest, and copies the chain process as it is: a
            handle that is open there (a file, a database) is then shared by all workers, and a
            lock held by another thread stays held. It does not go with CUDA.
        generator: accepted for compatibility and not used: the run's seed gives the order.
        prefetch_factor: batches each worker makes ahead.
        persistent_workers: keep workers between the chains of a process (the default).
        pin_memory_device: as for DataLoader.
        in_order: must be True: a stream has an order.
        resident: whether the batches of a step are taken by index from tensors that hold all the data, on
            the chain's device, all chains' at once; they are the same batches. None: for a
            ``TensorDataset`` with torch's own collate function, and for a map-style data set of up to
            64 MiB whose items are not random, if the chains read it whole and ``num_workers=0``. True: an
            error if it cannot be. False: never.
        worker_dataset: how the data set reaches workers that are not forked: "pickle" sends the
            chain's own, "rebuild" calls the factory in every worker, "auto" sends it if it can.

    Raises:
        InvalidArgumentError: a value cannot be used; the message names the field.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> spec = LoaderSpec(TensorDataset(torch.arange(10.0)), batch_size=4)
        >>> loader = spec.build(seed=0)
        >>> [tuple(batch[0].shape) for batch, _ in zip(loader, range(2))]
        [(4,), (4,)]
    """

    dataset: Any
    _: dataclasses.KW_ONLY
    dataset_args: Sequence[Any] = ()
    dataset_kwargs: Mapping[str, Any] | None = None
    batch_size: int | None = 1
    sampling: Sampling | None = None
    num_samples: int | None = None
    shuffle: bool | None = None
    sampler: Sampler[Any] | Iterable[Any] | None = None
    batch_sampler: Sampler[list[int]] | Iterable[list[int]] | None = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool | None = None
    drop_last: bool = False
    timeout: float = 0.0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    generator: torch.Generator | None = field(default=None, repr=False)
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    pin_memory_device: str = ""
    in_order: bool = True
    resident: bool | None = None
    worker_dataset: Literal["auto", "pickle", "rebuild"] = "auto"

    def __post_init__(self) -> None:
        self._set(**fields.import_paths(self), generator=None)
        for checked in (fields.factory_arguments, fields.numbers, fields.switches):
            self._set(**checked(self))
        self._check_dataset()
        fields.check_order(self)
        self._set(**fields.workers(self))

    @classmethod
    def from_dataloader(cls, loader: DataLoader[Any], **changes: Any) -> LoaderSpec:
        """The recipe behind an existing DataLoader.

        A random or sequential sampler becomes iid sampling: a DataLoader does not tell whether
        ``shuffle=False`` was meant. Any other sampler keeps its order. The loader is not touched;
        a live iterator and its workers stay with it.

        Args:
            loader: the loader, used or not.
            **changes: fields to set otherwise, e.g. ``sampling="epoch"``.

        Raises:
            InvalidArgumentError: it is no DataLoader, or does something that no recipe holds.
        """
        return cls(**(fields_of(loader) | changes))

    def build(
        self,
        *,
        seed: int = 0,
        chain: int = 0,
        grad_accum_steps: int = 1,
        first_step: int = 0,
        num_steps: int | None = None,
        device: torch.device | str = "cpu",
    ) -> DataLoader[Any]:
        """The DataLoader of one chain in this process.

        It gives the micro-batches of steps ``first_step``, ``first_step + 1``, … in order,
        ``grad_accum_steps`` a step, on the CPU, and does not end unless ``num_steps`` is given.

        Args:
            seed: the run's seed.
            chain: the chain's number.
            grad_accum_steps: micro-batches per step.
            first_step: where to begin; what comes is what an uninterrupted loader gives from there.
            num_steps: how many steps to serve.
            device: the chain's device (decides about pinning only).
        """
        from devsample.data.loader import ChainLoader
        from devsample.seeds import chain_keys

        keys = chain_keys(seed, chain + 1)
        served = ChainLoader(self, keys, grad_accum_steps=grad_accum_steps, device=torch.device(device))
        return served.as_dataloader(chain, first_step, num_steps)

    @property
    def is_factory(self) -> bool:
        """Whether ``dataset`` is called to get the data set."""
        return isinstance(self.dataset, type) or not (
            hasattr(self.dataset, "__getitem__") or hasattr(self.dataset, "__iter__")
        )

    @property
    def order(self) -> str:
        """The order of the gradient batches: "iid", "epoch", "sequential" or "user"."""
        if self.sampler is not None or self.batch_sampler is not None:
            return "user"
        return self.sampling or "iid"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoaderSpec:
        """A spec from plain values, e.g. a table of a TOML file.

        Args:
            values: fields by name; functions by import path. ``batch_size`` may be "none".

        Raises:
            InvalidArgumentError: an unknown field (the nearest one is named), or a value that
                cannot be used.

        Examples:
            >>> spec = LoaderSpec.from_dict({"dataset": "torch.utils.data:TensorDataset"})
            >>> spec.to_dict()
            {'dataset': 'torch.utils.data:TensorDataset'}
        """
        return recipes.from_dict(cls, values)

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain values that JSON and TOML can hold; defaults are left out.

        Functions appear by import path, a list of indices as it is; ``batch_size=None`` as "none".

        Raises:
            InvalidArgumentError: a field holds an object of another kind; it is named.
        """
        return recipes.as_dict(self)

    def fingerprint(self) -> str:
        """A SHA-256 hash, as 64 hex digits, of everything in the recipe that the batches depend on.

        It is the same in every process and on every machine with the same version of Python. It
        changes with the content of a data set, the code of a factory and of the functions and
        classes that it uses, their arguments, and the fields that say what is in a batch. It does
        not change with ``num_workers`` and the other settings of workers, with ``pin_memory`` or
        ``worker_dataset``, nor as a loader is used. (An iterable data set that divides itself
        among its workers gives other batches for another ``num_workers``, all the same.)

        Code of installed packages counts by name, without its version; files that a factory opens
        do not count, and a memory-mapped array counts by file, size and time of change. A lock, an
        open file or another handle has no content. A factory given by import path is imported.

        Raises:
            LoaderError: an import path leads nowhere.
        """
        from devsample.data.fingerprint import fingerprint

        return fingerprint(self)

    def check(
        self,
        num_workers: Sequence[int] | int | None = None,
        *,
        seconds: float = 10.0,
        device: torch.device | str = "cpu",
        progress: bool = True,
    ) -> LoaderReport:
        """Build the loader in a process of its own, as a chain would, and say what came out.

        The data set is made and read without workers, made again to see whether the same batch
        comes out, and read with the recipe's own number of workers and with others.

        Args:
            num_workers: numbers of workers to try besides the recipe's own; None: 1, 2, … up to 4
                or the CPU cores.
            seconds: how long to read batches, in all, > 0; starting processes comes on top. What
                takes ten times as long (at least 10 s) without a sign of life is an error.
            device: where batches end up.
            progress: say on stderr what is being done.

        Returns:
            Types, shapes and bytes of a batch, seconds per batch, memory, and the recommended
            ``num_workers``, ``prefetch_factor`` and ``multiprocessing_context`` with the reason;
            ``print`` it.

        Raises:
            NotPicklableError: something cannot be sent; names its path.
            LoaderError: the factory or the data set failed or hangs.
            LoaderWorkerError: a worker failed or died.
            ChainProcessError: the process itself died.
        """
        from devsample.checking import check_loader

        return check_loader(self, num_workers, seconds, device, progress)

    def make_dataset(self) -> Any:
        """The data set: the one given, or a new one from the factory."""
        dataset = self.dataset
        if self.is_factory:
            try:
                dataset = self.dataset(*self.dataset_args, **(self.dataset_kwargs or {}))
            except LoaderError:
                raise
            except Exception as error:
                raise LoaderError(
                    f"loader_spec.dataset: the factory raised {type(error).__name__}: {error}"
                ) from error
        self._check_made(dataset)
        return dataset

    def sample_count(self, dataset: Any) -> int:
        """n: ``num_samples`` if given, else the length of the data set."""
        return self.num_samples if self.num_samples is not None else len(dataset)

    def item_count(self, dataset: Any) -> int:
        """How many items the data set has; the samples, unless an item is a batch."""
        try:
            return len(dataset)
        except (TypeError, NotImplementedError):
            return self.sample_count(dataset)

    def packed(self) -> Packed:
        """The spec as bytes and tensor storages.

        Raises:
            NotPicklableError: naming the path of what cannot be sent to a chain process.
        """
        return pack(_Plain(self), "loader_spec", remedy=REMEDY)

    def __repr__(self) -> str:
        dataset = self.dataset
        named = dataset if isinstance(dataset, ImportPath) else getattr(dataset, "__qualname__", None)
        shown = [str(named or f"<{type_name(dataset)}>")]
        for one in dataclasses.fields(self)[1:]:
            value = getattr(self, one.name)
            plain_default = type(value) is type(one.default) and value == one.default
            if one.repr and not plain_default and not (isinstance(value, (tuple, dict)) and not value):
                shown.append(f"{one.name}={value!r}")
        return f"LoaderSpec({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return _restore, (values,)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_dataset(self) -> None:
        if isinstance(self.dataset, DataLoader):
            raise InvalidArgumentError(
                "dataset: this is a DataLoader. Use LoaderSpec.from_dataloader(loader), or pass its data set."
            )
        if self.is_factory and not callable(self.dataset):
            raise InvalidArgumentError(
                f"dataset: expected a map-style data set or a function that makes one, got {self.dataset!r}."
            )
        if isinstance(self.dataset, tuple) and all(isinstance(one, torch.Tensor) for one in self.dataset):
            raise InvalidArgumentError(
                "dataset: a tuple of tensors is no data set; use torch.utils.data.TensorDataset(*tensors)."
            )
        if not self.is_factory and (self.dataset_args or self.dataset_kwargs):
            raise InvalidArgumentError(
                "dataset_args, dataset_kwargs: only used with a factory, but dataset is already a "
                f"{type(self.dataset).__name__}."
            )
        if self.is_factory:
            fields.check_call(self)
        else:
            self._check_made(self.dataset)

    def _check_made(self, dataset: Any) -> None:
        where = "dataset: the factory returned" if self.is_factory else "dataset:"
        if is_iterable(dataset):
            self._check_iterable(where, dataset)
            return
        if not hasattr(dataset, "__getitem__"):
            raise InvalidArgumentError(
                f"{where} a {type(dataset).__name__}, which is no data set: it has neither __getitem__ nor "
                "__iter__."
            )
        try:
            count = self.sample_count(dataset)
        except (TypeError, NotImplementedError) as error:
            raise InvalidArgumentError(
                f"{where} a {type(dataset).__name__} without a length, "
                "but n enters the estimate: give num_samples=n."
            ) from error
        items = self.item_count(dataset)
        if items < 1:
            raise InvalidArgumentError(f"{where} an empty {type(dataset).__name__}.")
        if self.batch_size is None and self.num_samples is None:
            raise InvalidArgumentError(
                "num_samples: with batch_size=None an item is a batch, so n cannot be counted; give "
                "num_samples=n, the samples in all items."
            )
        if self.batch_size is not None and self.num_samples is not None and count != items:
            raise InvalidArgumentError(
                f"num_samples: {count} is not the length of the data set, {items}; leave it out."
            )

    def _check_iterable(self, where: str, dataset: Any) -> None:
        name = type(dataset).__name__
        written_out = isinstance(getattr(type(dataset), "__iter__", None), FunctionType)
        if isinstance(dataset, Iterator) and not written_out:  # a generator, a map, a file …
            raise InvalidArgumentError(
                f"{where} a {name}, which can be read only once, but a chain goes through the data again and "
                "again. Return an IterableDataset, or an object whose __iter__ starts anew."
            )
        if self.num_samples is None:
            raise InvalidArgumentError(
                f"num_samples: the data set is a {name}, which is read in an order of its own, and n enters "
                "the estimate. Give num_samples=n, the samples in an epoch (its len is not trusted); in "
                "place of loader=, pass loader_spec=LoaderSpec.from_dataloader(loader, num_samples=n)."
            )
        for field_name in ("sampling", "shuffle", "sampler", "batch_sampler"):
            if getattr(self, field_name) is not None:
                raise InvalidArgumentError(
                    f"{field_name}: the data set is a {name}, which has an order of its own; leave it out, "
                    "and shuffle in the data set."
                )


def is_iterable(dataset: Any) -> bool:
    """Whether a data set is read in an order of its own, not by index."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


class _Plain:
    """Shows a spec's fields to the pickler as attributes, so that errors name them."""

    def __init__(self, spec: LoaderSpec) -> None:
        self.__dict__.update({one.name: getattr(spec, one.name) for one in dataclasses.fields(spec)})

    def spec(self) -> LoaderSpec:
        return _restore(self.__dict__)


def _restore(values: dict[str, Any]) -> LoaderSpec:
    """A validated spec from its fields, without validating (or rebuilding anything) again."""
    spec = object.__new__(LoaderSpec)
    spec._set(**values)
    return spec
