"""The batches of a chain depend on (seed, chain, step): order, augmentation and collation.

Not on the number of workers, how they start, how far they read ahead, whether they persist, nor on
where reading was taken up again.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

from devsample import LoaderSpec
from tests.process.loader_cases import items, streams
from tests.process.loader_cases.covering import covering, pairs, product
from tests.process.loader_cases.harness import Run, batches, complete, run, same

pytestmark = pytest.mark.usefixtures("fork_server")
N, STEPS, SEED = items.COUNT, 18, 5
FACTORS: dict[str, Sequence[Any]] = {
    "method": ("forkserver", "fork", "spawn"),
    "num_workers": (0, 1, 2, 3),
    "kind": ("indexed", "iterable", "sampler", "batch_sampler", "epochs"),
    "first_step": (0, 1, 9),
    "prefetch_factor": (1, 4),
    "persistent_workers": (True, False),
}
CHOSEN = covering(FACTORS)


class Augmented(streams.Drawing):
    """Random numbers of every origin, in every item; the epoch as well."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        drawn = [float(torch.rand(())), float(np.random.rand())]  # noqa: NPY002
        return [*super().__getitem__(index), *drawn, self.epoch]


class AugmentedStream(streams.Augmenting):
    """The same for a stream, whose order is random, too."""

    def __init__(self) -> None:
        super().__init__(27)  # the last batch of an epoch is ragged
        self.noise = streams.Composed(streams.Noise(torch.Generator()))

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            yield [value, self.noise(0.0), self.epoch]


