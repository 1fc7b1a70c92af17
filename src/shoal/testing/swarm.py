"""Swarms on an in-memory network without hosts: cheap, usable in any event loop, and the same for the same seed.

Use :class:`~shoal.testing.Network` for hosts with clocks, rates, firewalls and faults of their own.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shoal.dht import DHTNode
from shoal.net.memory import MemoryNetwork
from shoal.p2p import P2P, Identity, PeerID

if TYPE_CHECKING:
    from shoal.averaging.node import AveragerNode

NodeT = TypeVar("NodeT", DHTNode, "AveragerNode")

# The number of nodes that a newcomer gets as initial peers. Chosen.
INITIAL_PEERS = 3


class Swarm(Generic[NodeT]):
    """Peers that can reach each other.

    Args:
        seed: decides every identity and every random choice.
        delay: seconds that a message takes.
    """

    def __init__(self, seed: int = 0, delay: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.delay = delay
        self.network = MemoryNetwork(lambda source, target, size: self._delay_between(source, target))
        self.silent_peers: list[PeerID] = []
        """Silent peers: messages from them and to them never arrive."""
        self.nodes: list[NodeT] = []
        """All nodes that were started, including those that have ended."""

    def _delay_between(self, source: PeerID, target: PeerID) -> float:
        return 1e9 if source in self.silent_peers or target in self.silent_peers else self.delay

    async def p2p(self, **options: Any) -> P2P:
        """Start one more peer, without a node.

        Args:
            options: for :meth:`P2P.create`.
        """
        identity, rng = Identity.generate(self.rng), random.Random(self.rng.getrandbits(64))
        return await P2P.create(transport=self.network.transport(identity), rng=rng, **options)

    def fall_silent(self, node: NodeT) -> None:
        """Make a node fall silent: it neither answers nor breaks its connections."""
        self.silent_peers.append(node.p2p.peer_id)


class DHTSwarm(Swarm[DHTNode]):
    """Nodes of one DHT."""

    async def node(self, *, client_mode: bool = False, token: str = "", **options: Any) -> DHTNode:
        """One more node, which joins through a few random nodes of the swarm.

        Args:
            token: of a private run.
            options: for :meth:`DHTNode.create`.
        """
        servers = [node for node in self.nodes if node.is_alive and not node.client_mode]
        chosen = self.rng.sample(servers, min(INITIAL_PEERS, len(servers)))
        addresses = [address for friend in chosen for address in await friend.get_visible_maddrs()]
        options.setdefault("initial_peers", addresses)
        p2p = await self.p2p(client_mode=client_mode, token=token)
        node = await DHTNode.create(p2p=p2p, client_mode=client_mode, **options)
        self.nodes.append(node)
        return node

    async def grow(self, count: int, **options: Any) -> list[DHTNode]:
        """Start several more nodes, one after another."""
        return [await self.node(**options) for _ in range(count)]

    async def kill(self, node: DHTNode) -> None:
        """End a node and its peer. Other nodes are not told."""
        await node.shutdown()
        await node.p2p.shutdown()
