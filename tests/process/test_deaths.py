"""Chains, loader workers and parents that fail, die or are interrupted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

from devsample.errors import (
    AllChainsFailedError,
    ChainProcessError,
    LoaderError,
    LoaderWorkerError,
)
from tests.factories import (
    BreaksWeights,
    FailsAt,
    KilledOnce,
    WorkerKilledOnce,
    estimate,
    linear_data,
    squared_error,
)

DEADLINE = 20.0  # seconds for processes to be gone; they take about one
ROOT = Path(__file__).parents[2]


def without_chain(draws: pd.DataFrame, chain: int) -> pd.DataFrame:
    return draws[draws["chain"] != chain].reset_index(drop=True)


def only_failed(result: Any, chain: int, status: str) -> Any:
    """The row of the one chain that failed, which is named and left out."""
    expected = ["done"] * len(result.chains)
    expected[chain] = status
    assert list(result.chains["status"]) == expected
    assert np.isnan(result[f"llc-chain/{chain}"])
    assert np.isfinite(result.llc)
    assert result.verdict != "trust"
    assert f"chain {chain}" in result.reasons[0].lower()
    return result.chains.loc[chain]


# --- chain processes killed ----------------------------------------------------------------------


def test_a_chain_process_that_is_killed_is_tried_again(tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    evaluate = KilledOnce(marker, call=70)
    result = estimate(evaluate=evaluate, num_draws=40, cores=2)
    assert marker.exists()
    assert list(result.chains["status"]) == ["done", "done"]
    assert sorted(result.chains["attempt"]) == [0, 1]
    undisturbed = estimate(num_draws=40)
    pd.testing.assert_frame_equal(result.draws, undisturbed.draws, check_exact=True)
    assert result.llc == undisturbed.llc


def test_a_chain_that_is_always_killed_costs_only_itself() -> None:
    result = estimate(callbacks=FailsAt(1, 5, "kill"), cores=2, num_chains=3)
    row = only_failed(result, 1, "died")
    assert "SIGKILL" in row["message"]
    assert row["attempt"] == 2
    undisturbed = estimate(num_chains=3)
    pd.testing.assert_frame_equal(
        without_chain(result.draws, 1), without_chain(undisturbed.draws, 1), check_exact=True
    )


@pytest.mark.slow
def test_keep_does_not_try_again() -> None:
    result = estimate(callbacks=FailsAt(0, 5, "kill"), cores=2, num_chains=3, on_failure="keep")
    row = only_failed(result, 0, "died")
    assert row["attempt"] == 0
    assert "SIGKILL" in row["message"]


def test_raise_makes_a_lost_process_an_error_that_has_the_draws() -> None:
    with pytest.raises(ChainProcessError, match="SIGKILL") as caught:
        estimate(callbacks=FailsAt(0, 5, "kill"), executor="processes", on_failure="raise")
    assert "chain 0" in str(caught.value)
    assert set(caught.value.draws["chain"]) == {1}
    assert len(caught.value.draws) == 10


# --- chains that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 2])
def test_an_exception_in_one_chain_leaves_the_others(cores: int) -> None:
    result = estimate(callbacks=FailsAt(1, 5, "raise"), num_chains=3, cores=cores)
    row = only_failed(result, 1, "failed")
    assert "the callback does not like chain 1" in row["message"]
    assert row["attempt"] == 0
    kept = result.draws[result.draws["chain"] == 1]
    assert 5 <= len(kept) <= 6  # what was drawn before it failed
    undisturbed = estimate(num_chains=3)
    pd.testing.assert_frame_equal(
        without_chain(result.draws, 1), without_chain(undisturbed.draws, 1), check_exact=True
    )


@pytest.mark.parametrize("cores", [1, 2])
def test_a_chain_whose_loss_is_nan_has_diverged(cores: int) -> None:
    result = estimate(callbacks=BreaksWeights(1, 4), num_chains=3, cores=cores)
    row = only_failed(result, 1, "diverged")
    assert "step 5" in row["message"]
    assert "lr" in row["message"]
    undisturbed = estimate(num_chains=3)
    assert result.llc == pytest.approx(np.mean([undisturbed["llc-chain/0"], undisturbed["llc-chain/2"]]))


def test_a_chain_that_diverges_in_a_group_leaves_the_group() -> None:
    result = estimate(callbacks=BreaksWeights(1, 4), num_chains=3, chains_per_process=3)
    only_failed(result, 1, "diverged")
    undisturbed = estimate(num_chains=3)
    np.testing.assert_allclose(result["loss/trace"][[0, 2]], undisturbed["loss/trace"][[0, 2]], rtol=1e-5)


def test_a_step_size_that_is_too_large_names_lr() -> None:
    with pytest.raises(AllChainsFailedError, match="lower lr"):
        estimate(optimizer_kwargs={"lr": 10.0, "nbeta": 1e6}, num_draws=200)


@pytest.mark.parametrize("cores", [1, 2])
def test_all_chains_failing_is_an_error_that_has_the_draws(cores: int) -> None:
    with pytest.raises(AllChainsFailedError) as caught:
        estimate(callbacks=FailsAt(None, 5, "raise"), cores=cores)
    message = str(caught.value)
    assert "the callback does not like chain 0" in message
    assert "chain 1" in message
    draws = caught.value.draws
    assert set(draws["chain"]) == {0, 1}
    assert np.isfinite(draws["loss"]).all()


def test_raise_makes_one_failed_chain_an_error_that_has_the_draws() -> None:
    with pytest.raises(ChainProcessError, match="1 of 2 chains failed") as caught:
        estimate(callbacks=FailsAt(1, 5, "raise"), on_failure="raise")
    assert "the callback does not like chain 1" in str(caught.value)
    assert (caught.value.draws["chain"] == 0).sum() == 10


# --- loader workers ------------------------------------------------------------------------------


def test_a_loader_worker_that_is_killed_costs_a_new_attempt(tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    spec = {"dataset": WorkerKilledOnce(marker, item=600), "num_workers": 1}
    result = estimate(executor="processes", num_draws=40, spec=spec)
    assert marker.exists()
    assert list(result.chains["status"]) == ["done", "done"]
    assert 1 in set(result.chains["attempt"])
    undisturbed = estimate(num_draws=40)
    pd.testing.assert_frame_equal(result.draws, undisturbed.draws, check_exact=True)


class KillsItsWorker(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return linear_data()[index]


def test_a_loader_worker_that_always_dies_is_named() -> None:
    with pytest.raises(LoaderWorkerError, match=r"loader worker \d .* SIGKILL"):
        estimate(spec={"dataset": KillsItsWorker(), "num_workers": 1})


class Refuses(torch.utils.data.Dataset):
    """An item that cannot be read."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("item seven is damaged")
        return linear_data()[index]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_item_that_cannot_be_read_is_named(num_workers: int) -> None:
    with pytest.raises(LoaderError) as caught:
        estimate(spec={"dataset": Refuses(), "num_workers": num_workers})
    message = str(caught.value)
    assert "OSError: item seven is damaged" in message
    assert "items" in message


