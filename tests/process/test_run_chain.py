"""The entry of every executor: it reads a run folder, never raises, and draws what a run draws."""

import hashlib
import inspect
import shutil

import devsample
from devsample.running import read_draws
from devsample.session import run_chain
from tests.factories import linear_data, linear_model, squared_error

POSITIONAL = [
    "model", "loader", "callbacks", "evaluate", "sampling_method", "optimizer_kwargs", "num_draws",
    "num_chains", "num_burnin_steps", "num_steps_bw_draws", "init_loss", "grad_accum_steps", "cores",
    "seed", "device", "gpu_idxs", "verbose", "optimize_over_per_model_param", "online", "use_amp",
]  # fmt: skip
KEYWORD_ONLY = [
    "loader_spec", "settings", "param_masks", "baseline", "start", "train_mode", "autocast_dtype",
    "observables", "until", "devices", "threads_per_chain", "chains_per_process", "executor", "run_dir",
    "on_failure", "timeout", "compile", "on_records",
]  # fmt: skip


def test_the_signature_is_the_agreed_one():
    for function in (
        devsample.estimate_learning_coeff_with_summary,
        devsample.estimate_learning_coeff,
        devsample.sample,
    ):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == POSITIONAL
        assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == KEYWORD_ONLY


def test_chains_are_drawn_again_from_the_run_folder_alone(tmp_path):
    folder = tmp_path / "run"
    result = devsample.estimate_learning_coeff_with_summary(
        linear_model(),
        loader_spec=devsample.LoaderSpec(linear_data(), batch_size=16),
        evaluate=squared_error,
        optimizer_kwargs={"lr": 1e-4, "localization": 1.0},
        num_chains=3,
        num_draws=20,
        cores=2,
        seed=0,
        run_dir=folder,
        verbose=False,
    )
    sha256 = hashlib.sha256((folder / "payload.bin").read_bytes()).hexdigest()
    shutil.rmtree(folder / "chains")
    events = []
    outcome = run_chain(sha256, [0, 2], folder, 0, events.append)
    assert outcome.error == ""
    assert [(chain.chain, chain.status, chain.num_draws) for chain in outcome.chains] == [
        (0, "done", 20),
        (2, "done", 20),
    ]
    again = read_draws(folder, 3)
    expected = result.draws[result.draws["chain"] != 1].reset_index(drop=True)
    assert again.equals(expected)
    assert {event.chain for event in events if event.kind == "records"} == {0, 2}


def test_a_foreign_payload_is_not_read_and_nothing_is_raised(tmp_path):
    (tmp_path / "payload.bin").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    outcome = run_chain("0" * 64, [0], tmp_path, 1, lambda event: None)
    assert outcome.error_type == "RunFolderError"
    assert "is not the payload of this run" in outcome.error
    assert [(chain.status, chain.attempt) for chain in outcome.chains] == [("failed", 1)]
    assert not (tmp_path / "hacked").exists()


def test_a_measurement_that_fails_after_the_last_draw_costs_no_chain():
    def run(evaluate):
        return devsample.estimate_learning_coeff_with_summary(
            linear_model(),
            loader_spec=devsample.LoaderSpec(linear_data(), batch_size=16),
            evaluate=evaluate,
            optimizer_kwargs={"lr": 1e-4, "localization": 1.0},
            init_loss=0.0,
            num_chains=1,
            num_draws=40,
            seed=0,
            verbose=False,
        )

    calls = []

    def counted(model, batch):
        calls.append(1)
        return squared_error(model, batch)

    whole = run(counted)
    left = len(calls) - 4  # the last calls of all are the measurement's

    def fails_late(model, batch):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("gone")
        return squared_error(model, batch)

    late = run(fails_late)
    assert late.draws.equals(whole.draws)
    assert late.chains["status"].tolist() == ["done"]
    assert "could not be measured" in late.chains["message"][0]
    assert whole.chains["message"][0] == ""
