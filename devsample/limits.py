"""What this machine lets a process have: cores, memory, shared memory, open files.

Every number comes from a facility that not all platforms have. Where one is missing its function
says None (or leaves an entry out), and nothing else changes.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_UNLIMITED = 1 << 60  # version 1 of cgroups says "no limit" with a huge number
MOST_FILES = 1 << 16


def core_limits() -> dict[str, int]:
    """How many CPU cores this process may use, by who says so.

    Keys, where they are known: "machine", "affinity", "cgroup" (a container's quota, whole cores)
    and "SLURM_CPUS_PER_TASK".
    """
    found = {"machine": os.cpu_count() or 1}
    if hasattr(os, "sched_getaffinity"):
        found["affinity"] = len(os.sched_getaffinity(0))
    quota = _cgroup_cores()
    if quota is not None:
        found["cgroup"] = quota
    with contextlib.suppress(KeyError, ValueError):
        found["SLURM_CPUS_PER_TASK"] = max(1, int(os.environ["SLURM_CPUS_PER_TASK"]))
    return found


def memory() -> tuple[int, int] | None:
    """Bytes of memory in all and available, of the machine or of the container, whichever is less."""
    found = _machine_memory()
    if found is None:
        return None
    total, available = found
    for folder in _cgroup_folders():
        limit = _memory_limit(folder)
        if limit is not None:
            total, available = min(total, limit), min(available, max(0, limit - _memory_used(folder)))
    return total, available


def memory_limit() -> int | None:
    """Bytes of memory that the cgroups of this process allow; None: no limit."""
    limits = [limit for limit in map(_memory_limit, _cgroup_folders()) if limit is not None]
    return min(limits, default=None)


def process_memory(pid: int) -> int | None:
    """Bytes of memory of a process: its share of what it shares with others, where that is known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def shared_memory() -> tuple[int, int] | None:
    """Bytes of shared memory in all and free, where it is a file system of a fixed size."""
    if not hasattr(os, "statvfs"):
        return None
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def disk_free(folder: str) -> int | None:
    """Bytes free where ``folder`` is."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def file_limits() -> tuple[int, int] | None:
    """How many files a process may have open: now, and at most if it asks; -1: any number."""
    try:
        import resource
    except ImportError:  # not POSIX
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    return -1 if soft == infinite else soft, -1 if hard == infinite else hard


def raise_file_limit() -> None:
    """Let this process open as many files as it may, at most 65536.

    Every batch that waits takes a few, and 1024 are soon used up.
    """
    limits = file_limits()
    if limits is None:
        return
    import resource

    soft, hard = limits
    wanted = MOST_FILES if hard == -1 else min(hard, MOST_FILES)
    if soft != -1 and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit on top
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted, resource.RLIM_INFINITY if hard == -1 else hard)
            )


def _machine_memory() -> tuple[int, int] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        lines = (line.split() for line in (_PROC / "meminfo").read_text().splitlines())
        found = {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if len(line) > 2}
        return found["MemTotal"], found["MemAvailable"]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        with contextlib.suppress(ValueError):
            return total, page * os.sysconf("SC_AVPHYS_PAGES")
        return total, total
    return None


def _cgroup_folders() -> Iterator[Path]:
    """This process's cgroup and those above it, which limit it too."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        root = _CGROUP / controllers if controllers else _CGROUP
        folder = root / path.lstrip("/")
        yield from (one for one in (folder, *folder.parents) if one.is_relative_to(root))
    yield _CGROUP


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # version 2 says "max" for no limit
        return None


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _number(folder / name)
        if limit is not None and limit < _UNLIMITED:
            return limit
    return None


def _memory_used(folder: Path) -> int:
    """Bytes in use, without cached files that nobody needs now."""
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name in ("inactive_file", "total_inactive_file"):
                return max(0, used - int(value))
    return used


def _cgroup_cores() -> int | None:
    quotas = [quota for quota in map(_core_quota, _cgroup_folders()) if quota is not None]
    return max(1, math.floor(min(quotas))) if quotas else None


def _core_quota(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    quota_v1, period_v1 = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota_v1 / period_v1 if quota_v1 and period_v1 and quota_v1 > 0 else None
