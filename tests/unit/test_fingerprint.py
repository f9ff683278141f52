"""spec.fingerprint(): the same in every process, another one for everything that changes the numbers."""

import collections
import dataclasses
import enum
import functools
import logging
import os
import random
import subprocess
import sys
import threading
import types
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from devsample import LoaderSpec
from devsample.data.fingerprint import content_hash
from devsample.errors import LoaderError

ROOT = Path(__file__).parents[2]
NUMBERS = TensorDataset(torch.arange(10))
FACTOR = 2


def make_numbers(n=10, *, offset=0):
    return TensorDataset(torch.arange(offset, offset + n))


def collate(items):
    return default_collate(items)


def collate_by_factor(items):
    return default_collate(items) * FACTOR


def collate_by_factor_inside(items):
    return [(lambda one: one * FACTOR)(one) for one in items]


# ---- over processes -----------------------------------------------------------------------------

SOURCE = '''
import collections, dataclasses, enum, functools, logging, random, threading
import numpy as np, torch
from torch.utils.data import Dataset, WeightedRandomSampler
from devsample import LoaderSpec

log = logging.getLogger(__name__)
NAMES = {"a", "b", "c", ("d", 1), frozenset("xyz")}
SIZES = {"z": 1, "a": 2, ("t", 3): [4.0, 5j, None, ...]}
Pair = collections.namedtuple("Pair", "left right")

class Kind(enum.Enum):
    TRAIN = "train"
    TEST = "test"

@dataclasses.dataclass
class Settings:
    kind: Kind
    sizes: dict = dataclasses.field(default_factory=lambda: dict(SIZES))
    rng: object = None

def scaled(function):
    @functools.wraps(function)
    def wrapper(self, index):
        return function(self, index) * len(NAMES)
    return wrapper

class Node:
    """One of several that know each other, in a set whose order is another one in every process."""

    def __init__(self, name):
        self.name, self.others = name, []

    def __hash__(self):
        return hash(self.name)

def nodes():
    made = [Node(name) for name in "abcdef"]
    for number, node in enumerate(made):
        node.others = [made[number - 1], made[number - 2], {made[0], made[3]}]
    return set(made), {node: node.name for node in made}

class Base(Dataset):
    def __len__(self):
        return 8

    def other(self):
        return Items, make, __name__

class Items(Base):
    __slots__ = ("lock", "slot")
    names = NAMES

    def __init__(self, settings):
        super().__init__()
        self.settings, self.lock, self.slot = settings, threading.Lock(), 3
        self.me, self.friends = self, [self]
        self.data = torch.arange(8.0).view(2, 4).t()
        self.array = np.arange(6, dtype=">i2")[::2]
        self.pair = Pair(1, Kind.TEST)
        self.nodes = nodes()
        self.find = functools.partial(np.searchsorted, [1, 2, 3])
        self.drawn = np.random.default_rng(3), random.Random(4), torch.Generator().manual_seed(5)

    @functools.cached_property
    def total(self):
        return self.data.sum()

    @scaled
    def __getitem__(self, index):
        log.debug("item")
        return self.data.flatten()[index] if index in {1, 2, 3, "x"} else torch.tensor(0.0)

def make(kind, *rest, **more):
    """The data set."""
    return Items(Settings(Kind(kind)))

def spec(dataset=None):
    return LoaderSpec(
        dataset if dataset is not None else make,
        dataset_args=() if dataset is not None else ("train",),
        dataset_kwargs={} if dataset is not None else {"b": {"x", "y"}, "a": 1},
        batch_size=2,
        sampler=WeightedRandomSampler([0.5] * 8, 8),
        collate_fn=lambda items: [torch.stack(items), sorted(NAMES, key=str)],
    )

def show():
    print(spec().fingerprint(), spec(make("test")).fingerprint())
'''


def run(arguments, cwd, hash_seed):
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_it_is_the_same_in_every_process_however_the_code_came_there(tmp_path):
    (tmp_path / "items.py").write_text(SOURCE)
    (tmp_path / "script.py").write_text(SOURCE + "\nshow()\n")
    runs = {
        "command": run(["-c", SOURCE + "\nshow()\n"], tmp_path, "1"),
        "script": run(["script.py"], tmp_path, "2"),
        "module": run(["-c", "import items; items.show()"], tmp_path, "3"),
        "again": run(["-c", "import items; items.show()"], tmp_path, "4"),
    }
    first = runs["command"]
    assert [len(one) for one in first] == [64, 64]
    assert first[0] != first[1]
    assert set(map(tuple, runs.values())) == {tuple(first)}


