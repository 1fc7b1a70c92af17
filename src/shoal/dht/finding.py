"""Finding out where a peer is of which nothing but its id is known.

A node's place in the table follows from the id of its peer. So whoever wants to call the peer walks to that place, and
hears from the nodes there at which addresses it can be dialled. Nothing is stored for it, and nothing has to be
believed: whoever answers there must prove the identity.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shoal.clock import get_dht_time
from shoal.dht.protocol import DHTProtocol
from shoal.dht.routing import DHTID
from shoal.dht.storage import TimedStorage
from shoal.errors import DHTError
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_SEARCHES = 5.0
"""A peer that was not found is not looked for again for so long."""
MAX_NOT_FOUND = 1000


class PeerFinder:
    """Looks for peers in the table.

    Args:
        protocol: of the node that looks; whoever is found, its peer can dial.
        walk: goes to a place in the table and meets the nodes there.
    """

    def __init__(self, protocol: DHTProtocol, walk: Callable[[DHTID], Awaitable[object]]) -> None:
        self._protocol, self._walk = protocol, walk
        self._searches: dict[PeerID, asyncio.Task[None]] = {}
        self._not_found: TimedStorage[PeerID, None] = TimedStorage(MAX_NOT_FOUND)

    async def find(self, peer: PeerID) -> None:
        """Look for the addresses of a peer, together with whoever else does so at the moment."""
        if peer in self._not_found:
            return
        search = self._searches.get(peer)
        if search is None:
            search = self._searches[peer] = self._protocol.spawn(self._search(peer))
            search.add_done_callback(lambda _: self._searches.pop(peer))
        await asyncio.wait([search])

    async def _search(self, peer: PeerID) -> None:
        try:
            async with asyncio.timeout(self._protocol.wait_timeout):
                await self._walk(DHTID.of_peer(peer))
        except (DHTError, TimeoutError) as e:
            logger.debug("the search for peer %s was given up: %r", peer, e)
        if not self._protocol.p2p.is_reachable(peer):
            self._not_found.store(peer, None, get_dht_time() + SECONDS_BETWEEN_SEARCHES)
