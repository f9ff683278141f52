"""One flat vector that the model computes with, whatever its parameters look like."""

import copy

import pytest
import torch

from devsample.errors import InvalidArgumentError, ModelError
from devsample.flat import FlatParameters, resolve_masks, squared_norm


class Model(torch.nn.Module):
    """Contiguous, transposed and channels_last parameters, and a tied one."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        random = torch.Generator().manual_seed(0)

        def values(*shape):
            return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

        self.first = torch.nn.Parameter(values(4, 3))
        self.turned = torch.nn.Parameter(values(3, 4).t())  # strides (1, 4)
        self.conv = torch.nn.Parameter(values(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.scale = torch.nn.Parameter(values())
        self.again = self.first

    def forward(self):
        total = (self.first**3).sum() + (self.turned.sin() * self.first).sum() + self.again.sum()
        index = torch.arange(1, 25, dtype=self.conv.dtype).view(2, 3, 2, 2)
        return total * self.scale.cos() + (index * self.conv**2).sum()


ALL = {"first": True, "turned": True, "conv": True, "scale": True}
SIZE = 12 + 12 + 24 + 1


def masks_of_every_kind(random=None) -> dict[str, torch.Tensor | bool]:
    random = random or torch.Generator().manual_seed(1)
    return {
        "first": True,
        "turned": torch.rand(4, 3, generator=random) < 0.5,
        "conv": torch.rand(2, 3, 2, 2, generator=random) < 0.5,
    }


def reference(model, masks, vector=None):
    """The moving entries of an untouched model in named_parameters order, and their gradient."""
    model = copy.deepcopy(model)
    chosen = [
        (parameter, torch.ones_like(parameter, dtype=torch.bool) if mask is True else mask)
        for name, parameter in model.named_parameters()
        if (mask := masks.get(name, False)) is not False
    ]
    if vector is not None:
        start = 0
        with torch.no_grad():
            for parameter, mask in chosen:
                count = int(mask.sum())
                parameter[mask] = vector[start : start + count].to(parameter.dtype)
                start += count
    loss = model()
    gradients = torch.autograd.grad(loss, [parameter for parameter, _ in chosen])
    return (
        torch.cat([parameter.detach()[mask] for parameter, mask in chosen]),
        torch.cat([grad[mask] for grad, (_, mask) in zip(gradients, chosen, strict=True)]),
        loss.detach(),
    )


def differentiate(flat, loss, gradient, *, add=False):
    """What a step does with a loss of the model that ``flat`` directs."""
    parts = torch.autograd.grad(loss, flat.parameters, allow_unused=True)
    flat.gather(parts, gradient, add=add)


@pytest.mark.parametrize("masks", [ALL, masks_of_every_kind()], ids=["full", "masked"])
def test_vector_loss_and_gradient_are_those_of_the_model(masks):
    model = Model()
    untouched = copy.deepcopy(model)
    flat = FlatParameters(model, masks)
    center, gradient, loss = reference(untouched, masks)
    assert flat.size == len(center)
    assert torch.equal(flat.read(), center)
    for scale in (0.0, 1.0, -0.5):
        vector = center + scale * torch.linspace(-1, 1, flat.size, dtype=torch.float64)
        expected_values, expected_gradient, expected_loss = reference(untouched, masks, vector)
        got = torch.full_like(vector, 9.0)  # whatever stood there before
        flat.point_to(vector)
        loss = model()
        differentiate(flat, loss, got)
        torch.testing.assert_close(loss.detach(), expected_loss)
        torch.testing.assert_close(got, expected_gradient)
        assert torch.equal(flat.read(), expected_values)
    assert gradient.abs().min() > 0  # every entry was tested


def test_an_update_in_place_is_seen_by_the_model():
    model = Model()
    flat = FlatParameters(model, ALL)
    vector = flat.read()
    flat.point_to(vector)
    vector.add_(1.0)
    torch.testing.assert_close(model().detach(), reference(Model(), ALL, vector)[2])
    assert all(one.direct for one in flat.segments)


def test_the_vector_read_is_a_copy():
    model = Model()
    before = copy.deepcopy(model.state_dict())
    flat = FlatParameters(model, ALL)
    flat.read().zero_()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_gradients_accumulate_over_micro_batches():
    model, masks = Model(), masks_of_every_kind()
    flat = FlatParameters(model, masks)
    gradient = torch.full((flat.size,), 9.0, dtype=torch.float64)
    flat.point_to(flat.read())
    differentiate(flat, model(), gradient)
    differentiate(flat, 2 * model(), gradient, add=True)
    torch.testing.assert_close(gradient, 3 * reference(Model(), masks)[1])
    differentiate(flat, model(), gradient)
    torch.testing.assert_close(gradient, reference(Model(), masks)[1])


def test_several_vectors_take_turns():
    """A group computes at one row after the other, each with its own gradient."""
    model = Model()
    flat = FlatParameters(model, ALL)
    center = flat.read()
    positions = torch.stack([center, center + 1.0])
    gradients = torch.zeros_like(positions)
    for _ in range(2):
        for row in range(2):
            flat.point_to(positions[row])
            differentiate(flat, model(), gradients[row])
    for row in range(2):
        torch.testing.assert_close(gradients[row], reference(Model(), ALL, positions[row])[1])


def test_a_parameter_outside_the_loss_has_gradient_zero():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))
    flat = FlatParameters(model, resolve_masks(model, None))
    gradient = torch.full((6,), 9.0)
    flat.point_to(flat.read())
    differentiate(flat, model[1](torch.ones(1, 2)).sum(), gradient)
    assert gradient.tolist() == [0, 0, 0, 1, 1, 1]


def test_entries_outside_the_mask_stay():
    model, masks = Model(), masks_of_every_kind()
    before = copy.deepcopy(model)
    flat = FlatParameters(model, masks)
    flat.point_to(torch.full((flat.size,), 7.0, dtype=torch.float64))
    for name in ("turned", "conv"):
        now, then, mask = getattr(model, name), getattr(before, name), masks[name]
        assert bool((now[mask] == 7).all())
        assert torch.equal(now[~mask], then[~mask])
    assert bool((model.first == 7).all())
    assert torch.equal(model.scale, before.scale)


def test_parameters_that_do_not_move_need_no_gradient():
    model = Model()
    flat = FlatParameters(model, {"turned": True})
    assert not model.first.requires_grad
    assert not model.scale.requires_grad
    flat.point_to(flat.read())
    model().backward()
    assert model.first.grad is None
    assert flat.names() == ["turned"]


def test_tied_parameters_are_one_and_stay_tied():
    model = Model()
    flat = FlatParameters(model, ALL)
    assert flat.names() == ["first", "turned", "conv", "scale"]
    assert flat.size == SIZE
    vector = flat.read()
    flat.point_to(vector)
    assert model.again is model.first
    vector[:12] = 0.0
    assert not model.again.any()


def test_half_precision_moves_in_single_precision():
    """A step below bfloat16's resolution adds up in the vector and reaches the weights in the end."""
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    flat = FlatParameters(model, {"weight": True, "bias": True})
    assert flat.dtype == torch.float32
    vector = flat.read()
    gradient = torch.zeros_like(vector)
    flat.point_to(vector)
    for _ in range(100):
        vector[:6] += 1e-3  # bfloat16 knows 1 and 1.0078
        flat.point_to(vector)
    assert model.weight.dtype == torch.bfloat16
    torch.testing.assert_close(vector[:6], torch.full((6,), 1.1), rtol=1e-5, atol=0)
    assert torch.equal(model.weight, torch.full((2, 3), 1.1, dtype=torch.bfloat16))
    differentiate(flat, model(torch.ones(1, 3, dtype=torch.bfloat16)).sum(), gradient)
    assert torch.equal(gradient, torch.ones(8))
    assert gradient.dtype == torch.float32


