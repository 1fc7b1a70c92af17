"""Telling others where this peer is now, and finding another process with the same identity.

Two processes that share one identity would take each other's messages and fail at random. So a peer that starts with a
saved identity asks its first peers where they have seen that identity, and then checks whether another process answers
there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from shoal.access.badges import ANY_ROLE, Roles
from shoal.base.bounded import Bounded
from shoal.base.tasks import cancel_and_wait
from shoal.errors import IdentityTakenError, ProtocolError, ShoalError
from shoal.net.addresses import MAX_ADDRESSES_PER_PEER
from shoal.net.connection import Connection
from shoal.net.connection_pool import DIRECT_ONLY
from shoal.net.endpoint import Endpoint
from shoal.net.service import P2PContext, ServicerBase
from shoal.net.transport import Header
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr

logger = logging.getLogger(__name__)

# Chosen: the time for one greeting, and how many are sent at once.
GREETING_SECONDS = 10.0
GREETINGS_AT_ONCE = 8


class PresenceQuery(Header):
    instance: bytes
    """The instance of the asking process."""
    addresses: list[str] = msgspec.field(default_factory=list)
    """The addresses at which it can be called now, if they have changed since its greeting on this connection."""
    reach: int = -1
    """How it can be called now, if that has changed; see :class:`~shoal.reach.reachability.Reach`."""
    relay: bool = False
    """Whether it is a relay now, if that has changed."""


class PresenceReply(Header):
    instance: bytes
    """The instance of the answering process."""
    addresses: list[str] = msgspec.field(default_factory=list)
    """Where the identity of the asking peer was last seen."""
    is_connected: bool = False
    """Whether another process with that identity is connected to the answering peer."""
    relay: bool = False
    """Whether the answering peer is a relay."""


class Presence(ServicerBase):
    """Tells a peer what this one knows about it."""

    roles: ClassVar[Roles] = ANY_ROLE

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def rpc_who_am_i(self, request: PresenceQuery, context: P2PContext) -> PresenceReply:
        own = self._endpoint
        if request.addresses and context.remote_id != own.peer_id:
            judge = own.judge_for(own.seen_of(context.remote_id))
            own.address_book.replace(context.remote_id, request.addresses[:MAX_ADDRESSES_PER_PEER], judge)
            own.book[context.remote_id].reach = request.reach
            own.note_relay(context.remote_id, request.relay)
        instances = {connection.instance for connection in own.server.connections_of(context.remote_id)}
        return PresenceReply(
            instance=own.instance,
            addresses=[str(address) for address in own.get_addresses(context.remote_id)],
            is_connected=bool(instances - {None, request.instance}),
            relay=own.announce().is_relay,
        )


class Announcements:
    """Tells other peers where this one can be reached now, by calling them: each connection begins with its addresses.

    A connection arranged by a relay may be older than the change, so the call itself tells the addresses, too. Its
    answer says whether the other peer is a relay now.

    Args:
        endpoint: of this peer.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        # Peers that may not have heard of the latest change. They must be kept here, because their connections end.
        self._uninformed: Bounded[PeerID, None] = Bounded()
        self._task: asyncio.Task[None] | None = None

    def remember(self, peers: Sequence[PeerID]) -> None:
        """Note peers that have yet to hear where this one is."""
        for peer in peers:
            self._uninformed.setdefault(peer)

    def tell(self, peers: Sequence[PeerID]) -> None:
        """Tell these peers, and all that have not heard of earlier changes."""
        if self._task is not None:
            self._task.cancel()
        self._endpoint.pool.renew()
        self.remember(peers)
        self._task = self._endpoint.tasks.start(self._tell_all())

    async def _tell_all(self) -> None:
        DIRECT_ONLY.set(False)  # this task may have been started by a call to a relay
        at_once = asyncio.Semaphore(GREETINGS_AT_ONCE)
        await asyncio.gather(*(self._tell(peer, at_once) for peer in list(self._uninformed)))

    async def _tell(self, peer: PeerID, at_once: asyncio.Semaphore) -> None:
        endpoint = self._endpoint
        handle = Presence.handle_name("rpc_who_am_i", None)
        try:
            async with at_once:
                addresses, reach, relay = endpoint.announce()
                query = PresenceQuery(endpoint.instance, [str(address) for address in addresses], reach, relay)
                reply = await endpoint.call(
                    peer, handle, query, PresenceReply, timeout=GREETING_SECONDS, roles=Presence.roles
                )
                endpoint.note_relay(peer, reply.relay)
        except (ShoalError, ConnectionError, TimeoutError) as e:
            logger.debug("could not tell %s the new addresses of this peer: %s", peer, e)
        self._uninformed.pop(peer, None)