TRAVELLER = """
import collections, enum, sys
import cloudpickle
from torch.utils.data import Dataset
from devsample import LoaderSpec

FACTOR = 2

class Kind(enum.Enum):
    A = 1

class Items(Dataset):
    def __init__(self):
        self.pair = collections.OrderedDict(a=1), Kind.A, self

    def __len__(self):
        return FACTOR

    def __getitem__(self, index):
        return self, Items, super()

specs = [LoaderSpec(Items), LoaderSpec(Items(), collate_fn=lambda items: items * FACTOR)]
with open("specs", "wb") as file:
    cloudpickle.dump(specs, file)
print(*[spec.fingerprint() for spec in specs])
"""


def test_a_spec_that_travelled_by_value_is_the_same(tmp_path):
    expected = run(["-c", TRAVELLER], tmp_path, "1")
    specs = cloudpickle.loads((tmp_path / "specs").read_bytes())
    assert [spec.fingerprint() for spec in specs] == expected
    assert expected[0] != expected[1]


# ---- what changes it ----------------------------------------------------------------------------


def data_set_class(body):
    """A class whose items are what ``body`` says."""
    source = f"class Made(Dataset):\n    def __len__(self):\n        return 4\n{body}"
    names = {"Dataset": Dataset, "torch": torch, "FACTOR": FACTOR, "__name__": "made_here"}
    exec(source, names)
    return names["Made"]


def with_global(collate, value):
    made = types.FunctionType(collate.__code__, globals() | {"FACTOR": value})
    return LoaderSpec(NUMBERS, collate_fn=made)


def with_attribute(value):
    def made():
        return [1]

    made.value = value
    return made


def closure(value):
    def made(items):
        return default_collate(items) + value

    return made


class Attributes(Dataset):
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


class Base(Attributes):
    def __getitem__(self, index):
        return index + 1


class OtherBase(Attributes):
    def __getitem__(self, index):
        return index + 2


OtherBase.__qualname__ = OtherBase.__name__ = "Base"


class Kind(enum.Enum):
    A = 1
    B = 2


@dataclasses.dataclass
class Config:
    size: int
    kind: Kind = Kind.A


def own(**attributes):
    return LoaderSpec(Attributes(**attributes))


