"""Everything about a result in one figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from devsample.diagnosis import Diagnostics, Measured, Quantity, diagnose, format_time
from devsample.diagnostics import virial_is_off
from devsample.evidence import format_number
from devsample.plots import base
from devsample.plots.chains import draw_chains
from devsample.plots.distance import draw_distance
from devsample.plots.mixing import draw_autocorrelation, draw_ranks
from devsample.plots.traces import draw_llc, draw_loss

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from devsample.results import LLCResult


BURNIN, VIRIAL = "burn-in", "virial (1 is right)"


def dashboard(
    result: LLCResult,
    path: str | PathLike[str] | None = None,
    *,
    width: float = 14.0,
    height: float = 10.5,
    dpi: int = 100,
) -> Figure:
    """Draw all panels in one figure, under a banner in the colour of the verdict.

    The banner (green: trust, brown: caution, red: reject) holds the estimate and the first reason. Below it:
    llc and loss traces (:func:`plot_trace`), the chains' estimates (:func:`plot_chains`), autocorrelation
    (:func:`plot_autocorrelation`), ranks (:func:`plot_ranks`), the distance from w* (:func:`plot_distance`,
    if it was recorded), and the numbers of :func:`devsample.diagnosis.diagnose`. What the draws do not have
    is said in grey.

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
    text = base.verdict_text(result, columns=int(10 * width))
    lines = text.count("\n") + 1
    ratios = [0.15 + 0.23 * lines, height]
    (banner,), (body,) = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios)
    banner.set_facecolor(base.VERDICT_COLORS[result.verdict])
    banner.text(0.012, 0.5, text, color="white", fontsize=12, va="center", weight="bold")
    axes = body.subplot_mosaic(
        [["llc", "llc", "chains"], ["loss", "autocorrelation", "ranks"], ["distance", "numbers", "numbers"]],
        height_ratios=[1.25, 1, 0.9],
    )
    draw_llc(axes["llc"], result)
    draw_chains(axes["chains"], result)
    draw_loss(axes["loss"], result)
    draw_autocorrelation(axes["autocorrelation"], result)
    draw_ranks(axes["ranks"], result)
    draw_distance(axes["distance"], result)
    _draw_numbers(axes["numbers"], result)
    base.save(figure, path, dpi)
    return figure


def _draw_numbers(axes: Axes, result: LLCResult) -> None:
    from matplotlib.transforms import Bbox

    axes.set_axis_off()
    found = diagnose(result)
    cells = _cells(result, found)
    marked = _marked(found)
    half = math.ceil(len(cells) / 2)
    for column, part in enumerate([cells[:half], cells[half:]]):
        table = axes.table(
            cellText=[list(row) for row in part],
            cellLoc="left",
            colWidths=[0.18, 0.31],
            bbox=Bbox.from_bounds(0.51 * column, 0.0, 0.49, len(part) / half),
            edges="horizontal",
        )
        table.auto_set_font_size(False)
        table.set_fontsize(9)
        for (row, position), cell in table.get_celld().items():
            cell.set_edgecolor("0.85")
            plain = "0.1" if position else "0.4"
            off = position and part[row][0] in marked
            cell.get_text().set_color(base.VERDICT_COLORS["reject"] if off else plain)


def _cells(result: LLCResult, found: Diagnostics) -> list[tuple[str, str]]:
    """Names and figures of the table."""
    settings, llc, bias = result.settings, found.quantities["llc"], result.predicted_bias
    return [
        ("estimate", _with_error(result.llc, result.se)),
        (
            "effective draws",
            f"{_figure(result.ess, '.0f')} of {llc.estimate.num_chains * llc.estimate.num_draws}",
        ),
        ("R-hat", _figure(result.rhat, ".2f")),
        ("autocorrelation", _time(llc)),
        ("between chains", _spread(llc)),
        ("drift of the halves", _drift(llc)),
        (BURNIN, _burnin(found)),
        (
            "predicted bias",
            "–" if bias is None else f"{format_number(bias.absolute, 2)} ({100 * bias.relative:.1f} %)",
        ),
        ("below baseline", f"{100 * found.below_baseline:.1f} % of the draws"),
        ("plateau slope", _measured(found.plateau_slope)),
        (VIRIAL, _measured(found.virial) + _off(found.virial)),
        ("descent from w*", "–" if found.descent.missing else f"lowers nβ L by {_measured(found.descent)}"),
        ("L_n(w*)", f"{result.init_loss:.5g}, {settings.get('baseline', '?')} baseline"),
        ("nβ, localization", f"{_setting(settings, 'nbeta')}, {_setting(settings, 'localization')}"),
        ("sampler, lr", f"{settings.get('sampler', '?')}, {_setting(settings, 'lr')}"),
        ("draws every", f"{_steps(found.steps_per_draw)}, after {found.num_burnin_steps}"),
        ("batch", f"{settings.get('batch_size', '?')} of {settings.get('num_samples', '?')} samples"),
    ]


def _with_error(value: float, se: float) -> str:
    return f"{format_number(value, 4)} ± {format_number(se, 2)}"


def _measured(one: Measured) -> str:
    return "not recorded" if one.missing else f"{format_number(one.value, 2)} ± {format_number(one.se, 2)}"


def _off(virial: Measured) -> str:
    off = virial_is_off(virial.value, virial.se)
    return f", too {off}" if off else ""


def _marked(found: Diagnostics) -> set[str]:
    """Names of the figures that are off."""
    off = virial_is_off(found.virial.value, found.virial.se)
    return ({VIRIAL} if off else set()) | ({BURNIN} if off == "low" else set())


def _figure(value: float, style: str) -> str:
    return "–" if math.isnan(value) else format(value, style)


def _time(llc: Quantity) -> str:
    if math.isnan(llc.autocorrelation_time):
        return "–"
    return f"{format_time(llc.autocorrelation_time)} draws = {format_time(llc.autocorrelation_steps)} steps"


def _drift(llc: Quantity) -> str:
    if math.isnan(llc.drift_z):
        return "–"
    return f"{format_number(llc.drift, 2)} ({format_number(llc.drift_z, 2)} standard errors)"


def _burnin(found: Diagnostics) -> str:
    if virial_is_off(found.virial.value, found.virial.se) == "low":
        return "not spread yet, see the virial"
    drop = found.quantities["llc"].burnin.drop
    if drop is None:
        return "not seen to settle"
    steps = found.num_burnin_steps + drop * found.steps_per_draw
    return f"{drop} draws more: {_steps(steps)}" if drop else "enough"


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number != 1)}"


def _spread(llc: Quantity) -> str:
    if math.isnan(llc.spread.sd):
        return "one chain"
    if math.isnan(llc.spread.ratio):
        return f"sd {format_number(llc.spread.sd, 2)}"
    return f"sd {format_number(llc.spread.sd, 2)}, {format_number(llc.spread.ratio, 2)} × as expected"


def _setting(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name)
    return format_number(value, 4) if isinstance(value, (int, float)) else "–"
