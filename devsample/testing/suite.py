"""The truth suite: a sampler on a case, with a step size by rule, held against the exact value."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from devsample.errors import InvalidArgumentError
from devsample.samplers import SAMPLERS, Kernel, Sampler
from devsample.samplers.hmc import HMCKernel
from devsample.testing.cases import Case, all_cases
from devsample.testing.driver import SHORT, Drive, Ensemble, rungs, settle

__all__ = ["HEADER", "REQUIRED", "Outcome", "Plan", "plan", "row", "run", "table"]

TARGET_SE = 0.0038  # relative; a sampler passes with at most LARGEST_SE
LARGEST_SE = 0.004
LARGEST_Z = 4.0
_DOUBTFUL = 0.75  # of the tolerance
MOST_STEPS = 1e8  # chain-steps that a sampler may be asked for
MOST_GRADIENTS = 1e10  # that HMC may take
STEP, LARGEST_STEP = 0.4, 1.0  # ε·a where most of L comes from, and at most
STEP_BIAS = 0.002  # relative, by the first-order law, of samplers that have one
REQUIRED = ("SGLD", "SGHMC", "SGNHT", "RMSPropSGLD")
"""Samplers that must pass the quadratic cases, linear regression, and reduced rank with λ ≥ 1, nβ ≤ 1e4."""

_FEWEST_ROWS, _ROWS, _ENTRIES = 64, 512, 4096  # chains side by side, and their entries
_FEWEST_PILOTS = 128
_DRAWS_PER_ROW = 16  # independent draws that each row must make itself
_DRAWS_PER_ROUND, _LOOK_EVERY = 256, 8
_BURNIN = 1 / 32  # of a round
_SHORTEST_BURNIN = 2000  # steps: time for a preconditioner or a thermostat to adapt
_FEW_RUNGS = 3  # with more, stiffness varies so much that L depends on what only long trajectories change
_FEWEST_TRANSITIONS = 10  # of HMC and MALA before the first draw
_SEED = 20240917


@dataclass(frozen=True)
class Plan:
    """How a sampler is to run a case, by rule.

    Attributes:
        case: the case.
        sampler: name of the sampler.
        kernel: its update with all values.
        rows: chains side by side.
        round: steps in which slow directions relax (of MALA: four times that; of HMC: transitions in
            which the rarest step size has its turn 32 times).
        predicted: chain-steps (of a reference sampler: gradients) until the standard error is reached.
        rungs: HMC only: the kernel at several step sizes, see `devsample.testing.driver.rungs`.
    """

    case: Case
    sampler: str
    kernel: Kernel
    rows: int
    round: int
    predicted: float
    rungs: tuple[HMCKernel, ...] = ()

    @property
    def is_required(self) -> bool:
        """Whether the sampler must pass the case."""
        limit = MOST_GRADIENTS if isinstance(self.kernel, HMCKernel) else MOST_STEPS
        return self.predicted <= limit or (self.sampler in REQUIRED and is_basic(self.case))


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        plan: what was run.
        value: nβ (E[L] − L(w*)), the mean over chains and draws.
        se: standard error, from the spread of the chains' means.
        steps: chain-steps made, burn-in included.
        gradients: gradients of one chain evaluated, burn-in included.
        seconds: wall time.
    """

    plan: Plan
    value: float
    se: float
    steps: int
    gradients: int
    seconds: float

    @property
    def z(self) -> float:
        """Deviation in standard errors, that of a simulated expected value included."""
        case = self.plan.case
        return (self.value - case.expected) / math.hypot(self.se, case.standard_error)

    @property
    def deviation(self) -> float:
        """Relative to the exact value."""
        return self.value / self.plan.case.expected - 1

    @property
    def passed(self) -> bool:
        """|z| < 4, standard error ≤ 0.4 %, deviation within the case's tolerance."""
        case = self.plan.case
        precise = self.se <= LARGEST_SE * abs(case.expected)
        return precise and abs(self.z) < LARGEST_Z and abs(self.deviation) <= case.tolerance


def is_basic(case: Case) -> bool:
    """Quadratic, linear regression, or reduced rank with λ ≥ 1 and nβ ≤ 1e4."""
    if case.kind.startswith(("quadratic", "linear_regression")):
        return True
    return case.kind.startswith("rrr") and case.expected >= 1 and case.nbeta <= 1e4


