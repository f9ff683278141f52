"""LoaderSpec: the recipe for a DataLoader that every chain process builds for itself."""

from __future__ import annotations

import dataclasses
import inspect
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from devsample.errors import FeatureNotAvailableError, InvalidArgumentError, LoaderError
from devsample.machine import default_worker_start_method
from devsample.serialize import Packed, pack, type_name

if TYPE_CHECKING:
    from torch.utils.data import Sampler

Sampling = Literal["iid", "epoch", "sequential"]
_SAMPLINGS = ("iid", "epoch", "sequential")
_WITHOUT_WORKERS: dict[str, Any] = {
    "prefetch_factor": None,
    "persistent_workers": True,
    "timeout": 0.0,
    "multiprocessing_context": None,
}
REMEDY = (
    "Build it where it is used: pass a factory (LoaderSpec(make_dataset, ...)) that makes it in "
    "the chain process, or drop it in __getstate__."
)


@dataclass(frozen=True, eq=False, repr=False)
class LoaderSpec:
    """A recipe for a DataLoader: a data set, or a function that makes it, and DataLoader keywords.

    Every chain process builds its own loader from it, with its own loader workers. What travels
    is the recipe, so the data set may hold what cannot be pickled if the factory makes it there.

    Each chain draws independent, uniform minibatches by default (with replacement), from a stream
    of its own that depends on (seed, chain, step) only: the same batches for any number of
    workers. torch, numpy and random are seeded once per batch where it is made, so augmentation
    is part of that stream. Chains that shared batches would
    seem to agree more than they do.

    Args:
        dataset: a map-style data set, or a function, class or closure that returns one when
            called with ``dataset_args`` and ``dataset_kwargs``.
        dataset_args: positional arguments of the factory.
        dataset_kwargs: keyword arguments of the factory.
        batch_size: samples per micro-batch, ≥ 1; None: an item of the data set is a batch.
        sampling: "iid" (the default), "epoch" (a new permutation per epoch and chain) or
            "sequential" (data order). With the last two the recorded losses are read on separate
            iid batches, since a loss read on the batch just fitted is biased.
        num_samples: n, the number of samples, where the data set has no ``len`` or its items are
            batches.
        shuffle: True means iid. False is refused: say ``sampling="sequential"``.
        sampler: a sampler object; keeps its order. Its random state is keyed by (seed, chain).
        batch_sampler: a sampler of lists of indices; keeps its order.
        num_workers: loader worker processes per chain process, ≥ 0.
        collate_fn: as for DataLoader.
        pin_memory: None: on if the chain runs on CUDA.
        drop_last: leave out a ragged last batch of an epoch.
        timeout: seconds to wait for a batch from a worker, 0 for no limit.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: how workers start: "forkserver" (the default where it exists),
            "spawn" or "fork".
        generator: accepted for compatibility and not used: the run's seed gives the order.
        prefetch_factor: batches each worker makes ahead.
        persistent_workers: keep workers between the chains of a process (the default).
        pin_memory_device: as for DataLoader.
        in_order: must be True: a stream has an order.
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
    worker_dataset: Literal["auto", "pickle", "rebuild"] = "auto"

    def __post_init__(self) -> None:
        self._check_factory_arguments()
        self._check_numbers()
        if self.batch_size is None and self.drop_last:
            raise InvalidArgumentError("drop_last: has no meaning with batch_size=None; drop it.")
        self._check_dataset()
        self._check_order()
        self._check_workers()

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
        if not isinstance(loader, DataLoader):
            raise InvalidArgumentError(
                f"loader: expected a torch.utils.data.DataLoader, got {type(loader).__name__}. For any "
                "other pipeline write a data set factory and pass loader_spec=LoaderSpec(factory, ...)."
            )
        for method in ("__iter__", "_get_iterator", "__getattribute__"):
            if getattr(type(loader), method) is not getattr(DataLoader, method):
                raise InvalidArgumentError(
                    f"loader: {type(loader).__name__} overrides DataLoader.{method}, which a recipe "
                    "cannot hold. Write what it does as a data set factory and pass a LoaderSpec."
                )
        fields: dict[str, Any] = {
            name: getattr(loader, name)
            for name in (
                "dataset", "num_workers", "collate_fn", "drop_last", "timeout", "worker_init_fn",
                "multiprocessing_context", "pin_memory_device", "in_order",
            )
        }  # fmt: skip
        fields.update(_order_fields(loader))
        fields["pin_memory"] = loader.pin_memory or None
        if loader.num_workers > 0:
            fields["prefetch_factor"] = loader.prefetch_factor
        return cls(**(fields | changes))

    def build(
        self,
        *,
        seed: int = 0,
        chain: int = 0,
        grad_accum_steps: int = 1,
        num_steps: int | None = None,
        device: torch.device | str = "cpu",
    ) -> DataLoader[Any]:
        """The DataLoader of one chain in this process.

        It gives the micro-batches of steps 0, 1, 2, … in order, ``grad_accum_steps`` a step, on
        the CPU, and does not end unless ``num_steps`` is given.

        Args:
            seed: the run's seed.
            chain: the chain's number.
            grad_accum_steps: micro-batches per step.
            num_steps: how many steps to serve.
            device: the chain's device (decides about pinning only).
        """
        from devsample.data.loader import ChainLoader
        from devsample.seeds import chain_keys

        keys = chain_keys(seed, chain + 1)
        served = ChainLoader(self, keys, grad_accum_steps=grad_accum_steps, device=torch.device(device))
        return served.as_dataloader(chain, num_steps)

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

    def make_dataset(self) -> Any:
        """The data set: the one given, or a new one from the factory."""
        dataset = self.dataset
        if self.is_factory:
            try:
                dataset = self.dataset(*self.dataset_args, **(self.dataset_kwargs or {}))
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
        shown = [
            self.dataset.__qualname__
            if hasattr(self.dataset, "__qualname__")
            else f"<{type_name(self.dataset)}>"
        ]
        for one in dataclasses.fields(self)[1:]:
            value = getattr(self, one.name)
            if one.repr and value != one.default and value not in ((), {}):
                shown.append(f"{one.name}={value!r}")
        return f"LoaderSpec({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return _restore, (values,)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_factory_arguments(self) -> None:
        if isinstance(self.dataset_args, (str, bytes)) or not isinstance(self.dataset_args, Sequence):
            raise InvalidArgumentError(
                f"dataset_args: expected a list of arguments, got {self.dataset_args!r}."
            )
        if not isinstance(self.dataset_kwargs, Mapping | None):
            raise InvalidArgumentError(f"dataset_kwargs: expected a mapping, got {self.dataset_kwargs!r}.")
        self._set(
            dataset_args=tuple(self.dataset_args),
            dataset_kwargs=dict(self.dataset_kwargs or {}),
            generator=None,
        )

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
            self._check_call()
        else:
            self._check_made(self.dataset)

    def _check_call(self) -> None:
        try:
            signature = inspect.signature(self.dataset)
        except (TypeError, ValueError):
            return  # some builtins do not tell
        try:
            signature.bind(*self.dataset_args, **(self.dataset_kwargs or {}))
        except TypeError as error:
            raise InvalidArgumentError(
                f"dataset_args, dataset_kwargs: do not fit {self.dataset!r}{signature}: {error}."
            ) from error

    def _check_made(self, dataset: Any) -> None:
        where = "dataset: the factory returned" if self.is_factory else "dataset:"
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise FeatureNotAvailableError(
                f"{where} a {type(dataset).__name__}, which has no items by index; this version of "
                "devsample takes map-style data sets (with __getitem__ and __len__) only."
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
        if self.batch_size is not None and count != items:
            raise InvalidArgumentError(
                f"num_samples: {count} is not the length of the data set, {items}; leave it out."
            )

    def _check_numbers(self) -> None:
        for name, lowest in (
            ("batch_size", 1),
            ("num_samples", 1),
            ("num_workers", 0),
            ("prefetch_factor", 1),
        ):
            value = getattr(self, name)
            optional = name != "num_workers"
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < lowest:
                raise InvalidArgumentError(f"{name}: expected an integer ≥ {lowest}, got {value!r}.")
            self._set(**{name: int(value)})
        if not isinstance(self.timeout, (int, float)) or self.timeout < 0:
            raise InvalidArgumentError(f"timeout: expected seconds ≥ 0, got {self.timeout!r}.")
        for name in ("collate_fn", "worker_init_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise InvalidArgumentError(f"{name}: expected a function, got {getattr(self, name)!r}.")
        if not self.in_order:
            raise InvalidArgumentError("in_order: a stream of batches has an order; leave it True.")

    def _check_order(self) -> None:
        if self.sampling not in (None, *_SAMPLINGS):
            raise InvalidArgumentError(f"sampling: expected one of {_SAMPLINGS}, got {self.sampling!r}.")
        if self.shuffle not in (None, True, False):
            raise InvalidArgumentError(f"shuffle: expected True or None, got {self.shuffle!r}.")
        if self.shuffle is False:
            raise InvalidArgumentError(
                'shuffle: False is ambiguous here. For data order say sampling="sequential"; leave it '
                "out for independent random batches."
            )
        given = [
            name
            for name in ("sampling", "shuffle", "sampler", "batch_sampler")
            if getattr(self, name) is not None and getattr(self, name) is not False
        ]
        if len(given) > 1:
            raise InvalidArgumentError(f"{', '.join(given)}: mutually exclusive; give one of them.")
        for name in ("sampler", "batch_sampler"):
            self._check_sampler(name, getattr(self, name))
        if self.batch_sampler is not None and (self.batch_size != 1 or self.drop_last):
            raise InvalidArgumentError(
                "batch_sampler: mutually exclusive with batch_size and drop_last; drop those."
            )

    def _check_sampler(self, name: str, sampler: Any) -> None:
        if sampler is None:
            return
        if isinstance(sampler, DistributedSampler) or isinstance(
            getattr(sampler, "sampler", None), DistributedSampler
        ):
            raise InvalidArgumentError(
                f"{name}: a DistributedSampler gives a part of the data, but every chain needs all of "
                "it. Leave it out; chains already draw their own batches."
            )
        if not hasattr(sampler, "__iter__") or isinstance(sampler, Iterator):
            raise InvalidArgumentError(
                f"{name}: expected a sampler that can be iterated again, got {sampler!r}."
            )
        if not hasattr(sampler, "__len__"):
            raise InvalidArgumentError(
                f"{name}: {type(sampler).__name__} needs a __len__ (an epoch must end)."
            )

    def _check_workers(self) -> None:
        context = self.multiprocessing_context
        if context is not None and not isinstance(context, str):
            if not hasattr(context, "get_start_method"):
                raise InvalidArgumentError(
                    f"multiprocessing_context: expected a start method or a context, got {context!r}."
                )
            context = getattr(context, "_name", None) or context.get_start_method()
            self._set(multiprocessing_context=context)
        if context is not None and context not in multiprocessing.get_all_start_methods():
            raise InvalidArgumentError(
                "multiprocessing_context: expected one of "
                f"{multiprocessing.get_all_start_methods()}, got {self.multiprocessing_context!r}."
            )
        if self.worker_dataset not in ("auto", "pickle", "rebuild"):
            raise InvalidArgumentError(
                f'worker_dataset: expected "auto", "pickle" or "rebuild", got {self.worker_dataset!r}.'
            )
        if self.worker_dataset == "rebuild" and not self.is_factory:
            raise InvalidArgumentError('worker_dataset: "rebuild" needs a factory as dataset.')
        if self.num_workers == 0:  # harmless leftovers
            self._set(**_WITHOUT_WORKERS)
        elif context is None:
            self._set(multiprocessing_context=default_worker_start_method())


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


def _order_fields(loader: DataLoader[Any]) -> dict[str, Any]:
    """batch_size, sampler or batch_sampler of an existing loader."""
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": loader.batch_size}
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return {"batch_sampler": loader.batch_sampler, "batch_size": 1, "drop_last": False}
    sampler = loader.sampler
    batched = loader.batch_sampler
    if loader.batch_size is None and type(batched) is BatchSampler:  # batch_sampler=BatchSampler(...)
        sampler = batched.sampler
        fields: dict[str, Any] = {"batch_size": batched.batch_size, "drop_last": batched.drop_last}
    else:
        fields = {"batch_size": loader.batch_size}
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and sampler._num_samples is None
    )
    return fields if plain else fields | {"sampler": sampler}
