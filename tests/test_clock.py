"""The time of the swarm."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time

import pytest

from shoal.base.clock import (
    MAX_AGE_SECONDS,
    MAX_ROUND_TRIP_SECONDS,
    MAX_SOURCES,
    SETTLING_SECONDS,
    SwarmClock,
    get_clock,
    get_dht_time,
    steady_clock,
)
from shoal.testing import START_OF_TIME, run
from tests.dht.virtual_time import in_virtual_time

pytestmark = pytest.mark.oldest


def test_outside_a_loop_it_is_the_time_of_the_machine():
    before = time.time()
    assert before <= get_dht_time() <= time.time()


async def test_inside_an_ordinary_loop_too():
    before = time.time()
    assert before <= get_dht_time() <= time.time()


@in_virtual_time
async def test_a_loop_may_bring_its_own_time():
    assert get_dht_time() == START_OF_TIME
    await asyncio.sleep(3600)
    assert get_dht_time() == START_OF_TIME + 3600


def test_an_hour_of_virtual_time_passes_at_once():
    before = time.monotonic()
    run(asyncio.sleep(3600))
    assert time.monotonic() - before < 60


@in_virtual_time
async def test_timeout_follows_the_time_of_the_loop():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10):
            await asyncio.sleep(11)
    assert get_dht_time() == START_OF_TIME + 10


@in_virtual_time
async def test_a_loop_with_virtual_time_has_a_clock_of_its_own():
    get_clock().hear("other", get_dht_time() + 100, 0.0, 0.1)
    assert get_clock().sources == {"other": pytest.approx(100.05)}


class Laboratory:
    """A machine whose clock is ahead of the true time, which passes when the test says so."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.true_time, self.ahead = 1_000_000.0, ahead
        self.clock = SwarmClock(lambda: self.true_time + self.ahead, lambda: self.true_time)

    def hear(
        self, source: str, ahead: float = 0.0, *, offset: float = 0.0, round_trip: float = 0.1, is_mate: bool = False
    ) -> None:
        """A peer whose time is ahead of the true one, and whose clock is still further ahead of that."""
        self.clock.hear(source, self.true_time - round_trip / 2 + ahead, offset, round_trip, is_mate=is_mate)

    @property
    def error(self) -> float:
        return self.clock.time() - self.true_time


def test_two_others_that_agree_are_believed():
    machine = Laboratory(ahead=300)
    machine.hear("a")
    assert machine.error == 300, "one alone may as well be wrong"
    machine.hear("b")
    assert machine.error == pytest.approx(0, abs=1e-6)
    assert machine.clock.offset == pytest.approx(300)


def test_the_peer_through_which_one_joins_is_believed():
    machine = Laboratory(ahead=300)
    machine.clock.join_through("a")
    machine.hear("a", 40, offset=260)
    assert machine.error == pytest.approx(40)
    machine.hear("b")
    machine.hear("c")
    assert machine.error == pytest.approx(300), "three of four clocks agree"


def test_who_joins_waits_for_the_time_until_it_is_told_once():
    machine = Laboratory()
    assert not machine.clock.is_joining
    machine.clock.add_own("me")
    machine.clock.join_through("me")
    assert not machine.clock.is_joining, "it would wait for its own opinion"
    machine.clock.join_through("a")
    assert machine.clock.is_joining
    machine.hear("a")
    assert not machine.clock.is_joining
    machine.clock.samples.clear()
    assert not machine.clock.is_joining, "what was heard long ago is still the time"


def test_machines_that_are_right_set_the_time_whoever_came_first():
    machine = Laboratory()
    machine.clock.join_through("first")
    machine.hear("first", 500)
    assert machine.error == pytest.approx(500)
    machine.hear("second", 500, offset=-500)
    assert machine.error == pytest.approx(0, abs=1e-6)


def test_who_knows_only_initial_peers_does_as_they_do():
    """Otherwise these would find that the newcomer has the wrong time, and not let it in."""
    machine = Laboratory()
    for source in "ab":
        machine.clock.join_through(source)
        machine.hear(source, 300, offset=-300)
    assert machine.error == pytest.approx(300)
    machine.hear("c", 300, offset=-300)
    assert machine.error == pytest.approx(0, abs=1e-6)


