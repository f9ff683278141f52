"""What travels comes back the same; what cannot travel is named by its path."""

import copyreg
import dataclasses
import enum
import functools
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
import types
from collections import namedtuple

import cloudpickle
import numpy as np
import pytest
import safetensors.torch
import torch

from devsample.errors import LoaderError, NotPicklableError
from devsample.serialize import (
    dumps,
    find_culprit,
    identify_classes,
    load_storages,
    loads,
    pack,
    pack_unproven,
    save_storages,
    unpack,
)


class Box:
    """An object with whatever attributes it is given."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slots:
    __slots__ = ("first", "second")

    def __init__(self, first, second):
        self.first, self.second = first, second


class Unloadable:
    def __reduce__(self):
        return _raise_on_load, ("no such shelf",)


def _raise_on_load(text):
    raise FileNotFoundError(text)


def there_and_back(obj, **options):
    packed = pack(obj, "thing", **options)
    return unpack(packed.data, packed.storages)


def refusal(obj, **options) -> str:
    with pytest.raises(NotPicklableError) as caught:
        pack(obj, "thing", **options)
    assert isinstance(caught.value, TypeError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


# ---- what travels -------------------------------------------------------------------------------


def test_functions_closures_and_local_classes_travel():
    factor = 3

    class Local:
        def __call__(self, x):
            return factor * x

    inner = lambda x: Local()(x) + 1  # noqa: E731
    assert there_and_back(inner)(2) == 7
    assert there_and_back(functools.partial(inner, 5))() == 16
    assert there_and_back([Local()])[0](4) == 12


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        base = torch.arange(12.0)
        self.register_buffer("table", base.view(3, 4).t(), persistent=False)
        self.row = base[4:8]  # a plain attribute, a view of the buffer
        self.head.bias.requires_grad_(False)


@pytest.mark.parametrize("from_file", [False, True])
def test_ties_views_and_plain_tensors_survive(from_file, tmp_path):
    model = Tied()
    packed = pack(model, "model", every_tensor=True)
    storages = packed.storages
    if from_file:
        save_storages(storages, tmp_path / "weights.safetensors")
        storages = load_storages(tmp_path / "weights.safetensors")
    back = unpack(packed.data, storages)
    assert back.head.weight is back.embedding.weight
    assert isinstance(back.head.weight, torch.nn.Parameter)
    assert torch.equal(back.head.weight, model.head.weight)
    assert back.head.weight.requires_grad
    assert not back.head.bias.requires_grad
    assert torch.equal(back.table, model.table)
    assert back.table.stride() == (1, 4)
    assert "table" not in back.state_dict()
    assert back.row.untyped_storage()._cdata == back.table.untyped_storage()._cdata
    back.table[0, 1] = 50.0
    assert back.row[0] == 50.0
    tokens = torch.tensor([0, 3])
    assert torch.equal(back.head(back.embedding(tokens)), model.head(model.embedding(tokens)))
    assert len(packed.storages) == 3  # tied weight, bias, table


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64],
)  # fmt: skip
def test_every_dtype_goes_through_a_file(dtype, tmp_path):
    value = torch.arange(-3, 5).reshape(2, 4).to(dtype)
    packed = pack([value, value[:, 1::2], torch.tensor(7).to(dtype)], "thing", every_tensor=True)
    save_storages(packed.storages, tmp_path / "file")
    whole, part, scalar = unpack(packed.data, load_storages(tmp_path / "file"))
    assert whole.dtype == dtype
    assert torch.equal(whole, value)
    assert torch.equal(part, value[:, 1::2])
    assert part.stride() == (4, 2)
    assert scalar.shape == ()
    assert scalar == torch.tensor(7).to(dtype)


def test_empty_conjugated_and_expanded_tensors():
    z = torch.tensor([1 + 2j, 3 - 1j])
    empty, conjugate, expanded = there_and_back(
        [torch.empty(0, 3), z.conj(), torch.ones(1, 3).expand(4, 3)], every_tensor=True
    )
    assert empty.shape == (0, 3)
    assert torch.equal(conjugate, z.conj())
    assert torch.equal(expanded, torch.ones(4, 3))
    assert expanded.stride() == (0, 1)


def test_a_file_of_storages_keeps_their_number_order_and_sizes(tmp_path):
    storages = [torch.arange(n, dtype=torch.uint8).untyped_storage() for n in (3, 0, 11, 1000)]
    save_storages(storages, tmp_path / "file")
    back = load_storages(tmp_path / "file")
    assert [one.tolist() for one in back] == [one.tolist() for one in storages]
    assert [one.name for one in tmp_path.iterdir()] == ["file"]  # no temporary file is left


def test_writes_to_loaded_storages_stay_private(tmp_path):
    storage = torch.zeros(1000).untyped_storage()
    save_storages([storage], tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    first, second = load_storages(tmp_path / "file"), load_storages(tmp_path / "file")
    torch.empty(0).set_(first[0]).fill_(3.0)
    assert torch.empty(0).set_(second[0]).sum() == 0
    assert (tmp_path / "file").read_bytes() == before


def test_one_large_tensor_is_one_storage_however_often_it_appears():
    data = torch.zeros(100_000)
    packed = pack({"a": data, "b": data[10:], "c": Box(data=data.view(100, 1000))}, "thing")
    assert len(packed.storages) == 1
    assert len(packed.data) < 5000
    assert packed.storages[0].data_ptr() == data.untyped_storage().data_ptr()


def test_the_same_tensor_twice_is_the_same_tensor_after():
    for size in (3, 100_000):
        data = torch.zeros(size)
        first, second = there_and_back([data, data])
        assert first is second


def test_attributes_of_tensors_and_parameters_travel():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.lr_scale = 0.1
    data = torch.zeros(100_000)
    data.label = "pixels"
    back = there_and_back([weight, data])
    assert back[0].lr_scale == 0.1
    assert back[1].label == "pixels"


def test_a_leaf_that_requires_grad_stays_one():
    back = there_and_back([torch.zeros(3, requires_grad=True)], every_tensor=True)[0]
    assert back.requires_grad
    assert back.is_leaf
    assert type(back) is torch.Tensor


def test_the_gradient_of_a_parameter_does_not_travel():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.sum().backward()
    assert there_and_back(weight).grad is None
    assert weight.grad is not None


def test_sparse_tensors_and_subclasses_pickle_themselves():
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(there_and_back([sparse], every_tensor=True)[0].to_dense(), torch.eye(3))
    buffer = torch.nn.Buffer(torch.ones(2))
    assert torch.equal(there_and_back([buffer], every_tensor=True)[0], buffer)


def test_tensors_move_from_one_device_to_another():
    """Only what was on the first device moves, and a storage that is shared moves once."""
    base = torch.ones(6)
    packed = pack([base, base[2:], torch.nn.Parameter(torch.ones(2))], "thing", every_tensor=True)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    stayed = unpack(packed.data, packed.storages, move=(torch.device("cuda:0"), meta))
    assert [one.device for one in stayed] == [cpu, cpu, cpu]
    moved = unpack(packed.data, packed.storages, move=(cpu, cpu))
    assert moved[0].untyped_storage()._cdata == moved[1].untyped_storage()._cdata
    assert torch.equal(moved[2], torch.ones(2))


def test_generators_arrays_and_recursion_travel():
    generator = torch.Generator().manual_seed(5)
    box = Box(generator=generator, array=np.arange(3))
    box.me = box
    back = there_and_back(box)
    assert back.me is back
    assert torch.equal(torch.rand(3, generator=back.generator), torch.rand(3, generator=generator))


# ---- arrays -------------------------------------------------------------------------------------


def through_a_file(obj, folder, **options):
    """The object as another process gets it: its storages mapped from a file."""
    packed = pack(obj, "thing", **options)
    save_storages(packed.storages, folder / "storages")
    return unpack(packed.data, load_storages(folder / "storages")), packed


ARRAYS = {
    "rows": np.arange(90_000.0).reshape(300, 300),
    "columns": np.asfortranarray(np.arange(90_000.0).reshape(300, 300)),
    "transposed": np.arange(90_000.0).reshape(300, 300).T,
    "every other": np.arange(90_000.0).reshape(300, 300)[:, ::2],
    "backwards": np.arange(90_000.0)[::-1],
    "repeated": np.broadcast_to(np.arange(300.0), (300, 300)),
    "days": np.arange("2000-01", "2300-01", dtype="M8[D]"),
    "fields": np.zeros(9000, dtype=[("a", "i4"), ("b", "f8")]),
    "texts": np.array(["one", "three"] * 9000),
    "halves": np.arange(40_000, dtype=np.float16),
    "truths": np.arange(90_000) % 3 == 0,
    "big-endian": np.arange(9_000, dtype=">f8"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_large_arrays_travel_out_of_band(kind, tmp_path):
    array = ARRAYS[kind]
    back, packed = through_a_file({"array": array}, tmp_path)
    assert len(packed.data) < 2000
    assert packed.storages[0].nbytes() == array.nbytes
    np.testing.assert_array_equal(back["array"], array)
    assert back["array"].dtype == array.dtype
    assert back["array"].flags.aligned
    assert back["array"].flags.writeable == array.flags.writeable


def test_an_array_that_is_contiguous_is_not_copied():
    array = np.arange(90_000.0)
    packed = pack([array, {"again": array}], "thing")
    assert [one.data_ptr() for one in packed.storages] == [array.ctypes.data]
    first, second = unpack(packed.data, packed.storages)
    assert first is second["again"]


def test_an_array_and_a_tensor_over_its_memory_stay_tied(tmp_path):
    array = np.arange(90_000.0)
    (back, tensor), packed = through_a_file((array, torch.from_numpy(array)), tmp_path)
    assert len(packed.storages) == 1
    back[5] = -1.0
    assert tensor[5] == -1.0


def test_writes_to_arrays_stay_private(tmp_path):
    array = np.arange(90_000.0)
    packed = pack(array, "thing")
    save_storages(packed.storages, tmp_path / "file")
    first, second = (unpack(packed.data, load_storages(tmp_path / "file")) for _ in range(2))
    first += 1
    np.testing.assert_array_equal(second, array)
    assert array[0] == 0


def test_a_read_only_array_stays_read_only():
    array = np.frombuffer(bytes(100_000), np.uint8)
    assert not array.flags.writeable
    assert not there_and_back(array).flags.writeable
    packed = pack(array, "thing")
    assert len(packed.storages) == 1


def test_small_arrays_objects_and_other_kinds_of_arrays_stay_in_the_bytes():
    objects = np.array([{"a": 1}, None, "x"] * 10_000, dtype=object)
    masked = np.ma.masked_array(np.arange(20_000.0), np.arange(20_000) % 2 == 0)
    records = np.zeros(20_000, dtype=[("a", "i4")]).view(np.recarray)
    obj = [np.arange(3), objects, masked, records]
    packed = pack(obj, "thing")
    assert packed.storages == ()
    small, texts, others, back = unpack(packed.data, ())
    assert small.tolist() == [0, 1, 2]
    assert texts.tolist() == objects.tolist()
    assert others.sum() == masked.sum()
    assert type(back) is np.recarray


def test_whatever_gives_a_buffer_travels_out_of_band(tmp_path):
    packed_frame = [Buffered(bytearray(range(256)) * 1000), Buffered(bytearray(b"small"))]
    back, packed = through_a_file(packed_frame, tmp_path)
    assert [one.nbytes() for one in packed.storages] == [256_000]
    assert [bytes(one.content) for one in back] == [bytes(one.content) for one in packed_frame]


class Buffered:
    """Hands its content to the pickler as a buffer, as tables of several packages do."""

    def __init__(self, content):
        self.content = content

    def __reduce__(self):
        return Buffered, (pickle.PickleBuffer(self.content),)


def test_storages_in_a_file_are_aligned_and_any_reader_understands_it(tmp_path):
    storages = [torch.arange(n, dtype=torch.uint8).untyped_storage() for n in (3, 0, 130, 64)]
    save_storages(storages, tmp_path / "file")
    assert [one.data_ptr() % 64 for one in load_storages(tmp_path / "file") if one.nbytes()] == [0, 0, 0]
    read = safetensors.torch.load_file(tmp_path / "file")
    assert [read[str(index)].tolist() for index in range(4)] == [one.tolist() for one in storages]


def test_packing_leaves_no_mark_on_the_callers_tensors(tmp_path):
    data = torch.zeros(100_000)
    through_a_file([data, data[5:]], tmp_path)
    assert data.untyped_storage().resizable()
    assert not data.is_shared()


def test_the_size_of_what_was_packed():
    packed = pack([torch.zeros(100_000), bytes(1000)], "thing")
    assert 401_000 < packed.nbytes < 403_000


# ---- files that are mapped ----------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    """A file of 100 000 numbers after 800 bytes of something else."""
    path = tmp_path / "table.bin"
    path.write_bytes(bytes(800) + np.arange(100_000.0).tobytes())
    return path


def open_table(path, mode):
    return np.memmap(path, np.float64, mode, offset=800, shape=(1000, 100))


VIEWS = {
    "all": lambda mapped: mapped,
    "rows": lambda mapped: mapped[500:],
    "few": lambda mapped: mapped[3, 5:9],
    "columns": lambda mapped: mapped[::2, 7:70:3],
    "backwards": lambda mapped: mapped[::-1, ::-1],
    "plain": lambda mapped: np.asarray(mapped)[500:],
    "transposed": lambda mapped: mapped[500:].T,
    "raw": lambda mapped: mapped.view(np.uint8)[3:],
    "repeated": lambda mapped: np.broadcast_to(mapped[5], (50, 100)),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_memory_maps_travel_by_path(mode, view, table):
    mapped = open_table(table, mode)
    before = table.read_bytes()
    part = VIEWS[view](mapped)
    packed = pack([part], "thing")
    assert packed.storages == ()
    assert packed.nbytes < 2000
    (back,) = unpack(packed.data, ())
    assert type(back) is type(part)
    assert back.dtype == part.dtype
    np.testing.assert_array_equal(back, part)
    assert back.flags.writeable == part.flags.writeable
    if back.flags.writeable:
        back[...] = 7
        assert VIEWS[view](mapped).sum() != back.sum()  # stays in this copy
    assert table.read_bytes() == before


def test_a_new_memory_map_travels_by_path(tmp_path):
    mapped = np.memmap(tmp_path / "new", np.float32, "w+", shape=(50_000,))
    mapped[:] = np.arange(50_000)
    packed = pack(mapped, "thing")
    assert packed.nbytes < 2000
    back = unpack(packed.data, ())
    np.testing.assert_array_equal(back, mapped)
    assert (back.filename, back.mode) == (str(tmp_path / "new"), "c")


def test_a_private_map_that_was_written_travels_by_value(table):
    mapped = open_table(table, "c")
    mapped[400, 5] = -1
    back = there_and_back(mapped)
    np.testing.assert_array_equal(back, mapped)
    assert back[400, 5] == -1
    small = there_and_back(mapped[400, 4:7])
    assert small.tolist() == [40004.0, -1.0, 40006.0]


def test_a_deleted_file_and_one_that_was_replaced_travel_by_value(table, tmp_path):
    mapped = open_table(table, "r")
    expected = np.array(mapped)
    table.unlink()
    np.testing.assert_array_equal(there_and_back(mapped), expected)
    table.write_bytes(bytes(800_800))  # another file of that name
    np.testing.assert_array_equal(there_and_back(mapped), expected)


def test_a_file_that_is_gone_on_the_other_side_is_named(table):
    packed = pack(Box(rows=open_table(table, "r")), "thing")
    table.unlink()
    with pytest.raises(LoaderError) as caught:
        unpack(packed.data, ())
    assert str(table) in str(caught.value)
    assert "keep the file" in str(caught.value)
    table.write_bytes(bytes(1000))
    with pytest.raises(LoaderError, match="shorter than it was"):
        unpack(packed.data, ())


@pytest.mark.parametrize("part", [slice(None), slice(500, None)])
def test_tensors_over_files_travel_by_path(part, table):
    whole = torch.from_file(str(table), shared=True, size=100_100, dtype=torch.float64)
    mapped = open_table(table, "r+")
    other = torch.from_numpy(np.asarray(mapped))
    before = table.read_bytes()
    packed = pack([whole[part], other[part]], "thing")
    assert packed.nbytes < 3000
    back, other_back = unpack(packed.data, ())
    assert torch.equal(back, whole[part])
    assert torch.equal(other_back, other[part])
    back[3] = 9.0
    assert table.read_bytes() == before


def test_views_of_a_tensor_over_a_file_stay_tied(table):
    whole = torch.from_file(str(table), shared=True, size=100_100, dtype=torch.float64)
    first, second, again = there_and_back([whole, whole[100:], whole])
    assert again is first
    first[100] = -5.0
    assert second[0] == -5.0


def test_nothing_of_a_model_travels_by_path(table):
    whole = torch.from_file(str(table), shared=True, size=100_100, dtype=torch.float64)
    packed = pack([whole, open_table(table, "r")], "model", every_tensor=True)
    assert [one.nbytes() for one in packed.storages] == [800_800, 800_000]
    table.unlink()
    back, array = unpack(packed.data, packed.storages)
    assert torch.equal(back, whole)
    assert array.shape == (1000, 100)


def test_tensors_in_the_shared_memory_of_torch_travel_by_value():
    shared = torch.arange(100_000.0).share_memory_()
    packed = pack(shared, "thing")
    assert len(packed.storages) == 1
    assert torch.equal(unpack(packed.data, packed.storages), shared)


# ---- modules that other processes do not find ---------------------------------------------------

SOURCE = """
import collections, dataclasses, enum
FACTOR = 3
def helper(x): return FACTOR * x
def function(x): return helper(x) + 1
class Base:
    def value(self): return helper(self.x)
