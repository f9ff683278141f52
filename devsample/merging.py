"""Several runs' records as those of one run: more chains, more draws, and no draw twice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from devsample.analysis import ChainInfo, Recorded
from devsample.errors import InvalidArgumentError, ReportWarning
from devsample.tables import plain

if TYPE_CHECKING:
    import pandas as pd

# What may differ between runs whose draws have one law. A setting that is not named here must agree.
FREE = frozenset(
    {"num_draws", "num_chains", "seed", "cores", "threads_per_chain", "chains_per_process", "not_stackable"}
    | {
        "run_dir",
        "seconds",
        "baseline_cache",
        "curvature",
        "descent",
        "auto",
        "nbeta_rule",
        "nbeta_batch",
        "observables",
        "until",
    }
)
LAYOUT = ("threads_per_chain", "chains_per_process")
SUMS = ("seconds", "device_seconds", "gradients", "forwards")


@dataclass
class _Source:
    """One chain of one of the runs."""

    run: int
    chain: int
    info: ChainInfo
    recorded: Recorded
    row: int
    draws: pd.DataFrame


def union(results: Sequence[Recorded]) -> Recorded:
    """The records of all runs as one.

    Raises:
        InvalidArgumentError: nothing is given, the runs differ in what defines the law, or one chain has
            other draws in another run.

    Warns:
        ReportWarning: a report that cannot be joined is left out.
    """
    if not results:
        raise InvalidArgumentError("merge: no results are given.")
    for number, other in enumerate(results[1:], start=1):
        _check_same_law(results[0], other, number)
    runs, sources = _sources(results)
    chosen: dict[Hashable, _Source] = {}
    for source in sources:
        key = _key(runs, source)
        chosen[key] = _longer(chosen[key], source, runs) if key in chosen else source
    kept = list(chosen.values())
    init_loss, init_loss_se = _init_loss(results)
    return Recorded(
        draws=_draws(kept),
        chains=tuple(_renumbered(number, source, runs) for number, source in enumerate(kept)),
        settings=_settings(results, kept, runs),
        init_loss=init_loss,
        init_loss_se=init_loss_se,
        online=any(one.online for one in results),
        at_center=_at_center(results),
        reports=_reports(results, kept),
        provenance=_provenance(results, runs),
    )


# --- one law -------------------------------------------------------------------------------------


def _check_same_law(first: Recorded, other: Recorded, number: int) -> None:
    """An error that names all settings that differ, with both values."""
    differing = []
    for name in first.settings.keys() & other.settings.keys() - FREE:
        one, two = plain(first.settings[name]), plain(other.settings[name])
        if one != two:
            differing.append(f"{name}: {one!r} and {two!r}; {_remedy(name)}")
    prints = (recorded.provenance.get("fingerprints") or {} for recorded in (first, other))
    one_prints, other_prints = prints
    for name in one_prints.keys() & other_prints.keys():
        one, two = one_prints[name], other_prints[name]
        if one is not None and two is not None and one != two:
            differing.append(f"{name}: fingerprints {one[:12]} and {two[:12]}; {_remedy(name)}")
    if first.settings.get("baseline") in ("full", "fixed") and first.init_loss != other.init_loss:
        both = f"{first.init_loss!r} and {other.init_loss!r}"
        differing.append(f"init_loss: {both}; give init_loss={first.init_loss!r} to both")
    if not differing:
        return
    text = (
        f"merge: results 0 and {number} were not drawn from one law, so their draws cannot be taken together."
    )
    text += "".join(f"\n  {line}." for line in sorted(differing))
    if any(recorded.settings.get("auto") for recorded in (first, other)):
        text += (
            "\n  Settings that are chosen automatically depend on the seed: give lr, localization and "
            "num_burnin_steps."
        )
    raise InvalidArgumentError(text)


_ARGUMENTS = ("num_burnin_steps", "num_steps_bw_draws", "grad_accum_steps", "baseline", "start", "train_mode",
              "autocast_dtype")  # fmt: skip
_REMEDIES = {
    "weights": "the models differ; estimate each by itself",
    "data": "the recipes for the data differ; use the same loader_spec",
    "evaluate": "the losses differ; use the same evaluate",
    "masks": "other parameters move; use the same param_masks",
    "sampler": "use the same sampling_method",
    "num_samples": "use the same loader_spec",
    "batch_size": "use the same loader_spec",
    "sampling": "use the same loader_spec",
}


def _remedy(name: str) -> str:
    if name in _REMEDIES:
        return _REMEDIES[name]
    if name in _ARGUMENTS:
        return f"use the same {name}"
    return "use the same optimizer_kwargs, data and masks"


# --- chains --------------------------------------------------------------------------------------


def _sources(results: Sequence[Recorded]) -> tuple[list[dict[str, Any]], list[_Source]]:
    """The provenance of every run that is not yet in the list, and every chain with its run's number."""
    runs: list[dict[str, Any]] = []
    sources = []
    for recorded in results:
        numbers = []
        for one in _runs(recorded):
            if one not in runs:
                runs.append(one)
            numbers.append(runs.index(one))
        rows = dict(iter(recorded.draws.groupby("chain")))
        for row, info in enumerate(recorded.chains):
            run = numbers[info.run or 0]
            chain = info.chain if info.source_chain is None else info.source_chain
            draws = rows.get(info.chain, recorded.draws.iloc[:0])
            sources.append(_Source(run, chain, info, recorded, row, draws))
    return runs, sources


