"""Frozen settings of a run: what was asked for, checked, and what was decided from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch

from devsample.errors import InvalidArgumentError
from devsample.losses import NbetaRule
from devsample.samplers import Kernel, Sampler
from devsample.samplers.foreign import ForeignKernel, foreign_lr
from devsample.seeds import ChainKey, chain_keys

Baseline = Literal["paired", "full", "fixed"]
Start = Literal["center", "prior"]

DECIDED_LATER = {"lr": 1e-6, "nbeta": 1.0}  # stand-ins while only the other values are checked


@dataclass(frozen=True)
class SamplerSpec:
    """A sampler class and its keyword arguments; ``lr`` and ``nbeta`` may be left to the run.

    Attributes:
        kind: the sampler, or any optimizer.
        options: its keyword arguments without ``nbeta``, and a sampler's without ``lr``.
        lr: the step size, or None: chosen from the measured curvature. An optimizer's own, NaN if it
            has none.
        nbeta: nβ, or the rule for it.
    """

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float | None = None
    nbeta: NbetaRule = None

    def kernel(self, *, lr: float, nbeta: float, **changes: Any) -> Kernel:
        """The sampler's update with every value filled in."""
        options = dict(self.options) | changes
        if issubclass(self.kind, Sampler):
            return self.kind.kernel(lr=lr, nbeta=nbeta, **options)
        localization = options.pop("localization", 0.0)
        return ForeignKernel(kind=self.kind, options=options, nbeta=nbeta, localization=localization)

    def settings(self, *, lr: float, nbeta: float, localization: float) -> dict[str, Any]:
        """Every hyperparameter with its value."""
        if issubclass(self.kind, Sampler):
            return dict(vars(self.kernel(lr=lr, nbeta=nbeta, localization=localization)))
        return dict(self.options) | {"lr": lr, "nbeta": nbeta, "localization": localization}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A standard error to be reached: chains go on in rounds until they have it.

    Args:
        se: the standard error, absolute, > 0.
        relative: the standard error relative to the estimate, > 0. With both, both are to be reached.
        max_draws: draws a chain may make at most.
        max_seconds: seconds after which no further round starts; a round is planned to end by then.

    Examples:
        >>> Precision(relative=0.02, max_draws=10_000).goal(-50.0)
        1.0
    """

    se: float | None = None
    relative: float | None = None
    max_draws: int = 100_000
    max_seconds: float = math.inf

    def __post_init__(self) -> None:
        if self.se is None and self.relative is None:
            raise InvalidArgumentError("until: give Precision(se=...) or Precision(relative=...).")
        for name in ("se", "relative", "max_seconds", "max_draws"):
            value = getattr(self, name)
            if value is None and name in ("se", "relative"):
                continue
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or not value > 0 or (math.isinf(value) and name != "max_seconds"):
                raise InvalidArgumentError(f"until: {name}: expected a number > 0, got {value!r}.")
        if not isinstance(self.max_draws, Integral):
            raise InvalidArgumentError(f"until: max_draws: expected an integer, got {self.max_draws!r}.")

    def goal(self, estimate: float) -> float:
        """The standard error that is asked for, at this estimate."""
        goals = [] if self.se is None else [self.se]
        if self.relative is not None:
            goals.append(self.relative * abs(estimate))
        return min(goals)


@dataclass(frozen=True)
class RunSpec:
    """One run: how many chains, which draws, from which seeds. Times are in steps.

    ``observables`` are the names of what is recorded besides the loss.
    """

    num_draws: int
    num_chains: int
    num_burnin_steps: int
    num_steps_bw_draws: int
    grad_accum_steps: int
    seed: int | tuple[int, ...]
    baseline: Baseline
    init_loss: float | None
    start: Start
    train_mode: bool
    autocast_dtype: torch.dtype | None
    auto: bool
    group_size: int
    observables: tuple[str, ...] = ()

    def keys(self) -> tuple[ChainKey, ...]:
        """Keys of all chains' streams."""
        return chain_keys(self.seed, self.num_chains)


