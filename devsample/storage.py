r"""A result as one safetensors file: arrays, and JSON in its metadata. Nothing in it is code.

The metadata of the file are texts::

    devsample  "result"
    format     the number of this format, 1
    content    JSON: chains, settings, analysis, reports, provenance, names of the columns of draws
    sha256     of the content and of all arrays, so that damage is noticed

The arrays ``draws/<column>`` are the table of draws. Values that JSON does not know stand in the content
as ``{"$": kind, ...}``: tuples, floats that are not finite, and arrays by the name of their entry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from devsample.analysis import Analysis, ChainInfo, Recorded
from devsample.diagnostics import Description, PredictedBias
from devsample.errors import ReportWarning, ResultFileError
from devsample.verdict import Finding, LostChain

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
_MARK = "$"
_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32}
    | {torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
T = TypeVar("T")


class NotPlainError(Exception):
    """A value that is neither an array nor made of JSON's types."""


def write_result(path: str | os.PathLike[str], recorded: Recorded, analysis: Analysis) -> None:
    """Write a result beside ``path`` and rename it into place.

    Raises:
        ResultFileError: ``path`` is taken by something that is no saved result, or cannot be written.

    Warns:
        ReportWarning: a report that cannot be kept, by name.
    """
    target = _check_target(path)
    arrays: dict[str, torch.Tensor] = {}
    content = {
        "columns": _store_draws(recorded.draws, arrays),
        "chains": [asdict(info) for info in recorded.chains],
        "settings": {name: _encode_loosely(value, arrays) for name, value in recorded.settings.items()},
        "init_loss": _encode(recorded.init_loss, arrays),
        "init_loss_se": _encode(recorded.init_loss_se, arrays),
        "online": recorded.online,
        "at_center": _encode(recorded.at_center, arrays),
        "provenance": _encode_loosely(recorded.provenance, arrays),
        "reports": _store_reports(recorded.reports, arrays),
        "analysis": {
            "estimate": asdict(analysis.estimate),
            "each": [[chain, asdict(one)] for chain, one in analysis.each.items()],
            "lost": [asdict(one) for one in analysis.lost.values()],
            "bias": None if analysis.bias is None else asdict(analysis.bias),
            "findings": [asdict(one) for one in analysis.findings],
        },
    }
    for name in ("chains", "analysis"):  # numbers in them may be NaN
        content[name] = _encode(content[name], arrays)
    text = json.dumps(content, allow_nan=False)
    metadata = {"devsample": "result", "format": str(FORMAT), "content": text, "sha256": _hash(text, arrays)}
    _write(target, arrays, metadata)


def read_result(path: str | os.PathLike[str]) -> tuple[Recorded, Analysis]:
    """What `write_result` wrote.

    Raises:
        ResultFileError: the file is damaged, of another kind, or of a newer format.
    """
    arrays, metadata = _read(Path(path))
    text = metadata.get("content", "")
    if metadata.get("sha256") != _hash(text, arrays):
        raise ResultFileError(
            f"{path} is damaged: its content does not match its checksum. Take a copy of it."
        )
    try:
        return _restore(json.loads(text), arrays)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ResultFileError(f"{path} is damaged: its content is incomplete ({error!r}).") from error


def _restore(content: dict[str, Any], arrays: Mapping[str, torch.Tensor]) -> tuple[Recorded, Analysis]:
    get = {name: _decode(value, arrays) for name, value in content.items()}
    recorded = Recorded(
        draws=_load_draws(get["columns"], arrays),
        chains=tuple(_make(ChainInfo, one) for one in get["chains"]),
        settings=get["settings"],
        init_loss=get["init_loss"],
        init_loss_se=get["init_loss_se"],
        online=get["online"],
        at_center=get["at_center"],
        reports=get["reports"],
        provenance=get["provenance"],
    )
    found = get["analysis"]
    analysis = Analysis(
        estimate=_make(Description, found["estimate"]),
        each={chain: _make(Description, one) for chain, one in found["each"]},
        lost={one["chain"]: _make(LostChain, one) for one in found["lost"]},
        bias=None if found["bias"] is None else _make(PredictedBias, found["bias"]),
        findings=tuple(_make(Finding, one) for one in found["findings"]),
    )
    return recorded, analysis


def _make(kind: type[T], values: Mapping[str, Any]) -> T:
    known = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in known})


# --- the file ------------------------------------------------------------------------------------


def _check_target(path: str | os.PathLike[str]) -> Path:
    """Where a result may be written: a new name, or that of a saved result."""
    target = Path(os.path.realpath(path))  # a link stays a link
    if not target.parent.is_dir():
        raise ResultFileError(f"{path} cannot be written: there is no folder {target.parent}; make it first.")
    if target.exists() and not _is_ours(target):
        raise ResultFileError(
            f"{path} exists and is no result that devsample has saved; it was left as it is. "
            "Give another path."
        )
    return target


