"""Sessions inside one process: the same contract as over TCP, with pipes instead of sockets.

The two ends of a session may be far apart, joined by a relay. So both sides of a handshake tell each other in-band who
they are. Nobody in this process lies about that, so there are no keys and no encryption; the messages and the round
trips are those of :mod:`~.tcp.handshake`::

    dialler ► listener    hello
    listener ► dialler    peer id
    dialler ► listener    go on
    listener ► dialler    badge
    dialler ► listener    peer id, badge
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

from shoal.access.badges import MAX_BADGE_BYTES
from shoal.access.membership import Membership, judge_listener
from shoal.base.tasks import cancel_and_wait
from shoal.errors import DialError, IdentityMismatchError, InterruptedDialError, StreamClosedError
from shoal.net.pipes import PipeEnd
from shoal.net.transport import COOKIE_SECONDS, HANDSHAKE_TIMEOUT, Session, Throttle
from shoal.peers.identity import MAX_PEER_ID_BYTES, Identity, PeerID
from shoal.peers.multiaddr import Multiaddr

_LENGTH = struct.Struct(">H")


class MemorySession(Session):
    """One end of a pipe on which nobody has said who it is."""

    def __init__(self, end: PipeEnd, local: Multiaddr, remote: Multiaddr, *, punchable: bool = False) -> None:
        self.local_address, self.remote_address = local, remote
        self.is_punchable = punchable
        end.local_address, end.remote_address = local, remote
        self._end = end
        self._is_taken = False

    async def write(self, data: bytes) -> None:
        await self._end.write(data)

    async def read_exactly(self, size: int) -> bytes:
        data = bytearray(size)
        await self._end.read_exactly_into(memoryview(data))
        return bytes(data)

    def abort(self) -> None:
        if not self._is_taken:
            self._end.abort()

    def take_over(self) -> PipeEnd:
        """The pipe, for its next user."""
        assert not self._is_taken, "a session is taken over once"
        self._is_taken = True
        return self._end


class Expectations:
    """The cookies that a peer has given away, and who waits for the sessions."""

    def __init__(self) -> None:
        self._expected: dict[bytes, asyncio.Future[Session]] = {}

    def expect(self, cookie: bytes) -> asyncio.Future[Session]:
        """See :meth:`Transport.expect_session`."""
        loop = asyncio.get_running_loop()
        assert cookie not in self._expected, "a cookie is random and good once"
        future: asyncio.Future[Session] = loop.create_future()
        timer = loop.call_later(COOKIE_SECONDS, future.cancel)

        def forget(_: object) -> None:
            timer.cancel()
            self._expected.pop(cookie, None)

        self._expected[cookie] = future
        future.add_done_callback(forget)
        return future

    def meet(self, cookie: bytes, session: Session) -> None:
        """Hand a session to the side that expects it; end it if none does."""
        future = self._expected.pop(cookie, None)
        if future is None or future.done():
            session.abort()
        else:
            future.set_result(session)

    def clear(self) -> None:
        """Expect nobody any more."""
        for future in list(self._expected.values()):
            future.cancel()


# --- handshake --------------------------------------------------------------------------------------------------------


async def _send(end: PipeEnd, *parts: bytes) -> None:
    await end.write(*(piece for part in parts for piece in (_LENGTH.pack(len(part)), part)))


async def _read(end: PipeEnd, most: int) -> bytes:
    head = bytearray(_LENGTH.size)
    await end.read_exactly_into(memoryview(head))
    (size,) = _LENGTH.unpack(head)
    if size > most:
        raise ValueError(f"{size} bytes where at most {most} are allowed")
    data = bytearray(size)
    await end.read_exactly_into(memoryview(data))
    return bytes(data)


async def prove_on_pipe(
    end: PipeEnd, identity: Identity, expected_peer: PeerID, membership: Membership | None, address: Multiaddr | None
) -> None:
    """The dialler's half of the handshake.

    Raises:
        IdentityMismatchError: another peer answers.
        NotAMemberError: that peer and this one are not of one run.
        DialError: no peer answers, or not in time.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            await _send(end, b"")
            found = PeerID(await _read(end, MAX_PEER_ID_BYTES))
            if found != expected_peer:
                text = f"{address}: wrong identity: peer {found} answers there, not {expected_peer}"
                raise IdentityMismatchError(text)
            await _send(end, b"")
            end.badge = judge_listener(membership, expected_peer, await _read(end, MAX_BADGE_BYTES))
            badge = b"" if membership is None else membership.shown_badge()
            await _send(end, identity.peer_id.to_bytes(), badge)
            end.remote = expected_peer
    except BaseException as e:
        end.abort()
        if isinstance(e, TimeoutError):
            raise DialError(f"{address}: no answer within {HANDSHAKE_TIMEOUT:g} s") from e
        if isinstance(e, StreamClosedError):
            raise InterruptedDialError(f"{address}: the connection was closed during the handshake") from e
        if isinstance(e, ValueError):
            raise DialError(f"{address}: something else answers there: {e}") from e
        raise