class Thing(Base):
    def __init__(self, x): self.x = x
Pair = collections.namedtuple("Pair", "x y")
@dataclasses.dataclass
class Item:
    x: int
class Colour(enum.Enum):
    RED = 1
"""


@pytest.fixture(params=["made in memory", "loaded under another name", "part of a package in memory"])
def module(request, tmp_path, monkeypatch):
    """A module that is in this process's ``sys.modules`` only."""
    if request.param == "made in memory":
        made = types.ModuleType("made_in_memory")
        exec(SOURCE, made.__dict__)
    else:
        (tmp_path / "something.py").write_text(SOURCE)
        name = "plugins.first" if "package" in request.param else "loaded_by_path"
        spec = importlib.util.spec_from_file_location(name, tmp_path / "something.py")
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, made)
        spec.loader.exec_module(made)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def elsewhere(data, monkeypatch, module):
    """What the bytes give where the module is not."""
    monkeypatch.delitem(sys.modules, module.__name__)
    try:
        return pickle.loads(data)
    finally:
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_what_comes_from_a_module_in_memory_travels_by_value(module, monkeypatch):
    obj = [module.function, module.Thing(2), module.Pair(1, 2), module.Item(4), module.Colour.RED, module]
    function, thing, pair, item, red, whole = elsewhere(dumps(obj), monkeypatch, module)
    assert function(2) == 7
    assert thing.value() == 6
    assert (pair.y, item.x, red.name, whole.FACTOR) == (2, 4, "RED", 3)
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_pack_does_so_too(module, monkeypatch):
    packed = pack(Box(f=module.function), "thing")
    monkeypatch.delitem(sys.modules, module.__name__)
    assert unpack(packed.data, packed.storages).f(1) == 4