def _is_ours(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file():
            return False
        with safe_open(str(path), framework="pt") as file:
            return (file.metadata() or {}).get("devsample") == "result"
    except (OSError, SafetensorError):
        return False


def _write(target: Path, arrays: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    from safetensors.torch import save

    data = save(dict(arrays), metadata=dict(metadata))
    new = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with new.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, target)
    except OSError as error:
        raise ResultFileError(f"{target} cannot be written: {error}.") from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All arrays and the metadata of a file of this format."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ResultFileError(f"{path}: there is no such file.")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = dict(file.metadata() or {})
            _check_format(path, metadata)
            return {name: file.get_tensor(name).clone() for name in file.keys()}, metadata  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ResultFileError(
            f"{path} cannot be read: it is damaged, or no file that LLCResult.save has written ({error})."
        ) from error


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    import devsample

    if metadata.get("devsample") != "result":
        raise ResultFileError(f"{path} is a safetensors file, but no result that devsample has saved.")
    number = metadata.get("format", "")
    if not number.isdecimal():
        raise ResultFileError(f"{path} is damaged: its format number is {number!r}.")
    if int(number) > FORMAT:
        raise ResultFileError(
            f"{path} has format {number}; devsample {devsample.__version__} reads formats up to {FORMAT}. "
            "A newer version wrote it: pip install --upgrade devsample."
        )


def _hash(text: str, arrays: Mapping[str, torch.Tensor]) -> str:
    hashed = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        one = arrays[name]
        hashed.update(f"{name} {one.dtype} {tuple(one.shape)}\n".encode())
        hashed.update(one.reshape(-1).view(torch.uint8).numpy().data if one.numel() else b"")
    return hashed.hexdigest()


# --- draws and reports ---------------------------------------------------------------------------


def _store_draws(draws: pd.DataFrame, arrays: dict[str, torch.Tensor]) -> list[str]:
    """Put numeric columns into ``arrays``; returns their names in order."""
    kept = [name for name, kind in draws.dtypes.items() if kind.kind in "biuf"]
    for name in kept:
        arrays[f"draws/{name}"] = _tensor(draws[name].to_numpy())
    _say_left_out([f"draws[{name!r}]" for name in draws.columns if name not in kept])
    return kept


def _load_draws(columns: Sequence[str], arrays: Mapping[str, torch.Tensor]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({name: arrays[f"draws/{name}"].numpy() for name in columns})


def _store_reports(reports: Mapping[str, Any], arrays: dict[str, torch.Tensor]) -> dict[str, Any]:
    kept, left_out = {}, []
    for name, value in reports.items():
        try:
            kept[name] = _encode(value, arrays)
        except NotPlainError as error:
            left_out.append(f"{name!r} ({error})")
    _say_left_out(left_out)
    return kept


def _say_left_out(names: Sequence[str]) -> None:
    if names:
        warnings.warn(
            f"not saved, since it is neither an array of numbers nor plain values: {', '.join(names)}.",
            ReportWarning,
            stacklevel=5,
        )


# --- values --------------------------------------------------------------------------------------


def _encode(value: Any, arrays: dict[str, torch.Tensor]) -> Any:
    """The value in JSON's types, its arrays put into ``arrays``."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_MARK: "float", "value": repr(value)}
    if type(value) is list:
        return [_encode(item, arrays) for item in value]
    if type(value) is tuple:
        return {_MARK: "tuple", "items": [_encode(item, arrays) for item in value]}
    if type(value) is dict:
        if all(isinstance(key, str) for key in value) and _MARK not in value:
            return {key: _encode(item, arrays) for key, item in value.items()}
        pairs = [[_encode(key, arrays), _encode(item, arrays)] for key, item in value.items()]
        return {_MARK: "dict", "items": pairs}
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        name = f"value/{len(arrays)}"
        arrays[name] = _tensor(value)
        kind = next(name for kind, name in _ARRAY_KINDS if isinstance(value, kind))
        return {_MARK: kind, "at": name}
    raise NotPlainError(f"a {type(value).__name__}")


_ARRAY_KINDS = ((torch.Tensor, "tensor"), (np.generic, "number"), (np.ndarray, "array"))


def _encode_loosely(value: Any, arrays: dict[str, torch.Tensor]) -> Any:
    """The same, and as text what is neither an array nor plain: of a setting, that says enough."""
    if isinstance(value, Mapping):
        return _encode({}, arrays) | {str(k): _encode_loosely(v, arrays) for k, v in value.items()}
    if type(value) in (list, tuple):
        items = [_encode_loosely(item, arrays) for item in value]
        return items if type(value) is list else {_MARK: "tuple", "items": items}
    try:
        return _encode(value, arrays)
    except NotPlainError:
        return str(value)


def _tensor(value: Any) -> torch.Tensor:
    """A copy that shares no memory, on the CPU."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.dtype not in _DTYPES:
            raise NotPlainError(f"a {value.layout} tensor of {value.dtype}")
        return value.detach().cpu().resolve_neg().clone(memory_format=torch.contiguous_format)
    array = np.array(value, order="C", copy=True)
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError:
        raise NotPlainError(f"an array of {array.dtype}") from None


def _decode(value: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: _decode(item, arrays) for key, item in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "tuple":
        return tuple(_decode(item, arrays) for item in value["items"])
    if kind == "dict":
        return {_decode(key, arrays): _decode(item, arrays) for key, item in value["items"]}
    tensor = arrays[value["at"]]
    if kind == "tensor":
        return tensor
    return tensor.numpy() if kind == "array" else tensor.numpy()[()]
