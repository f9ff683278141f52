"""Results of several runs as one: more chains, more draws, one law, and no draw twice."""

import numpy as np
import pytest
import torch
from scipy.signal import lfilter

from devsample import LLCResult
from devsample.analysis import pool
from devsample.diagnosis import diagnose
from devsample.errors import InvalidArgumentError, ReportWarning
from tests.unit.test_results import SETTINGS, make_result, table

PRINTS = {"weights": "a" * 64, "data": "b" * 64, "evaluate": "c" * 64, "masks": None}


def draws_of(seed, chain, count, *, mean=3.0, sd=1.0):
    """The first draws of a chain, the same whatever ``count`` is."""
    return mean + sd * np.random.default_rng([seed, chain]).normal(size=count)


def run(seed, chains, count, *, mean=3.0, **changed):
    """A result of a run with this seed."""
    provenance = {"fingerprints": PRINTS, "seconds": 2.0, "device_seconds": 3.0, "gradients": chains * count}
    seeds = [seed] * chains if isinstance(seed, int) else seed
    numbers = range(chains) if isinstance(seed, int) else [0] * chains
    traces = [draws_of(one, number, count, mean=mean) for one, number in zip(seeds, numbers, strict=True)]
    frame = table(traces)
    frame["baseline"] = 0.08 + 0.01 * np.sin(7 * frame["llc"])  # the same for a chain wherever it is
    frame["loss"] = frame["baseline"] + frame["llc"] / SETTINGS["nbeta"]
    given = {"num_draws": count, "seed": seed, "draws": frame, "provenance": provenance} | changed
    return make_result(traces, **given)


def test_more_chains():
    one, other = run(0, 4, 200), run(1, 3, 200)
    merged = LLCResult.merge(one, other)
    assert len(merged.draws) == 1400
    assert list(merged.chains["chain"]) == list(range(7))
    assert list(merged.chains["run"]) == [0, 0, 0, 0, 1, 1, 1]
    assert list(merged.chains["source_chain"]) == [0, 1, 2, 3, 0, 1, 2]
    assert list(merged.chains["seed"]) == [0, 0, 0, 0, 1, 1, 1]
    assert merged.llc == pytest.approx((4 * one.llc + 3 * other.llc) / 7, rel=1e-12)
    assert merged["llc-chain/5"] == other["llc-chain/1"]
    assert merged["llc/trace"].shape == (7, 200)
    assert merged.se == pytest.approx(1 / np.sqrt(1400), rel=0.2)
    assert merged.settings["num_chains"] == 7
    assert merged.settings["seed"] == [0, 1]
    assert merged.verdict == "trust"


def test_equal_runs_give_what_one_run_of_all_chains_gives():
    """Estimate and error are those of the chains, whoever ran them."""
    merged = LLCResult.merge(run([5], 1, 200), run([6], 1, 200), run([7, 8], 2, 200))
    together = run([5, 6, 7, 8], 4, 200)
    assert merged.estimate == together.estimate
    assert merged.findings == together.findings
    assert merged.draws.equals(together.draws)


def test_all_ways_to_call_it_are_the_same():
    a, b, c = run(0, 2, 50), run(1, 2, 50), run(2, 2, 50)
    merged = [LLCResult.merge(a, b, c), LLCResult.merge([a, b, c]), a.merge(b, c), a.merge([b, c])]
    merged.append(LLCResult.merge(LLCResult.merge(a, b), c))
    for one in merged:
        assert one.to_dict() == merged[0].to_dict()
        assert one.draws.equals(merged[0].draws)
    with pytest.raises(InvalidArgumentError, match="expected results"):
        LLCResult.merge(a, {"llc": 3.0})
    with pytest.raises(InvalidArgumentError, match="no results"):
        LLCResult.merge([])


def test_a_longer_run_of_the_same_chains_extends_them():
    short, long = run(0, 4, 100), run(0, 2, 300)
    for merged in (LLCResult.merge(short, long), LLCResult.merge(long, short)):
        assert sorted(merged.chains["draws"]) == [100, 100, 300, 300]
        assert len(merged.draws) == 800
        assert not merged.draws.duplicated(["chain", "draw"]).any()
        assert not merged.draws["llc"].duplicated().any()
        assert merged.llc == pytest.approx(merged.draws["llc"].mean(), rel=1e-12)
    assert merged.settings["num_draws"] == 300


