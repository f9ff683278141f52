"""Callbacks under the names of devinterp 1.x; `devsample.compat.devinterp` has them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from devsample.errors import InvalidArgumentError
from devsample.samplers.base import check_range

if TYPE_CHECKING:
    import pandas as pd

Trace = NDArray[np.float64]


class SamplerCallback:
    """What such scripts derive their callbacks from.

    A callback is called at every draw with the keywords it takes of chain, draw, step, loss, baseline,
    llc, init_loss, nbeta, model, optimizer, batch and device. In runs with several processes its arrays
    whose first axis is num_chains come back merged by row; other state needs ``merge(self, other)``.

    Args:
        device: kept as ``.device``.
    """

    def __init__(self, device: Any = "cpu") -> None:
        self.device = str(device)

    def share_memory_(self) -> SamplerCallback:
        """Nothing: state comes back by row."""
        return self

    def get_results(self) -> dict[str, Any]:
        """What the callback reports."""
        raise NotImplementedError(f"{type(self).__name__} needs a method get_results() that returns a dict.")


class _LossTrace(SamplerCallback):
    """Keeps the loss of every draw, shape (num_chains, num_draws); NaN where there was none."""

    def __init__(self, num_chains: int, num_draws: int, device: Any = "cpu") -> None:
        super().__init__(device)
        self.num_chains, self.num_draws = num_chains, num_draws
        self.losses: Trace = np.full((num_chains, num_draws), np.nan)

    def __call__(self, chain: int, draw: int, loss: float) -> None:
        self.losses[chain, draw] = loss

    def _running(self, factor: float | Trace = 1.0, offset: float = 0.0) -> Trace:
        """The running mean of the losses, less ``offset`` and times ``factor``."""
        count = np.arange(1, self.num_draws + 1)
        return np.asarray(factor * (np.cumsum(self.losses, axis=1) / count - offset))


class _WithTemperature(_LossTrace):
    def __init__(
        self,
        num_chains: int,
        num_draws: int,
        init_loss: float,
        device: Any = "cpu",
        eval_field: str = "evaluate",
        nbeta: float | None = None,
        temperature: float | None = None,
    ) -> None:
        super().__init__(num_chains, num_draws, device)
        if temperature is not None:
            raise InvalidArgumentError("temperature: give nbeta, the n over the temperature.")
        self.init_loss = float(init_loss)
        self.nbetas: Trace = np.full((num_chains, 1), np.nan if nbeta is None else nbeta)

    def __call__(self, chain: int, draw: int, loss: float, nbeta: float) -> None:  # type: ignore[override]
        self.losses[chain, draw] = loss
        if np.isnan(self.nbetas[chain, 0]):
            self.nbetas[chain, 0] = nbeta


class LLCEstimator(_WithTemperature):
    r"""Learning coefficients with a given L(w*), by chain: nβ (mean loss − init_loss).

    The run's own result has the same with an error bar, and with the paired baseline a much smaller one.

    Args:
        num_chains, num_draws: of the run.
        init_loss: L(w*).
        device, eval_field: not used.
        nbeta: nβ; None: the run's.
    """

    def get_results(self) -> dict[str, Any]:
        """Keys init_loss, llc/mean, llc/std, llc-chain/{i}, loss/trace."""
        each = self.nbetas[:, 0] * (self.losses.mean(axis=1) - self.init_loss)
        return {
            "init_loss": self.init_loss,
            "llc/mean": float(each.mean()),
            "llc/std": float(_std(each)),
            **{f"llc-chain/{chain}": float(value) for chain, value in enumerate(each)},
            "loss/trace": self.losses,
        }


class OnlineLLCEstimator(_WithTemperature):
    """The running estimates: at each draw, from the losses up to it; see `LLCEstimator`.

    Args:
        num_chains, num_draws: of the run.
        init_loss: L(w*).
        device, eval_field: not used.
        nbeta: nβ; None: the run's.
    """

    def get_results(self) -> dict[str, Any]:
        """Keys init_loss, llc/means and llc/stds (num_draws,), llc/trace and loss/trace (chains, draws)."""
        trace = self._running(self.nbetas, self.init_loss)
        return {
            "init_loss": self.init_loss,
            "llc/means": trace.mean(axis=0),
            "llc/stds": _std(trace),
            "llc/trace": trace,
            "loss/trace": self.losses,
        }


class WBIC(_LossTrace):
    """n times the running mean of the losses: the WBIC where nβ = n/ln n, see `devsample.observables.wbic`.

    Args:
        num_chains, num_draws: of the run.
        n: samples in the data set.
        device: not used.
    """

    def __init__(self, num_chains: int, num_draws: int, n: int, device: Any = "cpu") -> None:
        super().__init__(num_chains, num_draws, device)
        self.n = n

    def get_results(self) -> dict[str, Any]:
        """Keys wbic/means and wbic/stds (num_draws,), wbic/trace (chains, draws)."""
        trace = self._running(self.n)
        return {"wbic/means": trace.mean(axis=0), "wbic/stds": _std(trace), "wbic/trace": trace}


class Recorded(SamplerCallback):
    """Collects an observable of the run; the functions of `devsample.compat.devinterp` see to that.

    Args:
        num_chains, num_draws: of the run.
        device: not used.
    """

    key: ClassVar[str]

    def __init__(self, num_chains: int, num_draws: int, device: Any = "cpu") -> None:
        super().__init__(device)
        self.trace: Trace = np.full((num_chains, num_draws), np.nan)

    @property
    def observable(self) -> str:
        """The name of the observable."""
        return self.key

    def __call__(self) -> None:
        """Nothing: the values come with the table of draws."""

    def merge(self, other: Recorded) -> None:
        """Nothing to merge."""

    def take(self, rows: pd.DataFrame) -> None:
        """Keep the values of new draws."""
        more = int(rows["draw"].max()) + 1 - self.trace.shape[1]
        if more > 0:
            self.trace = np.pad(self.trace, ((0, 0), (0, more)), constant_values=np.nan)
        self.trace[rows["chain"], rows["draw"]] = rows[self.observable]

    def get_results(self) -> dict[str, Any]:
        """Key {name}/trace (chains, draws)."""
        if np.isnan(self.trace).all():
            raise InvalidArgumentError(
                f"callbacks: {type(self).__name__} got nothing. Use the functions of "
                f"devsample.compat.devinterp, or observables={self.observable!r} in place of the callback."
            )
        return {f"{self.key}/trace": self.trace}


class _Norm(Recorded):
    """The p-norm of a vector of the step, see the observables of the same name.

    Args:
        num_chains, num_draws: of the run.
        device: not used.
        p_norm: p > 0.
    """

    def __init__(self, num_chains: int, num_draws: int, device: Any = "cpu", p_norm: float = 2) -> None:
        super().__init__(num_chains, num_draws, device)
        self.p_norm = check_range("p_norm", p_norm, above=0)

    @property
    def observable(self) -> str:
        """The name of the observable."""
        return self.key if self.p_norm == 2 else f"{self.key}:{self.p_norm:g}"


class GradientNorm(_Norm):
    """|nβ ĝ|_p, ĝ the gradient estimate of the step; key gradient_norm/trace."""

    key = "gradient_norm"


class NoiseNorm(_Norm):
    """|σ R|_p, R the normals of the step; key noise_norm/trace."""

    key = "noise_norm"


class WeightNorm(_Norm):
    """|w|_p of the moving entries; key weight_norm/trace."""

    key = "weight_norm"


class MalaAcceptanceRate(Recorded):
    """Acceptance of the Euler proposal from each draw, see `devsample.observables.mala_acceptance`.

    Args:
        num_chains, num_draws: of the run.
        nbeta, learning_rate, device: not used; the run's values count.
    """

    key = "mala_acceptance"

    def __init__(
        self,
        num_chains: int,
        num_draws: int,
        nbeta: Any = None,
        learning_rate: Any = None,
        device: Any = "cpu",
    ) -> None:
        super().__init__(num_chains, num_draws, device)

    def get_results(self) -> dict[str, Any]:
        """Keys mala_accept/trace (chains, draws), mala_accept/mean and mala_accept/std over all draws."""
        (trace,) = super().get_results().values()
        return {
            "mala_accept/trace": trace,
            "mala_accept/mean": float(np.nanmean(trace)),
            "mala_accept/std": float(np.nanstd(trace)),
        }


def _std(values: Trace) -> Trace:
    """Unbiased standard deviation over the first axis; NaN for one value."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return np.asarray(values.std(axis=0, ddof=1))
