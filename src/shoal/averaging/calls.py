"""What calls between the members of a round have in common: how they fail, and how parts travel on them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from shoal.averaging.messages import PartHeader, PartStatus, RoundKind, RoundMessage
from shoal.compression.base import SerializedTensor
from shoal.errors import DialError, InterruptedDialError, P2PDaemonError, P2PHandlerError, ProtocolError
from shoal.p2p import Call
from shoal.p2p.transport import Buffer

# How a call to another peer fails.
CALL_FAILURES = (P2PDaemonError, P2PHandlerError, ProtocolError, TimeoutError)
# What another member can do to this one; none of it may end the round.
PEER_FAILURES = (*CALL_FAILURES, ValueError, RuntimeError)

MAX_DIALS = 3
# Seconds before a dial is repeated the first time.
REDIAL_PAUSE = 0.1
# Seconds after which it is not repeated any more: who answers nothing has been waited for long enough.
REDIAL_WITHIN = 2.0
# Both limits are so many times as large if something has answered and the connection broke, which is mostly chance.
ANSWERED_FACTOR = 2
# How often a member shows that it lives within the time after which it would be given up.
ALIVE_PER_TIMEOUT = 3

PartKey = tuple[int, int]
"""A reducer and the index of one of its parts."""


def reason_of(error: BaseException) -> str:
    """Why a member failed, in words."""
    if isinstance(error, TimeoutError):
        return "silent for too long"
    if isinstance(error, asyncio.CancelledError):
        return "the connection ended"
    return str(error) or type(error).__name__


DescribedPart = tuple[PartHeader, "tuple[Buffer, ...]"]


def describe_part(status: PartStatus, encoded: SerializedTensor | None) -> DescribedPart:
    """A part's header and its bytes; ``None`` = there is no average, the receiver keeps its values."""
    if encoded is None:
        return PartHeader(int(PartStatus.UNCHANGED)), ()
    return PartHeader(int(status), encoded.metadata, len(encoded.buffer)), (encoded.buffer,)


@asynccontextmanager
async def open_patiently(open_call: Callable[[], AbstractAsyncContextManager[Call]]) -> AsyncIterator[Call]:
    """A call to another member; a dial that fails quickly is repeated, as long as nothing has been sent."""
    now = asyncio.get_running_loop().time
    begun = now()
    async with AsyncExitStack() as stack:
        for attempt in itertools.count(1):
            try:
                call = await stack.enter_async_context(open_call())
                break
            except DialError as e:
                factor = ANSWERED_FACTOR if isinstance(e, InterruptedDialError) else 1
                if attempt >= factor * MAX_DIALS or now() - begun > factor * REDIAL_WITHIN:
                    raise
                await asyncio.sleep(attempt * REDIAL_PAUSE)
        yield call


class Line:
    """A call on which several tasks send: whole messages, one after another."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._lock = asyncio.Lock()

    async def send(self, message: RoundMessage, *payload: Buffer, end: bool = False) -> None:
        async with self._lock:
            await self.call.send(message, *payload, end=end)

    async def send_part(self, key: PartKey, encoded: SerializedTensor | None) -> None:
        """Send one part; ``None`` = there is no average."""
        reducer, index = key
        part, payload = describe_part(PartStatus.VALUES, encoded)
        await self.send(RoundMessage(kind=RoundKind.PART, reducer=reducer, index=index, part=part), *payload)


async def show_life(line: Line, silence: float) -> None:
    """Show the other side that this one lives, for ever; it would be given up after so many seconds of silence."""
    while True:
        await asyncio.sleep(silence / ALIVE_PER_TIMEOUT)
        await line.send(RoundMessage(kind=RoundKind.ALIVE))