def _runs(recorded: Recorded) -> list[dict[str, Any]]:
    if "runs" in recorded.provenance:
        return list(recorded.provenance["runs"])
    known = {"seed": recorded.settings.get("seed"), "settings": recorded.settings}
    return [plain(recorded.provenance | known)]


def _key(runs: Sequence[Mapping[str, Any]], source: _Source) -> Hashable:
    """What a chain's random numbers depend on: its seed and its number, as in `seeds.chain_keys`."""
    seed = runs[source.run]["seed"]
    if isinstance(seed, list):
        return seed[source.chain], 0
    if seed is None:
        raise InvalidArgumentError(
            f"merge: run {source.run} does not say its seed, so a chain of it might count twice; "
            "only results with settings['seed'] can be merged."
        )
    return seed, source.chain


def _longer(one: _Source, other: _Source, runs: Sequence[Mapping[str, Any]]) -> _Source:
    """Of two records of one chain the one to keep, if they agree as far as both go."""
    _check_overlap(one, other, runs)
    short, long = (one, other) if len(other.draws) > len(one.draws) else (other, one)
    lost_by_accident = long.info.status in ("failed", "died")
    if lost_by_accident and short.info.status in ("done", "stopped"):
        long, short = short, long
    extra = [name for name in short.draws if name not in long.draws]
    if extra and len(long.draws) >= len(short.draws):
        draws = long.draws.reset_index(drop=True).join(short.draws[extra].reset_index(drop=True))
        return replace(long, draws=draws)
    return long


def _check_overlap(one: _Source, other: _Source, runs: Sequence[Mapping[str, Any]]) -> None:
    shared = min(len(one.draws), len(other.draws))
    for name in one.draws.columns.intersection(other.draws.columns):
        if name == "chain":
            continue
        first, second = (source.draws[name].to_numpy()[:shared] for source in (one, other))
        differs = (first != second) & ~((first != first) & (second != second))  # NaN agrees with NaN
        if not differs.any():
            continue
        at = int(np.argmax(differs))
        settings = [runs[source.run]["settings"] for source in (one, other)]
        layout = [
            f"{key} {settings[0].get(key)} and {settings[1].get(key)}"
            for key in LAYOUT
            if settings[0].get(key) != settings[1].get(key)
        ]
        if one.info.device != other.info.device:
            layout.append(f"device {one.info.device} and {other.info.device}")
        cause = f"They ran with {', '.join(layout)}, which changes rounding" if layout else ""
        raise InvalidArgumentError(
            f"merge: runs {one.run} and {other.run} both hold chain {one.chain} of seed "
            f"{runs[one.run]['seed']}, but at draw {at} {name} is {first[at]!s} and {second[at]!s}. "
            f"{cause or 'Something else was changed'}; merge one of them, or run the other with another seed."
        )


def _renumbered(number: int, source: _Source, runs: Sequence[Mapping[str, Any]]) -> ChainInfo:
    seed = runs[source.run]["seed"]
    own = seed[source.chain] if isinstance(seed, list) else seed
    return replace(source.info, chain=number, seed=own, run=source.run, source_chain=source.chain)


def _draws(kept: Sequence[_Source]) -> pd.DataFrame:
    import pandas as pd

    tables = [source.draws.assign(chain=number) for number, source in enumerate(kept)]
    filled = [table for table in tables if len(table)] or tables[:1]
    return pd.concat(filled, ignore_index=True)


# --- everything else -----------------------------------------------------------------------------


