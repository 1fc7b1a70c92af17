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


def ask(reception: Connectivity, number: int, *, answers: bool) -> bool:
    """One call; whether a silence is held against the peer."""
    asked_at = reception.begin_call()
    try:
        if answers:
            reception.note_answer(peer(number))
            return False
        return reception.note_silence(peer(number), asked_at)
    finally:
        reception.end_call()


@in_virtual_time
async def test_one_dead_peer_of_three_is_found_out_at_once():
    reception = Connectivity()
    ask(reception, 0, answers=True)
    assert ask(reception, 1, answers=False)
    assert not reception.is_lost


@in_virtual_time
async def test_a_single_peer_that_is_silent_is_not_excused():
    assert ask(Connectivity(), 0, answers=False)


@in_virtual_time
async def test_when_most_are_silent_nobody_is_to_blame():
    reception = Connectivity()
    ask(reception, 0, answers=True)
    assert ask(reception, 1, answers=False)
    assert not ask(reception, 2, answers=False)
    assert not ask(reception, 2, answers=False), "the same one again"
    for number in range(3, 6):
        ask(reception, number, answers=True)
    assert ask(reception, 2, answers=False), "most answer again"


@in_virtual_time
async def test_what_was_long_ago_does_not_count():
    reception = Connectivity()
    for number in range(4):
        ask(reception, number, answers=False)
    await asyncio.sleep(WINDOW_SECONDS)
    assert ask(reception, 5, answers=False)


@in_virtual_time
async def test_who_stays_silent_while_others_are_heard_is_gone_even_if_most_are():
    reception = Connectivity()
    ask(reception, 0, answers=True)
    for number in (1, 2, 3):
        ask(reception, number, answers=False)
    await asyncio.sleep(WINDOW_SECONDS / 2)
    ask(reception, 0, answers=True)
    assert not ask(reception, 3, answers=False), "too early"
    await asyncio.sleep(WINDOW_SECONDS / 2)
    for number in (2, 3):
        ask(reception, number, answers=False)
    assert ask(reception, 3, answers=False)


@in_virtual_time
async def test_in_an_outage_of_any_length_nobody_is_to_blame():
    reception = Connectivity()
    assert ask(reception, 0, answers=False), "this one may as well be dead"
    for _ in range(100):
        for number in range(1, 4):
            assert not ask(reception, number, answers=False)
        await asyncio.sleep(5)


@in_virtual_time
async def test_the_swarm_is_lost_when_nobody_answers_for_a_while_and_found_with_the_first_answer():
    heard = []
    reception = Connectivity()
    reception.on_heard = lambda: heard.append(True)
    ask(reception, 0, answers=False)
    await asyncio.sleep(1000)
    assert not reception.is_lost, "nobody has ever answered"
    ask(reception, 0, answers=True)
    heard.clear()
    await asyncio.sleep(1000)
    assert not reception.is_lost, "nobody was asked"
    ask(reception, 0, answers=False)
    assert reception.is_silent
    assert not reception.is_lost
    await asyncio.sleep(WINDOW_SECONDS)
    assert not reception.is_lost, "nobody was asked again"
    ask(reception, 1, answers=False)
    assert reception.is_lost
    ask(reception, 1, answers=True)
    assert not reception.is_silent
    assert not reception.is_lost
    assert heard == [True]


@in_virtual_time
async def test_those_who_were_excused_are_remembered_up_to_a_limit():
    reception = Connectivity()
    for number in range(MAX_EXCUSED + 10):
        ask(reception, number, answers=False)
    assert len(reception.excused) == MAX_EXCUSED


@pytest.mark.parametrize("is_beating", [True, False], ids=["while the heart beats", "before it can"])
async def test_nobody_is_to_blame_if_the_loop_was_late(is_beating):
    reception = Connectivity()
    asked_at = reception.begin_call()
    time.sleep(1.0)  # noqa: ASYNC251 - the loop stands still
    if is_beating:
        await asyncio.sleep(0.01)
    assert not reception.note_silence(peer(1), asked_at)
    assert not reception.is_silent, "the answer may be there, unread"
    reception.end_call()
    reception.close()