def test_a_lock_in_a_module_in_memory_is_named(module):
    module.LOCK = threading.Lock()
    exec("def locked(): return LOCK", module.__dict__)
    assert refusal(Box(f=module.locked)).startswith("thing.f.<global LOCK> is a _thread.lock")
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_modules_that_are_found_travel_by_name(tmp_path, monkeypatch):
    (tmp_path / "next_to_the_notebook.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import next_to_the_notebook as found

    try:
        assert there_and_back(found.Thing) is found.Thing
        assert len(dumps(found.function)) < 100
        assert there_and_back(np.linalg.norm) is np.linalg.norm
        assert there_and_back(Box) is Box
    finally:
        del sys.modules["next_to_the_notebook"]


def test_what_the_user_registered_stays_registered(module):
    cloudpickle.register_pickle_by_value(module)
    try:
        dumps(module.function)
        assert cloudpickle.list_registry_pickle_by_value() == {module.__name__}
    finally:
        cloudpickle.unregister_pickle_by_value(module)


# ---- classes that the reader has ----------------------------------------------------------------


def test_the_proof_leaves_the_callers_classes_as_they_are():
    made = []
    factor = 3

    class Registered:
        def __init_subclass__(cls):
            made.append(cls.__name__)

    class Local(Registered):
        calls = 0

        def __call__(self, x):
            return factor * x

    class Colour(enum.Enum):
        RED = 1

    copyreg._slotnames(Local)  # noted in a class when it is first pickled
    before = dict(vars(Local)), vars(Local)["__call__"].__closure__
    back = there_and_back([Local(), Colour.RED, Box(kind=Local)])
    assert type(back[0]) is Local
    assert back[1] is Colour.RED
    assert back[2].kind is Local
    assert (dict(vars(Local)), vars(Local)["__call__"].__closure__) == before
    assert made == ["Local"]
    assert loads(dumps(Local())) is not None
    assert dict(vars(Local)) == before[0]


def test_a_reader_that_has_the_class_uses_its_own():
    Pair = namedtuple("Pair", "x y")

    @dataclasses.dataclass
    class Item:
        x: int
        made = 0

    cloudpickle.dumps(Item)  # this process has sent it before
    packed = pack_unproven([Pair(1, 2), Item(3), Item], known_classes=True)
    Item.made = 5
    pair, item, kind = unpack(packed.data, packed.storages)
    assert type(pair) is Pair
    assert type(item) is kind is Item
    assert Item.made == 5  # the class itself is left alone


def test_a_reader_without_the_class_gets_it():
    Pair = namedtuple("Pair", "x y")
    packed = pack_unproven([Pair(1, 2), Pair(3, 4)], known_classes=True)
    script = (
        "import sys, pickle; from devsample.serialize import unpack\n"
        "first, second = unpack(sys.stdin.buffer.read(), [])\n"
        "assert type(first) is type(second)\n"
        "print(first, second.y)"
    )
    ran = subprocess.run([sys.executable, "-c", script], input=packed.data, capture_output=True, check=True)
    assert ran.stdout.decode().strip() == "Pair(x=1, y=2) 4"


def test_forked_processes_know_the_classes_of_this_one():
    class Unsent:
        pass

    identify_classes()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, pack_unproven(Unsent(), known_classes=True).data)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    assert type(unpack(data, [])) is Unsent


