"""A download takes no more bytes in a second than it may, and is not left for slowness because of that."""

from __future__ import annotations

import math

import pytest

from shoal.averaging.state.download import RateMeter

RATE = 1e6


def test_pauses_follow_from_the_rate() -> None:
    arrivals = RateMeter(0.0, RATE)
    arrivals.add(500_000, 0.0)
    assert arrivals.seconds_to_rest(0.0) <= 0.5
    for second in range(1, 20):
        arrivals.add(2_000_000, float(second))
    # 38.5 MB have come; a second's worth may come at once.
    assert arrivals.seconds_to_rest(19.0) == pytest.approx(38.5 - 19.0, abs=1.0)
    # Time in which nothing came is not made up for.
    arrivals = RateMeter(0.0, RATE)
    arrivals.add(3_000_000, 100.0)
    assert arrivals.seconds_to_rest(100.0) == pytest.approx(2.0)
    assert RateMeter(0.0).seconds_to_rest(0.0) == 0.0


def test_a_download_at_its_limit_is_not_slow() -> None:
    limited, free = RateMeter(0.0, RATE), RateMeter(0.0, math.inf)
    for second in range(20):
        for each in (limited, free):
            each.add(900_000, float(second))
    assert limited.is_at_limit(20.0)
    assert not free.is_at_limit(20.0)
    assert not limited.anew(20.0).is_at_limit(30.0)
