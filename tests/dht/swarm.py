"""Nodes of the DHT on an in-memory network, in one loop."""

from __future__ import annotations

from typing import Any

from shoal.dht import DHTNode
from shoal.p2p import Multiaddr
from shoal.testing import DHTSwarm

ONE_WAY_DELAY = 0.02


class Swarm(DHTSwarm):
    """Messages take a moment."""

    def __init__(self, seed: int = 0, delay: float = ONE_WAY_DELAY) -> None:
        super().__init__(seed, delay)


async def addresses(node: DHTNode) -> list[Multiaddr]:
    return await node.get_visible_maddrs()


def holders(swarm: Swarm, key_id: Any) -> list[DHTNode]:
    """The nodes that store a key."""
    return [node for node in swarm.nodes if node.is_alive and key_id in node.protocol.storage]
