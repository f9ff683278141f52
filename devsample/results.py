"""The result of a run: the estimate, its error bar, the verdict, and the tables behind them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from devsample.diagnostics import Description, Draws, PredictedBias, align, describe, predict_bias
from devsample.errors import AllChainsFailedError
from devsample.summary import headline, render
from devsample.verdict import Evidence, Finding, LostChain, Verdict, examine, verdict_of

if TYPE_CHECKING:
    from os import PathLike

    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["ChainInfo", "LLCResult"]


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


@dataclass(frozen=True, eq=False, repr=False)
class LLCResult(Mapping[str, Any]):
    r"""A learning coefficient, its error bar, and what speaks against it.

    .. math:: \hat\lambda = n\beta \, ( \overline{L_n(w)} - L_n(w^*) )

    As a mapping it has devinterp's keys, all float64:

    =====================  ==========================================================
    ``llc/mean``           equals ``.llc``
    ``llc/std``            unbiased standard deviation of the chains' estimates; NaN for one
                           chain, whose spread is unknown
    ``llc-chain/{i}``      estimate of chain i; NaN if it is left out
    ``loss/trace``         shape (num_chains, num_draws), NaN where nothing was recorded
    ``llc/trace``          same shape, nβ (loss − baseline) of each draw; with ``online=True``
                           each chain's running mean of it
    ``init_loss``          L_n(w*)
    ``llc/means``          with ``online=True`` only, shape (num_draws,): mean of the running
                           estimates over the chains that are not left out
    ``llc/stds``           likewise, their unbiased standard deviation
    =====================  ==========================================================

    devinterp's running estimate at draw t is nβ (mean of the losses up to t − init_loss). Here it
    is the mean of the per-draw nβ (loss − baseline) up to t. The two are the same with the fixed
    and the full baseline; with the paired one each loss has its own baseline, so that ``llc/mean``
    is not nβ (mean loss − init_loss).

    A chain that did not end well or holds a NaN is left out of every average and named in the
    first reasons. Chains of unequal length (a stopped run) count up to the draw that all of them
    have; one that is stopped before half of the longest is left out.

    Attributes:
        estimate: mean, standard error, effective draws and R-hat over the chains in use.
        findings: what speaks against the estimate, the most telling first.
        predicted_bias: bias from the step size, None if there is no law for it.
        draws: one row per recorded draw (chain, draw, step, loss, baseline, llc), left-out chains
            included.
        chains: one row per chain (chain, status, llc, se, ess, draws, ...); llc, se and ess are
            NaN for a chain that is left out.
        init_loss: L_n(w*).
        init_loss_se: its standard error, None if unknown.
    """

    estimate: Description
    findings: tuple[Finding, ...]
    predicted_bias: PredictedBias | None
    draws: pd.DataFrame
    chains: pd.DataFrame
    init_loss: float
    init_loss_se: float | None
    _settings: dict[str, Any] = field(default_factory=dict)
    _values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_run(
        cls,
        draws: pd.DataFrame,
        chains: Sequence[ChainInfo],
        settings: Mapping[str, Any],
        *,
        init_loss: float,
        init_loss_se: float | None,
        online: bool,
        at_center: Mapping[str, float],
        reports: Mapping[str, Any] = MappingProxyType({}),
    ) -> LLCResult:
        """Estimate from the draws of a run.

        Args:
            draws: columns chain, draw, step (integers), loss, baseline, llc (float64), sorted by
                chain and draw.
            chains: how each chain ended, also those without draws.
            settings: of the run; kept, and read by the diagnostics.
            init_loss: L_n(w*).
            init_loss_se: its standard error.
            online: whether the mapping has devinterp's running estimates.
            at_center: ``"gradient_noise"`` and ``"hessian_trace"`` at w*, as in ChainInfo; either
                may be missing.
            reports: what callbacks reported; further keys of the mapping.

        Raises:
            AllChainsFailedError: no chain can be used; carries the draws.
        """
        traces = _traces(draws, chains)
        lost = _lost_chains(chains, traces)
        used = [i for i, info in enumerate(chains) if info.chain not in lost]
        if not used:
            raise _all_failed(lost, draws)
        llc, loss, baseline = (align([trace[i] for i in used]) for trace in traces.values())
        estimate = describe(llc)
        bias = _bias(estimate.mean, [chains[i] for i in used], settings, at_center)
        evidence = Evidence(llc, loss, baseline, estimate, tuple(lost.values()), bias, settings)
        each = {chains[i].chain: describe(llc[[row]]) for row, i in enumerate(used)}
        values = dict(reports) | _values(chains, traces, each, int(settings.get("num_draws", 0)))
        values |= {"llc/mean": estimate.mean, "init_loss": float(init_loss)}
        if online:
            values |= _running(values["llc/trace"], used, llc.shape[1])
        return cls(
            estimate=estimate,
            findings=examine(evidence),
            predicted_bias=bias,
            draws=draws,
            chains=_chains_table(chains, lost, each),
            init_loss=float(init_loss),
            init_loss_se=None if init_loss_se is None else float(init_loss_se),
            _settings=dict(settings),
            _values=values,
        )

    @property
    def llc(self) -> float:
        """The estimate λ̂, the mean over the draws of the chains in use."""
        return self.estimate.mean

    @property
    def se(self) -> float:
        """Monte Carlo standard error of ``llc``."""
        return self.estimate.se

    @property
    def ess(self) -> float:
        """Effective number of draws behind ``llc``, over all chains."""
        return self.estimate.ess

    @property
    def rhat(self) -> float:
        """Split R-hat."""
        return self.estimate.rhat

    @property
    def verdict(self) -> Verdict:
        """``"trust"``, ``"caution"`` or ``"reject"``."""
        return verdict_of(self.findings)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the verdict is not "trust", one sentence each, the most telling first."""
        return tuple(finding.text for finding in self.findings)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the run, read-only."""
        return MappingProxyType(self._settings)

    @property
    def headline(self) -> str:
        """The verdict and the estimate in one sentence."""
        return headline(self)

    def summary(self) -> str:
        """The result as text for a terminal of 80 columns.

        Per chain and over all chains: estimate, standard error, draws, effective draws and status;
        then the settings that matter, the verdict in one sentence, and the reasons for it.
        """
        return render(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the draws, as plain values that ``json.dumps`` takes; NaN becomes None.

        Returns:
            Keys llc, se, ess, rhat, verdict, reasons, predicted_bias, init_loss, init_loss_se,
            chains (one dict per chain) and settings.
        """
        names = ("llc", "se", "ess", "rhat", "verdict", "reasons", "init_loss", "init_loss_se")
        bias = None if self.predicted_bias is None else asdict(self.predicted_bias)
        values = {name: getattr(self, name) for name in names} | {
            "predicted_bias": bias,
            "chains": self.chains.to_dict("records"),
            "settings": self._settings,
        }
        return {name: _plain(value) for name, value in values.items()}

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Draw the traces, see :func:`devsample.plots.plot_trace`; saved to ``path`` if given."""
        from devsample.plots import plot_trace

        return plot_trace(self, path)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    # A mapping of arrays has no useful equality: two results are equal if they are one object.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<LLCResult {self.headline.rstrip('.')}>"


# --- from the draws ------------------------------------------------------------------------------


def _traces(draws: pd.DataFrame, chains: Sequence[ChainInfo]) -> dict[str, list[Draws]]:
    """What each chain recorded, shape (num_draws_i,), by quantity and in the order of ``chains``."""
    rows = {chain: rows for chain, rows in draws.groupby("chain")}
    return {
        name: [
            rows[info.chain][name].to_numpy(np.float64) if info.chain in rows else np.empty(0)
            for info in chains
        ]
        for name in ("llc", "loss", "baseline")
    }


def _lost_chains(chains: Sequence[ChainInfo], traces: Mapping[str, Sequence[Draws]]) -> dict[int, LostChain]:
    """The chains that cannot be used, by index."""
    lost = {}
    longest = max((len(trace) for trace in traces["llc"]), default=0)
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
        elif info.status == "stopped" and 2 * len(llc) < longest:
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


_WITH_LAW = ("SGLD", "SGHMC", "MALA", "HMC")


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
        if at_center.get(name) is not None:
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


def _values(
    chains: Sequence[ChainInfo],
    traces: Mapping[str, Sequence[Draws]],
    each: Mapping[int, Description],
    num_draws: int,
) -> dict[str, Any]:
    """The entries of the mapping, in devinterp's order."""
    width = max(num_draws, *(len(trace) for trace in traces["llc"]))

    def padded(name: str) -> Draws:
        out = np.full((len(chains), width), np.nan)
        for row, trace in zip(out, traces[name], strict=True):
            row[: len(trace)] = trace
        return out

    means = {info.chain: each[info.chain].mean if info.chain in each else math.nan for info in chains}
    return {
        "llc/mean": math.nan,
        "llc/std": float(_std(np.array([entry.mean for entry in each.values()]))),
        **{f"llc-chain/{chain}": mean for chain, mean in means.items()},
        "loss/trace": padded("loss"),
        "llc/trace": padded("llc"),
    }


