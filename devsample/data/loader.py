"""One DataLoader per chain process, serving the batches of all its chains by request."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import multiprocessing
import signal
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate, default_convert
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from devsample.data.batches import to_device
from devsample.data.carriers import Carried, carry, pass_through
from devsample.data.dealing import Dealer, Epoch, Stream
from devsample.data.generators import preserved_global_generators, seed_global_generators
from devsample.data.orders import Order, batch_length, make_order
from devsample.data.resident import Columns, NotResident, ResidentRows, columns_of
from devsample.data.sending import is_no_space
from devsample.data.spec import LoaderSpec, is_iterable
from devsample.data.streams import known_shares
from devsample.data.worker import (
    BatchMaker,
    BatchRequest,
    IndexedBatches,
    StreamedBatches,
    WorkerStart,
    as_it_is,
)
from devsample.errors import InvalidArgumentError, LoaderError, LoaderWarning, LoaderWorkerError
from devsample.machine import describe_exit, hidden_main_module, worker_server
from devsample.seeds import ChainKey, Role, stream_seed

_BROKEN_CONNECTION = (ConnectionError, FileNotFoundError, EOFError)
_LOST_WORKER = (RuntimeError, OSError, EOFError)
_POLL_SECONDS = 1.0  # how long a dead worker may go unnoticed
_ROOM_SECONDS = 10.0  # how long workers that do not fit into /dev/shm wait for room
_LARGEST_LEAD = 2048  # samples; see ChainLoader._lead
_NO_STEP = 1 << 40  # added to a step's number; see ChainLoader.for_other_steps


class ChainLoader:
    """Builds the data set and its DataLoader once, and serves batches by request.

    Args:
        spec: the recipe.
        keys: the keys of all chains of the run, by number.
        grad_accum_steps: micro-batches per step.
        device: where batches end up.
    """

    def __init__(
        self,
        spec: LoaderSpec,
        keys: Sequence[ChainKey],
        *,
        grad_accum_steps: int,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self._keys, self._accumulate, self._device = tuple(keys), grad_accum_steps, device
        self._orders: dict[tuple[int, int], Order] = {}
        self._streams: dict[tuple[int, int], Stream] = {}
        self._plan = _Plan()
        self._resources = contextlib.ExitStack()
        self._dataset_seed = stream_seed(ChainKey(0, 0, 0), Role.DATASET, 0)  # the same in every run
        with preserved_global_generators():
            seed_global_generators(self._dataset_seed)
            dataset = spec.make_dataset()
        self.is_stream = is_iterable(dataset)
        self.num_samples = spec.sample_count(dataset)
        self._shares = self._count_shares(dataset) if self.is_stream else 1
        self._num_items = self.num_samples if self.is_stream else spec.item_count(dataset)
        self._micro_size = (spec.batch_size or 1) if self.is_stream else batch_length(spec, self._keys[0])
        self._wants_epoch = hasattr(dataset, "set_epoch")
        if spec.num_workers > 0:
            self._resources.enter_context(worker_server(spec.multiprocessing_context))
        self._loader = self._build(dataset)
        self._columns: Columns | None = None
        if spec.resident:
            self._columns = self._make_columns()

    @property
    def order(self) -> str:
        """The order of the gradient batches: "iid", "epoch", "sequential", "user" or "stream"."""
        return "stream" if self.is_stream else self.spec.order

    def requests(
        self, chain: int, step: int, role: Role = Role.ORDER, *, draw: int | None = None
    ) -> list[BatchRequest]:
        """The micro-batches of one step of one chain, for a purpose.

        Args:
            chain: its number.
            step: the step.
            role: the purpose.
            draw: the number of the draw, if the batches are read at draws only.
        """
        if self.is_stream:
            return self._stream_requests(chain, step, role, self._number(chain, step, role, draw))
        pieces = self._pieces(chain, step, role, draw)
        epoch = self._order(chain, Role.ORDER).epoch(step) if self._wants_epoch else 0
        last = len(pieces) - 1
        return [
            self._request(chain, step, micro, role, piece, last=micro == last, epoch=epoch)
            for micro, piece in enumerate(pieces)
        ]

    def by_index(self, chains: Sequence[int], steps: int) -> ResidentRows | None:
        """The batches of chains from memory, if the data lie there or can be brought there.

        Args:
            chains: their numbers.
            steps: how many they make.
        """
        if self.is_stream:
            return None
        if self._columns is None:
            reads = steps * len(chains) * self._micro_size * self._accumulate
            try:
                maker: Any = self._loader.dataset
                self._columns = columns_of(maker, self.spec, self._num_items, reads, self._device)
            except NotResident:
                return None
        return ResidentRows(
            self._columns,
            self.spec,
            chains,
            [self._keys[chain] for chain in chains],
            count=self._num_items,
            sizes=(self._micro_size, self._accumulate),
            pieces=self._pieces,
        )

    def reads_all(self, count: int) -> bool:
        """Whether `full_pass` reads every sample once."""
        return self.order != "user" and count >= self.num_samples

    def full_pass(self, count: int) -> Iterable[BatchRequest]:
        """Requests that cover ``count`` samples once.

        If that is not all of them they are evenly spread over the data set. Data with an order of
        their own, and those of a user's sampler, are read as they come, for an epoch at most.
        """
        if self.is_stream:
            return self._stream_pass(count)
        if self.order == "user":
            return self._sampler_pass(count)
        count = min(count, self._num_items)
        indices = np.linspace(0, self._num_items - 1, count).round().astype(np.int64).tolist()
        size = self._micro_size
        pieces = [indices[start : start + size] for start in range(0, len(indices), size)]
        return [
            self._request(0, step, 0, Role.FULL_ORDER, piece, last=True) for step, piece in enumerate(pieces)
        ]

    def has_samples(self) -> bool:
        """Whether an index is a sample, drawn independently: a step's samples are known by number."""
        one_each = self.num_samples == self._num_items and self.spec.batch_size is not None
        return self.order == "iid" and one_each

    def for_other_steps(self, requests: Sequence[BatchRequest]) -> list[BatchRequest]:
        """The same items, to be read as at steps that a run does not come to."""
        return [
            self._request(
                one.chain,
                _NO_STEP + one.step,
                one.micro,
                Role(one.role),
                list(one.indices),
                last=one.last,
                epoch=one.epoch + 1 if self._wants_epoch else 0,
            )
            for one in requests
        ]

    def serve(self, requests: Iterable[BatchRequest]) -> Iterator[tuple[BatchRequest, Any]]:
        """Each request with its batch on the device, in order.

        Raises:
            LoaderWorkerError: a worker died, or raised while it made a batch.
            LoaderError: the data set raised in this process, or a worker is stuck.
        """
        for request, batch in self._served(requests):
            yield request, to_device(batch, self._device)

    def as_dataloader(self, chain: int, first_step: int, num_steps: int | None) -> DataLoader[Any]:
        """A DataLoader that gives the batches of the steps of one chain; this loader ends with it."""

        def batches() -> Iterator[Any]:
            steps = itertools.islice(itertools.count(first_step), num_steps)
            requests = itertools.chain.from_iterable(self.requests(chain, step) for step in steps)
            for _, batch in self._served(requests):
                yield batch

        maker = self._loader.dataset
        maker.preserves = True  # type: ignore[attr-defined]
        shown = _ServedDataLoader(maker, **self._options)
        shown.batches, shown.close = batches, self.close
        weakref.finalize(shown, self.close)
        return shown

    def close(self) -> None:
        """End the workers."""
        self._end_workers()
        self._resources.close()
        self._loader.dataset.put_back()  # type: ignore[attr-defined]

    def __enter__(self) -> ChainLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _served(self, requests: Iterable[BatchRequest]) -> Iterator[tuple[BatchRequest, Any]]:
        return self._serve_streams(requests) if self.is_stream else self._serve_indexed(requests)

    def _serve_indexed(self, requests: Iterable[BatchRequest]) -> Iterator[tuple[BatchRequest, Any]]:
        under_way: deque[BatchRequest] = deque()
        self._next_due = lambda: under_way[0] if under_way else None

        def noted() -> Iterator[BatchRequest]:
            for request in requests:
                under_way.append(request)
                yield request

        for batch in self._batches(noted()):
            yield under_way.popleft(), batch

    def _serve_streams(self, requests: Iterable[BatchRequest]) -> Iterator[tuple[BatchRequest, Any]]:
        workers = self.spec.num_workers
        dealer = Dealer(self._streams, self._keys, requests, shares=self._shares, workers=workers)
        self._next_due = lambda: dealer.due
        looked_at = 0
        while True:
            for reply in self._batches(dealer):
                self._guarded(functools.partial(dealer.take, reply))
                for epoch in dealer.epochs[looked_at:]:
                    self._look_at(epoch)
                looked_at = len(dealer.epochs)
                if dealer.differs:
                    self._say_it_differs()
                for request, made in dealer.ready():
                    yield request._replace(indices=range(made.size)), made.batch
            if dealer.idle:
                return

    def _batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """What the wrapped loader makes of what ``source`` asks for."""
        if self.spec.num_workers == 0 and not self._loader.pin_memory:  # what it would do, at less cost
            for request in source:
                yield self._guarded(functools.partial(self._loader.dataset.__getitem__, request))
            return
        self._plan.source = source
        self._iterations += 1
        mine = self._iterations
        batches = self._guarded(self._start)
        try:
            while True:
                try:
                    batch = self._guarded(lambda: self._next(batches))
                except StopIteration:
                    return
                yield batch
                if mine != self._iterations:
                    raise LoaderError(
                        "this loader was iterated anew meanwhile, which took its workers; build another one "
                        "to read two streams side by side."
                    )
        finally:
            if mine == self._iterations and not self.spec.persistent_workers:
                self._end_workers()

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch; the loader looks after its workers every second while it waits."""
        started = time.monotonic()
        while True:
            try:
                return next(batches)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
                waited = time.monotonic() - started
                if 0 < self.spec.timeout <= waited:
                    raise _Stuck(waited) from None

    def _make_columns(self) -> Columns:
        try:
            if self.is_stream:
                raise NotResident("it is a stream")
            maker: Any = self._loader.dataset
            return columns_of(maker, self.spec, self._num_items, math.inf, self._device)
        except NotResident as reason:
            self.close()
            raise InvalidArgumentError(
                f"resident: True, but the data set cannot be kept as tensors: {reason}. Leave resident out."
            ) from reason.__cause__

    def _number(self, chain: int, step: int, role: Role, draw: int | None) -> int:
        """The place in an order of its own of what is read at a step."""
        number = step if draw is None else draw
        ahead = role in (Role.LOSS_ORDER, Role.SECOND_ORDER)
        return number + self._lead(chain, role) if ahead else number

    def _pieces(self, chain: int, step: int, role: Role, draw: int | None) -> list[list[int]]:
        """The micro-batches of a step, as indices."""
        own_order = self.order == "user" or role == Role.ORDER
        return self._order(chain, role)(self._number(chain, step, role, draw) if own_order else step)

    def _stream_requests(self, chain: int, step: int, role: Role, number: int) -> list[BatchRequest]:
        first, last = number * self._accumulate, self._accumulate - 1
        return [
            BatchRequest(chain, step, micro, int(role), micro == last, (), 0, place=first + micro)
            for micro in range(self._accumulate)
        ]

    def _stream_pass(self, count: int) -> Iterator[BatchRequest]:
        name = 0, int(Role.FULL_ORDER)
        stream = self._streams.setdefault(name, Stream(0, self._keys[0], name[1]))
        stream.restart()
        stream.limit = count
        for place in itertools.count():
            if stream.samples >= count or stream.epoch > 0:
                return
            yield BatchRequest(0, place, 0, name[1], True, (), 0, place=place)

    def _sampler_pass(self, count: int) -> list[BatchRequest]:
        order = make_order(self.spec, self._keys[0], self._num_items, self._micro_size, 1, Role.FULL_ORDER)
        requests: list[BatchRequest] = []
        while count > 0 and order.epoch(len(requests)) == 0:
            (piece,) = order(len(requests))
            requests.append(self._request(0, len(requests), 0, Role.FULL_ORDER, piece, last=True))
            count -= len(piece)
        return requests

    def _lead(self, chain: int, role: Role) -> int:
        """By how many steps a chain's losses are ahead of its gradients, if they are read in an order.

        A data set or sampler without randomness gives both in the same order. Read side by side, a
        loss would come from the very batch of the gradient, and a second loss from that of the first.
        """
        if self.order not in ("stream", "user"):
            return 0
        samples, sampler = self.num_samples, self.spec.sampler or ()
        if self.spec.batch_sampler is not None:
            samples = len(self.spec.batch_sampler) * self._micro_size  # type: ignore[arg-type]
        elif isinstance(sampler, Sized) and len(sampler):
            samples = len(sampler)
        steps = min(samples, _LARGEST_LEAD) // (self._micro_size * self._accumulate)
        lead = stream_seed(self._keys[chain], Role.LOSS_ORDER, 0, part=1) % max(1, steps)
        if role == Role.SECOND_ORDER:
            lead += 1 + stream_seed(self._keys[chain], role, 0, part=1) % max(1, steps - 1)
        return lead

    def _count_shares(self, dataset: Any) -> int:
        """In how many shares a data set that divides itself is read."""
        workers, known = self.spec.num_workers, known_shares(dataset)
        if known is None or known >= workers:
            return workers
        warnings.warn(
            f"loader_spec: the data set divides into {known} parts (its files or shards), so {known} of the "
            f"{workers} loader workers get data; num_workers={known} is enough.",
            LoaderWarning,
            stacklevel=2,
        )
        return known

    def _say_it_differs(self) -> None:
        warnings.warn(
            "loader_spec.dataset: two loader workers read the same part of the data in another order or with "
            "another content, so samples are left out and others come twice. The data set takes its "
            "randomness from the clock or the system: give it a seed, let it draw from the generators of "
            "torch, numpy or random, or use num_workers=1.",
            LoaderWarning,
            stacklevel=2,
        )

    def _look_at(self, epoch: Epoch) -> None:
        """Say what is odd about an epoch, once."""
        if epoch.empty_shares:
            warnings.warn(
                f"loader_spec: {epoch.empty_shares} of {epoch.shares} loader workers got no data from a data "
                f"set that divides itself; num_workers={epoch.shares - epoch.empty_shares} is enough.",
                LoaderWarning,
                stacklevel=2,
            )
        if self.spec.batch_size is not None and epoch.items != self.num_samples:
            warnings.warn(
                f"loader_spec.num_samples: it says {self.num_samples}, but an epoch of the data set had "
                f"{epoch.items} items. n enters nbeta and the estimate; give the right number.",
                LoaderWarning,
                stacklevel=2,
            )

    def _order(self, chain: int, role: Role) -> Order:
        if (chain, role) not in self._orders:
            self._orders[chain, role] = make_order(
                self.spec, self._keys[chain], self._num_items, self._micro_size, self._accumulate, role
            )
        return self._orders[chain, role]

    def _request(
        self,
        chain: int,
        step: int,
        micro: int,
        role: Role,
        indices: list[int],
        *,
        last: bool,
        epoch: int = 0,
    ) -> BatchRequest:
        seed = stream_seed(self._keys[chain], Role.ITEMS, step, micro << 8 | role) if self._seeded else 0
        return BatchRequest(chain, step, micro, int(role), last, indices, seed, epoch)

    def _build(self, dataset: Any) -> _SafeDataLoader:
        spec = self.spec
        batched = spec.batch_size is not None
        collate = Carried(spec.collate_fn or (default_collate if batched else default_convert))
        plain = type(dataset) is TensorDataset and collate.value is default_collate
        self._seeded = not plain
        carried = carry(dataset, spec, self._dataset_seed)
        self._resources.callback(carried.close)
        maker: BatchMaker
        if self.is_stream:
            maker = StreamedBatches(
                carried,
                collate,
                batch_size=spec.batch_size,
                drop_last=spec.drop_last,
                shares=self._shares,
            )
        else:
            maker = IndexedBatches(carried, collate, batched=batched, seeded=self._seeded)
        workers: dict[str, Any] = {}
        if spec.num_workers > 0:
            workers = {
                "prefetch_factor": spec.prefetch_factor,
                "persistent_workers": spec.persistent_workers,
                "timeout": _POLL_SECONDS,
                "worker_init_fn": WorkerStart(pass_through(spec.worker_init_fn)),
                "multiprocessing_context": multiprocessing.get_context(spec.multiprocessing_context),
            }
        pin = spec.pin_memory if spec.pin_memory is not None else self._device.type == "cuda"
        self._options = {
            "batch_size": None,
            "sampler": self._plan,
            "collate_fn": as_it_is,
            "num_workers": spec.num_workers,
            "pin_memory": pin and torch.accelerator.is_available(),
            "pin_memory_device": spec.pin_memory_device,
            "generator": torch.Generator(),
        } | workers
        return _SafeDataLoader(maker, **self._options)

    def _start(self) -> Iterator[Any]:
        until = time.monotonic() + _ROOM_SECONDS
        while True:
            try:
                self._live = iter(self._loader)
            except OSError as error:  # another chain's batches fill /dev/shm until they are read
                if not is_no_space(error) or time.monotonic() > until:
                    raise
                time.sleep(_ROOM_SECONDS / 50)
            else:
                return self._live  # type: ignore[no-any-return]

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Call into the loader; whatever goes wrong there is named."""
        try:
            return call()
        except LoaderWorkerError as error:
            own = str(error).partition("LoaderWorkerError: ")[2]  # without the traceback around it
            raise LoaderWorkerError(own or str(error)) from None
        except (StopIteration, LoaderError, KeyboardInterrupt):
            raise
        except _Stuck as error:
            self._end_workers()
            raise LoaderError(
                f"{self._where()}loader workers gave {error} (timeout={self.spec.timeout:g}). Either an item "
                "takes that long: raise timeout, or num_workers; or a worker waits for something: see what "
                "the data set does."
            ) from None
        except _LOST_WORKER as error:
            named = self._name_lost_worker(error)
            self._end_workers()
            raise named from error
        except Exception as error:
            raise LoaderError(f"the loader raised {type(error).__name__}: {error}") from error

    def _end_workers(self) -> None:
        """End the workers; the next batches start new ones."""
        live: list[Any] = [self._live, self._loader._iterator]
        for iterator in {id(one): one for one in live}.values():
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
                for process in iterator._workers:  # one that was stopped heeds nothing else
                    if process.is_alive():
                        process.kill()
                        process.join()
        self._loader._iterator = None
        self._live = None

    def _name_lost_worker(self, error: Exception) -> LoaderError:
        workers = getattr(self._live, "_workers", None) or []
        if isinstance(error, _BROKEN_CONNECTION):  # it may take a moment to be seen as dead
            for process in workers:
                process.join(1.0)
        dead = [
            f"loader worker {number} (pid {process.pid}) was {describe_exit(process.exitcode)}"
            if (process.exitcode or 0) < 0
            else f"loader worker {number} (pid {process.pid}) {describe_exit(process.exitcode)}"
            for number, process in enumerate(workers)
            if not process.is_alive()
        ]
        if not dead:
            full = " /dev/shm is full: give it more room (docker run --shm-size=8g) or use fewer workers."
            hint = full if is_no_space(error) else ""
            return LoaderError(f"{self._where()}the loader raised {type(error).__name__}: {error}.{hint}")
        hint = "Something in the data set, or a library of its, ended the process (os._exit, for one)."
        if any("SIGKILL" in one for one in dead):
            hint = "If memory ran out, lower num_workers, prefetch_factor or batch_size."
        elif any("killed" in one for one in dead):
            hint = "A compiled library crashed, or a memory-mapped file became shorter."
        named = LoaderWorkerError(f"{self._where()}{'; '.join(dead)}. {hint}")
        named.lost = True
        return named

    def _where(self) -> str:
        request = self._next_due()
        return "" if request is None else f"chain {request.chain}, step {request.step}: "

    _live: Any = None
    _iterations = 0
    _next_due: Callable[[], BatchRequest | None] = staticmethod(lambda: None)


