"""The loader that LoaderSpec builds against the DataLoader that one would write oneself.

Both read the same data set with the same settings, in the same process; rounds alternate. Two tables:
batches per second in the long run, as a ratio of plain, and the time to the first batch of an iterator
that starts two workers, as a ratio to fork (the first iterator of a process, which may have to start a
server, is shown on its own). Medians, with the range over rounds:

    python benchmarks/loader.py [--rounds 15] [--seconds 0.5] [--json]
"""

import argparse
import hashlib
import itertools
import json
import statistics
import time

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from devsample import LoaderSpec

BATCH, ROWS, WIDTH = 64, 4096, 32
ITEM_SECONDS = 1.2e-3
METHODS = ("fork", "forkserver", "spawn")
BARS = {"small rows": 0.80, "items over 1 ms": 0.95, "forkserver": 2.0}


class Rows(Dataset):
    """Rows of tensors in memory; an item takes some microseconds, and as long as hashing ``work`` bytes."""

    def __init__(self, work=0):
        self.inputs, self.targets = torch.randn(ROWS, WIDTH), torch.randint(0, 10, (ROWS,))
        self.work = bytes(work)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if self.work:
            hashlib.sha256(self.work).digest()
        return self.inputs[index], self.targets[index]


def plain(dataset, batch_size, workers, method):
    """What a user writes for endless independent batches."""
    sampler = RandomSampler(dataset, replacement=True, num_samples=1 << 40)
    extra = {"multiprocessing_context": method, "persistent_workers": True} if workers else {}
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=workers, **extra)


def ours(dataset, batch_size, workers, method):
    """The same, from a recipe."""
    extra = {"multiprocessing_context": method} if workers else {}
    return LoaderSpec(dataset, batch_size=batch_size, num_workers=workers, **extra).build(seed=0)


def seconds_per_batch(batches, count):
    """Seconds per batch over the next ``count``."""
    started = time.perf_counter()
    for _ in itertools.islice(batches, count):
        pass
    return (time.perf_counter() - started) / count


def throughput(dataset, batch_size, workers, method, rounds, seconds):
    """Seconds per batch of plain and of ours, a pair a round."""
    both = [iter(make(dataset, batch_size, workers, method)) for make in (plain, ours)]
    for batches in both:
        seconds_per_batch(batches, 8)  # workers are up, and the queue is filled
    count = max(20, round(seconds / seconds_per_batch(both[0], 20)))
    pairs = []
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        taken = {which: seconds_per_batch(both[which], count) for which in order}
        pairs.append((taken[0], taken[1]))
    return pairs


def first_batches(method, rounds):
    """An iterator that gives, each time, the seconds until a new pair of workers sent a batch."""
    spec = LoaderSpec(
        Rows(), batch_size=BATCH, num_workers=2, multiprocessing_context=method, persistent_workers=False
    )
    loader = spec.build(seed=0)
    for _ in range(rounds + 1):
        started = time.perf_counter()
        batches = iter(loader)
        next(batches)
        taken = time.perf_counter() - started
        batches.close()
        yield taken


def work_for(seconds):
    """How many bytes are hashed in that time."""
    size, taken = 1 << 20, []
    for _ in range(5):
        started = time.perf_counter()
        hashlib.sha256(bytes(size)).digest()
        taken.append(time.perf_counter() - started)
    return round(size * seconds / min(taken))


def spread(values):
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def measure(rounds, seconds, method):
    """All figures, by name."""
    report = {"throughput": [], "first batch": []}
    # before the plain loaders: theirs would start a server without torch in it, and there is one a process
    rows = list(zip(*(first_batches(one, rounds) for one in METHODS), strict=True))
    for number, one in enumerate(METHODS):
        report["first batch"].append(
            {
                "method": one,
                "first_ms": 1e3 * rows[0][number],
                "later_ms": 1e3 * statistics.median(row[number] for row in rows[1:]),
                "ratio": spread([row[number] / row[0] for row in rows[1:]]),
                "bar": BARS.get(one),
            }
        )
    work = work_for(ITEM_SECONDS)
    for name, dataset, batch_size in (
        ("small rows", Rows(), BATCH),
        ("items over 1 ms", Rows(work=work), 16),
    ):
        for workers in (0, 2):
            pairs = throughput(dataset, batch_size, workers, method, rounds, seconds)
            report["throughput"].append(
                {
                    "data": name,
                    "batch_size": batch_size,
                    "workers": workers,
                    "plain_ms": 1e3 * statistics.median(one for one, _ in pairs),
                    "ours_ms": 1e3 * statistics.median(two for _, two in pairs),
                    "ratio": spread([one / two for one, two in pairs]),
                    "bar": BARS[name],
                }
            )
    return report


def show(report, method):
    """The tables."""
    print(f"throughput of the wrapped loader, plain DataLoader = 1 (workers by {method})")
    print(f"{'data':18}{'batch':>6}{'workers':>8}{'plain ms':>10}{'ours ms':>9}{'ratio':>7}  (range)")
    for row in report["throughput"]:
        print(
            f"{row['data']:18}{row['batch_size']:6}{row['workers']:8}{row['plain_ms']:10.3f}"
            f"{row['ours_ms']:9.3f}{row['ratio']['median']:7.2f}  ({row['ratio']['low']:.2f} – "
            f"{row['ratio']['high']:.2f}), at least {row['bar']:.2f}"
        )
    print("\nfirst batch of an iterator with 2 new workers, fork = 1")
    print(f"{'method':18}{'first ms':>10}{'later ms':>10}{'ratio':>7}  (range)")
    for row in report["first batch"]:
        bar = f", at most {row['bar']:.1f}" if row["bar"] else ""
        print(
            f"{row['method']:18}{row['first_ms']:10.0f}{row['later_ms']:10.0f}{row['ratio']['median']:7.2f}"
            f"  ({row['ratio']['low']:.2f} – {row['ratio']['high']:.2f}){bar}"
        )


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one measurement of one loader")
    parser.add_argument("--method", choices=METHODS, default="forkserver", help="for the throughput")
    parser.add_argument("--json", action="store_true", help="figures as JSON instead of tables")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = measure(arguments.rounds, arguments.seconds, arguments.method)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, arguments.method)


if __name__ == "__main__":
    main()
