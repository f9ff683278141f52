"""From a run's records to its estimate: which chains count, how they are pooled, what speaks against them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from devsample.diagnostics import CHAINS_DIFFER, Description, Draws, PredictedBias, describe, predict_bias
from devsample.errors import AllChainsFailedError
from devsample.evidence import PRECONDITIONED
from devsample.measured import measured_bias
from devsample.verdict import Evidence, Finding, LostChain, examine

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ChainInfo:
    """How one chain ended.

    Attributes:
        chain: its index in the run.
        seed: its seed, or None if it was not given one of its own.
        status: ``"done"``, ``"diverged"``, ``"failed"``, ``"died"`` or ``"stopped"``.
        num_draws: recorded draws.
        message: why it is not done.
        attempt: 0 for the first.
        device: where it ran.
        seconds: wall time.
        steps: updates made, burn-in included.
        gradient_noise: trace of the covariance of one step's gradient estimate (all
            ``grad_accum_steps`` of it) at the chain's last state; None if not measured.
        hessian_trace: trace of the Hessian of the loss there; None if not measured.
        curvature: its largest eigenvalue in size; None if not measured (it is for two chains). With a
            preconditioner G these three are of √G g, √G H √G and √G (H + γ/nβ) √G.
        moved: share of the moving entries whose value, in the model's dtype, differs from that at w*.
        step_bias: means over 20 stretches of its rerun of nβ (L(w) − L(w')), w with lr and w' with lr/2;
            None if it was not rerun.
        run: of a merged result: which run it comes from, as numbered in ``provenance["runs"]``.
        source_chain: of a merged result: its index in that run.
    """

    chain: int
    seed: int | None
    status: str
    num_draws: int
    message: str = ""
    attempt: int = 0
    device: str = "cpu"
    seconds: float = 0.0
    steps: int = 0
    gradient_noise: float | None = None
    hessian_trace: float | None = None
    curvature: float | None = None
    moved: float | None = None
    step_bias: tuple[float, ...] | None = None
    run: int | None = None
    source_chain: int | None = None


@dataclass(frozen=True)
class Recorded:
    """All that a result is computed from; see `LLCResult.from_run`."""

    draws: pd.DataFrame
    chains: tuple[ChainInfo, ...]
    settings: dict[str, Any]
    init_loss: float
    init_loss_se: float | None
    online: bool = False
    at_center: dict[str, float] = field(default_factory=dict)
    reports: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Analysis:
    """What the records say.

    Attributes:
        estimate: over the chains in use.
        each: of every chain in use, by its index.
        lost: the chains that are left out, by index.
        bias: predicted bias, None if there is no law for it.
        findings: what speaks against the estimate.
    """

    estimate: Description
    each: dict[int, Description]
    lost: dict[int, LostChain]
    bias: PredictedBias | None
    findings: tuple[Finding, ...]


def analyse(recorded: Recorded) -> Analysis:
    """Estimate and judge.

    Raises:
        AllChainsFailedError: no chain can be used; carries the draws.
    """
    names = ("llc", "loss", "baseline")
    traces = {name: traces_of(recorded, name) for name in names}
    moving = int(recorded.settings.get("num_moving_parameters", 0))
    lost = _lost_chains(recorded.chains, traces, moving)
    used = [i for i, info in enumerate(recorded.chains) if info.chain not in lost]
    if not used:
        raise _all_failed(lost, recorded.draws)
    groups = groups_of(recorded.chains, traces["llc"], used)
    each = {
        recorded.chains[i].chain: describe(traces["llc"][i][None, :length])
        for length, group in groups.items()
        for i in group
    }
    llc, loss, baseline = (_rectangle(traces[name], groups) for name in names)
    estimate = pool(traces["llc"], groups)
    infos = [recorded.chains[i] for i in used]
    bias = _bias(estimate.mean, infos, recorded.settings, recorded.at_center)
    evidence = Evidence(
        llc,
        loss,
        baseline,
        estimate,
        tuple(lost.values()),
        bias,
        recorded.settings,
        curvature=max((one.curvature for one in infos if one.curvature is not None), default=None),
        moved=_mean([one.moved for one in infos if one.moved is not None]),
        measured=measured_bias(
            [one.step_bias for one in infos], estimate.mean, recorded.settings.get("lr", math.nan)
        ),
        virial=_observed(recorded, groups, "virial"),
        distance=_observed(recorded, groups, "distance"),
    )
    return Analysis(estimate, each, lost, bias, examine(evidence))


def traces_of(recorded: Recorded, name: str) -> list[Draws]:
    """What each chain recorded in this column, shape (num_draws_i,), in the order of ``chains``."""
    rows = {chain: rows for chain, rows in recorded.draws.groupby("chain")}
    return [
        rows[info.chain][name].to_numpy(np.float64) if info.chain in rows else np.empty(0)
        for info in recorded.chains
    ]


def _observed(recorded: Recorded, groups: Mapping[int, Sequence[int]], name: str) -> Draws | None:
    """An observable of the chains in use, if it was recorded at each draw."""
    if name not in recorded.draws or recorded.draws[name].dtype.kind != "f":
        return None
    found = _rectangle(traces_of(recorded, name), groups)
    return found if np.isfinite(found).all() else None


def groups_of(
    chains: Sequence[ChainInfo], traces: Sequence[Draws], used: Sequence[int]
) -> dict[int, list[int]]:
    """The places in ``chains`` of those in use, by how many of their draws count.

    That is as many as the shortest chain of the same run has; so in a run there is one group.
    """
    shortest: dict[int | None, int] = {}
    for i in used:
        run = chains[i].run
        shortest[run] = min(shortest.get(run, len(traces[i])), len(traces[i]))
    groups: dict[int, list[int]] = {}
    for i in used:
        groups.setdefault(shortest[chains[i].run], []).append(i)
    return groups


def pool(traces: Sequence[Draws], groups: Mapping[int, Sequence[int]]) -> Description:
    r"""The mean over all draws of chains that may differ in length.

    .. math:: \bar x = \sum_g \frac{n_g}{n} \bar x_g, \qquad
        \mathrm{se}^2 = \sum_g \Big(\frac{n_g}{n}\Big)^2 \mathrm{se}_g^2

    over groups g of chains of equal length, n_g draws each. (Weights from the errors would pull the
    mean towards chains that happen to vary little.) If the C chains' own means x_i lie further
    apart than that allows (chance below 10 %), their spread gives the error, as in `describe`:

    .. math:: \mathrm{se}^2 = \frac{C}{C-1} \sum_i \Big(\frac{n_i}{n}\Big)^2 (\bar x_i - \bar x)^2

    Args:
        traces: draws of every chain, shape (num_draws_i,).
        groups: draws that count, to the places in ``traces`` of the chains of that length.
    """
    parts = [describe(np.stack([traces[i][:length] for i in group])) for length, group in groups.items()]
    if len(parts) == 1:
        return parts[0]
    counts = np.array([part.num_chains * part.num_draws for part in parts])
    shares, total = counts / counts.sum(), sum(part.num_chains for part in parts)
    mean = float(shares @ [part.mean for part in parts])
    within = float(np.linalg.norm(shares * [part.se for part in parts]))
    ess = float(sum(part.ess for part in parts))
    between = _spread_of_chains(traces, groups, mean)
    if between > within > 0 and chi2_tail(total - 1, (total - 1) * (between / within) ** 2) < CHAINS_DIFFER:
        ess, within = ess * (within / between) ** 2, between
    return replace(
        parts[0],
        mean=mean,
        se=within,
        ess=ess,
        rhat=describe(_rectangle(traces, groups)).rhat,
        num_chains=total,
        num_draws=round(counts.sum() / total),
    )


def _spread_of_chains(traces: Sequence[Draws], groups: Mapping[int, Sequence[int]], mean: float) -> float:
    lengths = {i: length for length, group in groups.items() for i in group}
    number, draws = len(lengths), sum(lengths.values())
    parts = [length / draws * (traces[i][:length].mean() - mean) for i, length in lengths.items()]
    return math.sqrt(number / (number - 1)) * float(np.linalg.norm(parts))


def chi2_tail(degrees: int, value: float) -> float:
    """Chance of a χ² with so many degrees of freedom above ``value``."""
    from scipy.stats import chi2

    return float(chi2.sf(value, degrees))


def _rectangle(traces: Sequence[Draws], groups: Mapping[int, Sequence[int]]) -> Draws:
    """Chains of different length at one number of draws each, evenly taken from all of theirs."""
    length = min(groups)
    rows = {
        i: traces[i][np.linspace(0, own - 1, length).round().astype(int)]
        for own, group in groups.items()
        for i in group
    }
    return np.stack([rows[i] for i in sorted(rows)])


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _far_away(llc: Sequence[Draws], moving: int) -> float:
    """The estimate beyond which a chain has left the others for good: ten times P/2 and the median."""
    ends = [
        float(trace[len(trace) // 2 :].mean()) for trace in llc if len(trace) and np.isfinite(trace).all()
    ]
    return 10 * max(moving / 2, float(np.median(ends))) if ends and moving else math.inf


def _lost_chains(
    chains: Sequence[ChainInfo], traces: Mapping[str, Sequence[Draws]], moving: int
) -> dict[int, LostChain]:
    """The chains that cannot be used, by index."""
    lost, far = {}, _far_away(traces["llc"], moving)
    longest: dict[int | None, int] = {}
    for info, llc in zip(chains, traces["llc"], strict=True):
        longest[info.run] = max(longest.get(info.run, 0), len(llc))
    for info, llc, loss in zip(chains, traces["llc"], traces["loss"], strict=True):
        finite = np.isfinite(llc) & np.isfinite(loss)
        why = textwrap.shorten(info.message.partition("\n")[0], 120, placeholder=" …")
        if info.status not in ("done", "stopped"):
            lost[info.chain] = LostChain(info.chain, info.status, why)
        elif not len(llc):
            lost[info.chain] = LostChain(info.chain, "failed", why or "no draws were recorded")
        elif not finite.all():
            at = int(np.argmin(finite))
            lost[info.chain] = LostChain(info.chain, "diverged", f"loss not finite at draw {at}")
        elif llc[len(llc) // 2 :].mean() > far:
            lost[info.chain] = LostChain(info.chain, "diverged", f"its estimate is {llc.mean():.3g}")
        elif info.status == "stopped" and 2 * len(llc) < longest[info.run]:
            lost[info.chain] = LostChain(info.chain, "stopped", f"after {len(llc)} draws")
    return lost


def _all_failed(lost: Mapping[int, LostChain], draws: pd.DataFrame) -> AllChainsFailedError:
    named = "".join(f"\n  chain {c.chain} {c.status}: {c.why}" for c in list(lost.values())[:4])
    more = f"\n  and {len(lost) - 4} more" if len(lost) > 4 else ""
    error = AllChainsFailedError(
        f"none of the {len(lost)} chains can be used, so there is no estimate:{named}{more}\n"
        "  The draws recorded until then are in this error's .draws. If the chains diverged, "
        "lower lr."
    )
    error.draws = draws
    return error


_WITH_LAW = ("SGLD", "SGHMC", "SGNHT", "MALA", "HMC", *PRECONDITIONED)


def _bias(
    estimate: float,
    used: Sequence[ChainInfo],
    settings: Mapping[str, Any],
    at_center: Mapping[str, float],
) -> PredictedBias | None:
    """The predicted bias of samplers that have a law for it."""
    if settings.get("sampler", "SGLD") not in _WITH_LAW or not {"lr", "nbeta"} <= settings.keys():
        return None

    def larger(name: str) -> float | None:
        # A chain's value is a noisy one, from its last state: their mean stands for the chains.
        values = [value for info in used if (value := getattr(info, name)) is not None]
        both = [float(np.mean(values))] if values else []
        known = settings.get("sampler") not in PRECONDITIONED  # whose scale was not yet there
        if known and at_center.get(name) is not None:
            both.append(float(at_center[name]))
        return max((value for value in both if math.isfinite(value)), default=None)

    return predict_bias(
        estimate,
        lr=settings["lr"],
        nbeta=settings["nbeta"],
        step_bias=settings.get("step_bias", float(settings.get("integrator") == "euler")),
        speed=settings.get("speed", 1.0),
        gradient_noise=larger("gradient_noise"),
        hessian_trace=larger("hessian_trace"),
    )


# --- the mapping and the tables ------------------------------------------------------------------
