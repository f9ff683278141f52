"""Observables that a user declares: losses on other data, and functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from types import SimpleNamespace
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from devsample.data.spec import LoaderSpec
from devsample.errors import InvalidArgumentError
from devsample.types import EvaluateFn

RECORD = (
    *("chain", "draw", "step", "loss", "baseline", "llc", "init_loss", "nbeta"),
    *("model", "optimizer", "batch", "device"),
)


class _Travels:
    """Shows the fields of ``loader_spec`` to the pickler as attributes, so that errors name them."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        if state["loader_spec"] is not None:
            state["restore"], (values,) = state["loader_spec"].__reduce__()
            state["loader_spec"] = SimpleNamespace(**values)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore = state.pop("restore", None)
        vars(self).update(state)
        if restore is not None:
            vars(self)["loader_spec"] = restore(vars(state["loader_spec"]))


@dataclass(frozen=True)
class LossOn(_Travels):
    """Mean loss of w_t on a data set, at every draw; at w* it is computed once.

    Every chain process reads the data through a loader of its own, always the same samples. If they
    take up to 64 MiB they are read once and stay on the device, else they are read again at every
    draw. The mean is by sample, or by weight if ``evaluate`` returns weights.

    Args:
        name: its column in the table of draws.
        loader_spec: the recipe for the data (or a DataLoader); None: the run's own data.
        num_samples: how many samples, evenly spread over the data set (of a stream, or with a sampler of
            one's own: as they come); None: all.
        evaluate: ``evaluate(model, batch)``; None: the run's. It needs no gradient: an accuracy will do.

    Raises:
        InvalidArgumentError: naming the field.
    """

    name: str
    loader_spec: LoaderSpec | None = None
    num_samples: int | None = None
    evaluate: EvaluateFn | None = None

    by_sample: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_data(self)

    @property
    def columns(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of what is recorded."""
        return ((self.name, ()),)


@dataclass(frozen=True)
class SampleLosses(_Travels):
    """The losses of m fixed samples, one by one, at every draw: for `functional_variance` and the like.

    They are in ``result[name + "/trace"]``, shape (num_chains, num_draws, m), and not in the table of draws.
    ``evaluate`` must return per-sample losses: shape (batch,), or (batch, ...), averaged over the rest, by
    weight if it returns weights. A sample of weight 0 has no loss, and is an error before the first chain.

    Args:
        name: of the record.
        num_samples: m ≥ 1, evenly spread over the data set. A draw takes 8 m bytes.
        loader_spec: the recipe for the data (or a DataLoader); None: the run's own data.
        evaluate: ``evaluate(model, batch)``; None: the run's.

    Raises:
        InvalidArgumentError: naming the field.
    """

    name: str = "sample_losses"
    num_samples: int = 256
    loader_spec: LoaderSpec | None = None
    evaluate: EvaluateFn | None = None

    by_sample: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_data(self)
        if self.num_samples is None:
            raise InvalidArgumentError("SampleLosses: num_samples: expected an integer ≥ 1, got None.")

    @property
    def columns(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of what is recorded."""
        return ((self.name, (self.num_samples,)),)


@dataclass(frozen=True)
class Function:
    """A function of the user's, called at every draw; it returns one number.

    Args:
        name: its column in the table of draws.
        function: takes keywords of `RECORD`, or (model, batch) by position.
    """

    name: str
    function: Callable[..., Any]

    def __post_init__(self) -> None:
        self.accepted()

    @property
    def columns(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of what is recorded."""
        return ((self.name, ()),)

    def accepted(self) -> tuple[str, ...] | int:
        """The keywords that it is called with, or how many of (model, batch) it takes by position.

        Raises:
            InvalidArgumentError: it asks for something else.
        """
        try:
            parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):  # a compiled function without a signature
            return 2
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            return RECORD
        named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        required = [
            one for one in parameters if one.default is one.empty and one.kind is not one.VAR_POSITIONAL
        ]
        if all(one.name in RECORD and one.name in named for one in required):
            return tuple(name for name in named if name in RECORD)
        if len(required) <= 2 and all(one.kind is not one.KEYWORD_ONLY for one in required):
            return len(required)
        raise InvalidArgumentError(
            f"observables: {self.name!r}: the function takes {', '.join(one.name for one in required)}; it "
            f"may take (model, batch), or keywords of {', '.join(RECORD)}."
        )

    def __call__(self, record: dict[str, Any]) -> Any:
        """Call the function with what it takes of ``record``."""
        accepted = self.accepted()
        if isinstance(accepted, int):
            return self.function(*(record["model"], record["batch"])[:accepted])
        return self.function(**{name: record[name] for name in accepted})


Declared = LossOn | SampleLosses


def _check_data(one: Any) -> None:
    kind = type(one).__name__
    if not isinstance(one.name, str) or not one.name:
        raise InvalidArgumentError(f"{kind}: name: expected the name of a column, got {one.name!r}.")
    if isinstance(one.loader_spec, DataLoader):
        object.__setattr__(one, "loader_spec", LoaderSpec.from_dataloader(one.loader_spec))
    if not isinstance(one.loader_spec, LoaderSpec | None):
        raise InvalidArgumentError(
            f"{kind}: loader_spec: expected a LoaderSpec or None, got {one.loader_spec!r}."
        )
    count = one.num_samples
    if count is not None and (isinstance(count, bool) or not isinstance(count, Integral) or count < 1):
        raise InvalidArgumentError(f"{kind}: num_samples: expected an integer ≥ 1, got {count!r}.")
    if one.evaluate is not None and not callable(one.evaluate):
        raise InvalidArgumentError(
            f"{kind}: evaluate: expected evaluate(model, batch), got {one.evaluate!r}."
        )
