"""One copy of large data on both hops, and classes that no other process can import."""

import dataclasses
import enum
import gc
import os
import signal
import subprocess
import sys
import types
import warnings
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from devsample.data import CompactList, LoaderSpec
from devsample.data.loader import ChainLoader
from devsample.errors import LargePayloadWarning, LoaderWorkerError
from devsample.seeds import chain_keys
from devsample.shared import LINUX
from tests.factories import estimate, linear_data

METHODS = pytest.mark.parametrize(
    "method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
)
NOT_FORKED = pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
linux_only = pytest.mark.skipif(not LINUX, reason="asks Linux what is mapped where")
LARGE = 10_000_000  # numbers, 40 MB


def first_batches(spec: LoaderSpec, count: int = 3) -> list:
    """The first batches of a loader with workers, which are ended."""
    loader = spec.build(seed=0)
    try:
        return [batch for batch, _ in zip(loader, range(count), strict=False)]
    finally:
        loader.close()


def mapped_file(address: int) -> str:
    """The file that lies at an address of this process, and how it is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, how, _, _, _, *name = line.split(maxsplit=5)
        start, stop = (int(one, 16) for one in span.split("-"))
        if start <= address < stop:
            return f"{how} {name[0] if name else ''}"
    raise AssertionError("no such address")


# --- one copy ------------------------------------------------------------------------------------


class Rows(Dataset):
    """Says of each item, as text, where the worker has its memory from."""

    def __init__(self, rows: object) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[str, float]:
        rows = self.rows
        address = rows.data_ptr() if isinstance(rows, torch.Tensor) else rows.ctypes.data
        assert get_worker_info() is not None
        return mapped_file(address), float(rows[3])


def texts_and_numbers(items: list) -> list:
    return items


def where(rows: object, method: str) -> str:
    """Where a loader worker has its memory from, after a look at the values."""
    spec = LoaderSpec(
        Rows(rows),
        batch_size=4,
        num_workers=1,
        multiprocessing_context=method,
        collate_fn=texts_and_numbers,
    )
    (items,) = first_batches(spec, 1)
    assert {number for _, number in items} == {3.0}
    (place,) = {text for text, _ in items}
    return place


@linux_only
@NOT_FORKED
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_workers_map_a_block_of_the_process_that_started_them(kind, method):
    array = np.arange(LARGE, dtype=np.float32)
    rows = torch.tensor(array) if kind == "tensor" else array
    assert where(rows, method) == "rw-p /memfd:devsample (deleted)"


@linux_only
def test_the_process_that_started_them_uses_the_block_itself():
    rows = torch.arange(LARGE, dtype=torch.float32)
    loader = LoaderSpec(TensorDataset(rows), batch_size=4, num_workers=1).build(seed=0)
    next(iter(loader))
    assert mapped_file(rows.data_ptr()) == "rw-p /memfd:devsample (deleted)"
    rows[0] = -7.0  # its own from now on
    loader.close()
    assert torch.equal(rows[1:], torch.arange(1, LARGE, dtype=torch.float32))


@linux_only
@NOT_FORKED
@pytest.mark.parametrize("kind", ["memory map", "part of a map", "tensor of a file"])
def test_workers_map_the_file_of_a_mapped_data_set(kind, method, tmp_path):
    path = tmp_path / "rows"
    np.arange(LARGE, dtype=np.float32).tofile(path)
    rows = {
        "memory map": lambda: np.memmap(path, np.float32, "r"),
        "part of a map": lambda: np.memmap(path, np.float32, "r+")[:-5],
        "tensor of a file": lambda: torch.from_file(str(path), True, LARGE),
    }[kind]()
    how = "r--s" if kind == "memory map" else "rw-p"
    assert where(rows, method) == f"{how} {path}"


@linux_only
def test_data_of_a_run_are_mapped_from_its_folder_by_workers_too(tmp_path):
    """Captured data: written once, mapped by chain processes and their workers."""
    rows = torch.arange(LARGE, dtype=torch.float32)
    array = np.arange(LARGE, dtype=np.float32)

    class Noted(Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> object:
            note = tmp_path / f"{os.getpid()}"
            note.write_text(f"{mapped_file(rows.data_ptr())}\n{mapped_file(array.ctypes.data)}")
            return torch.ones(4) * rows[index] / array[63], torch.zeros(1)

    folder = tmp_path / "run"
    spec = {"dataset": Noted(), "num_workers": 2}
    result = estimate(cores=2, spec=spec, run_dir=folder)
    assert list(result.chains["status"]) == ["done", "done"]
    expected = f"rw-p {folder / 'data.safetensors'}"
    notes = [path.read_text() for path in tmp_path.iterdir() if path.is_file()]
    assert len(notes) >= 2
    assert set(notes) == {f"{expected}\n{expected}"}
    assert mapped_file(rows.data_ptr()).split() in (["rw-p"], ["rw-p", "[heap]"])  # the user's folder: a copy


@pytest.mark.slow
@linux_only
def test_the_caller_uses_the_file_of_a_temporary_run_folder():
    dataset = TensorDataset(torch.ones(LARGE // 5, 5), torch.ones(LARGE // 5, 1))
    loader_spec = LoaderSpec(dataset, batch_size=16)
    for _ in range(2):  # the second time the file has no name any more
        result = estimate(cores=2, loader_spec=loader_spec, model=torch.nn.Linear(5, 1))
        assert list(result.chains["status"]) == ["done", "done"]
        assert mapped_file(dataset.tensors[0].data_ptr()).endswith("/data.safetensors (deleted)")
        assert float(dataset.tensors[0].double().sum()) == LARGE


@linux_only
def test_in_the_callers_process_no_tensor_changes_its_memory():
    dataset = TensorDataset(torch.ones(LARGE // 5, 5), torch.ones(LARGE // 5, 1))
    before = [rows.data_ptr() for rows in dataset.tensors]
    loader_spec = LoaderSpec(dataset, batch_size=16)
    estimate(cores=1, loader_spec=loader_spec, model=torch.nn.Linear(5, 1))
    assert [rows.data_ptr() for rows in dataset.tensors] == before


@NOT_FORKED
def test_writes_of_workers_and_of_the_chain_stay_their_own(method):
    class Written(Dataset):
        def __init__(self) -> None:
            self.rows = torch.zeros(LARGE)

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> torch.Tensor:
            self.rows[0] += 1
            return self.rows[0].clone()

    dataset = Written()
    spec = LoaderSpec(dataset, batch_size=1, num_workers=2, multiprocessing_context=method, prefetch_factor=1)
    seen = [int(batch) for batch in first_batches(spec, 6)]
    assert seen == [1, 1, 2, 2, 3, 3]  # each worker counts for itself
    assert dataset.rows[0] == 0


class Signed(Dataset):
    """Rows, each with the process that read it."""

    def __init__(self) -> None:
        self.rows = torch.arange(LARGE, dtype=torch.float32)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index].clone(), os.getpid()


@pytest.mark.slow
@NOT_FORKED
def test_workers_can_be_started_again_and_get_the_same_data(method):
    spec = LoaderSpec(
        Signed(),
        batch_size=8,
        sampling="sequential",
        num_workers=1,
        multiprocessing_context=method,
    )
    seen = []
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=torch.device("cpu")) as loader:
        for _ in range(2):
            requests = loader.requests(0, 0) + loader.requests(0, 1)
            batches = [batch for _, batch in loader.serve(requests)]
            assert [rows.tolist() for rows, _ in batches] == [list(range(8)), list(range(8, 16))]
            seen.append(int(batches[0][1][0]))
            os.kill(seen[-1], signal.SIGKILL)
            with pytest.raises(LoaderWorkerError, match="SIGKILL"):
                list(loader.serve(loader.requests(0, 2)))
    assert seen[0] != seen[1]


@pytest.mark.slow
@linux_only
def test_a_closed_loader_lets_go_of_its_memory():
    def blocks() -> int:
        numbers = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
        return sum("memfd:devsample" in os.readlink(one) for one in numbers if os.path.lexists(one))

    rows = np.arange(LARGE, dtype=np.float32)
    loader = LoaderSpec(Rows(rows), batch_size=4, num_workers=1, collate_fn=texts_and_numbers).build()
    next(iter(loader))
    assert blocks() == 1
    loader.close()
    assert blocks() == 0
    loader = LoaderSpec(Rows(rows), batch_size=4, num_workers=1, collate_fn=texts_and_numbers).build()
    next(iter(loader))
    assert blocks() == 1
    del loader  # without a word
    gc.collect()
    assert blocks() == 0


@pytest.mark.slow
def test_a_factory_that_captures_data_gives_one_copy_to_workers_that_rebuild():
    rows = torch.arange(LARGE, dtype=torch.float32)
    spec = LoaderSpec(
        lambda: Rows(rows),
        batch_size=4,
        num_workers=1,
        worker_dataset="rebuild",
        collate_fn=texts_and_numbers,
    )
    (items,) = first_batches(spec, 1)
    if LINUX:
        assert {text for text, _ in items} == {"rw-p /memfd:devsample (deleted)"}


@METHODS
def test_a_compact_list_is_a_data_set(method):
    rows = CompactList({"text": f"row {index}", "label": index} for index in range(100))
    spec = LoaderSpec(
        rows, batch_size=50, sampling="sequential", num_workers=1, multiprocessing_context=method
    )
    (batch,) = first_batches(spec, 1)
    assert batch["label"].tolist() == list(range(50))
    assert batch["text"][7] == "row 7"


def test_a_small_part_of_a_large_tensor_is_sent_without_the_rest():
    """batch_size=None with parts of a tensor as batches; the data set itself stays where it is."""

    class Parts(Dataset):
        def __init__(self) -> None:
            self.rows = torch.arange(LARGE, dtype=torch.float32)

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> tuple[torch.Tensor, bool]:
            return self.rows[index * 10 : index * 10 + 10], self.rows.is_shared()

    spec = LoaderSpec(Parts(), batch_size=None, num_samples=1000, num_workers=1)
    for part, shared in first_batches(spec):
        assert len(part) == 10
        assert part.untyped_storage().nbytes() == 40
        assert not shared


# --- modules and classes that only this process has ----------------------------------------------


@pytest.fixture
def plugin(monkeypatch):
    """A module made in memory."""
    module = types.ModuleType("made_in_memory")
    source = (
        "import torch\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __init__(self, data): self.data = data\n"
        "    def __len__(self): return len(self.data)\n"
        "    def __getitem__(self, index): return self.data[index]\n"
        "def collate(items): return [torch.stack(one) for one in zip(*items)]\n"
        "def evaluate(model, batch): return ((model(batch[0]) - batch[1]) ** 2).mean()\n"
        "def start(worker): assert collate is not None\n"
    )
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, "made_in_memory", module)
    return module


@NOT_FORKED
def test_a_module_made_in_memory_travels_over_both_hops(plugin, method):
    spec = {
        "dataset": plugin.Data(linear_data()),
        "collate_fn": plugin.collate,
        "worker_init_fn": plugin.start,
        "num_workers": 2,
        "multiprocessing_context": method,
    }
    result = estimate(cores=2, spec=spec, evaluate=plugin.evaluate)
    plain = estimate(cores=1)
    torch.testing.assert_close(result["loss/trace"], plain["loss/trace"])


@METHODS
def test_batches_of_classes_without_a_home_arrive_as_those_classes(method):
    Pair = namedtuple("Pair", "x y")

    @dataclasses.dataclass
    class Sample:
        x: torch.Tensor
        kind: object

        def total(self) -> float:
            return float(self.x.sum())

    class Colour(enum.Enum):
        RED = 1

    def collate(items: list) -> object:
        x = torch.stack([x for x, _ in items])
        return [x, Pair(x, {"inner": Sample(x, Colour.RED)})]

    spec = LoaderSpec(
        linear_data(), batch_size=4, collate_fn=collate, num_workers=2, multiprocessing_context=method
    )
    batches = first_batches(spec, 6)
    for plain, pair in batches:
        sample = pair.y["inner"]
        assert isinstance(pair, Pair)
        assert isinstance(sample, Sample)
        assert sample.kind is Colour.RED
        assert sample.total() == float(plain.sum())
        assert pair.x.is_shared()  # did not go through the pipe
    expected = first_batches(LoaderSpec(linear_data(), batch_size=4, collate_fn=collate), 6)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(batches, expected, strict=True))


SCRIPT = """
import dataclasses, sys, torch, devsample

