"""A member that others wait for longer than its samples are worth is named once, and costs little from then on."""

from __future__ import annotations

import functools

import pytest

from tests.drills import mostly_drills
from tests.hostile.attacks.members import sends_each_piece_late
from tests.simulation.rounds import run_round, when_all_average
from tests.simulation.slow_members import Outcome, train

pytestmark = pytest.mark.timeout(600)
MEGABIT = 125e3
PEERS = 8


@functools.cache
def on_lines(slow: float | None, seed: int) -> Outcome:
    """Eight peers, epochs of a minute, and a vector of a megabyte."""
    slow_line = None if slow is None else slow * MEGABIT
    lines = {"fast_line": 100 * MEGABIT, "slow_line": slow_line}
    return train(seed, peers=PEERS, epoch_seconds=60.0, values=250_000, **lines)


@pytest.mark.parametrize("direction", ["uplink", "downlink"])
@pytest.mark.parametrize("seed", mostly_drills(range(5)))
def test_all_hear_the_same_of_a_member_that_they_waited_for(seed: int, direction: str) -> None:
    """Also if it only receives slowly: then nobody lacks anything but its word."""

    def interfere(network, members):
        when_all_average(members, lambda rounds: setattr(members[0].host, direction, 400.0))

    members = run_round(seed, 5, interfere=interfere, sender_timeout=20.0, reducer_timeout=40.0)
    waits, *others = [member.result.waits for member in members]
    assert all(each == waits for each in others)
    assert [*waits] == [members[0].node.p2p.peer_id]


@pytest.mark.slow_drill
@pytest.mark.parametrize("slow", [1.0, 0.3])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_slow_line_makes_no_swarm_slower(slow: float, seed: int) -> None:
    outcome = on_lines(slow, seed)
    assert outcome.goodput >= 0.85, "seven of eight make 0.87"
    assert outcome.warnings <= PEERS, "each of the others says so once, and the slow one is told once"
    assert outcome.epochs_apart <= 1, "it follows by downloads"


@pytest.mark.slow_drill
@pytest.mark.parametrize("seed", [1, 2])
def test_equal_lines_lose_nobody(seed: int) -> None:
    outcome = on_lines(None, seed)
    assert outcome.goodput >= 0.95
    assert outcome.rounds_with_it >= 8
    assert outcome.warnings == 0


@pytest.mark.parametrize("case", mostly_drills([(1, 6, 10), (1, 10, 20), (2, 10, 20), (3, 10, 20)]), ids=str)
def test_a_member_that_sends_each_piece_late_is_named_and_costs_little(case: tuple[int, int, int]) -> None:
    seed, peers, epochs = case
    options = {"peers": peers, "epoch_seconds": 10.0, "values": 20_000, "fast_line": 100 * MEGABIT, "epochs": epochs}
    peace = train(seed, **options)
    outcome = train(seed, **options, lie=sends_each_piece_late)
    assert outcome.goodput_of_others >= 0.9 * peace.goodput
    assert outcome.told
    assert outcome.warnings <= 10
