"""The functions that estimate a local learning coefficient."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch

from devsample.arguments import Arguments, Plan, make_plan
from devsample.callbacks import gather_results
from devsample.errors import UnreliableEstimateWarning
from devsample.provenance import make_provenance, note_origin
from devsample.results import ChainInfo, LLCResult
from devsample.running import Finished, carry_out
from devsample.samplers import SGLD, Sampler, can_freeze
from devsample.stopping import Stopping
from devsample.types import ChainOutcome, EvaluateFn, Executor

if TYPE_CHECKING:
    import pandas as pd
    from torch.utils.data import DataLoader

    from devsample.data.spec import LoaderSpec

P = ParamSpec("P")
R = TypeVar("R")


def estimate_learning_coeff_with_summary(
    model: torch.nn.Module,
    loader: DataLoader[Any] | None = None,
    callbacks: Sequence[Callable[..., Any]] | Callable[..., Any] = (),
    evaluate: EvaluateFn | None = None,
    sampling_method: type[torch.optim.Optimizer] = SGLD,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    num_draws: int = 100,
    num_chains: int = 10,
    num_burnin_steps: int = 0,
    num_steps_bw_draws: int = 1,
    init_loss: float | None = None,
    grad_accum_steps: int = 1,
    cores: int | Sequence[Any] = 1,
    seed: int | Sequence[int] | None = None,
    device: torch.device | str | None = None,
    gpu_idxs: Sequence[int] | None = None,
    verbose: bool = True,
    optimize_over_per_model_param: Mapping[str, torch.Tensor] | None = None,
    online: bool = False,
    use_amp: bool = False,
    *,
    loader_spec: LoaderSpec | None = None,
    settings: Literal["auto"] | None = None,
    param_masks: Mapping[str, torch.Tensor | bool] | None = None,
    baseline: Literal["paired", "full", "fixed"] = "paired",
    start: Literal["center", "prior"] = "center",
    train_mode: bool = False,
    autocast_dtype: torch.dtype | None = None,
    observables: Any = None,
    until: Any = None,
    devices: Sequence[Any] | None = None,
    threads_per_chain: int | None = None,
    chains_per_process: int | Literal["auto"] = "auto",
    executor: Literal["auto", "inline", "processes"] | Executor = "auto",
    run_dir: str | PathLike[str] | None = None,
    on_failure: Literal["retry", "keep", "raise"] = "retry",
    timeout: float | None = None,
    compile: bool = False,
    on_records: Callable[[pd.DataFrame], None] | None = None,
) -> LLCResult:
    r"""Estimate the local learning coefficient at the model's weights, with its standard error.

    .. math::
        \hat λ = nβ\,\big(E[L_n(w)] - L_n(w^*)\big), \qquad
        w \sim \exp\!\big(-nβ\,L_n(w) - \tfrac{γ}{2}\,|w - w^*|^2\big)

    Chains of stochastic gradient MCMC start at w*, each with its own minibatches and noise, in
    ``cores`` spawned processes, each with its own DataLoader and loader workers. Neither the model
    nor anything else of the caller's is changed. The same seed gives the same draws for any number
    of processes and loader workers.

    Args:
        model: the trained model; its weights are w*.
        loader: a DataLoader; it is turned into a LoaderSpec. Give this or ``loader_spec``.
        callbacks: called at every draw with the keywords they take of chain, draw, step, loss,
            baseline, llc, init_loss, nbeta, model, optimizer, batch, device.
        evaluate: ``evaluate(model, batch)`` → the mean loss, per-sample losses, ``(loss, ...)``, a
            mapping with ``"loss"`` or an object with ``.loss``. With weights w ≥ 0, which may be a padding
            mask, in ``"weights"`` or ``.weights``, or as ``{"loss_sum": s, "count": c}``, all means are
            Σ w ℓ / Σ w. None: ``model(batch)``, or ``model(**batch)`` for a mapping.
        sampling_method: the sampler's class. Any other ``torch.optim.Optimizer`` follows the slope
            nβ ∇L + γ (w − w*) with its own lr and keywords, without noise, and the verdict is "reject".
        optimizer_kwargs: its keyword arguments. ``nbeta``: a number, ``"batch"`` (B/ln B), a
            function of n, or left out: n/ln n. Without ``lr``, settings are chosen: see ``settings``.
        num_draws: draws per chain, ≥ 1.
        num_chains: independent chains, ≥ 1.
        num_burnin_steps: steps before the first draw, ≥ 0.
        num_steps_bw_draws: steps per draw, ≥ 1.
        init_loss: L_n(w*), used as it is for every draw (``baseline="fixed"``).
        grad_accum_steps: micro-batches per step, ≥ 1; the same as a batch that much larger.
        cores: chain processes; 1 runs in the caller's process. Or a list of devices, one each.
        seed: an integer, or one a chain, ≥ 0; None: a fresh one, recorded in the result.
        device: where chains run; None: where the model is.
        gpu_idxs: the GPU of each chain process, in turn.
        verbose: show a progress bar.
        optimize_over_per_model_param: the older name of ``param_masks``.
        online: also give the running estimates ``llc/means`` and ``llc/stds``.
        use_amp: run forward passes under bfloat16 autocast.
        loader_spec: the recipe for the data.
        settings: "auto" chooses the step size from the largest curvature h over w* and a short
            pilot chain, ε = 0.3/(nβ h + γ), γ = 1 and the burn-in, where they are not given.
        param_masks: what moves: parameter name or pattern → True, or a boolean tensor of its
            entries. Everything else stays at w*.
        baseline: "paired": the loss at w* on the very samples of each draw; "full": L_n(w*) over
            all data; "fixed": ``init_loss``.
        start: "center": chains start at w*; "prior": at w* + N(0, 1/γ).
        train_mode: leave dropout and batch norm in training mode (else eval mode).
        autocast_dtype: run forward passes under autocast with this dtype.
        observables: what else to record at every draw, in columns of their own: names of norms
            ("gradient_norm", "noise_norm", "localization_norm", "weight_norm", "distance"; another p as
            in "gradient_norm:1"), products ("gradient_dot_noise"), "virial", "full_loss", "second_batch",
            "mala_acceptance" of SGLD, "acceptance" of HMC and MALA; ``LossOn`` and ``SampleLosses`` of
            `devsample.observables`; (name, function) or {name: function}; and "step_bias" (or ``StepBias``),
            which is measured once, after the last draw.
        until: ``Precision(se=...)`` or ``Precision(relative=...)``: ``num_draws`` is the first round only,
            and the chains go on in rounds until the standard error is reached.
        devices: devices of the chain processes, in turn.
        threads_per_chain: CPU threads of a chain process; None: available cores // num_chains,
            at least 1.
        chains_per_process: chains in lockstep in a process, vectorised if ``evaluate`` allows; "auto":
            one.
        executor: "auto", "inline" (the caller's process), "processes", or an Executor.
        run_dir: a new folder that keeps draws, final states and logs; None: a temporary one.
        on_failure: what a lost process means: "retry" (at most twice), "keep" the other chains,
            or "raise". Chains that fail in any other way are left out, and the verdict says so.
        timeout: comes with a later version.
        compile: comes with a later version.
        on_records: called in this process with new draws as a DataFrame.

    Returns:
        The result: estimate, standard error, verdict, tables; also a mapping with the keys
        "llc/mean", "llc/std", "llc-chain/{i}", "loss/trace", "llc/trace", "init_loss".

    Raises:
        InvalidArgumentError: an argument cannot be used.
        NotPicklableError: something cannot be sent to a chain process; names its path.
        EvaluateError: evaluate fails at w*.
        LoaderError: the data cannot be read.
        AllChainsFailedError: no chain gave a usable trace; carries the draws.

    References:
        E. Lau et al., "The local learning coefficient: a singularity-aware complexity measure",
        2023, arXiv 2308.12108, eq. 9.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from devsample import LoaderSpec
        >>> x = torch.randn(256, 3, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Linear(3, 1)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(1.0), model.bias.fill_(0.0)
        >>> result = estimate_learning_coeff_with_summary(
        ...     model, loader_spec=LoaderSpec(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64),
        ...     evaluate=lambda m, batch: ((m(batch[0]) - batch[1]) ** 2).mean(),
        ...     optimizer_kwargs=dict(lr=1e-3, localization=1.0), num_chains=2, num_draws=50,
        ...     seed=0, verbose=False)
        >>> len(result.draws), sorted(result)[:3]
        (100, ['init_loss', 'llc-chain/0', 'llc-chain/1'])
    """
    return _estimate(Arguments(**locals()))


def _same_arguments(
    template: Callable[P, Any],
) -> Callable[[Callable[[Arguments], R]], Callable[P, R]]:
    """Give a function of `Arguments` the signature of ``template``."""
    signature = inspect.signature(template)

    def decorate(function: Callable[[Arguments], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return function(Arguments(**bound.arguments))

        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            return_annotation=function.__annotations__["return"]
        )
        return wrapper

    return decorate


@_same_arguments(estimate_learning_coeff_with_summary)
def estimate_learning_coeff(given: Arguments) -> float:
    """Estimate the local learning coefficient; only the number.

    Takes the arguments of `estimate_learning_coeff_with_summary`, whose result also has the
    standard error and the verdict.

    Returns:
        λ̂.

    Warns:
        UnreliableEstimateWarning: the verdict is "reject"; the message gives the reasons.
    """
    result = _estimate(given)
    if result.verdict == "reject":
        warnings.warn(" ".join(result.reasons), UnreliableEstimateWarning, stacklevel=3)
    return result.llc


@_same_arguments(estimate_learning_coeff_with_summary)
def sample(given: Arguments) -> dict[str, Any]:
    """Draw chains and return what the callbacks report, with the table of draws.

    Takes the arguments of `estimate_learning_coeff_with_summary`. A callback reports with
    ``get_results()`` (or ``sample()``), a dict.

    Returns:
        The callbacks' results, and ``"draws"``: the DataFrame of draws.
    """
    plan = make_plan(given)
    finished = carry_out(plan, None if plan.until is None else Stopping(plan.until))
    return gather_results(plan.parts.callbacks) | {"draws": finished.draws}


def _estimate(given: Arguments) -> LLCResult:
    plan = make_plan(given)
    origin = note_origin(plan)
    stopping = None if plan.until is None else Stopping(plan.until)
    finished = carry_out(plan, stopping)
    prepared = finished.prepared
    at_center = {"gradient_noise": prepared.gradient_noise}
    if prepared.hessian_trace is not None:
        at_center["hessian_trace"] = prepared.hessian_trace
    return LLCResult.from_run(
        finished.draws,
        [_chain_info(plan, finished.outcomes[chain]) for chain in sorted(finished.outcomes)],
        _settings(plan, finished) | ({} if stopping is None else {"until": stopping.settings()}),
        init_loss=prepared.init_loss,
        init_loss_se=prepared.init_loss_se,
        online=plan.online,
        at_center=at_center,
        reports=gather_results(plan.parts.callbacks) | _observed(plan, finished),
        provenance=make_provenance(origin, plan, finished),
    )


def _observed(plan: Plan, finished: Finished) -> dict[str, Any]:
    """Each observable as ``name/trace``, shape (num_chains, num_draws); NaN where nothing was recorded."""
    run, draws = plan.parts.run, finished.draws
    traces = {}
    for name in run.observables:
        if name in finished.arrays:
            traces[f"{name}/trace"] = finished.arrays[name]
            continue
        trace = traces[f"{name}/trace"] = np.full((run.num_chains, finished.num_draws), np.nan)
        if name in draws:
            trace[draws["chain"], draws["draw"]] = draws[name]
    return traces


def _chain_info(plan: Plan, outcome: ChainOutcome) -> ChainInfo:
    return ChainInfo(
        chain=outcome.chain,
        seed=plan.seeds[outcome.chain] if plan.seeds is not None else None,
        status=outcome.status,
        num_draws=outcome.num_draws,
        message=outcome.message,
        attempt=outcome.attempt,
        device=outcome.device,
        seconds=outcome.seconds,
        steps=outcome.steps,
        gradient_noise=outcome.gradient_noise,
        hessian_trace=outcome.hessian_trace,
        curvature=outcome.curvature,
        moved=outcome.moved,
        step_bias=outcome.step_bias,
    )


def _settings(plan: Plan, finished: Finished) -> dict[str, Any]:
    """Every value that the run used."""
    run, prepared, spec = plan.parts.run, finished.prepared, plan.parts.loader_spec
    sampler = plan.parts.sampler
    chosen = {"lr": prepared.lr, "nbeta": prepared.nbeta, "localization": prepared.localization}
    kernel = sampler.kernel(**chosen)
    return {
        **sampler.settings(**chosen),
        "step_bias": kernel.step_bias,
        "speed": kernel.speed,
        "adapting": kernel.adapts and (prepared.num_burnin_steps == 0 or not can_freeze(kernel)),
        "sampler": sampler.kind.__name__,
        "samples": issubclass(sampler.kind, Sampler),
        "nbeta_rule": prepared.nbeta_rule,
        "nbeta_batch": prepared.nbeta_batch,
        "num_draws": finished.num_draws,
        "num_chains": run.num_chains,
        "num_burnin_steps": prepared.num_burnin_steps,
        "num_steps_bw_draws": run.num_steps_bw_draws,
        "num_samples": prepared.num_samples,
        "batch_size": spec.batch_size,
        "grad_accum_steps": run.grad_accum_steps,
        "sampling": prepared.sampling,
        "baseline": run.baseline,
        "start": run.start,
        "train_mode": run.train_mode,
        "in_training": prepared.in_training,
        "baseline_cache": prepared.baseline_cache,
        "averaged_by": prepared.averaged_by,
        "weights_dtype": prepared.weights_dtype,
        "autocast_dtype": None if run.autocast_dtype is None else str(run.autocast_dtype),
        "seed": run.seed,
        "cores": plan.cores,
        "threads_per_chain": plan.threads,
        "chains_per_process": run.group_size,
        "not_stackable": prepared.not_stackable,
        "auto": run.auto,
        "curvature": prepared.curvature,
        "descent": prepared.descent,
        "run_dir": str(finished.run_dir) if finished.run_dir is not None else None,
        "num_moving_parameters": prepared.num_moving,
        "unused_parameters": prepared.unused,
        "observables": prepared.observed,
        "seconds": finished.seconds,
    }
