"""Loss and gradient of K chains: row by row, or at once over stacked states.

At once, `torch.vmap` runs the user's ``evaluate`` over rows of parameters and of batches, so a step is one
batched forward and backward. Batches that do not fit together are taken row by row; the numbers
agree to the rounding of batched kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from devsample.averages import Gathered, Sums
from devsample.data.batches import children_of, opened, rebuilt
from devsample.data.resident import Together
from devsample.errors import EvaluateError
from devsample.objective import Batch, Objective
from devsample.seeds import ChainKey, NormalBlocks, Role
from devsample.serialize import short_error

Rows = Sequence[Sequence[Batch]]
"""The micro-batches of one step, row by row."""

_DISTANCE = 1e-3  # of the weights' size: how far the second row of the trial is from w*
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-3, torch.float64: 1e-8}  # relative


class NotStackable(Exception):  # noqa: N818 - says why the rows are taken one by one
    """These batches differ in shape or structure, or hold what cannot be stacked."""


class RowByRow:
    """What `Objective` computes for one state, for the K rows of ``position``, one after the other.

    Args:
        objective: the model and ``evaluate``.
        position: states (K, P), read where they are: who moves them need not say so.
        center: w*, shape (P,).
        keys: the chains' keys.

    Attributes:
        weights: Σ w of the rows' last batches, shape (K,); None if losses are averaged by sample.
    """

    def __init__(
        self, objective: Objective, position: torch.Tensor, center: torch.Tensor, keys: Sequence[ChainKey]
    ) -> None:
        self.objective, self.center, self._keys = objective, center, keys
        self.weights: torch.Tensor | None = None
        self._position = list(position)

    def go_to(self, row: int) -> None:
        """Make the model compute with the weights of ``row``."""
        self.objective.flat.go_to(self._position[row])

    def losses_and_gradients(self, gradient: torch.Tensor, batches: Rows, step: int) -> torch.Tensor:
        """Losses (K,), detached; the gradients are written into ``gradient`` (K, P)."""
        losses = []
        for row, (batch, key) in enumerate(zip(batches, self._keys, strict=True)):
            self.go_to(row)
            losses.append(self.objective.loss_and_gradient(gradient[row], batch, key, step))
        return torch.stack(losses)

    def losses(self, batches: Rows, step: int) -> torch.Tensor:
        """Losses (K,) at the rows' states, detached."""
        losses, weights = [], []
        for row, (batch, key) in enumerate(zip(batches, self._keys, strict=True)):
            self.go_to(row)
            losses.append(self.objective.loss(batch, key, step))
            weights += [] if self.objective.weight is None else [self.objective.weight]
        self.weights = torch.stack(weights) if weights else None
        return torch.stack(losses)

    def center_losses(self, batches: Rows, step: int) -> torch.Tensor:
        """Losses (K,) of the rows' batches at w*, detached."""
        self.objective.flat.go_to(self.center)
        losses = [
            self.objective.loss(batch, key, step) for batch, key in zip(batches, self._keys, strict=True)
        ]
        return torch.stack(losses)


