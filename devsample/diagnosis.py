"""What can be asked of the draws of a result, in one table: `diagnose(result)`.

The verdict names what is wrong; this shows the figures, of the llc and of every other column of the draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from devsample.autocorrelation import Spread, autocorrelation_time, chain_spread
from devsample.diagnostics import Description, Draws, align, describe, drift, virial_is_off
from devsample.evidence import descent_of, format_number
from devsample.settling import BurninAdvice, burnin_advice

if TYPE_CHECKING:
    from devsample.results import LLCResult

__all__ = [
    "Diagnostics",
    "Measured",
    "Quantity",
    "below_baseline",
    "diagnose",
    "healthy_draws",
    "plateau_slope",
    "quantity",
    "virial",
]

NO_QUANTITY = frozenset({"chain", "draw", "step", "loss_b", "baseline_b", "run", "source_chain"})
SECOND_BATCH = ("loss_b", "baseline_b")
FULL_DATA = ("HMC", "MALA")  # samplers that read the loss on all data


@dataclass(frozen=True)
class Quantity:
    """One column of the draws of the healthy chains, as a mean and what can go wrong with it.

    Attributes:
        estimate: mean, standard error, effective draws, R-hat: :func:`devsample.diagnostics.describe`.
        autocorrelation_time: in draws, :func:`devsample.autocorrelation.autocorrelation_time`.
        autocorrelation_steps: the same in steps.
        spread: of the chain means, :func:`devsample.autocorrelation.chain_spread`.
        drift: second half less first, :func:`devsample.diagnostics.drift`.
        drift_z: the same in standard errors.
        burnin: draws to leave out, :func:`devsample.settling.burnin_advice`.
    """

    estimate: Description
    autocorrelation_time: float
    autocorrelation_steps: float
    spread: Spread
    drift: float
    drift_z: float
    burnin: BurninAdvice


@dataclass(frozen=True)
class Measured:
    """A number with its standard error, or the reason why there is none.

    Attributes:
        value: NaN if it is missing.
        se: Monte Carlo standard error; NaN if it is missing.
        missing: why, and what to do to have it; empty if it is there.
    """

    value: float
    se: float
    missing: str = ""


@dataclass(frozen=True)
class Diagnostics:
    """The figures behind a verdict; ``print`` shows them as a table.

    Attributes:
        quantities: by column of the draws: ``"llc"``, ``"loss"``, ``"baseline"`` and every observable with
            a finite number at each draw.
        below_baseline: share of the draws whose loss is below that at w*, see :func:`below_baseline`.
        plateau_slope: dλ̂/d ln nβ, see :func:`plateau_slope`.
        virial: E[(w − w*)·∇U]/d, see :func:`virial`.
        step_bias: bias of λ̂ from the step size, from chains with lr/2: `devsample.measured.measured_bias`.
        descent: by how much one step of steepest descent from w* lowers nβ L_n, with a standard error; see
            `devsample.descent.Descent`.
        num_chains: chains in use.
        num_draws: draws of each that count.
        steps_per_draw: steps from draw to draw.
        num_burnin_steps: steps before the first draw.
    """

    quantities: Mapping[str, Quantity]
    below_baseline: float
    plateau_slope: Measured
    virial: Measured
    descent: Measured
    num_chains: int
    num_draws: int
    steps_per_draw: int
    num_burnin_steps: int
    step_bias: Measured = Measured(math.nan, math.nan, "not measured")

    def __str__(self) -> str:
        return _render(self)


def diagnose(result: LLCResult) -> Diagnostics:
    """Compute every diagnostic of a result, from the draws of its healthy chains.

    Args:
        result: of a run; nothing is sampled again.

    Returns:
        The figures, with NaN or a reason where the draws do not have them.
    """
    steps = int(result.settings.get("num_steps_bw_draws", 1))
    nbeta = float(result.settings.get("nbeta", math.nan))
    columns = {name: healthy_draws(result, name) for name in _numeric(result)}
    pairs = columns
    if result.settings.get("sampler") in FULL_DATA:  # their losses have no sampling noise to be rid of
        pairs = columns | {"loss_b": columns["loss"], "baseline_b": columns["baseline"]}
    return Diagnostics(
        quantities={
            name: quantity(draws, steps)
            for name, draws in columns.items()
            if name not in NO_QUANTITY and np.isfinite(draws).all()
        },
        below_baseline=below_baseline(columns["loss"], columns["baseline"]),
        plateau_slope=plateau_slope(pairs, nbeta),
        virial=virial(columns),
        descent=_descent(result.settings),
        num_chains=result.estimate.num_chains,
        num_draws=result.estimate.num_draws,
        steps_per_draw=steps,
        num_burnin_steps=int(result.settings.get("num_burnin_steps", 0)),
        step_bias=step_bias(result),
    )


def healthy_draws(result: LLCResult, column: str) -> Draws:
    """A column of the draws of the chains in use, cut to the draws that all of them have.

    Args:
        result: of a run.
        column: of ``result.draws``, numeric.

    Returns:
        Shape (num_chains, num_draws), float64; rows in the order of the chains' numbers.
    """
    table = result.draws
    used = np.sort(result.chains.loc[result.chains["llc"].notna(), "chain"].to_numpy())
    rows = table[table["chain"].isin(used)].groupby("chain", sort=True)[column]
    return align([values.to_numpy(np.float64) for _, values in rows])


def quantity(draws: Draws, steps_per_draw: int = 1) -> Quantity:
    """All figures of one column.

    Args:
        draws: shape (num_chains, num_draws), finite, of healthy chains.
        steps_per_draw: steps from draw to draw.
    """
    time = autocorrelation_time(draws)
    difference, z = drift(draws)
    return Quantity(
        estimate=describe(draws),
        autocorrelation_time=time,
        autocorrelation_steps=time * steps_per_draw,
        spread=chain_spread(draws),
        drift=difference,
        drift_z=z,
        burnin=burnin_advice(draws),
    )


def below_baseline(loss: Draws, baseline: Draws) -> float:
    """Share of the draws whose loss is below that at w*.

    Loss and baseline are those of one minibatch, as they were recorded, so that some draws lie below by
    chance; of a w* that is a minimum fewer do than lie above.

    Args:
        loss: shape (num_chains, num_draws).
        baseline: same shape.

    >>> below_baseline(np.array([[0.3, 0.1]]), np.array([[0.2, 0.2]]))
    0.5
    """
    return float(np.mean(loss < baseline))


def plateau_slope(columns: Mapping[str, Draws], nbeta: float) -> Measured:
    r"""How the estimate would change with nβ: a plateau has slope 0.

    .. math:: \frac{d\hat\lambda}{d \ln n\beta} = \hat\lambda - (n\beta)^2 \, \mathrm{Var}(L_n(w))
              = \hat\lambda - (n\beta)^2 \, \mathrm{Cov}(\ell_a - b_a, \ell_b - b_b)

    Var is that of the loss over all data, at fixed localization. The variance of minibatch losses would hold
    their sampling noise as well; that of two independent batches a and b, read at the same w, has nothing in
    common, so their covariance over the draws does not hold it.

    Args:
        columns: of the draws, each (num_chains, num_draws): ``loss``, ``baseline``, ``llc``, and ``loss_b``
            and ``baseline_b`` of a second batch.
        nbeta: nβ.

    Returns:
        The slope and its standard error, that of the mean of
        :math:`n\beta\, p_a - \tfrac{N}{N-1} (n\beta)^2 (p_a - \bar p_a)(p_b - \bar p_b)` over the draws, with
        p = ℓ − b and N the effective draws.

    References:
        The derivative of an expectation in an exponential family with respect to its parameter: Watanabe
        (2013), A widely applicable Bayesian information criterion, JMLR 14, for the same step in WBIC.
    """
    if not set(SECOND_BATCH) <= columns.keys():
        return _no('needs a second batch at each draw: pass observables=("second_batch",) to the run')
    first = nbeta * (columns["loss"] - columns["baseline"])
    second = nbeta * (columns["loss_b"] - columns["baseline_b"])
    if not np.isfinite(first).all() or not np.isfinite(second).all():
        return _no("a loss of the second batch, or nβ, is not finite")
    ess = describe(first).ess
    unbiased = ess / (ess - 1) if ess > 2 else 1.0  # products about the draws' own means
    products = (first - first.mean()) * (second - second.mean())
    found = describe(columns["llc"] - unbiased * products)
    return Measured(found.mean, found.se)


def virial(columns: Mapping[str, Draws]) -> Measured:
    r"""Whether the draws obey the virial theorem, which every exact sample does with 1.

    .. math:: \frac{1}{d} \, E[(w - w^*) \cdot \nabla U(w)] = 1,
              \qquad U = n\beta L_n(w) + \tfrac{\gamma}{2} |w - w^*|^2

    It holds for every U that grows at infinity (integrate by parts); with ``noise_level`` σ the 1 is σ².
    Below it the chains have not yet spread to where they belong; above it the step is too large, or the
    gradients too noisy.

    Args:
        columns: of the draws, each (num_chains, num_draws); ``virial`` holds (w − w*)·∇U / d at each draw.

    References:
        The equipartition theorem; e.g. Leimkuhler and Matthews (2015), Molecular Dynamics, section 6.1.
    """
    if "virial" not in columns:
        return _no('not recorded: pass observables=("virial",) to the run')
    if not np.isfinite(columns["virial"]).all():
        return _no("a value is not finite")
    found = describe(columns["virial"])
    return Measured(found.mean, found.se)


def step_bias(result: LLCResult) -> Measured:
    """Bias of the estimate from the step size, to first order in lr, from reruns with lr and lr/2.

    Args:
        result: of a run with ``observables=("step_bias",)``.
    """
    found = result.measured_bias
    if found is None:
        return _no('not measured: pass observables=("step_bias",) to the run')
    return Measured(found.value, found.se)


def _descent(settings: Mapping[str, Any]) -> Measured:
    found = descent_of(settings)
    if not found:
        return _no("not measured")
    relative = found["error"] / found["square"] if found["square"] > 0 else 0.0
    return Measured(found["drop"], found["drop"] * relative)


def _no(why: str) -> Measured:
    return Measured(math.nan, math.nan, why)


def _numeric(result: LLCResult) -> list[str]:
    return [str(name) for name in result.draws.select_dtypes("number").columns]


def format_time(value: float) -> str:
    """A time in draws or steps for people: two digits, and whole from 10 on.

    >>> format_time(3.14159), format_time(123.4)
    ('3.1', '123')
    """
    return f"{value:.0f}" if 10 <= value < 1e6 else format_number(value, 2)


# --- as text -------------------------------------------------------------------------------------


def _render(given: Diagnostics) -> str:
    header = ("", "mean", "± se", "ESS", "R-hat", "τ", "spread", "drift", "drop")
    rows = [header, *(_row(name, one) for name, one in given.quantities.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    ]
    rule = "─" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:], rule, *_notes(given)])


def _row(name: str, one: Quantity) -> tuple[str, ...]:
    estimate, drop = one.estimate, one.burnin.drop
    return (
        name,
        format_number(estimate.mean, 4),
        format_number(estimate.se, 2),
        "–" if math.isnan(estimate.ess) else f"{estimate.ess:.0f}",
        "–" if math.isnan(estimate.rhat) else f"{estimate.rhat:.2f}",
        format_time(one.autocorrelation_time),
        format_number(one.spread.ratio, 2),
        format_number(one.drift_z, 2),
        "?" if drop is None else str(drop),
    )


def _notes(given: Diagnostics) -> list[str]:
    steps = given.steps_per_draw
    chains = f"{given.num_chains} chain{'s' * (given.num_chains > 1)} × {given.num_draws} draws"
    lines = [
        f"{chains}, {steps} step{'s' * (steps > 1)} a draw. τ: autocorrelation time in draws;",
        "spread: of the chain means, 1 is what their errors predict; drift: of the second half",
        "against the first, in standard errors; drop: draws until the trace is level.",
        "",
        f"burn-in              {burnin_sentence(given)}",
        f"loss below baseline  {100 * given.below_baseline:.1f} % of the draws",
    ]
    measured = [
        ("plateau slope", given.plateau_slope),
        ("virial", given.virial),
        ("descent from w*", given.descent),
    ]
    off = virial_is_off(given.virial.value, given.virial.se)
    for name, one in measured:
        value = f"{format_number(one.value)} ± {format_number(one.se, 2)}"
        value += f" – too {off}, 1 is right" if off and name == "virial" else ""
        lines.append(f"{name:<21}{one.missing or value}")
    return [*lines, f"step bias (lr against lr/2): {_step_bias_sentence(given)}"]


def _step_bias_sentence(given: Diagnostics) -> str:
    """The bias in units of λ̂, and relative to it."""
    one, estimate = given.step_bias, abs(given.quantities["llc"].estimate.mean)
    if one.missing:
        return one.missing
    value = f"{format_number(one.value, 2)} ± {format_number(one.se, 2)}"
    if not estimate:
        return value
    return f"{value} ({100 * one.value / estimate:.1f} ± {100 * one.se / estimate:.1f} % of λ̂)"


def burnin_sentence(given: Diagnostics) -> str:
    """What the llc's trace says of burn-in, and what to set."""
    advice, before = given.quantities["llc"].burnin, given.num_burnin_steps
    if virial_is_off(given.virial.value, given.virial.se) == "low":
        value = format_number(given.virial.value, 2)
        return (
            f"too short: the virial is {value}, the chains have yet to spread; raise lr or num_burnin_steps"
        )
    if advice.drop is None:
        return f"not within the draws: {advice.why}"
    if advice.drop == 0:
        return "enough: level from the first draw on"
    steps = before + advice.drop * given.steps_per_draw
    return f"drop {advice.drop} draws: raise num_burnin_steps from {before} to {steps}"
