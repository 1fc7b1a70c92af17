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

from shoal.averaging.messages import PEER_FAILURES, BeginReduce, PartMessage, Resume
from shoal.averaging.round.combining import NormClaim
from shoal.averaging.round.traffic import MAX_STRIPES, Traffic
from shoal.base.tasks import all_of, cancel_and_wait, first_completed
from shoal.errors import ProtocolError, StreamClosedError
from shoal.net.resumable import ResumableCall, open_again, open_patiently
from shoal.p2p import Call

logger = logging.getLogger(__name__)


class Delivery:
    """The sender's side, for one reducer.

    Args:
        traffic: what is to be exchanged with the reducer.
        open_call: begins a call to the reducer.
        calls: keeps the calls to the reducer.
        may_end: set when the calls may end: this member holds the averages of all reducers, or will get no more.
        timeout: the reducer is given up after this many seconds without the next average.
    """

    def __init__(
        self,
        traffic: Traffic,
        open_call: Callable[[], AbstractAsyncContextManager[Call]],
        calls: ResumableCall,
        *,
        may_end: asyncio.Event,
        timeout: float,
    ) -> None:
        self._traffic = traffic
        self._open_call, self._may_end, self._timeout = open_call, may_end, timeout
        self._calls = calls
        self._stripes = 1
        # After a connection broke: whether the reducer has told on the first call what it lacks.
        self._agreement: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def run(self, round_id: bytes, weight: float, stripes: int, claim: NormClaim, generation: int = 0) -> None:
        """Exchange everything, then wait until the calls may end.

        Args:
            generation: how often this begins anew because a connection broke.

        Raises:
            StreamClosedError: a connection broke.
            ProtocolError, P2PDaemonError, P2PHandlerError, TimeoutError: the reducer failed.
        """
        self._stripes = stripes
        self._agreement = asyncio.get_running_loop().create_future()
        self._traffic.begin(stripes, own=True)
        begin = [
            BeginReduce(round_id, weight, i, stripes, [*claim.norms], claim.statement, generation)
            for i in range(stripes)
        ]
        if generation:
            gaps = self._traffic.gaps()
            for each in begin:
                each.lacks = gaps
        await all_of(*[self.run_stripe(each) for each in begin])

    async def run_stripe(self, begin: BeginReduce) -> None:
        """Exchange everything that travels on one connection."""
        is_first_again = begin.resume > 0 and not begin.stripe
        if begin.resume and begin.stripe and not await asyncio.shield(self._agreement):
            return
        try:
            async with self._open(is_again=is_first_again) as call:
                with self._calls.calls.watching(call):
                    await call.send(begin)
                    if begin.resume:
                        await self._agree(call, begin)
                    await all_of(self._send_until_end(call), self._receive_averages(call))
        except PEER_FAILURES as e:
            # If nothing more is expected of this call, its failure does no harm. But if it broke, the reducer may wait.
            lacks_nothing = not self._traffic.averages_in.missing
            is_harmless = self._may_end.is_set() or (begin.resume > 0 and lacks_nothing)
            if isinstance(e, StreamClosedError) or not is_harmless:
                raise
            if is_first_again and not self._agreement.done():
                self._agreement.set_result(False)
            logger.debug("a call to a reducer ended badly: %r", e)

    def _open(self, *, is_again: bool) -> AbstractAsyncContextManager[Call]:
        return open_again(self._open_call, self) if is_again else open_patiently(self._open_call)

    def is_heard(self) -> bool:
        """Whether the reducer is worth waiting for: not if the calls may end."""
        return not self._may_end.is_set() and self._calls.is_heard()

    def has_come_after(self, moment: float) -> bool:
        return self._calls.has_come_after(moment)

    async def _agree(self, call: Call, begin: BeginReduce) -> None:
        """Hear from the reducer what it lacks."""
        async with asyncio.timeout(self._timeout):
            gaps = await call.receive(Resume)
        if gaps is None:
            raise ProtocolError("does not say what has not come")
        if self._traffic.send_missing(gaps):
            call.connection.metrics.exchanges_resumed += 1
        if not begin.stripe:
            self._agreement.set_result(True)

    async def _send_until_end(self, call: Call) -> None:
        await self.send_parts(call)
        # The end of this side tells the reducer that everything is here. It is sent without waiting for the reducer's
        # own end, which would cost another trip over a long link.
        await self._until_may_end(call)
        await call.send_end()

    async def _until_may_end(self, call: Call) -> None:
        """Wait until the call may end, or has broken: the reducer may lack something then."""
        broken, stream = asyncio.Event(), call.connection.stream
        stream.on_closed(broken.set)
        try:
            await first_completed(self._may_end.wait(), broken.wait())
        finally:
            stream.on_closed(None)

    async def send_parts(self, call: Call) -> None:
        """Send the values of this member."""
        await self._traffic.send(call, self._traffic.parts_out, self._stripes)
        await call.send(PartMessage())

    async def _receive_averages(self, call: Call) -> None:
        if await self._traffic.receive(call, lambda: self._timeout) is not None:
            raise ProtocolError("has no more to send, but does not end")
        self._traffic.end(own=True)


def check_beginning(begin: BeginReduce, known: Intake | None) -> None:
    """Check how a sender begins on one of its connections.

    Args:
        known: what is known from its other connections.

    Raises:
        ProtocolError: that cannot be, or contradicts what is known.
    """
    if not 0 <= begin.weight < float("inf"):
        raise ProtocolError(f"weight {begin.weight} is not a non-negative number")
    if not 0 <= begin.stripe < begin.stripes <= MAX_STRIPES:
        raise ProtocolError(f"stripe {begin.stripe} of {begin.stripes} does not exist")
    if known is not None and known.generation == begin.resume and begin.stripe in known.begun:
        raise ProtocolError("this member has begun before")
    stripes = begin.stripes if known is None or known.generation < begin.resume else known.stripes
    if known is not None and (known.weight, stripes) != (begin.weight, begin.stripes):
        raise ProtocolError("the stripes of this member contradict each other")


class Intake:
    """The reducer's side, for one sender.

    Args:
        traffic: what is to be exchanged with the sender.
        begin: the sender's first message.
        timeout: the sender is given up after this many seconds without the next part.
        timeout_for_averages: the same limit once all parts are here and only averages are still on their way.
    """

    def __init__(
        self,
        traffic: Traffic,
        begin: BeginReduce,
        timeout: float,
        timeout_for_averages: float,
    ) -> None:
        self._traffic, self.generation = traffic, begin.resume
        self._gaps = begin.lacks
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
        if self.generation:
            if self._traffic.send_missing(self._gaps):
                call.connection.metrics.exchanges_resumed += 1
            await call.send(self._traffic.gaps())
        await all_of(self._take_parts(call), self.give_averages(call))
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
