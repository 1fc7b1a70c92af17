"""Many peers at once, each on a host of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from shoal.dht import DHTNode
from shoal.errors import BootstrapError, ValidationError
from shoal.p2p import P2P, Multiaddr
from shoal.testing.network import Network

# How many nodes of the swarm a newcomer is told.
INITIAL_PEERS = 3
# How often it tries, on links that fail now and then.
JOIN_ATTEMPTS = 5


async def start_peers(network: Network, count: int, **options: Any) -> list[P2P]:
    """Start peers that know nothing of each other.

    Args:
        count: how many, each on a new host.
        options: for :meth:`P2P.create`.
    """
    hosts = [network.add_host() for _ in range(count)]
    return [await host.run(P2P.create(transport=host.transport(), rng=host.rng, **options)) for host in hosts]


async def start_dht_nodes(
    network: Network, count: int, *, swarm: list[DHTNode] | None = None, at_once: int = 32, **options: Any
) -> list[DHTNode]:
    """Start nodes of one distributed table, each on a new host.

    Args:
        count: how many.
        swarm: nodes that exist already; the new ones join them.
        at_once: so many join at the same time.
        options: for :meth:`DHTNode.create`.

    Returns:
        The new nodes.

    Raises:
        BootstrapError, ValidationError: a node could not join, also when it tried again.
    """
    existing: list[DHTNode] = list(swarm or ())
    started: list[DHTNode] = []
    while len(started) < count:
        wave = min(at_once, count - len(started)) if existing else 1
        nodes = await asyncio.gather(*(_start_dht_node(network, existing, options) for _ in range(wave)))
        started += nodes
        existing += nodes
    return started


async def _some_addresses(network: Network, nodes: list[DHTNode]) -> list[Multiaddr]:
    reachable = [node for node in nodes if not node.protocol.client_mode and network.host_of(node.peer_id).is_up]
    chosen = network.rng.sample(reachable, min(INITIAL_PEERS, len(reachable)))
    return [address for node in chosen for address in await node.p2p.get_visible_maddrs()]


async def _start_dht_node(network: Network, swarm: list[DHTNode], options: dict[str, Any]) -> DHTNode:
    host, attempts_left = network.add_host(), JOIN_ATTEMPTS
    while True:
        addresses = await _some_addresses(network, swarm)
        create = DHTNode.create(initial_peers=addresses, transport=host.transport(), rng=host.rng, **options)
        attempts_left -= 1
        try:
            return await host.run(create)
        except (BootstrapError, ValidationError):
            if not attempts_left:
                raise
