"""A LoaderSpec as plain values, as they stand in JSON or TOML, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from devsample.data.fields import FUNCTIONS
from devsample.data.importing import ImportPath, nearest, path_of, plain
from devsample.errors import InvalidArgumentError
from devsample.machine import default_worker_start_method
from devsample.serialize import type_name

if TYPE_CHECKING:
    from devsample.data.spec import LoaderSpec

NO_BATCHING = "none"  # batch_size=None: TOML has no null


def as_dict(spec: LoaderSpec) -> dict[str, Any]:
    """The fields of ``spec`` that are not at their defaults, as plain values.

    Raises:
        InvalidArgumentError: a field holds an object that plain values cannot say.
    """
    values: dict[str, Any] = {}
    for one in dataclasses.fields(spec):
        value = getattr(spec, one.name)
        if _is_default(one, value):
            continue
        if one.name in FUNCTIONS:
            values[one.name] = _path(one.name, value)
        elif one.name == "batch_size" and value is None:
            values[one.name] = NO_BATCHING
        elif one.name in ("sampler", "batch_sampler") and not isinstance(value, (list, tuple)):
            raise InvalidArgumentError(
                f"{one.name}: a {type_name(value)} cannot be written as plain values; only a list of "
                "indices can."
            )
        else:
            values[one.name] = plain(_listed(value), one.name)
    return values


def from_dict(kind: type[LoaderSpec], values: Mapping[str, Any]) -> LoaderSpec:
    """The spec that plain values stand for.

    Raises:
        InvalidArgumentError: there is no such field, or no data set, or a value cannot be used.
    """
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(f"expected a mapping of LoaderSpec's fields, got {values!r}.")
    known = [one.name for one in dataclasses.fields(kind)]
    for name in values:
        if name not in known:
            raise InvalidArgumentError(f"{name}: LoaderSpec has no such field.{nearest(str(name), known)}")
    if "dataset" not in values:
        raise InvalidArgumentError(
            'dataset: is missing; give the import path of its factory ("package.module:function").'
        )
    given = dict(values)
    if given.get("batch_size") == NO_BATCHING:
        given["batch_size"] = None
    return kind(**given)


def _is_default(one: dataclasses.Field[Any], value: Any) -> bool:
    if one.name == "multiprocessing_context":  # the default of another machine may be another one
        return value in (None, default_worker_start_method())
    if isinstance(value, (tuple, dict)) and not value:
        return True
    return type(value) is type(one.default) and bool(value == one.default)


def _path(name: str, value: Any) -> str:
    if isinstance(value, ImportPath):
        return value.path
    known = path_of(value) if callable(value) else None
    remedy = f"Give its import path, {known!r}." if known else "Give the import path of a function."
    raise InvalidArgumentError(
        f"{name}: a {type_name(value)} object cannot be written as plain values. {remedy}"
    )


def _listed(value: Any) -> Any:
    """Tuples as lists, as far down as an order of batches goes."""
    return [_listed(one) for one in value] if isinstance(value, (list, tuple)) else value
