"""A member keeps what it sends to several others in step."""

from __future__ import annotations

import asyncio

import pytest

from shoal.averaging.round.sending import MAX_LEAD, MAX_WAIT_SECONDS, STALLED_SECONDS, FlowControl
from tests.dht.virtual_time import in_virtual_time

pytestmark = pytest.mark.once


class Exchange:
    """Sends a number of pieces over some connections, each of which takes some seconds for a piece."""

    def __init__(self, pace: FlowControl, pieces: int, seconds: float, connections: int = 1) -> None:
        self.pieces, self.taken, self.ended = pieces, 0, 0.0
        self.longest_pause = 0.0
        self._seconds, self._connections = seconds, connections
        self._runner = pace.add(self.share_left)

    def share_left(self) -> float:
        return 1 - self.taken / self.pieces

    async def run(self) -> None:
        await asyncio.gather(*[self._send() for _ in range(self._connections)])
        self.ended = asyncio.get_running_loop().time()

    async def _send(self) -> None:
        now = asyncio.get_running_loop().time
        while self.taken < self.pieces:
            started = now()
            self._runner.note_progress()
            await self._runner.wait_for_others()
            self.longest_pause = max(self.longest_pause, now() - started)
            if self.taken < self.pieces:
                self.taken += 1
                await asyncio.sleep(self._seconds)
        self._runner.note_progress()


async def time_of(*exchanges: Exchange) -> list[float]:
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*[exchange.run() for exchange in exchanges])
    return [exchange.ended - began for exchange in exchanges]


@in_virtual_time
async def test_those_that_are_faster_end_with_the_slowest():
    pace = FlowControl()
    slow, fast, many = Exchange(pace, 500, 0.02), Exchange(pace, 500, 0.01), Exchange(pace, 1500, 0.02, connections=4)
    assert await time_of(slow, fast, many) == [pytest.approx(10, rel=0.01)] * 3
    assert many.longest_pause < 0.2  # of any connection: they take turns


@in_virtual_time
async def test_every_connection_sends_something_now_and_then():
    pace = FlowControl()
    slow, fast = Exchange(pace, 100, 0.45), Exchange(pace, 10_000, 0.001, connections=8)
    times = await time_of(slow, fast)
    assert times[0] == pytest.approx(45, rel=0.001)
    assert fast.longest_pause <= MAX_WAIT_SECONDS + 0.001
    assert fast.ended > 40


@in_virtual_time
async def test_nobody_gets_far_ahead():
    pace = FlowControl()
    slow, fast = Exchange(pace, 500, 0.02), Exchange(pace, 500, 0.01, connections=4)
    running = asyncio.gather(slow.run(), fast.run())
    while slow.taken < slow.pieces:
        await asyncio.sleep(0.1)
        assert fast.share_left() >= (1 - MAX_LEAD) * slow.share_left() - 4 / fast.pieces
    await running


@in_virtual_time
async def test_one_that_stalls_is_not_waited_for():
    pace = FlowControl()
    living, dead = Exchange(pace, 1000, 0.01), Exchange(pace, 1000, 0.01)
    stuck = asyncio.ensure_future(dead.run())
    running = asyncio.ensure_future(time_of(living))
    await asyncio.sleep(2)
    stuck.cancel()
    assert await running == [pytest.approx(10 + STALLED_SECONDS, abs=0.6)]


@in_virtual_time
async def test_one_that_comes_to_life_again_is():
    pace = FlowControl()
    fast, stalled = Exchange(pace, 1000, 0.005), Exchange(pace, 1000, 0.005)
    running = asyncio.ensure_future(time_of(fast))
    await asyncio.sleep(2.5)
    assert 250 < fast.taken < 460  # it has waited, and does not any more
    assert await time_of(stalled) == [pytest.approx(5, rel=0.01)]
    assert await running == [pytest.approx(7.5, rel=0.05)]
    assert fast.longest_pause <= MAX_WAIT_SECONDS + 0.001


@in_virtual_time
async def test_nobody_waits_for_one_that_is_over():
    pace, is_over = FlowControl(), asyncio.Event()
    given_up = pace.add(lambda: 0.0 if is_over.is_set() else 1.0)
    exchange = Exchange(pace, 1000, 0.002)
    running = asyncio.ensure_future(time_of(exchange))
    await asyncio.sleep(0.4)
    assert exchange.taken <= 1000 * MAX_LEAD + 1
    is_over.set()
    given_up.note_progress()
    assert await running == [pytest.approx(0.4 + 2 - 0.002 * 1000 * MAX_LEAD, rel=0.01)]  # it goes on at once


@in_virtual_time
async def test_nobody_waits_for_one_whose_connections_have_broken():
    """Neither while it has none, nor while new ones are slow at first."""
    pace = FlowControl()
    broken, exchange = pace.add(lambda: 1.0), Exchange(pace, 1000, 0.002)
    running = asyncio.ensure_future(time_of(exchange))
    await asyncio.sleep(0.4)
    assert exchange.taken <= 1000 * MAX_LEAD + 1
    broken.fall_behind()
    for _ in range(5):
        await asyncio.sleep(0.1)
        broken.note_progress()
    assert await running == [pytest.approx(0.4 + 2 - 0.002 * 1000 * MAX_LEAD, rel=0.01)]


@in_virtual_time
async def test_alone_it_never_waits():
    assert await time_of(Exchange(FlowControl(), 100, 0.01)) == [pytest.approx(1)]
