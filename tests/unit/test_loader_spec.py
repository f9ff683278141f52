"""LoaderSpec: what it refuses, what it recovers, and which batches come out of it."""

import dataclasses
import itertools
import math
import multiprocessing
import pickle
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from devsample import LoaderSpec
from devsample.data.loader import ChainLoader
from devsample.errors import (
    InvalidArgumentError,
    LoaderError,
    LoaderWarning,
    NotPicklableError,
)
from devsample.machine import available_cores
from devsample.seeds import Role, chain_keys

CPU = torch.device("cpu")


class Numbers(Dataset):
    """Item i is i."""

    def __init__(self, n=10):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if not 0 <= index < self.n:
            raise IndexError(index)
        return torch.tensor(index)


class Noisy(Numbers):
    """Item i with what torch, numpy and random draw: augmentation."""

    def __getitem__(self, index):
        numpy = np.random.rand()  # noqa: NPY002 - what augmentations use
        return torch.tensor([index, torch.rand(()).item(), numpy, random.random()])


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.count()


class Lengthless(Numbers):
    __len__ = None


def make_numbers(n, *, offset=0):
    return TensorDataset(torch.arange(offset, offset + n))


def steps_of(spec, steps, *, seed=0, chain=0, **options):
    """The indices of the first steps, a list per micro-batch."""
    loader = spec.build(seed=seed, chain=chain, num_steps=steps, **options)
    return [batch.tolist() for batch in loader]


# ---- what is refused ----------------------------------------------------------------------------

NUMBERS = Numbers()