def test_mixed_dtypes_move_in_the_widest():
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.b = torch.nn.Parameter(torch.ones(3, dtype=torch.float32))
    model.c = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    flat = FlatParameters(model, {"a": True, "b": True, "c": True})
    assert flat.dtype == torch.float64
    assert [one.direct for one in flat.segments] == [True, False, False]
    gradient = torch.zeros(7, dtype=torch.float64)
    flat.point_to(torch.full((7,), 3.0, dtype=torch.float64))
    differentiate(flat, (model.a**2).sum() + (model.b**2).sum() + (model.c**2).sum(), gradient)
    assert gradient.tolist() == [6.0] * 7
    assert [one.dtype for one in (model.a, model.b, model.c)] == [
        torch.float64,
        torch.float32,
        torch.bfloat16,
    ]


def test_only_what_moves_decides_the_dtype():
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.b = torch.nn.Parameter(torch.ones(3, dtype=torch.float32))
    assert FlatParameters(model, {"b": True}).dtype == torch.float32


def test_sparse_gradients_land_in_the_vector():
    model = torch.nn.Embedding(6, 2, sparse=True)
    flat = FlatParameters(model, {"weight": True})
    gradient = torch.zeros(12)
    flat.point_to(flat.read())
    differentiate(flat, model(torch.tensor([1, 1, 4])).sum(), gradient)
    assert gradient.view(6, 2)[:, 0].tolist() == [0, 2, 0, 0, 1, 0]


# ---- masks --------------------------------------------------------------------------------------


def network() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    model[2].bias.requires_grad_(False)
    return model


def test_without_masks_everything_that_requires_grad_moves():
    assert resolve_masks(network(), None) == {"0.weight": True, "0.bias": True, "2.weight": True}