def test_a_run_merged_with_itself_stays_what_it_was():
    one = run(0, 4, 100)
    merged = LLCResult.merge(one, one, LLCResult.merge(one, one))
    assert merged.estimate == one.estimate
    assert len(merged.draws) == 400
    assert len(merged.provenance["runs"]) == 1
    assert merged.provenance["gradients"] == one.provenance["gradients"]


def test_a_seed_of_a_list_is_the_same_chain_in_any_list():
    merged = LLCResult.merge(run([7, 8], 2, 100), run([9, 7], 2, 150))
    assert sorted(merged.chains["seed"]) == [7, 8, 9]
    assert merged.chains.set_index("seed").loc[7, "draws"] == 150


def test_chain_0_of_a_seed_is_that_of_a_list_with_this_seed():
    assert len(LLCResult.merge(run([7, 8], 2, 100), run(7, 2, 100)).chains) == 3


def test_other_draws_of_the_same_chain_are_an_error():
    changed = run(0, 4, 300, threads_per_chain=2)
    frame = changed.draws.copy()
    at = frame.index[(frame["chain"] == 2) & (frame["draw"] == 41)][0]
    frame.loc[at, "llc"] += 1e-12
    provenance = dict(changed._recorded.provenance)
    settings = {"draws": frame, "provenance": provenance, "num_draws": 300, "seed": 0}
    other = make_result([np.ones(300)] * 4, **settings)
    with pytest.raises(InvalidArgumentError, match=r"chain 2 of seed 0, but at draw 41 llc is .* and "):
        LLCResult.merge(run(0, 4, 100), other)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lr": 2e-4}, r"lr: 0.0001 and 0.0002; use the same optimizer_kwargs"),
        ({"nbeta": 100.0}, "nbeta: 239.85 and 100.0"),
        ({"localization": 1.0}, "localization: 10.0 and 1.0"),
        ({"num_steps_bw_draws": 2}, "num_steps_bw_draws: 1 and 2; use the same num_steps_bw_draws"),
        ({"num_burnin_steps": 0}, "num_burnin_steps: 500 and 0"),
        ({"sampler": "SGHMC"}, "sampler: 'SGLD' and 'SGHMC'; use the same sampling_method"),
        ({"sampling": "epoch"}, "sampling: 'iid' and 'epoch'; use the same loader_spec"),
        ({"batch_size": 32}, "batch_size: 64 and 32"),
        ({"baseline": "full"}, "baseline: 'paired' and 'full'"),
    ],
)
def test_another_law_is_an_error_that_names_it(changed, said):
    with pytest.raises(InvalidArgumentError, match=said):
        LLCResult.merge(run(0, 2, 50), run(1, 2, 50), run(2, 2, 50, **changed))


def test_all_differences_are_named_at_once():
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)results 0 and 1 .*\n  localization.*\n  lr.*seed: give"
    ):
        LLCResult.merge(run(0, 2, 50), run(1, 2, 50, lr=1.0, localization=2.0, auto=True))


@pytest.mark.parametrize("name", ["weights", "data", "evaluate"])
def test_other_inputs_are_an_error(name):
    other = {"fingerprints": PRINTS | {name: "f" * 64}}
    with pytest.raises(
        InvalidArgumentError, match=f"{name}: fingerprints {PRINTS[name][:12]} and ffffffffffff"
    ):
        LLCResult.merge(run(0, 2, 50), run(1, 2, 50, provenance=other))


def test_inputs_that_are_not_known_are_no_difference():
    for other in ({}, {"fingerprints": PRINTS | {"weights": None}}):
        merged = LLCResult.merge(run(0, 2, 50), run(1, 2, 50, provenance=other))
        assert merged.provenance["fingerprints"]["weights"] == PRINTS["weights"]


def test_a_result_without_a_seed_is_an_error():
    unknown = make_result([draws_of(1, 0, 50)], seed=None, num_draws=50)
    with pytest.raises(InvalidArgumentError, match="run 1 does not say its seed"):
        LLCResult.merge(run(0, 2, 50), unknown)


