"""What a run decides before its first chain: n, nβ, L_n(w*), what moves, and settings left open."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from devsample.baseline import CenterLosses, Collector, reproduces, same_items
from devsample.chain import PROBE_STEPS
from devsample.data.generators import global_random_state
from devsample.data.loader import ChainLoader
from devsample.data.worker import BatchRequest
from devsample.descent import measure_descent
from devsample.errors import EvaluateError, InvalidArgumentError
from devsample.flat import FlatParameters, Masks
from devsample.losses import nbeta_for
from devsample.objective import Batch, Objective
from devsample.probes import Probe
from devsample.samplers import SGLDKernel
from devsample.seeds import ChainKey, NormalBlocks, Role
from devsample.specs import DECIDED_LATER, Prepared, RunSpec, SamplerSpec
from devsample.stacked import why_not_stackable
from devsample.types import EvaluateFn

FULL_PASS_SAMPLES = 1 << 14  # L_n(w*) reads all data up to this many samples, else this many
_PILOT_STEPS, _PILOT_ROUNDS, _PILOT_GROWTH = 100, 24, 1.25
_CALM_ROUNDS = 2  # rounds in which the curvature does not grow, before the pilot ends
_EXPLOSION = 8.0  # how much smaller the step is after a pilot that exploded
_SMALLEST_CURVATURE = 1e-3  # of nβ·L, where the curvature vanishes
_AUTO_LR, _AUTO_LOCALIZATION = 0.3, 1.0
_AUTO_BIAS = 0.05  # of the estimate, which a chosen lr may have in any case
_FEW_BATCHES = 64  # a pass over so many takes gradients along, for ∇L_n(w*)
_SLOWEST_MODE = 100.0  # burn-in waits for modes with this fraction of the largest curvature


@dataclass
class Setting:
    """Everything that `prepare` looks at."""

    model: torch.nn.Module
    evaluate: EvaluateFn
    masks: Masks
    sampler: SamplerSpec
    run: RunSpec
    key: ChainKey
    loader: ChainLoader


def prepare(setting: Setting) -> tuple[Prepared, Any, CenterLosses | None]:
    """Measure at w* and decide.

    Returns:
        What was decided; the first batch, for a check against the caller's model; and the losses of all
        samples at w*, if the baselines of draws are to be taken from them.

    Raises:
        EvaluateError: evaluate fails, gives no finite loss, or does not use the model.
        InvalidArgumentError: a value that cannot be used now that n is known.
    """
    run, loader = setting.run, setting.loader
    probes = [
        request for step in range(PROBE_STEPS) for request in loader.requests(0, step, Role.PROBE_ORDER)
    ]
    count = loader.num_samples if run.baseline == "full" else min(loader.num_samples, FULL_PASS_SAMPLES)
    everything_once = loader.full_pass(count) if run.init_loss is None else ()
    few = operator.length_hint(everything_once) <= _FEW_BATCHES
    served = loader.serve(itertools.chain(probes, everything_once))
    steps = _collect(served, len(probes))
    everything = _objective(setting, setting.masks)
    random_evaluate = _try_evaluate(everything, steps, setting.key)
    everything.seeded = random_evaluate
    in_training = _in_training(setting.model, random_evaluate)
    everything.needs_grad = _needs_grad(everything, steps[0], setting.key)
    collector = _collector(setting, count, random_evaluate, in_training)
    init_loss, init_loss_se, gradient = _center_loss(
        everything, served, setting, loader.reads_all(count), collector, few=few
    )
    everything.reset_buffers()
    touched = [name for number, name in enumerate(everything.flat.names()) if number in everything.touched]
    if not touched:
        raise EvaluateError("no moving parameter gets a gradient from evaluate(model, batch).")
    objective = _objective(setting, {name: setting.masks[name] for name in touched})
    objective.seeded, objective.needs_grad = random_evaluate, everything.needs_grad
    objective.weighted = everything.weighted
    center = objective.flat.read()
    objective.flat.point_to(center)
    check_loss = _check_loss(objective, steps[0], setting.key, run.train_mode)
    probe = Probe(objective, steps, setting.key)
    decided = _decide(setting, probe, center, objective, steps)
    if gradient is not None:
        gradient = _restricted(gradient, everything.flat, touched)
    pull = decided["localization"] + float(setting.sampler.options.get("weight_decay", 0.0))
    descent = measure_descent(probe, center, nbeta=decided["nbeta"], pull=pull, gradient=gradient)
    not_stackable = ""
    if run.group_size > 1:
        not_stackable = why_not_stackable(objective, center, steps, setting.key)
    kept = _kept_losses(
        setting,
        collector,
        objective,
        center,
        steps,
        probes,
        decided,
        together=run.group_size > 1 and not not_stackable,
    )
    objective.flat.point_to(center)  # chains of this process start from the same model as elsewhere
    objective.reset_buffers()
    prepared = Prepared(
        num_samples=loader.num_samples,
        sampling=loader.order,
        init_loss=init_loss,
        init_loss_se=init_loss_se,
        moving=tuple(touched),
        unused=tuple(name for name in everything.flat.names() if name not in touched),
        num_moving=objective.flat.size,
        uses_randomness=random_evaluate,
        needs_grad=objective.needs_grad,
        check_loss=check_loss,
        not_stackable=not_stackable,
        in_training=in_training,
        averaged_by="weight" if objective.weighted else "sample",
        baseline_cache=kept is not None,
        weights_dtype=", ".join(sorted({str(one.parameter.dtype)[6:] for one in objective.flat.segments})),
        descent=dataclasses.asdict(descent),
        **decided,
    )
    return prepared, steps[0][0][1], kept


def _collector(
    setting: Setting, count: int, random_evaluate: bool, in_training: tuple[str, ...]
) -> Collector | None:
    """What keeps the samples' losses at w* while L_n(w*) is read, if they could be baselines."""
    run, loader = setting.run, setting.loader
    if run.baseline != "paired" or run.init_loss is not None or random_evaluate or in_training:
        return None
    return Collector(count) if loader.has_samples() and loader.reads_all(count) else None


