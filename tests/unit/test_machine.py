"""What a machine allows, from files laid out as Linux does, and where they are missing."""

import os
import subprocess
import sys

import pytest
import torch

from devsample import limits
from devsample.errors import InvalidArgumentError
from devsample.executors.devices import slot_devices
from devsample.machine import available_cores

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """/proc and /sys/fs/cgroup, to be filled by a test."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    monkeypatch.setattr(limits, "_PROC", proc)
    monkeypatch.setattr(limits, "_CGROUP", cgroup)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))

    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n")
    return write


# ---- cores --------------------------------------------------------------------------------------


def test_a_quota_of_a_container_limits_the_cores(system):
    unlimited = available_cores()
    system({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "max 100000\n"})
    assert available_cores() == unlimited
    system({"cgroup/cpu.max": "150000 100000\n"})
    assert limits.core_limits()["cgroup"] == 1
    assert available_cores() == 1
    system({"cgroup/cpu.max": "50000 100000\n"})
    assert available_cores() == 1


def test_a_quota_of_any_group_above_counts(system):
    system(
        {
            "proc/self/cgroup": "0::/jobs/mine\n",
            "cgroup/jobs/cpu.max": "300000 100000\n",
            "cgroup/jobs/mine/cpu.max": "800000 100000\n",
        }
    )
    assert limits.core_limits()["cgroup"] == 3


def test_a_quota_of_version_1(system):
    system(
        {
            "proc/self/cgroup": "4:memory:/a\n2:cpu,cpuacct:/docker/x\n",
            "cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        }
    )
    assert "cgroup" not in limits.core_limits()
    system({"cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n"})
    assert limits.core_limits()["cgroup"] == 2


@pytest.mark.parametrize(("given", "expected"), [("1", 1), ("0", 1), ("many", None), ("", None)])
def test_slurms_share_limits_the_cores(system, monkeypatch, given, expected):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
    assert limits.core_limits().get("SLURM_CPUS_PER_TASK") == expected
    assert available_cores() >= 1


# ---- memory -------------------------------------------------------------------------------------


def test_memory_is_that_of_the_machine_or_of_the_container(system):
    assert limits.memory() == (16 * GIB, 8 * GIB)
    assert limits.memory_limit() is None
    system(
        {
            "proc/self/cgroup": "0::/pod\n",
            "cgroup/pod/memory.max": 4 * GIB,
            "cgroup/pod/memory.current": 3 * GIB,
            "cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        }
    )
    assert limits.memory_limit() == 4 * GIB
    assert limits.memory() == (4 * GIB, 2 * GIB)  # cached files can go


def test_memory_of_version_1(system):
    system(
        {
            "proc/self/cgroup": "4:memory:/docker/x\n",
            "cgroup/memory/memory.limit_in_bytes": 2 * GIB,
            "cgroup/memory/memory.usage_in_bytes": GIB,
        }
    )
    assert limits.memory() == (2 * GIB, GIB)
    system({"cgroup/memory/memory.limit_in_bytes": (1 << 63) - 4096})
    assert limits.memory_limit() is None


def test_memory_of_a_process(system):
    system({"proc/7/smaps_rollup": "Rss: 9 kB\nPss:   5 kB\n", "proc/8/statm": "100 30 1\n"})
    assert limits.process_memory(7) == 5 << 10
    assert limits.process_memory(8) == 30 * os.sysconf("SC_PAGE_SIZE")
    assert limits.process_memory(9) is None


def test_what_is_missing_is_not_known(system, tmp_path, monkeypatch):
    (tmp_path / "proc" / "meminfo").unlink()
    total, available = limits.memory()
    assert 0 < available <= total
    monkeypatch.delattr(os, "sysconf")
    assert limits.memory() is None
    monkeypatch.setattr(limits, "_SHARED_MEMORY", tmp_path / "none")
    assert limits.shared_memory() is None
    assert limits.disk_free(str(tmp_path / "none")) is None
    monkeypatch.delattr(os, "statvfs")
    assert limits.shared_memory() is None
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert limits.core_limits() == {"machine": os.cpu_count()}


# ---- open files ---------------------------------------------------------------------------------


@pytest.mark.skipif(limits.file_limits() is None, reason="no limit on open files here")
def test_a_process_takes_the_files_that_it_may_have():
    code = (
        "import resource\n"
        "from devsample.limits import file_limits, raise_file_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "raise_file_limit()\n"
        "print(*file_limits())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    soft, hard = map(int, done.stdout.split())
    assert soft == (limits.MOST_FILES if hard == -1 else min(hard, limits.MOST_FILES)) > 64


def test_without_such_a_limit_nothing_happens(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert limits.file_limits() is None
    limits.raise_file_limit()


# ---- devices ------------------------------------------------------------------------------------


def chosen(device, available, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: available)
    return slot_devices(2, device, None, None, CPU, 4)


@pytest.mark.parametrize("device", ["mps", "mps:0", torch.device("mps")])
def test_mps_is_taken_where_torch_has_it(device, monkeypatch):
    assert set(chosen(device, True, monkeypatch)) <= {"mps", "mps:0"}
    assert slot_devices(["mps", "cpu"], None, None, None, CPU, 4) == ["mps", "cpu"]


@pytest.mark.parametrize("device", ["mps", "mps:0"])
def test_mps_is_refused_where_torch_has_it_not(device, monkeypatch):
    with pytest.raises(InvalidArgumentError, match=rf"^device: {device} is not available: .*macOS"):
        chosen(device, False, monkeypatch)


def test_there_is_one_mps_device(monkeypatch):
    with pytest.raises(InvalidArgumentError, match=r"^device: mps:1 is not there; there is one, mps:0"):
        chosen("mps:1", True, monkeypatch)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerators")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "hpu"])
def test_an_accelerator_that_is_not_there_is_refused(device):
    with pytest.raises(InvalidArgumentError, match=r"^device: (cuda|xpu|hpu)(:\d)? is not "):
        slot_devices(1, device, None, None, CPU, 1)
