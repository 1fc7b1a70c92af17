"""Connecting to a host, which may have several addresses of which some lead nowhere.

They are tried as in RFC 8305: versions of IP in turn, each a little later than the one before, and the first that
answers wins. So an address that answers never, or late (Windows takes two seconds for a port that is refused), costs
the others nothing but a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Sequence
from typing import cast

from shoal.p2p.tcp_stream import WRITE_HIGH_WATER, disown_socket, own_socket

# Seconds after which the next address of a host is tried beside those that have not answered yet.
CONNECT_STAGGER = 0.25
# A host that vanishes without a word is noticed within about a minute, also while nobody writes.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPALIVE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}

_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}

AddressInfo = tuple[int, int, int, str, "tuple[str | int, ...]"]


class TcpSocket(socket.socket):
    """A socket that takes no offence at being shut down when its connection is over.

    The loop of Windows shuts a socket down before it closes it: an error there would leave it open for good.
    """

    def shutdown(self, how: int) -> None:
        with contextlib.suppress(OSError):
            super().shutdown(how)


def family_of(kind: str) -> socket.AddressFamily:
    """Which version of IP a part of a multiaddr asks for, such as ``dns4``."""
    return _FAMILIES.get(kind, socket.AF_UNSPEC)


async def connect(host: str, port: int, family: socket.AddressFamily) -> socket.socket:
    """A connected socket to the first address of a host that answers.

    Raises:
        OSError: none does; the error of the address that was tried first.
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
    """Addresses in the order in which to try them: the system's, but with the versions of IP by turns."""
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
    """Another address was faster, or nobody waits any more."""
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
    """No delay for small messages; little that waits unsent; notice hosts that vanish."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_HIGH_WATER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # each system has its own choice of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def hurry_within_host(connection: socket.socket) -> None:
    """Leave out pacing, with which some systems spare networks, where there is none: it takes a quarter of the time."""
    with contextlib.suppress(OSError):  # it is over already, or there is no such choice
        if hasattr(socket, "TCP_CONGESTION") and connection.getsockname()[0] == connection.getpeername()[0]:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
