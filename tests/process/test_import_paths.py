"""A recipe of plain text, in chain processes and in their loader workers."""

import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import devsample
from devsample.errors import LoaderError
from tests.factories import estimate, settings

SOURCE = """
import os
import torch
from torch.utils.data import TensorDataset

MARKS = {marks!r}


def mark(name):
    open(os.path.join(MARKS, f"{{name}}-{{os.getpid()}}"), "w").close()


class Data:
    @staticmethod
    def make(n, *, noise):
        mark("made")
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(n, 4, generator=generator)
        return TensorDataset(x, x.sum(1, keepdim=True) + noise)


def collate(items):
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def start(worker):
    mark(f"worker{{worker}}")


if os.environ.get("BREAK"):
    raise RuntimeError("this module does not like chains")
"""

SPEC = """
dataset = "text_recipe.data:Data.make"
dataset_args = [128]
dataset_kwargs = { noise = 0.5 }
batch_size = 16
num_workers = 2
collate_fn = "text_recipe.data:collate"
worker_init_fn = "text_recipe.data:start"
"""


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The recipe's module, not imported yet, and the folder where it leaves marks."""
    package, folder = tmp_path / "text_recipe", tmp_path / "marks"
    package.mkdir()
    folder.mkdir()
    (package / "__init__.py").touch()
    (package / "data.py").write_text(SOURCE.format(marks=str(folder)))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in ("text_recipe", "text_recipe.data"):
        sys.modules.pop(name, None)


def test_a_recipe_of_text_runs_in_chains_and_workers(marks: Path) -> None:
    spec = devsample.LoaderSpec.from_dict(tomllib.loads(SPEC))
    result = estimate(loader_spec=spec, cores=2)
    assert list(result.chains["status"]) == ["done", "done"]
    assert result.settings["num_samples"] == 128
    made = sorted(path.name.partition("-")[0] for path in marks.iterdir())
    assert {"worker0", "worker1", "made"} == set(made)
    pids = {int(path.name.partition("-")[2]) for path in marks.iterdir()}
    assert os.getpid() not in pids


def test_what_fails_only_in_the_chain_is_named(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = devsample.LoaderSpec.from_dict(tomllib.loads(SPEC))
    monkeypatch.setenv("BREAK", "1")
    with pytest.raises(LoaderError) as caught:
        devsample.estimate_learning_coeff_with_summary(**settings(loader_spec=spec, executor="processes"))
    message = str(caught.value)
    assert "'text_recipe.data:Data.make' cannot be imported" in message
    assert "RuntimeError: this module does not like chains" in message
