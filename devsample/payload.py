"""What a run sends to its chain processes: written once, checked by hash, read only by them.

Three files of the run folder: ``payload.bin`` (cloudpickle bytes of the parts), and two files of
tensor storages that are memory-mapped: ``weights.safetensors`` (everything in the model) and
``data.safetensors`` (large tensors in the other parts).
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from devsample.checkpoints import write_bytes
from devsample.data.spec import REMEDY, LoaderSpec
from devsample.errors import ModelError, RunFolderError
from devsample.flat import Masks
from devsample.large import warn_if_large
from devsample.memory import save_storages
from devsample.repoint import SMALLEST_BYTES, repoint
from devsample.serialize import Packed, pack, unpack
from devsample.shared import load_storages, on_local_disk
from devsample.specs import RunSpec, SamplerSpec
from devsample.types import EvaluateFn

_MODEL_REMEDY = "Remove it from the model before the run, or give it a __getstate__ that drops it."
_FUNCTION_REMEDY = "Create it inside the function, or pass what it needs as plain values."


@dataclass(frozen=True)
class Parts:
    """What a chain needs besides the model."""

    loader_spec: LoaderSpec
    evaluate: EvaluateFn
    callbacks: tuple[Callable[..., Any], ...]
    sampler: SamplerSpec
    run: RunSpec
    masks: Masks
    observables: tuple[Any, ...] = ()


def pack_model(model: torch.nn.Module) -> Packed:
    """The model as a skeleton and its storages: parameters, buffers of either kind, plain tensors.

    Raises:
        NotPicklableError: naming the path of what cannot travel.
    """
    return pack(unwrap(model), "model", every_tensor=True, remedy=_MODEL_REMEDY)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The plain module inside a compiled or data-parallel one.

    Raises:
        ModelError: a wrapper that shards the weights.
    """
    while True:
        name = type(model).__name__
        if name == "OptimizedModule":
            model = model._orig_mod  # type: ignore[assignment]
        elif name in ("DistributedDataParallel", "DataParallel"):
            model = model.module  # type: ignore[assignment]
        elif name.startswith(("FSDP", "FullyShardedDataParallel")):
            raise ModelError(
                f"model is wrapped in {name}, which shards its weights; pass the unsharded module."
            )
        else:
            return model


def home_device(model: torch.nn.Module) -> torch.device:
    """The device of the model's first parameter (its buffers, if it has none)."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


@dataclass(frozen=True)
class Skeleton:
    """A model without its tensors, and the device it was on."""

    data: bytes
    home: str


def pack_parts(parts: Parts) -> dict[str, Packed]:
    """Every part as bytes, each tried on its own so that an error names it.

    Warns:
        LargePayloadWarning: what the loader spec carries is larger than 100 MB.
    """
    spec = parts.loader_spec.packed()
    fields = {one.name: getattr(parts.loader_spec, one.name) for one in dataclasses.fields(LoaderSpec)}
    warn_if_large(SimpleNamespace(**fields), "loader_spec", spec, readers=_readers(parts.loader_spec))
    return {
        "loader_spec": spec,
        "evaluate": pack(parts.evaluate, "evaluate", remedy=_FUNCTION_REMEDY),
        "callbacks": pack(parts.callbacks, "callbacks", remedy=_FUNCTION_REMEDY),
        "sampler": pack(parts.sampler, "sampling_method", remedy=REMEDY),
        "run": pack(parts.run, "run"),
        "masks": pack(dict(parts.masks), "param_masks"),
        "observables": pack(parts.observables, "observables", remedy=_FUNCTION_REMEDY),
    }


def _readers(spec: LoaderSpec) -> str:
    own_copies = spec.num_workers > 0 and spec.multiprocessing_context != "fork"
    return "every chain process and every loader worker" if own_copies else "every chain process"


def write_payload(folder: Path, packed: Mapping[str, Packed], *, temporary: bool = True) -> str:
    """Write ``payload.bin`` and ``data.safetensors``; returns the payload's SHA-256.

    Args:
        folder: the run folder.
        packed: the parts.
        temporary: nobody else knows of the folder. The caller's own large tensors then use the
            file's memory from now on, where nobody can tell: the machine holds one copy of them.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    places: dict[int, int] = {}
    table: dict[str, tuple[bytes, list[int]]] = {}
    for name, one in packed.items():
        for storage in one.storages:
            places.setdefault(storage._cdata, len(places))
            storages[storage._cdata] = storage
        table[name] = (one.data, [places[storage._cdata] for storage in one.storages])
    data = pickle.dumps(table)
    if storages:
        file = folder / "data.safetensors"
        save_storages(list(storages.values()), file)
        del storage
        storages.clear()
        if temporary:
            _use_file(file, packed.values(), [places for _, places in table.values()])
    write_bytes(folder / "payload.bin", data)
    return hashlib.sha256(data).hexdigest()


def _use_file(file: Path, packed: Collection[Packed], places: Sequence[Sequence[int]]) -> None:
    """Point the tensors of ``packed`` at a private mapping of the file that holds them."""
    large = any(one.nbytes() >= SMALLEST_BYTES for pack in packed for one in pack.storages)
    if large and on_local_disk(file):
        mapped = load_storages(file, keep=True)
        repoint(list(packed), [[mapped[place] for place in of_one] for of_one in places])


class PayloadReader:
    """The parts of a payload, each loaded when it is asked for.

    Args:
        folder: the run folder.
        sha256: hash of ``payload.bin``; nothing is unpickled unless it matches.
    """

    def __init__(self, folder: Path, sha256: str) -> None:
        data = (folder / "payload.bin").read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise RunFolderError(f"{folder / 'payload.bin'} is not the payload of this run; it was not read.")
        self._table: dict[str, tuple[bytes, list[int]]] = pickle.loads(data)
        shared = folder / "data.safetensors"
        self._storages = load_storages(shared) if shared.exists() else []

    def load(self, name: str) -> Any:
        """A new copy of one part; its large tensors share the mapped file."""
        data, places = self._table[name]
        return unpack(data, [self._storages[place] for place in places])

    def parts(self) -> Parts:
        """All parts."""
        values = {one.name: self.load(one.name) for one in dataclasses.fields(Parts)}
        return Parts(**(values | {"loader_spec": values["loader_spec"].spec()}))


def load_model(skeleton: Skeleton, folder: Path, device: torch.device) -> torch.nn.Module:
    """A private copy of the model on ``device``."""
    storages = load_storages(folder / "weights.safetensors")
    model: torch.nn.Module = unpack(skeleton.data, storages, move=(torch.device(skeleton.home), device))
    return model
