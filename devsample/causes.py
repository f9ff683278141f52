"""Checks of a run's evidence that find what is wrong with its set-up: modes, batches, step size.

Like those of `devsample.verdict`, each gives one sentence or nothing. What they find is the cause of
whatever else is the matter, and stands first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from devsample.diagnostics import Draws
from devsample.evidence import Evidence, Finding, descent_of, format_number, percent, stiffness
from devsample.pace import check_slow, check_spread, fitting_lr, law

RELAXED = 3.0  # e-foldings of the fastest direction within a run that has moved
LARGE_STEP, LARGEST_STEP = 2.0, 3.0  # ε (nβ h + γ); at 4 steps are unstable
CACHE_ROUNDING = 4.0  # a baseline from kept losses is a mean that was taken in another way
MOVE_RESOLUTION = 2.0**-23  # loss differences below this share of the loss are float32 rounding
MOVED = 0.5  # share of the entries that must differ from w* in the model's own precision
HALF = ("float16", "bfloat16")
SHARED_CORRELATION, SHARED_Z = 0.5, 6.0  # of losses at w* between chains
FEWEST_DRAWS, FEWEST_EPOCHS = 20, 6
DEALT, IN_ORDER = 0.6, 3.0  # variance of epoch means, relative to that of independent batches
ALIGNMENTS = 8  # places tried for the start of an epoch
SURE = 1e-5  # chance at which the order of batches counts as seen
DESCENT_Z = 2.5  # standard errors (at a minimum 3.5 of them) by which |∇L_n(w*)|² is above 0
DESCENT_CAUTION, DESCENT_REJECT = 0.1, 0.5  # what descent gains, relative to the estimate at a minimum
LOST_REJECT = 0.25  # share of chains lost above which what is left is a selection
REMEDIES = {
    "diverged": "lower lr (now {lr})",
    "failed": "mend the error that its message names",
    "died": "look in its log for a lack of memory or a kill",
    "stopped": "let it run to the end",
}


def check_samples(evidence: Evidence) -> Finding | None:
    """An optimizer in the place of a sampler."""
    settings = evidence.settings
    if settings.get("samples", True):
        return None
    text = (
        f"{settings.get('sampler')} samples nothing: it is an optimizer, without noise, and the losses on "
        "its way are no draws from the posterior; take a sampler, such as devsample.SGLD."
    )
    return Finding("no sampler", "reject", text)


def check_noise(evidence: Evidence) -> Finding | None:
    """Noise of another size than the posterior's."""
    level = float(evidence.settings.get("noise_level", 1.0))
    if level == 1.0:
        return None
    text = (
        f"noise_level is {format_number(level)}: the chains sample the posterior at another temperature, "
        f"about {format_number(level**2)} times as hot, and the estimate is not that at nβ; leave "
        "noise_level out."
    )
    return Finding("noise level", "caution", text)


def check_training(evidence: Evidence) -> Finding | None:
    """Modules in training mode, for which the loss is not a function of weights and sample."""
    modes = tuple(evidence.settings.get("in_training", ()))
    if not modes:
        return None
    where, remedy = "evaluate sets model.train()", "use model.eval() there"
    if evidence.settings.get("train_mode"):
        where, remedy = "train_mode=True", "leave train_mode out"
    effect = {
        "dropout": "the loss of the same weights differs from call to call",
        "batch norm": "the loss of a sample depends on the others of its batch",
    }
    text = (
        f"{' and '.join(modes).capitalize()} ran in training mode ({where}): {effect[modes[0]]}, and the "
        f"estimate is that of another loss; {remedy}."
    )
    return Finding("training mode", "caution", text)


def check_precision_of_weights(evidence: Evidence) -> Finding | None:
    """Weights of half precision that round back to w*."""
    dtype, moved = str(evidence.settings.get("weights_dtype", "")), evidence.moved
    if moved is None or moved >= MOVED or not any(half in dtype for half in HALF):
        return None
    text = (
        f"Only {percent(moved)} of the weights differ from w* once they are rounded to {dtype}: the "
        "steps are smaller than the weights' precision; keep them in float32 (model.float()), with "
        "use_amp=True for "
        "speed."
    )
    return Finding("low precision", "reject", text)