# --- the parent ----------------------------------------------------------------------------------

LONG_RUN = """
import multiprocessing, os, sys, time
from pathlib import Path
import devsample
from tests.factories import linear_data, linear_model, squared_error

folder, stuck = Path(sys.argv[1]), sys.argv[2] == "stuck"
calls = 0


def evaluate(model, batch):
    global calls
    calls += 1
    (folder / f"chain-{os.getpid()}").touch()
    if stuck and calls > 200 and multiprocessing.parent_process():  # it sends nothing any more
        (folder / f"stuck-{os.getpid()}").touch()
        time.sleep(1000)
    return squared_error(model, batch)


try:
    devsample.estimate_learning_coeff(
        linear_model(),
        loader_spec=devsample.LoaderSpec(
            linear_data(),
            batch_size=16,
            num_workers=2,
            worker_init_fn=lambda worker: (folder / f"worker-{os.getpid()}").touch(),
        ),
        evaluate=evaluate,
        optimizer_kwargs={"lr": 1e-5},
        num_chains=2,
        num_draws=10_000_000,
        cores=2,
        verbose=False,
    )
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(3)
"""


@pytest.fixture
def long_run(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """A run in a process group of its own, its own folder for temporary files, and its processes."""
    marks, temporary = tmp_path / "marks", tmp_path / "temporary"
    marks.mkdir()
    temporary.mkdir()
    script = tmp_path / "long_run.py"
    script.write_text(LONG_RUN)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(marks), request.param],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    family: list[psutil.Process] = []
    try:
        # The parent's evaluate leaves a mark as well: it checks the loss at w*.
        wait_until(lambda: len(marked(marks, "chain")) == 3 and len(marked(marks, "worker")) == 4)
        if request.param == "stuck":
            wait_until(lambda: len(marked(marks, "stuck")) == 2)
        family = psutil.Process(parent.pid).children(recursive=True)
        wanted = (marked(marks, "chain") | marked(marks, "worker")) - {parent.pid}
        assert wanted <= {process.pid for process in family}
        yield parent, family, temporary
    finally:
        for process in [*family, parent]:
            if process.poll() is None if process is parent else process.is_running():
                process.kill()
        parent.communicate()


def marked(folder: Path, kind: str) -> set[int]:
    return {int(path.name.split("-")[1]) for path in folder.glob(f"{kind}-*")}


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def still_there(family: list[psutil.Process]) -> list[psutil.Process]:
    return [
        process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize("long_run", ["stuck"], indirect=True)
def test_nothing_survives_a_parent_that_is_killed(long_run: Any) -> None:
    parent, family, _ = long_run
    assert len(still_there(family)) >= 6
    parent.kill()
    parent.wait()
    wait_until(lambda: not still_there(family), DEADLINE)


@pytest.mark.parametrize("long_run", ["running"], indirect=True)
def test_an_interrupt_from_the_keyboard_leaves_nothing_behind(long_run: Any) -> None:
    parent, family, temporary = long_run
    os.killpg(parent.pid, signal.SIGINT)  # a terminal sends it to the whole group
    out, err = parent.communicate(timeout=60)
    assert parent.returncode == 3
    assert out == "interrupted\n"
    wait_until(lambda: not still_there(family), DEADLINE)
    assert list(temporary.iterdir()) == []
    assert err == ""  # no process complains while it is ended


def test_a_loss_that_is_nan_at_the_center_stops_before_any_chain() -> None:
    def nowhere(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return squared_error(model, batch) * torch.nan

    with pytest.raises(Exception, match=r"the loss at w\* is nan"):
        estimate(evaluate=nowhere)