def test_initial_peers_that_disagree_are_judged_by_the_own_clock():
    machine = Laboratory()
    for source, ahead in (("a", 300), ("b", 0)):
        machine.clock.join_through(source)
        machine.hear(source, ahead)
    assert machine.error == 0
    assert not machine.clock.is_disputed


def test_what_most_take_for_the_time_counts_where_all_clocks_are_off():
    machine = Laboratory(ahead=77)
    for number, offset in enumerate([0, 100, -30, 250, 12]):
        machine.hear(str(number), 5, offset=offset)
    assert machine.error == pytest.approx(5)


def test_without_a_majority_nothing_changes():
    machine = Laboratory(ahead=50)
    for number in range(10):
        machine.hear(str(number), 100 * number)
    assert machine.error == 50
    assert machine.clock.is_disputed
    assert not SwarmClock().is_disputed


def test_small_differences_are_left_alone():
    machine = Laboratory(ahead=0.2)
    for source in "abcdef":
        machine.hear(source)
    assert machine.clock.offset == 0
    assert machine.clock.time() == machine.true_time + 0.2


@pytest.mark.parametrize("ahead", [0.8, -0.8])
def test_noticeable_ones_are_corrected(ahead):
    machine = Laboratory(ahead)
    for source in "abcdef":
        machine.hear(source)
    assert machine.error == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("time", "offset", "round_trip"),
    [
        (math.nan, 0, 0.1),
        (math.inf, 0, 0.1),
        (1e6, math.nan, 0.1),
        (1e6, -math.inf, 0.1),
        (1e6, 0, math.nan),
        (1e6, 0, math.inf),
        (0.0, 0, 0.1),
        (-5.0, 0, 0.1),
        (1e6, 0, 1e9),
    ],
)
def test_nonsense_is_not_heard(time, offset, round_trip):
    machine = Laboratory()
    machine.clock.hear("a", time, offset, round_trip)
    assert machine.clock.sources == {}


def test_peers_of_the_same_process_have_no_vote():
    machine = Laboratory(ahead=300)
    machine.clock.add_own("me")
    machine.hear("me", 300)
    assert machine.clock.sources == {}
    machine.clock.remove_own("me")
    machine.hear("me", 300)
    assert machine.clock.sources == {"me": pytest.approx(0)}


def test_a_peer_has_one_vote():
    machine = Laboratory()
    machine.hear("honest")
    for _ in range(100):
        machine.hear("liar", 1000)
        machine.hear("liar", -1000)
    assert machine.error == 0


def test_a_crowd_of_newcomers_outvotes_nobody():
    machine = Laboratory()
    for number in range(MAX_SOURCES):
        machine.hear(f"old {number}")
    for number in range(1000):
        machine.hear(f"new {number}", 1000)
    assert machine.error == 0
    assert len(machine.clock.sources) == MAX_SOURCES
    machine.true_time += MAX_AGE_SECONDS + 1
    machine.hear("new")
    assert list(machine.clock.sources) == ["new"]


def test_whoever_claims_to_be_near_does_not_outvote_two():
    machine = Laboratory(ahead=10)
    for source in "ab":
        machine.hear(source, 0.0, round_trip=0.2)
    machine.clock.hear("liar", machine.true_time + 2.5, 0.0, -1.0)
    assert machine.error == pytest.approx(0, abs=1e-6)


def test_what_an_exchange_cannot_tell_from_no_difference_is_none():
    machine = Laboratory(ahead=1.2)
    for source in "abcdef":
        machine.hear(source, round_trip=2.0)  # perhaps all of them were slow in one direction
    assert machine.clock.offset == 0
    for source in "abcdef":
        machine.hear(source, round_trip=0.5)
    assert machine.error == pytest.approx(0, abs=1e-6)
    machine.hear("a", -100.0, round_trip=MAX_ROUND_TRIP_SECONDS + 0.1)
    assert machine.clock.sources["a"] == pytest.approx(-1.2)


