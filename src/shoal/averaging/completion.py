"""The second half of a round: make sure that every member has every average, and finish what the dead have left undone.

From the beginning of the round each member keeps a call open to the *coordinator*, the first member that can be
connected to. Its end is how a death becomes known at once; messages now and then show that a silent member still lives.
When a member has exchanged all its parts it reports how many averages it holds from each reducer. When all living
members have reported, the coordinator either commits the round, or lets them fill the gaps:

- a part whose average some member already holds is fetched from it and passed on as it is;
- a part that nobody holds is reduced again from all living members, by the coordinator.

Then all of them report again. So all survivors end with the same values for every part. If the coordinator dies, the
next member in order takes over; members that have left the round by then say that it was committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.averaging.allreduce import PEER_FAILURES, AllReduce, AveragingMode, reason_of
from shoal.averaging.protocol import (
    PartMessage,
    PartStatus,
    RoundKind,
    RoundMessage,
    RoundStatus,
    StatusRequest,
)
from shoal.averaging.reducer import PartReducer
from shoal.clock import timeout
from shoal.compression.base import SerializedTensor
from shoal.errors import P2PDaemonError, ProtocolError, StreamClosedError
from shoal.p2p import Call
from shoal.reactor import cancel_and_wait, first_completed

logger = logging.getLogger(__name__)

ALIVE_PER_TIMEOUT = 3
"""How often a member shows that it lives within the time after which it would be given up."""
RECONNECT_GRACE = 0.3
"""Seconds for which a member whose connection broke may come back before it counts as dead."""
STATUS_PERIOD = 0.5
"""Seconds between questions to members that have not come."""
_MAX_FOLLOW_ATTEMPTS = 2

PartKey = tuple[int, int]
"""A reducer and the index of one of its parts."""
Ranges = list[tuple[int, int, int]]


@dataclass
class _Link:
    """A member that is connected to this one."""

    call: Call
    weight: float
    held: list[int] | None = None
    """What it has reported; ``None`` while it is still busy."""
    obsolete: bool = False
    """Parts that it sends belong to an assignment that was called off."""


@dataclass
class _Plan:
    """How the gaps of living members are filled."""

    sources: dict[PartKey, int] = field(default_factory=dict)
    """Averages that exist, and who holds them."""
    again: list[PartKey] = field(default_factory=list)
    """Parts that have to be reduced again, from all living senders."""
    missing: dict[int, Ranges] = field(default_factory=dict)
    """What each member lacks."""

    def parts_missing(self, member: int) -> list[PartKey]:
        return [(r, k) for r, start, stop in self.missing.get(member, []) for k in range(start, stop)]


class Completion:
    """Brings one round to its end. Lives as long as the round.

    Args:
        allreduce: the round's exchange of parts.
    """

    def __init__(self, allreduce: AllReduce) -> None:
        self.allreduce = allreduce
        self.vector, self.group, self.own = allreduce.vector, allreduce.group, allreduce.own_index
        self._silence = allreduce.settings.sender_timeout
        self._links: dict[int, _Link] = {}
        self._gone: set[int] = set()
        """Members that have left the round after it was committed."""
        self._changed = asyncio.Event()
        self._execution: _Execution | None = None
        self._committed = False

    async def run(self) -> None:
        """Return when every living member has every average that could be saved."""
        for candidate in self._coordinators():
            if candidate == self.own:
                break
            if await self._follow(candidate):
                await self._coordinate(wait_for_absent=False)  # members that could not reach the coordinator
                return
        if self.allreduce.modes[self.own] is not AveragingMode.CLIENT:
            await self._coordinate(wait_for_absent=True)
        else:
            await self.allreduce.exchanged.wait()

    def _coordinators(self) -> list[int]:
        return [i for i, mode in enumerate(self.allreduce.modes) if mode is not AveragingMode.CLIENT]

    # --- as a member --------------------------------------------------------------------------------------------------

    async def _follow(self, coordinator: int) -> bool:
        """Take part under a coordinator; returns whether the round was committed."""
        for _ in range(_MAX_FOLLOW_ATTEMPTS):
            try:
                async with self.allreduce.get_stub(self.group.peer_ids[coordinator]).rpc_complete() as call:
                    await self._follow_call(call)
                    await call.send_end()
                return True
            except StreamClosedError as e:  # a connection may break without a death: try once more
                reason = reason_of(e)
            except PEER_FAILURES as e:
                reason = reason_of(e)
                break
        self.allreduce.member_failed(coordinator, reason)
        return False

    async def _follow_call(self, call: Call) -> None:
        hello = RoundMessage(kind=RoundKind.HELLO, group_id=self.group.group_id, weight=self.allreduce.weight)
        await call.send(hello)
        helpers = [asyncio.ensure_future(self._show_life(call)), asyncio.ensure_future(self._report_when_ready(call))]
        sending: asyncio.Task[None] | None = None
        try:
            while True:
                async with timeout(self._silence):
                    message = await _receive(call)
                    if message.kind == RoundKind.PART:
                        await self._take_part(call, message)
                if message.kind == RoundKind.COMMIT:
                    return
                if message.kind == RoundKind.FAILED:
                    self._drop(message.members)
                elif message.kind in (RoundKind.ASSIGNMENT, RoundKind.RESTART):
                    if sending is not None:
                        await cancel_and_wait(sending)  # a message is handed over whole, so this ends between two
                    sending = asyncio.ensure_future(self._fulfil(call, message))
                    helpers.append(sending)
        finally:
            await cancel_and_wait(*helpers)

    def _drop(self, members: list[int]) -> None:
        for member in members:
            if 0 <= member < self.group.group_size and member != self.own:
                self.allreduce.member_failed(member, "the coordinator has lost it")

    async def _show_life(self, call: Call) -> None:
        while True:
            await asyncio.sleep(self._silence / ALIVE_PER_TIMEOUT)
            await call.send(RoundMessage(kind=RoundKind.ALIVE))

    async def _report_when_ready(self, call: Call) -> None:
        await self.allreduce.exchanged.wait()
        await self._report(call)

    async def _report(self, call: Call) -> None:
        await call.send(RoundMessage(kind=RoundKind.REPORT, held=self.vector.held))

    async def _fulfil(self, call: Call, assignment: RoundMessage) -> None:
        """Send the parts that the coordinator wants; report when those that it promised are here, too."""
        for reducer, start, stop in assignment.send:
            for index in range(start, stop):
                part = self.vector.parts[reducer][index]
                await _send(call, (reducer, index), self.vector.encode(part))
        while any(self.vector.held[reducer] < stop for reducer, _, stop in assignment.expect):
            self._changed.clear()
            await self._changed.wait()
        await self._report(call)

    async def _take_part(self, call: Call, message: RoundMessage) -> None:
        reducer, part = message.reducer, message.part
        if part is None or not 0 <= reducer < self.group.group_size or part.index != self.vector.held[reducer]:
            raise ProtocolError("the coordinator sent a part that is not due")
        if part.index >= len(self.vector.parts[reducer]):
            raise ProtocolError("the coordinator sent a part that does not exist")
        values = await self.vector.receive(call, part, self.vector.parts[reducer][part.index])
        self.vector.take(reducer, values)
        self._changed.set()

    # --- as the coordinator -------------------------------------------------------------------------------------------

    async def serve(self, call: Call, hello: RoundMessage, member: int) -> None:
        """Hold a member's call until the round is over; runs in the handler of its call."""
        link = _Link(call, hello.weight)
        self._links[member] = link
        self._changed.set()
        alive = asyncio.ensure_future(self._show_life(call))
        try:
            while await self._serve_message(link, member):
                pass
        except BaseException as e:
            if self._links.get(member) is link and not self._committed:
                asyncio.get_running_loop().call_later(RECONNECT_GRACE, self._lost, member, link, reason_of(e))
            raise
        finally:
            await cancel_and_wait(alive)

    async def _serve_message(self, link: _Link, member: int) -> bool:
        async with timeout(self._silence):
            message = await link.call.receive(RoundMessage)
            if message is None:
                if not self._committed:
                    raise ProtocolError("left the round early")
                return False
            if message.kind == RoundKind.PART:
                await self._receive_for_plan(link, member, message)
        if message.kind == RoundKind.REPORT:
            if len(message.held) != self.group.group_size:
                raise ProtocolError("malformed report")
            link.held, link.obsolete = message.held, False
            self._changed.set()
        return True

    def _lost(self, member: int, link: _Link, reason: str) -> None:
        """The member has not come back."""
        if self._links.get(member) is link and not self._committed:
            del self._links[member]
            self._declare_failed(member, reason)

    def _declare_failed(self, member: int, reason: str) -> None:
        self.allreduce.member_failed(member, reason)
        if self._execution is not None:
            self._execution.member_failed(member)
        self._changed.set()

    def _expected(self) -> set[int]:
        return set(range(self.group.group_size)) - {self.own} - self._gone - self._dead

    @property
    def _dead(self) -> set[int]:
        return {member for member in self.allreduce.failed if member not in self._links}

    async def _coordinate(self, *, wait_for_absent: bool) -> None:
        """Collect reports, fill gaps, until there are none; then commit."""
        background = [asyncio.ensure_future(self._spread_failures())]
        if wait_for_absent:
            background.append(asyncio.ensure_future(self._ask_absent()))
        try:
            await self.allreduce.exchanged.wait()
            while True:
                await self._all_reported(wait_for_absent)
                plan = self._make_plan()
                if not plan.missing:
                    break
                await self._execute(plan)
            await self._commit()
        finally:
            await cancel_and_wait(*background)

    async def _all_reported(self, wait_for_absent: bool) -> None:
        while True:
            self._changed.clear()
            present = all(link.held is not None for link in self._links.values())
            if present and (not wait_for_absent or self._expected() <= self._links.keys()):
                return
            await self._changed.wait()

    async def _spread_failures(self) -> None:
        """Tell everybody of deaths, so that nobody has to find out by waiting."""
        told: set[int] = set()
        while True:
            news = self._dead - told
            if news:
                told |= news
                await self._broadcast(RoundMessage(kind=RoundKind.FAILED, members=sorted(news)))
            await first_completed(self._changed.wait(), timeout=STATUS_PERIOD)

    async def _ask_absent(self) -> None:
        """Find out about members that have not come: dead, finished before, or just late."""
        deadline = asyncio.get_running_loop().time() + self._silence
        while True:
            await asyncio.sleep(STATUS_PERIOD)
            absent = sorted(self._expected() - self._links.keys())
            too_late = asyncio.get_running_loop().time() > deadline
            await asyncio.gather(*[self._ask_status(member, too_late) for member in absent])

    async def _ask_status(self, member: int, too_late: bool) -> None:
        status = RoundStatus.UNKNOWN
        if self.allreduce.modes[member] is not AveragingMode.CLIENT:
            stub = self.allreduce.get_stub(self.group.peer_ids[member])
            try:
                reply = await stub.rpc_round_status(StatusRequest(group_id=self.group.group_id), timeout=self._silence)
                status = RoundStatus(reply.status)
            except P2PDaemonError as e:
                self._declare_failed(member, reason_of(e))
                return
            except PEER_FAILURES as e:
                logger.debug("asked %s about the round: %r", self.group.peer_ids[member], e)
        if member in self._links:
            return
        if status is RoundStatus.FINISHED:
            self._gone.add(member)
            self._changed.set()
        elif too_late and status is not RoundStatus.RUNNING:
            self._declare_failed(member, "did not take part in the round")

    async def _broadcast(self, message: RoundMessage, *, end: bool = False) -> None:
        await asyncio.gather(*[self._tell(link, message, end) for link in list(self._links.values())])

    async def _tell(self, link: _Link, message: RoundMessage, end: bool = False) -> None:
        try:
            async with timeout(self._silence):
                await link.call.send(message, end=end)
        except PEER_FAILURES as e:
            logger.debug("could not tell %s: %r", link.call.remote, e)  # its handler notices, too

    async def _commit(self) -> None:
        self._committed = True
        await self._broadcast(RoundMessage(kind=RoundKind.COMMIT), end=True)

    # --- filling gaps -------------------------------------------------------------------------------------------------

    def _make_plan(self) -> _Plan:
        """What living senders lack, and where it comes from."""
        held = {member: link.held or [] for member, link in self._links.items()}
        held[self.own] = self.vector.held
        living = sorted(member for member in held if member in self.allreduce.senders)
        plan = _Plan()
        if len(living) < 2:  # nobody to average with
            return plan
        for reducer, parts in enumerate(self.vector.parts):
            counts = {member: held[member][reducer] for member in living}
            lacking = [member for member in living if counts[member] < len(parts)]
            if not lacking:
                continue
            most = max(counts.values())
            best = self.own if counts.get(self.own) == most else max(living, key=lambda member: counts[member])
            for index in range(min(counts[member] for member in lacking), len(parts)):
                if index < most:
                    plan.sources[reducer, index] = best
                else:
                    plan.again.append((reducer, index))
            for member in lacking:
                plan.missing.setdefault(member, []).append((reducer, counts[member], len(parts)))
        return plan

    async def _execute(self, plan: _Plan) -> None:
        """Carry out a plan; a death on the way calls it off, and everybody reports again."""
        weights = {self.own: self.allreduce.weight, **{member: link.weight for member, link in self._links.items()}}
        execution = _Execution(self, plan, {member: link.call for member, link in self._links.items()}, weights)
        self._execution = execution
        for link in self._links.values():
            link.held = None
        logger.info("finishing the parts of dead members: %d reduced again", len(plan.again))
        try:
            completed = await execution.run()
        finally:
            self._execution = None
        if not completed:
            for link in self._links.values():
                link.held, link.obsolete = None, True
            await self._broadcast(RoundMessage(kind=RoundKind.RESTART))

    async def _receive_for_plan(self, link: _Link, member: int, message: RoundMessage) -> None:
        key, part = (message.reducer, message.part.index if message.part is not None else -1), message.part
        exists = 0 <= key[0] < self.group.group_size and 0 <= key[1] < len(self.vector.parts[key[0]])
        if part is None or not exists:
            raise ProtocolError("sent a part that does not exist")
        values = await self.vector.receive(link.call, part, self.vector.parts[key[0]][key[1]])
        if self._execution is not None and not link.obsolete:
            self._execution.deliver(member, key, values)


