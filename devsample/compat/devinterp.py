"""The names that scripts written for devinterp 1.x import.

Change the import line to ``from devsample.compat.devinterp import ...``; the calls stay as they
are. Everything here is devsample's own, under the name that such scripts use.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from devsample import estimate
from devsample.compat.callbacks import (
    WBIC,
    GradientNorm,
    LLCEstimator,
    MalaAcceptanceRate,
    NoiseNorm,
    OnlineLLCEstimator,
    Recorded,
    SamplerCallback,
    WeightNorm,
)
from devsample.data.batches import to_device
from devsample.errors import FeatureNotAvailableError, InvalidArgumentError
from devsample.losses import nbeta_for, read_loss
from devsample.observables import mala_acceptance
from devsample.observables.checks import listed
from devsample.samplers import SGLD, SGNHT, RMSPropSGLD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "SGLD",
    "SGMCMC",
    "SGNHT",
    "WBIC",
    "GradientNorm",
    "LLCEstimator",
    "MalaAcceptanceRate",
    "NoiseNorm",
    "OnlineLLCEstimator",
    "OnlineWBICEstimator",
    "SamplerCallback",
    "WeightNorm",
    "default_nbeta",
    "estimate_learning_coeff",
    "estimate_learning_coeff_with_summary",
    "evaluate_ce",
    "evaluate_mse",
    "get_init_loss_full_batch",
    "get_init_loss_multi_batch",
    "get_init_loss_one_batch",
    "mala_acceptance_probability",
    "optimal_nbeta",
    "plot_trace",
    "sample",
]

P = ParamSpec("P")
R = TypeVar("R")

_NOT_OPTIONS = ("save_noise", "save_mala_vars")  # told the optimizer what to keep for callbacks


def _translated(function: Callable[P, R]) -> Callable[P, R]:
    """The function with callbacks that collect observables, and without options that stood for them."""
    signature = inspect.signature(function)
    call: Callable[..., R] = function

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs).arguments
        options = given.get("optimizer_kwargs")
        if options is not None:
            given["optimizer_kwargs"] = {key: options[key] for key in options if key not in _NOT_OPTIONS}
        callbacks = given.get("callbacks") or ()
        several = callbacks if isinstance(callbacks, Sequence) else [callbacks]
        recorded = [one for one in several if isinstance(one, Recorded)]
        if recorded:
            asked, own = listed(given.get("observables")), given.get("on_records")
            names = dict.fromkeys(one.observable for one in recorded)
            given["observables"] = [*asked, *(name for name in names if name not in asked)]
            takers = [one.take for one in recorded] + ([] if own is None else [own])
            given["on_records"] = functools.partial(_hand_on, takers)
        return call(**given)

    return wrapper


def _hand_on(takers: Sequence[Callable[[Any], Any]], rows: Any) -> None:
    for take in takers:
        take(rows)


estimate_learning_coeff = _translated(estimate.estimate_learning_coeff)
estimate_learning_coeff_with_summary = _translated(estimate.estimate_learning_coeff_with_summary)
sample = _translated(estimate.sample)

OnlineWBICEstimator = WBIC


class SGMCMC:
    """The samplers by method: ``SGMCMC.sgld``, ``SGMCMC.rmsprop_sgld`` and ``SGMCMC.sgnht`` are classes.

    Raises:
        FeatureNotAvailableError: it is made itself.
    """

    sgld, rmsprop_sgld, sgnht = SGLD, RMSPropSGLD, SGNHT

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise FeatureNotAvailableError(
            "SGMCMC is a list of samplers here: use SGMCMC.sgld, SGMCMC.rmsprop_sgld or SGMCMC.sgnht, or "
            "another of devsample.samplers."
        )


def default_nbeta(dataloader: DataLoader[Any] | int, grad_accum_steps: int = 1) -> float:
    r"""Inverse temperature by devinterp's rule, from the number of samples in a step.

    .. math:: n\beta = \frac{m}{\ln m}, \qquad m = \text{batch size} \times \text{grad\_accum\_steps}

    devsample's own default is n/ln n of the whole data set: see `devsample.nbeta_for`.

    Args:
        dataloader: a loader, whose batch size is used, or a number of samples ≥ 1 itself.
        grad_accum_steps: batches per step, ≥ 1.

    Raises:
        InvalidArgumentError: the loader has no batch size.

    Examples:
        >>> round(default_nbeta(64), 2)
        15.39
        >>> default_nbeta(32, grad_accum_steps=2) == default_nbeta(64)
        True
    """
    size = dataloader if isinstance(dataloader, int) else getattr(dataloader, "batch_size", None)
    if size is None:
        raise InvalidArgumentError(
            f"dataloader: expected a DataLoader with a batch size or a number of samples, got "
            f"{dataloader!r}. With a batch_sampler, give the number of samples in a batch."
        )
    return nbeta_for(size * grad_accum_steps)


def evaluate_ce(
    model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Mean cross-entropy of ``model(x)`` against the classes y.

    Args:
        model: gives logits of shape (B, C, ...).
        data: x, and y of shape (B, ...).

    Returns:
        The loss, and ``{"logits": model(x)}``.
    """
    x, y = data
    logits = model(x)
    return F.cross_entropy(logits, y), {"logits": logits}


