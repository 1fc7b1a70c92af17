"""The relay server: joins two connections for two peers that cannot call each other.

A peer that cannot be called keeps one call open to each of its relays: its *reservation*, which lives and ends with
that call. A peer that wants to reach it asks the relay, which gives both sides *cookies*. Each side opens a session
with its cookie, and the relay copies bytes between the two: a *circuit*. Inside, both shake hands as over any
connection, so a relay cannot read or change anything, nor pretend to be somebody.

A relay gains nothing from what it carries, so it grants little: a number of reservations and circuits, and a rate that
all circuits share. When that is not enough, peers that have contributed to rounds with this one come first: they take
the places of strangers, and strangers together get half of the rate. A relay that takes part in no rounds, such as
``shoal dht``, treats all alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from shoal.access.badges import ANY_ROLE, Badge, Roles
from shoal.base.backoff import TokenBuckets
from shoal.base.tasks import TaskSet, cancel_and_wait
from shoal.errors import BusyError, ShoalError, StreamClosedError
from shoal.net.addresses import host_charged
from shoal.net.connection import Call
from shoal.net.endpoint import Endpoint
from shoal.net.limits import RelayLimits
from shoal.net.service import P2PContext, ServicerBase, patient, receive_only
from shoal.net.transport import Session, Splice, send_frame
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.reachability import Reach
from shoal.reach.relay.fair_rate import FairRate, RateShare
from shoal.reach.relay.messages import (
    MAX_TEXT,
    MEETING_SECONDS,
    Alive,
    Connect,
    ConnectAnswer,
    Connected,
    ConnectRequest,
    ConnectReverse,
    Ended,
    Incoming,
    IncomingReverse,
    NotConnected,
    Notice,
    NotReserved,
    Observe,
    Observed,
    OpenObservation,
    Ready,
    RelayCode,
    Reserve,
    Reserved,
)

logger = logging.getLogger(__name__)

# All chosen.
ALIVE_SECONDS = 5.0
"""Seconds between a relay's heartbeats to a guest."""
RESERVATION_SECONDS = 3600.0
"""Reservations end after this long. Guests of a crowded relay then look for another one, so that they spread."""
SUCCESSION_SECONDS = 60.0
"""A guest asks for the successor of a reservation this long before its end."""
UNUSED_SECONDS = 300.0
"""A guest without a circuit for this long may be evicted even if it has no other relay."""
IDLE_SECONDS = 120.0
"""A circuit on which nothing moves ends after this long."""
SILENT_SECONDS = 2.0
"""A circuit that has been quiet for this long makes room for another one between the same two peers."""
CROWDED_SHARE = 0.5
"""A relay that has granted more than this share of its reservations is crowded, and others are asked first. When more
than this share of its circuits is in use, all peers of one host together may have as many as one peer."""
OBSERVATION_BURST = 20  # observations for one host at once


_REASONS = {
    RelayCode.NO_RESERVATION: "no reservation",
    RelayCode.BUSY: "no room",
    RelayCode.REFUSED: "wrong role",
    RelayCode.NOT_A_RELAY: "not a relay",
}


class _Refusal(NamedTuple):
    code: RelayCode
    text: str = ""


@dataclass(eq=False)
class _Guest:
    """A peer with a reservation."""

    peer: PeerID
    host: str
    badge: Badge | None
    since: float
    used_at: float
    """When its last circuit began or ended."""
    has_others: bool
    """Whether it had another relay when it came, so that it most likely has one now."""
    notices: asyncio.Queue[Notice] = field(default_factory=lambda: asyncio.Queue(64))
    """Notices that it has not read yet. A guest that reads none is dropped."""
    circuits: int = 0
    is_leaving: bool = False
    """Whether its reservation was ended, but its call is still open."""
    has_left: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, why: str) -> None:
        while not self.notices.empty():
            self.notices.get_nowait()
        self.notices.put_nowait(Ended(why))


@dataclass(eq=False)
class _Circuit:
    dialler: PeerID
    host: PeerID | str
    """The dialler's public host, which it may share with other identities; in a private network, the dialler itself."""
    guest: _Guest
    badge: Badge | None
    sessions: tuple[asyncio.Future[Session], asyncio.Future[Session]]
    share: RateShare

    @property
    def ends(self) -> tuple[PeerID, PeerID]:
        return self.dialler, self.guest.peer


