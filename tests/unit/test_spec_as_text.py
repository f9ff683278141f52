"""LoaderSpec from plain values: import paths, JSON, TOML; and what is refused before any process starts."""

import json
import multiprocessing
import pickle
import subprocess
import sys
import tomllib
import types

import cloudpickle
import pytest
import torch
from torch.utils.data import RandomSampler, TensorDataset

from devsample import LoaderSpec
from devsample.data.importing import ImportPath
from devsample.errors import InvalidArgumentError, LoaderError
from tests import factories

HERE = __name__


def make_numbers(n, *, offset=0, names=None):
    return TensorDataset(torch.arange(offset, offset + n))


class Makers:
    class Inner:
        @staticmethod
        def make(n):
            return make_numbers(n)


def collate(items):
    return torch.stack([one for (one,) in items]) * 10


def start_worker(worker_id):
    pass


NUMBERS = TensorDataset(torch.arange(3))


def value_of(spec, index=0):
    return spec.make_dataset()[index][0].item()


# ---- factories by import path -------------------------------------------------------------------


def test_a_factory_by_import_path_is_called_with_its_arguments():
    spec = LoaderSpec(f"{HERE}:make_numbers", dataset_args=[5], dataset_kwargs={"offset": 7})
    assert len(spec.make_dataset()) == 5
    assert value_of(spec) == 7
    assert spec.is_factory


def test_names_after_the_colon_may_have_dots():
    assert len(LoaderSpec(f"{HERE}:Makers.Inner.make", dataset_args=[4]).make_dataset()) == 4


def test_functions_by_import_path_are_the_functions():
    spec = LoaderSpec(
        NUMBERS, batch_size=2, collate_fn=f"{HERE}:collate", worker_init_fn=f"{HERE}:start_worker"
    )
    assert spec.collate_fn.resolve() is collate
    assert spec.worker_init_fn.resolve() is start_worker
    assert spec.collate_fn([NUMBERS[1], NUMBERS[2]]).tolist() == [10, 20]


def test_a_path_travels_as_text_only():
    spec = LoaderSpec(f"{HERE}:make_numbers", dataset_args=[5])
    data = cloudpickle.dumps(spec)
    assert b"make_numbers" in data
    assert b"arange" not in data
    assert len(pickle.loads(data).make_dataset()) == 5
    assert repr(spec) == f"LoaderSpec('{HERE}:make_numbers', dataset_args=(5,))"


def test_arguments_are_the_specs_own():
    names = ["a"]
    spec = LoaderSpec(f"{HERE}:make_numbers", dataset_args=[5], dataset_kwargs={"names": names})
    names.append("b")
    assert spec.dataset_kwargs == {"names": ["a"]}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose modules say so when they are run."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, source):
        folder = tmp_path / "made_for_paths"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        (folder / f"{name}.py").write_text("raise RuntimeError('this module was run')\n" + source)
        return f"made_for_paths.{name}"

    yield write
    for name in [name for name in sys.modules if name.startswith("made_for_paths")]:
        del sys.modules[name]


DEFINITIONS = """
from torch.utils.data import TensorDataset as Imported
import json as other

if True:
    def conditional(n): ...

def plain(n, /, split, start=Undefined, *, size: Undefined = Undefined): ...

@other
def decorated(n): ...

class Class: ...
value = 3
"""


@pytest.mark.parametrize("name", ["Imported", "conditional", "plain", "decorated", "Class", "value"])
def test_a_name_is_found_in_the_source_without_running_it(package, name):
    path = f"{package('defined', DEFINITIONS)}:{name}"
    spec = LoaderSpec(path, dataset_args=[1, "train"])
    assert "made_for_paths.defined" not in sys.modules
    with pytest.raises(LoaderError, match=f"'{path}' cannot be imported: RuntimeError: this module was run"):
        spec.make_dataset()


def test_a_name_that_the_source_does_not_define_is_refused(package):
    module = package("defined", DEFINITIONS)
    with pytest.raises(InvalidArgumentError, match=r"there is no 'plane'\. Did you mean 'plain'\?"):
        LoaderSpec(f"{module}:plane")
    with pytest.raises(InvalidArgumentError, match=r"cannot be imported: SyntaxError"):
        LoaderSpec(f"{package('broken', 'def f(:')}:f")


def test_arguments_are_checked_against_the_source(package):
    path = f"{package('defined', DEFINITIONS)}:plain"
    with pytest.raises(
        InvalidArgumentError, match=rf"{path}\(n, /, split, start=.*, \*, size=.*missing .*'split'"
    ):
        LoaderSpec(path, dataset_args=[1])
    with pytest.raises(InvalidArgumentError, match=r"unexpected keyword argument 'colour'"):
        LoaderSpec(path, dataset_args=[1, 2], dataset_kwargs={"colour": 3})


