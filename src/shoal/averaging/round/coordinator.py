"""The coordinator of a round: holds the calls of the members that follow it, and acts on the state machine's decisions.

Every member holds a call open to the coordinator. From these calls the coordinator learns which members are alive, dead
or late, and which averages each one holds. The state machine in :mod:`~.state` decides what follows.

After a death, members may lack averages. If some member holds the average of a part, the coordinator fetches it and
passes it on unchanged. If no member holds it, the coordinator reduces the part again, from the values of all living
senders (:class:`Recovery`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.averaging.control import AveragingMode
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
    NotFiniteError,
    PartKey,
    Ranges,
    Report,
    ResignedError,
    RoundAlive,
    RoundMessage,
    RoundOver,
    RoundStatus,
    SharedCall,
    StatusRequest,
    show_life,
)
from shoal.averaging.round.exchange import AllReduce
from shoal.averaging.round.reducer import PartReducer
from shoal.averaging.round.state import (
    Action,
    Attempt,
    AttemptEnded,
    CallOff,
    CommitRound,
    Confirmed,
    Coordinate,
    CutLink,
    Exchanged,
    GraceOver,
    HasDelivered,
    Left,
    LinkBroke,
    Linked,
    LinkLost,
    Lost,
    MemberLink,
    MemberStatus,
    PatienceOver,
    Plan,
    Reported,
    Resign,
    RoundMember,
    StartGrace,
    StatusKnown,
    TellMembers,
)
from shoal.averaging.round.waits import Missing
from shoal.base.tasks import TaskSet, all_of, cancel_and_wait, first_completed
from shoal.errors import AllreduceException, InterruptedDialError, P2PDaemonError, ProtocolError, StreamClosedError
from shoal.net.resumable import RETURN_SECONDS
from shoal.p2p import Call

logger = logging.getLogger(__name__)

# A member whose link failed without a broken connection (for example by silence) must call again within this many
# seconds, or it counts as dead. Chosen: a round trip of a slow line.
CALL_AGAIN_SECONDS = 0.3
# Seconds between two questions to a member that has not called (chosen).
STATUS_PERIOD = 0.5


@dataclass(eq=False)
class _Held:
    """A call that is held for a member."""

    shared: SharedCall
    handler: asyncio.Task[Any]
    replaced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the member has come back with another link."""


