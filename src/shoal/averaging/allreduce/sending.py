"""What two members of a round send each other: the parts that the other one reduces, and averages back.

Small parts travel several in a message, large ones alone, over long links in slices.

Models have many tensors of some hundred values. With codecs that look at a tensor as a whole, each of them makes a part
of its own, for which a message would cost more than its bytes.

Where connections share a slow link, each of them is slow. If each had a whole part to itself, the last parts would end
at very different times, and the link would be half idle meanwhile; in slices they end together.

What a member sends to several others over long links is kept in step (:class:`Pace`). All its connections share one
uplink, and TCP does not share it equally. When only some of the others have something left to come, the connections to
them are too few, and too slow to speed up, to fill the link: it is half idle in the end, while the round takes as long
as the last of them. So nobody who gets ahead is sent more until the rest catch up. Who makes no progress at all is not
waited for, and every connection carries something now and then, or the other side would take this one for dead.
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

# As long as a record of TLS.
SLICE_BYTES = 2**14
# Parts that take no more than this together travel in one message.
BUNDLE_BYTES = 2**19
# A message has no more parts than this: their descriptions have to fit into its header.
BUNDLE_PARTS = 256


Piece = tuple[PartMessage, "tuple[Buffer, ...]"]

# A member is ahead if it has this much less left to receive than the one that has most left (0.08: eight percent less).
# A smaller lead would hold back all members but one, and the connections to that one alone cannot fill the link.
MAX_LEAD = 0.08
# Nobody waits for a member that has not taken the next piece for so many seconds.
STALLED_SECONDS = 0.5
# For how long a connection is held back before it may send another piece.
MAX_WAIT_SECONDS = 1.0


class Pace:
    """Of one member in one round."""

    def __init__(self) -> None:
        self._runners: list[Runner] = []

    def add(self, share_left: Callable[[], float]) -> Runner:
        """From now on something is sent to one more of the others.

        Args:
            share_left: tells which share of that is left.
        """
        self._runners.append(Runner(self, share_left))
        return self._runners[-1]

    def least_left(self) -> float:
        """Who has less left is ahead."""
        stalled_since = asyncio.get_running_loop().time() - STALLED_SECONDS
        moving = [each.share_left() for each in self._runners if each.moved_at > stalled_since]
        return (1 - MAX_LEAD) * max(moving, default=0.0)

    def wake(self) -> None:
        """Let the connections to those go on that are not ahead any more."""
        waiting = [runner for runner in self._runners if runner.waiting]
        # This is called for each piece.
        least_left = self.least_left() if waiting else 0.0
        for runner in waiting:
            if runner.share_left() >= least_left:
                runner.go_on()


class Runner:
    """What is sent to one of the others, over any number of connections."""

    def __init__(self, pace: Pace, share_left: Callable[[], float]) -> None:
        self._pace, self.share_left = pace, share_left
        self.moved_at = asyncio.get_running_loop().time()
        self.waiting: list[asyncio.Future[None]] = []
        """Connections that are held back."""

    def note_progress(self) -> None:
        """It has been sent the next piece, or will get no more."""
        self.moved_at = asyncio.get_running_loop().time()
        self._pace.wake()

    def go_on(self) -> None:
        """Let every connection send one piece more, at least."""
        for turn in self.waiting:
            if not turn.done():
                turn.set_result(None)
        self.waiting = []

    async def wait_for_others(self) -> None:
        """Wait while it is ahead of them, but not too long."""
        if self.share_left() >= self._pace.least_left():
            return
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(MAX_WAIT_SECONDS):
                    await turn
        finally:
            with suppress(ValueError):  # it has been woken
                self.waiting.remove(turn)


class Outgoing:
    """Parts for one member, in order, which any number of connections take piece by piece.

    Args:
        sizes: of the parts in bytes.
        encode: makes a part ready, given its index; does not wait when the part is there.
        is_there: whether a part is, given its index.
        wait: waits until it is.
        on_sent: called when all pieces have been sent.
        is_average: whether they are averages.
        is_urgent: whether a part, given its index, goes before what comes first otherwise.
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
        self._sizes, self._count = sizes, len(sizes)
        self._encode, self._is_there, self._wait, self._on_sent = encode, is_there, wait, on_sent
        self.in_slices = False
        """Parts are cut: they travel over several connections."""
        self._next = 0
        # The pieces of what was made ready last.
        self._pieces: deque[Piece] = deque()
        self._pieces_per_part = 1
        self._under_way = 0

    @property
    def left(self) -> float:
        """How many parts are not taken."""
        return self._count - self._next + len(self._pieces) / self._pieces_per_part

    @property
    def is_taken(self) -> bool:
        """No piece is left."""
        return self._next == self._count and not self._pieces

    @property
    def is_ready(self) -> bool:
        """The next piece is there."""
        return bool(self._pieces) or (self._next < self._count and self._is_there(self._next))

    @property
    def is_urgent(self) -> bool:
        """The next piece, which is there, goes before what comes first otherwise."""
        return self._is_urgent(self._next)

    async def wait(self) -> None:
        """Wait for the next piece."""
        await self._wait(self._next)

    async def send_next(self, call: Call) -> None:
        """Send the next piece, which is there."""
        if not self._pieces:
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
        """After the last part that goes with the next one."""
        left = (SLICE_BYTES if self.in_slices else BUNDLE_BYTES) - self._sizes[self._next]
        end = min(self._count, self._next + BUNDLE_PARTS)
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
    """Send on one connection until others have taken the rest or nothing is left.

    What is ready in the first source goes first, unless something in another one is urgent.

    Args:
        before: called before each piece.
    """
    while waiting := [source for source in sources if not source.is_taken]:
        ready = [source for source in waiting if source.is_ready]
        if not ready:
            await waiting[0].wait()
            continue
        chosen = max(ready, key=lambda source: source.is_urgent)
        if before is not None:
            await before()
            if not chosen.is_ready:  # another connection has taken it
                continue
        await chosen.send_next(call)


