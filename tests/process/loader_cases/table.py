"""The cases by name, and the page of the documentation that says what became of each.

To renew the page::

    LOADER_CASE_RECORD=/tmp/cases.json python -m pytest tests/process -m "loader_case"
    python -m tests.process.loader_cases.table /tmp/cases.json
"""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "loader-cases.md"
_LONGEST = 420


@dataclass(frozen=True)
class Case:
    """A failure that people have reported.

    Args:
        name: what goes wrong, in a few words.
        plain: what PyTorch 2.13 does when its DataLoader meets it inside a spawned process.
        here: what devsample does.
    """

    name: str
    plain: str
    here: str


CASES = (
    Case(
        "live iterator in a persistent loader",
        "`NotImplementedError: _MultiProcessingDataLoaderIter` once somebody has iterated it",
        "works: the recipe is read off the loader, its iterator and workers stay with it",
    ),
    Case(
        "loader workers inside a daemonic process",
        "`AssertionError: daemonic processes are not allowed to have children`",
        "works: chain processes are not daemonic; inside a daemonic process of yours, an error names "
        "the way out",
    ),
    Case(
        "process group deep in the data set",
        "`TypeError: cannot pickle '…ProcessGroup' object`, without saying where it is",
        "works if the factory makes it; else refused before any process starts, with its path",
    ),
    Case(
        "random generators in the data set of a starting worker",
        "`ValueError: bad value(s) in fds_to_keep`, or the worker dies",
        "works",
    ),
    Case(
        "data set that packs itself into new tensors",
        "`bad value(s) in fds_to_keep` with spawn, a dead fork server with forkserver",
        "works",
    ),
    Case("local function as collate_fn", "`Can't pickle local object …data_collator`", "works"),
    Case("lambda as worker_init_fn", "`Can't pickle <function <lambda>>`", "works"),
    Case(
        "data set class from a notebook, -c or standard input",
        "`Can't get attribute 'MyDS' on <module '__main__'>`; from standard input no child starts",
        "works",
    ),
    Case(
        "script without a main guard",
        "`RuntimeError: An attempt has been made to start a new process …`, in the child only",
        "works: the top level of the script runs once",
    ),
    Case(
        "batch that cannot be pickled",
        "hangs for ever",
        "an error within seconds that names chain, step, worker and the path in the batch",
    ),
    Case(
        "lock, pool, bar or open file in the data set",
        "`TypeError: cannot pickle '_thread.lock' object` and the like, without saying where it is",
        "works if the factory makes it; else refused before any process starts, with its path",
    ),
    Case(
        "open database or array file in the data set",
        "`TypeError: h5py objects cannot be pickled`",
        "works if the factory opens it, or the data set does when it is first read; else refused before any "
        "process starts, with its path",
    ),
    Case(
        "network client in the data set",
        "`cannot pickle 'SSLContext' object`; or all workers share one connection and mix up its answers",
        "works if the factory makes it (every worker has its own); else refused before any process starts",
    ),
    Case(
        "autograd tensor in the data set",
        "`RuntimeError: Cowardly refusing to serialize non-leaf tensor`",
        "refused before any process starts, with its path and the remedy",
    ),
    Case(
        "multiprocessing primitive in the data set",
        "`SemLock created in a fork context is being shared with a process in a spawn context`",
        "works if the factory makes it; else refused before any process starts, with its path",
    ),
    Case(
        "start method left to the default",
        "a loader that works in the script fails in a spawned process, whose default is spawn",
        "works: workers start as the spec says, wherever the chain runs",
    ),
    Case(
        "DataLoader arguments that contradict each other",
        "`ValueError`, only inside the chain process; two of them only at the first batch",
        "an error where the spec is made, naming the argument; harmless leftovers are ignored",
    ),
    Case(
        "data set without a known size",
        "`TypeError: object of type … has no len()`, or a stream twice as long as it says, in silence",
        "an error where the spec is made that asks for num_samples; works with it",
    ),
    Case(
        "random generator object in the data set",
        "all workers draw the same numbers",
        "works: it is seeded once per batch, like the global generators",
    ),
    Case(
        "iterable read by every worker",
        "three workers give every sample three times",
        "works: the stream is the same for any number of workers",
    ),
    Case(
        "epoch frozen in persistent workers",
        "set_epoch never reaches the workers",
        "works",
    ),
    Case(
        "loader and sampler share a random stream",
        "the noise of a chain depends on how often a loader was iterated",
        "works: the same noise for any loader",
    ),
    Case(
        "augmentation depends on the number of workers",
        "other data for every number of workers",
        "works: the same data for any number",
    ),
    Case(
        "small shared memory",
        "hangs for ever (in a container with a small /dev/shm)",
        "an error within seconds that names /dev/shm and what to change",
    ),
    Case(
        "worker killed",
        "another error for every start method, up to `exited unexpectedly`",
        "an error that names chain, worker, process and signal; other chains go on",
    ),
    Case(
        "memory per worker",
        "a data set of Python objects is copied into every worker",
        "documented limit; tensors and arrays are shared, and lists of objects can be packed into one tensor",
    ),
    Case("fork after threads", "reports of hangs; works here", "works"),
    Case(
        "processes left by a killed program",
        "chain and workers go on for ever",
        "works: all of them leave within seconds",
    ),
    Case(
        "interrupted chain taken for a finished one",
        "torch.multiprocessing.spawn reports success",
        "works: a chain is done when its result has arrived",
    ),
    Case("end in the middle of a batch", "works, slowly", "works: workers are gone when the call returns"),
    Case(
        "shared memory left behind",
        "segments of a killed process stay",
        "works: nothing has a name in /dev/shm, and files go with the run",
    ),
    Case(
        "WebDataset pipeline",
        "`Can't pickle <lambda>`; fewer shards than workers: `ValueError`",
        "works; fewer shards than workers: a warning with both numbers",
    ),
    Case("zarr array read before a fork", "reports of hangs; works here", "works"),
    Case(
        "object that pickles but does not load again",
        "`DataLoader worker exited unexpectedly`",
        "refused before any process starts, with its path and the exception",
    ),
    Case(
        "default device",
        "`RuntimeError`: a generator of another device",
        "works",
    ),
    Case(
        "pinned memory without an accelerator",
        "a warning in every epoch",
        "works, without a warning (the GPU half is not checked here)",
    ),
    Case(
        "too many threads",
        "every chain computes with as many threads as there are cores",
        "works: cores are divided among chains, a worker has one thread",
    ),
    Case(
        "class that travels on to a second process",
        "`it's not the same object as __main__.DS`",
        "works",
    ),
    Case(
        "dead worker noticed late",
        "only after `timeout` seconds, or 5",
        "works: noticed in about a second, whatever `timeout` is",
    ),
    Case(
        "worker_init_fn that reaches its data set",
        "right",
        "works: `get_worker_info().dataset` is your object",
    ),
)
NAMES = frozenset(case.name for case in CASES)


