"""What a run's draws become: averages, keys, tables, text; and what is left out of them."""

import copy
import json
import math
import pickle

import numpy as np
import pandas as pd
import pytest

from devsample.errors import AllChainsFailedError
from devsample.results import ChainInfo, LLCResult
from tests.unit.test_diagnostics import healthy

SETTINGS = {
    "sampler": "SGLD",
    "integrator": "averaged",
    "lr": 1e-4,
    "nbeta": 239.85,
    "nbeta_rule": "n/ln n",
    "nbeta_batch": 15.39,
    "localization": 10.0,
    "weight_decay": 0.0,
    "noise_level": 1.0,
    "num_draws": 500,
    "num_chains": 4,
    "num_burnin_steps": 500,
    "num_steps_bw_draws": 1,
    "num_samples": 1797,
    "batch_size": 64,
    "grad_accum_steps": 1,
    "sampling": "iid",
    "baseline": "paired",
    "seed": 0,
    "cores": 2,
    "auto": False,
    "run_dir": None,
}
CENTER = {"gradient_noise": 0.005}


def table(traces, nbeta=SETTINGS["nbeta"]):
    """Draws as the chains record them, with a baseline of its own for each loss."""
    rng = np.random.default_rng(99)
    frames = []
    for chain, trace in enumerate(traces):
        llc = np.asarray(trace, dtype=np.float64)
        baseline = 0.08 + 0.01 * rng.normal(size=len(llc))
        draw = np.arange(len(llc))
        columns = {"chain": chain, "draw": draw, "step": 500 + draw}
        losses = {"loss": baseline + llc / nbeta, "baseline": baseline, "llc": llc}
        frames.append(pd.DataFrame(columns | losses))
    return pd.concat(frames, ignore_index=True)


def chain_infos(traces, **changed):
    """All done, but for ``c2={"status": "died"}`` and the like."""
    infos = []
    for chain, trace in enumerate(traces):
        values = {"chain": chain, "seed": None, "status": "done", "num_draws": len(trace)}
        infos.append(ChainInfo(**(values | changed.get(f"c{chain}", {}))))
    return infos


def make_result(
    traces,
    *,
    online=False,
    at_center=CENTER,
    init_loss=0.0801,
    init_loss_se=None,
    draws=None,
    reports=None,
    provenance=None,
    **changed,
):
    infos = chain_infos(traces, **{k: v for k, v in changed.items() if k in ("c0", "c1", "c2", "c3")})
    settings = {"num_chains": len(traces)} | {
        k: v for k, v in changed.items() if k in SETTINGS or k == "descent"
    }
    return LLCResult.from_run(
        table(traces) if draws is None else draws,
        infos,
        SETTINGS | settings,
        init_loss=init_loss,
        init_loss_se=init_loss_se,
        online=online,
        at_center=at_center,
        reports=reports or {},
        provenance=provenance or {},
    )


@pytest.fixture
def traces():
    return list(healthy(np.random.default_rng(0)))


@pytest.fixture
def result(traces):
    return make_result(traces)


# --- estimate and keys ---------------------------------------------------------------------------


def test_keys_are_those_of_devinterp(traces, result):
    chains = [f"llc-chain/{i}" for i in range(4)]
    offline = ["llc/mean", "llc/std", *chains, "loss/trace", "llc/trace", "init_loss"]
    assert list(result) == offline
    assert len(result) == len(offline)
    assert set(make_result(traces, online=True)) == {*offline, "llc/means", "llc/stds"}
    assert "llc/means" not in result


def test_the_mean_is_that_of_the_chains(traces, result):
    means = np.mean(traces, axis=1)
    assert result["llc/mean"] == result.llc == pytest.approx(np.mean(traces))
    assert [result[f"llc-chain/{i}"] for i in range(4)] == pytest.approx(means)
    assert result["llc/std"] == pytest.approx(means.std(ddof=1))
    assert result["init_loss"] == result.init_loss == 0.0801
    assert list(result.chains["llc"]) == pytest.approx(means)
    assert result.verdict == "trust"
    assert result.reasons == ()


