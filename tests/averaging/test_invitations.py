"""How invitations end that nobody needs any more."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from shoal.averaging.groups import leading
from shoal.averaging.groups.candidates import Offer
from shoal.averaging.groups.leading import Invitations
from shoal.p2p import Identity


@pytest.fixture
def peers():
    rng = random.Random(0)
    return [Identity.generate(rng).peer_id for _ in range(2)]


def make_search(group, pending):
    future = asyncio.get_running_loop().create_future()
    if group is not None:
        future.set_result(SimpleNamespace(peer_ids=group))
    return SimpleNamespace(group=future, pending=pending, unseen={}, offers={})


async def test_members_of_the_group_end_them_and_others_are_cut_off(peers, monkeypatch):
    monkeypatch.setattr(leading, "MEMBER_PATIENCE", 0.2)
    member, stranger = peers
    may_end = asyncio.Event()
    pending = {peer: asyncio.ensure_future(may_end.wait()) for peer in peers}
    Invitations.end(make_search([member], pending))
    await asyncio.wait([pending[stranger]])
    assert pending[stranger].cancelled()
    may_end.set()
    assert await pending[member]


async def test_a_member_that_does_not_is_cut_off_later(peers, monkeypatch):
    monkeypatch.setattr(leading, "MEMBER_PATIENCE", 0.01)
    pending = {peers[0]: asyncio.ensure_future(asyncio.Event().wait())}
    Invitations.end(make_search(peers, pending))
    await asyncio.wait(pending.values())
    assert pending[peers[0]].cancelled()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_without_a_group_all_are_cut_off_and_those_who_invited_are_told(peers, cancelled):
    pending = {peer: asyncio.ensure_future(asyncio.Event().wait()) for peer in peers}
    search = make_search(None, pending)
    if cancelled:
        search.group.cancel()
    offer = search.offers[peers[0]] = Offer(call=None, outcome=asyncio.get_running_loop().create_future())
    Invitations.end(search)
    await asyncio.wait(pending.values())
    assert all(task.cancelled() for task in pending.values())
    assert await offer.outcome is None
