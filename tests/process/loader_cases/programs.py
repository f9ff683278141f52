"""Whole programs, as text: everything in them belongs to ``__main__`` or to a module of their own."""

BESIDE = '''
"""A module that lies next to the script or notebook."""
import torch

def collate(items):
    return torch.tensor(items)
'''

INSTALLED = '''
"""A module of an installed package."""
def halved(x):
    return x / 2
'''

PROGRAM = '''
import os
import sys
import types
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

import devsample
from beside import collate
from loader_cases_installed.part import halved

METHOD, WORKERS = {method!r}, 2
with open(os.environ["RUNS"], "a") as file:
    print("top level", file=file)

made = types.ModuleType("made_in_memory")
exec("""
import os
def start(worker):
    assert os.getpid() != HOME
def tripled(x):
    return 3 * x
""", made.__dict__)
made.HOME = os.getpid()
sys.modules["made_in_memory"] = made
from made_in_memory import start, tripled


@dataclass
class Batch:
    x: torch.Tensor
    kind: str = "batch"


class Items(Dataset):
    """Its methods use functions and names of the script and of three modules."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return SCALE * halved(tripled(float(index)))


SCALE = 1 / 96
model = torch.nn.Linear(1, 1)
with torch.no_grad():
    model.weight.fill_(0.5)
    model.bias.zero_()


def squared(model, batch):
    assert type(batch) is Batch and batch.kind == "batch"
    x = batch.x.float().unsqueeze(1)
    return (model(x) - 0.5 * x + 0.1 * torch.sin(40 * x)).square().mean()


def estimate(cores, num_workers):
    return devsample.estimate_learning_coeff_with_summary(
        model,
        loader_spec=devsample.LoaderSpec(
            Items,
            batch_size=8,
            num_workers=num_workers,
            multiprocessing_context=METHOD,
            collate_fn=lambda items: Batch(collate(items)),
            worker_init_fn=start,
        ),
        evaluate=lambda model, batch: squared(model, batch),
        optimizer_kwargs={{"lr": 1e-3}},
        num_chains=2,
        num_draws=5,
        cores=cores,
        threads_per_chain=1,
        seed=0,
        verbose=False,
    )


result, alone = estimate(2, WORKERS), estimate(1, 0)
print(*result.chains["status"], len(result.draws), result.draws.equals(alone.draws))
'''
SAYS = "done done 10 True\n"

REPORTED_IN_A_NOTEBOOK = """
import torch
from torch.utils.data import Dataset

class MyDS(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return float(i)
"""

ENDLESS = """
import os, sys, time
from pathlib import Path
import torch
import devsample
from tests.process.loader_cases.harness import line, misfit, numbers


folder, kind, method, run_dir = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]


def begin(worker):
    (folder / f"worker-{os.getpid()}").touch()


def bounded(model, batch):  # it never diverges
    return misfit(model, torch.sin(numbers(batch)))


if __name__ == "__main__":
    from tests.process.loader_cases.made import dataset_of

    dataset, fields = dataset_of(kind)
    spec = devsample.LoaderSpec(
        dataset, batch_size=4, num_workers=2, multiprocessing_context=method, worker_init_fn=begin, **fields
    )
    if kind == "built":
        for number, _ in enumerate(spec.build()):
            (folder / "running").touch()
            time.sleep(0.001)

    def noted(chain, draw):
        if draw == 20:
            (folder / f"chain-{os.getpid()}").touch()

    try:
        devsample.estimate_learning_coeff(
            line(), loader_spec=spec, evaluate=bounded, callbacks=noted, optimizer_kwargs={"lr": 1e-5},
            num_chains=2, num_draws=10_000_000, cores=2, verbose=False, run_dir=run_dir or None,
        )
    except KeyboardInterrupt:
        print("interrupted")
        sys.exit(3)
"""