def check_lost(evidence: Evidence) -> Finding | None:
    """Chains that are left out: what is left is a selection."""
    lost, kept = evidence.lost, len(evidence.llc)
    if not lost:
        return None
    total = kept + len(lost)
    named = "; ".join(f"{c.chain} {c.status}" + (f" ({c.why})" if c.why else "") for c in lost[:4])
    more = f"; and {len(lost) - 4} more" if len(lost) > 4 else ""
    statuses = dict.fromkeys(chain.status for chain in lost)
    lr = format_number(float(evidence.settings.get("lr", math.nan)))
    remedy = " and ".join(REMEDIES[s].format(lr=lr) for s in statuses if s in REMEDIES)
    text = (
        f"{len(lost)} of {total} chains {'is' if len(lost) == 1 else 'are'} left out, which can "
        f"bias the estimate: chain {named}{more}; {remedy or 'see the table of chains'}."
    )
    return Finding("lost", "reject" if len(lost) > LOST_REJECT * total else "caution", text)


def check_moves(evidence: Evidence) -> Finding | None:
    """Losses at w and at w* that are equal: the weights do not move."""
    gap = np.abs(evidence.loss - evidence.baseline).max()
    differ = np.ptp(evidence.llc) > 0 or evidence.llc.size == 1
    resolution = MOVE_RESOLUTION * (CACHE_ROUNDING if evidence.settings.get("baseline_cache") else 1.0)
    if differ and gap > resolution * np.abs(evidence.baseline).max():
        return None
    text = (
        f"Nothing moves: the loss is never more than {format_number(float(gap))} from that at w*, "
        "so no weight was free to move or no step was large enough to show; check requires_grad "
        "and param_masks, keep the weights in float32, or raise lr "
        f"(now {format_number(float(evidence.settings.get('lr', math.nan)))})."
    )
    return Finding("frozen", "reject", text)


def check_minimum(evidence: Evidence) -> Finding | None:
    """A w* from which plain descent finds a much lower loss: chains do so, too."""
    descent = descent_of(evidence.settings)
    drop = float(descent.get("drop", 0.0))
    share = drop / max(evidence.estimate.mean + drop, 1.0)
    if share <= DESCENT_CAUTION or descent["square"] < DESCENT_Z * descent["error"]:
        return None
    text = (
        f"w* is not at a minimum: one step of steepest descent lowers nβ L by {format_number(drop, 2)}, and "
        f"the estimate ({format_number(evidence.estimate.mean)}) is too low by about as much or more; train "
        "w* further, or give evaluate and data as they were in training."
    )
    return Finding("no minimum", "reject" if share > DESCENT_REJECT else "caution", text)


def check_small_step(evidence: Evidence) -> Finding | None:
    """A run so short, or steps so small, that not even the stiffest direction has relaxed."""
    settings, stiffest = evidence.settings, stiffness(evidence)
    if stiffest is None:
        return None
    lr, speed = float(settings["lr"]), float(settings.get("speed", 1.0))
    between = int(settings.get("num_steps_bw_draws", 1))
    steps = int(settings.get("num_burnin_steps", 0)) + evidence.estimate.num_draws * between
    foldings = steps * lr * speed * stiffest / 2
    if foldings >= RELAXED:
        return None
    fit = fitting_lr(evidence, stiffest)
    factor = RELAXED / max(foldings, 1e-12)
    remedy = f"raise lr from {format_number(lr)} towards {format_number(fit, 2)} or make longer chains"
    if fit <= lr:
        remedy = f"raise num_draws and num_burnin_steps {format_number(math.ceil(factor))}-fold or more"
    text = (
        f"The chains have hardly left w*: {steps} steps of lr = {format_number(lr)} are "
        f"{format_number(foldings, 2)} relaxation times of the stiffest direction, with lr {law(evidence)} = "
        f"{format_number(lr * stiffest, 2)}, and the others are slower; {remedy}."
    )
    return Finding("small step", "reject", text)


def check_large_step(evidence: Evidence) -> Finding | None:
    """Steps near or beyond what the stiffest direction bears."""
    settings, stiffest = evidence.settings, stiffness(evidence)
    if stiffest is None or float(settings.get("step_bias", 0.0)) > 1:  # of which the bias speaks
        return None
    lr = float(settings["lr"])
    size = lr * stiffest
    if size <= LARGE_STEP:
        return None
    text = (
        f"lr is too large for the stiffest direction: lr {law(evidence)} = "
        f"{format_number(size, 2)}, where steps are unstable from 4 on and biased well below; lower lr from "
        f"{format_number(lr)} to {format_number(0.3 / stiffest, 2)}."
    )
    return Finding("large step", "reject" if size > LARGEST_STEP else "caution", text)