# --- chains of different length ------------------------------------------------------------------


def test_chains_of_different_length_count_in_full():
    one, other = run(0, 4, 100), run(1, 4, 900)
    merged = LLCResult.merge(one, other)
    assert merged.llc == pytest.approx(
        np.concatenate([one.draws["llc"], other.draws["llc"]]).mean(), rel=1e-12
    )
    assert merged.se == pytest.approx(1 / np.sqrt(4000), rel=0.2)
    assert merged.ess == pytest.approx(one.ess + other.ess)
    assert merged.estimate.num_chains * merged.estimate.num_draws == 4000
    assert "8 chains × 100–900 draws" in merged.headline
    assert merged["llc/trace"].shape == (8, 900)
    assert merged.verdict == "trust"


def test_the_error_of_chains_of_different_length_covers_the_truth():
    """Autocorrelated chains, against the spread of their estimates."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(400, 6, 300))  # the first 60 steps bring the chains into their law
    walks = lfilter([1.0], [1.0, -0.8], noise, axis=2)[..., 60:]
    groups = {60: [0, 1, 2], 240: [3, 4, 5]}
    pooled = [pool([*walk[:3, :60], *walk[3:]], groups) for walk in walks]
    errors, claimed = (np.array([getattr(one, name) for one in pooled]) for name in ("mean", "se"))
    covered = np.mean(np.abs(errors) <= 1.96 * claimed)
    assert 0.92 <= covered <= 0.98  # 95 % ± 2.8 standard errors of 400
    assert np.std(errors) == pytest.approx(np.mean(claimed), rel=0.12)
    assert np.mean(errors) == pytest.approx(0, abs=4 * np.std(errors) / 20)


def test_runs_that_disagree_widen_the_error():
    """Chains that sit in different places: the spread of their means is the error."""
    parts = [run(seed, 1, 100 + 10 * seed, mean=3 + seed % 3) for seed in range(6)]
    merged = LLCResult.merge(parts)
    means = [part.llc for part in parts]
    assert merged.se == pytest.approx(np.std(means, ddof=1) / np.sqrt(6), rel=0.2)
    assert merged.verdict == "reject"


def test_a_drift_late_in_long_chains_is_seen():
    drifting = run(1, 4, 800)
    frame = drifting.draws.copy()
    frame["llc"] += 3 * (frame["draw"] > 400)
    provenance = drifting._recorded.provenance
    late = make_result([np.ones(800)] * 4, draws=frame, seed=1, num_draws=800, provenance=provenance)
    merged = LLCResult.merge(run(0, 4, 100), late)
    assert merged.verdict == "reject"
    assert {finding.kind for finding in merged.findings} & {"drift", "rhat"}


# --- lost chains, reports, the rest --------------------------------------------------------------


def test_lost_chains_stay_lost():
    lost = {"status": "diverged", "message": "the loss was not finite at step 3"}
    merged = LLCResult.merge(run(0, 4, 100), run(1, 4, 100, c2=lost))
    assert merged.verdict == "caution"
    assert "chain 6 diverged" in merged.reasons[0]
    assert np.isnan(merged["llc-chain/6"])


def test_a_chain_that_was_killed_counts_where_it_ended():
    killed = {"status": "died", "message": "SIGKILL"}
    merged = LLCResult.merge(run(0, 4, 100), run(0, 4, 300, c1=killed))
    assert list(merged.chains["status"]) == ["done"] * 4
    assert list(merged.chains["draws"]) == [300, 100, 300, 300]


def test_a_chain_that_diverges_later_is_lost():
    diverged = {"status": "diverged"}
    merged = LLCResult.merge(run(0, 4, 100), run(0, 4, 300, c1=diverged))
    assert merged.chains.loc[1, "status"] == "diverged"


def test_reports_with_a_row_per_chain_are_joined():
    def reports(chains, draws, seed):
        rng = np.random.default_rng(seed)
        return {
            "norm/trace": rng.normal(size=(chains, draws)),
            "tensor": torch.arange(float(chains)) + seed,
            "matrix": rng.normal(size=(chains, draws, 3)),
            "same": {"a": 1},
        }

    one = run(0, 2, 50, reports=reports(2, 50, 0))
    other = run(1, 3, 80, reports=reports(3, 80, 1))
    merged = LLCResult.merge(one, other)
    assert merged["norm/trace"].shape == (5, 80)
    assert np.array_equal(merged["norm/trace"][:2, :50], one["norm/trace"])
    assert np.isnan(merged["norm/trace"][:2, 50:]).all()
    assert np.array_equal(merged["norm/trace"][2:], other["norm/trace"])
    assert merged["tensor"].tolist() == [0, 1, 1, 2, 3]
    assert merged["matrix"].shape == (5, 80, 3)
    assert merged["same"] == {"a": 1}


def test_reports_that_cannot_be_joined_are_named():
    one = run(0, 2, 50, reports={"kept": 1, "mean": 0.5, "only": 2})
    other = run(1, 2, 50, reports={"kept": 1, "mean": 0.7})
    with pytest.warns(ReportWarning, match="mean, only") as caught:
        merged = LLCResult.merge(one, other)
    assert caught[0].filename == __file__
    assert merged["kept"] == 1
    assert not {"mean", "only"} & set(merged)


def test_observables_of_one_run_only_are_nan_in_the_other():
    with_norm = run(1, 2, 50)
    frame = with_norm.draws.assign(norm=1.5)
    provenance = with_norm._recorded.provenance
    observed = make_result([np.ones(50)] * 2, draws=frame, seed=1, num_draws=50, provenance=provenance)
    merged = LLCResult.merge(run(0, 2, 50), observed)
    assert np.isnan(merged["norm/trace"][:2]).all()
    assert (merged["norm/trace"][2:] == 1.5).all()


def test_provenance_adds_up():
    merged = LLCResult.merge(run(0, 4, 100), run(1, 2, 200, cores=4))
    assert merged.provenance["gradients"] == 800
    assert merged.provenance["seconds"] == 4.0
    assert [one["seed"] for one in merged.provenance["runs"]] == [0, 1]
    assert [one["settings"]["cores"] for one in merged.provenance["runs"]] == [2, 4]
    assert merged.settings["cores"] == [2, 4]
    assert merged.settings["lr"] == SETTINGS["lr"]


def test_init_loss_of_different_samples_is_averaged():
    merged = LLCResult.merge(
        run(0, 2, 50, init_loss=0.08, init_loss_se=0.003), run(1, 2, 50, init_loss=0.09, init_loss_se=0.004)
    )
    assert merged.init_loss == pytest.approx(0.085)
    assert merged.init_loss_se == pytest.approx(0.0025)


def test_another_fixed_baseline_is_an_error():
    fixed = {"baseline": "fixed"}
    with pytest.raises(InvalidArgumentError, match=r"init_loss: 0.0801 and 0.5; give init_loss=0.0801"):
        LLCResult.merge(run(0, 2, 50, **fixed), run(1, 2, 50, init_loss=0.5, **fixed))


def test_a_merged_result_is_saved_and_merged_again(tmp_path):
    path = tmp_path / "merged.safetensors"
    merged = LLCResult.merge(run(0, 4, 100), run(2**100, 2, 200))
    merged.save(path)
    twin = LLCResult.load(path)
    assert twin.to_dict() == merged.to_dict()
    assert twin.estimate == merged.estimate
    more = LLCResult.merge(twin, run(3, 4, 100), run(0, 4, 150))
    assert list(more.chains["source_chain"]) == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3]
    assert len(more.draws) == 4 * 150 + 2 * 200 + 4 * 100


def test_nothing_of_the_sources_changes():
    one, other = run(0, 2, 50), run(1, 2, 50)
    before = [one.to_dict(), other.to_dict(), one.draws.copy()]
    LLCResult.merge(one, other)
    assert [one.to_dict(), other.to_dict()] == before[:2]
    assert one.draws.equals(before[2])


def test_runs_that_went_on_until_they_were_precise_are_merged_and_looked_at():
    until = {"se": 0.1, "relative": None, "max_draws": 10, "goal": 0.1, "ended": "max_draws"}
    both = LLCResult.merge(run(1, 2, 90, until=until), run(0, 2, 200))
    assert both.estimate.num_chains == 4
    assert both.verdict in ("trust", "caution", "reject")
    assert diagnose(both).num_chains == 4  # of unequal length
