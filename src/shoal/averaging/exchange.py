"""One member's parts for one reducer on their way there, and the averages on their way back.

Over a long link one connection is slow to reach its speed and limited by what may be under way on it. There the parts
are spread over several connections, the stripes: each takes the next part when it is done with the one before, so that
a stripe that is slower than the others carries less. The averages come back in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from shoal.averaging.calls import PEER_FAILURES, all_of, open_patiently, send_part
from shoal.averaging.protocol import BeginReduce, PartMessage, PartStatus
from shoal.averaging.reducer import PartReducer
from shoal.averaging.vector import RoundVector
from shoal.clock import timeout
from shoal.errors import ProtocolError
from shoal.p2p import Call
from shoal.reactor import cancel_and_wait, first_completed

logger = logging.getLogger(__name__)

MAX_STRIPES = 8
SECONDS_PER_STRIPE = 0.0125
"""A stripe for so much of the time to the reducer and back."""
PARTS_PER_STRIPE = 4
"""At least: with fewer parts a further connection does not pay."""


def stripes_for(round_trip: float, parts: int) -> int:
    """Over how many connections parts should travel.

    Args:
        round_trip: seconds to the reducer and back.
    """
    return max(1, min(MAX_STRIPES, round(round_trip / SECONDS_PER_STRIPE), parts // PARTS_PER_STRIPE))


class Exchange:
    """The sender's side.

    Args:
        vector: this member's values.
        reducer: position of the member that reduces the parts.
        open_call: begins a call to it.
        may_end: set when the calls may end: this member holds all averages, of all reducers, or will get no more.
        timeout: seconds without the next average after which it is given up.
        on_delivered: called when all parts are sent.
        on_received: called when all averages are here.
    """

    def __init__(
        self,
        vector: RoundVector,
        reducer: int,
        open_call: Callable[[], AbstractAsyncContextManager[Call]],
        *,
        may_end: asyncio.Event,
        timeout: float,
        on_delivered: Callable[[], None],
        on_received: Callable[[], None],
    ) -> None:
        self._vector, self._reducer, self._parts = vector, reducer, vector.parts[reducer]
        self._open_call, self._may_end, self._timeout = open_call, may_end, timeout
        self._on_delivered, self._on_received = on_delivered, on_received
        self._next = 0
        """The first part that no stripe has taken yet."""
        self._unsent = len(self._parts)
        self._missing = set(range(len(self._parts)))
        self._receiving = 0
        """On how many stripes averages may still come."""

    async def run(self, group_id: bytes, weight: float, stripes: int) -> None:
        """Exchange everything, then wait until the calls may end.

        Raises:
            ProtocolError, P2PDaemonError, P2PHandlerError, TimeoutError: the reducer failed.
        """
        self._receiving = stripes
        begin = [BeginReduce(group_id=group_id, weight=weight, stripe=i, stripes=stripes) for i in range(stripes)]
        await all_of(*[self._run_stripe(each) for each in begin])

    async def _run_stripe(self, begin: BeginReduce) -> None:
        async with open_patiently(self._open_call) as call:
            await call.send(begin)
            await all_of(self._send_parts(call), self._receive_averages(call))
            await self._may_end.wait()
            try:
                await call.send_end()
            except PEER_FAILURES as e:  # everything is here: it does not matter any more
                logger.debug("a call to %s ended badly: %r", call.remote, e)

    async def _send_parts(self, call: Call) -> None:
        while self._next < len(self._parts):
            index, self._next = self._next, self._next + 1
            await send_part(call, index, PartStatus.VALUES, self._vector.encode(self._parts[index]))
            self._unsent -= 1
            if not self._unsent:
                self._on_delivered()
        await call.send(PartMessage(index=0, status=int(PartStatus.NO_MORE)))

    async def _receive_averages(self, call: Call) -> None:
        while True:
            async with timeout(self._timeout):
                message = await call.receive(PartMessage)
                if message is None:
                    break
                if message.index not in self._missing:
                    raise ProtocolError(f"sent an average of part {message.index}, which is not due")
                values = await self._vector.receive(call, message, self._parts[message.index])
            self._missing.remove(message.index)
            self._vector.take(self._reducer, message.index, values, is_delta=message.status == PartStatus.DELTA)
            if not self._missing:
                self._on_received()
        self._receiving -= 1
        if not self._receiving and self._missing:
            raise ProtocolError(f"ended before {len(self._missing)} of its averages")


class Intake:
    """The reducer's side, for one sender.

    Args:
        vector: this member's values; its own parts are those that it reduces.
        own: this member's position.
        sender: the other one's.
        begin: how the sender began.
        timeout: seconds without the next part after which it is given up.
    """

    def __init__(
        self, vector: RoundVector, reducer: PartReducer, own: int, sender: int, begin: BeginReduce, timeout: float
    ) -> None:
        self._vector, self._reducer, self._parts, self._sender = vector, reducer, vector.parts[own], sender
        self._timeout = timeout
        self.weight, self.stripes = begin.weight, begin.stripes
        self.begun: set[int] = set()
        """Stripes that have begun."""
        self.unfinished = begin.stripes
        """How many stripes still have something to exchange."""
        self.open = begin.stripes
        """How many stripes the sender has not ended."""
        self._missing = set(range(len(self._parts)))
        self._taking = begin.stripes
        """On how many stripes parts may still come."""
        self._next_reply = 0

    async def exchange(self, call: Call) -> None:
        """Take parts and give averages on one stripe.

        Raises:
            ProtocolError, P2PDaemonError, TimeoutError: the sender failed.
        """
        await all_of(self._take_parts(call), self._give_averages(call))
        await call.send_end()
        self.unfinished -= 1

    async def _take_parts(self, call: Call) -> None:
        while True:
            async with timeout(self._timeout):
                message = await call.receive(PartMessage)
            if message is None:
                raise ProtocolError("ended before its last part")
            if message.status == PartStatus.NO_MORE:
                break
            if message.status != PartStatus.VALUES or message.index not in self._missing:
                raise ProtocolError(f"sent part {message.index} with status {message.status}, which is not due")
            self._missing.remove(message.index)
            await self._reducer.wait_for_room(message.index)
            async with timeout(self._timeout):
                values = await self._vector.receive(call, message, self._parts[message.index])
            if values is None:
                raise ProtocolError(f"sent part {message.index} without values")
            self._reducer.deliver(self._sender, message.index, values)
        self._taking -= 1
        if not self._taking and self._missing:
            raise ProtocolError(f"ended before {len(self._missing)} of its parts")

    async def _give_averages(self, call: Call) -> None:
        while self._next_reply < len(self._parts):
            index, self._next_reply = self._next_reply, self._next_reply + 1
            encoded, is_delta = await self._reducer.reply(index, self._sender)
            await send_part(call, index, PartStatus.DELTA if is_delta else PartStatus.VALUES, encoded)

    async def wait_for_end(self, call: Call, round_ended: asyncio.Event) -> bool:
        """A sender ends its side when it holds all averages; when the round is over it has to, soon.

        Returns:
            Whether it has ended all its stripes.
        """
        end = asyncio.ensure_future(call.receive(PartMessage))
        try:
            await first_completed(asyncio.shield(end), round_ended.wait())
            async with timeout(self._timeout):
                if await end is not None:
                    raise ProtocolError("more parts than agreed")
        finally:
            await cancel_and_wait(end)
        self.open -= 1
        return not self.open
