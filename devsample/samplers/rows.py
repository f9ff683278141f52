"""Parameters that move together as one flat row, with all that a sampler keeps of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from devsample.samplers.base import Buffers, Kernel

Draw = Callable[[torch.Tensor], torch.Tensor]  # normals of the shape, dtype and device of a tensor


@dataclass(eq=False)
class Member:
    """A parameter and its place in the row."""

    parameter: torch.Tensor
    entries: torch.Tensor | None  # positions of the entries that move; None: all
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of moving entries."""
        return self.stop - self.start

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The moving entries of a tensor of the parameter's shape, flat."""
        flat = (tensor.to_dense() if tensor.is_sparse else tensor).detach().reshape(-1)
        return flat if self.entries is None else flat[self.entries]

    def write(self, values: torch.Tensor) -> None:
        """Put ``values`` into the parameter."""
        target = self.parameter.detach()
        if self.entries is None:
            target.copy_(values.view(target.shape))
            return
        flat = target.reshape(-1)  # a copy, if the parameter is not contiguous
        flat[self.entries] = values.to(target.dtype)
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))


class Row:
    """State of parameters that have made all their steps together.

    Args:
        group: number of their group.
        members: the parameters, one after the other.
        center: w*, shape (P,).
        position: w in the precision in which it moves, shape (1, P).
        buffers: the kernel's.
        noise: the last noise drawn, which the next step shares; None before the first.
        steps: number of steps made.
    """

    def __init__(
        self,
        group: int,
        members: Sequence[Member],
        center: torch.Tensor,
        position: torch.Tensor,
        buffers: Buffers,
        noise: torch.Tensor | None = None,
        steps: int = 0,
    ) -> None:
        self.group, self.members = group, list(members)
        self.center, self.position, self.buffers = center, position, buffers
        self.noise, self.steps = noise, steps
        self._make_views()

    def load(self) -> None:
        """Read the parameters, as they are now, and their gradients."""
        _copy(self._positions, self._direct)
        for one in self._indirect:
            here, values = self.position[0, one.start : one.stop], one.values(one.parameter)
            unchanged = here.to(values.dtype) == values  # then the digits beyond its precision stay
            here.copy_(torch.where(unchanged, here, values.to(here.dtype)))
        grads = [one.grad for one in self._direct if one.grad is not None]
        _copy(self._gradients, [one.to_dense() if one.is_sparse else one for one in grads])
        for one in self._indirect:
            assert one.parameter.grad is not None
            self._gradient[0, one.start : one.stop].copy_(one.values(one.parameter.grad))

    def advance(self, kernel: Kernel, draw: Draw) -> None:
        """One step of the row."""
        averaged = kernel.noise_kind == "averaged"
        if averaged and self.noise is None:
            self.noise = draw(self.position)
        noise = draw(self.position)
        if averaged:
            noise, self.noise = (noise + self.noise) / 2, noise  # type: ignore[operator]
        kernel.step(self.position, self._gradient, self.center, noise, self.buffers)
        self.steps += 1

    def store(self) -> None:
        """Write the parameters."""
        _copy(self._direct, self._positions)
        for one in self._indirect:
            one.write(self.position[0, one.start : one.stop])

    def part(self, members: Iterable[Member]) -> Row:
        """A row of some of the members, with a copy of their state."""
        members, size = list(members), self.position.shape[1]

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[-1] != size:  # one value for the whole row
                return tensor.clone()
            return torch.cat([tensor[..., one.start : one.stop] for one in members], dim=-1)

        return Row(
            self.group,
            _in_line((one.parameter, one.entries, one.size) for one in members),
            pick(self.center),
            pick(self.position),
            {name: pick(value) for name, value in self.buffers.items()},
            None if self.noise is None else pick(self.noise),
            self.steps,
        )

    def state(self, numbers: Mapping[int, int]) -> dict[str, Any]:
        """What is to be saved; ``numbers`` are the parameters' by id.

        The position is among it where the parameters do not hold all its digits.
        """
        whole = all(one.parameter.dtype == self.position.dtype for one in self.members)
        return {
            "group": self.group,
            "members": [numbers[id(one.parameter)] for one in self.members],
            "center": self.center,
            "position": None if whole else self.position,
            "buffers": dict(self.buffers),
            "noise": self.noise,
            "steps": self.steps,
        }

    @classmethod
    def restored(
        cls,
        state: Mapping[str, Any],
        parameters: Sequence[torch.Tensor],
        masks: Mapping[int, torch.Tensor | None],
    ) -> Row:
        """The inverse of `state`; copies."""
        members = _members([parameters[number] for number in state["members"]], masks)

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(members[0].parameter.device, copy=True)

        center = copy(state["center"])
        position = state["position"]
        if position is None:
            parts = [one.values(one.parameter) for one in members]
            position = torch.cat(parts).to(center.dtype).unsqueeze(0)
        return cls(
            state["group"],
            members,
            center,
            copy(position),
            {name: copy(value) for name, value in state["buffers"].items()},
            None if state["noise"] is None else copy(state["noise"]),
            state["steps"],
        )

    def _make_views(self) -> None:
        self._gradient = torch.zeros_like(self.position)
        direct = [
            one for one in self.members if one.entries is None and one.parameter.dtype == self.position.dtype
        ]
        self._indirect = [one for one in self.members if one not in direct]
        self._direct = [one.parameter for one in direct]
        self._positions, self._gradients = (
            [flat[0, one.start : one.stop].view(one.parameter.shape) for one in direct]
            for flat in (self.position, self._gradient)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_views()


def new_rows(
    group: int,
    parameters: Sequence[torch.Tensor],
    masks: Mapping[int, torch.Tensor | None],
    kernel: Kernel,
) -> list[Row]:
    """Rows of parameters before their first step: one for each device and precision."""

    def place(parameter: torch.Tensor) -> tuple[str, torch.dtype]:
        exact = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        return str(parameter.device), exact

    rows = []
    for (_, dtype), some in itertools.groupby(sorted(parameters, key=lambda one: str(place(one))), place):
        members = _members(some, masks)
        center = torch.cat([one.values(one.parameter).to(dtype) for one in members])
        position = center.clone().unsqueeze(0)
        rows.append(Row(group, members, center, position, kernel.init(position)))
    return rows


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _members(parameters: Iterable[torch.Tensor], masks: Mapping[int, torch.Tensor | None]) -> list[Member]:
    found = []
    for one in parameters:
        mask = masks.get(id(one))
        entries = None if mask is None else mask.flatten().nonzero().squeeze(1).to(one.device)
        found.append((one, entries, one.numel() if entries is None else len(entries)))
    return _in_line(found)


def _in_line(found: Iterable[tuple[torch.Tensor, torch.Tensor | None, int]]) -> list[Member]:
    members, stop = [], 0
    for parameter, entries, size in found:
        start, stop = stop, stop + size
        members.append(Member(parameter, entries, start, stop))
    return members
