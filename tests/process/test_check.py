"""spec.check(): what a chain would get, measured in a process of its own; and its errors."""

import collections
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from devsample import LoaderSpec
from devsample.errors import (
    ChainProcessError,
    InvalidArgumentError,
    LoaderError,
    LoaderWorkerError,
    NotPicklableError,
)
from tests.factories import estimate, linear_data

ROOT = Path(__file__).parents[2]
QUICK = {"seconds": 0.3, "progress": False}

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Tokens:
    ids: torch.Tensor
    text: list


class Rich(Dataset):
    """Items with everything in them that a batch may hold."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"x": torch.full((2, 3), float(index)), "y": index, "name": f"item {index % 10}"}


def collate(items):
    x = torch.stack([one["x"] for one in items])
    tokens = Tokens(
        torch.tensor([one["y"] for one in items], dtype=torch.int16), [one["name"] for one in items]
    )
    return {"x": x.half(), "pair": Pair(np.zeros((len(items), 2)), None), "tokens": tokens, "n": len(items)}


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch, tmp_path_factory):
    """No process and no file of a check outlives it, however it ends."""
    tmp_path_factory.getbasetemp()  # pytest's own goes elsewhere
    folder = tempfile.mkdtemp(prefix="t-")  # short, for sockets
    monkeypatch.setattr(tempfile, "tempdir", folder)
    before = set(psutil.Process().children(recursive=True))
    yield
    children = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(children, timeout=20)
    assert [one for one in alive if "resource_tracker" not in " ".join(one.cmdline())] == []
    assert os.listdir(folder) == []
    os.rmdir(folder)


# ---- what it finds ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report():
    spec = LoaderSpec(Rich, batch_size=8, collate_fn=collate, num_workers=2, prefetch_factor=3)
    return spec.check((0, 1, 2), seconds=0.6, progress=False)


def test_every_leaf_of_a_batch_is_there_with_its_path(report):
    found = {leaf.path: (leaf.kind, leaf.dtype, leaf.shape, leaf.bytes) for leaf in report.batch}
    assert found == {
        "batch['x']": ("torch.Tensor", "float16", (8, 2, 3), 96),
        "batch['pair'].left": ("numpy.ndarray", "float64", (8, 2), 128),
        "batch['pair'].right": ("NoneType", "", None, 0),
        "batch['tokens'].ids": ("torch.Tensor", "int16", (8,), 16),
        "batch['tokens'].text[0] … batch['tokens'].text[7]": ("str × 8", "", None, 48),
        "batch['n']": ("int", "", None, 0),
    }
    assert report.batch_bytes == 96 + 128 + 16 + 48
    assert report.num_samples == 40
    assert report.repeatable is True


def test_each_number_of_workers_is_measured_in_order(report):
    counts = [(one.num_workers, one.method) for one in report.timings]
    assert counts[0] == (0, "")
    assert [count for count, _ in counts] == sorted(count for count, _ in counts)
    assert {1, 2} <= {count for count, _ in counts}
    for one in report.timings:
        assert one.error == ""
        assert one.batches >= 2
        assert one.first_batch > 0
        assert 0 < one.per_batch <= one.longest
    with_workers = [one for one in report.timings if one.num_workers]
    if Path("/proc/self/smaps_rollup").exists():
        assert all(1 << 20 < one.worker_memory < 1 << 32 for one in with_workers)
    assert {one.data_set for one in with_workers if one.method != "fork"} == {"sent"}


def test_a_report_is_a_table_and_plain_values(report):
    text = str(report)
    assert "40 samples" in text
    assert re.search(r"batch\['x'\] +torch\.Tensor +float16 +\(8, 2, 3\) +96 B", text)
    assert f"recommended: num_workers={report.num_workers}" in text
    assert report.reason in text
    values = json.loads(json.dumps(report.to_dict()))
    assert values["num_samples"] == 40
    assert values["batch"][0]["shape"] == [8, 2, 3]
    assert len(values["timings"]) == len(report.timings)


def test_what_the_recipe_carries():
    data = TensorDataset(torch.zeros(1 << 20), torch.zeros(1 << 20))
    report = LoaderSpec(data, batch_size=4).check(0, **QUICK)
    assert 2 << 22 <= report.recipe_bytes + report.shared_bytes < (2 << 22) + (1 << 16)
    assert report.shared_bytes >= 2 << 22
    assert (report.num_workers, report.prefetch_factor, report.multiprocessing_context) == (0, None, None)
    assert report.shared_memory_needed == 0


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(12):
            yield torch.full((3,), float(index))


def test_an_iterable_data_set(recwarn):
    report = LoaderSpec(Stream, batch_size=4, num_samples=12, num_workers=1).check((0, 1), **QUICK)
    assert report.num_samples == 12
    assert [leaf.shape for leaf in report.batch] == [(4, 3)]
    assert [one.error for one in report.timings] == [""] * len(report.timings)
    assert not recwarn.list


def make_locked():
    data = linear_data(64)
    data.lock = threading.Lock()
    return data


def test_a_data_set_that_workers_make_again():
    report = LoaderSpec(make_locked, batch_size=4, num_workers=1).check((), **QUICK)
    assert [one.data_set for one in report.timings if one.num_workers and one.method != "fork"] == [
        "made again in each"
    ]


def make_unrepeatable():
    return TensorDataset(torch.frombuffer(bytearray(os.urandom(64)), dtype=torch.uint8))


class Ragged(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(index + 1)


def test_what_cannot_be_repeated_and_what_changes_is_noted():
    report = LoaderSpec(make_unrepeatable, batch_size=4).check(0, **QUICK)
    assert report.repeatable is False
    assert "NOT the same when built again" in str(report)
    assert "os.urandom" in report.notes[0]
    report = LoaderSpec(Ragged(), sampling="sequential").check(0, **QUICK)
    assert report.repeatable is True
    assert report.notes == ("batch had the shape (1, 2) in the second batch.",)


class DiesInWorkers(Dataset):
    """Works in the chain process; ``how`` says what happens in a worker."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if get_worker_info() is not None:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                time.sleep(1000)
            raise ValueError("not in a worker")
        return torch.tensor(index)


