"""A progress bar over the steps of all chains."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from devsample.types import Event


class Progress:
    """Shows steps done and the estimate so far, on standard error, from the chains' events.

    Args:
        total: steps of all chains.
        show: whether anything is shown.
    """

    def __init__(self, total: int, show: bool) -> None:
        self._bar: Any = _bar(total) if show else None
        self._steps: dict[int, int] = {}
        self._sum, self._count = 0.0, 0

    def __call__(self, event: Event) -> None:
        """Take one event in."""
        if event.kind == "started":
            self.advance(event.chain, 0)
        elif event.kind == "progress":
            self.advance(event.chain, event.step)

    def draws(self, values: np.ndarray) -> None:
        """Take the llc of new draws into the running mean."""
        finite = values[np.isfinite(values)]
        self._sum += float(finite.sum())
        self._count += len(finite)
        if self._bar is not None and self._count:
            self._bar.set_postfix_str(f"llc {self._sum / self._count:.3g}", refresh=False)

    def advance(self, chain: int, step: int) -> None:
        """A chain has made ``step`` steps; fewer than before if it was started again."""
        if self._bar is not None:
            self._bar.update(step - self._steps.get(chain, 0))
        self._steps[chain] = step

    def extend(self, total: int) -> None:
        """There are to be ``total`` steps of all chains."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.refresh()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(total: int) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that outlives the bar

    return Bar(total=total, unit="step", desc="sampling", dynamic_ncols=True, mininterval=0.3)
