"""What a report recommends, and how it names what is in a batch."""

import collections
import dataclasses

import numpy as np
import pytest
import torch

from devsample.data.report import Timing, leaves_of, recommend

MIB = 1 << 20
ALONE = Timing(0, per_batch=1.0, batches=10, longest=1.0)


def timing(workers, seconds, method="forkserver", **values):
    return Timing(workers, method, per_batch=seconds, batches=10, longest=seconds, **values)


def advice(*timings, size=MIB, free=None, prefetch=None, cores=4):
    return recommend([ALONE, *timings], size, free, prefetch, cores)


@pytest.mark.parametrize(
    ("timings", "expected"),
    [
        ([], 0),
        ([timing(1, 2.0), timing(2, 1.5)], 0),  # slower
        ([timing(1, 0.95), timing(2, 0.9)], 0),  # no gain worth a process
        ([timing(1, 0.9), timing(2, 0.5), timing(4, 0.25)], 4),
        ([timing(1, 0.5), timing(2, 0.45), timing(4, 0.44)], 1),
        ([timing(1, 1.5), timing(2, 0.7), timing(3, 0.65)], 2),
        ([timing(1, 0.5), timing(2, 0.1, error="failed")], 1),
        ([timing(1, 0.1, error="failed")], 0),
    ],
)
def test_the_fewest_workers_that_are_about_as_fast(timings, expected):
    found = advice(*timings)
    assert found.num_workers == expected
    assert found.reason.endswith(".")
    if expected:
        assert (found.prefetch_factor, found.multiprocessing_context) == (2, "forkserver")
    else:
        assert (found.prefetch_factor, found.multiprocessing_context) == (None, None)


def test_the_reason_has_the_numbers():
    text = advice(timing(1, 0.9), timing(2, 0.25)).reason
    assert "1 s without workers and 250 ms with 2 workers" in text
    assert "the most that was tried (4 cores)" in text
    assert "more do not make it much faster" in advice(timing(1, 0.25), timing(2, 0.24)).reason
    assert "with workers it did not work" in advice(timing(1, 1.0, error="x")).reason
    assert "2 s with 1 worker, which is no gain" in advice(timing(1, 2.0)).reason


def test_fork_is_recommended_only_where_nothing_else_works():
    assert advice(timing(2, 0.5), timing(2, 0.2, "fork")).multiprocessing_context == "forkserver"
    found = advice(timing(2, 0.5, error="cannot be sent"), timing(2, 0.2, "fork"))
    assert (found.num_workers, found.multiprocessing_context) == (2, "fork")


def test_batches_ahead_fit_into_shared_memory():
    worker = timing(2, 0.2)
    assert advice(worker, free=100 * MIB).prefetch_factor == 2
    assert advice(worker, prefetch=7, free=100 * MIB).prefetch_factor == 7
    small = advice(worker, prefetch=7, free=16 * MIB)
    assert small.prefetch_factor == 4  # 2 workers, half of it
    assert "--shm-size" in small.reason
    none = advice(worker, free=3 * MIB)
    assert none.num_workers == 0
    assert "3 MiB free" in none.reason
    assert "lower batch_size" in none.reason


def test_more_are_made_ahead_where_some_batches_are_late():
    late = dataclasses.replace(timing(2, 0.1), longest=2.0)
    assert advice(late).prefetch_factor == 4
    assert "made ahead" in advice(late).reason
    assert advice(late, prefetch=2).prefetch_factor == 2


Pair = collections.namedtuple("Pair", "left right")


class Boxes:
    def __init__(self):
        self.values, self.note = torch.zeros(4, 2), "kept"


def test_leaves_have_paths():
    batch = {
        "a": [torch.zeros(2), (np.zeros(3, np.int8), 1)],
        "b": Pair("text", b"12345"),
        "c": Boxes(),
        "d": ["x", "yz"],
        "e": list(range(100)),
        3: torch.eye(2).to_sparse(),
    }
    found = {leaf.path: (leaf.kind, leaf.shape, leaf.bytes) for leaf in leaves_of(batch)}
    assert found == {
        "batch['a'][0]": ("torch.Tensor", (2,), 8),
        "batch['a'][1][0]": ("numpy.ndarray", (3,), 3),
        "batch['a'][1][1]": ("int", None, 0),
        "batch['b'].left": ("str", None, 4),
        "batch['b'].right": ("bytes", None, 5),
        "batch['c'].values": ("torch.Tensor", (4, 2), 32),
        "batch['d'][0]": ("str", None, 1),
        "batch['d'][1]": ("str", None, 2),
        "batch['e'][0] … batch['e'][99]": ("int × 100", None, 0),
        "batch[3]": ("torch.Tensor", (2, 2), 0),
    }


def test_an_object_without_tensors_is_a_leaf():
    assert [(leaf.path, leaf.kind) for leaf in leaves_of(object())] == [("batch", "object")]
    assert [leaf.kind for leaf in leaves_of({})] == ["dict"]