@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor

class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return Batch(torch.ones(4) * index / 64, torch.ones(1))

def collate(items):
    return Batch(torch.stack([one.x for one in items]), torch.stack([one.y for one in items]))

def evaluate(model, batch):
    assert isinstance(batch, Batch)
    return ((model(batch.x) - batch.y) ** 2).mean()

method, cores = sys.argv[1], int(sys.argv[2])
spec = devsample.LoaderSpec(
    Data(), batch_size=8, collate_fn=collate, num_workers=2, multiprocessing_context=method)
result = devsample.estimate_learning_coeff_with_summary(
    torch.nn.Linear(4, 1), loader_spec=spec, evaluate=evaluate, num_chains=2, num_draws=5, cores=cores,
    optimizer_kwargs={"lr": 1e-4, "localization": 1.0}, verbose=False)
print(list(result.chains["status"]))
"""


@pytest.mark.parametrize(
    ("method", "cores"),
    [
        ("forkserver", 2),
        *(
            pytest.param(method, cores, marks=pytest.mark.slow)
            for method in ("fork", "forkserver", "spawn")
            for cores in (1, 2)
            if (method, cores) != ("forkserver", 2)
        ),
    ],
)
def test_batches_of_classes_of_a_script_from_standard_input(method, cores, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-", method, str(cores)],
        input=SCRIPT,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "['done', 'done']"


# --- shared memory that is too small -------------------------------------------------------------

SMALL = """
import torch, warnings
from devsample.data import LoaderSpec

