"""Whether this peer serves the DHT at present. Others can call it or not, and that changes while it runs.

A peer that others can dial is a node of the DHT. A peer that they call through a relay is a node while few others are
there to keep records, so a small swarm behind routers needs no other help. In a larger swarm such a node is of little
use, because each call takes a detour: after a pause it gives its records to the remaining nodes and stops serving. A
peer that is no node uses the DHT as clients do.
"""

from __future__ import annotations

import asyncio
import logging

from shoal.dht.protocol import DHTProtocol
from shoal.dht.records import NewRecord
from shoal.p2p import PeerID
from shoal.reach.reachability import Reach, Reachability

logger = logging.getLogger(__name__)

# With this many public nodes, peers behind relays are not needed as nodes: as many as hold a record by default.
ENOUGH_PUBLIC_NODES = 5
# Chosen: longer than a public peer takes to restart.
STEP_DOWN_SECONDS = 600.0


class ServerMode:
    """Switches a peer between node and client.

    Args:
        protocol: its side of the protocol; answers calls and tells others of this node while ``is_node`` is set.
    """

    def __init__(self, protocol: DHTProtocol) -> None:
        self._protocol = protocol
        self._superfluous_since: float | None = None
        self._moving: asyncio.Task[None] | None = None

    async def settle(self) -> None:
        """Wait until it is clear how others can call this peer, now that the first ones have tried."""
        if not self._protocol.client_mode:
            await self._protocol.p2p.outlook.settle()
            self.look()

    def look(self) -> None:
        """Decide whether this peer should be a node, and change that if need be."""
        protocol = self._protocol
        is_moving = self._moving is not None and not self._moving.done()
        if protocol.client_mode or (is_moving and self._moving is not asyncio.current_task()):
            return
        now = asyncio.get_running_loop().time()
        if protocol.p2p.reachability is not Reachability.RELAYED or self._count_public() < ENOUGH_PUBLIC_NODES:
            self._superfluous_since = None
        elif self._superfluous_since is None:
            self._superfluous_since = now
        is_needed = self._superfluous_since is None or (
            protocol.is_node and now - self._superfluous_since < STEP_DOWN_SECONDS
        )
        # While nobody knows, this peer says that it can be called: the first peers of the swarm find out.
        wanted = protocol.p2p.reachability is not Reachability.CLIENT and is_needed
        if wanted is not protocol.is_node:
            self._moving = protocol.spawn(self._enter() if wanted else self._leave())

    def _count_public(self) -> int:
        book = self._protocol.p2p.book
        return sum(book.find(peer).reach == Reach.PUBLIC for _, peer in self._protocol.routing_table)

    async def _enter(self) -> None:
        await self._protocol.serve()
        self._protocol.is_node = True
        logger.info("this peer serves the DHT now: others can call it")
        self._protocol.connectivity.came_back.set()  # a walk tells its neighbors
        self.look()

    async def _leave(self) -> None:
        """Give the records away first, to nodes that no longer count this one among the nodes."""
        self._protocol.is_node = False
        logger.info("this peer does not serve the DHT any more: others cannot call it well enough")
        await self._hand_over()
        await self._protocol.stop_serving()
        self.look()

    async def _hand_over(self) -> None:
        protocol = self._protocol
        due: dict[PeerID, list[NewRecord]] = {}
        for key, item in list(protocol.storage.items()):
            record = protocol.records.copy_for_others(key, item.value, item.expiration_time)
            for _, peer in protocol.routing_table.get_nearest_neighbors(key, protocol.config.num_replicas):
                due.setdefault(peer, []).append(record)
        await asyncio.gather(*(protocol.call_store(peer, records) for peer, records in due.items()))
        for key in [key for key, _ in protocol.storage.items()]:
            del protocol.storage[key]
