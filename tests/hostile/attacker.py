"""What every attacker has: an identity, a node of the table, and the name of the run. It runs wherever a peer does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.averaging.node import AveragerNode
from shoal.base.clock import get_dht_time
from shoal.dht import DHTNode
from shoal.errors import ShoalError
from shoal.optim.progress.exchange import ProgressExchange, ProgressMessage
from shoal.optim.progress.records import parse_record
from shoal.p2p import P2P, P2PContext, PeerID, ServicerBase, StubBase

PACE = 0.5
"""Seconds between two blows of an attack that repeats itself."""
PATIENCE = 5.0
FAILURES = (ShoalError, ConnectionError, TimeoutError, ValueError)
"""How a victim may refuse: the attacker goes on."""


@dataclass
class Attacker:
    """One who wants to do harm."""

    node: DHTNode
    run: str
    """The name of the run."""
    make_node: Callable[..., Awaitable[DHTNode]]
    """Another identity, with a node of its own; takes options of :meth:`DHTNode.create`."""
    state_of: str = "state"
    """Which averager shares the state: it has one of its own, or is that of the gradients (``grad``)."""
    has_struck: asyncio.Event = field(default_factory=asyncio.Event)
    """The attack has reached everybody once."""

    @property
    def p2p(self) -> P2P:
        return self.node.p2p

    async def victims(self) -> list[PeerID]:
        """Peers that train, as anybody can find them."""
        found = await self.node.get(f"{self.run}_progress", latest=True)
        records = [] if found is None else [entry.value for entry in found.value.values() if entry.value is not None]
        peers = []
        for record in map(parse_record, records):
            if record.peer_id != self.p2p.peer_id.to_bytes() and not record.client_mode:
                peers.append(PeerID(record.peer_id))
                self.p2p.add_addresses(peers[-1], record.addresses)
        return peers

    def tracker(self, peer: PeerID) -> StubBase:
        """The tracker of a peer."""
        return ProgressExchange.get_stub(self.p2p, peer, namespace=f"{self.run}_progress")

    def averager(self, peer: PeerID, what: str = "grad") -> StubBase:
        """An averager of a peer; by default that of its gradients."""
        return AveragerNode.get_stub(self.p2p, peer, namespace=f"{self.run}_{what}_averager")

    async def strike(self, blow: Callable[[PeerID], Awaitable[Any]], peers: Iterable[PeerID] | None = None) -> None:
        """Do the same to everybody, at once. Whoever refuses is left alone this time."""
        chosen = await self.victims() if peers is None else list(peers)
        await asyncio.gather(*(self._try(blow, peer) for peer in chosen))
        if chosen:
            self.has_struck.set()

    async def _try(self, blow: Callable[[PeerID], Awaitable[Any]], peer: PeerID) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await blow(peer)
        except FAILURES:
            return

    async def strike_again_and_again(self, blow: Callable[[PeerID], Awaitable[Any]], pace: float = PACE) -> None:
        """The same for ever."""
        while True:
            await self.strike(blow)
            await asyncio.sleep(pace)


class FalseTracker(ServicerBase):
    """Answers and calls as trackers do, with something else to say.

    Args:
        epoch_of: makes the epoch that is claimed from the one that the others are at.
        claims: the other fields of its messages.
    """

    def __init__(self, me: Attacker, epoch_of: Callable[[int], int] = lambda epoch: epoch, **claims: Any) -> None:
        self._me, self._epoch_of = me, epoch_of
        self.epoch = 0
        """The largest epoch that another peer has told."""
        self._claims = {"samples_accumulated": 1, "samples_per_second": 1.0, "client_mode": False, **claims}

    @classmethod
    def handle_name(cls, method: str, namespace: str | None) -> str:
        return ProgressExchange.handle_name(method, namespace)

    def _message(self) -> ProgressMessage:
        return ProgressMessage(epoch=self._epoch_of(self.epoch), time=get_dht_time(), **self._claims)

    async def rpc_exchange_progress(self, request: ProgressMessage, context: P2PContext) -> ProgressMessage:
        self.epoch = max(self.epoch, request.epoch)
        return self._message()

    async def tell(self, peer: PeerID) -> None:
        """Call one peer. It is asked first how far it is, by somebody who takes no part."""
        question = ProgressMessage(0, 0, 0.0, get_dht_time(), True, taking_part=False)
        reply = await self._me.tracker(peer).rpc_exchange_progress(question, timeout=PATIENCE)
        self.epoch = max(self.epoch, reply.epoch)
        await self._me.tracker(peer).rpc_exchange_progress(self._message(), timeout=PATIENCE)

    async def go_on(self) -> None:
        """Tell everybody, again and again, and answer whoever calls."""
        namespace = f"{self._me.run}_progress"
        await self.add_p2p_handlers(self._me.p2p, namespace=namespace)
        try:
            await self._me.strike_again_and_again(self.tell)
        finally:
            await self.remove_p2p_handlers(self._me.p2p, namespace=namespace)
