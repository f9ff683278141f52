"""The contract of randomness: golden values, no shared numbers, any order of access, moments."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from devsample.errors import InvalidArgumentError
from devsample.seeds import (
    ELEMENTS_PER_PART,
    ChainKey,
    IndexBlocks,
    NormalBlocks,
    Role,
    chain_keys,
    check_seed,
    fresh_seed,
    philox,
    stream_seed,
)

CPU = torch.device("cpu")
KEYS = chain_keys(0, 4)


def normals(keys=KEYS[:1], size=5, dtype=torch.float32, role=Role.NOISE) -> NormalBlocks:
    return NormalBlocks(keys, size, dtype, CPU, role)


# ---- golden values ------------------------------------------------------------------------------


def philox_4x64_10(key: tuple[int, int], counter: tuple[int, ...]) -> list[int]:
    """Salmon et al. (2011), section 3.3, in plain integers."""
    mask = (1 << 64) - 1
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (second >> 64) ^ c1 ^ k0, second & mask, (first >> 64) ^ c3 ^ k1, first & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def test_the_reference_philox_gives_the_published_answer():
    # Random123's kat_vectors: philox4x64 10, counter and key 0.
    assert philox_4x64_10((0, 0), (0, 0, 0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@pytest.mark.parametrize(
    ("chain", "role", "block", "part"),
    [(0, Role.NOISE, 0, 0), (2, Role.NOISE, 5, 3), (1 << 20, Role.PILOT, 1 << 40, 1 << 33)],
)
def test_a_stream_is_philox_at_the_documented_counter(chain, role, block, part):
    key = ChainKey(KEYS[0].low, KEYS[0].high, chain)
    words = philox(key, role, block, part).random_raw(8).tolist()
    expected = [
        philox_4x64_10((key.low, key.high), (position, block, part, chain << 16 | role))
        for position in (1, 2)  # numpy counts up before it generates
    ]
    assert words == sum(expected, [])


def test_golden_keys_words_and_seeds():
    assert KEYS[2] == ChainKey(15793235383387715774, 12390638538380655177, 2)
    assert philox(KEYS[2], Role.NOISE, 5, 3).random_raw(4).tolist() == [
        12985513208402522652,
        8488778062956738959,
        11335906599800156991,
        13588621828522347271,
    ]
    assert stream_seed(KEYS[2], Role.ITEMS, 7, 9) == 11367073466580309830


def test_the_numbers_of_roles_never_change():
    known = {
        "NOISE": 1, "ORDER": 2, "LOSS_ORDER": 3, "PROBE_ORDER": 4, "ITEMS": 5, "MODEL": 6,
        "START": 7, "PROBE": 8, "FULL_ORDER": 9, "PILOT": 10,
    }  # fmt: skip
    values = {role.name: role.value for role in Role}
    assert known.items() <= values.items()
    assert len(set(values.values())) == len(values) < 1 << 16


def test_golden_indices():
    order = IndexBlocks(KEYS[1], Role.ORDER, 1797, 8)  # 512 steps a block
    assert order(0).tolist() == [1370, 1621, 464, 844, 221, 221, 1060, 1446]
    assert order(511).tolist() == [935, 134, 175, 637, 211, 101, 83, 908]
    assert order(512).tolist() == [722, 832, 1045, 880, 1031, 97, 15, 1544]


@pytest.mark.parametrize(
    ("dtype", "size", "first", "last"),
    [
        (torch.float32, 3, [-0.44187975, -1.00131692, 1.36088610], [0.93142998, 0.71206456, -0.52893203]),
        (torch.float32, 40, [-0.44187975, -1.00131692, 1.36088610], [-0.75596523, -0.27968875, -0.37899178]),
        (torch.float32, 5000, [-0.44187975, -1.00131692, 1.36088610], [0.43509111, -0.23109941, -0.47240818]),
        (torch.float64, 3, [-0.80128845, 1.83979515, 0.47217936], [-0.45674706, -1.11461264, -0.29332474]),
        (torch.float64, 40, [-0.80128845, 1.83979515, 0.47217936], [0.58341499, -0.03627957, -0.07831750]),
        (torch.float64, 5000, [-0.80128845, 1.83979515, 0.47217936], [-0.84090485, -1.22990337, 0.27886897]),
    ],
)  # fmt: skip
def test_golden_normals(dtype, size, first, last):
    noise = normals(KEYS[:2], size, dtype)
    torch.testing.assert_close(noise.plain(0)[0, :3], torch.tensor(first, dtype=dtype), rtol=0, atol=1e-6)
    torch.testing.assert_close(noise.plain(1400)[1, -3:], torch.tensor(last, dtype=dtype), rtol=0, atol=1e-6)


def test_normals_follow_from_the_words_of_their_block():
    """Philox → state of a Mersenne twister → 24-bit uniforms → Box and Muller, 16 at a time."""
    key, block, size = KEYS[3], 2, 4992
    twister = np.random.MT19937()
    state = twister.state
    state["state"]["key"][:] = philox(key, Role.NOISE, block).random_raw(312).view(np.uint32)
    state["state"]["pos"] = 624
    twister.state = state
    uniform = (twister.random_raw(size) & 0xFFFFFF).reshape(-1, 2, 8) / 2.0**24
    radius, angle = np.sqrt(-2 * np.log(1 - uniform[:, 0])), 2 * np.pi * uniform[:, 1]
    expected = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
    np.testing.assert_allclose(normals((key,), size).plain(block)[0].numpy(), expected, atol=1e-6)


# ---- no shared numbers --------------------------------------------------------------------------


def test_no_two_blocks_begin_with_the_same_word():
    places = list(itertools.product(range(12), Role, range(25), range(4)))
    words = {stream_seed(ChainKey(KEYS[0].low, KEYS[0].high, c), r, b, p) for c, r, b, p in places}
    assert len(words) == len(places) >= 12_000


def test_chains_above_2_to_16_do_not_meet_other_roles():
    chains = [0, 1, 1 << 15, (1 << 16) - 1, 1 << 16, 1 << 20]
    words = {stream_seed(ChainKey(1, 2, chain), role, 0) for chain in chains for role in Role}
    assert len(words) == len(chains) * len(Role)


def test_no_number_of_one_block_is_in_another():
    """All 53-bit numbers of 1 000 blocks: chance would make fewer than 10^-3 pairs."""
    seen = []
    for chain, role in itertools.product(KEYS, (Role.NOISE, Role.START, Role.PROBE, Role.PILOT)):
        noise = normals((chain,), 4096, torch.float64, role)
        seen += [noise.plain(step)[0, :64].clone() for step in range(60)]
    numbers = torch.cat(seen)
    assert len(torch.unique(numbers)) == len(numbers)


def test_parts_of_a_large_vector_differ():
    values = normals(size=2 * ELEMENTS_PER_PART + 40).plain(0)[0]
    first, second, third = values.split(ELEMENTS_PER_PART)
    assert not torch.isin(second[:40], first[:40]).any()
    assert not torch.isin(third, first[:40]).any()
    for one, other in ((first, second), (first[:40], third)):
        assert abs(np.corrcoef(one[: len(other)], other)[0, 1]) < 4 / math.sqrt(len(other))


def test_order_loss_order_and_probe_order_differ():
    drawn = [
        IndexBlocks(KEYS[0], role, 1 << 40, 4)(0).tolist()
        for role in (Role.ORDER, Role.LOSS_ORDER, Role.PROBE_ORDER)
    ]
    assert len(set(sum(drawn, []))) == 12


# ---- layout does not matter ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 4096, 4097, ELEMENTS_PER_PART + 5])
def test_rows_of_a_group_are_the_chains_alone(size):
    group = normals(KEYS[1:4], size)
    for step in (0, 1, 4095, 4096) if size < ELEMENTS_PER_PART else (0, 1):
        for kind in ("plain", "averaged"):
            together = getattr(group, kind)(step).clone()
            assert together.shape == (3, size)
            for row, key in enumerate(KEYS[1:4]):
                alone = getattr(normals((key,), size), kind)(step)
                assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("size", [1, 1000, 5000])
def test_steps_can_be_taken_in_any_order(size):
    steps = [0, 9, 3, 4, 4, 5, 10, 8200, 0, 1]
    forward = {step: normals(size=size).plain(step).clone() for step in steps}
    averaged = {step: normals(size=size).averaged(step).clone() for step in steps}
    noise = normals(size=size)
    for step in steps:
        assert torch.equal(noise.averaged(step), averaged[step])
        assert torch.equal(noise.plain(step), forward[step])


@pytest.mark.parametrize("size", [300, 5000])
@pytest.mark.parametrize("kind", ["plain", "averaged"])
def test_a_resume_at_any_step_continues_the_stream(kind, size):
    steps = 32  # 13 steps a block for 300 elements
    whole = normals(KEYS[:2], size)
    values = [getattr(whole, kind)(step).clone() for step in range(steps)]
    for start in range(steps):
        resumed = normals(KEYS[:2], size)
        for step in range(start, min(start + 3, steps)):
            assert torch.equal(getattr(resumed, kind)(step), values[step])


def test_indices_can_be_taken_in_any_order_and_after_a_resume():
    whole = IndexBlocks(KEYS[0], Role.ORDER, 100, 1500)  # 2 steps a block
    values = [whole(step).copy() for step in range(9)]
    for step in (8, 0, 5, 4, 1, 7):
        assert np.array_equal(whole(step), values[step])
        assert np.array_equal(IndexBlocks(KEYS[0], Role.ORDER, 100, 1500)(step), values[step])


@pytest.mark.parametrize("size", [1, 5, 4096, 4097, ELEMENTS_PER_PART + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_averaged_noise_is_the_mean_of_two_neighbours(size, dtype):
    averaged = normals(KEYS[:2], size, dtype)
    # 818|819 and 4095|4096 are ends of step blocks for 5 and 1 elements
    for step in [0, 1, 2, 4094, 4095, 4096, 818, 819] if size < ELEMENTS_PER_PART else [0, 1, 9]:
        plain = normals(KEYS[:2], size, dtype)
        expected = (plain.plain(step) + plain.plain(step + 1)) / 2
        torch.testing.assert_close(averaged.averaged(step), expected, rtol=1e-6, atol=1e-7)


def test_a_block_is_made_once_in_a_sweep(monkeypatch):
    made = []
    original = NormalBlocks._make
    monkeypatch.setattr(
        NormalBlocks, "_make", lambda self, block: made.append(block) or original(self, block)
    )
    for size in (300, 5000):
        made.clear()
        noise = normals(size=size)
        for step in range(30):
            noise.averaged(step)
        assert len(made) == len(set(made))


# ---- law ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 37, 100_000])
def test_normals_are_standard_normal(dtype, size):
    noise = normals(KEYS[:1], size, dtype)
    values = (
        torch.cat([noise.plain(step)[0] for step in range(min(40_000, 200_000 // size))]).double().numpy()
    )
    n = len(values)
    drawn = [noise.plain(step)[0] for step in range(min(40_000, 200_000 // size))]
    values = torch.cat(drawn).double().numpy()
    assert abs(values.mean()) < 4 / math.sqrt(n)
    assert abs((values**2).mean() - 1) < 4 * math.sqrt(2 / n)
    assert abs((values**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / n)


def test_neither_steps_nor_chains_nor_roles_are_correlated():
    size, steps = 1000, 200
    streams = [
        torch.stack([normals((key,), size, torch.float64, role).plain(s)[0] for s in range(steps)])
        for key in KEYS[:2]
        for role in (Role.NOISE, Role.START)
    ]
    bound = 4.5 / math.sqrt(size * (steps - 1))
    for one, other in itertools.combinations(streams, 2):
        for lag in (0, 1):
            assert abs((one[lag:] * other[: steps - lag]).mean()) < bound
    for one in streams:
        assert abs((one[1:] * one[:-1]).mean()) < bound  # step to step
        assert abs((one[:, 1:] * one[:, :-1]).mean()) < bound  # element to element
        assert abs((one[:, 8:] * one[:, :-8]).mean()) < bound  # the two halves of Box and Muller


def test_neighbouring_averaged_noises_share_half_their_variance():
    noise = normals(size=2000, dtype=torch.float64)
    rows = torch.stack([noise.averaged(step)[0].clone() for step in range(100)])
    bound = 4 / math.sqrt(2000 * 97)
    assert abs((rows**2).mean() - 1 / 2) < bound
    assert abs((rows[1:] * rows[:-1]).mean() - 1 / 4) < bound
    assert abs((rows[2:] * rows[:-2]).mean()) < bound


@pytest.mark.parametrize("size", [1, 32, 5000])
def test_indices_are_uniform_and_independent(size):
    n = 50
    order = IndexBlocks(KEYS[0], Role.ORDER, n, size)
    rows = np.stack([order(step) for step in range(100_000 // size)])
    assert rows.min() == 0
    assert rows.max() == n - 1
    assert stats.chisquare(np.bincount(rows.ravel(), minlength=n)).pvalue > 1e-3
    flat = rows.ravel()
    pairs = np.bincount(flat[1:] * n + flat[:-1], minlength=n * n)
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_chains_draw_independent_indices():
    n = 50
    one, other = (
        np.concatenate([IndexBlocks(key, Role.ORDER, n, 4096)(step) for step in range(12)])
        for key in KEYS[:2]
    )
    assert stats.chisquare(np.bincount(one * n + other, minlength=n * n)).pvalue > 1e-3


# ---- seeds --------------------------------------------------------------------------------------


def test_different_seeds_have_different_keys():
    keys = {(key.low, key.high) for seed in range(2000) for key in chain_keys(seed, 1)}
    assert len(keys) == 2000
    assert chain_keys(0, 1) != chain_keys(1 << 64, 1)


def test_a_chain_with_its_own_seed_is_the_same_at_any_place():
    assert chain_keys([7, 5, 3], 3)[1] == chain_keys([5], 1)[0] == chain_keys((9, 5), 2)[1]
    assert chain_keys([5], 1) == chain_keys(5, 1)


def test_more_chains_leave_the_first_as_they_are():
    assert chain_keys(3, 8)[:2] == chain_keys(3, 2)


@pytest.mark.parametrize(
    ("seed", "num_chains", "expected"),
    [
        (None, 3, None),
        (0, 3, 0),
        ((1 << 128) - 1, 1, (1 << 128) - 1),
        (np.int64(4), 2, 4),
        ([3, 4], 2, (3, 4)),
        ((4,), 1, (4,)),
        (np.array([1, 2]), 2, (1, 2)),
        (torch.tensor([1, 2]), 2, (1, 2)),
        (torch.tensor(3), 2, 3),
        (np.asarray(3), 1, 3),
    ],
)
def test_seeds_that_are_taken(seed, num_chains, expected):
    checked = check_seed(seed, num_chains)
    assert checked == expected
    assert type(checked) is type(expected)


@pytest.mark.parametrize(
    ("seed", "num_chains", "message"),
    [
        (-1, 1, r"seed: expected 0 ≤ seed < 2\^128, got -1"),
        (1 << 128, 1, r"seed: expected 0 ≤ seed"),
        (1.5, 1, r"seed: expected an integer.*got 1\.5"),
        (True, 1, r"seed: expected an integer.*got True"),
        ("3", 1, r"seed: expected an integer.*got '3'"),
        ([1, 2], 3, r"seed: 2 seeds for num_chains=3"),
        ([], 1, r"seed: 0 seeds for num_chains=1"),
        ([1, 1], 2, r"seed: two chains have the same seed"),
        ([1, -2], 2, r"seed: expected 0 ≤ seed < 2\^128, got -2"),
        ([1, 2.0], 2, r"seed: expected an integer"),
        ([[1, 2]], 1, r"seed: expected an integer"),
    ],
)
def test_seeds_that_are_refused(seed, num_chains, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check_seed(seed, num_chains)


def test_fresh_seeds_are_valid_and_differ():
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(check_seed(seed, 1) == seed < 1 << 63 for seed in seeds)


def test_the_global_generators_are_left_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    normals(KEYS[:2], 5000).averaged(3)
    IndexBlocks(KEYS[0], Role.ORDER, 10, 4)(0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
