"""Iterable data sets: one stream a chain and purpose, the same for any number of workers."""

import collections
import itertools
import os
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from devsample import LoaderSpec
from devsample.data.loader import ChainLoader
from devsample.errors import InvalidArgumentError, LoaderError, LoaderWarning
from devsample.seeds import Role, chain_keys

CPU = torch.device("cpu")


class Numbers(IterableDataset):
    """0 … n − 1, the same order in every epoch."""

    def __init__(self, n=10):
        self.n = n

    def __iter__(self):
        yield from range(self.n)


class Shuffled(Numbers):
    """A new order every time, from a generator of the process or of its own."""

    def __init__(self, n=10, kind="numpy"):
        super().__init__(n)
        self.kind, self.own = kind, np.random.default_rng(0)

    def __iter__(self):
        order = list(range(self.n))
        if self.kind == "random":
            random.shuffle(order)
        elif self.kind == "torch":
            order = torch.randperm(self.n).tolist()
        else:
            (np.random if self.kind == "numpy" else self.own).shuffle(order)
        for item in order:
            yield item + torch.rand(()).item() / 2  # augmentation


class SelfIterating:
    """The old way: the object is its own iterator."""

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == 10:
            raise StopIteration
        self.at += 1
        return self.at - 1


class Dividing(IterableDataset):
    """Divides its files over workers; file f holds f + 1 items."""

    def __init__(self, files=5, shuffle=False):
        self.files, self.shuffle = files, shuffle

    def __iter__(self):
        files = list(range(self.files))
        if self.shuffle:
            random.shuffle(files)  # needs the same order in every worker
        info = get_worker_info()
        if info is not None:
            assert info.dataset is self
            files = files[info.id :: info.num_workers]
        for file in files:
            for item in range(file + 1):
                yield 100 * file + item

    def all_items(self):
        return [100 * file + item for file in range(self.files) for item in range(file + 1)]


def first_batches(spec, count, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoaderWarning)
        return [batch.tolist() for batch in itertools.islice(spec.build(**options), count)]


def over_workers(dataset, count=12, num_samples=10, **fields):
    """The first batches for 0 to 3 workers."""
    found = [first_batches(LoaderSpec(dataset, batch_size=4, num_samples=num_samples, **fields), count)]
    for workers, method, prefetch in [(1, "fork", 1), (2, "fork", 3), (3, "fork", 1)]:
        spec = LoaderSpec(
            dataset,
            batch_size=4,
            num_samples=num_samples,
            num_workers=workers,
            multiprocessing_context=method,
            prefetch_factor=prefetch,
            **fields,
        )
        found.append(first_batches(spec, count))
    return found


def test_batches_follow_the_data_epoch_after_epoch():
    spec = LoaderSpec(Numbers, batch_size=4, num_samples=10)
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert first_batches(spec, 7) == epoch + epoch + epoch[:1]
    spec = LoaderSpec(Numbers, batch_size=4, num_samples=10, drop_last=True)
    assert first_batches(spec, 4) == epoch[:2] + epoch[:2]
    spec = LoaderSpec(Numbers, dataset_args=[3], batch_size=4, num_samples=3, drop_last=True)
    assert first_batches(spec, 2) == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("drop_last", [False, True])
def test_whole_batches_are_dealt_over_the_workers(drop_last):
    found = over_workers(Numbers(), drop_last=drop_last)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("kind", ["random", "numpy", "torch", "own"])
def test_order_and_augmentation_are_the_same_for_any_number_of_workers(kind):
    found = over_workers(Shuffled(kind=kind))
    assert all(one == found[0] for one in found)
    orders = [[int(item) for batch in found[0][start : start + 3] for item in batch] for start in (0, 3, 6)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    other = first_batches(LoaderSpec(Shuffled(kind=kind), batch_size=4, num_samples=10), 3, chain=1)
    assert other != found[0][:3]


def test_an_object_that_is_its_own_iterator_gives_each_purpose_a_stream():
    spec = LoaderSpec(SelfIterating, batch_size=4, num_samples=10)
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=CPU) as loader:
        roles = [Role.ORDER, Role.PROBE_ORDER]
        requests = [loader.requests(0, step, role) for step in range(3) for role in roles]
        served = loader.serve(itertools.chain.from_iterable(requests))
        got = [(request.role, batch.tolist()) for request, batch in served]
    for role in roles:
        assert [batch for one, batch in got if one == role] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("step", [1, 3, 7, 20])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_anywhere(step, workers):
    spec = LoaderSpec(
        Shuffled, batch_size=4, num_samples=10, num_workers=workers, multiprocessing_context="fork"
    )
    whole = first_batches(spec, 2 * (step + 4), grad_accum_steps=2)
    assert first_batches(spec, 8, first_step=step, grad_accum_steps=2) == whole[2 * step :]


