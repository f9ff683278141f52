"""What all pictures share: figures without pyplot, colours, limits, titles, and text in place of a panel."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from devsample.results import LLCResult

# Okabe & Ito's colours, which the colour-blind can tell apart; yellow left out (pale on white).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
VERDICT_COLORS = {"trust": "#1a7f37", "caution": "#9a6700", "reject": "#cf222e"}
LOST_COLOR = "0.6"
MAX_NAMED_CHAINS = 8  # more do not fit a legend


def new_figure(width: float, height: float) -> Figure:
    """A figure of its own, in inches, that can be saved without a display.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib, which is not installed: pip install 'devsample[plots]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def finish(
    figure: Figure, result: LLCResult, path: str | PathLike[str] | None, width: float, dpi: int
) -> Figure:
    """Put the verdict on top, and save the figure if there is a path."""
    figure.suptitle(
        verdict_text(result, columns=int(11 * width)),
        fontsize=11,
        x=0.01,
        ha="left",
        color=VERDICT_COLORS[result.verdict],
    )
    save(figure, path, dpi)
    return figure


def save(figure: Figure, path: str | PathLike[str] | None, dpi: int) -> None:
    """Write the picture, if it is wanted."""
    if path is not None:
        figure.savefig(path, dpi=dpi)


def verdict_text(result: LLCResult, columns: int) -> str:
    """The headline and the first reason, wrapped to so many letters."""
    reasons = result.reasons
    more = f" (+{len(reasons) - 1} more)" if len(reasons) > 1 else ""
    first = [fill(reasons[0] + more, columns)] if reasons else []
    return "\n".join([fill(result.headline, columns), *first])


def fill(text: str, columns: int) -> str:
    """Wrapped lines; a $ is a $ and starts no formula."""
    return textwrap.fill(text, max(columns, 20)).replace("$", r"\$")


def used_chains(result: LLCResult) -> list[int]:
    """Numbers of the chains behind the estimate, in order."""
    return sorted(result.chains.loc[result.chains["llc"].notna(), "chain"])


def chain_colors(result: LLCResult) -> dict[int, str]:
    """The colour of each chain, the same in every picture of a result."""
    return {chain: COLORS[i % len(COLORS)] for i, chain in enumerate(sorted(result.chains["chain"]))}


def limits(values: NDArray[np.float64], *shown: float) -> tuple[float, float]:
    """Room for nearly all values, and for all that must be shown."""
    low, high = np.quantile(values, [0.005, 0.99])
    low, high = min(low, *shown), max(high, *shown)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def label(axes: Axes, title: str, x: str, y: str) -> None:
    """Title and axes' names, in the style of all panels."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)


def whole_numbers(axes: Axes) -> None:
    """Ticks of the x axis at whole numbers: there is no half draw."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def legend_below(axes: Axes) -> None:
    """A legend under the panel, where it hides nothing, in rows of at most 4."""
    number = len(axes.get_legend_handles_labels()[1])
    columns = math.ceil(number / math.ceil(number / 4))
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns, frameon=False)


def say_missing(axes: Axes, title: str, why: str) -> None:
    """A panel that has nothing to show says so."""
    axes.set_title(title, fontsize=10, color="0.5")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_facecolor("0.97")
    axes.spines[:].set_visible(False)
    axes.text(
        0.5, 0.5, fill(why, 36), ha="center", va="center", color="0.45", fontsize=9, transform=axes.transAxes
    )
