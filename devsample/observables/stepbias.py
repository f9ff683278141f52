"""The bias from the step size as something that is measured once a run, after its last draw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from devsample.errors import InvalidArgumentError
from devsample.samplers import Kernel, can_freeze
from devsample.samplers.foreign import ForeignKernel
from devsample.samplers.langevin import OverdampedKernel
from devsample.samplers.sghmc import SGHMCKernel

COST = 15  # steps of the run for one of the rerun with lr, which takes three gradients
LEAST_STEPS = 60


@dataclass(frozen=True)
class StepBias:
    """The step bias, from a short rerun with lr and with lr/2 after each chain's last draw.

    Both go on from the chain's last state, with noise in common and half of the batches in common, two steps
    with lr/2 for one with lr. See ``docs/diagnostics.md``; `LLCResult.diagnose` has what comes of it.

    Args:
        num_steps: steps with lr, ≥ 60, three gradients each (five with ``control_variate``); the first
            third is left out. None: a fifteenth of the chain's steps, burn-in included, which costs a
            fifth of the run's gradients; at least 60.

    Raises:
        InvalidArgumentError: num_steps is no such number.
    """

    num_steps: int | None = None
    name: str = "step_bias"
    columns: tuple[tuple[str, tuple[int, ...]], ...] = ()  # nothing is recorded at draws

    def __post_init__(self) -> None:
        steps = self.num_steps
        if steps is None:
            return
        if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < LEAST_STEPS:
            raise InvalidArgumentError(
                f"StepBias: num_steps: expected an integer ≥ {LEAST_STEPS} or None, got {steps!r}."
            )

    def steps(self, run_steps: int) -> int:
        """Steps with lr after a chain of ``run_steps`` steps."""
        return max(LEAST_STEPS, run_steps // COST) if self.num_steps is None else int(self.num_steps)


def wanted(observables: Iterable[Any]) -> StepBias | None:
    """The step bias, if it is among the observables."""
    return next((one for one in observables if isinstance(one, StepBias)), None)


def check_kernel(kernel: Kernel, num_burnin_steps: int | None = None) -> None:
    """Check that a sampler has a law at lr/2 that the rerun reaches.

    Args:
        kernel: the sampler.
        num_burnin_steps: of the run; None: not known yet, or chosen by the run.

    Raises:
        InvalidArgumentError: it has not.
    """
    kind = kernel.kind.__name__ if isinstance(kernel, ForeignKernel) else type(kernel).__name__
    kind = kind.removesuffix("Kernel")
    if isinstance(kernel, ForeignKernel):
        _refuse(f"{kind} samples nothing, so its steps have no bias")
    if kernel.full_data:
        _refuse(f"{kind} accepts or rejects its steps, so they have no bias")
    if not isinstance(kernel, OverdampedKernel | SGHMCKernel):
        _refuse(
            f"{kind} has a state that changes with lr, so a chain with lr/2 cannot go on from it; run again "
            "with half the lr"
        )
    elif not kernel.noise_level:
        _refuse("with noise_level=0 nothing is sampled")
    if not kernel.adapts:
        return
    if not can_freeze(kernel):
        _refuse(f'{kind} goes on adapting, at lr/2 to something else; take preconditioner="frozen"')
    if num_burnin_steps == 0:
        _refuse(f"{kind} adapts in the first half of burn-in only; give num_burnin_steps")


def check_sampling(observables: Iterable[Any], sampling: str) -> None:
    """Check that the batches of the rerun have the law of the run's.

    Raises:
        InvalidArgumentError: the run reads them in an order.
    """
    if wanted(observables) is not None and sampling != "iid":
        _refuse(
            f'the batches are read in an order ("{sampling}"), which a rerun of half the step does not '
            'share; use LoaderSpec(..., sampling="iid") of an indexed data set'
        )


def _refuse(why: str) -> None:
    remedy = "" if ";" in why else "; leave it out"
    raise InvalidArgumentError(f"observables: 'step_bias': {why}{remedy}.")
