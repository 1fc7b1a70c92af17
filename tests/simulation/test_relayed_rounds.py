"""Rounds of averagers behind routers: over direct connections where that is possible, and when a relay dies meanwhile.

``python -m tests.simulation.relayed_rounds`` tries more kinds of trouble, and more seeds.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from shoal.net.transport import Stream
from shoal.p2p import Multiaddr, PeerID
from shoal.reach.relay.circuits import OutgoingCircuits
from shoal.testing import Link
from tests.drills import mostly_drills
from tests.simulation.relayed_rounds import WHAT, Scene, run_round, seconds_over

HARD, EASY = ["symmetric"] * 4, ["port-restricted"] * 4


def test_relays_carry_next_to_nothing_where_routers_can_be_passed() -> None:
    easy = run_round(1, EASY)
    easy.check(4)
    assert easy.relayed < 100_000
    hard = run_round(1, HARD)
    hard.check(4)
    assert hard.relayed > 4_000_000
    assert hard.seconds < 1.2 * easy.seconds


@pytest.mark.parametrize("seed", mostly_drills([1, 2]))
def test_relays_carry_next_to_nothing_on_long_and_unsteady_lines(seed: int) -> None:
    """Punches take seconds there. Whatever is dialled meanwhile waits for one of its own."""
    far = run_round(seed, EASY, link=Link(delay=0.15, jitter=0.1), window=15.0)
    far.check(4)
    assert far.relayed < 100_000


@pytest.mark.parametrize("kinds", mostly_drills([HARD, EASY, ["symmetric", "symmetric", "port-restricted", "public"]]))
@pytest.mark.parametrize("seed", mostly_drills(range(2)))
def test_a_relay_that_crashes_costs_a_moment_and_no_member(kinds: list[str], seed: int) -> None:
    assert seconds_over(seed, kinds, "crash") <= 2.0


def test_direct_connections_that_break_cost_a_moment() -> None:
    assert seconds_over(1, EASY, "break") <= 1.0


def test_after_a_break_one_question_to_a_relay_brings_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dial takes many round trips, so one after the other would take as long again."""
    asked: list[tuple[PeerID, PeerID, int]] = []
    pair: set[PeerID] = set()

    class Counting(OutgoingCircuits):
        def __init__(self, endpoint: Any, *others: Any) -> None:
            super().__init__(endpoint, *others)
            self.peer_id = endpoint.peer_id

        async def dial(self, address: Multiaddr, target: PeerID, count: int = 1) -> list[Stream]:
            if {self.peer_id, target} == pair:
                asked.append((self.peer_id, target, count))
            return await super().dial(address, target, count)

    def interfere(scene: Scene) -> None:
        pair.update(member.node.p2p.peer_id for member in scene.members[:2])
        WHAT["break"](scene)

    monkeypatch.setattr("shoal.p2p.p2p.OutgoingCircuits", Counting)
    run_round(1, EASY, interfere).check(4)
    assert sorted(each[:2] for each in asked) == sorted(permutations(pair))
    assert all(count > 1 for _, _, count in asked)


def test_direct_connections_need_no_relay_any_more() -> None:
    assert seconds_over(1, EASY, "all relays") <= 0.5
