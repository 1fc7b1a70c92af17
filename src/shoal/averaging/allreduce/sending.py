"""What two members of a round send each other: parts to the reducer, averages back to the sender.

*Bundles.* Several small parts travel in one message. Models have many tensors of some hundred values, and with codecs
that look at a tensor as a whole each of them is a part of its own. A message for each would cost more than its bytes.

*Slices.* Over long links a large part travels in slices, over several connections at once. Connections that share a
slow link are slow. If each carried whole parts, the last parts would end at very different times, and the link would be
half idle meanwhile. With slices all connections end together.

*Pace.* All connections of a member share one uplink, and TCP does not share it equally. Some receivers would be done
early. The few connections to the rest cannot fill the link and speed up slowly, so the link would be half idle, and the
round takes as long as its last receiver. So a receiver that is ahead is held back until the others catch up
(:class:`Pace`). Nobody waits for a receiver that makes no progress at all. And a connection that is held back still
carries something now and then, or the other side would take this one for dead.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from shoal.averaging.allreduce.parts import Averages, Part, RoundVector
from shoal.averaging.allreduce.reducer import PartReducer
from shoal.averaging.finite import all_finite
from shoal.averaging.messages import DescribedPart, PartMessage, PartStatus, describe_part
from shoal.compression.base import bytes_of
from shoal.errors import ProtocolError
from shoal.p2p import Call
from shoal.p2p.transport import Buffer

# The length of a TLS record.
SLICE_BYTES = 2**14
# Parts that take no more than this together travel in one message.
BUNDLE_BYTES = 2**19
# The most parts in one message: their descriptions have to fit into its header.
BUNDLE_PARTS = 256


Piece = tuple[PartMessage, "tuple[Buffer, ...]"]

# A member is ahead if it has this much less left to receive than the one that has most left (0.08: eight percent less).
# A smaller lead would hold back all members but one, and the connections to that one alone cannot fill the link.
MAX_LEAD = 0.08
# Nobody waits for a receiver to which no piece could be sent for so many seconds.
STALLED_SECONDS = 0.5
# A connection is held back for at most so many seconds before it may send another piece.
MAX_WAIT_SECONDS = 1.0


class Pace:
    """Keeps the receivers of one member in step. Lives for one round."""

    def __init__(self) -> None:
        self._runners: list[Runner] = []

    def add(self, share_left: Callable[[], float]) -> Runner:
        """Add a receiver.

        Args:
            share_left: tells which share of its data has not been sent yet, from 0 to 1.
        """
        self._runners.append(Runner(self, share_left))
        return self._runners[-1]

    def least_left(self) -> float:
        """The limit: a receiver that has a smaller share left is ahead."""
        stalled_since = asyncio.get_running_loop().time() - STALLED_SECONDS
        moving = [each.share_left() for each in self._runners if each.moved_at > stalled_since]
        return (1 - MAX_LEAD) * max(moving, default=0.0)

    def wake(self) -> None:
        """Let connections go on whose receivers are not ahead any more."""
        waiting = [runner for runner in self._runners if runner.waiting]
        # This runs for every piece, so the limit is computed only if a connection waits.
        least_left = self.least_left() if waiting else 0.0
        for runner in waiting:
            if runner.share_left() >= least_left:
                runner.go_on()


class Runner:
    """One receiver in a pace: what is sent to it, over any number of connections."""

    def __init__(self, pace: Pace, share_left: Callable[[], float]) -> None:
        self._pace, self.share_left = pace, share_left
        self.moved_at = asyncio.get_running_loop().time()
        self.waiting: list[asyncio.Future[None]] = []
        """Connections that are held back."""

    def note_progress(self) -> None:
        """Note that the receiver got the next piece, or will get no more."""
        self.moved_at = asyncio.get_running_loop().time()
        self._pace.wake()

    def go_on(self) -> None:
        """Let every waiting connection send at least one more piece."""
        for turn in self.waiting:
            if not turn.done():
                turn.set_result(None)
        self.waiting = []

    async def wait_for_others(self) -> None:
        """Wait while this receiver is ahead of the others, but at most ``MAX_WAIT_SECONDS``."""
        if self.share_left() >= self._pace.least_left():
            return
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(MAX_WAIT_SECONDS):
                    await turn
        finally:
            with suppress(ValueError):  # go_on has taken it off the list
                self.waiting.remove(turn)


class Outgoing:
    """Parts for one receiver, in order. Any number of connections take them piece by piece.

    Args:
        sizes: the size of each part in bytes.
        encode: encodes the part with a given index; does not wait if the part is there.
        is_there: tells whether the part with a given index can be encoded now.
        wait: waits until it can.
        on_sent: called when all pieces have been sent.
        is_average: whether these are averages, rather than parts to reduce.
        is_urgent: tells whether the part with a given index must go before everything else.
    """

    def __init__(
        self,
        sizes: Sequence[float],
        encode: Callable[[int], Awaitable[DescribedPart]],
        is_there: Callable[[int], bool],
        wait: Callable[[int], Awaitable[object]],
        on_sent: Callable[[], None],
        *,
        is_average: bool,
        is_urgent: Callable[[int], bool] = lambda index: False,
    ) -> None:
        self._is_average, self._is_urgent = is_average, is_urgent
        self._sizes = sizes
        self.count = len(sizes)
        """The number of all parts."""
        self._encode, self._is_there, self._wait, self._on_sent = encode, is_there, wait, on_sent
        self.in_slices = False
        """Large parts are cut into slices, because they travel over several connections."""
        self._next = 0
        # The pieces of the bundle that was encoded last.
        self._pieces: deque[Piece] = deque()
        self._pieces_per_part = 1
        self._under_way = 0

    @property
    def left(self) -> float:
        """The number of parts that no connection has taken, with a fraction for the one that is partly taken."""
        return self.count - self._next + len(self._pieces) / self._pieces_per_part

    @property
    def is_taken(self) -> bool:
        """Whether connections have taken all pieces."""
        return self._next == self.count and not self._pieces

    @property
    def is_ready(self) -> bool:
        """Whether the next piece can be sent now."""
        return bool(self._pieces) or (self._next < self.count and self._is_there(self._next))

    @property
    def is_urgent(self) -> bool:
        """Whether the next piece must go before everything else. It must be ready."""
        return self._is_urgent(self._next)

    async def wait(self) -> None:
        """Wait until the next piece is ready."""
        await self._wait(self._next)

    async def send_next(self, call: Call) -> None:
        """Send the next piece, which must be ready."""
        if not self._pieces:
            # Moved before anything is awaited, so that no other connection takes the same parts.
            first, self._next = self._next, self._end_of_bundle()
            pieces = list(self._cut(first, [await self._encode(index) for index in range(first, self._next)]))
            self._pieces.extend(pieces)
            self._pieces_per_part = len(pieces)
        message, payload = self._pieces.popleft()
        self._under_way += 1
        await call.send(message, *payload)
        self._under_way -= 1
        if self.is_taken and not self._under_way:
            self._on_sent()

    def _end_of_bundle(self) -> int:
        """The index after the last part that travels in one message with the next one."""
        left = (SLICE_BYTES if self.in_slices else BUNDLE_BYTES) - self._sizes[self._next]
        end = min(self.count, self._next + BUNDLE_PARTS)
        for index in range(self._next + 1, end):
            left -= self._sizes[index]
            if left < 0 or not self._is_there(index):
                return index
        return end

    def _cut(self, first: int, encoded: Sequence[DescribedPart]) -> Iterator[Piece]:
        headers = [header for header, _ in encoded]
        payload = tuple(buffer for _, buffers in encoded for buffer in buffers)
        if not self.in_slices or len(headers) > 1 or headers[0].nbytes <= SLICE_BYTES:
            yield PartMessage(first, headers, self._is_average), payload
            return
        whole = memoryview(payload[0])
        for offset in range(0, len(whole), SLICE_BYTES):
            yield PartMessage(first, headers, self._is_average, offset), (whole[offset : offset + SLICE_BYTES],)


async def send_all(call: Call, *sources: Outgoing, before: Callable[[], Awaitable[object]] | None = None) -> None:
    """Send pieces on one connection until the connections have taken them all.

    A ready piece of the first source goes first, unless another source has an urgent one.

    Args:
        before: called before each piece; may wait.
    """
    while waiting := [source for source in sources if not source.is_taken]:
        ready = [source for source in waiting if source.is_ready]
        if not ready:
            await waiting[0].wait()
            continue
        chosen = max(ready, key=lambda source: source.is_urgent)
        if before is not None:
            await before()
            if not chosen.is_ready:  # meanwhile another connection has taken it
                continue
        await chosen.send_next(call)


@dataclass
class _Slices:
    """A part of which some slices have come."""

    buffer: memoryview
    due: set[int]
    """Offsets of the slices that have not begun to come."""
    left: int
    """The number of bytes that have not come."""

    @classmethod
    def of(cls, nbytes: int) -> _Slices:
        """Memory for a part whose first slice is about to be read."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return cls(bytes_of(memory), set(range(0, nbytes, SLICE_BYTES)), nbytes)


