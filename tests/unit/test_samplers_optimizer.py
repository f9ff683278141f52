"""Samplers in one's own loop: what moves, in which row, with whose noise, and what is saved."""

import copy
import warnings

import pytest
import torch

from devsample.errors import InvalidArgumentError
from devsample.samplers import SAMPLERS, SGLD

SGHMC, SGNHT, RMSPropSGLD = (SAMPLERS[name] for name in ("SGHMC", "SGNHT", "RMSPropSGLD"))
BASE = {"lr": 0.02, "nbeta": 3.0, "localization": 1.0}
ELEMENTWISE = pytest.mark.parametrize("name", ["SGLD", "SGHMC", "RMSPropSGLD", "AdamSGLD"])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def parameters(*shapes, dtype=torch.float64, seed=11):
    random = seeded(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in shapes]


def set_gradients(*ws):
    for w in ws:
        w.grad = w.detach() * 0.3


def flat(ws):
    return torch.cat([w.detach().flatten() for w in ws])


@ELEMENTWISE
def test_one_row_moves_as_its_parameters_one_by_one(name):
    """The readable form: the kernel on each parameter by itself, with its part of the noise."""
    ws = parameters((3, 4), (5,), (2, 1, 2))
    kind = SAMPLERS[name]
    sampler, kernel, draw = kind(ws, generator=seeded(5), **BASE), kind.kernel(**BASE), seeded(5)
    alone = [w.detach().clone() for w in ws]
    centers = [w.clone().flatten() for w in alone]
    buffers = [kernel.init(w.view(1, -1)) for w in alone]

    def normal():
        return torch.randn(1, 21, generator=draw, dtype=torch.float64)

    before = normal() if kernel.noise_kind == "averaged" else None
    for _ in range(4):
        set_gradients(*ws)
        sampler.step()
        noise = normal()
        if before is not None:
            noise, before = (noise + before) / 2, noise
        parts = noise.split([12, 5, 4], dim=1)
        for w, center, part, buffer in zip(alone, centers, parts, buffers, strict=True):
            kernel.step(w.view(1, -1), 0.3 * w.view(1, -1), center, part, buffer)
        torch.testing.assert_close(flat(ws), flat(alone), rtol=1e-13, atol=1e-13)


def test_a_group_has_one_thermostat():
    ws = parameters((4,), (3,))
    sampler = SGNHT([{"params": ws}, {"params": parameters((2,), seed=1)}], generator=seeded(), **BASE)
    for _ in range(3):
        set_gradients(*[w for group in sampler.param_groups for w in group["params"]])
        sampler.step()
    thermostats = [row["buffers"]["thermostat"] for row in sampler.state_dict()["rows"]]
    assert [tuple(one.shape) for one in thermostats] == [(1, 1), (1, 1)]
    assert thermostats[0] != thermostats[1]


# ---- ties, late comers, layouts -----------------------------------------------------------------


def test_a_parameter_listed_twice_counts_once():
    one, two = parameters((3,), (2,))
    again, other = parameters((3,), (2,))
    mask = torch.tensor([True, False])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tied = SGLD([{"params": [one, two, one], "masks": [None, mask, None]}], generator=seeded(), **BASE)
    plain = SGLD([again, other], masks={other: mask}, generator=seeded(), **BASE)
    for _ in range(2):
        set_gradients(one, two, again, other)
        tied.step()
        plain.step()
    assert torch.equal(flat([one, two]), flat([again, other]))
    assert two.detach()[1] == parameters((3,), (2,))[1].detach()[1]


def test_tied_weights_of_a_model_move_once():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    sampler = SGLD(model.parameters(), generator=seeded(), noise_level=0.0, lr=0.02, nbeta=3.0)
    before = model[0].weight.detach().clone()
    model(torch.eye(3)).sum().backward()
    gradient = model[0].weight.grad.clone()
    sampler.step()
    torch.testing.assert_close(model[1].weight.detach(), before - 0.03 * gradient)


@pytest.mark.parametrize("name", ["SGLD", "SGHMC", "SGNHT", "RMSPropSGLD", "AdamSGLD"])
def test_a_parameter_that_gets_a_gradient_later_joins_then(name):
    first, late = parameters((3,), (2,))
    sampler = SAMPLERS[name]([first, late], generator=seeded(), **BASE)
    start = late.detach().clone()
    for _ in range(3):
        set_gradients(first)
        sampler.step()
    assert torch.equal(late.detach(), start)
    late.data += 1.0  # w* is where it is before its first step
    set_gradients(first, late)
    sampler.step()
    assert not torch.isclose(late.detach(), start + 1).any()
    rows = sampler.state_dict()["rows"]
    assert [(row["members"], row["steps"]) for row in rows] == [([0], 4), ([1], 1)]
    assert torch.equal(rows[1]["center"], start + 1)


