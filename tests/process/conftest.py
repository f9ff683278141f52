"""Fixtures of the loader cases, and the record from which their table in the documentation is made."""

import json
import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.process.loader_cases.leftovers import none_left

_records: list[dict[str, Any]] = []


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No process, shared memory or temporary file is left behind; gives the temporary folder.

    ``tmp_path`` comes first: pytest's own folder does not lie in it.
    """
    with none_left(monkeypatch) as folder:
        yield folder


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    """A fork server that has torch loaded serves the loaders that the tests of a module build themselves."""
    server = forkserver._forkserver
    forkserver.set_forkserver_preload(["torch", "torch.utils.data", "devsample.data.worker"])
    forkserver.ensure_running()
    yield
    server._stop()


@pytest.fixture
def said(record_property: Callable[[str, object], None]) -> Callable[[str], str]:
    """Keeps a text that devsample has shown, for the table."""

    def keep(text: str) -> str:
        record_property("said", text)
        return text

    return keep


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("loader_case"):
            item.user_properties.append(("case", mark.args[0]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    cases = [value for name, value in report.user_properties if name == "case"]
    if cases and (report.when == "call" or report.outcome != "passed"):
        texts = [value for name, value in report.user_properties if name == "said"]
        _records.extend(
            {"case": case, "test": report.nodeid, "outcome": report.outcome, "said": texts} for case in cases
        )


def pytest_sessionfinish() -> None:
    """``LOADER_CASE_RECORD=file`` keeps what the run has shown; see loader_cases/table.py."""
    path = os.environ.get("LOADER_CASE_RECORD")
    if path:
        from tests.process.loader_cases.table import versions

        Path(path).write_text(json.dumps({"versions": versions(), "tests": _records}, indent=1))
