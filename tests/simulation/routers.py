"""Peers behind routers, on a simulated internet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from shoal.dht import DHTNode
from shoal.errors import ShoalError
from shoal.net.connection import Connection
from shoal.p2p import P2P, Multiaddr
from shoal.testing import Host, Link, Nat, Network

ROUND_TRIP = 0.06
ANYWHERE = Link(delay=ROUND_TRIP / 2)
MakeNat = Callable[[], Nat | None]

KINDS: dict[str, MakeNat] = {
    "public": lambda: None,
    "full cone": lambda: Nat(filtering="none"),
    "address-restricted": lambda: Nat(filtering="address"),
    "port-restricted": lambda: Nat(filtering="port"),
    "rejecting": lambda: Nat(filtering="port", rejects=True),
    "carrier": lambda: Nat(behind=Nat()),
    "symmetric": lambda: Nat(mapping="hard"),
}
"""What peers are behind."""
STRICT = frozenset({"port-restricted", "rejecting", "carrier", "symmetric"})
"""Routers that let in nobody but those ports to which something was sent."""


def need_relay(first: str, second: str) -> bool:
    """Whether no direct connection is possible between peers behind such routers."""
    return "symmetric" in (first, second) and {first, second} <= STRICT


class Internet:
    """A network with one public node of a table, and whoever joins it."""

    def __init__(self, link: Link = ANYWHERE, **options: Any) -> None:
        self.network = Network(link, internet=True, **options)
        self.nodes: list[DHTNode] = []

    async def start(self, nat: Nat | None = None, **options: Any) -> DHTNode:
        """Start a node on a new host; the first one has nobody to join."""
        host = self.network.add_host(nat=nat)
        known: list[Multiaddr] = []
        if self.nodes:
            known = await self.nodes[0].p2p.get_visible_maddrs()
        create = DHTNode.create(initial_peers=known, transport=host.transport(), rng=host.rng, **options)
        node = await host.run(create)
        self.nodes.append(node)
        return node

    def host_of(self, node: DHTNode) -> Host:
        return self.network.host_of(node.peer_id)


def know(caller: P2P, other: P2P) -> None:
    """Let a peer have the present addresses of another one, as the table would tell them."""
    caller.address_book.replace(other.peer_id, [str(address) for address in other.outlook.announced()])


async def dial(internet: Internet, caller: DHTNode, other: DHTNode) -> tuple[Connection, float]:
    """A new connection, and the seconds that it took."""
    know(caller.p2p, other.p2p)
    loop = asyncio.get_running_loop()
    began = loop.time()
    connection = await internet.host_of(caller).run(caller.p2p.dial(other.peer_id))
    return connection, loop.time() - began


async def connects(internet: Internet, caller: DHTNode, other: DHTNode) -> bool:
    """Whether a peer can be dialled."""
    try:
        connection, _ = await dial(internet, caller, other)
    except ShoalError:
        return False
    connection.abort()
    return True