@pytest.mark.parametrize(
    "source", ["from torch.utils.data import *", "def __getattr__(name): ...", "globals()['x'] = 1",
               "def f():\n    global x\n    x = 1"],
)  # fmt: skip
def test_a_module_that_binds_names_as_it_runs_is_not_judged_by_its_source(package, source):
    path = f"{package('dynamic', source)}:something"
    assert LoaderSpec(path).dataset == ImportPath(path)


def test_a_value_that_is_no_function_is_named_where_it_is_used(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "holds_a_value.py").write_text("made = [1, 2]\n")
    spec = LoaderSpec("holds_a_value:made")
    with pytest.raises(LoaderError, match=r"'holds_a_value:made' is a list, not a function or class"):
        spec.make_dataset()


def test_a_submodule_after_the_colon_is_imported(tmp_path, monkeypatch):
    (tmp_path / "made_for_names").mkdir()
    (tmp_path / "made_for_names" / "__init__.py").touch()
    (tmp_path / "made_for_names" / "sub.py").write_text("def make(n):\n    return [0] * n\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = LoaderSpec("made_for_names:sub.make", dataset_args=[4])
    assert len(spec.make_dataset()) == 4
    with pytest.raises(InvalidArgumentError, match="there is no 'sup'"):
        LoaderSpec("made_for_names:sup.make", dataset_args=[4])


def test_a_spec_may_stand_in_the_module_that_it_names(tmp_path):
    (tmp_path / "own.py").write_text(
        "from devsample import LoaderSpec\n"
        "spec = LoaderSpec('own:make', dataset_args=[3])\n"
        "def make(n):\n    return list(range(n))\n"
    )
    code = "import own; print(own.spec.make_dataset())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "[0, 1, 2]\n", done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mnist", r"dataset: expected a data set.*import path \"package\.module:function\", got 'mnist'\.$"),
        ("data/train.csv", r"got 'data/train\.csv'\. To read a file, write a function"),
        (
            "torch.utils.data.TensorDataset",
            r"dataset: expected a data set, a function that makes one, or its",
        ),
        ("C:\\data\\train.csv", r"dataset: expected a data set"),
        ("no-such.module:make", r"dataset: expected a data set"),
        ("nosuchpackage.data:make", r"'nosuchpackage\.data:make' cannot be imported: .*nosuchpackage"),
        ("tests.nosuchmodule:make", r"there is no module 'tests\.nosuchmodule'"),
        ("json.decoder.nothing:make", r"cannot be imported: .*json\.decoder"),
        ("__main__:make", r"__main__ is another module\. Pass the function itself"),
        (f"{HERE}:make_number", r"there is no 'make_number'\. Did you mean 'make_numbers'\?"),
        (f"{HERE}:Makers.Outer", r"there is no 'Outer'"),
        (f"{HERE}:NUMBERS", r":NUMBERS' is a TensorDataset, not a function or class\. Name a function"),
        (f"{HERE}:make_numbers", r"do not fit .*:make_numbers\(n, .*missing a required argument: 'n'"),
    ],
)
def test_a_wrong_path_is_refused_before_any_process(given, message):
    with pytest.raises(InvalidArgumentError, match=message):
        LoaderSpec(given)


@pytest.mark.parametrize("field", ["collate_fn", "worker_init_fn"])
def test_a_wrong_path_names_its_field(field):
    with pytest.raises(InvalidArgumentError, match=rf"{field}: '{HERE}:missing' does not exist"):
        LoaderSpec(NUMBERS, **{field: f"{HERE}:missing"})
    with pytest.raises(InvalidArgumentError, match=rf"{field}: expected a function or its import path"):
        LoaderSpec(NUMBERS, **{field: "collate"})


