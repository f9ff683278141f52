"""Checks of how far the chains have got: steps smaller than they need be, chains that have not spread.

Like those of `devsample.causes`, each gives one sentence or nothing.
"""

from __future__ import annotations

import math

from devsample.diagnostics import DRIFT_Z, Description, describe, drift, virial_is_off
from devsample.evidence import PRECONDITIONED, Evidence, Finding, format_number, percent, stiffness

RHAT_DRAWS = 40
RHAT_CAUTION = 1.05  # about 10 effective draws per half chain
ESS_CAUTION = 50.0  # over all chains; there the error bar is itself 25 % off
FITTING_STEP = 0.3  # ε (nβ h + γ)
ROOM = 4.0  # how many times larger lr could be, for it to be called small
VIRIAL_HIGH = 1.3  # beyond which the estimate is far off, too
GROWTH_Z, GROWTH = 4.0, 0.1  # of the distance from w*, second half against first
SHORT_BURNIN = 0.1  # of the steps between the draws
MORE_LOCALIZATION = "localization, which is part of what is estimated"


def fitting_lr(evidence: Evidence, stiffest: float) -> float:
    """The largest lr that neither the stiffest direction nor the predicted bias speaks against."""
    fit = FITTING_STEP / stiffest / max(1.0, float(evidence.settings.get("step_bias", 0.0)))
    return fit if evidence.bias is None else min(fit, evidence.bias.lr_fit)


def law(evidence: Evidence) -> str:
    """What makes a direction stiff, as a formula."""
    return "G (nβ h + γ)" if evidence.settings.get("sampler") in PRECONDITIONED else "(nβ h + γ)"


def check_slow(evidence: Evidence) -> Finding | None:
    """Chains that are short for their autocorrelation because lr is small."""
    stiffest, estimate = stiffness(evidence), evidence.estimate
    if stiffest is None:
        return None
    lr, fit = float(evidence.settings["lr"]), fitting_lr(evidence, stiffest)
    if lr * ROOM > fit or _starts_at_once(evidence):
        return None
    symptoms = []
    if len(evidence.llc) > 1 and estimate.num_draws >= RHAT_DRAWS and estimate.rhat > RHAT_CAUTION:
        symptoms.append(f"R-hat is {estimate.rhat:.2f}")
    if estimate.ess < ESS_CAUTION:
        symptoms.append(f"there are {math.floor(estimate.ess)} effective draws")
    if _virial_off(evidence) == "low":
        symptoms.append("the virial is below 1")
    if not symptoms:
        return None
    text = (
        f"The steps are small, and the chains short for that ({', '.join(symptoms)}): lr {law(evidence)} is "
        f"{format_number(lr * stiffest, 2)} for the stiffest direction, where "
        f"{format_number(fit * stiffest, 2)} is fine; raise lr from {format_number(lr)} towards "
        f"{format_number(fit, 2)}."
    )
    return Finding("small step", "caution", text)


def _starts_at_once(evidence: Evidence) -> bool:
    """Whether draws drift for want of burn-in: whatever lr is, that is the first thing to mend."""
    burnin = int(evidence.settings.get("num_burnin_steps", 0))
    steps = evidence.estimate.num_draws * int(evidence.settings.get("num_steps_bw_draws", 1))
    return burnin < SHORT_BURNIN * steps and abs(drift(evidence.llc)[1]) > DRIFT_Z


def check_spread(evidence: Evidence) -> Finding | None:
    """Chains that are still on their way: a virial below 1, or a distance from w* that goes on growing."""
    if evidence.virial is not None and _virial_off(evidence) == "low":
        found = describe(evidence.virial)
        text = (
            f"The chains have not spread to where they belong: {_virial(found)} once they have, and the "
            f"estimate can lack what slow directions add; {_longer(evidence)}."
        )
        return Finding("not spread", "caution", text)  # of flat directions alone it would lack little
    if evidence.distance is None:
        return None
    difference, z = drift(evidence.distance)
    share = difference / float(evidence.distance.mean()) if evidence.distance.any() else 0.0
    if not (z > GROWTH_Z and share > GROWTH):
        return None
    text = (
        f"The chains are still moving away from w*: their distance is {percent(share)} larger in the second "
        f"half of the draws ({format_number(z, 2)} standard errors); {_longer(evidence)}."
    )
    return Finding("not spread", "caution", text)


def check_overspread(evidence: Evidence) -> Finding | None:
    """A virial above 1: chains that spread further than they should."""
    if evidence.virial is None or _virial_off(evidence) != "high":
        return None
    found = describe(evidence.virial)
    text = (
        f"The chains spread too far: {_virial(found)} where steps and gradients are fine, so the step is too "
        f"large or the gradients too noisy; lower lr "
        f"(now {format_number(float(evidence.settings.get('lr', math.nan)))}) or raise batch_size."
    )
    return Finding("spread too far", "reject" if found.mean > VIRIAL_HIGH else "caution", text)


def _virial(found: Description) -> str:
    return f"the virial is {format_number(found.mean)} ± {format_number(found.se, 2)}, and 1"


def _longer(evidence: Evidence) -> str:
    """What to do about chains that have not come far enough."""
    settings, stiffest = evidence.settings, stiffness(evidence)
    burnin = int(settings.get("num_burnin_steps", 0))
    steps = evidence.estimate.num_draws * int(settings.get("num_steps_bw_draws", 1))
    longer = f"raise num_burnin_steps from {burnin} to {burnin + steps} or more"
    lr = float(settings.get("lr", math.nan))
    if stiffest is not None and lr * ROOM <= (fit := fitting_lr(evidence, stiffest)):
        return f"raise lr from {format_number(lr)} towards {format_number(fit, 2)}, or {longer}"
    if not settings.get("localization"):
        return f"give some localization, without which flat directions have no end, or {longer}"
    return longer


def _virial_off(evidence: Evidence) -> str:
    settings = evidence.settings
    bounded = settings.get("bounding_box_size") is not None
    if evidence.virial is None or bounded or float(settings.get("noise_level", 1.0)) != 1.0:
        return ""  # with a box or other noise it is not 1
    found = describe(evidence.virial)
    return virial_is_off(found.mean, found.se)
