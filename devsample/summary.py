"""A result as text for a terminal of 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from devsample.diagnostics import Description
from devsample.verdict import format_number

if TYPE_CHECKING:
    from devsample.results import LLCResult

WIDTH = 80
MAX_CHAIN_ROWS = 20


def headline(result: LLCResult) -> str:
    """The verdict and the estimate in one sentence."""
    return f"{result.verdict}: λ̂ = {estimate_text(result)} ({sample_text(result)})."


def estimate_text(result: LLCResult) -> str:
    """Estimate ± standard error, with two digits of the error."""
    estimate = result.estimate
    places = _places(estimate)
    return f"{_fixed(estimate.mean, places)} ± {_fixed(estimate.se, places)}"


def sample_text(result: LLCResult) -> str:
    """How many chains and draws there are, and how well they mix."""
    estimate, total = result.estimate, len(result.chains)
    used = f"{estimate.num_chains} of {total}" if estimate.num_chains < total else f"{total}"
    low, high = _draws_per_chain(result)
    draws = f"{low}–{high}" if low < high else f"{estimate.num_draws}"
    ess = "–" if math.isnan(estimate.ess) else f"{estimate.ess:.0f}"
    rhat = "–" if math.isnan(estimate.rhat) else f"{estimate.rhat:.2f}"
    return f"{used} chain{'s' * (total > 1)} × {draws} draws, R-hat {rhat}, ESS {ess}"


def _draws_per_chain(result: LLCResult) -> tuple[int, int]:
    """The least and the most draws of a chain that count; they differ in merged results only."""
    if "run" not in result.chains:
        return 0, 0
    used = result.chains[result.chains["llc"].notna()]
    counts = used.groupby("run")["draws"].min()
    return int(counts.min()), int(counts.max())


def short(result: LLCResult) -> str:
    """The verdict, the estimate and the reasons, for a terminal of 80 columns."""
    lines = [_fill(f"<LLCResult {result.headline.rstrip('.')}")]
    return "\n".join([*lines, *(_fill(reason, "  - ") for reason in result.reasons)]) + ">"


def render(result: LLCResult) -> str:
    """Table of chains, the settings that matter, the verdict, and the reasons for it."""
    settings = [_fill(text, f"{name:<14}") for name, text in settings_lines(result)]
    reasons = [_fill(reason, "  - ") for reason in result.reasons]
    blocks = [_summary_table(result), *settings, "", _fill(result.headline), *reasons]
    return "\n".join(blocks)


def _places(estimate: Description) -> int | None:
    """Decimals that show two digits of the standard error; None: too small or large for that."""
    size = estimate.se if estimate.se > 0 else abs(estimate.mean) / 100
    if not 1e-7 < size < 1e7 or abs(estimate.mean) > 1e9:
        return None
    return max(0, 1 - math.floor(math.log10(size)))


def _fixed(value: float, places: int | None) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.4g}" if places is None or abs(value) > 1e9 else f"{value:.{places}f}"


def _fill(text: str, lead: str = "") -> str:
    """Wrap to the terminal, the first line after ``lead`` and the others aligned with it."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary_table(result: LLCResult) -> str:
    cells, hidden = chain_cells(result)
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    room = WIDTH - sum(widths) - 2 * len(widths)
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row[:5], widths, strict=True))
        + "  "
        + textwrap.shorten(row[5], room, placeholder=" …")
        for row in cells
    ]
    rule = "─" * max(len(line) for line in lines)
    more = [f"{hidden} more chains in .chains"] if hidden else []
    return "\n".join([lines[0], rule, *lines[1:-1], *more, rule, lines[-1], ""])


def chain_cells(result: LLCResult) -> tuple[list[tuple[str, ...]], int]:
    """The table of chains as text, its head and the row of all included; and how many are not shown."""
    table, estimate = result.chains, result.estimate
    places = _places(estimate)
    # Of many chains, show those that are left out first, then as many of the others as fit.
    shown = table.loc[table["llc"].notna().sort_values(kind="stable").index[:MAX_CHAIN_ROWS]]
    cells = [("chain", "estimate", "std. error", "draws", "ESS", "status")]
    for row in shown.sort_index().itertuples():
        ess = "–" if math.isnan(row.ess) else f"{row.ess:.0f}"
        status = f"{row.status}: {row.message}" if row.message else row.status
        numbers = (_fixed(row.llc, places), _fixed(row.se, places), str(row.draws), ess)
        cells.append((str(row.chain), *numbers, " ".join(status.split())))
    ess = "–" if math.isnan(estimate.ess) else f"{estimate.ess:.0f}"
    draws = estimate.num_chains * estimate.num_draws
    used = f"{estimate.num_chains} of {len(table)} chains"
    numbers = (_fixed(estimate.mean, places), _fixed(estimate.se, places), str(draws), ess)
    return [*cells, ("all", *numbers, used)], len(table) - len(shown)


def settings_lines(result: LLCResult) -> Iterator[tuple[str, str]]:
    """Name and text of the settings that matter, those that are known."""
    known = result.settings

    def number(name: str) -> str:
        value = known.get(name)
        return format_number(value, 4) if isinstance(value, (int, float)) else str(value)

    if "nbeta" in known:
        yield "nbeta", number("nbeta") + _nbeta_rule(known)
    if "lr" in known:
        noise = f", {known['integrator']} noise" if known.get("integrator") == "averaged" else ""
        noise = ", Euler steps" if known.get("integrator") == "euler" else noise
        chosen = ", settings chosen automatically" if known.get("auto") else ""
        yield "lr", f"{number('lr')} ({known.get('sampler', 'SGLD')}{noise}{chosen})"
    if "localization" in known:
        yield "localization", f"{number('localization')}, weight_decay {number('weight_decay')}"
    if "batch_size" in known:
        accumulated = known.get("grad_accum_steps", 1)
        times = f" × {accumulated} accumulated" if accumulated != 1 else ""
        size = f"{known['batch_size']}{times} of {known.get('num_samples', '?')} samples"
        yield "batch", f"{size}, {known.get('sampling', 'iid')}"
    error = result.init_loss_se
    spread = f" ± {format_number(error, 2)}" if error else ""
    averaged = f", averaged by {known['averaged_by']}" if "averaged_by" in known else ""
    yield "baseline", f"{known.get('baseline', '?')}, L_n(w*) = {result.init_loss:.5g}{spread}{averaged}"
    if "num_burnin_steps" in known:
        between = known.get("num_steps_bw_draws", 1)
        every = "a draw every step" if between == 1 else f"a draw every {between} steps"
        yield (
            "steps",
            f"burn-in {known['num_burnin_steps']}, then {every}; seed {known.get('seed')}",
        )


def _nbeta_rule(known: Mapping[str, Any]) -> str:
    rule = known.get("nbeta_rule", "given")
    if rule == "batch":
        return " = B/ln B of the batch size B, devinterp's rule"
    if rule != "n/ln n":
        return f" ({rule})"
    batch = known.get("nbeta_batch")
    other = f'; nbeta="batch", devinterp\'s rule: {format_number(batch, 4)}' if batch else ""
    return f" = n/ln n, n = {known.get('num_samples', '?')}{other}"
