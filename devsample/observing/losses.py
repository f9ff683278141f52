"""Losses of stacked states on the data of an observable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from devsample.averages import Weighted
from devsample.errors import EvaluateError
from devsample.losses import find_losses
from devsample.objective import Objective
from devsample.observables.declared import Declared
from devsample.observing.sources import Source
from devsample.seeds import ChainKey
from devsample.stacked import RowByRow, Rows

BATCH = 40  # bits of a step's number, in the seeds of what evaluate draws apart from its own batch


class OnData:
    """Mean loss, by sample or weight, or the samples' losses, of K rows on a data set.

    Args:
        one: the observable.
        states: computes at the rows.
        source: the data.
        keys: the rows' keys.
    """

    def __init__(self, one: Declared, states: RowByRow, source: Source, keys: Sequence[ChainKey]) -> None:
        self._by_sample, self._states, self._source, self._keys = one.by_sample, states, source, keys

    def __call__(self, target: torch.Tensor, step: int) -> None:
        """Write into ``target``, shape (1, K) or (samples, K)."""
        with self._states.objective.passing():
            weight = self._add_up(target, step)
        if weight is not None:
            target[0].div_(weight)

    def _add_up(self, target: torch.Tensor, step: int) -> torch.Tensor | None:
        """Σ w of the rows, by which the sums in ``target`` are to be divided, if by anything."""
        rows, seen = target.shape[1], 0
        weight: torch.Tensor | None = None
        if not self._by_sample:
            target.zero_()
        for number, (count, data) in enumerate(self._source):
            batches = [[(count, data)]] * rows
            other = step + ((number + 1) << BATCH)
            if self._by_sample:
                self._each(target[seen : seen + count], batches, other)
            else:
                losses = self._states.losses(batches, other).to(target.dtype)
                if self._states.weights is None:
                    target[0].add_(losses, alpha=count / self._source.count)
                else:
                    here = self._states.weights.to(target.dtype)
                    target[0].add_(torch.where(here > 0, losses * here, 0))
                    weight = here if weight is None else weight + here
            seen += count
        return weight

    def _each(self, target: torch.Tensor, batches: Rows, step: int) -> None:
        states, evaluate = self._states, self._states.objective.evaluate
        assert isinstance(evaluate, PerSample)
        for row in range(target.shape[1]):
            states.go_to(row)
            evaluate.count = batches[row][0][0]
            states.objective.loss(batches[row], self._keys[row], step)
            target[:, row].copy_(evaluate.losses)


class PerSample:
    """An evaluate whose last batch's losses are kept, sample by sample.

    Args:
        evaluate: the user's.

    Attributes:
        losses: of the samples, shape (batch,); with weights, each sample's weighted mean.
        empty: how many samples had weight 0 so far, and thus no loss; None: there are no weights.
    """

    def __init__(self, evaluate: Callable[..., Any]) -> None:
        self._evaluate = evaluate
        self.count: int | None = None
        self.losses = torch.zeros(0)
        self.empty: torch.Tensor | None = None

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        """What ``evaluate`` returns; the losses are kept."""
        output = self._evaluate(model, batch)
        found = find_losses(output)
        loss = found.products if isinstance(found, Weighted) else found
        if loss.ndim == 0 or (self.count is not None and loss.shape[0] != self.count):
            raise EvaluateError(
                f"evaluate returned a loss of shape {tuple(loss.shape)} for {self.count or 'some'} samples; "
                "it must return the loss of each."
            )
        if isinstance(found, Weighted):
            each = found.by_sample()
            empty = (each.weights == 0).sum()
            self.empty = empty if self.empty is None else self.empty + empty
            self.losses = each.losses().detach()
        else:
            self.losses = loss.detach().flatten(1).mean(1) if loss.ndim > 1 else loss.detach()
        return output


def objective_of(one: Declared, run: Objective, about: Mapping[str, Any]) -> Objective:
    """The run's objective with the observable's evaluate."""
    evaluate = one.evaluate or run.evaluate
    return Objective(
        run.model,
        PerSample(evaluate) if one.by_sample else evaluate,
        run.flat,
        train_mode=run.model.training,
        autocast_dtype=run.autocast_dtype,
        seeded=about["random"],
        needs_grad=about["needs_grad"],
        weighted=run.weighted if one.evaluate is None else None,
    )
