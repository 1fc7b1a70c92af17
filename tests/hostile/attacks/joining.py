"""Strangers who join groups, and do nothing there."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable

from shoal.averaging.messages import JoinReply, JoinRequest, RoundStatus, StatusReply, StatusRequest
from shoal.averaging.node import AveragerNode
from shoal.base.clock import get_dht_time
from shoal.p2p import Call, P2PContext, PeerID, ServicerBase
from tests.hostile.attacker import FAILURES, PACE, Attacker, FalseTracker

SETTINGS = ("shapes, types and roles of tensors", "compression", "part_size_bytes", "phases", "quorum")
"""What members agree about; everybody can read these names in the source."""


class SilentMember(ServicerBase):
    """Says that it is at work, and never sends anything."""

    @classmethod
    def handle_name(cls, method: str, namespace: str | None) -> str:
        return AveragerNode.handle_name(method, namespace)

    async def rpc_reduce(self, call: Call, context: P2PContext) -> None:
        await asyncio.Event().wait()

    async def rpc_complete(self, call: Call, context: P2PContext) -> None:
        await asyncio.Event().wait()

    async def rpc_round_status(self, request: StatusRequest, context: P2PContext) -> StatusReply:
        return StatusReply(status=int(RoundStatus.RUNNING))


async def _settings_of(me: Attacker, peer: PeerID, key: str) -> dict[str, str]:
    """Ask to join with other settings: the refusal tells those that were named."""
    async with me.averager(peer).rpc_join_group() as call:
        await call.send(JoinRequest(key, dict.fromkeys(SETTINGS, "?"), get_dht_time() + 60, 0), end=True)
        reply = await call.receive(JoinReply)
    assert reply is not None
    told = [re.search(rf"{name} is '([^']*)' there", reply.text) for name in SETTINGS]
    return {name: found.group(1) for name, found in zip(SETTINGS, told, strict=True) if found is not None}


async def _again_and_again(me: Attacker, blow: Callable[[PeerID], Awaitable[None]], peer: PeerID) -> None:
    while True:
        await me.strike(blow, [peer])
        await asyncio.sleep(PACE / 10)


async def joins_with_absurd_wishes(me: Attacker) -> None:
    """A stranger. Joins with impossible, then with the largest bandwidth and group, and is silent. Rounds go on."""
    await SilentMember().add_p2p_handlers(me.p2p, namespace=f"{me.run}_grad_averager")
    # Who leads asks whether they train the same model.
    await FalseTracker(me).add_p2p_handlers(me.p2p, namespace=f"{me.run}_progress")
    key = f"{me.run}_grad_averager.0b"
    wishes = [{"bandwidth": bandwidth} for bandwidth in (math.nan, -1.0, math.inf)]
    wishes += [{"gathered": bytes(900_000)}, {"bandwidth": 1e12, "expected_group_size": 10**6}]
    settings: dict[str, str] = {}

    async def join(peer: PeerID) -> None:
        if not settings:
            settings.update(await _settings_of(me, peer, key))
            return
        for wish in wishes:
            try:
                async with me.averager(peer).rpc_join_group() as call:
                    await call.send(JoinRequest(key, settings, get_dht_time() + 60, 0, **wish))
                    while await call.receive(JoinReply) is not None:
                        me.has_struck.set()
            except FAILURES:
                continue

    async with asyncio.TaskGroup() as tasks:
        for peer in await me.victims():
            tasks.create_task(_again_and_again(me, join, peer))