def test_traces_are_what_was_recorded(traces, result):
    assert np.array_equal(result["llc/trace"], traces)
    assert result["loss/trace"].shape == (4, 500)
    assert np.array_equal(result["loss/trace"].ravel(), result.draws["loss"])


def test_the_standard_deviation_of_one_chain_is_unknown(traces):
    one = make_result(traces[:1], online=True)
    assert math.isnan(one["llc/std"])
    assert np.isnan(one["llc/stds"]).all()
    assert np.isfinite(one["llc/means"]).all()
    assert one.se > 0
    assert "1 chain × 500 draws" in one.headline


def test_online_gives_running_estimates(traces):
    online = make_result(traces, online=True)
    running = np.cumsum(traces, axis=1) / np.arange(1, 501)
    assert np.allclose(online["llc/trace"], running, rtol=1e-12)
    assert np.allclose(online["llc/means"], running.mean(axis=0), rtol=1e-12)
    assert np.allclose(online["llc/stds"], running.std(axis=0, ddof=1), rtol=1e-9)
    assert online["llc/means"][-1] == pytest.approx(online.llc)


# --- chains that are left out --------------------------------------------------------------------


@pytest.mark.parametrize("status", ["diverged", "failed", "died"])
@pytest.mark.parametrize("rows", [0, 37, 500])
def test_a_failed_chain_is_in_no_average(traces, status, rows):
    traces[2] = 1e6 * traces[2][:rows]
    result = make_result(traces, c2={"status": status, "message": "it broke"}, online=True)
    kept = [traces[i] for i in (0, 1, 3)]
    assert result.llc == pytest.approx(np.mean(kept))
    assert result["llc/std"] == pytest.approx(np.mean(kept, axis=1).std(ddof=1))
    assert result["llc/means"][-1] == pytest.approx(result.llc)
    assert math.isnan(result["llc-chain/2"])
    assert result["llc/trace"].shape == (4, 500)
    assert np.isnan(result["loss/trace"][2, rows:]).all()
    row = result.chains.set_index("chain").loc[2]
    assert row["status"] == status
    assert row[["llc", "se", "ess"]].isna().all()
    assert result.verdict == "caution"
    assert f"chain 2 {status} (it broke)" in result.reasons[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_chain_said_to_be_done_that_holds_a_nan_is_left_out(traces, bad):
    traces[1] = traces[1].copy()
    traces[1][40] = bad
    result = make_result(traces, online=True)
    assert result.llc == pytest.approx(np.mean([traces[i] for i in (0, 2, 3)]))
    assert result.chains.loc[1, "status"] == "diverged"
    assert "chain 1 diverged (loss not finite at draw 40)" in result.reasons[0]
    assert result.verdict == "caution"


def test_a_diverging_chain_makes_no_warning(traces):
    traces[3] = np.concatenate([traces[3][:50], np.geomspace(1e2, 1e300, 20), [math.inf, math.nan]])
    result = make_result(traces, c3={"status": "diverged", "num_draws": 500}, online=True)
    assert result.verdict == "caution"
    assert "chain 3 diverged" in result.summary()


def test_too_many_lost_chains_are_a_rejection(traces):
    died = {"status": "died"}
    assert make_result(traces, c0=died, c3=died).verdict == "reject"


def test_no_usable_chain_is_an_error_that_carries_the_draws(traces):
    states = {f"c{i}": {"status": "diverged", "message": f"nan at {i}\nmore"} for i in range(4)}
    with pytest.raises(AllChainsFailedError, match="chain 1 diverged: nan at 1") as caught:
        make_result(traces, **states)
    assert len(caught.value.draws) == 2000
    assert "more" not in str(caught.value)


def test_no_draws_at_all_is_the_same_error():
    with pytest.raises(AllChainsFailedError, match="no draws were recorded"):
        make_result([[], []])


def test_stopped_chains_count_up_to_the_draw_all_have(traces):
    traces[0] = traces[0][:400]
    result = make_result(traces, c0={"status": "stopped"})
    assert result.llc == pytest.approx(np.mean([trace[:400] for trace in traces]))
    assert result.verdict == "trust"
    assert result["llc/trace"].shape == (4, 500)
    assert np.isnan(result["llc/trace"][0, 400:]).all()


def test_a_chain_stopped_early_does_not_cut_the_others(traces):
    traces[0] = traces[0][:3]
    result = make_result(traces, c0={"status": "stopped"})
    assert result.llc == pytest.approx(np.mean(traces[1:]))
    assert "chain 0 stopped (after 3 draws)" in result.reasons[0]


# --- predicted bias ------------------------------------------------------------------------------


def test_the_larger_gradient_noise_counts(traces):
    noisy = {f"c{i}": {"gradient_noise": 2.0 + i} for i in range(4)}
    at_center = make_result(traces, at_center={"gradient_noise": 9.0}, **noisy).predicted_bias
    chains = make_result(traces, at_center={"gradient_noise": 1.0}, **noisy).predicted_bias
    assert at_center.absolute == pytest.approx(1e-4 / 8 * 239.85**2 * 9.0)
    assert chains.absolute == pytest.approx(1e-4 / 8 * 239.85**2 * 3.5)


def test_the_noise_of_a_lost_chain_does_not_count(traces):
    lost = {"status": "diverged", "gradient_noise": 1e30}
    assert make_result(traces, c0=lost).predicted_bias.relative < 0.05


def test_no_bias_is_predicted_for_another_sampler_or_without_noise(traces):
    assert make_result(traces, sampler="RMSPropSGLD").predicted_bias is None
    assert make_result(traces, at_center={}).predicted_bias is None


def test_too_large_a_step_is_the_first_reason(traces):
    result = make_result(traces, at_center={"gradient_noise": 3.0})
    assert result.verdict == "caution"
    assert 'nbeta="batch" (nβ 15.4 in place of 240)' in result.reasons[0]
    assert "lower lr from 0.0001 to" in result.reasons[0]


# --- tables, text, travel ------------------------------------------------------------------------


@pytest.fixture
def broken(traces):
    traces[2] = traces[2][:40]
    message = "RuntimeError: " + "a long story " * 20 + "\n  with a second line"
    return make_result(traces, c2={"status": "failed", "message": message}, at_center={"gradient_noise": 3.0})


def test_summary_fits_a_terminal(result, broken, traces):
    many = make_result(traces * 8)
    huge = make_result([1e12 * trace for trace in traces])
    tiny = make_result([1e-9 * trace for trace in traces], nbeta=1e-9)
    for each in (result, broken, many, huge, tiny):
        lines = each.summary().replace("\u0302", "").splitlines()
        assert max(len(line) for line in lines) <= 80


def test_summary_says_what_matters(broken):
    text = " ".join(broken.summary().split())
    for part in (
        "chain estimate std. error draws ESS status",
        "failed: RuntimeError: a long story",
        "3 of 4 chains",
        'nbeta 239.8 = n/ln n, n = 1797; nbeta="batch", devinterp\'s rule: 15.39',
        "localization 10",
        "64 of 1797 samples, iid",
        "baseline paired",
        broken.headline,
        *broken.reasons,
    ):
        assert part in text
    assert "second line" not in text.split("nbeta")[0]


def test_summary_of_many_chains_shows_the_lost_ones(traces):
    many = traces * 8
    infos = chain_infos(many)
    infos[30] = ChainInfo(30, None, "died", 500, "killed by SIGKILL")
    result = LLCResult.from_run(
        table(many), infos, SETTINGS, init_loss=0.1, init_loss_se=0.01, online=False, at_center={}
    )
    text = result.summary()
    assert "died: killed by SIGKILL" in text
    assert "12 more chains in .chains" in text
    assert "L_n(w*) = 0.1 ± 0.01" in text


def test_summary_of_unknown_settings():
    result = LLCResult.from_run(
        table([[1.0, 2.0]]),
        chain_infos([[1.0, 2.0]]),
        {},
        init_loss=0.0,
        init_loss_se=None,
        online=False,
        at_center={},
    )
    assert result.verdict == "reject"
    assert "± –" in result.summary()


def test_the_headline_shows_two_digits_of_the_error(result):
    mean, error = result.headline.split("λ̂ = ")[1].split(" (")[0].split(" ± ")
    assert error == f"{result.se:.2f}"
    assert mean == f"{result.llc:.2f}"
    assert result.headline.startswith("trust: ")
    assert result.headline.endswith(").")
    assert result.headline[:-2] in " ".join(repr(result).split())
    assert str(result) == result.summary()


def test_repr_gives_the_reasons(broken):
    text = repr(broken)
    assert max(len(line) for line in text.replace("\u0302", "").splitlines()) <= 80
    for reason in broken.reasons:
        assert reason in " ".join(text.split())


def test_to_dict_is_json(broken):
    values = json.loads(json.dumps(broken.to_dict(), allow_nan=False))
    assert values["llc"] == broken.llc
    assert values["reasons"] == list(broken.reasons)
    assert values["chains"][2]["llc"] is None
    assert values["chains"][2]["seed"] is None
    assert values["predicted_bias"]["lr_fit"] == broken.predicted_bias.lr_fit
    assert values["settings"] == SETTINGS | {"num_chains": 4}
    assert values["observables"] == {}


def test_to_dict_gives_the_means_of_observables(traces):
    rng = np.random.default_rng(3)
    draws = table(traces)
    draws["distance"] = 5 + rng.normal(size=len(draws))
    draws["norm"] = np.where(draws["draw"] == 7, np.nan, 1.0)
    lost = {"status": "diverged"}
    found = make_result(traces, draws=draws, c0=lost).to_dict()["observables"]
    used = draws.loc[draws["chain"] != 0, "distance"]
    assert found["distance"]["mean"] == pytest.approx(used.mean())
    assert found["distance"]["se"] == pytest.approx(1 / math.sqrt(1500), rel=0.15)
    assert found["norm"] == {"mean": None, "se": None}


def test_observables_are_traces_of_the_mapping(traces):
    draws = table([traces[0], traces[1][:300]])
    draws["distance"] = np.arange(len(draws), dtype=float)
    result = make_result(traces[:2], draws=draws)
    assert result["distance/trace"].shape == (2, 500)
    assert result["distance/trace"][1, 299] == 799
    assert np.isnan(result["distance/trace"][1, 300:]).all()


def test_provenance_is_plain_and_read_only(traces):
    result = make_result(traces, provenance={"versions": {"torch": "2.13.0"}, "seconds": np.float64(3.5)})
    assert result.provenance["versions"] == {"torch": "2.13.0"}
    assert result.provenance["seed"] == 0
    assert result.provenance["settings"]["lr"] == 1e-4
    assert json.loads(json.dumps(result.to_dict()))["provenance"]["seconds"] == 3.5
    with pytest.raises(TypeError):
        result.provenance["seed"] = 1


def test_to_dict_takes_settings_that_json_does_not(traces):
    odd = (np.float32(0.5), np.inf, {1: [np.int64(2)]}, int)
    values = make_result(traces, run_dir=odd).to_dict()["settings"]["run_dir"]
    assert values == [0.5, None, {"1": [2]}, "<class 'int'>"]


@pytest.mark.parametrize("seed", [2**100 + 1, 2**53 + 1, 0])
def test_seeds_keep_all_their_bits(traces, seed):
    result = make_result(traces, c0={"seed": seed})
    assert list(result.chains["seed"]) == [seed, None, None, None]
    assert result.to_dict()["chains"][0]["seed"] == seed


def test_settings_are_a_copy_and_read_only(traces):
    settings = dict(SETTINGS)
    result = LLCResult.from_run(
        table(traces),
        chain_infos(traces),
        settings,
        init_loss=0.1,
        init_loss_se=None,
        online=False,
        at_center=CENTER,
    )
    settings["lr"] = 5.0
    assert result.settings["lr"] == 1e-4
    with pytest.raises(TypeError):
        result.settings["lr"] = 5.0


def test_a_result_can_be_pickled_copied_and_hashed(broken):
    for twin in (pickle.loads(pickle.dumps(broken)), copy.deepcopy(broken)):
        assert twin.to_dict() == broken.to_dict()
        assert twin.draws.equals(broken.draws)
        assert twin != broken
    assert {broken: 1}[broken] == 1