# ---- what cannot travel -------------------------------------------------------------------------


def test_a_lock_is_named_by_its_attribute_path():
    message = refusal(Box(collate=Box(tokenizer=Box(_lock=threading.Lock()))), remedy="Drop it.")
    assert message.startswith("thing.collate.tokenizer._lock is a _thread.lock and cannot be sent")
    assert message.endswith("\n  Drop it.")


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda lock: {"a": [1, {"b": lock}]}, "thing['a'][1]['b']"),
        (lambda lock: (1, (2, lock)), "thing[1][1]"),
        (lambda lock: [0, Box(x=[lock])], "thing[1].x[0]"),
        (lambda lock: Slots(1, Slots(lock, 2)), "thing.second.first"),
        (lambda lock: functools.partial(len, lock), "thing.args[0]"),
        (lambda lock: functools.partial(len, key=Box(a=lock)), "thing.keywords['key'].a"),
        (lambda lock: functools.partial(lambda: lock), "thing.func.<closure lock>"),
        (lambda lock: lambda: lock, "thing.<closure lock>"),
        (lambda lock: Box(f=lambda x, y=lock: x), "thing.f.<default 0>"),
        (lambda lock: types.MethodType(len, Box(a=lock)), "thing.len.__self__.a"),
    ],
)
def test_paths(make, path):
    assert refusal(make(threading.Lock())).startswith(f"{path} is a _thread.lock and cannot be sent")


