"""The transport for ``/ip4|ip6|dns|dns4|dns6/<host>/tcp/<port>``: TLS 1.3 over TCP, see :mod:`shoal.p2p.handshake`.

A host may have several addresses, some of which lead nowhere. They are tried as in RFC 8305: the IP versions take
turns, each attempt starts a little later than the one before, and the first address that answers wins. So an address
that answers late (Windows takes two seconds to refuse a port) or never delays the others only for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import ssl
import weakref
from collections.abc import Sequence
from typing import cast

from shoal.errors import DialError, P2PDaemonError, StreamClosedError
from shoal.metrics import Metrics
from shoal.p2p.handshake import (
    BUSY_ALERT,
    HANDSHAKE_TIMEOUT,
    as_dial_error,
    dialler_context,
    listener_context,
    prove_to_listener,
    verify_dialler,
)
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.limits import DEFAULT_LIMITS, Limits
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.own_addresses import (
    LOOK_AGAIN_SECONDS,
    LOOPBACK,
    MAX_ANNOUNCED,
    OwnAddresses,
    chosen_host_maddrs,
    everywhere,
)
from shoal.p2p.tcp_listener import HostRates, Listener, WaitingRoom, bind, host_of
from shoal.p2p.tcp_stream import WRITE_HIGH_WATER, TcpSocket, TcpStream, address_of, disown_socket, own_socket
from shoal.p2p.transport import OnStream, Stream, Transport

logger = logging.getLogger(__name__)

# The TLS layer's own timeout comes this much after ours, because ours gives the better error.
_BACKSTOP_SECONDS = 1.0

# Seconds after which the next address of a host is tried in parallel with those that have not answered yet.
CONNECT_STAGGER = 0.25
# A host that vanishes silently is noticed within about a minute, even while nobody writes.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPALIVE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}

_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}

AddressInfo = tuple[int, int, int, str, "tuple[str | int, ...]"]


def family_of(kind: str) -> socket.AddressFamily:
    """The IP version that a part of a multiaddr, such as ``dns4``, asks for."""
    return _FAMILIES.get(kind, socket.AF_UNSPEC)


async def connect(host: str, port: int, family: socket.AddressFamily) -> socket.socket:
    """A connected socket to the first address of a host that answers.

    Raises:
        OSError: no address answers; this is the error of the address that was tried first.
    """
    waiting = in_turn(await _resolve(host, port, family))
    attempts: dict[asyncio.Task[socket.socket], None] = {}
    pending: set[asyncio.Task[socket.socket]] = set()
    try:
        while waiting or pending:
            if waiting:
                attempt = asyncio.get_running_loop().create_task(_connect_to(waiting.pop(0)))
                attempts[attempt] = None
                pending.add(attempt)
            done, pending = await asyncio.wait(
                pending, timeout=CONNECT_STAGGER if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for attempt in done:
                if not attempt.cancelled() and attempt.exception() is None:
                    del attempts[attempt]
                    return attempt.result()
        errors = [error for attempt in attempts if isinstance(error := attempt.exception(), OSError)]
        raise errors[0]
    finally:
        for attempt in attempts:
            attempt.add_done_callback(_close_late)
            attempt.cancel()


def in_turn(found: Sequence[AddressInfo]) -> list[AddressInfo]:
    """Addresses in the order to try them: the system's order, but with the IP versions taking turns."""
    families = list(dict.fromkeys(each[0] for each in found))
    queues = [[each for each in found if each[0] == family] for family in families]
    return [each for row in itertools.zip_longest(*queues) for each in row if each is not None]


async def _connect_to(info: AddressInfo) -> socket.socket:
    family, kind, protocol, _, address = info
    connecting = TcpSocket(family, kind, protocol)
    own_socket(connecting.fileno(), connecting)
    try:
        connecting.setblocking(False)
        set_options(connecting)
        await asyncio.get_running_loop().sock_connect(connecting, address)
        hurry_within_host(connecting)
    except BaseException:
        close(connecting)
        raise
    return connecting


def close(connecting: socket.socket) -> None:
    """Close a socket that :func:`connect` has returned and that nothing else has taken over."""
    disown_socket(connecting.fileno(), connecting)
    connecting.close()


