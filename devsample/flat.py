"""The moving entries of a model as one flat vector that the model itself computes with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from devsample.errors import InvalidArgumentError, ModelError

Masks = Mapping[str, "torch.Tensor | bool"]


@dataclass(frozen=True)
class _Segment:
    name: str
    parameter: torch.nn.Parameter
    start: int
    stop: int
    entries: torch.Tensor | None  # positions of the moving entries; None: all of them
    direct: bool  # the parameter can be a view of the flat vector


class FlatParameters:
    """A view of a model's moving parameters as vectors of P elements.

    Parameters that move as a whole and have the vectors' dtype become views of them, so nothing
    is copied between update and forward pass; the rest (masked, or of lower precision) is copied.

    Args:
        model: a private copy; its parameters are redirected.
        moving: what moves, by parameter name: True, or a boolean tensor of its entries.
    """

    def __init__(self, model: torch.nn.Module, moving: Masks) -> None:
        self.dtype = _state_dtype(model, moving)
        self.segments: list[_Segment] = []
        self.size = 0
        for name, parameter in model.named_parameters():
            mask = moving.get(name, False)
            entries = _entries(mask, parameter)
            if isinstance(mask, bool) and not mask:
                parameter.requires_grad_(False)
                continue
            count = parameter.numel() if entries is None else len(entries)
            direct = entries is None and parameter.dtype == self.dtype
            stop = self.size + count
            self.segments.append(_Segment(name, parameter, self.size, stop, entries, direct))
            self.size = stop
        self.parameters = [one.parameter for one in self.segments]
        self._plain = all(one.direct for one in self.segments)
        self._pieces: tuple[int, list[torch.Tensor]] | None = None
        self._at: int | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.segments[0].parameter.device

    def read(self) -> torch.Tensor:
        """The moving entries now, a new vector of shape (P,)."""
        parts = [_pick(one.parameter.detach(), one.entries).to(self.dtype) for one in self.segments]
        return torch.cat(parts)

    def point_to(self, values: torch.Tensor) -> None:
        """Make the model compute at ``values``, shape (P,), and follow them if they are updated in place.

        Entries that are copied (masked, or of lower precision) do not follow.
        """
        self._at = values.data_ptr()
        for one in self.segments:
            if one.direct:
                one.parameter.data = values[one.start : one.stop].view(one.parameter.shape)
            else:
                _put(one.parameter.data, one.entries, values[one.start : one.stop])

    def go_to(self, values: torch.Tensor) -> None:
        """`point_to`, unless the model is there already."""
        if not self._plain or self._at != values.data_ptr():
            self.point_to(values)

    def gather(self, parts: Sequence[torch.Tensor | None], gradient: torch.Tensor, *, add: bool) -> None:
        """Write the parameters' gradients into ``gradient`` (P,), or add them to it."""
        whole = [part for part in parts if part is not None and not part.is_sparse]
        if not add and self._plain and len(whole) == len(parts):
            torch._foreach_copy_(self._views(gradient), whole)
            return
        if not add:
            gradient.zero_()
        for one, part in zip(self.segments, parts, strict=True):
            if part is not None:
                dense = part.to_dense() if part.is_sparse else part
                gradient[one.start : one.stop].add_(_pick(dense, one.entries).to(self.dtype))

    def _views(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Pieces of ``gradient`` in the parameters' shapes; the last answer is kept."""
        if self._pieces is None or self._pieces[0] != gradient.data_ptr():
            views = [gradient[one.start : one.stop].view(one.parameter.shape) for one in self.segments]
            self._pieces = (gradient.data_ptr(), views)
        return self._pieces[1]

    def share_moved(self, center: torch.Tensor, position: torch.Tensor) -> float:
        """Share of the moving entries whose value, in the parameter's own dtype, differs from ``center``."""
        moved = 0
        for one in self.segments:
            dtype, part = one.parameter.dtype, slice(one.start, one.stop)
            moved += int((center[part].to(dtype) != position[part].to(dtype)).sum())
        return moved / self.size

    def names(self) -> list[str]:
        """Names of the moving parameters, in the order of the vector."""
        return [one.name for one in self.segments]


def resolve_masks(
    model: torch.nn.Module, masks: Masks | None, name: str = "param_masks"
) -> dict[str, torch.Tensor | bool]:
    """What moves, by parameter name, checked against the model.

    Args:
        model: the model.
        masks: parameter name or pattern (``*``, ``?``) to True or a boolean tensor of the
            parameter's shape. What it does not name stays. None: everything that requires grad.
        name: the argument's name in errors.

    Raises:
        InvalidArgumentError: an unknown name, a wrong shape or dtype, nothing moves.
        ModelError: a moving parameter shares memory with another tensor.
    """
    parameters = dict(model.named_parameters())
    if masks is None:
        chosen: dict[str, torch.Tensor | bool] = {
            key: True for key, parameter in parameters.items() if parameter.requires_grad
        }
        if not chosen:
            raise InvalidArgumentError("model: no parameter requires grad, so nothing can move.")
    else:
        chosen = _match(parameters, masks, name)
    _check_shared_memory(model, chosen)
    for key in chosen:
        if not parameters[key].is_floating_point():
            raise InvalidArgumentError(
                f"{key} is {parameters[key].dtype}; only real floating point parameters can be sampled."
            )
    return chosen


def _check_shared_memory(model: torch.nn.Module, chosen: Masks) -> None:
    """Refuse moving parameters that share memory with another tensor of the model by hand.

    Once they move, each has memory of its own, and the tie would be lost. One Parameter object
    in two places is a tie that stays.
    """
    spans = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        lazy = isinstance(tensor, UninitializedTensorMixin)
        if not lazy and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            start, steps = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            spans.append((str(tensor.device), start, start + (last + 1) * tensor.element_size(), name))
    for one, other in _overlaps(sorted(spans)):
        if one in chosen or other in chosen:
            raise ModelError(
                f"model: {one} and {other} are two tensors that share memory; the tie would be lost once "
                "they move. Assign the same torch.nn.Parameter object in both places."
            )


def _overlaps(spans: Sequence[tuple[str, int, int, str]]) -> Iterator[tuple[str, str]]:
    """Names of spans (device, start, stop, name), sorted, that share bytes."""
    active: list[tuple[str, int, str]] = []
    for device, start, stop, name in spans:
        active = [span for span in active if span[0] == device and span[1] > start]
        yield from ((span[2], name) for span in active)
        active.append((device, stop, name))


def _match(
    parameters: Mapping[str, torch.nn.Parameter], masks: Masks, name: str
) -> dict[str, torch.Tensor | bool]:
    chosen: dict[str, torch.Tensor | bool] = {}
    for pattern, mask in masks.items():
        hits = [key for key in parameters if key == pattern or fnmatchcase(key, pattern)]
        if not hits:
            raise InvalidArgumentError(
                f"{name}: {pattern!r} names no parameter. There are: {', '.join(list(parameters)[:12])}"
                + (" …" if len(parameters) > 12 else ".")
            )
        for key in hits:
            if not parameters[key].requires_grad:
                if key == pattern:
                    raise InvalidArgumentError(
                        f"{name}: {key} is frozen (requires_grad=False); set requires_grad or leave it out."
                    )
                continue
            checked = _check_mask(mask, parameters[key], f"{name}[{pattern!r}]")
            chosen.pop(key, None)  # what comes later counts
            if checked is not None:
                chosen[key] = checked
    ordered = {key: chosen[key] for key in parameters if key in chosen}
    if not ordered:
        raise InvalidArgumentError(f"{name}: no entry of any parameter may move.")
    return ordered


def _check_mask(mask: object, parameter: torch.nn.Parameter, where: str) -> torch.Tensor | bool | None:
    if isinstance(mask, bool):
        return True if mask else None
    try:
        mask = torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgumentError(f"{where}: expected True or a boolean tensor, got {mask!r}.") from None
    if mask.dtype != torch.bool:
        binary = bool(((mask == 0) | (mask == 1)).all())
        if not binary:
            raise InvalidArgumentError(f"{where}: expected True or a boolean tensor, got {mask.dtype}.")
        mask = mask.bool()
    if mask.shape != parameter.shape:
        raise InvalidArgumentError(
            f"{where}: shape {tuple(mask.shape)} does not fit the parameter's {tuple(parameter.shape)}."
        )
    if not mask.any():
        return None
    return True if mask.all() else mask.detach().cpu()


def _entries(mask: torch.Tensor | bool, parameter: torch.nn.Parameter) -> torch.Tensor | None:
    if isinstance(mask, bool):
        return None
    return mask.flatten().nonzero().squeeze(1).to(parameter.device)


def _pick(values: torch.Tensor, entries: torch.Tensor | None) -> torch.Tensor:
    flat = values.reshape(-1)
    return flat if entries is None else flat[entries]


def _put(target: torch.Tensor, entries: torch.Tensor | None, values: torch.Tensor) -> None:
    if entries is None:
        target.copy_(values.view(target.shape))
    elif target.is_contiguous():
        target.view(-1)[entries] = values.to(target.dtype)
    else:
        index = torch.unravel_index(entries, target.shape)
        target[index] = values.to(target.dtype)


def _state_dtype(model: torch.nn.Module, moving: Masks) -> torch.dtype:
    """float64 if any moving parameter is, else float32: half precision moves in float32."""
    dtypes = {parameter.dtype for name, parameter in model.named_parameters() if moving.get(name) is not None}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def squared_norm(vector: torch.Tensor) -> float:
    """|v|² in double precision."""
    norm = float(
        torch.linalg.vector_norm(vector, dtype=torch.float64 if vector.device.type != "mps" else None)
    )
    return norm * norm if math.isfinite(norm) else math.inf