def test_a_default_of_a_keyword_only_argument_is_named():
    lock = threading.Lock()

    def function(*, key=lock):
        return key

    assert refusal(Box(f=function)).startswith("thing.f.<default key> is a _thread.lock")


def test_a_global_of_a_function_that_travels_by_value_is_named():
    namespace = {"SHARED": threading.Lock(), "__name__": "__main__"}
    exec("def function():\n    return [SHARED for _ in range(2)]", namespace)
    message = refusal(Box(f=namespace["function"]))
    assert message.startswith("thing.f.<global SHARED> is a _thread.lock")


def test_an_attribute_of_a_local_class_is_named():
    class Local:
        lock = threading.Lock()

    assert refusal(Box(kind=Local)).startswith("thing.kind.lock is a _thread.lock")
    assert ".lock is a _thread.lock" in refusal(Box(one=Local()))


def test_the_state_of_getstate_counts_not_the_attributes():
    class Careful(Box):
        def __getstate__(self):
            return {name: value for name, value in self.__dict__.items() if name != "lock"}

    assert there_and_back(Careful(lock=threading.Lock(), x=1)).x == 1
    assert refusal(Careful(lock=threading.Lock(), other=threading.Lock())).startswith("thing.other is")


def test_the_modules_of_a_model_are_named():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model[1].lock = threading.Lock()
    message = refusal(Box(model=model), every_tensor=True)
    assert message.startswith("thing.model.")
    assert message.startswith("thing.model.1.lock is a _thread.lock")