def case(name: str) -> pytest.MarkDecorator:
    """Marks tests that repeat a case."""
    if name not in NAMES:
        raise ValueError(f"no case is called {name!r}")
    return pytest.mark.loader_case(name)


def versions() -> dict[str, str]:
    """What a run's outcome depends on."""
    import torch

    import devsample

    return {
        "date": time.strftime("%Y-%m-%d"),
        "devsample": devsample.__version__,
        "Python": platform.python_version(),
        "PyTorch": torch.__version__.partition("+")[0],
        "system": platform.system(),
    }


def page(record: dict[str, Any]) -> str:
    """The page, from the record of a run in which every case was tried.

    Raises:
        ValueError: a case was not tried, or a test of one did not pass.
    """
    bad = [one["test"] for one in record["tests"] if one["outcome"] not in ("passed", "skipped")]
    if bad:
        raise ValueError(f"these did not pass: {', '.join(bad)}")
    lines = []
    for one in CASES:
        mine = [test for test in record["tests"] if test["case"] == one.name and test["outcome"] == "passed"]
        if not mine:
            raise ValueError(f"no test of {one.name!r} ran")
        texts = [text for test in mine for text in test["said"]]
        shown = f"<br>`{shorten(texts[0])}`" if texts else ""
        lines.append(f"| {one.name} | {one.plain} | {one.here}{shown} | {len(mine)} |")
    found = ", ".join(f"{name} {value}" for name, value in record["versions"].items() if name != "date")
    return _TEXT.format(date=record["versions"]["date"], found=found, rows="\n".join(lines))


def shorten(text: str) -> str:
    """The first lines of a message, without what differs from run to run."""
    text = " ".join(line.strip() for line in text.strip().splitlines()[:3])
    text = re.sub(r"pid \d+", "pid …", text).replace("`", "'").replace("|", "\\|")
    text = re.sub(r"/tmp/[^\s'\")]*", "…", text)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return text if len(text) <= _LONGEST else text[:_LONGEST].rsplit(" ", 1)[0] + " …"


_TEXT = """\
# Loaders that fail elsewhere

Failures of data loading in spawned processes that people have reported, what a plain `DataLoader` does when
it is built in such a process, and what devsample does. Each row is tried in real processes, as a rule in two
chains with two loader workers each. The page is written from such a run (tests/process/loader_cases/table.py
says how), on {date} with {found}.

| what goes wrong | plain PyTorch | devsample | tests |
| --- | --- | --- | --- |
{rows}

"Refused before any process starts" means a `NotPicklableError` or an `InvalidArgumentError` in your own
process. What to do about each message stands in [troubleshooting](troubleshooting.md).
"""


def main() -> None:
    """Write the page from the record that is named on the command line."""
    PAGE.write_text(page(json.loads(Path(sys.argv[1]).read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