def check_shared(evidence: Evidence) -> Finding | None:
    """Chains that read the same batches: they agree falsely, and the error bar is too small."""
    series = _batch_losses(evidence)
    if series is None or len(series) < 2 or series.shape[1] < FEWEST_DRAWS:
        return None
    if not np.ptp(series, axis=1).all():
        return None
    matrix = np.atleast_2d(np.corrcoef(series))
    pairs = matrix[np.triu_indices(len(series), 1)]
    mean, largest = float(pairs.mean()), float(pairs.max())
    if largest < SHARED_CORRELATION or largest * math.sqrt(series.shape[1]) < SHARED_Z:
        return None
    text = (
        f"Chains read the same batches: their losses at w* are correlated (largest {largest:.2f}, mean "
        f"{mean:.2f}), so they agree more than independent chains would and the standard error is too small; "
        "let the data set follow the index it is given, without an order or seed of its own."
    )
    return Finding("shared batches", "reject", text)


def check_order(evidence: Evidence) -> Finding | None:
    """Batches that are not independent: dealt out by epochs, or sorted."""
    epoch, settings = _draws_per_epoch(evidence), evidence.settings
    series = _batch_losses(evidence)
    if epoch is None or epoch < 2 or series is None or series.shape[1] < FEWEST_EPOCHS * epoch:
        return None
    starts = range(0, epoch, math.ceil(epoch / ALIGNMENTS))
    ratios = [_spread_of_means(series[:, start:], epoch) for start in starts]
    if not all(math.isfinite(ratio) for ratio, _ in ratios):
        return None
    least, freedom = min(ratios)
    dealt = 1 - DEALT / int(settings.get("num_steps_bw_draws", 1))  # of an epoch, only one part is drawn
    if settings.get("sampling") == "iid" and least < dealt and _chance_below(least, freedom) < SURE:
        text = (
            f"The batches are not independent: losses at w* average out over each {epoch} draws (variance "
            f"of their means {percent(least)} of that of independent batches), as if dealt out by epochs, "
            "and the loss is read on batches that the chain has yet to fit; let the data set follow the "
            "index it is "
            'given, or use sampling="epoch", which reads losses on other batches.'
        )
        return Finding("epoch order", "reject", text)
    ratio, freedom = ratios[0]
    if ratio > IN_ORDER and _chance_below(ratio, freedom) > 1 - SURE:
        text = (
            f"The batches are not independent: losses at w* drift along the data (means of {epoch} "
            f"draws vary {format_number(ratio, 2)} times as much as with independent batches), as with "
            "sorted data; "
            "shuffle the data, or raise num_draws to several passes."
        )
        return Finding("data order", "caution", text)
    return None


def _spread_of_means(series: Draws, window: int) -> tuple[float, int]:
    """Variance of the means of windows over that of independent values, and its degrees of freedom."""
    windows = series.shape[1] // window
    cut = series[:, : windows * window].reshape(len(series), windows, window)
    single = cut.reshape(len(series), -1).var(axis=1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = cut.mean(axis=2).var(axis=1, ddof=1) * window / single
    return float(ratio.mean()), len(series) * (windows - 1)


def _batch_losses(evidence: Evidence) -> Draws | None:
    """Losses at w* on each draw's batch: they know nothing of the chain. None unless paired."""
    if evidence.settings.get("baseline", "paired") != "paired":
        return None
    return evidence.baseline


def _draws_per_epoch(evidence: Evidence) -> int | None:
    settings = evidence.settings
    size = settings.get("batch_size")
    if not size or not settings.get("num_samples"):
        return None
    taken = int(size) * int(settings.get("grad_accum_steps", 1)) * int(settings.get("num_steps_bw_draws", 1))
    return max(1, round(int(settings["num_samples"]) / taken))


def _chance_below(ratio: float, freedom: int) -> float:
    """The chance of a variance this small, relative to the true one, or a smaller one."""
    from scipy.stats import chi2

    return float(chi2.cdf(ratio * freedom, freedom))


CAUSES: tuple[Callable[[Evidence], Finding | None], ...] = (
    check_samples,
    check_noise,
    check_training,
    check_precision_of_weights,
    check_moves,
    check_minimum,
    check_shared,
    check_order,
    check_large_step,
    check_lost,
    check_small_step,
    check_slow,
    check_spread,
)