class RelayServer(ServicerBase):
    """Grants reservations, makes circuits, and tells others at which address they are seen.

    Args:
        endpoint: of the peer that serves.
        wanted: always (``True``) or never (``False``) be a relay; ``None``: while this peer is public.
        limits: the most that it grants.
    """

    roles: ClassVar[Roles] = ANY_ROLE

    def __init__(self, endpoint: Endpoint, wanted: bool | None, limits: RelayLimits) -> None:
        self._endpoint = endpoint
        self.wanted = wanted
        self.is_public = False
        """Whether others can call this peer, so that it may be a relay."""
        self._limits = limits
        self._now = asyncio.get_running_loop().time
        self._guests: dict[PeerID, _Guest] = {}
        self._circuits: dict[asyncio.Task[None], _Circuit] = {}
        self.rate = FairRate(limits.rate, self._now, self._count_bytes)
        """The rate that all circuits share."""
        self._connects = TokenBuckets(limits.connects_per_second, limits.connect_burst)
        self._observations = TokenBuckets(1.0, OBSERVATION_BURST)
        self._observing = TaskSet()
        self._is_closed = False

    @property
    def serves(self) -> bool:
        """Whether this peer is a relay at present."""
        if self._is_closed or self.wanted is False or self._endpoint.client_mode:
            return False
        membership = self._endpoint.membership
        if membership is not None and not membership.own.roles & (Roles.TRAIN | Roles.RELAY):
            return False
        return self.is_public or self.wanted is True

    @property
    def guests(self) -> list[PeerID]:
        """Peers that have a reservation."""
        return list(self._guests)

    @property
    def circuit_count(self) -> int:
        """The number of circuits, including those that wait for a side to connect."""
        return len(self._circuits)

    @property
    def observation_count(self) -> int:
        """The number of sessions that others are about to open in order to learn their address."""
        return len(self._observing)

    def _count_bytes(self, nbytes: int) -> None:
        self._endpoint.metrics.bytes_carried += nbytes

    def _refuse(self, code: RelayCode, text: str = "") -> _Refusal:
        self._endpoint.metrics.circuits_refused[_REASONS[code]] += 1
        return _Refusal(code, text)

    def _seen(self, peer: PeerID) -> str:
        return self._endpoint.address_seen_of(peer)

    # --- reservations -------------------------------------------------------------------------------------------------

    @patient
    async def rpc_reserve(self, call: Call, context: P2PContext) -> None:
        """Hold a reservation for as long as this call lasts."""
        request = await receive_only(call, Reserve, context.handle_name)
        stream = call.connection.stream
        seen_at = "" if stream.remote_address is None or stream.is_relayed else str(stream.remote_address)
        host = host_charged(seen_at, context.remote_id)
        refusal = self._reason_to_refuse(request, context, host, is_relayed=stream.is_relayed)
        if refusal is not None:
            await call.send(NotReserved(*refusal))
            return
        guest = _Guest(context.remote_id, host, stream.badge, self._now(), self._now(), request.others > 0)
        self._guests[guest.peer] = guest
        # From now on the guest greets again when its reach changes.
        self._endpoint.book[guest.peer].reach = request.reach
        loop = asyncio.get_running_loop()
        end = loop.call_later(RESERVATION_SECONDS, guest.end, "it is an hour old: ask again, or elsewhere")
        try:
            limits = self._limits
            rate = limits.rate or 0.0
            await call.send(Reserved(seen_at=seen_at[:MAX_TEXT], rate=rate, circuits=limits.circuits))
            while True:
                notice = await _next_notice(guest)
                if not (self.serves or isinstance(notice, Ended)):  # callers of the guest are refused, too
                    notice = Ended("this peer is no relay any more: it cannot be called itself")
                await call.send(notice)
                if isinstance(notice, Ended):
                    return
        finally:
            end.cancel()
            guest.has_left.set()
            if self._guests.get(guest.peer) is guest:
                del self._guests[guest.peer]

    def _reason_to_refuse(
        self, request: Reserve, context: P2PContext, host: str, *, is_relayed: bool
    ) -> _Refusal | None:
        """Why a peer may not have a reservation; makes room if need be."""
        if not self.serves:
            return self._refuse(RelayCode.NOT_A_RELAY)
        if not context.roles & (Roles.TRAIN | Roles.RELAY):
            return self._refuse(RelayCode.REFUSED, "a peer that nobody has to call needs no reservation")
        if is_relayed:
            return self._refuse(RelayCode.REFUSED, "a reservation needs a direct connection")
        limits = self._limits
        former = self._guests.get(context.remote_id)
        if request.may_go_elsewhere and self._is_crowded_for(former):
            if former is not None:
                former.is_leaving = True
            return self._refuse(RelayCode.BUSY, "others may need the place: ask elsewhere first")
        if former is not None:
            del self._guests[former.peer]
            former.end("there is a newer one of the same peer")
        if sum(guest.host == host for guest in self._guests.values()) >= limits.reservations_per_host:
            return self._refuse(RelayCode.BUSY, f"{limits.reservations_per_host} reservations of one host")
        if len(self._guests) >= limits.reservations:
            guest = None if request.others else self._most_dispensable(self._knows(context.remote_id))
            if guest is None:
                return self._refuse(RelayCode.BUSY, f"{limits.reservations} reservations")
            del self._guests[guest.peer]
            guest.end("others need the place")
        return None

    def _is_crowded_for(self, former: _Guest | None) -> bool:
        """Whether a peer should ask elsewhere first: a newcomer, or a guest whose hour is nearly over."""
        staying = sum(not guest.is_leaving for guest in self._guests.values())
        is_crowded = staying + (former is None) > self._limits.reservations * CROWDED_SHARE
        if former is None:
            return is_crowded
        is_over = former.since + RESERVATION_SECONDS - self._now() <= SUCCESSION_SECONDS
        return is_over and (is_crowded or former.is_leaving)

    def _knows(self, *peers: PeerID) -> bool:
        """Whether each of these peers has contributed to rounds with this one, or is this one."""
        return all(peer == self._endpoint.peer_id or self._endpoint.behaviour.has_delivered(peer) for peer in peers)

    def _most_dispensable(self, is_known: bool) -> _Guest | None:
        """The guest to evict for a peer without any relay. A guest without another relay is evicted only if it is idle.

        Otherwise each would take the place of the next one, and many could not be called for a while.

        Args:
            is_known: whether the peer was in rounds with this one. If no place is free otherwise, it takes that of a
                stranger, even a busy one: strangers could keep each other busy forever.
        """
        idle_since = self._now() - UNUSED_SECONDS
        unused = [
            guest
            for guest in self._guests.values()
            if not guest.circuits and (guest.has_others or guest.used_at <= idle_since)
        ]
        if is_known and not unused:
            strangers = [guest for guest in self._guests.values() if not self._knows(guest.peer)]
            return min(strangers, key=lambda guest: guest.used_at, default=None)
        return min(unused, key=lambda guest: (not guest.has_others, guest.used_at), default=None)

    # --- circuits -----------------------------------------------------------------------------------------------------

    async def rpc_connect(self, request: ConnectRequest, context: P2PContext) -> ConnectAnswer:
        """Tell a guest that a peer wants to reach it; returns cookies for circuits to it."""
        return await self.connect(request, context.remote_id)

    async def connect(self, request: ConnectRequest, dialler: PeerID) -> ConnectAnswer:
        """Do what :meth:`rpc_connect` does; the dialler may also be this peer itself."""
        if isinstance(request, Connect):
            await self._make_room(dialler, PeerID(request.target), request.count)
        guest = self._find_guest(PeerID(request.target), dialler)
        if isinstance(guest, _Refusal):
            return NotConnected(*guest)
        cookies: list[bytes] = []
        told: Incoming | IncomingReverse
        if isinstance(request, ConnectReverse):
            told = IncomingReverse(peer=dialler.to_bytes(), places=request.places, cookies=request.cookies)
        else:
            assert isinstance(request, Connect)
            room = self._room_for(dialler, guest)
            if isinstance(room, _Refusal):
                return NotConnected(*room)
            told = Incoming(peer=dialler.to_bytes(), cookies=[], punch=request.punch, reach=request.reach)
            for _ in range(min(room, request.count)):
                own, other = self._begin_circuit(dialler, guest)
                cookies.append(own)
                told.cookies.append(other)
        guest.notices.put_nowait(told)
        rate = self._limits.rate or 0.0
        return Connected(cookies=cookies, rate=rate, reach=self._reach_of(guest.peer))

    async def _make_room(self, dialler: PeerID, target: PeerID, count: int) -> None:
        """End quiet circuits between two peers if there is no room for others.

        A router that forgets its connections breaks them without a sign, and this relay would keep them for minutes.
        Circuits of strangers make room for peers that were in rounds, the least recently used first.
        """
        limits, pair, since = self._limits, (dialler, target), self._now() - SILENT_SECONDS
        of_peer, between = self._count_circuits(dialler, target)
        left = limits.circuits_per_peer - of_peer, limits.circuits_per_pair - between
        if min(left) < count:
            of_pair = {task: circuit for task, circuit in self._circuits.items() if circuit.ends == pair}
            silent = [task for task, circuit in of_pair.items() if circuit.share.used_at <= since]
            await cancel_and_wait(*silent)
            if silent:
                logger.debug("%d silent circuits from %s to %s have made room", len(silent), dialler, target)
        missing = count - (limits.circuits - len(self._circuits))
        if missing > 0 and self._knows(dialler, target) and target in self._guests:
            of_strangers = [task for task, circuit in self._circuits.items() if not self._knows(*circuit.ends)]
            of_strangers.sort(key=lambda task: self._circuits[task].share.used_at)
            await cancel_and_wait(*of_strangers[:missing])

    def _count_circuits(self, dialler: PeerID, target: PeerID) -> tuple[int, int]:
        """The number of circuits that a peer has dialled, and how many of those lead to ``target``."""
        of_peer = [circuit for circuit in self._circuits.values() if circuit.dialler == dialler]
        return len(of_peer), sum(circuit.guest.peer == target for circuit in of_peer)

    def _reach_of(self, peer: PeerID) -> int:
        """The latest reach that a peer has told; it may have changed since the reservation."""
        reach = self._endpoint.book.find(peer).reach
        return Reach.EASY if reach is None else max(Reach.PUBLIC, min(reach, Reach.CLIENT))

    def _find_guest(self, target: PeerID, dialler: PeerID) -> _Guest | _Refusal:
        """The guest that a peer wants to reach, or why it cannot be reached."""
        if not self.serves:
            return self._refuse(RelayCode.NOT_A_RELAY)
        guest = self._guests.get(target)
        if guest is None:
            return self._refuse(RelayCode.NO_RESERVATION)
        if not self._connects.take(host_charged(self._seen(dialler), dialler), self._now()):
            return self._refuse(RelayCode.BUSY, "too many calls from one host")
        if guest.notices.full():
            return self._refuse(RelayCode.BUSY, "the peer does not listen to this relay")
        return guest

    def _room_for(self, dialler: PeerID, guest: _Guest) -> int | _Refusal:
        """How many more circuits two peers may have, at least one; or why they may have none."""
        limits = self._limits
        of_peer, between = self._count_circuits(dialler, guest.peer)
        rooms = {
            limits.circuits - len(self._circuits): f"{limits.circuits} circuits",
            limits.circuits_per_peer - of_peer: f"{limits.circuits_per_peer} circuits of one peer",
            limits.circuits_per_pair - between: f"{limits.circuits_per_pair} circuits between the same two peers",
        }
        if len(self._circuits) >= limits.circuits * CROWDED_SHARE:
            # Identities cost nothing, so those of one host leave room for others.
            host = self._endpoint.host_seen_of(dialler)
            left = limits.circuits_per_peer - sum(each.host == host for each in self._circuits.values())
            rooms[left] = f"{limits.circuits_per_peer} circuits of one host"
        room = min(rooms)
        return room if room > 0 else self._refuse(RelayCode.BUSY, rooms[room])

    def _begin_circuit(self, dialler: PeerID, guest: _Guest) -> tuple[bytes, bytes]:
        """Begin a circuit; returns one cookie for each side."""
        transport = self._endpoint.transport
        cookies, expect = (transport.new_cookie(), transport.new_cookie()), transport.expect_session
        badge = next((each.stream.badge for each in self._endpoint.server.connections_of(dialler)), None)
        sessions, host = (expect(cookies[0]), expect(cookies[1])), self._endpoint.host_seen_of(dialler)
        share = self.rate.share(lambda: self._knows(dialler, guest.peer))
        circuit = _Circuit(dialler, host, guest, badge, sessions, share)
        guest.circuits += 1
        guest.used_at = self._now()
        task = asyncio.get_running_loop().create_task(self._carry(circuit))
        self._circuits[task] = circuit
        task.add_done_callback(self._forget)
        return cookies

    def _forget(self, task: asyncio.Task[None]) -> None:
        circuit = self._circuits.pop(task)
        for session in circuit.sessions:
            if session.done() and not session.cancelled():
                session.result().abort()
            session.cancel()
        circuit.share.close()
        circuit.guest.circuits -= 1
        circuit.guest.used_at = self._now()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a circuit of %s ended with a defect", circuit.dialler, exc_info=error)

    async def _carry(self, circuit: _Circuit) -> None:
        """Wait for both sides of a circuit, and copy bytes between them."""
        try:
            async with asyncio.timeout(MEETING_SECONDS):
                first, second = await asyncio.gather(*circuit.sessions)
                seen = [_text_of(session.remote_address) for session in (first, second)]
                await send_frame(first, Ready(seen_at=seen[0], other_seen_at=seen[1]))
                await send_frame(second, Ready(seen_at=seen[1], other_seen_at=seen[0]))
        except (TimeoutError, StreamClosedError) as e:
            self._endpoint.metrics.circuits_refused["nobody came"] += 1
            logger.debug("no circuit from %s to %s: %r", circuit.dialler, circuit.guest.peer, e)
            return
        self._endpoint.metrics.circuits_carried += 1
        try:
            async with asyncio.timeout(self._seconds_left(circuit)):
                await Splice(first, second, circuit.share, IDLE_SECONDS).run()
        except TimeoutError:
            logger.debug("a badge has expired on a circuit from %s to %s", circuit.dialler, circuit.guest.peer)

    def _seconds_left(self, circuit: _Circuit) -> float | None:
        """Seconds until the badge of either side expires; ``None`` without badges."""
        membership, badges = self._endpoint.membership, (circuit.badge, circuit.guest.badge)
        left = [membership.seconds_left(badge) for badge in badges if membership is not None and badge is not None]
        return min(left, default=None)

    def cut(self, is_unwanted: Callable[[Badge | None], bool]) -> None:
        """End the reservations and circuits of peers whose badges are no longer wanted."""
        for guest in [each for each in self._guests.values() if is_unwanted(each.badge)]:
            del self._guests[guest.peer]
            guest.end("your badge is no longer valid")
        for task, circuit in self._circuits.items():
            if is_unwanted(circuit.badge) or is_unwanted(circuit.guest.badge):
                task.cancel()

    # --- observing ----------------------------------------------------------------------------------------------------

    async def rpc_observe(self, request: Observe, context: P2PContext) -> OpenObservation:
        """Give a cookie for a session that tells the caller at which address it is seen."""
        host, now = host_charged(self._seen(context.remote_id), context.remote_id), self._now()
        if not self._observations.take(host, now):
            raise BusyError("enough has been observed for this host: try again in a minute")
        cookie = self._endpoint.transport.new_cookie()
        self._observing.start(self._observe(self._endpoint.transport.expect_session(cookie)))
        return OpenObservation(cookie=cookie)

    async def _observe(self, expected: asyncio.Future[Session]) -> None:
        try:
            async with asyncio.timeout(MEETING_SECONDS):
                session = await expected
                await send_frame(session, Observed(seen_at=_text_of(session.remote_address)))
                await session.read_exactly(1)  # until the other side, which has read the answer, ends it
        except (TimeoutError, ShoalError) as e:
            logger.debug("an observation is over: %r", e)
        finally:
            if expected.done() and not expected.cancelled():
                expected.result().abort()
            expected.cancel()

    async def close(self) -> None:
        """Tell all guests to look for another relay, and end all circuits."""
        self._is_closed = True
        guests, self._guests = list(self._guests.values()), {}
        for guest in guests:
            guest.end("this relay shuts down")
        if guests:
            leaving = [asyncio.ensure_future(guest.has_left.wait()) for guest in guests]
            await asyncio.wait(leaving, timeout=1.0)
            await cancel_and_wait(*leaving)
        await cancel_and_wait(*self._circuits, *self._observing)


async def _next_notice(guest: _Guest) -> Notice:
    try:
        async with asyncio.timeout(ALIVE_SECONDS):
            return await guest.notices.get()
    except TimeoutError:
        return Alive()


def _text_of(address: Multiaddr | None) -> str:
    return "" if address is None else str(address)[:MAX_TEXT]