@pytest.mark.parametrize(
    ("dataset", "fields", "message"),
    [
        (DataLoader(NUMBERS), {}, r"dataset: this is a DataLoader\. Use LoaderSpec\.from_dataloader"),
        (7, {}, r"dataset: expected a map-style data set or a function.*got 7"),
        (None, {}, r"dataset: expected a map-style data set or a function"),
        (Numbers(0), {}, r"dataset: an empty Numbers"),
        (Lengthless(), {}, r"dataset: a Lengthless without a length.*num_samples=n"),
        (NUMBERS, {"dataset_args": (3,)}, r"dataset_args, dataset_kwargs: only used with a factory.*Numbers"),
        (NUMBERS, {"dataset_kwargs": {"n": 3}}, r"dataset_args, dataset_kwargs: only used with a factory"),
        (make_numbers, {}, r"dataset_args, dataset_kwargs: do not fit .*missing a required argument: 'n'"),
        (make_numbers, {"dataset_args": (1, 2)}, r"dataset_args, dataset_kwargs: do not fit"),
        (make_numbers, {"dataset_kwargs": {"m": 1}}, r"dataset_args, dataset_kwargs: do not fit"),
        (make_numbers, {"dataset_args": "5"}, r"dataset_args: expected a list"),
        (make_numbers, {"dataset_args": 5}, r"dataset_args: expected a list"),
        (make_numbers, {"dataset_args": (1,), "dataset_kwargs": [2]}, r"dataset_kwargs: expected a mapping"),
        (NUMBERS, {"batch_size": 0}, r"batch_size: expected an integer ≥ 1, got 0"),
        (NUMBERS, {"batch_size": 2.0}, r"batch_size: expected an integer ≥ 1, got 2\.0"),
        (NUMBERS, {"batch_size": True}, r"batch_size: expected an integer ≥ 1, got True"),
        (NUMBERS, {"num_samples": 0}, r"num_samples: expected an integer ≥ 1"),
        (NUMBERS, {"num_samples": 11}, r"num_samples: 11 is not the length of the data set, 10"),
        (NUMBERS, {"num_workers": -1}, r"num_workers: expected an integer ≥ 0, got -1"),
        (NUMBERS, {"num_workers": None}, r"num_workers: expected an integer ≥ 0, got None"),
        (NUMBERS, {"num_workers": 1, "prefetch_factor": 0}, r"prefetch_factor: expected an integer ≥ 1"),
        (NUMBERS, {"num_workers": 1, "timeout": -1}, r"timeout: expected seconds ≥ 0 .*got -1"),
        (NUMBERS, {"num_workers": 1, "timeout": "1"}, r"timeout: expected seconds ≥ 0 .*got '1'"),
        (NUMBERS, {"collate_fn": 3}, r"collate_fn: expected a function, got 3"),
        (NUMBERS, {"worker_init_fn": "x"}, r"worker_init_fn: expected a function or its import path"),
        (NUMBERS, {"in_order": False}, r"in_order: "),
        (NUMBERS, {"in_order": None}, r"in_order: expected True or False, got None"),
        (NUMBERS, {"pin_memory": "auto"}, r"pin_memory: expected True, False or None, got 'auto'"),
        (NUMBERS, {"drop_last": 1}, r"drop_last: expected True or False, got 1"),
        (NUMBERS, {"persistent_workers": "yes"}, r"persistent_workers: expected True or False, got 'yes'"),
        (NUMBERS, {"pin_memory_device": None}, r"pin_memory_device: expected the name of a device.*got None"),
        (NUMBERS, {"pin_memory_device": 0}, r"pin_memory_device: expected the name of a device.*got 0"),
        (NUMBERS, {"num_workers": 1, "timeout": math.nan}, r"timeout: expected seconds ≥ 0 .*got nan"),
        (NUMBERS, {"num_workers": 1, "timeout": math.inf}, r"timeout: expected seconds ≥ 0 .*got inf"),
        (NUMBERS, {"num_workers": 1, "timeout": True}, r"timeout: expected seconds ≥ 0 .*got True"),
        (NUMBERS, {"sampler": "012"}, r"sampler: expected a sampler that can be iterated again, got '012'"),
        (NUMBERS, {"sampling": "random"}, r"sampling: expected one of .*got 'random'"),
        (NUMBERS, {"shuffle": False}, r'shuffle: .*sampling="sequential"'),
        (NUMBERS, {"shuffle": "yes"}, r"shuffle: "),
        (NUMBERS, {"shuffle": 0}, r"shuffle: expected True or None, got 0"),
        (NUMBERS, {"shuffle": True, "sampling": "epoch"}, r"sampling, shuffle: mutually exclusive"),
        (NUMBERS, {"sampler": [1, 2], "sampling": "iid"}, r"sampling, sampler: mutually exclusive"),
        (NUMBERS, {"sampler": [1], "batch_sampler": [[1]]}, r"sampler, batch_sampler: mutually exclusive"),
        (NUMBERS, {"sampler": iter([1])}, r"sampler: expected a sampler that can be iterated again"),
        (NUMBERS, {"sampler": 4}, r"sampler: expected a sampler that can be iterated again, got 4"),
        (NUMBERS, {"sampler": Endless()}, r"sampler: Endless needs a __len__"),
        (NUMBERS, {"batch_sampler": [[1]], "batch_size": 2}, r"batch_sampler: mutually exclusive with batch"),
        (NUMBERS, {"batch_sampler": [[1]], "drop_last": True}, r"batch_sampler: mutually exclusive with"),
        (NUMBERS, {"batch_size": None}, r"num_samples: with batch_size=None an item is a batch"),
        (NUMBERS, {"batch_size": None, "num_samples": 9, "drop_last": True}, r"drop_last: has no meaning"),
        (NUMBERS, {"num_workers": 1, "multiprocessing_context": "thread"}, r"multiprocessing_context: expec"),
        (NUMBERS, {"num_workers": 1, "multiprocessing_context": 3}, r"multiprocessing_context: expected"),
        (NUMBERS, {"worker_dataset": "copy"}, r'worker_dataset: expected "auto"'),
        (NUMBERS, {"worker_dataset": "rebuild"}, r'worker_dataset: "rebuild" needs a factory'),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(dataset, fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        LoaderSpec(dataset, **fields)


def test_numpys_bools_and_numbers_are_fine():
    spec = LoaderSpec(
        NUMBERS, batch_size=np.int64(4), num_workers=np.int8(1), timeout=np.float32(2.5),
        drop_last=np.True_, pin_memory=np.False_, persistent_workers=np.False_, in_order=np.bool_(True),
    )  # fmt: skip
    kept = spec.drop_last, spec.pin_memory, spec.persistent_workers, spec.batch_size, spec.timeout
    assert kept == (True, False, False, 4, 2.5)
    assert [type(one) for one in kept] == [bool, bool, bool, int, float]


def test_far_more_workers_than_cores_are_warned_of():
    cores = available_cores()
    LoaderSpec(NUMBERS, num_workers=4 * cores)
    with pytest.warns(LoaderWarning, match=rf"num_workers: {4 * cores + 1} .* {cores} CPU cores") as caught:
        LoaderSpec(NUMBERS, num_workers=4 * cores + 1)
    assert [one.filename for one in caught] == [__file__]


def test_a_spec_shows_what_was_given():
    spec = LoaderSpec(NUMBERS, batch_size=2, sampler=np.arange(3), drop_last=True)
    assert (
        repr(spec) == "LoaderSpec(<tests.unit.test_loader_spec.Numbers>, batch_size=2, "
        "sampler=array([0, 1, 2]), drop_last=True)"
    )
    assert repr(LoaderSpec(make_numbers, dataset_args=(3,))) == "LoaderSpec(make_numbers, dataset_args=(3,))"


def test_a_distributed_sampler_is_refused():
    sampler = DistributedSampler(NUMBERS, num_replicas=2, rank=0)
    with pytest.raises(InvalidArgumentError, match="sampler: a DistributedSampler gives a part"):
        LoaderSpec(NUMBERS, sampler=sampler)
    with pytest.raises(InvalidArgumentError, match="batch_sampler: a DistributedSampler"):
        LoaderSpec(NUMBERS, batch_sampler=BatchSampler(sampler, 2, drop_last=False))


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError, match="batchsize"):
        LoaderSpec(NUMBERS, batchsize=3)
    with pytest.raises(TypeError):
        LoaderSpec(NUMBERS, 3)  # keywords only


def test_a_spec_is_frozen_and_does_not_share_its_arguments():
    kwargs = {"n": 5}
    spec = LoaderSpec(make_numbers, dataset_kwargs=kwargs)
    kwargs["n"] = 7
    assert len(spec.make_dataset()) == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.batch_size = 3


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: [][1], r"the factory raised IndexError: list index out of range"),
        (lambda: None, r"dataset: the factory returned a NoneType"),
        (lambda: Numbers(0), r"dataset: the factory returned an empty Numbers"),
        (Lengthless, r"dataset: the factory returned a Lengthless without a length"),
    ],
)
def test_a_factory_that_fails_is_named(factory, message):
    spec = LoaderSpec(factory)
    with pytest.raises((LoaderError, InvalidArgumentError), match=message):
        spec.build()