class _Stuck(Exception):  # noqa: N818 - becomes an error with a name and a remedy
    """No batch for as long as the user's timeout."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no batch for {seconds:.0f} s")


class _SafeDataLoader(DataLoader[Any]):
    """A DataLoader whose workers start from any script, and whatever the default device is."""

    def check_worker_number_rationality(self) -> None:
        """Left out: it knows of one loader only, and of no worker that waits for a disk."""

    def _get_iterator(self) -> Any:
        with hidden_main_module(), torch.device("cpu"), _own_signal_handler(), warnings.catch_warnings():
            # torch warns and raises; the error itself says what does not travel.
            warnings.filterwarnings("ignore", "Got pickle error", UserWarning)
            return _Workers(self) if self.num_workers > 0 else super()._get_iterator()


class _Workers(_MultiProcessingDataLoaderIter):
    """The workers of a loader; if not all could be started, the others end without a word."""

    def __del__(self) -> None:
        if hasattr(self, "_workers_status"):
            super().__del__()
            return
        for process in getattr(self, "_workers", ()):
            process.terminate()
            process.join()


@contextlib.contextmanager
def _own_signal_handler() -> Iterator[None]:
    """Keep torch from raising out of a signal handler, anywhere in the program, when a worker dies.

    The loader looks after its workers every second.
    """
    number = getattr(signal, "SIGCHLD", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(number, before)


class _ServedDataLoader(_SafeDataLoader):
    """What a user gets: iterating it goes through the loader of a chain."""

    batches: Callable[[], Iterator[Any]]
    close: Callable[[], None]
    """Ends its workers, which otherwise live as long as it does."""

    def __enter__(self) -> _ServedDataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        yield from self.batches()  # a generator, so that it lives as long as somebody reads from it


class _Plan:
    """The sampler of the wrapped loader: iterating it gives what is asked for now."""

    source: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)