@pytest.mark.parametrize("ahead", [2.0, -2.0])
def test_a_difference_that_is_found_later_goes_away_slowly(ahead):
    machine = Laboratory(ahead)
    machine.hear("a", ahead)
    machine.true_time += SETTLING_SECONDS + 1
    for source in "bcdef":
        machine.hear(source)
    assert machine.error == pytest.approx(ahead, abs=0.01)
    last = machine.clock.time()
    for _ in range(130):
        machine.true_time += 1.0
        assert machine.clock.time() > last
        last = machine.clock.time()
    assert machine.error == pytest.approx(0, abs=1e-6)


def settled(ahead: float = 0.0) -> Laboratory:
    """A machine that three others have agreed with for long."""
    machine = Laboratory(ahead)
    for _ in range(3):
        for source in "abc":
            machine.hear(source)
        machine.true_time += 300.0
    return machine


def hear_honest(machine: Laboratory) -> None:
    for source in "abc":
        machine.hear(source)


def attack(machine: Laboratory, ahead: float) -> None:
    """Seven newcomers agree about another time."""
    for number in range(7):
        machine.hear(f"liar {number}", ahead)


@pytest.mark.parametrize("own_error", [0.0, 300.0])
@pytest.mark.parametrize("ahead", [1e6, -1e6, 20.0, -20.0])
def test_a_settled_time_is_moved_slowly_by_a_crowd_of_newcomers(ahead, own_error):
    machine = settled(own_error)
    attack(machine, ahead)
    assert machine.error == pytest.approx(0, abs=1e-3)
    last = machine.clock.time()
    for _ in range(10):
        machine.true_time += 60
        attack(machine, ahead)
        hear_honest(machine)
        assert last < machine.clock.time()
        last = machine.clock.time()
    assert abs(machine.error) == pytest.approx(10, abs=0.1)
    # When the newcomers have been away for long, those who agreed before are the majority again.
    for _ in range(7):
        machine.true_time += MAX_AGE_SECONDS / 6
        hear_honest(machine)
    assert machine.error == pytest.approx(0, abs=0.3)


def test_a_settled_time_stays_so_while_the_crowd_contradicts_itself():
    machine = settled()
    for minute in range(30):
        machine.true_time += 60
        attack(machine, 1e6 + 10 * minute)
    assert 0 < machine.error < 31


@pytest.mark.parametrize("mates", ["ab", "abc"])
def test_a_crowd_that_has_agreed_first_does_not_move_a_settled_time_if_it_is_in_no_rounds(mates):
    machine = settled()
    attack(machine, 0.0)
    for _ in range(30):
        machine.true_time += 60
        for source in mates:
            machine.hear(source, is_mate=True)
        attack(machine, 1000.0)
    assert machine.error == pytest.approx(0, abs=1e-3)
    for source in mates:
        machine.hear(source, 500.0, is_mate=True)
    assert machine.error == pytest.approx(500, abs=0.1), "those who have delivered move it"


def test_one_mate_alone_does_not_keep_a_clock_wrong():
    machine = settled()
    for _ in range(10):
        machine.true_time += 60
        machine.hear("a", is_mate=True)
        attack(machine, 20.0)
    assert machine.error == pytest.approx(9, abs=0.1), "a second in each minute since the first"


def test_when_most_change_their_minds_a_settled_time_follows_at_once():
    machine = settled()
    for source in "abc":
        machine.hear(source, 500)
    assert machine.error == pytest.approx(500, abs=0.1)


def test_newcomers_do_not_pass_for_a_majority_that_has_changed_its_mind():
    machine = settled()
    machine.hear("a", 500)
    attack(machine, 500)
    machine.true_time += 60
    assert abs(machine.error) < 2


def test_after_an_outage_the_time_is_settled_anew():
    machine = settled()
    machine.clock.settle_anew()
    attack(machine, 1000)
    assert machine.error == pytest.approx(1000, abs=0.1)


@pytest.mark.parametrize("jump", [120.0, -120.0, 7200.0, -7200.0])
def test_the_time_does_not_jump_with_the_clock_of_the_machine(jump, caplog):
    machine, noticed = settled(300.0), list[float]()
    machine.clock.on_jump["me"] = lambda: noticed.append(machine.clock.offset)
    before = machine.clock.time()
    caplog.clear()
    machine.ahead += jump
    with caplog.at_level(logging.WARNING, logger="shoal.base.clock"):
        assert machine.clock.time() == pytest.approx(before, abs=1e-6)
        for _ in range(3):
            hear_honest(machine)
            machine.true_time += 60
    assert machine.error == pytest.approx(0, abs=1e-6)
    assert noticed == [pytest.approx(300 + jump)]
    assert machine.clock.offset == pytest.approx(300 + jump)
    [record] = caplog.records
    assert f"has jumped by {jump:+.1f} seconds. It is now {abs(300 + jump):.1f} seconds" in record.getMessage()
    assert "NTP" in record.getMessage()


