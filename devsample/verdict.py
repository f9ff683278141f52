"""Whether to believe an estimate: checks of a run's evidence, each one sentence with its remedy.

Each check looks at the :class:`Evidence` and returns one :class:`Finding` or None. A new check is a new
function in ``CHECKS``, or in `devsample.causes` if it finds a cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from devsample.causes import CAUSES
from devsample.diagnostics import BIAS_CAUTION, DRIFT_Z, MIN_DRAWS, drift
from devsample.evidence import Evidence, Finding, LostChain, format_number, percent
from devsample.pace import ESS_CAUTION, MORE_LOCALIZATION, RHAT_CAUTION, RHAT_DRAWS, check_overspread

__all__ = ["Evidence", "Finding", "LostChain", "Verdict", "examine", "format_number", "verdict_of"]

Verdict: TypeAlias = Literal["trust", "caution", "reject"]

DIMENSION_CAUTION, DIMENSION_REJECT = 1.05, 1.5  # estimate relative to half the moving entries
NEGATIVE_Z = 2.0  # standard errors below zero: no healthy run comes near it
DRIFT_REJECT = 0.25  # drift between the halves relative to the estimate
RHAT_REJECT = 1.2
ESS_REJECT = 10.0
RELATIVE_SE_CAUTION = 0.25
BIAS_REJECT = 0.30
MEASURED_CAUTION, MEASURED_Z = 0.10, 3.0  # relative to the estimate, and in standard errors


def examine(evidence: Evidence) -> tuple[Finding, ...]:
    """Run every check; what tells most about the cause comes first.

    What is wrong with the set-up and chains that were lost come first, then what it does to the estimate,
    the graver before the lighter, and symptoms (R-hat, few draws) last.
    """
    causes = [finding for check in CAUSES if (finding := check(evidence)) is not None]
    found = [finding for check in CHECKS if (finding := check(evidence)) is not None]
    if any(finding.kind in HOPELESS for finding in causes):  # more draws of it would be no better
        found = [finding for finding in found if finding.kind not in SYMPTOMS]
    found.sort(key=lambda finding: (finding.kind in SYMPTOMS, finding.severity != "reject"))
    return (*causes, *found)


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """``"reject"`` or ``"caution"``, whichever is the gravest finding, or ``"trust"``.

    >>> verdict_of([])
    'trust'
    """
    severities = {finding.severity for finding in findings}
    if "reject" in severities:
        return "reject"
    return "caution" if severities else "trust"


def check_negative(evidence: Evidence) -> Finding | None:
    """A significantly negative estimate: the chains found a lower loss than at w*."""
    mean, se = evidence.estimate.mean, evidence.estimate.se
    if math.isnan(se) or mean >= -NEGATIVE_Z * se:
        return None
    distance = f"{format_number(-mean / se)} standard errors" if se > 0 else "without any spread"
    text = (
        f"The estimate is negative ({format_number(mean)}, {distance} below 0): the chains find "
        "lower loss than at w*, so w* is no minimum of this loss; train w* to convergence, or "
        f"give evaluate and data as they were in training, or raise {MORE_LOCALIZATION}."
    )
    return Finding("negative", "reject", text)


def check_dimension(evidence: Evidence) -> Finding | None:
    """More than half the number of moving entries, which is the most that a minimum gives."""
    limit = int(evidence.settings.get("num_moving_parameters", 0)) / 2
    mean, se = evidence.estimate.mean, evidence.estimate.se
    low = mean - 2 * se if not math.isnan(se) else mean
    if not limit or low <= DIMENSION_CAUTION * limit:
        return None
    text = (
        f"The estimate {format_number(mean)} is above {format_number(limit)}, half the number of "
        "moving parameters, which no minimum gives: the chains have left the neighbourhood of w*, or "
        f"the step is too large; lower lr, or raise {MORE_LOCALIZATION}."
    )
    return Finding("dimension", "reject" if low > DIMENSION_REJECT * limit else "caution", text)


def check_drift(evidence: Evidence) -> Finding | None:
    """Halves of the draws that differ: the chains had not settled."""
    difference, z = drift(evidence.llc)
    if math.isnan(z) or abs(z) <= DRIFT_Z:
        return None
    share = abs(difference / evidence.estimate.mean) if evidence.estimate.mean else math.inf
    settings = evidence.settings
    burnin = int(settings.get("num_burnin_steps", 0))
    steps = evidence.estimate.num_draws * int(settings.get("num_steps_bw_draws", 1))
    text = (
        f"The chains have not settled: the second half of the draws lies {percent(share)} "
        f"({format_number(abs(z), 2)} standard errors) {'above' if z > 0 else 'below'} the first; "
        f"raise num_burnin_steps from {burnin} to {burnin + steps} or more"
        + (f", or raise lr, or {MORE_LOCALIZATION}." if z > 0 else ", or train w* further.")
    )
    return Finding("drift", "reject" if share > DRIFT_REJECT else "caution", text)


def check_bias(evidence: Evidence) -> Finding | None:
    """A step too large for the gradient noise and the curvature."""
    bias, settings = evidence.bias, evidence.settings
    if bias is None or bias.relative <= BIAS_CAUTION:
        return None
    cause, remedy = "the noise of the minibatch gradients", "a larger batch_size"
    if bias.step > bias.minibatch:
        cause, remedy = "the Euler step itself", 'integrator="averaged"'
        if settings.get("sampler") == "AdamSGLD":
            cause, remedy = "its averaged gradient, which is an old one", "RMSPropSGLD"
    lower = f"lower lr from {format_number(settings['lr'])} to {_floor(bias.lr_fit)}"
    others = [remedy]
    batch = settings.get("nbeta_batch")
    if settings.get("nbeta_rule") == "n/ln n" and batch is not None and batch < settings["nbeta"]:
        others.append(
            f'nbeta="batch" (nβ {format_number(batch)} in place of {format_number(settings["nbeta"])})'
        )
    at_most = settings.get("sampler") == "SGNHT"  # which takes up noise that is even in all directions
    text = (
        f"At this lr the estimate is predicted to be {'up to ' if at_most else ''}"
        f"{format_number(bias.absolute, 2)} ({percent(bias.relative)}) too high, from {cause}; "
        f"{lower}, or take {' or '.join(others)}."
    )
    grave = bias.relative > BIAS_REJECT and not at_most
    return Finding("bias", "reject" if grave else "caution", text)


def check_step_bias(evidence: Evidence) -> Finding | None:
    """A bias from the step size that was measured: chains with half the lr lie elsewhere."""
    found = evidence.measured
    if found is None or not abs(found.value) > MEASURED_Z * found.se:
        return None
    if not abs(found.relative) > MEASURED_CAUTION:
        return None
    text = (
        "Chains with half the lr give another estimate: to first order in lr, this one is "
        f"{format_number(abs(found.value), 2)} ± {format_number(found.se, 2)} "
        f"({percent(abs(found.relative))}) too {'high' if found.value > 0 else 'low'}; lower lr from "
        f"{format_number(evidence.settings['lr'])} to {_floor(found.lr_fit)}."
    )
    return Finding("step bias", "reject" if abs(found.relative) > BIAS_REJECT else "caution", text)


def _floor(value: float) -> str:
    """Two significant digits, rounded down: a limit must not be rounded up."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.floor(value / unit * (1 + 1e-9)) * unit:.2g}"


