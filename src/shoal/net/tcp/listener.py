"""Accepting TCP connections one by one, so that each can be judged before anything is spent on it.

Strangers wait in a room of fixed size until they have proven who they are. A crowd on a few machines can use neither
that room nor the rate of handshakes to keep others out: a full room drops the oldest guest of the host with the most
guests, and the rate is limited per host.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from shoal.base.logs import Seldom
from shoal.net.addresses import ip_text_of
from shoal.net.limits import more_files
from shoal.net.tcp.stream import AcceptedSocket, TcpSocket, disown_socket, own_socket
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr


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


def host_of(address: str) -> str:
    """What counts as one host: an IPv4 address, or the IPv6 /64 network that one subscriber has to itself."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((ip, 64), strict=False))


def host_charged(seen_at: str, peer: PeerID) -> str:
    """The host to charge for what is done for a peer: identities cost nothing, hosts do.

    Args:
        seen_at: the address from which it has connected; empty if that is not known.
    """
    ip = ip_text_of(Multiaddr(seen_at)) if seen_at else None
    return str(peer) if ip is None else host_of(ip)


logger = logging.getLogger(__name__)

# The system queues up to this many connections until they are accepted: a whole swarm may come back at once.
BACKLOG = 1024
# Connections taken from the queue before other work of the loop gets its turn.
ACCEPTED_AT_ONCE = 32
# Seconds without accepting after the system has refused to give another socket.
PAUSE_SECONDS = 0.2

REFUSED_BY_SYSTEM = "cannot accept connections: %s. %s"
_warn_seldom = Seldom(logger.warning)
LOCAL_CALL_SECONDS = 1.0
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
        bound.listen(BACKLOG)
        self.address: tuple[str, int] = bound.getsockname()[:2]
        self.family = bound.family
        own_socket(bound.fileno(), self)
        try:
            self._loop.add_reader(bound.fileno(), self._accept_some)
        except NotImplementedError:  # the loop of Windows
            self._task = self._loop.create_task(self._keep_accepting())

    def _accept_some(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
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
        connection = AcceptedSocket(fileno=accepted.detach())
        connection.setblocking(False)
        try:
            self._on_accept(connection, address[0])
        except Exception:  # whatever went wrong, the next connection must be accepted
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
        disown_socket(self._socket.fileno(), self)
        self._socket.close()


async def bind(host: str, port: int, family: socket.AddressFamily) -> list[socket.socket]:
    """Sockets bound to the addresses of a host; with port 0 all of them get the same free one.

    Raises:
        OSError: one of them cannot be bound.
    """
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    bound: list[socket.socket] = []
    try:
        for each_family, kind, protocol, _, address in dict.fromkeys(found):
            each = socket.socket(each_family, kind, protocol)
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
    with TcpSocket(family, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            async with asyncio.timeout(LOCAL_CALL_SECONDS):
                await asyncio.get_running_loop().sock_connect(caller, (host, *address[1:]))
        except TimeoutError:
            return True  # on the own machine a refusal comes at once
        except OSError:
            return False
    return True


_LISTENS = "0A"  # in the tables of Linux


def holder_of(port: int, proc: Path = Path("/proc")) -> int | None:
    """The process that listens on a TCP port of this machine; ``None`` if it is another user's, or not known.

    Args:
        proc: where the system shows its processes.
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