def test_workers_that_only_a_trial_asked_for_are_no_error():
    report = LoaderSpec(DiesInWorkers("raise"), batch_size=2).check(1, **QUICK)
    failed = [one for one in report.timings if one.num_workers == 1]
    assert all("not in a worker" in one.error for one in failed)
    assert report.num_workers == 0
    assert "with workers it did not work" in report.reason
    assert re.search(r"^1 +forkserver +failed$", str(report), re.MULTILINE)
    assert re.search(r"^note: 1 worker \(forkserver\): .*not in a worker", str(report), re.MULTILINE)


def test_it_says_what_it_is_doing(capsys):
    LoaderSpec(linear_data(8)).check(0, seconds=0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("check: ")
    assert "check: making the data set" in lines


# ---- errors -------------------------------------------------------------------------------------


def broken_factory():
    raise OSError("no such bucket")


def test_a_failing_factory_is_told_as_in_a_run():
    with pytest.raises(LoaderError) as in_check:
        LoaderSpec(broken_factory, batch_size=16).check(0, **QUICK)
    with pytest.raises(LoaderError) as in_run:
        estimate(spec={"dataset": broken_factory}, executor="processes")
    assert str(in_check.value) == str(in_run.value)
    assert "the factory raised OSError: no such bucket" in str(in_check.value)
    assert "broken_factory" in str(in_check.value)


def test_what_cannot_travel_is_named_before_a_process_starts():
    data = Rich()
    data.lock = threading.Lock()
    with pytest.raises(NotPicklableError, match=r"^loader_spec\.dataset\.lock is a _thread\.lock"):
        LoaderSpec(data).check(**QUICK)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", r"loader worker 0 \(pid \d+\) was killed by SIGKILL"),
        pytest.param("raise", "ValueError: not in a worker", marks=pytest.mark.slow),
    ],
)
def test_workers_of_the_recipe_that_fail_are_an_error(how, message):
    with pytest.raises(LoaderWorkerError, match=message):
        LoaderSpec(DiesInWorkers(how), batch_size=2, num_workers=1).check((), **QUICK)


@pytest.mark.slow
def test_workers_of_the_recipe_that_hang_are_an_error():
    spec = LoaderSpec(DiesInWorkers("hang"), batch_size=2, num_workers=1, timeout=20)
    with pytest.raises(LoaderError, match=r"no batch for 2\d s \(timeout=20\)"):
        spec.check((), **QUICK)


def hanging_factory():
    time.sleep(1000)


