"""The coordinator's part in the completion of a round: who is there, dead or late, what is missing, and the end.

After a death it fills the gaps: it finds out which parts are missing where, and makes one attempt after another to get
them there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging.allreduce.members import Link, Member, Standing
from shoal.averaging.allreduce.parts import Part
from shoal.averaging.allreduce.reducer import PartReducer
from shoal.averaging.control import AveragingMode
from shoal.averaging.finite import all_finite
from shoal.averaging.messages import (
    PEER_FAILURES,
    PartKey,
    RoundKind,
    RoundMessage,
    RoundStatus,
    SharedCall,
    StatusRequest,
    reason_of,
    show_life,
)
from shoal.errors import InterruptedDialError, P2PDaemonError, ProtocolError
from shoal.logs import counted
from shoal.p2p import Call
from shoal.tasks import all_of, cancel_and_wait, first_completed

if TYPE_CHECKING:
    from shoal.averaging.allreduce.exchange import AllReduce


logger = logging.getLogger(__name__)

# Seconds for which a member whose connection broke may come back before it counts as dead.
RECONNECT_GRACE = 0.3
# Seconds between questions to members that have not come.
STATUS_PERIOD = 0.5

Ranges = list[tuple[int, int, int]]
"""Parts of a reducer: the reducer, the first one, the end."""


@dataclass
class Plan:
    """How the gaps of living members are filled."""

    sources: dict[PartKey, int] = field(default_factory=dict)
    """Averages that exist, and who holds them."""
    again: list[PartKey] = field(default_factory=list)
    """Parts that have to be reduced again, from all living senders."""
    missing: dict[int, Ranges] = field(default_factory=dict)
    """What each member lacks."""

    def parts_missing(self, member: int) -> list[PartKey]:
        return [(r, k) for r, start, stop in self.missing.get(member, []) for k in range(start, stop)]


def make_plan(parts: Sequence[Sequence[Part]], held: Mapping[int, Sequence[int]], own: int) -> Plan:
    """What living senders lack, and where it comes from.

    Args:
        parts: of each reducer.
        held: how many of them each living sender holds.
        own: the member that plans; it is preferred as a source.
    """
    plan = Plan()
    if len(held) < 2:  # nobody to average with
        return plan
    for reducer, theirs in enumerate(parts):
        counts = {member: held[member][reducer] for member in sorted(held)}
        lacking = [member for member, count in counts.items() if count < len(theirs)]
        if not lacking:
            continue
        most = max(counts.values())
        best = own if counts.get(own) == most else max(counts, key=lambda member: counts[member])
        for index in range(min(counts[member] for member in lacking), len(theirs)):
            if index < most:
                plan.sources[reducer, index] = best
            else:
                plan.again.append((reducer, index))
        for member in lacking:
            plan.missing.setdefault(member, []).append((reducer, counts[member], len(theirs)))
    return plan


class Recovery:
    """One attempt to fill gaps, at the coordinator."""

    def __init__(
        self, allreduce: AllReduce, plan: Plan, calls: dict[int, SharedCall], weights: dict[int, float]
    ) -> None:
        self._vector, self._own, self._plan, self._calls = allreduce.vector, allreduce.own_index, plan, calls
        roster = allreduce.roster
        senders = [member for member in calls if member in roster.senders]
        parts = [self._vector.parts[reducer][index] for reducer, index in plan.again]
        local = self._vector.sound_values if roster.is_sender else None
        self._reducer = PartReducer(parts, senders, local, self._own, weights, roster.seen_not_finite.add)
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

    def is_average(self, key: PartKey) -> bool:
        """Whether a part that comes is an average that its sender holds."""
        return key in self._fetched

    def deliver(self, member: int, key: PartKey, values: torch.Tensor | None) -> None:
        """A part has come."""
        waiting = self._fetched.get(key)
        if waiting is not None and self._plan.sources[key] == member:
            if not waiting.done():
                waiting.set_result(values)
        elif key in self._position:
            self._reducer.deliver(member, self._position[key], values)

    async def run(self) -> bool:
        """Fill the gaps; returns whether all of them are filled."""
        work: list[Coroutine[Any, Any, None]] = [self._serve_member(member) for member in self._calls]
        if self._own in self._plan.missing:
            work.append(self._fill_own())
        everything = asyncio.ensure_future(all_of(*work))
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
            await cancel_and_wait(everything)

    async def _serve_member(self, member: int) -> None:
        shared = self._calls[member]
        wanted = [key for key, source in self._plan.sources.items() if source == member]
        wanted += self._plan.again if member in self._senders else []
        assignment = RoundMessage(
            kind=RoundKind.ASSIGNMENT, send=_as_ranges(wanted), expect=self._plan.missing.get(member, [])
        )
        await shared.send(assignment)
        for key in self._plan.parts_missing(member):
            average = await self._average(key)
            part = self._vector.parts[key[0]][key[1]]
            await shared.send_part(key, None if average is None else part.compress(average))

    async def _fill_own(self) -> None:
        for key in self._plan.parts_missing(self._own):
            self._vector.take(*key, await self._average(key))

    async def _average(self, key: PartKey) -> torch.Tensor | None:
        if key not in self._averages:
            self._averages[key] = await self._obtain(key)
        return self._averages[key]

    async def _obtain(self, key: PartKey) -> torch.Tensor | None:
        if key in self._position:
            return await self._reducer.peek(self._position[key])
        # Whoever holds the average has already mixed it with its own values.
        if self._vector.alpha != 1:
            return None
        if self._plan.sources[key] == self._own:
            return self._vector.values(self._vector.parts[key[0]][key[1]]) if self._vector.has_average(*key) else None
        return await asyncio.shield(self._fetched[key])


def _as_ranges(keys: list[PartKey]) -> Ranges:
    """Parts as few ranges, in order."""
    ranges: Ranges = []
    for reducer, index in sorted(keys):
        if ranges and ranges[-1][0] == reducer and ranges[-1][2] == index:
            ranges[-1] = (reducer, ranges[-1][1], index + 1)
        else:
            ranges.append((reducer, index, index + 1))
    return ranges


class Resigned(ProtocolError):
    """The coordinator is late itself."""


class Coordination:
    """Serves the members that take this one for the coordinator.

    Args:
        allreduce: the round's exchange of parts.
    """

    def __init__(self, allreduce: AllReduce) -> None:
        self.allreduce = allreduce
        self.vector, self.group, self.own = allreduce.vector, allreduce.group, allreduce.own_index
        self.roster = allreduce.roster
        self._silence = allreduce.settings.sender_timeout
        self._changed = asyncio.Event()
        self._deaths = asyncio.Event()
        self._quorum_changed = asyncio.Event()
        self._resigned = asyncio.Event()
        self._execution: Recovery | None = None
        self.roster.on_failure.append(self._note_failure)
        self._committed = False
        # All values, for members that were late.
        self._result: asyncio.Future[list[torch.Tensor]] = asyncio.get_running_loop().create_future()
        # What was averaged again, without those that had failed, may differ from what one that comes back holds.
        self._has_filled_gaps = False

    def close(self) -> None:
        """The round has ended here, with or without a result."""
        if not self._result.done():
            self._result.cancel()
        # The members that follow this one must not believe that the round goes on.
        if not self._committed:
            for link in self.roster.links.values():
                link.handler.cancel()

    async def serve(self, call: Call, hello: RoundMessage, member: Member) -> None:
        """Hold a member's call until the round is over; runs in the handler of its call."""
        handler = asyncio.current_task()
        assert handler is not None
        if self._committed and not self.roster.closed_early:
            raise ProtocolError("the round is over, without this member")
        too_late = (self.roster.closed_early or self._has_filled_gaps) and member.failed
        link = Link(SharedCall(call), handler, self.group.limited(member.index, hello.weight))
        await link.shared.send(RoundMessage(kind=RoundKind.ALIVE))
        member.link = link
        self._changed.set()
        if too_late or hello.late:
            self.roster.closed_early = True
            self.roster.fail(member.index, "late", Standing.LATE)
            await link.shared.send(RoundMessage(kind=RoundKind.LATE))
        alive = asyncio.ensure_future(show_life(link.shared, self._silence))
        try:
            while await self._serve_message(link, member):
                pass
        except BaseException as e:
            if member.link is link and not self._committed:
                asyncio.get_running_loop().call_later(RECONNECT_GRACE, self._lost, member, link, reason_of(e))
            raise
        finally:
            await cancel_and_wait(alive)

    async def _serve_message(self, link: Link, member: Member) -> bool:
        async with asyncio.timeout(self._silence):
            message = await link.shared.call.receive(RoundMessage)
            self.allreduce.heard_of(member.index)
            if message is None:
                if not self._committed:
                    raise ProtocolError("left the round early")
                return False
            if message.kind == RoundKind.LATE and member.late:
                await self._send_result(link)
            if message.kind == RoundKind.PART:
                await self._receive_for_plan(link, member, message)
        if message.kind == RoundKind.REPORT and not member.late:
            if len(message.held) != self.group.group_size:
                raise ProtocolError("malformed report")
            self.roster.note_told_not_finite(message.not_finite, member.index)
            link.held, link.obsolete = message.held, False
            self._changed.set()
        if message.kind == RoundKind.DELIVERED:
            link.delivered = True
            self._quorum_changed.set()
        return True

    def _lost(self, member: Member, link: Link, reason: str) -> None:
        """The member has not come back."""
        if member.link is link and not self._committed:
            member.link = None
            self.roster.fail(member.index, reason)

    def _note_failure(self, member: Member) -> None:
        if self._execution is not None and member.index in self.roster.dead:
            self._execution.member_failed(member.index)
        self._changed.set()
        self._deaths.set()

    async def run(self, *, wait_for_absent: bool) -> None:
        """Collect reports, fill gaps, until there are none; then commit."""
        background = [asyncio.ensure_future(self._spread_failures())]
        if wait_for_absent:
            background.append(asyncio.ensure_future(self._ask_absent()))
            if self.roster.quorum is not None:
                background.append(asyncio.ensure_future(self._count_own_delivery()))
                background.append(asyncio.ensure_future(self._close_at_quorum()))
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

    async def _close_at_quorum(self) -> None:
        """When enough members have delivered, and a while has passed, do not wait for the others."""
        while not self.roster.has_quorum:
            self._quorum_changed.clear()
            await self._quorum_changed.wait()
        await asyncio.sleep(self.allreduce.settings.quorum_grace)
        if not self.roster.delivered.is_set() and self.roster.has_successor:
            await self._broadcast(RoundMessage(kind=RoundKind.RESIGNED))
            self._resigned.set()
            return
        late = self.roster.close_early()
        if late:
            logger.info("the round goes on without %s that came too late", counted(len(late), "member"))
        for index in sorted(late):
            self.roster.fail(index, "late", Standing.LATE)
            if (link := self.roster.members[index].link) is not None:
                link.obsolete = True
                await self._tell(link, RoundMessage(kind=RoundKind.LATE))

    async def _count_own_delivery(self) -> None:
        await self.roster.delivered.wait()
        self._quorum_changed.set()

    async def _all_reported(self, wait_for_absent: bool) -> None:
        while True:
            self._changed.clear()
            busy = [member for member, link in self.roster.punctual.items() if link.held is None]
            complete = not wait_for_absent or not self.roster.absent
            if complete and not busy:
                return
            # the last one has nothing to wait for any more: all others are done, also with what it needs from them
            patience = self._silence if complete and len(busy) == 1 else None
            await first_completed(self._changed.wait(), timeout=patience)
            if patience is not None and not self._changed.is_set():
                self._drop(self.roster.members[busy[0]], "did not report in time")

    def _drop(self, member: Member, reason: str) -> None:
        if member.link is not None:
            member.link.handler.cancel()
        member.link = None
        self.roster.fail(member.index, reason)

    async def _spread_failures(self) -> None:
        """Tell everybody of deaths, so that nobody has to find out by waiting."""
        told: set[int] = set()
        while True:
            self._deaths.clear()
            news = self.roster.dead - told
            if news:
                told |= news
                await self._broadcast(RoundMessage(kind=RoundKind.FAILED, members=sorted(news)))
            await first_completed(self._deaths.wait(), timeout=STATUS_PERIOD)

    async def _ask_absent(self) -> None:
        """Find out about members that have not come: dead, finished before, or just late.

        One that works on the round may still be waiting for others that would coordinate before this one, and are dead.
        """
        begun, others_before = asyncio.get_running_loop().time(), self.roster.coordinators.index(self.own)
        while True:
            await asyncio.sleep(STATUS_PERIOD)
            absent = sorted(self.roster.absent)
            waited = (asyncio.get_running_loop().time() - begun) / self._silence
            late = {RoundStatus.UNKNOWN} if waited > 1 else set()
            if waited > 1 + 2 * others_before:
                late.add(RoundStatus.RUNNING)
            await asyncio.gather(*[self._ask_status(self.roster.members[index], late) for index in absent])

    async def _ask_status(self, member: Member, late: set[RoundStatus]) -> None:
        status = RoundStatus.UNKNOWN
        if member.mode is not AveragingMode.CLIENT:
            stub = self.allreduce.get_stub(member.peer_id)
            try:
                reply = await stub.rpc_round_status(
                    StatusRequest(round_id=self.allreduce.round_id), timeout=self._silence
                )
                status = RoundStatus(reply.status)
            except InterruptedDialError as e:
                # This may be chance: the next question will tell.
                logger.debug("could not ask %s about the round: %r", member.peer_id, e)
                return
            except P2PDaemonError as e:
                self.roster.fail(member.index, reason_of(e))
                return
            except PEER_FAILURES as e:
                logger.debug("asked %s about the round: %r", member.peer_id, e)
        if member.link is not None:
            return
        if status is RoundStatus.FINISHED and self.allreduce.waits_for_beginning_of(member.index):
            self.roster.fail(member.index, "has left without taking part")
        elif status is RoundStatus.FINISHED:
            if member.standing is Standing.ACTIVE:
                member.standing = Standing.GONE
            self._changed.set()
        elif status in late:
            # It runs the round, perhaps, but it has not found its way to this coordinator.
            self.roster.fail(member.index, "did not come to the coordinator in time")

    async def _broadcast(self, message: RoundMessage, *, end: bool = False) -> None:
        await asyncio.gather(*[self._tell(link, message, end) for link in self.roster.punctual.values()])

    async def _tell(self, link: Link, message: RoundMessage, end: bool = False) -> None:
        try:
            async with asyncio.timeout(self._silence):
                await link.shared.send(message, end=end)
        except PEER_FAILURES as e:
            # Its handler notices, too.
            logger.debug("could not tell %s: %r", link.shared.call.remote, e)

    async def _commit(self) -> None:
        self._committed = True
        if self.roster.closed_early:
            self._result.set_result(self.vector.copy_values())
        self.allreduce.weights = self.allreduce.weights or self._final_weights()
        commit = RoundMessage(
            kind=RoundKind.COMMIT,
            weights=self.allreduce.weights,
            members=sorted(self.roster.dead),
            not_finite=sorted(self.roster.seen_not_finite | self.roster.told_not_finite),
        )
        await self._broadcast(commit, end=True)

    def _final_weights(self) -> list[float]:
        weights, punctual = [0.0] * self.group.group_size, self.roster.punctual
        for index in self.roster.senders:
            member = self.roster.members[index]
            if index in punctual:
                weights[index] = punctual[index].weight
            elif member is self.roster.own or member.standing is Standing.GONE:
                weights[index] = self.allreduce.weight_of(member)
        return weights

    async def _send_result(self, link: Link) -> None:
        """Give a late member everything, as soon as the round is over."""
        values = await asyncio.shield(self._result)
        for reducer, parts in enumerate(self.vector.parts):
            for index, part in enumerate(parts):
                encoded = part.compress(part.of(values)) if self.vector.has_average(reducer, index) else None
                await link.shared.send_part((reducer, index), encoded)
        await link.shared.send(RoundMessage(kind=RoundKind.COMMIT, weights=self.allreduce.weights), end=True)

    # --- filling gaps -------------------------------------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        held = {member: link.held or [] for member, link in self.roster.punctual.items()}
        held[self.own] = self.vector.held
        living = {member: counts for member, counts in held.items() if member in self.roster.senders}
        return make_plan(self.vector.parts, living, self.own)

    async def _execute(self, plan: Plan) -> None:
        """Carry out a plan; a death on the way calls it off, and everybody reports again."""
        links = self.roster.punctual
        weights = {self.own: self.allreduce.weight, **{member: link.weight for member, link in links.items()}}
        execution = Recovery(self.allreduce, plan, {member: link.shared for member, link in links.items()}, weights)
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

    async def _receive_for_plan(self, link: Link, member: Member, message: RoundMessage) -> None:
        reducer, index, header = message.reducer, message.index, message.part
        exists = 0 <= reducer < self.group.group_size and 0 <= index < len(self.vector.parts[reducer])
        if header is None or not exists:
            raise ProtocolError("sent a part that does not exist")
        [values] = await self.vector.receive(link.shared.call, [header], [self.vector.parts[reducer][index]])
        is_average = self._execution is not None and self._execution.is_average((reducer, index))
        if is_average and values is not None and not all_finite(values):
            self.roster.seen_not_finite.add(member.index)
            raise ProtocolError("sent an average that is not finite")
        if self._execution is not None and not link.obsolete:
            self._execution.deliver(member.index, (reducer, index), values)
