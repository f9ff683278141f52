"""Memory of a whole run, chain processes and their loader workers, in copies of its data set.

Three chain processes with two loader workers each read a data set of --mib MiB that was handed to
LoaderSpec, and then one of 1 MiB. Compared is the proportional set size (PSS: a page that k processes map
counts 1/k in each) of the whole process tree while the chains run, the caller's process with the data set
in it included, program code left out. One copy is what the caller has anyway. Linux only:

    python benchmarks/memory.py [--mib 200] [--kind tensor] [--method forkserver] [--rounds 3] [--json]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary
from devsample.data import CompactList
from devsample.errors import LargePayloadWarning

KINDS = ("tensor", "numpy", "memmap", "list", "compact", "factory")
METHODS = ("forkserver", "fork", "spawn")
CHAINS, WORKERS, BATCH, WIDTH = 3, 2, 64, 256  # a row is 1 KiB
BAR = 1.3
SAMPLE_SECONDS = 0.5


class Rows(Dataset):
    """Rows of numbers, wherever they are."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        if isinstance(row, bytes):
            row = np.frombuffer(row, np.float32).copy()
        return torch.tensor(row) if isinstance(row, np.ndarray) else row


def made(mib):
    """What a factory returns."""
    return Rows(torch.ones(mib << 10, WIDTH))


def spec(kind, mib, method, folder):
    """The recipe with a data set of ``mib`` MiB in it."""
    count = mib << 10
    settings = {"batch_size": BATCH, "num_workers": WORKERS, "multiprocessing_context": method}
    if kind == "factory":
        return LoaderSpec(made, dataset_kwargs={"mib": mib}, **settings)
    if kind == "memmap":
        rows = np.memmap(Path(folder, "rows"), np.float32, "w+", shape=(count, WIDTH))
        rows[:] = 1
        rows.flush()
    elif kind == "numpy":
        rows = np.ones((count, WIDTH), np.float32)
    elif kind in ("list", "compact"):
        items = (np.full(WIDTH, number % 7, np.float32).tobytes() for number in range(count))
        rows = list(items) if kind == "list" else CompactList(items)
    else:
        rows = torch.ones(count, WIDTH)
    return LoaderSpec(Rows(rows), **settings)


def run_once(kind, mib, method, steps):
    """The run that is measured, in a process of its own."""
    warnings.simplefilter("ignore", LargePayloadWarning)  # that is what is measured
    with tempfile.TemporaryDirectory() as folder:
        recipe = spec(kind, mib, method, folder)
        estimate_learning_coeff_with_summary(
            torch.nn.Linear(WIDTH, 1),
            loader_spec=recipe,
            evaluate=lambda model, batch: model(batch).square().mean(),
            optimizer_kwargs={"lr": 1e-6, "nbeta": 1.0, "localization": 1.0},
            num_chains=CHAINS,
            num_draws=steps,
            cores=CHAINS,
            init_loss=1.0,
            seed=0,
            verbose=False,
        )


def descendants(pid):
    """``pid`` and every process below it."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # it has just ended
        parent = int(text.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def resident(pid):
    """PSS of a process in MiB, without the code that other programs may share."""
    total, counted = 0, True
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        if line[0].islower() or line[0].isdigit():  # a mapping begins: address range … path
            counted = ".so" not in line.rpartition("/")[2]
        elif counted and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total / 1024


def measure(kind, mib, method, steps):
    """Median and highest MiB of the tree, the first over the second half of the time with all workers."""
    command = [sys.executable, __file__, "--run", kind, str(mib), method, str(steps)]
    process = subprocess.Popen(command)
    samples = []
    while process.poll() is None:
        tree = descendants(process.pid)
        samples.append((len(tree), sum(map(resident, tree))))
        time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise SystemExit(f"the measured run ended with exit code {process.returncode}")
    most = max(count for count, _ in samples)
    full = [size for count, size in samples if count == most]
    return statistics.median(full[len(full) // 2 :]), max(size for _, size in samples)


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=200)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=["tensor"])
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["forkserver"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4000, help="of each chain; all of the data must be read")
    parser.add_argument("--json", action="store_true", help="figures as JSON instead of a table")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        kind, mib, method, steps = arguments.run
        run_once(kind, int(mib), method, int(steps))
        return
    if not arguments.json:
        print(f"{CHAINS} chain processes × {WORKERS} workers, {arguments.mib} MiB of data against 1 MiB")
        print(f"{'kind':9}{'workers by':12}{'1 MiB':>8}{arguments.mib:5} MiB{'copies':>8}  (range)      peak")
    report = []
    for kind in arguments.kind:
        for method in arguments.method:
            pairs = [
                [measure(kind, mib, method, arguments.steps) for mib in (1, arguments.mib)]
                for _ in range(arguments.rounds)
            ]
            copies = [(large[0] - small[0]) / (arguments.mib - 1) for small, large in pairs]
            peaks = [(large[1] - small[1]) / (arguments.mib - 1) for small, large in pairs]
            row = {
                "kind": kind,
                "method": method,
                "small_mib": statistics.median(small[0] for small, _ in pairs),
                "large_mib": statistics.median(large[0] for _, large in pairs),
                "copies": {
                    "median": statistics.median(copies),
                    "low": min(copies),
                    "high": max(copies),
                },
                "peak_copies": statistics.median(peaks),
                "bar": BAR if kind == "tensor" else None,
            }
            report.append(row)
            if not arguments.json:
                bar = f", at most {BAR}" if row["bar"] else ""
                print(
                    f"{kind:9}{method:12}{row['small_mib']:8.0f}{row['large_mib']:9.0f}"
                    f"{row['copies']['median']:8.2f}  ({min(copies):.2f} – {max(copies):.2f})"
                    f"{row['peak_copies']:9.2f}{bar}",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