def test_what_pickles_but_does_not_load_is_named():
    message = refusal(Box(data=[1, Box(index=Unloadable())]))
    assert message.startswith("thing.data[1].index is a tests.unit.test_serialize.Unloadable")
    assert "pickles but does not load again (FileNotFoundError: no such shelf)" in message


def test_a_generator_and_an_open_file_are_named(tmp_path):
    assert refusal({"it": (i for i in range(3))}).startswith("thing['it'] is a generator")
    with (tmp_path / "x").open("wb") as file:
        assert refusal(Box(log=file)).startswith("thing.log is a _io.BufferedWriter")


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda: torch.ones(2, requires_grad=True) * 2, "is a non-leaf tensor that requires grad"),
        (lambda: torch.nn.Linear(2, 2, device="meta").weight, "is on the meta device"),
        (lambda: torch.empty(2, device="meta"), "is on the meta device"),
        (lambda: torch.nn.LazyLinear(2).weight, "is a lazy parameter without values"),
        (lambda: torch.nn.LazyBatchNorm1d().running_mean, "is a lazy parameter without values"),
    ],
)
@pytest.mark.parametrize("every", [False, True])
def test_tensors_without_values_or_with_a_graph_are_refused_by_path(tensor, reason, every):
    message = refusal(Box(data=[0, {"w": tensor()}]), every_tensor=every)
    assert message.startswith(f"thing.data[1]['w'] {reason}")


