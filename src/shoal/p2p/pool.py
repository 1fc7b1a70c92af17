"""Connections to other peers, each used by one call at a time and kept for the next one.

A call that finds no idle connection dials a new one, so a bulk transfer never blocks a small call. A crowd of calls
to one peer shares a few dials: whoever waits takes the first connection that becomes free.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable

from shoal.errors import ReactorError
from shoal.p2p.connection import Connection
from shoal.p2p.peer_id import PeerID

MAX_PARALLEL_DIALS = 2
"""Dials to one peer at a time."""
MAX_IDLE_PER_PEER = 8


class ConnectionPool:
    """Idle connections by peer.

    Args:
        dial: makes a new connection to a peer.
        idle_timeout: seconds after which an unused connection is closed.
    """

    def __init__(self, dial: Callable[[PeerID], Awaitable[Connection]], idle_timeout: float) -> None:
        self._dial = dial
        self._idle_timeout = idle_timeout
        self._idle: dict[PeerID, list[Connection]] = {}
        self._idle_since: dict[Connection, float] = {}
        self._dialling: defaultdict[PeerID, int] = defaultdict(int)
        self._waiters: defaultdict[PeerID, deque[asyncio.Future[None]]] = defaultdict(deque)
        self._in_use: dict[Connection, None] = {}  # in order, so that simulations can be repeated
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def idle_count(self) -> int:
        return len(self._idle_since)

    @property
    def in_use_count(self) -> int:
        return len(self._in_use)

    @property
    def dialling_count(self) -> int:
        return sum(self._dialling.values())

    async def acquire(self, peer: PeerID) -> Connection:
        """A connection for the caller alone, to be given back with :meth:`release`.

        Raises:
            DialError: the peer cannot be reached.
        """
        while True:
            if self._closed:
                raise ReactorError("this peer is shut down")
            connection = self._take_idle(peer)
            if connection is None and self._dialling[peer] < MAX_PARALLEL_DIALS:
                connection = await self._dial_new(peer)
            if connection is not None:
                self._in_use[connection] = None
                return connection
            await self._wait_for_turn(peer)

    def release(self, connection: Connection, *, reusable: bool) -> None:
        """Give a connection back; one that is not reusable is cut, which cancels the handler on the other side."""
        self._in_use.pop(connection, None)
        peer = connection.remote
        idle = self._idle.setdefault(peer, [])
        if reusable and not connection.closed and not self._closed and len(idle) < MAX_IDLE_PER_PEER:
            idle.append(connection)
            self._idle_since[connection] = asyncio.get_running_loop().time()
            connection.stream.on_closed(lambda: self._forget(connection))
            self._schedule_sweep()
        else:
            connection.abort()
            if not idle:
                del self._idle[peer]
        self._wake_next(peer)

    def _take_idle(self, peer: PeerID) -> Connection | None:
        idle = self._idle.get(peer)
        while idle:
            connection = idle[-1]
            self._forget(connection)
            connection.stream.on_closed(None)
            if not connection.closed:
                return connection
        return None

    def _forget(self, connection: Connection) -> None:
        if self._idle_since.pop(connection, None) is None:
            return
        idle = self._idle[connection.remote]
        idle.remove(connection)
        if not idle:
            del self._idle[connection.remote]

    async def _dial_new(self, peer: PeerID) -> Connection:
        self._dialling[peer] += 1
        try:
            connection = await self._dial(peer)
        except Exception as e:
            self._fail_waiters(peer, e)
            raise
        finally:
            self._dialling[peer] -= 1
            if not self._dialling[peer]:
                del self._dialling[peer]
            self._wake_next(peer)
        if self._closed:
            connection.abort()
            raise ReactorError("this peer is shut down")
        return connection

    async def _wait_for_turn(self, peer: PeerID) -> None:
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._waiters[peer]
        waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # it was this caller's turn: pass it on
                self._wake_next(peer)
            raise
        finally:
            if waiter in waiters:
                waiters.remove(waiter)
            if not self._waiters.get(peer, True):
                del self._waiters[peer]

    def _wake_next(self, peer: PeerID) -> None:
        for waiter in self._waiters.get(peer, ()):
            if not waiter.done():
                waiter.set_result(None)
                return

    def _fail_waiters(self, peer: PeerID, error: Exception) -> None:
        """What made one dial fail would make the next one fail as late: do not queue up time-outs."""
        for waiter in self._waiters.get(peer, ()):
            if not waiter.done():
                waiter.set_exception(error)

    def _schedule_sweep(self) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._idle_timeout, self._close_idle)

    def _close_idle(self) -> None:
        self._sweep = None
        too_old = asyncio.get_running_loop().time() - self._idle_timeout
        for connection in [c for c, since in self._idle_since.items() if since <= too_old]:
            self._forget(connection)
            connection.close()
        if self._idle_since:
            self._schedule_sweep()

    def close(self) -> None:
        """Cut every connection; calls in progress fail."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._idle_since):
            self._forget(connection)
            connection.abort()
        for connection in list(self._in_use):
            connection.stream.abort()
        for peer in list(self._waiters):
            self._fail_waiters(peer, ReactorError("this peer is shut down"))