class Coordinator:
    """Serves the members that follow this one, from the start of the round.

    Args:
        allreduce: the round's exchange of parts.
    """

    def __init__(self, allreduce: AllReduce) -> None:
        self.allreduce, self.state, self.vector = allreduce, allreduce.state, allreduce.vector
        self._silence = allreduce.settings.sender_timeout
        self._calls: dict[MemberLink, _Held] = {}
        self._recovery: Recovery | None = None
        # Tasks that finish the round or send to members. A dictionary as an ordered set: simulations repeat exactly.
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._messages = TaskSet()
        self._is_closed = False
        loop = asyncio.get_running_loop()
        # Done when this member has committed the round; or the error that kept it from that.
        self._outcome: asyncio.Future[None] = loop.create_future()
        self._weights: asyncio.Future[list[float]] = loop.create_future()
        # The result for late members: a copy, as soon as the user may change the tensors again.
        self._kept: list[torch.Tensor] | None = None
        self._is_released = False
        self._confirmed = asyncio.Event()

    # --- what the state machine wants ---------------------------------------------------------------------------------

    async def act(self) -> None:
        """Perform the actions that follow from events, until cancelled."""
        try:
            while True:
                self._perform(await self.allreduce.actions.get())
        finally:
            await cancel_and_wait(*self._tasks, *self._messages)

    def close(self) -> None:
        """End the round here, with or without a result. Late members may still come for the result."""
        self._is_closed = True
        self._weights.cancel()
        self._outcome.cancel()
        # To a member that follows this one, an open call would mean that the round has not ended.
        if not self.state.committed:
            for held in self._calls.values():
                held.handler.cancel()
        for task in self._tasks:
            task.cancel()

    def _perform(self, action: Action) -> None:
        match action:
            case TellMembers(links, message):
                for link in links:
                    self._messages.start(self._tell(link, message))
            case CutLink(link, is_replaced):
                held = self._calls.pop(link)
                if is_replaced:
                    held.replaced.set()
                else:
                    held.handler.cancel()
            case StartGrace():
                self._begin(self._grace())
            case Attempt():
                self._begin(self._attempt(action))
            case CallOff():
                if self._recovery is not None:
                    self._recovery.call_off()
            case CommitRound():
                self._begin(self.commit(action))
            case Resign():
                if not self._outcome.done():
                    self._outcome.set_exception(ResignedError("this member is late"))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task] = None
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self._outcome.done():
            self._outcome.set_exception(error)

    async def _tell(self, link: MemberLink, message: RoundMessage, *, end: bool = False) -> None:
        if (held := self._calls.get(link)) is None:
            return
        try:
            async with asyncio.timeout(self._silence):
                await held.shared.send(message, end=end)
        except PEER_FAILURES as e:
            # The handler of this link sees the failure, too, and handles it.
            logger.debug("could not send to %s: %r", held.shared.call.remote, e)

    async def _grace(self) -> None:
        await asyncio.sleep(self.allreduce.settings.quorum_grace)
        self.allreduce.emit(GraceOver())
        if self.state.closed_early:
            logger.info("the round continues without the members that came too late")

    async def _attempt(self, attempt: Attempt) -> None:
        """Fill gaps. A death meanwhile calls the attempt off, and all members report again."""
        calls = {index: self._calls[link].shared for index, link in attempt.links.items()}
        weights = {index: link.weight for index, link in attempt.links.items()}
        weights[self.state.own.index] = self.allreduce.weight
        self._recovery = recovery = Recovery(self.allreduce, attempt.plan, calls, weights)
        logger.info("recovering the parts of dead members: %d are reduced again", len(attempt.plan.again))
        try:
            completed = await recovery.run()
        finally:
            self._recovery = None
        self.allreduce.emit(AttemptEnded(completed, [*self.vector.held]))

    async def commit(self, action: CommitRound) -> None:
        """Tell members that the round is over."""
        if not self.allreduce.weights:  # otherwise another coordinator has told them, and the waits
            self.allreduce.weights = self.final_weights()
            self.allreduce.waits.agree(self.state.own.index, self.state.reducers)
        weights = self.allreduce.weights
        if action.keeps and not self._weights.done():
            if not self._is_released:
                self._kept = self.vector.copy_values()
            self._weights.set_result(weights)
        await asyncio.gather(*[self._tell(link, self._commit_message(), end=True) for link in action.links.values()])
        self._note_confirmed()
        if not self._outcome.done():
            self._outcome.set_result(None)

    def _commit_message(self) -> Commit:
        members = self.state.members
        untrue, statements = self.allreduce.book.show_proofs()
        return Commit(
            weights=self.allreduce.weights,
            lost={i: loss.cause for i in sorted(self.state.dead) if (loss := members[i].loss) is not None},
            not_finite=[each.index for each in members if each.sent_not_finite or each.told_not_finite],
            left_out=self.allreduce.left_out,
            untrue=untrue,
            statements=statements,
            waits=self.allreduce.waits.agreed,
        )

    def final_weights(self) -> list[float]:
        """The weight of each member in the result."""
        weights, punctual = [0.0] * len(self.state.members), self.state.punctual
        for index in self.state.senders:
            member = self.state.members[index]
            if index in punctual:
                weights[index] = punctual[index].weight
            elif member is self.state.own or member.status is MemberStatus.GONE:
                weights[index] = self.allreduce.weight_of(member)
        return weights

    # --- as the coordinator -------------------------------------------------------------------------------------------

    async def coordinate(self, *, waits: bool) -> None:
        """Coordinate the round until it is committed.

        Args:
            waits: whether to wait for all members; see :class:`~.state.Coordinate`.

        Raises:
            ResignedError: this member is late itself.
        """
        if self.allreduce.exchanged.is_set():  # an earlier coordinator may have sent more since
            self.allreduce.emit(Exchanged([*self.vector.held]))
        self.allreduce.emit(Coordinate(waits))
        self._begin(self._notice_busy())
        if waits:
            self._begin(self._ask_absent())
        await self._outcome

    async def _notice_busy(self) -> None:
        """Give up members that do not report although nothing else is missing and there is no progress."""
        while not self._outcome.done():
            self.allreduce.changed.clear()
            busy = self.state.busy
            self.allreduce.waits.miss(busy, Missing.REPORT)
            # A single busy member has nothing to wait for: all others are done and have sent what it needs. So it gets
            # one time limit. Of several, one may first have to give up another, or still be receiving averages.
            several = busy if len(busy) > 1 else []
            patience = self._silence + (self.allreduce.settings.reducer_timeout if several else 0.0)
            sent = self.allreduce.bytes_sent_to(several)
            await first_completed(self.allreduce.changed.wait(), timeout=patience if busy else None)
            if busy and not self.allreduce.changed.is_set() and sent == self.allreduce.bytes_sent_to(several):
                self.allreduce.emit(PatienceOver(busy))

    async def _ask_absent(self) -> None:
        """Ask members that have not called whether they are dead, have finished already, or are only late.

        A member of the round may still be trying dead candidates that come before this one in the order of
        coordinators. So it gets two time limits for each of these before it counts as late.
        """
        begun, others_before = asyncio.get_running_loop().time(), self.state.coordinators.index(self.state.own.index)
        while self.state.coordinates is not None and not self.state.committed:
            await asyncio.sleep(STATUS_PERIOD)
            waited = (asyncio.get_running_loop().time() - begun) / self._silence
            late = {RoundStatus.UNKNOWN} if waited > 1 else set()
            if waited > 1 + 2 * others_before:
                late.add(RoundStatus.RUNNING)
            await asyncio.gather(*[self._ask_status(self.state.members[i], late) for i in self.state.absent])

    async def _ask_status(self, member: RoundMember, late: set[RoundStatus]) -> None:
        # A client cannot be called. So its status stays unknown, and it counts as late after one time limit.
        status = RoundStatus.UNKNOWN
        if member.mode is not AveragingMode.CLIENT:
            stub = self.allreduce.get_stub(member.peer_id)
            try:
                question = StatusRequest(round_id=self.allreduce.round_id)
                reply = await stub.rpc_round_status(question, timeout=self._silence)
                status = RoundStatus(reply.status)
            except (InterruptedDialError, StreamClosedError) as e:
                # A broken connection proves nothing. The next question decides.
                logger.debug("could not ask %s about the round: %r", member.peer_id, e)
                return
            except P2PDaemonError as e:
                self.allreduce.emit(Lost(member.index, Loss.of(e)))
                return
            except PEER_FAILURES as e:
                logger.debug("asked %s about the round: %r", member.peer_id, e)
        never_began = self.allreduce.waits_for_beginning_of(member.index)
        self.allreduce.emit(StatusKnown(member.index, status, status in late, never_began))

    # --- calls of members ---------------------------------------------------------------------------------------------

    async def serve(self, call: Call, greeting: Greeting, member: RoundMember) -> None:
        """Hold a member's call until the round is over. Runs in the handler of that call."""
        handler = asyncio.current_task()
        assert handler is not None
        if self._is_closed and not self.state.committed:
            raise AllreduceException("this member has left the round")
        if member.unconfirmed:
            await self._commit_again(call, member)
            return
        if self.state.is_over_for(member):
            await call.send(RoundOver(), end=True)
            return
        calls = self.allreduce.calls[member.index]
        calls.note_life(is_new=member.link is not None)
        self.allreduce.book.take_claim(member.index, greeting.norms, greeting.statement)
        link = MemberLink(self.allreduce.group.limited(member.index, greeting.weight))
        self._calls[link] = held = _Held(SharedCall(call), handler)
        await held.shared.send(RoundAlive())
        self.allreduce.emit(Linked(member.index, link, greeting.late, greeting.missed))
        alive = asyncio.ensure_future(show_life(held.shared, self._silence))
        try:
            with calls.link.watching(call):
                while await self._serve_message(link, held.shared, member):
                    pass
        except BaseException as e:
            self._note_end(member, link, e)
            raise
        finally:
            await cancel_and_wait(alive)

    async def _serve_message(self, link: MemberLink, shared: SharedCall, member: RoundMember) -> bool:
        async with asyncio.timeout(self._silence):
            message = await shared.call.receive(RoundMessage)
            self.allreduce.calls[member.index].note_life()
            if isinstance(message, AssignedPart):
                await self._receive_assigned(link, shared.call, member, message)
        match message:
            case None if self.state.committed:
                self._confirm(member)
                return False
            case None:
                self.allreduce.emit(Left(member.index))
                raise ProtocolError("left the round early")
            case Late() if member.late:
                await self._send_result(shared)
            case Report() if not member.late:
                if len(message.held) != len(self.state.members):
                    raise ProtocolError("malformed report")
                self.state.note_told(message.not_finite, message.left_out, member.index)
                self.allreduce.book.take_report(message.statements)
                self.allreduce.waits.hear(member.index, message.waits)
                self.allreduce.hear_report(member)
                self.allreduce.emit(Reported(member.index, link, message.held))
            case Delivered():
                self.allreduce.emit(HasDelivered(link))
        return True

    def _note_end(self, member: RoundMember, link: MemberLink, error: BaseException) -> None:
        """Note that a link has ended. Before the commit this is a failure, but a broken connection is not a death."""
        if member.link is not link or self.state.committed or self._is_closed:
            return
        # When a connection ends, its handlers are cancelled.
        is_broken = isinstance(error, StreamClosedError | asyncio.CancelledError)
        if is_broken and self._calls[link].shared.call.connection.closed:
            self.allreduce.emit(LinkBroke(member.index, link))
            self._begin(self._wait_for_return(member, link))
        else:
            self._begin(self._lose_soon(member, link, Loss.of(error)))

    async def _lose_soon(self, member: RoundMember, link: MemberLink, loss: Loss) -> None:
        await asyncio.sleep(CALL_AGAIN_SECONDS)
        self._lose(member, link, loss)

    async def _wait_for_return(self, member: RoundMember, link: MemberLink) -> None:
        error = await self.allreduce.calls[member.index].wait_for_link(self._calls[link].replaced)
        if error is not None:
            self._lose(member, link, Loss.of(error))

    def _lose(self, member: RoundMember, link: MemberLink, loss: Loss) -> None:
        self.allreduce.emit(LinkLost(member.index, link, loss))
        if member.link is not link:
            self._calls.pop(link, None)

    async def _receive_assigned(self, link: MemberLink, call: Call, member: RoundMember, message: AssignedPart) -> None:
        reducer, index = message.reducer, message.index
        if reducer >= len(self.vector.parts) or index >= len(self.vector.parts[reducer]):
            raise ProtocolError("sent a part that does not exist")
        is_average = self._recovery is not None and self._recovery.is_average((reducer, index))
        part = self.vector.parts[reducer][index]
        [values] = await self.vector.receive(call, [message.part], [part.returned if is_average else part])
        if is_average and values is not None and not all_finite(values):
            member.sent_not_finite = True
            raise NotFiniteError("sent an average that is not finite")
        if self._recovery is not None and not link.obsolete:
            self._recovery.deliver(member.index, (reducer, index), values)

    # --- after the commit ---------------------------------------------------------------------------------------------

    async def _commit_again(self, call: Call, member: RoundMember) -> None:
        """Send a member the commit that was in flight when its connection broke."""
        await call.send(RoundAlive())
        await call.send(self._commit_message(), end=True)
        async with asyncio.timeout(self._silence):
            while await call.receive(RoundMessage) is not None:
                pass
        self._confirm(member)

    def _confirm(self, member: RoundMember) -> None:
        self.allreduce.emit(Confirmed(member.index))
        self._note_confirmed()

    def _note_confirmed(self) -> None:
        if not any(member.unconfirmed for member in self.state.members):
            self._confirmed.set()

    async def wait_until_confirmed(self) -> None:
        """Wait until the members have confirmed the commit. Those whose connection broke get time to come back."""
        if any(member.unconfirmed for member in self.state.members):
            await first_completed(self._confirmed.wait(), timeout=RETURN_SECONDS)

    def release(self) -> None:
        """Give the tensors back to the user, who may change them. Keep a copy if late members may want the values."""
        self._kept, self._is_released = self.vector.copy_values() if self.state.closed_early else None, True

    async def _send_result(self, shared: SharedCall) -> None:
        """Give a late member all averages as soon as the round is over.

        It gets even those that it holds already, because others may have averaged the same parts again without it. The
        time limit applies to each part, not to all of them together.
        """
        weights = await asyncio.shield(self._weights)
        values = self._kept if self.state.own.is_sender else None
        for reducer, parts in enumerate(self.vector.parts):
            for index, part in enumerate(parts):
                is_there = self.vector.has_average(reducer, index)
                encoded = part.returned.compress(part.of(values)) if values is not None and is_there else None
                async with asyncio.timeout(self._silence):
                    await shared.send_part((reducer, index), encoded)
        await shared.send(Commit(weights=weights), end=True)


