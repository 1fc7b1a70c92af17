"""Butterfly all-reduce: every member sends each part of its vector to the member that reduces it.

All parts are in flight at once, each reducer averages a part as soon as it has it from everybody, and sends the average
back (:mod:`shoal.averaging.allreduce.sending`). Afterwards the members make sure that all of them have everything
(:mod:`shoal.averaging.allreduce.finish`), and finish what a dead member has left undone.

Over a long link one connection is slow to reach its speed and limited by what may be under way on it. There a member
makes several calls, the stripes, and each takes the next slice when it is done with the one before, so that a stripe
that is slower than the others carries less.

A sender ends its side of the calls when it holds all averages, of all reducers. So a reducer whose senders have all
ended knows, without asking anybody, that the round is over everywhere.

A sender that fails is excluded from the parts that it has not delivered. Failure is the end of a connection, at once,
or silence for longer than a time limit.

No value that is not finite gets into an average, or is taken for one: a member with such values has weight 0 and does
not send them, a reducer leaves out those that come nevertheless, and a reducer that sends some has failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging.allreduce.members import Member, Roster, Standing
from shoal.averaging.allreduce.parts import RoundVector
from shoal.averaging.allreduce.reducer import PartReducer
from shoal.averaging.allreduce.sending import Pace, Traffic
from shoal.averaging.control import AveragingMode, GroupInfo, RoundResult
from shoal.averaging.messages import (
    ALIVE_PER_TIMEOUT,
    PEER_FAILURES,
    BeginReduce,
    PartMessage,
    StatusRequest,
    open_patiently,
    reason_of,
)
from shoal.compression import CompressionInfo
from shoal.errors import AllreduceException, P2PHandlerError, ProtocolError
from shoal.p2p import Call, PeerID, StubBase
from shoal.tasks import all_of, cancel_and_wait, first_completed

if TYPE_CHECKING:
    from shoal.averaging.allreduce.session import AllReduceSettings

logger = logging.getLogger(__name__)

# A member may take at least so many seconds to answer whether it lives: it may have to be dialled.
MIN_QUESTION_SECONDS = 1.5

# More connections between two members make no link faster, and each costs a handshake.
MAX_STRIPES = 8
# A stripe for so much of the time to the reducer and back; the reducer makes as many, if it sends, too.
SECONDS_PER_STRIPE = 0.025
# A connection needs at least so many parts to pay.
PARTS_PER_STRIPE = 4


def stripes_for(round_trip: float, parts: int) -> int:
    """Over how many connections parts should travel.

    Args:
        round_trip: seconds to the reducer and back.
    """
    return max(1, min(MAX_STRIPES, round(round_trip / SECONDS_PER_STRIPE), parts // PARTS_PER_STRIPE))


class Delivery:
    """The sender's side, for one reducer.

    Args:
        traffic: what is to be exchanged with the reducer.
        open_call: begins a call to it.
        may_end: set when the calls may end: this member holds all averages, of all reducers, or will get no more.
        timeout: seconds without the next average after which it is given up.
    """

    def __init__(
        self,
        traffic: Traffic,
        open_call: Callable[[], AbstractAsyncContextManager[Call]],
        *,
        may_end: asyncio.Event,
        timeout: float,
    ) -> None:
        self._traffic = traffic
        self._open_call, self._may_end, self._timeout = open_call, may_end, timeout
        self._stripes = 1

    async def run(self, round_id: bytes, weight: float, stripes: int) -> None:
        """Exchange everything, then wait until the calls may end.

        Raises:
            ProtocolError, P2PDaemonError, P2PHandlerError, TimeoutError: the reducer failed.
        """
        self._stripes = stripes
        self._traffic.begin(stripes, own=True)
        begin = [BeginReduce(round_id=round_id, weight=weight, stripe=i, stripes=stripes) for i in range(stripes)]
        await all_of(*[self._run_stripe(each) for each in begin])

    async def _run_stripe(self, begin: BeginReduce) -> None:
        async with open_patiently(self._open_call) as call:
            await call.send(begin)
            try:
                await all_of(self._send_until_end(call), self._receive_averages(call))
            except PEER_FAILURES as e:
                if not self._may_end.is_set():
                    raise
                # Everything is here: it does not matter.
                logger.debug("a call to %s ended badly: %r", call.remote, e)

    async def _send_until_end(self, call: Call) -> None:
        await self._send_parts(call)
        # The end says that everything is here: over a long link it is not to wait for the reducer's own end.
        await self._may_end.wait()
        await call.send_end()

    async def _send_parts(self, call: Call) -> None:
        await self._traffic.send(call, self._traffic.parts_out, self._stripes)
        await call.send(PartMessage())

    async def _receive_averages(self, call: Call) -> None:
        if await self._traffic.receive(call, lambda: self._timeout) is not None:
            raise ProtocolError("has no more to send, but does not end")
        self._traffic.end(own=True)


class Intake:
    """The reducer's side, for one sender.

    Args:
        traffic: what is to be exchanged with the sender.
        begin: how the sender began.
        timeout: seconds without the next part after which it is given up.
        timeout_for_averages: the same when all parts are here.
    """

    def __init__(self, traffic: Traffic, begin: BeginReduce, timeout: float, timeout_for_averages: float) -> None:
        self._traffic = traffic
        self._timeout, self._timeout_for_averages = timeout, timeout_for_averages
        self.weight, self.stripes = begin.weight, begin.stripes
        self.begun: set[int] = set()
        """Stripes that have begun."""
        self.unfinished = begin.stripes
        """How many stripes still have something to exchange."""
        self.open = begin.stripes
        """How many stripes the sender has not ended."""
        traffic.begin(begin.stripes, own=False)

    async def exchange(self, call: Call) -> None:
        """Take parts and give averages on one stripe.

        Raises:
            ProtocolError, P2PDaemonError, TimeoutError: the sender failed.
        """
        await all_of(self._take_parts(call), self._give_averages(call))
        await call.send_end()
        self.unfinished -= 1

    async def _take_parts(self, call: Call) -> None:
        if await self._traffic.receive(call, self._limit) is None:
            raise ProtocolError("ended before its last part")
        self._traffic.end(own=False)

    def _limit(self) -> float:
        return self._timeout if self._traffic.parts_in.missing else self._timeout_for_averages

    async def _give_averages(self, call: Call) -> None:
        await self._traffic.send(call, self._traffic.averages_out, self.stripes)

    async def wait_for_end(self, call: Call, round_ended: asyncio.Event) -> bool:
        """A sender ends its side when it holds all averages; when the round is over it has to, soon.

        Returns:
            Whether it has ended all its stripes.
        """
        end = asyncio.ensure_future(call.receive(PartMessage))
        try:
            await first_completed(asyncio.shield(end), round_ended.wait())
            async with asyncio.timeout(self._timeout):
                if await end is not None:
                    raise ProtocolError("more parts than agreed")
        finally:
            await cancel_and_wait(end)
        self.open -= 1
        return not self.open


class AllReduce:
    """The exchange of parts in one group.

    Args:
        round_id: names it, the same way at all members.
        group: as agreed; ``modes`` and ``shares`` filled in.
        own_index: this member's position.
        tensors: contiguous CPU tensors; they receive the averages.
        infos: one for each tensor.
        weight: of this member's values.
        get_stub: makes a stub of the averager protocol for a member.
        is_spoilt: some of this member's values are not finite; its weight is 0.
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
        self.exchanged = asyncio.Event()
        """This member has delivered and received all that it will."""
        # The calls to reducers may end: this member holds all averages, without any help, or the round is over.
        self._may_end = asyncio.Event()
        self.ended = asyncio.Event()
        """The round is over."""
        self.weights: list[float] = []
        """Of all members' values in the average, as the coordinator says."""
        self._reducer = self._make_reducer()
        self._pace = Pace() if settings.quorum is None else None
        # What is exchanged with each of the others.
        self._traffic = {i: self._make_traffic(i) for i in range(group.group_size) if i != own_index}
        self._exchanges: dict[int, asyncio.Task[None]] = {}
        # A dictionary keeps the order, so that simulations can be repeated.
        self._handlers: dict[asyncio.Task[Any], None] = {}
        self._intakes: dict[int, Intake] = {}
        self._timers: list[asyncio.TimerHandle] = []

    def _make_reducer(self) -> PartReducer:
        parts, roster = self.vector.parts[self.own_index], self.roster
        senders = [index for index in roster.senders if index != self.own_index and parts]
        local = self.vector.sound_values if roster.is_sender else None
        weights = {self.own_index: self.weight}
        return PartReducer(parts, senders, local, self.own_index, weights, roster.seen_not_finite.add)

    def _make_traffic(self, member: int) -> Traffic:
        roster = self.roster
        return Traffic(
            self.vector,
            self._reducer,
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
        """Exchange parts with all members; their failures end up in the roster, never here.

        Raises:
            AllreduceException: this member could not average a part.
        """
        work: list[Coroutine[Any, Any, object]] = [self._reducer.finish()]
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
        background = [asyncio.ensure_future(each) for each in (self._give_up_absent_senders(), *watches)]
        exchange = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.gather(*exchange)
            await roster.received.wait()
            self.vector.drop_early()
            self.exchanged.set()
            # who has left out values does not end early, so that the others wait for the coordinator to name the sender
            if roster.is_sender and self.vector.is_complete and not roster.seen_not_finite:
                self._may_end.set()
                roster.note_complete(self.own_index)
            await self.ended.wait()
            if self._exchanges:
                await asyncio.wait(self._exchanges.values(), timeout=self.settings.sender_timeout)
        finally:
            for timer in self._timers:
                timer.cancel()
            await cancel_and_wait(*background, *exchange, *self._exchanges.values(), *self._handlers)

    def end(self) -> None:
        """The round is over."""
        self.ended.set()
        self._may_end.set()

    async def abandon(self) -> None:
        """The others have gone on without this member: stop exchanging, and forget what came of it."""
        self.roster.own.standing = Standing.LATE
        # The handlers end first: nobody may get an average that only this member believes in.
        await cancel_and_wait(*self._handlers)
        for member in range(self.group.group_size):
            self._reducer.ban(member, "this member is late")
        await cancel_and_wait(*self._exchanges.values())
        await self.exchanged.wait()
        self.roster.forgive()
        self.vector.restart()

    def _drop(self, member: Member) -> None:
        """It has failed."""
        self._reducer.ban(member.index, member.reason)
        exchange = self._exchanges.get(member.index)
        if exchange is not None and exchange is not asyncio.current_task():
            exchange.cancel()

    def result(self, duration: float) -> RoundResult:
        """What came of the round.

        Raises:
            AllreduceException: nothing; the tensors are as they were.
        """
        roster = self.roster
        share = self.vector.share_averaged if roster.is_sender else 1.0
        # Nobody has even said that there is no average.
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
        )

    def weight_of(self, member: Member) -> float:
        """As far as this member knows: each one tells it to those that reduce for it."""
        if member is self.roster.own:
            return self.weight if self.roster.is_sender else 0.0
        is_counted = not member.failed and member.mode is not AveragingMode.AUX
        return self._reducer.weights.get(member.index, 0.0) if is_counted else 0.0

    # --- sending own parts, receiving averages ------------------------------------------------------------------------

    async def _exchange_with(self, member: Member) -> None:
        """Let another member reduce its parts; whatever it does wrong costs these parts and no more."""
        stub, traffic = self.get_stub(member.peer_id), self._traffic[member.index]
        delivery = Delivery(traffic, stub.rpc_reduce, may_end=self._may_end, timeout=self.settings.reducer_timeout)
        try:
            stripes = stripes_for(stub.round_trip, len(self.vector.parts[member.index]))
            await delivery.run(self.round_id, self.weight, stripes)
        except PEER_FAILURES as e:
            self.roster.fail(member.index, reason_of(e))
        finally:
            self._stop_exchange(member.index)

    def _stop_exchange(self, member: int) -> None:
        """Nothing is to be sent to a member, or expected of it, any more."""
        self._traffic[member].stop()
        self.roster.note_delivery(member)
        self.roster.note_received(member)

    def heard_of(self, member: int) -> None:
        """A member has shown that it lives."""
        self._traffic[member].heard_at = asyncio.get_running_loop().time()

    async def _watch(self, member: Member) -> None:
        """Ask a member whether it lives when it has sent nothing for a while, and give it up if it does not answer.

        A reducer or coordinator that waits for others may be silent for longer than a sender; this tells it from one
        that is frozen. It is asked more than once, and may have to be dialled for that.
        """
        stub, traffic = self.get_stub(member.peer_id), self._traffic[member.index]
        now = asyncio.get_running_loop().time
        begun, unanswered = now(), 0
        pause = self.settings.sender_timeout / ALIVE_PER_TIMEOUT
        patience = max(pause, MIN_QUESTION_SECONDS)
        while unanswered < ALIVE_PER_TIMEOUT - 1:
            asked, last_sign = now(), max(begun, traffic.heard_at)
            if asked < last_sign + pause:
                unanswered = 0
                await asyncio.sleep(last_sign + pause - asked)
                continue
            try:
                with suppress(P2PHandlerError):  # an answer, too
                    await stub.rpc_round_status(StatusRequest(round_id=self.round_id), timeout=patience)
                self.heard_of(member.index)
            except PEER_FAILURES as e:
                logger.debug("asked %s whether it lives: %r", member.peer_id, e)
                await asyncio.sleep(asked + patience - now())
                unanswered = unanswered + 1 if traffic.heard_at < asked else 0
        member.silent.set()
        self.roster.fail(member.index, reason_of(TimeoutError()))

    # --- reducing -----------------------------------------------------------------------------------------------------

    async def _apply_own_parts(self) -> None:
        for index in range(len(self._reducer)):
            average = await self._reducer.average(index)
            # All others have failed: if some live, it is theirs to average the rest.
            if not average.is_shared:
                return
            self.vector.take(self.own_index, index, average.values, is_delta=average.is_delta)

    def waits_for_beginning_of(self, member: int) -> bool:
        """Whether this member is to reduce parts of another one that has not even begun to send them."""
        return member in self._reducer.waiting_for and not self._reducer.has_begun(member)

    async def _give_up_absent_senders(self) -> None:
        """Whoever has not even begun within the time limit is not waited for."""
        await asyncio.sleep(self.settings.sender_timeout)
        for sender in sorted(self._reducer.waiting_for):
            if self.waits_for_beginning_of(sender):
                self.roster.fail(sender, "did not begin to send in time")

    async def serve(self, call: Call, begin: BeginReduce, sender: PeerID) -> None:
        """Reduce for another member; runs in the handler of its call.

        Raises:
            ProtocolError: the sender has no business here, or sends something wrong.
        """
        index = self._check_sender(begin, sender)
        task = asyncio.current_task()
        assert task is not None
        self._handlers[task] = None
        intake = self._begin_stripe(index, begin)
        try:
            await intake.exchange(call)
        except BaseException as e:
            self._handlers.pop(task, None)
            self.roster.fail(index, reason_of(e))
            raise
        self._handlers.pop(task, None)
        if not intake.unfinished:
            self._reducer.delivered_everything(index)
        if await intake.wait_for_end(call, self.ended):
            self.roster.note_complete(index)

    def _check_sender(self, begin: BeginReduce, sender: PeerID) -> int:
        if sender not in self.group.peer_ids:
            raise ProtocolError("not a member of this group")
        index = self.group.peer_ids.index(sender)
        known = self._intakes.get(index)
        if index not in self._reducer.waiting_for or (known is not None and begin.stripe in known.begun):
            raise ProtocolError("nothing is expected from this member: it began before, was given up, or is no sender")
        if not 0 <= begin.weight < float("inf"):
            raise ProtocolError(f"weight {begin.weight} is not a non-negative number")
        if not 0 <= begin.stripe < begin.stripes <= MAX_STRIPES:
            raise ProtocolError(f"stripe {begin.stripe} of {begin.stripes} does not exist")
        if known is not None and (known.weight, known.stripes) != (begin.weight, begin.stripes):
            raise ProtocolError("the stripes of this member contradict each other")
        return index

    def _begin_stripe(self, sender: int, begin: BeginReduce) -> Intake:
        limit = self.settings.sender_timeout
        if sender not in self._intakes:
            self._intakes[sender] = Intake(self._traffic[sender], begin, limit, self.settings.reducer_timeout)
            self._reducer.begin(sender, self.group.limited(sender, begin.weight))
            if begin.stripes > 1:
                self._timers.append(asyncio.get_running_loop().call_later(limit, self._give_up_if_partial, sender))
        intake = self._intakes[sender]
        intake.begun.add(begin.stripe)
        return intake

    def _give_up_if_partial(self, sender: int) -> None:
        intake = self._intakes[sender]
        if len(intake.begun) < intake.stripes:
            self.roster.fail(sender, "did not begin to send on all its connections in time")
