"""The quickstart notebook, executed by a real kernel."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"

# What the notebook's user sees is checked from values in its kernel.
REPORT = """
import json, multiprocessing
print(json.dumps({
    "llc": result.llc, "se": result.se, "verdict": result.verdict, "draws": len(result.draws),
    "cores": result.settings["cores"], "check": [check.llc, check.se, exact],
    "processes": len(multiprocessing.active_children()),
    "gradients": [p.grad.abs().max().item() for p in model.parameters()],
}))
"""


@pytest.fixture(scope="module")
def executed():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(REPORT))
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    return notebook


def printed(cell):
    return "".join(one["text"] for one in cell.outputs if one.get("name") == "stdout")


def test_its_numbers_are_right_and_nothing_is_left_running(executed):
    report = json.loads(printed(executed.cells[-1]))
    assert report["verdict"] == "trust"
    assert report["cores"] == 2
    assert report["draws"] == 4 * 300
    assert report["processes"] == 0
    assert report["llc"] == pytest.approx(3.8, abs=0.6)  # 3.81 ± 0.04 with ten times the draws
    estimate, error, exact = report["check"]
    assert abs(estimate - exact) < 4 * error + 0.02 * exact


def test_it_shows_the_summary_tables_and_a_picture(executed):
    shown = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert any("4 of 4 chains" in printed(cell) for cell in shown)
    pictures = [one for cell in shown for one in cell.outputs if "image/png" in one.get("data", {})]
    tables = [one for cell in shown for one in cell.outputs if "text/html" in one.get("data", {})]
    assert len(pictures) == 1
    assert len(tables) == 2
    assert not [one for cell in shown for one in cell.outputs if "Warning" in one.get("text", "")]


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
