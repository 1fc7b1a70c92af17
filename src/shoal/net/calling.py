"""Calling handlers at other peers, over connections of the pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shoal.access.badges import Roles
from shoal.access.membership import Membership
from shoal.errors import NotAMemberError, ProtocolError
from shoal.metrics import Metrics
from shoal.net.connection import Call
from shoal.net.connection_pool import ConnectionPool
from shoal.net.server import Server
from shoal.net.transport import H, Header
from shoal.peers.identity import PeerID

logger = logging.getLogger(__name__)

LATE_ANSWER_SECONDS = 30.0
"""How long a connection that relays have arranged is kept for an answer that comes too late for the caller."""


class Caller:
    """The half of a peer that calls others."""

    pool: ConnectionPool
    """Connections to others."""
    server: Server
    """Answers on connections that others have opened."""
    membership: Membership | None
    """This peer's place in a private run; ``None`` in an open one."""
    metrics: Metrics
    late_answers: dict[asyncio.Task[Any], None]
    """Calls whose callers have given up, but not their connections."""

    async def call(
        self,
        peer: PeerID,
        handle: str,
        request: Header,
        response_type: type[H],
        timeout: float | None = None,
        *,
        roles: Roles = Roles.TRAIN,
    ) -> H:
        """Call a unary handler at another peer.

        Args:
            timeout: seconds for everything, dialling included; ``None`` = as long as the connection lives.
            roles: in a private run, both sides need one of these.

        Raises:
            P2PHandlerError: the handler raised.
            NotAMemberError: one of both sides may not take part in such a call.
            P2PDaemonError: the peer cannot be reached, the connection broke, or it has no such handler.
            TimeoutError: no answer in time.
        """
        async with asyncio.timeout(timeout):
            call = await self._begin_call(peer, handle, roles)
            if not call.connection.stream.is_arranged:
                return await self._ask(call, request, response_type)
            asking = asyncio.get_running_loop().create_task(self._ask(call, request, response_type))
            try:
                return await asyncio.shield(asking)
            except asyncio.CancelledError:
                self._await_later(asking)
                raise

    async def _ask(self, call: Call, request: Header, response_type: type[H]) -> H:
        try:
            return await call.ask(request, response_type)
        except BaseException as e:
            self._note_failure(call, e)
            raise
        finally:
            self.pool.release(call.connection, reusable=call.clean)

    def _await_later(self, asking: asyncio.Task[Any]) -> None:
        """Wait for an answer that nobody wants any more: there may be no other connection like this one."""
        end = asyncio.get_running_loop().call_later(LATE_ANSWER_SECONDS, asking.cancel)

        def forget(asking: asyncio.Task[Any]) -> None:
            end.cancel()
            del self.late_answers[asking]
            if not asking.cancelled() and (error := asking.exception()) is not None:
                logger.debug("a late answer: %r", error)

        self.late_answers[asking] = None
        asking.add_done_callback(forget)

    @asynccontextmanager
    async def open_call(self, peer: PeerID, handle: str, *, roles: Roles = Roles.TRAIN) -> AsyncIterator[Call]:
        """Call a handler that receives and sends any number of messages; ``roles`` as for :meth:`call`.

        Leaving the block before both sides have ended cuts the connection, which cancels the handler.
        """
        call = await self._begin_call(peer, handle, roles)
        try:
            yield call
        except BaseException as e:
            self._note_failure(call, e)
            raise
        finally:
            self.pool.release(call.connection, reusable=call.clean)

    async def _begin_call(self, peer: PeerID, handle: str, roles: Roles) -> Call:
        if self.membership is not None:
            self.membership.check_own(roles)
        connection = await self.pool.acquire(peer)
        gate = self.server.gate
        try:
            if self.membership is not None:
                self.membership.check(connection.stream.badge, roles, dialled=True)
            if gate is not None and self.server.needs_proof(connection, handle):
                await gate.enter(connection)
        except BaseException as e:
            # Other calls may be allowed on it.
            self.pool.release(connection, reusable=isinstance(e, NotAMemberError) and e.reason == "wrong role")
            raise
        self.metrics.calls_made += 1
        return connection.open_call(handle)

    def _note_failure(self, call: Call, error: BaseException) -> None:
        self.metrics.calls_failed += 1
        if isinstance(error, ProtocolError):
            self.metrics.connections_dropped["broke the protocol"] += 1
            call.connection.abort()
        elif isinstance(error, NotAMemberError) and self.membership is not None:
            self.membership.note_refused(call.remote, error)
