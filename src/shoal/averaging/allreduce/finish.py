"""The second half of a round: make sure that every member has every average, and finish what the dead have left undone.

From the beginning of the round each member keeps a call open to the *coordinator*, the first member that can be
connected to. Its end is how a death becomes known at once; messages now and then show that a silent member still lives.
When a member has exchanged all its parts it reports how many averages it holds from each reducer. When all living
members have reported, the coordinator either commits the round, or lets them fill the gaps:

- a part whose average some member already holds is fetched from it and passed on as it is;
- a part that nobody holds is reduced again from all living members, by the coordinator.

Then all of them report again. So all survivors end with the same values for every part. If the coordinator dies, the
next member in order takes over; members that have left the round by then say that it was committed.

With a quorum the round does not wait for everybody. When enough members have sent everything, the others get a while
longer; then the coordinator goes on as if those that are late were dead, but keeps the result for them. A coordinator
that is late itself resigns.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

from shoal.averaging.allreduce.coordinator import Coordination, Resigned
from shoal.averaging.allreduce.members import Member
from shoal.averaging.finite import all_finite
from shoal.averaging.messages import (
    PEER_FAILURES,
    REDIAL_PAUSE,
    RoundKind,
    RoundMessage,
    SharedCall,
    reason_of,
    show_life,
)
from shoal.errors import DialError, ProtocolError, StreamClosedError
from shoal.p2p import Call
from shoal.tasks import cancel_and_wait, first_completed

if TYPE_CHECKING:
    from shoal.averaging.allreduce.exchange import AllReduce

# For the way to the coordinator and back: one whose answer is under way has begun.
MIN_ANSWER_SECONDS = 1.0


class Participation:
    """A member's part: follows the coordinators of one round, one after another if they die.

    It reports to the coordinator, and does what that one asks for.

    Args:
        allreduce: the round's exchange of parts.
    """

    def __init__(self, allreduce: AllReduce) -> None:
        self.allreduce = allreduce
        self.vector, self.group, self.roster = allreduce.vector, allreduce.group, allreduce.roster
        self._silence, self._quorum = allreduce.settings.sender_timeout, allreduce.settings.quorum
        self._changed = asyncio.Event()
        # What the coordinator wants of this member now.
        self._assignment: RoundMessage | None = None

    async def run(self, call: Call) -> None:
        """Take part under the coordinator at the other end of a call until the round is committed.

        Raises:
            Resigned: the coordinator is late itself.
            ProtocolError: it breaks the protocol.
        """
        hello = RoundMessage(
            kind=RoundKind.HELLO,
            round_id=self.allreduce.round_id,
            weight=self.allreduce.weight,
            late=self.roster.own.late,
        )
        shared, coordinator = SharedCall(call), self.group.peer_ids.index(call.remote)
        await shared.send(hello)
        helpers = [
            asyncio.ensure_future(work)
            for work in (
                show_life(shared, self._silence),
                self._say_when_delivered(shared),
                self._report_when_ready(shared),
            )
        ]
        try:
            await self._receive_first(call)
            while True:
                async with asyncio.timeout(self._silence):
                    message = await _receive(call)
                    self.allreduce.heard_of(coordinator)
                    if message.kind == RoundKind.PART:
                        await self._take_part(call, message)
                if message.kind == RoundKind.COMMIT:
                    self._drop(message.members)
                    self.allreduce.weights = self._check_weights(message.weights)
                    self.roster.note_told_not_finite(message.not_finite, coordinator)
                    return
                if message.kind == RoundKind.RESIGNED:
                    raise Resigned("is late itself")
                if message.kind == RoundKind.LATE:
                    await self.allreduce.abandon()
                    await shared.send(RoundMessage(kind=RoundKind.LATE))
                elif message.kind == RoundKind.FAILED:
                    self._drop(message.members)
                elif message.kind in (RoundKind.ASSIGNMENT, RoundKind.RESTART):
                    # One that is being fulfilled ends between two parts.
                    self._assignment = message
                    self._changed.set()
                    helpers.append(asyncio.ensure_future(self._fulfil(shared, message)))
        finally:
            await cancel_and_wait(*helpers)

    async def _receive_first(self, call: Call) -> None:
        """The coordinator's answer to the greeting. With a quorum, one that has not begun yet is late.

        Raises:
            Resigned: it is late.
            TimeoutError: it does not answer.
        """
        answer = asyncio.ensure_future(_receive(call))
        try:
            async with asyncio.timeout(self._silence):
                if self._quorum is not None:
                    await first_completed(asyncio.shield(answer), self.roster.delivered.wait())
                    grace = max(self.allreduce.settings.quorum_grace, MIN_ANSWER_SECONDS)
                    await first_completed(asyncio.shield(answer), timeout=grace)
                    if not answer.done():
                        raise Resigned("has not begun in time")
                if (await answer).kind != RoundKind.ALIVE:
                    raise ProtocolError("not an answer to a greeting")
        finally:
            await cancel_and_wait(answer)

    def _check_weights(self, weights: list[float]) -> list[float]:
        if len(weights) != self.group.group_size or not all(0 <= weight < math.inf for weight in weights):
            raise ProtocolError("the coordinator's list of weights is malformed")
        return weights

    def _drop(self, members: list[int]) -> None:
        for member in members if not self.roster.own.late else ():
            if 0 <= member < self.group.group_size and member != self.roster.own.index:
                self.roster.fail(member, "the coordinator has lost it")

    async def _say_when_delivered(self, shared: SharedCall) -> None:
        if self._quorum is not None:
            await self.roster.delivered.wait()
            await shared.send(RoundMessage(kind=RoundKind.DELIVERED))

    async def _report_when_ready(self, shared: SharedCall) -> None:
        await self.allreduce.exchanged.wait()
        await self._report(shared)

    async def _report(self, shared: SharedCall) -> None:
        left_out = sorted(self.roster.seen_not_finite)
        await shared.send(RoundMessage(kind=RoundKind.REPORT, held=self.vector.held, not_finite=left_out))

    async def _fulfil(self, shared: SharedCall, assignment: RoundMessage) -> None:
        """Send the parts that the coordinator wants; report when those that it promised are here, too."""
        for reducer, start, stop in assignment.send:
            for index in range(start, stop):
                if self._assignment is not assignment:
                    return
                part, is_known = self.vector.parts[reducer][index], self.vector.has_average(reducer, index)
                await shared.send_part((reducer, index), self.vector.encode(part) if is_known else None)
        while any(self.vector.held[reducer] < stop for reducer, _, stop in assignment.expect):
            self._changed.clear()
            await self._changed.wait()
            if self._assignment is not assignment:
                return
        await self._report(shared)

    async def _take_part(self, call: Call, message: RoundMessage) -> None:
        reducer, index, header = message.reducer, message.index, message.part
        if header is None or not 0 <= reducer < self.group.group_size or index != self.vector.held[reducer]:
            raise ProtocolError("the coordinator sent a part that is not due")
        if index >= len(self.vector.parts[reducer]):
            raise ProtocolError("the coordinator sent a part that does not exist")
        [values] = await self.vector.receive(call, [header], [self.vector.parts[reducer][index]])
        if values is not None and not all_finite(values):
            self.roster.seen_not_finite.add(self.group.peer_ids.index(call.remote))
            raise ProtocolError("the coordinator sent an average that is not finite")
        self.vector.take(reducer, index, values)
        self._changed.set()


async def _receive(call: Call) -> RoundMessage:
    message = await call.receive(RoundMessage)
    if message is None:
        raise ProtocolError("the coordinator ended without a decision")
    return message


logger = logging.getLogger(__name__)

_MAX_FOLLOW_ATTEMPTS = 3


class Completion:
    """Brings one round to its end. Lives as long as the round.

    Args:
        allreduce: the round's exchange of parts.
    """

    def __init__(self, allreduce: AllReduce) -> None:
        self.allreduce, self.roster = allreduce, allreduce.roster
        self._participation, self._coordination = Participation(allreduce), Coordination(allreduce)
        self._quorum = allreduce.settings.quorum

    async def serve(self, call: Call, hello: RoundMessage, member: int) -> None:
        """Hold the call of a member that takes this one for the coordinator."""
        await self._coordination.serve(call, hello, self.roster.members[member])

    async def run(self) -> None:
        """Return when every living member that is not late has every average that could be saved."""
        try:
            await self._run()
        finally:
            self._coordination.close()

    async def _run(self) -> None:
        for index in self.roster.coordinators:
            candidate = self.roster.members[index]
            if candidate is self.roster.own:
                if await self._coordinate_unless_late():
                    return
            elif self._is_worth_following(candidate) and await self._follow_unless_silent(candidate):
                # Members that could not reach the coordinator.
                if not self.roster.own.late:
                    await self._coordination.run(wait_for_absent=False)
                return
        await self.allreduce.exchanged.wait()

    async def _coordinate_unless_late(self) -> bool:
        """Coordinate the round; returns whether that was this member's to do, rather than to follow the others."""
        try:
            await self._coordination.run(wait_for_absent=True)
        except Resigned:
            is_late = True
        else:
            # It comes alone: perhaps the others have finished, and have the result for it.
            has_results = any(self.allreduce.vector.held)
            is_late = self._quorum is not None and bool(self.roster.failed) and not has_results
        if is_late:
            await self.allreduce.abandon()
        return not is_late

    def _is_worth_following(self, candidate: Member) -> bool:
        """One that has failed may still have the result of a round that did not wait for this member."""
        return not candidate.silent.is_set() and (not candidate.failed or self._quorum is not None)

    async def _follow_unless_silent(self, coordinator: Member) -> bool:
        """If several fall silent, nobody waits for one after the other."""
        following = asyncio.ensure_future(self._follow(coordinator))
        await first_completed(following, coordinator.silent.wait())
        return not following.cancelled() and following.result()

    async def _follow(self, coordinator: Member) -> bool:
        """Take part under a coordinator; returns whether the round was committed."""
        reason, loop = "", asyncio.get_running_loop()
        deadline = loop.time() + self.allreduce.settings.sender_timeout
        for attempt in range(_MAX_FOLLOW_ATTEMPTS):
            await asyncio.sleep(attempt * REDIAL_PAUSE)
            if loop.time() >= deadline:
                break
            try:
                async with self.allreduce.get_stub(coordinator.peer_id).rpc_complete() as call:
                    await self._participation.run(call)
                    await call.send_end()
                return True
            except Resigned as e:
                # It is going to ask for the result.
                self.roster.closed_early, reason = True, str(e)
                break
            except (StreamClosedError, DialError) as e:
                # A connection may break without a death: try once more.
                reason = reason_of(e)
            except PEER_FAILURES as e:
                reason = reason_of(e)
                break
        self.roster.fail(coordinator.index, reason)
        return False
