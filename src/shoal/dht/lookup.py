"""One walk through the swarm: the nodes that it learns of on the way, their peers, and how to reach them.

A walk can also find the addresses of a peer whose id alone is known. A node's place in the table follows from its peer
id, and the nodes near that place know its addresses. Nothing is stored for this, and nothing has to be trusted: a peer
that answers at an address must prove its identity.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.dht.have_set import MAX_KNOWN, pack_known
from shoal.dht.records import MAX_KEYS_PER_FIND, MAX_NEIGHBORS_TOLD, peer_of_contact, unpack_contact
from shoal.dht.routing import DHTID
from shoal.dht.storage import TimedStorage
from shoal.dht.traverse import LEAST_KEPT, Answer, OnFinished, Traversal, walk_line
from shoal.errors import DHTError
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.dht.protocol import DHTProtocol
    from shoal.dht.records import FoundRecord

logger = logging.getLogger(__name__)
warn_seldom = Seldom(logger.warning)

# A node asked knows others than the asker: so many more are said to be known than it would tell.
SOME_MORE = 4
# Most nodes that are said to be known; the rest of the room is for entries.
MAX_NODES_KNOWN = MAX_KNOWN // 4


class Lookup:
    """State shared by all requests of one walk.

    Args:
        protocol: asks other nodes; has the blacklist of peers not to ask.
        known_nodes: nodes to begin with, besides those of the routing table.
    """

    def __init__(self, protocol: DHTProtocol, known_nodes: Mapping[DHTID, PeerID] | None = None) -> None:
        self._protocol = protocol
        self._blacklist = protocol.blacklist
        self._known_nodes = dict(known_nodes or {})
        self._peers: dict[int, PeerID] = {int(node_id): peer for node_id, peer in self._known_nodes.items()}
        self._contacts: dict[int, msgspec.Raw] = {}  # of nodes that other nodes have told of
        self._hops: dict[int, int] = {}
        # Known nodes near some targets, plainly and packed; forgotten when more nodes become known.
        self._near: dict[tuple[DHTID, ...], tuple[list[int], bytes]] = {}
        self.chosen: set[int] = {
            node_id for node_id, peer in self._known_nodes.items() if node_id != DHTID.of_peer(peer)
        }
        """Ids of nodes that do not follow from their peers' ids."""
        self._neighbors = protocol.bucket_size

    def starting_nodes(self, target: DHTID) -> list[DHTID]:
        """The nearest nodes to a target that are known without asking anybody; suspects only if there are no others."""
        table = self._protocol.routing_table
        nearest = dict(table.get_nearest_neighbors(target, max(self._neighbors, LEAST_KEPT))) or table.suspects
        for node_id, peer in nearest.items():
            self._peers[node_id] = peer
            self._hops[node_id] = 1
        self._near.clear()
        own_id = self._protocol.node_id
        if table.chosen:
            self.chosen |= table.chosen & nearest.keys()
        return [
            node_id
            for node_id in (*nearest, *self._known_nodes)
            if node_id != own_id and self._peers[node_id] not in self._blacklist
        ]

    async def ask(
        self,
        node_id: DHTID,
        targets: Sequence[DHTID],
        *,
        neighbors_only: bool = False,
        known_entries: Sequence[int] = (),
        most_entries: int = 0,
    ) -> dict[DHTID, FoundRecord] | None:
        """Ask a node about targets; returns ``None`` if it does not answer.

        Args:
            known_entries: :func:`~shoal.dht.have_set.numbers_of_entries` that need not be in the answer.
            most_entries: as for :meth:`DHTNode.get_many_by_id`.
        """
        peer = self.peer_of(node_id)
        if peer is None or peer in self._blacklist:
            return None
        wanted = self._neighbors if self._neighbors > self._protocol.bucket_size else 0
        known_nodes, known = self._known_near(targets)
        if known_entries or most_entries:  # what each node draws of many entries should differ
            known = pack_known([*known_nodes, *known_entries], self._protocol.p2p.rng)
        answer = await self._protocol.call_find(
            peer, targets, wanted, neighbors_only=neighbors_only, known=known, most=most_entries
        )
        if answer is None:
            return None
        # The peer has another id, so this one was made up: one peer must not stand for many nodes.
        if answer.node_id != node_id.to_bytes():
            self._protocol.p2p.metrics.node_ids_refused += 1
            warn_seldom(
                "the DHT names peer %s with an id that it does not have, so it is left out. Somebody lies about who "
                "is near a key, or that peer has a new id",
                peer,
            )
            return None
        self._hear_of(answer.contacts, self.hops_to(node_id) + 1)
        if len(targets) > 1:  # what was told for one of them is known, but not to the queries for the others
            for record in answer.records.values():
                record.neighbors.extend(known_nodes)
        return answer.records

    def _known_near(self, targets: Sequence[DHTID]) -> tuple[list[int], bytes]:
        """Nodes that nobody needs to tell, plainly and packed."""
        found = self._near.get(tuple(targets))
        if found is None:
            # Those with chosen ids may be lies about nodes that others tell truly.
            known = list((self._peers.keys() | self._contacts.keys()) - self.chosen)
            count = min(self._neighbors + SOME_MORE, MAX_NODES_KNOWN // max(1, len(targets)))
            if len(known) > count:
                nearest = (heapq.nsmallest(count, known, key=target.__xor__) for target in targets)
                known = list(dict.fromkeys(node_id for few in nearest for node_id in few))
            found = self._near[tuple(targets)] = known, pack_known(known, self._protocol.p2p.rng)
        return found

    def _hear_of(self, contacts: Mapping[int, msgspec.Raw], hops: int) -> None:
        """Nodes whose ids follow from their peers' are believed rather than what others tell under the same ids."""
        if contacts:
            self._near.clear()
        for told_id, contact in contacts.items():
            is_known = told_id in self._contacts or told_id in self._peers
            if is_known and told_id not in self.chosen:
                continue
            if DHTID.of_peer_bytes(peer_of_contact(contact)) == told_id:
                self.chosen.discard(told_id)
                self._peers.pop(told_id, None)
            elif is_known:
                continue
            else:
                self.chosen.add(told_id)
            self._contacts[told_id] = contact
            self._hops.setdefault(told_id, hops)

    def with_own(self, nearest: Iterable[DHTID], target: DHTID) -> list[DHTID]:
        """The nodes nearest to a target and this one, in the order in which they are to hold what is stored there."""
        own_id = self._protocol.node_id
        chosen = self.chosen | self._protocol.routing_table.chosen & {own_id}
        return sorted([*nearest, own_id], key=lambda node_id: (node_id in chosen, node_id ^ target))

    def hops_to(self, node_id: int) -> int:
        """Number of consecutive answers needed to get one from this node; 1 if it was known from the start."""
        return self._hops.get(node_id, 1)

    def peer_of(self, node_id: int) -> PeerID | None:
        """The peer of a known node, ready to be called; ``None`` if its contact data make no sense."""
        peer = self._peers.get(node_id)
        if peer is None and (told := self._contacts.get(node_id)) is not None:
            peer = self._introduce(told)
            if peer is not None:
                self._peers[node_id] = peer
        return peer

    def _introduce(self, told: msgspec.Raw) -> PeerID | None:
        """Give the network layer the addresses of a peer that others told of."""
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
                    # Perhaps of a kind that this version does not know; the peer's other addresses may work.
                    logger.debug("ignored an address that somebody told of: %s", e)
        return peer

    async def find_nearest(
        self, targets: Iterable[DHTID], on_finished: OnFinished, *, num_workers: int, beam_size: int, enough: int
    ) -> None:
        """Find the nodes that are nearest to targets, without asking for records.

        Args:
            targets: the ids to look near.
            on_finished: gets a target and the nearest nodes found there, without this node.
            num_workers: most requests in flight.
            beam_size: most nodes in a result.
            enough: a target is done when this many of the nearest nodes have answered.
        """
        # Ask for enough neighbors: the nearest nodes know each other, but would tell of fewer by default.
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
            chosen=self.chosen,
        )
        await self.run(walk)

    @staticmethod
    async def run(walk: Traversal) -> None:
        """Run a walk as soon as the line of walks lets it in."""
        async with walk_line():
            await walk.run()

    async def _ask_for_neighbors(self, node_id: DHTID, targets: list[DHTID]) -> dict[DHTID, Answer] | None:
        answers = await self.ask(node_id, targets, neighbors_only=True)
        if answers is None:
            return None
        return {target: Answer(record.neighbors) for target, record in answers.items()}


# Pause before a peer that was not found is looked for again.
SECONDS_BETWEEN_SEARCHES = 5.0

MAX_NOT_FOUND = 1000


class PeerFinder:
    """Looks for peers in the table.

    Args:
        protocol: of the searching node; its peer can dial the peers that are found.
        walk: walks to a place in the table, and learns of the nodes there.
    """

    def __init__(self, protocol: DHTProtocol, walk: Callable[[DHTID], Awaitable[object]]) -> None:
        self._protocol, self._walk = protocol, walk
        self._searches: dict[PeerID, asyncio.Task[None]] = {}
        self._not_found: TimedStorage[PeerID, None] = TimedStorage(MAX_NOT_FOUND)

    async def find(self, peer: PeerID) -> None:
        """Look for the addresses of a peer; concurrent callers share one search."""
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
