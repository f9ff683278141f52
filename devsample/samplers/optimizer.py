"""A sampler as a ``torch.optim.Optimizer``: parameters gathered into flat rows that a kernel moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch

from devsample.errors import InvalidArgumentError
from devsample.samplers.base import Kernel
from devsample.samplers.rows import Row, new_rows

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[Mapping[str, Any]]
Masks = Mapping[torch.Tensor | str, torch.Tensor]


class Sampler(torch.optim.Optimizer):
    """A sampler as a ``torch.optim.Optimizer``, for use in one's own loop.

    All parameters of a group that have a gradient move together, as one flat row of the kernel; a
    parameter that gets its first gradient later joins then, and w* of a parameter is where it is before
    its first step. A parameter without gradient, or with ``requires_grad=False``, stays and gets no
    noise. Parameters of half precision move in float32 and hold the rounded values. Noise comes
    from ``generator``; the global random state is neither read nor moved.

    ``state_dict`` holds everything, the generator's state too: a chain that continues from it (with the
    parameters as they were) is the same to the last bit.

    Args:
        params: parameters, named parameters or groups, as for any optimizer; groups may override
            hyperparameters, ``masks`` and ``freeze_after``.
        generator: the source of noise, on the parameters' device; None: a new one with a fresh seed.
        masks: which entries move: boolean tensors of the parameters' shapes, by parameter, or by name
            or pattern if ``params`` has names. A parameter that is not mentioned moves as a whole.
            In a group also a list, a mask or None for each of its parameters.
        freeze_after: number of a parameter's steps after which `freeze` is called for it.
        **hyperparameters: the kernel's.

    Raises:
        InvalidArgumentError: a hyperparameter out of its range, a mask that does not fit.
        TypeError: a hyperparameter that the sampler does not have, or one that is missing.
    """

    kernel: ClassVar[Callable[..., Kernel]]

    def __init__(
        self,
        params: Params,
        *,
        generator: torch.Generator | None = None,
        masks: Masks | None = None,
        freeze_after: int | None = None,
        **hyperparameters: Any,
    ) -> None:
        _check_names(type(self), hyperparameters)
        filled = vars(type(self).kernel(**hyperparameters))
        self._names = tuple(filled)
        self._kernels: dict[int, Kernel] = {}
        self._rows: list[Row] = []
        self._given = generator is not None
        self._generators = [] if generator is None else [generator]
        self._unmatched = {key if isinstance(key, str) else id(key) for key in masks or ()}
        defaults = {**filled, "masks": masks, "freeze_after": freeze_after}
        super().__init__(params, defaults)  # type: ignore[arg-type]
        self.defaults["masks"] = None
        for key in masks or ():
            if (key if isinstance(key, str) else id(key)) in self._unmatched:
                name = repr(key) if isinstance(key, str) else f"a key of shape {tuple(key.shape)}"
                raise InvalidArgumentError(
                    f"masks: {name} is none of the parameters; names need params=model.named_parameters()."
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; a parameter that it names twice counts once."""
        group = _without_repetition(param_group)
        super().add_param_group(group)
        group = self.param_groups[-1]
        try:
            group["masks"] = self._masks_in_line(group)
            self._check(len(self.param_groups) - 1)
        except InvalidArgumentError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            kernel = self._kernel(number)
            for row in self._moving_rows(number, kernel):
                row.load()
                row.advance(kernel, self._draw)
                row.store()
                if row.steps == group["freeze_after"]:
                    kernel.freeze(row.buffers)
        return loss

    def freeze(self) -> None:
        """Fix what the sampler has adapted so far; draws count from here.

        A parameter that makes its first step later adapts until ``freeze_after`` or the next call.

        Raises:
            InvalidArgumentError: there is nothing to fix, or it is set to go on moving.
        """
        if not self._rows:
            raise InvalidArgumentError("freeze: no step has been made, so nothing has been adapted.")
        for row in self._rows:
            kernel = self._kernel(row.group)
            kernel.freeze(row.buffers)
            if not kernel.is_frozen(row.buffers):
                raise InvalidArgumentError(f"freeze: {kernel} goes on adapting; it is set to.")

    def state_dict(self) -> dict[str, Any]:
        """Hyperparameters, rows and the generators' states: tensors and plain values."""
        numbers = {id(one): number for number, one in enumerate(self._parameters())}
        return {
            **super().state_dict(),
            "sampler": type(self).__name__,
            "rows": [row.state(numbers) for row in self._rows],
            "generators": [{"device": str(one.device), "state": one.get_state()} for one in self._generators],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of a sampler of the same kind on the same parameters.

        The generator is set to its saved state, the one handed in too.
        """
        missing = {"rows", "generators"} - state_dict.keys()
        if missing:
            raise InvalidArgumentError(
                f"state_dict: it has no {' and '.join(sorted(missing))}, so it is not that of a sampler."
            )
        kind = state_dict.get("sampler", type(self).__name__)
        if kind != type(self).__name__:
            raise InvalidArgumentError(f"state_dict: it is that of {kind}, not of {type(self).__name__}.")
        super().load_state_dict(dict(state_dict))
        for number in range(len(self.param_groups)):
            self._check(number)
        parameters, masks = self._parameters(), self._masks()
        self._rows = [Row.restored(one, parameters, masks) for one in state_dict["rows"]]
        for one in state_dict["generators"]:
            device = torch.device(one["device"])
            self._generator(device).set_state(one["state"].cpu())

    def __getstate__(self) -> dict[str, Any]:
        generators = [(str(one.device), one.get_state()) for one in self._generators]
        own = {name: getattr(self, name) for name in ("_names", "_rows", "_given", "_unmatched")}
        return {**super().__getstate__(), **own, "_generators": generators}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "_generators" in state:
            saved, state["_generators"] = state["_generators"], []
            for device, words in saved:
                state["_generators"].append(torch.Generator(device=device))
                state["_generators"][-1].set_state(words)
        super().__setstate__(state)
        self._kernels = {}

    def _kernel(self, number: int) -> Kernel:
        """The group's kernel, made again if a value has changed."""
        values = {name: self.param_groups[number][name] for name in self._names}
        kept = self._kernels.get(number)
        if kept is None or vars(kept) != values:
            kept = self._kernels[number] = type(self).kernel(**values)
            if getattr(kept, "control_variate", False):
                raise InvalidArgumentError(
                    "control_variate: an optimizer does not see the data's full gradient. Leave it out here; "
                    "a run takes it (optimizer_kwargs)."
                )
        return kept

    def _check(self, number: int) -> None:
        """Raise at a value of a group that cannot be used."""
        group, kernel = self.param_groups[number], self._kernel(number)
        after = group["freeze_after"]
        if after is None:
            return
        if isinstance(after, bool) or not isinstance(after, int) or after < 1:
            raise InvalidArgumentError(f"freeze_after: expected a number of steps ≥ 1, got {after!r}.")
        if not kernel.adapts:
            raise InvalidArgumentError(f"freeze_after: {type(self).__name__} adapts nothing; leave it out.")

    def _moving_rows(self, number: int, kernel: Kernel) -> list[Row]:
        """The rows to be moved now: their parameters have gradients, all of them."""
        moving = {
            id(one): one
            for one in self.param_groups[number]["params"]
            if one.grad is not None and one.requires_grad
        }
        rows = [row for row in self._rows if row.group == number]
        for row in rows:
            inside = [id(one.parameter) in moving for one in row.members]
            if any(inside) and not all(inside):  # from now on they are on their own
                sides = [[], []]  # type: list[list[Any]]
                for one, is_inside in zip(row.members, inside, strict=True):
                    sides[is_inside].append(one)
                place = self._rows.index(row)
                self._rows[place : place + 1] = [row.part(side) for side in sides]
        known = {id(one.parameter) for row in rows for one in row.members}
        new = [one for key, one in moving.items() if key not in known]
        if new:
            self._rows += new_rows(number, new, self._masks(), kernel)
        return [
            row
            for row in self._rows
            if row.group == number and id(row.members[0].parameter) in moving and row.center.numel()
        ]

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        generator = self._generator(like.device)
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)

    def _generator(self, device: torch.device) -> torch.Generator:
        for one in self._generators:
            if one.device.type == device.type and (one.device.index or 0) == (device.index or 0):
                return one
        if self._given:
            raise InvalidArgumentError(
                f"generator: it is on {self._generators[0].device}, parameters are on {device}; "
                f"make it with torch.Generator(device={str(device)!r})."
            )
        self._generators.append(torch.Generator(device=device))
        self._generators[-1].seed()
        return self._generators[-1]

    def _parameters(self) -> list[torch.Tensor]:
        return [one for group in self.param_groups for one in group["params"]]

    def _masks(self) -> dict[int, torch.Tensor | None]:
        return {
            id(one): mask
            for group in self.param_groups
            for one, mask in zip(group["params"], group["masks"], strict=True)
        }

    def _masks_in_line(self, group: Mapping[str, Any]) -> list[torch.Tensor | None]:
        """A mask or None for each parameter of a group; marks what it finds."""
        given, parameters = group["masks"], group["params"]
        if isinstance(given, Mapping):
            names = group.get("param_names") or [None] * len(parameters)
            found = [self._find(given, *pair) for pair in zip(parameters, names, strict=True)]
        else:
            found = [None] * len(parameters) if given is None else list(given)
        if len(found) != len(parameters):
            raise InvalidArgumentError(f"masks: {len(found)} masks for {len(parameters)} parameters.")
        for one, mask in zip(parameters, found, strict=True):
            _check_parameter(one, mask)
        return found

    def _find(self, masks: Masks, parameter: torch.Tensor, name: str | None) -> torch.Tensor | None:
        """The mask of a parameter: the last that names it."""
        found = None
        for key, mask in masks.items():
            if isinstance(key, str):
                hit = name is not None and (key == name or fnmatchcase(name, key))
            else:
                hit = key is parameter
            if hit:
                found = mask
                self._unmatched.discard(key if isinstance(key, str) else id(key))
        return found