@functools.lru_cache(maxsize=256)
def ensemble(name: str) -> Ensemble:
    """The pilot of a case, by name."""
    (case,) = [one for one in all_cases() if one.name == name]
    rows = int(max(_FEWEST_PILOTS, min(8 * _ROWS, 2 * _ENTRIES / case.num_parameters)))
    return settle(case.potential, nbeta=case.nbeta, gamma=case.gamma, box=case.box, seed=_SEED, rows=rows)


def plan(case: Case, sampler: str | type[Sampler], **options: Any) -> Plan:
    r"""Step size, length and cost by rule.

    * :math:`ε G a ≤ 0.4` for the rows from which nine tenths of L come, and ≤ 1 for all: a is the largest
      precision nβ h + γ where a row of the pilot is, G the largest factor by which the sampler scales a
      step. Beyond, steps are biased where the loss is not quadratic; with momentum twice as much, so half
      of 0.4 for those. A sampler whose steps have a
      first-order bias takes at most the ε at which the law :math:`b\,ε/8\;nβ\,E\,\mathrm{tr}\,∇^2 L` is
      0.2 % of the value. MALA: ≤ 1 for all, since it neither enters nor leaves a region in which it is
      unstable. HMC takes the step sizes of `devsample.testing.driver.rungs` in turn, at random.
    * A draw is taken as independent after :math:`2/(ε s G a_{min}) + s` steps: a_min the smallest precision
      that there is (γ; in a box :math:`(π/2r)^2`), s the sampler's speed. HMC: after a
      trajectory of 1.5/√a_min; with up to three step sizes half of the gradients go into others, a
      sixteenth as long.
    * One draw has the relative standard deviation 1/√λ, so 0.38 % takes 1/(λ 0.0038²) draws.
    * So many chains that each must make 16 of these draws itself; 64 to 512, fewer for many parameters.
      HMC and MALA: as many as the pilot has, up to 4096.
    """
    name = sampler if isinstance(sampler, str) else sampler.__name__
    kind = _sampler(name) if isinstance(sampler, str) else sampler
    found = ensemble(case.name)
    slowest = _slowest(case, found)
    given = {"nbeta": case.nbeta, "localization": case.gamma, "bounding_box_size": case.box} | options
    trial = kind.kernel(lr=1.0, **given)
    typical = STEP if trial.speed == 1 else STEP / 2
    lr = min(typical / found.typical, LARGEST_STEP / found.largest) / trial.scale
    draws = 1 / (max(_size(case), 0.05) * TARGET_SE**2)
    if trial.full_data:
        rows = max(_FEWEST_ROWS, int(min(len(found.position), draws / 4)))
        scales = (found.typical, found.largest, found.trace, slowest)
        return _reference_plan(case, name, kind, given | {"adapt": False}, rows, draws, scales)
    if trial.step_bias:
        law = trial.step_bias * trial.scale * found.trace / 8
        lr = min(lr, STEP_BIAS * abs(case.expected) / law)
    rows = int(min(_ENTRIES / case.num_parameters, _ROWS, draws / _DRAWS_PER_ROW))
    rows = max(_FEWEST_ROWS, rows)
    kernel = kind.kernel(lr=lr, **given)
    relaxation = 2 / (lr * kernel.speed * trial.scale * slowest) + kernel.speed
    return Plan(case, name, kernel, rows, math.ceil(relaxation), 1.2 * draws * relaxation)


def _reference_plan(
    case: Case,
    name: str,
    kind: type[Sampler],
    given: dict[str, Any],
    rows: int,
    draws: float,
    scales: tuple[float, float, float, float],
) -> Plan:
    """MALA at the smallest of the rungs; HMC at all of them, with long and short trajectories."""
    steps, make = rungs(*scales), kind.kernel
    kernel = make(lr=steps[-1][0], **given)
    if not isinstance(kernel, HMCKernel):
        relaxation = max(2.0, 2 / (steps[-1][0] * scales[-1]))
        return Plan(case, name, kernel, rows, math.ceil(4 * relaxation), 1.2 * draws * relaxation)
    cost = 1.2 * draws * 2 * len(steps) / sum(1 / length for _, length in steps)
    if len(steps) <= _FEW_RUNGS:
        steps += [(lr, math.ceil(length * SHORT)) for lr, length in steps]
    kernels = tuple(dataclasses.replace(kernel, lr=lr, num_leapfrog_steps=length) for lr, length in steps)
    rarest = max(length for _, length in steps) * sum(1 / length for _, length in steps)
    return Plan(case, name, kernels[0], rows, math.ceil(32 * rarest), cost, kernels)