def _init_loss(results: Sequence[Recorded]) -> tuple[float, float | None]:
    """L_n(w*): what all say, else the mean of what each has measured on samples of its own."""
    values = list(dict.fromkeys((one.init_loss, one.init_loss_se) for one in results))
    if len(values) == 1:
        return values[0]
    losses = [loss for loss, _ in values]
    errors = [error for _, error in values if error is not None]
    se = math.hypot(*errors) / len(values) if len(errors) == len(values) else None
    return float(np.mean(losses)), se


def _at_center(results: Sequence[Recorded]) -> dict[str, float]:
    names = dict.fromkeys(name for one in results for name in one.at_center)
    return {
        name: float(np.mean([one.at_center[name] for one in results if name in one.at_center]))
        for name in names
    }


def _settings(
    results: Sequence[Recorded], kept: Sequence[_Source], runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Those that agree; lists by run of layout and the like, where they do not."""
    settings: dict[str, Any] = {}
    observables: dict[str, Any] = {}
    for one in reversed(results):
        settings |= one.settings
        observables |= one.settings.get("observables") or {}
    for name in FREE & settings.keys():
        values = [run["settings"].get(name) for run in runs]
        distinct = [value for place, value in enumerate(values) if value not in values[:place]]
        if len(distinct) > 1:
            settings[name] = distinct
    if "observables" in settings:
        settings["observables"] = observables
    if "seconds" in settings:
        settings["seconds"] = float(sum(run["settings"].get("seconds") or 0.0 for run in runs))
    settings["auto"] = any(run["settings"].get("auto") for run in runs)
    return settings | {
        "num_chains": len(kept),
        "num_draws": max(len(source.draws) for source in kept),
    }


def _provenance(results: Sequence[Recorded], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of what was spent, what is known of the inputs, and each run's own."""
    prints: dict[str, Any] = {}
    for one in results:
        for name, value in (one.provenance.get("fingerprints") or {}).items():
            prints[name] = prints.get(name) or value
    merged: dict[str, Any] = {"fingerprints": prints} if prints else {}
    started = [run["started"] for run in runs if run.get("started")]
    if started:
        merged["started"] = min(started)
    for name in SUMS:
        values = [run[name] for run in runs if run.get(name) is not None]
        if values:
            merged[name] = sum(values)
    for name in ("versions", "samples_per_gradient"):
        values = [run.get(name) for run in runs]
        if all(value == values[0] for value in values) and values[0] is not None:
            merged[name] = values[0]
    return merged | {"runs": runs}


def _reports(results: Sequence[Recorded], kept: Sequence[_Source]) -> dict[str, Any]:
    """Callbacks' reports: rows of chains joined, and what all runs agree on."""
    joined: dict[str, Any] = {}
    left_out = []
    for name in dict.fromkeys(name for one in results for name in one.reports):
        if all(name in one.reports for one in results):
            rows = _rows(name, kept)
            if rows is not None:
                joined[name] = rows
                continue
            first, *others = (one.reports[name] for one in results)
            if all(_equal(first, value) for value in others):
                joined[name] = first
                continue
        left_out.append(name)
    if left_out:
        warnings.warn(
            "merge: left out, since they are no arrays with a row per chain and not the same in all results: "
            f"{', '.join(left_out)}.",
            ReportWarning,
            stacklevel=4,
        )
    return joined


def _rows(name: str, kept: Sequence[_Source]) -> Any:
    """The rows of the chains in a report that has one for each, or None; shorter rows end in NaN."""
    rows = []
    for source in kept:
        value = source.recorded.reports[name]
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        if not isinstance(array, np.ndarray) or array.ndim == 0 or len(array) != len(source.recorded.chains):
            return None
        rows.append(array[source.row])
    if len({(row.ndim, row.dtype, row.shape[1:]) for row in rows}) > 1:
        return None
    if len({row.shape for row in rows}) > 1:
        if rows[0].dtype.kind != "f":
            return None
        longest = max(len(row) for row in rows)
        rows = [_lengthened(row, longest) for row in rows]
    whole = np.stack(rows)
    return torch.from_numpy(whole) if isinstance(kept[0].recorded.reports[name], torch.Tensor) else whole


def _lengthened(row: np.ndarray, length: int) -> np.ndarray:
    out = np.full((length, *row.shape[1:]), np.nan, row.dtype)
    out[: len(row)] = row
    return out


def _equal(one: Any, other: Any) -> bool:
    try:
        if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
            return bool(np.array_equal(one, other, equal_nan=True))
        if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
            return bool(torch.equal(one, other))
        return bool(one == other)
    except Exception:  # two objects that cannot be compared
        return False
