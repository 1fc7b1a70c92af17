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
from dataclasses import dataclass

from shoal.averaging.allreduce import PEER_FAILURES, REDIAL_PAUSE, AllReduce, AveragingMode, reason_of
from shoal.averaging.protocol import (
    RoundKind,
    RoundMessage,
    RoundStatus,
    StatusRequest,
)
from shoal.averaging.recovery import Line, Plan, Recovery, make_plan
from shoal.clock import timeout
from shoal.errors import DialError, P2PDaemonError, ProtocolError, StreamClosedError
from shoal.p2p import Call
from shoal.reactor import cancel_and_wait, first_completed

logger = logging.getLogger(__name__)

ALIVE_PER_TIMEOUT = 3
"""How often a member shows that it lives within the time after which it would be given up."""
RECONNECT_GRACE = 0.3
"""Seconds for which a member whose connection broke may come back before it counts as dead."""
STATUS_PERIOD = 0.5
"""Seconds between questions to members that have not come."""
_MAX_FOLLOW_ATTEMPTS = 3


@dataclass
class _Link:
    """A member that is connected to this one."""

    line: Line
    weight: float
    held: list[int] | None = None
    """What it has reported; ``None`` while it is still busy."""
    obsolete: bool = False
    """Parts that it sends belong to an assignment that was called off."""


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
        self._deaths = asyncio.Event()
        self._execution: Recovery | None = None
        self._committed = False
        self._assignment: RoundMessage | None = None
        """What the coordinator wants of this member now."""

    async def run(self) -> None:
        """Return when every living member has every average that could be saved."""
        for candidate in self._coordinators():
            if candidate == self.own:
                break
            if candidate not in self.allreduce.failed and await self._follow(candidate):
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
        reason, loop = "", asyncio.get_running_loop()
        deadline = loop.time() + self._silence
        for attempt in range(_MAX_FOLLOW_ATTEMPTS):
            await asyncio.sleep(attempt * REDIAL_PAUSE)
            if loop.time() >= deadline:
                break
            try:
                async with self.allreduce.get_stub(self.group.peer_ids[coordinator]).rpc_complete() as call:
                    await self._follow_call(call)
                    await call.send_end()
                return True
            except (StreamClosedError, DialError) as e:  # a connection may break without a death: try once more
                reason = reason_of(e)
            except PEER_FAILURES as e:
                reason = reason_of(e)
                break
        self.allreduce.member_failed(coordinator, reason)
        return False

    async def _follow_call(self, call: Call) -> None:
        hello = RoundMessage(kind=RoundKind.HELLO, group_id=self.group.group_id, weight=self.allreduce.weight)
        line = Line(call)
        await line.send(hello)
        helpers = [asyncio.ensure_future(self._show_life(line)), asyncio.ensure_future(self._report_when_ready(line))]
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
                    self._assignment = message  # one that is being fulfilled ends between two parts
                    self._changed.set()
                    helpers.append(asyncio.ensure_future(self._fulfil(line, message)))
        finally:
            await cancel_and_wait(*helpers)

    def _drop(self, members: list[int]) -> None:
        for member in members:
            if 0 <= member < self.group.group_size and member != self.own:
                self.allreduce.member_failed(member, "the coordinator has lost it")

    async def _show_life(self, line: Line) -> None:
        while True:
            await asyncio.sleep(self._silence / ALIVE_PER_TIMEOUT)
            await line.send(RoundMessage(kind=RoundKind.ALIVE))

    async def _report_when_ready(self, line: Line) -> None:
        await self.allreduce.exchanged.wait()
        await self._report(line)

    async def _report(self, line: Line) -> None:
        await line.send(RoundMessage(kind=RoundKind.REPORT, held=self.vector.held))

    async def _fulfil(self, line: Line, assignment: RoundMessage) -> None:
        """Send the parts that the coordinator wants; report when those that it promised are here, too."""
        for reducer, start, stop in assignment.send:
            for index in range(start, stop):
                if self._assignment is not assignment:
                    return
                await line.send_part((reducer, index), self.vector.encode(self.vector.parts[reducer][index]))
        while any(self.vector.held[reducer] < stop for reducer, _, stop in assignment.expect):
            self._changed.clear()
            await self._changed.wait()
            if self._assignment is not assignment:
                return
        await self._report(line)

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
        link = _Link(Line(call), hello.weight)
        self._links[member] = link
        self._changed.set()
        alive = asyncio.ensure_future(self._show_life(link.line))
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
            message = await link.line.call.receive(RoundMessage)
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
        self._deaths.set()

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
            self._deaths.clear()
            news = self._dead - told
            if news:
                told |= news
                await self._broadcast(RoundMessage(kind=RoundKind.FAILED, members=sorted(news)))
            await first_completed(self._deaths.wait(), timeout=STATUS_PERIOD)

    async def _ask_absent(self) -> None:
        """Find out about members that have not come: dead, finished before, or just late.

        One that works on the round may still be waiting for others that would coordinate before this one, and are dead.
        """
        begun, others_before = asyncio.get_running_loop().time(), self._coordinators().index(self.own)
        while True:
            await asyncio.sleep(STATUS_PERIOD)
            absent = sorted(self._expected() - self._links.keys())
            waited = (asyncio.get_running_loop().time() - begun) / self._silence
            late = {RoundStatus.UNKNOWN} if waited > 1 else set()
            if waited > 1 + 2 * others_before:
                late.add(RoundStatus.RUNNING)
            await asyncio.gather(*[self._ask_status(member, late) for member in absent])

    async def _ask_status(self, member: int, late: set[RoundStatus]) -> None:
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
        elif status in late:  # it runs the round, perhaps, but it has not found its way to this coordinator
            self._declare_failed(member, "did not come to the coordinator in time")

    async def _broadcast(self, message: RoundMessage, *, end: bool = False) -> None:
        await asyncio.gather(*[self._tell(link, message, end) for link in list(self._links.values())])

    async def _tell(self, link: _Link, message: RoundMessage, end: bool = False) -> None:
        try:
            async with timeout(self._silence):
                await link.line.send(message, end=end)
        except PEER_FAILURES as e:
            logger.debug("could not tell %s: %r", link.line.call.remote, e)  # its handler notices, too

    async def _commit(self) -> None:
        self._committed = True
        await self._broadcast(RoundMessage(kind=RoundKind.COMMIT), end=True)

    # --- filling gaps -------------------------------------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        held = {member: link.held or [] for member, link in self._links.items()}
        held[self.own] = self.vector.held
        living = {member: counts for member, counts in held.items() if member in self.allreduce.senders}
        return make_plan(self.vector.parts, living, self.own)

    async def _execute(self, plan: Plan) -> None:
        """Carry out a plan; a death on the way calls it off, and everybody reports again."""
        weights = {self.own: self.allreduce.weight, **{member: link.weight for member, link in self._links.items()}}
        execution = Recovery(self.allreduce, plan, {member: link.line for member, link in self._links.items()}, weights)
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
        values = await self.vector.receive(link.line.call, part, self.vector.parts[key[0]][key[1]])
        if self._execution is not None and not link.obsolete:
            self._execution.deliver(member, key, values)


async def _receive(call: Call) -> RoundMessage:
    message = await call.receive(RoundMessage)
    if message is None:
        raise ProtocolError("the coordinator ended without a decision")
    return message