def test_gradient_hooks_are_refused():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.register_hook(lambda gradient: gradient * 2)
    assert refusal([weight]).startswith("thing[0] has a gradient hook")
    weight = torch.nn.Parameter(torch.ones(2))
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert refusal([weight]).startswith("thing[0] has a gradient hook")


def test_a_lazy_module_is_refused_by_the_name_of_its_parameter():
    message = refusal(torch.nn.Sequential(torch.nn.LazyLinear(2)), every_tensor=True)
    assert "weight" in message
    assert "run one forward pass first" in message


def test_the_cause_is_chained():
    with pytest.raises(NotPicklableError) as caught:
        pack(Box(lock=threading.Lock()), "thing")
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_deep_structure_is_searched_to_its_end():
    obj = threading.Lock()
    for _ in range(40):
        obj = Box(inner=obj)
    assert refusal(obj).startswith("thing" + ".inner" * 40 + " is a _thread.lock")


def test_a_wide_structure_is_searched_once():
    """One attempt per part on the way down, not one per pair of parts."""
    attempts = []

    def attempt(part):
        attempts.append(part)
        pickle.dumps(part)

    parts = [{"k": index} for index in range(200)]
    parts.append(threading.Lock())
    culprit, path, _ = find_culprit(parts, "thing", TypeError(), attempt)
    assert culprit is parts[-1]
    assert path == "thing[200]"
    assert len(attempts) == 201


