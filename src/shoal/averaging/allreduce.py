"""Butterfly all-reduce: every member sends each part of its vector to the member that reduces it, and gets the average
back.

All parts are in flight at once, each reducer averages a part as soon as it has it from everybody, and the average
goes straight back on the connection on which the part came. A member leaves only after every reducer has said that
all senders have their averages, so what a reducer holds is never lost because somebody else was faster.

A sender that fails is excluded from the parts that it has not delivered. Parts of a reducer that fails keep their
local values. Failure is the end of a connection, at once, or silence for longer than a time limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from shoal.averaging.control import RoundResult
from shoal.averaging.group_info import GroupInfo
from shoal.averaging.partition import Part, split_into_parts
from shoal.averaging.protocol import BeginReduce, PartMessage, PartStatus
from shoal.averaging.reducer import PartReducer
from shoal.clock import timeout
from shoal.compression import CompressionBase, CompressionInfo
from shoal.compression.base import SerializedTensor, bytes_of, dtype_name
from shoal.errors import AllreduceException, P2PDaemonError, P2PHandlerError, ProtocolError
from shoal.p2p import Call, PeerID, StubBase
from shoal.p2p.connection import Nothing
from shoal.reactor import cancel_and_wait

logger = logging.getLogger(__name__)

_PEER_FAILURES = (
    P2PDaemonError,
    P2PHandlerError,
    ProtocolError,
    asyncio.TimeoutError,
    TimeoutError,
    ValueError,
    RuntimeError,
)
"""What another member can do to this one; none of it may end the round."""


class AveragingMode(IntEnum):
    """What a member does in the group."""

    NODE = 0
    """Sends its tensors and reduces a share."""
    CLIENT = 1
    """Sends only: nobody can connect to it."""
    AUX = 2
    """Reduces only: it has no data of its own."""


@dataclass(frozen=True)
class AllReduceSettings:
    """How a group averages."""

    codec: CompressionBase
    part_size_bytes: int
    alpha: float
    """Local values move by this fraction of the way to the average."""
    sender_timeout: float
    """Seconds without the next part after which a sender is given up."""
    reducer_timeout: float
    """Seconds without the next average after which a reducer is given up."""


class AllReduce:
    """One round in one group.

    Args:
        group: as agreed; ``modes`` and ``shares`` filled in.
        own_index: this member's position.
        tensors: contiguous CPU tensors; they receive the averages.
        infos: one for each tensor.
        weight: of this member's values.
        get_stub: makes a stub of the averager protocol for a member.
    """

    def __init__(
        self,
        group: GroupInfo,
        own_index: int,
        tensors: Sequence[torch.Tensor],
        infos: Sequence[CompressionInfo],
        settings: AllReduceSettings,
        weight: float,
        get_stub: Callable[[PeerID], StubBase],
    ) -> None:
        self.group, self.own_index, self.settings, self.weight = group, own_index, settings, weight
        self._get_stub = get_stub
        self._flat = [tensor.detach().view(-1) for tensor in tensors]
        self._modes = [AveragingMode(mode) for mode in group.modes]
        self._is_sender = self._modes[own_index] is not AveragingMode.AUX
        self._parts: dict[int, list[Part]] = defaultdict(list)
        for part in split_into_parts(infos, settings.codec, settings.part_size_bytes, group.shares):
            self._parts[part.reducer].append(part)
        self._reducer = self._make_reducer()
        self._values_total = sum(flat.numel() for flat in self._flat)
        self._values_averaged = 0
        self._failed: dict[int, str] = {}
        self._handlers: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        """Calls being served: their task, and a future that ends when the call does (the task serves others later)."""

    def _make_reducer(self) -> PartReducer:
        own_parts = self._parts[self.own_index]
        senders = [
            index
            for index, mode in enumerate(self._modes)
            if index != self.own_index and mode is not AveragingMode.AUX and own_parts
        ]
        local = [part.of(self._flat) for part in own_parts] if self._is_sender else None
        infos = [part.info for part in own_parts]
        return PartReducer(infos, self.settings.codec, senders, local, self.own_index, self.weight)

    # --- the round ----------------------------------------------------------------------------------------------------

    async def run(self) -> RoundResult:
        """Average; afterwards the tensors hold the result.

        Raises:
            AllreduceException: nothing at all was averaged; the tensors are as they were.
        """
        started = asyncio.get_running_loop().time()
        work: list[Coroutine[Any, Any, None]] = [self._give_up_absent_senders(), self._reducer_finished()]
        if self._is_sender:
            work.append(self._apply_own_parts())
            work += [self._exchange_with(j) for j, parts in self._parts.items() if parts and j != self.own_index]
        watchdog, *rest = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.gather(*rest)
            if self._handlers:  # they still have to tell their senders that everybody is done
                await asyncio.wait(set(self._handlers.values()), timeout=self.settings.sender_timeout)
        finally:
            await cancel_and_wait(watchdog, *rest, *self._handlers)
        duration = asyncio.get_running_loop().time() - started
        return self._result(duration)

    def _result(self, duration: float) -> RoundResult:
        failed = {**self._reducer.banned, **self._failed}
        total = self._values_total if self._is_sender else 0
        if failed and total and not self._values_averaged:
            reasons = "; ".join(f"{self.group.peer_ids[i]}: {reason}" for i, reason in failed.items())
            raise AllreduceException(f"nothing was averaged, every other member failed: {reasons}")
        return RoundResult(
            group_id=self.group.group_id,
            peers=self.group.peer_ids,
            failed_peers=tuple(self.group.peer_ids[i] for i in sorted(failed)),
            share_averaged=self._values_averaged / total if total else 1.0,
            duration=duration,
        )

    def _member_failed(self, member: int, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
            reason = "silent for too long"
        self._failed.setdefault(member, reason)
        self._reducer.ban(member, reason)
        logger.info("group member %s failed: %s", self.group.peer_ids[member], reason)

    # --- sending own parts, receiving averages ------------------------------------------------------------------------

    async def _exchange_with(self, member: int) -> None:
        """Let another member reduce its parts; whatever it does wrong costs these parts and no more."""
        parts = self._parts[member]
        try:
            async with self._get_stub(self.group.peer_ids[member]).rpc_reduce() as call:
                await call.send(BeginReduce(group_id=self.group.group_id, weight=self.weight))
                await _both(self._send_parts(call, parts), self._receive_averages(call, parts))
                await call.send_end()
                async with timeout(self.settings.reducer_timeout):
                    if await call.receive(Nothing) is not None:
                        raise ProtocolError("more averages than parts")
        except _PEER_FAILURES as e:
            self._member_failed(member, e)

    async def _send_parts(self, call: Call, parts: Sequence[Part]) -> None:
        for index, part in enumerate(parts):
            encoded = self.settings.codec.compress(part.of(self._flat), part.info)
            await _send_part(call, index, PartStatus.VALUES, encoded)

    async def _receive_averages(self, call: Call, parts: Sequence[Part]) -> None:
        scratch = torch.empty(0, dtype=torch.uint8)
        for index, part in enumerate(parts):
            async with timeout(self.settings.reducer_timeout):
                message = await self._receive_part(call, index, part)
                size = call.payload_size
                if scratch.numel() < size:
                    scratch = torch.empty(size, dtype=torch.uint8)
                buffer = bytes_of(scratch[:size])
                await call.read_payload_into(buffer)
            if message.metadata is not None:
                values = self.settings.codec.extract(SerializedTensor(message.metadata, buffer))
                self._apply(part, values, is_delta=message.status == PartStatus.DELTA)
            self._values_averaged += part.length

    async def _receive_part(self, call: Call, index: int, part: Part) -> PartMessage:
        """The next message, which must be the part that is due; its payload is still to be read.

        Raises:
            ProtocolError: it is something else.
        """
        message, payload_bytes = await call.receive(PartMessage), call.payload_size
        if message is None:
            raise ProtocolError(f"ended before part {index}")
        if message.index != index:
            raise ProtocolError(f"sent part {message.index} where part {index} is due")
        if message.status == PartStatus.UNCHANGED and message.metadata is None and not payload_bytes:
            return message
        found, dtype = message.metadata, part.info.descriptor.dtype
        if found is None or found.size != (part.length,) or found.dtype != dtype_name(dtype) or found.requires_grad:
            raise ProtocolError(f"sent {found} for a part of {part.length} values of {dtype}")
        size = self.settings.codec.compressed_nbytes(found.size, part.info)
        limit = 2 * part.length * dtype.itemsize + 2**16
        if payload_bytes != size if size is not None else payload_bytes > limit:
            raise ProtocolError(f"sent {payload_bytes} bytes for a part of {part.length} values")
        return message

    def _apply(self, part: Part, values: torch.Tensor, *, is_delta: bool) -> None:
        target, alpha = part.of(self._flat), self.settings.alpha
        if is_delta:
            target.add_(values.to(target.dtype), alpha=alpha)
        elif alpha == 1:
            target.copy_(values)
        elif target.is_floating_point() or target.is_complex():
            target.lerp_(values, alpha)
        else:
            target.copy_(torch.lerp(target.double(), values.double(), alpha).round_())

    # --- reducing -----------------------------------------------------------------------------------------------------

    async def _apply_own_parts(self) -> None:
        for index, part in enumerate(self._parts[self.own_index]):
            average = await self._reducer.average(index)
            if average is not None:
                self._apply(part, average, is_delta=False)
            self._values_averaged += part.length

    async def _reducer_finished(self) -> None:
        await self._reducer.finished.wait()

    async def _give_up_absent_senders(self) -> None:
        """Whoever has not even begun within the time limit is not waited for."""
        await asyncio.sleep(self.settings.sender_timeout)
        for sender in sorted(self._reducer.waiting_for):
            if not self._reducer.has_begun(sender):
                self._member_failed(sender, TimeoutError())

    async def serve(self, call: Call, begin: BeginReduce, sender: PeerID) -> None:
        """Reduce for another member; runs in the handler of its call.

        Raises:
            ProtocolError: the sender has no business here, or sends something wrong.
        """
        index = self._check_sender(begin, sender)
        task = asyncio.current_task()
        assert task is not None
        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handlers[task] = served
        self._reducer.begin(index, begin.weight)
        try:
            await self._serve_sender(call, index)
        finally:
            del self._handlers[task]
            served.set_result(None)

    async def _serve_sender(self, call: Call, index: int) -> None:
        try:
            await _both(self._take_parts(call, index), self._give_averages(call, index))
            async with timeout(self.settings.sender_timeout):
                if await call.receive(Nothing) is not None:
                    raise ProtocolError("more parts than agreed")
        except BaseException as e:
            self._member_failed(index, e)
            raise
        self._reducer.delivered_everything(index)
        await self._reducer.finished.wait()
        await call.send_end()

    def _check_sender(self, begin: BeginReduce, sender: PeerID) -> int:
        if sender not in self.group.peer_ids:
            raise ProtocolError("not a member of this group")
        index = self.group.peer_ids.index(sender)
        if index not in self._reducer.waiting_for or self._reducer.has_begun(index):
            raise ProtocolError("nothing is expected from this member: it began before, was given up, or is no sender")
        if not 0 <= begin.weight < float("inf"):
            raise ProtocolError(f"weight {begin.weight} is not a non-negative number")
        return index

    async def _take_parts(self, call: Call, sender: int) -> None:
        for index, part in enumerate(self._parts[self.own_index]):
            await self._reducer.wait_for_room(index)
            async with timeout(self.settings.sender_timeout):
                message = await self._receive_part(call, index, part)
                if message.status != PartStatus.VALUES or message.metadata is None:
                    raise ProtocolError(f"sent a part with status {message.status}")
                buffer = bytes_of(torch.empty(call.payload_size, dtype=torch.uint8))
                await call.read_payload_into(buffer)
            values = self.settings.codec.extract(SerializedTensor(message.metadata, buffer))
            self._reducer.deliver(sender, index, values)

    async def _give_averages(self, call: Call, sender: int) -> None:
        for index in range(len(self._reducer)):
            encoded, is_delta = await self._reducer.reply(index, sender)
            await _send_part(call, index, PartStatus.DELTA if is_delta else PartStatus.VALUES, encoded)


async def _send_part(call: Call, index: int, status: PartStatus, encoded: SerializedTensor | None) -> None:
    if encoded is None:
        await call.send(PartMessage(index=index, status=int(PartStatus.UNCHANGED)))
    else:
        await call.send(PartMessage(index=index, status=int(status), metadata=encoded.metadata), encoded.buffer)


async def _both(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
    """Run two coroutines together; the failure of one cancels the other."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)