def test_a_jump_that_puts_the_clock_right_leaves_no_correction(caplog):
    machine = Laboratory(ahead=-3600)
    for source in "abc":
        machine.hear(source)
    machine.true_time += 100
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="shoal.base.clock"):
        machine.ahead = 0.01
        assert machine.error == pytest.approx(0, abs=1e-6)
        machine.hear("a")
    assert machine.clock.offset == 0
    assert machine.error == pytest.approx(0.01)
    [record] = caplog.records
    assert "agrees with the other peers now" in record.getMessage()


def test_without_others_the_time_is_that_of_the_machine(caplog):
    machine = Laboratory()
    with caplog.at_level(logging.WARNING, logger="shoal.base.clock"):
        machine.ahead = 5000
        assert machine.error == 5000
        machine.hear("a", 5000)
        machine.true_time += MAX_AGE_SECONDS + 1
        machine.ahead = 0
        assert machine.error == 0
    assert not caplog.records


def test_others_that_only_call_are_others_too():
    machine = Laboratory()
    machine.clock.meet()
    machine.ahead = 5000
    assert machine.error == 0


@pytest.mark.parametrize("others", ["a", "ab", "abc"])
def test_a_machine_that_stood_still_is_right_as_soon_as_it_hears_others(others):
    """A virtual machine was paused: both of its clocks stood still, and then the one was set."""
    machine, slept = Laboratory(), 5000.0
    for _ in range(3):
        for source in others:
            machine.hear(source)
        machine.true_time += 300.0
    stood_still = machine.clock._monotonic
    machine.clock._monotonic = lambda: stood_still() - slept
    machine.true_time += slept
    assert machine.error == pytest.approx(-slept), "it cannot know better"
    for source in others:
        machine.hear(source)
    assert machine.error == pytest.approx(0, abs=1e-6)
    assert machine.clock.offset == 0


def test_a_slow_drift_is_no_jump(caplog):
    """Some systems slow their clock down, or speed it up, and not the one that counts seconds."""
    machine = settled()
    for _ in range(100):
        machine.true_time += 600
        machine.ahead += 0.05
        hear_honest(machine)
        machine.ahead -= 0.05
        machine.hear("a")
    for _ in range(100):
        machine.true_time += 600
        drifted = machine.clock._monotonic
        machine.clock._monotonic = lambda drifted=drifted: drifted() + 0.03
        hear_honest(machine)
        assert machine.error == pytest.approx(0, abs=1e-6)
    assert not caplog.records


def test_a_thread_that_is_held_up_between_two_readings_sees_no_jump():
    machine, naps = settled(), [40.0]

    def wall() -> float:
        shown = machine.true_time
        machine.true_time += naps.pop() if naps else 0.0
        return shown

    machine.clock._wall = wall
    machine.clock.on_jump["me"] = lambda: pytest.fail("no clock has jumped")
    assert machine.clock.time() == pytest.approx(machine.true_time)
    assert machine.clock.offset == 0


def test_the_clock_that_counts_goes_on_while_the_machine_sleeps():
    if sys.platform != "linux":
        pytest.skip("other systems have other clocks")
    assert steady_clock()() == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=1)


def test_the_user_is_told_once(caplog):
    with caplog.at_level(logging.WARNING, logger="shoal.base.clock"):
        machine = Laboratory(ahead=-300)
        for source in "abcdef":
            machine.hear(source)
        [record] = caplog.records
        assert "the clock of this machine is 300.0 seconds behind" in record.getMessage()
        assert "NTP" in record.getMessage()
        machine.ahead = 0
        for source in "abcdef":
            machine.hear(source)
    assert "agrees with the other peers now" in caplog.records[-1].getMessage()
    assert len(caplog.records) == 2