@ELEMENTWISE
def test_one_that_misses_some_steps_keeps_its_own_state(name):
    """As with one sampler each, step by step; with the noise off, so that both are the same."""
    kind, values = SAMPLERS[name], BASE | {"noise_level": 0.0}
    ws, alone = parameters((3,), (2,), (4,)), parameters((3,), (2,), (4,))
    together, apart = kind(ws, **values), [kind([w], **values) for w in alone]
    for moving in ([0, 1, 2], [0, 1, 2], [0, 2], [1], [0, 1, 2], [2, 1]):
        for k in range(3):
            ws[k].grad = alone[k].grad = None
        for k in moving:
            set_gradients(ws[k], alone[k])
            apart[k].step()
        together.step()
        torch.testing.assert_close(flat(ws), flat(alone), rtol=1e-13, atol=1e-13)


def test_what_has_parted_is_saved_as_such():
    ws = parameters((3,), (2,))
    sampler = SGNHT(ws, generator=seeded(), **BASE)
    set_gradients(*ws)
    sampler.step()
    ws[0].grad = None
    sampler.step()
    resumed = [torch.nn.Parameter(w.detach().clone()) for w in ws]
    other = SGNHT(resumed, **BASE)
    other.load_state_dict(copy.deepcopy(sampler.state_dict()))
    for _ in range(3):
        set_gradients(*ws, *resumed)
        sampler.step()
        other.step()
    assert torch.equal(flat(ws), flat(resumed))
    assert len(sampler.state_dict()["rows"]) == 2


def test_a_group_added_later_joins_with_values_of_its_own():
    one, two = parameters((3,), (2,))
    sampler = SGLD([one], generator=seeded(), **BASE)
    set_gradients(one, two)
    sampler.step()
    sampler.add_param_group({"params": [two], "noise_level": 0.0, "localization": 0.0})
    start, gradient = two.detach().clone(), two.grad.clone()
    sampler.step()
    torch.testing.assert_close(two.detach(), start - 0.01 * 3.0 * gradient)
    with pytest.raises(InvalidArgumentError, match="lr: expected a number > 0"):
        sampler.add_param_group({"params": parameters((1,)), "lr": 0.0})
    assert len(sampler.param_groups) == 2


def test_precisions_move_side_by_side():
    ws = [torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float64, torch.bfloat16, torch.float32)]
    sampler = SGLD(ws, generator=seeded(), **BASE)
    for _ in range(3):
        set_gradients(*ws)
        sampler.step()
    rows = sampler.state_dict()["rows"]
    assert {tuple(row["members"]): row["center"].dtype for row in rows} == {
        (0,): torch.float64,
        (1, 2): torch.float32,
    }
    assert all(w.detach().float().std() > 0 for w in ws)


def test_sparse_gradients_move_every_entry():
    table, dense = torch.nn.Embedding(6, 2, sparse=True), torch.nn.Embedding(6, 2)
    dense.load_state_dict(table.state_dict())
    for one in (table, dense):
        sampler = SGLD(one.parameters(), generator=seeded(), **BASE)
        for _ in range(2):
            sampler.zero_grad()
            one(torch.tensor([1, 4])).square().sum().backward()
            sampler.step()
    assert torch.equal(table.weight, dense.weight)


def test_a_half_precision_parameter_that_is_overwritten_stays_so():
    w = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    sampler = SGLD([w], lr=1e-9, nbeta=1.0, generator=seeded())
    for value in (1.0, 2.0):
        w.data.fill_(value)
        set_gradients(w)
        sampler.step()
        assert torch.equal(w.detach(), torch.full_like(w, value))


# ---- masks --------------------------------------------------------------------------------------


def test_masks_by_name_pattern_and_group():
    def model():
        made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        for w in made.parameters():
            torch.nn.init.constant_(w, 0.5)
        return made

    mask = torch.tensor([[True, False], [False, True]])
    nothing = torch.zeros(2, dtype=torch.bool)
    results = []
    for way in ("pattern", "parameter", "group"):
        one = model()
        ws = list(one.parameters())
        values = {"generator": seeded(), **BASE}
        if way == "pattern":
            sampler = SGLD(one.named_parameters(), masks={"*.weight": mask, "1.bias": nothing}, **values)
        elif way == "parameter":
            masks = {ws[0]: mask, ws[2]: mask, ws[3]: nothing}
            sampler = SGLD(ws, masks=masks, **values)
        else:
            sampler = SGLD([{"params": ws, "masks": [mask, None, mask, nothing]}], **values)
        for _ in range(3):
            set_gradients(*ws)
            sampler.step()
        results.append(flat(ws))
        moved = [w.detach() != 0.5 for w in ws]
        assert torch.equal(moved[0], mask)
        assert torch.equal(moved[2], mask)
        assert moved[1].all()
        assert not moved[3].any()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_masked_parameter_of_any_layout(layout):
    values = torch.arange(6.0).view(2, 3)
    w = torch.nn.Parameter(values if layout == "contiguous" else values.t().contiguous().t())
    mask = torch.tensor([[True, False, True], [False, False, True]])
    before = values.clone()
    sampler = SGLD([w], masks={w: mask}, generator=seeded(), **BASE)
    w.grad = torch.ones_like(w)
    sampler.step()
    assert torch.equal(w.detach() != before, mask)
    assert w.is_contiguous() == (layout == "contiguous")


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"weight": torch.ones(3, dtype=torch.bool)}, "'weight' is none of the parameters"),
        (
            {torch.nn.Parameter(torch.zeros(3)): torch.ones(3, dtype=torch.bool)},
            "a key of shape .3,. is none of the parameters",
        ),
        ([torch.ones(3)], "expected a boolean tensor of shape .3,., got torch.float32"),
        (
            [torch.ones(2, dtype=torch.bool)],
            "expected a boolean tensor of shape .3,., got torch.bool of shape",
        ),
        ([True], "expected a boolean tensor of shape .3,., got True"),
        ([None, None], "2 masks for 1 parameters"),
    ],
)
def test_masks_that_are_refused(masks, message):
    with pytest.raises(InvalidArgumentError, match=message):
        SGLD(parameters((3,)), masks=masks, **BASE)


