"""What peers tell each other when they connect, and the time that they compare on the way."""

from __future__ import annotations

import asyncio
import math

import pytest

from shoal.base.clock import SwarmClock
from shoal.net.connection import Hello
from shoal.net.connection_pool import MAX_AGE_SECONDS
from shoal.net.memory import MemoryNetwork
from shoal.p2p import P2P, P2PContext, ServicerBase
from shoal.testing import VirtualTimeLoop
from tests.dht.virtual_time import in_virtual_time
from tests.p2p.peers import Empty

pytestmark = pytest.mark.oldest

ONE_WAY = 0.1


class Slow(ServicerBase):
    async def rpc_think(self, request: Empty, context: P2PContext) -> Empty:
        await asyncio.sleep(5)
        return Empty()


class Two:
    """A peer that serves and one that calls it, as if in different processes."""

    @classmethod
    async def start(cls, ahead: float = 0.0) -> Two:
        two, loop = cls(), asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        network = MemoryNetwork(lambda source, target, size: ONE_WAY)
        two.server = await P2P.create(transport=network.transport())
        two.caller = await P2P.create(transport=network.transport())
        two.server.clock = SwarmClock(lambda: loop.true_time() + ahead, loop.time)
        two.caller.clock = SwarmClock(loop.true_time, loop.time)
        two.caller.add_addresses(two.server.peer_id, two.server.get_addresses(two.server.peer_id))
        await Slow().add_p2p_handlers(two.server)
        return two

    server: P2P
    caller: P2P

    async def call(self) -> None:
        await Slow.get_stub(self.caller, self.server.peer_id).rpc_think(Empty())

    async def end(self) -> None:
        await asyncio.gather(self.server.shutdown(), self.caller.shutdown())


@in_virtual_time
async def test_the_time_that_an_answer_takes_does_not_count():
    two = await Two.start(ahead=42.0)
    await two.call()
    assert two.caller.clock.sources == {two.server.peer_id: pytest.approx(42, abs=1e-5)}
    assert two.caller.book.find(two.server.peer_id).round_trip == pytest.approx(2 * ONE_WAY, abs=1e-5)
    assert two.server.clock.sources == {}, "who was called has not measured anything"
    await two.end()


@in_virtual_time
async def test_connections_are_renewed_so_that_times_are_compared_again():
    two = await Two.start()
    accepted = two.server.server
    began = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < began + 2.5 * MAX_AGE_SECONDS:
        await two.call()
        await asyncio.sleep(20)  # less than after which idle connections are closed
        assert accepted.connection_count <= 1
        heard = next(iter(two.caller.clock.samples.values())).heard_at
        assert asyncio.get_running_loop().time() - heard < MAX_AGE_SECONDS + 60
    await two.end()


@pytest.mark.parametrize("waited", [None, math.nan, math.inf, -math.inf, -1e9, 1e9])
@pytest.mark.parametrize("time", [0.0, math.nan, -math.inf, 1e300])
@in_virtual_time
async def test_nonsense_in_a_greeting_does_no_harm(waited: float | None, time: float):
    two = await Two.start()
    greeting = two.caller.on_hello

    def nonsense(connection, hello: Hello) -> None:
        if connection.round_trip is not None:
            connection.round_trip = math.nan if waited is None else 2 * ONE_WAY - waited
        hello.time = time
        hello.clock_offset = time
        greeting(connection, hello)

    two.caller.on_hello = nonsense
    for _ in range(2):
        await two.call()
    assert two.caller.clock.offset == 0
    assert two.caller.metrics.clock_offset == 0
    await two.end()
