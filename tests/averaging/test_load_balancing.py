"""How the vector is split among members."""

from __future__ import annotations

import random

import pytest

from shoal.averaging.control import AveragingMode
from shoal.averaging.groups.group import spare_relays
from shoal.averaging.round.parts import load_balance_peers
from shoal.reach.reachability import Reach


@pytest.mark.parametrize(
    ("size", "bandwidths", "min_size", "expected"),
    [
        (60, [0.25] * 4, 0, (15, 15, 15, 15)),
        (60, [0.55, 0.44, 0.40], 10, (41, 19, 0)),
        (60, [0.32, 0.55, 0.44], 10, (0, 40, 20)),
        (2, [0.55, 0.2, 0.44], 10, (1, 0, 1)),
        (1, [0.55, 0.2, 0.44], 10, (1, 0, 0)),
        (100, (None, None), 0, (50, 50)),
        (100, (0, 0, 0, None, None), 0, (0, 0, 0, 50, 50)),
        (2**20, [0, 0.5, 0, 0.6], 0, (0, 428963, 0, 619613)),
        (10, [7.0], 0, (10,)),
        (100, [1.0, 3.0], 0, (50, 50)),
        (0, [1.0, 2.0, 3.0], 0, (0, 0, 0)),
    ],
)
def test_splits(size, bandwidths, min_size, expected):
    assert load_balance_peers(size, bandwidths, min_size) == expected


def test_somebody_must_be_able():
    with pytest.raises(AssertionError, match="at least one"):
        load_balance_peers(100, [0, 0, 0])


def slowest(shares, bandwidths, size):
    count = len(bandwidths)
    return max(
        (1 + (count - 2) * share / size) / speed for share, speed in zip(shares, bandwidths, strict=True) if speed
    )


@pytest.mark.parametrize("seed", range(50))
def test_no_small_change_makes_the_slowest_peer_faster(seed):
    rng = random.Random(seed)
    size = 10**9
    bandwidths = [rng.choice([0.0, rng.uniform(0.01, 1), rng.uniform(0.5, 1)]) for _ in range(rng.randint(3, 12))]
    bandwidths[0] = 0.7
    shares = load_balance_peers(size, bandwidths)
    assert sum(shares) == size
    assert all(share == 0 for share, speed in zip(shares, bandwidths, strict=True) if not speed)
    time = slowest(shares, bandwidths, size)
    for _ in range(200):
        giver, taker = rng.sample(range(len(bandwidths)), 2)
        moved = rng.randint(0, shares[giver])
        if not bandwidths[taker]:
            continue
        other = list(shares)
        other[giver] -= moved
        other[taker] += moved
        assert slowest(other, bandwidths, size) >= time * (1 - 1e-6)


PUBLIC, EASY, HARD = (Reach.PUBLIC, 0.0), (Reach.EASY, 0.0), (Reach.HARD, 100.0)


@pytest.mark.parametrize(
    ("bandwidths", "links", "expected"),
    [
        ([None, None, None], [PUBLIC, EASY, HARD], [1.0, 1.0, 0.25]),
        ([None, 8.0, None], [PUBLIC, EASY, HARD], [8.0, 8.0, 2.0]),
        ([None, None, None], [PUBLIC, PUBLIC, HARD], [None, None, None]),  # all its links are direct
        ([None, None, None], [PUBLIC, EASY, (Reach.HARD, 0.0)], [None, None, None]),  # its relay sets no limit
        ([None, None, 5.0], [PUBLIC, EASY, HARD], [None, None, 5.0]),  # its user knows better
        ([None, None, None], [HARD, HARD, PUBLIC], [0.25, 0.25, 1.0]),
        ([4.0, 0.0, None], [PUBLIC, EASY, HARD], [4.0, 0.0, 1.0]),
    ],
)
def test_member_behind_a_narrow_relay_reduces_less(bandwidths, links, expected):
    members = [(int(AveragingMode.NODE), bandwidth) for bandwidth in bandwidths]
    assert [bandwidth for _, bandwidth in spare_relays(members, links)] == expected


def test_clients_do_not_count_for_the_mean():
    members = [(int(AveragingMode.CLIENT), 100.0), (int(AveragingMode.NODE), None), (int(AveragingMode.NODE), None)]
    assert spare_relays(members, [PUBLIC, EASY, HARD])[1:] == [(0, 1.0), (0, 0.25)]
