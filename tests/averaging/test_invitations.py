"""How invitations end that are not needed any more."""

from __future__ import annotations

import asyncio
import random

import pytest

from shoal.averaging.groups import matchmaking
from shoal.averaging.groups.matchmaking import end_invitations
from shoal.p2p import Identity


@pytest.fixture
def peers():
    rng = random.Random(0)
    return [Identity.generate(rng).peer_id for _ in range(2)]


async def test_members_end_invitations_others_are_cut(peers, monkeypatch):
    monkeypatch.setattr(matchmaking, "MEMBER_PATIENCE", 0.2)
    member, stranger = peers
    may_end = asyncio.Event()
    pending = {peer: asyncio.ensure_future(may_end.wait()) for peer in peers}
    end_invitations(pending, [member])
    await asyncio.wait([pending[stranger]])
    assert pending[stranger].cancelled()
    may_end.set()
    assert await pending[member]


async def test_a_member_that_does_not_is_cut_later(peers, monkeypatch):
    monkeypatch.setattr(matchmaking, "MEMBER_PATIENCE", 0.01)
    pending = {peers[0]: asyncio.ensure_future(asyncio.Event().wait())}
    end_invitations(pending, peers)
    await asyncio.wait(pending.values())
    assert pending[peers[0]].cancelled()
