"""What goes wrong while batches are made is named within seconds, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from devsample import LoaderSpec
from devsample.errors import AllChainsFailedError, LoaderError, LoaderWorkerError
from devsample.records import read_records
from tests.process.loader_cases import items, trouble
from tests.process.loader_cases.harness import (
    NEWS_SECONDS,
    batches,
    complete,
    misfit,
    run,
    says,
    soon,
    start_methods,
    works,
)
from tests.process.loader_cases.leftovers import alive, family
from tests.process.loader_cases.programs import ENDLESS
from tests.process.loader_cases.table import case

pytestmark = [pytest.mark.usefixtures("fork_server", "clean"), pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
FORK = {"batch_size": 4, "multiprocessing_context": "fork"}


# --- batches ---------------------------------------------------------------------------------------


@case("batch that cannot be pickled")
@start_methods("forkserver")
def test_an_unsendable_batch_is_named_by_its_path(
    method: str, tmp_path: Path, said: Callable[[str], str]
) -> None:
    collate, path, kind = trouble.UNSENDABLE["dict of lists"]
    fields = {"multiprocessing_context": method, "collate_fn": trouble.NotesTime(collate, tmp_path)}
    with pytest.raises(LoaderWorkerError) as caught:
        run(items.Numbers(), spec=fields | {"num_workers": 2})
    soon(trouble.happened(tmp_path))
    text = says(str(caught.value), path, kind, "chain 0", "step 0", r"worker 0 \(pid \d+\)", "num_workers=0")
    said(text)


@case("batch that cannot be pickled")
@pytest.mark.parametrize("form", trouble.UNSENDABLE)
def test_wherever_in_the_batch_it_is(form: str) -> None:
    collate, path, kind = trouble.UNSENDABLE[form]
    started = time.time()
    with pytest.raises(LoaderWorkerError) as caught:
        batches(LoaderSpec(items.Numbers(), num_workers=1, collate_fn=collate, **FORK), 3)
    soon(started)
    says(str(caught.value), rf"{path} is a ", kind)


@case("batch that cannot be pickled")
@pytest.mark.filterwarnings("ignore:Sparse invariant")  # torch's own, as it rebuilds one
@pytest.mark.parametrize("form", trouble.AWKWARD)
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_batch_that_only_seems_unsendable(form: str, method: str) -> None:
    """Beyond what multiprocessing pickles."""
    collate = trouble.AWKWARD[form]
    fields: dict[str, Any] = {"batch_size": 4, "collate_fn": collate}
    alone = batches(LoaderSpec(items.Numbers(), **fields), 4)
    workers = LoaderSpec(items.Numbers(), num_workers=2, multiprocessing_context=method, **fields)
    assert batches(workers, 4) == alone


@case("batch that cannot be pickled")
@pytest.mark.parametrize("form", trouble.RAISED)
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_an_exception_that_cannot_be_pickled(form: str, method: str, tmp_path: Path) -> None:
    what, text = trouble.RAISED[form]
    spec = LoaderSpec(
        trouble.Fails(what, tmp_path),
        num_workers=2,
        batch_size=4,
        sampling="sequential",
        multiprocessing_context=method,
    )
    with pytest.raises(LoaderWorkerError) as caught:
        batches(spec, 8)
    soon(trouble.happened(tmp_path))
    says(
        str(caught.value),
        re.escape(text),
        "chain 0, step 1",
        r"loader worker 1 \(pid \d+\)",
        "items 4, 5, 6, 7",
    )


# --- shared memory ---------------------------------------------------------------------------------

SMALL = """
mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"
"""


def in_small_shared_memory(test: str, folder: Path) -> None:
    """Run one of the tests below again where /dev/shm has 8 MiB."""
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={folder / 'inner'}"]
    command = [sys.executable, "-m", "pytest", *options, f"{__file__}::{test}"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", SMALL, "sh", *command],
        cwd=ROOT,
        env=os.environ | {"SMALL_SHARED_MEMORY": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"this needs to be root: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "1 passed" in done.stdout


def is_small() -> bool:
    return os.environ.get("SMALL_SHARED_MEMORY") == "1"


@case("small shared memory")
def test_batches_that_do_not_fit(tmp_path: Path, said: Callable[[str], str]) -> None:
    """8 MiB each, several under way, two chains: an error or another way, but within seconds, and said."""
    if not is_small():
        in_small_shared_memory("test_batches_that_do_not_fit", tmp_path)
        said("/dev/shm is full: give it more room (docker run --shm-size=8g), or use num_workers=0")
        return
    started = time.time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = run(
                trouble.Large(),
                spec={"num_workers": 2, "collate_fn": first_and_rest, "multiprocessing_context": "fork"},
                num_draws=3,
                evaluate=first_misfit,
                callbacks=(),
            )
            texts = [str(one.message) for one in caught]
            chains = found.result.chains
            assert list(chains["status"]) == ["done", "done"], list(chains["message"])
        except LoaderError as error:
            texts = [str(error)]
    assert time.time() - started < 100
    assert any(re.search(SHM_TEXT, text) for text in texts), texts


SHM_TEXT = r"/dev/shm.* is full.*shm-size.*num_workers=0"


def first_and_rest(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    rows = torch.stack(batch)
    return [rows[:, 0].clone(), rows]


def first_misfit(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    assert torch.equal(batch[1][:, -1], batch[0])
    return misfit(model, batch[0])


@case("small shared memory")
@pytest.mark.slow
def test_a_data_set_that_does_not_fit(tmp_path: Path) -> None:
    """32 MiB held by the caller: it travels some other way."""
    if not is_small():
        in_small_shared_memory("test_a_data_set_that_does_not_fit", tmp_path)
        return
    dataset = items.Holding(torch.arange(8.0 * (1 << 20)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        complete(run(dataset, spec={"num_workers": 2}))


@case("small shared memory")
def test_workers_wait_for_room(tmp_path: Path) -> None:
    """Their queues need a little of it: another program's, or another chain's, may pass."""
    if not is_small():
        in_small_shared_memory("test_workers_wait_for_room", tmp_path)
        return
    filler = Path("/dev/shm/filler")
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
    with pytest.raises(OSError, match="No space left"):
        multiprocessing.Lock()
    threading.Timer(2.0, filler.unlink).start()
    assert len(batches(LoaderSpec(items.Numbers(), num_workers=1, **FORK), 3)) == 3


# --- workers that end ------------------------------------------------------------------------------


@case("worker killed")
@start_methods("forkserver")
def test_a_killed_worker_is_named(method: str, tmp_path: Path, said: Callable[[str], str]) -> None:
    """Tried three times, since a lost process may be an accident."""
    dataset = trouble.Fails(trouble.ENDS["SIGKILL"][0], tmp_path)
    with pytest.raises((LoaderWorkerError, AllChainsFailedError)) as caught:
        run(dataset, spec={"num_workers": 2, "multiprocessing_context": method}, on_failure="keep")
    soon(trouble.happened(tmp_path), str(caught.value))
    text = says(
        str(caught.value),
        r"chain 0",
        r"loader worker \d \(pid \d+\) was killed by SIGKILL",
        "memory",
        "num_workers",
        "prefetch_factor",
    )
    named = {int(pid) for pid in re.findall(r"pid (\d+)\) was killed", text)}
    assert named <= trouble.pids(tmp_path)
    said(text)


@case("worker killed")
def test_the_other_chain_goes_on(tmp_path: Path) -> None:
    dataset = trouble.Fails(trouble.ENDS["SIGKILL"][0], tmp_path, once=True)
    spec = {"num_workers": 2, "multiprocessing_context": "fork", "sampling": "sequential", "batch_size": 1}
    retried = run(dataset, spec=spec)
    complete(retried)
    plain = run(items.Numbers(), spec={"sampling": "sequential", "batch_size": 1}, cores=1)
    assert retried.result.draws.equals(plain.result.draws)


@case("worker killed")
def test_a_lost_chain_is_left_out_if_it_is_not_to_be_tried_again(tmp_path: Path) -> None:
    """Item 5 is read at the sixth draw at the earliest, so preparation is over."""
    dataset = trouble.Fails(trouble.ENDS["SIGKILL"][0], tmp_path, once=True)
    order = [k for k in range(items.COUNT) if k != 5] * 3 + [5]
    found = run(
        dataset,
        spec={"num_workers": 1, "multiprocessing_context": "fork", "sampler": order, "batch_size": 1},
        num_draws=200,
        callbacks=(),
        init_loss=0.0,
        on_failure="keep",
    )
    status = sorted(found.result.chains["status"])
    assert status == ["done", "failed"]
    message = found.result.chains.set_index("status").loc["failed", "message"]
    says(message, r"loader worker 0 \(pid \d+\) was killed by SIGKILL")
    assert (found.result.draws["chain"].value_counts() == 200).sum() == 1


@case("worker killed")
@pytest.mark.parametrize(
    "how", [how for how in trouble.ENDS if how not in ("SIGKILL", "never answers", "stopped")]
)
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_however_a_worker_ends(how: str, method: str, tmp_path: Path) -> None:
    what, text = trouble.ENDS[how]
    spec = LoaderSpec(
        trouble.FailsQuietly(what, tmp_path),
        batch_size=4,
        num_workers=2,
        sampling="sequential",
        multiprocessing_context=method,
    )
    with pytest.raises(LoaderWorkerError) as caught:
        batches(spec, 8)
    soon(trouble.happened(tmp_path), str(caught.value))
    found = says(str(caught.value), rf"loader worker 1 \(pid \d+\)[^\n]*({text})")
    assert int(re.search(r"loader worker 1 \(pid (\d+)\)", found)[1]) in trouble.pids(tmp_path)


@case("dead worker noticed late")
@start_methods("forkserver", "fork")
@pytest.mark.parametrize("timeout", [0, 100])
def test_a_dead_worker_is_noticed_whatever_the_timeout(
    timeout: float, method: str, tmp_path: Path, said: Callable[[str], str]
) -> None:
    spec = LoaderSpec(
        trouble.Fails(trouble.ENDS["SIGKILL"][0], tmp_path),
        batch_size=4,
        num_workers=2,
        timeout=timeout,
        sampling="sequential",
        multiprocessing_context=method,
    )
    with pytest.raises(LoaderWorkerError) as caught:
        batches(spec, 8)
    soon(trouble.happened(tmp_path), str(caught.value))
    said(says(str(caught.value), "killed by SIGKILL"))


@case("dead worker noticed late")
@pytest.mark.parametrize("how", ["never answers", pytest.param("stopped", marks=pytest.mark.slow)])
def test_a_stuck_worker_ends_the_wait_at_the_timeout(how: str, tmp_path: Path) -> None:
    spec = LoaderSpec(
        trouble.Fails(trouble.ENDS[how][0], tmp_path),
        batch_size=4,
        num_workers=2,
        timeout=3,
        sampling="sequential",
        multiprocessing_context="fork",
    )
    with pytest.raises(LoaderError) as caught:
        batches(spec, 8)
    soon(trouble.happened(tmp_path) + 3, str(caught.value))
    says(str(caught.value), "no batch for", "timeout")


@case("dead worker noticed late")
@pytest.mark.slow
def test_a_stuck_worker_in_a_chain(tmp_path: Path) -> None:
    dataset = trouble.Fails(trouble.ENDS["never answers"][0], tmp_path)
    with pytest.raises((LoaderError, AllChainsFailedError)) as caught:
        run(dataset, spec={"num_workers": 2, "timeout": 3}, on_failure="keep")
    soon(trouble.happened(tmp_path) + 3, str(caught.value))
    says(str(caught.value), "chain 0", "no batch for", "timeout")


# --- threads ---------------------------------------------------------------------------------------


@case("fork after threads")
@start_methods("fork")
def test_workers_after_autograd_and_threads(method: str) -> None:
    works(trouble.Threaded, spec={"multiprocessing_context": method})


# --- the end ---------------------------------------------------------------------------------------


class Refuses:
    """An evaluate that raises in the middle of a chain."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls > 60:
            raise ValueError("enough")
        return misfit(model, batch)