# ---- from an existing loader --------------------------------------------------------------------


def collate(items):
    return torch.stack(items) * 10


def start_worker(worker_id):
    random.seed(worker_id)


def test_every_keyword_of_a_loader_is_recovered():
    loader = DataLoader(
        NUMBERS,
        batch_size=4,
        num_workers=2,
        collate_fn=collate,
        drop_last=True,
        timeout=30,
        worker_init_fn=start_worker,
        multiprocessing_context="fork",
        prefetch_factor=5,
        persistent_workers=False,
    )
    spec = LoaderSpec.from_dataloader(loader)
    assert spec.dataset is NUMBERS
    got = {one.name: getattr(spec, one.name) for one in dataclasses.fields(spec)}
    assert got["batch_size"] == 4
    assert got["num_workers"] == 2
    assert got["collate_fn"] is collate
    assert got["drop_last"] is True
    assert got["timeout"] == 30
    assert got["worker_init_fn"] is start_worker
    assert got["multiprocessing_context"] == "fork"
    assert got["prefetch_factor"] == 5


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, "iid"),
        ({"shuffle": True}, "iid"),
        ({"sampler": RandomSampler(NUMBERS)}, "iid"),
        ({"sampler": SequentialSampler(NUMBERS)}, "iid"),
        ({"sampler": RandomSampler(NUMBERS, num_samples=4)}, "user"),
        ({"sampler": WeightedRandomSampler([0.5] * 10, 10)}, "user"),
        ({"sampler": [3, 1, 2]}, "user"),
    ],
)
def test_the_order_of_a_loader(options, order):
    spec = LoaderSpec.from_dataloader(DataLoader(NUMBERS, batch_size=2, **options))
    assert spec.order == order
    assert spec.batch_size == 2


