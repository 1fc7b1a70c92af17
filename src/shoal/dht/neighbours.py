"""Joining through the local network: nodes find each other there, whenever they start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shoal.base.logs import Seldom
from shoal.dht.protocol import DHTProtocol
from shoal.dht.server_mode import NO_ANSWER
from shoal.errors import ValidationError
from shoal.p2p import PeerID
from shoal.p2p.local_network import LocalNetwork

logger = logging.getLogger(__name__)

# How long a node waits for the first neighbour. One that is there answers within a second.
FIRST_SECONDS = 3.0


class Neighbours:
    """A node's acquaintance with the nodes of its local network.

    Args:
        protocol: the node's side of the protocol.
        meet_neighbors: walks to the node's own id.
    """

    def __init__(self, protocol: DHTProtocol, meet_neighbors: Callable[[], Awaitable[bool]]) -> None:
        self._protocol, self._meet_neighbors = protocol, meet_neighbors
        self.network = LocalNetwork(protocol.p2p, self._note)
        """Tells which peers are there."""
        self._joined = asyncio.Event()
        self._warn_seldom = Seldom(logger.warning)

    async def start(self) -> None:
        """Announce this node, and join others as soon as they are found."""
        await self.network.start()

    async def wait_for_first(self) -> None:
        """Wait for a moment until this node has joined another one."""
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                await self._joined.wait()
        except TimeoutError:
            logger.info("no peer is in the local network yet: starting alone. Whenever one appears, the two join")

    async def close(self) -> None:
        """Announce this node no more."""
        await self.network.close()

    def _note(self, peer: PeerID) -> None:
        self._protocol.spawn(self._join(peer))

    async def _join(self, peer: PeerID) -> None:
        protocol = self._protocol
        if peer not in protocol.routing_table:
            protocol.p2p.add_addresses(peer, self.network.present.get(peer, ()))
            if not len(protocol.routing_table):
                protocol.p2p.clock.join_through(peer)
            try:
                await protocol.ping(peer, validate=True)
            except ValidationError as e:
                # As with initial peers: it is in the table, and the user has to do something.
                self._warn_seldom("joined peer %s in the local network, but %s", peer, e, about=peer)
            except NO_ANSWER as e:
                # With others around, it is enough that the node keeps trying.
                if not len(protocol.routing_table):
                    self._warn_seldom("cannot join a peer that is announced in the local network: %s", e, about=peer)
                return
            else:
                logger.info("joined peer %s in the local network", peer)
            await protocol.settle()
            await self._meet_neighbors()
        self._joined.set()
