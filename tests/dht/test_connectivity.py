"""Whether a silent peer is gone, or this machine offline or busy."""

from __future__ import annotations

import asyncio
import time

import pytest

from shoal.dht.protocol import WINDOW_SECONDS, Connectivity
from shoal.p2p import PeerID
from shoal.peers.book import PeerBook
from tests.dht.virtual_time import in_virtual_time


def peer(number: int) -> PeerID:
    return PeerID(b"peer %d" % number)


def ask(connectivity: Connectivity, number: int, *, answers: bool) -> bool:
    """One call; whether a silence is held against the peer."""
    asked_at = connectivity.begin_call()
    try:
        if answers:
            connectivity.note_answer(peer(number))
            return False
        return connectivity.note_silence(peer(number), asked_at)
    finally:
        connectivity.end_call()


@in_virtual_time
async def test_one_dead_peer_of_three_is_noticed():
    connectivity = Connectivity(PeerBook())
    ask(connectivity, 0, answers=True)
    assert ask(connectivity, 1, answers=False)
    assert not connectivity.is_lost


@in_virtual_time
async def test_single_silent_peer_is_not_excused():
    assert ask(Connectivity(PeerBook()), 0, answers=False)


@in_virtual_time
async def test_when_most_are_silent_nobody_is_to_blame():
    connectivity = Connectivity(PeerBook())
    ask(connectivity, 0, answers=True)
    assert ask(connectivity, 1, answers=False)
    assert not ask(connectivity, 2, answers=False)
    assert not ask(connectivity, 2, answers=False), "the same one again"
    for number in range(3, 6):
        ask(connectivity, number, answers=True)
    assert ask(connectivity, 2, answers=False), "most answer again"


@in_virtual_time
async def test_what_was_long_ago_does_not_count():
    connectivity = Connectivity(PeerBook())
    for number in range(4):
        ask(connectivity, number, answers=False)
    await asyncio.sleep(WINDOW_SECONDS)
    assert ask(connectivity, 5, answers=False)


@in_virtual_time
async def test_silent_majority_is_gone_once_another_answers():
    connectivity = Connectivity(PeerBook())
    ask(connectivity, 0, answers=True)
    for number in (1, 2, 3):
        ask(connectivity, number, answers=False)
    await asyncio.sleep(WINDOW_SECONDS / 2)
    ask(connectivity, 0, answers=True)
    assert not ask(connectivity, 3, answers=False), "too early"
    await asyncio.sleep(WINDOW_SECONDS / 2)
    for number in (2, 3):
        ask(connectivity, number, answers=False)
    assert ask(connectivity, 3, answers=False)


@in_virtual_time
async def test_outages_of_any_length_blame_nobody():
    connectivity = Connectivity(PeerBook())
    assert ask(connectivity, 0, answers=False), "this one may as well be dead"
    for _ in range(100):
        for number in range(1, 4):
            assert not ask(connectivity, number, answers=False)
        await asyncio.sleep(5)


@in_virtual_time
async def test_swarm_is_lost_without_answers_and_found_again():
    connectivity = Connectivity(PeerBook())
    ask(connectivity, 0, answers=False)
    await asyncio.sleep(1000)
    assert not connectivity.is_lost, "nobody has ever answered"
    ask(connectivity, 0, answers=True)
    connectivity.heard.clear()
    await asyncio.sleep(1000)
    assert not connectivity.is_lost, "nobody was asked"
    ask(connectivity, 0, answers=False)
    assert connectivity.is_silent
    assert not connectivity.is_lost
    await asyncio.sleep(WINDOW_SECONDS)
    assert not connectivity.is_lost, "nobody was asked again"
    ask(connectivity, 1, answers=False)
    assert connectivity.is_lost
    ask(connectivity, 1, answers=True)
    assert not connectivity.is_silent
    assert not connectivity.is_lost
    assert connectivity.heard.is_set()


@pytest.mark.parametrize("is_beating", [True, False], ids=["while the heart beats", "before it can"])
async def test_late_event_loop_blames_nobody(is_beating):
    connectivity = Connectivity(PeerBook())
    asked_at = connectivity.begin_call()
    time.sleep(1.0)  # noqa: ASYNC251 - the loop stands still
    if is_beating:
        await asyncio.sleep(0.01)
    assert not connectivity.note_silence(peer(1), asked_at)
    assert not connectivity.is_silent, "the answer may be there, unread"
    connectivity.end_call()
    connectivity.close()