class Recovery:
    """One attempt to fill gaps, at the coordinator.

    Args:
        allreduce: the round's exchange of parts.
        plan: which member lacks what.
        calls: by member, its call to this coordinator.
        weights: by member, including this one.
    """

    def __init__(
        self, allreduce: AllReduce, plan: Plan, calls: dict[int, SharedCall], weights: dict[int, float]
    ) -> None:
        self._vector, self._own, self._plan, self._calls = allreduce.vector, allreduce.own_index, plan, calls
        state = allreduce.state
        senders = [member for member in calls if state.members[member].is_sender]
        parts = [self._vector.parts[reducer][index] for reducer, index in plan.again]
        local = self._vector.sound_values if state.own.is_sender else None
        combiner = allreduce.book.make_combiner()
        self._reducer = PartReducer(parts, senders, local, self._own, weights, allreduce.note_not_finite, combiner)
        self._position = {key: position for position, key in enumerate(plan.again)}
        self._senders = senders
        loop = asyncio.get_running_loop()
        self._fetched: dict[PartKey, asyncio.Future[torch.Tensor | None]] = {
            key: loop.create_future() for key in plan.sources
        }
        self._averages: dict[PartKey, torch.Tensor | None] = {}
        self._failed = asyncio.Event()

    def call_off(self) -> None:
        """End the attempt, because a member whose parts the plan needs has died."""
        self._failed.set()

    def is_average(self, key: PartKey) -> bool:
        """Whether an incoming part is a finished average, rather than values to reduce."""
        return key in self._fetched

    def deliver(self, member: int, key: PartKey, values: torch.Tensor | None) -> None:
        """Take a part that a member has sent for this plan."""
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
        except PEER_FAILURES as e:  # a member failed; the handler of its call gives it up
            logger.debug("could not fill all gaps: %r", e)
            return False
        finally:
            await cancel_and_wait(everything)
            await self._reducer.close()

    async def _serve_member(self, member: int) -> None:
        shared = self._calls[member]
        wanted = [key for key, source in self._plan.sources.items() if source == member]
        wanted += self._plan.again if member in self._senders else []
        await shared.send(Assignment(_as_ranges(wanted), self._plan.missing.get(member, [])))
        for key in self._plan.parts_missing(member):
            average = await self._average(key)
            part = self._vector.parts[key[0]][key[1]]
            await shared.send_part(key, None if average is None else part.returned.compress(average))

    async def _fill_own(self) -> None:
        for key in self._plan.parts_missing(self._own):
            self._vector.take(*key, await self._average(key))

    async def _average(self, key: PartKey) -> torch.Tensor | None:
        if key not in self._averages:
            self._averages[key] = await self.obtain(key)
        return self._averages[key]

    async def obtain(self, key: PartKey) -> torch.Tensor | None:
        """Reduce a part again or fetch its average; ``None``: it has none."""
        if key in self._position:
            return await self._reducer.peek(self._position[key])
        # With alpha below 1 a member mixes the average with its own values at once, so it cannot pass the average on.
        if self._vector.alpha != 1 or key not in self._plan.sources:
            return None
        if self._plan.sources[key] == self._own:
            return self._vector.values(self._vector.parts[key[0]][key[1]]) if self._vector.has_average(*key) else None
        return await asyncio.shield(self._fetched[key])


def _as_ranges(keys: list[PartKey]) -> Ranges:
    """The given parts as the fewest possible ranges, in order."""
    ranges: Ranges = []
    for reducer, index in sorted(keys):
        if ranges and ranges[-1][0] == reducer and ranges[-1][2] == index:
            ranges[-1] = (reducer, ranges[-1][1], index + 1)
        else:
            ranges.append((reducer, index, index + 1))
    return ranges
