"""One walk through the swarm: which nodes were heard of on the way, who they are, and how to reach them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from shoal.dht.blacklist import Blacklist
from shoal.dht.messages import MAX_KEYS_PER_FIND
from shoal.dht.protocol import DHTProtocol, FoundRecord, Neighbor
from shoal.dht.routing import DHTID
from shoal.dht.traverse import Answer, OnFinished, Traversal
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)


class Lookup:
    """What all requests of one walk share.

    Args:
        protocol: asks other nodes.
        blacklist: peers that are left alone; gains the peers that do not answer.
        known_nodes: nodes to begin with, besides those of the routing table.
    """

    def __init__(
        self, protocol: DHTProtocol, blacklist: Blacklist, known_nodes: Mapping[DHTID, PeerID] | None = None
    ) -> None:
        self._protocol = protocol
        self._blacklist = blacklist
        self._addresses: dict[PeerID, Iterable[str]] = {}
        self._known_nodes = dict(known_nodes or {})
        self.peers: dict[DHTID, PeerID] = dict(self._known_nodes)
        """Who the nodes are that were heard of."""

    def starting_nodes(self, target: DHTID) -> list[DHTID]:
        """The nodes nearest to a target that are known without asking anybody."""
        table = self._protocol.routing_table
        nearest = dict(table.get_nearest_neighbors(target, self._protocol.bucket_size))
        self.peers.update(nearest)
        own_id = self._protocol.node_id
        return [
            node_id
            for node_id in (*nearest, *self._known_nodes)
            if node_id != own_id and self.peers[node_id] not in self._blacklist
        ]

    async def ask(self, node_id: DHTID, targets: Iterable[DHTID]) -> dict[DHTID, FoundRecord] | None:
        """Ask a node about targets; ``None`` if it does not answer, which gets it banned for a while."""
        peer = self.peers[node_id]
        self.introduce(peer)
        answers = await self._protocol.call_find(peer, targets)
        if answers is None:
            self._blacklist.register_failure(peer)
        else:
            self._blacklist.register_success(peer)
        return answers

    def introduce(self, peer: PeerID) -> None:
        """Make sure that the network below knows the addresses that were told for this peer."""
        told = self._addresses.pop(peer, None)
        if not told:
            return
        p2p = self._protocol.p2p
        known = [str(address) for address in p2p.get_addresses(peer)]
        for address in told:
            if address not in known:
                try:
                    p2p.add_addresses(peer, [address])
                except ValueError as e:
                    logger.debug("ignored an address that was told for peer %s: %s", peer, e)

    def accept(self, neighbors: Iterable[Neighbor]) -> list[DHTID]:
        """The nodes among those that somebody told of which are worth asking."""
        own_id, own_peer = self._protocol.node_id, self._protocol.p2p.peer_id
        accepted = []
        for node_id, peer, addresses in neighbors:
            if node_id == own_id or peer == own_peer or peer in self._blacklist:
                continue
            if node_id not in self.peers:
                self.peers[node_id] = peer
                self._addresses[peer] = addresses
            accepted.append(node_id)
        return accepted

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
        walk = Traversal(
            targets,
            self.starting_nodes,
            self._ask_for_neighbors,
            on_finished,
            num_workers=num_workers,
            beam_size=beam_size,
            queries_per_call=MAX_KEYS_PER_FIND,
            enough_responses=enough,
            spawn=self._protocol.spawn,
        )
        await walk.run()

    async def _ask_for_neighbors(self, node_id: DHTID, targets: list[DHTID]) -> dict[DHTID, Answer] | None:
        answers = await self.ask(node_id, targets)
        if answers is None:
            return None
        return {target: Answer(self.accept(record.neighbors)) for target, record in answers.items()}
