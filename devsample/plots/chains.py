"""The estimate of each chain against that of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from devsample.plots import base

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from devsample.results import LLCResult

BOX = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
MAX_LOST_NAMES = 6  # of chains that are left out; more do not fit the panel


def plot_chains(
    result: LLCResult,
    path: str | PathLike[str] | None = None,
    *,
    width: float = 6.5,
    height: float = 4.5,
    dpi: int = 120,
) -> Figure:
    """Draw each chain's estimate ± 2 of its own standard errors, and the pooled one as a band.

    Chains of one law have most of their bars reach the line. Chains that are left out have a cross at the
    left edge and their status. The verdict and the first reason stand above.

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
    draw_chains(figure.subplots(), result)
    return base.finish(figure, result, path, width, dpi)


def draw_chains(axes: Axes, result: LLCResult) -> None:
    """One line a chain, from the top: estimate, error bar; or why there is none."""
    table = result.chains.sort_values("chain")
    colors, rows = base.chain_colors(result), np.arange(len(table))
    estimate, error = result.llc, 2 * np.nan_to_num(result.se)
    axes.axvspan(estimate - error, estimate + error, color="0.2", alpha=0.18, lw=0, zorder=1)
    axes.axvline(estimate, color="0.1", lw=1.2, zorder=2)
    used = table["llc"].notna().to_numpy()
    size = 5.0 if len(table) <= 20 else 3.0
    for row, one in zip(rows, table.itertuples(), strict=True):
        if used[row]:
            bar = 2 * np.nan_to_num(one.se)
            axes.errorbar(one.llc, row, xerr=bar, fmt="o", ms=size, lw=1.5, color=colors[one.chain], zorder=3)
    _name_lost(axes, rows[~used], list(table["status"][~used]))
    means, bars = table["llc"][used].to_numpy(), 2 * np.nan_to_num(table["se"][used].to_numpy())
    low = min(float((means - bars).min()), estimate - error)
    high = max(float((means + bars).max()), estimate + error)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_xlim(low - margin, high + margin)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    every = max(1, len(rows) // 10)
    axes.set_yticks(rows[::every], [str(chain) for chain in table["chain"][::every]])
    base.label(axes, "chains, and all of them (band), ± 2 standard errors", "nβ (loss − baseline)", "chain")


def _name_lost(axes: Axes, rows: np.ndarray, statuses: list[str]) -> None:
    edge = axes.get_yaxis_transform()
    for number, (row, status) in enumerate(zip(rows, statuses, strict=True)):
        axes.plot([0.02], [row], "x", color="0.3", ms=6, transform=edge, zorder=4)
        if number < MAX_LOST_NAMES:
            axes.text(
                0.05, row, status, va="center", fontsize=8, color="0.3", transform=edge, zorder=5, bbox=BOX
            )