def test_a_module_without_a_file_is_refused(monkeypatch):
    module = types.ModuleType("made_in_memory")
    module.make = make_numbers
    monkeypatch.setitem(sys.modules, "made_in_memory", module)
    with pytest.raises(
        InvalidArgumentError, match=r"'made_in_memory' was made in memory.*the function itself"
    ):
        LoaderSpec("made_in_memory:make", dataset_args=[3])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset_args": [(1, 2)]}, r"dataset_args\[0\]: a tuple is no JSON value"),
        ({"dataset_args": [float("nan")]}, r"dataset_args\[0\]: nan is no JSON value"),
        ({"dataset_args": [torch.tensor(1)]}, r"dataset_args\[0\]: a Tensor is no JSON value"),
        ({"dataset_kwargs": {"n": {"a": [1, {2}]}}}, r"dataset_kwargs\['n'\]\['a'\]\[1\]: a set is no"),
        ({"dataset_kwargs": {"n": {1: 2}}}, r"dataset_kwargs\['n'\]: the key 1 is no string"),
    ],
)
def test_arguments_that_are_not_plain_are_named_by_place(fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        LoaderSpec(f"{HERE}:make_numbers", **fields)


def test_any_argument_goes_with_a_function_itself():
    assert len(LoaderSpec(make_numbers, dataset_args=[torch.tensor(3)]).make_dataset()) == 3


# ---- to plain values and back -------------------------------------------------------------------

TEXT = f"""
dataset = "{HERE}:make_numbers"
dataset_args = [20]
batch_size = 4
sampling = "epoch"
drop_last = true
num_workers = 1
timeout = 30.0
prefetch_factor = 3
persistent_workers = false
worker_dataset = "rebuild"
collate_fn = "{HERE}:collate"

[dataset_kwargs]
offset = 3
names = ["a", "b"]
"""


def test_a_spec_in_toml_goes_there_and_back():
    values = tomllib.loads(TEXT)
    spec = LoaderSpec.from_dict(values)
    assert (spec.batch_size, spec.num_workers, spec.timeout, spec.order) == (4, 1, 30.0, "epoch")
    assert value_of(spec) == 3
    assert spec.to_dict() == values
    again = LoaderSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again.to_dict() == values


def test_defaults_are_left_out_so_that_nothing_is_none():
    values = LoaderSpec(f"{HERE}:make_numbers", dataset_args=[3], num_workers=2).to_dict()
    assert values == {"dataset": f"{HERE}:make_numbers", "dataset_args": [3], "num_workers": 2}


def test_items_that_are_batches_can_be_said_without_null():
    spec = LoaderSpec(f"{HERE}:make_numbers", dataset_args=[3], batch_size=None, num_samples=30)
    assert spec.to_dict()["batch_size"] == "none"
    assert LoaderSpec.from_dict(spec.to_dict()).batch_size is None


def test_an_order_of_indices_can_be_written():
    spec = LoaderSpec(f"{HERE}:make_numbers", dataset_args=[9], batch_sampler=[(0, 1), (2,)])
    assert spec.to_dict()["batch_sampler"] == [[0, 1], [2]]


def a_copy_of(function):
    return types.FunctionType(function.__code__, function.__globals__)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LoaderSpec(NUMBERS), r"dataset: a torch\.utils\.data\.dataset\.TensorDataset object cannot be writ"),
        (LoaderSpec(factories.linear_data), r"dataset: .* Give its import path, 'tests\.factories:linear_d"),
        (LoaderSpec(a_copy_of(factories.linear_data), dataset_args=(8, 4, None)),
         r"dataset: .* Give the import path of a function"),
        (LoaderSpec(f"{HERE}:make_numbers", dataset_args=[3], collate_fn=lambda items: items),
         r"collate_fn: a function object cannot be written.*Give the import path of a function"),
        (LoaderSpec(f"{HERE}:make_numbers", dataset_args=[3], sampler=RandomSampler(NUMBERS)),
         r"sampler: a .*RandomSampler cannot be written"),
    ],
)  # fmt: skip
def test_a_live_object_cannot_be_written_and_is_named(spec, message):
    with pytest.raises(InvalidArgumentError, match=message):
        spec.to_dict()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dataset": f"{HERE}:make_numbers", "batchsize": 3}, r"batchsize: .*Did you mean 'batch_size'\?"),
        ({"dataset": f"{HERE}:make_numbers", "xyz": 3}, r"xyz: LoaderSpec has no such field\.$"),
        ({"batch_size": 3}, r"dataset: is missing"),
        ([1], r"expected a mapping"),
        ({"dataset": f"{HERE}:make_numbers"}, r"missing a required argument: 'n'"),
    ],
)
def test_from_dict_refuses_what_is_no_spec(values, message):
    with pytest.raises(InvalidArgumentError, match=message):
        LoaderSpec.from_dict(values)


def test_another_start_method_than_the_default_is_written():
    methods = multiprocessing.get_all_start_methods()
    written = [
        LoaderSpec(NUMBERS, num_workers=1, multiprocessing_context=method).multiprocessing_context
        for method in methods
    ]
    assert written == methods
    kept = [
        LoaderSpec.from_dict(
            {"dataset": f"{HERE}:make_numbers", "dataset_args": [3], "num_workers": 1,
             "multiprocessing_context": method}
        ).to_dict().get("multiprocessing_context")
        for method in methods
    ]  # fmt: skip
    assert kept.count(None) == 1  # the default