class Stacked(RowByRow):
    """The same for all rows at once.

    Attributes:
        given_up: why the rows are taken one by one after all, for an operation that the trial of
            `why_not_stackable` has not met; or "".
    """

    def __init__(
        self, objective: Objective, position: torch.Tensor, center: torch.Tensor, keys: Sequence[ChainKey]
    ) -> None:
        super().__init__(objective, position, center, keys)
        self.given_up = ""
        segments = objective.flat.segments
        self._places = _places(objective.model, [one.parameter for one in segments])
        self._leaves = [
            _shaped(position[:, one.start : one.stop], one).detach().requires_grad_() for one in segments
        ]
        self._center = [_shaped(center[None, one.start : one.stop], one)[0].detach() for one in segments]

    def losses_and_gradients(self, gradient: torch.Tensor, batches: Rows, step: int) -> torch.Tensor:
        """Losses (K,), detached; the gradients are written into ``gradient`` (K, P)."""
        together = self._if_possible(lambda stacks: self.gradients_together(gradient, stacks), batches)
        return super().losses_and_gradients(gradient, batches, step) if together is None else together

    def losses(self, batches: Rows, step: int) -> torch.Tensor:
        """Losses (K,) at the rows' states, detached."""
        together = self._if_possible(lambda stacks: self._mean(self._leaves, 0, stacks), batches)
        return super().losses(batches, step) if together is None else together

    def center_losses(self, batches: Rows, step: int) -> torch.Tensor:
        """Losses (K,) of the rows' batches at w*, detached."""
        together = self._if_possible(self.center_together, batches)
        return super().center_losses(batches, step) if together is None else together

    def gradients_together(self, gradient: torch.Tensor, stacks: Stacks) -> torch.Tensor:
        """`losses_and_gradients` of batches that are stacked."""
        value: torch.Tensor | None = None
        gathered = Gathered()
        for number, (share, stack) in enumerate(stacks):
            found = self._losses(self._leaves, 0, stack)
            if isinstance(found, Sums):
                losses, share = gathered.take(found), 1.0
            else:
                losses = found
            if not losses.requires_grad:
                raise EvaluateError(
                    "evaluate returned a loss that does not depend on the moving parameters of the model."
                )
            parts = torch.autograd.grad(losses.sum() * share, self._leaves, allow_unused=True)
            self._write(gradient, parts, add=number > 0)
            losses = losses.detach() * share
            value = losses if value is None else value + losses
        assert value is not None
        factor = self.objective.finish(gathered)
        if factor is not None:
            gradient.mul_(factor[:, None])
            value = value * factor
        return value

    def center_together(self, stacks: Stacks) -> torch.Tensor:
        """`center_losses` of batches that are stacked."""
        return self._mean(self._center, None, stacks)

    def _if_possible(self, compute: Callable[[Stacks], torch.Tensor], batches: Rows) -> torch.Tensor | None:
        """What ``compute`` makes of the stacked batches; None if the rows are to be taken one by one."""
        if self.given_up:
            return None
        try:
            return compute(stacks_of(batches))
        except NotStackable:  # the last batches of an epoch, for one
            return None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # if it is evaluate's own, it comes again, of one row and named
            self.given_up = short_error(error)[:300]
            return None

    @torch.no_grad()
    def _mean(self, values: list[torch.Tensor], dim: int | None, stacks: Stacks) -> torch.Tensor:
        parts, gathered = [], Gathered()
        for share, stack in stacks:
            found = self._losses(values, dim, stack)
            parts.append(gathered.take(found) if isinstance(found, Sums) else found * share)
        losses, factor = torch.stack(parts).sum(0), self.objective.finish(gathered)
        self.weights = self.objective.weight
        return losses if factor is None else losses * factor

    def _losses(self, values: list[torch.Tensor], dim: int | None, stack: Stack) -> torch.Tensor | Sums:
        def loss(values: list[torch.Tensor], leaves: list[torch.Tensor]) -> torch.Tensor | Sums:
            with self._with_weights(values), self.objective.autocast():
                output = self.objective.evaluate(self.objective.model, opened(stack.batch(leaves)))
                return self.objective.read(output)

        if dim is None and stack.dim is None:  # nothing differs between the rows
            alone = loss(values, stack.leaves)
            if isinstance(alone, Sums):
                return Sums(*(one.expand(len(self._keys)) for one in alone))
            return alone.expand(len(self._keys))
        result: torch.Tensor | Sums = torch.vmap(loss, (dim, stack.dim), randomness="error")(
            values, stack.leaves
        )
        return result

    @contextlib.contextmanager
    def _with_weights(self, values: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the model compute with ``values`` in the place of its moving parameters."""
        segments = self.objective.flat.segments
        for places, one, value in zip(self._places, segments, values, strict=True):
            whole = value.to(one.parameter.dtype)
            if one.entries is not None:
                whole = one.parameter.detach().flatten().scatter(0, one.entries, whole)
                whole = whole.view(one.parameter.shape)
            for module, name in places:
                module._parameters[name] = whole  # type: ignore[assignment]
        try:
            yield
        finally:
            for places, one in zip(self._places, segments, strict=True):
                for module, name in places:
                    module._parameters[name] = one.parameter

    def _write(self, gradient: torch.Tensor, parts: Sequence[torch.Tensor | None], *, add: bool) -> None:
        for one, part in zip(self.objective.flat.segments, parts, strict=True):
            target = gradient[:, one.start : one.stop]
            if part is None:
                target.zero_() if not add else None
            elif add:
                target.add_(part.reshape(target.shape))
            else:
                target.copy_(part.reshape(target.shape))


def why_not_stackable(
    objective: Objective, center: torch.Tensor, steps: Sequence[Sequence[Batch]], key: ChainKey
) -> str:
    """Why this model is taken row by row, or "" if its rows can be stacked.

    Two rows, one at w* and one beside it, are computed both ways and compared.
    """
    if objective.seeded:
        return "evaluate draws random numbers"
    if objective.needs_grad:
        return "evaluate differentiates on its own"
    normals = NormalBlocks([key], center.numel(), center.dtype, center.device, Role.PILOT)
    scale = _DISTANCE * float(center.abs().mean()) + 1e-6
    position = torch.stack([center, center + scale * normals.plain(0)[0]])
    batches = [steps[0], steps[1 % len(steps)]]
    alone, together = torch.zeros_like(position), torch.zeros_like(position)
    expected = []
    for number in range(2):
        objective.flat.point_to(position[number])
        expected.append(objective.loss_and_gradient(alone[number], batches[number], key, number))
    objective.flat.point_to(center)
    try:
        stacks = stacks_of(batches)
        stacked = Stacked(objective, position, center, [key, key])
        with quiet():
            found = stacked.gradients_together(together, stacks)
            at_center = stacked.center_together(stacks)
    except NotStackable as error:
        return str(error)
    except Exception as error:  # whatever torch.vmap does not know
        return f"torch.vmap refuses it ({short_error(error)[:300]})"
    tolerance = max(_TOLERANCE[dtype] for dtype in _precisions(objective))
    losses = torch.stack(expected).to(found.dtype)
    found = torch.cat([found, at_center[:1]])
    losses = torch.cat([losses, losses[:1]])  # the first row is at w*
    if not torch.allclose(found, losses, rtol=tolerance, atol=tolerance * float(losses.abs().max())):
        return "its vectorised form gives other losses"
    if not (together - alone).norm() <= tolerance * 10 * alone.norm():
        return "its vectorised form gives other gradients"
    return ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remark that it takes an operation row by row within a vectorised model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def _precisions(objective: Objective) -> set[torch.dtype]:
    """In which the model computes."""
    tensors = (*objective.model.parameters(), *objective.model.buffers())
    found = {one.dtype for one in tensors if one.is_floating_point()}
    if objective.autocast_dtype is not None:
        found.add(objective.autocast_dtype)
    return found & _TOLERANCE.keys()


# ---- parameters ---------------------------------------------------------------------------------


def _shaped(rows: torch.Tensor, segment: Any) -> torch.Tensor:
    """A piece of the stacked states in the shape of its parameter, if that moves as a whole."""
    if segment.entries is not None:
        return rows
    return rows.view(len(rows), *segment.parameter.shape)


def _places(
    model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]
) -> list[list[tuple[torch.nn.Module, str]]]:
    """Where each parameter stands in the model: more than one place if it is tied."""
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    places: list[list[tuple[torch.nn.Module, str]]] = [[] for _ in parameters]
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in numbers:
                places[numbers[id(parameter)]].append((module, name))
    return places


# ---- batches ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Stack:
    """Batches of K rows: their tensors stacked, in the structure of the first."""

    like: Any
    leaves: list[torch.Tensor]
    dim: int | None  # None: the rows share one batch

    def batch(self, leaves: Sequence[torch.Tensor]) -> Any:
        """A batch with these tensors."""
        return rebuilt(self.like, leaves)


Stacks = Sequence[tuple[float, Stack]]
"""Share of the step's samples and stacked data, micro-batch by micro-batch."""


def stacks_of(batches: Rows) -> Stacks:
    """The batches of all rows, stacked.

    Raises:
        NotStackable: they do not fit together.
    """
    if isinstance(batches, Together):
        total = sum(count for count, _ in batches.micros)
        return [(count / total, Stack(batches.like, leaves, 0)) for count, leaves in batches.micros]
    counts = [[count for count, _ in row] for row in batches]
    if any(one != counts[0] for one in counts):
        raise NotStackable("the chains' batches differ in size")
    total = sum(counts[0])
    return [
        (count / total, _stack([row[micro][1] for row in batches])) for micro, count in enumerate(counts[0])
    ]


def _stack(rows: Sequence[Any]) -> Stack:
    leaves, rest = _taken_apart(rows[0])
    if all(one is rows[0] for one in rows):
        return Stack(rows[0], leaves, None)
    columns = [leaves]
    shapes = [one.shape for one in leaves]
    for row in rows[1:]:
        leaves, other = _taken_apart(row)
        if other != rest or [one.shape for one in leaves] != shapes:
            raise NotStackable("the chains' batches differ in shape or in what is not a tensor")
        columns.append(leaves)
    stacked = [torch.stack(column) for column in zip(*columns, strict=True)]
    return Stack(rows[0], stacked, 0 if stacked else None)


def _taken_apart(batch: Any) -> tuple[list[torch.Tensor], list[Any]]:
    leaves: list[torch.Tensor] = []
    rest: list[Any] = []
    _walk(batch, leaves, rest)
    return leaves, rest


def _walk(batch: Any, leaves: list[torch.Tensor], rest: list[Any]) -> None:
    """Collect the tensors of a batch, and whatever must be the same in all rows."""
    if isinstance(batch, torch.Tensor):
        if batch.layout is not torch.strided:
            raise NotStackable("a batch holds a sparse tensor")
        leaves.append(batch)
        rest.append(batch.dtype)
        return
    rest.append(type(batch))
    if isinstance(batch, (str, bytes, int, float, complex, type(None))):
        rest.append(batch)
        return
    children = children_of(batch)
    if children is None:
        raise NotStackable(f"a batch holds a {type(batch).__name__}, which is not known to stack")
    for key, value in children:
        rest.append(key)
        _walk(value, leaves, rest)
