"""Tensors get other memory only where nobody can tell, and nothing else about them changes."""

import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from devsample.payload import PayloadReader, write_payload
from devsample.repoint import SMALLEST_BYTES, repoint
from devsample.serialize import pack
from devsample.shared import LINUX

pytestmark = pytest.mark.skipif(not LINUX, reason="done where the system tells what kind a disk is")

NUMBERS = SMALLEST_BYTES // 4 + 1000


def large() -> torch.Tensor:
    return torch.arange(NUMBERS, dtype=torch.float32)


def write(folder: Path, *objects: object) -> PayloadReader:
    """What a run does with what it sends."""
    folder.mkdir(exist_ok=True)
    packed = {str(number): pack(one, "thing") for number, one in enumerate(objects)}
    return PayloadReader(folder, write_payload(folder, packed))


def uses(tensor: torch.Tensor, folder: Path) -> bool:
    """Whether a tensor's memory is the file of a run folder."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split()
        start, stop = (int(one, 16) for one in span.split("-"))
        if start <= address < stop:
            return name == str(folder / "data.safetensors")
    return False


@pytest.mark.parametrize("form", ["tensor", "data set", "closure", "several objects"])
def test_a_tensor_that_nobody_else_uses(form, tmp_path):
    x = large()
    x.label = "pixels"
    alive, version = weakref.ref(x), x._version
    wholes = {
        "tensor": [x],
        "data set": [TensorDataset(x, torch.arange(NUMBERS))],
        "closure": [lambda: x],
        "several objects": [{"a": [x, x]}, lambda: x],
    }
    write(tmp_path, *wholes[form])
    assert uses(x, tmp_path)
    assert alive() is x
    assert x.label == "pixels"
    assert (x.dtype, x.shape, x.stride(), x._version) == (torch.float32, (NUMBERS,), (1,), version)
    assert torch.equal(x, large())


def test_a_layout_that_is_not_contiguous_is_kept(tmp_path):
    x = torch.empty(0).set_(large().untyped_storage(), 7, (1000, 1000), (3, 5000))
    expected = x.clone()
    write(tmp_path, x)
    assert uses(x, tmp_path)
    assert (x.storage_offset(), x.stride()) == (7, (3, 5000))
    assert torch.equal(x, expected)


@pytest.mark.parametrize("size", [5, NUMBERS - 5])
def test_two_tensors_on_one_storage_stay_tied(size, tmp_path):
    x = large()
    y = torch.empty(0).set_(x.untyped_storage(), 0, (size,), (1,))
    write(tmp_path, [x, y])
    assert uses(x, tmp_path)
    y[3] = -1.0
    assert x[3] == -1.0


def test_later_writes_of_the_caller_reach_neither_file_nor_readers(tmp_path):
    x = large()
    reader = write(tmp_path, x)
    assert uses(x, tmp_path)
    before = (tmp_path / "data.safetensors").read_bytes()
    x.mul_(2.0)
    assert x[10] == 20.0
    assert (tmp_path / "data.safetensors").read_bytes() == before
    assert reader.load("0")[10] == 10.0
    assert write(tmp_path / "second", x).load("0")[10] == 20.0


def test_the_run_folder_can_be_deleted(tmp_path):
    x = large()
    write(tmp_path, x)
    (tmp_path / "data.safetensors").unlink()
    assert torch.equal(x, large())
    x.add_(1.0)
    assert x[0] == 1.0
    assert torch.equal(write(tmp_path, x).load("0"), large() + 1)


def test_the_next_run_does_not_write_the_data_again(tmp_path):
    x = large()
    write(tmp_path / "first", x)
    (tmp_path / "first" / "data.safetensors").unlink()
    reader = write(tmp_path / "second", x)
    assert not (tmp_path / "second" / "data.safetensors").exists()
    assert torch.equal(reader.load("0"), large())


def test_a_pending_graph_stays_valid(tmp_path):
    x, weight = large(), torch.ones(NUMBERS, requires_grad=True)
    loss = (x * weight).sum()
    write(tmp_path, x)
    loss.backward()
    assert torch.equal(weight.grad, large())


LEFT_ALONE = {
    "a numpy array": lambda x: x.numpy(),
    "a DLPack array": lambda x: np.from_dlpack(x),
    "a view": lambda x: x[5:],
    "an alias": lambda x: x.detach(),
    "a storage": lambda x: x.untyped_storage(),
    "a graph": lambda x: (x * torch.ones(NUMBERS, requires_grad=True)).sum(),
}


@pytest.mark.parametrize("user", LEFT_ALONE)
def test_a_tensor_whose_memory_is_used_otherwise_is_left_alone(user, tmp_path):
    x = large()
    other = LEFT_ALONE[user](x)
    address = x.data_ptr()
    write(tmp_path, x)
    assert x.data_ptr() == address
    x[0] = 8.0
    if isinstance(other, (np.ndarray, torch.Tensor)) and other.shape:
        assert other[0] in (8.0, 5.0)


KINDS = {
    "over a numpy array": lambda: torch.from_numpy(np.zeros(NUMBERS, np.float32)),
    "in shared memory": lambda: large().share_memory_(),
    "that requires grad": lambda: large().requires_grad_(),
    "that is a parameter": lambda: torch.nn.Parameter(large()),
    "that is a view of nothing else": lambda: large()[2:],
    "that is small": lambda: torch.zeros(SMALLEST_BYTES // 4 - 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_another_kind_is_left_alone(kind, tmp_path):
    x = KINDS[kind]()
    address = x.data_ptr()
    write(tmp_path, x)
    assert x.data_ptr() == address


def test_a_tensor_made_in_inference_mode_is_left_alone_and_the_mode_changes_nothing(tmp_path):
    with torch.inference_mode():
        x = large()
    address = x.data_ptr()
    write(tmp_path, x)
    assert x.data_ptr() == address
    y = large()
    with torch.inference_mode():
        write(tmp_path / "second", y)
    assert uses(y, tmp_path / "second")


class Paused(TorchDispatchMode):
    """Holds up the operations inside it until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.go_on = threading.Event(), threading.Event()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.started.set()
        assert self.go_on.wait(60)
        return func(*args, **(kwargs or {}))


def test_a_tensor_that_another_thread_computes_with_is_left_alone(tmp_path):
    x = large()
    packed = [pack(x, "thing")]
    copy = [[x.clone().untyped_storage()]]
    pause = Paused()

    def compute() -> None:
        with pause:
            x.sum()

    thread = threading.Thread(target=compute)
    thread.start()
    assert pause.started.wait(60)
    during = repoint(packed, copy)
    pause.go_on.set()
    thread.join()
    after = repoint(packed, copy)
    assert (during, after) == (0, 1)


def test_a_disk_that_may_be_elsewhere_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("devsample.shared._LOCAL_DISKS", set())  # every disk is one that nobody knows
    x = large()
    address = x.data_ptr()
    write(tmp_path, x)
    assert x.data_ptr() == address
