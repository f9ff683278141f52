"""Samplers against exact values by the rule of the truth suite: a selection that takes a minute or two."""

import dataclasses

import pytest

from devsample.samplers import SAMPLERS, SGLDKernel
from devsample.testing import case, plan, run, table

STOCHASTIC = ("SGLD", "SGHMC", "SGNHT", "RMSPropSGLD")
SELECTION = [
    *((name, sampler) for name in ("quad_1d", "quad_10d_iso_g0") for sampler in (*STOCHASTIC, "MALA", "HMC")),
    *(("quad_not_at_minimum_negative", sampler) for sampler in ("SGLD", "SGNHT", "HMC")),
    *(("quad_20d_spread", sampler) for sampler in ("SGHMC", "SGNHT", "HMC")),
    *(("linreg_n512_d8", sampler) for sampler in ("SGLD", "SGHMC", "SGNHT", "HMC")),
    *((name, sampler) for name in ("crossing_1_nb100", "crossing_11_nb100") for sampler in ("SGHMC", "HMC")),
    ("crossing_box_11_devinterp_notebook", "SGHMC"),
    ("crossing_box_11_devinterp_notebook", "HMC"),
    ("rrr_3_1_4_zero_nb1000", "SGHMC"),
    ("rrr_5_2_4_zero_nb1000", "SGNHT"),
    ("rrr_4_1_3_rank1_nb100", "HMC"),
    ("crossing_12_nb100", "HMC"),  # rare rows a hundred times as stiff as most
    ("tanh_H1_nb100", "HMC"),
]


@pytest.mark.truths
@pytest.mark.parametrize(("name", "sampler"), SELECTION)
def test_a_sampler_finds_the_exact_value(name, sampler):
    planned = plan(case(name), sampler)
    assert planned.is_required
    found = run(planned)
    assert found.passed, table([found])


def test_the_rule_asks_every_sampler_for_something():
    chosen = {sampler for _, sampler in SELECTION}
    assert set(STOCHASTIC) | {"MALA", "HMC"} == chosen
    assert chosen | {"AdamSGLD"} == set(SAMPLERS)


def test_a_chain_that_stands_still_does_not_pass():
    """Its rows start at draws of the right law, and stay: they are too few to be precise by themselves."""
    planned = plan(case("linreg_n512_d8"), "SGLD")
    still = dataclasses.replace(planned, kernel=SGLDKernel(lr=1e-12, nbeta=planned.case.nbeta))
    found = run(still, most=4 * planned.rows * planned.round)
    assert abs(found.z) < 4
    assert not found.passed
