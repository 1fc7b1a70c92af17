"""Butterfly all-reduce: every member sends each part of its vector to the member that reduces it.

All parts are in flight at once. A reducer averages a part as soon as all senders have delivered it, and sends the
average back (:mod:`shoal.averaging.round.traffic`). Afterwards the members make sure that all of them have every
average, and make up for members that have died (:mod:`shoal.averaging.round.finish`).

A sender ends its side of the calls when it holds the averages of all reducers. So when all senders of a reducer have
ended, that reducer knows without asking that the round is over everywhere.

A member whose connection breaks is waited for while the exchange with it begins anew
(:mod:`shoal.averaging.round.pair`). It fails when it does not come back, or when it is silent for longer than a
time limit. The parts that a failed sender has not delivered are averaged without it.

NaN and infinity never get into an average. A member with such values has weight 0 and does not send them. If some come
nevertheless, the reducer leaves them out. If an average contains some, its reducer has failed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging.control import AveragingMode, GroupInfo, RoundResult
from shoal.averaging.messages import PEER_FAILURES, BeginReduce, RoundStatus, StatusReply, StatusRequest, reason_of
from shoal.averaging.round.combining import NormBook
from shoal.averaging.round.delivery import Delivery, Intake, check_beginning, stripes_for
from shoal.averaging.round.flow_control import FlowControl
from shoal.averaging.round.liveness import wait_for_return, wait_until_silent
from shoal.averaging.round.members import MemberStatus, Roster, RoundMember
from shoal.averaging.round.pair import MAX_RESUMES, Pair, Superseded
from shoal.averaging.round.parts import RoundVector
from shoal.averaging.round.reducer import PartReducer
from shoal.averaging.round.traffic import Traffic
from shoal.averaging.round.watchdog import Watchdog
from shoal.base.tasks import cancel_and_wait
from shoal.compression import CompressionInfo
from shoal.errors import AllreduceException, ProtocolError, StreamClosedError
from shoal.p2p import Call, PeerID, StubBase

if TYPE_CHECKING:
    from shoal.averaging.round.session import AllReduceSettings

logger = logging.getLogger(__name__)

GIVEN_UP = "has given this member up"


class AllReduce:
    """The exchange of parts in one group.

    Args:
        round_id: names the round, the same way at all members.
        group: as agreed, with ``modes`` and ``shares`` filled in.
        own_index: this member's position.
        tensors: contiguous CPU tensors; the averages are written into them.
        infos: one for each tensor.
        settings: how the group averages.
        weight: this member's weight.
        get_stub: makes a stub of the averager protocol for a member.
        is_spoilt: whether some of this member's values are not finite; its weight is then 0.
    """

    def __init__(
        self,
        round_id: bytes,
        group: GroupInfo,
        own_index: int,
        tensors: Sequence[torch.Tensor],
        infos: Sequence[CompressionInfo],
        settings: AllReduceSettings,
        weight: float,
        get_stub: Callable[[PeerID], StubBase],
        is_spoilt: bool = False,
    ) -> None:
        self.round_id, self.group, self.own_index, self.get_stub = round_id, group, own_index, get_stub
        self.settings, self.weight = settings, weight
        self.vector = RoundVector(
            tensors, infos, settings.codec, settings.part_size_bytes, group.shares, settings.alpha, is_spoilt
        )
        reducers = [index for index, parts in enumerate(self.vector.parts) if parts]
        self.roster = Roster(group, own_index, reducers, settings.quorum)
        self.roster.on_failure.append(self._drop)
        self.book = NormBook(round_id, group, settings.aggregation, self.roster.accuse)
        self.exchanged = asyncio.Event()
        """This member has sent and received all that it will in the exchange."""
        # The calls to reducers may end: they gave this member all averages, or the round is over. A member that needed
        # a recovery does not end early, so the others wait for the coordinator.
        self._may_end = asyncio.Event()
        self.ended = asyncio.Event()
        """Set when the round is over."""
        self.weights: list[float] = []
        """The weight of each member in the average, as the coordinator has committed it."""
        self.reducer = self._make_reducer()
        """Averages the parts that this member reduces."""
        self._pace = FlowControl() if settings.quorum is None else None
        # By member: what is exchanged with it.
        self._traffic = {i: self._make_traffic(i) for i in range(group.group_size) if i != own_index}
        is_awaited = self.reducer.waiting_for.__contains__
        self.pairs = {i: Pair(each, functools.partial(is_awaited, i)) for i, each in self._traffic.items()}
        """By member: the calls between the two."""
        self.watch = Watchdog(self)  # looks after the calls
        self._exchanges: dict[int, asyncio.Task[None]] = {}
        # A dictionary used as an ordered set: the order of cancellation is the same in every run of a simulation.
        self._handlers: dict[asyncio.Task[Any], None] = {}
        self.intakes: dict[int, Intake] = {}
        """By sender: what it sends to this reducer."""
        self._timers: list[asyncio.TimerHandle] = []
        self._waiting: dict[asyncio.Task[None], None] = {}  # for senders whose connections broke

    def _make_reducer(self) -> PartReducer:
        own, parts, roster = self.own_index, self.vector.parts[self.own_index], self.roster
        senders = [index for index in roster.senders if index != own and parts]
        local = self.vector.sound_values if roster.is_sender else None
        on_not_finite, combiner = roster.seen_not_finite.add, self.book.make_combiner()
        reducer = PartReducer(parts, senders, local, own, {own: self.weight}, on_not_finite, combiner)
        reducer.left_out, reducer.waits = roster.left_out, roster.waits
        return reducer

    def _make_traffic(self, member: int) -> Traffic:
        roster = self.roster
        return Traffic(
            self.vector,
            self.reducer,
            self.own_index,
            member,
            gives=roster.is_sender,
            takes=member in roster.senders,
            pace=self._pace,
            on_not_finite=lambda: roster.seen_not_finite.add(member),
            on_delivered=lambda: roster.note_delivery(member),
            on_received=lambda: roster.note_received(member),
        )

    async def run(self) -> None:
        """Exchange parts with all members. Failures of other members go to the roster and are not raised here.

        Raises:
            AllreduceException: this member could not average a part.
        """
        work: list[Coroutine[Any, Any, object]] = [self.reducer.finish()]
        roster = self.roster
        living = [member for member in roster.members if not member.failed and member is not roster.own]
        if roster.is_sender:
            work.append(self._apply_own_parts())
            for failed in roster.failed:  # in an earlier phase
                self._stop_exchange(failed.index)
            for member in living:
                if self.vector.parts[member.index]:
                    self._exchanges[member.index] = asyncio.ensure_future(self._exchange_with(member))
        watches = [self._watch(member) for member in living if member.index in roster.coordinators]
        watches += [self._give_up_absent_senders(), self.watch.run()]
        background, exchange = ([asyncio.ensure_future(each) for each in begun] for begun in (watches, work))
        try:
            await asyncio.gather(*exchange)
            await roster.received.wait()
            self.vector.drop_early()
            self.exchanged.set()
            # A member that has left out bad values does not end early. The others then wait for the coordinator, which
            # names the sender of these values to all.
            if roster.is_sender and self.vector.is_complete and not roster.seen_not_finite:
                self._may_end.set()
                roster.note_complete(self.own_index)
            await self.ended.wait()
            # Calls that end by themselves leave their connections open for the next round.
            if self._exchanges:
                await asyncio.wait(self._exchanges.values(), timeout=self.settings.sender_timeout)
        finally:
            for timer in self._timers:
                timer.cancel()
            await cancel_and_wait(*background, *exchange, *self._exchanges.values(), *self._handlers, *self._waiting)
            for pair in self.pairs.values():
                await pair.close()

    def end(self) -> None:
        """Note that the round is over, and let all calls end."""
        self.ended.set()
        self._may_end.set()

    async def abandon(self) -> None:
        """Stop the exchange and forget its averages, because the others have gone on without this member."""
        self.roster.own.standing = MemberStatus.LATE
        # The handlers end first: no other member may get an average that is not part of the round's result.
        await cancel_and_wait(*self._handlers)
        for member in range(self.group.group_size):
            self.reducer.ban(member, "this member is late")
        await cancel_and_wait(*self._exchanges.values())
        await self.exchanged.wait()
        self.roster.forgive()
        self.vector.restart()

    def _drop(self, member: RoundMember) -> None:
        """Stop all exchange with a member that has failed."""
        self.reducer.ban(member.index, member.reason)
        exchange = self._exchanges.get(member.index)
        if exchange is not None and exchange is not asyncio.current_task():
            exchange.cancel()

    def result(self, duration: float) -> RoundResult:
        """The result of the round, as far as this member knows.

        Args:
            duration: seconds that the round has taken.

        Raises:
            AllreduceException: nothing was averaged; the tensors are as they were.
        """
        roster = self.roster
        share = self.vector.share_averaged if roster.is_sender else 1.0
        # A part that is held without an average is a result, too: its reducer says that nobody has contributed.
        has_nothing = share == 0 and not any(self.vector.held)
        if has_nothing and roster.failed:
            reasons = "; ".join(f"{member.peer_id}: {member.reason}" for member in roster.failed)
            raise AllreduceException(f"nothing was averaged, every other member failed: {reasons}")
        if has_nothing and roster.own.late:
            raise AllreduceException("this member was late, and the result did not arrive")
        not_finite = roster.seen_not_finite | roster.told_not_finite
        return RoundResult(
            group_id=self.group.group_id,
            peers=self.group.peer_ids,
            failed_peers=tuple(member.peer_id for member in roster.failed),
            weights=tuple(self.weights or map(self.weight_of, roster.members)),
            share_averaged=share,
            auxiliaries=tuple(member.peer_id for member in roster.members if member.mode is AveragingMode.AUX),
            late=roster.own.late,
            duration=duration,
            not_finite_peers=tuple(self.group.peer_ids[i] for i in sorted(not_finite)),
            left_out_peers=tuple(self.group.peer_ids[i] for i in roster.left_out_alive),
            bytes_sent=sum(each.bytes_sent for each in self._traffic.values()),
            bytes_received=sum(each.bytes_received for each in self._traffic.values()),
            seen_failing=tuple(each.peer_id for each in roster.failed if each.index in roster.seen_failing),
            waits={self.group.peer_ids[index]: seconds for index, seconds in roster.waits.seconds.items()},
        )

    def weight_of(self, member: RoundMember) -> float:
        """A member's weight as far as this one knows it: members announce their weights to their reducers only."""
        if member is self.roster.own:
            return self.weight if self.roster.is_sender else 0.0
        is_counted = not member.failed and member.mode is not AveragingMode.AUX
        return self.reducer.weights.get(member.index, 0.0) if is_counted else 0.0

    # --- sending own parts, receiving averages ------------------------------------------------------------------------

    async def _exchange_with(self, member: RoundMember) -> None:
        """Exchange with another member as a reducer. Its failure costs this member only the parts that it reduces."""
        stub, traffic, pair = self.get_stub(member.peer_id), self._traffic[member.index], self.pairs[member.index]
        delivery = Delivery(
            traffic,
            stub.rpc_reduce,
            pair.lines,
            pair,
            may_end=self._may_end,
            timeout=self.settings.reducer_timeout,
        )

        async def make_calls(generation: int) -> None:
            if not generation or not self.ended.is_set():
                await delivery.run(self.round_id, self.weight, self._stripes_to(member), self.book.own, generation)

        try:
            await pair.keep_calling(make_calls, lambda generation: self._resumes(member, generation))
        except PEER_FAILURES as e:
            if not self.ended.is_set():
                self.roster.seen_withholding[member.index] = asyncio.get_running_loop().time()
                self.roster.fail(member.index, reason_of(e))
        except asyncio.CancelledError:
            self.roster.note_cancelled(member.index)
            raise
        finally:
            self._stop_exchange(member.index)

    def _stop_exchange(self, member: int) -> None:
        """Send nothing more to a member, and expect nothing more from it."""
        self._traffic[member].stop()
        self.roster.note_delivery(member)
        self.roster.note_received(member)

    def heard_of(self, member: int) -> None:
        """Note that a member has shown that it lives."""
        self._traffic[member].heard_at = asyncio.get_running_loop().time()

    async def _watch(self, member: RoundMember) -> None:
        """Give a member up when it has sent nothing for a while and does not answer whether it lives.

        If it answers that it has given this member up, perhaps because this one came late, it is not to blame.
        """
        traffic, limit = self._traffic[member.index], self.settings.sender_timeout
        stub = self.get_stub(member.peer_id)
        if await wait_until_silent(stub, self.round_id, lambda: traffic.heard_at, limit):
            member.silent.set()
            self.roster.fail(member.index, reason_of(TimeoutError()))
        else:
            self.roster.fail(member.index, GIVEN_UP, is_hearsay=True)

    # --- reducing -----------------------------------------------------------------------------------------------------

    async def _apply_own_parts(self) -> None:
        for index in range(len(self.reducer)):
            average = await self.reducer.average(index)
            # All others have failed before they contributed. If some of them live, they average the rest without this
            # member, so its own values must not count as averages.
            if not average.is_shared:
                return
            self.vector.take(self.own_index, index, average.values, is_delta=average.is_delta)

    def waits_for_beginning_of(self, member: int) -> bool:
        """Whether this member expects parts from another one that has not even begun to send them."""
        return member in self.reducer.waiting_for and not self.reducer.has_begun(member)

    async def _give_up_absent_senders(self) -> None:
        """Give up senders that have not even begun within the time limit."""
        await asyncio.sleep(self.settings.sender_timeout)
        for sender in sorted(self.reducer.waiting_for):
            if self.waits_for_beginning_of(sender):
                self.roster.fail(sender, "did not begin to send in time")

    async def serve(self, call: Call, begin: BeginReduce, sender: PeerID) -> None:
        """Reduce for another member. Runs in the handler of its call.

        Raises:
            ProtocolError: the caller is not an expected sender, or it breaks the protocol.
            P2PDaemonError, TimeoutError: the sender failed.
        """
        index, task = self._check_member(begin, sender), asyncio.current_task()
        assert task is not None
        member, pair = self.roster.members[index], self.pairs[index]
        self._handlers[task] = None
        try:
            pair.advance(begin.resume)
            if await pair.settle() != begin.resume:
                raise Superseded("the exchange goes on over other connections")
            check_beginning(begin, self.intakes.get(index))
            self.book.take_claim(index, begin.norms, begin.statement)
            self._check_member(begin, sender)  # again: time has passed
            pair.note_life(comes_anew=begin.resume > 0)
            intake = self.begin_stripe(index, begin)
            try:
                call.connection.show_life()  # the first average may take a while
                with pair.lines.watching(call):
                    await pair.run(begin.resume, intake.exchange(call))
            except BaseException as e:
                self._note_failure(member, begin.resume, call, e)
                raise
        except Superseded as e:
            call.connection.abort()
            raise StreamClosedError(str(e)) from e
        finally:
            self._handlers.pop(task, None)
        if not intake.unfinished:
            self.reducer.delivered_everything(index)
        with pair.lines.watching(call):
            on_break = functools.partial(self._resumes, member, begin.resume)
            has_ended = await intake.wait_for_end(call, self.ended, None if pair.is_calling else on_break)
        if has_ended:
            self.roster.note_complete(index)

    def _note_failure(self, member: RoundMember, generation: int, call: Call, error: BaseException) -> None:
        """A sender's call has failed before everything was exchanged."""
        # The end of a connection cancels its handler.
        is_broken = isinstance(error, StreamClosedError | asyncio.CancelledError) and call.connection.closed
        if self.pairs[member.index].generation > generation:
            return
        if not (is_broken and (self.ended.is_set() or self._resumes(member, generation))):
            self.roster.fail(member.index, reason_of(error))

    def _resumes(self, member: RoundMember, generation: int) -> bool:
        """A call of this generation has broken before its time; returns whether the exchange begins anew."""
        pair = self.pairs[member.index]
        if member.failed or generation >= MAX_RESUMES or self.ended.is_set():
            return False
        if pair.lost < generation:
            logger.info("the connection to group member %s broke; the exchange begins anew", member.peer_id)
            pair.lost = generation
            pair.returned.clear()
            pair.dial_anew(self.get_stub(member.peer_id), self._stripes_to(member))
            # If this member does not call it anyway, it may not know yet.
            if member.index in self.reducer.waiting_for or not pair.is_calling:
                waiting = asyncio.ensure_future(self._wait_for_return(member, generation))
                self._waiting[waiting] = None
                waiting.add_done_callback(self._waiting.pop)
        if pair.is_calling:
            pair.advance(generation + 1)
        return True

    def _stripes_to(self, member: RoundMember) -> int:
        missing = self._traffic[member.index].averages_in.missing
        return stripes_for(self.get_stub(member.peer_id).round_trip, len(missing))

    async def _wait_for_return(self, member: RoundMember, generation: int) -> None:
        """Give a sender up whose connection broke, if it is dead or does not come back in time."""
        pair = self.pairs[member.index]
        is_client = member.mode is AveragingMode.CLIENT  # which cannot be called

        def why_not(reply: StatusReply) -> str | None:
            if reply.has_given_up:
                return GIVEN_UP
            return "has left the round" if reply.status != RoundStatus.RUNNING else None

        reason = await wait_for_return(
            None if is_client else self.get_stub(member.peer_id),
            StatusRequest(round_id=self.round_id, resume=generation + 1),
            pair.returned,
            pair,
            why_not,
            pair.traffic.is_incomplete,
        )
        if pair.lost == generation and member.index in self.reducer.waiting_for and not pair.returned.is_set():
            if reason is None or (pair.is_heard() and not pair.traffic.is_incomplete()):
                self.reducer.delivered_everything(member.index)  # it lives, and has nothing to come back for
            else:
                self.roster.fail(member.index, reason)

    def has_given_up(self, member: RoundMember) -> bool:
        """Whether nothing more will be exchanged with a member."""
        return member.failed or self.roster.own.late

    def _check_member(self, begin: BeginReduce, sender: PeerID) -> int:
        """The position of a caller that may call now."""
        if sender not in self.group.peer_ids:
            raise ProtocolError("not a member of this group")
        index = self.group.peer_ids.index(sender)
        # It may lack averages although it has delivered everything.
        member = self.roster.members[index]
        is_known = begin.resume > 0 and index in self.intakes and not self.has_given_up(member)
        if index not in self.reducer.waiting_for and not is_known:
            raise ProtocolError("nothing is expected from this member: it began before, was given up, or is no sender")
        if begin.resume > MAX_RESUMES:
            raise ProtocolError(f"has begun anew {begin.resume} times, more than {MAX_RESUMES}")
        return index

    def begin_stripe(self, sender: int, begin: BeginReduce) -> Intake:
        """Note that a sender has begun on one of its connections; returns its intake, new on the first connection."""
        limit = self.settings.sender_timeout
        known = self.intakes.get(sender)
        if known is None or known.generation < begin.resume:
            self.intakes[sender] = Intake(self._traffic[sender], begin, limit, self.settings.reducer_timeout)
            self.reducer.begin(sender, self.group.limited(sender, begin.weight))
            if begin.stripes > 1:
                timer = asyncio.get_running_loop().call_later(limit, self._give_up_if_partial, sender, begin.resume)
                self._timers.append(timer)
        intake, pair = self.intakes[sender], self.pairs[sender]
        if begin.resume > pair.lost:
            pair.returned.set()
        intake.begun.add(begin.stripe)
        return intake

    def _give_up_if_partial(self, sender: int, generation: int) -> None:
        """Give up a sender that has begun on some of its connections only: the rest of its parts may never come."""
        intake = self.intakes[sender]
        if intake.generation == generation and len(intake.begun) < intake.stripes:
            self.roster.fail(sender, "did not begin to send on all its connections in time")
