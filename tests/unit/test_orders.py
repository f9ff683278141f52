"""What the user's own samplers may give, and what is said of anything else."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from devsample import LoaderSpec
from devsample.data.loader import ChainLoader
from devsample.data.orders import make_order
from devsample.errors import LoaderError
from devsample.seeds import Role, chain_keys

CPU = torch.device("cpu")
DATA = TensorDataset(torch.arange(10))


def steps_of(count, **fields):
    """The indices of the first steps, a list per micro-batch."""
    spec = LoaderSpec(DATA, **fields)
    order = make_order(spec, chain_keys(0, 1)[0], 10, spec.batch_size, 1)
    return [order(step) for step in range(count)]


class Drawn:
    """A sampler that gives what it is told, whatever its length says."""

    def __init__(self, *values):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return 4


@pytest.mark.parametrize(
    "indices",
    [[3, 1, 2], np.array([3, 1, 2]), torch.tensor([3, 1, 2]), (np.int32(3), torch.tensor(1), 2)],
)
def test_integers_of_any_kind_are_indices(indices):
    got = steps_of(2, sampler=indices, batch_size=3)
    assert got == [[[3, 1, 2]]] * 2
    assert {type(one) for one in got[0][0]} == {int}
    assert steps_of(1, batch_sampler=[indices]) == [[[3, 1, 2]]]


def test_a_batch_may_be_a_row_of_a_tensor():
    assert steps_of(2, batch_sampler=torch.tensor([[1, 2], [3, 4]])) == [[[1, 2]], [[3, 4]]]
    sampler = BatchSampler(SequentialSampler(DATA), 5, drop_last=False)
    assert steps_of(1, batch_sampler=sampler) == [[[0, 1, 2, 3, 4]]]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.0, "1.0"), (np.float32(2), r".*2\.0.*"), (torch.tensor(1.5), r"tensor\(1\.5.*\)"), ("3", "'3'"),
     (None, "None"), (True, "True"), (np.True_, ".*True.*"), ([1, 2], r"\[1, 2\]")],
)  # fmt: skip
def test_what_is_no_index_is_named_with_the_field(value, shown):
    message = rf"^loader_spec\.sampler: the sampler gave {shown}, expected an integer\..* batch_sampler"
    with pytest.raises(LoaderError, match=message):
        steps_of(1, sampler=Drawn(0, value), batch_size=2)
    if not isinstance(value, list):
        message = rf"^loader_spec\.batch_sampler: the sampler gave {shown}, expected batches of integers"
        with pytest.raises(LoaderError, match=message):
            steps_of(1, batch_sampler=Drawn([0, value]))


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3), "01", None])
def test_what_is_no_batch_is_named_with_the_field(value):
    message = r"^loader_spec\.batch_sampler: the sampler gave .*, expected a list of indices\..* sampler\.$"
    with pytest.raises(LoaderError, match=message):
        steps_of(1, batch_sampler=Drawn([1, 2], value))


def test_an_empty_batch_and_nothing_at_all_are_named_with_the_field():
    with pytest.raises(LoaderError, match=r"^loader_spec\.batch_sampler: the sampler gave an empty batch"):
        steps_of(1, batch_sampler=Drawn([1], []))
    with pytest.raises(LoaderError, match=r"^loader_spec\.batch_sampler: the sampler gave nothing"):
        steps_of(1, batch_sampler=Drawn())
    with pytest.raises(LoaderError, match=r"^loader_spec\.sampler: the sampler gave nothing"):
        steps_of(1, sampler=Drawn(), batch_size=2)


def test_a_wrong_index_reaches_the_caller_by_name():
    with pytest.raises(LoaderError, match=r"loader_spec\.sampler: the sampler gave 2\.5"):
        list(LoaderSpec(DATA, sampler=[1, 2.5], batch_size=2).build(num_steps=1))


class Rows(Sampler):
    """The first rows of a data set, always in the same order."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))

    def __len__(self):
        return self.count


def reads(spec, role, chain=0, draws=range(40)):
    """The samples of each step that is read for a purpose."""
    with ChainLoader(spec, chain_keys(3, chain + 1), grad_accum_steps=1, device=CPU) as loader:
        asked = [loader.requests(chain, 7 + 5 * draw, role, draw=draw) for draw in draws]
        return [list(request.indices) for request in itertools.chain.from_iterable(asked)]


@pytest.mark.parametrize(
    "order",
    [
        {"sampler": SubsetRandomSampler(range(5, 21)), "batch_size": 4},
        {"sampler": Rows(16), "batch_size": 4},
        {"batch_sampler": BatchSampler(SubsetRandomSampler(range(5, 21)), 4, drop_last=False)},
    ],
    ids=["subset", "rows", "batches"],
)
def test_losses_are_read_from_the_samplers_own_samples(order):
    spec = LoaderSpec(TensorDataset(torch.arange(64)), **order)
    sampler = order.get("sampler") or order["batch_sampler"].sampler
    own = set(sampler)
    for role in (Role.LOSS_ORDER, Role.PROBE_ORDER):
        drawn = reads(spec, role)
        assert set(itertools.chain.from_iterable(drawn)) == own
        assert all(len(batch) == 4 for batch in drawn)
    with ChainLoader(spec, chain_keys(3, 1), grad_accum_steps=1, device=CPU) as loader:
        once = [index for request in loader.full_pass(64) for index in request.indices]
        assert sorted(once) == sorted(own)
        assert len([one for request in loader.full_pass(6) for one in request.indices]) == 8
        assert not loader.reads_all(64)


def test_losses_in_a_fixed_order_are_read_elsewhere():
    spec = LoaderSpec(TensorDataset(torch.arange(64)), sampler=Rows(64), batch_size=4)
    leads = {reads(spec, Role.LOSS_ORDER, chain)[0][0] // 4 for chain in range(12)}
    assert len(leads) > 5
    assert reads(spec, Role.ORDER)[0] == [0, 1, 2, 3]


def test_a_weighted_sampler_weights_the_losses_too():
    weights = torch.tensor([1.0, 0.0, 3.0, 0.0])
    spec = LoaderSpec(
        TensorDataset(torch.arange(4)), sampler=WeightedRandomSampler(weights, 400), batch_size=8
    )
    for role in (Role.ORDER, Role.LOSS_ORDER, Role.PROBE_ORDER):
        drawn = np.bincount(list(itertools.chain.from_iterable(reads(spec, role))), minlength=4)
        assert drawn[1] == drawn[3] == 0
        assert abs(drawn[2] / drawn.sum() - 0.75) < 0.12  # 5 sd of 320 draws
