"""The recipe behind a DataLoader that exists already."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from devsample.errors import InvalidArgumentError


def fields_of(loader: Any) -> dict[str, Any]:
    """The fields of a LoaderSpec that does what ``loader`` does. The loader is not touched.

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
            "multiprocessing_context", "pin_memory_device",
        )
    }  # fmt: skip
    fields["in_order"] = bool(loader.in_order)  # a DataLoader takes anything for these two
    fields["pin_memory"] = bool(loader.pin_memory) or None
    fields |= _order_fields(loader)
    if loader.num_workers > 0:
        fields["prefetch_factor"] = loader.prefetch_factor
    return fields


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
