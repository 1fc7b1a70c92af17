"""Butterfly all-reduce: every member sends each part of its vector to the member that reduces it.

All parts are in flight at once. A reducer averages a part as soon as all senders have delivered it, and sends the
average back (:mod:`shoal.averaging.round.traffic`). Afterwards the members make sure that all of them have every
average, and recover the parts of members that have died (:mod:`shoal.averaging.round.finish`).

A sender ends its side of the calls when it holds the averages of all reducers. So when all senders of a reducer have
ended, that reducer knows without asking that the round is over everywhere.

When a connection breaks, the exchange with that member restarts (:mod:`shoal.net.resumable`). A member fails if it does
not come back, or if it exceeds a time limit. Parts that a failed sender has not delivered are averaged without it.

NaN and infinity never get into an average. A member with such values has weight 0 and does not send them. If some
arrive anyway, the reducer leaves them out. If an average contains some, its reducer counts as failed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import torch

from shoal.averaging.arguments import AveragerConfig
from shoal.averaging.control import AveragingMode, GroupInfo, LossCause, MemberTraffic, RoundResult
from shoal.averaging.messages import PEER_FAILURES, BeginReduce, Loss, RoundStatus, StatusReply, StatusRequest
from shoal.averaging.round.combining import NormBook
from shoal.averaging.round.parts import RoundVector
from shoal.averaging.round.reducer import PartReducer
from shoal.averaging.round.sending import FlowControl
from shoal.averaging.round.state import (
    Action,
    AveragesCame,
    Complete,
    Event,
    Exchanged,
    Lost,
    MemberStatus,
    PartsSent,
    RoundMember,
    RoundState,
    StopExchange,
    on,
)
from shoal.averaging.round.traffic import Delivery, Intake, Traffic, check_beginning
from shoal.averaging.round.waits import NOTABLE_SECONDS, Missing, Waits
from shoal.base.tasks import cancel_and_wait
from shoal.compression import CompressionInfo
from shoal.errors import AllreduceException, ProtocolError
from shoal.net.resumable import GIVEN_UP, MAX_RESUMES, GaveUpError, LifeAnswer, LifeQuestion, ResumableCall
from shoal.p2p import Call, PeerID, StubBase

logger = logging.getLogger(__name__)


def answer_of(reply: StatusReply) -> LifeAnswer:
    """Translate a member's answer about the round for the calls to it."""
    has_left = "has left the round"
    why_over = GIVEN_UP if reply.has_given_up else has_left if reply.status != RoundStatus.RUNNING else None
    why_unlinked = "has given this coordinator up" if reply.follows_another else None
    if why_unlinked is None and reply.status in (RoundStatus.UNKNOWN, RoundStatus.LEFT):
        why_unlinked = has_left
    return LifeAnswer(reply.status != RoundStatus.UNKNOWN, reply.has_given_up, why_over, why_unlinked)


