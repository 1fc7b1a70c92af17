"""Connections whose other side has not proven its identity: rooms of limited size to wait in, and the handshake.

The first byte tells what a connection is: the beginning of TLS, or of a session that somebody here expects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from shoal.base.backoff import TokenBuckets
from shoal.base.logs import Seldom
from shoal.errors import StreamClosedError
from shoal.metrics import Metrics
from shoal.net.limits import Limits, more_files
from shoal.net.tcp.connect import hurry_within_host, set_options
from shoal.net.tcp.handshake import BUSY_ALERT, HANDSHAKE_TIMEOUT, listener_context, verify_dialler
from shoal.net.tcp.listener import WaitingRoom
from shoal.net.tcp.sessions import SESSION_BYTE, ExpectedSessions, TcpSession
from shoal.net.tcp.stream import AcceptedSocket, TcpStream, disown_socket, own_socket
from shoal.net.transport import COOKIE_BYTES, COOKIE_SECONDS, OnStream, Transport

logger = logging.getLogger(__name__)
_warn_seldom = Seldom(logger.warning)

# The TLS layer's own timeout comes this much after ours, because ours gives the better error.
BACKSTOP_SECONDS = 1.0


class Arrival:
    """An accepted connection whose other side has not proven its identity yet."""

    def __init__(self, accepted: socket.socket, host: str, may_be_session: bool) -> None:
        self.socket = accepted
        self.host = host
        self._may_be_session = may_be_session
        self.stream = TcpStream()
        self.session: TcpSession | None = None
        """The connection, once its first byte says that it is no stream."""
        self.patience: asyncio.TimerHandle | None = None
        """Ends the wait for the first byte."""
        self.first_byte: asyncio.Task[None] | None = None
        """Waits for the first byte, on loops that cannot watch a socket."""
        self.task: asyncio.Task[None] | None = None
        """The handshake, which begins with the first byte."""
        self.in_hands_of_loop = False
        self.drop_reason = ""
        # Kept here, because a socket that the loop has closed no longer knows its descriptor.
        self._descriptor = accepted.fileno()
        own_socket(self._descriptor, self)

    def begins_session(self) -> bool:
        """Whether the first byte says so. It stays where it is: TLS reads it from the socket."""
        if not self._may_be_session:
            return False
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == SESSION_BYTE
        except OSError:  # the handshake finds out what is wrong
            return False

    def give_up(self) -> None:
        """Close the connection at any stage."""
        disown_socket(self._descriptor, self)
        if self.session is not None:
            self.session.abort()
        elif self.in_hands_of_loop:
            self.stream.abort()
        else:
            self.socket.close()


class UnauthenticatedLimits:
    """All connections to one peer that have not proven who they are.

    Args:
        of: the transport of that peer.
        metrics: counts who was accepted, and who was dropped and why.
        limits: how many there may be, and how fast they may come.
        on_proven: gets each stream as soon as its other side is known.
    """

    def __init__(
        self, of: Transport, metrics: Metrics, limits: Limits, on_proven: Callable[[TcpStream], object]
    ) -> None:
        self._of = of
        self._metrics = metrics
        self._on_proven = on_proven
        self._tls: tuple[ssl.SSLContext, bytes] | None = None
        self._files = limits.files
        self._rates = TokenBuckets(limits.handshakes_per_second, limits.handshake_burst)
        self.silent: WaitingRoom[Arrival] = WaitingRoom(limits.handshakes_in_flight)
        """Connections that have said nothing yet."""
        self.shaking_hands: WaitingRoom[Arrival] = WaitingRoom(limits.handshakes_in_flight)
        """Those that have begun a handshake, or to say a cookie."""
        self.expected = ExpectedSessions()
        """Sessions that may come."""
        self.sessions: set[TcpSession] = set()
        """Open sessions of this peer, opened by either side, that nobody has taken over."""

    async def tls(self) -> tuple[ssl.SSLContext, bytes]:
        """The settings for TLS, and the certificate of this peer."""
        if self._tls is None:
            # In a thread, because it writes and reads a file.
            self._tls = await asyncio.to_thread(listener_context, self._of.identity)
        return self._tls

    def arrive(self, accepted: socket.socket, host: str, on_stream: OnStream, *, may_be_session: bool = True) -> None:
        """Start the handshake at the first byte, so that nothing is spent on a stranger that says nothing."""
        loop = asyncio.get_running_loop()
        if self._rates.is_exhausted(host, loop.time()):
            self._turn_away(accepted, host)
            return
        arrival = Arrival(accepted, host, may_be_session)
        self.silent.enter(arrival)
        arrival.patience = loop.call_later(HANDSHAKE_TIMEOUT, self._drop, arrival, "said nothing")
        try:
            loop.add_reader(accepted.fileno(), self._begin, arrival, on_stream)
        except NotImplementedError:  # the loop of Windows
            arrival.first_byte = loop.create_task(_first_byte_of(accepted))
            arrival.first_byte.add_done_callback(lambda _: self._note_first_byte(arrival, on_stream))
        self._make_room_in(self.silent)
        self._leave_files()

    def _leave_files(self) -> None:
        """Leave the user of this process half of its files: close an unproven connection if others have too many."""
        taken = len(AcceptedSocket.open)
        if self._files is not None and taken > self._files:
            _warn_seldom("no file for a connection: others have %d of this process. %s", taken, more_files())
            self.make_room("no files left")

    def _turn_away(self, accepted: socket.socket, host: str) -> None:
        reason = "too many handshakes of one host"
        self._metrics.connections_dropped[reason] += 1
        logger.debug("dropped a connection from %s: %s", host, reason)
        with accepted, contextlib.suppress(OSError):
            accepted.send(BUSY_ALERT)
            accepted.shutdown(socket.SHUT_WR)
            # Read first: closing with unread bytes would reset the connection and destroy the alert on its way.
            accepted.recv(4096)

    def _note_first_byte(self, arrival: Arrival, on_stream: OnStream) -> None:
        if arrival in self.silent:  # otherwise it was dropped meanwhile
            self._begin(arrival, on_stream)

    def _begin(self, arrival: Arrival, on_stream: OnStream) -> None:
        loop = asyncio.get_running_loop()
        self._stop_waiting(arrival)
        self.shaking_hands.enter(arrival)
        self._rates.spend(arrival.host, loop.time())
        arrival.task = loop.create_task(
            self.take_session(arrival) if arrival.begins_session() else self.shake_hands(arrival, on_stream)
        )
        arrival.task.add_done_callback(lambda task: self._end(arrival, task))
        self._make_room_in(self.shaking_hands)

    def _stop_waiting(self, arrival: Arrival) -> None:
        self.silent.leave(arrival)
        if arrival.patience is not None:
            arrival.patience.cancel()
            arrival.patience = None
            if arrival.first_byte is not None:
                arrival.first_byte.cancel()
            else:
                asyncio.get_running_loop().remove_reader(arrival.socket.fileno())

    async def shake_hands(self, arrival: Arrival, on_stream: OnStream) -> None:
        """Find out which peer has connected, and hand it on once it has proven that."""
        stream, stage = arrival.stream, "TLS handshake"
        membership = self._of.membership
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                context, certificate = await self.tls()
                set_options(arrival.socket)
                hurry_within_host(arrival.socket)
                arrival.in_hands_of_loop = True
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: stream,
                    arrival.socket,
                    ssl=context,
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT + BACKSTOP_SECONDS,
                )
                stage = "proof of identity"
                own_badge = b"" if membership is None else membership.shown_badge()
                found = await verify_dialler(stream, self._of.identity.peer_id, certificate, own_badge)
        except TimeoutError:
            arrival.drop_reason = f"no {stage} in time"
        except ssl.SSLError:
            arrival.drop_reason = "no TLS"
        except (StreamClosedError, OSError):
            arrival.drop_reason = f"closed before the {stage}"
        else:
            if found is None:
                arrival.drop_reason = "wrong proof of identity"
                return
            stream.remote, stream.shown_badge = found
            self._on_proven(stream)
            self._metrics.connections_accepted += 1
            on_stream(stream)

    async def take_session(self, arrival: Arrival) -> None:
        """Find out who expects this session, and give it to them."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                set_options(arrival.socket)
                hurry_within_host(arrival.socket)
                session = arrival.session = TcpSession(arrival.socket, self.sessions)
                said = await session.read_exactly(len(SESSION_BYTE) + COOKIE_BYTES)
        except TimeoutError:
            arrival.drop_reason = "no cookie in time"
        except (StreamClosedError, OSError):
            arrival.drop_reason = "closed before the cookie"
        else:
            waiting = self.expected.take(said[len(SESSION_BYTE) :])
            if waiting is None:
                arrival.drop_reason = "unknown session"
                return
            # A session that this peer has given a cookie for costs no handshake.
            self._rates.spend(arrival.host, asyncio.get_running_loop().time(), -1.0)
            session.use_within(COOKIE_SECONDS)
            waiting.set_result(session)

    def _end(self, arrival: Arrival, task: asyncio.Task[None]) -> None:
        self.shaking_hands.leave(arrival)
        if arrival.drop_reason:
            self._count_drop(arrival)
        elif not task.cancelled() and task.exception() is None:
            return
        arrival.give_up()

    def _drop(self, arrival: Arrival, reason: str) -> None:
        """Close an unproven connection at any stage, and count the reason."""
        arrival.drop_reason = reason
        if arrival.task is not None:
            arrival.task.cancel()
            return
        self._stop_waiting(arrival)
        self._count_drop(arrival)
        arrival.give_up()

    def _count_drop(self, arrival: Arrival) -> None:
        self._metrics.connections_dropped[arrival.drop_reason] += 1
        logger.debug("dropped a connection from %s: %s", arrival.host, arrival.drop_reason)

    def _make_room_in(self, room: WaitingRoom[Arrival]) -> None:
        victim = room.one_too_many()
        if victim is not None:
            room.leave(victim)
            self._drop(victim, "too many handshakes at once")

    def make_room(self, reason: str = "no sockets left") -> None:
        """Drop a stranger, because this process has no sockets left, or none for others."""
        victim = self.silent.least_welcome() or self.shaking_hands.least_welcome()
        if victim is not None:
            self._drop(victim, reason)

    async def close(self) -> None:
        """Drop everybody, and the sessions that nobody has taken over."""
        self.expected.close()
        for arrival in self.silent.guests():
            self._stop_waiting(arrival)
            arrival.give_up()
        tasks = [arrival.task for arrival in self.shaking_hands.guests() if arrival.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in [*self.sessions]:
            session.abort()


async def _first_byte_of(accepted: socket.socket) -> None:
    """Return when something has arrived, without reading it: on Windows, an empty read ends at that moment."""
    with contextlib.suppress(OSError):  # the handshake finds out what is wrong
        await asyncio.get_running_loop().sock_recv_into(accepted, bytearray())
