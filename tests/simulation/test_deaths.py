"""Members that die in the middle of a round: the others finish it, with the same bytes, from those who delivered."""

from __future__ import annotations

import asyncio

import pytest

from shoal.testing import Link
from tests.simulation.deaths import (
    NOTICE_CRASH_SECONDS,
    NOTICE_SILENCE_SECONDS,
    check_survivors,
    deaths,
    run_round_with_deaths,
)
from tests.simulation.rounds import STAGGER, WIDE_AREA, WINDOW, run_round

NO_LOSS = Link(delay=WIDE_AREA.delay, jitter=0.01)


@pytest.mark.parametrize("when", ["looking for a group", "all-reduce"])
@pytest.mark.parametrize("kind", ["crash", "power_off"])
def test_survivors_finish_the_round(kind, when):
    first, last = (0.0, WINDOW) if when == "looking for a group" else (WINDOW - 0.2, WINDOW + STAGGER + 1)
    notice = NOTICE_CRASH_SECONDS if kind == "crash" else NOTICE_SILENCE_SECONDS
    size, dying, runs = 8, 3, 10
    averaged = 0
    for seed in range(runs):
        members = run_round(seed, size, link=NO_LOSS, interfere=deaths(dying, first, last, kind))
        averaged += check_survivors(members, 2 * WINDOW + STAGGER + notice)
    assert averaged >= 0.9 * runs * (size - dying)


@pytest.mark.parametrize("after", [0.0, 0.15, 0.3])
@pytest.mark.parametrize("count", [1, 2])
def test_silent_coordinators_are_paid_for_only_once(count, after):
    """The first ones in the order of coordinators fall silent, at some moment of the all-reduce."""
    died = []

    def interfere(network, members):
        loop = asyncio.get_running_loop()

        def look():
            rounds = [current for member in members for current in member.node._rounds._running.values()]
            if len(rounds) == len(members):
                loop.call_later(after, silence, rounds[0]._allreduce)
            else:
                loop.call_later(0.01, look)

        def silence(allreduce):
            died.append(loop.time())
            for index in allreduce.coordinators[:count]:
                network.host_of(allreduce.group.peer_ids[index]).power_off()

        look()

    members = run_round(1, 8, link=NO_LOSS, interfere=interfere)
    living = [member for member in members if member.host.is_up]
    assert len(living) == 8 - count
    silence = living[0].node.config.sender_timeout
    check_survivors(members, died[0] + silence + 2)  # for the ways there and back


def test_who_freezes_after_sending_everything_costs_no_more_either():
    """Of a reducer nobody waits for anything then but averages, for which the limit is longer."""
    frozen = []

    def interfere(network, members):
        loop = asyncio.get_running_loop()

        def look():
            rounds = [current._allreduce for member in members for current in member.node._rounds._running.values()]
            if len(rounds) == len(members):
                victims = rounds[0].coordinators[::7]  # the one who would notice, and another one
                waiting = set().union(*(each._reducer.waiting_for for each in rounds if each.own_index not in victims))
                if not waiting.intersection(victims):
                    frozen.append(loop.time())
                    for index in victims:
                        network.host_of(rounds[0].group.peer_ids[index]).power_off()
                    return
            loop.call_later(0.001, look)

        look()

    members = run_round(1, 8, link=NO_LOSS, interfere=interfere)
    living = [member for member in members if member.host.is_up]
    assert len(living) == 6
    assert all(member.result.failed_peers for member in living), "they have not got all averages of the frozen"
    silence = living[0].node.config.sender_timeout
    check_survivors(members, frozen[0] + silence + 1)


def test_many_deaths_of_all_kinds_on_failing_links():
    size, dying, runs = 16, 8, 4
    averaged = sum(run_round_with_deaths(seed, size, dying) for seed in range(runs))
    assert averaged >= 0.8 * runs * (size - dying)