async def compare_clocks(endpoint: Endpoint) -> None:
    """Ask a few connected peers for the time, which they tell in the greetings of new connections."""
    connected = dict.fromkeys([*endpoint.pool.peers, *endpoint.server.peers])
    known = [peer for peer in connected if peer != endpoint.peer_id and endpoint.is_reachable(peer)]

    async def compare(peer: PeerID) -> None:
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                await _ask(endpoint, await endpoint.dial(peer))
        except (ShoalError, ConnectionError, TimeoutError) as e:
            logger.debug("could not ask %s for the time: %s", peer, e)

    await asyncio.gather(*map(compare, endpoint.rng.sample(known, min(len(known), 8))))


async def check_identity_is_free(
    endpoint: Endpoint, witnesses: Sequence[PeerID], addresses: Sequence[tuple[Multiaddr, PeerID]] = ()
) -> None:
    """Make sure that no other process is online with this peer's identity, as far as the witnesses know.

    Args:
        witnesses: peers that may have seen that identity.
        addresses: pairs of an address and the peer expected there, which may be this peer's own identity.

    Raises:
        IdentityTakenError: another process is online with it.
    """
    checks = [
        asyncio.ensure_future(_find_double(endpoint, witness)) for witness in witnesses if witness != endpoint.peer_id
    ]
    own = [str(address) for address, peer in addresses if peer == endpoint.peer_id]
    checks.append(asyncio.ensure_future(_find_double_at(endpoint, own)))
    try:
        async with asyncio.timeout(2.0):
            for check in asyncio.as_completed(checks):
                where = await check
                if where is not None:
                    raise IdentityTakenError(
                        f"the identity {endpoint.peer_id} is already taken by another peer, which is online {where}: "
                        "stop it, or start this one with another identity_path"
                    )
    except TimeoutError:
        return  # a process that does not answer in time counts as offline
    finally:
        await cancel_and_wait(*checks)


async def _find_double(endpoint: Endpoint, witness: PeerID) -> str | None:
    """Where another process is online with this identity, or ``None``."""
    try:
        reply = await _ask(endpoint, await endpoint.dial_without_greeting(witness))
    except (ShoalError, ConnectionError):
        return None
    if reply.is_connected:
        return f"and connected to peer {witness}"
    return await _find_double_at(endpoint, reply.addresses[:MAX_ADDRESSES_PER_PEER])


async def _find_double_at(endpoint: Endpoint, addresses: Sequence[str]) -> str | None:
    found = await asyncio.gather(*(_is_double(endpoint, text) for text in addresses))
    return next((f"at {text}" for text, is_double in zip(addresses, found, strict=True) if is_double), None)


async def _is_double(endpoint: Endpoint, text: str) -> bool:
    try:
        reply = await _ask(endpoint, await endpoint.dial_without_greeting(endpoint.peer_id, Multiaddr(text)))
    except (ShoalError, ConnectionError, ValueError):
        return False
    return reply.instance != endpoint.instance


async def _ask(endpoint: Endpoint, connection: Connection) -> PresenceReply:
    call = connection.open_call(Presence.handle_name("rpc_who_am_i", None))
    try:
        await call.send(PresenceQuery(instance=endpoint.instance), end=True)
        reply = await call.receive(PresenceReply)
        if reply is None:
            raise ProtocolError("no answer")
        return reply
    finally:
        connection.abort()
