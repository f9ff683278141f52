"""Texts on the troubleshooting page are what plain PyTorch, and devsample, really say."""

import multiprocessing
import pickle
import re
import socket
import sqlite3
import ssl
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from devsample import LoaderSpec
from devsample.errors import InvalidArgumentError, NotPicklableError

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
TEXT = re.sub(r"\s+", " ", PAGE)


class Holding(Dataset):
    """Keeps something."""

    def __init__(self, held=None):
        self.held = held

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class MyDataset(Dataset):
    def __getitem__(self, index):
        return index


def in_spawned_worker(**options):
    """Start a spawned worker; what cannot be pickled for it is an error here, before it runs."""
    dataset = options.pop("dataset", Holding())
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        next(iter(DataLoader(dataset, 2, num_workers=1, multiprocessing_context="spawn", **options)))


def local_collator():
    def data_collator(features):
        return features

    data_collator.__qualname__ = "Trainer.__init__.<locals>.data_collator"
    in_spawned_worker(collate_fn=data_collator)


PLAIN = {  # as the page has it: what plain PyTorch does to print it
    "ValueError: bad value(s) in fds_to_keep": lambda: in_spawned_worker(
        dataset=Holding((torch.Generator(), torch.Generator()))
    ),
    "AttributeError: Can't pickle local object 'Trainer.__init__.<locals>.data_collator'": local_collator,
    "TypeError: cannot pickle '_thread.lock' object": lambda: in_spawned_worker(
        dataset=Holding(threading.Lock())
    ),
    "'_thread.RLock'": lambda: in_spawned_worker(dataset=Holding(threading.RLock())),
    "'_thread._local'": lambda: in_spawned_worker(dataset=Holding(threading.local())),
    "'_queue.SimpleQueue'": lambda: in_spawned_worker(dataset=Holding(ThreadPoolExecutor(1))),
    "'generator'": lambda: in_spawned_worker(dataset=Holding(one for one in range(3))),
    "'module'": lambda: in_spawned_worker(dataset=Holding(threading)),
    "'weakref.ReferenceType'": lambda: in_spawned_worker(dataset=Holding(weakref.ref(Holding))),
    "cannot pickle 'sqlite3.Connection' object": lambda: in_spawned_worker(
        dataset=Holding(sqlite3.connect(":memory:"))
    ),
    "TypeError: cannot pickle 'SSLContext' object": lambda: in_spawned_worker(
        dataset=Holding(ssl.create_default_context())
    ),
    "cannot pickle 'socket' object": lambda: pickle.dumps(socket.socket()),
    "RuntimeError: A SemLock created in a fork context is being shared with a process in a spawn context.": (
        lambda: in_spawned_worker(dataset=Holding(multiprocessing.get_context("fork").Lock()))
    ),
    "Synchronized objects should only be shared between processes through inheritance": lambda: pickle.dumps(
        multiprocessing.Value("i", 0)
    ),
    "Queue objects should only be shared between processes through inheritance": lambda: pickle.dumps(
        multiprocessing.Queue()
    ),
    "RuntimeError: Cowardly refusing to serialize non-leaf tensor which requires_grad": lambda: (
        in_spawned_worker(dataset=TensorDataset(torch.nn.Linear(2, 2)(torch.ones(4, 2))))
    ),
    "RuntimeError: stack expects each tensor to be equal size, but got [2] at entry 0 and [3] at entry 1": (
        lambda: next(iter(DataLoader([torch.zeros(2), torch.zeros(3)], 2)))
    ),
    "TypeError: default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; "
    "found <class 'NoneType'>": lambda: next(iter(DataLoader([None, None], 2))),
    "TypeError: object of type 'MyDataset' has no len()": lambda: next(iter(DataLoader(MyDataset(), 2))),
    "ValueError: DataLoader with IterableDataset: expected unspecified shuffle option, "
    "but got shuffle=True": lambda: DataLoader(Stream(), 2, shuffle=True),
    "ValueError: prefetch_factor option could only be specified in multiprocessing.let num_workers > 0 to "
    "enable multiprocessing, otherwise set prefetch_factor to None.": lambda: DataLoader(
        Holding(), 2, prefetch_factor=2
    ),
    "persistent_workers option needs num_workers > 0": lambda: DataLoader(
        Holding(), 2, persistent_workers=True
    ),
    "multiprocessing_context can only be used with multi-process loading": lambda: DataLoader(
        Holding(), 2, multiprocessing_context="spawn"
    ),
    "ValueError: batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, "
    "and drop_last": lambda: DataLoader(Holding(), 2, batch_sampler=[[0, 1]]),
}


@pytest.mark.parametrize("text", PLAIN)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_plain_pytorch_says_it(text):
    assert f"`{text}`" in TEXT
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the question
        PLAIN[text]()
    said = f"{type(caught.value).__name__}: {caught.value}"
    assert text in said.replace("Can't get local", "Can't pickle local")  # since Python 3.12


def test_a_warning_of_plain_pytorch():
    with pytest.warns(UserWarning, match="no accelerator is found") as caught:
        list(DataLoader(Holding(), 2, pin_memory=True))
    assert f"### `UserWarning: {caught[0].message}`" in TEXT


@pytest.mark.parametrize("held", [threading.Lock(), socket.socket()], ids=["lock", "socket"])
def test_what_devsample_says(held):
    with pytest.raises(NotPicklableError) as caught:
        LoaderSpec(Holding(held), batch_size=2).packed()
    first, rest = "NotPicklableError: loader_spec.dataset.…", "cannot be sent to another process"
    assert f"### `{first} {rest}`" in TEXT
    assert str(caught.value).startswith("loader_spec.dataset.held is a ")
    assert rest in str(caught.value)


def test_what_devsample_says_of_a_loader():
    with pytest.raises(InvalidArgumentError) as caught:
        LoaderSpec(DataLoader(Holding(), 2))
    text = str(caught.value).partition(". ")[0]
    assert f"### `InvalidArgumentError: {text}.`" in TEXT
