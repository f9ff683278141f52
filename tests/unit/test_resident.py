"""Batches taken from memory by index are those that the data set and its collate function make."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, WeightedRandomSampler, default_collate

from devsample import LoaderSpec
from devsample.data.loader import ChainLoader
from devsample.errors import InvalidArgumentError, LoaderError
from devsample.seeds import Role, chain_keys

N = 53
KEYS = chain_keys(3, 4)
generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 3, 2, generator=generator), torch.arange(N)


class Plain(Dataset):
    """Items of several kinds, all of them functions of their number."""

    def __len__(self):
        return N

    def __getitem__(self, number):
        return {
            "x": X[number],
            "pair": (Y[number].item(), X[number].numpy().astype(np.float64)),
            "is": number % 2 == 0,
        }


class AtOnce(Plain):
    """The same, fetched in one go."""

    def __getitems__(self, numbers):
        return [self[number] for number in numbers]


class Varying(Plain):
    """Items that depend on something else than their number."""

    def __init__(self, how):
        self.how, self.calls = how, 0
        self.own = np.random.default_rng(0)

    def __getitem__(self, number):
        self.calls += 1
        shift = {
            "torch": lambda: torch.rand(()),
            "numpy": lambda: float(np.random.rand()),  # noqa: NPY002 - what augmentation draws from
            "own generator": self.own.random,
            "clock": time.perf_counter,
            "calls": lambda: self.calls,
            "shape": lambda: torch.zeros(1 + number % 2),
            "kind": lambda: number if number % 2 else float(number),
            "text": lambda: str(number),
        }[self.how]
        return X[number], shift()


def loader(dataset, **options):
    accumulate = options.pop("grad_accum_steps", 1)
    spec = LoaderSpec(dataset, **({} if "batch_sampler" in options else {"batch_size": 8}) | options)
    return ChainLoader(spec, KEYS, grad_accum_steps=accumulate, device=torch.device("cpu"))


def draw_of(step, role):
    return None if role == Role.ORDER else step // 2


def served(one, chain, step, role):
    draw = draw_of(step, role)
    batches = one.serve(one.requests(chain, step, role, draw=draw))
    return [(len(request.indices), batch) for request, batch in batches]


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape, found.stride()) == (
            expected.dtype,
            expected.shape,
            expected.stride(),
        )
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


DATA = {
    "tensors": TensorDataset(X, Y),
    "transposed": TensorDataset(X.transpose(1, 2), Y),
    "one tensor": TensorDataset(X),
    "items": Plain(),
    "items at once": AtOnce(),
}
ORDERS = {
    "iid": {},
    "accumulated": {"grad_accum_steps": 3},
    "epoch": {"sampling": "epoch"},
    "epoch, accumulated": {"sampling": "epoch", "grad_accum_steps": 2},
    "dropped": {"sampling": "epoch", "drop_last": True},
    "sequential": {"sampling": "sequential"},
    "sampler": {"sampler": WeightedRandomSampler(torch.arange(1.0, N + 1), N)},
    "in turn": {"sampler": [N - 1, 0, 7, 5] * 4},
    "batches": {"batch_sampler": [[1, 2, 3], [4], [5, 6, 7]], "grad_accum_steps": 2},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("chains", [(2,), (0, 1, 3)], ids=["one", "three"])
def test_the_batches_are_the_same(data, order, chains):
    with loader(DATA[data], resident=False, **ORDERS[order]) as plain:
        expected = {
            (step, role): [served(plain, chain, step, role) for chain in chains]
            for step in (0, 1, 6, 7, 600)
            for role in (Role.ORDER, Role.LOSS_ORDER, Role.SECOND_ORDER)
        }
    with loader(DATA[data], **ORDERS[order]) as quick:
        rows = quick.by_index(chains, 1000)
        assert rows is not None
        for (step, role), wanted in expected.items():
            batches, items = rows.take(step, role, draw_of(step, role))
            assert_same([list(row) for row in batches], wanted)
            assert [len(row) for row in items] == [sum(count for count, _ in row) for row in wanted]


def test_rows_come_stacked_unless_they_differ_in_length():
    with loader(TensorDataset(X, Y)) as quick:
        batches, _ = quick.by_index((0, 1, 2), 10).take(0, Role.ORDER, None)
        ((count, (x, y)),) = batches.micros
        assert (count, x.shape, y.shape) == (8, (3, 8, 3, 2), (3, 8))
        assert len(batches) == 3
        with pytest.raises(IndexError):
            batches[3]


@pytest.mark.parametrize(
    "how", ["torch", "numpy", "own generator", "clock", "calls", "shape", "kind", "text"]
)
def test_items_that_are_not_functions_of_their_number_are_not_kept(how):
    dataset = Varying(how)
    with loader(dataset) as one:
        assert one.by_index((0,), 1000) is None
    if how == "own generator":  # the user's own object is as it was
        assert dataset.own.random() == np.random.default_rng(0).random()
    with pytest.raises(InvalidArgumentError, match=r"resident: True, but .*its items"):
        loader(dataset, resident=True)


def test_when_data_are_not_kept():
    with loader(Plain()) as one:
        assert one.by_index((0,), N // 8) is None  # reading all would cost more than it saves
        assert one.by_index((0,), N // 8 + 1) is not None
    for options in ({"resident": False}, {"num_workers": 1}, {"collate_fn": default_collate_of_own}):
        with loader(Plain(), **options) as one:
            assert one.by_index((0,), 1000) is None
    with loader(TensorDataset(X.clone().requires_grad_(), Y)) as one:
        assert one.by_index((0,), 1000) is None
    with pytest.raises(InvalidArgumentError, match="resident: True leaves the loader workers"):
        LoaderSpec(TensorDataset(X), batch_size=2, resident=True, num_workers=1)
    with pytest.raises(InvalidArgumentError, match="resident: expected True, False or None"):
        LoaderSpec(TensorDataset(X), batch_size=2, resident="yes")


def default_collate_of_own(rows):
    return default_collate(rows)


def test_items_are_counted_from_the_end_too():
    with loader(TensorDataset(X, Y), sampler=[-1, 0, -N, 5] * 2) as one:
        (((_, (_, y)),),), _ = one.by_index((1,), 100).take(0, Role.ORDER, None)
    assert y.tolist() == [N - 1, 0, 0, 5] * 2


@pytest.mark.parametrize(("data", "sampler", "said"), [
    (TensorDataset(X, Y), [0, 1, N + 2, 3], f"items from 0 to {N + 2}, but the data set has items -{N}"),
    (TensorDataset(X, Y), [0, 1, -N - 1, 3], f"items from -{N + 1} to 3"),
    (Plain(), [0, 1, -1, 3], f"items from -1 to 3, but the data set has items 0 to {N - 1}"),
])  # fmt: skip
def test_an_item_that_is_not_there_is_named(data, sampler, said):
    with loader(data, sampler=sampler) as one:
        rows = one.by_index((1,), 100)
        with pytest.raises(LoaderError, match=f"chain 1, step 0: the sampler gave {said}"):
            rows.take(0, Role.ORDER, None)


def test_the_recipe_is_the_same_data():
    one, other = (LoaderSpec(TensorDataset(X), batch_size=2, resident=value) for value in (None, False))
    assert one.fingerprint() == other.fingerprint()
    assert LoaderSpec.from_dict({"dataset": "torch.utils.data:TensorDataset", "resident": True}).resident
