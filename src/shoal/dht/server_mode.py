"""Whether this peer is a node of the table at present. Others can call it or not, so that changes while it runs.

A peer that others can dial is a node. One that they call through a relay is a node too while few others are there to
keep records: then a small swarm behind routers needs nobody else. In a larger one its place is of little use to others,
because each call takes a detour. After a pause it gives its records to nodes that remain, and steps down. A peer that
is no node uses the table as clients do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.base.clock import DHTExpiration
from shoal.dht.records import NewRecord
from shoal.dht.routing import DHTID, ID_BITS, RoutingTable
from shoal.dht.storage import DHTLocalStorage, StoredValue
from shoal.errors import ShoalError
from shoal.p2p import PeerID
from shoal.reach.reachability import Reach, Reachability

if TYPE_CHECKING:
    from shoal.dht.protocol import DHTProtocol

logger = logging.getLogger(__name__)

ENOUGH_PUBLIC_NODES = 5
"""With so many of them, peers behind relays are not needed as nodes."""
STEP_DOWN_SECONDS = 600.0

# What a call raises when the other node is gone, silent, or does not speak this protocol.
NO_ANSWER = (ShoalError, ConnectionError, TimeoutError)
# More than one attempt: a connection that breaks by chance would keep a newcomer out of the table.
PING_BACK_ATTEMPTS = 3
SECONDS_BETWEEN_ATTEMPTS = 0.1
# The fraction of the waiting time for calling a newcomer back; the rest lets the verdict reach the newcomer in time.
PING_BACK_SHARE = 0.5


class ServerMode:
    """A peer's place in the table.

    Args:
        protocol: its side of the protocol.
        client_mode: it never is a node.
    """

    def __init__(self, protocol: DHTProtocol, *, client_mode: bool) -> None:
        self._protocol, self._client_mode = protocol, client_mode
        self.is_node = self._is_wanted()
        """Others may call this peer, and keep records here."""
        self._is_serving = False
        self._superfluous_since: float | None = None
        self._moving: asyncio.Task[None] | None = None

    def _is_wanted(self) -> bool:
        state = self._protocol.p2p.reachability
        # While nobody knows, this peer says that it is one: the first peers of the swarm find out.
        return not self._client_mode and state is not Reachability.CLIENT

    async def start(self) -> None:
        """Answer others as long as this peer is a node, and follow what it is to them until :meth:`close`."""
        if self._client_mode:
            return
        self.is_node = self._is_wanted()
        if self.is_node:
            await self._serve()
        self._protocol.p2p.outlook.on_change[self.look] = None

    async def close(self) -> None:
        """Stop answering."""
        self._protocol.p2p.outlook.on_change.pop(self.look, None)
        await self._stop_serving()

    async def _serve(self) -> None:
        if not self._is_serving:
            self._is_serving = True
            await self._protocol.add_p2p_handlers(self._protocol.p2p, self._protocol.wrapper)

    async def _stop_serving(self) -> None:
        if self._is_serving:
            self._is_serving = False
            await self._protocol.remove_p2p_handlers(self._protocol.p2p)

    def look(self) -> None:
        """See whether this peer should enter the table, or leave it."""
        is_moving = self._moving is not None and not self._moving.done()
        if self._client_mode or (is_moving and self._moving is not asyncio.current_task()):
            return
        now = asyncio.get_running_loop().time()
        if self._protocol.p2p.reachability is not Reachability.RELAYED or self._count_public() < ENOUGH_PUBLIC_NODES:
            self._superfluous_since = None
        elif self._superfluous_since is None:
            self._superfluous_since = now
        is_patient = self._superfluous_since is None or (
            self.is_node and now - self._superfluous_since < STEP_DOWN_SECONDS
        )
        wanted = self._is_wanted() and is_patient
        if wanted is not self.is_node:
            self._moving = self._protocol.spawn(self._enter() if wanted else self._leave())

    def _count_public(self) -> int:
        book = self._protocol.p2p.book
        return sum(book.find(peer).reach == Reach.PUBLIC for _, peer in self._protocol.routing_table)

    async def _enter(self) -> None:
        await self._serve()
        self.is_node = True
        logger.info("this peer is a node of the table now: others can call it")
        self._protocol.came_back.set()  # a walk tells its neighbors
        self.look()

    async def _leave(self) -> None:
        """Give the records away first, to nodes that no longer take this one for one of them."""
        self.is_node = False
        logger.info("this peer is no node of the table any more")
        await self._hand_over()
        await self._stop_serving()
        self.look()

    # --- what nodes do for each other -----------------------------------------------------------------------------

    def welcome(self, newcomer: DHTID, peer: PeerID) -> None:
        """Give a new neighbor the records that it should hold from now on."""
        protocol = self._protocol
        if not protocol.storage:
            return
        due = records_for_newcomer(newcomer, protocol.storage, protocol.routing_table, protocol.num_replicas)
        records = [protocol.records.copy_for_others(*record) for record in due]
        if records:
            protocol.spawn(protocol.call_store(peer, records))

    async def can_call_back(self, node_id: bytes, peer: PeerID) -> bool:
        """Whether a newcomer can be called, in several attempts: one broken connection proves nothing.

        A failure is told after a fixed time: the newcomer says where to call, and must not see from the time whether a
        port there is closed, filtered, or open for something else.
        """
        protocol = self._protocol
        if protocol.p2p.is_hopeless(peer):
            return False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + protocol.wait_timeout * PING_BACK_SHARE
        for _ in range(PING_BACK_ATTEMPTS):
            try:
                left = max(0.0, deadline - loop.time())
                response = await protocol.ping(peer, validate=False, timeout=left, is_trial=True)
            except NO_ANSWER:
                await asyncio.sleep(max(0.0, min(SECONDS_BETWEEN_ATTEMPTS, deadline - loop.time())))
            else:
                return response.node_id == node_id
        await asyncio.sleep(max(0.0, deadline - loop.time()))
        return False

    async def _hand_over(self) -> None:
        protocol = self._protocol
        due: dict[PeerID, list[NewRecord]] = {}
        for key, item in list(protocol.storage.items()):
            record = protocol.records.copy_for_others(key, item.value, item.expiration_time)
            for _, peer in protocol.routing_table.get_nearest_neighbors(key, protocol.num_replicas):
                due.setdefault(peer, []).append(record)
        await asyncio.gather(*(protocol.call_store(peer, records) for peer, records in due.items()))
        for key in [key for key, _ in protocol.storage.items()]:
            del protocol.storage[key]


def records_for_newcomer(
    newcomer: DHTID, storage: DHTLocalStorage, table: RoutingTable, num_replicas: int
) -> Iterator[tuple[DHTID, StoredValue, DHTExpiration]]:
    """The records that this node passes on: the newcomer should hold them, and this node is nearest to their keys."""
    own_id = table.node_id
    bits_not_shared = ID_BITS - _bits_shared_by_neighborhood(newcomer, table, num_replicas)
    newcomer_is_near = not (own_id ^ newcomer) >> bits_not_shared
    for key, item in storage.items():
        # All replicas of a key from the own neighborhood are inside it, so a newcomer from outside is not one of them.
        if not newcomer_is_near and not (own_id ^ key) >> bits_not_shared:
            continue
        if _should_pass_on(key, newcomer, table, num_replicas):
            yield key, item.value, item.expiration_time


def _bits_shared_by_neighborhood(newcomer: DHTID, table: RoutingTable, num_replicas: int) -> int:
    """Leading bits that this node has in common with its ``num_replicas`` nearest neighbors; 0 if it has fewer."""
    nearest = table.get_nearest_neighbors(table.node_id, num_replicas, exclude=newcomer)
    if len(nearest) < num_replicas:
        return 0
    return DHTID.longest_common_prefix_length(table.node_id, *(node_id for node_id, _ in nearest))


def _should_pass_on(key: DHTID, newcomer: DHTID, table: RoutingTable, num_replicas: int) -> bool:
    neighbors = table.get_nearest_neighbors(key, num_replicas, exclude=newcomer)
    if not neighbors:
        return True
    nearest, farthest = (table.rank(node_id, key) for node_id, _ in (neighbors[0], neighbors[-1]))
    is_replica = len(neighbors) < num_replicas or table.rank(newcomer, key) < farthest
    return is_replica and table.rank(table.node_id, key) < nearest
