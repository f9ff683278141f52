"""Pictures: that a bad run looks bad, that files are written, and that pyplot is left alone."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba

from devsample.diagnosis import diagnose
from devsample.errors import InvalidArgumentError
from devsample.plots import (
    dashboard,
    plot_autocorrelation,
    plot_chains,
    plot_distance,
    plot_ranks,
    plot_trace,
)
from devsample.plots.base import VERDICT_COLORS
from tests.unit.test_diagnostics import ar1, healthy
from tests.unit.test_results import make_result, table

TIME = np.arange(500)


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
    dashboard(make_result(list(traces)), tmp_path / "dashboard.png", dpi=40)
    assert (tmp_path / "dashboard.png").stat().st_size > 10_000


def test_a_trace_that_levels_off_late_has_a_mark_there(traces):
    rise = 1 - np.exp(-TIME / 20)
    result = make_result(list(np.array(traces) * rise))
    drop = diagnose(result).quantities["llc"].burnin.drop
    left, _ = plot_trace(result).axes
    assert set(lines(left)[f"level from draw {drop} on"].get_xdata()) == {drop}
    level, _ = plot_trace(make_result(traces)).axes
    assert not [name for name in lines(level) if name.startswith("level")]


def test_the_dots_are_means_of_all_chains(traces):
    left, _ = plot_trace(make_result(traces)).axes
    dots = lines(left)["all chains, 25 draws each"]
    assert dots.get_ydata() == pytest.approx(np.array(traces).reshape(4, 20, 25).mean(axis=(0, 2)))
    assert dots.get_xdata()[:2] == pytest.approx([12, 37])


# --- chains, mixing, distance --------------------------------------------------------------------


def test_each_chain_has_its_error_bar(traces):
    result = make_result(traces, c2={"status": "died"})
    (axes,) = plot_chains(result).axes
    bars = {round(box.lines[0].get_ydata()[0]): box for box in axes.containers}
    assert set(bars) == {0, 1, 3}
    table = result.chains.set_index("chain")
    for chain, bar in bars.items():
        assert bar.lines[0].get_xdata()[0] == pytest.approx(table["llc"][chain])
        low, high = np.ravel(bar.lines[2][0].get_segments()[0])[[0, 2]]
        assert (high - low) / 4 == pytest.approx(table["se"][chain])
    assert [text.get_text() for text in axes.texts] == ["died"]
    low, high = axes.get_xlim()
    assert low < table["llc"].min() - 2 * table["se"].max() < table["llc"].max() < high


def test_the_autocorrelation_is_that_of_the_draws():
    draws = 12 + ar1(4, 500, 0.8, np.random.default_rng(1))
    (axes,) = plot_autocorrelation(make_result(list(draws), num_steps_bw_draws=10)).axes
    pooled = lines(axes)["all chains"].get_ydata()
    assert pooled[:3] == pytest.approx([1, 0.8, 0.64], abs=0.1)
    assert len(axes.get_lines()) == 4 + 2  # chains, all of them, and the zero
    time = diagnose(make_result(list(draws))).quantities["llc"].autocorrelation_time
    assert axes.get_title() == f"autocorrelation: time {time:.1f} draws = {10 * time:.0f} steps"


def heights(axes):
    """Of the bars of the rank plot, by row."""
    return [np.array([-bar.get_height() for bar in box]) for box in axes.containers]


def test_ranks_are_level_where_chains_draw_from_one_law_and_not_where_one_sits_apart(traces):
    (axes,) = plot_ranks(make_result(traces)).axes
    assert len(heights(axes)) == 4
    assert np.ptp(heights(axes), axis=1).max() < 0.4  # 0.4 is what is expected in each
    traces[3] = traces[3] + 15
    (axes,) = plot_ranks(make_result(traces)).axes
    last = heights(axes)[3]
    assert last[0] == 0
    assert last[-1] > 0.8


def test_ranks_of_many_chains_are_a_map():
    traces = list(healthy(np.random.default_rng(2), shape=(30, 200)))
    traces[7] = traces[7] + 20
    axes, bar = plot_ranks(make_result(traces)).axes
    (image,) = axes.get_images()
    relative = image.get_array()
    assert relative.shape[0] == 30
    assert relative.mean() == pytest.approx(1)
    assert np.argmax(relative[:, -1]) == 7
    assert relative[7, 0] == 0
    assert [text.get_text() for text in bar.get_yticklabels()] == ["none", "as expected", "≥ twice"]


def with_distance(traces, distance):
    return make_result(traces, draws=table(traces).assign(distance=np.ravel(distance)))


def test_the_distance_of_each_chain_and_their_mean(traces):
    distance = np.sqrt(1 + TIME) * np.array([1.0, 2.0, 3.0, 4.0])[:, None]
    (axes,) = plot_distance(with_distance(traces, distance)).axes
    *chains, mean = axes.get_lines()
    assert [line.get_ydata()[-1] for line in chains] == pytest.approx(distance[:, -1])
    assert mean.get_ydata() == pytest.approx(distance.mean(axis=0))
    assert axes.get_ylim()[0] == 0


def test_a_distance_that_was_not_recorded_is_an_error_with_the_remedy(traces):
    with pytest.raises(InvalidArgumentError, match=r'observables=\("distance",\)'):
        plot_distance(make_result(traces))


@pytest.mark.parametrize(
    ("draws", "why"),
    [
        (np.random.default_rng(3).normal(5, 1, (1, 3)), "needs 4 draws"),
        (np.random.default_rng(3).normal(5, 1, (1, 300)), "two chains to compare"),
        (np.random.default_rng(3).normal(5, 1, (3, 19)), "needs 20 draws a chain"),
        (np.zeros((3, 50)), "all draws are equal"),
    ],
    ids=["few", "one chain", "short", "frozen"],
)
def test_a_panel_without_data_says_so_in_grey(draws, why):
    figure = dashboard(make_result(list(draws)))
    said = {
        text.get_text().replace("\n", " "): text.get_color()
        for axes in figure.get_axes()
        for text in axes.texts
    }
    assert any(why in text for text in said), said
    assert any("distance from w*" in text and "observables" in text for text in said)
    assert set(said.values()) == {"0.45"}


# --- dashboard -----------------------------------------------------------------------------------


def banner(figure):
    top, _ = figure.subfigs
    return top.get_facecolor(), top.texts[0].get_text()


def test_the_banner_has_the_verdict_its_colour_and_the_first_reason(traces):
    bad = np.array(traces) * (1 - np.exp(-TIME / 300))
    for draws, verdict in [(traces, "trust"), (list(bad), "reject")]:
        result = make_result(draws)
        assert result.verdict == verdict
        color, text = banner(dashboard(result))
        assert color == to_rgba(VERDICT_COLORS[verdict])
        assert result.headline in text
        if result.reasons:
            assert result.reasons[0] in text.replace("\n", " ")


def test_the_dashboard_has_all_panels_and_the_numbers(traces):
    result = with_distance(traces, np.ones(2000))
    axes = {one.get_label(): one for one in dashboard(result).get_axes()}
    assert set(axes) == {"llc", "chains", "loss", "autocorrelation", "ranks", "distance", "numbers"}
    cells = {}
    for one in axes["numbers"].tables:
        texts = {place: cell.get_text().get_text() for place, cell in one.get_celld().items()}
        cells |= {texts[row, 0]: texts[row, 1] for row, column in texts if column == 0}
    assert cells["effective draws"] == f"{result.ess:.0f} of 2000"
    assert cells["burn-in"] == "enough"
    assert cells["plateau slope"] == "not recorded"
    assert cells["draws every"] == "1 step, after 500"
    assert cells["estimate"].startswith("12.28 ± ")


@pytest.mark.parametrize(("mean", "marked"), [(1.0, set()), (0.23, {"virial", "burn-in"}), (1.4, {"virial"})])
def test_a_virial_that_is_off_is_marked(traces, mean, marked):
    virial = mean + 0.1 * np.random.default_rng(8).normal(size=2000)
    figure = dashboard(make_result(traces, draws=table(traces).assign(virial=virial)))
    (axes,) = (one for one in figure.get_axes() if one.get_label() == "numbers")
    red = set()
    for one in axes.tables:
        for (row, column), cell in one.get_celld().items():
            if to_rgba(cell.get_text().get_color()) == to_rgba(VERDICT_COLORS["reject"]):
                assert column == 1
                red.add(one.get_celld()[row, 0].get_text().get_text().partition(" ")[0])
    assert red == marked


@pytest.mark.parametrize("num_chains", [4, 64])
def test_nothing_overlaps_or_is_cut_off(num_chains):
    """Texts of the dashboard are inside of it, and those of the table of numbers clear of each other."""
    draws = healthy(np.random.default_rng(4), shape=(num_chains, 300)) * (1 - np.exp(-np.arange(300) / 20))
    figure = dashboard(make_result(list(draws)))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    size = figure.bbox
    for axes in figure.get_axes():
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for text in [text for text in texts if text.get_text()]:
            box = text.get_window_extent(renderer)
            assert box.x0 >= size.x0 - 1, text
            assert box.x1 <= size.x1 + 1, text
    numbers = next(axes for axes in figure.get_axes() if axes.get_label() == "numbers")
    for one in numbers.tables:
        for cell in one.get_celld().values():
            inside, around = cell.get_text().get_window_extent(renderer), cell.get_window_extent(renderer)
            assert inside.x1 <= around.x1, cell.get_text()


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
