"""The result of a run: the estimate, its error bar, the verdict, and the tables behind them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from devsample.analysis import Analysis, ChainInfo, Recorded, analyse
from devsample.diagnostics import Description, PredictedBias
from devsample.errors import InvalidArgumentError
from devsample.measured import MeasuredBias, measured_bias
from devsample.summary import headline, render, short
from devsample.tables import (
    make_chains_table,
    make_values,
    observable_means,
    other_reports,
    plain,
)
from devsample.verdict import Finding, Verdict, verdict_of

if TYPE_CHECKING:
    from os import PathLike

    import pandas as pd
    import xarray as xr
    from matplotlib.figure import Figure

    from devsample.diagnosis import Diagnostics

__all__ = ["ChainInfo", "LLCResult"]


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
    have; one that is stopped before half of the longest is left out. In a merged result that is so
    within each of its runs.

    Attributes:
        estimate: mean, standard error, effective draws and R-hat over the chains in use.
        findings: what speaks against the estimate, the most telling first.
        predicted_bias: bias from the step size, None if there is no law for it.
        draws: one row per recorded draw (chain, draw, step, loss, baseline, llc, then observables),
            left-out chains included.
        chains: one row per chain (chain, status, llc, se, ess, draws, ...); llc, se and ess are
            NaN for a chain that is left out. A merged result has run and source_chain besides.
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
    _values: dict[str, Any]
    _recorded: Recorded
    _analysis: Analysis

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
        provenance: Mapping[str, Any] = MappingProxyType({}),
    ) -> LLCResult:
        """Estimate from the draws of a run.

        Args:
            draws: columns chain, draw, step (integers), loss, baseline, llc (float64), then one per
                observable; sorted by chain and draw.
            chains: how each chain ended, also those without draws.
            settings: of the run; kept, and read by the diagnostics.
            init_loss: L_n(w*).
            init_loss_se: its standard error.
            online: whether the mapping has devinterp's running estimates.
            at_center: ``"gradient_noise"`` and ``"hessian_trace"`` at w*, as in ChainInfo; either
                may be missing.
            reports: what callbacks reported; further keys of the mapping.
            provenance: where the numbers come from, in JSON's types.

        Raises:
            AllChainsFailedError: no chain can be used; carries the draws.
        """
        return cls._of(
            Recorded(
                draws=draws,
                chains=tuple(chains),
                settings=dict(settings),
                init_loss=float(init_loss),
                init_loss_se=None if init_loss_se is None else float(init_loss_se),
                online=online,
                at_center=dict(at_center),
                reports=other_reports(reports, draws),
                provenance=dict(provenance),
            )
        )

    @classmethod
    def _of(cls, recorded: Recorded, analysis: Analysis | None = None) -> LLCResult:
        if analysis is None:
            analysis = analyse(recorded)
        return cls(
            estimate=analysis.estimate,
            findings=analysis.findings,
            predicted_bias=analysis.bias,
            draws=recorded.draws,
            chains=make_chains_table(recorded, analysis),
            init_loss=recorded.init_loss,
            init_loss_se=recorded.init_loss_se,
            _values=make_values(recorded, analysis),
            _recorded=recorded,
            _analysis=analysis,
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
    def measured_bias(self) -> MeasuredBias | None:
        """Bias from the step size, as chains with lr/2 show it; None if not measured."""
        used = [self._recorded.chains[i].step_bias for i in self._used()]
        return measured_bias(used, self.llc, self._recorded.settings.get("lr", math.nan))

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
        return MappingProxyType(self._recorded.settings)

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Where the numbers come from, read-only, in JSON's types.

        ===================  ===================================================================
        ``versions``         of devsample, torch, numpy and Python, and the platform
        ``started``          when the run started: ISO 8601, UTC
        ``fingerprints``     SHA-256 of ``weights``, ``data`` (the recipe), ``evaluate`` and
                             ``masks``; None where there is none, see `devsample.provenance`
        ``seconds``          wall time of the run
        ``device_seconds``   time that chains computed, added up over chains; chains that were
                             computed together count once
        ``gradients``        gradients taken by the chains that are in the table, burn-in included,
                             each of ``samples_per_gradient`` samples
        ``forwards``         evaluations without gradient, of the same number of samples
        ``seed``             the run's seed, or one a chain
        ``settings``         as in ``.settings``
        ``runs``             of a merged result: the provenance of each of its runs
        ===================  ===================================================================
        """
        recorded = self._recorded
        known = {"seed": recorded.settings.get("seed"), "settings": recorded.settings}
        return MappingProxyType(plain(dict(recorded.provenance) | known))

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
            Keys llc, se, ess, rhat, verdict, reasons, predicted_bias, measured_bias, init_loss, init_loss_se,
            observables (mean and standard error of each), chains (one dict per chain), settings and
            provenance.
        """
        names = ("llc", "se", "ess", "rhat", "verdict", "reasons", "init_loss", "init_loss_se")
        bias = None if self.predicted_bias is None else asdict(self.predicted_bias)
        values = {name: getattr(self, name) for name in names} | {
            "predicted_bias": bias,
            "measured_bias": None if self.measured_bias is None else asdict(self.measured_bias),
            "observables": observable_means(self._recorded, self._used()),
            "chains": self.chains.to_dict("records"),
            "settings": self.settings,
            "provenance": self.provenance,
        }
        return {name: plain(value) for name, value in values.items()}

    def to_xarray(self) -> xr.DataTree:
        """The draws as ArviZ reads them: a DataTree with the dimensions chain and draw.

        Group ``posterior`` has llc and loss, ``sample_stats`` has baseline, step and the observables;
        the attributes of the tree hold the estimate, the verdict and the main settings. Chains that
        are left out are not in it; its attribute ``lost_chains`` names them. All chains are cut to
        the number of draws of the shortest.

        Raises:
            ImportError: xarray is not installed.
        """
        from devsample.datatree import make_tree

        return make_tree(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything into one safetensors file, which holds arrays and JSON and no code.

        The file appears whole or not at all. One that was saved before is replaced; any other file
        is left as it is.

        Args:
            path: of the file, e.g. ``"run.safetensors"``.

        Raises:
            ResultFileError: ``path`` holds something else, or cannot be written.

        Warns:
            ReportWarning: something a callback has reported is neither an array nor plain values;
                it is named and left out.
        """
        from devsample.storage import write_result

        write_result(path, self._recorded, self._analysis)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> LLCResult:
        """The result that `save` wrote: the same estimate, verdict, keys and draws. Runs no code.

        Raises:
            ResultFileError: the file is damaged, of another kind, or of a newer format.
        """
        from devsample.storage import read_result

        return cls._of(*read_result(path))

    def merge(self: LLCResult | Iterable[LLCResult], *others: LLCResult | Iterable[LLCResult]) -> LLCResult:
        """One result from the chains of several: more chains, more draws.

        ``LLCResult.merge(a, b, c)``, ``LLCResult.merge([a, b, c])`` and ``a.merge(b, c)`` are the same.
        The runs must have the same settings but for seeds, the number of chains and of draws, and the
        layout; weights, data, evaluate and masks are compared by their fingerprints. Chains are
        numbered anew; columns run and source_chain of ``.chains`` say what they were, and
        ``provenance["runs"]`` holds the provenance of each run. A chain that is in several runs (same
        seed and number) counts once: as it is where it is longest. Chains of different length all
        count in full.

        Callbacks' arrays with a row per chain are joined; other reports stay if all runs agree.

        Raises:
            InvalidArgumentError: the runs differ in a setting, or one chain has different draws in two
                of them.

        Warns:
            ReportWarning: reports of callbacks that cannot be joined are left out.
        """
        from devsample.merging import union

        results: list[LLCResult] = []
        for one in (self, *others):
            results += [one] if isinstance(one, LLCResult) else one
        for one in results:
            if not isinstance(one, LLCResult):
                raise InvalidArgumentError(f"merge: expected results, got {one!r}.")
        return LLCResult._of(union([one._recorded for one in results]))

    def diagnose(self) -> Diagnostics:
        """Autocorrelation, spread between chains, drift, burn-in advice and checks, of every quantity."""
        from devsample.diagnosis import diagnose

        return diagnose(self)

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
        return short(self)

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        from devsample.markup import render_html

        return render_html(self)

    def _used(self) -> list[int]:
        """Places in the table of the chains that are not left out."""
        return [i for i, info in enumerate(self._recorded.chains) if info.chain in self._analysis.each]