def test_a_factory_that_hangs_is_an_error_that_says_where():
    with pytest.raises(LoaderError) as caught:
        LoaderSpec(hanging_factory).check(0, **QUICK)
    message = str(caught.value)
    assert "nothing came for 10 s" in message
    assert "making the data set" in message
    assert "in hanging_factory" in message


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        pytest.param(lambda: os._exit(3), "ended with exit code 3", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_is_an_error(end, how):
    with pytest.raises(ChainProcessError, match=rf"{how}.* making the data set"):
        LoaderSpec(end).check(0, **QUICK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": -1}, "num_workers: expected numbers of workers"),
        ({"num_workers": (0, 1.5)}, "num_workers: expected numbers of workers"),
        ({"num_workers": "two"}, "num_workers: expected numbers of workers"),
        ({"seconds": 0}, "seconds: expected a number > 0, got 0"),
        ({"seconds": float("nan")}, "seconds: expected a number > 0, got nan"),
        ({"device": "mps:7"}, "device: mps"),
        ({"device": "disk"}, "device: 'disk' is no device"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        LoaderSpec(linear_data(8)).check(**arguments)


# ---- programs -----------------------------------------------------------------------------------

PROGRAM = """
import torch
from torch.utils.data import Dataset
from devsample import LoaderSpec

print("top level")

class Items(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor([float(index)])

report = LoaderSpec(Items, batch_size=4, num_workers=1, collate_fn=lambda items: torch.cat(items)).check(
    (0, 1), seconds=0.3, progress=False
)
print(report.num_samples, report.batch[0].shape, {one.error for one in report.timings})
"""


@pytest.mark.parametrize("way", ["standard input", pytest.param("command", marks=pytest.mark.slow)])
def test_it_works_from_a_program_without_a_guard(way, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", *(["-"] if way == "standard input" else ["-c", PROGRAM])],
        input=PROGRAM if way == "standard input" else None,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "top level\n16 (4,) {''}\n"


MODULE = """
import torch
from torch.utils.data import TensorDataset

def make(n, *, scale=1.0):
    return TensorDataset(scale * torch.arange(float(n)))

def make_broken():
    raise RuntimeError("the disk is gone")
"""

SPEC = """
[loader_spec]
dataset = "own_data:make"
dataset_args = [12]
batch_size = 3

[loader_spec.dataset_kwargs]
scale = 2.0
"""


def run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "devsample", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own_data.py").write_text(MODULE)
    (tmp_path / "loader.toml").write_text(SPEC)
    return tmp_path


def test_the_command_line_takes_an_import_path(folder):
    done = run(
        "check", "own_data:make", "--args", "[20]", "--kwargs", '{"scale": 3.0}', "--batch-size", "5",
        "--set", "sampling=sequential", "--num-workers", "0", "--seconds", "0.2", "--json", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["num_samples"] == 20
    assert values["batch"][0]["shape"] == [5]
    assert "check: making the data set" in done.stderr


def test_the_command_line_takes_a_file(folder):
    done = run("check", "loader.toml", "--num-workers", "0", "--seconds", "0.2", "--quiet", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("12 samples")
    assert "float32" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["own_data:make_broken", "--quiet"], 1, "the factory raised RuntimeError: the disk is gone"),
        (["own_data:maker", "--args", "[3]"], 1, "there is no 'maker'. Did you mean 'make'?"),
        (["missing.toml"], 1, "missing.toml cannot be read"),
        (["loader.toml", "--set", "batchsize=3"], 1, "Did you mean 'batch_size'?"),
        (["own_data:make", "--args", "[3"], 2, "is no JSON"),
        (["own_data:make", "--set", "batch_size"], 2, "expected FIELD=VALUE"),
        (["own_data:make", "--num-workers", "a"], 2, "expected numbers separated by commas"),
    ],
)
def test_errors_of_the_command_line(folder, arguments, code, message):
    done = run("check", *arguments, "--seconds", "0.2", cwd=folder)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interrupt_leaves_nothing(folder):
    with subprocess.Popen(
        [sys.executable, "-m", "devsample", "check", "loader.toml", "--num-workers", "2", "--seconds", "100"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        shown = ""
        while "2 workers" not in shown:
            line = process.stderr.readline()
            assert line, shown
            shown += line
        time.sleep(2)  # workers are starting
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
    assert children
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
