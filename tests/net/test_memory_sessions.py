"""Sessions in memory: cookies, handshakes through a relay, joining, and punches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from shoal.errors import DialError, IdentityMismatchError, InterruptedDialError, StreamClosedError
from shoal.net.memory import MemoryNetwork, MemoryTransport
from shoal.net.transport import COOKIE_SECONDS, Session, Splice, Stream, Throttle
from shoal.peers.identity import Identity
from shoal.peers.multiaddr import Multiaddr
from shoal.testing import run

COOKIE = bytes(32)
OTHER_COOKIE = bytes(31) + b"\1"
ONE_WAY = 0.03


class Unlimited(Throttle):
    def take(self, nbytes: int) -> float:
        return 0.0


class Steady(Throttle):
    """So many bytes per second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def take(self, nbytes: int) -> float:
        return nbytes / self.rate


class Three:
    """Two peers and one between them, who joins their sessions."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(lambda source, target, size: ONE_WAY)
        self.dialler, self.relay, self.target = (
            MemoryTransport(self.network, Identity.generate(random.Random(number))) for number in range(3)
        )
        self.address = Multiaddr("/memory/1")
        self.joining: asyncio.Task[None] | None = None

    async def sessions(self, throttle: Throttle | None = None, idle: float = 100.0) -> tuple[Session, Session]:
        """The outer ends of a circuit."""
        [self.address] = await self.relay.listen(self.network.new_address(), lambda stream: None)
        expected = [self.relay.expect_session(cookie) for cookie in (COOKIE, OTHER_COOKIE)]
        first = await self.dialler.open_session(self.address, COOKIE, punchable=True)
        second = await self.target.open_session(self.address, OTHER_COOKIE, punchable=True)
        inner = [await each for each in expected]
        assert [each.remote_address for each in inner] == [first.local_address, second.local_address]
        self.joining = asyncio.ensure_future(Splice(inner[0], inner[1], throttle or Unlimited(), idle).run())
        return first, second

    async def streams(self) -> tuple[Stream, Stream]:
        """A stream from the dialler to the target, through the relay."""
        first, second = await self.sessions()
        accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self.target.receive(second, accepted.set_result)
        return await self.dialler.authenticate(first, self.target.identity.peer_id), await accepted


def simulated(test: Callable[[Three], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def main() -> None:
        await test(Three())

    def test_it() -> None:
        run(main())

    test_it.__name__, test_it.__doc__ = test.__name__, test.__doc__
    return test_it


def now() -> float:
    return asyncio.get_running_loop().time()


@simulated
async def test_the_two_ends_of_a_circuit_learn_who_they_are(three: Three) -> None:
    near, far = await three.streams()
    assert near.remote == three.target.identity.peer_id
    assert far.remote == three.dialler.identity.peer_id
    await near.write(b"to and")
    await far.write(b"fro")
    there, back = bytearray(6), bytearray(3)
    await far.read_exactly_into(memoryview(there))
    await near.read_exactly_into(memoryview(back))
    assert (there, back) == (b"to and", b"fro")
    near.close()
    assert three.joining is not None
    await three.joining
    await asyncio.sleep(ONE_WAY)
    assert far.closed


@simulated
async def test_another_peer_than_the_expected_one_is_not_taken(three: Three) -> None:
    first, second = await three.sessions()
    three.target.receive(second, pytest.fail)
    with pytest.raises(IdentityMismatchError, match="wrong identity"):
        await three.dialler.authenticate(first, three.relay.identity.peer_id)
    await asyncio.sleep(1)
    with pytest.raises(StreamClosedError):
        await first.write(b"")


@simulated
async def test_silence_and_an_early_end_fail_as_dials_do(three: Three) -> None:
    first, second = await three.sessions()
    with pytest.raises(DialError, match="no answer within"):
        await three.dialler.authenticate(first, three.target.identity.peer_id)
    three.target.receive(second, pytest.fail)
    near, far = await three.sessions()
    far.abort()
    with pytest.raises(InterruptedDialError):
        await three.dialler.authenticate(near, three.target.identity.peer_id)


@simulated
async def test_a_cookie_is_good_once_and_for_some_seconds(three: Three) -> None:
    [address] = await three.relay.listen(three.network.new_address(), lambda stream: None)
    expired = three.relay.expect_session(OTHER_COOKIE)
    began = now()
    await asyncio.wait([expired])
    assert expired.cancelled()
    assert now() - began == COOKIE_SECONDS
    expected = three.relay.expect_session(COOKIE)
    await three.dialler.open_session(address, COOKIE)
    assert (await expected).local_address == address
    for cookie in (COOKIE, OTHER_COOKIE):
        session = await three.dialler.open_session(address, cookie)
        with pytest.raises(StreamClosedError):
            await session.read_exactly(1)
    with pytest.raises(DialError, match="nothing listens"):
        await three.dialler.open_session(Multiaddr("/memory/99"), COOKIE)
    await three.relay.close()


@simulated
async def test_joined_sessions_obey_the_throttle_and_end_when_idle(three: Three) -> None:
    first, second = await three.sessions(Steady(1000.0), idle=5.0)
    began = now()
    for _ in range(10):
        await first.write(bytes(100))
    await second.read_exactly(1000)
    assert now() - began == pytest.approx(0.9 + 2 * ONE_WAY)
    with pytest.raises(StreamClosedError):
        await second.read_exactly(1)
    # The last bytes came to the relay one way earlier, and paused there no longer than the idle time.
    assert now() - began == pytest.approx(0.9 + 5.0 + 2 * ONE_WAY)


@simulated
async def test_ports_that_punch_each_other_meet_once(three: Three) -> None:
    first, second = await three.sessions()
    assert first.local_address is not None
    assert second.local_address is not None

    async def found(transport: MemoryTransport, session: Session, other: Multiaddr) -> list[Session]:
        async with aclosing(transport.punch(session, [other], 2.5)) as punch:
            return [each async for each in punch]

    (near,), (far,) = await asyncio.gather(
        found(three.dialler, first, second.local_address), found(three.target, second, first.local_address)
    )
    await near.write(b"direct")
    assert await far.read_exactly(6) == b"direct"
    accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
    three.target.receive(far, accepted.set_result)
    stream = await three.dialler.authenticate(near, three.target.identity.peer_id)
    assert stream.remote_address == second.local_address
    assert (await accepted).remote == three.dialler.identity.peer_id
    assert await found(three.dialler, first, second.local_address) == []