@pytest.mark.parametrize(
    ("method", "workers", "prefetch", "shuffle"),
    [("fork", 1, 2, False), ("fork", 2, 1, True), ("forkserver", 2, 3, True), ("fork", 3, 2, False)],
)
def test_a_data_set_that_divides_itself_gives_every_item_once_an_epoch(method, workers, prefetch, shuffle):
    dataset = Dividing(shuffle=shuffle)
    spec = LoaderSpec(
        dataset,
        batch_size=2,
        num_samples=15,
        num_workers=workers,
        prefetch_factor=prefetch,
        multiprocessing_context=method,
    )
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=CPU) as loader:
        items = [item for _, batch in loader.serve(loader.full_pass(15)) for item in batch.tolist()]
        assert sorted(items) == dataset.all_items()
    batches = first_batches(spec, 40)
    counts = collections.Counter(itertools.chain.from_iterable(batches))
    assert max(counts.values()) - min(counts.values()) <= 1  # epochs are whole
    again = LoaderSpec(
        dataset, batch_size=2, num_samples=15, num_workers=workers, multiprocessing_context="fork"
    )
    assert first_batches(again, 12, first_step=3) == batches[3:15]


def test_a_worker_without_data_is_named():
    spec = LoaderSpec(
        Dividing, dataset_args=[2], batch_size=2, num_samples=3, num_workers=3, multiprocessing_context="fork"
    )
    loader = spec.build()
    with pytest.warns(LoaderWarning, match="1 of 3 loader workers got no data"):
        batches = [batch.tolist() for batch in itertools.islice(loader, 6)]
    assert batches[:2] == batches[2:4] == [[0], [100, 101]]


def test_known_shards_are_counted_before_the_start():
    class Sharded(Dividing):
        num_shards = 2

    spec = LoaderSpec(Sharded(2), batch_size=2, num_samples=3, num_workers=3, multiprocessing_context="fork")
    with pytest.warns(LoaderWarning, match="2 parts .* 2 of the 3 loader workers"):
        loader = spec.build()
    assert [batch.tolist() for batch in itertools.islice(loader, 4)] == [[0], [100, 101]] * 2


def test_a_wrong_number_of_samples_is_noticed():
    loader = LoaderSpec(Numbers, batch_size=4, num_samples=1000).build()
    with pytest.warns(LoaderWarning, match="num_samples: it says 1000, but an epoch .* 10 items"):
        list(itertools.islice(loader, 4))


def test_data_that_can_be_read_only_once_is_named():
    class Once(IterableDataset):
        def __init__(self):
            self.source = iter(range(10))

        def __iter__(self):
            return self.source

    with pytest.raises(LoaderError, match="no items in epoch 2.*new iterator"):
        list(itertools.islice(LoaderSpec(Once, batch_size=4, num_samples=10).build(), 9))
    with pytest.raises(InvalidArgumentError, match="generator, which can be read only once"):
        LoaderSpec(lambda: (i for i in range(10)), batch_size=4, num_samples=10).build()


def test_an_error_in_the_stream_is_named():
    class Breaks(IterableDataset):
        def __iter__(self):
            yield from range(6)
            raise OSError("lost the connection")

    for workers in (0, 2):
        spec = LoaderSpec(
            Breaks, batch_size=4, num_samples=10, num_workers=workers, multiprocessing_context="fork"
        )
        loader = iter(spec.build())
        assert next(loader).tolist() == [0, 1, 2, 3]
        with pytest.raises(LoaderError, match="chain 0.*lost the connection(.|\n)*batch 1 of epoch 0"):
            next(loader)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "num_samples"),
        ({"num_samples": 10, "sampling": "epoch"}, "sampling"),
        ({"num_samples": 10, "shuffle": True}, "shuffle"),
        ({"num_samples": 10, "sampler": range(10)}, "sampler"),
    ],
)
def test_what_an_iterable_data_set_cannot_have(fields, name):
    with pytest.raises(InvalidArgumentError, match=f"^{name}: the data set is a Numbers"):
        LoaderSpec(Numbers(), batch_size=4, **fields)


