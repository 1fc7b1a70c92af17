"""Answering peers that reach this one through its relays: the other side of :mod:`shoal.reach.relay.outgoing`.

A relay tells who wants what, and may lie. So what it can make this peer do is bounded: a few attempts at a few
addresses, and handshakes, in which the other side has to prove who it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.base.logs import Seldom, quoted
from shoal.base.tasks import cancel_and_wait
from shoal.errors import DialError, ShoalError
from shoal.net.addresses import Judge, may_be_dialled_for
from shoal.net.dialler import CIRCUIT_SECONDS
from shoal.net.endpoint import Endpoint
from shoal.net.transport import Stream
from shoal.peers.identity import PeerID, is_circuit
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.candidates import LOWEST_PORT
from shoal.reach.relay.circuit import Circuit, Punching, mark_relayed, open_circuits, parse_told, successes
from shoal.reach.relay.messages import MAX_AT_ONCE, MAX_PLACES, Incoming, IncomingReverse, Reach
from shoal.reach.relay.outgoing import OutgoingCircuits

logger = logging.getLogger(__name__)

# How long each address of a peer that wants to be called in reverse is tried.
REVERSE_TRY_SECONDS = 0.7
HTTPS_PORT = 443
"""The only port of a system service at which peers listen, because some networks let nothing else through."""
MAX_ANSWERS = 64
"""Requests of relays that are answered at the same time. With more, or if they take too many connections together, the
oldest of those that take most are given up: honest peers come within a few round trips."""


@dataclass(frozen=True)
class _Answer:
    """What an answer in progress is about."""

    relay: PeerID
    peer: bytes
    """The peer that wants to reach this one, as the relay says."""
    connections: int


class IncomingCircuits:
    """Answers what relays announce.

    Args:
        endpoint: of the peer whose relays these are.
        circuits: knows how to find direct connections on the way.
        most: connections that may be opened for them at the same time.
    """

    def __init__(self, endpoint: Endpoint, circuits: OutgoingCircuits, most: int) -> None:
        self._endpoint, self._circuits = endpoint, circuits
        self._most = max(most, MAX_AT_ONCE)  # half of what one caller asks for would be of no use to it
        self.tasks: dict[asyncio.Task[None], _Answer] = {}
        """Answers in progress, the oldest first."""
        self._given_up: dict[asyncio.Task[None], None] = {}  # which end in a moment
        self._warn_seldom = Seldom(logger.warning)

    def answer(self, relay: PeerID, places: Sequence[Multiaddr], incoming: Incoming | IncomingReverse) -> None:
        """A relay says that somebody wants to reach this peer.

        Args:
            relay: which one.
            places: where this peer reaches the relay.
            incoming: what it says.
        """
        task = asyncio.get_running_loop().create_task(self._answer(relay, places, incoming))
        self.tasks[task] = _Answer(relay, incoming.peer, max(1, len(incoming.cookies)))
        task.add_done_callback(self._forget)
        while len(self.tasks) > MAX_ANSWERS or self.connections > self._most:
            self._warn_seldom(
                "relay %s announces more connections than this peer makes at the same time, %d for %d peers: some are "
                "left out",
                relay,
                self._most,
                MAX_ANSWERS,
                about=relay,
            )
            self._give_one_up()

    @property
    def connections(self) -> int:
        """How many connections the answers in progress open, or have opened."""
        return sum(each.connections for each in self.tasks.values())

    def _give_one_up(self) -> None:
        """Make room: strangers who announce themselves and do not come must keep nobody out."""
        by_relay, by_peer = Counter[PeerID](), Counter[bytes]()
        for each in self.tasks.values():
            by_relay[each.relay] += each.connections
        [(crowded, _)] = by_relay.most_common(1)
        for each in self.tasks.values():
            by_peer[each.peer] += each.connections if each.relay == crowded else 0
        [(greedy, _)] = by_peer.most_common(1)
        oldest = next(task for task, each in self.tasks.items() if (each.relay, each.peer) == (crowded, greedy))
        del self.tasks[oldest]
        self._given_up[oldest] = None
        oldest.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self.tasks.pop(task, None)
        self._given_up.pop(task, None)

    async def _answer(self, relay: PeerID, places: Sequence[Multiaddr], incoming: Incoming | IncomingReverse) -> None:
        peer = PeerID(incoming.peer)
        try:
            async with asyncio.timeout(CIRCUIT_SECONDS):
                if isinstance(incoming, IncomingReverse):
                    await self._call_in_reverse(relay, places, incoming)
                    return
                punching = self._circuits.punching if incoming.punch else None
                circuits = await open_circuits(
                    self._endpoint.transport, relay, places, incoming.cookies, punchable=punching is not None
                )
                try:
                    await self._receive(peer, Reach(incoming.reach), circuits, punching)
                finally:
                    for circuit in circuits:
                        circuit.abort()
        except (ShoalError, TimeoutError) as e:
            logger.debug("peer %s, announced by relay %s, is not reached: %r", peer, relay, e)
        except Exception as e:
            # A defect on this side, or what a relay says has led to one. Nobody waits for this task who could see it.
            self._warn_seldom(
                "peer %s, announced by relay %s, is not reached because of %s", peer, relay, quoted(e), about=relay
            )
            logger.debug("traceback of the answer to %s", peer, exc_info=e)

    async def _receive(
        self, peer: PeerID, reach: Reach, circuits: Sequence[Circuit], punching: Punching | None
    ) -> None:
        going_on = None if punching is None else await punching.as_target(peer, reach, circuits)
        for circuit in circuits:
            place, relay = circuit.session.remote_address, circuit.relay

            def accept(stream: Stream, place: Multiaddr | None = place, relay: PeerID = relay) -> None:
                mark_relayed(stream, place, relay)
                self._endpoint.server.accept(stream)

            self._endpoint.transport.receive(circuit.session, accept)
        if going_on is not None:
            await going_on

    async def _call_in_reverse(self, relay: PeerID, places: Sequence[Multiaddr], incoming: IncomingReverse) -> None:
        cookies, transport = incoming.cookies, self._endpoint.transport
        if incoming.peer == relay.to_bytes():
            wanted = list(places)  # it is the relay itself that wants to be called
        else:
            told = [address for text in incoming.places if (address := parse_told(text)) is not None]
            allowed = [each for each in told if may_be_dialled(each, places, transport.is_inside, transport.is_here)]
            wanted = transport.worth_dialling(allowed)
        for address in wanted[:MAX_PLACES]:
            try:
                async with asyncio.timeout(REVERSE_TRY_SECONDS):
                    session = await transport.open_session(address, cookies[0])
            except (DialError, TimeoutError) as e:
                logger.debug("cannot call %s in reverse: %r", address, e)
                continue
            transport.receive(session, self._accept_arranged)
            if others := [transport.open_session(address, cookie) for cookie in cookies[1:]]:
                for each in await successes(others):
                    transport.receive(each, self._accept_arranged)
            return

    def _accept_arranged(self, stream: Stream) -> None:
        stream.is_arranged = True
        self._endpoint.server.accept(stream)

    async def close(self) -> None:
        """Answer nobody any more."""
        await cancel_and_wait(*self.tasks, *self._given_up)


def may_be_dialled(address: Multiaddr, places: Sequence[Multiaddr], is_inside: Judge, is_here: Judge) -> bool:
    """Whether to dial an address that a relay has told: it must not make this machine call whatever it likes.

    The caller is at most as near as the relay. Where a place of the relay is public, the caller may be
    anywhere.

    Args:
        address: as it was told.
        places: where this peer reaches the relay.
        is_inside, is_here: as for :func:`~shoal.net.addresses.may_be_dialled_for`.
    """
    if is_circuit(address):
        return False
    if "memory" not in address and (port := int(address.get("tcp") or 0)) < LOWEST_PORT and port != HTTPS_PORT:
        return False
    tellers: Sequence[Multiaddr | None] = places or [None]
    return all(may_be_dialled_for(address, place, is_inside=is_inside, is_here=is_here) for place in tellers)