DIFFERENT = {
    "data": (NUMBERS, TensorDataset(torch.arange(10) + 1)),
    "dtype": (NUMBERS, TensorDataset(torch.arange(10, dtype=torch.int32))),
    "dtype of zeros": (Attributes(x=torch.zeros(3)), Attributes(x=torch.zeros(3, dtype=torch.int32))),
    "dtype of an array": (Attributes(x=np.zeros(3, ">i4")), Attributes(x=np.zeros(3, "<i4"))),
    "shape": (NUMBERS, TensorDataset(torch.arange(10).view(10, 1))),
    "one more": (NUMBERS, TensorDataset(torch.arange(10), torch.arange(10))),
    "class": (NUMBERS, Subset(NUMBERS, range(10))),
    "indices": (Subset(NUMBERS, range(9)), Subset(NUMBERS, range(8))),
    "arrays": (Attributes(x=np.arange(4)), Attributes(x=np.arange(4)[::-1])),
    "array of objects": (Attributes(x=np.array([1, "a"], object)), Attributes(x=np.array([1, "b"], object))),
    "mask": (Attributes(x=np.ma.array([1, 2], mask=[0, 1])), Attributes(x=np.ma.array([1, 2], mask=[1, 0]))),
    "bfloat16": (Attributes(x=torch.ones(2).bfloat16()), Attributes(x=torch.zeros(2).bfloat16())),
    "sparse": (Attributes(x=torch.eye(2).to_sparse()), Attributes(x=torch.ones(2, 2).to_sparse())),
    "conjugate": (Attributes(x=torch.tensor(1j)), Attributes(x=torch.tensor(1j).conj())),
    "bool or int": (Attributes(x=True), Attributes(x=1)),
    "int or float": (Attributes(x=1), Attributes(x=1.0)),
    "text or bytes": (Attributes(x="a"), Attributes(x=b"a")),
    "list or tuple": (Attributes(x=[1, 2]), Attributes(x=(1, 2))),
    "nesting": (Attributes(x=[[1], 2]), Attributes(x=[[1, 2]])),
    "keys": (Attributes(x={"a": 1, "b": 2}), Attributes(x={"a": 2, "b": 1})),
    "set": (Attributes(x={1, 2}), Attributes(x={1, 3})),
    "name of an attribute": (Attributes(x=1), Attributes(y=1)),
    "enumeration": (Attributes(x=Kind.A), Attributes(x=Kind.B)),
    "dataclass": (Attributes(x=Config(1)), Attributes(x=Config(2))),
    "deque": (Attributes(x=collections.deque([1])), Attributes(x=collections.deque([2]))),
    "proxy": (Attributes(x=types.MappingProxyType({1: 2})), Attributes(x=types.MappingProxyType({1: 3}))),
    "counter": (Attributes(x=collections.Counter("ab")), Attributes(x=collections.Counter("abb"))),
    "module": (Attributes(x=torch.nn.Linear(1, 1)), Attributes(x=torch.nn.Linear(1, 1))),
    "method": (Attributes(x=[].append), Attributes(x=[].extend)),
    "cycle": (Attributes(x=(one := [1], one.append(one))[0]), Attributes(x=[1, [1, [1]]])),
    "end of a cycle": (
        Attributes(x=(one := [1, [2]], one[1].append(one))[0]),
        Attributes(x=(two := [1, [2]], two[1].append(two[1]))[0]),
    ),
    "base class": (type("Own", (Base,), {})(), type("Own", (OtherBase,), {})()),
    "item code": (
        data_set_class("    def __getitem__(self, i):\n        return i")(),
        data_set_class("    def __getitem__(self, i):\n        return i + 1")(),
    ),
    "item operation": (
        data_set_class("    def __getitem__(self, i):\n        return i - self")(),
        data_set_class("    def __getitem__(self, i):\n        return i + self")(),
    ),
    "guarded items": (
        data_set_class("    def __getitem__(self, i):\n        a()\n        try: b()\n        except: c()")(),
        data_set_class("    def __getitem__(self, i):\n        try: a(); b()\n        except: c()")(),
    ),
    "item constant": (
        data_set_class("    def __getitem__(self, i):\n        return i * 2")(),
        data_set_class("    def __getitem__(self, i):\n        return i * 3")(),
    ),
    "item function": (
        data_set_class("    def __getitem__(self, i):\n        return torch.sin(i)")(),
        data_set_class("    def __getitem__(self, i):\n        return torch.cos(i)")(),
    ),
    "inner code": (
        data_set_class("    def __getitem__(self, i):\n        return [k for k in 'ab']")(),
        data_set_class("    def __getitem__(self, i):\n        return [k for k in 'ac']")(),
    ),
    "class attribute": (
        data_set_class("    x = 1\n    def __getitem__(self, i):\n        return self.x")(),
        data_set_class("    x = 2\n    def __getitem__(self, i):\n        return self.x")(),
    ),
    "factory": (lambda: NUMBERS, lambda: Subset(NUMBERS, [1])),
    "default": (lambda n=3: make_numbers(n), lambda n=4: make_numbers(n)),
    "keyword default": (lambda *, n=3: make_numbers(n), lambda *, n=4: make_numbers(n)),
    "wrapped": (torch.no_grad()(lambda: [1]), torch.no_grad()(lambda: [2])),
    "attribute of a function": (with_attribute(1), with_attribute(2)),
    "bound function": (types.MethodType(lambda _: [1], NUMBERS), types.MethodType(lambda _: [2], NUMBERS)),
    "partial": (functools.partial(make_numbers, 3), functools.partial(make_numbers, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_it_changes_with_the_data_set(name):
    one, other = DIFFERENT[name]
    assert LoaderSpec(one).fingerprint() != LoaderSpec(other).fingerprint()
    assert LoaderSpec(one).fingerprint() == LoaderSpec(one).fingerprint()


FIELDS = {
    "batch_size": ({"batch_size": 1}, {"batch_size": 2}),
    "sampling": ({}, {"sampling": "epoch"}),
    "drop_last": ({"sampling": "epoch"}, {"sampling": "epoch", "drop_last": True}),
    "sampler": ({"sampler": [1, 2]}, {"sampler": [2, 1]}),
    "weights": (
        {"sampler": WeightedRandomSampler([0.5] * 10, 4)},
        {"sampler": WeightedRandomSampler([0.5] * 9 + [0.4], 4)},
    ),
    "batch_sampler": (
        {"batch_sampler": BatchSampler(SequentialSampler(NUMBERS), 2, drop_last=False)},
        {"batch_sampler": BatchSampler(SequentialSampler(NUMBERS), 3, drop_last=False)},
    ),
    "sampler or batch_sampler": ({"sampler": [[1, 2]]}, {"batch_sampler": [[1, 2]]}),
    "collate_fn": ({}, {"collate_fn": lambda items: items}),
    "closure": ({"collate_fn": closure(1)}, {"collate_fn": closure(2)}),
    "worker_init_fn": ({}, {"worker_init_fn": lambda worker: None}),
    "num_samples": ({"batch_size": None, "num_samples": 10}, {"batch_size": None, "num_samples": 20}),
}


@pytest.mark.parametrize("name", FIELDS)
def test_it_changes_with_every_field_that_changes_the_numbers(name):
    one, other = (LoaderSpec(NUMBERS, **fields).fingerprint() for fields in FIELDS[name])
    assert one != other


@pytest.mark.parametrize("collate", [collate_by_factor, collate_by_factor_inside])
def test_it_changes_with_a_global_that_a_function_uses(collate):
    one, same, other = (with_global(collate, value).fingerprint() for value in (2, 2, 3))
    assert one == same != other


def test_it_changes_with_the_arguments_of_a_factory():
    prints = [
        LoaderSpec(make_numbers, dataset_args=args, dataset_kwargs=kwargs).fingerprint()
        for args, kwargs in [((), {}), ((10,), {}), ((), {"n": 10}), ((10,), {"offset": 1})]
    ]
    assert len(set(prints)) == 4


def test_the_users_own_modules_count_by_what_is_used_of_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_helper.py").write_text("def scale(x):\n    return 2 * x\ndef unused(x):\n    return x\n")
    import own_helper

    del sys.modules["own_helper"]

    def make():
        return TensorDataset(own_helper.scale(torch.arange(3)))

    before = LoaderSpec(make).fingerprint()
    own_helper.unused = None
    assert LoaderSpec(make).fingerprint() == before
    own_helper.scale = lambda x: 3 * x
    assert LoaderSpec(make).fingerprint() != before


# ---- what does not ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"num_workers": 2},
        {"num_workers": 2, "prefetch_factor": 5, "persistent_workers": False, "timeout": 3},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
        {"pin_memory": True},
        {"pin_memory_device": "cuda"},
        {"generator": torch.Generator()},
        {"in_order": True},
        {"worker_dataset": "pickle"},
        {"shuffle": True},
        {"sampling": "iid"},
        {"collate_fn": default_collate},
    ],
)
def test_it_does_not_change_with_what_leaves_the_numbers_as_they_are(fields):
    assert LoaderSpec(NUMBERS, **fields).fingerprint() == LoaderSpec(NUMBERS).fingerprint()


def test_a_function_is_the_same_by_any_name():
    path = f"{__name__}:make_numbers"
    assert LoaderSpec(path).fingerprint() == LoaderSpec(make_numbers).fingerprint()
    by_path = LoaderSpec(NUMBERS, collate_fn=f"{__name__}:collate").fingerprint()
    assert by_path == LoaderSpec(NUMBERS, collate_fn=collate).fingerprint()
    renamed = types.FunctionType(make_numbers.__code__, globals(), "other", make_numbers.__defaults__)
    renamed.__kwdefaults__ = make_numbers.__kwdefaults__
    assert LoaderSpec(renamed).fingerprint() == LoaderSpec(make_numbers).fingerprint()


def test_names_of_locals_and_where_code_stands_do_not_count():
    def one(items):
        total = items[0]
        return total + total

    def other(items):
        first = items[0]

        return first + first

    assert (
        LoaderSpec(NUMBERS, collate_fn=one).fingerprint()
        == LoaderSpec(NUMBERS, collate_fn=other).fingerprint()
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_layout_sharing_and_order_do_not_count():
    x = torch.arange(12).view(3, 4)
    shared = [1, 2]
    pairs = [
        (x.t(), x.t().contiguous()),
        (x[1:], x[1:].clone()),
        (torch.eye(2).to_sparse_csr(), torch.eye(2).to_sparse()),
        (np.arange(12).reshape(3, 4).T, np.ascontiguousarray(np.arange(12).reshape(3, 4).T)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {2, 3, 1}),
        ([shared, shared], [[1, 2], [1, 2]]),
    ]
    for one, other in pairs:
        assert content_hash(one) == content_hash(other)


class Lazy(Dataset):
    """Opens what it needs when it is first asked, as the docs of many formats recommend."""

    def __init__(self, path):
        self.path, self.file = path, None
        self.lock = threading.Lock()
        self.log = logging.getLogger(str(path))
        self.generator, self.other = np.random.default_rng(0), torch.Generator()
        self.epoch, self.rows = 0, iter(range(10))

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    @functools.cached_property
    def table(self):
        return [5, 6, 7, 8]

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115 - it stays open
            self.thread = threading.Thread(target=print)
        torch.rand(1, generator=self.other)
        next(self.rows)
        return self.table[index] + self.generator.integers(3)


def test_it_does_not_change_with_use(tmp_path):
    (tmp_path / "data").write_bytes(b"1234")
    data = Lazy(tmp_path / "data")
    sampler = RandomSampler(data, num_samples=3, generator=torch.Generator())
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    spec = LoaderSpec.from_dataloader(loader)
    before = spec.fingerprint()
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
        assert spec.fingerprint() == before
    assert LoaderSpec.from_dataloader(loader).fingerprint() == before
    data.set_epoch(3)
    assert spec.fingerprint() == before
    data.file.close()


def test_a_live_loader_inside_a_data_set_does_not_count():
    class Wraps(Attributes):
        pass

    loader = DataLoader(NUMBERS, batch_size=5, persistent_workers=False)
    spec = LoaderSpec(Wraps(loader=loader))
    before = spec.fingerprint()
    loader._iterator = iter(loader)
    assert spec.fingerprint() == before


def test_functions_that_were_called_often_are_the_same():
    def collate(items):
        total = 0
        for one in items:
            total += one[0] * FACTOR
        return total

    before = LoaderSpec(NUMBERS, collate_fn=collate).fingerprint()
    for _ in range(1000):
        collate([(1,), (2,), (3,)])
    assert LoaderSpec(NUMBERS, collate_fn=collate).fingerprint() == before


# ---- special content ----------------------------------------------------------------------------


def test_a_mapped_array_counts_by_its_file(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(1000.0))

    def mapped():
        return np.load(path, mmap_mode="r")

    first = content_hash(mapped())
    assert content_hash(mapped()) == first
    assert content_hash(mapped()[10:]) != first
    assert content_hash(np.asarray(mapped())[10:]) == content_hash(np.asarray(mapped()[10:]))
    assert content_hash(mapped()[10:20]) != content_hash(mapped()[11:21])
    assert content_hash(mapped()[::2][:5]) != content_hash(mapped()[::3][:5])
    assert content_hash(np.arange(1000.0)) != first
    os.utime(path, ns=(0, 10**18))
    assert content_hash(mapped()) != first


@pytest.mark.parametrize(
    "make",
    [np.random.default_rng, np.random.RandomState, random.Random, lambda s: torch.Generator().manual_seed(s)],
)
def test_a_generator_counts_by_its_state_where_nothing_sets_it(make):
    assert content_hash(make(3)) == content_hash(make(3))
    assert content_hash(make(3)) != content_hash(make(4))


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_objects_of_many_kinds_have_a_hash_that_repeats():
    import datetime
    import decimal
    import re

    def kinds():
        return [
            datetime.datetime(2020, 1, 2), decimal.Decimal("1.5"), re.compile("a+"), Path("/x"), range(3),
            slice(1, 2), bytearray(b"x"), collections.deque([1]), collections.defaultdict(list, a=[1]),
            torch.float16, torch.device("cpu"), torch.Size([1]), np.dtype("f4"), np.float32(1.5), np.add,
            list[int], types.SimpleNamespace(a=1),
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), torch.empty(0), np.empty((0, 3)),
            np.array(["ab", "c"]), np.array(["2020-01-01"], "M8[D]"), np.array(5), torch.tensor(5),
            np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]), torch.ones(2).untyped_storage(), memoryview(b"a"),
            threading.RLock(), iter([1]), (k for k in "a"), torch.nn.Parameter(torch.ones(1)), type, object(),
        ]  # fmt: skip

    hashes = [content_hash(one) for one in kinds()]
    assert hashes == [content_hash(one) for one in kinds()]
    assert len(set(hashes)) == len(hashes)


def test_functions_that_call_each_other_have_a_hash():
    names = {"__name__": "made_here"}
    everyone = ", ".join(f"f{number}" for number in range(60))
    lines = [f"def f{number}(x):\n    return {number}, {everyone}" for number in range(60)]
    exec("\n".join(lines), names)
    first = LoaderSpec(names["f0"], dataset_args=(1,)).fingerprint()
    assert first == LoaderSpec(names["f0"], dataset_args=(1,)).fingerprint()
    assert first != LoaderSpec(names["f1"], dataset_args=(1,)).fingerprint()


def test_an_import_path_that_leads_nowhere_is_an_error(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "raises_when_run.py").write_text("def make():\n    return [1]\nraise ValueError('no')\n")
    spec = LoaderSpec("raises_when_run:make")
    with pytest.raises(LoaderError, match="'raises_when_run:make' cannot be imported: ValueError: no"):
        spec.fingerprint()
