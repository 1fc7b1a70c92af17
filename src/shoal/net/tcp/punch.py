"""TCP hole punching: two sides connect to each other at once, so that each router takes the other's SYN for an answer.

Everything happens on one local port, which is fresh for each punch. The connection to the relay was made from it, so
the port that the relay sees is the one that the router uses for this port. The listening port would not do: between two
fixed ports there can be only one TCP connection, and a failed attempt leaves state in routers under its address pair.

The kernels do the rest: a SYN that meets a connecting socket makes a connection (simultaneous open, RFC 9293 3.5), and
one that comes earlier finds the listener on the same port.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import socket
from collections.abc import AsyncGenerator, Sequence

from shoal.base.tasks import cancel_and_wait
from shoal.net.tcp.connect import share_port
from shoal.net.tcp.stream import OwnSocket

logger = logging.getLogger(__name__)

MAX_PER_PORT = 3
"""Connections that one port hands up. Chosen: more than two routers and a local network can make."""
MAX_SYNS = 32
"""Attempts per candidate that send a packet: a relay may lie about candidates, and some refuse at once. Chosen."""
# Limits of the random pause after a failed attempt, in seconds; half a round trip is added to the longer one. Equal
# pauses would keep two sides out of phase. Chosen.
SHORTEST_PAUSE = 0.005
LONGEST_PAUSE = 0.010
# The numbers are WSAEADDRINUSE and WSAEADDRNOTAVAIL, which completion ports report without an ``errno``.
_TAKEN = {errno.EADDRINUSE, errno.EADDRNOTAVAIL, 10048, 10049}

Endpoint = tuple[str, int]
"""A numeric host and a port."""


def punch_socket(family: int, port: int = 0) -> OwnSocket:
    """An unconnected socket on a port that it shares with the other sockets of one punch.

    Args:
        port: of the other sockets; 0 for the first one, which gets a fresh port.

    Raises:
        OSError: the port cannot be shared.
    """
    made = OwnSocket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        share_port(made)
        if family == socket.AF_INET6:  # IPv4 has a socket of its own
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(("", port))
    except BaseException:
        made.close()
        raise
    return made


async def punched(
    port: int, candidates: Sequence[Endpoint], seconds: float, round_trip: float
) -> AsyncGenerator[OwnSocket, None]:
    """Connect to candidates from a port, again and again, and listen there meanwhile.

    Args:
        port: of a socket that :func:`punch_socket` has made. IPv6 candidates are tried from the port of this number.
        seconds: how long to try; it also ends after :data:`MAX_PER_PORT` connections.
        round_trip: seconds to the other side and back through the relay.

    Yields:
        Connected sockets, which belong to the caller.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    found: asyncio.Queue[OwnSocket] = asyncio.Queue()
    listeners = [listener for family in _families(candidates) if (listener := _listener(family, port)) is not None]
    work = [
        *(_accept(listener, found) for listener in listeners),
        *(_connect(port, candidate, round_trip, found) for candidate in candidates),
    ]
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        for _ in range(MAX_PER_PORT):
            try:
                async with asyncio.timeout_at(deadline):
                    connected = await found.get()
            except TimeoutError:
                return
            yield connected
    finally:
        try:
            await cancel_and_wait(*tasks)
        finally:  # the caller may be cancelled, but the tasks have ended all the same
            for listener in listeners:
                listener.close()
            while not found.empty():
                found.get_nowait().close()
        for task in tasks:
            if not task.cancelled():
                task.result()  # raises what should never happen


def _families(candidates: Sequence[Endpoint]) -> list[int]:
    return list(dict.fromkeys(socket.AF_INET6 if ":" in host else socket.AF_INET for host, _ in candidates))


def _listener(family: int, port: int) -> OwnSocket | None:
    """A listener for connections of the other side that come before this side's own attempt.

    ``None`` if the system refuses it; then this side can only connect.
    """
    try:
        listener = punch_socket(family, port)
    except OSError as e:
        logger.debug("cannot use port %d once more: %s", port, e)
        return None
    try:
        listener.listen(MAX_PER_PORT)
    except OSError as e:
        logger.debug("cannot listen on port %d while punching: %s", port, e)
        listener.close()
        return None
    return listener


async def _accept(listener: OwnSocket, found: asyncio.Queue[OwnSocket]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, _ = await loop.sock_accept(listener)
        except OSError as e:  # the other side is gone already, or this process has no sockets left
            logger.debug("cannot accept a connection while punching: %s", e)
            await asyncio.sleep(LONGEST_PAUSE)
            continue
        found.put_nowait(OwnSocket.take(accepted))


async def _connect(port: int, candidate: Endpoint, round_trip: float, found: asyncio.Queue[OwnSocket]) -> None:
    """Try until there is a connection. While the listener holds it no SYNs are sent, but later they may be again."""
    syns = 0
    while syns < MAX_SYNS:
        try:
            connected = await attempt(port, candidate)
        except OSError as e:
            syns += not _is_taken(e)
            await asyncio.sleep(random.uniform(SHORTEST_PAUSE, round_trip / 2 + LONGEST_PAUSE))
            continue
        if connected is not None:
            found.put_nowait(connected)
        return


async def attempt(port: int, candidate: Endpoint) -> OwnSocket | None:
    """One attempt; ``None`` if the candidate turns out to be this very port.

    Raises:
        OSError: it failed.
    """
    connecting = punch_socket(socket.AF_INET6 if ":" in candidate[0] else socket.AF_INET, port)
    try:
        await asyncio.get_running_loop().sock_connect(connecting, candidate)
        if connecting.getsockname()[:2] == connecting.getpeername()[:2]:
            connecting.close()
            return None
    except BaseException:
        connecting.close()
        raise
    return connecting


def _is_taken(error: OSError) -> bool:
    """Whether the address pair of this connection is in use: the listener has it, or is about to."""
    return not _TAKEN.isdisjoint((error.errno, getattr(error, "winerror", None)))