def _kept_losses(
    setting: Setting,
    collector: Collector | None,
    objective: Objective,
    center: torch.Tensor,
    steps: Sequence[Sequence[Batch]],
    requests: Sequence[BatchRequest],
    decided: dict[str, Any],
    *,
    together: bool,
) -> CenterLosses | None:
    """The samples' losses at w*, if draws need them, and if they are those of any batch at any step."""
    kept = None if collector is None else collector.result()
    if collector is None or kept is None:
        return None
    chosen = {name: decided[name] for name in ("lr", "nbeta", "localization")}
    kernel = setting.sampler.kernel(**chosen)
    if kernel.full_data or getattr(kernel, "control_variate", False):  # they have the loss at w* anyway
        return None
    again = setting.loader.serve(setting.loader.for_other_steps(requests))
    if not same_items(steps, again):
        return None
    same = reproduces(
        kept,
        collector.dtype,
        objective,
        center,
        steps,
        requests,
        chosen["nbeta"],
        setting.key,
        together=together,
    )
    return kept if same else None


def _objective(setting: Setting, masks: Masks) -> Objective:
    return Objective(
        setting.model,
        setting.evaluate,
        FlatParameters(setting.model, masks),
        train_mode=setting.run.train_mode,
        autocast_dtype=setting.run.autocast_dtype,
    )


def _collect(served: Any, count: int) -> list[list[Batch]]:
    """The probe requests' batches, by step."""
    steps: list[list[Batch]] = [[]]
    for _ in range(count):
        request, data = next(served)
        steps[-1].append((len(request.indices), data))
        if request.last:
            steps.append([])
    return steps[:-1]


def _try_evaluate(objective: Objective, steps: Sequence[Sequence[Batch]], key: ChainKey) -> bool:
    """Whether evaluate reads global random state; marks the parameters that get a gradient."""
    center = objective.flat.read()
    scratch = torch.zeros_like(center)
    objective.flat.point_to(center)
    objective.seeded, random_evaluate = False, False
    for number, batches in enumerate(steps):
        before = global_random_state()
        loss = objective.loss_and_gradient(scratch, batches, key, number)
        random_evaluate = random_evaluate or global_random_state() != before
        objective.watch.check()
        if not math.isfinite(float(loss)):
            raise EvaluateError(
                f"the loss at w* is {float(loss)} on a batch; a chain that starts there cannot work. "
                "Check the weights and evaluate(model, batch)."
            )
    return random_evaluate


