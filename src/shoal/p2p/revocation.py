"""How a list of revocations reaches all members of a private run.

Every peer keeps the newest list, and each greeting tells its serial number. If the numbers of two peers differ, the one
that has dialled gives its list and takes that of the other. Whoever gets a newer list cuts the connections of those on
it, and gives it to all other peers that it is connected to. So a list crosses a connected swarm within a few round
trips, and peers that were away get it with their first connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta

from shoal.access.badges import ANY_ROLE, MAX_REVOKED, Badge, RevocationList, Roles
from shoal.access.membership import Membership
from shoal.base.tasks import cancel_and_wait
from shoal.errors import NotAMemberError, P2PDaemonError, ShoalError
from shoal.net.connection import Connection
from shoal.net.service import P2PContext, ServicerBase
from shoal.net.transport import Count, Header
from shoal.peers.identity import PUBLIC_KEY_BYTES, PeerID

if TYPE_CHECKING:
    from shoal.p2p.p2p import P2P

logger = logging.getLogger(__name__)

ASK_SECONDS = 10.0
# A peer whose greeting promised a newer list and that has given none is not asked again for this long.
PATIENCE_SECONDS = 60.0
MAX_LIST_BYTES = (PUBLIC_KEY_BYTES + 2) * MAX_REVOKED + 256


class Revocations(Header):
    """The newest list that the sender knows, as far as the other side does not know it."""

    serial: Count = 0
    """Its serial number; 0 if the sender knows none."""
    data: Annotated[bytes, Meta(max_length=MAX_LIST_BYTES)] = b""
    """The list itself, or empty."""


class RevocationExchange(ServicerBase):
    """Exchanges lists of revocations with other members.

    Args:
        p2p: the peer that calls and is called.
        membership: keeps the list.
    """

    roles: ClassVar[Roles] = ANY_ROLE

    def __init__(self, p2p: P2P, membership: Membership) -> None:
        self._p2p, self._membership = p2p, membership
        self._in_vain: dict[PeerID, float] = {}
        # A dictionary and not a set: it keeps the order, so that the same seed gives the same run.
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._asking: dict[PeerID, None] = {}

    @property
    def is_asking(self) -> bool:
        """Whether a call about lists is in progress."""
        return bool(self._tasks)

    @classmethod
    async def of(cls, p2p: P2P) -> RevocationExchange | None:
        """Put a peer's membership, if it has one, in charge of its connections; returns what keeps the list."""
        if p2p.membership is None:
            return None
        p2p.transport.membership = p2p.server.membership = p2p.membership
        members = cls(p2p, p2p.membership)
        await members.add_p2p_handlers(p2p)
        return members

    async def rpc_revocations(self, request: Revocations, context: P2PContext) -> Revocations:
        """Take a list if it is newer than the own one, and give the own one if that is newer."""
        self.learn(request.data, context.remote_id)
        return self._told_to(request.serial)

    def _told_to(self, serial: int) -> Revocations:
        newest = self._membership.revocations
        if newest is None:
            return Revocations()
        return Revocations(newest.serial, newest.to_bytes() if newest.serial > serial else b"")

    def learn(self, data: bytes, source: PeerID | None) -> bool:
        """Take over a list that somebody has sent, if it is newer; returns whether it is.

        Raises:
            P2PDaemonError: it is not a list of this run.
        """
        if not data:
            return False
        try:
            found = RevocationList.from_bytes(self._membership.run_key, data)
        except ValueError as e:
            raise P2PDaemonError(str(e)) from None
        if not self._membership.adopt(found):
            return False
        logger.info("list of revocations %d: %d keys are worth nothing in this run", found.serial, len(found.keys))
        self._cut_revoked()
        self._pass_on(source)
        return True

    def _cut_revoked(self) -> None:
        def is_revoked(badge: Badge | None) -> bool:
            return badge is not None and self._membership.is_revoked(badge)

        self._p2p.relay.cut(is_revoked)
        self._p2p.pool.cut(lambda stream: is_revoked(stream.badge))
        self._p2p.server.cut(lambda stream: is_revoked(stream.badge), "revoked")

    def _pass_on(self, source: PeerID | None) -> None:
        """Give the list to all connected peers; those that cannot be called get it when they greet next."""
        for peer in dict.fromkeys([*self._p2p.pool.peers, *self._p2p.server.peers]):
            if peer != source:
                self._spawn(self._give(peer))

    async def _give(self, peer: PeerID) -> None:
        if not self._p2p.is_reachable(peer) or not await self.exchange(peer):
            self._p2p.server.cut_idle(peer)

    def note_hello(self, connection: Connection, serial: int) -> None:
        """Another peer has told the serial number of its list; it has proven that it is a member."""
        badge, membership = connection.stream.badge, self._membership
        try:
            # This peer may not have known the time when it let the other one in.
            membership.check(badge, ANY_ROLE, dialled=True)
        except NotAMemberError as e:
            membership.note_stranger(connection.remote, e)
            connection.stream.abort()
            return
        peer, now = connection.remote, asyncio.get_running_loop().time()
        # One call serves both sides. The dialler makes it, because it knows how to reach the other one.
        has_dialled = not connection.stream.shown_badge
        if serial == membership.serial or peer in self._asking or not has_dialled:
            return
        if now - self._in_vain.get(peer, -PATIENCE_SECONDS) >= PATIENCE_SECONDS:
            self._spawn(self._ask(peer, serial))

    async def _ask(self, peer: PeerID, promised: int) -> None:
        self._asking[peer] = None
        try:
            await self.exchange(peer)
        finally:
            del self._asking[peer]
            if self._membership.serial < promised:
                now = asyncio.get_running_loop().time()
                recent = {each: at for each, at in self._in_vain.items() if now - at < PATIENCE_SECONDS}
                self._in_vain = {**recent, peer: now}

    async def exchange(self, peer: PeerID) -> bool:
        """Give a peer the own list, and take its list if that is newer; returns whether it has answered."""
        handle, own = self.handle_name("rpc_revocations", None), self._told_to(0)
        try:
            answer = await self._p2p.call(peer, handle, own, Revocations, timeout=ASK_SECONDS, roles=self.roles)
            self.learn(answer.data, peer)
            return True
        except (ShoalError, ConnectionError, TimeoutError) as e:
            logger.debug("no exchange of revocations with %s: %s", peer, e)
            return False

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def close(self) -> None:
        """Cancel what is going on."""
        await cancel_and_wait(*[task for task in self._tasks if task is not asyncio.current_task()])
