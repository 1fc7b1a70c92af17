"""Answering calls: one task per accepted connection, and limits on what the peers behind them may take.

Only connections in use keep their place. A connection counts as unused between two calls, before the first message of
a call, and in a call about something that does not exist here yet. Then it gives way to others when all places are
taken. One timer checks all connections every few seconds, so that no message costs a timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.access.badges import ANY_ROLE
from shoal.access.membership import ADVICE, Membership
from shoal.base.logs import Seldom, quoted
from shoal.errors import NotAMemberError, P2PDaemonError, ProtocolError, ShoalError, StreamClosedError
from shoal.metrics import Metrics
from shoal.net.addresses import host_of
from shoal.net.connection import DRAIN_TIMEOUT, NO_HANDLER, NOT_A_MEMBER, REFUSED, Call, CallFailure, Connection
from shoal.net.limits import Limits, more_files
from shoal.net.service import Gate, Handler, P2PContext, receive_only, serve_streams
from shoal.net.transport import READ_STEP_BYTES, Kind, Stream, pack
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr
from shoal.peers.scores import PeerScores

logger = logging.getLogger(__name__)

MEMBERS_ONLY = "only members may call this: give the DHT of this process the authorizer of the swarm"


@dataclass(eq=False, slots=True)
class _Accepted:
    """An accepted connection: the call on it, and when it last showed a sign of life."""

    connection: Connection
    heard_at: float
    """When the caller was last heard; without a call: when the last one ended."""
    call: Call | None = None
    """The call in progress, if its handler runs."""
    is_patient: bool = False
    """Whether the handler has its own time limits, see :func:`~shoal.net.service.patient`."""
    received: int = 0
    """Bytes that had arrived at the last check."""
    is_idle: bool = False
    """It waits for the next call."""
    is_leaving: bool = False
    """It was dropped, but its task has not ended yet: it no longer takes a place, so it has none to give up."""

    @property
    def is_unused(self) -> bool:
        """Whether it may lose its place to another one."""
        return not self.connection.closed and (self.is_idle or (self.call is not None and self.call.yields))

    def await_call(self, now: float) -> None:
        self.is_idle, self.heard_at = True, now

    def begin_call(self, call: Call, now: float, *, is_patient: bool) -> None:
        self.call, self.is_patient, self.heard_at = call, is_patient, now
        self.received = self.connection.stream.received

    def find_fault(self, now: float, limits: Limits) -> str | None:
        """Why it must be dropped, if it takes too long for something."""
        stream = self.connection.stream
        if 0 < self.connection.header_since < now - limits.seconds_for_header:
            return "too slow with a header"
        if self.call is not None and self._is_silent(self.call, now, limits):
            return "silent in a call"
        if 0 < self.connection.writing_since < now - limits.seconds_for_write:
            return "does not read"
        # Arranged connections stay: the caller may be unable to make another one.
        if self.is_idle and self.heard_at < now - limits.seconds_idle and not stream.is_arranged:
            return "idle for too long"
        return None

    def _is_silent(self, call: Call, now: float, limits: Limits) -> bool:
        """Whether a caller has said nothing for too long while its handler waits for it."""
        stream = self.connection.stream
        # Before the first message, single bytes do not count.
        if not stream.is_awaited or (call.has_received and stream.received != self.received):
            self.heard_at = now
        self.received = stream.received
        if call.has_received:
            return not self.is_patient and self.heard_at < now - limits.seconds_of_silence
        # If the first message has begun to arrive, the time limit of its header applies.
        has_begun = self.connection.header_since > 0
        return not has_begun and self.heard_at < now - limits.seconds_for_first_message


class CallServer:
    """Serves the calls of other peers on connections that they have opened.

    Args:
        peer_id: the peer that serves.
        connect: wraps an accepted stream.
        limits: what one peer, and all peers together, may take.
        knows: whether this peer itself calls another peer, or has trained with it.
        behaviour: remembers what others take.
    """

    def __init__(
        self,
        peer_id: PeerID,
        metrics: Metrics,
        limits: Limits,
        connect: Callable[[Stream], Connection],
        knows: Callable[[PeerID], bool],
        behaviour: PeerScores,
    ) -> None:
        self._peer_id = peer_id
        self._metrics = metrics
        self._limits = limits
        self._connect = connect
        self._knows = knows
        self._behaviour = behaviour
        self.handlers: dict[str, Handler] = {}
        """Handlers by their names on the wire."""
        self.gate: Gate | None = None
        """Decides which peers may call them; ``None`` = all."""
        self.membership: Membership | None = None
        """The private run to which others must belong; ``None``: the run is open."""
        self._accepted: dict[asyncio.Task[None], _Accepted] = {}
        self._by_peer: dict[PeerID, dict[Connection, _Accepted]] = {}
        # Tasks that tell peers why they are refused.
        self._refusals: dict[asyncio.Task[None], Stream] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._warn_seldom = Seldom(logger.warning)

    def connections(self) -> list[Connection]:
        """Accepted connections that may carry calls."""
        return [each.connection for each in self._accepted.values()]

    @property
    def connection_count(self) -> int:
        """The number of :attr:`connections`."""
        return len(self._accepted)

    @property
    def idle_count(self) -> int:
        """The number of connections that carry no call at the moment."""
        return sum(each.is_idle for each in self._accepted.values())

    @property
    def refusal_count(self) -> int:
        """Connections that are still being told that they are refused."""
        return len(self._refusals)

    @property
    def peers(self) -> list[PeerID]:
        """The peers that have connected."""
        return list(self._by_peer)

    def connections_of(self, peer: PeerID) -> list[Connection]:
        """Accepted connections of one peer."""
        return list(self._by_peer.get(peer, ()))

    def addresses_of(self, peer: PeerID) -> Iterator[Multiaddr]:
        """Where a peer's direct connections come from, the latest first. A relayed one would show the relay instead."""
        for connection in reversed(self._by_peer.get(peer, {})):
            address = connection.stream.remote_address
            if address is not None and not connection.stream.is_relayed:
                yield address

    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks that serve or refuse connections."""
        return [*self._accepted, *self._refusals]

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
        """Stop serving these handlers; calls in progress continue."""
        for name in names:
            self.handlers.pop(name, None)

    def needs_proof(self, connection: Connection, handle: str) -> bool:
        """Whether both sides must still prove that they are members before this handler is called on a connection."""
        return self.gate is not None and not connection.is_member and self.gate.guards(handle)

    # --- accepting ----------------------------------------------------------------------------------------------------

    def accept(self, stream: Stream) -> None:
        """Serve a peer that has connected, or tell it why it is refused."""
        self._note(stream, connects=True)
        if self.membership is not None:
            try:
                stream.badge = self.membership.admit(stream.remote, stream.shown_badge, dialled=False)
            except NotAMemberError as e:
                self.membership.note_stranger(stream.remote, e)
                self._refuse(stream, "not a member", _tell_stranger(stream, e))
                return
        connection = self._connect(stream)
        reason = self._reason_to_refuse(connection.remote)
        if reason is not None:
            logger.debug("refused a connection of %s: %s", connection.remote, reason)
            self._refuse(stream, reason.partition(":")[0], self._tell_refusal(connection, reason))
            return
        accepted = _Accepted(connection, asyncio.get_running_loop().time())
        self._by_peer.setdefault(connection.remote, {})[connection] = accepted
        self._accepted[self._start(stream, self.serve(accepted), self._forget)] = accepted
        self._schedule_sweep()

    def _note(self, stream: Stream, **what: Any) -> None:
        """Note what a stranger does."""
        if not self._knows(stream.remote):
            address = stream.remote_address
            self._behaviour.note_stranger(host_of(stream.remote, () if address is None else (address,)), **what)

    def _start(
        self, stream: Stream, coroutine: Coroutine[Any, Any, None], forget: Callable[[asyncio.Task[None]], object]
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(forget)
        stream.on_closed(task.cancel)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        connection = self._accepted.pop(task).connection
        if not connection.closed:  # the task was cancelled before it began
            connection.abort()
        self._note(connection.stream, nbytes=connection.stream.received)
        others = self._by_peer[connection.remote]
        del others[connection]
        if not others:
            del self._by_peer[connection.remote]

    def _reason_to_refuse(self, peer: PeerID) -> str | None:
        limits = self._limits
        if len(self._by_peer.get(peer, ())) >= limits.connections_per_peer:
            return f"too many connections of one peer: the limit is {limits.connections_per_peer}"
        places = limits.connections if self._knows(peer) else limits.connections_of_strangers
        taken = sum(not each.is_leaving for each in self._accepted.values())
        if taken >= places and not self._close_longest_idle():
            self._metrics.troubles["no place for a connection"] += 1
            # Not one line for each peer: a crowd of strangers has as many names as it likes.
            self._warn_seldom(
                "no place for a connection of peer %s: the limit is %d, and all are in use. If the swarm is that "
                "large: %s",
                peer,
                places,
                more_files(),
            )
            return f"too many connections: the limit is {places}, and all are in use"
        return None

    def _close_longest_idle(self) -> bool:
        """Close an unused connection, preferably a stranger's; returns whether there was one."""
        unused = [each for each in self._accepted.values() if each.is_unused]
        if not unused:
            return False
        first = min(unused, key=lambda each: (self._knows(each.connection.remote), not each.is_idle, each.heard_at))
        self._drop(first, "idle while others wanted to connect")
        return True

    def _refuse(self, stream: Stream, kind: str, refusal: Coroutine[Any, Any, None]) -> None:
        """Let a coroutine tell a peer why it is refused."""
        self._count_drop(stream, kind)
        if len(self._refusals) >= self._limits.refusals:
            refusal.close()
            stream.abort()
            return
        self._refusals[self._start(stream, refusal, self._forget_refusal)] = stream

    def _forget_refusal(self, task: asyncio.Task[None]) -> None:
        stream = self._refusals.pop(task)
        if not stream.closed:  # the task was cancelled before it began
            stream.abort()

    def _count_drop(self, stream: Stream, reason: str) -> None:
        self._metrics.connections_dropped[reason] += 1
        self._note(stream, is_dropped=True)

    async def _tell_refusal(self, connection: Connection, reason: str) -> None:
        call = Call(connection)
        try:
            await call.send_failure(CallFailure(code=REFUSED, text=reason, is_final=True))
            await call.drain()
        except (ShoalError, asyncio.CancelledError):
            return  # the peer has left, or sends nonsense: nobody will read the reason
        finally:
            connection.abort()

    # --- serving ------------------------------------------------------------------------------------------------------

    async def serve(self, accepted: _Accepted) -> None:
        """Serve calls on one connection until it ends. Its end cancels this task and the handler that is running."""
        connection = accepted.connection
        try:
            while await self._serve_call(accepted, await self._next_call(accepted)):
                pass
            connection.close()
        except ProtocolError as e:
            self._count_drop(connection.stream, "broke the protocol")
            logger.debug("dropped the connection of %s: %s", connection.remote, e)
            connection.close()  # not abort: the reason is still on its way to the peer
        except (StreamClosedError, asyncio.CancelledError):
            connection.abort()

    async def _next_call(self, accepted: _Accepted) -> str:
        accepted.await_call(asyncio.get_running_loop().time())
        try:
            return await accepted.connection.receive_open()
        finally:
            accepted.is_idle = False

    def _refusal(self, connection: Connection, name: str) -> CallFailure | None:
        """The reason not to serve this call, or ``None``."""
        if name not in self.handlers:
            return CallFailure(code=NO_HANDLER, text=name[:200])
        if self.gate is not None and self.needs_proof(connection, name):
            self._metrics.calls_refused["not a member"] += 1
            logger.debug("%s, called by %s: it has not proven that it is a member", name, connection.remote)
            return CallFailure(type=PermissionError.__name__, text=MEMBERS_ONLY)
        if self.membership is not None:
            try:
                self.membership.check(connection.stream.badge, self.handlers[name].method.roles, dialled=False)
            except NotAMemberError as e:
                self._metrics.calls_refused[e.reason] += 1
                logger.debug("%s, called by %s: %s", name, connection.remote, e)
                return CallFailure(code=NOT_A_MEMBER, type=e.reason, text=f"{e}. {ADVICE}")
        return None

    async def _serve_call(self, accepted: _Accepted, name: str) -> bool:
        """Serve one call; returns whether the connection may carry another one."""
        connection = accepted.connection
        call = Call(connection)
        refusal = self._refusal(connection, name)
        if refusal is not None:
            await call.send_failure(refusal)
            await call.drain()
            return call.clean
        self._metrics.calls_served += 1
        connection.handler = name
        badge = connection.stream.badge
        roles = ANY_ROLE if badge is None else badge.roles
        context = P2PContext(handle_name=name, local_id=self._peer_id, remote_id=connection.remote, roles=roles)
        handler = self.handlers[name]
        accepted.begin_call(call, asyncio.get_running_loop().time(), is_patient=handler.method.is_patient)
        try:
            await _run_handler(handler, call, context)
        except ProtocolError as e:
            await call.send_failure(CallFailure.of_error(e, is_final=True))
            raise  # nothing that follows on this connection can be parsed
        except Exception as e:
            if connection.closed:
                raise StreamClosedError("the caller has left") from e
            self._log_handler_error(name, connection.remote, e)
            await call.send_failure(CallFailure.of_error(e))
        finally:
            accepted.call = None
        await call.drain()
        return call.clean

    def _log_handler_error(self, name: str, caller: PeerID, error: Exception) -> None:
        """Log a handler's error. Errors that shoal raises on purpose concern the caller; others are defects here."""
        expected = isinstance(error, ShoalError)
        log = logger.debug if expected else self._warn_seldom
        log("%s, called by %s: %s", name, caller, quoted(error))
        if not expected:
            logger.debug("traceback of %s", name, exc_info=error)

    # --- patience -----------------------------------------------------------------------------------------------------

    def _schedule_sweep(self) -> None:
        if self._sweep is None and self._accepted:
            limits = self._limits
            shortest = min(
                limits.seconds_for_first_message,
                limits.seconds_of_silence,
                limits.seconds_for_header,
                limits.seconds_for_write,
                limits.seconds_idle,
            )
            self._sweep = asyncio.get_running_loop().call_later(shortest / 4, self._drop_who_takes_too_long)

    def _drop_who_takes_too_long(self) -> None:
        self._sweep = None
        for each in list(self._accepted.values()):
            badge = each.connection.stream.badge
            if self.membership is not None and badge is not None and self.membership.has_expired(badge, dialled=False):
                self._drop(each, "its badge has expired")
            elif (fault := each.find_fault(asyncio.get_running_loop().time(), self._limits)) is not None:
                self._drop(each, fault)
        self._schedule_sweep()

    def _drop(self, accepted: _Accepted, reason: str) -> None:
        stream = accepted.connection.stream
        self._count_drop(stream, reason)
        logger.debug("dropped the connection of %s: %s", stream.remote, reason)
        accepted.is_leaving = True
        stream.abort()  # this cancels the task that serves the connection

    def has_arranged(self) -> bool:
        """Whether a peer has a direct connection to this one that a relay arranged."""
        return any(each.stream.is_arranged and not each.closed for each in self.connections())

    def cut(self, is_unwanted: Callable[[Stream], bool], reason: str) -> None:
        """End the connections that are no longer wanted; the handlers on them are cancelled."""
        for each in [each for each in self._accepted.values() if is_unwanted(each.connection.stream)]:
            self._drop(each, reason)

    def cut_idle(self, peer: PeerID) -> None:
        """End the connections of a peer that carry no call, so that its next call begins with a greeting."""
        for each in list(self._by_peer.get(peer, {}).values()):
            if each.is_idle:
                each.connection.stream.abort()

    async def close(self) -> None:
        """Cut every connection and cancel its task."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        tasks = [task for task in self.tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _tell_stranger(stream: Stream, error: NotAMemberError) -> None:
    """Tell a peer that is no member why it is refused. It learns nothing else of this peer, and nothing it sends is
    parsed."""
    failure = CallFailure(code=NOT_A_MEMBER, type=error.reason, text=f"{error}. {ADVICE}", is_final=True)
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT):
            await stream.write(pack(Kind.ERROR, failure, end=True))
            # Closing with unread bytes would reset the connection and lose the reason in flight.
            await stream.read_exactly_into(memoryview(bytearray(READ_STEP_BYTES)))
    except (TimeoutError, StreamClosedError, asyncio.CancelledError):
        return  # it has left, or says too much
    finally:
        stream.on_closed(None)
        stream.abort()


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
