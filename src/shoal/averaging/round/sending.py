"""How parts and averages are cut into messages, which any number of connections take one after another.

*Bundles.* Several small parts travel in one message. Models have many tensors of a few hundred values, and each is a
part of its own if the codec treats a tensor as a whole. Separate messages would cost more than these bytes.

*Slices.* Over long links a large part travels in slices, over several connections at once. Connections that share a
slow link are slow. If each carried whole parts, the last parts would end at very different times, with the link half
idle meanwhile. With slices, all connections end together.

*Flow control.* A receiver that is ahead waits for the rest. All connections of a member share one uplink, and TCP does
not share it equally. Without flow control some receivers would be done early, and the few connections to the rest could
not fill the link, so the round would take as long as its last receiver. Receivers that are stalled, or whose
connections have broken, hold up no other. A connection that is held back still carries a piece now and then, or the
other side would take this one for dead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from shoal.averaging.messages import DescribedPart, PartMessage
from shoal.base.logs import quoted
from shoal.errors import ProtocolError
from shoal.net.transport import Buffer
from shoal.p2p import Call

# The maximum length of a TLS record (RFC 8446).
SLICE_BYTES = 2**14
# The most bytes of parts in one message. Chosen: as much as one part of the default size.
BUNDLE_BYTES = 2**19
# The most parts in one message (chosen): their descriptions have to fit into its header.
BUNDLE_PARTS = 256


Piece = tuple[PartMessage, "tuple[Buffer, ...]"]


class OutgoingParts:
    """Parts for one receiver, in order. Any number of connections take them piece by piece.

    Args:
        sizes: the size of each part in bytes.
        encode: encodes the part with a given index; returns at once if the part is ready.
        is_there: tells whether the part with a given index can be encoded now.
        wait: waits until it can be.
        on_sent: called when all pieces have been sent.
        is_average: whether these are averages, rather than parts to reduce.
        is_urgent: tells whether the part with a given index must go before everything else.
        held: tells how many averages of the receiver this member holds, see :class:`PartMessage`.
        left_out: tells which members' values are missing in averages, see :class:`PartMessage`.
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
        held: Callable[[], int] = lambda: 0,
        left_out: Callable[[], Iterable[int]] = lambda: (),
    ) -> None:
        self._is_average, self._is_urgent, self._held, self._left_out = is_average, is_urgent, held, left_out
        self._sizes = sizes
        self.count = len(sizes)
        """The number of all parts."""
        self._encode, self._is_there, self._wait, self._on_sent = encode, is_there, wait, on_sent
        self.in_slices = False
        """Whether to cut large parts into slices, because they travel over several connections."""
        # Parts that no connection has taken, in order.
        self._ranges = deque([range(self.count)] if self.count else [])
        self._untaken = self.count
        # The pieces of the bundle that was encoded last.
        self._pieces: deque[Piece] = deque()
        self._pieces_per_part = 1
        self._under_way = 0
        self.bytes_sent = 0
        """The bytes of all payloads so far."""

    @property
    def left(self) -> float:
        """The number of parts that no connection has taken, with a fraction for the one that is partly taken."""
        return self._untaken + len(self._pieces) / self._pieces_per_part

    @property
    def _next(self) -> int:
        return self._ranges[0].start if self._ranges else self.count

    @property
    def is_taken(self) -> bool:
        """Whether connections have taken all pieces."""
        return not self._ranges and not self._pieces

    @property
    def is_ready(self) -> bool:
        """Whether the next piece can be sent now."""
        return bool(self._pieces) or (bool(self._ranges) and self._is_there(self._next))

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
            # The range moves before the first await, so that no other connection takes the same parts.
            taken = self._take_bundle()
            pieces = list(self._cut(taken.start, [await self._encode(index) for index in taken]))
            self._pieces.extend(pieces)
            self._pieces_per_part = len(pieces)
        message, payload = self._pieces.popleft()
        message.held, message.left_out = self._held(), sorted(self._left_out())
        self._under_way += 1
        await call.send(message, *payload)
        self._under_way -= 1
        self.bytes_sent += sum(len(each) for each in payload)
        if self.is_taken and not self._under_way:
            self._on_sent()

    def repeat(self, gaps: Sequence[tuple[int, int]]) -> None:
        """Send only these parts from now on. No connection may be sending meanwhile.

        Args:
            gaps: ranges of parts.

        Raises:
            ProtocolError: there are no such parts.
        """
        borders = [0, *(border for gap in gaps for border in gap), self.count]
        if borders != sorted(borders):
            raise ProtocolError(f"lacks parts {quoted(gaps)} of {self.count}")
        self._ranges = deque(range(start, stop) for start, stop in gaps if start < stop)
        self._untaken = sum(map(len, self._ranges))
        self._pieces.clear()
        self._under_way = 0
        if self.is_taken:
            self._on_sent()

    def _take_bundle(self) -> range:
        """Take the next part, and those after it that fit into the same message."""
        together = self._ranges.popleft()
        end = self._end_of_bundle(together)
        taken, rest = range(together.start, end), range(end, together.stop)
        if rest:
            self._ranges.appendleft(rest)
        self._untaken -= len(taken)
        return taken

    def _end_of_bundle(self, together: range) -> int:
        left = (SLICE_BYTES if self.in_slices else BUNDLE_BYTES) - self._sizes[together.start]
        end = min(together.stop, together.start + BUNDLE_PARTS)
        for index in range(together.start + 1, end):
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


async def send_all(call: Call, *sources: OutgoingParts, before: Callable[[], Awaitable[object]] | None = None) -> None:
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
            if not chosen.is_ready:  # another connection has taken the piece meanwhile
                continue
        await chosen.send_next(call)


# A receiver is ahead if it has this much less left to receive than the one that has most left (0.08: eight percent
# less). Chosen: a smaller lead would hold back all but one, whose connections alone cannot fill the link.
MAX_LEAD = 0.08
# A receiver to which no piece could be sent for this many seconds is stalled (chosen): the others do not wait for it.
STALLED_SECONDS = 0.5
# The longest time in seconds that a connection is held back before it may send another piece (chosen).
MAX_WAIT_SECONDS = 1.0


class FlowControl:
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
        moving = [each.share_left() for each in self._runners if each.is_waited_for and each.moved_at > stalled_since]
        return (1 - MAX_LEAD) * max(moving, default=0.0)

    def wake(self) -> None:
        """Resume connections whose receivers are no longer ahead."""
        waiting = [runner for runner in self._runners if runner.waiting]
        # This runs for every piece, so the limit is computed only if a connection waits.
        least_left = self.least_left() if waiting else 0.0
        for runner in waiting:
            if runner.share_left() >= least_left:
                runner.go_on()


class Runner:
    """One receiver under flow control: the data sent to it, over any number of connections."""

    def __init__(self, pace: FlowControl, share_left: Callable[[], float]) -> None:
        self._pace, self.share_left = pace, share_left
        self.moved_at = asyncio.get_running_loop().time()
        self.is_waited_for = True
        self.waiting: list[asyncio.Future[None]] = []
        """Connections that are held back."""

    def note_progress(self) -> None:
        """Note that the receiver has got the next piece, or will get no more."""
        self.moved_at = asyncio.get_running_loop().time()
        self._pace.wake()

    def fall_behind(self) -> None:
        """Note that the connections to the receiver have broken, so that the others no longer wait for it.

        New connections are slow at first. If the others waited for them, the link would be half idle meanwhile.
        """
        self.is_waited_for = False
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
