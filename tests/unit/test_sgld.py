"""SGLD: the algebra of one step, the box, and the optimizer in one's own loop."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from devsample import SGLD
from devsample.errors import InvalidArgumentError
from devsample.flat import FlatParameters
from devsample.samplers import SGLDKernel
from devsample.seeds import NormalBlocks, chain_keys

CPU = torch.device("cpu")
PLAIN = SGLDKernel(lr=0.02, nbeta=30.0)


def state(rows=3, size=11, seed=0):
    """Position, gradient, center and noise."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((rows, size), (rows, size), (size,), (rows, size))
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


# ---- one step -----------------------------------------------------------------------------------


def formula(kernel, w, gradient, center, noise):
    """The step as it is written in the docstring, element by element."""
    new = []
    for w_k, g, c, r in zip(w.tolist(), gradient.tolist(), center.tolist(), noise.tolist(), strict=True):
        drift = kernel.nbeta * g + kernel.weight_decay * w_k + kernel.localization * (w_k - c)
        new.append(w_k - kernel.lr / 2 * drift + math.sqrt(kernel.lr) * kernel.noise_level * r)
    return torch.tensor(new, dtype=torch.float64)


@pytest.mark.parametrize(
    "kernel",
    [
        PLAIN,
        replace(PLAIN, localization=7.0),
        replace(PLAIN, weight_decay=3.0),
        replace(PLAIN, localization=7.0, weight_decay=3.0),
        replace(PLAIN, localization=90.0, weight_decay=20.0),  # lr/2 · pull > 1/2
        replace(PLAIN, noise_level=0.0),
        replace(PLAIN, noise_level=1.3, integrator="euler", localization=1.0),
    ],
    ids=lambda kernel: f"{kernel.localization:g}-{kernel.weight_decay:g}-{kernel.noise_level:g}",
)
def test_a_step_is_its_formula(kernel):
    position, gradient, center, noise = state()
    expected = torch.stack([formula(kernel, position[k], gradient[k], center, noise[k]) for k in range(3)])
    inputs = [one.clone() for one in (gradient, center, noise)]
    kernel.step(position, gradient, center, noise, kernel.init(position))
    torch.testing.assert_close(position, expected, rtol=1e-13, atol=1e-13)
    for before, after in zip(inputs, (gradient, center, noise), strict=True):
        assert torch.equal(before, after)  # only the position is written


