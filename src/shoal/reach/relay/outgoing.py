"""Dialling peers that cannot be called: from an address ``/…/p2p/RELAY/p2p-circuit`` to a stream.

Three ways lead there. *In reverse*: if this peer can be called itself, the relay tells the other one where, and that
one connects. *Through the relay*: each side opens a session to it, and the relay joins the two. *Through both routers*:
both sides of a circuit try to connect to each other from the ports of their sessions (:class:`~.circuit.Punching`).

Whatever connects, the roles are fixed before: who has asked is the dialler of the handshake, which proves who the other
one is. So a relay that lies can waste some attempts and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from shoal.access.badges import ANY_ROLE
from shoal.base.backoff import Backoffs
from shoal.base.logs import quoted
from shoal.errors import (
    DialError,
    NoRelayError,
    NoReservationError,
    NoRoomError,
    NotAMemberError,
    P2PDaemonError,
    P2PHandlerError,
    ProtocolError,
)
from shoal.net.connection_pool import SPARE
from shoal.net.dialler import CIRCUIT_SECONDS, DIRECT_ONLY
from shoal.net.endpoint import Endpoint
from shoal.net.transport import Stream
from shoal.peers.identity import PeerID, relay_of
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.relay.circuit import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    Circuit,
    Punching,
    mark_relayed,
    open_circuits,
    successes,
)
from shoal.reach.relay.messages import (
    MAX_AT_ONCE,
    MAX_PLACES,
    Connect,
    ConnectAnswer,
    Connected,
    ConnectRequest,
    ConnectReverse,
    NotConnected,
    Reach,
    RelayCode,
)
from shoal.reach.relay.server import RelayServer

logger = logging.getLogger(__name__)

REVERSE_SECONDS = 2.0
"""How long a peer that asked to be called waits, before it goes through the relay after all."""
ANSWER_SECONDS = 2.0
"""How long a relay has to answer on a connection that it had before; then it is asked over a new one."""
HEAD_START = 0.5
"""How much longer a direct connection may take than the relayed one, and still be preferred."""
PATIENCE = 0.75
"""The same as a share of the time that everything before has taken: on busy machines both take longer."""


class OutgoingCircuits:
    """Dials through relays.

    Args:
        endpoint: whose connections these are.
        own_relay: joins circuits through this peer itself.
        punching: finds direct connections on the way; without it, all circuits stay relayed.
        public_addresses: where this peer is known to be callable from outside, so that others may call in reverse.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        own_relay: RelayServer,
        punching: Punching | None,
        public_addresses: Callable[[], Sequence[Multiaddr]],
    ) -> None:
        self._endpoint, self._own_relay = endpoint, own_relay
        self.punching, self.public_addresses = punching, public_addresses
        self.reach = Reach.EASY
        """What others are told of this peer."""
        self.reversals = Backoffs(FIRST_PAUSE, LONGEST_PAUSE, asyncio.get_running_loop().time)
        """Peers that could not call in reverse."""

    def forget_routers(self) -> None:
        """This machine is behind other routers: what worked, or did not, says nothing any more."""
        self.reversals.clear()
        if self.punching is not None:
            self.punching.forget_routers()

    async def dial(self, address: Multiaddr, target: PeerID, count: int = 1) -> list[Stream]:
        """Connect to a peer through its relay, or with its help.

        Args:
            address: ``/…/p2p/RELAY/p2p-circuit``.
            target: who must answer.
            count: how many streams are wanted, at most 8.

        Returns:
            One to ``count`` streams.

        Raises:
            NoReservationError: the relay holds no reservation of that peer.
            NoRoomError: the relay has no room.
            DialError: the relay or that peer could not be reached.
        """
        found = relay_of(address)
        if found is None:
            raise DialError(f"{address} leads through no relay: give /ip4/…/tcp/…/p2p/<relay>/p2p-circuit")
        place, relay = found
        try:
            async with asyncio.timeout(CIRCUIT_SECONDS):
                streams = await self._dial(place, relay, target, min(count, MAX_AT_ONCE))
        except TimeoutError:
            raise DialError(
                f"no connection to peer {target} through relay {relay} within {CIRCUIT_SECONDS:g} s"
            ) from None
        for stream in streams:
            stream.is_arranged = not stream.is_relayed
        return streams

    async def dial_one(self, address: Multiaddr, target: PeerID) -> Stream:
        """Like :meth:`dial`, for one stream."""
        streams = await self.dial(address, target)
        return streams[0]

    async def _dial(self, place: Multiaddr, relay: PeerID, target: PeerID, count: int) -> list[Stream]:
        is_own = relay == self._endpoint.peer_id
        callable_at = list(self._endpoint.transport.addresses() if is_own else self.public_addresses())[:MAX_PLACES]
        if callable_at and (is_own or self.reversals.is_due(target)):
            streams = await self._dial_in_reverse(place, relay, target, count, callable_at)
            if streams:
                self.reversals.succeed(target)
                return streams
            self.reversals.fail(target)
        began_at = asyncio.get_running_loop().time()
        wants_punch = self.punching is not None and not is_own and self.punching.is_worth_it(target)
        request = Connect(target=target.to_bytes(), count=count, punch=wants_punch, reach=int(self.reach))
        answer = await self._ask(place, relay, target, request)
        circuits = await open_circuits(
            self._endpoint.transport, relay, [place], answer.cookies[:count], punchable=wants_punch
        )
        try:
            punches: Sequence[asyncio.Future[Stream]] = ()
            is_expected = False
            if wants_punch and self.punching is not None:
                punches = await self.punching.as_dialler(target, Reach(answer.reach), circuits, began_at)
                is_expected = self.punching.expects_success(target)
            elif self.punching is not None and not is_own:
                self.punching.note_unpunched(target, circuits)
            return await self._authenticate(circuits, target, punches, began_at, direct_is_expected=is_expected)
        finally:
            for circuit in circuits:
                circuit.abort()

    async def _ask(self, place: Multiaddr, relay: PeerID, target: PeerID, request: ConnectRequest) -> Connected:
        """Ask a relay for connections to a peer."""
        if relay == self._endpoint.peer_id:
            answer = await self._own_relay.connect(request, relay)
        else:
            self._endpoint.add_addresses(relay, [place])
            answer = await self.call_relay(relay, "rpc_connect", request)
        if isinstance(answer, Connected) and (answer.cookies or isinstance(request, ConnectReverse)):
            return answer
        code, text = (answer.code, answer.text) if isinstance(answer, NotConnected) else (None, "")
        if code in (RelayCode.NO_RESERVATION, RelayCode.NOT_A_RELAY):
            raise NoReservationError(
                f"relay {relay} holds no reservation of peer {target}: it has left, or has other relays now, which are "
                "looked up by themselves"
            )
        if code == RelayCode.BUSY:
            raise NoRoomError(f"relay {relay} has no room: {quoted(text)}. Run 'shoal dht' on a public machine")
        raise DialError(f"relay {relay} refuses a connection to peer {target}: {quoted(text)}")

    async def call_relay(self, relay: PeerID, method: str, request: ConnectRequest) -> ConnectAnswer:
        """Call a relay at its own addresses: nothing leads to a relay through another one.

        Raises:
            NoRelayError: it does not answer.
            NotAMemberError: one of both sides may not take part in such a call.
        """
        before = DIRECT_ONLY.get()
        DIRECT_ONLY.set(True)
        try:
            handle = RelayServer.handle_name(method, None)
            if self._endpoint.pool.count_of(relay):
                try:
                    return await self._endpoint.call(
                        relay, handle, request, ConnectAnswer, ANSWER_SECONDS, roles=ANY_ROLE
                    )
                except TimeoutError:
                    # The connection may have broken without a sign.
                    self._endpoint.pool.end_idle(relay)
            return await self._endpoint.call(relay, handle, request, ConnectAnswer, roles=ANY_ROLE)
        except NotAMemberError:
            raise
        except (P2PDaemonError, P2PHandlerError, ProtocolError) as e:
            raise NoRelayError(f"{relay}: {e}") from e
        finally:
            # Not by a token: a loop that ends may close this in another context.
            DIRECT_ONLY.set(before)

    async def _authenticate(
        self,
        circuits: Sequence[Circuit],
        target: PeerID,
        punches: Sequence[asyncio.Future[Stream]],
        began_at: float,
        *,
        direct_is_expected: bool,
    ) -> list[Stream]:
        """One stream of each circuit, a direct one if possible."""
        if punches:
            pairs = zip(circuits, punches, strict=True)
            finishing = [self._better_of(*pair, target, began_at, is_expected=direct_is_expected) for pair in pairs]
        else:
            finishing = [self._relayed(circuit, target) for circuit in circuits]
        streams = await successes(finishing)
        relayed = sum(stream.is_relayed for stream in streams)
        self._endpoint.metrics.dials_relayed += relayed
        self._endpoint.metrics.dials_punched += len(streams) - relayed
        return streams

    async def _relayed(self, circuit: Circuit, target: PeerID) -> Stream:
        place = circuit.session.remote_address
        stream = await self._endpoint.transport.authenticate(circuit.session, target)
        mark_relayed(stream, place, circuit.relay)
        return stream

    async def _better_of(
        self,
        circuit: Circuit,
        punch: asyncio.Future[Stream],
        target: PeerID,
        began_at: float,
        *,
        is_expected: bool,
    ) -> Stream:
        """The relayed stream of a circuit, or the direct one if it comes before, or soon after.

        Args:
            began_at: when the dial began.
            is_expected: there will be a direct one, so it is waited for first, and the relay has nothing to carry.
        """
        unused: list[asyncio.Future[Stream]] = [punch]
        try:
            if is_expected:
                await asyncio.wait([punch], timeout=_head_start(began_at))
            if not _has_worked(punch):
                relayed = asyncio.ensure_future(self._relayed(circuit, target))
                unused.append(relayed)
                await asyncio.wait([relayed, punch], return_when=asyncio.FIRST_COMPLETED)
                if not punch.done():
                    # If the circuit has failed, nothing but the punch is left to wait for.
                    left = 0.0 if is_expected else _head_start(began_at)
                    await asyncio.wait([punch], timeout=left if _has_worked(relayed) else None)
            if _has_worked(punch):
                unused.remove(punch)
                return punch.result()
            stream = await relayed
            unused.clear()
            punch.add_done_callback(self._keep_late)
            return stream
        finally:
            for each in unused:
                each.add_done_callback(_abort_late)
                each.cancel()

    def _keep_late(self, punch: asyncio.Future[Stream]) -> None:
        """A direct connection that has come too late for the call serves later ones."""
        if _has_worked(punch):
            if self._endpoint.is_alive:
                self._endpoint.metrics.dials_punched += 1
                punch.result().is_arranged = True
                self._endpoint.pool.add(self._endpoint.greet(punch.result()))
            else:
                punch.result().abort()

    async def _dial_in_reverse(
        self, place: Multiaddr, relay: PeerID, target: PeerID, count: int, callable_at: Sequence[Multiaddr]
    ) -> list[Stream]:
        """Streams that the other peer opens to this one; none if that takes too long.

        Raises:
            DialError: what the relay has to say. It says nothing about calls in reverse.
        """
        cookies = [self._endpoint.transport.new_cookie() for _ in range(count)]
        expected = [self._endpoint.transport.expect_session(cookie) for cookie in cookies]
        try:
            places = [str(address) for address in callable_at]
            request = ConnectReverse(target=target.to_bytes(), places=places, cookies=cookies)
            await self._ask(place, relay, target, request)
            try:
                async with asyncio.timeout(REVERSE_SECONDS):
                    await asyncio.wait(expected, return_when=asyncio.FIRST_COMPLETED)
                    # The others are on their way, too.
                    await asyncio.wait(expected, timeout=REVERSE_SECONDS / 4)
                    arrived = [each.result() for each in expected if each.done() and not each.cancelled()]
                    streams = await successes([self._endpoint.transport.authenticate(each, target) for each in arrived])
            except (TimeoutError, DialError) as e:
                logger.debug("peer %s, called through %s, does not call in reverse: %r", target, relay, e)
                return []
        finally:
            for each in expected:
                each.cancel()
                if each.done() and not each.cancelled():
                    each.result().abort()
        self._endpoint.metrics.dials_reversed += len(streams)
        return streams

    async def prepare(self, peer: PeerID, connections: int) -> None:
        """Dial several connections at once, if relays lead to a peer; those that are open already count.

        Raises:
            DialError: as by :meth:`dial`.
        """
        pool, dialler = self._endpoint.pool, self._endpoint.dialler
        addresses = dialler.circuits(peer)
        if not addresses:
            return
        if dialler.direct_addresses(peer):
            # Many homes have networks of the same number, so the first connection has to show where these lead.
            await pool.prepare(peer, 1)
        streams = pool.streams_to(peer)
        if streams and not all(stream.is_relayed or stream.is_arranged for stream in streams):
            return
        if any(stream.is_arranged for stream in streams):
            connections = max(connections, SPARE - len(streams) + pool.count_of(peer))
        missing = min(connections - pool.count_of(peer), MAX_AT_ONCE)
        if missing > 1:
            for stream in await self.dial(addresses[0], peer, missing):
                pool.add(self._endpoint.greet(stream))


def _head_start(began_at: float) -> float:
    return max(HEAD_START, PATIENCE * (asyncio.get_running_loop().time() - began_at))


def _has_worked(future: asyncio.Future[Stream]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _abort_late(future: asyncio.Future[Stream]) -> None:
    if _has_worked(future):
        future.result().abort()
