"""``devsample truths``."""

import json

import pytest

from devsample.cli import main
from devsample.testing import all_cases, command


def test_the_list_names_every_case(capsys):
    assert main(["truths", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [one.name for one in all_cases()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "quad_9"], "--case: 'quad_9' names none of quad_1d"),
        (["--sampler", "Gibbs"], "--sampler: 'Gibbs' names none of "),
        (["--jobs", "0"], "--jobs: expected a number ≥ 1, got 0."),
    ],
)
def test_what_is_refused(arguments, message, capsys):
    assert main(["truths", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_run_writes_a_table_and_the_figures(tmp_path, capsys):
    chosen = ["--case", "quad_1d", "--sampler", "HMC", "--sampler", "AdamSGLD"]
    assert main(["truths", *chosen, "--jobs", "2", "--out", str(tmp_path / "found")]) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "found.md").read_text(encoding="utf-8") == text
    assert "1 of 1 runs passed; 1 that the rule does not ask for were not run." in text
    hmc, adam = sorted(json.loads((tmp_path / "found.json").read_text()), key=lambda one: not one["required"])
    assert (hmc["sampler"], hmc["passed"]) == ("HMC", True)
    assert abs(hmc["value"] / hmc["exact"] - 1) < 0.01
    assert "value" not in adam
    assert "not run" in text


def test_a_required_run_that_fails_and_a_case_that_nobody_solves_are_failures():
    lines = [
        {"case": "a", "sampler": "SGLD", "required": True, "passed": False},
        {"case": "b", "sampler": "SGLD", "required": False},
        {"case": "b", "sampler": "HMC", "required": True, "passed": True},
    ]
    found = command.failures(lines, ["a", "b"], all_samplers=True)
    assert found == ["SGLD does not pass a", "no sampler passes a"]
    assert command.failures(lines[1:], ["b"], all_samplers=True) == []
