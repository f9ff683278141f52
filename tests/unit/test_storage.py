"""Results saved to a file and read again: nothing is lost, nothing else is overwritten, nothing runs."""

import hashlib
import json
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from devsample import LLCResult
from devsample.cli import main
from devsample.errors import ReportWarning, ResultFileError
from devsample.storage import FORMAT, write_result
from devsample.verdict import Finding
from tests.unit.test_diagnostics import healthy
from tests.unit.test_results import make_result, table

PROVENANCE = {"versions": {"torch": "2.13.0"}, "fingerprints": {"weights": "ab" * 32, "data": None}}


@pytest.fixture
def traces():
    return list(healthy(np.random.default_rng(0)))


@pytest.fixture
def rich(traces):
    """A result with everything that can be in one: a lost chain, reasons, observables, reports."""
    traces[2] = np.append(traces[2][:40], np.nan)
    draws = table(traces)
    draws["distance"] = np.linspace(0, 1, len(draws)).astype(np.float32)
    draws["count"] = np.arange(len(draws), dtype=np.int32)
    reports = {
        "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "big-endian": np.arange(3, dtype=">f8"),
        "empty": np.empty((0, 3)),
        "scalar": np.float64(0.1),
        "zero-d": np.array(7),
        "bfloat16": torch.arange(4, dtype=torch.bfloat16),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "nested": {"a": [1, None, "ü", (2.5, float("inf"))], "b": {"mask": np.array([True, False])}},
        "numbered": {1: "one", (2, 3): "two"},
        "marked": {"$": "float"},
    }
    seeds = {f"c{i}": {"seed": 2**100 + i, "message": "it broke" if i == 2 else ""} for i in range(4)}
    return make_result(
        traces,
        draws=draws,
        online=True,
        init_loss_se=0.002,
        at_center={"gradient_noise": 3.0},
        reports=reports,
        provenance=PROVENANCE,
        run_dir=("a", 1, float("nan")),
        **seeds,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.safetensors"


def same(one, other):
    """Equal in type, dtype and every bit."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray | np.generic):
        assert one.dtype.newbyteorder("=") == other.dtype
        assert one.shape == other.shape
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def test_everything_comes_back(rich, path):
    rich.save(path)
    twin = LLCResult.load(path)
    for name in ("llc", "se", "ess", "rhat", "verdict", "reasons", "findings", "estimate", "predicted_bias"):
        assert getattr(twin, name) == getattr(rich, name), name
    assert rich.reasons
    assert rich.predicted_bias is not None
    assert list(twin) == list(rich)
    for key in rich:
        assert same(rich[key], twin[key]), key
    assert same(dict(rich.settings), dict(twin.settings))
    assert twin.to_dict() == rich.to_dict()
    assert twin.summary() == rich.summary()
    assert (twin.init_loss, twin.init_loss_se) == (rich.init_loss, rich.init_loss_se)


def test_tables_come_back_exactly(rich, path):
    rich.save(path)
    twin = LLCResult.load(path)
    assert twin.draws.equals(rich.draws)
    assert list(twin.draws.dtypes) == list(rich.draws.dtypes)
    assert list(twin.draws) == list(rich.draws)
    assert twin.draws["distance"].dtype == np.float32
    assert twin.chains.equals(rich.chains)
    assert list(twin.chains["seed"]) == [2**100 + i for i in range(4)]


def test_a_loaded_result_can_be_saved_again(rich, path, tmp_path):
    rich.save(path)
    again = tmp_path / "again.safetensors"
    LLCResult.load(path).save(again)
    assert same(dict(LLCResult.load(again)), dict(LLCResult.load(path)))


def test_a_loaded_result_keeps_its_verdict(traces, path):
    """It is read, not judged anew: a later version may judge by other rules."""
    result = make_result(traces)
    assert result.verdict == "trust"
    finding = Finding("new", "caution", "A rule that is not there yet.")
    write_result(path, result._recorded, replace(result._analysis, findings=(finding,)))
    assert LLCResult.load(path).verdict == "caution"
    assert LLCResult.load(path).reasons == (finding.text,)


def test_a_report_of_another_kind_is_left_out_and_named(traces, path):
    reports = {"kept": [1, 2], "figure": object(), "text": np.array(["a"]), "inside": {"deep": {1, 2}}}
    result = make_result(traces, reports=reports)
    with pytest.warns(ReportWarning, match=r"'figure' \(a object\), 'text' .*, 'inside' \(a set\)") as caught:
        result.save(path)
    assert caught[0].filename == __file__
    assert "kept" in LLCResult.load(path)
    assert not {"figure", "text", "inside"} & set(LLCResult.load(path))


def test_a_setting_of_another_kind_becomes_text(traces, path):
    make_result(traces, run_dir={"kind": int, "values": [complex(1, 2)]}).save(path)
    assert LLCResult.load(path).settings["run_dir"] == {"kind": "<class 'int'>", "values": ["(1+2j)"]}


# --- files ---------------------------------------------------------------------------------------


def test_it_replaces_what_was_saved_before(traces, rich, path):
    rich.save(path)
    make_result(traces[:2]).save(str(path))
    assert len(LLCResult.load(path).chains) == 2
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("kind", ["text", "empty", "weights", "folder", "cut off"])
def test_it_overwrites_nothing_else(rich, path, kind):
    if kind == "folder":
        path.mkdir()
    elif kind == "weights":
        save_file({"w": torch.ones(3)}, path, metadata={"format": "pt"})
    elif kind == "cut off":
        rich.save(path)
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_text("precious" if kind == "text" else "")
    before = None if kind == "folder" else path.read_bytes()
    with pytest.raises(ResultFileError, match="left as it is"):
        rich.save(path)
    assert before is None or path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_link_stays_a_link(rich, path, tmp_path):
    link = tmp_path / "latest"
    rich.save(path)
    link.symlink_to(path)
    before = path.read_bytes()
    make_result(list(healthy(np.random.default_rng(1)))).save(link)
    assert link.is_symlink()
    assert path.read_bytes() != before


def test_without_the_folder_nothing_is_made(rich, tmp_path):
    with pytest.raises(ResultFileError, match="no folder"):
        rich.save(tmp_path / "not there" / "run.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_file_has_the_usual_permissions(rich, path):
    rich.save(path)
    other = path.with_name("other")
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (self.marker, "w"))


@pytest.mark.parametrize("save", [pickle.dumps, "torch"])
def test_no_code_runs_on_load(path, tmp_path, save):
    marker = str(tmp_path / "marker")
    if save == "torch":
        torch.save(Bomb(marker), path)
    else:
        path.write_bytes(save(Bomb(marker)))
    with pytest.raises(ResultFileError, match="damaged, or no file"):
        LLCResult.load(path)
    assert not os.path.exists(marker)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.9999])
def test_a_file_that_was_cut_off_is_an_error(rich, path, share):
    rich.save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ResultFileError, match="damaged"):
        LLCResult.load(path)


def test_a_changed_bit_anywhere_is_an_error(rich, path):
    rich.save(path)
    data = path.read_bytes()
    places = np.random.default_rng(0).integers(0, len(data), 200)
    for place in [0, 8, 9, *places, len(data) - 1]:
        changed = bytearray(data)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(ResultFileError):
            LLCResult.load(path)


def test_no_file_and_a_folder_are_errors(tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ResultFileError, match="no such file"):
            LLCResult.load(path)


def test_other_safetensors_are_an_error(path):
    save_file({"w": torch.ones(3)}, path)
    with pytest.raises(ResultFileError, match="no result that devsample has saved"):
        LLCResult.load(path)


def test_a_newer_format_is_refused_with_the_remedy(path):
    save_file({"w": torch.ones(3)}, path, metadata={"devsample": "result", "format": str(FORMAT + 1)})
    with pytest.raises(ResultFileError, match="pip install --upgrade devsample"):
        LLCResult.load(path)


def test_content_that_lacks_something_is_an_error(rich, path):
    for text in ("{}", "[]", "null", json.dumps({"columns": ["x"]}), "[" * 100_000):
        digest = hashlib.sha256(text.encode()).hexdigest()
        metadata = {"devsample": "result", "format": "1", "content": text, "sha256": digest}
        save_file({}, path, metadata=metadata)
        with pytest.raises(ResultFileError, match="incomplete"):
            LLCResult.load(path)


# --- the command line ----------------------------------------------------------------------------


def test_show_prints_what_was_saved(rich, path, capsys):
    rich.save(path)
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out == rich.summary() + "\n"
    assert main(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rich.to_dict()


def test_show_says_what_is_wrong(path, capsys):
    path.write_text("nothing")
    assert main(["show", str(path)]) == 1
    assert "devsample: " in capsys.readouterr().err
