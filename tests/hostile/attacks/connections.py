"""Strangers who take places, and say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from shoal.averaging.messages import BeginReduce
from shoal.net.connection import CallFailure
from shoal.net.transport import PREFIX_BYTES, Kind, pack
from shoal.p2p import Call
from tests.hostile.attacker import FAILURES, PATIENCE, Attacker

CALLS, HEADERS, AT_ONCE = 1024, 64, 32
HEADER_BYTES = 2**20 - 2**10


async def _hold(me: Attacker, count: int, first_word: Callable[[Call], Awaitable[object]]) -> None:
    """Keep so many calls to a peer open; whenever one is ended, another one is made."""
    [peer, *_] = await me.victims()
    turns, opened = asyncio.Semaphore(AT_ONCE), 0

    async def keep_open() -> None:
        nonlocal opened
        while True:
            try:
                async with AsyncExitStack() as stack:
                    async with turns, asyncio.timeout(PATIENCE):
                        call = await stack.enter_async_context(me.averager(peer).rpc_reduce())
                        await first_word(call)
                    opened += 1
                    await call.receive(CallFailure)
            except FAILURES:
                # Most of them are refused when there is no place left: that is the end of the first wave.
                opened += 1
            if opened >= count:
                me.has_struck.set()
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(keep_open())
        await asyncio.sleep(PATIENCE)
        me.has_struck.set()


async def opens_calls_and_says_nothing(me: Attacker) -> None:
    """A stranger. 1,024 calls, and no word on any. Those who take part must still be able to call."""
    await _hold(me, CALLS, lambda call: call.connection.flush())


async def announces_headers_that_never_come(me: Attacker) -> None:
    """A stranger. 64 times "a megabyte follows", and nothing follows. Large messages of others must be read."""
    prefix = pack(Kind.ITEM, CallFailure(text="z" * HEADER_BYTES))[:PREFIX_BYTES]

    async def announce(call: Call) -> None:
        await call.connection.flush()
        await call.connection.stream.write(prefix)

    await _hold(me, HEADERS, announce)


async def means_rounds_that_nobody_knows(me: Attacker) -> None:
    """A stranger. 1,024 calls for rounds that do not exist. Members that call a moment early must not be refused."""
    rng = me.p2p.rng
    await _hold(me, CALLS, lambda call: call.send(BeginReduce(round_id=rng.randbytes(21), weight=1.0)))
