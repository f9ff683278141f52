"""What gets imported where, and the public names."""

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import devsample

ROOT = Path(__file__).parents[2]

PUBLIC = {
    "LLCResult",
    "LoaderSpec",
    "Precision",
    "AdamSGLD",
    "HMC",
    "MALA",
    "RMSPropSGLD",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "errors",
    "estimate_learning_coeff",
    "estimate_learning_coeff_with_summary",
    "nbeta_for",
    "observables",
    "plots",
    "sample",
    "samplers",
    "testing",
}
HEAVY = (
    "arviz_stats",
    "matplotlib",
    "pandas",
    "scipy",
    "sklearn",
    "torch._dynamo",
    "torch._inductor",
    "tqdm",
    "transformers",
    "xarray",
)


def test_a_chain_process_and_its_workers_import_nothing_heavy(tmp_path: Path) -> None:
    with_torch = python("import sys, torch; print(*sys.modules)").split()  # tqdm, in some versions
    looked_for = set(HEAVY) - set(with_torch)
    assert {"pandas", "scipy", "matplotlib", "arviz_stats"} <= looked_for

    def look(kind: str) -> None:
        names = sorted(name for name in looked_for if name in sys.modules)
        (tmp_path / f"{kind}-{os.getpid()}").write_text(" ".join(names))

    class Items(Dataset):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> torch.Tensor:
            look("worker")
            return torch.ones(2) * index

    def evaluate(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        look("chain")
        return model(batch).square().mean()

    devsample.estimate_learning_coeff_with_summary(
        torch.nn.Linear(2, 1),
        loader_spec=devsample.LoaderSpec(Items(), batch_size=8, num_workers=1),
        evaluate=evaluate,
        optimizer_kwargs={"lr": 1e-6},
        num_chains=1,
        num_draws=5,
        executor="processes",
        verbose=False,
    )
    (tmp_path / f"chain-{os.getpid()}").unlink()  # this process looked too, for the check at w*
    found = {path.name.split("-")[0]: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"chain": "", "worker": ""}


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_devsample_imports_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "cloudpickle", *HEAVY)
    code = f"import sys, devsample; print(*[name for name in {heavy} if name in sys.modules])"
    assert python(code) == ""


def test_importing_every_public_name_needs_no_optional_package() -> None:
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'xarray', 'ray', 'transformers', 'sklearn'):\n"
        "    sys.modules[name] = None\n"
        "from devsample import *\n"
        "print(SGLD.__name__)"
    )
    assert python(code) == "SGLD"


def test_the_public_names() -> None:
    assert set(devsample.__all__) == PUBLIC
    assert len(devsample.__all__) == len(PUBLIC)
    assert set(dir(devsample)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(devsample, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'estimate_llc'"):
        _ = devsample.estimate_llc


def test_no_module_has_the_name_of_a_public_object() -> None:
    modules = {name for _, name, _ in pkgutil.iter_modules(devsample.__path__)}
    objects = {name for name in PUBLIC if not isinstance(getattr(devsample, name), type(sys))}
    assert "SGLD" in objects
    assert "seeds" in modules
    assert not modules & objects
    samplers = {name for _, name, _ in pkgutil.iter_modules(devsample.samplers.__path__)}
    assert not samplers & set(devsample.samplers.__all__)


@pytest.mark.parametrize("name", ["errors", "samplers", "plots", "results", "data"])
def test_every_listed_name_exists(name: str) -> None:
    module = importlib.import_module(f"devsample.{name}")
    assert module.__all__
    assert [one for one in module.__all__ if not hasattr(module, one)] == []
