"""Runs with a planted fault: the first reason names it. Runs without: the verdict is "trust"."""

import pytest

from benchmarks.verdicts import SCENARIOS, outcome, run

LONG = ("healthy, AdamSGLD", "healthy, SGHMC, settings chosen", "healthy, SGNHT", "healthy, observed")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if one in LONG else ()) for one in SCENARIOS]
)
def test_the_first_reason_names_the_fault(name):
    result = run(name, seed=1000)
    right, kind = outcome(name, result)
    assert right, (kind, result.reasons)
    for finding in result.findings:
        assert finding.text.endswith(".")
        assert ";" in finding.text  # what is the matter; what to do


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_does_so_for_twenty_seeds(name):
    seeds = range(20)
    wrong = {seed: kind for seed in seeds for good, kind in [outcome(name, run(name, seed))] if not good}
    assert len(wrong) <= (1 if SCENARIOS[name].kind else 2), wrong
