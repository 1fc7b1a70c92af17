"""One member's calls to one reducer, and the reducer's side of them.

Over a long link one connection is slow to reach its speed and limited by what may be under way on it. There a member
makes several calls, the stripes, and each takes the next slice when it is done with the one before, so that a stripe
that is slower than the others carries less (:mod:`shoal.averaging.allreduce.sending`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from shoal.averaging.allreduce.sending import Traffic
from shoal.averaging.calls import PEER_FAILURES, open_patiently
from shoal.averaging.messages import BeginReduce, PartMessage
from shoal.errors import ProtocolError
from shoal.p2p import Call
from shoal.tasks import all_of, cancel_and_wait, first_completed

logger = logging.getLogger(__name__)

MAX_STRIPES = 8
# A stripe for so much of the time to the reducer and back; the reducer makes as many, if it sends, too.
SECONDS_PER_STRIPE = 0.025
# A connection needs at least so many parts to pay.
PARTS_PER_STRIPE = 4


def stripes_for(round_trip: float, parts: int) -> int:
    """Over how many connections parts should travel.

    Args:
        round_trip: seconds to the reducer and back.
    """
    return max(1, min(MAX_STRIPES, round(round_trip / SECONDS_PER_STRIPE), parts // PARTS_PER_STRIPE))


class Exchange:
    """The sender's side.

    Args:
        traffic: what is to be exchanged with the reducer.
        open_call: begins a call to it.
        may_end: set when the calls may end: this member holds all averages, of all reducers, or will get no more.
        timeout: seconds without the next average after which it is given up.
    """

    def __init__(
        self,
        traffic: Traffic,
        open_call: Callable[[], AbstractAsyncContextManager[Call]],
        *,
        may_end: asyncio.Event,
        timeout: float,
    ) -> None:
        self._traffic = traffic
        self._open_call, self._may_end, self._timeout = open_call, may_end, timeout
        self._stripes = 1

    async def run(self, group_id: bytes, weight: float, stripes: int) -> None:
        """Exchange everything, then wait until the calls may end.

        Raises:
            ProtocolError, P2PDaemonError, P2PHandlerError, TimeoutError: the reducer failed.
        """
        self._stripes = stripes
        self._traffic.begin(stripes, own=True)
        begin = [BeginReduce(group_id=group_id, weight=weight, stripe=i, stripes=stripes) for i in range(stripes)]
        await all_of(*[self._run_stripe(each) for each in begin])

    async def _run_stripe(self, begin: BeginReduce) -> None:
        async with open_patiently(self._open_call) as call:
            await call.send(begin)
            try:
                await all_of(self._send_until_end(call), self._receive_averages(call))
            except PEER_FAILURES as e:
                if not self._may_end.is_set():
                    raise
                # Everything is here: it does not matter.
                logger.debug("a call to %s ended badly: %r", call.remote, e)

    async def _send_until_end(self, call: Call) -> None:
        """The end says that everything is here: over a long link it is not to wait for the reducer's own end."""
        await self._send_parts(call)
        await self._may_end.wait()
        await call.send_end()

    async def _send_parts(self, call: Call) -> None:
        await self._traffic.send(call, self._traffic.parts_out, self._stripes)
        await call.send(PartMessage())

    async def _receive_averages(self, call: Call) -> None:
        if await self._traffic.receive(call, lambda: self._timeout) is not None:
            raise ProtocolError("has no more to send, but does not end")
        self._traffic.end(own=True)


class Intake:
    """The reducer's side, for one sender.

    Args:
        traffic: what is to be exchanged with the sender.
        begin: how the sender began.
        timeout: seconds without the next part after which it is given up.
        timeout_for_averages: the same when all parts are here.
    """

    def __init__(self, traffic: Traffic, begin: BeginReduce, timeout: float, timeout_for_averages: float) -> None:
        self._traffic = traffic
        self._timeout, self._timeout_for_averages = timeout, timeout_for_averages
        self.weight, self.stripes = begin.weight, begin.stripes
        self.begun: set[int] = set()
        """Stripes that have begun."""
        self.unfinished = begin.stripes
        """How many stripes still have something to exchange."""
        self.open = begin.stripes
        """How many stripes the sender has not ended."""
        traffic.begin(begin.stripes, own=False)

    async def exchange(self, call: Call) -> None:
        """Take parts and give averages on one stripe.

        Raises:
            ProtocolError, P2PDaemonError, TimeoutError: the sender failed.
        """
        await all_of(self._take_parts(call), self._give_averages(call))
        await call.send_end()
        self.unfinished -= 1

    async def _take_parts(self, call: Call) -> None:
        if await self._traffic.receive(call, self._limit) is None:
            raise ProtocolError("ended before its last part")
        self._traffic.end(own=False)

    def _limit(self) -> float:
        return self._timeout if self._traffic.parts_in.missing else self._timeout_for_averages

    async def _give_averages(self, call: Call) -> None:
        await self._traffic.send(call, self._traffic.averages_out, self.stripes)

    async def wait_for_end(self, call: Call, round_ended: asyncio.Event) -> bool:
        """A sender ends its side when it holds all averages; when the round is over it has to, soon.

        Returns:
            Whether it has ended all its stripes.
        """
        end = asyncio.ensure_future(call.receive(PartMessage))
        try:
            await first_completed(asyncio.shield(end), round_ended.wait())
            async with asyncio.timeout(self._timeout):
                if await end is not None:
                    raise ProtocolError("more parts than agreed")
        finally:
            await cancel_and_wait(end)
        self.open -= 1
        return not self.open
