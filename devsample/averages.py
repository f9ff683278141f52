r"""Losses averaged by weight: Σ w ℓ / Σ w over all micro-batches of a step, or all batches of a pass.

Weights do not depend on the parameters, so sums and their gradients are added up micro-batch by
micro-batch and divided by the total weight at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from devsample.errors import EvaluateError


class Sums(NamedTuple):
    """Of one micro-batch, scalars; or of K of them, shape (K,).

    Attributes:
        total: Σ w ℓ.
        weight: Σ w, without gradient.
        lowest: the smallest weight, to be checked.
    """

    total: torch.Tensor
    weight: torch.Tensor
    lowest: torch.Tensor


class Weighted(NamedTuple):
    """Weighted losses, in float32 at least.

    Attributes:
        products: w ℓ, of any shape; 0 where w is 0, whatever the loss is there.
        weights: w, of the same shape, without gradient.
    """

    products: torch.Tensor
    weights: torch.Tensor

    def sums(self) -> Sums:
        """Added up."""
        return Sums(self.products.sum(), self.weights.sum(), self.weights.min())

    def by_sample(self) -> Weighted:
        """Added up over all axes but the first."""
        if self.products.ndim < 2:
            return self
        return Weighted(self.products.flatten(1).sum(1), self.weights.flatten(1).sum(1))

    def losses(self) -> torch.Tensor:
        """Σ w ℓ / Σ w of each entry; NaN where the weight is 0."""
        return self.products / self.weights


def weights_in(output: Any) -> Any:
    """The weights that ``evaluate`` returned with its loss, or None."""
    if isinstance(output, Mapping):
        return output.get("weights") if "loss" in output else None
    if isinstance(output, torch.Tensor):
        return None
    return getattr(output, "weights", None)


def weighted(losses: torch.Tensor, weights: Any) -> Weighted:
    """Losses with weights of their shape, or of the first axes and 1.

    Raises:
        EvaluateError: weights that are no tensor, of another shape, or depend on the parameters.
    """
    if not isinstance(weights, torch.Tensor) or weights.is_complex():
        raise EvaluateError(
            f"evaluate returned weights that are a {type(weights).__name__}; return a tensor of the losses' "
            "shape, or that of their first axes: bool (True counts), integers or floating point, ≥ 0."
        )
    shape, like = tuple(weights.shape), tuple(losses.shape)
    fits = len(shape) <= len(like) and (len(shape) > 0) == (len(like) > 0)
    fits = fits and shape[:1] == like[:1]
    if not fits or any(one not in (1, other) for one, other in zip(shape, like, strict=False)):
        raise EvaluateError(
            f"evaluate returned weights of shape {shape} for losses of shape {like}; they must have that "
            "shape, or that of the first axes, such as (batch,) or (batch, 1) for losses (batch, tokens)."
        )
    whole = weights.reshape(shape + (1,) * (len(like) - len(shape))).expand(like)
    return _weighted(losses, whole)


def counted(sums: Any, count: Any) -> Weighted:
    """Sums of losses with what they are sums of: ``{"loss_sum": s, "count": c}``.

    Raises:
        EvaluateError: sums that are not floating point, or counts of another shape.
    """
    if not isinstance(sums, torch.Tensor) or not sums.is_floating_point() or sums.numel() == 0:
        raise EvaluateError(
            'evaluate returned a "loss_sum" that is no floating point tensor with values; return the sum of '
            "the losses as a tensor."
        )
    if isinstance(count, (int, float)) and sums.ndim == 0:
        count = torch.full((), float(count), dtype=_exact(sums), device=sums.device)
    if not isinstance(count, torch.Tensor) or count.shape != sums.shape or count.is_complex():
        found = f"of shape {tuple(count.shape)}" if isinstance(count, torch.Tensor) else f"{count!r}"
        raise EvaluateError(
            f'evaluate returned {{"loss_sum": ..., "count": ...}} with a count {found} for sums of shape '
            f"{tuple(sums.shape)}; return a number for one sum, or a tensor of the sums' shape."
        )
    weights = _constant(count).to(_exact(sums))
    return Weighted(sums.to(weights.dtype), weights)


def _weighted(losses: torch.Tensor, weights: torch.Tensor) -> Weighted:
    constant = _constant(weights).to(_exact(losses))
    counting = torch.where(constant == 0, 0, losses.to(constant.dtype))
    return Weighted(counting * constant, constant)


def _constant(weights: torch.Tensor) -> torch.Tensor:
    if weights.requires_grad:
        raise EvaluateError(
            "evaluate returned weights (or a count) that depend on the parameters, so that they are no "
            "weights of samples; compute them from the batch alone."
        )
    return weights


def _exact(losses: torch.Tensor) -> torch.dtype:
    """Half precision holds no sum, and no count above 2048."""
    return torch.promote_types(losses.dtype, torch.float32)


class Gathered:
    """The micro-batches of a step, one after the other, for one state or for K.

    Sums are kept in units of the first micro-batch's weight, so that they are about as large as a mean.
    """

    def __init__(self) -> None:
        self._unit: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None
        self._lowest: torch.Tensor | None = None
        self._several = False

    def take(self, sums: Sums) -> torch.Tensor:
        """Σ w ℓ of the next micro-batch in units of the first one's weight."""
        if self._unit is None or self._weight is None or self._lowest is None:
            self._unit = torch.where(sums.weight > 0, sums.weight, 1)
            self._weight, self._lowest = sums.weight, sums.lowest
        else:
            self._weight, self._several = self._weight + sums.weight, True
            self._lowest = torch.minimum(self._lowest, sums.lowest)
        return sums.total / self._unit

    @property
    def weight(self) -> torch.Tensor:
        """Σ w of all."""
        assert self._weight is not None
        return self._weight

    @property
    def lowest(self) -> torch.Tensor:
        """The smallest weight."""
        assert self._lowest is not None
        return self._lowest

    @property
    def factor(self) -> torch.Tensor | None:
        """What the sum of `take` is to be multiplied by to be the mean; None: by 1."""
        assert self._unit is not None
        return self._unit / self.weight if self._several else None


class Watch:
    """Sees that weights can be averaged with.

    Args:
        at_once: look at every step's; else `check` waits for the device, once for all steps before.
    """

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self._seen: torch.Tensor | None = None

    def __call__(self, gathered: Gathered, *, may_be_empty: bool) -> None:
        """Look at the weights of a step.

        Raises:
            EvaluateError: at once, see `check`.
        """
        weight = gathered.weight
        least = torch.ones_like(weight).min() if may_be_empty else weight.min()
        found = torch.stack([gathered.lowest.min(), least, -weight.max()])
        if self._at_once:
            _check(found)
        else:
            self._seen = found if self._seen is None else torch.minimum(self._seen, found)

    def check(self) -> None:
        """Check what has been seen so far.

        Raises:
            EvaluateError: weights that are negative or not finite, or a batch whose weights are all 0.
        """
        if self._seen is not None:
            _check(self._seen)


def _check(seen: torch.Tensor) -> None:
    lowest, least, most = seen.tolist()
    if not (lowest >= 0 and math.isfinite(most)):
        value = lowest if not lowest >= 0 else -most
        raise EvaluateError(
            f"evaluate returned weights (or a count) with the value {value:g}; they must be finite and ≥ 0."
        )
    if not least > 0:
        raise EvaluateError(
            "evaluate returned weights (or a count) that are all 0 for a batch, which thus has no mean loss. "
            "Leave samples without weight out of the data set, or take larger batches."
        )
