"""Pictures of a result. Figures are made directly, so pyplot and its state are never touched."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from os import PathLike

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from devsample.results import LLCResult

__all__ = ["plot_trace"]

# Okabe & Ito's colours, which the colour-blind can tell apart; yellow left out (pale on white).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
VERDICT_COLORS = {"trust": "#1a7f37", "caution": "#9a6700", "reject": "#cf222e"}
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


def plot_trace(
    result: LLCResult,
    path: str | PathLike[str] | None = None,
    *,
    width: float = 11.0,
    height: float = 5.0,
    dpi: int = 120,
) -> Figure:
    """Draw the llc and the loss of every chain against the draws.

    Left: nβ (loss − baseline) of each draw, faint, each chain's running mean over it, and the
    estimate with ± 2 standard errors as a band. Right: the running mean of the loss of each chain
    and of its baseline. Chains that are left out are dashed and grey, with a cross where they
    end; the axes are scaled to the others. The verdict and the first reason stand above.

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
    figure = new_figure(width, height)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    _draw_llc(left, result)
    _draw_loss(right, result)
    title = _title(result, columns=int(11 * width))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", color=VERDICT_COLORS[result.verdict])
    if path is not None:
        figure.savefig(path, dpi=dpi)
    return figure


def _title(result: LLCResult, columns: int) -> str:
    reasons = result.reasons
    more = f" (+{len(reasons) - 1} more)" if len(reasons) > 1 else ""
    first = [textwrap.fill(reasons[0] + more, columns)] if reasons else []
    return "\n".join([result.headline, *first])


def _draw_llc(axes: Axes, result: LLCResult) -> None:
    used = result.draws[result.draws["chain"].isin(_used_chains(result))]
    estimate, error = result.llc, 2 * np.nan_to_num(result.se)
    axes.axhspan(estimate - error, estimate + error, color="0.2", alpha=0.18, lw=0, zorder=1)
    axes.axhline(estimate, color="0.1", lw=1.2, zorder=4, label="estimate ± 2 standard errors")
    _draw_chains(axes, result, "llc")
    axes.set_ylim(_limits(used["llc"].to_numpy(np.float64), estimate - error, estimate + error))
    axes.set_title("learning coefficient: draws, and running mean of each chain", fontsize=10)
    _label(axes, "nβ (loss − baseline)")


def _draw_loss(axes: Axes, result: LLCResult) -> None:
    used = result.draws[result.draws["chain"].isin(_used_chains(result))]
    _draw_chains(axes, result, "loss", named=False)
    baseline = used.groupby("draw")["baseline"].mean()
    running = baseline.expanding().mean()
    axes.plot(
        running.index,
        running,
        color="0.1",
        lw=1.4,
        ls=(0, (5, 2)),
        zorder=4,
        label="at w* (baseline)",
    )
    loss = used["loss"].to_numpy(np.float64)
    axes.set_ylim(_limits(loss, running.min(), running.max()))
    axes.set_title("loss of each chain and at w*, likewise", fontsize=10)
    _label(axes, "loss")


def _draw_chains(axes: Axes, result: LLCResult, column: str, *, named: bool = True) -> None:
    """One faint line of draws and one strong line of running means per chain."""
    used = _used_chains(result)
    status = dict(zip(result.chains["chain"], result.chains["status"], strict=True))
    named = named and len(used) <= MAX_NAMED_CHAINS
    alpha = 0.25 * min(1.0, (4 / len(used)) ** 0.5)
    for number, (chain, rows) in enumerate(result.draws.groupby("chain")):
        draws, values = _finite(rows, column)
        thin = slice(None, None, max(1, len(draws) // 2000))
        if chain not in used:
            name = f"chain {chain}: {status[chain]}" if column == "llc" else None
            axes.plot(draws[thin], values[thin], color="0.6", lw=0.8, ls="--", zorder=2, label=name)
            top = axes.get_xaxis_transform()  # its last loss may be far outside the axes
            axes.plot(draws[-1:], [0.98], "x", color="0.3", transform=top, zorder=5)
            continue
        color = COLORS[number % len(COLORS)]
        axes.plot(draws[thin], values[thin], color=color, lw=0.5, alpha=alpha, zorder=2)
        running = np.cumsum(values) / np.arange(1, len(values) + 1)
        name = f"chain {chain}" if named else None
        axes.plot(draws[thin], running[thin], color=color, lw=1.5, zorder=3, label=name)


def _used_chains(result: LLCResult) -> set[int]:
    return set(result.chains.loc[result.chains["llc"].notna(), "chain"])


def _finite(rows: pd.DataFrame, column: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    values = rows[column].to_numpy(np.float64)
    finite = np.isfinite(values)
    return rows["draw"].to_numpy(np.int64)[finite], values[finite]


def _limits(values: NDArray[np.float64], *shown: float) -> tuple[float, float]:
    """Room for nearly all values, and for all that must be shown."""
    low, high = np.quantile(values, [0.002, 0.998])
    low, high = min(low, *shown), max(high, *shown)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _label(axes: Axes, name: str) -> None:
    axes.set_xlabel("draw")
    axes.set_ylabel(name)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, frameon=False)
