"""How a loader worker packs its batches."""

import collections
import os
import pickle
import threading
from multiprocessing import resource_sharer

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from devsample.data.sending import PackedBatch, send
from devsample.errors import LoaderWorkerError
from devsample.shared import LINUX


class Batches:
    """A data set whose items are batches, made in the worker."""

    def __init__(self, make):
        self._make = make

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self._make(index)


def through_a_worker(make):
    """What a reader gets of the batches that ``make`` makes in a worker."""
    loader = DataLoader(
        Batches(make), batch_size=None, collate_fn=send, num_workers=1, multiprocessing_context="fork"
    )
    return list(loader)


def test_without_a_worker_a_batch_stays_as_it_is():
    batch = [torch.ones(3), threading.Lock()]
    assert send(batch) is batch


def test_tensors_come_through_shared_memory_and_the_rest_as_bytes():
    batches = through_a_worker(lambda index: {"x": torch.full((3,), float(index)), "text": ["a", index]})
    assert [batch["text"] for batch in batches] == [["a", 0], ["a", 1], ["a", 2]]
    for index, batch in enumerate(batches):
        assert batch["x"].is_shared()
        assert batch["x"].tolist() == [index] * 3


def test_parts_of_one_tensor_stay_tied():
    def make(index):
        tokens = torch.arange(100)
        return tokens[:-1], tokens[1:]

    inputs, targets = through_a_worker(make)[0]
    inputs[1] = -1
    assert targets[0] == -1


def test_what_cannot_be_sent_is_named_by_its_path():
    def make(index):
        return {"x": torch.ones(3), "meta": [threading.Lock()]}

    with pytest.raises(LoaderWorkerError) as caught:
        through_a_worker(make)
    assert "batch['meta'][0] is a _thread.lock and cannot be sent from a loader worker" in str(caught.value)


def test_functions_of_the_worker_arrive():
    batch = through_a_worker(lambda index: [torch.ones(2), lambda x: x + index])[2]
    assert batch[1](1) == 3
    assert batch[0].is_shared()


@pytest.mark.skipif(not LINUX, reason="counts descriptors by /proc")
@pytest.mark.parametrize("reason", ["a class without a home", "a lock"])
def test_a_failed_attempt_keeps_no_descriptor_open(reason):
    """Every tensor that was packed before the failure had got one."""

    def make(index):
        Pair = collections.namedtuple("Pair", "x y")
        for _ in range(20):
            last = Pair(0, 0) if reason != "a lock" else threading.Lock()
            try:
                packed = send([torch.ones(3), torch.ones(3), last])
                del packed
            except LoaderWorkerError:
                pass
        waiting = len(resource_sharer._resource_sharer._cache)
        return waiting, len(os.listdir("/proc/self/fd"))

    first, *_, last = through_a_worker(make)
    sent = 0 if reason == "a lock" else 40  # what went through waits for its reader
    assert last[0] - first[0] == 2 * sent
    assert last[1] - first[1] < 2 * sent + 20  # not one or two for each of the 40 attempts


def test_what_was_sent_by_value_can_be_written_and_says_so_once():
    packed = PackedBatch(pickle.dumps(()) + pickle.dumps(1), (), "shared memory is full")
    with pytest.warns(UserWarning, match="shared memory is full"):
        assert pickle.loads(pickle.dumps(packed)) == 1


def test_the_default_collation_of_the_caller_is_not_touched():
    before = dict(torch.utils.data._utils.collate.default_collate_fn_map)
    through_a_worker(lambda index: default_collate([torch.ones(2)]))
    assert torch.utils.data._utils.collate.default_collate_fn_map == before
