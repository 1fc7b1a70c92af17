"""A rate that is shared: no more than that together, equal parts for all that move, nothing wasted on the rest."""

from __future__ import annotations

import heapq
import random

import pytest

from shoal.reach.relay.fair_rate import LATENESS, FairRate, RateShare

pytestmark = pytest.mark.once

RATE = 1e6


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now


def simulate(clock: Clock, demands: dict[RateShare, tuple[float, int]], seconds: float) -> dict[RateShare, int]:
    """Let shares take pieces of some size whenever they may, or at a pace of their own; returns what each took."""
    end = clock.now + seconds
    taken = dict.fromkeys(demands, 0)
    queue = [(clock.now, number, share) for number, share in enumerate(demands)]
    while queue and queue[0][0] < end:
        clock.now, number, share = heapq.heappop(queue)
        pace, size = demands[share]
        pause = share.take(size)
        taken[share] += size
        heapq.heappush(queue, (clock.now + max(pause, pace), number, share))
    clock.now = end
    return taken


@pytest.mark.parametrize("count", [1, 2, 8, 100])
def test_all_get_the_same_and_together_the_whole(count: int) -> None:
    clock, rng = Clock(), random.Random(1)
    counted: list[int] = []
    whole = FairRate(RATE, clock.time, counted.append)
    shares = [whole.share() for _ in range(count)]
    taken = simulate(clock, {share: (0.0, rng.choice([4096, 16384, 65536])) for share in shares}, 60.0)
    assert sum(counted) == sum(taken.values()) == pytest.approx(60 * RATE, rel=0.05 + 65536 * count / (60 * RATE))
    assert min(taken.values()) > 0.8 * max(taken.values())


def test_what_slow_ones_leave_goes_to_the_others() -> None:
    clock = Clock()
    whole = FairRate(RATE, clock.time, lambda _: None)
    slow, first, second = whole.share(), whole.share(), whole.share()
    taken = simulate(clock, {slow: (1.0, 10_000), first: (0.0, 8192), second: (0.0, 8192)}, 30.0)
    assert taken[slow] == 300_000, "it is never made to wait"
    assert sum(taken.values()) == pytest.approx(30 * RATE, rel=0.02)
    assert taken[first] == pytest.approx(taken[second], rel=0.02)


def test_a_crowd_of_strangers_gets_half() -> None:
    clock = Clock()
    whole = FairRate(RATE, clock.time, lambda _: None)
    known = [whole.share() for _ in range(2)]
    strangers = [whole.share(lambda: False) for _ in range(50)]
    taken = simulate(clock, {share: (0.0, 8192) for share in (*known, *strangers)}, 60.0)
    assert sum(taken.values()) == pytest.approx(60 * RATE, rel=0.05)
    for share in known:
        assert taken[share] == pytest.approx(15 * RATE, rel=0.05)
    assert min(taken[share] for share in strangers) > 0.7 * max(taken[share] for share in strangers)


@pytest.mark.parametrize("known_count", [0, 3])
def test_strangers_count_like_others_where_they_are_few_or_alone(known_count: int) -> None:
    clock = Clock()
    whole = FairRate(RATE, clock.time, lambda _: None)
    shares = [whole.share(lambda number=number: number < known_count) for number in range(6)]  # type: ignore[misc]
    taken = simulate(clock, {share: (0.0, 8192) for share in shares}, 60.0)
    assert sum(taken.values()) == pytest.approx(60 * RATE, rel=0.05)
    assert min(taken.values()) > 0.9 * max(taken.values())


def test_shares_come_and_go() -> None:
    clock = Clock()
    whole = FairRate(RATE, clock.time, lambda _: None)
    first, second = whole.share(), whole.share()
    alone = simulate(clock, {first: (0.0, 8192)}, 10.0)
    both = simulate(clock, {first: (0.0, 8192), second: (0.0, 8192)}, 10.0)
    second.close()
    second.close()
    again = simulate(clock, {first: (0.0, 8192)}, 10.0)
    assert alone[first] == pytest.approx(10 * RATE, rel=0.05)
    assert both[first] == pytest.approx(5 * RATE, rel=0.05)
    assert again[first] == pytest.approx(10 * RATE, rel=0.05)


def test_who_was_silent_has_saved_nothing_and_who_is_late_loses_nothing() -> None:
    clock = Clock()
    whole = FairRate(RATE, clock.time, lambda _: None)
    share = whole.share()
    assert share.take(1000) == pytest.approx(0.0, abs=0.001)
    clock.now += 3600.0
    size = int(RATE * LATENESS)
    assert share.take(size) == 0.0
    assert share.take(1000) == pytest.approx(0.001)
    clock.now += 0.001 + LATENESS / 2
    assert share.take(size // 2) == pytest.approx(0.0, abs=1e-6)


def test_without_a_limit_all_is_counted_and_nobody_waits() -> None:
    counted: list[int] = []
    share = FairRate(None, Clock().time, counted.append).share()
    assert [share.take(2**30) for _ in range(3)] == [0.0] * 3
    assert counted == [2**30] * 3
    share.close()