class Incoming:
    """The parts or averages of one member as they arrive."""

    def __init__(self, vector: RoundVector, parts: list[Part]) -> None:
        self._vector, self._parts = vector, parts
        self.missing = set(range(len(parts)))
        """Indices of the parts that are not completely here."""
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
        return await self._vector.receive(call, message.parts, parts)

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
        await call.read_payload_into(slices.buffer[offset : offset + size])
        slices.left -= size
        if slices.left:
            return []
        del self._begun[index]
        self.missing.remove(index)
        return [self._vector.decode(header, part, slices.buffer)]


# The most bytes that wait unsent on a call that shares its work with others. Little, so that all calls end together.
BACKLOG_BYTES = 2**15


class Traffic:
    """All parts and averages between this member and another one, on the calls of both.

    On short links a member's parts travel on its own calls, and their averages come back on the same calls. On a long
    link every call carries whatever is to be sent next. So all connections are busy from the beginning, when there are
    no averages yet, to the end, when no parts are left. Parts go first, because the other side needs them to make
    averages; but if too many averages wait here, these go first.

    Args:
        vector: this member's values.
        reducer: averages the parts that this member reduces.
        own, other: positions of the two members.
        gives: whether this member sends parts.
        takes: whether the other member sends parts.
        pace: keeps all receivers of this member in step; ``None``: none of them is held back.
        on_not_finite: called when an average is not finite.
        on_delivered: called when all parts are sent.
        on_received: called when all averages are here.
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
        pace: Pace | None,
        on_not_finite: Callable[[], None],
        on_delivered: Callable[[], None],
        on_received: Callable[[], None],
    ) -> None:
        self.vector, self._reducer, self.other = vector, reducer, other
        self._pace, self._on_received, self._on_not_finite = pace, on_received, on_not_finite
        self._runner: Runner | None = None
        theirs, ours = vector.parts[other] if gives else [], vector.parts[own] if takes else []
        self.parts_out = Outgoing(
            [part.nbytes for part in theirs],
            self._encode_part,
            lambda index: True,
            _no_wait,
            on_delivered,
            is_average=False,
        )
        self.averages_out = Outgoing(
            [part.nbytes for part in ours],
            self._encode_average,
            reducer.is_averaged,
            reducer.peek,
            on_sent=lambda: None,
            is_average=True,
            is_urgent=reducer.is_crowded,
        )
        self._count = max(1, len(theirs) + len(ours))
        self.parts_in, self.averages_in = Incoming(vector, ours), Incoming(vector, theirs)
        # The number of calls on which something may still come: the calls of this member (True) and of the other one.
        self._calls = {True: math.inf if theirs else 0, False: math.inf if ours else 0}
        # Set when the other member has announced its weight. Its parts may come earlier, on a call of this member.
        self._begun = asyncio.Event()
        self._is_over = False
        self.heard_at = -math.inf
        """Loop time of the other member's last message."""

    async def _encode_part(self, index: int) -> DescribedPart:
        part = self.vector.parts[self.other][index]
        return describe_part(PartStatus.VALUES, self.vector.encode(part))

    async def _encode_average(self, index: int) -> DescribedPart:
        encoded, is_delta = await self._reducer.reply(index, self.other)
        return describe_part(PartStatus.DELTA if is_delta else PartStatus.VALUES, encoded)

    def begin(self, calls: int, *, own: bool) -> None:
        """Note that so many calls begin: this member's own ones, or those of the other member."""
        self._calls[own] = calls
        if not own:
            self._begun.set()
        if calls > 1 and not self.parts_out.in_slices:
            self.parts_out.in_slices = self.averages_out.in_slices = True
            self._runner = self._pace.add(self._share_left) if self._pace else None

    def _share_left(self) -> float:
        """The share of all parts and averages that is still to be sent, from 0 to 1."""
        left = 0.0 if self._is_over else self.parts_out.left + self.averages_out.left
        return left / self._count

    def stop(self) -> None:
        """Refuse averages that come from now on, and hold no other receiver back for this one."""
        self._is_over = True
        self._note_progress()

    async def send(self, call: Call, usual: Outgoing, calls: int) -> None:
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
            async with asyncio.timeout(limit()):
                message = await call.receive(PartMessage)
            self.heard_at = asyncio.get_running_loop().time()
            if message is None or not message.parts:
                return message
            incoming = self._expect(message)
            if incoming is self.parts_in:
                await self._begun.wait()
                await self._reducer.wait_for_room(message.index)
            async with asyncio.timeout(limit()):
                complete = await incoming.receive(call, message)
            self._take(message, complete)

    def _expect(self, message: PartMessage) -> Incoming:
        incoming = self.averages_in if message.is_average else self.parts_in
        statuses = {header.status for header in message.parts}
        is_due = message.is_average or statuses <= {PartStatus.VALUES, PartStatus.UNCHANGED}
        if message.index not in incoming.missing or not is_due:
            raise ProtocolError(f"sent part {message.index} with status {statuses}, which is not due")
        return incoming

    def _take(self, message: PartMessage, complete: Averages) -> None:
        if complete and message.is_average and self._is_over:
            raise ProtocolError("sent an average that is not waited for any more")
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
            raise ProtocolError("sent an average that is not finite")

    def end(self, *, own: bool) -> None:
        """Note that nothing more comes on one call.

        Raises:
            ProtocolError: this was the last call, but parts or averages are missing.
        """
        self._calls[own] -= 1
        missing = len(self.parts_in.missing) + len(self.averages_in.missing)
        if missing and not sum(self._calls.values()):
            raise ProtocolError(f"ended before {missing} of its parts and averages")


async def _no_wait(index: int) -> None:
    await asyncio.sleep(0)
