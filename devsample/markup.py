"""A result as HTML for a notebook: nothing but text and inline styles, light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import shorten
from typing import TYPE_CHECKING

from devsample.summary import chain_cells, estimate_text, sample_text, settings_lines

if TYPE_CHECKING:
    from devsample.results import LLCResult

# White text on them reads well (contrast above 4.5), whatever the colour of the page.
COLORS = {"trust": "#1a7f37", "caution": "#9a6700", "reject": "#cf222e"}

# Colours of the page are inherited; lines are a grey that shows on white and on black.
_LINE = "1px solid rgba(128,128,128,.45)"
_BOX = f"border:{_LINE};border-radius:6px;padding:.7em 1em;max-width:60em;line-height:1.4;color:inherit"
_BADGE = (
    "color:#fff;border-radius:4px;padding:.15em .6em;font-weight:600;margin-right:.7em;display:inline-block"
)
_CELL = (
    "padding:.15em .8em;border:0;background:transparent;color:inherit;font-size:inherit;vertical-align:top"
)

_LONGEST_MESSAGE = 200


def render_html(result: LLCResult) -> str:
    """Verdict, estimate, reasons, table of chains, settings and provenance."""
    badge = f"{_BADGE};background:{COLORS[result.verdict]}"
    parts = [
        f'<div class="devsample-result" style="{_BOX}">',
        f'<div><span style="{badge}">{escape(result.verdict)}</span>',
        f'<span style="font-size:1.25em">λ̂ = <b>{escape(estimate_text(result))}</b></span></div>',
        f'<div style="opacity:.75;margin:.3em 0">{escape(sample_text(result))}</div>',
        _reasons(result.reasons),
        _chains(result),
        _details("settings", list(settings_lines(result))),
        _details("provenance", _provenance(result)),
        "</div>",
    ]
    return "\n".join(part for part in parts if part)


def _reasons(reasons: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f'<ul style="margin:.5em 0;padding-left:1.4em">{items}</ul>' if items else ""


def _chains(result: LLCResult) -> str:
    (head, *rows, total), hidden = chain_cells(result)
    wide = f'colspan="{len(head)}" style="{_CELL};text-align:left"'
    more = [f"<tr><td {wide}>{hidden} more chains in .chains</td></tr>"] if hidden else []
    body = [_row((*row[:-1], shorten(row[-1], _LONGEST_MESSAGE, placeholder=" …"))) for row in rows]
    table = f'style="border-collapse:collapse;margin:.6em 0;font-variant-numeric:tabular-nums;{_CELL}"'
    return "".join(
        [
            f"<table {table}><thead>{_row(head, 'th')}</thead><tbody>",
            *body,
            *more,
            _row(total, style=f"border-top:{_LINE};font-weight:600"),
            "</tbody></table>",
        ]
    )


def _row(cells: Sequence[str], tag: str = "td", style: str = "") -> str:
    last = len(cells) - 1
    texts = []
    for number, cell in enumerate(cells):
        line = f";border-bottom:{_LINE};white-space:nowrap" if tag == "th" else ""
        align = "left" if number == last else "right"
        texts.append(f'<{tag} style="{_CELL};text-align:{align}{line}">{escape(cell)}</{tag}>')
    return f'<tr style="background:transparent;{style}">{"".join(texts)}</tr>'


def _details(name: str, lines: Sequence[tuple[str, str]]) -> str:
    if not lines:
        return ""
    rows = "".join(
        f'<tr style="background:transparent">'
        f'<td style="{_CELL};text-align:left;white-space:nowrap">{escape(key)}</td>'
        f'<td style="{_CELL};text-align:left;overflow-wrap:anywhere">{escape(text)}</td></tr>'
        for key, text in lines
    )
    table = f'<table style="border-collapse:collapse;{_CELL}"><tbody>{rows}</tbody></table>'
    return f'<details><summary style="cursor:pointer">{escape(name)}</summary>{table}</details>'


def _provenance(result: LLCResult) -> list[tuple[str, str]]:
    known = result.provenance
    lines = [("started", str(known["started"]))] if known.get("started") else []
    versions = known.get("versions") or {}
    if versions:
        lines.append(("versions", ", ".join(f"{name} {value}" for name, value in versions.items())))
    for name, value in (known.get("fingerprints") or {}).items():
        lines.append((name, "unknown" if value is None else f"sha256 {value}"))
    if known.get("seconds") is not None:
        spent = f"{known['seconds']:.1f} s; chains computed {known.get('device_seconds') or 0:.1f} s"
        lines.append(("time", spent))
    if known.get("gradients") is not None:
        size = known.get("samples_per_gradient")
        of = f" of {size} samples" if size else ""
        lines.append(("gradients", f"{known['gradients']}{of}, and {known.get('forwards')} forward passes"))
    if known.get("runs"):
        lines.append(("merged", f"{len(known['runs'])} runs; see .provenance['runs']"))
    return lines