def test_names_and_patterns_in_the_models_order():
    names = ["0.weight", "0.bias", "2.weight"]
    assert list(resolve_masks(network(), {"2.*": True, "0.*": True})) == names
    assert list(resolve_masks(network(), {"2.weight": True, "?.bias": True})) == names[1:]
    masks = {"*": True, "0.weight": torch.eye(3, 2, dtype=torch.bool)}
    resolved = resolve_masks(network(), masks)
    assert list(resolved) == names
    assert resolved["0.bias"] is resolved["2.weight"] is True
    assert resolved["0.weight"].tolist() == torch.eye(3, 2).bool().tolist()


def test_false_takes_a_parameter_out_of_a_pattern():
    assert list(resolve_masks(network(), {"?.weight": True, "2.weight": False})) == ["0.weight"]


def test_a_mask_of_ones_is_the_whole_parameter_and_one_of_zeros_is_nothing():
    masks = {
        "0.weight": torch.ones(3, 2, dtype=torch.bool),
        "0.bias": torch.zeros(3, dtype=torch.bool),
        "2.weight": torch.tensor([[1, 0, 1]]),
    }
    resolved = resolve_masks(network(), masks)
    assert list(resolved) == ["0.weight", "2.weight"]
    assert resolved["0.weight"] is True
    assert resolved["2.weight"].tolist() == [[True, False, True]]
    assert masks["2.weight"].dtype == torch.int64  # the caller's is left alone


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"3.weight": True}, r"param_masks: '3\.weight' names no parameter\. There are: 0\.weight"),
        ({"0.weight": torch.ones(2, 3, dtype=torch.bool)},
         r"param_masks\['0\.weight'\]: shape \(2, 3\) does not fit the parameter's \(3, 2\)"),
        ({"*.weight": torch.ones(3, 2, dtype=torch.bool)},
         r"param_masks\['\*\.weight'\]: shape \(3, 2\) does not fit"),
        ({"0.bias": torch.tensor([0.5, 1, 1])}, r"expected True or a boolean tensor"),
        ({"0.bias": False}, r"param_masks: no entry of any parameter may move"),
        ({"0.bias": torch.zeros(3, dtype=torch.bool)}, r"no entry of any parameter may move"),
        ({}, r"no entry of any parameter may move"),
        ({"0.bias": "yes"}, r"param_masks\['0\.bias'\]: expected True or a boolean tensor"),
        ({"0.bias": None}, r"param_masks\['0\.bias'\]: expected True or a boolean tensor"),
    ],
)  # fmt: skip
def test_masks_that_are_refused(masks, message):
    with pytest.raises(InvalidArgumentError, match=message):
        resolve_masks(network(), masks)


def test_the_name_of_the_argument_is_in_the_error():
    with pytest.raises(InvalidArgumentError, match=r"^optimize_over_per_model_param: 'x'"):
        resolve_masks(network(), {"x": True}, "optimize_over_per_model_param")


def test_a_model_without_anything_to_move_is_refused():
    with pytest.raises(InvalidArgumentError, match="no parameter requires grad"):
        resolve_masks(network().requires_grad_(False), None)


def test_complex_parameters_are_refused_by_name():
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(InvalidArgumentError, match="w is torch.complex64"):
        resolve_masks(model, None)


def test_frozen_parameters_are_refused_by_name_and_passed_over_by_patterns():
    with pytest.raises(InvalidArgumentError, match=r"param_masks: 2\.bias is frozen"):
        resolve_masks(network(), {"2.bias": True})
    assert list(resolve_masks(network(), {"2.*": True})) == ["2.weight"]


def test_parameters_that_share_memory_by_hand_are_refused_by_name():
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.ones(6))
    model.b = torch.nn.Parameter(model.a.data[2:4])
    model.c = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ModelError, match="a and b are two tensors that share memory"):
        resolve_masks(model, None)
    assert resolve_masks(model, {"c": True}) == {"c": True}


def test_a_parameter_inside_a_buffer_with_another_view_between_is_found():
    model = torch.nn.Module()
    base = torch.ones(10)
    model.register_buffer("whole", base)
    model.register_buffer("part", base[1:3])
    model.w = torch.nn.Parameter(base[5:7])
    with pytest.raises(ModelError, match="share memory"):
        resolve_masks(model, None)


def test_neighbours_in_one_storage_may_move():
    base = torch.ones(6)
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Parameter(base[:3]), torch.nn.Parameter(base[3:])
    assert resolve_masks(model, None) == {"a": True, "b": True}


def test_squared_norm_is_summed_in_double_precision():
    vector = torch.full((1 << 20,), 1e-3)
    assert squared_norm(vector) == pytest.approx((1 << 20) * float(vector[0]) ** 2, rel=1e-10)
    assert squared_norm(torch.tensor([3.0, 4.0, float("inf")])) == float("inf")
    assert squared_norm(torch.tensor([float("nan")])) == float("inf")
    assert squared_norm(torch.full((2,), 1e30)) == pytest.approx(2e60)
