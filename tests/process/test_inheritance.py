"""Locks, counters and queues of multiprocessing, made by a factory, are shared with loader workers."""

import multiprocessing
import threading

import pytest
import torch
from torch.utils.data import Dataset

from devsample.data import LoaderSpec
from devsample.errors import NotPicklableError
from devsample.inheritance import check_inheritance
from devsample.serialize import pack, unpack
from tests.factories import estimate, linear_data

NOT_FORKED = pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])


class Counting(Dataset):
    """Counts the items that were read, in all processes together."""

    def __init__(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        self.data = linear_data(64)
        self.count = context.Value("i", 0)
        self.lock = context.Lock()
        self.log = context.Queue()
        self.seen = context.Array("i", 64)
        self.again = {"count": self.count}

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> object:
        with self.count.get_lock():
            self.count.value += 1
        assert self.again["count"] is self.count
        with self.lock:
            self.seen[index] += 1
        self.log.put(index)
        return self.data[index]


@NOT_FORKED
def test_workers_and_their_chain_share_what_the_factory_made(method):
    made = []

    def make() -> Counting:
        made.append(Counting("spawn"))
        return made[-1]

    spec = LoaderSpec(
        make,
        batch_size=8,
        sampling="sequential",
        num_workers=2,
        multiprocessing_context=method,
        prefetch_factor=1,
    )
    loader = spec.build(num_steps=8)
    assert len(list(loader)) == 8
    (dataset,) = made  # not made again in the workers
    assert dataset.count.value == 64
    assert list(dataset.seen) == [1] * 64
    assert sorted(dataset.log.get(timeout=60) for _ in range(64)) == list(range(64))
    loader.close()
    dataset.log.close()


@NOT_FORKED
def test_what_was_made_for_forked_processes_is_made_again_in_each_worker(method):
    spec = LoaderSpec(
        Counting, dataset_args=("fork",), batch_size=8, num_workers=2, multiprocessing_context=method
    )
    loader = spec.build(num_steps=4)
    assert len(list(loader)) == 4
    loader.close()


def test_in_chain_processes():
    spec = {"dataset": Counting, "dataset_args": ("spawn",), "num_workers": 2}
    assert list(estimate(cores=2, spec=spec).chains["status"]) == ["done", "done"]


def test_a_primitive_of_the_caller_is_named():
    with pytest.raises(NotPicklableError, match=r"^loader_spec\.dataset\.count is a .*Synchronized"):
        LoaderSpec(Counting("spawn"), num_workers=2).packed()


# --- the parts -----------------------------------------------------------------------------------


def test_what_is_handed_over_is_set_aside():
    context = multiprocessing.get_context("spawn")
    lock, event = context.Lock(), context.Event()
    packed = pack({"lock": lock, "event": [event, event], "x": 1}, "thing", to_worker=True)
    assert packed.inherited == (lock, event)
    back = unpack(packed.data, packed.storages, inherited=packed.inherited)
    assert back == {"lock": lock, "event": [event, event], "x": 1}


@pytest.mark.parametrize(
    ("obj", "path"),
    [
        ({"a": [multiprocessing.get_context("fork").Value("i", 0)]}, r"thing\['a'\]\[0\]"),
        ({"ok": multiprocessing.get_context("spawn").Lock(), "bad": threading.Lock()}, r"thing\['bad'\]"),
    ],
)
def test_what_cannot_be_handed_over_is_named(obj, path):
    with pytest.raises(NotPicklableError, match=f"^{path} is a "):
        pack(obj, "thing", to_worker=True)


def test_the_rehearsal_leaves_no_trace():
    context = multiprocessing.get_context("spawn")
    check_inheritance([context.Lock(), context.Queue()])
    assert multiprocessing.context.get_spawning_popen() is None
    with pytest.raises(RuntimeError, match="inheritance"):  # as ever when nothing is being started
        multiprocessing.reduction.ForkingPickler.dumps(context.Lock())


def test_tensors_and_sockets_are_not_handed_over():
    packed = pack([torch.zeros(3)], "thing", to_worker=True)
    assert packed.inherited == ()
