"""A result as xarray's DataTree, as ArviZ takes it."""

import sys

import numpy as np
import pytest

from tests.unit.test_diagnostics import healthy
from tests.unit.test_results import make_result, table

arviz_stats = pytest.importorskip("arviz_stats")
pytest.importorskip("arviz_base")


@pytest.fixture
def traces():
    return list(healthy(np.random.default_rng(0)))


@pytest.fixture
def result(traces):
    draws = table(traces)
    draws["distance"] = np.arange(len(draws), dtype=float)
    return make_result(traces, draws=draws)


def test_draws_by_chain_and_draw(result, traces):
    tree = result.to_xarray()
    assert set(tree.children) == {"posterior", "sample_stats"}
    llc = tree["posterior"]["llc"]
    assert llc.dims == ("chain", "draw")
    assert np.array_equal(llc, traces)
    assert set(tree["posterior"].data_vars) == {"llc", "loss"}
    assert set(tree["sample_stats"].data_vars) == {"baseline", "step", "distance"}
    assert tree["sample_stats"]["distance"].sel(chain=1, draw=7) == 507
    assert tree["sample_stats"]["step"].dtype == np.int64


def test_arviz_finds_what_the_result_says(result):
    """Its functions take the tree as it is."""
    tree = result.to_xarray()
    assert float(arviz_stats.ess(tree, method="mean")["llc"]) == pytest.approx(result.ess)
    assert float(arviz_stats.mcse(tree, method="mean")["llc"]) == pytest.approx(result.se)
    assert float(arviz_stats.rhat(tree, method="split")["llc"]) == pytest.approx(result.rhat)
    summary = arviz_stats.summary(tree, round_to="none")
    assert summary.loc["llc", "mean"] == pytest.approx(result.llc)
    assert set(summary.index) == {"llc", "loss"}


def test_lost_chains_are_named_and_left_out(traces):
    traces[2] = traces[2][:40]
    result = make_result(traces, c2={"status": "died", "message": "SIGKILL"})
    tree = result.to_xarray()
    assert tree["posterior"].coords["chain"].values.tolist() == [0, 1, 3]
    assert tree.attrs["lost_chains"] == ["2 died: SIGKILL"]
    assert tree["posterior"].sizes["draw"] == 500
    assert tree.attrs["verdict"] == "caution"
    assert tree.attrs["reasons"] == list(result.reasons)
    assert tree.attrs["llc"] == result.llc


def test_arrays_of_a_draw_keep_their_shape(traces):
    losses = np.random.default_rng(1).normal(size=(4, 500, 3))
    result = make_result(traces, reports={"sample_losses/trace": losses}, c0={"status": "died"})
    found = result.to_xarray()["sample_stats"]["sample_losses"]
    assert found.dims == ("chain", "draw", "sample_losses_dim_0")
    assert np.array_equal(found, losses[1:])


def test_attributes_can_be_stored(result):
    """Nothing in them that a file of arrays could not hold."""
    tree = result.to_xarray()
    for part in (tree, *tree.children.values()):
        for name, value in part.attrs.items():
            assert isinstance(value, (int, float, str, list)), name
            assert not isinstance(value, list) or all(isinstance(one, str) for one in value)


def test_without_xarray_the_error_says_what_to_install(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match=r"pip install 'devsample\[xarray\]'"):
        result.to_xarray()