def test_a_batch_sampler_of_torch_is_taken_apart():
    for sampler, order in ((RandomSampler(NUMBERS), "iid"), ([5, 6, 7], "user")):
        batches = BatchSampler(sampler, 2, drop_last=True)
        spec = LoaderSpec.from_dataloader(DataLoader(NUMBERS, batch_sampler=batches))
        assert (spec.batch_size, spec.drop_last, spec.order) == (2, True, order)


def test_another_batch_sampler_is_kept():
    loader = DataLoader(NUMBERS, batch_sampler=[[0, 1], [2, 3, 4]])
    spec = LoaderSpec.from_dataloader(loader)
    assert spec.order == "user"
    assert steps_of(spec, 3) == [[0, 1], [2, 3, 4], [0, 1]]


def test_items_that_are_batches_are_kept():
    spec = LoaderSpec.from_dataloader(DataLoader(NUMBERS, batch_size=None), num_samples=30)
    assert spec.batch_size is None


def test_what_a_loader_takes_for_a_bool_is_one():
    spec = LoaderSpec.from_dataloader(DataLoader(NUMBERS, batch_size=3, in_order=1, pin_memory=0))
    assert (spec.in_order, spec.pin_memory) == (True, None)


def test_changes_win():
    loader = DataLoader(NUMBERS, batch_size=2, num_workers=2)
    spec = LoaderSpec.from_dataloader(loader, batch_size=5, sampling="epoch", num_workers=0)
    assert (spec.batch_size, spec.order, spec.num_workers) == (5, "epoch", 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_in_use_is_not_touched():
    loader = DataLoader(NUMBERS, batch_size=2, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    spec = LoaderSpec.from_dataloader(loader, num_workers=0)
    assert len(steps_of(spec, 2)) == 2
    assert next(iterator).tolist() == [2, 3]
    iterator._shutdown_workers()


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2], r"loader: expected a torch\.utils\.data\.DataLoader, got list"),
        (iter(DataLoader(NUMBERS)), r"loader: expected a torch\.utils\.data\.DataLoader, got _Single"),
        (type("Mine", (DataLoader,), {"__iter__": lambda self: iter([])})(NUMBERS),
         r"loader: Mine overrides DataLoader\.__iter__"),
        (DataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, num_replicas=1, rank=0)),
         r"sampler: a DistributedSampler"),
    ],
)  # fmt: skip
def test_what_cannot_be_recovered_is_refused(loader, message):
    with pytest.raises(InvalidArgumentError, match=message):
        LoaderSpec.from_dataloader(loader)


def test_a_subclass_that_only_adds_is_recovered():
    class Mine(DataLoader):
        def describe(self):
            return "mine"

    assert LoaderSpec.from_dataloader(Mine(NUMBERS, batch_size=3)).batch_size == 3


def test_an_iterable_data_set_of_a_loader_needs_its_size():
    loader = DataLoader(Endless(), batch_size=2)
    with pytest.raises(InvalidArgumentError, match="num_samples: the data set is a Endless"):
        LoaderSpec.from_dataloader(loader)
    spec = LoaderSpec.from_dataloader(loader, num_samples=1000)
    assert [batch.tolist() for batch, _ in zip(spec.build(), range(2), strict=False)] == [[0, 1], [2, 3]]


# ---- orders -------------------------------------------------------------------------------------


def test_iid_indices_are_uniform_with_replacement():
    spec = LoaderSpec(Numbers(20), batch_size=10)
    batches = steps_of(spec, 1000)
    drawn = np.array(batches).ravel()
    assert stats.chisquare(np.bincount(drawn, minlength=20)).pvalue > 1e-3
    repeats = np.mean([len(set(batch)) < 10 for batch in batches])
    expected = 1 - np.prod(1 - np.arange(10) / 20)  # the birthday problem: .93
    assert abs(repeats - expected) < 4 * np.sqrt(expected * (1 - expected) / 1000)


