"""One DataLoader per chain process, serving the batches of all its chains by request."""

from __future__ import annotations

import contextlib
import multiprocessing
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate, default_convert

from devsample.data.batches import to_device
from devsample.data.carriers import Carried, carry, pass_through, send
from devsample.data.generators import preserved_global_generators, seed_global_generators
from devsample.data.orders import Order, batch_length, make_order, sliced
from devsample.data.spec import LoaderSpec
from devsample.data.worker import BatchDataset, BatchRequest, WorkerStart
from devsample.errors import LoaderError, LoaderWorkerError
from devsample.machine import describe_exit, hidden_main_module, worker_server
from devsample.seeds import ChainKey, IndexBlocks, Role, stream_seed

_SEPARATE_ROLES = (Role.LOSS_ORDER, Role.PROBE_ORDER)
_BROKEN_CONNECTION = (ConnectionError, FileNotFoundError, EOFError)
_LOST_WORKER = (RuntimeError, OSError, EOFError)


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
        self._micro_size = batch_length(spec, self._keys[0])
        self._orders: dict[tuple[int, int], Order] = {}
        self._plan = _Plan()
        self._resources = contextlib.ExitStack()
        self._dataset_seed = stream_seed(ChainKey(0, 0, 0), Role.DATASET, 0)  # the same in every run
        with preserved_global_generators():
            seed_global_generators(self._dataset_seed)
            dataset = spec.make_dataset()
        self.num_samples = spec.sample_count(dataset)
        self._num_items = spec.item_count(dataset)
        self._seeded = not (type(dataset) is TensorDataset and spec.collate_fn in (None, default_collate))
        if spec.num_workers > 0:
            self._resources.enter_context(worker_server(spec.multiprocessing_context))
        self._loader = self._build(dataset)

    def requests(self, chain: int, step: int, role: Role = Role.ORDER) -> list[BatchRequest]:
        """The micro-batches of one step of one chain, for a purpose."""
        order = self._orders.get((chain, role)) or self._new_order(chain, role)
        pieces = order(step)
        last = len(pieces) - 1
        return [
            self._request(chain, step, micro, role, piece, last=micro == last)
            for micro, piece in enumerate(pieces)
        ]

    def full_pass(self, count: int) -> list[BatchRequest]:
        """Requests that cover ``count`` items once, evenly spread over the data set if not all."""
        count = min(count, self._num_items)
        indices = np.linspace(0, self._num_items - 1, count).round().astype(np.int64).tolist()
        size = self._micro_size
        pieces = [indices[start : start + size] for start in range(0, len(indices), size)]
        return [
            self._request(0, step, 0, Role.FULL_ORDER, piece, last=True) for step, piece in enumerate(pieces)
        ]

    def serve(self, requests: Iterable[BatchRequest]) -> Iterator[tuple[BatchRequest, Any]]:
        """Each request with its batch on the device, in order.

        Raises:
            LoaderWorkerError: a worker died, or raised while it made a batch.
            LoaderError: the data set raised in this process.
        """
        self._plan.requests = iter(requests)
        batches = self._guarded(self._start)
        while True:
            try:
                batch = self._guarded(lambda: next(batches))
            except StopIteration:
                return
            yield self._plan.taken(), to_device(batch, self._device)

    def as_dataloader(self, chain: int, num_steps: int | None) -> DataLoader[Any]:
        """The DataLoader itself, its plan set to the steps of one chain."""

        def steps() -> Iterator[BatchRequest]:
            step = 0
            while num_steps is None or step < num_steps:
                yield from self.requests(chain, step)
                step += 1

        self._plan.restart = steps
        self._loader.dataset.preserves = True  # type: ignore[attr-defined]
        weakref.finalize(self._loader, self._resources.close)
        self._loader._devsample = self  # lives as long as the loader
        return self._loader

    def close(self) -> None:
        """End the workers."""
        self._end_workers()
        self._resources.close()

    def __enter__(self) -> ChainLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_order(self, chain: int, role: Role) -> Order:
        size, key = self._micro_size * self._accumulate, self._keys[chain]
        if role in _SEPARATE_ROLES:
            order = sliced(IndexBlocks(key, role, self._num_items, size), self._micro_size)
        else:
            order = make_order(self.spec, key, self._num_items, self._micro_size, self._accumulate)
        self._orders[chain, role] = order
        return order

    def _request(
        self, chain: int, step: int, micro: int, role: Role, indices: list[int], *, last: bool
    ) -> BatchRequest:
        seed = stream_seed(self._keys[chain], Role.ITEMS, step, micro << 8 | role) if self._seeded else 0
        return BatchRequest(chain, step, micro, int(role), last, indices, seed)

    def _build(self, dataset: Any) -> DataLoader[Any]:
        spec = self.spec
        batched = spec.batch_size is not None
        collate = spec.collate_fn or (default_collate if batched else default_convert)
        source = BatchDataset(
            carry(dataset, spec, self._dataset_seed), Carried(collate), batched=batched, seeded=self._seeded
        )
        workers: dict[str, Any] = {}
        if spec.num_workers > 0:
            workers = {
                "prefetch_factor": spec.prefetch_factor,
                "persistent_workers": spec.persistent_workers,
                "timeout": spec.timeout,
                "worker_init_fn": WorkerStart(pass_through(spec.worker_init_fn)),
                "multiprocessing_context": multiprocessing.get_context(spec.multiprocessing_context),
            }
        pin = spec.pin_memory if spec.pin_memory is not None else self._device.type == "cuda"
        return _SafeDataLoader(
            source,
            batch_size=None,
            sampler=self._plan,
            collate_fn=send,
            num_workers=spec.num_workers,
            pin_memory=pin and torch.accelerator.is_available(),
            pin_memory_device=spec.pin_memory_device,
            generator=torch.Generator(),
            **workers,
        )

    def _start(self) -> Iterator[Any]:
        live = self._live = iter(self._loader)
        return live

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Call into the loader; whatever goes wrong there is named."""
        try:
            return call()
        except LoaderWorkerError as error:
            own = str(error).partition("LoaderWorkerError: ")[2]  # without the traceback around it
            raise LoaderWorkerError(own or str(error)) from None
        except (StopIteration, LoaderError, KeyboardInterrupt):
            raise
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
            return LoaderError(f"the loader raised {type(error).__name__}: {error}")
        killed = any("killed" in one for one in dead)
        hint = " If memory ran out, lower num_workers, prefetch_factor or batch_size." if killed else ""
        named = LoaderWorkerError(f"{'; '.join(dead)}.{hint} ({error})")
        named.lost = True
        return named

    _live: Any = None


class _SafeDataLoader(DataLoader[Any]):
    """A DataLoader whose workers start from any script, and whatever the default device is."""

    def _get_iterator(self) -> Any:
        with hidden_main_module(), torch.device("cpu"):
            return super()._get_iterator()


class _Plan:
    """The sampler of the wrapped loader: hands out requests and remembers what is under way."""

    def __init__(self) -> None:
        self.requests: Iterator[BatchRequest] = iter(())
        self.restart: Callable[[], Iterator[BatchRequest]] | None = None
        self._under_way: list[BatchRequest] = []

    def __iter__(self) -> Iterator[BatchRequest]:
        self._under_way = []
        if self.restart is not None:  # somebody iterates the DataLoader itself
            yield from self.restart()
            return
        for request in self.requests:
            self._under_way.append(request)
            yield request

    def taken(self) -> BatchRequest:
        """The request whose batch has just arrived; batches arrive in order."""
        return self._under_way.pop(0)