def test_items_that_are_batches():
    class Batches(IterableDataset):
        def __iter__(self):
            yield from ({"x": torch.full((size,), size)} for size in (3, 5, 2))

    spec = LoaderSpec(Batches, batch_size=None, num_samples=10)
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=CPU) as loader:
        served = [(len(one.indices), len(batch["x"])) for one, batch in loader.serve(loader.full_pass(10))]
        assert served == [(3, 3), (5, 5), (2, 2)]
        part = [len(batch["x"]) for _, batch in loader.serve(loader.full_pass(4))]
        assert part == [3, 5]


def test_the_epoch_is_told():
    class Knows(Numbers):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            for item in range(4):
                yield 100 * self.epoch + item

    found = over_workers(Knows(), count=3, num_samples=4)
    assert all(one == [[0, 1, 2, 3], [100, 101, 102, 103], [200, 201, 202, 203]] for one in found)


def test_losses_are_read_somewhere_else():
    spec = LoaderSpec(Numbers, dataset_args=[64], batch_size=4, num_samples=64)
    starts = set()
    for chain in range(8):
        with ChainLoader(spec, chain_keys(0, 8), grad_accum_steps=1, device=CPU) as loader:
            requests = loader.requests(chain, 500, Role.LOSS_ORDER, draw=0)
            ((_, batch),) = loader.serve(requests)
            starts.add(batch[0].item())
    assert len(starts) > 3


def test_interrupted_serving_goes_on_where_it_was():
    spec = LoaderSpec(Shuffled, batch_size=4, num_samples=10, num_workers=2, multiprocessing_context="fork")
    whole = first_batches(spec, 9)
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=CPU) as loader:
        got = []
        for start, stop in [(0, 2), (2, 5), (5, 9), (1, 4)]:
            asked = itertools.chain.from_iterable(loader.requests(0, step) for step in range(start, 9))
            served = loader.serve(asked)
            got.append([batch.tolist() for _, batch in itertools.islice(served, stop - start)])
    assert got == [whole[0:2], whole[2:5], whole[5:9], whole[1:4]]


class FromTheClock(Numbers):
    """An order that nobody can repeat."""

    def __iter__(self):
        items = list(range(self.n))
        random.Random(os.urandom(8)).shuffle(items)
        yield from items


class DividingFromTheClock(Dividing):
    def __iter__(self):
        items = list(super().__iter__())
        random.Random(os.urandom(8)).shuffle(items)
        yield from items


def test_workers_that_read_different_streams_are_noticed():
    spec = LoaderSpec(
        FromTheClock(100), batch_size=4, num_samples=100, num_workers=2, multiprocessing_context="fork"
    )
    with pytest.warns(LoaderWarning, match="two loader workers read the same part"):
        list(itertools.islice(spec.build(), 6))
    for workers in (0, 1):
        spec = LoaderSpec(
            FromTheClock(100),
            batch_size=4,
            num_samples=100,
            num_workers=workers,
            multiprocessing_context="fork",
        )
        items = itertools.chain.from_iterable(first_batches(spec, 25))
        assert sorted(items) == list(range(100))


