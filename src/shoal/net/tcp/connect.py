"""Connecting to hosts by TCP.

A host may have several addresses, some of which lead nowhere. They are tried as in RFC 8305: the IP versions take
turns, each attempt starts a little later than the one before, and the first address that answers wins. So an address
that answers late (Windows takes two seconds to refuse a port) or never delays the others only for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
from collections.abc import Callable, Sequence
from typing import cast

from shoal.net.tcp.stream import WRITE_HIGH_WATER, TcpSocket, close_socket, own_socket

# Seconds after which the next address of a host is tried in parallel with those that have not answered yet.
CONNECT_STAGGER = 0.25
# A host that vanishes silently is noticed within about a minute, even while nobody writes.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPALIVE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}

_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}

AddressInfo = tuple[int, int, int, str, "tuple[str | int, ...]"]


def family_of(kind: str) -> socket.AddressFamily:
    """The IP version that a part of a multiaddr, such as ``dns4``, asks for."""
    return _FAMILIES.get(kind, socket.AF_UNSPEC)


async def connect(
    host: str,
    port: int,
    family: socket.AddressFamily,
    prepare: Callable[[socket.socket], object] | None = None,
    judge: Callable[[str], bool] | None = None,
) -> socket.socket:
    """A connected socket to the first address of a host that answers.

    Args:
        prepare: called with each socket before it connects, for example to bind it.
        judge: whether an IP address may be connected to.

    Raises:
        OSError: no address answers; this is the error of the address that was tried first.
    """
    found = await _resolve(host, port, family)
    waiting = in_turn([each for each in found if judge is None or judge(str(each[4][0]))])
    if not waiting:
        raise OSError(errno.EPERM, "it leads into a private network, and that peer is seen elsewhere")
    attempts: dict[asyncio.Task[socket.socket], None] = {}
    pending: set[asyncio.Task[socket.socket]] = set()
    try:
        while waiting or pending:
            if waiting:
                attempt = asyncio.get_running_loop().create_task(_connect_to(waiting.pop(0), prepare))
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


async def _connect_to(info: AddressInfo, prepare: Callable[[socket.socket], object] | None) -> socket.socket:
    family, kind, protocol, _, address = info
    connecting = TcpSocket(family, kind, protocol)
    own_socket(connecting.fileno(), connecting)
    try:
        connecting.setblocking(False)
        set_options(connecting)
        if prepare is not None:
            prepare(connecting)
        await asyncio.get_running_loop().sock_connect(connecting, address)
        hurry_within_host(connecting)
    except BaseException:
        close_socket(connecting)
        raise
    return connecting


def _close_late(attempt: asyncio.Task[socket.socket]) -> None:
    """Close a late success: another address was faster, or nobody waits any more."""
    if not attempt.cancelled() and attempt.exception() is None:
        close_socket(attempt.result())


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


def share_port(unbound: socket.socket) -> None:
    """Let other sockets of this process have the same local port, as those of a punch do.

    On Windows the one option is enough, and the other one does not exist. It is also the weak one, with which any
    program could take the port, so it is for ports that live for seconds.
    """
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def bind_to_shared_port(unbound: socket.socket, port: int = 0) -> None:
    """Bind a socket to a port on all networks, by default a fresh one, which others of this process can share."""
    share_port(unbound)
    if unbound.family == socket.AF_INET6:  # IPv4 has sockets of its own
        unbound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    unbound.bind(("", port))
