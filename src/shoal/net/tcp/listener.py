"""Accepting TCP connections one by one, so that each can be judged before anything is spent on it.

Strangers wait in a room of fixed size until they have proven who they are. A crowd on a few machines can use neither
that room nor the rate of handshakes to keep others out: a full room drops the oldest guest of the host with the most
guests, and the rate is limited per host.

The first byte tells what a connection is: the beginning of TLS, or of a session that somebody here expects.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from shoal.base.backoff import TokenBuckets
from shoal.base.logs import Seldom
from shoal.errors import StreamClosedError
from shoal.metrics import Metrics
from shoal.net.limits import Limits, more_files
from shoal.net.tcp.connect import hurry_within_host, set_options
from shoal.net.tcp.handshake import BUSY_ALERT, HANDSHAKE_TIMEOUT, listener_context, verify_dialler
from shoal.net.tcp.sessions import SESSION_BYTE, TcpSession
from shoal.net.tcp.stream import OwnSocket, TcpStream
from shoal.net.transport import COOKIE_BYTES, COOKIE_SECONDS, ExpectedSessions, OnStream, Transport

logger = logging.getLogger(__name__)
_warn_seldom = Seldom(logger.warning)


class Guest(Protocol):
    """A connection that has not proven who it is."""

    host: str


G = TypeVar("G", bound=Guest)


class WaitingRoom(Generic[G]):
    """Guests by host, the oldest first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_host: dict[str, dict[G, None]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, guest: G) -> bool:
        return guest in self._by_host.get(guest.host, ())

    def guests(self) -> list[G]:
        """All guests in the room."""
        return [guest for guests in self._by_host.values() for guest in guests]

    def enter(self, guest: G) -> None:
        """Let a guest in, even if the room is full: see :meth:`one_too_many`."""
        self._by_host.setdefault(guest.host, {})[guest] = None
        self._size += 1

    def one_too_many(self) -> G | None:
        """The guest that has to leave if the room is over its capacity, otherwise ``None``."""
        if self._size <= self._capacity:
            return None
        return self.least_welcome()

    def least_welcome(self) -> G | None:
        """The oldest guest of the host with the most guests, or ``None`` in an empty room."""
        crowd = max(self._by_host.values(), key=len, default=None)
        return None if crowd is None else next(iter(crowd))

    def leave(self, guest: G) -> None:
        """Remove a guest. Does nothing if it is not in the room."""
        guests = self._by_host.get(guest.host)
        if guests is None or guest not in guests:
            return
        del guests[guest]
        self._size -= 1
        if not guests:
            del self._by_host[guest.host]


# Seconds without accepting after the system has refused to give another socket. Chosen.
PAUSE_SECONDS = 0.2

REFUSED_BY_SYSTEM = "cannot accept connections: %s. %s"
# Errors of the connection that was to be accepted, not of the listener; so is every ConnectionError.
_ABORTED = {errno.EPROTO, errno.EINTR, errno.ENETDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH}

OnAccept = Callable[[socket.socket, str], None]


def _is_of_connection(error: OSError) -> bool:
    """Whether the other side gave up before it was accepted, so that nothing is wrong here."""
    return isinstance(error, ConnectionError) or error.errno in _ABORTED


class Listener:
    """A bound socket that listens.

    Args:
        bound: the socket; closed by :meth:`close`.
        on_accept: gets each connection, non-blocking, and the address of its other side.
        on_exhaustion: called when the system has no more sockets to give.
    """

    def __init__(self, bound: socket.socket, on_accept: OnAccept, on_exhaustion: Callable[[], None]) -> None:
        self._socket = bound
        self._on_accept = on_accept
        self._on_exhaustion = on_exhaustion
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        bound.setblocking(False)
        bound.listen(1024)  # most connections that wait to be accepted: a whole swarm may come back at once
        self.address: tuple[str, int] = bound.getsockname()[:2]
        self.family = bound.family
        try:
            self._loop.add_reader(bound.fileno(), self._accept_some)
        except NotImplementedError:  # the loop of Windows
            self._task = self._loop.create_task(self._keep_accepting())

    def _accept_some(self) -> None:
        for _ in range(32):  # then other work of the loop gets its turn
            try:
                connection, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if not _is_of_connection(e):
                    self._wait_for_sockets(e)
                    return
            else:
                self._hand_over(connection, address)

    def _hand_over(self, accepted: socket.socket, address: Any) -> None:
        connection = OwnSocket.take(accepted)
        OwnSocket.accepted.add(connection)
        try:
            self._on_accept(connection, address[0])
        except Exception:  # whatever goes wrong, the next connection must be accepted
            logger.exception("a connection from %s could not be taken", address[0])
            connection.close()

    def _wait_for_sockets(self, error: OSError) -> None:
        _warn_seldom(REFUSED_BY_SYSTEM, error.strerror, more_files())
        self._on_exhaustion()
        descriptor = self._socket.fileno()
        self._loop.remove_reader(descriptor)
        self._pause = self._loop.call_later(PAUSE_SECONDS, self._loop.add_reader, descriptor, self._accept_some)

    async def _keep_accepting(self) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(self._socket)
            except OSError as e:
                if not _is_of_connection(e):
                    _warn_seldom(REFUSED_BY_SYSTEM, e.strerror, more_files())
                    self._on_exhaustion()
                    await asyncio.sleep(PAUSE_SECONDS)
            else:
                self._hand_over(connection, address)

    async def close(self) -> None:
        """Stop listening."""
        if self._pause is not None:
            self._pause.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        elif self._socket.fileno() != -1:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()