def _check_names(kind: type[Sampler], given: Mapping[str, Any]) -> None:
    """Raise if a hyperparameter is unknown or missing."""
    known = dataclasses.fields(kind.kernel)  # type: ignore[arg-type]
    names = [one.name for one in known]
    unknown = [name for name in given if name not in names]
    missing = [one.name for one in known if one.default is dataclasses.MISSING and one.name not in given]
    if unknown:
        raise TypeError(
            f"{kind.__name__} has no hyperparameter {unknown[0]!r}; it has {', '.join(names)}, and "
            "generator, masks, freeze_after."
        )
    if missing:
        raise TypeError(f"{kind.__name__} needs {' and '.join(missing)}: give it by keyword.")


def _check_parameter(parameter: torch.Tensor, mask: Any) -> None:
    if not parameter.is_floating_point():
        raise InvalidArgumentError(
            f"params: one is {parameter.dtype}; only real floating point parameters can be sampled."
        )
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape != parameter.shape:
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)
        raise InvalidArgumentError(
            f"masks: expected a boolean tensor of shape {tuple(parameter.shape)}, got {got}."
        )


def _without_repetition(param_group: Mapping[str, Any]) -> dict[str, Any]:
    """The group with each parameter once, and the masks of those that stay."""
    group = dict(param_group)
    given = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
    seen: dict[int, int] = {}
    for number, one in enumerate(given):
        seen.setdefault(id(one[1] if isinstance(one, tuple) else one), number)
    group["params"] = [given[number] for number in seen.values()]
    masks = group.get("masks")
    if isinstance(masks, Sequence) and len(masks) == len(given):
        group["masks"] = [masks[number] for number in seen.values()]
    return group