def test_iid_is_the_documented_stream():
    generator = np.random.Generator(
        np.random.Philox(
            key=np.random.SeedSequence(7).generate_state(2, np.uint64),
            counter=np.array([0, 0, 0, 3 << 16 | Role.ORDER], np.uint64),
        )
    )
    rows = generator.integers(0, 10, size=(4096 // 6, 6))  # 2 micro-batches of 3
    spec = LoaderSpec(NUMBERS, batch_size=3)
    got = steps_of(spec, 2, seed=7, chain=3, grad_accum_steps=2)
    assert got == rows[:2].reshape(4, 3).tolist()


def test_accumulated_micro_batches_are_slices_of_one_batch():
    whole = steps_of(LoaderSpec(NUMBERS, batch_size=8), 5)
    parts = steps_of(LoaderSpec(NUMBERS, batch_size=2), 5, grad_accum_steps=4)
    assert [sum(parts[4 * k : 4 * k + 4], []) for k in range(5)] == whole


def test_chains_and_seeds_differ_and_repeat():
    spec = LoaderSpec(Numbers(1000), batch_size=8)
    runs = [steps_of(spec, 3, seed=s, chain=c) for s in (0, 1) for c in (0, 1)]
    assert len({str(run) for run in runs}) == 4
    assert runs[3] == steps_of(spec, 3, seed=1, chain=1)


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_has_every_sample_once(drop_last):
    spec = LoaderSpec(NUMBERS, batch_size=4, sampling="epoch", drop_last=drop_last)
    per_epoch = 2 if drop_last else 3
    batches = steps_of(spec, 4 * per_epoch)
    epochs = [sum(batches[k : k + per_epoch], []) for k in range(0, len(batches), per_epoch)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == (8 if drop_last else 10)
    assert [len(batch) for batch in batches[:per_epoch]] == ([4, 4] if drop_last else [4, 4, 2])
    assert len({tuple(epoch) for epoch in epochs}) == 4  # a new permutation each
    assert steps_of(spec, 3, chain=1) != batches[:3]


def test_sequential_is_data_order_with_a_ragged_last_batch():
    spec = LoaderSpec(NUMBERS, batch_size=4, sampling="sequential")
    assert steps_of(spec, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    assert steps_of(spec, 3, chain=1, seed=9) == steps_of(spec, 3)
    dropped = LoaderSpec(NUMBERS, batch_size=4, sampling="sequential", drop_last=True)
    assert steps_of(dropped, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_a_ragged_step_is_split_into_ragged_micro_batches():
    spec = LoaderSpec(NUMBERS, batch_size=2, sampling="sequential")
    got = steps_of(spec, 3, grad_accum_steps=3)
    assert got == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1], [2, 3], [4, 5]]


def test_a_data_set_smaller_than_a_batch():
    small = Numbers(3)
    assert (
        steps_of(LoaderSpec(small, batch_size=5, sampling="sequential", drop_last=True), 2) == [[0, 1, 2]] * 2
    )
    assert all(len(batch) == 5 for batch in steps_of(LoaderSpec(small, batch_size=5), 3))


def test_a_users_sampler_keeps_its_order_and_starts_again():
    spec = LoaderSpec(NUMBERS, sampler=[5, 1, 1, 7, 2], batch_size=2)
    assert steps_of(spec, 4) == [[5, 1], [1, 7], [2], [5, 1]]
    dropped = LoaderSpec(NUMBERS, sampler=[5, 1, 1, 7, 2], batch_size=2, drop_last=True)
    assert steps_of(dropped, 3) == [[5, 1], [1, 7], [5, 1]]


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(3)])
def test_a_random_sampler_is_keyed_by_seed_and_chain(generator):
    sampler = WeightedRandomSampler([1.0] * 5 + [0.0] * 5, 8, generator=generator)
    spec = LoaderSpec(NUMBERS, sampler=sampler, batch_size=8)
    before = None if generator is None else generator.get_state()
    first = steps_of(spec, 6)
    assert steps_of(spec, 6) == first
    assert steps_of(spec, 6, chain=1) != first
    assert steps_of(spec, 6, seed=1) != first
    assert max(sum(first, [])) < 5
    assert len({tuple(batch) for batch in first}) > 1  # epochs differ
    assert sampler.generator is generator
    assert generator is None or torch.equal(before, generator.get_state())


def test_a_random_sampler_that_wraps_another_is_keyed_too():
    class Shuffled:
        def __init__(self):
            self.inner = SubsetRandomSampler(range(10))

        def __iter__(self):
            return iter(self.inner)

        def __len__(self):
            return 10

    spec = LoaderSpec(NUMBERS, sampler=Shuffled(), batch_size=10)
    assert steps_of(spec, 3) == steps_of(spec, 3)
    assert steps_of(spec, 3) != steps_of(spec, 3, chain=1)


def test_set_epoch_is_called_on_a_copy():
    class Epochs:
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch, self.epoch])

        def __len__(self):
            return 2

    sampler = Epochs()
    assert steps_of(LoaderSpec(NUMBERS, sampler=sampler, batch_size=2), 3) == [[0, 0], [1, 1], [2, 2]]
    assert sampler.epoch == -1


