"""A progress bar over the steps of all chains."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from devsample.types import Event


class Progress:
    """Shows steps done, chains at work and the estimate so far, from the chains' events.

    Args:
        total: steps of all chains.
        nbeta: only to show.
        show: whether anything is shown.
    """

    def __init__(self, total: int, show: bool) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(total=total, disable=not show, unit="step", desc="sampling", dynamic_ncols=True)
        self._steps: dict[int, int] = {}
        self._sum, self._count = 0.0, 0

    def __call__(self, event: Event) -> None:
        """Take one event in."""
        if event.kind == "started":
            self._advance(event.chain, 0)
        elif event.kind == "progress":
            self._advance(event.chain, event.step)

    def draws(self, values: Any) -> None:
        """Take the llc of new draws into the running mean."""
        self._sum += float(values.sum())
        self._count += len(values)
        if self._count:
            self._bar.set_postfix_str(f"llc {self._sum / self._count:.3g}", refresh=False)

    def finish(self, chain: int, steps: int) -> None:
        """A chain is over."""
        self._advance(chain, steps)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def _advance(self, chain: int, step: int) -> None:
        self._bar.update(step - self._steps.get(chain, 0))
        self._steps[chain] = step
