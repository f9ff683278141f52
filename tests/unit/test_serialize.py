"""What travels comes back the same; what cannot travel is named by its path."""

import functools
import pickle
import threading
import types

import numpy as np
import pytest
import torch

from devsample.errors import NotPicklableError
from devsample.serialize import find_culprit, load_storages, pack, save_storages, unpack


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
