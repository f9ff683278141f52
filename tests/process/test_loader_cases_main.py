"""Programs and notebooks whose loaders are made of what stands in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.process.loader_cases.programs import BESIDE, INSTALLED, PROGRAM, SAYS
from tests.process.loader_cases.table import case

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.timeout(280)]
ROOT = Path(__file__).parents[2]
DEADLINE = 240
DEFAULT = {
    ("file", "forkserver"),
    ("standard input", "forkserver"),
    ("command", "fork"),
    ("notebook", "forkserver"),
}


def ways(*names: str) -> pytest.MarkDecorator:
    """Ways to run a program, each with every start method of loader workers."""
    return pytest.mark.parametrize(
        ("way", "method"),
        [
            pytest.param(way, method, marks=() if (way, method) in DEFAULT else pytest.mark.slow)
            for way in names
            for method in ("forkserver", "fork", "spawn")
        ],
    )


@pytest.fixture
def place(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module in it, an installed package, and the environment for a program there."""
    site, work = tmp_path / "site", tmp_path / "work"
    (site / "loader_cases_installed").mkdir(parents=True)
    (site / "loader_cases_installed" / "__init__.py").touch()
    (site / "loader_cases_installed" / "part.py").write_text(INSTALLED)
    work.mkdir()
    (work / "beside.py").write_text(BESIDE)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{site}")
    monkeypatch.setenv("RUNS", str(tmp_path / "runs.txt"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return work


def run_program(place: Path, way: str, text: str) -> str:
    """What a program prints; it prints nothing on stderr."""
    script = place / "program.py"
    script.write_text(text)
    arguments = {
        "file": [str(script)],
        "standard input": ["-"],
        "command": ["-c", text],
        "module": ["-m", "program"],
    }[way]
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        input=text if way == "standard input" else None,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout


def run_notebook(place: Path, text: str) -> str:
    """What a cell prints; it prints nothing on stderr."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text)])
    client = NotebookClient(
        notebook, timeout=DEADLINE, kernel_name="python3", resources={"metadata": {"path": str(place)}}
    )
    client.execute()
    printed = {"stdout": "", "stderr": ""}
    for output in notebook.cells[0].outputs:
        printed[output["name"]] += output["text"]
    assert printed["stderr"] == ""
    return printed["stdout"]


def top_levels(tmp_path: Path) -> int:
    """How often the top level of the program was run."""
    return (tmp_path / "runs.txt").read_text().count("top level")


@case("script without a main guard")
@case("class that travels on to a second process")
@ways("file", "module")
def test_a_script_without_a_guard(place: Path, way: str, method: str, tmp_path: Path) -> None:
    assert run_program(place, way, PROGRAM.format(method=method)) == SAYS
    assert top_levels(tmp_path) == 1


@case("data set class from a notebook, -c or standard input")
@case("class that travels on to a second process")
@ways("standard input", "command")
def test_a_program_without_a_file(place: Path, way: str, method: str, tmp_path: Path) -> None:
    assert run_program(place, way, PROGRAM.format(method=method)) == SAYS
    assert top_levels(tmp_path) == 1


@case("data set class from a notebook, -c or standard input")
@ways("notebook")
def test_a_notebook(place: Path, way: str, method: str, tmp_path: Path) -> None:
    assert run_notebook(place, PROGRAM.format(method=method)) == SAYS
    assert top_levels(tmp_path) == 1


@case("script without a main guard")
@pytest.mark.slow
def test_a_script_with_a_guard(place: Path, tmp_path: Path) -> None:
    head, last = PROGRAM.format(method="spawn").rsplit("result, alone", 1)
    guarded = f"{head}if __name__ == '__main__':\n    result, alone" + last.replace("\nprint", "\n    print")
    assert run_program(place, "file", guarded) == SAYS
    assert top_levels(tmp_path) == 1


@case("script without a main guard")
@pytest.mark.slow
def test_a_script_that_runs_another_one(place: Path, tmp_path: Path) -> None:
    """runpy replaces ``__main__`` for a while."""
    (place / "inner.py").write_text(PROGRAM.format(method="forkserver"))
    outer = "import runpy\nrunpy.run_path('inner.py', run_name='__main__')"
    assert run_program(place, "file", outer) == SAYS
    assert top_levels(tmp_path) == 1