# ---- freezing -----------------------------------------------------------------------------------


def test_freezing_by_hand_and_after_a_number_of_steps_is_the_same():
    results = []
    for after in (None, 3):
        ws = parameters((3,), (2,))
        sampler = RMSPropSGLD(ws, generator=seeded(), freeze_after=after, **BASE)
        for step in range(6):
            if step == 3 and after is None:
                sampler.freeze()
            set_gradients(*ws)
            sampler.step()
        results.append(flat(ws))
        assert "scale" in sampler.state_dict()["rows"][0]["buffers"]
    assert torch.equal(*results)


def test_a_later_parameter_adapts_for_as_many_steps():
    first, late = parameters((3,), (2,))
    sampler = RMSPropSGLD([first, late], freeze_after=2, **BASE)
    frozen = []
    for step in range(5):
        set_gradients(first)
        if step >= 2:
            set_gradients(late)
        sampler.step()
        frozen.append(["scale" in row["buffers"] for row in sampler.state_dict()["rows"]])
    assert frozen == [[False], [True], [True, False], [True, True], [True, True]]


def test_what_cannot_be_frozen():
    ws = parameters((3,))
    with pytest.raises(InvalidArgumentError, match="freeze: no step has been made"):
        RMSPropSGLD(ws, **BASE).freeze()
    sampler = RMSPropSGLD(ws, preconditioner="moving", **BASE)
    set_gradients(*ws)
    sampler.step()
    with pytest.raises(InvalidArgumentError, match="goes on adapting"):
        sampler.freeze()
    for value in (0, -1, 1.5, True, "3"):
        with pytest.raises(InvalidArgumentError, match="freeze_after: expected a number of steps"):
            RMSPropSGLD(ws, freeze_after=value, **BASE)
    with pytest.raises(InvalidArgumentError, match="freeze_after: SGLD adapts nothing"):
        SGLD(ws, freeze_after=10, **BASE)


# ---- generators, schedulers, states -------------------------------------------------------------


def test_a_generator_on_another_device_is_refused():
    w = torch.nn.Parameter(torch.zeros(2, device="meta"))
    w.grad = torch.zeros_like(w)
    sampler = SGLD([w], generator=seeded(), **BASE)
    with pytest.raises(InvalidArgumentError, match=r"generator: it is on cpu, parameters are on meta"):
        sampler.step()


def test_schedulers_set_the_step_size():
    (w,) = parameters((3,))
    sampler = SGLD([w], lr=0.4, nbeta=1.0, noise_level=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(sampler, step_size=1, gamma=0.5)
    expected = w.detach().clone()
    for lr in (0.4, 0.2, 0.1):
        w.grad = torch.ones_like(w)
        sampler.step()
        schedule.step()
        expected -= lr / 2
    torch.testing.assert_close(w.detach(), expected)


def test_states_of_something_else_are_refused():
    (w,) = parameters((3,))
    other = torch.optim.SGD([w], lr=0.1)
    with pytest.raises(InvalidArgumentError, match="state_dict: it has no generators and rows"):
        SGLD([w], **BASE).load_state_dict(other.state_dict())
    two = SGLD(parameters((3,), (2,)), **BASE)
    with pytest.raises(ValueError, match="parameter group"):
        SGLD([w], **BASE).load_state_dict(two.state_dict())


def test_complex_parameters_are_refused():
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(InvalidArgumentError, match="only real floating point"):
        SGLD([w], **BASE)


def test_a_model_that_has_nothing_to_move_stays():
    (w,) = parameters((0, 3))
    sampler = SGNHT([w], **BASE)
    sampler.step()
    w.grad = torch.zeros_like(w)
    sampler.step()
    assert w.shape == (0, 3)
