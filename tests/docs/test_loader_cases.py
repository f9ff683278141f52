"""The page of loader cases is the one that a run of the tests gives, and has every case."""

import importlib
import re
from pathlib import Path

import pytest

from tests.process.loader_cases import table

MODULES = sorted(path.stem for path in (Path(__file__).parents[1] / "process").glob("test_loader_cases_*.py"))
ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+) \| (\d+) \|$", re.MULTILINE)


def cases_in_modules():
    """How many tests are marked with each case."""
    counts = dict.fromkeys(table.NAMES, 0)
    for name in MODULES:
        module = importlib.import_module(f"tests.process.{name}")
        for value in vars(module).values():
            marks = getattr(value, "pytestmark", [])
            for mark in marks if isinstance(marks, list) else [marks]:
                for inner in (mark, *params_of(mark)):
                    if inner.name == "loader_case":
                        counts[inner.args[0]] += 1
    return counts


def params_of(mark):
    """The marks of single parameters."""
    if mark.name != "parametrize":
        return []
    return [inner for one in mark.args[1] for inner in getattr(one, "marks", ())]


def test_every_case_has_tests():
    counts = cases_in_modules()
    assert [name for name, count in counts.items() if not count] == []


def test_the_page_lists_exactly_the_cases_that_are_tested():
    rows = ROW.findall(table.PAGE.read_text(encoding="utf-8"))
    found = {name: (plain, here) for name, plain, here, _ in rows}
    assert list(found) == [case.name for case in table.CASES]
    for case in table.CASES:
        plain, here = found[case.name]
        assert plain == case.plain
        assert here.startswith(case.here)
    assert all(int(count) > 0 for *_, count in rows)


def record(outcome="passed", cases=table.CASES):
    tests = [
        {"case": case.name, "test": case.name, "outcome": outcome, "said": ["pid 17 | `a`"]} for case in cases
    ]
    versions = {"date": "2026-01-01", "Python": "3.11", "devsample": "0"}
    return {"versions": versions, "tests": tests}


def test_a_page_from_a_run():
    text = table.page(record())
    assert "on 2026-01-01 with Python 3.11, devsample 0." in text
    assert len(ROW.findall(text)) == len(table.CASES)
    assert "`pid … \\| 'a'`" in text


@pytest.mark.parametrize(
    "record", [record("failed"), record(cases=table.CASES[1:])], ids=["failed", "missing"]
)
def test_no_page_from_a_run_that_failed_or_missed_a_case(record):
    with pytest.raises(ValueError, match="did not pass|no test of"):
        table.page(record)
