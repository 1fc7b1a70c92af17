"""How a list of revocations reaches all members of a private run.

Every peer keeps the newest list, and each greeting tells its serial number. If two peers have different numbers, the
one that dialled exchanges lists with the other. A peer that gets a newer list cuts the connections of peers on it, and
passes it to all other peers that it is connected to. So a list crosses a connected swarm within a few round trips, and
peers that were away get it with their first connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, ClassVar

from msgspec import Meta

from shoal.access.badges import ANY_ROLE, MAX_REVOKED, Badge, RevocationList, Roles
from shoal.access.membership import Membership
from shoal.base.bounded import Bounded
from shoal.base.tasks import BackgroundTasks
from shoal.errors import NotAMemberError, P2PDaemonError, ShoalError
from shoal.net.connection import Connection
from shoal.net.endpoint import Endpoint
from shoal.net.service import P2PContext, ServicerBase
from shoal.net.transport import Count, Header
from shoal.peers.identity import PUBLIC_KEY_BYTES, PeerID

logger = logging.getLogger(__name__)

# Chosen.
ASK_SECONDS = 10.0
# A peer that promised a newer list in its greeting but gave none is not asked again for this long.
PATIENCE_SECONDS = 60.0
MAX_LIST_BYTES = (PUBLIC_KEY_BYTES + 2) * MAX_REVOKED + 256


class Revocations(Header):
    """The newest list that the sender knows, if the other side lacks it."""

    serial: Count = 0
    """Its serial number; 0 if the sender knows none."""
    data: Annotated[bytes, Meta(max_length=MAX_LIST_BYTES)] = b""
    """The list itself, or empty."""


class RevocationExchange(ServicerBase):
    """Exchanges lists of revocations with other members.

    Args:
        endpoint: of the peer that calls and is called.
        membership: keeps the list.
        cut_relayed: ends the circuits that this peer carries for peers with an unwanted badge.
    """

    roles: ClassVar[Roles] = ANY_ROLE

    def __init__(
        self,
        endpoint: Endpoint,
        membership: Membership,
        cut_relayed: Callable[[Callable[[Badge | None], bool]], None],
    ) -> None:
        self._endpoint, self._membership, self._cut_relayed = endpoint, membership, cut_relayed
        # Peers that promised a newer list but gave none.
        self._in_vain: Bounded[PeerID, None] = Bounded(seconds=PATIENCE_SECONDS, now=asyncio.get_running_loop().time)
        self._tasks = BackgroundTasks(logger, "the list of revocations")
        self._asking: dict[PeerID, None] = {}

    @property
    def is_asking(self) -> bool:
        """Whether a call about lists is in progress."""
        return bool(self._tasks)

    async def rpc_revocations(self, request: Revocations, context: P2PContext) -> Revocations:
        """Take the caller's list if it is newer, or answer with this peer's list if that is newer."""
        self.learn(request.data, context.remote_id)
        return self._told_to(request.serial)

    def _told_to(self, serial: int) -> Revocations:
        newest = self._membership.revocations
        if newest is None:
            return Revocations()
        return Revocations(newest.serial, newest.to_bytes() if newest.serial > serial else b"")

    def learn(self, data: bytes, source: PeerID | None) -> bool:
        """Take over a list from another peer if it is newer; returns whether it is.

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
        logger.info("list of revocations %d: %d keys are revoked in this run", found.serial, len(found.keys))
        self._cut_revoked()
        self._pass_on(source)
        return True

    def _cut_revoked(self) -> None:
        def is_revoked(badge: Badge | None) -> bool:
            return badge is not None and self._membership.is_revoked(badge)

        self._cut_relayed(is_revoked)
        self._endpoint.pool.cut(lambda stream: is_revoked(stream.badge))
        self._endpoint.server.cut(lambda stream: is_revoked(stream.badge), "revoked")

    def _pass_on(self, source: PeerID | None) -> None:
        """Give the list to all connected peers; those that cannot be called get it with their next greeting."""
        for peer in dict.fromkeys([*self._endpoint.pool.peers, *self._endpoint.server.peers]):
            if peer != source:
                self._tasks.spawn(self._give(peer))

    async def _give(self, peer: PeerID) -> None:
        if not self._endpoint.is_reachable(peer) or not await self.exchange(peer):
            self._endpoint.server.cut_idle(peer)

    def note_hello(self, connection: Connection, serial: int) -> None:
        """A member has greeted with the serial number of its list."""
        badge, membership = connection.stream.badge, self._membership
        try:
            # This peer's clock may have been wrong when it let the other one in.
            membership.check(badge, ANY_ROLE, dialled=True)
        except NotAMemberError as e:
            membership.note_stranger(connection.remote, e)
            connection.stream.abort()
            return
        peer = connection.remote
        # One call serves both sides. The dialler makes it, because it knows how to reach the other one.
        has_dialled = not connection.stream.shown_badge
        if serial == membership.serial or peer in self._asking or not has_dialled:
            return
        if peer not in self._in_vain:
            self._tasks.spawn(self._ask(peer, serial))

    async def _ask(self, peer: PeerID, promised: int) -> None:
        self._asking[peer] = None
        try:
            await self.exchange(peer)
        finally:
            del self._asking[peer]
            if self._membership.serial < promised:
                self._in_vain[peer] = None

    async def exchange(self, peer: PeerID) -> bool:
        """Give a peer this one's list, and take its list if that is newer; returns whether it has answered."""
        handle, own = self.handle_name("rpc_revocations", None), self._told_to(0)
        try:
            answer = await self._endpoint.call(peer, handle, own, Revocations, timeout=ASK_SECONDS, roles=self.roles)
            self.learn(answer.data, peer)
            return True
        except (ShoalError, ConnectionError, TimeoutError) as e:
            logger.debug("no exchange of revocations with %s: %s", peer, e)
            return False

    async def close(self) -> None:
        """Cancel the calls in progress."""
        await self._tasks.close()
