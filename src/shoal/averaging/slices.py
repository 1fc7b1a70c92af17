"""Parts on their way over one connection as a whole, or over several at once in slices.

Where connections share a slow link, each of them is slow. If each had a whole part to itself, the last parts would end
at very different times, and the link would be half idle meanwhile; in slices they end together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch

from shoal.averaging.calls import describe_part
from shoal.averaging.partition import Part
from shoal.averaging.protocol import PartMessage, PartStatus
from shoal.averaging.vector import RoundVector
from shoal.compression.base import SerializedTensor, bytes_of
from shoal.errors import ProtocolError
from shoal.p2p import Call
from shoal.p2p.transport import Buffer

SLICE_BYTES = 2**14


class Encoded(NamedTuple):
    """A part ready to be sent."""

    status: PartStatus
    values: SerializedTensor | None
    """``None`` = there is no average, the receiver keeps its values."""
    is_average: bool


Piece = tuple[PartMessage, "tuple[Buffer, ...]"]


class Outgoing:
    """Parts for one member, in order, which any number of connections take piece by piece.

    Args:
        count: how many parts.
        encode: makes a part ready, given its index; does not wait when the part is there.
        is_there: whether a part is, given its index.
        wait: waits until it is.
        on_sent: called when all pieces have been sent.
        is_urgent: whether a part, given its index, goes before what comes first otherwise.
    """

    def __init__(
        self,
        count: int,
        encode: Callable[[int], Awaitable[Encoded]],
        is_there: Callable[[int], bool],
        wait: Callable[[int], Awaitable[object]],
        on_sent: Callable[[], None],
        is_urgent: Callable[[int], bool] = lambda index: False,
    ) -> None:
        self._is_urgent = is_urgent
        self._count, self._encode, self._is_there, self._wait, self._on_sent = count, encode, is_there, wait, on_sent
        self.in_slices = False
        """Parts are cut: they travel over several connections."""
        self._next = 0
        self._pieces: deque[Piece] = deque()
        """Of the part that was made ready last."""
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
            index, self._next = self._next, self._next + 1
            pieces = list(self._cut(index, await self._encode(index)))
            self._pieces.extend(pieces)
            self._pieces_per_part = len(pieces)
        message, payload = self._pieces.popleft()
        self._under_way += 1
        await call.send(message, *payload)
        self._under_way -= 1
        if self.is_taken and not self._under_way:
            self._on_sent()

    def _cut(self, index: int, encoded: Encoded) -> Iterator[Piece]:
        message, payload = describe_part(index, encoded.status, encoded.values)
        message.is_average = encoded.is_average
        if not (self.in_slices and payload):
            yield message, payload
            return
        whole = memoryview(payload[0])
        for offset in range(0, max(1, len(whole)), SLICE_BYTES):
            piece = whole[offset : offset + SLICE_BYTES]
            yield msgspec.structs.replace(message, offset=offset, size=len(whole)), (piece,)


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


class Incoming:
    """Parts of one member as they arrive."""

    def __init__(self, vector: RoundVector, parts: list[Part]) -> None:
        self._vector, self._parts = vector, parts
        self.missing = set(range(len(parts)))
        """Parts that are not here yet, as a whole."""
        self._begun: dict[int, _Slices] = {}

    async def receive(self, call: Call, message: PartMessage) -> tuple[bool, torch.Tensor | None]:
        """Receive the payload that belongs to a message.

        Returns:
            Whether the part is complete now; and its values, or ``None`` for "unchanged".

        Raises:
            ProtocolError: it is something that is not due.
        """
        index = message.index
        if index not in self.missing or (not message.size and index in self._begun):
            raise ProtocolError(f"sent part {index}, which is not due")
        part = self._parts[index]
        if not message.size:
            self.missing.remove(index)
            return True, await self._vector.receive(call, message, part)
        self._vector.check(message, part, message.size)
        if index not in self._begun:
            self._begun[index] = _slices_of(message)
        slices = self._begun[index]
        size = min(SLICE_BYTES, message.size - message.offset)
        if message.size != len(slices.buffer) or message.offset not in slices.due or call.payload_size != size:
            raise ProtocolError(f"sent a slice of part {index} which is not due")
        slices.due.remove(message.offset)
        await call.read_payload_into(slices.buffer[message.offset : message.offset + size])
        slices.left -= size
        if slices.left:
            return False, None
        del self._begun[index]
        self.missing.remove(index)
        return True, self._vector.decode(message, slices.buffer)


def _slices_of(message: PartMessage) -> _Slices:
    """Room for a part of which the first slice has come."""
    buffer = bytes_of(torch.empty(message.size, dtype=torch.uint8))
    return _Slices(buffer, set(range(0, message.size, SLICE_BYTES)), message.size)
