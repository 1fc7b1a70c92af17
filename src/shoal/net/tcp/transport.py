"""The transport for ``/ip4|ip6|dns|dns4|dns6/<host>/tcp/<port>``: TLS 1.3 over TCP, see
:mod:`shoal.net.tcp.handshake`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import cast

from shoal.access.membership import judge_listener
from shoal.errors import DialError, P2PDaemonError, StreamClosedError
from shoal.metrics import Metrics
from shoal.net.addresses import ip_text_of, subscriber_of
from shoal.net.limits import DEFAULT_LIMITS, Limits
from shoal.net.own_addresses import (
    LOOK_AGAIN_SECONDS,
    LOOPBACK,
    MAX_ADDRESSES_PER_PEER,
    OwnAddresses,
    chosen_host_maddrs,
    everywhere,
)
from shoal.net.tcp.connect import Proxies, bind_to_shared_port, connect, connect_through, family_of
from shoal.net.tcp.handshake import HANDSHAKE_TIMEOUT, as_dial_error, dialler_context, prove_to_listener
from shoal.net.tcp.listener import BACKSTOP_SECONDS, Listener, UnauthenticatedLimits, bind, port_in_use
from shoal.net.tcp.punch import punched
from shoal.net.tcp.sessions import SESSION_BYTE, TcpSession
from shoal.net.tcp.stream import OwnSocket, TcpStream, address_of
from shoal.net.transport import MAY_CONNECT, ON_ANSWER, ROUND_TRIP, OnStream, Session, Stream, Transport
from shoal.peers.identity import Identity, PeerID
from shoal.peers.multiaddr import Multiaddr

logger = logging.getLogger(__name__)


class TcpTransport(Transport):
    """Transport over TCP.

    Args:
        identity: of the peer that dials and listens.
        metrics: counts connections made and refused.
        limits: what strangers may take.
        machine: the addresses of this machine.
        proxies: which connections go through a proxy; default: as the environment variables say.

    Raises:
        ValueError: an environment variable names no proxy that can be used.
    """

    is_behind_routers = True

    def __init__(
        self,
        identity: Identity,
        metrics: Metrics | None = None,
        limits: Limits = DEFAULT_LIMITS,
        machine: OwnAddresses | None = None,
        proxies: Proxies | None = None,
    ) -> None:
        self.identity = identity
        self.metrics = metrics or Metrics()
        self._machine = machine or OwnAddresses()
        self.proxies = Proxies.of_environment() if proxies is None else proxies
        self.is_proxied = self.proxies.proxy is not None
        self._streams: weakref.WeakSet[TcpStream] = weakref.WeakSet()
        self._next_look: asyncio.TimerHandle | None = None
        self.listeners: list[Listener] = []
        """The sockets on which this peer listens."""
        # Cache of the listeners' addresses, with what they were derived from: each greeting tells them.
        self._reachable: tuple[tuple[int, int], list[Multiaddr]] | None = None
        self.strangers = UnauthenticatedLimits(self, self.metrics, limits, self._note_stream)
        """Connections whose other side has not proven its identity yet."""

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
        await self.strangers.tls()

        def arrive(accepted: socket.socket, remote_host: str) -> None:
            self.arrivals += 1
            self.strangers.arrive(accepted, subscriber_of(remote_host), on_stream)

        try:
            listeners = [
                Listener(each, arrive, self.strangers.make_room) for each in await self._bind(host, port, family)
            ]
        except OSError as e:
            is_taken = e.errno == errno.EADDRINUSE and port
            why = await asyncio.to_thread(port_in_use, port) if is_taken else e.strerror or e
            raise P2PDaemonError(f"cannot listen on {address}: {why}") from e
        self.listeners += listeners
        if self._next_look is None:
            self._keep_looking()
        return self._reachable_at(listeners)

    async def _bind(self, host: str, port: int, family: socket.AddressFamily) -> list[OwnSocket]:
        """Bind to a host. For port 0, reuse the port of another listener if possible, so that all have one port."""
        if port == 0 and self.listeners:
            with contextlib.suppress(OSError):
                return await bind(host, self.listeners[0].address[1], family)
        return await bind(host, port, family)

    def addresses(self, latest: bool = False) -> list[Multiaddr]:
        self._look(latest=latest)
        source = self._machine.looks, len(self.listeners)
        if self._reachable is None or self._reachable[0] != source:
            self._reachable = source, self._reachable_at(self.listeners)
        return list(self._reachable[1])

    def _keep_looking(self) -> None:
        self._look()
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(LOOK_AGAIN_SECONDS, self._keep_looking)

    def _look(self, *, latest: bool = False) -> None:
        now = asyncio.get_running_loop().time()
        if self._machine.look(now) if latest else self._machine.look_if_due(now):
            self._note_move()

    def _note_stream(self, stream: TcpStream) -> None:
        """Remember a stream, and look for moves: its local address shows which address this machine has now."""
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
        """Addresses of these listeners, the best first. At most one loopback address comes last if there are others."""
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
        return [*far[: MAX_ADDRESSES_PER_PEER - 1], *near[: None if not far else 1]]

    # --- dialling -----------------------------------------------------------------------------------------------------

    def is_inside(self, address: Multiaddr) -> bool:
        host = address.get("ip4") or address.get("ip6")
        return host is not None and self._machine.is_inside(host)

    def is_here(self, address: Multiaddr) -> bool:
        host = ip_text_of(address)
        return host is not None and self._machine.is_here(host)

    def is_elsewhere(self, address: Multiaddr) -> bool:
        host = ip_text_of(address)
        self._look()
        return host is not None and self._machine.is_elsewhere(host)

    def worth_dialling(self, addresses: Sequence[Multiaddr], *, have_others: bool = False) -> list[Multiaddr]:
        usable = super().worth_dialling(addresses)
        if len(usable) < 2 and not have_others:
            return usable
        self._look()
        return self._machine.in_order_to_dial(usable, have_others=have_others)

    async def dial(self, address: Multiaddr, expected_peer: PeerID | None) -> Stream:
        connecting, is_proxied = self._connect(address)
        stream = await self._shake_hands(connecting, address, expected_peer)
        if is_proxied:
            stream.remote_address = address  # and not that of the proxy
        return stream

    def _connect(
        self, address: Multiaddr, prepare: Callable[[socket.socket], object] | None = None
    ) -> tuple[Awaitable[socket.socket], bool]:
        """A coroutine that connects to an address, and whether it does so through a proxy."""
        host, port, family = self._host_and_port(address)
        proxy = self.proxies.for_host(host, port)
        if proxy is not None:
            return connect_through(proxy, host, port), True
        may_connect = MAY_CONNECT.get()
        judge = None if may_connect is None else lambda ip: may_connect(address_of(ip, port))
        return connect(host, port, family, prepare, judge), False

    async def _shake_hands(
        self, connecting: Awaitable[socket.socket], address: Multiaddr, expected_peer: PeerID | None
    ) -> Stream:
        """Do the dialler's half of the handshake, as soon as there is a connection."""
        stream = TcpStream()
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                connected = await connecting
                ON_ANSWER.get()()
                await asyncio.get_running_loop().create_connection(
                    lambda: stream,
                    sock=connected,
                    ssl=dialler_context(),
                    server_hostname="",
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT + BACKSTOP_SECONDS,
                )
                judge = functools.partial(judge_listener, self.membership)
                own_badge = b"" if self.membership is None else self.membership.shown_badge()
                proving = prove_to_listener(stream, self.identity, address, expected_peer, judge, own_badge)
                stream.remote, stream.badge = await proving
        except BaseException as e:
            stream.abort()
            if not isinstance(e, (OSError, StreamClosedError)):
                raise
            self.metrics.dials_failed += 1
            raise as_dial_error(address, e) from e
        self._note_stream(stream)
        self.metrics.connections_dialled += 1
        return stream

    # --- sessions -----------------------------------------------------------------------------------------------------

    def expect_session(self, cookie: bytes) -> asyncio.Future[Session]:
        return self.strangers.expected.expect(cookie)

    async def open_session(
        self, address: Multiaddr, cookie: bytes, *, punchable: bool = False, beside: Session | None = None
    ) -> Session:
        local = None if beside is None else beside.local_address
        bind = functools.partial(bind_to_shared_port, port=0 if local is None else int(local["tcp"] or 0))
        connecting, is_proxied = self._connect(address, bind if punchable else None)
        session: TcpSession | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                session = self.adopt(await connecting, punchable=punchable and not is_proxied)
                if is_proxied:
                    session.remote_address = address  # and not that of the proxy
                await session.write(SESSION_BYTE + cookie)
        except BaseException as e:
            if session is not None:
                session.abort()
            if not isinstance(e, (OSError, StreamClosedError)):
                raise
            self.metrics.dials_failed += 1
            raise as_dial_error(address, e) from e
        return session

    def adopt(self, connected: socket.socket, *, punchable: bool = False) -> TcpSession:
        """Make a session of a connected socket; it ends with this transport at the latest.

        Raises:
            OSError: the connection is over already; the socket is closed.
        """
        try:
            return TcpSession(connected, self.strangers.sessions, punchable=punchable)
        except BaseException:
            connected.close()
            raise

    async def authenticate(self, session: Session, expected_peer: PeerID) -> Stream:
        own = _of_tcp(session)

        async def detached() -> socket.socket:
            return own.detach()

        return await self._shake_hands(detached(), own.remote_address, expected_peer)

    def receive(self, session: Session, on_stream: OnStream) -> None:
        own = _of_tcp(session)
        if own.closed:
            logger.debug("a session with %s has ended before its handshake", own.remote_address)
            return
        self.strangers.arrive(own.detach(), subscriber_of(own.remote_host), on_stream, may_be_session=False)

    async def punch(
        self, session: Session, candidates: Sequence[Multiaddr], seconds: float, round_trip: float = ROUND_TRIP
    ) -> AsyncGenerator[Session, None]:
        own = _of_tcp(session)
        if not own.is_punchable:
            raise ValueError(f"the port of {own.local_address} cannot be shared: open the session with punchable=True")
        places = [(host, port) for host, port, _ in map(self._host_and_port, candidates)]
        _, port, _ = self._host_and_port(own.local_address)
        async with aclosing(punched(port, places, seconds, round_trip)) as connections:
            async for connected in connections:
                try:
                    found = self.adopt(connected)
                except OSError:  # it is over already
                    continue
                yield found

    async def close(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        for listener in self.listeners:
            await listener.close()
        self.listeners.clear()
        await self.strangers.close()


def _of_tcp(session: Session) -> TcpSession:
    if not isinstance(session, TcpSession):
        raise TypeError(f"{session!r} is no session of this transport: use the one that has opened it")
    return session
