"""How far steepest descent from w* goes, against quadratic losses, and what the verdict makes of it."""

import math

import numpy as np
import pytest
import torch

from devsample.causes import check_minimum
from devsample.descent import squared_mean
from tests.unit.test_causes import evidence
from tests.unit.test_prepare import BOWL, Bowl, H, W, measure

NBETA, GAMMA = 20.0, 3.0


def expected(offset):
    """|∇L|² and the drop at W + offset, L = Σ h_j (w_j − W_j)²/2 + constant."""
    gradient = H * offset
    curvature = (H * gradient**2).sum() / (gradient**2).sum()
    length = NBETA / (NBETA * curvature + GAMMA)
    return (gradient**2).sum(), NBETA * (gradient**2).sum() * length * (1 - length * curvature / 2)


def descent(offset, **settings):
    kwargs = {"lr": 1e-3, "nbeta": NBETA, "localization": GAMMA}
    return measure(Bowl(H, W + offset), BOWL, kwargs=kwargs, **settings).descent


@pytest.mark.parametrize("offset", [[1.0, 0.0, 0.0], [0.3, -0.5, 0.2]])
@pytest.mark.parametrize("size", [50, 7])
def test_of_a_bowl_it_is_exact(offset, size):
    found, (square, drop) = descent(np.array(offset), batch_size=size), expected(np.array(offset))
    assert found["error"] == 0
    assert found["square"] == pytest.approx(square, rel=1e-6)
    assert found["drop"] == pytest.approx(drop, rel=1e-6)


def test_at_the_minimum_there_is_none():
    assert descent(np.zeros(3), batch_size=7)["drop"] < 1e-12


def test_a_loss_that_cannot_be_had_along_the_way_is_no_error():
    """Nothing is claimed of a step that was not seen to gain anything."""

    def near(model, batch):
        if abs(model.w[0].item() - W[0] - 1) > 0.1:
            raise ValueError("too far")
        return model(batch)

    found = descent(np.array([1.0, 0.0, 0.0]), batch_size=50, evaluate=near)
    assert found["drop"] == 0
    assert found["square"] == pytest.approx(H[0] ** 2, rel=1e-6)


def test_a_mask_leaves_only_what_moves():
    mask = {"w": torch.tensor([True, False, True])}
    offset = np.array([0.3, -5.0, 0.2])
    found = descent(offset, batch_size=7, masks=mask)
    assert found["drop"] == pytest.approx(expected(offset * [1, 0, 1])[1], rel=1e-6)


def test_without_a_pass_over_the_data_it_is_estimated():
    """On batches only, the square has an error that covers the truth."""
    offset = np.array([0.4, -0.2, 0.3])
    found = [descent(offset, batch_size=25, seed=seed, run={"init_loss": 1.0}) for seed in range(30)]
    square, drop = expected(offset)
    z = [(one["square"] - square) / one["error"] for one in found]
    assert abs(np.mean(z)) < 4 / math.sqrt(30)
    assert 0.6 < np.std(z) < 1.9
    assert np.mean([one["drop"] for one in found]) == pytest.approx(drop, rel=0.25)


def test_the_square_of_a_mean_is_unbiased_and_its_error_right():
    rng = np.random.default_rng(0)
    for mean in (np.zeros(20), 0.3 * np.ones(20)):
        samples = [torch.tensor(mean + rng.normal(size=(8, 20))) for _ in range(2000)]
        values, errors = np.array([squared_mean(lambda one=one: iter(one))[1:] for one in samples]).T
        assert abs(values.mean() - (mean**2).sum()) < 4 * values.std() / math.sqrt(2000)
        ratio = math.sqrt((errors**2).mean()) / values.std()
        assert ratio == pytest.approx(1.1 if mean.any() else math.sqrt(2), abs=0.15)
        assert (values > 2.5 * errors).mean() < (1 if mean.any() else 0.01)
        # Control: the square of the mean itself has the noise in it.
        naive = np.mean([((mean + rng.normal(size=(8, 20))).mean(0) ** 2).sum() for _ in range(2000)])
        assert naive - (mean**2).sum() > 1


@pytest.mark.parametrize(
    ("drop", "error", "severity"),
    [(0.3, 0.0, None), (1.0, 0.0, "caution"), (6.0, 0.0, "reject"), (6.0, 0.45, None), (6.0, 0.35, "reject")],
)
def test_a_drop_that_counts_is_the_first_reason(drop, error, severity):
    """The estimate is 4, the square 1."""
    given = {"drop": drop, "square": 1.0, "error": error, "curvature": 1.0}
    found = check_minimum(evidence(descent=given))
    assert (found and found.severity) == severity
    if found:
        assert f"lowers nβ L by {drop:.2g}" in found.text
        assert "train w* further" in found.text
