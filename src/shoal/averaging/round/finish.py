"""The second half of a round: every member gets every average, even if some members have died.

Each member keeps a call open to the *coordinator* from the beginning of the round. The coordinator is the first member
that accepts connections. If a member dies, the end of its call shows that at once; a member that has nothing to say
sends a sign of life now and then. When a member has exchanged all its parts, it reports how many averages it holds from
each reducer. When all living members have reported, the coordinator either commits the round, or fills the gaps:

- if some member holds the average of a part, the coordinator fetches it and passes it on unchanged;
- if no member holds it, the coordinator reduces the part again, from the values of all living members.

Then all members report again. So all survivors end with the same values for every part. If the coordinator dies, the
next member in order takes over. So it does if the coordinator lives and does nothing: a member that has waited for it
for ``reducer_timeout`` seconds asks the others, and gives it up if all of them only wait for it, too. If members have
left the round by then, they answer that it was committed.

A connection may break without a death. So if the coordinator commits without some members that have not left on
purpose, it keeps the result for them for a while. A member that comes after that, or that finds only others that have
left, averages nothing again, because its averages would differ from those of the others.

With a quorum the round does not wait for all members. When enough of them have sent everything, the others get a time
of grace. Then the coordinator goes on as if the late members were dead, but keeps the result for them. A coordinator
that is late itself resigns.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence

from shoal.averaging.control import LossCause, RoundResult
from shoal.averaging.finite import all_finite
from shoal.averaging.messages import (
    PEER_FAILURES,
    AssignedPart,
    Assignment,
    Commit,
    Delivered,
    Greeting,
    Late,
    Loss,
    MembersLost,
    MissedError,
    NotFiniteError,
    Report,
    ResignedError,
    Resigns,
    Restart,
    RoundAlive,
    RoundMessage,
    RoundOver,
    RoundStatus,
    SharedCall,
    StatusRequest,
    show_life,
)
from shoal.averaging.round.coordinator import Coordinator
from shoal.averaging.round.exchange import AllReduce
from shoal.averaging.round.state import Lost, RoundMember
from shoal.base.tasks import all_of, cancel_and_wait, first_completed, wait_at_most
from shoal.errors import ProtocolError
from shoal.net.resumable import ALIVE_PER_TIMEOUT
from shoal.p2p import Call, PeerID

logger = logging.getLogger(__name__)

# The least time to wait for the coordinator's answer. It covers the way there and back: a coordinator whose answer is
# still under way is not late.
MIN_ANSWER_SECONDS = 1.0


class Participant:
    """A member's side: it follows the coordinators of one round, one after another if they die.

    It reports to the coordinator, and sends and takes the parts that the coordinator asks for.

    Args:
        allreduce: the round's exchange of parts.
    """

    def __init__(self, allreduce: AllReduce) -> None:
        self.allreduce = allreduce
        self.vector, self.group, self.state = allreduce.vector, allreduce.group, allreduce.state
        self._silence, self._quorum = allreduce.settings.sender_timeout, allreduce.settings.quorum
        self._changed = asyncio.Event()
        # The latest assignment of the coordinator, and whether work on it has yet to begin.
        self._assignment: Assignment | None = None
        self._is_assigned = asyncio.Event()
        self._reported_at = self.first_report_at = math.inf

    def has_waited(self, seconds: float) -> bool:
        """Whether this member reported at least ``seconds`` ago, and was asked for nothing since."""
        return asyncio.get_running_loop().time() - self._reported_at >= seconds

    async def run(self, call: Call) -> None:
        """Follow the coordinator at the other end of a call until the round is committed.

        Raises:
            ResignedError: the coordinator is late itself.
            MissedError: the round was committed without this member, and its result is not kept.
            ProtocolError: the coordinator breaks the protocol.
            P2PDaemonError, P2PHandlerError, TimeoutError: the coordinator failed.
        """
        claim = self.allreduce.book.own
        is_late, missed = self.state.own.late, self.state.missed
        greeting = Greeting(
            self.allreduce.round_id, self.allreduce.weight, is_late, missed, [*claim.norms], claim.statement
        )
        shared, coordinator = SharedCall(call), self.group.peer_ids.index(call.remote)
        await shared.send(greeting)
        helpers = [
            asyncio.ensure_future(work)
            for work in (
                show_life(shared, self._silence),
                self._say_when_delivered(shared),
                self._report_when_ready(shared),
                self._fulfil_the_latest(shared),
            )
        ]
        try:
            await self._receive_first(call)
            self.allreduce.calls[coordinator].note_life()
            while True:
                async with asyncio.timeout(self._silence):
                    message = await _receive(call)
                    self.allreduce.calls[coordinator].note_life()
                    if isinstance(message, AssignedPart):
                        await self._take_part(call, message)
                match message:
                    case Commit():
                        self._take_commit(message, coordinator)
                        return
                    case Resigns():
                        raise ResignedError("is late itself")
                    case Late():
                        # All senders hold all averages, so this member's result is the right one and may be in use.
                        if self.state.all_complete:
                            return
                        await self.allreduce.abandon()
                        await shared.send(Late())
                    case MembersLost():
                        self._lose(message.lost)
                    case Assignment() | Restart():
                        # An older assignment sees that it was replaced, and stops between two parts.
                        self._assignment = message if isinstance(message, Assignment) else Assignment()
                        self._reported_at = math.inf
                        self._is_assigned.set()
                        self._changed.set()
        finally:
            self._reported_at = math.inf
            await cancel_and_wait(*helpers)

    async def _receive_first(self, call: Call) -> None:
        """Wait for the coordinator's answer to the greeting.

        With a quorum, the coordinator is late if it has not answered some time after this member has delivered.

        Raises:
            ResignedError: the coordinator is late.
            MissedError: the coordinator has committed the round.
            TimeoutError: the coordinator does not answer.
        """
        answer = asyncio.ensure_future(_receive(call))
        try:
            async with asyncio.timeout(self._silence):
                if self._quorum is not None:
                    await first_completed(asyncio.shield(answer), self.allreduce.delivered.wait())
                    grace = max(self.allreduce.settings.quorum_grace, MIN_ANSWER_SECONDS)
                    await first_completed(asyncio.shield(answer), timeout=grace)
                    if not answer.done():
                        raise ResignedError("has not begun in time")
                match await answer:
                    case RoundOver():
                        raise MissedError("has finished the round without this member")
                    case RoundAlive():
                        return
                raise ProtocolError("not an answer to a greeting")
        finally:
            await cancel_and_wait(answer)

    def _check_weights(self, weights: list[float]) -> list[float]:
        if len(weights) != self.group.group_size or not all(0 <= weight < math.inf for weight in weights):
            raise ProtocolError("the coordinator's list of weights is malformed")
        return [self.group.limited(index, weight) for index, weight in enumerate(weights)]

    def _take_commit(self, commit: Commit, coordinator: int) -> None:
        self._lose(commit.lost)
        self.allreduce.weights = self._check_weights(commit.weights)
        self.state.note_told(commit.not_finite, commit.left_out, coordinator)
        self.allreduce.book.take_proofs(commit.untrue, commit.statements)
        # Nobody can have waited longer than the round has taken.
        seconds = asyncio.get_running_loop().time() - self.allreduce.began_at
        told = {index: waited for index, waited in commit.waits.items() if index < self.group.group_size}
        self.allreduce.waits.agreed = {index: min(waited, seconds) for index, waited in told.items()}

    def _lose(self, lost: Mapping[int, LossCause]) -> None:
        for index, cause in lost.items() if not self.state.own.late else ():
            if index < self.group.group_size and index != self.state.own.index:
                self.allreduce.emit(Lost(index, Loss(cause, "the coordinator has lost it"), is_hearsay=True))

    async def _say_when_delivered(self, shared: SharedCall) -> None:
        if self._quorum is not None:
            await self.allreduce.delivered.wait()
            await shared.send(Delivered())

    async def _report_when_ready(self, shared: SharedCall) -> None:
        await self.allreduce.exchanged.wait()
        await self._report(shared)

    async def _report(self, shared: SharedCall) -> None:
        not_finite = [member.index for member in self.state.members if member.sent_not_finite]
        left_out, statements = self.allreduce.left_out, self.allreduce.book.report()
        await shared.send(Report([*self.vector.held], not_finite, left_out, statements, self.allreduce.waits.notable))
        self._reported_at = asyncio.get_running_loop().time()
        self.first_report_at = min(self.first_report_at, self._reported_at)

    async def _fulfil_the_latest(self, shared: SharedCall) -> None:
        """One assignment at a time: a coordinator could give any number of them, and take no answers."""
        while True:
            await self._is_assigned.wait()
            self._is_assigned.clear()
            if (assignment := self._assignment) is not None:
                await self._fulfil(shared, assignment)

    async def _fulfil(self, shared: SharedCall, assignment: Assignment) -> None:
        """Send the parts that the coordinator wants, wait for those that it has promised, and report."""
        for reducer, start, stop in assignment.send:
            for index in range(start, stop):
                if self._assignment is not assignment:
                    return
                part, is_known = self.vector.parts[reducer][index], self.vector.has_average(reducer, index)
                part = part.returned if index < self.vector.held[reducer] else part
                await shared.send_part((reducer, index), self.vector.encode(part) if is_known else None)
        while any(self.vector.held[reducer] < stop for reducer, _, stop in assignment.expect):
            self._changed.clear()
            await self._changed.wait()
            if self._assignment is not assignment:
                return
        await self._report(shared)

    async def _take_part(self, call: Call, message: AssignedPart) -> None:
        reducer, index = message.reducer, message.index
        if reducer >= self.group.group_size or index != self.vector.held[reducer]:
            raise ProtocolError("the coordinator sent a part that is not due")
        if index >= len(self.vector.parts[reducer]):
            raise ProtocolError("the coordinator sent a part that does not exist")
        [values] = await self.vector.receive(call, [message.part], [self.vector.parts[reducer][index].returned])
        if values is not None and not all_finite(values):
            self.allreduce.note_not_finite(self.group.peer_ids.index(call.remote))
            raise NotFiniteError("the coordinator sent an average that is not finite")
        self.vector.take(reducer, index, values)
        self._changed.set()


async def _receive(call: Call) -> RoundMessage:
    message = await call.receive(RoundMessage)
    if message is None:
        raise ProtocolError("the coordinator ended without a decision")
    return message


class Round:
    """One all-reduce: the exchange of parts, then its end. Serves the calls of other members meanwhile.

    Args:
        allreduce: the exchange of parts.
        note_stuck: called with a coordinator that has not ended the round, and how many seconds this member waited;
            perhaps after the result.
    """

    def __init__(
        self, allreduce: AllReduce, note_stuck: Callable[[PeerID, float], object] = lambda coordinator, seconds: None
    ) -> None:
        self.allreduce, self.state, self._note_stuck = allreduce, allreduce.state, note_stuck
        self._follower, self._coordinator = Participant(allreduce), Coordinator(allreduce)
        self._quorum = allreduce.settings.quorum
        # A coordinator did not end the round, and others that follow it still are to hear that this member waited.
        self._has_given_up = False
        self._left: set[PeerID] = set()  # the coordinators that this member does not follow any more
        self.is_outdated = asyncio.Event()
        """Set when members that are late would not find their way back into the run by this result any more."""
        self._work: asyncio.Future[None] | None = None
        self._acting: asyncio.Future[None] | None = None

    async def run(self, failed_before: Sequence[int] = ()) -> RoundResult:
        """Average; afterwards the tensors hold the result. :meth:`finish` must follow.

        Args:
            failed_before: positions of members that failed in an earlier phase; nobody waits for them.

        Raises:
            AllreduceException: nothing at all was averaged; the tensors are as they were.
        """
        for member in failed_before:
            loss = Loss(LossCause.EARLIER, "failed in an earlier phase")
            self.allreduce.emit(Lost(member, loss, is_hearsay=True))
        self._acting = asyncio.ensure_future(self._coordinator.act())
        # The call to the coordinator begins first, so it takes the connection that is there already. A call that has to
        # dial would hear of the end later than the others.
        self._work = work = asyncio.ensure_future(all_of(self._complete(), self.allreduce.run()))
        try:
            # When all senders hold all averages the result is final; finish() waits for the calls to end.
            await first_completed(asyncio.shield(work), self.allreduce.all_complete.wait())
            if self.allreduce.has_waited_long:
                await asyncio.wait([work])
            if work.done():
                work.result()
            else:  # the tensors go back to their user, although some calls have not ended
                self._coordinator.release()
        except BaseException:
            for index in self.allreduce.reducer.find_who_holds_up():
                self.state.members[index].holds_up = True
            await cancel_and_wait(work)
            raise
        return self.allreduce.result()

    @property
    def is_committed(self) -> bool:
        """Whether all members that stayed to the end have the same averages, as far as this member knows."""
        return bool(self.allreduce.weights) or self.allreduce.all_complete.is_set()

    async def finish(self, linger: float) -> None:
        """Serve the other members until they have all that they need. The tensors are not touched any more.

        Args:
            linger: seconds for which late members may come for the result.
        """
        if self._work is None or self._acting is None:
            return
        try:
            await asyncio.wait([self._work])
            await self._coordinator.wait_until_confirmed()
            if self.state.closed_early:
                await wait_at_most(self.is_outdated, linger)
        finally:
            await cancel_and_wait(self._work, self._acting)
            self.allreduce.vector.let_go()

    async def serve(self, call: Call, greeting: Greeting, member: PeerID) -> None:
        """Serve the call of a member that follows this one as its coordinator.

        Raises:
            ProtocolError: the caller is not a member, or breaks the protocol.
        """
        peers = self.allreduce.group.peer_ids
        if member not in peers:
            raise ProtocolError("not the greeting of a member of this round")
        await self._coordinator.serve(call, greeting, self.state.members[peers.index(member)])

    async def _complete(self) -> None:
        """Run until every living member that is not late has every average that could be saved."""
        try:
            await self._find_coordinator()
        finally:
            self._coordinator.close()
            self.allreduce.end()

    async def _find_coordinator(self) -> None:
        for index in self.state.coordinators:
            candidate = self.state.members[index]
            if candidate is self.state.own:
                if await self._coordinate_unless_late():
                    return
            elif self._is_worth_following(candidate) and await self._follow_unless_silent(candidate):
                # Some members could not reach that coordinator and have called this one: they get the result here.
                if not self.state.own.late:
                    await self._coordinator.coordinate(waits=False)
                return
            self._left.add(candidate.peer_id)
        await self.allreduce.exchanged.wait()

    async def _coordinate_unless_late(self) -> bool:
        """Coordinate the round. Returns ``False`` if this member is late itself and has to follow another one."""
        try:
            await self._coordinator.coordinate(waits=True)
        except ResignedError:
            is_late = True
        else:
            # Nobody has joined this member, and it got no averages. The others may have finished without it, and may
            # hold the result for it.
            has_results = any(self.allreduce.vector.held) or not self.state.own.is_sender  # an auxiliary never gets any
            is_late = self._quorum is not None and bool(self.state.failed) and not has_results
        if is_late:
            await self.allreduce.abandon()
        return not is_late

    def _is_worth_following(self, candidate: RoundMember) -> bool:
        """With a quorum even a failed candidate is tried: it may hold the result of a round that went on without us."""
        return not self._is_silent(candidate).is_set() and (not candidate.failed or self._quorum is not None)

    def _is_silent(self, candidate: RoundMember) -> asyncio.Event:
        return self.allreduce.calls[candidate.index].silent

    async def _follow_unless_silent(self, coordinator: RoundMember) -> bool:
        """Follow a coordinator, but stop as soon as the watch finds it silent.

        Candidates are watched all at once. So if several fall silent, this member does not wait for one after another.
        """
        following = asyncio.ensure_future(self._follow(coordinator))
        await first_completed(following, self._is_silent(coordinator).wait(), self._wait_until_stuck(coordinator))
        return not following.cancelled() and following.result()

    def follows_another_than(self, coordinator: PeerID) -> bool:
        """Whether this member has followed this coordinator, or tried to, and follows another one now."""
        return coordinator in self._left

    @property
    def is_waiting(self) -> bool:
        """Whether this member has nothing left to do but to wait for its coordinator, or has given that one up."""
        return self.allreduce.has_given_all and (self._has_given_up or self._follower.has_waited(0.0))

    async def _wait_until_stuck(self, coordinator: RoundMember) -> None:
        """Give a coordinator up that does not end the round, although all others only wait for that."""
        limit, state = self.allreduce.settings.reducer_timeout, self.state
        # Clients cannot be asked. One member that does not wait is enough, and is asked first the next time.
        others = [state.members[index] for index in state.coordinators]
        others = [member for member in others if member not in (state.own, coordinator)]
        busy: RoundMember | None = coordinator
        while busy is not None and not self._is_overdue:
            await asyncio.sleep(limit / ALIVE_PER_TIMEOUT)
            if self.is_waiting and self._follower.has_waited(limit):
                others.sort(key=lambda member: member is not busy)
                busy = await self._first_busy(others)
        self._has_given_up = True
        self._note_stuck(coordinator.peer_id, limit)
        stuck = Loss(LossCause.STUCK, "does not end the round, for which all others wait")
        self.allreduce.emit(Lost(coordinator.index, stuck))

    @property
    def _is_overdue(self) -> bool:
        """Whether the round would be over even if a gap had to be filled after each death, whatever others say."""
        settings, reported_at = self.allreduce.settings, self._follower.first_report_at
        seconds = 2 * settings.reducer_timeout + settings.sender_timeout + reported_at - self.allreduce.began_at
        now = asyncio.get_running_loop().time()
        return now - reported_at > (1 + len(self.state.failed)) * seconds

    async def _first_busy(self, members: list[RoundMember]) -> RoundMember | None:
        for member in members:
            if await self._is_busy(member):
                return member
        return None

    async def _is_busy(self, member: RoundMember) -> bool:
        """Whether the coordinator may be waiting for another member, which perhaps has failed only here."""
        question, stub = StatusRequest(round_id=self.allreduce.round_id), self.allreduce.get_stub(member.peer_id)
        try:
            reply = await stub.rpc_round_status(question, timeout=self.allreduce.settings.sender_timeout)
        except PEER_FAILURES as e:
            logger.debug("asked %s whether it waits for the coordinator: %r", member.peer_id, e)
            return not member.failed
        return not reply.is_waiting and reply.status in (RoundStatus.RUNNING, RoundStatus.UNKNOWN)

    async def _follow(self, coordinator: RoundMember) -> bool:
        """Follow a coordinator; returns whether the round was committed."""
        stub = self.allreduce.get_stub(coordinator.peer_id)
        patience = self.allreduce.settings.sender_timeout
        try:
            await self.allreduce.calls[coordinator.index].follow(stub.rpc_complete, self._follower.run, patience)
            return True
        except PEER_FAILURES as e:
            # The member follows the next coordinator. One that resigned will come back for the result, so it is kept.
            self.state.closed_early |= isinstance(e, ResignedError)
            self.state.missed |= isinstance(e, MissedError)
            self.allreduce.emit(Lost(coordinator.index, Loss.of(e)))
        return False