def _close_late(attempt: asyncio.Task[socket.socket]) -> None:
    """Close a late success: another address was faster, or nobody waits any more."""
    if not attempt.cancelled() and attempt.exception() is None:
        close(attempt.result())


async def _resolve(host: str, port: int, family: socket.AddressFamily) -> list[AddressInfo]:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    except UnicodeError as e:  # not a name that the domain name system can express
        raise socket.gaierror(socket.EAI_NONAME, str(e)) from e
    return cast("list[AddressInfo]", found)


def set_options(connection: socket.socket) -> None:
    """Send small messages at once, keep the unsent backlog short, and notice hosts that vanish."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_HIGH_WATER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # each system offers its own subset
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def hurry_within_host(connection: socket.socket) -> None:
    """Switch off pacing within this host: it spares networks, and here it would only cost a quarter of the time."""
    with contextlib.suppress(OSError):  # the connection is over already, or the system has no such option
        if hasattr(socket, "TCP_CONGESTION") and connection.getsockname()[0] == connection.getpeername()[0]:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


class Arrival:
    """An accepted connection whose other side has not proven its identity yet."""

    def __init__(self, accepted: socket.socket, host: str) -> None:
        self.socket = accepted
        self.host = host
        self.stream = TcpStream()
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

    def give_up(self) -> None:
        """Close the connection at any stage."""
        disown_socket(self._descriptor, self)
        if self.in_hands_of_loop:
            self.stream.abort()
        else:
            self.socket.close()


class TcpTransport(Transport):
    """Transport over TCP.

    Args:
        identity: of the peer that dials and listens.
        metrics: counts connections made and refused.
        limits: what strangers may take.
        machine: the addresses of this machine.
    """

    def __init__(
        self,
        identity: Identity,
        metrics: Metrics | None = None,
        limits: Limits = DEFAULT_LIMITS,
        machine: OwnAddresses | None = None,
    ) -> None:
        self.identity = identity
        self.metrics = metrics or Metrics()
        self._machine = machine or OwnAddresses()
        self._streams: weakref.WeakSet[TcpStream] = weakref.WeakSet()
        self._next_look: asyncio.TimerHandle | None = None
        self.listeners: list[Listener] = []
        """Where this peer listens."""
        self._tls: tuple[ssl.SSLContext, bytes] | None = None
        self.silent: WaitingRoom[Arrival] = WaitingRoom(limits.handshakes_in_flight)
        """Who has connected and said nothing yet."""
        self.shaking_hands: WaitingRoom[Arrival] = WaitingRoom(limits.handshakes_in_flight)
        """Who has begun a handshake."""
        self._rates = HostRates(limits.handshakes_per_second, limits.handshake_burst)

    def supports(self, address: Multiaddr) -> bool:
        protocols = address.protocols()
        return len(protocols) == 2 and protocols[0] in ("ip4", "ip6", "dns", "dns4", "dns6") and protocols[1] == "tcp"

    def _host_and_port(self, address: Multiaddr) -> tuple[str, int, socket.AddressFamily]:
        if not self.supports(address):
            raise DialError(f"{address} is not supported: give /ip4/<address>/tcp/<port> (or ip6, dns, dns4, dns6)")
        (kind, host), (_, port) = address.items()
        return cast("str", host), int(cast("str", port)), family_of(kind)

    # --- listening ----------------------------------------------------------------------------------------------------

    def listens_by_default(self) -> list[str]:
        return chosen_host_maddrs() or everywhere()

    async def listen(self, address: Multiaddr, on_stream: OnStream) -> list[Multiaddr]:
        host, port, family = self._host_and_port(address)
        if self._tls is None:
            # In a thread, because it writes and reads a file.
            self._tls = await asyncio.to_thread(listener_context, self.identity)

        def arrive(accepted: socket.socket, remote_host: str) -> None:
            self._arrive(accepted, host_of(remote_host), on_stream)

        try:
            listeners = [Listener(each, arrive, self._make_room) for each in await self._bind(host, port, family)]
        except OSError as e:
            raise P2PDaemonError(f"cannot listen on {address}: {e.strerror or e}") from e
        self.listeners += listeners
        if self._next_look is None:
            self._keep_looking()
        return self._reachable_at(listeners)

    async def _bind(self, host: str, port: int, family: socket.AddressFamily) -> list[socket.socket]:
        """Bind to a host. For port 0, reuse the port of another address if possible: one less to remember."""
        if port == 0 and self.listeners:
            with contextlib.suppress(OSError):
                return await bind(host, self.listeners[0].address[1], family)
        return await bind(host, port, family)

    def addresses(self, latest: bool = False) -> list[Multiaddr]:
        self._look(latest=latest)
        return self._reachable_at(self.listeners)

    def _keep_looking(self) -> None:
        self._look()
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(LOOK_AGAIN_SECONDS, self._keep_looking)

    def _look(self, *, latest: bool = False) -> None:
        now = asyncio.get_running_loop().time()
        if self._machine.look(now) if latest else self._machine.look_if_due(now):
            self._note_move()

    def _note_stream(self, stream: TcpStream) -> None:
        """Remember a stream, and look for moves: its local address shows best which address this machine has now."""
        self._streams.add(stream)
        if stream.local_host and self._machine.look_if_unknown(stream.local_host, asyncio.get_running_loop().time()):
            self._note_move()

    def _note_move(self) -> None:
        loop = asyncio.get_running_loop()
        here = ", ".join(address.ip for address in self._machine.told())
        logger.info("the addresses of this machine have changed: %s", here)
        if self.on_addresses_changed is not None:
            loop.call_soon(self.on_addresses_changed)
        for stream in self._streams:
            # Nothing will ever arrive at an address that this machine has lost.
            if stream.local_host in self._machine.lost:
                loop.call_soon(stream.abort)

    def _reachable_at(self, listeners: Sequence[Listener]) -> list[Multiaddr]:
        """Addresses of these listeners, the best first; at most one loopback address, the last, if there are others."""
        order = {address.ip: (address.rank, number) for number, address in enumerate(self._machine.told())}
        found: list[tuple[tuple[int, int], Multiaddr]] = []
        for listener in listeners:
            bound, port = listener.address
            same_version = [ip for ip in order if (":" in ip) == (listener.family == socket.AF_INET6)]
            hosts = same_version if bound in ("0.0.0.0", "::") else [bound]
            found += [(order.get(host, (0, 0)), address_of(host, port)) for host in hosts]
        found.sort(key=lambda each: each[0])
        far = [address for (rank, _), address in found if rank != LOOPBACK]
        near = [address for (rank, _), address in found if rank == LOOPBACK]
        return [*far[: MAX_ANNOUNCED - 1], *near[: None if not far else 1]]

    # --- what has arrived ---------------------------------------------------------------------------------------------

    def _arrive(self, accepted: socket.socket, host: str, on_stream: OnStream) -> None:
        """Start the handshake at the first byte, so that nothing is spent on a stranger that says nothing."""
        loop = asyncio.get_running_loop()
        if self._rates.is_exhausted(host, loop.time()):
            self._turn_away(accepted, host)
            return
        arrival = Arrival(accepted, host)
        self.silent.enter(arrival)
        arrival.patience = loop.call_later(HANDSHAKE_TIMEOUT, self._drop, arrival, "said nothing")
        try:
            loop.add_reader(accepted.fileno(), self._begin_handshake, arrival, on_stream)
        except NotImplementedError:  # the loop of Windows
            arrival.first_byte = loop.create_task(_first_byte_of(accepted))
            arrival.first_byte.add_done_callback(lambda _: self._note_first_byte(arrival, on_stream))
        self._make_room_in(self.silent)

    def _turn_away(self, accepted: socket.socket, host: str) -> None:
        reason = "too many handshakes of one host"
        self.metrics.connections_dropped[reason] += 1
        logger.debug("dropped a connection from %s: %s", host, reason)
        with accepted, contextlib.suppress(OSError):
            accepted.send(BUSY_ALERT)
            accepted.shutdown(socket.SHUT_WR)
            # Read first: closing with unread bytes would reset the connection and destroy the alert on its way.
            accepted.recv(4096)

    def _note_first_byte(self, arrival: Arrival, on_stream: OnStream) -> None:
        if arrival in self.silent:  # otherwise it was dropped meanwhile
            self._begin_handshake(arrival, on_stream)

    def _begin_handshake(self, arrival: Arrival, on_stream: OnStream) -> None:
        loop = asyncio.get_running_loop()
        self._stop_waiting(arrival)
        self.shaking_hands.enter(arrival)
        self._rates.spend(arrival.host, loop.time())
        arrival.task = loop.create_task(self.shake_hands(arrival, on_stream))
        arrival.task.add_done_callback(lambda task: self._end_handshake(arrival, task))
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
        """Find out who has connected; whoever proves it is handed on."""
        assert self._tls is not None
        context, certificate = self._tls
        stream, stage = arrival.stream, "TLS handshake"
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                arrival.in_hands_of_loop = True
                set_options(arrival.socket)
                hurry_within_host(arrival.socket)
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: stream,
                    arrival.socket,
                    ssl=context,
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT + _BACKSTOP_SECONDS,
                )
                stage = "proof of identity"
                own_badge = b"" if self.membership is None else self.membership.shown_badge()
                found = await verify_dialler(stream, self.identity.peer_id, certificate, own_badge)
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
            self._note_stream(stream)
            self.metrics.connections_accepted += 1
            on_stream(stream)

    def _end_handshake(self, arrival: Arrival, task: asyncio.Task[None]) -> None:
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
        self.metrics.connections_dropped[arrival.drop_reason] += 1
        logger.debug("dropped a connection from %s: %s", arrival.host, arrival.drop_reason)

    def _make_room_in(self, room: WaitingRoom[Arrival]) -> None:
        victim = room.one_too_many()
        if victim is not None:
            room.leave(victim)
            self._drop(victim, "too many handshakes at once")

    def _make_room(self) -> None:
        """Drop a stranger, because this process has no sockets left."""
        victim = self.silent.least_welcome() or self.shaking_hands.least_welcome()
        if victim is not None:
            self._drop(victim, "no sockets left")

    # --- dialling -----------------------------------------------------------------------------------------------------

    def is_inside(self, address: Multiaddr) -> bool:
        host = address.get("ip4") or address.get("ip6")
        return host is not None and self._machine.is_inside(host)

    def worth_dialling(self, addresses: Sequence[Multiaddr]) -> list[Multiaddr]:
        usable = super().worth_dialling(addresses)
        if len(usable) < 2:
            return usable
        self._look()
        return self._machine.in_order_to_dial(usable)

    async def dial(self, address: Multiaddr, expected_peer: PeerID) -> Stream:
        host, port, family = self._host_and_port(address)
        stream = TcpStream()
        connected: socket.socket | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                connected = await connect(host, port, family)
                descriptor = connected.fileno()
                await asyncio.get_running_loop().create_connection(
                    lambda: stream,
                    sock=connected,
                    ssl=dialler_context(),
                    server_hostname="",
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT + _BACKSTOP_SECONDS,
                )
                proving = prove_to_listener(stream, self.identity, address, expected_peer, self.membership)
                stream.badge = await proving
        except BaseException as e:
            stream.abort()
            # The handshake may have failed before the stream took over the socket.
            if connected is not None:
                disown_socket(descriptor, connected)
            if not isinstance(e, (OSError, StreamClosedError)):
                raise
            self.metrics.dials_failed += 1
            raise as_dial_error(address, e) from e
        stream.remote = expected_peer
        self._note_stream(stream)
        self.metrics.connections_dialled += 1
        return stream

    async def close(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        for listener in self.listeners:
            await listener.close()
        self.listeners.clear()
        for arrival in self.silent.guests():
            self._stop_waiting(arrival)
            arrival.give_up()
        tasks = [arrival.task for arrival in self.shaking_hands.guests() if arrival.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_byte_of(accepted: socket.socket) -> None:
    """Return when something has arrived, without reading it: on Windows, an empty read ends at that moment."""
    with contextlib.suppress(OSError):  # the handshake finds out what is wrong
        await asyncio.get_running_loop().sock_recv_into(accepted, bytearray())
