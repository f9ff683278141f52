"""Pictures: that a bad run looks bad, that files are written, and that pyplot is left alone."""

import subprocess
import sys

import numpy as np
import pytest

from devsample.plots import plot_trace
from tests.unit.test_diagnostics import healthy
from tests.unit.test_results import make_result


@pytest.fixture
def traces():
    return list(healthy(np.random.default_rng(0)))


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_each_chain_ends_at_its_estimate(traces):
    result = make_result(traces)
    left, right = plot_trace(result).axes
    for chain in range(4):
        line = lines(left)[f"chain {chain}"]
        assert line.get_ydata()[-1] == pytest.approx(result[f"llc-chain/{chain}"])
    (estimate,) = set(lines(left)["estimate ± 2 standard errors"].get_ydata())
    assert estimate == result.llc
    baseline = lines(right)["at w* (baseline)"].get_ydata()
    assert baseline[-1] == pytest.approx(result.draws["baseline"].mean())


def test_a_lost_chain_is_shown_as_lost_and_does_not_set_the_scale(traces):
    traces[1] = np.concatenate([traces[1][:30], np.geomspace(1e2, 1e300, 9), [np.inf, np.nan]])
    result = make_result(traces, c1={"status": "diverged"})
    figure = plot_trace(result)
    left, right = figure.axes
    assert lines(left)["chain 1: diverged"].get_linestyle() == "--"
    assert "chain 1" not in lines(left)
    assert max(left.get_ylim()) < 100
    assert max(right.get_ylim()) < 1
    assert "caution" in figure.get_suptitle()
    assert "chain 1 diverged" in figure.get_suptitle()


@pytest.mark.parametrize(
    "traces",
    [np.zeros((4, 50)), np.ones((1, 1)), np.ones((2, 3)), np.full((12, 3000), 7.0)],
    ids=["frozen", "one draw", "three draws", "many"],
)
def test_degenerate_runs_can_be_drawn(traces, tmp_path):
    make_result(list(traces)).plot(tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 10_000


def test_the_ending_says_the_format(traces, tmp_path):
    make_result(traces).plot(str(tmp_path / "trace.svg"))
    assert "<svg" in (tmp_path / "trace.svg").read_text()


def test_without_matplotlib_the_extra_is_named(traces, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'devsample\[plots\]'"):
        plot_trace(make_result(traces))


def test_pyplot_is_never_loaded():
    code = (
        "import numpy as np, sys\n"
        "from tests.unit.test_results import make_result\n"
        "make_result(list(np.random.default_rng(0).normal(5, 1, (2, 50)))).plot()\n"
        "sys.exit('pyplot was loaded' if 'matplotlib.pyplot' in sys.modules else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
