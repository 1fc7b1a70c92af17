"""Strangers who look for a group as averagers do, and do not mean it."""

from __future__ import annotations

import asyncio

from shoal.averaging.messages import Code, Invitation, InvitationReply, JoinReply, JoinRequest
from shoal.averaging.node import AveragerNode
from shoal.base.clock import get_dht_time
from shoal.dht.crypto import tag_of
from shoal.net.transport import MOST
from shoal.p2p import Call, P2PContext, PeerID, ServicerBase
from tests.hostile.attacker import PACE, Attacker

SOON = 0.7
"""Who promises to start earlier than all others is asked to lead."""


class FalseAverager(ServicerBase):
    """Says that it looks for a group, and is asked to lead by those who believe it.

    Args:
        code: what it answers to them.
    """

    def __init__(self, me: Attacker, code: Code) -> None:
        self._me, self._code = me, code
        self.namespace = f"{me.run}_grad_averager"
        self.key = f"{self.namespace}.0b"

    @classmethod
    def handle_name(cls, method: str, namespace: str | None) -> str:
        return AveragerNode.handle_name(method, namespace)

    async def rpc_join_group(self, call: Call, context: P2PContext) -> None:
        await call.receive(JoinRequest)
        await call.send(JoinReply(code=self._code, expiration=float(MOST)), end=self._code != Code.ACCEPTED)
        await call.receive(JoinRequest)

    async def attract(self) -> None:
        """Be a candidate, for ever."""
        await self.add_p2p_handlers(self._me.p2p, namespace=self.namespace)
        addresses = [str(address) for address in self._me.p2p.get_addresses(self._me.p2p.peer_id)]
        try:
            while True:
                tag = tag_of(self._me.p2p.peer_id)
                await self._me.node.store(self.key, addresses, get_dht_time() + SOON, subkey=tag)
                await asyncio.sleep(PACE)
        finally:
            await self.remove_p2p_handlers(self._me.p2p, namespace=self.namespace)


async def invites_and_falls_silent(me: Attacker) -> None:
    """A stranger. "I lead, and start in 10⁸ years." Whoever follows it is not in a group; rounds must go on."""
    averager = FalseAverager(me, Code.ACCEPTED)

    async def invite(peer: PeerID) -> None:
        async with me.averager(peer).rpc_invite() as call:
            await call.send(Invitation(group_key=averager.key, expiration=get_dht_time() + SOON))
            await call.receive(InvitationReply)
            await call.send(JoinReply(code=Code.ACCEPTED, expiration=float(MOST)))
            await asyncio.Event().wait()

    await asyncio.gather(averager.attract(), me.strike_again_and_again(invite))
