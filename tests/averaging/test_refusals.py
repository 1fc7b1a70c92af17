"""Whom an averager refuses after a round, and for how long."""

from __future__ import annotations

import random

from shoal.averaging.groups.memory import MAX_REFUSED_PEERS, SEEN_SEARCHES, TOLD_SEARCHES, UNTRUE, Refusals
from shoal.p2p import Identity

RNG = random.Random(0)
A, B, C, D = (Identity.generate(RNG).peer_id for _ in range(4))


def test_what_was_seen_counts_for_some_searches():
    refusals = Refusals()
    assert refusals.note([B], [], [A, B, C], []) == [B]
    assert refusals.note([B], [], [A, B, C], []) == []  # no news
    for _ in range(SEEN_SEARCHES):
        assert set(refusals.next_search()) == {B}
    assert refusals.next_search() == {}
    assert refusals.note([B], [], [A, B, C], []) == [B]


def test_what_was_told_counts_once_and_only_of_a_minority():
    refusals = Refusals()
    assert refusals.note([], [B], [A, B, C], []) == [B]
    for _ in range(TOLD_SEARCHES):
        assert set(refusals.next_search()) == {B}
    assert refusals.next_search() == {}
    refusals.note([], [B, C], [A, B, C, D], [])
    assert refusals.next_search() == {}
    refusals.note([], [B], [A, B], [])
    assert refusals.next_search() == {}
    refusals.note([B], [C], [A, B, C, D], [])  # what was seen counts, but both are too many
    assert set(refusals.next_search()) == {B}


def test_what_was_told_does_not_shorten_what_was_seen():
    refusals = Refusals()
    refusals.note([B], [], [A, B, C], [])
    refusals.note([], [B], [A, B, C], [])
    for _ in range(SEEN_SEARCHES):
        assert B in refusals.next_search()


def test_nobody_counts_on_an_auxiliary():
    refusals = Refusals()
    refusals.note([B], [], [A, B, C], [B])
    assert [each.counts for each in refusals.next_search().values()] == [False]


def test_memory_is_bounded():
    refusals = Refusals()
    peers = [Identity.generate(RNG).peer_id for _ in range(MAX_REFUSED_PEERS + 3)]
    for peer in peers:
        refusals.note([peer], [], [A, peer], [peer])
    assert len(refusals) == MAX_REFUSED_PEERS
    assert list(refusals.next_search()) == peers[3:]


def test_a_refused_peer_is_told_the_one_reason_for_it():
    refusals = Refusals()
    refusals.note([A], [], [A, B, C, D], [])
    refusals.note([B], [], [A, B, C, D], [], UNTRUE)
    refused = refusals.next_search()
    assert refused.keys() == {A, B}
    assert "NaN or infinite" in refused[A].reason
    assert "other values than it had announced" in refused[B].reason
