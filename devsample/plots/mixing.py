"""Whether the chains forget where they were, and whether they draw from one law."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from devsample.autocorrelation import autocorrelation, autocorrelation_time, pooled_autocorrelation
from devsample.diagnosis import format_time, healthy_draws
from devsample.diagnostics import MIN_DRAWS, Draws
from devsample.plots import base

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from devsample.results import LLCResult

MAX_BARS = 8  # chains that have a row of bars each; more become a map of colours
MIN_BINS, MAX_BINS = 4, 20
DRAWS_PER_BIN = 5  # at least, in each chain
INDEPENDENT_PER_BIN = 10  # where there are enough: their number is then 30 % off by chance
CLOSE_LAGS = 20
TIMES_SHOWN = 5  # autocorrelation times that the lags reach


def plot_autocorrelation(
    result: LLCResult,
    path: str | PathLike[str] | None = None,
    *,
    width: float = 6.5,
    height: float = 4.5,
    dpi: int = 120,
) -> Figure:
    """Draw the autocorrelation of the llc: of each chain about its mean, and of all about theirs (black).

    The integrated autocorrelation time stands in the title, in draws and in steps. A black line that
    stays above the others is chains that disagree.

    Args:
        result: what to draw.
        path: where to save the picture; the ending says the format.
        width: in inches.
        height: in inches.
        dpi: dots per inch of a saved picture.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.

    References:
        Vehtari et al. (2021), equations 10-13.
    """
    figure = base.new_figure(width, height)
    draw_autocorrelation(figure.subplots(), result)
    return base.finish(figure, result, path, width, dpi)


def draw_autocorrelation(axes: Axes, result: LLCResult) -> None:
    """Lines of correlation against lag; or why there are none."""
    draws = healthy_draws(result, "llc")
    time = autocorrelation_time(draws)
    if math.isnan(time):
        why = "all draws are equal" if np.ptp(draws) == 0 else f"it needs {MIN_DRAWS} draws a chain"
        base.say_missing(axes, "autocorrelation", f"No autocorrelation: {why}.")
        return
    wanted = max(CLOSE_LAGS, min(math.ceil(TIMES_SHOWN * time), draws.shape[1] // 2))
    shown = min(draws.shape[1], wanted + 1)
    share, colors = min(1.0, (4 / len(draws)) ** 0.5), base.chain_colors(result)
    lags = np.arange(shown)
    for chain, row in zip(base.used_chains(result), autocorrelation(draws)[:, :shown], strict=True):
        axes.plot(lags, row, color=colors[chain], lw=1.0, alpha=0.3 + 0.5 * share)
    axes.plot(lags, pooled_autocorrelation(draws)[:shown], color="0.1", lw=1.8, label="all chains")
    axes.axhline(0, color="0.5", lw=0.8)
    axes.set_ylim(min(-0.25, *axes.get_ylim()), 1.03)
    steps = time * int(result.settings.get("num_steps_bw_draws", 1))
    title = f"autocorrelation: time {format_time(time)} draws = {format_time(steps)} steps"
    base.label(axes, title, "lag in draws", "correlation")
    base.whole_numbers(axes)
    axes.legend(fontsize=8, loc="upper right", frameon=False)


def plot_ranks(
    result: LLCResult,
    path: str | PathLike[str] | None = None,
    *,
    width: float = 6.5,
    height: float = 4.5,
    dpi: int = 120,
) -> Figure:
    """Draw how the ranks of each chain's llc, among all draws of all chains, are spread.

    Chains of one law have flat rows: as many low, middle and high ranks as the others. A row that is full at
    one end belongs to a chain that sits lower or higher. Up to 8 chains have bars, with the expected number
    as a line; more are a map, white where the number is as expected.

    Args:
        result: what to draw.
        path: where to save the picture; the ending says the format.
        width: in inches.
        height: in inches.
        dpi: dots per inch of a saved picture.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.

    References:
        Vehtari et al. (2021), section 5: rank plots.
    """
    figure = base.new_figure(width, height)
    draw_ranks(figure.subplots(), result)
    return base.finish(figure, result, path, width, dpi)


def draw_ranks(axes: Axes, result: LLCResult) -> None:
    """Bars, or a map of many chains; or why there are none."""
    draws = healthy_draws(result, "llc")
    few = draws.shape[1] < MIN_BINS * DRAWS_PER_BIN
    if len(draws) < 2 or few or np.ptp(draws) == 0:
        why = f"it needs {MIN_BINS * DRAWS_PER_BIN} draws a chain"
        why = "it needs two chains to compare" if len(draws) < 2 else why
        why = "all draws are equal" if np.ptp(draws) == 0 else why
        base.say_missing(axes, "ranks of the draws", f"No rank plot: {why}.")
        return
    bins = _bins(draws)
    relative = rank_counts(draws, bins) * bins / draws.shape[1]
    chains = base.used_chains(result)
    if len(draws) > MAX_BARS:
        _map(axes, relative, chains)
    else:
        _bars(axes, relative, chains, base.chain_colors(result))
    base.label(axes, "ranks of each chain's draws: level is good", "rank, lowest to highest", "chain")
    axes.set_xlim(0, 1)


def rank_counts(draws: Draws, bins: int) -> Draws:
    """How many draws of each chain have their rank among all draws in each of equal bins.

    Args:
        draws: shape (num_chains, num_draws); equal ones share their mean rank.
        bins: how many.

    Returns:
        Shape (num_chains, bins).

    >>> rank_counts(np.array([[1.0, 2.0], [3.0, 4.0]]), 2)
    array([[2., 0.],
           [0., 2.]])
    """
    from scipy.stats import rankdata

    ranks = (rankdata(draws).reshape(draws.shape) - 0.5) / draws.size
    return np.stack([np.histogram(row, bins, (0, 1))[0] for row in ranks]).astype(np.float64)


def _bins(draws: Draws) -> int:
    time = autocorrelation_time(draws - draws.mean(axis=1, keepdims=True))
    independent = draws.shape[1] / max(1.0, np.nan_to_num(time, nan=1.0))
    return int(np.clip(independent / INDEPENDENT_PER_BIN, MIN_BINS, MAX_BINS))


def _bars(axes: Axes, relative: Draws, chains: list[int], colors: dict[int, str]) -> None:
    """Rows of bars, the first on top; the expected number is 0.4 of a row high, 2.2 times it is the most."""
    bins = relative.shape[1]
    left = np.arange(bins) / bins
    for row, (chain, values) in enumerate(zip(chains, relative, strict=True)):
        heights = 0.4 * np.minimum(values, 2.2)
        axes.bar(left, -heights, 1 / bins, bottom=row + 0.45, align="edge", color=colors[chain], alpha=0.75)
        axes.axhline(row + 0.05, color="0.1", lw=0.8, ls=(0, (4, 3)))
    axes.set_ylim(len(chains) - 0.45, -0.55)
    axes.set_yticks(range(len(chains)), [str(chain) for chain in chains])


def _map(axes: Axes, relative: Draws, chains: list[int]) -> None:
    """A row of colours a chain: blue for fewer than expected, red for more."""
    image = axes.imshow(
        relative,
        cmap="RdBu_r",
        vmin=0,
        vmax=2,
        aspect="auto",
        interpolation="nearest",
        extent=(0, 1, len(chains) - 0.5, -0.5),
    )
    every = max(1, len(chains) // 8)
    axes.set_yticks(range(0, len(chains), every), [str(chain) for chain in chains[::every]])
    bar = axes.figure.colorbar(image, ax=axes, ticks=[0, 1, 2], pad=0.02, aspect=30)
    bar.ax.set_yticklabels(["none", "as expected", "≥ twice"], fontsize=7)
