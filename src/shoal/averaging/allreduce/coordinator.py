"""The coordinator's part in the completion of a round: who is there, who is dead or late, what is missing, the end."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging.allreduce.recovery import Plan, Recovery, make_plan
from shoal.averaging.calls import PEER_FAILURES, Line, reason_of, show_life
from shoal.averaging.control import AveragingMode
from shoal.averaging.finite import all_finite
from shoal.averaging.messages import RoundKind, RoundMessage, RoundStatus, StatusRequest
from shoal.errors import InterruptedDialError, P2PDaemonError, ProtocolError
from shoal.logs import counted
from shoal.p2p import Call
from shoal.tasks import cancel_and_wait, first_completed

if TYPE_CHECKING:
    from shoal.averaging.allreduce.exchange import AllReduce

logger = logging.getLogger(__name__)

# Seconds for which a member whose connection broke may come back before it counts as dead.
RECONNECT_GRACE = 0.3
# Seconds between questions to members that have not come.
STATUS_PERIOD = 0.5


class Resigned(ProtocolError):
    """The coordinator is late itself."""


@dataclass
class _Link:
    """A member that is connected to this one."""

    line: Line
    handler: asyncio.Task[Any]
    weight: float
    held: list[int] | None = None
    """What it has reported; ``None`` while it is still busy."""
    obsolete: bool = False
    """Parts that it sends belong to an assignment that was called off."""
    delivered: bool = False
    """It has sent all its parts."""
    late: bool = False
    """The round does not wait for it."""


class Coordination:
    """Serves the members that take this one for the coordinator.

    Args:
        allreduce: the round's exchange of parts.
    """

    def __init__(self, allreduce: AllReduce) -> None:
        self.allreduce = allreduce
        self.vector, self.group, self.own = allreduce.vector, allreduce.group, allreduce.own_index
        self._silence, self._quorum = allreduce.settings.sender_timeout, allreduce.settings.quorum
        self._links: dict[int, _Link] = {}
        # Members that have left the round after it was committed.
        self._gone: set[int] = set()
        self._changed = asyncio.Event()
        self._deaths = asyncio.Event()
        self._quorum_changed = asyncio.Event()
        self._resigned = asyncio.Event()
        self._execution: Recovery | None = None
        allreduce.on_failure = self._note_failure
        self._committed = False
        # All values, for members that were late.
        self._result: asyncio.Future[list[torch.Tensor]] = asyncio.get_running_loop().create_future()
        # What was averaged again, without those that had failed, may differ from what one that comes back holds.
        self._has_filled_gaps = False
        self.closed_early = False
        """The round goes on without members that may come later, for the result."""

    def close(self) -> None:
        """The round has ended here, with or without a result."""
        if not self._result.done():
            self._result.cancel()
        # The members that follow this one must not believe that the round goes on.
        if not self._committed:
            for link in self._links.values():
                link.handler.cancel()

    async def serve(self, call: Call, hello: RoundMessage, member: int) -> None:
        """Hold a member's call until the round is over; runs in the handler of its call."""
        handler = asyncio.current_task()
        assert handler is not None
        if self._committed and not self.closed_early:
            raise ProtocolError("the round is over, without this member")
        is_late = hello.late or ((self.closed_early or self._has_filled_gaps) and member in self.allreduce.failed)
        link = _Link(Line(call), handler, hello.weight, late=is_late)
        await link.line.send(RoundMessage(kind=RoundKind.ALIVE))
        self._links[member] = link
        self._changed.set()
        if link.late:
            self.closed_early = True
            await link.line.send(RoundMessage(kind=RoundKind.LATE))
        alive = asyncio.ensure_future(show_life(link.line, self._silence))
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
        async with asyncio.timeout(self._silence):
            message = await link.line.call.receive(RoundMessage)
            self.allreduce.heard_of(member)
            if message is None:
                if not self._committed:
                    raise ProtocolError("left the round early")
                return False
            if message.kind == RoundKind.LATE and link.late:
                await self._send_result(link)
            if message.kind == RoundKind.PART:
                await self._receive_for_plan(link, member, message)
        if message.kind == RoundKind.REPORT and not link.late:
            if len(message.held) != self.group.group_size:
                raise ProtocolError("malformed report")
            self._note_not_finite(member, message.not_finite)
            link.held, link.obsolete = message.held, False
            self._changed.set()
        if message.kind == RoundKind.DELIVERED:
            link.delivered = True
            self._quorum_changed.set()
        return True

    def _note_not_finite(self, reporter: int, members: list[int]) -> None:
        others = {member for member in members if 0 <= member < self.group.group_size} - {self.own, reporter}
        self.allreduce.told_not_finite |= others

    def _lost(self, member: int, link: _Link, reason: str) -> None:
        """The member has not come back."""
        if self._links.get(member) is link and not self._committed:
            del self._links[member]
            self.allreduce.member_failed(member, reason)

    def _note_failure(self, member: int) -> None:
        if self._execution is not None and member in self._dead:
            self._execution.member_failed(member)
        self._changed.set()
        self._deaths.set()

    def _expected(self) -> set[int]:
        return set(range(self.group.group_size)) - {self.own} - self._gone - self._dead

    @property
    def _punctual(self) -> dict[int, _Link]:
        """Connected members that the round waits for."""
        return {member: link for member, link in self._links.items() if not link.late}

    @property
    def _dead(self) -> set[int]:
        return {member for member in self.allreduce.failed if member not in self._punctual}

    async def run(self, *, wait_for_absent: bool) -> None:
        """Collect reports, fill gaps, until there are none; then commit."""
        background = [asyncio.ensure_future(self._spread_failures())]
        if wait_for_absent:
            background.append(asyncio.ensure_future(self._ask_absent()))
            if self._quorum is not None:
                background.append(asyncio.ensure_future(self._count_own_delivery()))
                background.append(asyncio.ensure_future(self._close_at_quorum(self._quorum)))
        try:
            await first_completed(self.allreduce.exchanged.wait(), self._resigned.wait())
            if self._resigned.is_set():
                raise Resigned("this member is late")
            while True:
                await self._all_reported(wait_for_absent)
                plan = self._make_plan()
                if not plan.missing:
                    break
                await self._execute(plan)
            await self._commit()
        finally:
            await cancel_and_wait(*background)

    async def _close_at_quorum(self, quorum: int) -> None:
        """When enough members have delivered, and a while has passed, do not wait for the others."""
        while self._count_delivered() < min(quorum, self.group.group_size):
            self._quorum_changed.clear()
            await self._quorum_changed.wait()
        await asyncio.sleep(self.allreduce.settings.quorum_grace)
        if not self.allreduce.delivered.is_set() and self._has_successor():
            await self._broadcast(RoundMessage(kind=RoundKind.RESIGNED))
            self._resigned.set()
            return
        late = {member for member, link in self._links.items() if not link.delivered}
        absent = self._expected() - self._links.keys()
        if late or absent:
            self.closed_early = True
            logger.info("the round goes on without %s that came too late", counted(len(late | absent), "member"))
        for member in sorted(late):
            self._links[member].late = self._links[member].obsolete = True
            await self._tell(self._links[member], RoundMessage(kind=RoundKind.LATE))
        for member in sorted(late | absent):
            self.allreduce.member_failed(member, "late")

    async def _count_own_delivery(self) -> None:
        await self.allreduce.delivered.wait()
        self._quorum_changed.set()

    def _count_delivered(self) -> int:
        return self.allreduce.delivered.is_set() + sum(link.delivered for link in self._links.values())

    def _has_successor(self) -> bool:
        order = self.allreduce.coordinators
        return any(member not in self.allreduce.failed for member in order[order.index(self.own) + 1 :])

    async def _all_reported(self, wait_for_absent: bool) -> None:
        while True:
            self._changed.clear()
            busy = [member for member, link in self._punctual.items() if link.held is None]
            complete = not wait_for_absent or self._expected() <= self._links.keys()
            if complete and not busy:
                return
            # the last one has nothing to wait for any more: all others are done, also with what it needs from them
            patience = self._silence if complete and len(busy) == 1 else None
            await first_completed(self._changed.wait(), timeout=patience)
            if patience is not None and not self._changed.is_set():
                self._drop(busy[0], "did not report in time")

    def _drop(self, member: int, reason: str) -> None:
        self._links.pop(member).handler.cancel()
        self.allreduce.member_failed(member, reason)

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
        begun, others_before = asyncio.get_running_loop().time(), self.allreduce.coordinators.index(self.own)
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
            except InterruptedDialError as e:
                # This may be chance: the next question will tell.
                logger.debug("could not ask %s about the round: %r", self.group.peer_ids[member], e)
                return
            except P2PDaemonError as e:
                self.allreduce.member_failed(member, reason_of(e))
                return
            except PEER_FAILURES as e:
                logger.debug("asked %s about the round: %r", self.group.peer_ids[member], e)
        if member in self._links:
            return
        if status is RoundStatus.FINISHED and self.allreduce.waits_for_beginning_of(member):
            self.allreduce.member_failed(member, "has left without taking part")
        elif status is RoundStatus.FINISHED:
            self._gone.add(member)
            self._changed.set()
        elif status in late:
            # It runs the round, perhaps, but it has not found its way to this coordinator.
            self.allreduce.member_failed(member, "did not come to the coordinator in time")

    async def _broadcast(self, message: RoundMessage, *, end: bool = False) -> None:
        await asyncio.gather(*[self._tell(link, message, end) for link in self._punctual.values()])

    async def _tell(self, link: _Link, message: RoundMessage, end: bool = False) -> None:
        try:
            async with asyncio.timeout(self._silence):
                await link.line.send(message, end=end)
        except PEER_FAILURES as e:
            # Its handler notices, too.
            logger.debug("could not tell %s: %r", link.line.call.remote, e)

    async def _commit(self) -> None:
        self._committed = True
        if self.closed_early:
            self._result.set_result(self.vector.copy_values())
        self.allreduce.weights = self.allreduce.weights or self._final_weights()
        not_finite = sorted(self.allreduce.seen_not_finite | self.allreduce.told_not_finite)
        commit = RoundMessage(
            kind=RoundKind.COMMIT, weights=self.allreduce.weights, members=sorted(self._dead), not_finite=not_finite
        )
        await self._broadcast(commit, end=True)

    def _final_weights(self) -> list[float]:
        weights = [0.0] * self.group.group_size
        for member in self.allreduce.senders:
            if member == self.own:
                weights[member] = self.allreduce.weight
            elif member in self._punctual:
                weights[member] = self._links[member].weight
            elif member in self._gone:
                weights[member] = self.allreduce.weight_of(member)
        return weights

    async def _send_result(self, link: _Link) -> None:
        """Give a late member everything, as soon as the round is over."""
        values = await asyncio.shield(self._result)
        for reducer, parts in enumerate(self.vector.parts):
            for index, part in enumerate(parts):
                encoded = part.compress(part.of(values)) if self.vector.has_average(reducer, index) else None
                await link.line.send_part((reducer, index), encoded)
        await link.line.send(RoundMessage(kind=RoundKind.COMMIT, weights=self.allreduce.weights), end=True)

    # --- filling gaps -------------------------------------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        held = {member: link.held or [] for member, link in self._punctual.items()}
        held[self.own] = self.vector.held
        living = {member: counts for member, counts in held.items() if member in self.allreduce.senders}
        return make_plan(self.vector.parts, living, self.own)

    async def _execute(self, plan: Plan) -> None:
        """Carry out a plan; a death on the way calls it off, and everybody reports again."""
        links = self._punctual
        weights = {self.own: self.allreduce.weight, **{member: link.weight for member, link in links.items()}}
        execution = Recovery(self.allreduce, plan, {member: link.line for member, link in links.items()}, weights)
        self._execution, self._has_filled_gaps = execution, True
        for link in links.values():
            link.held = None
        logger.info("finishing the parts of dead members: %d reduced again", len(plan.again))
        try:
            completed = await execution.run()
        finally:
            self._execution = None
        if not completed:
            for link in links.values():
                link.held, link.obsolete = None, True
            await self._broadcast(RoundMessage(kind=RoundKind.RESTART))

    async def _receive_for_plan(self, link: _Link, member: int, message: RoundMessage) -> None:
        reducer, index, header = message.reducer, message.index, message.part
        exists = 0 <= reducer < self.group.group_size and 0 <= index < len(self.vector.parts[reducer])
        if header is None or not exists:
            raise ProtocolError("sent a part that does not exist")
        [values] = await self.vector.receive(link.line.call, [header], [self.vector.parts[reducer][index]])
        is_average = self._execution is not None and self._execution.is_average((reducer, index))
        if is_average and values is not None and not all_finite(values):
            self.allreduce.seen_not_finite.add(member)
            raise ProtocolError("sent an average that is not finite")
        if self._execution is not None and not link.obsolete:
            self._execution.deliver(member, (reducer, index), values)
