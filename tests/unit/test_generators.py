"""The process's generators stay as they were; generators that objects hold are found and seeded."""

import functools
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch

from devsample.data.generators import (
    find_generators,
    preserved_global_generators,
    reseed,
    seed_global_generators,
)

LEGACY = np.random


def draw():
    return torch.rand(()).item(), LEGACY.rand(), LEGACY.randn(), random.random(), random.gauss(0, 1)


@pytest.mark.parametrize("normals", [0, 1, 2, 3])
@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_the_process_does_not_notice(normals, bits):
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(bits(5))
        found = []
        for disturbed in (False, True):
            torch.manual_seed(1)
            np.random.set_bit_generator(bits(5))
            random.seed(1)
            for _ in range(normals):  # an odd number leaves one ready
                LEGACY.randn()
                random.gauss(0, 1)
            if disturbed:
                with preserved_global_generators():
                    seed_global_generators(7)
                    draw()
            found.append([draw() for _ in range(3)])
            with preserved_global_generators(), preserved_global_generators():
                LEGACY.randn()
        assert found[0] == found[1]
    finally:
        np.random.set_bit_generator(own)


def test_seeding_fixes_what_is_drawn():
    seed_global_generators(2**63 + 12345)
    first = draw()
    draw()
    seed_global_generators(2**63 + 12345)
    assert draw() == first
    seed_global_generators(2**63 + 12346)
    assert draw() != first


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, rng):
        self.rng = rng


class Holder:
    def __init__(self, **values):
        self.__dict__.update(values)

    def method(self):
        return self


def make_all(seed=0):
    return [
        np.random.default_rng(seed),
        np.random.RandomState(seed),
        random.Random(seed),
        torch.Generator().manual_seed(seed),
    ]


def draws(generators):
    numpy, legacy, python, torchs = generators
    return numpy.random(), legacy.rand(), python.random(), torch.rand((), generator=torchs).item()


def test_generators_are_found_wherever_they_are():
    rng = make_all()
    captured = rng[2]
    places = Holder(
        attribute=rng[0],
        nested=Holder(inside=[{"deep": (rng[1],)}]),
        function=lambda: captured.random(),
        partial=functools.partial(print, Slotted(rng[3])),
        method=Holder(x=rng[0]).method,
        data=np.zeros(4),
        ordered=OrderedDict(a=1),
        system=random.SystemRandom(),
        loop=None,
    )
    places.loop = places
    assert {id(one) for one in find_generators(places)} == {id(one) for one in rng}
    assert find_generators(np.zeros(3), None, "text", torch.zeros(2)) == []


def test_the_order_in_which_they_are_found_is_fixed():
    found = [find_generators(Holder(**dict(enumerate_names(make_all(k))))) for k in range(2)]
    assert [type(one) for one in found[0]] == [type(one) for one in found[1]]


def enumerate_names(values):
    return [(f"g{number}", value) for number, value in enumerate(values)]


def test_reseeded_generators_forget_what_they_were():
    one, other = make_all(1), make_all(2)
    draws(other)
    other[1].randn()  # leaves a normal ready
    for seed in (3, 2**64 - 1):
        reseed(one, seed)
        reseed(other, seed)
        assert draws(one) == draws(other)
        assert one[1].randn() == other[1].randn()
    reseed(one, 4)
    reseed(other, 5)
    assert all(a != b for a, b in zip(draws(one), draws(other), strict=True))


def test_two_generators_of_a_kind_differ():
    pair = [np.random.default_rng(0), np.random.default_rng(0)]
    reseed(pair, 9)
    assert pair[0].random() != pair[1].random()


GLOBAL = np.random.default_rng(3)
UNUSED = np.random.default_rng(4)


def helper():
    return GLOBAL.random()


class Everywhere:
    """Uses generators in all the ways in which code does that keeps none as an attribute."""

    shared = random.Random(1)

    def __init__(self, enclosed):
        def inside():
            return enclosed.random()

        self.function = inside

    def item(self, given=random.Random(2)):  # noqa: B008 - that is what is tried
        return helper() + self.shared.random() + given.random()


class Inherits(Everywhere):
    @staticmethod
    def other(rng=random.Random(5)):  # noqa: B008
        return rng.random()


def test_generators_that_code_uses_are_found():
    enclosed = np.random.RandomState(0)
    found = {id(one) for one in find_generators(Inherits(enclosed))}
    defaults = [Everywhere.item.__defaults__[0], Inherits.other.__defaults__[0]]
    assert found == {id(one) for one in [GLOBAL, Everywhere.shared, enclosed, *defaults]}
    assert [id(GLOBAL)] == [id(one) for one in find_generators(helper)]