class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((1 << 19,), float(index)), index

if __name__ == "__main__":
    spec = LoaderSpec(Data(), batch_size=8, sampling="sequential", num_workers=2)
    loader = spec.build(num_steps=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, (rows, numbers) in enumerate(loader):
            assert numbers.tolist() == list(range(8 * step, 8 * step + 8))
            assert torch.equal(rows[:, -1], numbers.float())
            rows.add_(1)
    assert step == 7
    print(len(caught))
    print(caught[0].message)
"""


@linux_only
def test_batches_larger_than_shared_memory_go_through_the_pipe(tmp_path):
    (tmp_path / "small.py").write_text(SMALL)
    mount = "mount -t tmpfs -o size=8m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no private mount namespace here")
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && exec {sys.executable} {tmp_path / 'small.py'}"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    count, message = ran.stdout.splitlines()
    assert count == "2"  # one a worker
    assert "/dev/shm (8 MB) is full" in message
    assert "--shm-size" in message
    assert "num_workers=0" in message


# --- much data by value --------------------------------------------------------------------------


def test_the_caller_is_told_of_large_data_before_any_process_starts():
    table = torch.zeros(30_000_000)
    held = Rows([str(index) * 50 for index in range(600_000)])

    def collate(items: list) -> object:
        return table, items

    for spec, name, fate in (
        (
            {"collate_fn": collate},
            "loader_spec.collate_fn.<closure table> is a torch.Tensor of 120 MB",
            "one copy",
        ),
        ({"dataset": held}, "loader_spec.dataset.rows is a list of", "copied into every chain process"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error", LargePayloadWarning)
            with pytest.raises(LargePayloadWarning) as caught:
                estimate(cores=2, spec=spec)
        assert str(caught.value).startswith(name)
        assert fate in str(caught.value)
        assert ("CompactList" in str(caught.value)) == (spec.get("dataset") is held)


def test_data_that_travel_by_path_are_no_reason_for_a_warning(tmp_path):
    rows = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(30_000_000,))
    plain = LoaderSpec(Rows(rows), batch_size=4)
    assert plain.packed().nbytes < 10_000


@pytest.mark.slow
def test_workers_that_get_a_large_copy_each():
    rows = CompactRows([str(index) * 50 for index in range(600_000)])
    spec = LoaderSpec(rows, batch_size=4, num_workers=2, sampling="sequential")
    with pytest.warns(LargePayloadWarning, match="dataset.rows is a list .* each of the 2 loader workers"):
        spec.build()


class CompactRows(Rows):
    """Items of a list."""

    def __getitem__(self, index: int) -> str:
        return self.rows[index]