# It has more than 15 attributes because the second half of the round shares its vector, state, book, reducer and calls.
class AllReduce:
    """The exchange of parts in one group.

    Args:
        round_id: the id of the round, the same at all members.
        group: as agreed, with ``modes`` and ``shares`` filled in.
        own_index: this member's position.
        tensors: contiguous CPU tensors; the averages are written into them.
        infos: one for each tensor.
        settings: how the group averages.
        weight: this member's weight.
        get_stub: makes a stub of the averager protocol for a member.
        is_spoilt: whether some of this member's values are not finite; its weight is then 0.
        accuse: called with the position of a member that has lied, and what it has lied about.
    """

    def __init__(
        self,
        round_id: bytes,
        group: GroupInfo,
        own_index: int,
        tensors: Sequence[torch.Tensor],
        infos: Sequence[CompressionInfo],
        settings: AveragerConfig,
        weight: float,
        get_stub: Callable[[PeerID], StubBase],
        is_spoilt: bool = False,
        accuse: Callable[[int, str], object] = lambda member, what: None,
    ) -> None:
        self.round_id, self.group, self.own_index, self.get_stub = round_id, group, own_index, get_stub
        self.settings, self.weight = settings, weight
        self.vector = RoundVector(
            tensors,
            infos,
            settings.compression,
            settings.part_size_bytes,
            group.shares,
            settings.averaging_alpha,
            is_spoilt,
        )
        counts = [len(parts) for parts in self.vector.parts]
        self.state = RoundState(group, own_index, counts, settings.quorum, passes_on=settings.averaging_alpha == 1)
        self.actions: asyncio.Queue[Action] = asyncio.Queue()
        """Actions that the exchange does not perform itself."""
        self.changed = asyncio.Event()
        """Set after each event."""
        self.delivered, self.received, self.all_complete = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """Set when the state says so for the first time, see :class:`~.state.RoundState`."""
        self.book = NormBook(round_id, group, settings.aggregation, accuse)
        self.exchanged = asyncio.Event()
        """This member has sent and received all that it will in the exchange."""
        # Set when the calls to reducers may end: this member has all averages from them, or the round is over. A member
        # that needed a recovery does not end early, so the others wait for the coordinator.
        self._may_end = asyncio.Event()
        self.ended = asyncio.Event()
        """Set when the round is over."""
        self.weights: list[float] = []
        """The weight of each member in the average, as the coordinator has committed it."""
        self.waits = Waits(asyncio.get_running_loop().time)
        """How long members wait for each member alone."""
        self.reducer = self._make_reducer()
        """Averages the parts that this member reduces."""
        self._pace = FlowControl() if settings.quorum is None else None
        # By member: the exchange with it.
        self._traffic = {i: self._make_traffic(i) for i in range(group.group_size) if i != own_index}
        self.calls = {i: self._make_calls(i) for i in self._traffic}
        """By member: the calls between the two."""
        self._exchanges: dict[int, asyncio.Task[None]] = {}
        # A dictionary as an ordered set, so that every run of a simulation cancels in the same order.
        self._handlers: dict[asyncio.Task[Any], None] = {}
        self.intakes: dict[int, Intake] = {}
        """By sender: the incoming side of its calls to this reducer."""
        self._timers: list[asyncio.TimerHandle] = []
        self.began_at = self._exchanged_at = asyncio.get_running_loop().time()
        self._show()

    def _make_reducer(self) -> PartReducer:
        own, parts = self.own_index, self.vector.parts[self.own_index]
        senders = [index for index in self.state.senders if index != own and parts]
        local = self.vector.sound_values if self.state.own.is_sender else None
        combiner = self.book.make_combiner()
        reducer = PartReducer(parts, senders, local, own, {own: self.weight}, self.note_not_finite, combiner)
        reducer.waits = self.waits
        return reducer

    def _make_traffic(self, member: int) -> Traffic:
        return Traffic(
            self.vector,
            self.reducer,
            self.own_index,
            member,
            gives=self.state.own.is_sender,
            takes=self.state.members[member].is_sender,
            pace=self._pace,
            on_not_finite=lambda: self.note_not_finite(member),
            on_delivered=lambda: self.emit(PartsSent(member)),
            on_received=lambda: self._note_received(member),
        )

    def _make_calls(self, index: int) -> ResumableCall:
        member = self.state.members[index]
        stub = self.get_stub(member.peer_id)

        async def ask(question: LifeQuestion, timeout: float | None = None) -> LifeAnswer:
            reply: StatusReply = await stub.rpc_round_status(StatusRequest(self.round_id, *question), timeout=timeout)
            return answer_of(reply)

        can_be_called = member.mode is not AveragingMode.CLIENT
        return ResumableCall(
            stub, self._traffic[index], ask, functools.partial(self._lose, member), can_be_called=can_be_called
        )

    def _lose(self, member: RoundMember, error: BaseException) -> None:
        """Note that a member is gone, as the calls to it report."""
        # A member that has given this one up, perhaps because this one was late, is not to blame.
        self.emit(Lost(member.index, Loss.of(error), is_hearsay=isinstance(error, GaveUpError)))

    def emit(self, event: Event) -> None:
        """Pass an event to the state machine. Perform the actions that follow, or put them into :attr:`actions`."""
        for action in on(self.state, event):
            if isinstance(action, StopExchange):
                self._stop(action)
            else:
                self.actions.put_nowait(action)
        self._show()
        self.changed.set()

    def _note_received(self, member: int) -> None:
        """Note that a reducer sends nothing more. If only one is left, this peer waits for that one alone."""
        owed_by_several = len(self._owing()) > 1
        self.emit(AveragesCame(member))
        owing = self._owing()
        if owed_by_several or not owing:  # if there was only one from the start, no other was faster: it is not late
            self.waits.miss(owing, Missing.AVERAGES)

    def _owing(self) -> list[int]:
        """Reducers whose averages have not all arrived."""
        return [member.index for member in self.state.members if member.owes_averages]

    def _show(self) -> None:
        # What has been shown stays true, and to ask again would take time with each event.
        if not self.delivered.is_set() and self.state.has_delivered:
            self.delivered.set()
        if not self.received.is_set() and self.state.has_received:
            self.received.set()
        if not self.all_complete.is_set() and self.state.all_complete:
            self.all_complete.set()

    def note_not_finite(self, member: int) -> None:
        """Note a member that has sent values that are not finite."""
        self.state.members[member].sent_not_finite = True

    @property
    def left_out(self) -> list[int]:
        """Members whose values are missing in some averages, made here or, as others report, elsewhere."""
        return [each.index for each in self.state.members if each.left_out or each.index in self.reducer.left_out]

    @property
    def has_news(self) -> bool:
        """Whether this member knows something that the coordinator must tell all: bad values, or a long wait.

        Then it does not end its calls early, so that no member leaves the round before it hears from the coordinator.
        """
        return bool(self.waits.notable) or any(member.sent_not_finite for member in self.state.members)

    @property
    def has_waited_long(self) -> bool:
        """Whether this member was done long before others. The coordinator tells all which members caused waits."""
        return asyncio.get_running_loop().time() - self._exchanged_at >= NOTABLE_SECONDS

    async def run(self) -> None:
        """Exchange parts with all members. Failures of other members become events and are not raised.

        Raises:
            AllreduceException: this member could not average a part.
        """
        work: list[Coroutine[Any, Any, object]] = [self.reducer.finish()]
        state = self.state
        living = [member for member in state.members if not member.failed and member is not state.own]
        if state.own.is_sender:
            work.append(self._apply_own_parts())
            for failed in state.failed:  # in an earlier phase
                self._stop_exchange(failed.index)
            for member in living:
                if self.vector.parts[member.index]:
                    self._exchanges[member.index] = asyncio.ensure_future(self._exchange_with(member))
        for index, calls in self.calls.items():
            calls.start(self.settings.sender_timeout, asks=not state.members[index].failed)
        absent = asyncio.ensure_future(self._give_up_absent_senders())
        exchange = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.gather(*exchange)
            await self.received.wait()
            self.vector.drop_early()
            self.exchanged.set()
            self._exchanged_at = asyncio.get_running_loop().time()
            if state.own.is_sender and self.vector.is_complete and not self.has_news:
                self._may_end.set()
                self.emit(Complete(self.own_index))
            self.emit(Exchanged([*self.vector.held]))
            await self.ended.wait()
            # A call that ends by itself leaves its connection open for the next round.
            if self._exchanges:
                await asyncio.wait(self._exchanges.values(), timeout=self.settings.sender_timeout)
        finally:
            for timer in self._timers:
                timer.cancel()
            helpers = [task for calls in self.calls.values() for task in calls.close()]
            await cancel_and_wait(absent, *exchange, *self._exchanges.values(), *self._handlers, *helpers)

    def end(self) -> None:
        """Note that the round is over, and let all calls end."""
        self.ended.set()
        self._may_end.set()
        for calls in self.calls.values():
            calls.is_over = True

    async def abandon(self) -> None:
        """Stop the exchange and discard its averages, because the others continue without this member."""
        self.state.own.status = MemberStatus.LATE
        # End the handlers first, so that no other member gets an average that is not part of the round's result.
        await cancel_and_wait(*self._handlers)
        for member in range(self.group.group_size):
            self.reducer.ban(member, "this member is late")
        await cancel_and_wait(*self._exchanges.values())
        await self.exchanged.wait()
        self.state.forgive()
        self.vector.restart()

    def _stop(self, action: StopExchange) -> None:
        """Stop the exchange with a member that has failed."""
        member = self.state.members[action.index]
        if action.is_new:
            logger.info("group member %s failed: %s", member.peer_id, action.loss.reason)
        self.reducer.ban(action.index, action.loss.reason)
        if member is not self.state.own:
            self.calls[action.index].is_given_up = True
        exchange = self._exchanges.get(action.index)
        if exchange is not None and exchange is not asyncio.current_task():
            exchange.cancel()

    def result(self) -> RoundResult:
        """The result of the round, as far as this member knows.

        Raises:
            AllreduceException: nothing was averaged; the tensors are as they were.
        """
        state, failed = self.state, self.state.failed
        share = self.vector.share_averaged if state.own.is_sender else 1.0
        # A part that is held without an average is a result, too: its reducer says that no member has contributed.
        has_nothing = share == 0 and not any(self.vector.held)
        if has_nothing and failed:
            reasons = "; ".join(f"{each.peer_id}: {each.loss.reason}" for each in failed if each.loss is not None)
            raise AllreduceException(f"nothing was averaged, every other member failed: {reasons}")
        if has_nothing and state.own.late:
            raise AllreduceException("this member was late, and the result did not arrive")
        left_out = [state.members[index] for index in self.left_out]
        return RoundResult(
            group_id=self.group.group_id,
            peers=self.group.peer_ids,
            failed_peers=tuple(member.peer_id for member in failed),
            weights=tuple(self.weights or map(self.weight_of, state.members)),
            share_averaged=share,
            auxiliaries=tuple(member.peer_id for member in state.members if not member.is_sender),
            late=state.own.late,
            duration=asyncio.get_running_loop().time() - self.began_at,
            not_finite_peers=tuple(m.peer_id for m in state.members if m.sent_not_finite or m.told_not_finite),
            left_out_peers=tuple(m.peer_id for m in left_out if m.is_sender and not m.failed),
            bytes_sent=sum(each.bytes_sent for each in self._traffic.values()),
            bytes_received=sum(each.bytes_received for each in self._traffic.values()),
            seen_failing=tuple(each.peer_id for each in failed if each.seen_failing),
            traffic={state.members[index].peer_id: self._traffic_of(each) for index, each in self._traffic.items()},
            causes={each.peer_id: each.loss.cause for each in failed if each.loss is not None},
            waits={self.group.peer_ids[index]: seconds for index, seconds in self.waits.agreed.items()},
        )

    def _traffic_of(self, traffic: Traffic) -> MemberTraffic:
        seconds = max(0.0, traffic.came_at - self.began_at)
        return MemberTraffic(traffic.bytes_sent, traffic.bytes_received, seconds)

    def weight_of(self, member: RoundMember) -> float:
        """A member's weight as far as this one knows it. Members announce their weights to their reducers only."""
        if member is self.state.own:
            return self.weight if member.is_sender else 0.0
        return self.reducer.weights.get(member.index, 0.0) if member.is_sender and not member.failed else 0.0

    # --- sending own parts, receiving averages ------------------------------------------------------------------------

    async def _exchange_with(self, member: RoundMember) -> None:
        """Exchange parts with another member as their reducer. If it fails, only the parts that it reduces are lost."""
        stub, traffic, calls = self.get_stub(member.peer_id), self._traffic[member.index], self.calls[member.index]
        delivery = Delivery(
            traffic,
            stub.rpc_reduce,
            calls,
            may_end=self._may_end,
            has_news=lambda: self.has_news,
            timeout=self.settings.reducer_timeout,
        )

        async def make_calls(generation: int) -> None:
            if not generation or not self.ended.is_set():
                stripes = traffic.count_calls(stub.round_trip)
                await delivery.run(self.round_id, self.weight, stripes, self.book.own, generation)

        try:
            await calls.keep_calling(make_calls)
        except PEER_FAILURES as e:
            if not self.ended.is_set():
                member.withheld_at = asyncio.get_running_loop().time()
                self.emit(Lost(member.index, Loss.of(e)))
        except asyncio.CancelledError:
            member.cut_off |= member.owes_averages
            raise
        finally:
            self._stop_exchange(member.index)

    def _stop_exchange(self, member: int) -> None:
        """Send nothing more to a reducer, and expect nothing more from it."""
        self._traffic[member].stop()
        self.emit(PartsSent(member))
        self._note_received(member)

    # --- reducing -----------------------------------------------------------------------------------------------------

    async def _apply_own_parts(self) -> None:
        for index in range(len(self.reducer)):
            average = await self.reducer.average(index)
            # All others have failed before they contributed. Some may be alive and average the rest without this
            # member, so its own values must not count as averages.
            if not average.is_shared:
                return
            self.vector.take(self.own_index, index, average.values, is_delta=average.is_delta)

    def waits_for_beginning_of(self, member: int) -> bool:
        """Whether this member expects parts from another one that has not started to send."""
        return member in self.reducer.waiting_for and not self.reducer.has_begun(member)

    async def _give_up_absent_senders(self) -> None:
        """Give up senders that have not started within the time limit."""
        await asyncio.sleep(self.settings.sender_timeout)
        for sender in sorted(self.reducer.waiting_for):
            if self.waits_for_beginning_of(sender):
                self.emit(Lost(sender, Loss(LossCause.SILENT, "did not begin to send in time")))

    async def serve(self, call: Call, begin: BeginReduce, sender: PeerID) -> None:
        """Reduce for another member. Runs in the handler of its call.

        Raises:
            ProtocolError: the caller is not an expected sender, or it breaks the protocol.
            P2PDaemonError, TimeoutError: the sender failed.
        """
        index, task = self._check_member(begin, sender), asyncio.current_task()
        assert task is not None
        calls = self.calls[index]
        intake: Intake | None = None

        def start() -> Coroutine[Any, Any, None]:
            nonlocal intake
            check_beginning(begin, self.intakes.get(index))
            self.book.take_claim(index, begin.norms, begin.statement)
            self._check_member(begin, sender)  # again, because time has passed
            intake = self.begin_stripe(index, begin)
            return intake.exchange(call)

        self._handlers[task] = None
        try:
            await calls.serve(call, begin.resume, start)
        finally:
            self._handlers.pop(task, None)
        assert intake is not None
        if not intake.unfinished:
            self.reducer.delivered_everything(index)
        with calls.ending(call, begin.resume):
            has_ended = await intake.wait_for_end(call, self.ended)
        if has_ended:
            self.emit(Complete(index))

    def has_given_up(self, member: RoundMember) -> bool:
        """Whether the exchange with a member has been given up."""
        return member.failed or self.state.own.late

    def hear_report(self, member: RoundMember) -> None:
        """Note that a member has reported. It exchanges nothing more, so it will not repeat its broken calls."""
        traffic = self._traffic[member.index]
        if traffic.is_awaited() and traffic.parts_in.missing:
            self._lose(member, GaveUpError(GIVEN_UP))
        elif traffic.is_awaited():
            traffic.excuse()

    def bytes_sent_to(self, members: Iterable[int]) -> int:
        """The bytes of parts and averages sent to these members so far."""
        return sum(self._traffic[index].bytes_sent for index in members)

    @property
    def has_given_all(self) -> bool:
        """Whether this member has sent all averages that it reduces to all living members."""
        return all(
            traffic.averages_out.is_taken
            for index, traffic in self._traffic.items()
            if not self.state.members[index].failed
        )

    def hear_question(self, told: StatusRequest, asker: PeerID) -> bool:
        """Handle a peer's question about the round, which also tells which calls have broken.

        Returns:
            Whether this member has given up the asker.
        """
        if asker not in self.group.peer_ids or (index := self.group.peer_ids.index(asker)) == self.own_index:
            return False
        self.calls[index].hear_question(LifeQuestion(told.resume, told.is_link_broken))
        return self.has_given_up(self.state.members[index])

    def _check_member(self, begin: BeginReduce, sender: PeerID) -> int:
        """The position of a caller that may call now."""
        if sender not in self.group.peer_ids:
            raise ProtocolError("not a member of this group")
        index = self.group.peer_ids.index(sender)
        # The caller may lack averages although it has delivered everything.
        member = self.state.members[index]
        is_known = begin.resume > 0 and index in self.intakes and not self.has_given_up(member)
        if index not in self.reducer.waiting_for and not is_known:
            raise ProtocolError("nothing is expected from this member: it began before, was given up, or is no sender")
        if begin.resume > MAX_RESUMES:
            raise ProtocolError(f"has restarted {begin.resume} times, more than {MAX_RESUMES}")
        return index

    def begin_stripe(self, sender: int, begin: BeginReduce) -> Intake:
        """Note that a sender has started on one connection; returns its intake, which the first connection creates."""
        limit = self.settings.sender_timeout
        known = self.intakes.get(sender)
        if known is None or known.generation < begin.resume:
            self.intakes[sender] = Intake(self._traffic[sender], begin, limit, self.settings.reducer_timeout)
            self.reducer.begin(sender, self.group.limited(sender, begin.weight))
            if begin.stripes > 1:
                timer = asyncio.get_running_loop().call_later(limit, self._give_up_if_partial, sender, begin.resume)
                self._timers.append(timer)
        intake = self.intakes[sender]
        intake.begun.add(begin.stripe)
        return intake

    def _give_up_if_partial(self, sender: int, generation: int) -> None:
        """Give up a sender that has started on only some of its connections: its other parts may never come."""
        intake = self.intakes[sender]
        if intake.generation == generation and len(intake.begun) < intake.stripes:
            loss = Loss(LossCause.SILENT, "did not begin to send on all its connections in time")
            self.emit(Lost(sender, loss))