def test_an_empty_sampler_is_refused():
    with pytest.raises(LoaderError, match="sampler gave nothing"):
        steps_of(LoaderSpec(NUMBERS, sampler=[], batch_size=2), 1)


def test_losses_are_read_on_batches_of_the_size_of_the_users_batches():
    """A batch_sampler's batches have 3 samples here, so the separate ones must not have 1."""
    spec = LoaderSpec(NUMBERS, batch_sampler=[[0, 1, 2], [3, 4, 5]])
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=CPU) as loader:
        for role in (Role.LOSS_ORDER, Role.PROBE_ORDER):
            sizes = [len(request.indices) for request in loader.requests(0, 0, role)]
            assert sum(sizes) == 3, role


def test_grad_accum_steps_with_a_batch_sampler_takes_that_many_batches_a_step():
    spec = LoaderSpec(NUMBERS, batch_sampler=[[0, 1], [2, 3], [4, 5], [6, 7]])
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=2, device=CPU) as loader:
        requests = loader.requests(0, 0)
        assert [request.indices for request in requests] == [[0, 1], [2, 3]]
        assert [request.last for request in requests] == [False, True]


def test_roles_have_batches_of_their_own():
    spec = LoaderSpec(Numbers(10_000), batch_size=8, sampling="epoch")
    with ChainLoader(spec, chain_keys(0, 2), grad_accum_steps=1, device=CPU) as loader:
        seen = {
            tuple(loader.requests(chain, 0, role)[0].indices)
            for chain in (0, 1)
            for role in (Role.ORDER, Role.LOSS_ORDER, Role.PROBE_ORDER)
        }
    assert len(seen) == 6


# ---- passes over the data -----------------------------------------------------------------------


def test_a_full_pass_reads_every_sample_once():
    spec = LoaderSpec(NUMBERS, batch_size=4)
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=CPU) as loader:
        served = [(len(r.indices), b.tolist()) for r, b in loader.serve(loader.full_pass(10))]
        assert served == [(4, [0, 1, 2, 3]), (4, [4, 5, 6, 7]), (2, [8, 9])]
        part = [b.tolist() for _, b in loader.serve(loader.full_pass(4))]
        assert part == [[0, 3, 6, 9]]


def test_a_full_pass_over_a_batch_sampler_does_not_go_one_by_one():
    spec = LoaderSpec(Numbers(1000), batch_sampler=[list(range(k, k + 100)) for k in range(0, 1000, 100)])
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=CPU) as loader:
        assert len(loader.full_pass(1000)) <= 20


# ---- batches ------------------------------------------------------------------------------------


def test_an_item_can_be_a_batch():
    class Batches(Numbers):
        def __getitem__(self, index):
            return {"x": np.full((3,), index), "size": 3}

    spec = LoaderSpec(Batches(4), batch_size=None, num_samples=12)
    for batch in spec.build(num_steps=3):
        assert batch["x"].shape == (3,)
        assert isinstance(batch["x"], torch.Tensor)  # as DataLoader converts it
        assert batch["size"] == 3


