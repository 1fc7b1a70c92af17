"""How the coordinator brings a round to its end.

Every member holds a call open to the coordinator. From these calls it learns which members live, which are dead or
late, and which averages each one holds. When all living members have reported and nothing is missing, it commits the
round. After a death it fills the gaps first: it finds out which parts are missing where, and makes one attempt after
another to deliver them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from shoal.averaging.control import AveragingMode
from shoal.averaging.finite import all_finite
from shoal.averaging.messages import (
    PEER_FAILURES,
    RoundKind,
    RoundMessage,
    RoundStatus,
    SharedCall,
    StatusRequest,
    reason_of,
    show_life,
)
from shoal.averaging.round.members import FollowerCall, MemberStatus, RoundMember
from shoal.averaging.round.recovery import Plan, Recovery, make_plan
from shoal.averaging.round.stragglers import Resigned, Stragglers
from shoal.base.logs import counted
from shoal.base.tasks import cancel_and_wait, first_completed
from shoal.errors import InterruptedDialError, P2PDaemonError, ProtocolError, StreamClosedError
from shoal.net.resumable import RETURN_SECONDS
from shoal.p2p import Call

if TYPE_CHECKING:
    from shoal.averaging.round.exchange import AllReduce

logger = logging.getLogger(__name__)

# A member that was silent for too long, say, is dead unless it calls again within so many seconds.
CALL_AGAIN_SECONDS = 0.3
# Seconds between two questions to a member that has not called.
STATUS_PERIOD = 0.5


class Coordination:
    """Serves the members that follow this one as their coordinator.

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
        self._commit_message: RoundMessage | None = None
        # Members that have not confirmed the commit: the connection may break while it is under way.
        self._unconfirmed: set[int] = set()
        self._confirmed = asyncio.Event()
        # Each waits for a member whose link broke.
        self._waiting: dict[asyncio.Task[None], None] = {}
        self.latecomers = Stragglers(self.vector, has_averages=self.roster.is_sender)
        # Members that have left on purpose. They will not come back for the result.
        self._left: set[int] = set()
        # Parts were averaged again without failed members, or another coordinator may have done that. A failed member
        # that comes back may hold other averages of the same parts, so it is treated as late from then on.
        self._has_filled_gaps = False

    def close(self) -> None:
        """Release everything that waits; the round has ended here, with or without a result."""
        self.latecomers.close()
        # An open call would tell the members that follow this one that the round goes on.
        if not self._committed:
            for link in self.roster.links.values():
                link.handler.cancel()
        for waiting in self._waiting:
            waiting.cancel()

    async def serve(self, call: Call, hello: RoundMessage, member: RoundMember) -> None:
        """Hold a member's call until the round is over. Runs in the handler of that call."""
        handler = asyncio.current_task()
        assert handler is not None
        if self._commit_message is not None and member.index in self._unconfirmed:
            await self._commit_again(call, member, self._commit_message)
            return
        too_late = (self.roster.closed_early or self._has_filled_gaps) and self._may_lack_averages(member)
        is_lost = too_late and self.roster.quorum is None and not self.latecomers.can_get_result
        if is_lost or (self._committed and not self.roster.closed_early):
            await call.send(RoundMessage(kind=RoundKind.OVER), end=True)
            return
        calls = self.allreduce.calls[member.index]
        calls.note_life(is_new=member.link is not None)
        self.roster.missed = self.roster.missed or hello.missed
        self.allreduce.book.take_claim(member.index, hello.norms, b"".join(hello.statements))
        link = FollowerCall(SharedCall(call), handler, self.group.limited(member.index, hello.weight))
        await link.shared.send(RoundMessage(kind=RoundKind.ALIVE))
        if member.link is not None:
            member.link.replaced.set()
        member.link = link
        self._changed.set()
        if too_late or hello.late:
            self.roster.closed_early = True
            self.roster.fail(member.index, "late", MemberStatus.LATE)
            await link.shared.send(RoundMessage(kind=RoundKind.LATE))
        alive = asyncio.ensure_future(show_life(link.shared, self._silence))
        try:
            with calls.link.watching(call):
                while await self._serve_message(link, member):
                    pass
        except BaseException as e:
            if member.link is link and not self._committed:
                self._note_broken(member, link, e)
            raise
        finally:
            await cancel_and_wait(alive)

    async def _serve_message(self, link: FollowerCall, member: RoundMember) -> bool:
        async with asyncio.timeout(self._silence):
            message = await link.shared.call.receive(RoundMessage)
            self.allreduce.calls[member.index].note_life()
            if message is None:
                if not self._committed:
                    self._left.add(member.index)
                    raise ProtocolError("left the round early")
                self._note_confirmed(member)
                return False
            if message.kind == RoundKind.PART:
                await self._receive_for_plan(link, member, message)
        if message.kind == RoundKind.LATE and member.late:
            await self.latecomers.send_result(link, self._silence)
        if message.kind == RoundKind.REPORT and not member.late:
            if len(message.held) != self.group.group_size:
                raise ProtocolError("malformed report")
            self.roster.note_told(message, member.index)
            self.allreduce.book.take_report(message.statements)
            link.held, link.obsolete = message.held, False
            self._changed.set()
        if message.kind == RoundKind.DELIVERED:
            link.delivered = True
            self._quorum_changed.set()
        return True

    def _note_broken(self, member: RoundMember, link: FollowerCall, error: BaseException) -> None:
        """Give a member some time to call again, because a connection may break without a death."""
        # The end of a connection cancels its handler.
        is_broken = isinstance(error, StreamClosedError | asyncio.CancelledError) and link.shared.call.connection.closed
        if not is_broken:
            loop = asyncio.get_running_loop()
            loop.call_later(CALL_AGAIN_SECONDS, self._lost, member, link, reason_of(error))
            return
        # The round is not committed without it meanwhile, and what it was to send will not come.
        link.held = None
        if self._execution is not None:
            self._execution.member_failed(member.index)
        waiting = asyncio.ensure_future(self._wait_for_return(member, link))
        self._waiting[waiting] = None
        waiting.add_done_callback(self._waiting.pop)

    async def _wait_for_return(self, member: RoundMember, link: FollowerCall) -> None:
        error = await self.allreduce.calls[member.index].wait_for_link(link.replaced)
        if error is not None:
            self._lost(member, link, reason_of(error))

    async def _commit_again(self, call: Call, member: RoundMember, commit: RoundMessage) -> None:
        """Tell a member the result that was under way when its connection broke."""
        await call.send(RoundMessage(kind=RoundKind.ALIVE))
        await call.send(commit, end=True)
        async with asyncio.timeout(self._silence):
            while await call.receive(RoundMessage) is not None:
                pass
        self._note_confirmed(member)

    def _note_confirmed(self, member: RoundMember) -> None:
        self._unconfirmed.discard(member.index)
        if not self._unconfirmed:
            self._confirmed.set()

    async def wait_until_confirmed(self) -> None:
        """Wait until the members have confirmed the commit. Those whose connection broke have time to come back."""
        if self._unconfirmed:
            await first_completed(self._confirmed.wait(), timeout=RETURN_SECONDS)

    def _lost(self, member: RoundMember, link: FollowerCall, reason: str) -> None:
        """Give a member up, unless it has come back with another link."""
        if member.link is link and not self._committed:
            member.link = None
            self.roster.fail(member.index, reason)

    def _note_failure(self, member: RoundMember) -> None:
        if self._execution is not None and member.index in self.roster.dead:
            self._execution.member_failed(member.index)
        self._changed.set()
        self._deaths.set()

    async def run(self, *, wait_for_absent: bool) -> None:
        """Collect reports and fill gaps until none are left, then commit.

        Raises:
            Resigned: this member is late itself.
        """
        background = [asyncio.ensure_future(self._spread_failures())]
        if wait_for_absent:
            background.append(asyncio.ensure_future(self._ask_absent()))
            if self.roster.quorum is not None:
                background.append(asyncio.ensure_future(self._count_own_delivery()))
                background.append(asyncio.ensure_future(self._close_at_quorum()))
        else:
            # What another coordinator has committed may differ from what these members hold, which it has lost.
            self._has_filled_gaps = True
            lost = {i for i in self.roster.punctual if self._may_lack_averages(self.roster.members[i])}
            if lost and self.latecomers.can_get_result:
                self.roster.closed_early = True
                await self._go_on_without(lost)
            for index in () if self.latecomers.can_get_result else sorted(lost):
                self._drop(self.roster.members[index], "was lost by the coordinator")
        try:
            await first_completed(self.allreduce.exchanged.wait(), self._resigned.wait())
            if self._resigned.is_set():
                raise Resigned("this member is late")
            while True:
                await self._all_reported(wait_for_absent)
                if any(link.held is None for link in self.roster.punctual.values()):
                    continue  # a connection has broken meanwhile
                plan = self._make_plan()
                if not plan.missing:
                    break
                await self._execute(plan)
            await self.commit()
        finally:
            await cancel_and_wait(*background)

    async def _close_at_quorum(self) -> None:
        """Once enough members have delivered, wait for the others only for the time of grace."""
        while not self.roster.has_quorum:
            self._quorum_changed.clear()
            await self._quorum_changed.wait()
        await asyncio.sleep(self.allreduce.settings.quorum_grace)
        # The others would have to wait for this member's own parts, so the next coordinator takes over.
        if not self.roster.delivered.is_set() and self.roster.has_successor:
            await self._broadcast(RoundMessage(kind=RoundKind.RESIGNED))
            self._resigned.set()
            return
        late = set() if self.roster.all_complete.is_set() else self.roster.close_early()
        if late:
            logger.info("the round goes on without %s that came too late", counted(len(late), "member"))
        await self._go_on_without(late)

    async def _go_on_without(self, late: Collection[int]) -> None:
        for index in sorted(late):
            self.roster.fail(index, "late", MemberStatus.LATE)
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
            # The last busy member has nothing left to wait for: all others are done, and have sent what it needs. So
            # it gets a time limit. Of several, one may first have to give another up; or they still take averages.
            patience = self._silence + (self.allreduce.settings.reducer_timeout if len(busy) > 1 else 0.0)
            several = busy if len(busy) > 1 else []
            sent = self.allreduce.bytes_sent_to(several)
            await first_completed(self._changed.wait(), timeout=patience if complete else None)
            if complete and not self._changed.is_set() and sent == self.allreduce.bytes_sent_to(several):
                for index in busy:
                    self._drop(self.roster.members[index], "did not report in time")

    def _drop(self, member: RoundMember, reason: str) -> None:
        if member.link is not None:
            member.link.handler.cancel()
        member.link = None
        self.roster.fail(member.index, reason)

    async def _spread_failures(self) -> None:
        """Tell all members of deaths, so that none has to wait for a time limit to find out."""
        told: set[int] = set()
        while True:
            self._deaths.clear()
            news = self.roster.dead - told
            if news:
                told |= news
                await self._broadcast(RoundMessage(kind=RoundKind.FAILED, members=sorted(news)))
            await first_completed(self._deaths.wait(), timeout=STATUS_PERIOD)

    async def _ask_absent(self) -> None:
        """Ask members that have not called whether they are dead, have finished already, or are only late.

        A member that works on the round may still be trying candidates that come before this one in the order of
        coordinators, and that are dead. So it gets two time limits for each of these before it counts as late.
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
                # The connection may have broken by chance. The next question decides.
                logger.debug("could not ask %s about the round: %r", member.peer_id, e)
                return
            except P2PDaemonError as e:
                self.roster.fail(member.index, reason_of(e))
                return
            except PEER_FAILURES as e:
                logger.debug("asked %s about the round: %r", member.peer_id, e)
        if member.link is not None:
            return
        is_over = status is RoundStatus.FINISHED
        if status is RoundStatus.LEFT or (is_over and self.allreduce.waits_for_beginning_of(member.index)):
            self._left.add(member.index)
            self.roster.fail(member.index, "has left the round")
        elif is_over:
            if member.standing is MemberStatus.ACTIVE:
                member.standing = MemberStatus.GONE
            self._changed.set()
        elif status in late:
            # It may be running the round, but it has not found its way to this coordinator.
            self.roster.fail(member.index, "did not come to the coordinator in time")

    async def _broadcast(self, message: RoundMessage, *, end: bool = False) -> None:
        await asyncio.gather(*[self._tell(link, message, end) for link in self.roster.punctual.values()])

    async def _tell(self, link: FollowerCall, message: RoundMessage, end: bool = False) -> None:
        try:
            async with asyncio.timeout(self._silence):
                await link.shared.send(message, end=end)
        except PEER_FAILURES as e:
            # The handler of this link sees the failure, too, and deals with it.
            logger.debug("could not tell %s: %r", link.shared.call.remote, e)

    async def commit(self) -> None:
        """Tell all members that the round is over."""
        self._committed = True
        # If not, another coordinator has committed, and this member only serves members that could not reach that one.
        is_first = not self.allreduce.weights
        if is_first and self._some_may_return():
            self.roster.closed_early = True
        self.allreduce.weights = self.allreduce.weights or self.final_weights()
        if self.roster.closed_early:
            self.latecomers.keep_result(self.allreduce.weights)
        commit = RoundMessage(
            kind=RoundKind.COMMIT,
            weights=self.allreduce.weights,
            members=sorted(self.roster.dead),
            not_finite=sorted(self.roster.seen_not_finite | self.roster.told_not_finite),
            left_out=sorted(self.roster.left_out),
        )
        commit.untrue, commit.statements = self.allreduce.book.show_proofs()
        self._commit_message, self._unconfirmed = commit, set(self.roster.punctual)
        await self._broadcast(commit, end=True)

    def _some_may_return(self) -> bool:
        """Whether a failed member may come back: its connection is gone, but it has not left on purpose.

        Such a member must get the same result as the others. In modes in which a result cannot be passed on, it keeps
        its local values instead, and nothing has to be kept for it.
        """
        missing = self.roster.dead & self.roster.seen_failing - self._left
        return any(self._may_lack_averages(self.roster.members[i]) for i in missing) and self.latecomers.can_get_result

    def _may_lack_averages(self, member: RoundMember) -> bool:
        """Whether a member that failed may hold fewer averages than the others, or other ones."""
        return member.failed and not self.roster.all_complete.is_set()

    def final_weights(self) -> list[float]:
        """What each member weighs in the result."""
        weights, punctual = [0.0] * self.group.group_size, self.roster.punctual
        for index in self.roster.senders:
            member = self.roster.members[index]
            if index in punctual:
                weights[index] = punctual[index].weight
            elif member is self.roster.own or member.standing is MemberStatus.GONE:
                weights[index] = self.allreduce.weight_of(member)
        return weights

    # --- filling gaps -------------------------------------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        held = {member: link.held or [] for member, link in self.roster.punctual.items()}
        held[self.own] = self.vector.held
        living = {member: counts for member, counts in held.items() if member in self.roster.senders}
        return make_plan(self.vector.parts, living, self.own, may_reduce=not self.roster.missed)

    async def _execute(self, plan: Plan) -> None:
        """Carry out a plan. A death on the way calls it off, and all members report again."""
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

    async def _receive_for_plan(self, link: FollowerCall, member: RoundMember, message: RoundMessage) -> None:
        reducer, index, header = message.reducer, message.index, message.part
        exists = 0 <= reducer < self.group.group_size and 0 <= index < len(self.vector.parts[reducer])
        if header is None or not exists:
            raise ProtocolError("sent a part that does not exist")
        is_average = self._execution is not None and self._execution.is_average((reducer, index))
        part = self.vector.parts[reducer][index]
        [values] = await self.vector.receive(link.shared.call, [header], [part.returned if is_average else part])
        if is_average and values is not None and not all_finite(values):
            self.roster.seen_not_finite.add(member.index)
            raise ProtocolError("sent an average that is not finite")
        if self._execution is not None and not link.obsolete:
            self._execution.deliver(member.index, (reducer, index), values)