def test_a_share_is_always_read_by_the_same_worker():
    spec = LoaderSpec(
        DividingFromTheClock, batch_size=2, num_samples=15, num_workers=2, multiprocessing_context="fork"
    )
    got = collections.defaultdict(list)
    with (
        warnings.catch_warnings(),
        ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=CPU) as loader,
    ):
        warnings.simplefilter("error", LoaderWarning)
        asked = []
        for step in range(27):  # losses at every third step
            asked += loader.requests(0, step)
            if step % 3 == 0:
                asked += loader.requests(0, step, Role.PROBE_ORDER, draw=step // 3)
        for request, batch in loader.serve(asked):
            got[request.role] += batch.tolist()
    for items in got.values():
        counts = collections.Counter(items)
        assert len(items) >= 15
        assert max(counts.values()) - min(counts.values()) <= 1


class Curious(Numbers):
    """Asks for its number, but reads everything."""

    def __iter__(self):
        info = get_worker_info()
        self.name = "main" if info is None else f"worker {info.id} of {info.num_workers}"
        yield from range(self.n)


def test_a_data_set_that_asks_but_does_not_divide_is_dealt():
    found = over_workers(Curious())
    assert all(one == found[0] for one in found)


class EpochInSharedMemory(Dividing):
    """Keeps its epoch where all workers see it, which is how it reaches them elsewhere."""

    def __init__(self):
        super().__init__(4)
        self.shared = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        self.shared.fill_(epoch)

    def __iter__(self):
        for item in super().__iter__():
            yield item + 1000 * int(self.shared)


def test_streams_at_different_epochs_do_not_disturb_each_other():
    spec = LoaderSpec(
        EpochInSharedMemory,
        batch_size=2,
        num_samples=10,
        num_workers=2,
        prefetch_factor=4,
        multiprocessing_context="fork",
    )
    items = list(itertools.chain.from_iterable(first_batches(spec, 18)))
    epochs = [sorted(item % 1000 for item in items if item // 1000 == epoch) for epoch in range(3)]
    assert all(epoch == sorted(Dividing(4).all_items()) for epoch in epochs[:2])


def test_an_iterator_that_cannot_be_copied_serves_one_stream():
    class Held(SelfIterating):
        def __init__(self):
            self.lock = threading.Lock()

    loader = LoaderSpec(Held, batch_size=5, num_samples=10).build()
    epoch = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [batch.tolist() for batch in itertools.islice(loader, 3)] == [*epoch, epoch[0]]
    spec = LoaderSpec(Held, batch_size=5, num_samples=10)
    with ChainLoader(spec, chain_keys(0, 1), grad_accum_steps=1, device=CPU) as loader:
        asked = loader.requests(0, 0) + loader.requests(0, 0, Role.PROBE_ORDER)
        with pytest.raises(LoaderError, match="is its own iterator and cannot be copied"):
            list(loader.serve(asked))


class Files(IterableDataset):
    """Two files, whatever the number of workers."""

    def __iter__(self):
        info = get_worker_info()
        for file in range(2) if info is None else range(info.id, 2, info.num_workers):
            yield from range(100 * file, 100 * file + 6)


def test_workers_without_a_file_know_that_the_data_are_divided():
    spec = LoaderSpec(Files, batch_size=2, num_samples=12, num_workers=4, multiprocessing_context="fork")
    with pytest.warns(LoaderWarning, match="2 of 4 loader workers got no data"):
        batches = [batch.tolist() for batch in itertools.islice(spec.build(), 13)]
    assert sorted(itertools.chain.from_iterable(batches[:6])) == [*range(6), *range(100, 106)]
    assert batches[:6] == batches[6:12]


class Counting(Numbers):
    """Counts its epochs itself."""

    def __init__(self, n=10, at_the_end=False):
        super().__init__(n)
        self.epoch, self.at_the_end = 0, at_the_end

    def __iter__(self):
        order = np.random.RandomState(self.epoch).permutation(self.n)
        self.epoch += not self.at_the_end
        yield from order.tolist()
        self.epoch += self.at_the_end


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_data_set_that_counts_its_epochs_is_the_same_for_any_number_of_workers(at_the_end):
    found = over_workers(Counting(at_the_end=at_the_end))
    assert all(one == found[0] for one in found)
    assert found[0][:3] != found[0][3:6]
    roles = [Role.ORDER, Role.LOSS_ORDER]
    got = []
    for workers in (0, 2):
        spec = LoaderSpec(
            Counting(at_the_end=at_the_end),
            batch_size=4,
            num_samples=10,
            num_workers=workers,
            multiprocessing_context="fork",
        )
        with ChainLoader(spec, chain_keys(0, 2), grad_accum_steps=1, device=CPU) as loader:
            wanted = itertools.product(range(8), (1, 0), roles)
            asked = [loader.requests(chain, step, role) for step, chain, role in wanted]
            served = loader.serve(itertools.chain.from_iterable(asked))
            got.append([batch.tolist() for _, batch in served])
    assert got[0] == got[1]