def check_rhat(evidence: Evidence) -> Finding | None:
    """Chains that disagree by more than their own spread; one chain has none to disagree with."""
    rhat = evidence.estimate.rhat
    if evidence.estimate.num_draws < RHAT_DRAWS:  # halves of a few draws disagree by chance
        return None
    if len(evidence.llc) < 2 or math.isnan(rhat) or rhat <= RHAT_CAUTION:
        return None
    text = (
        f"R-hat is {rhat:.2f} (limit {RHAT_CAUTION}): the chains disagree, because they are too "
        f"short for their autocorrelation or sit in different places; {_more_draws(evidence)} and, if the "
        f"chains keep apart, {MORE_LOCALIZATION}."
    )
    return Finding("rhat", "reject" if rhat > RHAT_REJECT else "caution", text)


def _more_draws(evidence: Evidence) -> str:
    """What makes a chain forget more between its draws."""
    longer = "raise num_draws or num_steps_bw_draws"
    return longer + " or num_leapfrog_steps" * (evidence.settings.get("sampler") == "HMC")


def check_draws(evidence: Evidence) -> Finding | None:
    """Too few effective draws for an error bar, or an error bar too wide to be of use."""
    estimate = evidence.estimate
    total = estimate.num_chains * estimate.num_draws
    if math.isnan(estimate.ess):
        text = (
            f"{estimate.num_draws} draws a chain are too few for an error bar; "
            f"raise num_draws to at least {MIN_DRAWS}, better 100 or more."
        )
        return Finding("few draws", "reject", text)
    effective = min(estimate.ess, total)  # of few draws, more may seem effective than there are
    if effective < ESS_CAUTION:
        factor = math.ceil(2 * ESS_CAUTION / effective)
        text = (
            f"Only {math.floor(effective)} effective draws of {total} (limit {ESS_CAUTION:.0f}), too "
            f"few for a sure error bar; {_more_draws(evidence)} {factor}-fold."
        )
        return Finding("few draws", "reject" if effective < ESS_REJECT else "caution", text)
    relative = estimate.se / abs(estimate.mean) if estimate.mean else math.inf
    if relative > RELATIVE_SE_CAUTION and estimate.se > 0:
        text = (
            f"The standard error is {percent(relative)} of the estimate; raise num_draws or "
            f"num_chains {math.ceil((relative / 0.1) ** 2)}-fold for 10 %, or raise batch_size."
        )
        return Finding("few draws", "caution", text)
    return None


def check_precision(evidence: Evidence) -> Finding | None:
    """A precision that was asked for and not reached."""
    until = evidence.settings.get("until")
    se = evidence.estimate.se
    if not isinstance(until, Mapping) or until["ended"] == "reached" or not se > until["goal"]:
        return None
    text = (
        f"The standard error {format_number(se)} is above the {format_number(until['goal'])} asked for when "
        f"{until['ended']} ended the run; raise {until['ended']} or num_chains."
    )
    return Finding("precision", "caution", text)


def check_adapting(evidence: Evidence) -> Finding | None:
    """A sampler that adapts while it draws: its law is not the posterior."""
    settings = evidence.settings
    if not settings.get("adapting"):
        return None
    sampler = settings.get("sampler", "the sampler")
    remedy = "give num_burnin_steps, in whose first half it adapts"
    if settings.get("preconditioner") == "moving":
        remedy = 'take preconditioner="frozen"'
    text = (
        f"{sampler} goes on adapting while it draws, so its law is not the posterior, however small lr is; "
        f"{remedy}."
    )
    return Finding("adapting", "caution", text)


CHECKS: tuple[Callable[[Evidence], Finding | None], ...] = (
    check_negative,
    check_drift,
    check_bias,
    check_step_bias,
    check_overspread,
    check_adapting,
    check_dimension,
    check_rhat,
    check_draws,
    check_precision,
)
HOPELESS = frozenset({"no sampler"})
SYMPTOMS = frozenset({"rhat", "few draws", "precision"})
