"""What two members of a round send each other, and on which calls: parts to the reducer, averages back.

*Stripes.* On a long link a single connection speeds up slowly, and its window limits the bytes in flight. There a
sender makes several calls at once. Each of these stripes takes the next slice when it has sent the one before, so a
slow stripe carries less.

*Repetition.* When a connection breaks, the data in flight may be lost. Then the two members tell each other which parts
and averages have not arrived, and these are sent again. So averages are kept until the receiver has said that it holds
them. Parts need not be kept: until the average of a part arrives, the vector still holds its values.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import torch

from shoal.averaging.finite import all_finite
from shoal.averaging.messages import (
    PEER_FAILURES,
    BeginReduce,
    DescribedPart,
    NotFiniteError,
    PartMessage,
    PartStatus,
    Resume,
    describe_part,
)
from shoal.averaging.round.combining import NormClaim
from shoal.averaging.round.parts import Averages, Part, RoundVector
from shoal.averaging.round.reducer import PartReducer
from shoal.averaging.round.sending import (
    BUNDLE_BYTES,
    BUNDLE_PARTS,
    SLICE_BYTES,
    FlowControl,
    OutgoingParts,
    Runner,
    send_all,
)
from shoal.base.logs import quoted
from shoal.base.tasks import all_of, cancel_and_wait, first_completed
from shoal.compression.base import SerializedTensor, bytes_of
from shoal.errors import ProtocolError, StreamClosedError
from shoal.net.resumable import ResumableCall, open_again, open_patiently
from shoal.p2p import Call

logger = logging.getLogger(__name__)

# The most connections to one reducer (chosen): more make no link faster, and each one costs a handshake.
MAX_STRIPES = 8
# One stripe for this many seconds of round-trip time (chosen). If the reducer sends, too, it makes as many of its own.
SECONDS_PER_STRIPE = 0.025
# The least number of parts for each stripe (chosen): a further connection does not pay for fewer.
PARTS_PER_STRIPE = 4


def stripes_for(round_trip: float, parts: int) -> int:
    """The number of connections over which parts should travel.

    Args:
        round_trip: seconds to the reducer and back.
        parts: the number of parts.
    """
    return max(1, min(MAX_STRIPES, round(round_trip / SECONDS_PER_STRIPE), parts // PARTS_PER_STRIPE))


@dataclass
class _Slices:
    """A part with some slices received."""

    buffer: memoryview
    due: set[int]
    """Offsets of the slices that have not started to arrive."""
    left: int
    """The number of bytes that have not arrived."""

    @classmethod
    def of(cls, nbytes: int) -> _Slices:
        """Memory for a part whose first slice is about to be read."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return cls(bytes_of(memory), set(range(0, nbytes, SLICE_BYTES)), nbytes)


class IncomingParts:
    """The parts or averages of one member as they arrive."""

    def __init__(self, vector: RoundVector, parts: list[Part]) -> None:
        self._vector, self._parts = vector, parts
        self.missing = set(range(len(parts)))
        """Indices of the parts that have not arrived completely."""
        self._begun: dict[int, _Slices] = {}

    async def receive(self, call: Call, message: PartMessage) -> Averages:
        """Receive the payload that belongs to a message.

        Returns:
            The values of the parts that are complete now; ``None`` for "unchanged".

        Raises:
            ProtocolError: the message holds something that is not due.
        """
        indices = range(message.index, message.index + len(message.parts))
        if not self.missing.issuperset(indices):
            raise ProtocolError(f"sent parts {indices}, which are not due")
        if len(indices) == 1 and call.payload_size < message.parts[0].nbytes:
            return await self._receive_slice(call, message)
        parts = [self._parts[index] for index in indices]
        is_too_large = len(parts) > 1 and sum(part.nbytes for part in parts) > BUNDLE_BYTES
        if is_too_large or len(parts) > BUNDLE_PARTS or not self._begun.keys().isdisjoint(indices):
            raise ProtocolError(f"sent parts {indices} as a whole")
        self.missing.difference_update(indices)
        try:
            return await self._vector.receive(call, message.parts, parts)
        except BaseException:
            self.missing.update(indices)
            raise

    def gaps(self) -> list[tuple[int, int]]:
        """The parts that have not arrived completely, as ranges in order."""
        gaps: list[tuple[int, int]] = []
        for index in sorted(self.missing):
            if gaps and gaps[-1][1] == index:
                gaps[-1] = (gaps[-1][0], index + 1)
            else:
                gaps.append((index, index + 1))
        return gaps

    def drop_slices(self) -> None:
        """Discard incomplete parts, which are sent again as a whole.

        Each connection carries the next slice, so only a few parts are incomplete at a time.
        """
        self._begun.clear()

    async def _receive_slice(self, call: Call, message: PartMessage) -> Averages:
        index, header, offset = message.index, message.parts[0], message.offset
        part = self._parts[index]
        self._vector.check(header, part)
        if index not in self._begun:
            self._begun[index] = _Slices.of(header.nbytes)
        slices = self._begun[index]
        size = min(SLICE_BYTES, header.nbytes - offset)
        if header.nbytes != len(slices.buffer) or offset not in slices.due or call.payload_size != size:
            raise ProtocolError(f"sent a slice of part {index} which is not due")
        slices.due.remove(offset)
        try:
            await call.read_payload_into(slices.buffer[offset : offset + size])
        except BaseException:
            slices.due.add(offset)
            raise
        slices.left -= size
        if slices.left:
            return []
        del self._begun[index]
        self.missing.remove(index)
        return [self._vector.decode(header, part, slices.buffer)]


