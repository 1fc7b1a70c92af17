"""Finds out what the router does to outgoing ports, by looking at one local port from two places outside.

If both see the same outer port, others can predict it, and punches are likely to succeed. If they see different ones,
each connection gets its own, and two peers behind such routers need not even try.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence

from shoal.errors import ProtocolError, ShoalError
from shoal.net.addresses import is_global, is_ipv6, is_name
from shoal.net.endpoint import Endpoint
from shoal.net.transport import MAY_CONNECT, Session, receive_frame
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.relay.messages import Observe, Observed, OpenObservation
from shoal.reach.relay.server import RelayServer

logger = logging.getLogger(__name__)

OBSERVERS = 2
MOST_OBSERVERS = 4
"""One may lie, so if two differ, others are asked until two agree. Where each gets a port of its own, none do."""
OBSERVE_SECONDS = 5.0


def places_of(endpoint: Endpoint, peer: PeerID) -> list[Multiaddr]:
    """The addresses at which a peer can observe: only IPv4 has routers that translate."""
    known = endpoint.transport.worth_dialling(endpoint.address_book.peek(peer))
    return [address for address in known if is_global(address) and not is_ipv6(address)]


async def is_mapping_hard(endpoint: Endpoint, observers: Sequence[PeerID]) -> bool | None:
    """Whether each connection gets another outer port; ``None`` if fewer than two observers tell."""
    seen = [there for _, there in await observe(endpoint, observers)]
    return seen[0] != seen[1] if len(seen) == OBSERVERS else None


async def observe(endpoint: Endpoint, observers: Sequence[PeerID]) -> list[tuple[Multiaddr | None, Multiaddr]]:
    """One local address as this machine sees it, and as at most two others do; if possible, two who agree.

    Args:
        observers: peers on different hosts that may be asked, the best first.
    """
    sessions: list[Session] = []
    seen: list[tuple[Multiaddr | None, Multiaddr]] = []
    try:
        for observer in observers:
            try:
                async with asyncio.timeout(OBSERVE_SECONDS):
                    there = await _be_observed(endpoint, observer, sessions)
                    seen.append((sessions[-1].local_address, there))
            except (ShoalError, ConnectionError, TimeoutError, ValueError) as e:
                logger.debug("%s does not observe: %s", observer, e)
            agreeing = next((list(pair) for pair in itertools.combinations(seen, 2) if pair[0][1] == pair[1][1]), None)
            if agreeing is not None:
                return agreeing
            if len(seen) == MOST_OBSERVERS:
                break
        return seen[:OBSERVERS]
    finally:
        for session in sessions:
            session.abort()


async def _be_observed(endpoint: Endpoint, observer: PeerID, sessions: list[Session]) -> Multiaddr:
    handle = RelayServer.handle_name("rpc_observe", None)
    given = await endpoint.call(observer, handle, Observe(), OpenObservation, OBSERVE_SECONDS, roles=RelayServer.roles)
    places = places_of(endpoint, observer)
    if not places:
        raise ProtocolError(f"peer {observer} has no address at which it could observe")
    beside = sessions[0] if sessions else None
    # A host name may lead into a network of this machine.
    judging = MAY_CONNECT.set(endpoint.judge_for(None) if is_name(places[0]) else None)
    try:
        session = await endpoint.transport.open_session(places[0], given.cookie, punchable=True, beside=beside)
    finally:
        MAY_CONNECT.reset(judging)
    sessions.append(session)
    return Multiaddr((await receive_frame(session, Observed)).seen_at)