def evaluate_mse(
    model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Mean squared error of ``model(x)`` against y.

    Args:
        model: gives predictions of y's shape.
        data: x and y.

    Returns:
        The loss, and ``{"output": model(x)}``.
    """
    x, y = data
    output = model(x)
    return F.mse_loss(output, y), {"output": output}


def optimal_nbeta(dataloader: DataLoader[Any] | int, grad_accum_steps: int = 1) -> float:
    """The older name of `default_nbeta`."""
    return default_nbeta(dataloader, grad_accum_steps)


def mala_acceptance_probability(
    prev_point: torch.Tensor | Sequence[torch.Tensor],
    prev_grad: torch.Tensor | Sequence[torch.Tensor],
    prev_loss: torch.Tensor | float,
    current_point: torch.Tensor | Sequence[torch.Tensor],
    current_grad: torch.Tensor | Sequence[torch.Tensor],
    current_loss: torch.Tensor | float,
    learning_rate: float,
) -> float:
    """`devsample.observables.mala_acceptance` of one step, whose loss is the whole potential U.

    Args:
        prev_point: w, a tensor or one a parameter.
        prev_grad: ∇U(w), likewise.
        prev_loss: U(w).
        current_point: w'.
        current_grad: ∇U(w').
        current_loss: U(w').
        learning_rate: ε > 0.

    Examples:
        >>> zero, w = torch.zeros(2), torch.tensor([1.5, 5.5])
        >>> round(mala_acceptance_probability(zero, zero, 0.0, w, w, 16.25, 0.1), 6)
        0.666144
    """
    before, after = (torch.as_tensor(one, dtype=torch.float64).detach() for one in (prev_loss, current_loss))
    chance = mala_acceptance(
        _flat(prev_point),
        _flat(prev_grad),
        before,
        _flat(current_point),
        _flat(current_grad),
        after,
        learning_rate,
    )
    return float(chance)


def _flat(values: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [values] if isinstance(values, torch.Tensor) else values
    return torch.cat([part.detach().double().flatten() for part in parts])


def get_init_loss_multi_batch(
    dataloader: Iterable[Any], n_batches: int, model: torch.nn.Module, evaluate: Any, device: Any = "cpu"
) -> float:
    """The mean of the losses of the first ``n_batches`` batches at the model's weights.

    A run finds L(w*) itself, and with the paired baseline does not depend on it.

    Args:
        dataloader: gives batches.
        n_batches: how many, ≥ 1.
        model: the model.
        evaluate: ``evaluate(model, batch)``.
        device: where batches go.

    Raises:
        InvalidArgumentError: there is no batch.
    """
    with torch.no_grad():
        losses = [
            float(read_loss(evaluate(model, to_device(batch, torch.device(device)))))
            for batch in itertools.islice(dataloader, n_batches)
        ]
    if not losses:
        raise InvalidArgumentError("dataloader, n_batches: there is no batch to take a loss on.")
    return float(np.mean(losses))


def get_init_loss_one_batch(
    dataloader: Iterable[Any], model: torch.nn.Module, evaluate: Any, device: Any = "cpu"
) -> float:
    """`get_init_loss_multi_batch` of one batch."""
    return get_init_loss_multi_batch(dataloader, 1, model, evaluate, device)


def get_init_loss_full_batch(
    dataloader: DataLoader[Any], model: torch.nn.Module, evaluate: Any, device: Any = "cpu"
) -> float:
    """`get_init_loss_multi_batch` of all batches; a shorter last one counts like the others."""
    return get_init_loss_multi_batch(dataloader, len(dataloader), model, evaluate, device)


def plot_trace(
    trace: Any,
    y_axis: str,
    x_axis: str = "step",
    title: str | None = None,
    plot_mean: bool = True,
    plot_std: bool = True,
    fig_size: tuple[float, float] = (12, 9),
    true_lc: float | None = None,
) -> Figure:
    """Draw the rows of a trace, their mean and ± one standard deviation.

    ``result.plot()`` draws a result, with its verdict.

    Args:
        trace: shape (num_chains, num_draws).
        y_axis: its label.
        x_axis: its label.
        title: above the picture.
        plot_mean: whether to draw the mean.
        plot_std: whether to draw the band.
        fig_size: in inches.
        true_lc: a known value, as a line.

    Returns:
        The figure; in a notebook it is shown.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from devsample.plots.base import new_figure

    rows = np.atleast_2d(np.asarray(trace, dtype=float))
    figure = new_figure(*fig_size)
    axes = figure.subplots()
    axes.plot(rows.T, alpha=0.4, linewidth=1)
    draws, mean, std = np.arange(rows.shape[1]), rows.mean(axis=0), rows.std(axis=0)
    if plot_mean:
        axes.plot(draws, mean, color="black", label="mean")
    if plot_std:
        axes.fill_between(
            draws, mean - std, mean + std, color="black", alpha=0.15, label="± sd of the chains"
        )
    if true_lc is not None:
        axes.axhline(true_lc, color="black", linestyle="--", label=f"{true_lc:g}")
    axes.set(xlabel=x_axis, ylabel=y_axis, title=title or "")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return figure


_CALLBACK = "write it as a callback, whose arrays of num_chains rows come back from any process"
_INSTEAD = {
    "BetweenLayerCovariance": _CALLBACK,
    "CovarianceAccumulator": _CALLBACK,
    "GradientDistribution": _CALLBACK + '; observables="gradient_norm" records norms',
    "OnlineLossStatistics": 'read result.draws["loss"]',
    "WithinHeadCovariance": _CALLBACK,
    "EpsilonBetaAnalyzer": "run one estimate for each lr and nbeta, and compare predicted_bias and verdict",
    "optimal_temperature": "give nbeta; default_nbeta(loader) is its value",
    "sample_single_chain": "use sample(..., num_chains=1)",
    "set_seed": "give seed= to the run, and torch.manual_seed to what comes before",
    "validate_callbacks": "leave it out; callbacks are checked before a run",
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise FeatureNotAvailableError(f"devsample.compat.devinterp has no {name}: {_INSTEAD[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
