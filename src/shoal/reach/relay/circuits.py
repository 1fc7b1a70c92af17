"""Connections to peers that cannot be called: from an address ``/…/p2p/RELAY/p2p-circuit`` to a stream.

Three ways lead there. *In reverse*: if this peer can be called, the relay tells the other one where, and that one
connects. *Through the relay*: each side opens a session to it, and the relay joins the two. *Through both routers*:
both sides of a circuit try to connect to each other from the ports of their sessions (:mod:`~shoal.reach.punching`).

In each way the asking peer is the dialler of the handshake, which proves the identity of the other one. So a lying
relay can only waste some attempts. The same holds for the peer that answers: a relay can only make it try a few
addresses and handshakes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from shoal.access.badges import ANY_ROLE
from shoal.base.backoff import Backoffs
from shoal.base.logs import Seldom, quoted
from shoal.base.tasks import cancel_and_wait, has_succeeded
from shoal.errors import (
    DialError,
    NoRelayError,
    NoReservationError,
    NoRoomError,
    NotAMemberError,
    P2PDaemonError,
    P2PHandlerError,
    ProtocolError,
    ShoalError,
    StreamClosedError,
)
from shoal.net.addresses import Judge, may_be_dialled_for
from shoal.net.connection_pool import CIRCUIT_SECONDS, DIRECT_ONLY, SPARE
from shoal.net.endpoint import Endpoint
from shoal.net.transport import Session, Stream, Transport, abort_late, receive_frame
from shoal.peers.identity import PeerID, circuit_address, is_circuit, relay_of
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.punching import FIRST_PAUSE, LONGEST_PAUSE, Circuit, Puncher, head_start
from shoal.reach.relay.messages import (
    LOWEST_PORT,
    MAX_AT_ONCE,
    MAX_PLACES,
    MEETING_SECONDS,
    Connect,
    ConnectAnswer,
    Connected,
    ConnectRequest,
    ConnectReverse,
    Incoming,
    IncomingReverse,
    NotConnected,
    Reach,
    Ready,
    RelayCode,
)
from shoal.reach.relay.server import RelayServer

logger = logging.getLogger(__name__)


class Abortable(Protocol):
    """A stream, a session or a circuit."""

    def abort(self) -> None:
        """End it now."""


E = TypeVar("E", bound=Abortable)


async def open_circuits(
    transport: Transport, relay: PeerID, places: Sequence[Multiaddr], cookies: Sequence[bytes], *, punchable: bool
) -> list[Circuit]:
    """Open sessions to a relay, and wait until it has joined them to those of the other side.

    Raises:
        DialError: no circuit was made.
    """
    opening = [_open_one(transport, relay, places, cookie, punchable=punchable) for cookie in cookies]
    return await successes(opening)


async def _open_one(
    transport: Transport, relay: PeerID, places: Sequence[Multiaddr], cookie: bytes, *, punchable: bool
) -> Circuit:
    session = await _open_session(transport, places, cookie, punchable=punchable)
    try:
        async with asyncio.timeout(MEETING_SECONDS + 1.0):
            ready = await receive_frame(session, Ready)
        return Circuit(session, relay, parse_told(ready.seen_at), parse_told(ready.other_seen_at))
    except (StreamClosedError, TimeoutError) as e:
        session.abort()
        raise DialError(f"through relay {relay}: the other side has not come") from e
    except ProtocolError as e:
        session.abort()
        raise DialError(f"through relay {relay}: {e}") from e
    except BaseException:
        session.abort()
        raise


async def _open_session(
    transport: Transport, places: Sequence[Multiaddr], cookie: bytes, *, punchable: bool
) -> Session:
    """Open a session at the first address where that works."""
    for place in places[:-1]:
        try:
            async with asyncio.timeout(MEETING_SECONDS / 2):
                return await transport.open_session(place, cookie, punchable=punchable)
        except (DialError, TimeoutError) as e:
            logger.debug("no session at %s: %r", place, e)
    return await transport.open_session(places[-1], cookie, punchable=punchable)


def mark_relayed(stream: Stream, place: Multiaddr | None, relay: PeerID) -> None:
    """Mark a stream as relayed: its remote address is the circuit, not the relay's own address."""
    stream.via = relay
    stream.remote_address = None if place is None else circuit_address(place, relay)


