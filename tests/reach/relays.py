"""Peers that can be reached through relays alone, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from shoal.net.memory import MemoryNetwork
from shoal.p2p import P2P, Multiaddr, PeerID
from shoal.reach.relay.messages import Connect, ConnectAnswer, Reserve, ReserveAnswer
from shoal.reach.relay.server import RelayServer
from tests.p2p.peers import Number, Peers, Service, serving, stub, until

HERE = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}


class Relayed(Peers):
    """Relays that know each other, and private peers behind them, shut down at the end of the block."""

    def __init__(self, kind: str, network: MemoryNetwork | None = None) -> None:
        super().__init__(kind)
        self.network = network or self.network
        self.relays: list[P2P] = []
        self.hidden: list[P2P] = []

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        if self.kind == "memory":
            options.setdefault("transport", self.network.transport())
        return options

    async def start(self, **options: Any) -> P2P:
        p2p = await super().start(**options)
        p2p.circuits.punching = None  # on one machine that would always succeed
        return p2p

    async def relay(self, **options: Any) -> P2P:
        relay = await self.start(**{"relay": True, **HERE, **options})
        self.relays.append(relay)
        return relay

    async def caller(self, **options: Any) -> P2P:
        """Somebody who does not listen and knows no relay."""
        p2p = await P2P.create(**self._options({"client_mode": True, **options}))
        p2p.circuits.punching = None
        self.hidden.append(p2p)
        return p2p

    async def guest(self, relays: Sequence[P2P] | None = None, **options: Any) -> P2P:
        """Somebody who does not listen, has reservations at relays, and serves."""
        p2p = await self.caller(**options)
        chosen = self.relays if relays is None else list(relays)
        introduce(p2p, *chosen)
        p2p.reservations.want(True)
        await until(lambda: len(p2p.reservations.held) == min(2, len(chosen)))
        await serving(p2p)
        return p2p

    async def private(self) -> P2P:
        """Somebody who listens, knows that it cannot be called, and serves."""
        p2p = await self.start(force_reachability="private", **HERE)
        p2p.reservations.look()
        introduce(p2p, *self.relays)
        await until(lambda: len(p2p.reservations.held) == min(2, len(self.relays)))
        await serving(p2p)
        return p2p

    async def __aexit__(self, *exc_info: Any) -> None:
        await asyncio.gather(*(p2p.shutdown() for p2p in self.hidden))
        await super().__aexit__(*exc_info)


class Told:
    """A directory that knows some peers.

    Args:
        nodes: peers that others can dial.
        find: looks for the addresses of a peer.
    """

    def __init__(self, nodes: Sequence[PeerID] = (), find: Callable[[PeerID], object] = lambda peer: None) -> None:
        self.nodes, self._find = nodes, find

    async def find_addresses(self, peer: PeerID) -> None:
        self._find(peer)

    def dialable_peers(self) -> Sequence[PeerID]:
        return self.nodes

    def note_reachability(self) -> None:
        pass


def introduce(p2p: P2P, *relays: P2P) -> None:
    """Tell a peer which relays there are."""
    for relay in relays:
        p2p.add_addresses(relay.peer_id, relay.get_addresses(relay.peer_id))
    p2p.directory = Told([relay.peer_id for relay in relays])


def tell(caller: P2P, guest: P2P) -> list[Multiaddr]:
    """Tell a peer through which relays another one is reached."""
    addresses = guest.reservations.addresses()
    caller.add_addresses(guest.peer_id, addresses)
    return addresses


async def square(caller: P2P, server: P2P) -> int:
    answer = await stub(caller, server).rpc_square(Number(value=3))
    return int(answer.value)


async def connect(caller: P2P, relay: P2P, **request: Any) -> Any:
    """Ask a relay for circuits."""
    answer: ConnectAnswer = await RelayServer.get_stub(caller, relay.peer_id).rpc_connect(Connect(**request))
    return answer


@asynccontextmanager
async def reserving(p2p: P2P, relay: P2P, **request: Any) -> AsyncIterator[Any]:
    """Ask a relay for a reservation; what the relay answers holds until the end of the block."""
    async with RelayServer.get_stub(p2p, relay.peer_id).rpc_reserve() as call:
        await call.send(Reserve(**request), end=True)
        answer = await call.receive(ReserveAnswer)
        assert answer is not None
        yield answer


async def reserve(p2p: P2P, relay: P2P, **request: Any) -> Any:
    """Ask a relay for a reservation, and give it up at once."""
    async with reserving(p2p, relay, **request) as answer:
        return answer


__all__ = ["HERE", "Relayed", "Service", "Told", "connect", "introduce", "reserve", "reserving", "square", "tell"]
