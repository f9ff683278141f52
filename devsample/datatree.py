"""A result as an xarray DataTree, as ArviZ reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from devsample.tables import observable_names

if TYPE_CHECKING:
    import xarray as xr

    from devsample.results import LLCResult

_SETTINGS = ("sampler", "lr", "nbeta", "localization", "num_burnin_steps", "num_steps_bw_draws",
             "num_samples", "batch_size", "sampling", "baseline")  # fmt: skip


def make_tree(result: LLCResult) -> xr.DataTree:
    """See `LLCResult.to_xarray`.

    Raises:
        ImportError: xarray is not installed, or is older than its DataTree.
    """
    try:
        import xarray
        from xarray import DataTree
    except ImportError as error:
        raise ImportError(
            "to_xarray needs xarray 2024.11 or newer: pip install 'devsample[xarray]'"
        ) from error
    used = result.chains["llc"].notna()
    chains = result.chains.loc[used, "chain"].to_numpy()
    rows = [result.draws[result.draws["chain"] == chain] for chain in chains]
    length = min(len(one) for one in rows)

    def dataset(names: list[str], arrays: dict[str, np.ndarray]) -> xr.Dataset:
        columns = {name: np.stack([one[name].to_numpy()[:length] for one in rows]) for name in names}
        variables = {
            name: (("chain", "draw", *(f"{name}_dim_{i}" for i in range(values.ndim - 2))), values)
            for name, values in (columns | arrays).items()
        }
        coords = {"chain": chains, "draw": np.arange(length)}
        return xarray.Dataset(variables, coords=coords, attrs=_library(result))

    arrays = {name: values[used.to_numpy(), :length] for name, values in _arrays(result).items()}
    stats = ["baseline", "step", *observable_names(result.draws)]
    groups = {"posterior": dataset(["llc", "loss"], {}), "sample_stats": dataset(stats, arrays)}
    tree = DataTree.from_dict({f"/{name}": group for name, group in groups.items()})
    tree.attrs.update(_attributes(result, result.chains.loc[~used]))
    return tree


def _arrays(result: LLCResult) -> dict[str, np.ndarray]:
    """What was recorded as an array at every draw, by name; shape (num_chains, num_draws, ...)."""
    whole = result["llc/trace"].shape
    return {
        key.removesuffix("/trace"): value
        for key, value in result.items()
        if key.endswith("/trace")
        and isinstance(value, np.ndarray)
        and value.ndim > 2
        and value.shape[:2] == whole
    }


def _library(result: LLCResult) -> dict[str, Any]:
    import devsample

    known = {
        "created_at": result.provenance.get("started"),
        "inference_library": "devsample",
        "inference_library_version": devsample.__version__,
        "sampling_time": result.provenance.get("seconds"),
        "tuning_steps": result.settings.get("num_burnin_steps"),
    }
    return {name: value for name, value in known.items() if value is not None}


def _attributes(result: LLCResult, lost: Any) -> dict[str, Any]:
    """Texts and numbers only, which every file format of xarray takes."""
    chosen = {name: result.settings.get(name) for name in _SETTINGS}
    known = {
        "llc": result.llc,
        "se": result.se,
        "verdict": result.verdict,
        "reasons": list(result.reasons),
        "init_loss": result.init_loss,
        "init_loss_se": result.init_loss_se,
        "lost_chains": [f"{row.chain} {row.status}: {row.message}" for row in lost.itertuples()],
    } | {name: value for name, value in chosen.items() if isinstance(value, (int, float, str))}
    return {name: value for name, value in known.items() if value is not None} | _library(result)