@pytest.mark.parametrize("box", [None, 0.3])
def test_rows_are_chains_alone(box):
    kernel = replace(PLAIN, localization=2.0, weight_decay=1.0, bounding_box_size=box)
    position, gradient, center, noise = state()
    alone = position.clone()
    kernel.step(position, gradient, center, noise, {})
    for k in range(3):
        kernel.step(alone[k : k + 1], gradient[k : k + 1], center, noise[k : k + 1], {})
    assert torch.equal(position, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_order_of_operations_is_part_of_a_seeded_result(dtype):
    """Bit for bit: rounding depends on the order, and seeded traces must not change with it."""
    position, gradient, center, noise = (one.to(dtype) for one in state(3, 40))
    kernel = replace(PLAIN, localization=7.0, weight_decay=3.0, noise_level=1.3)
    expected = position.clone()
    expected.lerp_(center * (7.0 / 10.0), 0.01 * 10.0)
    expected.add_(gradient, alpha=-0.01 * 30.0)
    expected.add_(noise, alpha=math.sqrt(0.02) * 1.3)
    kernel.step(position, gradient, center, noise, {})
    assert torch.equal(position, expected)


def test_which_noise_an_integrator_takes():
    assert PLAIN.noise_kind == "averaged"
    assert replace(PLAIN, integrator="euler").noise_kind == "plain"


@pytest.mark.parametrize(("lr", "weight", "bias"), [(0.1, 0.8456292, 0.9110986), (0.01, 0.7726476, 0.838117)])
def test_without_noise_it_is_gradient_descent(lr, weight, bias):
    """Values of torch.optim.SGD(lr) after one step from Linear(1, 1) at seed 42, x = 1, y = 2."""
    with torch.random.fork_rng():
        torch.manual_seed(42)
        model = torch.nn.Linear(1, 1)
    sampler = SGLD(model.parameters(), lr=2 * lr, nbeta=1.0, noise_level=0.0)
    ((model(torch.tensor([[1.0]])) - 2.0) ** 2).sum().backward()
    sampler.step()
    assert model.weight.item() == pytest.approx(weight, abs=2e-7)
    assert model.bias.item() == pytest.approx(bias, abs=2e-7)


def test_without_noise_many_steps_are_those_of_torchs_sgd():
    models = [torch.nn.Linear(3, 2, dtype=torch.float64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    optimizers = [
        SGLD(models[0].parameters(), lr=0.02, nbeta=10.0, weight_decay=0.5, noise_level=0.0),
        torch.optim.SGD(models[1].parameters(), lr=0.1, weight_decay=0.05),
    ]
    for _ in range(50):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            ((model(x) - x[:, :2]) ** 2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-10, atol=1e-12)


# ---- masks --------------------------------------------------------------------------------------


class Product(torch.nn.Module):
    """Loss (w0 · w1 + w2 − 1)² + Σw²; the frozen coordinate is where ``fixed`` says."""

    def __init__(self, values):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, w=None):
        w = self.w if w is None else w
        return (w[0] * w[1] + w[2] - 1) ** 2 + (w**2).sum()


class Smaller(torch.nn.Module):
    """The same loss with w1 a constant."""

    def __init__(self, values):
        super().__init__()
        self.constant = values[1]
        self.w = torch.nn.Parameter(torch.tensor([values[0], values[2]], dtype=torch.float64))

    def forward(self):
        return (self.w[0] * self.constant + self.w[1] - 1) ** 2 + (self.w**2).sum()


def run_chain(model, masks, kernel, steps=60):
    flat = FlatParameters(model, masks)
    center = flat.read()
    position, gradient = center[None].clone(), torch.zeros_like(center)[None]
    noise = NormalBlocks(chain_keys(3, 1), flat.size, flat.dtype, CPU)
    trace = []
    for step in range(steps):
        flat.point_to(position[0])
        flat.gather(torch.autograd.grad(model(), flat.parameters), gradient[0], add=False)
        kernel.step(position, gradient, center, noise.averaged(step), {})
        trace.append(position[0].clone())
    return torch.stack(trace)


@pytest.mark.parametrize("noise_level", [0.0, 1.0])
def test_a_masked_model_is_the_smaller_model(noise_level):
    kernel = replace(PLAIN, lr=0.003, localization=1.0, noise_level=noise_level)
    values = [0.7, -0.4, 0.2]
    masked = Product(values)
    large = run_chain(masked, {"w": torch.tensor([True, False, True])}, kernel)
    small = run_chain(Smaller(values), {"w": True}, kernel)
    torch.testing.assert_close(large, small, rtol=1e-12, atol=1e-12)
    assert masked.w[1] == -0.4
    assert large.std() > 0.01  # it moved


# ---- the box ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "reflected", "clamped"),
    [
        (0.0, 0.0, 0.0),
        (0.9, 0.9, 0.9),
        (1.25, 0.75, 1.0),
        (-1.25, -0.75, -1.0),
        (2.5, -0.5, 1.0),
        (-3.5, 0.5, -1.0),
        (4.25, 0.25, 1.0),
        (-6.5, 0.5, -1.0),
        (101.0, 1.0, 1.0),
    ],
)
def test_where_a_step_over_the_wall_ends(offset, reflected, clamped):
    """Unfolded walls have period 4: the image of x is x mod 4, mirrored above 1."""
    for how, expected in (("reflect", reflected), ("clamp", clamped)):
        kernel = SGLDKernel(lr=1.0, nbeta=1.0, bounding_box_size=1.0, bounding_box=how)
        center = torch.tensor([5.0, -3.0], dtype=torch.float64)
        position = center[None].clone()
        noise = torch.full((1, 2), offset, dtype=torch.float64)
        kernel.step(position, torch.zeros(1, 2, dtype=torch.float64), center, noise, {})
        torch.testing.assert_close(position[0] - center, torch.full_like(center, expected))


@pytest.mark.parametrize("how", ["reflect", "clamp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_entry_leaves_the_box(how, dtype):
    kernel = SGLDKernel(lr=0.5, nbeta=1.0, bounding_box_size=0.1, bounding_box=how)
    random = torch.Generator().manual_seed(0)
    center = torch.randn(500, generator=random, dtype=dtype)
    position = center.expand(4, -1).clone()
    for _ in range(50):
        noise = torch.randn(4, 500, generator=random, dtype=dtype)
        kernel.step(position, torch.zeros_like(position), center, noise, {})
        slack = 4 * torch.finfo(dtype).eps * (center.abs() + 0.1)
        assert bool(((position - center).abs() <= 0.1 + slack).all())


def test_the_law_of_reflected_steps_is_uniform_and_that_of_clamped_ones_is_not():
    """Without a loss the box's law is uniform for reflection, at any step size."""
    random = torch.Generator().manual_seed(1)
    center = torch.zeros(4000, dtype=torch.float64)
    for how in ("reflect", "clamp"):
        kernel = SGLDKernel(lr=0.09, nbeta=1.0, bounding_box_size=1.0, bounding_box=how, integrator="euler")
        position = center[None].clone()
        for _ in range(150):  # from the middle: relaxed to e^{-150 · 0.09 · π²/8} < 10^-7
            noise = torch.randn(1, 4000, generator=random, dtype=torch.float64)
            kernel.step(position, torch.zeros_like(position), center, noise, {})
        p = stats.kstest(position[0].numpy(), stats.uniform(-1, 2).cdf).pvalue
        assert p > 1e-3 if how == "reflect" else p < 1e-6


def test_a_box_that_is_never_reached_changes_nothing():
    position, gradient, center, noise = state()
    boxed = position.clone()
    PLAIN.step(position, gradient, center, noise, {})
    replace(PLAIN, bounding_box_size=100.0).step(boxed, gradient, center, noise, {})
    assert torch.equal(position, boxed)


def test_not_a_number_stays_visible_in_a_box():
    position, gradient, center, noise = state()
    gradient[0, 0] = math.nan
    replace(PLAIN, bounding_box_size=1.0).step(position, gradient, center, noise, {})
    assert math.isnan(position[0, 0])
    assert int(position.isnan().sum()) == 1


# ---- hyperparameters ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0}, "lr: expected a number > 0, got 0"),
        ({"lr": -1e-3}, "lr: expected a number > 0"),
        ({"lr": math.nan}, "lr: expected a number > 0, got nan"),
        ({"lr": math.inf}, "lr: expected a number > 0, got inf"),
        ({"lr": "1e-3"}, "lr: expected a number > 0, got '1e-3'"),
        ({"lr": True}, "lr: expected a number"),
        ({"lr": None}, "lr: expected a number"),
        ({"nbeta": 0.0}, "nbeta: expected a number > 0"),
        ({"localization": -1}, "localization: expected a number ≥ 0, got -1"),
        ({"weight_decay": -0.1}, "weight_decay: expected a number ≥ 0"),
        ({"noise_level": -1.0}, "noise_level: expected a number ≥ 0"),
        ({"bounding_box_size": 0.0}, "bounding_box_size: expected a number > 0"),
        ({"bounding_box": "bounce"}, "bounding_box: expected .*got 'bounce'"),
        ({"integrator": "leapfrog"}, "integrator: expected .*got 'leapfrog'"),
    ],
)
def test_values_that_are_refused(values, message):
    with pytest.raises(InvalidArgumentError, match=message):
        SGLDKernel(**({"lr": 0.1, "nbeta": 1.0} | values))
    with pytest.raises(InvalidArgumentError, match=message):
        SGLD([torch.nn.Parameter(torch.zeros(1))], **({"lr": 0.1, "nbeta": 1.0} | values))


def test_numbers_of_numpy_are_numbers():
    for value in (np.float64(2), np.float32(2), np.int64(2)):
        kernel = SGLDKernel(lr=0.1, nbeta=value, localization=value)
        position, gradient, center, noise = state()
        same = position.clone()
        kernel.step(position, gradient, center, noise, {})
        SGLDKernel(lr=0.1, nbeta=2.0, localization=2.0).step(same, gradient, center, noise, {})
        assert torch.equal(position, same)


def test_unknown_and_missing_hyperparameters_are_refused():
    w = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(TypeError, match="momentum"):
        SGLD([w], lr=0.1, nbeta=1.0, momentum=0.9)
    with pytest.raises(TypeError, match="nbeta"):
        SGLD([w], lr=0.1)
    with pytest.raises(TypeError):
        SGLD([w], 0.1, 1.0)  # hyperparameters are keywords


# ---- in one's own loop --------------------------------------------------------------------------


def seeded(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_optimizer_makes_the_kernels_step_with_the_generators_noise():
    w = torch.nn.Parameter(torch.arange(6.0, dtype=torch.float64).view(2, 3))
    options = dict(lr=0.02, nbeta=30.0, localization=2.0)
    sampler = SGLD([w], generator=seeded(5), **options)
    draw = seeded(5)
    center = w.detach().clone().view(-1)
    position = center[None].clone()
    before = torch.randn(2, 3, generator=draw, dtype=torch.float64)
    for _ in range(4):
        w.grad = (w.detach() ** 2).cos()
        sampler.step()
        after = torch.randn(2, 3, generator=draw, dtype=torch.float64)
        noise = ((before + after) / 2).view(1, -1)
        gradient = (position**2).cos()
        SGLDKernel(**options).step(position, gradient, center, noise, {})
        before = after
        torch.testing.assert_close(w.detach().view(1, -1), position)


def test_euler_takes_one_noise_a_step():
    w = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    sampler = SGLD([w], lr=0.25, nbeta=1.0, integrator="euler", generator=seeded(5))
    w.grad = torch.zeros_like(w)
    sampler.step()
    torch.testing.assert_close(w.detach(), 0.5 * torch.randn(4, generator=seeded(5), dtype=torch.float64))


def test_the_global_generator_is_neither_read_nor_moved():
    traces = []
    for junk in (1, 2):
        torch.manual_seed(junk)
        state_before = torch.get_rng_state()
        w = torch.nn.Parameter(torch.zeros(5))
        sampler = SGLD([w], lr=0.1, nbeta=1.0, generator=seeded())
        for _ in range(3):
            w.grad = torch.ones_like(w)
            sampler.step()
        SGLD([w], lr=0.1, nbeta=1.0).step()  # also without a generator of its own
        assert torch.equal(state_before, torch.get_rng_state())
        traces.append(w.detach().clone())
    other = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
    for w in other:
        w.grad = torch.zeros(5)
        SGLD([w], lr=0.1, nbeta=1.0).step()
    assert not torch.equal(other[0], other[1])  # fresh entropy each


def test_the_same_generator_seed_gives_the_same_chain():
    traces = []
    for _ in range(2):
        w = torch.nn.Parameter(torch.zeros(5))
        sampler = SGLD([w], lr=0.1, nbeta=1.0, generator=seeded(3))
        for _ in range(3):
            w.grad = torch.ones_like(w)
            sampler.step()
        traces.append(w.detach().clone())
    assert torch.equal(*traces)
    assert traces[0].std() > 0


def test_groups_have_values_of_their_own():
    one, two = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    groups = [{"params": [one], "lr": 0.2}, {"params": [two], "nbeta": 5.0}]
    sampler = SGLD(groups, lr=0.1, nbeta=1.0, noise_level=0.0)
    one.grad, two.grad = torch.ones(3), torch.ones(3)
    sampler.step()
    torch.testing.assert_close(one.detach(), torch.full((3,), 1 - 0.1))
    torch.testing.assert_close(two.detach(), torch.full((3,), 1 - 0.25))
    with pytest.raises(InvalidArgumentError, match="lr: expected a number > 0"):
        SGLD([{"params": [one], "lr": -1.0}], lr=0.1, nbeta=1.0)


def test_a_changed_step_size_counts_from_the_next_step():
    w = torch.nn.Parameter(torch.ones(1))
    sampler = SGLD([w], lr=0.2, nbeta=1.0, noise_level=0.0)
    w.grad = torch.ones(1)
    sampler.step()
    sampler.param_groups[0]["lr"] = 0.4
    sampler.step()
    assert w.item() == pytest.approx(1 - 0.1 - 0.2)


def test_parameters_without_a_gradient_do_not_move():
    one, two = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    sampler = SGLD([one, two], lr=0.1, nbeta=1.0, localization=1.0, generator=seeded())
    one.grad = torch.zeros(3)
    sampler.step()
    assert torch.equal(two.detach(), torch.ones(3))
    assert not torch.equal(one.detach(), torch.ones(3))


def test_the_center_is_where_a_parameter_was_at_its_first_step():
    w = torch.nn.Parameter(torch.zeros(2))
    sampler = SGLD([w], lr=0.1, nbeta=1.0, localization=4.0, noise_level=0.0)
    w.data.fill_(3.0)
    w.grad = torch.zeros(2)
    sampler.step()
    assert torch.equal(w.detach(), torch.full((2,), 3.0))
    w.data.fill_(4.0)
    sampler.step()
    torch.testing.assert_close(w.detach(), torch.full((2,), 4.0 - 0.1 / 2 * 4.0))


@pytest.mark.parametrize("shape", ["transposed", "channels_last", "scalar", "empty"])
def test_any_layout_moves_as_its_contiguous_copy(shape):
    values = {
        "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
        "channels_last": lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "scalar": lambda: torch.tensor(2.0),
        "empty": lambda: torch.empty(0, 3),
    }  # fmt: skip
    strange = torch.nn.Parameter(values[shape]())
    plain = torch.nn.Parameter(values[shape]().contiguous())
    for w in (strange, plain):
        sampler = SGLD([w], lr=0.1, nbeta=1.0, localization=1.0, generator=seeded())
        for _ in range(3):
            w.grad = None
            (w**2).sum().backward()
            sampler.step()
    assert torch.equal(strange.detach(), plain.detach())
    assert strange.stride() == values[shape]().stride()


def test_a_closure_is_called_with_gradients_on():
    w = torch.nn.Parameter(torch.ones(2))
    sampler = SGLD([w], lr=0.1, nbeta=1.0, noise_level=0.0)

    def closure():
        sampler.zero_grad()
        loss = (w**2).sum()
        loss.backward()
        return loss.detach()

    assert float(sampler.step(closure)) == 2.0
    torch.testing.assert_close(w.detach(), torch.full((2,), 1 - 0.1 / 2 * 2))


def test_state_dict_resumes_the_chain():
    def make(w, generator):
        return SGLD([w], lr=0.1, nbeta=2.0, localization=1.0, generator=generator)

    def advance(w, sampler, steps):
        for _ in range(steps):
            w.grad = w.detach().clone()
            sampler.step()

    whole, half = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    generators = seeded(7), seeded(7)
    one, two = make(whole, generators[0]), make(half, generators[1])
    advance(whole, one, 6)
    advance(half, two, 3)
    resumed = torch.nn.Parameter(half.detach().clone())
    generator = torch.Generator()
    generator.set_state(generators[1].get_state())
    three = make(resumed, generator)
    three.load_state_dict(two.state_dict())
    advance(resumed, three, 3)
    torch.testing.assert_close(resumed.detach(), whole.detach())


@pytest.mark.parametrize(("integrator", "excess"), [("averaged", 1.0), ("euler", 1 / (1 - 0.8 / 4))])
def test_the_optimizer_samples_the_exact_law_of_a_quadratic(integrator, excess):
    """L = h w²/2, a = nβ h + γ, ε a = 0.8: variance 1/a (averaged), 1/(a (1 − ε a/4)) (Euler)."""
    h, nbeta, localization, size = 2.0, 50.0, 10.0, 20_000
    a = nbeta * h + localization
    w = torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))
    sampler = SGLD(
        [w],
        lr=0.8 / a,
        nbeta=nbeta,
        localization=localization,
        integrator=integrator,
        generator=seeded(1),
    )
    squares = []
    for step in range(200):  # the memory of the start is 0.6^step
        w.grad = h * w.detach()
        sampler.step()
        if step >= 20 and step % 10 == 0:  # 0.6^20 = 4e-5: independent draws
            squares.append(float((a * w.detach() ** 2).mean()))
    standard_error = excess * math.sqrt(2 / (size * len(squares)))
    assert abs(np.mean(squares) - excess) < 4 * standard_error
    assert standard_error < 0.01 * excess  # 25 % apart, told apart
