"""Which modules another process finds by name."""

import importlib
import importlib.abc
import importlib.util
import os
import sys
import types

import pytest

from devsample.importable import found_elsewhere, has_home, home_module


@pytest.mark.parametrize(
    "name", ["os", "os.path", "sys", "torch.nn.functional", "torch._C", "numpy.linalg", __name__, "zipimport"]
)
def test_what_is_installed_is_found(name):
    importlib.import_module(name)
    assert found_elsewhere(name)


@pytest.mark.parametrize("name", ["__main__", "no_such_module", "no_such.module", "no_such.part.deep"])
def test_what_no_finder_knows_is_not(name):
    assert not found_elsewhere(name)


def test_a_module_made_in_memory_is_not_found(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_in_memory", types.ModuleType("made_in_memory"))
    assert not found_elsewhere("made_in_memory")


@pytest.mark.parametrize("name", ["loaded_by_path", "plugins.loaded", "devsample.loaded"])
def test_a_module_loaded_from_a_file_under_another_name_is_not_found(name, tmp_path, monkeypatch):
    (tmp_path / "source.py").write_text("x = 1")
    spec = importlib.util.spec_from_file_location(name, tmp_path / "source.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert not found_elsewhere(name)


def test_a_part_that_its_package_makes_is_found_with_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "devsample.made", types.ModuleType("devsample.made"))
    assert found_elsewhere("devsample.made")


def test_the_answer_follows_sys_path(tmp_path, monkeypatch):
    (tmp_path / "found_later.py").touch()
    assert not found_elsewhere("found_later")
    monkeypatch.syspath_prepend(tmp_path)
    assert found_elsewhere("found_later")
    monkeypatch.undo()
    assert not found_elsewhere("found_later")


def test_a_finder_that_the_script_defined_does_not_count(monkeypatch):
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "from_nowhere":
                return importlib.util.spec_from_loader(name, loader=None)
            return None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert found_elsewhere("from_nowhere")
    Finder.__module__ = "__main__"
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:-1], Finder()])
    assert not found_elsewhere("from_nowhere")


def test_the_home_of_functions_classes_and_modules():
    assert home_module(os.path.join) == os.path.__name__
    assert home_module(pytest.MonkeyPatch) == "_pytest.monkeypatch"
    assert home_module(os) == "os"
    assert home_module(3) is None


def test_classes_with_and_without_a_home():
    class Local:
        pass

    assert has_home(pytest.MonkeyPatch)
    assert not has_home(Local)
    assert not has_home(type("pytest", (), {}))