def _in_training(model: torch.nn.Module, random_evaluate: bool) -> tuple[str, ...]:
    """What ``evaluate``, which has just run, has left in training mode, or set to it itself."""
    training = [module for module in model.modules() if module.training]
    found = []
    dropout = any(isinstance(one, _DropoutNd) and one.p > 0 for one in training)
    if random_evaluate and (dropout or model.training):
        found.append("dropout")
    if any(isinstance(one, _BatchNorm) for one in training):
        found.append("batch norm")
    return tuple(found)


def _needs_grad(objective: Objective, batches: Sequence[Batch], key: ChainKey) -> bool:
    """Whether evaluate, which has worked with grad enabled, fails without."""
    try:
        objective.loss(batches, key, 0)
    except EvaluateError:
        return True
    return False


def _check_loss(objective: Objective, batches: Sequence[Batch], key: ChainKey, train_mode: bool) -> float:
    objective.model.eval()
    seeded, objective.seeded = objective.seeded, True
    value = float(objective.loss(batches[:1], key, 0))
    objective.seeded = seeded
    objective.model.train(train_mode)
    return value


def _center_loss(
    objective: Objective,
    served: Any,
    setting: Setting,
    everything: bool,
    collector: Collector | None,
    *,
    few: bool,
) -> tuple[float, float | None, torch.Tensor | None]:
    """L_n(w*) averaged by sample or weight, its standard error, and ∇L_n(w*) if all data are ``few`` batches.

    As long as some parameter has not got a gradient, gradients are taken along: a branch or an
    expert may be reached by few batches only.
    """
    if setting.run.init_loss is not None:
        return setting.run.init_loss, None, None
    counts: list[float] = []
    losses = []
    scratch = torch.zeros(objective.flat.size, dtype=objective.flat.dtype, device=objective.flat.device)
    objective.listener = collector
    total = torch.zeros_like(scratch) if everything and few else None
    for number, (request, data) in enumerate(served, 1):
        if number > _FEW_BATCHES:
            total = None
        with objective.passing():
            if total is not None or len(objective.touched) < len(objective.flat.parameters):
                loss = objective.loss_and_gradient(scratch, [(1, data)], setting.key, request.step)
            else:
                loss = objective.loss([(1, data)], setting.key, request.step)
        if collector is not None:
            collector.take(request.indices)
        count = len(request.indices) if objective.weight is None else float(objective.weight)
        if count > 0:  # a batch may be without weight
            counts.append(count)
            losses.append(float(loss))
            if total is not None:
                total.add_(scratch, alpha=count)
    objective.listener = None
    objective.watch.check()
    weights, values = np.asarray(counts, dtype=float) / sum(counts), np.asarray(losses)
    mean = float(weights @ values)
    if everything:
        return mean, 0.0, None if total is None else total.div_(sum(counts))
    if objective.weighted:  # the error of a ratio
        errors = weights * (values - mean)
        error = float(np.sqrt(errors @ errors * len(values) / max(1, len(values) - 1)))
        return mean, error, None
    return mean, float(np.sqrt(weights @ (values - mean) ** 2 / max(1, len(values) - 1))), None


def _restricted(vector: torch.Tensor, flat: FlatParameters, names: Sequence[str]) -> torch.Tensor:
    """The entries of a vector over ``flat`` that belong to the parameters of these names."""
    return torch.cat([vector[one.start : one.stop] for one in flat.segments if one.name in names])


