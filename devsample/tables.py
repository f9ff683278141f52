"""What a result shows of a run: its mapping, its table of chains, plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from devsample.analysis import Analysis, Recorded, groups_of, pool, traces_of
from devsample.diagnostics import Description, Draws
from devsample.records import BASE_FIELDS

if TYPE_CHECKING:
    import pandas as pd

BASE_COLUMNS = ("chain", *(name for name, _ in BASE_FIELDS))


def observable_names(draws: pd.DataFrame) -> list[str]:
    """The numeric columns that are not of every table of draws."""
    return [name for name, kind in draws.dtypes.items() if name not in BASE_COLUMNS and kind.kind in "biuf"]


def other_reports(reports: Mapping[str, Any], draws: pd.DataFrame) -> dict[str, Any]:
    """The reports that the table of draws does not hold as well."""
    in_table = {f"{name}/trace" for name in observable_names(draws)}
    return {name: value for name, value in reports.items() if name not in in_table}


def make_values(recorded: Recorded, analysis: Analysis) -> dict[str, Any]:
    """The entries of the mapping: what callbacks report, observables, then devinterp's in its order."""
    chains, each = recorded.chains, analysis.each
    llc = traces_of(recorded, "llc")
    width = max(int(recorded.settings.get("num_draws", 0)), *(len(trace) for trace in llc))
    observed = {
        f"{name}/trace": _padded(traces_of(recorded, name), width)
        for name in observable_names(recorded.draws)
    }
    means = {info.chain: each[info.chain].mean if info.chain in each else math.nan for info in chains}
    values = recorded.reports | observed
    values |= {
        "llc/mean": analysis.estimate.mean,
        "llc/std": float(_std(np.array([entry.mean for entry in each.values()]))),
        **{f"llc-chain/{chain}": mean for chain, mean in means.items()},
        "loss/trace": _padded(traces_of(recorded, "loss"), width),
        "llc/trace": _padded(llc, width),
        "init_loss": recorded.init_loss,
    }
    if recorded.online:
        used = [i for i, info in enumerate(chains) if info.chain in each]
        values |= _running(values["llc/trace"], used, min(len(llc[i]) for i in used))
    return values


def _padded(traces: Sequence[Draws], width: int) -> Draws:
    out = np.full((len(traces), width), np.nan)
    for row, trace in zip(out, traces, strict=True):
        row[: len(trace)] = trace
    return out


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


def make_chains_table(recorded: Recorded, analysis: Analysis) -> pd.DataFrame:
    """One row per chain; run and source_chain only where results were merged."""
    import pandas as pd

    nothing = Description(math.nan, math.nan, math.nan, math.nan, 0, 0)
    rows = []
    for info in recorded.chains:
        numbers, missing = analysis.each.get(info.chain, nothing), analysis.lost.get(info.chain)
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
                "curvature": math.nan if info.curvature is None else info.curvature,
                "moved": math.nan if info.moved is None else info.moved,
                "message": info.message or (missing.why if missing else ""),
            }
        )
        if info.run is not None:
            rows[-1] |= {"run": info.run, "source_chain": info.source_chain}
    table = pd.DataFrame(rows)
    # Seeds may have more than 64 bits, and a None must not turn the others into floats.
    table["seed"] = pd.Series([info.seed for info in recorded.chains], dtype=object)
    return table


def observable_means(recorded: Recorded, used: Sequence[int]) -> dict[str, dict[str, float]]:
    """Mean and standard error of each observable over the chains in use; NaN if it is not always finite."""
    found = {}
    for name in observable_names(recorded.draws):
        traces = traces_of(recorded, name)
        groups = groups_of(recorded.chains, traces, used)
        if all(np.isfinite(traces[i]).all() for i in used):
            whole = pool(traces, groups)
            found[name] = {"mean": whole.mean, "se": whole.se}
        else:
            found[name] = {"mean": math.nan, "se": math.nan}
    return found


def plain(value: Any) -> Any:
    """The value in JSON's types; what JSON does not know becomes text, and NaN and infinity None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    return str(value)
