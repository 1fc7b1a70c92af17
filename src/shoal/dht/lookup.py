"""One walk through the swarm: which nodes were heard of on the way, who they are, and how to reach them.

A walk also finds a peer of which nothing but its id is known. A node's place in the table follows from the id of its
peer: the nodes there tell at which addresses it can be dialled. Nothing is stored for it, and nothing has to be
believed, because whoever answers there must prove the identity.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from shoal.clock import get_dht_time
from shoal.dht.records import MAX_KEYS_PER_FIND, MAX_NEIGHBORS_TOLD, unpack_contact
from shoal.dht.routing import DHTID
from shoal.dht.storage import TimedStorage
from shoal.dht.traverse import Answer, OnFinished, Traversal, walk_line
from shoal.errors import DHTError
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.dht.protocol import DHTProtocol
    from shoal.dht.records import FoundRecord

logger = logging.getLogger(__name__)


class Lookup:
    """What all requests of one walk share.

    Args:
        protocol: asks other nodes; knows which peers to leave alone.
        known_nodes: nodes to begin with, besides those of the routing table.
    """

    def __init__(self, protocol: DHTProtocol, known_nodes: Mapping[DHTID, PeerID] | None = None) -> None:
        self._protocol = protocol
        self._blacklist = protocol.blacklist
        self._known_nodes = dict(known_nodes or {})
        self._peers: dict[int, PeerID] = {int(node_id): peer for node_id, peer in self._known_nodes.items()}
        self._contacts: dict[int, msgspec.Raw] = {}  # of nodes that others told of
        self._hops: dict[int, int] = {}
        self._neighbors = protocol.bucket_size

    def starting_nodes(self, target: DHTID) -> list[DHTID]:
        """The nodes nearest to a target that are known without asking anybody; suspects if there is nobody else."""
        table = self._protocol.routing_table
        nearest = dict(table.get_nearest_neighbors(target, self._neighbors)) or table.suspects
        for node_id, peer in nearest.items():
            self._peers[node_id] = peer
            self._hops[node_id] = 1
        own_id = self._protocol.node_id
        return [
            node_id
            for node_id in (*nearest, *self._known_nodes)
            if node_id != own_id and self._peers[node_id] not in self._blacklist
        ]

    async def ask(
        self, node_id: DHTID, targets: Iterable[DHTID], *, neighbors_only: bool = False
    ) -> dict[DHTID, FoundRecord] | None:
        """Ask a node about targets; ``None`` if it does not answer."""
        peer = self.peer_of(node_id)
        if peer is None or peer in self._blacklist:
            return None
        wanted = self._neighbors if self._neighbors > self._protocol.bucket_size else 0
        answer = await self._protocol.call_find(peer, targets, wanted, neighbors_only=neighbors_only)
        if answer is None:
            return None
        # A made-up id: one peer shall not stand for many nodes.
        if answer.node_id != node_id.to_bytes():
            return None
        hops = self.hops_to(node_id) + 1
        for told_id, contact in answer.contacts.items():
            if told_id not in self._contacts:
                self._contacts[told_id] = contact
                self._hops.setdefault(told_id, hops)
        return answer.records

    def hops_to(self, node_id: int) -> int:
        """How many answers it takes until one from this node: 1 if it was known from the start."""
        return self._hops.get(node_id, 1)

    def peer_of(self, node_id: int) -> PeerID | None:
        """Who a node is that was heard of, ready to be called; ``None`` if what was told of it makes no sense."""
        peer = self._peers.get(node_id)
        if peer is None and (told := self._contacts.get(node_id)) is not None:
            peer = self._introduce(told)
            if peer is not None:
                self._peers[node_id] = peer
        return peer

    def _introduce(self, told: msgspec.Raw) -> PeerID | None:
        """Tell the network below where a peer can be reached."""
        try:
            contact = unpack_contact(told)
        except ValueError as e:
            logger.debug("ignored a node that somebody told of: %s", e)
            return None
        peer, p2p = PeerID(contact.peer_id), self._protocol.p2p
        if peer == p2p.peer_id:
            return None
        known = {str(address) for address in p2p.get_addresses(peer)}
        for address in contact.addresses:
            if address not in known:
                try:
                    p2p.add_addresses(peer, [address])
                except ValueError as e:
                    # Perhaps one of a kind that is not known here yet; others may do.
                    logger.debug("ignored an address that somebody told of: %s", e)
        return peer

    async def find_nearest(
        self, targets: Iterable[DHTID], on_finished: OnFinished, *, num_workers: int, beam_size: int, enough: int
    ) -> None:
        """Find the nodes that are nearest to targets, without asking for any records.

        Args:
            targets: where to look.
            on_finished: gets a target and the nearest nodes found there, without this one.
            num_workers: most requests in flight.
            beam_size: most nodes in a result.
            enough: a target is done when this many of the nearest nodes have answered.
        """
        # The nearest of all know each other, but would tell of fewer.
        self._neighbors = max(self._neighbors, enough)
        walk = Traversal(
            targets,
            self.starting_nodes,
            self._ask_for_neighbors,
            on_finished,
            num_workers=num_workers,
            beam_size=beam_size,
            own_id=self._protocol.node_id,
            queries_per_call=min(MAX_KEYS_PER_FIND, max(1, MAX_NEIGHBORS_TOLD // self._neighbors)),
            enough_responses=enough,
            stall_after=self._protocol.stall_after,
            spawn=self._protocol.spawn,
        )
        await self.run(walk)

    @staticmethod
    async def run(walk: Traversal) -> None:
        """Carry out a walk when it is its turn."""
        async with walk_line():
            await walk.run()

    async def _ask_for_neighbors(self, node_id: DHTID, targets: list[DHTID]) -> dict[DHTID, Answer] | None:
        answers = await self.ask(node_id, targets, neighbors_only=True)
        if answers is None:
            return None
        return {target: Answer(record.neighbors) for target, record in answers.items()}


# A peer that was not found is not looked for again for so long.
SECONDS_BETWEEN_SEARCHES = 5.0

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
