"""The llc and the loss of every chain against the draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from devsample.diagnosis import healthy_draws
from devsample.plots import base
from devsample.settling import burnin_advice

if TYPE_CHECKING:
    from os import PathLike

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from devsample.results import LLCResult

MAX_POINTS = 2000  # of a line; more are not to be told apart
BLOCKS, BLOCK_DRAWS = 20, 5  # of the mean over the chains: how many, and their least length


def plot_trace(
    result: LLCResult,
    path: str | PathLike[str] | None = None,
    *,
    width: float = 11.0,
    height: float = 5.0,
    dpi: int = 120,
) -> Figure:
    """Draw the llc and the loss of every chain against the draws.

    Left: nβ (loss − baseline) of each draw, faint, each chain's running mean over it, black dots for the mean
    of all chains in 20 blocks of draws, and the estimate with ± 2 standard errors as a band. Dots that climb
    are chains that have not settled; a dotted line is where the trace becomes level
    (:func:`devsample.settling.burnin_advice`), if that is not the first draw. Right: the running mean of the
    loss of each chain and of its baseline. Chains that are left out are dashed and grey, with a cross where
    they end; the axes are scaled to the others. The verdict and the first reason stand above.

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
    """
    figure = base.new_figure(width, height)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    draw_llc(left, result)
    draw_loss(right, result)
    return base.finish(figure, result, path, width, dpi)


def draw_llc(axes: Axes, result: LLCResult) -> None:
    """The llc of the draws, its running means, the blocks' means, and the estimate."""
    estimate, error = result.llc, 2 * np.nan_to_num(result.se)
    axes.axhspan(estimate - error, estimate + error, color="0.2", alpha=0.18, lw=0, zorder=1)
    axes.axhline(estimate, color="0.1", lw=1.2, zorder=4, label="estimate ± 2 standard errors")
    _draw_chains(axes, result, "llc")
    llc = healthy_draws(result, "llc")
    _draw_blocks(axes, llc)
    drop = burnin_advice(llc).drop
    if drop:
        axes.axvline(drop, color="0.1", lw=1.2, ls=":", zorder=5, label=f"level from draw {drop} on")
    axes.set_ylim(base.limits(llc, estimate - error, estimate + error))
    base.label(
        axes, "learning coefficient: draws, and running mean of each chain", "draw", "nβ (loss − baseline)"
    )
    base.whole_numbers(axes)
    base.legend_below(axes)


def draw_loss(axes: Axes, result: LLCResult) -> None:
    """The loss of the draws and its running means, and the baseline's running mean."""
    _draw_chains(axes, result, "loss", named=False)
    baseline = healthy_draws(result, "baseline").mean(axis=0)
    running = np.cumsum(baseline) / np.arange(1, len(baseline) + 1)
    axes.plot(running, color="0.1", lw=1.4, ls=(0, (5, 2)), zorder=4, label="at w* (baseline)")
    axes.set_ylim(base.limits(healthy_draws(result, "loss"), running.min(), running.max()))
    base.label(axes, "loss of each chain and at w*, likewise", "draw", "loss")
    base.whole_numbers(axes)
    base.legend_below(axes)


def _draw_blocks(axes: Axes, llc: NDArray[np.float64]) -> None:
    size = max(BLOCK_DRAWS, llc.shape[1] // BLOCKS)
    count = llc.shape[1] // size
    if count < 4:
        return
    means = llc[:, : count * size].mean(axis=0).reshape(count, size).mean(axis=1)
    middle = (np.arange(count) + 0.5) * size - 0.5
    axes.plot(
        middle,
        means,
        "o",
        color="0.1",
        mec="white",
        mew=0.6,
        ms=4.5,
        zorder=6,
        label=f"all chains, {size} draws each",
    )


def _draw_chains(axes: Axes, result: LLCResult, column: str, *, named: bool = True) -> None:
    """One faint line of draws and one strong line of running means per chain."""
    used, colors = base.used_chains(result), base.chain_colors(result)
    status = dict(zip(result.chains["chain"], result.chains["status"], strict=True))
    named = named and len(used) <= base.MAX_NAMED_CHAINS
    share = min(1.0, (4 / len(used)) ** 0.5)
    for chain, rows in result.draws.groupby("chain"):
        draws, values = _finite(rows, column)
        thin = slice(None, None, max(1, len(draws) // MAX_POINTS))
        if chain not in used:
            name = f"chain {chain}: {status[chain]}" if column == "llc" else None
            axes.plot(draws[thin], values[thin], color=base.LOST_COLOR, lw=0.8, ls="--", zorder=2, label=name)
            top = axes.get_xaxis_transform()  # its last loss may be far outside the axes
            axes.plot(draws[-1:], [0.98] * len(draws[-1:]), "x", color="0.3", transform=top, zorder=5)
            continue
        axes.plot(draws[thin], values[thin], color=colors[chain], lw=0.5, alpha=0.25 * share, zorder=2)
        running = np.cumsum(values) / np.arange(1, len(values) + 1)
        name = f"chain {chain}" if named else None
        axes.plot(
            draws[thin],
            running[thin],
            color=colors[chain],
            lw=0.5 + share,
            alpha=0.4 + 0.6 * share,
            zorder=3,
            label=name,
        )


def _finite(rows: pd.DataFrame, column: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    values = rows[column].to_numpy(np.float64)
    finite = np.isfinite(values)
    return rows["draw"].to_numpy(np.int64)[finite], values[finite]
