"""The scripts in docs/examples show plain PyTorch failing, and devsample at work on the same data."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
DRAWS = r"200 draws from 2 chains, λ̂ = \d+\.\d\d"
PICKLED = r"AttributeError: Can't (get|pickle) local object 'Trainer\.__init__\.<locals>\.data_collator'"

LINES = {
    "persistent_loader": (
        r"plain PyTorch: NotImplementedError: \('\{\} cannot be pickled', '_MultiProcessingDataLoaderIter'\)",
        rf"devsample: {DRAWS}",
    ),
    "process_group": (
        r"plain PyTorch: TypeError: cannot pickle 'torch\._C\._distributed_c10d\.ProcessGroup' object",
        r"devsample, the data set itself: loader_spec\.dataset\.sampling\.distributed\.world is a .*Group",
        rf"devsample, its class as a factory: {DRAWS}",
    ),
    "fds_to_keep": (
        r"plain PyTorch, Regression: ValueError: bad value\(s\) in fds_to_keep",
        r"plain PyTorch, Packed: ValueError: bad value\(s\) in fds_to_keep",
        rf"devsample, Regression: {DRAWS}",
        r"devsample, Packed: batches of \[\(50, 3\), \(50, 3\)\] from a spawned worker",
    ),
    "local_collator": (
        rf"plain PyTorch, spawn: {PICKLED}",
        rf"plain PyTorch, forkserver: {PICKLED}",
        rf"devsample, spawn: {DRAWS}",
    ),
}


SLOW = {"persistent_loader", "process_group", "fds_to_keep"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in sorted(LINES)]
)
def test_both_halves(name, tmp_path):
    command = [sys.executable, "-W", "error", "-X", "utf8", str(EXAMPLES / f"{name}.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    for line in LINES[name]:
        assert re.search(f"^{line}", ended.stdout, re.MULTILINE), (line, ended.stdout)
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_dashboards_are_those_of_the_docs(tmp_path):
    command = [sys.executable, "-X", "utf8", str(EXAMPLES / "dashboards.py"), str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=240)
    shown = {path.name for path in (EXAMPLES.parent / "images").glob("dashboard-*.png")}
    assert {path.name for path in tmp_path.glob("*.png")} == shown


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*LINES, "dashboards"}
