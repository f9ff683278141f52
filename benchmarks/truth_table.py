"""The table of docs/truth-table.md, from what `devsample truths --out STEM` wrote.

    python benchmarks/truth_table.py STEM.json [LATER.json ...]

Of a sampler on a case: how far the value found is from the exact one, and the gradients it took; "–" and
the prediction where the rule does not ask for a run. Rows of later files replace those of earlier ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SAMPLERS = ("SGLD", "SGHMC", "SGNHT", "RMSPropSGLD", "AdamSGLD", "MALA", "HMC")


def cell(line: dict[str, Any]) -> str:
    """What a sampler did on a case."""
    if "passed" not in line:
        return f"– ({line['predicted']:.0e})"
    mark = "" if line["passed"] else " **no**"
    return f"{100 * line['deviation']:+.2f} % ({line['gradients']:.0e}){mark}"


def main() -> None:
    """Print the table."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sys.argv[1:]:
        for line in json.loads(Path(path).read_text(encoding="utf-8")):
            found.setdefault(line["case"], {})[line["sampler"]] = line
    order = {name: number for number, name in enumerate(_names())}
    print("| case | exact | " + " | ".join(SAMPLERS) + " |")
    print("| --- " * (2 + len(SAMPLERS)) + "|")
    for case in sorted(found, key=order.__getitem__):
        lines = found[case]
        exact = next(iter(lines.values()))["exact"]
        print(f"| `{case}` | {exact:.4g} | " + " | ".join(cell(lines[one]) for one in SAMPLERS) + " |")
    done = [one for lines in found.values() for one in lines.values() if "passed" in one]
    print(f"\n{sum(one['passed'] for one in done)} of {len(done)} runs passed.")


def _names() -> list[str]:
    from devsample.testing.cases import all_cases

    return [one.name for one in all_cases()]


if __name__ == "__main__":
    main()
