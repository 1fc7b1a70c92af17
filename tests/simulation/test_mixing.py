"""Averaging in small groups, again and again in other ones: everybody gets the mean of all."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.simulation.mixing import SPREAD, mix


def test_eight_peers_in_groups_of_two_have_the_mean_after_three_rounds():
    spreads = mix(8, 2, 4)
    assert all(spread.group_sizes == {2: 8} for spread in spreads[1:])
    assert all(spread.shift < 1e-6 for spread in spreads)
    deviations = [spread.standard_deviation for spread in spreads]
    assert all(after <= before + 1e-7 for before, after in itertools.pairwise(deviations))
    assert deviations[0] > SPREAD / 2
    assert spreads[3].largest < 1e-6
    assert spreads[4].largest < 1e-6


def test_full_buckets_mix_in_a_logarithmic_number_of_rounds():
    peers, group_size = 64, 8
    rounds = math.ceil(math.log(peers, group_size))
    spreads = mix(peers, group_size, rounds)
    assert all(spread.group_sizes == {group_size: peers} for spread in spreads[1:])
    assert spreads[rounds - 1].largest > 1e-3
    assert spreads[rounds].largest < 1e-6


@pytest.mark.slow_drill
def test_buckets_that_are_not_full_mix_too():
    spreads = mix(50, 8, 5)
    assert all(max(spread.group_sizes) <= 8 for spread in spreads[1:])
    assert sum(spreads[1].group_sizes.values()) == 50
    assert spreads[4].largest < SPREAD / 10
    assert spreads[5].largest < spreads[4].largest
    assert all(spread.shift < 1e-6 for spread in spreads)
