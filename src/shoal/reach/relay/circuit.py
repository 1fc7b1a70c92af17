"""One side of a connection through a relay, from the cookie to the handshake; both sides use it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from shoal.base.tasks import cancel_and_wait
from shoal.errors import DialError, ProtocolError, StreamClosedError
from shoal.net.transport import Session, Stream, Transport, receive_frame
from shoal.peers.identity import PeerID, circuit_address
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.relay.messages import Reach, Ready

logger = logging.getLogger(__name__)

MEETING_SECONDS = 5.0
"""How long the two sides of a circuit wait for each other."""
FIRST_PAUSE, LONGEST_PAUSE = 120.0, 3600.0
"""Seconds after the first failure to get through a router, and after many, until it is tried again: routers rarely
change. Not measured."""


class Abortable(Protocol):
    """A stream, a session or a circuit."""

    def abort(self) -> None:
        """End it now."""


E = TypeVar("E", bound=Abortable)


@dataclass(frozen=True)
class Circuit:
    """One side of a pair of sessions that a relay has joined. Nobody has shaken hands on it."""

    session: Session
    relay: PeerID
    seen_at: Multiaddr | None
    """Where the relay says to see this side; it may lie."""
    other_seen_at: Multiaddr | None
    """Where it says to see the other side."""

    def abort(self) -> None:
        """End it now, unless somebody has taken over the session."""
        self.session.abort()


class Punching(Protocol):
    """Tries for direct connections from the ports of circuits; see :class:`~.outgoing.OutgoingCircuits`."""

    def forget_routers(self) -> None:
        """This machine is behind other routers."""

    def is_worth_it(self, peer: PeerID) -> bool:
        """Whether this peer, as the dialler, should ask for it. If so, sessions are opened as punchable."""

    def expects_success(self, peer: PeerID) -> bool:
        """Whether the routers on both sides have let a connection through before."""

    def note_unpunched(self, peer: PeerID, circuits: Sequence[Circuit]) -> None:
        """There is no punch this time; but circuits show whether one of both sides is elsewhere by now."""

    async def as_dialler(
        self, peer: PeerID, reach: Reach, circuits: Sequence[Circuit], since: float
    ) -> Sequence[asyncio.Future[Stream]]:
        """Exchange candidates on the first circuit, and begin to try.

        Args:
            peer: the other one, whose identity is still to be proven.
            reach: what the relay says of it.
            circuits: on which nothing has been sent yet. Afterwards, the handshake begins on each.
            since: when the dial began, in the time of the loop.

        Returns:
            For each circuit, a future of the first stream on which the other one has proven who it is. It fails with a
            ``DialError`` if there is none. Cancelling it gives up that port.
        """

    async def as_target(self, peer: PeerID, reach: Reach, circuits: Sequence[Circuit]) -> Awaitable[None]:
        """The same as the one who was asked for: ends when the handshakes may begin on the circuits.

        If this side does not want to, it says so in the exchange, for the other one waits for it.

        Returns:
            The punch itself; it hands what connects to ``transport.receive``.
        """


async def open_circuits(
    transport: Transport, relay: PeerID, places: Sequence[Multiaddr], cookies: Sequence[bytes], *, punchable: bool
) -> list[Circuit]:
    """Open sessions to a relay, and wait until it has joined them to those of the other side.

    Raises:
        DialError: there is no circuit.
    """
    opening = [_open_one(transport, relay, places, cookie, punchable=punchable) for cookie in cookies]
    return await successes(opening)


async def _open_one(
    transport: Transport, relay: PeerID, places: Sequence[Multiaddr], cookie: bytes, *, punchable: bool
) -> Circuit:
    session = await _open_session(transport, places, cookie, punchable=punchable)
    try:
        async with asyncio.timeout(MEETING_SECONDS + 1.0):
            ready = await receive_frame(session, Ready)
        return Circuit(session, relay, parse_told(ready.seen_at), parse_told(ready.other_seen_at))
    except (StreamClosedError, TimeoutError) as e:
        session.abort()
        raise DialError(f"through relay {relay}: the other side has not come") from e
    except ProtocolError as e:
        session.abort()
        raise DialError(f"through relay {relay}: {e}") from e
    except BaseException:
        session.abort()
        raise


async def _open_session(
    transport: Transport, places: Sequence[Multiaddr], cookie: bytes, *, punchable: bool
) -> Session:
    """Open a session at the first place where that works."""
    for place in places[:-1]:
        try:
            async with asyncio.timeout(MEETING_SECONDS / 2):
                return await transport.open_session(place, cookie, punchable=punchable)
        except (DialError, TimeoutError) as e:
            logger.debug("no session at %s: %r", place, e)
    return await transport.open_session(places[-1], cookie, punchable=punchable)


def mark_relayed(stream: Stream, place: Multiaddr | None, relay: PeerID) -> None:
    """From here the other side is seen behind its relay, and not at the address of the relay."""
    stream.via = relay
    stream.remote_address = None if place is None else circuit_address(place, relay)


def parse_told(text: str) -> Multiaddr | None:
    """An address that a relay has told, or ``None``: it may say anything."""
    try:
        return Multiaddr(text)
    except ValueError:
        return None


async def successes(work: Sequence[Coroutine[object, object, E]]) -> list[E]:
    """Run coroutines together; the results of those that succeed, in order.

    Raises:
        Exception: all have failed; this is the error of the first one.
    """
    if not work:
        raise DialError("nothing has come of it")
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks)
    except BaseException:
        try:
            await cancel_and_wait(*tasks)
        finally:  # the caller may be cancelled once more, but the tasks have ended all the same
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    task.result().abort()
        raise
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if len(errors) == len(tasks):
        raise errors[0]
    return [task.result() for task in tasks if task.exception() is None]
