"""What every registered sampler must do. A new one is picked up by its registration."""

import copy
import io
import math
import pickle
from dataclasses import fields
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from devsample import samplers
from devsample.errors import InvalidArgumentError
from devsample.samplers import SAMPLERS

STOCHASTIC = {name: one for name, one in SAMPLERS.items() if not getattr(one.kernel, "full_data", False)}
BASE = {"lr": 0.02, "nbeta": 3.0}

every_sampler = pytest.mark.parametrize("kind", STOCHASTIC.values(), ids=STOCHASTIC)


def state(rows=3, size=11, seed=0, dtype=torch.float64):
    """Position, gradient, center and noise."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((rows, size), (rows, size), (size,), (rows, size))
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def options(kind):
    """Each choice of each option by itself, and the common ones in some combinations."""
    yield {}
    yield {"localization": 7.0}
    yield {"weight_decay": 3.0}
    yield {"localization": 7.0, "weight_decay": 3.0, "noise_level": 1.3}
    yield {"noise_level": 0.0}
    yield {"bounding_box_size": 0.5, "localization": 1.0}
    yield {"bounding_box_size": 0.5, "bounding_box": "clamp"}
    for name, hint in get_type_hints(kind.kernel).items():
        if get_origin(hint) is Literal and name != "bounding_box":
            yield from ({name: choice} for choice in get_args(hint))


def with_options():
    cases = [(kind, values) for kind in STOCHASTIC.values() for values in options(kind)]
    return pytest.mark.parametrize(
        ("kind", "values"),
        cases,
        ids=[f"{kind.__name__}-{'-'.join(map(str, values.values()))}" for kind, values in cases],
    )


def clone(buffers):
    return {name: value.clone() for name, value in buffers.items()}


def row(buffers, k):
    return {name: value[k : k + 1].clone() for name, value in buffers.items()}


def test_all_five_and_what_is_imported_are_registered():
    assert {"SGLD", "SGHMC", "SGNHT", "RMSPropSGLD", "AdamSGLD"} <= set(SAMPLERS)
    for name, kind in SAMPLERS.items():
        assert kind.__name__ == name
        assert getattr(samplers, name) is kind
        assert name in samplers.__all__


# ---- one step -----------------------------------------------------------------------------------


@with_options()
def test_a_step_is_its_formula(kind, values):
    kernel = kind.kernel(**BASE, **values)
    position, _, center, _ = state()
    position.copy_(center + 0.3 * position)
    buffers = kernel.init(position)
    for step in range(6):
        _, gradient, _, noise = state(seed=step + 1)
        expected = [
            kernel.formula(position[k], gradient[k], center, noise[k], {n: v[k] for n, v in buffers.items()})
            for k in range(3)
        ]
        inputs = [one.clone() for one in (gradient, center, noise)]
        kernel.step(position, gradient, center, noise, buffers)
        for k, (w, kept) in enumerate(expected):
            torch.testing.assert_close(position[k], w, rtol=1e-12, atol=1e-12)
            assert kept.keys() == buffers.keys()
            for name, value in kept.items():
                torch.testing.assert_close(buffers[name][k], value, rtol=1e-12, atol=1e-12)
        for before, after in zip(inputs, (gradient, center, noise), strict=True):
            assert torch.equal(before, after)  # only position and buffers are written
        if step == 2:
            kernel.freeze(buffers)


@with_options()
def test_rows_are_chains_alone_bit_for_bit(kind, values):
    kernel = kind.kernel(**BASE, **values)
    for size in (1, 11, 40_000):
        position, _, center, _ = state(2, size)
        alone = [position[k : k + 1].clone() for k in range(2)]
        buffers = kernel.init(position)
        kept = [kernel.init(one) for one in alone]
        for step in range(4):
            _, gradient, _, noise = state(2, size, seed=step + 1)
            kernel.step(position, gradient, center, noise, buffers)
            for k in range(2):
                kernel.step(alone[k], gradient[k : k + 1], center, noise[k : k + 1], kept[k])
            if step == 1:
                for one in (buffers, *kept):
                    kernel.freeze(one)
        assert torch.equal(position, torch.cat(alone))
        for name, value in buffers.items():
            assert torch.equal(value, torch.cat([one[name] for one in kept]))


@every_sampler
def test_all_state_is_in_buffers_with_one_row_a_chain(kind):
    kernel = kind.kernel(**BASE)
    position, gradient, center, noise = state()
    before = position.clone()
    buffers = kernel.init(position)
    assert torch.equal(position, before)
    for step in range(4):
        for value in buffers.values():
            assert value.shape in ((3, 11), (3, 1))
            assert value.dtype == position.dtype
        again, kept = position.clone(), clone(buffers)
        kernel.step(position, gradient, center, noise, buffers)
        pickle.loads(pickle.dumps(kernel)).step(again, gradient, center, noise, kept)
        assert torch.equal(position, again)
        if step == 1:
            kernel.freeze(buffers)
            assert kernel.is_frozen(buffers)
            fixed = clone(buffers)
            kernel.freeze(buffers)  # a second time changes nothing
            assert all(torch.equal(buffers[name], fixed[name]) for name in fixed)
    assert kernel.adapts != kernel.is_frozen(kernel.init(position))


@every_sampler
def test_single_precision_follows_double_and_stays_single(kind):
    kernel = kind.kernel(**BASE, localization=2.0, weight_decay=1.0)
    runs = []
    for dtype in (torch.float64, torch.float32):
        position, _, center, _ = state(dtype=dtype)
        buffers = kernel.init(position)
        for step in range(10):
            _, gradient, _, noise = state(seed=step + 1, dtype=dtype)
            kernel.step(position, gradient, center, noise, buffers)
        assert position.dtype == dtype
        assert {value.dtype for value in buffers.values()} <= {dtype}
        runs.append(position.double())
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-4)


@every_sampler
@pytest.mark.parametrize("how", ["reflect", "clamp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_entry_leaves_the_box(kind, how, dtype):
    kernel = kind.kernel(lr=0.5, nbeta=1.0, bounding_box_size=0.1, bounding_box=how)
    center = state(4, 500, dtype=dtype)[2]
    position = center.expand(4, -1).clone()
    buffers, touched = kernel.init(position), 0
    slack = 4 * torch.finfo(dtype).eps * (center.abs() + 0.1)
    for step in range(40):
        _, gradient, _, noise = state(4, 500, seed=step + 1, dtype=dtype)
        kernel.step(position, gradient / 10, center, noise, buffers)
        distance = (position - center).abs()
        assert bool((distance <= 0.1 + slack).all())
        touched += int((distance > 0.09).sum())
    assert touched > 0
    assert position.std() > 0


@every_sampler
def test_without_noise_nothing_is_random(kind):
    kernel = kind.kernel(**BASE, noise_level=0.0)
    runs = []
    for seed in (5, 6):
        position, gradient, center, _ = state()
        buffers = kernel.init(position)
        for step in range(3):
            kernel.step(position, gradient, center, state(seed=10 * seed + step)[3], buffers)
        runs.append(position)
    assert torch.equal(*runs)
    assert not torch.equal(runs[0], state()[0])


@every_sampler
def test_at_a_flat_place_without_noise_it_rests(kind):
    kernel = kind.kernel(**BASE, localization=3.0, noise_level=0.0)
    _, _, center, noise = state()
    position = center.expand(3, -1).clone()
    buffers = kernel.init(position)
    for _ in range(3):
        kernel.step(position, torch.zeros_like(position), center, noise, buffers)
    assert torch.equal(position, center.expand(3, -1))


# ---- hyperparameters ----------------------------------------------------------------------------


def wrong_values(kind):
    for one in fields(kind.kernel):
        hint = get_type_hints(kind.kernel, include_extras=True)[one.name]
        optional = type(None) in get_args(hint)
        if optional:
            (hint,) = (part for part in get_args(hint) if part is not type(None))
        else:
            yield one.name, None
        if get_origin(hint) is Annotated:
            yield from ((one.name, value) for value in (-1, -1e-9, math.nan, math.inf, "1", True, [1.0]))
            if hint.__metadata__[0].above == 0:
                yield one.name, 0
        elif get_origin(hint) is Literal:
            yield from ((one.name, value) for value in ("", "nonsense", 3))
        else:
            yield from ((one.name, value) for value in ("yes", 1))


@every_sampler
def test_every_hyperparameter_is_checked_by_name(kind):
    seen = set()
    for name, value in wrong_values(kind):
        seen.add(name)
        for make in (kind.kernel, lambda **values: kind([torch.nn.Parameter(torch.zeros(1))], **values)):
            with pytest.raises(InvalidArgumentError, match=f"^{name}: expected .*, got "):
                make(**(BASE | {name: value}))
    assert seen == {one.name for one in fields(kind.kernel)}


@every_sampler
def test_hyperparameters_are_keywords_and_known(kind):
    w = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(TypeError):
        kind([w], 0.1, 1.0)
    with pytest.raises(TypeError, match="temperature"):
        kind([w], **BASE, temperature=2.0)
    with pytest.raises(TypeError, match="nbeta"):
        kind([w], lr=0.1)
    kernel = kind.kernel(**BASE)
    assert (kernel.localization, kernel.weight_decay, kernel.noise_level) == (0.0, 0.0, 1.0)
    assert kernel.bounding_box_size is None
    assert kernel.noise_kind in ("plain", "averaged")
    assert kernel.step_bias >= 0
    assert kernel.speed >= 1


@every_sampler
def test_the_docstrings_name_every_hyperparameter(kind):
    for one in fields(kind.kernel):
        assert one.name in kind.__doc__ or one.name in samplers.LangevinKernel.__doc__


# ---- the law ------------------------------------------------------------------------------------


def excess(kind, curvature, noise_level=1.0, rows=12_000):
    """E[a (w − m)²] − 1 for L = Σ h (w − w*)²/2, over all entries and 20 times, and its standard error."""
    h = torch.tensor(curvature, dtype=torch.float64)
    values = {"nbeta": 1.3, "localization": 0.1, "weight_decay": 0.05}
    a = values["nbeta"] * h + values["localization"] + values["weight_decay"]
    biased = kind.kernel(lr=1.0, **values).step_bias
    lr = float(0.3 / a.max()) if biased == 0 else float(0.02 / (biased * a.max()))
    kernel = kind.kernel(lr=lr, noise_level=noise_level, **values)
    rows //= len(h)
    random = torch.Generator().manual_seed(3)
    center = torch.linspace(0.5, 1.5, len(h), dtype=torch.float64)
    mean = center * (1 - values["weight_decay"] / a)

    def normal():
        return torch.randn(rows, len(h), generator=random, dtype=torch.float64)

    position = mean + normal() / a.sqrt()
    buffers = kernel.init(position)
    adapting = 150 if kernel.adapts else 0
    before, read = normal(), []
    relaxation = math.ceil(0.8 / float(lr * a.min()))
    start = adapting + 200 + 2 * relaxation
    for step in range(start + 20 * relaxation):
        noise = normal()
        if kernel.noise_kind == "averaged":
            noise, before = (noise + before) / 2, noise
        kernel.step(position, h * (position - center), center, noise, buffers)
        if step == adapting - 1:
            kernel.freeze(buffers)  # the fixed scale knows where the chain was: start elsewhere
            position = mean + normal() / a.sqrt()
        if step >= start and (step - start) % relaxation == 0:
            read.append(a * (position - mean) ** 2)
    assert abs(((position - mean) * a.sqrt()).mean()) < 4 / math.sqrt(position.numel())
    chains = torch.stack(read).mean(0).mean(1)  # a chain's readings depend on each other
    return float(chains.mean() - 1), float(chains.std() / math.sqrt(rows))


def slow_if_biased(name):
    """A sampler whose steps have a bias takes many small ones."""
    biased = STOCHASTIC[name].kernel(lr=1.0, nbeta=1.0).step_bias > 0
    return pytest.param(STOCHASTIC[name], id=name, marks=[pytest.mark.slow] if biased else [])


@pytest.mark.parametrize("kind", [slow_if_biased(name) for name in STOCHASTIC])
@pytest.mark.parametrize("curvature", [[1.0], [0.6, 0.7, 0.8, 0.9, 1.0]], ids=["1d", "5d"])
def test_the_law_of_a_gaussian_and_that_of_noise_too_large(kind, curvature):
    deviation, error = excess(kind, curvature)
    assert error < 0.005
    assert abs(deviation) < 4 * error
    deviation, error = excess(kind, curvature, noise_level=1.05)
    assert deviation > 10 * error


# ---- in one's own loop --------------------------------------------------------------------------


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def parameters(dtype=torch.float32):
    random = seeded(11)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in ((3, 4), (5,))]


def advance(sampler, steps):
    for _ in range(steps):
        for group in sampler.param_groups:
            for w in group["params"]:
                if w.requires_grad:
                    w.grad = w.detach().clone().mul_(0.3)
        sampler.step()


def flat(ws):
    return torch.cat([w.detach().flatten() for w in ws])


@every_sampler
def test_the_optimizer_makes_the_kernels_steps(kind):
    ws = parameters(torch.float64)
    values = BASE | {"localization": 2.0, "weight_decay": 0.5}
    sampler, kernel, draw = kind(ws, generator=seeded(5), **values), kind.kernel(**values), seeded(5)
    center = flat(ws)
    position = center.unsqueeze(0).clone()
    buffers = kernel.init(position)

    def normal():
        return torch.randn(position.shape, generator=draw, dtype=torch.float64)

    before = normal() if kernel.noise_kind == "averaged" else None
    for _ in range(5):
        gradient, noise = position * 0.3, normal()
        if before is not None:
            noise, before = (noise + before) / 2, noise
        kernel.step(position, gradient, center, noise, buffers)
        advance(sampler, 1)
        torch.testing.assert_close(flat(ws), position[0], rtol=0, atol=0)


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_sampler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("saved_at", [0, 3, 7])
def test_a_saved_state_continues_bit_for_bit(kind, dtype, saved_at):
    after = {"freeze_after": 5} if kind.kernel(**BASE).adapts else {}

    def make(ws, seed):
        masks = {ws[0]: torch.arange(12).view(3, 4) % 3 > 0}
        return kind(ws, generator=seeded(seed), masks=masks, **BASE, **after)

    one, two = parameters(dtype), parameters(dtype)
    whole, half = make(one, 7), make(two, 7)
    advance(whole, saved_at + 4)
    advance(half, saved_at)
    saved = through_a_file(half.state_dict())
    resumed = [torch.nn.Parameter(w.detach().clone()) for w in two]
    third = make(resumed, 8)
    advance(third, 2)  # what it did before does not count
    with torch.no_grad():
        for w, other in zip(resumed, two, strict=True):
            w.copy_(other)
    third.load_state_dict(saved)
    copies = [copy.deepcopy(half), pickle.loads(pickle.dumps(half))]
    for sampler in (third, *copies):
        advance(sampler, 4)
        assert torch.equal(flat(sampler.param_groups[0]["params"]), flat(one))
    advance(half, 4)  # the copies have not moved its state
    assert torch.equal(flat(two), flat(one))


@every_sampler
def test_parameters_without_gradient_or_frozen_never_move(kind):
    moving, without, frozen, stale = (torch.nn.Parameter(torch.ones(3)) for _ in range(4))
    frozen.requires_grad_(False)
    sampler = kind([moving, without, frozen, stale], localization=1.0, generator=seeded(), **BASE)
    alone = torch.nn.Parameter(torch.ones(3))
    other = kind([alone], localization=1.0, generator=seeded(), **BASE)
    stale.grad = torch.ones(3)
    stale.requires_grad_(False)
    for _ in range(4):
        for w in (moving, alone):
            w.grad = torch.full((3,), 0.2)
        sampler.step()
        other.step()
    for w in (without, frozen, stale):
        assert torch.equal(w.detach(), torch.ones(3))
    assert torch.equal(moving.detach(), alone.detach())  # nor do they take noise, or a part in a thermostat
    assert moving.detach().std() > 0


@every_sampler
def test_masked_entries_stay_and_the_rest_is_the_smaller_model(kind):
    mask = torch.tensor([[True, False, True], [False, False, True]])
    large = torch.nn.Parameter(torch.arange(6.0, dtype=torch.float64).view(2, 3))
    small = torch.nn.Parameter(large.detach()[mask].clone())
    start = large.detach().clone()
    pair = [
        (large, kind([large], masks={large: mask}, localization=1.0, generator=seeded(2), **BASE)),
        (small, kind([small], localization=1.0, generator=seeded(2), **BASE)),
    ]
    for _ in range(5):
        for w, sampler in pair:
            w.grad = w.detach().cos()
            sampler.step()
    assert torch.equal(large.detach()[~mask], start[~mask])
    torch.testing.assert_close(large.detach()[mask], small.detach(), rtol=0, atol=0)
    assert not torch.isclose(large.detach()[mask], start[mask]).any()


@every_sampler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_moves_in_single(kind, dtype):
    half = torch.nn.Parameter(torch.linspace(1, 2, 50).to(dtype))
    full = torch.nn.Parameter(half.detach().float())
    values = {"lr": 1e-7, "nbeta": 3.0, "localization": 1.0}  # most steps are below half precision
    pair = [(w, kind([w], generator=seeded(4), **values)) for w in (half, full)]
    for _ in range(50):
        for w, sampler in pair:
            w.grad = torch.full_like(w, 0.5)
            sampler.step()
    assert torch.equal(half.detach(), full.detach().to(dtype))
    assert not torch.equal(full.detach(), torch.linspace(1, 2, 50).to(dtype).float())


@every_sampler
def test_groups_have_values_of_their_own(kind):
    one, two = parameters(torch.float64)
    third, fourth = parameters(torch.float64)
    groups = [{"params": [one], "lr": 0.01}, {"params": [two], "nbeta": 9.0}]
    together = kind(groups, generator=seeded(1), **BASE)
    draw = seeded(1)
    apart = [
        kind([third], generator=draw, **(BASE | {"lr": 0.01})),
        kind([fourth], generator=draw, **(BASE | {"nbeta": 9.0})),
    ]
    for _ in range(3):
        advance(together, 1)
        for sampler in apart:
            advance(sampler, 1)
    assert torch.equal(flat([one, two]), flat([third, fourth]))
    with pytest.raises(InvalidArgumentError, match="localization: expected a number ≥ 0"):
        kind([{"params": [one], "localization": -1.0}], **BASE)


@every_sampler
def test_the_global_generator_is_neither_read_nor_moved(kind):
    traces = []
    for junk in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(junk)
            before = torch.get_rng_state()
            ws = parameters()
            advance(kind(ws, generator=seeded(), **BASE), 3)
            advance(kind(parameters(), **BASE), 2)  # also without a generator of its own
            assert torch.equal(before, torch.get_rng_state())
        traces.append(flat(ws))
    assert torch.equal(*traces)


@every_sampler
def test_a_control_variate_is_for_runs(kind):
    assert kind.kernel(**BASE, control_variate=True).control_variate
    with pytest.raises(InvalidArgumentError, match="control_variate: an optimizer does not see"):
        kind(parameters(), **BASE, control_variate=True)