@case("end in the middle of a batch")
@pytest.mark.parametrize("kind", ["persistent", pytest.param("fresh", marks=pytest.mark.slow)])
@start_methods("fork")
def test_workers_are_gone_after_an_error(kind: str, method: str) -> None:
    """While slow batches are under way; `clean` looks for what is left."""
    spec = {
        "num_workers": 2,
        "multiprocessing_context": method,
        "persistent_workers": kind == "persistent",
        "prefetch_factor": 4,
    }
    with pytest.raises(AllChainsFailedError, match="enough"):
        run(trouble.Slow(), spec=spec, evaluate=Refuses(), num_draws=500, callbacks=())


@case("end in the middle of a batch")
@pytest.mark.parametrize("how", ["close", "with", "collected", "iterator left", "error"])
def test_a_built_loader_ends_its_workers(how: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    spec = LoaderSpec(trouble.Slow(), num_workers=2, prefetch_factor=4, **FORK)
    loader = spec.build()
    batch = iter(loader)
    next(batch)
    assert len(set(psutil.Process().children(recursive=True)) - before) >= 2
    if how == "close":
        loader.close()
    elif how == "with":
        with loader as same:
            assert same is loader
            next(iter(same))
    elif how == "iterator left":
        del loader
        next(batch)
        del batch
    elif how == "error":
        with pytest.raises(ValueError, match="mine"), loader:
            raise ValueError("mine")
    else:
        del loader, batch
    gc.collect()
    deadline = time.monotonic() + NEWS_SECONDS
    while alive([one for one in psutil.Process().children(recursive=True) if one not in before]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- killed and interrupted programs ---------------------------------------------------------------


@pytest.fixture
def endless(clean: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a program that runs for ever, and waits until its chains and workers are at work."""
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    marks = tmp_path / "marks"
    marks.mkdir()
    started: list[subprocess.Popen[str]] = []

    def start(
        kind: str, method: str, run_dir: str = ""
    ) -> tuple[Any, list[psutil.Process], list[psutil.Process]]:
        program = subprocess.Popen(
            [sys.executable, str(script), str(marks), kind, method, run_dir],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(program)
        chains, workers = (0, 2) if kind == "built" else (2, 4)
        wait_until(
            lambda: (
                program.poll() is not None
                or (len(marked(marks, "chain")) >= chains and len(marked(marks, "worker")) >= workers)
            )
        )
        assert program.poll() is None, program.communicate()
        members = family(program.pid)
        mine = marked(marks, "chain") | marked(marks, "worker")
        assert mine <= {one.pid for one in members}
        return program, members, [psutil.Process(pid) for pid in sorted(marked(marks, "chain"))]

    yield start
    for program in started:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


def marked(folder: Path, kind: str) -> set[int]:
    return {int(path.name.split("-")[1]) for path in folder.glob(f"{kind}-*")}


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


@case("processes left by a killed program")
@case("shared memory left behind")
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("stream", "forkserver"),
        pytest.param("captured", "fork", marks=pytest.mark.slow),
        pytest.param("built", "forkserver", marks=pytest.mark.slow),
        pytest.param("captured", "spawn", marks=pytest.mark.slow),
        pytest.param("captured", "forkserver", marks=pytest.mark.slow),
        pytest.param("built", "fork", marks=pytest.mark.slow),
        pytest.param("built", "spawn", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_of_a_killed_program(
    endless: Callable[..., Any], clean: Path, kind: str, method: str
) -> None:
    """`clean` looks at shared memory and temporary files."""
    program, members, _ = endless(kind, method)
    assert len(members) >= (2 if kind == "built" else 6)
    program.kill()
    program.wait()
    wait_until(lambda: not alive(members), NEWS_SECONDS)
    for folder in clean.glob("pymp-*"):  # of the program itself, where Python keeps its sockets
        assert kind == "built"
        shutil.rmtree(folder)
    for file in clean.glob("tmp*"):  # torch's, to see whether files can be opened while a pipe breaks
        assert file.stat().st_size == 0
        file.unlink()


@case("shared memory left behind")
def test_nothing_is_left_of_a_killed_chain(endless: Callable[..., Any]) -> None:
    """The caller lives; its chain is started anew, and the segments of the dead one are gone."""
    program, members, chains = endless("captured", "forkserver")
    chains[0].kill()
    lost = [one for one in members if one.pid != program.pid and chains[0] in _parents(one)]
    wait_until(lambda: not alive([chains[0], *lost]), NEWS_SECONDS)
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=60)
    assert program.returncode == 3


def _parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.parents()
    except psutil.NoSuchProcess:
        return []


@case("interrupted chain taken for a finished one")
def test_an_interrupt_of_one_chain_alone_changes_nothing(endless: Callable[..., Any], tmp_path: Path) -> None:
    """Then one to the program, which keeps what was drawn."""
    folder = tmp_path / "run"
    program, members, chains = endless("stream", "fork", str(folder))
    chains[0].send_signal(signal.SIGINT)
    time.sleep(1)
    assert chains[0] in alive(members)
    assert program.poll() is None
    os.killpg(program.pid, signal.SIGINT)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (3, "interrupted\n", "")
    wait_until(lambda: not alive(members), NEWS_SECONDS)
    for chain in range(2):
        kept = read_records(folder / "chains" / str(chain) / "draws.bin")[1]
        assert len(kept) >= 20
        assert np.isfinite(kept["loss"]).all()


@case("interrupted chain taken for a finished one")
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_chain_that_ends_early_is_not_done(number: int, tmp_path: Path) -> None:
    """By a signal to itself in the middle of its draws."""

    def ends(chain: int, draw: int) -> None:
        if (chain, draw) == (1, 3):
            os.kill(os.getpid(), number)

    spec = {"num_workers": 1, "multiprocessing_context": "fork"}
    found = run(items.Numbers(), spec=spec, callbacks=[ends], on_failure="keep", num_draws=50)
    chains = found.result.chains
    assert list(chains["status"]) in (["done", "died"], ["done", "failed"])
    says(chains["message"][1], "SIG|signal|exit code")


@case("interrupted chain taken for a finished one")
def test_a_chain_that_exits_with_success_is_not_done(tmp_path: Path) -> None:
    def ends(chain: int, draw: int) -> None:
        if (chain, draw) == (1, 3):
            os._exit(0)

    found = run(items.Numbers(), callbacks=[ends], on_failure="keep", num_draws=50)
    assert list(found.result.chains["status"]) == ["done", "died"]
    says(found.result.chains["message"][1], "exit code 0")