class _Execution:
    """One attempt to fill gaps, at the coordinator."""

    def __init__(self, completion: Completion, plan: _Plan, calls: dict[int, Call], weights: dict[int, float]) -> None:
        self._vector, self._own, self._plan, self._calls = completion.vector, completion.own, plan, calls
        senders = [member for member in calls if member in completion.allreduce.senders]
        parts = [self._vector.parts[reducer][index] for reducer, index in plan.again]
        local = [self._vector.values(part) for part in parts] if completion.allreduce.is_sender else None
        infos = [part.info for part in parts]
        self._reducer = PartReducer(infos, self._vector.codec, senders, local, self._own, weights)
        self._position = {key: position for position, key in enumerate(plan.again)}
        self._senders = senders
        loop = asyncio.get_running_loop()
        self._fetched: dict[PartKey, asyncio.Future[torch.Tensor | None]] = {
            key: loop.create_future() for key in plan.sources
        }
        self._averages: dict[PartKey, torch.Tensor | None] = {}
        self._failed = asyncio.Event()

    def member_failed(self, member: int) -> None:
        """A member of this attempt is dead: the attempt is over."""
        if member in self._calls:
            self._failed.set()

    def deliver(self, member: int, key: PartKey, values: torch.Tensor | None) -> None:
        """A part has come."""
        waiting = self._fetched.get(key)
        if waiting is not None and self._plan.sources[key] == member:
            if not waiting.done():
                waiting.set_result(values)
        elif values is not None and key in self._position:
            self._reducer.deliver(member, self._position[key], values)

    async def run(self) -> bool:
        """Fill the gaps; returns whether all of them are filled."""
        work: list[Coroutine[Any, Any, None]] = [self._serve_member(member) for member in self._calls]
        if self._own in self._plan.missing:
            work.append(self._fill_own())
        tasks = [asyncio.ensure_future(each) for each in work]
        everything = asyncio.gather(*tasks)
        try:
            await first_completed(asyncio.shield(everything), self._failed.wait())
            if not everything.done() or self._failed.is_set():
                return False
            await everything
            return True
        except PEER_FAILURES as e:  # a member that is dying: its handler notices, too
            logger.debug("could not fill all gaps: %r", e)
            return False
        finally:
            everything.cancel()
            await cancel_and_wait(*tasks)

    async def _serve_member(self, member: int) -> None:
        call = self._calls[member]
        wanted = [key for key, source in self._plan.sources.items() if source == member]
        wanted += self._plan.again if member in self._senders else []
        assignment = RoundMessage(
            kind=RoundKind.ASSIGNMENT, send=_as_ranges(wanted), expect=self._plan.missing.get(member, [])
        )
        await call.send(assignment)
        for key in self._plan.parts_missing(member):
            average = await self._average(key)
            part = self._vector.parts[key[0]][key[1]]
            await _send(call, key, None if average is None else self._vector.codec.compress(average, part.info))

    async def _fill_own(self) -> None:
        for key in self._plan.parts_missing(self._own):
            self._vector.take(key[0], await self._average(key))

    async def _average(self, key: PartKey) -> torch.Tensor | None:
        if key not in self._averages:
            self._averages[key] = await self._obtain(key)
        return self._averages[key]

    async def _obtain(self, key: PartKey) -> torch.Tensor | None:
        if key in self._position:
            return await self._reducer.peek(self._position[key])
        if self._vector.alpha != 1:  # whoever holds the average has already mixed it with its own values
            return None
        if self._plan.sources[key] == self._own:
            return self._vector.values(self._vector.parts[key[0]][key[1]])
        return await asyncio.shield(self._fetched[key])


async def _receive(call: Call) -> RoundMessage:
    message = await call.receive(RoundMessage)
    if message is None:
        raise ProtocolError("the coordinator ended without a decision")
    return message


async def _send(call: Call, key: PartKey, encoded: SerializedTensor | None) -> None:
    reducer, index = key
    if encoded is None:
        part = PartMessage(index=index, status=int(PartStatus.UNCHANGED))
        await call.send(RoundMessage(kind=RoundKind.PART, reducer=reducer, part=part))
    else:
        part = PartMessage(index=index, status=int(PartStatus.VALUES), metadata=encoded.metadata)
        await call.send(RoundMessage(kind=RoundKind.PART, reducer=reducer, part=part), encoded.buffer)


def _as_ranges(keys: list[PartKey]) -> Ranges:
    """Parts as few ranges, in order."""
    ranges: Ranges = []
    for reducer, index in sorted(keys):
        if ranges and ranges[-1][0] == reducer and ranges[-1][2] == index:
            ranges[-1] = (reducer, ranges[-1][1], index + 1)
        else:
            ranges.append((reducer, index, index + 1))
    return ranges