async def meet_dialler(end: PipeEnd, identity: Identity, membership: Membership | None) -> bool:
    """The listener's half of the handshake; returns whether somebody has said who it is. If not, the pipe has ended."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            await _read(end, 0)
            await _send(end, identity.peer_id.to_bytes())
            await _read(end, 0)
            await _send(end, b"" if membership is None else membership.shown_badge())
            end.remote = PeerID(await _read(end, MAX_PEER_ID_BYTES))
            end.shown_badge = await _read(end, MAX_BADGE_BYTES)
    except (TimeoutError, StreamClosedError, ValueError):
        end.abort()
        return False
    except BaseException:
        end.abort()
        raise
    return True


# --- joining ----------------------------------------------------------------------------------------------------------


class MemorySplice:
    """Copies bytes between two pipes, both ways."""

    def __init__(self, first: PipeEnd, second: PipeEnd, throttle: Throttle, idle_seconds: float) -> None:
        self._ends = (first, second)
        self._throttle = throttle
        self._idle_seconds = idle_seconds
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()

    async def run(self) -> None:
        """Copy until one of them ends, or neither moves for some time; end both."""
        first, second = self._ends
        ways = [self._loop.create_task(self._copy(*ends)) for ends in ((first, second), (second, first))]
        try:
            while (left := self._moved_at + self._idle_seconds - self._loop.time()) > 0:
                done, _ = await asyncio.wait(ways, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    break
        finally:
            await cancel_and_wait(*ways)
            for end in self._ends:
                end.close()

    async def _copy(self, source: PipeEnd, target: PipeEnd) -> None:
        while (data := await source.read_some()) is not None:
            self._moved_at = self._loop.time()
            pause = self._throttle.take(len(data))
            await target.write(data)
            if pause > 0:
                await asyncio.sleep(pause)


# --- punching ---------------------------------------------------------------------------------------------------------


class PunchPort:
    """The local port of a session, while its owner tries to connect from there and listens there.

    Args:
        address: the port.
        candidates: where it tries to connect to.
    """

    def __init__(self, address: Multiaddr, candidates: Sequence[Multiaddr]) -> None:
        self.address, self.candidates = address, tuple(candidates)
        self._met: set[Multiaddr] = set()
        self._found: list[MemorySession] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    def may_meet(self, other: PunchPort) -> bool:
        """Note that two ports meet; ``False`` if they have met before: between two ports there is one connection."""
        if other is self or other.address in self._met:
            return False
        self._met.add(other.address)
        other._met.add(self.address)
        return True

    def connected(self, session: MemorySession) -> None:
        """There is a connection from or to this port."""
        if self._is_closed:
            session.abort()
            return
        self._found.append(session)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, end: float) -> MemorySession | None:
        """The next connection; ``None`` if there is none until the end, in the time of the loop."""
        loop = asyncio.get_running_loop()
        while not self._found:
            left = end - loop.time()
            if left <= 0:
                return None
            self._waiter = loop.create_future()
            await asyncio.wait([self._waiter], timeout=left)
        return self._found.pop(0)

    def close(self) -> None:
        """Drop what nobody has asked for, and whatever comes later."""
        self._is_closed = True
        for session in self._found:
            session.abort()