class Jitter:
    """A collate function with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.RandomState(0)

    def __call__(self, rows: list[Any]) -> torch.Tensor:
        batch = torch.tensor(rows, dtype=torch.float64)
        return batch + torch.rand(batch.shape) + float(self.rng.rand())


def fields_of(kind: str) -> tuple[Any, dict[str, Any]]:
    """A data set, new each time, and what makes its spec of a kind."""
    given: dict[str, Any] = {"batch_size": 4, "collate_fn": Jitter()}
    if kind == "iterable":
        return AugmentedStream(), given | {"num_samples": 27}
    if kind == "sampler":
        return Augmented(), given | {"sampler": WeightedRandomSampler([1.0, 2.0] * (N // 2), 30)}
    if kind == "batch_sampler":
        batches_of = BatchSampler(RandomSampler(range(N)), 5, drop_last=False)
        return Augmented(), {"collate_fn": Jitter(), "batch_sampler": batches_of}
    if kind == "epochs":
        return Augmented(), given | {"sampling": "epoch", "batch_size": 5}
    return Augmented(), given


def spec_of(kind: str, **options: Any) -> LoaderSpec:
    dataset, fields = fields_of(kind)
    return LoaderSpec(dataset, **fields, **options)


def stream(kind: str, *, chain: int = 0, seed: int = SEED, **build: Any) -> list[Any]:
    """The batches that one process makes without workers."""
    return batches(spec_of(kind), STEPS, seed=seed, chain=chain, **build)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    """The stream of chain 1, by kind."""
    return {kind: stream(kind, chain=1) for kind in FACTORS["kind"]}


def check(choice: dict[str, Any], expected: list[Any]) -> None:
    """The loader of a combination gives the stream, again when it is iterated again."""
    spec = spec_of(
        choice["kind"],
        num_workers=choice["num_workers"],
        multiprocessing_context=choice["method"],
        prefetch_factor=choice["prefetch_factor"],
        persistent_workers=choice["persistent_workers"],
    )
    first = choice["first_step"]
    loader = spec.build(seed=SEED, chain=1, first_step=first, num_steps=STEPS - first)
    try:
        assert [batch.tolist() for batch in loader] == expected[first:]
        assert [batch.tolist() for batch in itertools.islice(loader, 3)] == expected[first : first + 3]
    finally:
        loader.close()


def label(choice: dict[str, Any]) -> str:
    return "-".join(str(level) for level in choice.values())


def test_the_chosen_combinations_have_every_pair_of_levels() -> None:
    assert set().union(*map(pairs, CHOSEN)) == set().union(*map(pairs, product(FACTORS)))
    assert len(CHOSEN) <= 24


def test_the_streams_are_worth_comparing(expected: dict[str, list[Any]]) -> None:
    """Augmented, with batches of more than one size, over more than one epoch; no two are alike."""
    for found in expected.values():
        columns = np.concatenate([np.array(batch) for batch in found])
        assert len(found) == STEPS
        assert len(np.unique(columns[:, :2])) == 2 * len(columns)
    assert {len(batch) for batch in expected["iterable"]} == {4, 3}
    assert {len(batch) for batch in expected["epochs"]} == {5, 2}
    assert {len(batch) for batch in expected["batch_sampler"]} == {5, 2}
    assert len({str(found[:3]) for found in expected.values()}) == len(expected)


@pytest.mark.parametrize("choice", CHOSEN, ids=label)
def test_the_same_stream(choice: dict[str, Any], expected: dict[str, list[Any]]) -> None:
    check(choice, expected[choice["kind"]])


ALL = FACTORS | {"kind": ("indexed", "iterable"), "first_step": (0, 9), "num_workers": (1, 2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("choice", [one for one in product(ALL) if one not in CHOSEN], ids=label)
def test_the_same_stream_in_every_combination(choice: dict[str, Any], expected: dict[str, list[Any]]) -> None:
    check(choice, expected[choice["kind"]])


@pytest.mark.parametrize("kind", FACTORS["kind"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_taking_up_at_any_step(kind: str, num_workers: int, expected: dict[str, list[Any]]) -> None:
    for first in range(STEPS) if num_workers == 0 else (2, 7, STEPS - 1):
        spec = spec_of(kind, num_workers=num_workers, multiprocessing_context="fork")
        loader = spec.build(seed=SEED, chain=1, first_step=first, num_steps=min(2, STEPS - first))
        assert [batch.tolist() for batch in loader] == expected[kind][first : first + 2]
        loader.close()


@pytest.mark.parametrize("kind", FACTORS["kind"])
def test_taking_up_with_several_batches_a_step(kind: str) -> None:
    whole = batches(spec_of(kind), 15, seed=SEED, grad_accum_steps=3)
    for first, num_workers in ((1, 2), (3, 0), (4, 3)):
        spec = spec_of(kind, num_workers=num_workers, multiprocessing_context="fork")
        loader = spec.build(seed=SEED, grad_accum_steps=3, first_step=first, num_steps=5 - first)
        found = [batch.tolist() for batch in loader]
        loader.close()
        after = sum(1 for _ in spec_of(kind).build(seed=SEED, grad_accum_steps=3, num_steps=first))
        assert found == whole[after : after + len(found)]
        assert len(found) >= (5 - first) * 2


# --- chains ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FACTORS["kind"])
def test_chains_and_seeds_have_streams_of_their_own(kind: str) -> None:
    found = [stream(kind, chain=chain, seed=seed) for chain, seed in ((0, 5), (1, 5), (2, 5), (0, 6))]
    noise = [{x for batch in one for row in batch for x in row[:2]} for one in found]
    for left, right in itertools.combinations(noise, 2):
        assert not left & right


def drawn(kind: str, *, cores: int = 1, num_chains: int = 2, **options: Any) -> Run:
    """A short run; the batches of all draws are kept."""
    dataset, fields = fields_of(kind)
    result = run(
        dataset,
        spec=fields | options,
        cores=cores,
        num_chains=num_chains,
        grad_accum_steps=2,
        num_draws=8,
        width=256,
    )
    complete(result)
    return result


@pytest.mark.parametrize(
    ("kind", "num_workers", "method"),
    [
        ("indexed", 2, "forkserver"),
        ("iterable", 3, "fork"),
        *(
            pytest.param(kind, num_workers, method, marks=pytest.mark.slow)
            for kind, num_workers, method in itertools.product(
                FACTORS["kind"], (0, 1, 2, 3), ("forkserver", "fork", "spawn")
            )
            if (kind, num_workers, method) not in {("indexed", 2, "forkserver"), ("iterable", 3, "fork")}
        ),
    ],
)
def test_draws_of_chain_processes(kind: str, num_workers: int, method: str) -> None:
    """To the last bit, and every batch that a draw was read on."""
    options = {"num_workers": num_workers, "multiprocessing_context": method}
    same(drawn(kind, cores=2, **options), drawn(kind))


@pytest.mark.parametrize("kind", FACTORS["kind"])
def test_chains_that_share_a_process_get_what_they_would_get_alone(kind: str) -> None:
    """One after the other, and with workers."""
    alone, together = drawn(kind, num_chains=1), drawn(kind, num_chains=3)
    workers = drawn(kind, num_chains=3, num_workers=2, multiprocessing_context="fork")
    np.testing.assert_array_equal(together.seen[0], alone.seen[0])
    same(workers, together)
    everything = together.seen[:, :, 0]
    assert len(np.unique(everything)) == everything.size


@pytest.mark.parametrize("kind", ["indexed", "iterable"])
def test_chains_in_lockstep_get_what_they_would_get_alone(kind: str) -> None:
    dataset, fields = fields_of(kind)
    given: dict[str, Any] = {"spec": fields, "cores": 1, "num_chains": 3, "width": 256}
    apart = run(dataset, **given)
    dataset, fields = fields_of(kind)
    given["spec"] = fields | {"num_workers": 2, "multiprocessing_context": "fork"}
    lockstep = run(dataset, chains_per_process=3, **given)
    np.testing.assert_array_equal(lockstep.seen, apart.seen)


# --- the test can fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_depends_on_the_worker_is_seen_to_differ(num_workers: int) -> None:
    fields: dict[str, Any] = {"batch_size": 4, "multiprocessing_context": "fork"}
    alone = batches(LoaderSpec(streams.SeededByWorker(), **fields), 6, seed=SEED)
    workers = LoaderSpec(streams.SeededByWorker(), num_workers=num_workers, **fields)
    assert batches(workers, 6, seed=SEED) != alone
    assert multiprocessing.active_children() == []