# The most bytes of averages kept for one receiver until it says that it holds them (chosen). There are never many more
# in flight, because parts and averages keep in step.
KEPT_BYTES = 2**26


class SentAverages:
    """Averages sent to one receiver, in encoded form, until it says that it holds them.

    Averages of exact codecs are not kept if the vector of this member holds them, too.
    """

    def __init__(self) -> None:
        self._averages: dict[int, DescribedPart] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._averages)

    def get(self, index: int) -> DescribedPart | None:
        return self._averages.get(index)

    def add(self, index: int, average: DescribedPart) -> None:
        self._averages[index] = average
        self._nbytes += average[0].nbytes
        while self._nbytes > KEPT_BYTES:
            self._drop_first()

    def confirm(self, held: int) -> None:
        """Note that the receiver holds this many averages, from the first one on."""
        while self._averages and next(iter(self._averages)) < held:
            self._drop_first()

    def _drop_first(self) -> None:
        self._nbytes -= self._averages.pop(next(iter(self._averages)))[0].nbytes


# The most unsent bytes on a call that shares its work with others (chosen). Few, so that all calls end together.
BACKLOG_BYTES = 2**15


# It has many attributes because there are two directions, each with outgoing, incoming and kept data.
class Traffic:
    """All parts and averages between this member and another one, on the calls of both.

    On short links a member's parts travel on its own calls, and their averages come back on the same calls. On a long
    link every call carries whatever is to be sent next. So all connections are busy from the start, when there are no
    averages yet, to the end, when no parts are left. Parts go first, because the other side needs them to make
    averages; but if too many averages are waiting here, these go first.

    Args:
        vector: this member's values.
        reducer: averages the parts that this member reduces.
        own, other: positions of the two members.
        gives: whether this member sends parts.
        takes: whether the other member sends parts.
        pace: keeps all receivers of this member in step; ``None``: none of them is held back.
        on_not_finite: called when an average is not finite.
        on_delivered: called when all parts have been sent.
        on_received: called when all averages have arrived.
    """

    def __init__(
        self,
        vector: RoundVector,
        reducer: PartReducer,
        own: int,
        other: int,
        *,
        gives: bool,
        takes: bool,
        pace: FlowControl | None,
        on_not_finite: Callable[[], None],
        on_delivered: Callable[[], None],
        on_received: Callable[[], None],
    ) -> None:
        self.vector, self._reducer, self.other = vector, reducer, other
        self._pace, self._on_received, self._on_not_finite = pace, on_received, on_not_finite
        self._runner: Runner | None = None
        theirs, ours = vector.parts[other] if gives else [], vector.parts[own] if takes else []
        self.parts_out = OutgoingParts(
            [part.nbytes for part in theirs],
            self._encode_part,
            lambda index: True,
            _no_wait,
            on_delivered,
            is_average=False,
            held=lambda: vector.held[other],
        )
        self._kept = SentAverages()
        # Averages of exact codecs need not be kept: this member's own vector holds the same.
        self._own, self._holds_averages = own, gives and vector.alpha == 1
        self._given = 0
        self._is_agreed = False
        self.averages_out = OutgoingParts(
            [part.returned.nbytes for part in ours],
            self._encode_average,
            reducer.is_averaged,
            reducer.peek,
            on_sent=lambda: None,
            is_average=True,
            is_urgent=reducer.is_crowded,
            left_out=lambda: reducer.left_out,
        )
        self._count = max(1, len(theirs) + len(ours))
        self.parts_in, self.averages_in = (
            IncomingParts(vector, ours),
            IncomingParts(vector, [each.returned for each in theirs]),
        )
        # The number of calls that may still bring data: this member's own (True) and the other member's (False).
        self._calls = {True: math.inf if theirs else 0, False: math.inf if ours else 0}
        # Set when the other member has announced its weight. Its parts may arrive earlier, on a call of this member.
        self._begun = asyncio.Event()
        self._is_over = False
        # By time limit of a call that awaits a message: how long the limit would be if it started now.
        self._patience: dict[asyncio.Timeout, Callable[[], float]] = {}
        self.heard_at = -math.inf
        """Loop time of the other member's last message."""
        self.came_at = -math.inf
        """Loop time at which the last part or average arrived; ``-inf``: none has."""
        self.bytes_received = 0
        """The bytes of all payloads so far."""

    @property
    def bytes_sent(self) -> int:
        """The bytes of all payloads so far."""
        return self.parts_out.bytes_sent + self.averages_out.bytes_sent

    async def _encode_part(self, index: int) -> DescribedPart:
        part = self.vector.parts[self.other][index]
        return describe_part(PartStatus.VALUES, self.vector.encode(part))

    async def _encode_average(self, index: int) -> DescribedPart:
        if (kept := self._kept.get(index)) is not None:
            return kept
        part = self.vector.parts[self._own][index]
        is_held = self._holds_averages and not part.codec.lossy
        if is_held and index < self._given:
            return describe_part(PartStatus.VALUES, await self._encode_again(index, part))
        encoded, status = await self._reducer.reply(index, self.other)
        average = describe_part(status, encoded)
        self._given = max(self._given, index + 1)
        if not is_held:
            self._kept.add(index, average)
        return average

    async def _encode_again(self, index: int, part: Part) -> SerializedTensor | None:
        if self.vector.held[self._own] > index:
            has_average = self.vector.has_average(self._own, index)
            average = self.vector.values(part) if has_average else None
        else:
            average = await self._reducer.peek(index)  # the reducer still keeps it for this member
        return None if average is None else part.compress(average)

    def begin(self, calls: int, *, own: bool) -> None:
        """Note how many calls begin, either this member's own or the other member's."""
        self._calls[own] = calls
        if not own:
            self._begun.set()
        if calls > 1 and not self.parts_out.in_slices:
            self.parts_out.in_slices = self.averages_out.in_slices = True
            self._runner = self._pace.add(self._share_left) if self._pace else None

    def restart(self, *, own: bool, others: bool) -> None:
        """Prepare for new calls after a connection has broken. All older ones must have ended.

        Args:
            own: whether this member makes new calls.
            others: whether the other one makes new calls, as far as this member knows.
        """
        self.parts_in.drop_slices()
        self.averages_in.drop_slices()
        self._calls = {True: math.inf if own else 0, False: math.inf if others else 0}
        self._is_agreed = False
        if self._runner:
            self._runner.fall_behind()

    def count_calls(self, round_trip: float) -> int:
        """The number of calls that this member makes to the other one, if it makes any."""
        return stripes_for(round_trip, len(self.averages_in.missing))

    def is_awaited(self) -> bool:
        """Whether the other member has not delivered all its parts, or has not confirmed that it did."""
        return self.other in self._reducer.waiting_for

    def excuse(self) -> None:
        """Expect nothing more: the other member has delivered everything, but its last message was lost."""
        self._reducer.delivered_everything(self.other)

    def is_incomplete(self) -> bool:
        """Whether the other member still has something to send."""
        return bool(self.parts_in.missing or self.averages_in.missing)

    def gaps(self) -> Resume:
        """The parts and averages that the other member has to send again, or has not sent yet."""
        return Resume(self.parts_in.gaps(), self.averages_in.gaps())

    def send_missing(self, gaps: Resume) -> bool:
        """Send only what the other member lacks; returns ``False`` if this was already known.

        Raises:
            ProtocolError: the other member cannot lack that.
        """
        if self._is_agreed:
            return False
        self.averages_out.repeat(gaps.missing_averages)
        self.parts_out.repeat(gaps.missing_parts)
        # The average of a part takes the place of its values, so these cannot be sent a second time.
        for start, stop in gaps.missing_parts:
            if not self.averages_in.missing.issuperset(range(start, stop)):
                raise ProtocolError("asks again for parts that it has averaged")
        self._is_agreed = True
        return True

    def _share_left(self) -> float:
        """The share of all parts and averages that is still to be sent, from 0 to 1."""
        left = 0.0 if self._is_over else self.parts_out.left + self.averages_out.left
        return left / self._count

    def stop(self) -> None:
        """Refuse averages that come from now on, and hold no other receiver back for this one."""
        self._is_over = True
        self._note_progress()

    async def send(self, call: Call, usual: OutgoingParts, calls: int) -> None:
        """Send on one of several calls until nothing is left.

        Args:
            usual: what travels on this call if it is the only one.
            calls: the number of calls that share the work.
        """
        if calls == 1:
            await send_all(call, usual)
            return
        stream = call.connection.stream
        stream.limit_backlog(BACKLOG_BYTES)
        try:
            await send_all(call, self.parts_out, self.averages_out, before=self._keep_pace)
        finally:
            stream.limit_backlog(None)
            self._note_progress()

    async def _keep_pace(self) -> None:
        self._note_progress()
        if self._runner:
            await self._runner.wait_for_others()

    def _note_progress(self) -> None:
        if self._runner:
            self._runner.note_progress()

    async def receive(self, call: Call, limit: Callable[[], float]) -> PartMessage | None:
        """Receive parts and averages on one call until the other side has no more to send on it.

        Args:
            limit: tells after how many seconds without the next message to give up.

        Returns:
            The last message, which has no parts; ``None``: the other side has ended the call.

        Raises:
            ProtocolError, P2PDaemonError, P2PHandlerError, TimeoutError: the other member failed.
        """
        while True:
            async with asyncio.timeout(limit()) as patience:
                self._patience[patience] = limit
                try:
                    message = await call.receive(PartMessage)
                finally:
                    del self._patience[patience]
            self.heard_at = asyncio.get_running_loop().time()
            if message is None or not message.parts:
                return message
            if message.held:
                self._kept.confirm(message.held)
            incoming = self._expect(message)
            if incoming is self.parts_in:
                await self._begun.wait()
                await self._reducer.wait_for_room(message.index)
            async with asyncio.timeout(limit()):
                nbytes = call.payload_size
                complete = await incoming.receive(call, message)
            self.bytes_received, self.came_at = self.bytes_received + nbytes, asyncio.get_running_loop().time()
            if incoming is self.parts_in and not incoming.missing:
                # The other calls now wait for averages, which the other member itself may have to wait for.
                for patience, its_limit in self._patience.items():
                    patience.reschedule(self.came_at + its_limit())
            self._take(message, complete)

    def _expect(self, message: PartMessage) -> IncomingParts:
        incoming = self.averages_in if message.is_average else self.parts_in
        statuses = {header.status for header in message.parts}
        is_due = message.is_average or statuses <= {PartStatus.VALUES, PartStatus.UNCHANGED}
        if message.index not in incoming.missing or not is_due:
            raise ProtocolError(f"sent part {message.index} with status {quoted(statuses)}, which is not due")
        return incoming

    def _take(self, message: PartMessage, complete: Averages) -> None:
        if complete and message.is_average and self._is_over:
            raise ProtocolError("sent an average that is no longer awaited")
        if message.is_average:
            self._reducer.left_out.update(index for index in message.left_out if index < len(self.vector.parts))
        for index, (header, values) in enumerate(zip(message.parts, complete, strict=False), message.index):
            if message.is_average:
                self._check_finite(values)
                self.vector.take(self.other, index, values, is_delta=header.status == PartStatus.DELTA)
            else:
                self._reducer.deliver(self.other, index, values)
        if message.is_average and not self.averages_in.missing:
            self._on_received()

    def _check_finite(self, average: torch.Tensor | None) -> None:
        if average is not None and not all_finite(average):
            self._on_not_finite()
            raise NotFiniteError("sent an average that is not finite")

    def end(self, *, own: bool) -> None:
        """Note that nothing more comes on one call.

        Raises:
            ProtocolError: this was the last call, but parts or averages are missing.
        """
        self._calls[own] -= 1
        missing = len(self.parts_in.missing) + len(self.averages_in.missing)
        if missing and not sum(self._calls.values()):
            raise ProtocolError(f"ended before {missing} of its parts and averages had arrived")


