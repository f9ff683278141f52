"""The cases as potentials and models: gradients, curvatures, dtypes, and a run on one of them."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from devsample import LoaderSpec, estimate_learning_coeff_with_summary, testing
from devsample.errors import InvalidArgumentError
from devsample.testing import all_cases, case, potentials
from devsample.testing.cases import KINDS
from devsample.testing.factors import DeepLinear, NormProduct, ReducedRank

CASES = all_cases()
SMALL = [one for one in CASES if one.num_parameters <= 40]
by_name = pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)


def rows(one, count=5, spread=0.7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    away = torch.randn(count, one.num_parameters, generator=generator, dtype=torch.float64)
    return (one.center + spread * away).to(dtype)


def test_there_are_eighty_two_cases_of_eleven_kinds():
    assert len(CASES) == len({one.name for one in CASES}) == 82
    assert {one.kind for one in CASES} == set(KINDS)
    assert sum(len(all_cases(kind)) for kind in KINDS) == 82


@by_name
def test_the_gradient_is_the_derivative_of_the_potential(one):
    w = rows(one).requires_grad_()
    (expected,) = torch.autograd.grad(one.potential(w).sum(), w)
    torch.testing.assert_close(one.gradient(w.detach()), expected, rtol=1e-10, atol=1e-12)


@by_name
def test_shapes_and_the_zero_at_the_center(one):
    w = rows(one)
    assert one.potential(w).shape == (5,)
    assert one.gradient(w).shape == w.shape
    assert float(one.potential(one.center[None])) == pytest.approx(0, abs=1e-15)
    if one.kind != "quadratic_offset":
        assert (one.potential(w) > 0).all()
        assert one.gradient(one.center[None]).abs().max() < 1e-12


@by_name
def test_rows_are_independent_of_each_other(one):
    w = rows(one)
    alone = torch.cat([one.gradient(row[None]) for row in w])
    torch.testing.assert_close(one.gradient(w), alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("one", SMALL, ids=lambda one: one.name)
def test_curvatures(one):
    w = rows(one)
    hessian = one.potential.hessian(w)
    torch.testing.assert_close(hessian, hessian.mT)
    torch.testing.assert_close(one.hessian_trace(w), hessian.diagonal(dim1=1, dim2=2).sum(1))
    exact = torch.linalg.eigvalsh(hessian)[:, -1]
    bound = one.hessian_max(w)
    assert (bound > exact * (1 - 1e-9)).all()
    assert (bound < 3 * exact).all()


@by_name
def test_single_precision_stays_so(one):
    w = rows(one, dtype=torch.float32)
    gradient = one.gradient(w)
    assert gradient.dtype == one.potential(w).dtype == one.hessian_trace(w).dtype == torch.float32
    exact = one.gradient(w.double())
    assert float((gradient - exact).norm()) < 1e-4 * float(exact.norm())


@by_name
def test_the_model_returns_the_loss_and_its_gradient(one):
    model = one.model()
    assert torch.equal(model.w.detach(), one.center)
    with torch.no_grad():
        model.w.add_(0.1)
    loss = model()
    loss.backward()
    assert loss.shape == ()
    torch.testing.assert_close(loss, one.potential(model.w.detach()[None])[0])
    torch.testing.assert_close(model.w.grad, one.gradient(model.w.detach()[None])[0])
    assert one.model(torch.float32).w.dtype == torch.float32


@by_name
def test_a_case_travels_to_another_process(one):
    w = rows(one)
    one.gradient(w)
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one
    assert torch.equal(copy.gradient(w), one.gradient(w))


def test_the_data_of_the_linear_regression_give_its_loss():
    one = case("linreg_n512_d8")
    x, y = one.dataset().tensors
    assert x.shape == (512, 8)
    assert one.potential.init_loss == pytest.approx(0.2463685767086944)
    w = rows(one, count=2)
    loss = ((w @ x.T - y) ** 2).mean(1)
    torch.testing.assert_close(one.potential(w), loss - one.potential.init_loss)
    model = one.model()
    assert model((x, y)).item() == pytest.approx(one.potential.init_loss)
    assert model((x[:3], y[:3])).item() == pytest.approx(float(((x[:3] @ one.center - y[:3]) ** 2).mean()))


def test_the_box_of_the_bounded_cases():
    assert {one.box for one in all_cases("normal_crossing_box")} == {1.0}
    assert {one.box for one in CASES if one.kind != "normal_crossing_box"} == {None}


def test_blocks_add_up():
    parts = [case("crossing_12_nb100"), case("quad_1d"), case("rrr_3_1_4_zero_nb1000")]
    blocks = potentials.Blocks([one.potential for one in parts])
    w = [rows(one) for one in parts]
    together = torch.cat(w, dim=1)
    assert blocks.num_parameters == 10
    torch.testing.assert_close(
        blocks(together), sum(one.potential(r) for one, r in zip(parts, w, strict=True))
    )
    torch.testing.assert_close(
        blocks.gradient(together),
        torch.cat([one.gradient(r) for one, r in zip(parts, w, strict=True)], dim=1),
    )
    hessian = blocks.hessian(together)
    torch.testing.assert_close(blocks.hessian_trace(together), hessian.diagonal(dim1=1, dim2=2).sum(1))
    assert (blocks.hessian_max(together) > torch.linalg.eigvalsh(hessian)[:, -1] - 1e-9).all()


def test_forms_of_one_loss_agree():
    """A product of norms, reduced rank regression and a deep linear network with target 0."""
    w = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    forms = [NormProduct([3, 4]), ReducedRank(3, 1, 4), DeepLinear([3, 1, 4], 0)]
    for form in forms[1:]:
        torch.testing.assert_close(form(w), forms[0](w))
        torch.testing.assert_close(form.gradient(w), forms[0].gradient(w))
    two, deep = ReducedRank(3, 2, 4, scale=0.25), DeepLinear([3, 2, 4], 0, scale=0.25)
    w = torch.randn(4, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(two(w), deep(w))
    torch.testing.assert_close(two.gradient(w), deep.gradient(w))
    torch.testing.assert_close(two.hessian_max(w), deep.hessian_max(w))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: case("crossing_1"), "name: there is no case 'crossing_1'; similar: crossing_"),
        (lambda: all_cases("quadratics"), "kind: "),
        (lambda: potentials.NormalCrossing([0, 0]), "powers: "),
        (lambda: potentials.NormalCrossing([1, -1]), "powers: "),
        (lambda: potentials.NormalCrossing([1, 1], center=[1, 1]), "center: "),
        (lambda: potentials.NormalCrossing([1, 0], center=[1, 0]), "center: "),
        (lambda: potentials.Quadratic([1, -1]), "curvatures: "),
        (lambda: potentials.Quadratic([1, 1], [0]), "minimum: "),
        (lambda: NormProduct([3]), "sizes: "),
    ],
)
def test_what_is_wrong_is_named(wrong, named):
    with pytest.raises(InvalidArgumentError, match=f"^{named}"):
        wrong()


def test_a_run_of_the_library_on_a_case():
    one = case("quad_10d_iso_g0")
    result = estimate_learning_coeff_with_summary(
        one.model(),
        loader_spec=LoaderSpec(one.dataset()),
        evaluate=lambda model, batch: model(),
        optimizer_kwargs={"lr": 2e-2, "nbeta": one.nbeta},
        num_chains=4,
        num_draws=1000,
        num_burnin_steps=20,
        num_steps_bw_draws=2,
        seed=0,
        verbose=False,
    )
    assert result.se < 0.03 * one.expected
    assert abs(result.llc - one.expected) < 4 * result.se


def test_a_run_on_minibatches_of_the_linear_regression():
    one = case("linreg_n512_d8")
    result = estimate_learning_coeff_with_summary(
        one.model(),
        loader_spec=LoaderSpec(one.dataset(), batch_size=64),
        optimizer_kwargs={"lr": 1e-4, "nbeta": one.nbeta, "localization": one.gamma},
        num_chains=2,
        num_draws=20,
        seed=0,
        verbose=False,
    )
    assert result["init_loss"] == pytest.approx(one.potential.init_loss)


def test_public_names_load_and_nothing_heavy_comes_with_them():
    assert testing.__all__ == sorted(testing.__all__, key=str.lower) or set(testing.__all__) <= set(
        dir(testing)
    )
    for name in testing.__all__:
        assert getattr(testing, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = testing.nothing
    code = (
        "import sys, devsample.testing as t; assert 'torch' not in sys.modules\n"
        "[one.potential for one in t.all_cases()]; t.deep_linear_network([3, 2, 3], 1)\n"
        "print([m for m in ('scipy', 'pandas', 'matplotlib', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_data_without_a_regression_is_a_placeholder():
    data = case("quad_1d").dataset()
    assert isinstance(data, TensorDataset)
    assert len(data) == 1


def test_the_page_of_known_values_lists_every_case():
    page = (Path(__file__).parents[2] / "docs" / "truths.md").read_text(encoding="utf-8")
    for one in CASES:
        row = f"| `{one.name}` | {one.num_parameters} | {one.nbeta:.6g} | {one.gamma:g} | {one.expected:.8g} "
        assert row in page, one.name
    assert all(re.search(rf"^### .*\b{kind}\b", page, re.MULTILINE) for kind in KINDS)
