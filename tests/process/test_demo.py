"""The command line, as a user runs it: ``devsample demo`` and its ways to end."""

import os
import signal
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest

DEMO = [sys.executable, "-m", "devsample", "demo"]
SHORT = ["--chains", "4", "--draws", "12", "--seed", "3"]


def run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "devsample", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=cwd,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("keep me")
    return run("demo", *SHORT, "--out", "out", cwd=folder), folder


def test_it_prints_a_table_and_a_verdict_and_writes_two_files(finished):
    done, folder = finished
    assert done.returncode == 0, done.stderr
    assert "test loss" in done.stdout
    assert "4 of 4 chains" in done.stdout
    assert any(line.startswith(("trust:", "caution:", "reject:")) for line in done.stdout.splitlines())
    draws = pd.read_csv(folder / "out-2" / "draws.csv")
    assert draws.groupby("chain").size().tolist() == [12] * 4
    assert (folder / "out-2" / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert "step" in done.stderr  # the progress bar


def test_a_folder_that_holds_anything_is_left_alone(finished):
    done, folder = finished
    assert [path.name for path in (folder / "out").iterdir()] == ["mine.txt"]
    assert "In out-2" in done.stdout


@pytest.mark.slow
def test_one_process_without_workers_draws_the_same(finished):
    _, folder = finished
    done = run("demo", *SHORT, "--cores", "1", "--workers", "0", "--out", "inline", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "inline" / "draws.csv").read_bytes() == (folder / "out-2" / "draws.csv").read_bytes()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    "moment", ["sampling:", *(pytest.param(one, marks=pytest.mark.slow) for one in ("Training", "Sampling"))]
)
def test_an_interrupt_leaves_no_process_and_no_empty_folder(moment, tmp_path):
    with subprocess.Popen(
        [*DEMO, "--draws", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
        start_new_session=True,
    ) as process:
        shown = ""
        while moment not in shown:
            letter = process.stdout.read(1)
            assert letter, f"it ended before it was interrupted: {shown}"
            shown += letter
        if moment == "Sampling":
            time.sleep(2)  # processes are starting
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
        shown += process.stdout.read()
        assert process.wait(30) == 130
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert children or moment == "Training"
    assert "Traceback" not in shown, shown
    assert "interrupted" in shown
    assert not list(tmp_path.iterdir())


def test_bad_usage_ends_with_2_and_an_error_with_1(tmp_path):
    assert run(cwd=tmp_path).returncode == 2
    wrong = run("demo", "--chains", "0", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "--chains: expected an integer ≥ 1, got '0'" in wrong.stderr
    (tmp_path / "file").write_text("")
    error = run("demo", "--out", "file/out", cwd=tmp_path)
    assert error.returncode == 1
    assert error.stderr.startswith("devsample: --out: cannot use file")
    assert "Traceback" not in error.stderr


def test_help_and_version_start_fast(tmp_path):
    done = run("demo", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "draws.csv" in done.stdout
    check = (
        "import sys, devsample.cli; devsample.cli.main(['--version']);"
        "assert not {'torch', 'numpy', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