async def bind(host: str, port: int, family: socket.AddressFamily) -> list[OwnSocket]:
    """Sockets bound to the addresses of a host; with port 0 all of them get the same free one.

    Raises:
        OSError: one of them cannot be bound.
    """
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    bound: list[OwnSocket] = []
    try:
        for each_family, kind, protocol, _, address in dict.fromkeys(found):
            each = OwnSocket(each_family, kind, protocol)
            bound.append(each)
            if each_family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            await _bind(each, (address[0], port or bound[0].getsockname()[1], *address[2:]))
    except BaseException:
        for each in bound:
            each.close()
        raise
    return bound


async def _bind(unbound: socket.socket, address: tuple[Any, ...]) -> None:
    """Bind a socket to a port of its own, even if connections of the last start are not quite over."""
    ports_may_overlap: bool = sys.platform == "darwin"
    # On Windows and macOS SO_REUSEADDR lets two listeners share a port.
    if sys.platform == "win32":
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    elif not ports_may_overlap:
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        unbound.bind(address)
    except OSError as e:
        if not ports_may_overlap or e.errno != errno.EADDRINUSE or await _is_answered(unbound.family, address):
            raise
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        unbound.bind(address)


async def _is_answered(family: int, address: tuple[Any, ...]) -> bool:
    """Whether a program on this machine listens there.

    With SO_REUSEADDR, macOS lets one program have a port on all networks and another program the same port on one.
    """
    loopback = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    host = loopback if address[0] in ("0.0.0.0", "::") else address[0]
    with OwnSocket(family, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            async with asyncio.timeout(1.0):
                await asyncio.get_running_loop().sock_connect(caller, (host, *address[1:]))
        except TimeoutError:
            return True  # on this machine a refusal comes at once
        except OSError:
            return False
    return True


_LISTENS = "0A"  # TCP_LISTEN of include/net/tcp_states.h in Linux


def holder_of(port: int, proc: Path = Path("/proc")) -> int | None:
    """The process that listens on a TCP port of this machine; ``None`` if it is another user's, or not known.

    Args:
        proc: the proc file system.
    """
    if sys.platform != "linux":
        return None
    wanted = {f"socket:[{inode}]" for inode in _sockets_on(port, proc)}
    if not wanted:
        return None
    for process in proc.glob("[0-9]*"):
        try:
            if any(os.readlink(descriptor) in wanted for descriptor in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:  # it is another user's, or has just ended
            continue
    return None


def _sockets_on(port: int, proc: Path) -> set[str]:
    """The inodes of sockets that listen on a port."""
    found = set[str]()
    for name in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / name).read_text().splitlines()[1:]
        except OSError:  # there may be no IPv6
            continue
        for _, local, _, state, *rest in map(str.split, rows):
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                found.add(rest[5])
    return found


def port_in_use(port: int) -> str:
    """What to tell a user whose port is taken."""
    process = holder_of(port)
    who = "" if process is None else " (this process)" if process == os.getpid() else f" (process {process})"
    return f"port {port} is in use: is an earlier run still running?{who}"


# --- connections that have proven nothing -----------------------------------------------------------------------------


# Seconds by which the TLS layer's own timeout comes after ours, because ours gives the better error. Chosen.
BACKSTOP_SECONDS = 1.0


class Arrival:
    """An accepted connection whose other side has not proven its identity yet."""

    def __init__(self, accepted: socket.socket, host: str, may_be_session: bool) -> None:
        self.socket = accepted
        self.host = host
        self._may_be_session = may_be_session
        self.stream = TcpStream()
        self.session: TcpSession | None = None
        """The session, once the first byte says that the connection is one."""
        self.patience: asyncio.TimerHandle | None = None
        """Ends the wait for the first byte."""
        self.first_byte: asyncio.Task[None] | None = None
        """Waits for the first byte, on loops that cannot watch a socket."""
        self.task: asyncio.Task[None] | None = None
        """The handshake, which begins with the first byte."""
        self.in_hands_of_loop = False
        self.drop_reason = ""

    def begins_session(self) -> bool:
        """Whether the first byte begins a session. It is left in the socket for TLS to read."""
        if not self._may_be_session:
            return False
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == SESSION_BYTE
        except OSError:  # the handshake finds out what is wrong
            return False

    def give_up(self) -> None:
        """Close the connection at any stage."""
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
        metrics: counts accepted connections, and dropped ones by reason.
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
        """Connections that have sent nothing yet."""
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
        """Close an unproven connection if others take more than half of this process's files, which are the user's."""
        taken = len(OwnSocket.accepted)
        if self._files is not None and taken > self._files:
            _warn_seldom(
                "no file for a connection: connections of others take %d of this process. %s", taken, more_files()
            )
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
        """Find out which peer has connected, and hand its stream on once it has proven that."""
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
        """Find out which task expects this session, and hand it over."""
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
            # This peer has given the cookie, so the session does not count as a handshake.
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