def _decide(
    setting: Setting,
    probe: Probe,
    center: torch.Tensor,
    objective: Objective,
    steps: Sequence[Sequence[Batch]],
) -> dict[str, Any]:
    """nβ, step size, localisation and burn-in; and the figures that predict the bias."""
    sampler, run, spec = setting.sampler, setting.run, setting.loader.spec
    size = (spec.batch_size or 1) * run.grad_accum_steps
    if spec.batch_sampler is not None:
        size = sum(count for count, _ in steps[0])
    rule = "given" if sampler.nbeta not in (None, "batch", "n/ln n") else (sampler.nbeta or "n/ln n")
    nbeta = nbeta_for(setting.loader.num_samples, sampler.nbeta, batch_size=size)
    options = dict(sampler.options)
    lr, burnin, curvature = sampler.lr, run.num_burnin_steps, None
    if run.auto:
        options.setdefault("localization", _AUTO_LOCALIZATION)
    localization = float(options.get("localization", 0.0))
    gradient_noise, control = _gradient_noise(setting, probe, center)
    if lr is None:
        curvature = _explore(probe, setting, objective, center, steps, nbeta, localization)
        lr = _AUTO_LR / (nbeta * curvature + localization)
        kernel = sampler.kernel(lr=lr, nbeta=nbeta)
        lr /= max(1.0, kernel.step_bias)
        noise = math.inf if control else gradient_noise  # off w* there is some
        lr /= _too_fast(lr / 8 * nbeta**2 * noise, kernel.speed)
        if burnin == 0:
            slowest = max(localization, nbeta * curvature / _SLOWEST_MODE)
            speed = sampler.kernel(lr=lr, nbeta=nbeta).speed
            burnin = math.ceil(math.log(100) / (lr * speed * slowest))
    kernel = sampler.kernel(lr=lr, nbeta=nbeta, localization=localization)
    return {
        "nbeta": nbeta,
        "nbeta_rule": rule,
        "nbeta_batch": None if spec.batch_size is None else nbeta_for(size, "batch", batch_size=size),
        "lr": lr,
        "localization": localization,
        "num_burnin_steps": burnin,
        "gradient_noise": gradient_noise,
        "hessian_trace": probe.hessian_trace(center) if kernel.step_bias else None,
        "curvature": curvature,
    }


def _gradient_noise(setting: Setting, probe: Probe, center: torch.Tensor) -> tuple[float, bool]:
    """Tr Cov of a step's gradient at w*, and whether it is 0 by a control variate."""
    sampler = setting.sampler
    kernel = sampler.kernel(**DECIDED_LATER)
    control = bool(getattr(kernel, "control_variate", False))
    if kernel.full_data or control:
        who = "control_variate" if not kernel.full_data else f"sampling_method: {sampler.kind.__name__}"
        _check_reads_all(setting.loader, who)
        return 0.0, control
    return probe.gradient_noise(center), False


def _too_fast(bias: float, speed: float) -> float:
    """By what lr is to be divided, so that a faster sampler gathers no more of the gradients' noise.

    Args:
        bias: of the estimate, from that noise, for a sampler of speed 1.
        speed: the sampler's.
    """
    return min(speed, max(1.0, speed * bias / _AUTO_BIAS))


def _check_reads_all(loader: ChainLoader, who: str) -> None:
    if not loader.reads_all(loader.num_samples):
        raise InvalidArgumentError(
            f"{who} needs every sample once, and a sampler of one's own does not promise that; "
            "leave sampler and batch_sampler out of loader_spec."
        )


def _explore(
    probe: Probe,
    setting: Setting,
    objective: Objective,
    center: torch.Tensor,
    steps: Sequence[Sequence[Batch]],
    nbeta: float,
    localization: float,
) -> float:
    """The largest curvature at w* and along a short pilot chain (at a singular w* it vanishes).

    A pilot that explodes starts again with a smaller step; one that survives goes on until the
    curvature along it has not grown for some rounds.
    """
    largest = max(probe.largest_curvature(center), _SMALLEST_CURVATURE / nbeta)
    noise = NormalBlocks([setting.key], center.numel(), center.dtype, center.device, Role.PILOT)
    gradient = torch.zeros_like(center)
    position, calm = center.clone(), 0
    for number in range(_PILOT_ROUNDS):
        lr = _AUTO_LR / (nbeta * largest + localization)
        kernel = SGLDKernel(lr=lr, nbeta=nbeta, localization=localization)
        for step in range(number * _PILOT_STEPS, (number + 1) * _PILOT_STEPS):
            objective.flat.point_to(position)
            loss = objective.loss_and_gradient(gradient, steps[step % len(steps)], setting.key, step)
            if not math.isfinite(float(loss)):
                break
            kernel.step(position[None], gradient[None], center, noise.averaged(step), {})
        here = probe.largest_curvature(position)
        if not math.isfinite(here) or not math.isfinite(float(loss)):
            largest += (_EXPLOSION - 1) * (largest + localization / nbeta)  # a smaller step
            position, calm = center.clone(), 0
            continue
        calm = calm + 1 if here <= _PILOT_GROWTH * largest else 0
        largest = max(largest, here)
        if calm == _CALM_ROUNDS:
            return largest
    return largest
