"""Scores: what other peers have brought to rounds, and what follows from it."""

from __future__ import annotations

import logging

import pytest

from shoal.base.bounded import MOST
from shoal.metrics import Metrics
from shoal.p2p import Identity, PeerID
from shoal.peers.book import (
    FAILURES_TO_LOSE_SHARE,
    LEAST_SECONDS,
    MAX_REST_SECONDS,
    SHARE_WASTED,
    PeerBook,
)
from shoal.peers.scores import HALF_LIFE, MAX_STRANGERS, PeerScores

pytestmark = pytest.mark.once

FRIEND, REDUCER = (Identity.generate().peer_id for _ in range(2))
BOTH = [FRIEND, REDUCER]


class Clock:
    """Stands still unless a test moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """A memory, and its clock and metrics."""

    def __init__(self) -> None:
        self.clock, self.metrics = Clock(), Metrics()
        self.book = PeerBook(on_forget=lambda peer: self.metrics.peers.pop(str(peer)))
        self.behaviour = PeerScores(self.metrics, self.clock, self.book)

    def rounds(
        self,
        count: int,
        *,
        withheld: list[PeerID] | None = None,
        seconds: float = 10.0,
        waited: float | None = None,
    ) -> None:
        """Rounds in which both others are reducers. ``waited``: seconds until those that failed did; ``None``: all."""
        for _ in range(count):
            waited = dict.fromkeys(withheld or [], seconds if waited is None else waited)
            self.behaviour.note_round(BOTH, withheld or [], BOTH, waited, seconds)


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_nothing_is_held_against_those_who_are_not_known(memory: Memory) -> None:
    assert memory.behaviour.share_of(FRIEND) == 1
    assert memory.behaviour.may_lead(FRIEND)
    assert not memory.behaviour.has_delivered(FRIEND)
    assert len(memory.book) == 0


def test_a_share_goes_step_by_step_and_comes_back(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    shares = []
    for _ in range(FAILURES_TO_LOSE_SHARE):
        memory.rounds(1, withheld=[REDUCER])
        shares.append(memory.behaviour.share_of(REDUCER))
    assert shares == [0.5, 0.25, 0.0]
    assert memory.behaviour.share_of(FRIEND) == 1
    assert not memory.behaviour.may_lead(REDUCER)
    first, last = [record.getMessage() for record in caplog.records]
    assert f"{REDUCER} kept a round waiting for 10 s" in first
    assert f"averages of peer {REDUCER} did not arrive in 3 rounds: for 200 s" in last
    assert memory.metrics.troubles == {"averages that did not come": 1, "reducers without a share": 1}
    memory.clock.now += 10.0 / SHARE_WASTED - 1
    assert memory.behaviour.share_of(REDUCER) == 0
    memory.clock.now += 2
    shares = [memory.behaviour.share_of(REDUCER)]
    for _ in range(3):
        memory.rounds(1)
        shares.append(memory.behaviour.share_of(REDUCER))
    assert shares == [0.25, 0.25, 0.5, 1.0]
    assert memory.behaviour.may_lead(REDUCER)


def test_a_reducer_that_died_at_once_is_not_to_blame_for_a_long_round(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.rounds(1, withheld=[REDUCER], seconds=10.0, waited=0.5)
    assert caplog.records == []
    assert memory.metrics.troubles == {}


def test_others_lead_after_the_first_round_whose_averages_did_not_come(memory: Memory) -> None:
    """Who leads says who reduces, and does not remember what others think of it."""
    memory.rounds(1, withheld=[REDUCER])
    assert not memory.behaviour.may_lead(REDUCER)
    assert memory.behaviour.may_lead(FRIEND)
    memory.rounds(1)
    assert memory.behaviour.may_lead(REDUCER), "its averages have come"
    memory.rounds(1, withheld=[REDUCER])
    memory.clock.now += 10.0 / SHARE_WASTED + 1
    assert memory.behaviour.may_lead(REDUCER), "it had no occasion to show it"


def test_of_two_that_are_alone_either_leads_for_longer(memory: Memory) -> None:
    memory.behaviour.note_round([REDUCER], [REDUCER], [REDUCER], {REDUCER: 10.0}, 10.0)
    assert memory.behaviour.may_lead(REDUCER)


def test_second_failure_doubles_the_rest(memory: Memory) -> None:
    memory.rounds(FAILURES_TO_LOSE_SHARE, withheld=[REDUCER])
    rest = 10.0 / SHARE_WASTED
    for _ in range(20):
        memory.clock.now += rest + 1
        assert memory.behaviour.share_of(REDUCER) > 0
        memory.rounds(1, withheld=[REDUCER])
        rest = min(2 * rest, MAX_REST_SECONDS)
        memory.clock.now += rest - 1
        assert memory.behaviour.share_of(REDUCER) == 0
        memory.clock.now -= rest - 1


def test_a_failure_that_takes_no_time_is_forgiven_soon(memory: Memory) -> None:
    memory.rounds(FAILURES_TO_LOSE_SHARE, withheld=[REDUCER], seconds=0.01)
    assert memory.behaviour.share_of(REDUCER) == 0
    memory.clock.now += LEAST_SECONDS / SHARE_WASTED + 0.1
    assert memory.behaviour.share_of(REDUCER) > 0


def test_if_everybody_fails_it_may_be_the_own_line(memory: Memory) -> None:
    memory.rounds(10, withheld=BOTH)
    assert memory.behaviour.share_of(REDUCER) == memory.behaviour.share_of(FRIEND) == 1


def test_what_is_shown_decays(memory: Memory) -> None:
    memory.rounds(4)
    memory.rounds(1, withheld=[REDUCER])
    deeds = memory.metrics.peers[str(REDUCER)]
    assert (deeds.came, deeds.delivered, deeds.excluded) == (5, 4, 1)
    assert memory.behaviour.has_delivered(REDUCER)
    memory.clock.now += HALF_LIFE
    memory.rounds(1)
    assert (deeds.came, deeds.delivered, deeds.excluded) == (3.5, 3, 0.5)


def test_leaders_that_never_start(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)  # no warning: such a leader may be in the middle of a long batch
    for number in range(FAILURES_TO_LOSE_SHARE):
        assert memory.behaviour.may_lead(FRIEND)
        memory.behaviour.note_lead(FRIEND, 5.0, started=False)
        assert bool(caplog.records) == (number == FAILURES_TO_LOSE_SHARE - 1)
    assert not memory.behaviour.may_lead(FRIEND)
    assert memory.behaviour.share_of(FRIEND) == 1, "it may reduce as well as others"
    assert str(FRIEND) in caplog.text
    memory.clock.now += 5.0 / SHARE_WASTED + 1
    assert memory.behaviour.may_lead(FRIEND)
    memory.behaviour.note_lead(FRIEND, 0.0, started=True)
    memory.behaviour.note_lead(FRIEND, 5.0, started=False)
    assert not memory.behaviour.may_lead(FRIEND)


def test_a_leader_that_waits_in_vain_within_its_budget_is_followed(memory: Memory) -> None:
    """Its guard stops after the peers of two hosts, for as long as a twentieth of the time asks for each of them."""
    for _ in range(5):
        for _ in range(2):
            memory.behaviour.note_lead(FRIEND, 5.0, started=True, in_vain=True)
            assert memory.behaviour.may_lead(FRIEND)
        memory.clock.now += 5.0 / SHARE_WASTED
    assert memory.metrics.troubles == {}


def test_a_leader_that_waits_in_vain_each_time_is_named_by_its_third_round(memory: Memory) -> None:
    for _ in range(3):
        assert memory.behaviour.may_lead(FRIEND)
        memory.clock.now += 10.0
        memory.behaviour.note_lead(FRIEND, 5.0, started=True, in_vain=True)
    assert not memory.behaviour.may_lead(FRIEND)
    assert memory.metrics.troubles == {"leaders not followed": 1}


def test_a_crowd_takes_little_memory_and_few_lines(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for number in range(MOST + 100):
        peer = PeerID(number.to_bytes(8, "big"))
        for _ in range(FAILURES_TO_LOSE_SHARE):
            memory.behaviour.note_lead(peer, 1.0, started=False)
    assert len(memory.book) == len(memory.metrics.peers) == MOST
    assert len(caplog.records) <= 5


def test_a_coordinator_that_got_stuck_does_not_lead_for_a_while(memory: Memory) -> None:
    """Each further time for twice as long; who has led well meanwhile begins anew."""
    rests = []
    for _ in range(3):
        memory.behaviour.note_stuck(FRIEND, 5.0)
        began = memory.clock.now
        assert not memory.behaviour.may_lead(FRIEND)
        while not memory.behaviour.may_lead(FRIEND):
            memory.clock.now += 1
        rests.append(memory.clock.now - began)
    assert rests == [100, 200, 400]
    assert memory.metrics.troubles == {"leaders not followed": 3}
    assert memory.behaviour.share_of(FRIEND) == 1, "it may reduce"
    memory.behaviour.note_lead(FRIEND, 1.0, started=True)
    assert memory.behaviour.may_lead(FRIEND)
    memory.behaviour.note_stuck(FRIEND, 5.0)
    memory.clock.now += 101
    assert memory.behaviour.may_lead(FRIEND)


def test_breaking_off_a_short_round_is_not_logged(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    memory.rounds(1, withheld=[REDUCER], seconds=1.0)
    assert memory.behaviour.share_of(REDUCER) == 0.5
    assert not caplog.records
    assert not memory.metrics.troubles


def test_what_strangers_take_is_counted_by_host_and_fades(memory: Memory) -> None:
    for _ in range(4):
        memory.behaviour.note_stranger("1.2.3.0/24", connects=True)
    memory.behaviour.note_stranger("1.2.3.0/24", 1000)
    memory.behaviour.note_stranger("1.2.3.0/24", is_dropped=True)
    known = memory.metrics.strangers["1.2.3.0/24"]
    assert (known.connections, known.dropped, known.nbytes) == (4, 1, 1000)
    memory.clock.now += HALF_LIFE
    memory.behaviour.note_stranger("1.2.3.0/24", 1000)
    known = memory.metrics.strangers["1.2.3.0/24"]
    assert (known.connections, known.dropped, known.nbytes) == (2, 0.5, 1500)
    for number in range(2 * MAX_STRANGERS):
        memory.behaviour.note_stranger(f"host {number}", connects=True)
    assert len(memory.metrics.strangers) == MAX_STRANGERS
    assert f"host {2 * MAX_STRANGERS - 1}" in memory.metrics.strangers
    assert not memory.metrics.peers, "they have taken part in nothing"
