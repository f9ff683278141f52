"""How far the chains are from w*, draw by draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from devsample.diagnosis import healthy_draws
from devsample.errors import InvalidArgumentError
from devsample.plots import base

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from devsample.results import LLCResult

HOW = 'pass observables=("distance",) to the run'


def plot_distance(
    result: LLCResult,
    path: str | PathLike[str] | None = None,
    *,
    width: float = 6.5,
    height: float = 4.5,
    dpi: int = 120,
) -> Figure:
    """Draw the distance |w − w*| of each chain in use against the draws, and its mean over them.

    A distance that still grows at the end says that the chains have not reached the edge of where they
    belong, however level the loss looks: along flat directions the loss does not show it.

    Args:
        result: of a run with ``observables=("distance",)``.
        path: where to save the picture; the ending says the format.
        width: in inches.
        height: in inches.
        dpi: dots per inch of a saved picture.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
        InvalidArgumentError: the distance was not recorded.
    """
    if "distance" not in result.draws:
        raise InvalidArgumentError(f"plot_distance: the draws have no column 'distance': {HOW}.")
    figure = base.new_figure(width, height)
    draw_distance(figure.subplots(), result)
    return base.finish(figure, result, path, width, dpi)


def draw_distance(axes: Axes, result: LLCResult) -> None:
    """A line a chain, and a black one for their mean; or how to record it."""
    title = "distance |w − w*| of each chain, and their mean"
    if "distance" not in result.draws:
        base.say_missing(axes, title, f"The distance from w* was not recorded: {HOW}.")
        return
    draws, colors = healthy_draws(result, "distance"), base.chain_colors(result)
    share = min(1.0, (4 / len(draws)) ** 0.5)
    for chain, row in zip(base.used_chains(result), draws, strict=True):
        axes.plot(row, color=colors[chain], lw=1.0, alpha=0.3 + 0.5 * share)
    axes.plot(draws.mean(axis=0), color="0.1", lw=1.6)
    finite = draws[np.isfinite(draws)]
    if len(finite):
        axes.set_ylim(0, 1.06 * finite.max() or 1.0)
    base.label(axes, title, "draw", "|w − w*|")
    base.whole_numbers(axes)
