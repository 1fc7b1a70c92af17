"""What two members of a round send each other: the parts that the other one reduces, and averages back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import torch

from shoal.averaging.calls import DescribedPart, describe_part
from shoal.averaging.finite import all_finite
from shoal.averaging.pace import Pace, Runner
from shoal.averaging.protocol import PartMessage, PartStatus
from shoal.averaging.reducer import PartReducer
from shoal.averaging.slices import Incoming, Outgoing, send_all
from shoal.averaging.vector import Averages, RoundVector
from shoal.errors import ProtocolError
from shoal.p2p import Call

BACKLOG_BYTES = 2**15
"""What may wait unsent on a call that shares its work with others: little, so that all of them end together."""


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
        self._calls = {True: math.inf if theirs else 0, False: math.inf if ours else 0}
        """On how many calls something may still come: those that this member makes, and those of the other one."""
        self._begun = asyncio.Event()
        """The other one has told its weight; parts may overtake that."""
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