@pytest.mark.filterwarnings("ignore")  # of torch, about quantised tensors as such
def test_quantised_tensors_keep_their_quantiser():
    for size in (10, 200_000):
        tensor = torch.quantize_per_tensor(torch.linspace(-1, 1, size), 0.1, 3, torch.quint8)
        packed = pack([tensor], "x")
        (back,) = unpack(packed.data, packed.storages)
        assert torch.equal(back.dequantize(), tensor.dequantize())


def test_a_cached_function_of_a_script_travels_with_its_code():
    source = (
        "import functools, pickle, sys\n"
        "@functools.lru_cache(maxsize=3)\n"
        "def double(x): return 2 * x\n"
        "def use(x): return double(x) + 1\n"
        "from devsample.serialize import pack\n"
        "sys.stdout.buffer.write(pickle.dumps([pack(one, 'x').data for one in (double, use)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, check=True)
    double, use = (unpack(data, ()) for data in pickle.loads(done.stdout))
    assert (double(4), use(4)) == (8, 9)
    assert double.cache_parameters() == {"maxsize": 3, "typed": False}


def test_a_memory_map_whose_file_was_replaced_is_refused(tmp_path):
    path = tmp_path / "rows.bin"
    np.arange(100_000.0).tofile(path)
    rows = np.memmap(path, np.float64, "r")
    packed = pack(rows, "x")
    path.rename(tmp_path / "old.bin")
    np.zeros(100_000).tofile(path)
    with pytest.raises(LoaderError, match="is not the file that it was"):
        unpack(packed.data, packed.storages)


class WritesWhenLoaded:
    def __init__(self):
        self.rows = torch.ones(100_000)

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.rows.div_(2)


def test_the_proof_does_not_touch_the_callers_data():
    made = WritesWhenLoaded()
    packed = pack(made, "x")
    assert made.rows.unique().tolist() == [1.0]
    assert unpack(packed.data, [one.clone() for one in packed.storages]).rows.unique().tolist() == [0.5]
