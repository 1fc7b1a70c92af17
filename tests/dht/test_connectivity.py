"""Whose fault is a silence?"""

from __future__ import annotations

import asyncio
import time

import pytest

from shoal.dht.connectivity import MAX_EXCUSED, WINDOW_SECONDS, Connectivity
from shoal.p2p import PeerID
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
async def test_one_dead_peer_of_three_is_found_out_at_once():
    connectivity = Connectivity()
    ask(connectivity, 0, answers=True)
    assert ask(connectivity, 1, answers=False)
    assert not connectivity.is_lost


@in_virtual_time
async def test_a_single_peer_that_is_silent_is_not_excused():
    assert ask(Connectivity(), 0, answers=False)


@in_virtual_time
async def test_when_most_are_silent_nobody_is_to_blame():
    connectivity = Connectivity()
    ask(connectivity, 0, answers=True)
    assert ask(connectivity, 1, answers=False)
    assert not ask(connectivity, 2, answers=False)
    assert not ask(connectivity, 2, answers=False), "the same one again"
    for number in range(3, 6):
        ask(connectivity, number, answers=True)
    assert ask(connectivity, 2, answers=False), "most answer again"


@in_virtual_time
async def test_what_was_long_ago_does_not_count():
    connectivity = Connectivity()
    for number in range(4):
        ask(connectivity, number, answers=False)
    await asyncio.sleep(WINDOW_SECONDS)
    assert ask(connectivity, 5, answers=False)


@in_virtual_time
async def test_who_stays_silent_while_others_are_heard_is_gone_even_if_most_are():
    connectivity = Connectivity()
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
async def test_in_an_outage_of_any_length_nobody_is_to_blame():
    connectivity = Connectivity()
    assert ask(connectivity, 0, answers=False), "this one may as well be dead"
    for _ in range(100):
        for number in range(1, 4):
            assert not ask(connectivity, number, answers=False)
        await asyncio.sleep(5)


@in_virtual_time
async def test_the_swarm_is_lost_when_nobody_answers_for_a_while_and_found_with_the_first_answer():
    connectivity = Connectivity()
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


@in_virtual_time
async def test_those_who_were_excused_are_remembered_up_to_a_limit():
    connectivity = Connectivity()
    for number in range(MAX_EXCUSED + 10):
        ask(connectivity, number, answers=False)
    assert len(connectivity.excused) == MAX_EXCUSED


@pytest.mark.parametrize("is_beating", [True, False], ids=["while the heart beats", "before it can"])
async def test_nobody_is_to_blame_if_the_loop_was_late(is_beating):
    connectivity = Connectivity()
    asked_at = connectivity.begin_call()
    time.sleep(1.0)  # noqa: ASYNC251 - the loop stands still
    if is_beating:
        await asyncio.sleep(0.01)
    assert not connectivity.note_silence(peer(1), asked_at)
    assert not connectivity.is_silent, "the answer may be there, unread"
    connectivity.end_call()
    connectivity.close()
