"""Nodes of the table on an in-memory network, in one loop."""

from __future__ import annotations

import random
from typing import Any

from shoal.dht import DHTNode
from shoal.p2p import P2P, Identity, Multiaddr, PeerID
from shoal.p2p.memory import MemoryNetwork

ONE_WAY_DELAY = 0.02


class Swarm:
    """Makes nodes that can reach each other; the same seed gives the same swarm.

    Args:
        seed: decides every identity and every random choice.
        delay: seconds that a message takes.
    """

    def __init__(self, seed: int = 0, delay: float = ONE_WAY_DELAY) -> None:
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(lambda source, target, size: self.delay_between(source, target))
        self.delay = delay
        self.silent_peers: list[PeerID] = []
        """Peers whose messages, and messages to whom, take for ever."""
        self.nodes: list[DHTNode] = []

    def delay_between(self, source: PeerID, target: PeerID) -> float:
        is_silent = source in self.silent_peers or target in self.silent_peers
        return 1e9 if is_silent else self.delay

    async def p2p(self, **options: Any) -> P2P:
        identity = Identity.generate(self.rng)
        return await P2P.create(
            transport=self.network.transport(identity), rng=random.Random(self.rng.getrandbits(64)), **options
        )

    async def node(self, *, client_mode: bool = False, friends: int = 3, **options: Any) -> DHTNode:
        """One more node; it joins by way of a few random nodes of the swarm."""
        servers = [node for node in self.nodes if node.is_alive and not node.client_mode]
        friends_of_mine = self.rng.sample(servers, min(friends, len(servers)))
        options.setdefault("initial_peers", [maddr for friend in friends_of_mine for maddr in await addresses(friend)])
        p2p = await self.p2p(no_listen=client_mode)
        node = await DHTNode.create(p2p=p2p, client_mode=client_mode, **options)
        self.nodes.append(node)
        return node

    async def grow(self, count: int, **options: Any) -> list[DHTNode]:
        """Several more nodes, one after another."""
        return [await self.node(**options) for _ in range(count)]

    async def kill(self, node: DHTNode) -> None:
        """A node vanishes without a word."""
        await node.shutdown()
        await node.p2p.shutdown()

    def fall_silent(self, node: DHTNode) -> None:
        """A node neither answers nor breaks its connections."""
        self.silent_peers.append(node.peer_id)


async def addresses(node: DHTNode) -> list[Multiaddr]:
    return await node.get_visible_maddrs()


def holders(swarm: Swarm, key_id: Any) -> list[DHTNode]:
    """The nodes that store a key."""
    return [node for node in swarm.nodes if node.is_alive and key_id in node.protocol.storage]