def run(plan: Plan, *, most: float | None = None, control: Callable[[Drive], None] | None = None) -> Outcome:
    """Run a plan until the standard error is reached.

    The chains start where the pilot has ended, as draws of their law, and burn in for a 32nd of a round,
    2000 steps at least (MALA: ten transitions; HMC: one turn of the rarest step size). Draws go on until
    the standard error is reached, for a 32nd of a round at least: chains that stand still never reach it,
    for there are too few of them. A value off by more than three quarters of what is allowed, as one of a
    right sampler in twenty is by chance, is judged with half the standard error.

    Args:
        plan: what to run.
        most: chain-steps (of a reference sampler: gradients) after burn-in at which it ends in any case;
            default: 16 times the prediction.
        control: called with the chains before the first step.
    """
    started = time.monotonic()
    case = plan.case
    found = ensemble(case.name)
    position = found.position[: plan.rows]
    drive = Drive(case.potential, plan.kernel, position, seed=_SEED + 1, rungs=plan.rungs)
    if control is not None:
        control(drive)
    fewest = _FEWEST_TRANSITIONS if plan.kernel.full_data else _SHORTEST_BURNIN
    burnin = max(round(plan.round * _BURNIN), fewest)
    drive.advance(burnin // 2)
    drive.freeze()
    drive.advance(burnin - burnin // 2)
    burnt = drive.gradients if plan.kernel.full_data else drive.step
    most = most or max(16 * plan.predicted, 8.0 * plan.round * plan.rows)
    draws = min(_DRAWS_PER_ROUND, plan.round)
    between = max(1, plan.round // draws)
    total, number = torch.zeros(plan.rows, dtype=torch.float64), 0
    target = TARGET_SE
    while True:
        drive.advance(between)
        total += drive.losses()
        number += 1
        if number % _LOOK_EVERY:
            continue
        means = case.nbeta * total / number
        value, se = float(means.mean()), float(means.std()) / math.sqrt(plan.rows)
        enough = se <= target * abs(case.expected)
        cost = drive.gradients if plan.kernel.full_data else drive.step
        if (cost - burnt) * plan.rows >= most or not math.isfinite(value):
            break
        if enough and target == TARGET_SE and abs(value / case.expected - 1) > _DOUBTFUL * case.tolerance:
            target, most = TARGET_SE / 2, 4 * most
        elif enough:
            break
    steps, gradients = drive.step * plan.rows, drive.gradients * plan.rows
    return Outcome(plan, value, se, steps, gradients, time.monotonic() - started)


HEADER = (
    "| case | sampler | exact | found | se | z | off | passed | predicted | gradients | seconds |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
)


def table(results: Sequence[Outcome | Plan]) -> str:
    """Sampler by case, one line each: prediction, value, error bar, verdict and cost."""
    return "\n".join([*HEADER, *map(row, results)])


def row(result: Outcome | Plan) -> str:
    """A line of `table`; of a plan that was not run, its prediction only."""
    how = result.plan if isinstance(result, Outcome) else result
    start = f"| {how.case.name} | {how.sampler} | {how.case.expected:.4g} |"
    if isinstance(result, Plan):
        return f"{start} | | | | not run | {how.predicted:.1e} | | |"
    relative = result.se / abs(how.case.expected)
    return (
        f"{start} {result.value:.4g} | {100 * relative:.2f} % | {result.z:+.1f} "
        f"| {100 * result.deviation:+.2f} % | {'yes' if result.passed else 'no'} "
        f"| {how.predicted:.1e} | {result.gradients:.1e} | {result.seconds:.0f} |"
    )


def _sampler(name: str) -> type[Sampler]:
    if name not in SAMPLERS:
        raise InvalidArgumentError(f"sampler: {name!r} is none of {', '.join(SAMPLERS)}.")
    return SAMPLERS[name]


def _size(case: Case) -> float:
    """λ as it sets the spread of a draw."""
    return case.asymptotic_lambda or abs(case.expected)


def _slowest(case: Case, found: Ensemble) -> float:
    if case.gamma:
        return case.gamma
    if case.box:
        return (math.pi / (2 * case.box)) ** 2
    return found.trace / case.num_parameters
