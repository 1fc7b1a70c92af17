"""Answering calls: one task per accepted connection, and limits on what the peers behind them may take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from shoal.errors import P2PDaemonError, ProtocolError, ShoalError, StreamClosedError
from shoal.metrics import Metrics
from shoal.p2p.connection import NO_HANDLER, REFUSED, Call, Connection, Failure
from shoal.p2p.identity import PeerID
from shoal.p2p.limits import Limits
from shoal.p2p.service import Gate, Handler, P2PContext, receive_only, serve_streams
from shoal.p2p.transport import Stream

logger = logging.getLogger(__name__)

MAX_NAME_CHARACTERS = 200
MEMBERS_ONLY = "only members may call this: give the DHT of this process the authorizer of the swarm"
# Connections at a time that are still being told that they are refused.
MAX_REFUSALS = 64
# How often the shortest time limit is looked at before it can be over.
SWEEPS = 4


class Server:
    """Serves the calls that other peers make on connections that they have opened.

    Args:
        peer_id: who serves.
        connect: wraps an accepted stream.
        limits: what one peer, and all of them together, may take.
        knows: whether this peer calls another one itself.
    """

    def __init__(
        self,
        peer_id: PeerID,
        metrics: Metrics,
        limits: Limits,
        connect: Callable[[Stream], Connection],
        knows: Callable[[PeerID], bool],
    ) -> None:
        self._peer_id = peer_id
        self._metrics = metrics
        self._limits = limits
        self._connect = connect
        self._knows = knows
        self.handlers: dict[str, Handler] = {}
        """By their names on the wire."""
        self.gate: Gate | None = None
        """What decides who may call them; without it everybody may."""
        self._tasks: dict[Connection, asyncio.Task[None]] = {}
        self._by_peer: dict[PeerID, dict[Connection, None]] = {}
        self._idle_since: dict[Connection, float] = {}  # in this order
        self._refusals: dict[Connection, asyncio.Task[None]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def connection_count(self) -> int:
        """Accepted connections that may carry calls."""
        return len(self._tasks)

    @property
    def peers(self) -> list[PeerID]:
        """Who has connected."""
        return list(self._by_peer)

    def connections_of(self, peer: PeerID) -> list[Connection]:
        """Accepted connections of one peer."""
        return list(self._by_peer.get(peer, ()))

    def tasks(self) -> list[asyncio.Task[None]]:
        """What is being served."""
        return [*self._tasks.values(), *self._refusals.values()]

    # --- handlers -----------------------------------------------------------------------------------------------------

    def add_handlers(self, handlers: Mapping[str, Handler]) -> None:
        """Serve handlers by name.

        Raises:
            P2PDaemonError: one of the names is taken.
        """
        for name in handlers:
            if name in self.handlers:
                raise P2PDaemonError(f"handler {name} is registered already: use another namespace or prefix")
        self.handlers.update(handlers)

    def remove_handlers(self, names: Iterable[str]) -> None:
        """Stop serving these handlers; calls in progress go on."""
        for name in names:
            self.handlers.pop(name, None)

    def needs_proof(self, connection: Connection, handle: str) -> bool:
        """Whether both sides must prove that they are members before this is called on a connection of theirs."""
        return self.gate is not None and not connection.is_member and self.gate.guards(handle)

    # --- accepting ----------------------------------------------------------------------------------------------------

    def accept(self, stream: Stream) -> None:
        """Serve a peer that has connected, or tell it why not."""
        connection = self._connect(stream)
        reason = self._reason_to_refuse(connection.remote)
        if reason is not None:
            self._refuse(connection, reason)
            return
        self._by_peer.setdefault(connection.remote, {})[connection] = None
        self._tasks[connection] = self._start(connection, self._serve(connection), self._forget)
        self._schedule_sweep()

    def _start(
        self,
        connection: Connection,
        coroutine: Coroutine[Any, Any, None],
        forget: Callable[[Connection], None],
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(lambda _: forget(connection))
        connection.stream.on_closed(task.cancel)
        return task

    def _forget(self, connection: Connection) -> None:
        if not connection.closed:  # the task was cancelled before it began
            connection.abort()
        del self._tasks[connection]
        self._idle_since.pop(connection, None)
        others = self._by_peer[connection.remote]
        del others[connection]
        if not others:
            del self._by_peer[connection.remote]

    def _reason_to_refuse(self, peer: PeerID) -> str | None:
        limits = self._limits
        if len(self._by_peer.get(peer, ())) >= limits.connections_per_peer:
            return f"too many connections of one peer: the limit is {limits.connections_per_peer}"
        places = limits.connections if self._knows(peer) else limits.connections_of_strangers
        if len(self._tasks) >= places and not self._close_longest_idle():
            return f"too many connections: the limit is {places}, and all are in use"
        return None

    def _close_longest_idle(self) -> bool:
        connection = next(iter(self._idle_since), None)
        if connection is None:
            return False
        self._drop(connection, "idle while others wanted to connect")
        return True

    def _refuse(self, connection: Connection, reason: str) -> None:
        self._metrics.connections_dropped[reason.partition(":")[0]] += 1
        logger.debug("refused a connection of %s: %s", connection.remote, reason)
        if len(self._refusals) >= MAX_REFUSALS:
            connection.abort()
            return
        refusal = self._tell_refusal(connection, reason)
        self._refusals[connection] = self._start(connection, refusal, self._refusals.__delitem__)

    async def _tell_refusal(self, connection: Connection, reason: str) -> None:
        call = Call(connection)
        try:
            await call.send_failure(Failure(code=REFUSED, text=reason, is_final=True))
            await call.drain()
        except (ShoalError, asyncio.CancelledError):
            return  # it has left, or sends nonsense: nobody wants to know the reason
        finally:
            connection.abort()

    # --- serving ------------------------------------------------------------------------------------------------------

    async def _serve(self, connection: Connection) -> None:
        """Serve calls on one connection until it ends. Its end cancels this task, and with it a handler at work."""
        try:
            while await self._serve_call(connection, await self._next_call(connection)):
                pass
            connection.close()
        except ProtocolError as e:
            self._metrics.connections_dropped["broke the protocol"] += 1
            logger.debug("dropped the connection of %s: %s", connection.remote, e)
            connection.close()  # not abort: why it was dropped is on its way
        except (StreamClosedError, asyncio.CancelledError):
            connection.abort()

    async def _next_call(self, connection: Connection) -> str:
        self._idle_since[connection] = asyncio.get_running_loop().time()
        try:
            return await connection.receive_open()
        finally:
            self._idle_since.pop(connection, None)

    def _refusal(self, connection: Connection, name: str) -> Failure | None:
        """Why this call is not served, if so."""
        if name not in self.handlers:
            return Failure(code=NO_HANDLER, text=name[:MAX_NAME_CHARACTERS])
        if self.needs_proof(connection, name):
            self._metrics.calls_refused["not a member"] += 1
            logger.debug("%s, called by %s: it has not proven that it is a member", name, connection.remote)
            return Failure(type=PermissionError.__name__, text=MEMBERS_ONLY)
        return None

    async def _serve_call(self, connection: Connection, name: str) -> bool:
        """Serve one call; returns whether the connection may carry another one."""
        call = Call(connection)
        refusal = self._refusal(connection, name)
        if refusal is not None:
            await call.send_failure(refusal)
            await call.drain()
            return call.clean
        self._metrics.calls_served += 1
        connection.handler = name
        context = P2PContext(handle_name=name, local_id=self._peer_id, remote_id=connection.remote)
        try:
            await _run_handler(self.handlers[name], call, context)
        except ProtocolError as e:
            await call.send_failure(Failure.of_error(e, is_final=True))
            raise  # what follows on this connection can no longer be understood
        except Exception as e:
            if connection.closed:
                raise StreamClosedError("the caller has left") from e
            _log_handler_error(name, connection.remote, e)
            await call.send_failure(Failure.of_error(e))
        await call.drain()
        return call.clean

    # --- patience -----------------------------------------------------------------------------------------------------

    def _schedule_sweep(self) -> None:
        if self._sweep is None and self._tasks:
            limits = self._limits
            shortest = min(limits.seconds_for_header, limits.seconds_for_write, limits.seconds_idle)
            self._sweep = asyncio.get_running_loop().call_later(shortest / SWEEPS, self._drop_who_takes_too_long)

    def _drop_who_takes_too_long(self) -> None:
        self._sweep = None
        now, limits = asyncio.get_running_loop().time(), self._limits
        for connection in list(self._tasks):
            if 0 < connection.header_since < now - limits.seconds_for_header:
                self._drop(connection, "too slow with a header")
            elif 0 < connection.writing_since < now - limits.seconds_for_write:
                self._drop(connection, "does not read")
            elif 0 < self._idle_since.get(connection, 0) < now - limits.seconds_idle:
                self._drop(connection, "idle for too long")
        self._schedule_sweep()

    def _drop(self, connection: Connection, reason: str) -> None:
        self._metrics.connections_dropped[reason] += 1
        logger.debug("dropped the connection of %s: %s", connection.remote, reason)
        connection.stream.abort()  # which cancels the task that serves it

    async def close(self) -> None:
        """Cut every connection and cancel what is being served."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        tasks = [task for task in self.tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_handler(handler: Handler, call: Call, context: P2PContext) -> None:
    method = handler.method
    if method.request_type is None:
        await handler.function(call, context)
        await call.send_end()
        return
    if method.is_streaming:
        await serve_streams(handler, call, context)
        return
    request = await receive_only(call, method.request_type, context.handle_name)
    response = await handler.function(request, context)
    if response is None:
        raise P2PDaemonError(f"{context.handle_name} does not answer this peer")
    await call.send(response, end=True)


def _log_handler_error(name: str, caller: PeerID, error: Exception) -> None:
    """What shoal raises on purpose is the caller's news; anything else is a defect on this side."""
    expected = isinstance(error, ShoalError)
    logger.log(logging.DEBUG if expected else logging.WARNING, "%s, called by %s: %r", name, caller, error)
    if not expected:
        logger.debug("traceback of %s", name, exc_info=error)
