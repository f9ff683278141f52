"""Programs without a ``__main__`` guard, from a file, standard input or the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset

import devsample

with open(os.environ["RUNS"], "a") as file:
    print("top level", file=file)


class Items(Dataset):
    def __init__(self):
        self.x = torch.linspace(-1, 1, 64).unsqueeze(1)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.x[index], HALF * self.x[index]


HALF = 0.5
model = torch.nn.Linear(1, 1)
with torch.no_grad():
    model.weight.fill_(HALF)
    model.bias.zero_()


def squared(model, batch):
    assert isinstance(model, torch.nn.Linear)
    return (model(batch[0]) - batch[1]).square().mean()


result = devsample.estimate_learning_coeff_with_summary(
    model,
    loader_spec=devsample.LoaderSpec(
        Items, batch_size=8, num_workers=2, collate_fn=lambda items: [torch.stack(x) for x in zip(*items)]
    ),
    evaluate=lambda model, batch: squared(model, batch),
    optimizer_kwargs={"lr": 1e-3},
    num_chains=2,
    num_draws=10,
    cores=2,
    seed=0,
    verbose=False,
)
print(len(result.draws), *result.chains["status"])
"""


@pytest.mark.parametrize(
    "way", ["standard input", *(pytest.param(way, marks=pytest.mark.slow) for way in ("file", "command"))]
)
def test_a_program_without_a_guard_runs_once(way: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    arguments = {"file": [str(script)], "standard input": ["-"], "command": ["-c", PROGRAM]}[way]
    runs = tmp_path / "runs.txt"
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        input=PROGRAM if way == "standard input" else None,
        cwd=tmp_path,
        env=os.environ | {"RUNS": str(runs), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "20 done done\n"
    assert runs.read_text() == "top level\n"