@dataclass(frozen=True)
class Prepared:
    """What the run decided before its first chain, from the data and the model at w*.

    Attributes:
        num_samples: n.
        sampling: order of the gradient batches: "iid", "epoch", "sequential", "user" or "stream".
        nbeta: nβ used.
        nbeta_rule: "given", "n/ln n" or "batch".
        nbeta_batch: devinterp's default B/ln B of the step's batch, or None for whole items.
        lr: ε used.
        localization: γ used.
        num_burnin_steps: steps before the first draw.
        init_loss: L_n(w*), or its estimate.
        init_loss_se: standard error of that estimate; 0 if every sample was read.
        moving: names of the parameters that move.
        unused: names of parameters that should move, but never get a gradient: they stay.
        num_moving: P, how many entries move.
        uses_randomness: whether ``evaluate`` reads torch's, numpy's or random's global state.
        needs_grad: whether ``evaluate`` itself differentiates, so that it cannot run without grad.
        gradient_noise: tr Cov of a step's gradient at w*.
        hessian_trace: tr of the Hessian at w* (Euler steps only).
        curvature: largest curvature that ``auto`` found, else None.
        check_loss: loss of the first batch at w* in this process.
        not_stackable: why several chains of a process are computed one after the other, or "".
        in_training: kinds of modules that were in training mode when ``evaluate`` ran and make the loss
            depend on more than the weights and the sample: "dropout", "batch norm".
        averaged_by: "sample", or "weight" if ``evaluate`` returns weights: Σ w ℓ / Σ w.
        baseline_cache: whether baselines are taken from the losses of all samples at w*, see `baseline`.
        weights_dtype: the dtypes of the moving parameters, such as "float32".
        descent: what a step of steepest descent from w* does, as `devsample.descent.Descent` has it.
        observed: what is known of the observables at w*, by name.
    """

    num_samples: int
    sampling: str
    nbeta: float
    nbeta_rule: str
    nbeta_batch: float | None
    lr: float
    localization: float
    num_burnin_steps: int
    init_loss: float
    init_loss_se: float | None
    moving: tuple[str, ...]
    unused: tuple[str, ...]
    num_moving: int
    uses_randomness: bool
    needs_grad: bool
    gradient_noise: float
    hessian_trace: float | None
    curvature: float | None
    check_loss: float
    not_stackable: str = ""
    in_training: tuple[str, ...] = ()
    averaged_by: str = "sample"
    baseline_cache: bool = False
    weights_dtype: str = "float32"
    descent: dict[str, float] = field(default_factory=dict)
    observed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Prepared:
        """The inverse of `to_dict`."""
        return cls(
            **{**values, **{name: tuple(values[name]) for name in ("moving", "unused", "in_training")}}
        )


def _plain(value: Any) -> Any:
    """Python's own number for a numpy or torch scalar."""
    is_scalar = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return value.item() if is_scalar else value


def sampler_spec(kind: object, optimizer_kwargs: Mapping[str, Any] | None) -> SamplerSpec:
    """Check a sampler class and its keyword arguments as far as the data need not be known."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InvalidArgumentError(
            f"sampling_method: expected a sampler class such as devsample.SGLD, got {kind!r}."
        )
    if not isinstance(optimizer_kwargs, Mapping | None):
        raise InvalidArgumentError(
            f"optimizer_kwargs: expected keyword arguments as a mapping, got {optimizer_kwargs!r}."
        )
    options = {name: _plain(value) for name, value in (optimizer_kwargs or {}).items()}
    lr, nbeta = options.pop("lr", None), options.pop("nbeta", None)
    if isinstance(nbeta, str) and nbeta not in ("batch", "n/ln n"):
        raise InvalidArgumentError(f'optimizer_kwargs: nbeta={nbeta!r} is neither "batch" nor "n/ln n".')
    number = not (nbeta is None or isinstance(nbeta, str) or callable(nbeta))
    trial = DECIDED_LATER | ({"lr": lr} if lr is not None else {}) | ({"nbeta": nbeta} if number else {})
    if not issubclass(kind, Sampler):
        return _foreign_spec(kind, options, lr, nbeta, trial["nbeta"])
    try:
        kind.kernel(**(trial | options))
    except TypeError as error:
        names = ", ".join(sorted(vars(kind.kernel(**DECIDED_LATER))))
        raise InvalidArgumentError(
            f"optimizer_kwargs: {kind.__name__} takes {names}; {str(error).split('() ')[-1]}."
        ) from error
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"optimizer_kwargs: {error}") from error
    return SamplerSpec(kind, options, lr, nbeta)


def _foreign_spec(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], lr: Any, nbeta: NbetaRule, trial: Any
) -> SamplerSpec:
    """Of an optimizer that is no sampler: all but ``nbeta`` and ``localization`` is its own."""
    if lr is not None:
        options["lr"] = lr
    spec = SamplerSpec(kind, options, math.nan, nbeta)
    try:
        kernel = spec.kernel(lr=math.nan, nbeta=trial)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"optimizer_kwargs: {error}") from error
    assert isinstance(kernel, ForeignKernel)
    return replace(spec, lr=foreign_lr(kernel))
