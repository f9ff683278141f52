"""What this machine offers a run, and what to do about what is short: ``devsample doctor``."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from devsample import limits
from devsample.machine import available_cores, default_worker_start_method, thread_variables

_GIB = 1 << 30
_LITTLE_MEMORY = 2 * _GIB
_LITTLE_SHARED_MEMORY = _GIB
_LITTLE_DISK = _GIB
_FEW_FILES = 1024
_PACKAGES = ("matplotlib", "xarray", "zarr", "ray", "datasets", "transformers", "scikit-learn")


@dataclass(frozen=True)
class Finding:
    """One fact about this machine.

    Attributes:
        name: what it is about.
        value: the fact in words.
        numbers: the same as plain values.
        remedy: what to do, if it may become a problem; "" if it is fine.
    """

    name: str
    value: str
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    remedy: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing needs doing."""
        return not self.remedy

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self) | {"ok": self.ok}


def examine() -> list[Finding]:
    """All findings, in the order in which they are shown."""
    return [look() for look in _LOOKS]


def text(findings: list[Finding]) -> str:
    """The findings as lines: ok or warning, what, and the remedy."""
    width = max(len(one.name) for one in findings)
    return "\n".join(line for one in findings for line in _lines(one, width))


def _lines(finding: Finding, width: int) -> Iterator[str]:
    yield f"{'ok     ' if finding.ok else 'warning'}  {finding.name.ljust(width)}  {finding.value}"
    if finding.remedy:
        yield f"{' ' * 9}{' ' * width}  → {finding.remedy}"


def _python() -> Finding:
    version = platform.python_version()
    return Finding(
        "python", f"{version}, {sys.executable}", {"version": version, "executable": sys.executable}
    )


def _torch() -> Finding:
    import torch

    return Finding("torch", torch.__version__, {"version": torch.__version__})


def _platform() -> Finding:
    return Finding(
        "platform", platform.platform(), {"system": platform.system(), "machine": platform.machine()}
    )


def _cores() -> Finding:
    cores, by = available_cores(), limits.core_limits()
    said = ", ".join(f"{name} {count}" for name, count in by.items())
    remedy = ""
    if cores == 1:
        remedy = "chains and loader workers share one core: cores=1 and num_workers=0 lose nothing."
    return Finding("cores", f"{cores} ({said})", {"cores": cores, "limits": by}, remedy)


def _memory() -> Finding:
    found, limit = limits.memory(), limits.memory_limit()
    if found is None:
        return Finding("memory", "not known on this platform")
    total, available = found
    value = f"{_size(available)} available of {_size(total)}"
    if limit is not None:
        value += f", the limit of the container is {_size(limit)}"
    remedy = ""
    if available < _LITTLE_MEMORY:
        remedy = (
            "use fewer cores and loader workers; each chain process takes about 0.3 GiB and the data set."
        )
    numbers = {"total": total, "available": available, "limit": limit}
    return Finding("memory", value, numbers, remedy)


def _shared_memory() -> Finding:
    found = limits.shared_memory()
    if found is None:
        return Finding("shared memory", "no /dev/shm here; it is not limited apart from memory")
    total, free = found
    remedy = ""
    if free < _LITTLE_SHARED_MEMORY:
        remedy = (
            "batches from loader workers wait there. In a container give it more (docker run --shm-size=8g "
            "or --ipc=host; Kubernetes: an emptyDir with medium Memory at /dev/shm), or use num_workers=0."
        )
    numbers = {"total": total, "free": free}
    return Finding("shared memory", f"{_size(free)} free of {_size(total)} (/dev/shm)", numbers, remedy)


def _open_files() -> Finding:
    found = limits.file_limits()
    if found is None:
        return Finding("open files", "not limited on this platform")
    soft, hard = (None if one == -1 else one for one in found)
    remedy = ""
    if soft is not None and soft < _FEW_FILES:
        remedy = f"raise it with ulimit -n {_FEW_FILES if hard is None else max(hard, soft)}"
        if hard is not None and hard < _FEW_FILES:
            remedy += (
                "; more takes an administrator (/etc/security/limits.conf, docker run --ulimit nofile=65536)"
            )
        remedy += "."
    shown = ", at most ".join("any number" if one is None else str(one) for one in (soft, hard))
    value = f"{shown} (chain processes raise their own)"
    return Finding("open files", value, {"soft": soft, "hard": hard}, remedy)


def _start_methods() -> Finding:
    methods, default = multiprocessing.get_all_start_methods(), default_worker_start_method()
    value = f"{', '.join(methods)}; loader workers start by {default}"
    return Finding("start methods", value, {"methods": methods, "workers": default})


def _temporary_folder() -> Finding:
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        return Finding(
            "temporary folder", "none", {}, f"set TMPDIR to a folder that can be written: {error}."
        )
    free = limits.disk_free(folder)
    value = folder if free is None else f"{folder}, {_size(free)} free"
    remedy = ""
    if free is not None and free < _LITTLE_DISK:
        remedy = "weights and data are written there in a run: set TMPDIR to a folder with more space."
    return Finding("temporary folder", value, {"folder": folder, "free": free}, remedy)


def _threads() -> Finding:
    given = {name: os.environ[name] for name in thread_variables() if name in os.environ}
    value = ", ".join(f"{name}={count}" for name, count in given.items()) or "no variable is set"
    return Finding("threads", f"{value} (chain processes get their own)", {"variables": given})


def _accelerators() -> Finding:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = [f"cuda:{index} {name}" for index, name in enumerate(names)]
    if torch.backends.mps.is_available():
        found.append("mps")
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found += [
            f"xpu:{index} {torch.xpu.get_device_name(index)}" for index in range(torch.xpu.device_count())
        ]
    remedy = ""
    if not names and shutil.which("nvidia-smi"):
        build = (
            "a build without CUDA" if torch.version.cuda is None else f"a build for CUDA {torch.version.cuda}"
        )
        remedy = f"there is nvidia-smi, but torch sees no GPU: torch is {build}; see torch.cuda.init()."
    return Finding("accelerators", ", ".join(found) or "none", {"devices": found}, remedy)


def _packages() -> Finding:
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    value = ", ".join(f"{name} {version or '-'}" for name, version in versions.items())
    return Finding("optional packages", value, {"versions": versions})


_LOOKS: tuple[Callable[[], Finding], ...] = (
    _python, _torch, _platform, _cores, _memory, _shared_memory, _open_files, _start_methods,
    _temporary_folder, _threads, _accelerators, _packages,
)  # fmt: skip


def _size(count: int) -> str:
    return f"{count / _GIB:.3g} GiB"
