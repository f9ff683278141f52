"""Tries a LoaderSpec in this process, as a chain process would use it, and measures what it gives."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from devsample.data.carriers import Rebuilt
from devsample.data.fingerprint import content_hash
from devsample.data.loader import ChainLoader
from devsample.data.report import Leaf, LoaderReport, Timing, leaves_of, recommend
from devsample.data.spec import LoaderSpec
from devsample.limits import process_memory, shared_memory
from devsample.machine import available_cores
from devsample.seeds import chain_keys
from devsample.serialize import short_error

FEWEST_BATCHES = 2
_MOST_BATCHES = 1000
_PATIENCE = 6.0  # times the seconds asked for, after which nothing more is begun
_MOST_WORKERS = 4
_SIGN_SECONDS = 1.0
_START_SECONDS = 60.0  # for worker processes to come up on a busy machine

Say = Callable[..., None]
"""Told what begins now, and how much longer than usual (``extra`` seconds) it may take."""


@dataclass(frozen=True)
class Wanted:
    """What to try.

    Attributes:
        counts: numbers of workers, 0 not among them; None: 1, 2, … up to the cores.
        seconds: how long to read batches, in all.
        limit: seconds that one batch may take.
        recipe_bytes: what the recipe carries by value.
        shared_bytes: what it carries in shared memory.
    """

    counts: tuple[int, ...] | None
    seconds: float
    limit: float
    recipe_bytes: int
    shared_bytes: int


def examine(spec: LoaderSpec, device: str, wanted: Wanted, say: Say) -> LoaderReport:
    """Build the loader, read from it with several numbers of workers, and say what was found.

    Raises:
        LoaderError: the factory, the data set or a worker failed, as in a run.
    """
    trial = _Trial(spec, torch.device(device), wanted, say)
    alone = trial.without_workers()
    trial.build_again()
    timings = [alone]
    own = spec.num_workers
    if own:
        timings.append(trial.with_workers(own, str(spec.multiprocessing_context), required=True))
    method = str(replace(spec, num_workers=max(1, own)).multiprocessing_context)
    for count in trial.counts():
        timings += trial.extra(count, method)
    best = _recommended(timings, trial).num_workers
    for other in _other_methods(method, device):
        timings += trial.extra(best, other)
    return trial.report(sorted(timings, key=lambda one: one.num_workers))


class _Trial:
    """One recipe under test."""

    def __init__(self, spec: LoaderSpec, device: torch.device, wanted: Wanted, say: Say) -> None:
        self.spec, self._device, self.wanted, self._say = spec, device, wanted, say
        self._keys = chain_keys(0, 1)
        self._started = time.monotonic()
        self.cores = available_cores()
        self.batch: tuple[Leaf, ...] = ()
        self.num_samples = 0
        self.build_seconds = 0.0
        self.repeatable: bool | None = None
        self.notes: list[str] = []
        self._first_hash = ""

    @property
    def batch_bytes(self) -> int:
        """Bytes of the first batch."""
        return sum(leaf.bytes for leaf in self.batch)

    def counts(self) -> list[int]:
        """Numbers of workers to try besides the recipe's own."""
        given = self.wanted.counts
        if given is None:
            given = tuple(range(1, min(_MOST_WORKERS, self.cores) + 1))
        return [count for count in given if count not in (0, self.spec.num_workers)]

    def without_workers(self) -> Timing:
        """The data set made and read in this process."""
        self._say("making the data set")
        started = time.perf_counter()
        with self._loader(self._alone()) as loader:
            self.build_seconds = time.perf_counter() - started
            self.num_samples = loader.num_samples
            self._say("reading batches in the chain process")
            timing, batches = self._read(loader)
        self._look_at(batches)
        return replace(timing, data_set="")

    def build_again(self) -> None:
        """See whether the first batch comes out the same when all is built anew."""
        if self._is_late() or self.build_seconds > self.wanted.seconds:
            self.notes.append("whether building it again gives the same batches was not tried, for time.")
            return
        self._say("making the data set again")
        with self._loader(self._alone()) as loader:
            _, batch = next(self._serve(loader))
            self.repeatable = content_hash(batch) == self._first_hash
        if not self.repeatable:
            self.notes.append(
                "the first batch was another one when all was built again: something in the data set or "
                "its factory is random in a way that no seed sets (the clock, os.urandom, a generator seeded "
                "from them), so a run cannot be repeated."
            )

    def with_workers(self, count: int, method: str, *, required: bool) -> Timing:
        """The loader with so many workers.

        Args:
            count: how many.
            method: how they start.
            required: whether an error is raised; else it is part of the result.
        """
        text = f"reading batches with {count} worker{'s' if count > 1 else ''} ({method})"
        self._say(text, extra=_START_SECONDS)
        spec = replace(
            self.spec,
            num_workers=count,
            multiprocessing_context=method,
            timeout=self.spec.timeout or self.wanted.limit + _START_SECONDS / 2,
        )
        try:
            with self._loader(spec) as loader:
                timing, _ = self._read(loader, method)
                memory = [process_memory(one.pid or 0) for one in multiprocessing.active_children()]
                rebuilt = isinstance(_carrier(loader), Rebuilt)
        except Exception as error:
            if required:
                raise
            return Timing(count, method, error=short_error(error))
        known = [one for one in memory if one is not None]
        way = "as it is" if method == "fork" else "made again in each" if rebuilt else "sent"
        return replace(timing, worker_memory=sum(known) // len(known) if known else None, data_set=way)

    def extra(self, count: int, method: str) -> list[Timing]:
        """A measurement that is made if there is time."""
        if count == 0:
            return []
        if self._is_late():
            self.notes.append(f"{count} workers by {method} were not tried, for time.")
            return []
        with warnings.catch_warnings():  # Python's own about fork, which nobody asked for
            warnings.simplefilter("ignore", DeprecationWarning)
            return [self.with_workers(count, method, required=False)]

    def report(self, timings: Sequence[Timing]) -> LoaderReport:
        """Everything that was found."""
        advice = _recommended(timings, self)
        free = shared_memory()
        ahead = advice.num_workers * (advice.prefetch_factor or 0)
        return LoaderReport(
            num_samples=self.num_samples,
            batch=self.batch,
            batch_bytes=self.batch_bytes,
            build_seconds=self.build_seconds,
            repeatable=self.repeatable,
            timings=tuple(timings),
            recipe_bytes=self.wanted.recipe_bytes,
            shared_bytes=self.wanted.shared_bytes,
            cores=self.cores,
            num_workers=advice.num_workers,
            prefetch_factor=advice.prefetch_factor,
            multiprocessing_context=advice.multiprocessing_context,
            reason=advice.reason,
            shared_memory_needed=ahead * self.batch_bytes,
            shared_memory_free=None if free is None else free[1],
            notes=tuple(self.notes),
        )

    def _alone(self) -> LoaderSpec:
        return replace(self.spec, num_workers=0, worker_dataset="auto")

    def _is_late(self) -> bool:
        return time.monotonic() - self._started > _START_SECONDS / 2 + _PATIENCE * self.wanted.seconds

    def _loader(self, spec: LoaderSpec) -> ChainLoader:
        return ChainLoader(spec, self._keys, grad_accum_steps=1, device=self._device)

    def _serve(self, loader: ChainLoader) -> Iterator[tuple[Any, Any]]:
        steps = (loader.requests(0, step) for step in itertools.count())
        return loader.serve(itertools.chain.from_iterable(steps))

    def _read(self, loader: ChainLoader, method: str = "") -> tuple[Timing, list[Any]]:
        """Time the batches of a loader; the first two of them are kept."""
        share = self.wanted.seconds / (len(self.counts()) + 3)
        workers = loader.spec.num_workers
        started = time.perf_counter()
        served = self._serve(loader)
        kept: list[Any] = []
        arrivals: list[float] = []
        said = started
        while len(arrivals) < FEWEST_BATCHES or (
            arrivals[-1] - arrivals[0] < share and len(arrivals) < _MOST_BATCHES
        ):
            _, batch = next(served)
            self._wait_for_device()
            arrivals.append(time.perf_counter())
            if len(kept) < FEWEST_BATCHES:
                kept.append(batch)
            if arrivals[-1] - said > _SIGN_SECONDS:
                self._say("")  # it goes on
                said = arrivals[-1]
        ready = min(workers * (loader.spec.prefetch_factor or 2), len(arrivals) // 2)  # made while it started
        steady = arrivals[ready:] if len(arrivals) - ready > 1 else arrivals
        gaps = [after - before for before, after in itertools.pairwise(steady)]
        timing = Timing(
            workers,
            method,
            first_batch=arrivals[0] - started,
            per_batch=sum(gaps) / len(gaps),
            batches=len(arrivals),
            longest=max(gaps),
        )
        return timing, kept

    def _wait_for_device(self) -> None:
        if self._device.type != "cpu":
            with contextlib.suppress(RuntimeError):
                torch.accelerator.synchronize()

    def _look_at(self, batches: Sequence[Any]) -> None:
        self.batch = tuple(leaves_of(batches[0]))
        self._first_hash = content_hash(batches[0])
        second = {leaf.path: leaf for leaf in leaves_of(batches[1])}
        for leaf in self.batch:
            other = second.get(leaf.path)
            if other is None:
                self.notes.append(f"{leaf.path} was missing in the second batch.")
            elif other.shape != leaf.shape:
                self.notes.append(f"{leaf.path} had the shape {other.shape} in the second batch.")
            elif (other.kind, other.dtype) != (leaf.kind, leaf.dtype):
                self.notes.append(
                    f"{leaf.path} was a {other.kind} {other.dtype} in the second batch.".strip()
                )


def _carrier(loader: ChainLoader) -> Any:
    """What brings the data set to the workers."""
    maker: Any = loader._loader.dataset
    return maker.dataset


def _recommended(timings: Sequence[Timing], trial: _Trial) -> Any:
    free = shared_memory()
    return recommend(
        timings,
        trial.batch_bytes,
        None if free is None else free[1],
        trial.spec.prefetch_factor,
        trial.cores,
    )


def _other_methods(method: str, device: str) -> list[str]:
    """Start methods to compare with: those that are safe here and not plainly slower."""
    known = multiprocessing.get_all_start_methods()
    safe = ["forkserver", *(["fork"] if torch.device(device).type == "cpu" else [])]
    return [one for one in safe if one in known and one != method]