async def _no_wait(index: int) -> None:
    await asyncio.sleep(0)


class Delivery:
    """The sender's side, for one reducer.

    Args:
        traffic: what is to be exchanged with the reducer.
        open_call: begins a call to the reducer.
        calls: keeps the calls to the reducer.
        may_end: set when the calls may end: this member holds the averages of all reducers, or will get no more.
        has_news: tells whether this member has news, so that the end of its calls does not mean that the round is over.
        timeout: the reducer is given up after this many seconds without the next average.
    """

    def __init__(
        self,
        traffic: Traffic,
        open_call: Callable[[], AbstractAsyncContextManager[Call]],
        calls: ResumableCall,
        *,
        may_end: asyncio.Event,
        has_news: Callable[[], bool],
        timeout: float,
    ) -> None:
        self._traffic = traffic
        self._open_call, self._may_end, self._timeout = open_call, may_end, timeout
        self._has_news = has_news
        self._calls = calls
        self._stripes = 1
        # After a connection broke: done when the reducer has told, on the first call, what it lacks.
        self._agreement: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def run(self, round_id: bytes, weight: float, stripes: int, claim: NormClaim, generation: int = 0) -> None:
        """Exchange everything, then wait until the calls may end.

        Args:
            generation: how often the exchange has restarted because a connection broke.

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
            # If this call is no longer needed, its failure is harmless. But if it broke, the reducer may be waiting.
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
            raise ProtocolError("does not say what it lacks")
        if self._traffic.send_missing(gaps):
            call.connection.metrics.exchanges_resumed += 1
        if not begin.stripe:
            self._agreement.set_result(True)

    async def _send_until_end(self, call: Call) -> None:
        await self.send_parts(call)
        # The end of this side tells the reducer that all averages have arrived. Waiting for the reducer's own end first
        # would cost another trip over a long link.
        await self._until_may_end(call)
        if self._has_news():
            await call.send(PartMessage())
        await call.send_end()

    async def _until_may_end(self, call: Call) -> None:
        """Wait until the call may end, or has broken. If it broke, the reducer may lack something."""
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
            raise ProtocolError("has nothing left to send, but does not end the call")
        self._traffic.end(own=True)


def check_beginning(begin: BeginReduce, known: Intake | None) -> None:
    """Check a sender's first message on one of its connections.

    Args:
        begin: the message.
        known: the sender's intake, if it has begun on other connections.

    Raises:
        ProtocolError: the message is invalid, or contradicts the other connections.
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
        timeout_for_averages: the limit once all parts have arrived and only averages are in flight.
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
        """Send averages on this stripe."""
        await self._traffic.send(call, self._traffic.averages_out, self.stripes)

    async def wait_for_end(self, call: Call, round_ended: asyncio.Event) -> bool:
        """Wait until the sender ends its side of a stripe, which it does when it holds all averages.

        When the round is over, the sender has to end within the time limit. A sender with news for the coordinator
        announces once more that it has no parts left. Its end then does not mean that all members know the news.

        Returns:
            Whether the sender has now ended all its stripes, and has no news.

        Raises:
            ProtocolError, P2PDaemonError, TimeoutError: the sender failed.
        """
        end = asyncio.ensure_future(call.receive(PartMessage))
        try:
            await first_completed(asyncio.shield(end), round_ended.wait())
            async with asyncio.timeout(self._timeout):
                has_news = (last := await end) is not None
                if last is not None and (last.parts or await call.receive(PartMessage) is not None):
                    raise ProtocolError("more parts than agreed")
        finally:
            await cancel_and_wait(end)
        self.open -= not has_news
        return not self.open