@dataclass
class _Slices:
    """A part of which slices have come."""

    buffer: memoryview
    due: set[int]
    """Where slices begin that have not begun to come."""
    left: int
    """How many bytes have not come."""

    @classmethod
    def of(cls, nbytes: int) -> _Slices:
        """Room for a part of which the first slice has come."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return cls(bytes_of(memory), set(range(0, nbytes, SLICE_BYTES)), nbytes)


class Incoming:
    """Parts of one member as they arrive."""

    def __init__(self, vector: RoundVector, parts: list[Part]) -> None:
        self._vector, self._parts = vector, parts
        self.missing = set(range(len(parts)))
        """Parts that are not here yet, as a whole."""
        self._begun: dict[int, _Slices] = {}

    async def receive(self, call: Call, message: PartMessage) -> Averages:
        """Receive the payload that belongs to a message.

        Returns:
            The values of the parts that are complete now, or ``None`` for "unchanged".

        Raises:
            ProtocolError: it is something that is not due.
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


# What may wait unsent on a call that shares its work with others: little, so that all of them end together.
BACKLOG_BYTES = 2**15


class Traffic:
    """Everything between this member and another one, whichever of the two has made the call that carries it.

    Where all is near, parts travel on the calls of the one that sends them, and averages back on the same calls. Over
    a long link, every call carries whatever is to be sent next: so all connections are at work from the beginning,
    when there are no averages yet, to the end, when there are no parts any more. Parts go first, for others wait for
    them to have averages to send, unless too many averages wait here.

    Args:
        vector: this member's values.
        own, other: positions of the two.
        gives: whether this member sends parts.
        takes: whether the other one does.
        pace: of what this member sends to all others; ``None``: nobody waits for anybody.
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
        # On how many calls something may still come: those that this member makes, and those of the other one.
        self._calls = {True: math.inf if theirs else 0, False: math.inf if ours else 0}
        # The other one has told its weight; parts may overtake that.
        self._begun = asyncio.Event()
        self._is_over = False
        self.heard_at = -math.inf
        """Loop time of the last message of the other one."""

    async def _encode_part(self, index: int) -> DescribedPart:
        part = self.vector.parts[self.other][index]
        return describe_part(PartStatus.VALUES, self.vector.encode(part))

    async def _encode_average(self, index: int) -> DescribedPart:
        encoded, is_delta = await self._reducer.reply(index, self.other)
        return describe_part(PartStatus.DELTA if is_delta else PartStatus.VALUES, encoded)

    def begin(self, calls: int, *, own: bool) -> None:
        """Some calls begin, which are this member's own or those of the other one."""
        self._calls[own] = calls
        if not own:
            self._begun.set()
        if calls > 1 and not self.parts_out.in_slices:
            self.parts_out.in_slices = self.averages_out.in_slices = True
            self._runner = self._pace.add(self._share_left) if self._pace else None

    def _share_left(self) -> float:
        """Of what is to be sent."""
        left = 0.0 if self._is_over else self.parts_out.left + self.averages_out.left
        return left / self._count

    def stop(self) -> None:
        """No average counts any more."""
        self._is_over = True
        self._note_progress()

    async def send(self, call: Call, usual: Outgoing, calls: int) -> None:
        """Send what is left on one of some calls."""
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
            limit: seconds without the next message after which it is given up.

        Returns:
            How it has said so.

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
        """Nothing more comes on one call.

        Raises:
            ProtocolError: nothing more comes at all, but something is missing.
        """
        self._calls[own] -= 1
        missing = len(self.parts_in.missing) + len(self.averages_in.missing)
        if missing and not sum(self._calls.values()):
            raise ProtocolError(f"ended before {missing} of its parts and averages")


async def _no_wait(index: int) -> None:
    await asyncio.sleep(0)