def _running(llc: Draws, used: Sequence[int], shared: int) -> dict[str, Draws]:
    """Running means of every chain, and their mean and spread over the chains in use."""
    with np.errstate(invalid="ignore", over="ignore"):  # a diverged chain
        trace = np.cumsum(llc, axis=1) / np.arange(1, llc.shape[1] + 1)
    means, stds = np.full((2, llc.shape[1]), np.nan)
    means[:shared] = trace[used, :shared].mean(axis=0)
    stds[:shared] = _std(trace[used, :shared])
    return {"llc/trace": trace, "llc/means": means, "llc/stds": stds}


def _std(values: Draws) -> Draws:
    """Unbiased standard deviation over the first axis; NaN, without a warning, for one value."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return np.asarray(values.std(axis=0, ddof=1))


def _chains_table(
    chains: Sequence[ChainInfo], lost: Mapping[int, LostChain], each: Mapping[int, Description]
) -> pd.DataFrame:
    import pandas as pd

    nothing = Description(math.nan, math.nan, math.nan, math.nan, 0, 0)
    rows = []
    for info in chains:
        numbers, missing = each.get(info.chain, nothing), lost.get(info.chain)
        rows.append(
            {
                "chain": info.chain,
                "status": missing.status if missing else info.status,
                "llc": numbers.mean,
                "se": numbers.se,
                "ess": numbers.ess,
                "draws": info.num_draws,
                "steps": info.steps,
                "seconds": info.seconds,
                "attempt": info.attempt,
                "device": info.device,
                "seed": None,
                "gradient_noise": math.nan if info.gradient_noise is None else info.gradient_noise,
                "hessian_trace": math.nan if info.hessian_trace is None else info.hessian_trace,
                "message": info.message or (missing.why if missing else ""),
            }
        )
    table = pd.DataFrame(rows)
    # Seeds may have more than 64 bits, and a None must not turn the others into floats.
    table["seed"] = pd.Series([info.seed for info in chains], dtype=object)
    return table


def _plain(value: Any) -> Any:
    """The value in JSON's types."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    return str(value)
