"""Models, losses and samplers that do more than they should: they work, and stay as they were."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.utils import prune
from torch.utils.data import Dataset, Sampler, TensorDataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary
from devsample.errors import EvaluateError

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
DATA = TensorDataset(X, Y)


def squared_error(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def run(model, evaluate=squared_error, spec=None, **arguments):
    values = {
        "optimizer_kwargs": {"lr": 1e-4, "localization": 1.0},
        "num_chains": 2,
        "num_draws": 10,
        "seed": 0,
        "verbose": False,
    }
    return estimate_learning_coeff_with_summary(
        model, loader_spec=spec or LoaderSpec(DATA, batch_size=16), evaluate=evaluate, **(values | arguments)
    )


@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_models_travel(wrap):
    torch.manual_seed(0)
    layer = getattr(torch.nn.utils.parametrizations, wrap)(torch.nn.Linear(4, 3))
    model = torch.nn.Sequential(layer, torch.nn.Linear(3, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = run(model)
    assert len(result.draws) == 20
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_pruned_model_is_refused_with_the_remedy():
    model = torch.nn.Linear(4, 1)
    prune.l1_unstructured(model, "weight", 0.5)
    with pytest.raises(TypeError, match=r"model\.weight is a non-leaf tensor.*prune\.remove"):
        run(model)


class Cache(torch.nn.Linear):
    """Replaces a buffer, counts its calls, and keeps its last input."""

    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(0))
        self.calls = 0

    def forward(self, x):
        self.count = self.count + 1
        self.last = x.detach()
        self.calls += 1
        return super().forward(x)


def test_buffers_that_are_replaced_and_grow_are_reset_and_the_callers_stay():
    model = Cache()
    result = run(model)
    assert len(result.draws) == 20
    assert (model.count.item(), model.last.shape, model.calls) == (0.0, (0,), 0)
    alone = run(model, num_chains=1).draws
    assert result.draws[result.draws["chain"] == 0].reset_index(drop=True).equals(alone)


def test_an_evaluate_that_writes_to_the_model_leaves_the_callers_alone():
    model = torch.nn.Linear(4, 1)
    weight = model.weight.detach().clone()

    def projects(model, batch):
        with torch.no_grad():
            model.weight.clamp_(-0.01, 0.01)
        return squared_error(model, batch)

    with pytest.raises(EvaluateError, match="does not depend on the moving parameters"):
        run(model, lambda m, batch: squared_error(m.requires_grad_(False), batch))
    run(model, projects)
    assert torch.equal(model.weight, weight)
    assert model.weight.requires_grad


def test_an_evaluate_that_takes_its_batch_apart():
    class Rows(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return {"x": X[index], "labels": Y[index]}

    def pops(model, batch):
        labels = batch.pop("labels")
        return ((model(batch["x"]) - labels) ** 2).mean()

    model = torch.nn.Linear(4, 1)
    popped = run(model, pops, LoaderSpec(Rows(), batch_size=16)).draws
    assert popped.equals(run(model).draws)


def test_an_evaluate_that_differentiates():
    def penalty(model, batch):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return squared_error(model, batch) + (slope**2).mean()

    result = run(torch.nn.Linear(4, 1), penalty)
    assert np.isfinite(result.draws["baseline"]).all()


def test_an_evaluate_that_calls_backward_is_told_not_to():
    def trains(model, batch):
        loss = squared_error(model, batch)
        loss.backward()
        return loss

    with pytest.raises(EvaluateError, match="do not call backward"):
        run(torch.nn.Linear(4, 1), trains)


def test_without_evaluate_the_message_says_so():
    with pytest.raises(EvaluateError, match="evaluate was not given"):
        run(torch.nn.Linear(4, 1), None)


class Endless(Sampler):
    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __len__(self):
        return 32

    def __iter__(self):
        return (int(self.rng.integers(64)) for _ in itertools.count())


def test_a_sampler_without_end_and_with_a_generator_of_its_own_is_repeatable():
    sampler = Endless()
    state = sampler.rng.bit_generator.state
    spec = LoaderSpec(DATA, batch_size=16, sampler=sampler)
    model = torch.nn.Linear(4, 1)
    first = run(model, spec=spec).draws
    assert first.equals(run(model, spec=spec).draws)
    assert not first.equals(run(model, spec=spec, seed=1).draws)
    assert sampler.rng.bit_generator.state == state


def test_items_that_are_batches_are_read_by_item_and_counted_by_sample():
    batches = [(X[start : start + 16], Y[start : start + 16]) for start in range(0, 64, 16)]
    result = run(torch.nn.Linear(4, 1), spec=LoaderSpec(batches, batch_size=None, num_samples=64))
    assert result.settings["num_samples"] == 64
    assert result.settings["nbeta"] == pytest.approx(64 / np.log(64))
    with pytest.raises(ValueError, match="num_samples: with batch_size=None"):
        LoaderSpec(batches, batch_size=None)


def test_a_run_that_fails_before_its_first_chain_leaves_its_folder_free(tmp_path):
    with pytest.raises(EvaluateError):
        run(torch.nn.Linear(4, 1), lambda model, batch: 1 / 0, run_dir=tmp_path / "run")
    assert len(run(torch.nn.Linear(4, 1), run_dir=tmp_path / "run").draws) == 20


def test_another_default_device_of_the_caller():
    model = torch.nn.Linear(4, 1)
    expected = run(model).draws
    with torch.device("meta"):
        assert run(model).draws.equals(expected)
