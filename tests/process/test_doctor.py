"""``devsample doctor``: what it shows, what it warns of, and the remedy."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-W", "error", "-m", "devsample", "doctor"]
NAMES = [
    "python", "torch", "platform", "cores", "memory", "shared memory", "open files", "start methods",
    "temporary folder", "threads", "accelerators", "optional packages",
]  # fmt: skip


def run(command=DOCTOR, **environment):
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def findings(command=DOCTOR, **environment):
    """The findings by name."""
    done = run([*command, "--json"], **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return {one["name"]: one for one in json.loads(done.stdout)}


def test_every_fact_has_a_line():
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if not line.strip().startswith("→")]
    assert [line[9:].split("  ")[0].strip() for line in lines] == NAMES
    assert {line[:9].strip() for line in lines} <= {"ok", "warning"}
    assert platform.python_version() in done.stdout
    assert torch.__version__ in done.stdout


def test_facts_as_json():
    found = findings(OMP_NUM_THREADS="3", SLURM_CPUS_PER_TASK="1")
    assert list(found) == NAMES
    assert found["torch"]["numbers"]["version"] == torch.__version__
    assert found["cores"]["numbers"]["cores"] == 1
    assert found["threads"]["numbers"]["variables"]["OMP_NUM_THREADS"] == "3"
    assert "spawn" in found["start methods"]["numbers"]["methods"]
    assert found["optional packages"]["numbers"]["versions"]["matplotlib"]
    assert not found["cores"]["ok"]
    assert "num_workers=0" in found["cores"]["remedy"]
    assert found["python"]["ok"]
    assert found["python"]["remedy"] == ""


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_few_open_files_are_warned_of():
    doctor = ["sh", "-c", f"ulimit -Sn 200 && exec {shlex.join(DOCTOR)} --json"]
    found = json.loads(run(doctor).stdout)
    files = next(one for one in found if one["name"] == "open files")
    assert files["numbers"]["soft"] == 200
    assert not files["ok"]
    assert "ulimit -n" in files["remedy"]


PRIVATE = "mount -t tmpfs -o size=32m tmpfs /dev/shm"


def can_mount():
    """Whether this user may give a process a small shared memory of its own."""
    if shutil.which("unshare") is None or not os.path.isdir("/dev/shm"):
        return False
    return (
        subprocess.run(["unshare", "-m", "sh", "-c", PRIVATE], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.skipif(not can_mount(), reason="may not mount")
def test_little_shared_memory_is_warned_of():
    done = run(["unshare", "-m", "sh", "-c", f"{PRIVATE} && exec {shlex.join(DOCTOR)} --json"])
    found = next(one for one in json.loads(done.stdout) if one["name"] == "shared memory")
    assert found["numbers"]["total"] == 32 << 20
    assert "--shm-size" in found["remedy"]


def test_a_warning_is_followed_by_the_remedy():
    lines = run(SLURM_CPUS_PER_TASK="1").stdout.splitlines()
    index = next(number for number, line in enumerate(lines) if "cores" in line)
    assert lines[index].startswith("warning")
    assert lines[index + 1].strip().startswith("→ chains and loader workers share one core")