def test_getitems_and_collate_fn_are_used():
    class Fast(Numbers):
        def __getitems__(self, indices):
            return [torch.tensor(index + 100) for index in indices]

    spec = LoaderSpec(Fast(), batch_size=2, collate_fn=collate, sampling="sequential")
    assert steps_of(spec, 1) == [[1000, 1010]]


def test_a_tensor_data_set_gives_what_torchs_own_loader_gives():
    data = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10), torch.rand(10, 2, 2))
    spec = LoaderSpec(data, batch_size=4, sampling="sequential")
    expected = list(DataLoader(data, batch_size=4))
    for one, other in zip(spec.build(num_steps=3), expected, strict=True):
        assert type(one) is type(other)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_a_random_data_set_draws_depends_on_seed_chain_and_step_only():
    spec = LoaderSpec(Noisy(), batch_size=3)
    first = torch.stack(list(spec.build(num_steps=4)))
    torch.rand(3)
    again = torch.stack(list(spec.build(num_steps=4)))
    assert torch.equal(first, again)
    other = torch.stack(list(spec.build(num_steps=4, chain=1)))
    assert not torch.isin(other[..., 1:], first[..., 1:]).any()
    assert len(torch.unique(first[..., 1])) == 12


def test_a_built_loader_leaves_the_global_generators_alone():
    spec = LoaderSpec(Noisy(), batch_size=3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    list(spec.build(num_steps=4))
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    assert before[2] == random.getstate()


def batches_of(spec, steps):
    """All micro-batches as tensors; the workers are ended."""
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=2, device=CPU) as loader:
        requests = [one for step in range(steps) for one in loader.requests(0, step)]
        batches = [batch for _, batch in loader.serve(requests)]
    return [torch.stack(one) if isinstance(one, list) else one for one in batches]


