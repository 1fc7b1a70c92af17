"""The calls on which one sender and one reducer exchange parts and averages.

On a long link a single connection speeds up slowly, and its window limits how many bytes may be under way. There a
sender makes several calls at once, called stripes. Each stripe takes the next slice when it has sent the one before, so
a slow stripe carries less.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from shoal.averaging.allreduce.combining import NormClaim
from shoal.averaging.allreduce.traffic import Traffic
from shoal.averaging.messages import PEER_FAILURES, BeginReduce, PartMessage, open_patiently
from shoal.errors import ProtocolError
from shoal.p2p import Call
from shoal.p2p.identity import SIGNATURE_BYTES
from shoal.tasks import all_of, cancel_and_wait, first_completed

logger = logging.getLogger(__name__)

# More connections than this make no link faster, and each one costs a handshake.
MAX_STRIPES = 8
# One stripe for each so many seconds of round-trip time. If the reducer sends, too, it makes as many of its own.
SECONDS_PER_STRIPE = 0.025
# A further connection pays only with at least this many parts for it.
PARTS_PER_STRIPE = 4


def stripes_for(round_trip: float, parts: int) -> int:
    """The number of connections over which parts should travel.

    Args:
        round_trip: seconds to the reducer and back.
        parts: the number of parts.
    """
    return max(1, min(MAX_STRIPES, round(round_trip / SECONDS_PER_STRIPE), parts // PARTS_PER_STRIPE))


class Delivery:
    """The sender's side, for one reducer.

    Args:
        traffic: what is to be exchanged with the reducer.
        open_call: begins a call to the reducer.
        may_end: set when the calls may end: this member holds the averages of all reducers, or will get no more.
        timeout: the reducer is given up after so many seconds without the next average.
        take_signature: called with the reducer's signature over its averages; ``None``: it signs nothing.
    """

    def __init__(
        self,
        traffic: Traffic,
        open_call: Callable[[], AbstractAsyncContextManager[Call]],
        *,
        may_end: asyncio.Event,
        timeout: float,
        take_signature: Callable[[bytes], None] | None = None,
    ) -> None:
        self._traffic, self._take_signature = traffic, take_signature
        self._open_call, self._may_end, self._timeout = open_call, may_end, timeout
        self._stripes = 1

    async def run(self, round_id: bytes, weight: float, stripes: int, claim: NormClaim) -> None:
        """Exchange everything, then wait until the calls may end.

        Raises:
            ProtocolError, P2PDaemonError, P2PHandlerError, TimeoutError: the reducer failed.
        """
        self._stripes = stripes
        self._traffic.begin(stripes, own=True)
        norms, statement = [*claim.norms], claim.statement
        begin = [BeginReduce(round_id, weight, i, stripes, norms, statement) for i in range(stripes)]
        await all_of(*[self.run_stripe(each) for each in begin])

    async def run_stripe(self, begin: BeginReduce) -> None:
        """Exchange everything that travels on one connection."""
        async with open_patiently(self._open_call) as call:
            await call.send(begin)
            try:
                await all_of(self._send_until_end(call), self._receive_averages(call))
            except PEER_FAILURES as e:
                if not self._may_end.is_set():
                    raise
                # Nothing more is expected of this call, so its failure does no harm.
                logger.debug("a call to %s ended badly: %r", call.remote, e)

    async def _send_until_end(self, call: Call) -> None:
        await self.send_parts(call)
        # The end of this side tells the reducer that everything is here. It is sent without waiting for the reducer's
        # own end, which would cost another trip over a long link.
        await self._may_end.wait()
        await call.send_end()

    async def send_parts(self, call: Call) -> None:
        """Send the values of this member."""
        await self._traffic.send(call, self._traffic.parts_out, self._stripes)
        await call.send(PartMessage())

    async def _receive_averages(self, call: Call) -> None:
        end = await self._traffic.receive(call, lambda: self._timeout)
        if self._take_signature is not None:
            if end is None or call.payload_size != SIGNATURE_BYTES:
                raise ProtocolError("has not signed the averages that it gave")
            self._take_signature(bytes(await call.read_payload(SIGNATURE_BYTES)))
            end = await self._traffic.receive(call, lambda: self._timeout)
        if end is not None:
            raise ProtocolError("has no more to send, but does not end")
        self._traffic.end(own=True)


class Intake:
    """The reducer's side, for one sender.

    Args:
        traffic: what is to be exchanged with the sender.
        begin: the sender's first message.
        timeout: the sender is given up after so many seconds without the next part.
        timeout_for_averages: the same limit once all parts are here and only averages are still on their way.
        sign: makes a signature over the averages, once all have been sent; ``None``: they are not signed.
    """

    def __init__(
        self,
        traffic: Traffic,
        begin: BeginReduce,
        timeout: float,
        timeout_for_averages: float,
        sign: Callable[[], bytes] | None = None,
    ) -> None:
        self._traffic = traffic
        self.sign = sign
        """Makes a signature over the averages that the sender has got; ``None``: they are not signed."""
        self._timeout, self._timeout_for_averages = timeout, timeout_for_averages
        self.weight, self.stripes = begin.weight, begin.stripes
        self.begun: set[int] = set()
        """The stripes that have begun, by number."""
        self.unfinished = begin.stripes
        """The number of stripes that still have something to exchange."""
        self.open = begin.stripes
        """The number of stripes that the sender has not ended."""
        traffic.begin(begin.stripes, own=False)

    async def exchange(self, call: Call) -> None:
        """Receive parts and send averages on one stripe.

        Raises:
            ProtocolError, P2PDaemonError, TimeoutError: the sender failed.
        """
        await all_of(self._take_parts(call), self.give_averages(call))
        if self.sign is not None:
            await call.send(PartMessage(), self.sign())
        await call.send_end()
        self.unfinished -= 1

    async def _take_parts(self, call: Call) -> None:
        if await self._traffic.receive(call, self._limit) is None:
            raise ProtocolError("ended before its last part")
        self._traffic.end(own=False)

    def _limit(self) -> float:
        return self._timeout if self._traffic.parts_in.missing else self._timeout_for_averages

    async def give_averages(self, call: Call) -> None:
        """Send the averages that belong on this stripe."""
        await self._traffic.send(call, self._traffic.averages_out, self.stripes)

    async def wait_for_end(self, call: Call, round_ended: asyncio.Event) -> bool:
        """Wait until the sender ends its side of a stripe, which it does when it holds all averages.

        When the round is over, the sender has to end within the time limit.

        Returns:
            Whether the sender has now ended all its stripes.

        Raises:
            ProtocolError, P2PDaemonError, TimeoutError: the sender failed.
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