def parse_told(text: str) -> Multiaddr | None:
    """Parse an address from a relay; ``None`` if it is invalid, because a relay may send anything."""
    try:
        return Multiaddr(text)
    except ValueError:
        return None


async def successes(work: Sequence[Coroutine[object, object, E]]) -> list[E]:
    """Run coroutines together, and return the results of those that succeed, in order.

    Raises:
        Exception: all have failed; it is the error of the first one.
    """
    if not work:
        raise DialError("there was nothing to try")
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks)
    except BaseException:
        try:
            await cancel_and_wait(*tasks)
        finally:  # the caller may be cancelled again, but the tasks have ended all the same
            for task in tasks:
                if has_succeeded(task):
                    task.result().abort()
        raise
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if len(errors) == len(tasks):
        raise errors[0]
    return [task.result() for task in tasks if task.exception() is None]


# --- dialling ---------------------------------------------------------------------------------------------------------


REVERSE_SECONDS = 2.0
"""How long a peer waits for a call in reverse before it goes through the relay after all. Chosen."""
ANSWER_SECONDS = 2.0
"""How long a relay has to answer on an existing connection before it is asked over a new one. Chosen."""


class OutgoingCircuits:
    """Dials through relays.

    Args:
        endpoint: of the peer that dials.
        own_relay: joins circuits through this peer itself.
        punching: finds direct connections; without it, all circuits stay relayed.
        public_addresses: the addresses at which others are known to reach this peer, for calls in reverse.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        own_relay: RelayServer,
        punching: Puncher | None,
        public_addresses: Callable[[], Sequence[Multiaddr]],
    ) -> None:
        self._endpoint, self._own_relay = endpoint, own_relay
        self.punching, self.public_addresses = punching, public_addresses
        self.reversals = Backoffs(FIRST_PAUSE, LONGEST_PAUSE, asyncio.get_running_loop().time)
        """Peers that could not call in reverse."""

    def forget_routers(self) -> None:
        """Forget what worked and what did not: this machine is behind other routers."""
        self.reversals.clear()
        if self.punching is not None:
            self.punching.forget_routers()

    async def dial(self, address: Multiaddr, target: PeerID, count: int = 1) -> list[Stream]:
        """Connect to a peer through its relay, or with its help.

        Args:
            address: ``/…/p2p/RELAY/p2p-circuit``.
            target: the peer that must answer.
            count: how many streams to open, at most 8.

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
        request = Connect(
            target=target.to_bytes(), count=count, punch=wants_punch, reach=self._endpoint.announce().reach
        )
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
        """Call a relay at its own addresses, never through another relay.

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
            # Without a reset token: a loop that ends may close this in another context.
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
        """Make one stream of each circuit, a direct one if possible."""
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
        """The relayed stream of a circuit, or the direct one if it comes first or soon after.

        Args:
            began_at: when the dial began.
            is_expected: whether a direct one is likely. Then it is awaited first, so that the relay carries nothing.
        """
        unused: list[asyncio.Future[Stream]] = [punch]
        try:
            if is_expected:
                await asyncio.wait([punch], timeout=_head_start(began_at))
            if not has_succeeded(punch):
                relayed = asyncio.ensure_future(self._relayed(circuit, target))
                unused.append(relayed)
                await asyncio.wait([relayed, punch], return_when=asyncio.FIRST_COMPLETED)
                if not punch.done():
                    # If the circuit has failed, only the punch is left to wait for.
                    left = 0.0 if is_expected else _head_start(began_at)
                    await asyncio.wait([punch], timeout=left if has_succeeded(relayed) else None)
            if has_succeeded(punch):
                unused.remove(punch)
                return punch.result()
            stream = await relayed
            unused.clear()
            punch.add_done_callback(self._keep_late)
            return stream
        finally:
            for each in unused:
                each.add_done_callback(abort_late)
                each.cancel()

    def _keep_late(self, punch: asyncio.Future[Stream]) -> None:
        """Keep a direct connection that comes too late for this call, for later ones."""
        if has_succeeded(punch):
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
            DialError: the relay refuses. That proves nothing about calls in reverse.
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
        """Dial several connections at once to a peer that relays lead to; open ones count.

        Raises:
            DialError: as by :meth:`dial`.
        """
        pool, dialler = self._endpoint.pool, self._endpoint.dialler
        addresses = dialler.circuits(peer)
        if not addresses:
            return
        if dialler.direct_addresses(peer):
            # Many homes use the same private range, so the first connection has to show where its addresses lead.
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
    return head_start(asyncio.get_running_loop().time() - began_at)


# --- answering --------------------------------------------------------------------------------------------------------


MAX_ANSWERS = 64
"""Requests of relays that are answered at the same time. Above that, or if they take too many connections together, the
oldest of those that take most are given up: honest peers connect within a few round trips. Chosen."""


@dataclass(frozen=True)
class _Answer:
    """An answer in progress."""

    relay: PeerID
    peer: bytes
    """The peer that wants to reach this one, as the relay says."""
    connections: int


class IncomingCircuits:
    """Answers the requests that relays announce.

    Args:
        endpoint: of the peer whose relays these are.
        circuits: has the means to find direct connections.
        most: the most connections that may be open for these answers at the same time.
    """

    def __init__(self, endpoint: Endpoint, circuits: OutgoingCircuits, most: int) -> None:
        self._endpoint, self._circuits = endpoint, circuits
        self._most = max(most, MAX_AT_ONCE)  # enough for one caller's whole request
        self.tasks: dict[asyncio.Task[None], _Answer] = {}
        """Answers in progress, the oldest first."""
        self._warn_seldom = Seldom(logger.warning)

    def answer(self, relay: PeerID, places: Sequence[Multiaddr], incoming: Incoming | IncomingReverse) -> None:
        """A relay says that a peer wants to reach this one.

        Args:
            relay: the relay.
            places: the addresses at which this peer reaches the relay.
            incoming: the relay's message.
        """
        task = self._endpoint.tasks.start(self._answer(relay, places, incoming))
        self.tasks[task] = _Answer(relay, incoming.peer, max(1, len(incoming.cookies)))
        task.add_done_callback(lambda ended: self.tasks.pop(ended, None))
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
        """The number of connections that the answers in progress open, or have opened."""
        return sum(each.connections for each in self.tasks.values())

    def _give_one_up(self) -> None:
        """Make room: strangers that announce themselves but never connect must not keep others out."""
        by_relay, by_peer = Counter[PeerID](), Counter[bytes]()
        for each in self.tasks.values():
            by_relay[each.relay] += each.connections
        [(crowded, _)] = by_relay.most_common(1)
        for each in self.tasks.values():
            by_peer[each.peer] += each.connections if each.relay == crowded else 0
        [(greedy, _)] = by_peer.most_common(1)
        oldest = next(task for task, each in self.tasks.items() if (each.relay, each.peer) == (crowded, greedy))
        del self.tasks[oldest]
        oldest.cancel()

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
            # A defect on this side, perhaps triggered by a relay's message. Nobody awaits this task, so log it here.
            self._warn_seldom(
                "peer %s, announced by relay %s, is not reached because of %s", peer, relay, quoted(e), about=relay
            )
            logger.debug("traceback of the answer to %s", peer, exc_info=e)

    async def _receive(self, peer: PeerID, reach: Reach, circuits: Sequence[Circuit], punching: Puncher | None) -> None:
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
            wanted = list(places)  # the relay itself wants to be called
        else:
            told = [address for text in incoming.places if (address := parse_told(text)) is not None]
            allowed = [each for each in told if may_be_dialled(each, places, transport.is_inside, transport.is_here)]
            wanted = transport.worth_dialling(allowed)
        for address in wanted[:MAX_PLACES]:
            try:
                async with asyncio.timeout(REVERSE_SECONDS / 3):
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


def may_be_dialled(address: Multiaddr, places: Sequence[Multiaddr], is_inside: Judge, is_here: Judge) -> bool:
    """Whether to dial an address that a relay has told. A relay must not make this machine dial any address it likes.

    The caller is at most as near as the relay. If the relay has a public address, the caller may be anywhere.

    Args:
        address: as the relay tells it.
        places: the addresses at which this peer reaches the relay.
        is_inside, is_here: as for :func:`~shoal.net.addresses.may_be_dialled_for`.
    """
    if is_circuit(address):
        return False
    # Among system ports, peers only listen on that of HTTPS: some networks let nothing else through.
    if "memory" not in address and (port := int(address.get("tcp") or 0)) < LOWEST_PORT and port != 443:
        return False
    tellers: Sequence[Multiaddr | None] = places or [None]
    return all(may_be_dialled_for(address, place, is_inside=is_inside, is_here=is_here) for place in tellers)
