"""Runs and checks where everything that only Linux has is missing, as on other platforms."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Python imports this module in every process that it starts with this folder on its path: in the
# chain processes and loader workers of the run, too.
ELSEWHERE = """
import multiprocessing
import multiprocessing.context
import os
import sys

HIDDEN = ("/proc", "/dev/shm", "/sys/fs/cgroup")

for name in (
    "sched_getaffinity", "sched_setaffinity", "setsid", "setpgid", "killpg", "memfd_create", "pidfd_open",
    "posix_fallocate",
):
    if hasattr(os, name):
        delattr(os, name)

sys.modules["resource"] = None
sys.modules["fcntl"] = None

contexts = multiprocessing.context._concrete_contexts
for name in ("fork", "forkserver"):
    contexts.pop(name, None)
multiprocessing.context.DefaultContext.get_all_start_methods = lambda self: ["spawn"]
multiprocessing.get_all_start_methods = lambda: ["spawn"]
multiprocessing.context._default_context._default_context = contexts["spawn"]

statvfs = os.statvfs


def hidden(path):
    return isinstance(path, (str, bytes)) and os.fsdecode(path).startswith(HIDDEN)


def look(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and hidden(arguments[0]):
        raise FileNotFoundError(2, "hidden", arguments[0])


def statvfs_elsewhere(path):
    if hidden(os.fspath(path) if hasattr(path, "__fspath__") else path):
        raise FileNotFoundError(2, "hidden", path)
    return statvfs(path)


os.statvfs = statvfs_elsewhere
sys.addaudithook(look)
"""

PROGRAM = """
import json
import multiprocessing
import os

import torch
from torch.utils.data import Dataset

import devsample
from devsample import LoaderSpec, limits

for path in ("/proc/self/status", "/sys/fs/cgroup/cpu.max"):
    try:
        open(path)
    except FileNotFoundError:
        continue
    raise SystemExit(f"{path} is not hidden")
assert multiprocessing.get_all_start_methods() == ["spawn"]
assert limits.core_limits().keys() <= {"machine", "SLURM_CPUS_PER_TASK"}
assert limits.shared_memory() is None and limits.file_limits() is None
assert limits.process_memory(os.getpid()) is None


def nothing_of_linux():
    return not any(hasattr(os, name) for name in ("setsid", "killpg", "memfd_create", "sched_getaffinity"))


class Items(Dataset):
    def __init__(self):
        assert nothing_of_linux()  # in the chain process
        self.x = torch.linspace(-1, 1, 64).unsqueeze(1)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        assert nothing_of_linux()  # in the worker
        return self.x[index], self.x[index] + 0.1 * torch.rand(1)


def squared(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


model = torch.nn.Linear(1, 1)
with torch.no_grad():
    model.weight.fill_(1.0)
    model.bias.zero_()
spec = LoaderSpec(Items, batch_size=8, num_workers=1)
assert spec.multiprocessing_context == "spawn"
large = torch.zeros(1 << 18)
runs = [
    devsample.estimate_learning_coeff_with_summary(
        model, loader_spec=one, evaluate=lambda m, b: squared(m, b) + large[0], optimizer_kwargs={"lr": 1e-3},
        num_chains=2, num_draws=10, cores=cores, seed=0, verbose=False,
    )
    for one, cores in ((spec, 2), (LoaderSpec(Items, batch_size=8), 1))
]
report = spec.check((0, 1), seconds=0.3, progress=False)
print(json.dumps({
    "status": list(runs[0].chains["status"]),
    "same": bool((runs[0].draws["loss"] == runs[1].draws["loss"]).all()),
    "methods": [[one.num_workers, one.method, one.error] for one in report.timings],
    "free": report.shared_memory_free,
}))
"""


@pytest.fixture
def elsewhere(tmp_path):
    """Run Python in a process in which, and below which, there is nothing that only Linux has."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(ELSEWHERE)

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-W", "error", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{tmp_path / 'path'}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run


@pytest.mark.skipif(os.name != "posix", reason="hides what POSIX has")
def test_a_run_and_a_check_without_what_only_linux_has(elsewhere):
    found = json.loads(elsewhere("-c", PROGRAM))
    assert found == {
        "status": ["done", "done"],
        "same": True,
        "methods": [[0, "", ""], [1, "spawn", ""]],
        "free": None,
    }


@pytest.mark.skipif(os.name != "posix", reason="hides what POSIX has")
def test_the_doctor_says_what_it_does_not_know(elsewhere):
    found = {one["name"]: one for one in json.loads(elsewhere("-m", "devsample", "doctor", "--json"))}
    assert "/dev/shm" in found["shared memory"]["value"]
    assert found["open files"]["value"] == "not limited on this platform"
    assert found["start methods"]["numbers"] == {"methods": ["spawn"], "workers": "spawn"}
