"""From what ``evaluate`` returns to one loss, and the inverse temperature nβ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sized
from numbers import Integral
from typing import Any

import torch

from devsample.averages import Sums, Weighted, counted, weighted, weights_in
from devsample.errors import EvaluateError, InvalidArgumentError
from devsample.types import EvaluateFn

NbetaRule = float | str | Callable[[int], float] | None


def default_evaluate(model: torch.nn.Module, batch: Any) -> Any:
    """``model(**batch)`` for a mapping, else ``model(batch)``: for models that return their loss."""
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


def resolve_evaluate(evaluate: EvaluateFn | None) -> EvaluateFn:
    """The user's function, or `default_evaluate`."""
    if evaluate is None:
        return default_evaluate
    if not callable(evaluate):
        raise InvalidArgumentError(f"evaluate: expected evaluate(model, batch), got {evaluate!r}.")
    return evaluate


def read_loss(output: Any) -> torch.Tensor:
    """The mean loss, a scalar tensor, in whatever form ``evaluate`` returned it.

    Args:
        output: a scalar; per-sample losses (any shape, averaged); ``(loss, ...)``; a mapping with
            ``"loss"``; or an object with ``.loss``. A mapping with ``"weights"``, or an object with
            ``.weights``, or ``{"loss_sum": ..., "count": ...}`` gives Σ w ℓ / Σ w.

    Raises:
        EvaluateError: there is no loss in it, or the weights are of a wrong kind or shape.
    """
    found = read_output(output)
    return found.total / found.weight if isinstance(found, Sums) else found


def read_output(output: Any) -> torch.Tensor | Sums:
    """What ``evaluate`` returned, see `read_loss`, as its mean loss; with weights, as sums.

    Raises:
        EvaluateError: see `read_loss`.
    """
    found = find_losses(output)
    if isinstance(found, Weighted):
        return found.sums()
    return found if found.ndim == 0 else found.mean()


def find_losses(output: Any) -> torch.Tensor | Weighted:
    """The losses that are in what ``evaluate`` returned, of any shape, with their weights if it gives some.

    Raises:
        EvaluateError: see `read_loss`.
    """
    if isinstance(output, Mapping) and "loss_sum" in output:
        if "count" not in output:
            raise EvaluateError('evaluate returned a "loss_sum" without a "count"; return both.')
        return counted(output["loss_sum"], output["count"])
    weights = weights_in(output)
    if weights is None:
        return find_loss(output)
    if isinstance(output, tuple):  # one with names
        output = {"loss": getattr(output, "loss", None)}
    return weighted(find_loss(output), weights)


def find_loss(output: Any) -> torch.Tensor:
    """The loss that is in what ``evaluate`` returned, of any shape; see `read_loss`.

    Raises:
        EvaluateError: there is none.
    """
    loss = output
    if isinstance(loss, Mapping) and "loss" in loss:
        loss = loss["loss"]
    elif isinstance(loss, tuple) and len(loss):
        loss = loss[0]
    elif not isinstance(loss, torch.Tensor) and getattr(loss, "loss", None) is not None:
        loss = loss.loss
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point() or loss.numel() == 0:
        raise EvaluateError(
            f"evaluate returned a {type(output).__name__} without a loss. Return a floating point tensor, "
            '(loss, ...), {"loss": ...}, an object with .loss, or {"loss_sum": ..., "count": ...}. '
            "Without evaluate, the model itself must return one of these."
        )
    return loss


def nbeta_for(data: int | Sized | Any, rule: NbetaRule = None, *, batch_size: int | None = None) -> float:
    r"""Inverse temperature times sample count, nβ.

    .. math:: n\beta = \frac{n}{\ln n}

    Args:
        data: n ≥ 1, the number of samples, or anything with a length: a data set, or a
            DataLoader or LoaderSpec (the length of its data set).
        rule: None or "n/ln n"; "batch": B/ln B of the batch size (devinterp's default); a number,
            used as it is; or a function of n.
        batch_size: B, for "batch"; taken from ``data`` if that is a loader or a spec.

    Returns:
        nβ > 0.

    References:
        S. Watanabe, "A widely applicable Bayesian information criterion", JMLR 14 (2013): β = 1/ln n.

    Examples:
        >>> round(nbeta_for(1000), 2)
        144.76
        >>> round(nbeta_for(1000, "batch", batch_size=64), 2)
        15.39
    """
    if batch_size is None:
        batch_size = getattr(data, "batch_size", None)
    if rule is None or rule == "n/ln n":
        return _n_over_log(_count(data))
    if rule == "batch":
        if batch_size is None:
            raise InvalidArgumentError('nbeta: the rule "batch" needs a batch size.')
        return _n_over_log(batch_size)
    value = rule(_count(data)) if callable(rule) else rule
    if isinstance(value, (str, bool)) or not (value > 0 and math.isfinite(value)):
        raise InvalidArgumentError(
            f'nbeta: expected a number > 0, "batch", "n/ln n" or a function of n, got {rule!r}.'
        )
    return float(value)


def _count(data: Any) -> int:
    if isinstance(data, Integral) and not isinstance(data, bool):
        return int(data)
    if hasattr(data, "sample_count"):  # a LoaderSpec
        return int(data.sample_count(data.make_dataset()))
    data = getattr(data, "dataset", data)
    try:
        return len(data)
    except TypeError as error:
        raise InvalidArgumentError(f"data: {type(data).__name__} has no length; give n itself.") from error


def _n_over_log(n: int) -> float:
    if n < 1:
        raise InvalidArgumentError(f"nbeta: expected n ≥ 1, got {n}.")
    return n / math.log(n) if n > 1 else 1.0