@pytest.mark.parametrize("data", [Noisy(50), make_numbers(50)], ids=["random", "tensors"])
@pytest.mark.parametrize("context", [pytest.param("forkserver", marks=pytest.mark.slow), "fork"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_do_not_change_the_batches(data, context):
    if context not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {context} here")
    specs = [LoaderSpec(data, batch_size=4, num_workers=n, multiprocessing_context=context) for n in (0, 2)]
    runs = [batches_of(spec, 7) for spec in specs]
    assert len(runs[0]) == len(runs[1]) == 14
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


SCRIPT = """
import gc, torch
from torch.utils.data import DataLoader, TensorDataset
from devsample import LoaderSpec

data = TensorDataset(torch.arange(50))
ours = LoaderSpec(data, batch_size=4, num_workers=1).build(num_steps=2)
assert len(list(ours)) == 2
theirs = DataLoader(
    data, batch_size=25, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
)
assert len(list(theirs)) == 2
del ours
gc.collect()
again = LoaderSpec(data, batch_size=4, num_workers=1).build(num_steps=2)
assert len(list(again)) == 2
print("done")
"""


@pytest.mark.slow
def test_a_forked_process_does_not_block_the_end_of_a_loader():
    """A process forked while our workers' fork server runs holds its pipe open."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork here")
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.stdout.strip().endswith("done"), child.stderr
    assert child.returncode == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_built_loader_gives_the_runs_batches_for_any_number_of_workers(workers):
    specs = [LoaderSpec(Noisy(50), batch_size=4, num_workers=n) for n in (0, workers)]
    expected = batches_of(specs[0], 3)
    built = specs[1].build(num_steps=3, grad_accum_steps=2)
    got = list(built)
    built.close()
    assert len(got) == len(expected) == 6
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_a_built_loader_can_be_iterated_again_and_ends():
    loader = LoaderSpec(NUMBERS, batch_size=2).build(num_steps=3)
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first == second
    assert len(first) == 3
    endless = LoaderSpec(NUMBERS, batch_size=2).build()
    assert len(list(itertools.islice(endless, 5000))) == 5000


@pytest.mark.parametrize("workers", [0, 1])
def test_an_item_that_raises_is_named(workers):
    class Broken(Numbers):
        def __getitem__(self, index):
            raise KeyError(f"no item {index}")

    spec = LoaderSpec(Broken(), batch_size=2, num_workers=workers)
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=CPU) as loader:
        with pytest.raises(LoaderError) as caught:
            list(loader.serve(loader.requests(0, 4)))
        message = str(caught.value)
    assert "chain 0, step 4" in message
    assert "KeyError" in message
    assert "no item" in message
    assert ("loader worker 0" in message) == bool(workers)


# ---- travelling ---------------------------------------------------------------------------------


def test_a_spec_travels_as_it_is():
    spec = LoaderSpec(make_numbers, dataset_args=(7,), batch_size=3, sampling="epoch", num_workers=2)
    back = pickle.loads(pickle.dumps(spec))
    for one in dataclasses.fields(spec):
        assert getattr(back, one.name) == getattr(spec, one.name)
    assert steps_like(back) == steps_like(spec)


def steps_like(spec):
    built = dataclasses.replace(spec, num_workers=0).build(num_steps=3)
    return [batch[0].tolist() for batch in built]


def test_what_a_spec_cannot_send_is_named_with_the_remedy():
    data = Numbers()
    data.store = {"lock": threading.Lock()}
    with pytest.raises(NotPicklableError) as caught:
        LoaderSpec(data).packed()
    message = str(caught.value)
    assert message.startswith("loader_spec.dataset.store['lock'] is a _thread.lock")
    assert "pass a factory" in message
    with pytest.raises(NotPicklableError, match=r"^loader_spec\.collate_fn\.<closure data>\.store"):
        LoaderSpec(NUMBERS, collate_fn=lambda items: data).packed()


def test_n_is_num_samples_or_the_length():
    assert LoaderSpec(NUMBERS).sample_count(NUMBERS) == 10
    assert LoaderSpec(Lengthless(), num_samples=6).sample_count(Lengthless()) == 6
    assert max(sum(steps_of(LoaderSpec(Lengthless(), num_samples=6, batch_size=8), 20), [])) == 5


class WithGenerators(Numbers):
    def __init__(self):
        super().__init__()
        self.numpy, self.legacy = np.random.default_rng(0), np.random.RandomState(0)
        self.python, self.torch = random.Random(0), torch.Generator().manual_seed(0)

    def __getitem__(self, index):
        return index + self.draw()[0]

    def draw(self):
        return (
            self.numpy.random(),
            self.legacy.randn(),
            self.python.random(),
            torch.rand((), generator=self.torch).item(),
        )


class StreamWithGenerators(WithGenerators, IterableDataset):
    def __iter__(self):
        for index in range(10):
            yield index + self.draw()[0]


@pytest.mark.parametrize("kind", [WithGenerators, StreamWithGenerators])
def test_generators_of_the_callers_data_set_stay_as_they_are(kind):
    fresh, dataset = kind(), kind()
    assert fresh.draw() == dataset.draw()
    spec = LoaderSpec(dataset, batch_size=3, num_samples=10)
    for _, _ in zip(spec.build(), range(5), strict=False):
        assert fresh.draw() == dataset.draw()
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=CPU) as loader:
        list(loader.serve(loader.requests(0, 0)))
    assert fresh.draw() == dataset.draw()


@pytest.mark.parametrize("persistent", [True, False])
def test_one_reader_at_a_time_has_the_workers(persistent):
    spec = LoaderSpec(
        NUMBERS,
        batch_size=2,
        num_workers=1,
        multiprocessing_context="fork",
        persistent_workers=persistent,
    )
    with spec.build(num_steps=8) as loader:
        whole = [batch.tolist() for batch in loader]
        older = iter(loader)
        assert next(older).tolist() == whole[0]
        newer = [batch.tolist() for batch in loader]
        assert newer == whole
        with pytest.raises(LoaderError, match="was iterated anew"):
            next(older)
    loader = LoaderSpec(NUMBERS, batch_size=2).build(num_steps=4)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [(one, one) for one in whole[:4]]
