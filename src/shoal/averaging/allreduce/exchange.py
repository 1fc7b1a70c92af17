"""Butterfly all-reduce: every member sends each part of its vector to the member that reduces it.

All parts are in flight at once, each reducer averages a part as soon as it has it from everybody, and sends the average
back (:mod:`shoal.averaging.allreduce.sending`). Afterwards the members make sure that all of them have everything
(:mod:`shoal.averaging.allreduce.finish`), and finish what a dead member has left undone.

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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from shoal.averaging.allreduce.link import MAX_STRIPES, Exchange, Intake, stripes_for
from shoal.averaging.allreduce.pace import Pace
from shoal.averaging.allreduce.parts import RoundVector
from shoal.averaging.allreduce.reducer import PartReducer
from shoal.averaging.allreduce.sending import Traffic
from shoal.averaging.calls import ALIVE_PER_TIMEOUT, PEER_FAILURES, reason_of
from shoal.averaging.control import AveragingMode, GroupInfo, RoundResult
from shoal.averaging.messages import BeginReduce, StatusRequest
from shoal.compression import CompressionBase, CompressionInfo
from shoal.errors import AllreduceException, P2PHandlerError, ProtocolError
from shoal.p2p import Call, PeerID, StubBase
from shoal.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

# A member may take at least so many seconds to answer whether it lives: it may have to be dialled.
MIN_QUESTION_SECONDS = 1.5


@dataclass(frozen=True)
class AllReduceSettings:
    """How a group averages."""

    codec: CompressionBase
    part_size_bytes: int
    alpha: float
    """Local values move by this fraction of the way to the average."""
    sender_timeout: float
    """Seconds without the next part after which a sender is given up."""
    reducer_timeout: float
    """Seconds without the next average after which a reducer is given up."""
    quorum: int | None = None
    """When so many members have sent everything, the others have ``quorum_grace`` seconds left; ``None``: no limit."""
    quorum_grace: float = 0.0


class AllReduce:
    """The exchange of parts in one group.

    Args:
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
        group: GroupInfo,
        own_index: int,
        tensors: Sequence[torch.Tensor],
        infos: Sequence[CompressionInfo],
        settings: AllReduceSettings,
        weight: float,
        get_stub: Callable[[PeerID], StubBase],
        is_spoilt: bool = False,
    ) -> None:
        self.group, self.own_index, self.settings, self.weight = group, own_index, settings, weight
        self.get_stub = get_stub
        self.modes = [AveragingMode(mode) for mode in group.modes]
        self.is_sender = self.modes[own_index] is not AveragingMode.AUX
        self.vector = RoundVector(
            tensors, infos, settings.codec, settings.part_size_bytes, group.shares, settings.alpha, is_spoilt
        )
        self.failed: dict[int, str] = {}
        """Members that did not do their part, with the reason."""
        self.seen_not_finite: set[int] = set()
        """Members that have sent this one values that are not finite."""
        self.told_not_finite: set[int] = set()
        """Members of which others say so."""
        self.on_failure: Callable[[int], None] = lambda member: None
        """Called with each one that is added, or confirmed."""
        self.silent = [asyncio.Event() for _ in self.modes]
        """Members that were asked whether they live, and did not answer."""
        self.delivered = asyncio.Event()
        """This member has sent its parts to all members, or with a quorum, to all but as many as may be late."""
        self.exchanged = asyncio.Event()
        """This member has delivered and received all that it will."""
        # The calls to reducers may end: this member holds all averages, without any help, or the round is over.
        self._may_end = asyncio.Event()
        self.all_complete = asyncio.Event()
        """All members do; known to those that reduce."""
        self.ended = asyncio.Event()
        """The round is over."""
        self.weights: list[float] = []
        """Of all members' values in the average, as the coordinator says."""
        self.late = False
        """The others have gone on without this member."""
        self._reducer = self._make_reducer()
        self._pace = Pace() if settings.quorum is None else None
        # What is exchanged with each of the others.
        self._traffic = {i: self._make_traffic(i) for i in range(group.group_size) if i != own_index}
        # Reducers to which something is still to be sent.
        self._undelivered = {i for i in self._traffic if self.is_sender and self.vector.parts[i]}
        # Reducers from which averages are still to come.
        self._unreceived = set(self._undelivered)
        self._exchanges: dict[int, asyncio.Task[None]] = {}
        # A dictionary keeps the order, so that simulations can be repeated.
        self._handlers: dict[asyncio.Task[Any], None] = {}
        self._intakes: dict[int, Intake] = {}
        self._timers: list[asyncio.TimerHandle] = []
        # Senders that are not known to hold all averages.
        self._incomplete = set(self.senders)
        # No further averages will come from others.
        self._received = asyncio.Event()

    def _make_reducer(self) -> PartReducer:
        parts = self.vector.parts[self.own_index]
        senders = [index for index in self.senders if index != self.own_index and parts]
        local = self.vector.sound_values if self.is_sender else None
        weights = {self.own_index: self.weight}
        return PartReducer(parts, senders, local, self.own_index, weights, self.seen_not_finite.add)

    def _make_traffic(self, member: int) -> Traffic:
        return Traffic(
            self.vector,
            self._reducer,
            self.own_index,
            member,
            gives=self.is_sender,
            takes=member in self.senders,
            pace=self._pace,
            on_not_finite=lambda: self.seen_not_finite.add(member),
            on_delivered=lambda: self._note_delivery(member),
            on_received=lambda: self._note_received(member),
        )

    @property
    def senders(self) -> list[int]:
        """Positions of the members that have tensors."""
        return [index for index, mode in enumerate(self.modes) if mode is not AveragingMode.AUX]

    @property
    def coordinators(self) -> list[int]:
        """Positions of the members that can coordinate the end of the round, in the order in which they would."""
        return [index for index, mode in enumerate(self.modes) if mode is not AveragingMode.CLIENT]

    async def run(self) -> None:
        """Exchange parts with all members; their failures end up in ``failed``, never here.

        Raises:
            AllreduceException: this member could not average a part.
        """
        work: list[Coroutine[Any, Any, object]] = [self._reducer.finish()]
        if self.is_sender:
            work.append(self._apply_own_parts())
            for member, parts in enumerate(self.vector.parts):
                if member in self.failed:  # in an earlier phase
                    self._stop_exchange(member)
                elif parts and member != self.own_index:
                    self._exchanges[member] = asyncio.ensure_future(self._exchange_with(member))
        self._check_delivered()
        self._check_received()
        watched = [member for member in self.coordinators if member not in (self.own_index, *self.failed)]
        watches = [self._watch(member) for member in watched]
        background = [asyncio.ensure_future(each) for each in (self._give_up_absent_senders(), *watches)]
        exchange = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.gather(*exchange)
            await self._received.wait()
            self.vector.drop_early()
            self.exchanged.set()
            # who has left out values does not end early, so that the others wait for the coordinator to name the sender
            if self.is_sender and self.vector.is_complete and not self.seen_not_finite:
                self._may_end.set()
                self._note_complete(self.own_index)
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

    def _note_delivery(self, member: int) -> None:
        """Nothing more is to be sent to a member."""
        self._undelivered.discard(member)
        self._check_delivered()

    def _check_delivered(self) -> None:
        quorum = self.settings.quorum
        if len(self._undelivered) <= (0 if quorum is None else max(0, self.group.group_size - quorum)):
            self.delivered.set()

    def _note_received(self, member: int) -> None:
        """Nothing more will come from a reducer."""
        self._unreceived.discard(member)
        self._check_received()

    def _check_received(self) -> None:
        if not self._unreceived:
            self._received.set()

    def _note_complete(self, member: int) -> None:
        """A sender holds all averages."""
        self._incomplete.discard(member)
        if not self._incomplete and self.vector.parts[self.own_index]:
            self.all_complete.set()

    async def abandon(self) -> None:
        """The others have gone on without this member: stop exchanging, and forget what came of it."""
        self.late = True
        # The handlers end first: nobody may get an average that only this member believes in.
        await cancel_and_wait(*self._handlers)
        for member in range(self.group.group_size):
            self._reducer.ban(member, "this member is late")
        await cancel_and_wait(*self._exchanges.values())
        await self.exchanged.wait()
        self.failed.clear()
        self.vector.restart()

    def member_failed(self, member: int, reason: str) -> None:
        """A member is not to be waited for any more."""
        if member not in self.failed:
            self.failed[member] = reason
            logger.info("group member %s failed: %s", self.group.peer_ids[member], reason)
        self._reducer.ban(member, reason)
        exchange = self._exchanges.get(member)
        if exchange is not None and exchange is not asyncio.current_task():
            exchange.cancel()
        self.on_failure(member)

    def result(self, duration: float) -> RoundResult:
        """What came of the round.

        Raises:
            AllreduceException: nothing; the tensors are as they were.
        """
        share = self.vector.share_averaged if self.is_sender else 1.0
        # Nobody has even said that there is no average.
        has_nothing = share == 0 and not any(self.vector.held)
        if has_nothing and self.failed:
            reasons = "; ".join(f"{self.group.peer_ids[i]}: {reason}" for i, reason in self.failed.items())
            raise AllreduceException(f"nothing was averaged, every other member failed: {reasons}")
        if has_nothing and self.late:
            raise AllreduceException("this member was late, and the result did not arrive")
        not_finite = self.seen_not_finite | self.told_not_finite
        return RoundResult(
            group_id=self.group.group_id,
            peers=self.group.peer_ids,
            failed_peers=tuple(self.group.peer_ids[i] for i in sorted(self.failed)),
            weights=tuple(self.weights or [self.weight_of(i) for i in range(self.group.group_size)]),
            share_averaged=share,
            auxiliaries=tuple(
                peer for peer, mode in zip(self.group.peer_ids, self.modes, strict=True) if mode is AveragingMode.AUX
            ),
            late=self.late,
            duration=duration,
            not_finite_peers=tuple(self.group.peer_ids[i] for i in sorted(not_finite)),
        )

    def weight_of(self, member: int) -> float:
        """As far as this member knows: each one tells it to those that reduce for it."""
        if member in self.failed or self.modes[member] is AveragingMode.AUX:
            return 0.0
        return self.weight if member == self.own_index else self._reducer.weights.get(member, 0.0)

    # --- sending own parts, receiving averages ------------------------------------------------------------------------

    async def _exchange_with(self, member: int) -> None:
        """Let another member reduce its parts; whatever it does wrong costs these parts and no more."""
        stub = self.get_stub(self.group.peer_ids[member])
        exchange = Exchange(
            self._traffic[member], stub.rpc_reduce, may_end=self._may_end, timeout=self.settings.reducer_timeout
        )
        try:
            stripes = stripes_for(stub.round_trip, len(self.vector.parts[member]))
            await exchange.run(self.group.group_id, self.weight, stripes)
        except PEER_FAILURES as e:
            self.member_failed(member, reason_of(e))
        finally:
            self._stop_exchange(member)

    def _stop_exchange(self, member: int) -> None:
        """Nothing is to be sent to a member, or expected of it, any more."""
        self._traffic[member].stop()
        self._note_delivery(member)
        self._note_received(member)

    def heard_of(self, member: int) -> None:
        """A member has shown that it lives."""
        self._traffic[member].heard_at = asyncio.get_running_loop().time()

    async def _watch(self, member: int) -> None:
        """Ask a member whether it lives when it has sent nothing for a while, and give it up if it does not answer.

        A reducer or coordinator that waits for others may be silent for longer than a sender; this tells it from one
        that is frozen. It is asked more than once, and may have to be dialled for that.
        """
        stub, traffic = self.get_stub(self.group.peer_ids[member]), self._traffic[member]
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
                    await stub.rpc_round_status(StatusRequest(group_id=self.group.group_id), timeout=patience)
                self.heard_of(member)
            except PEER_FAILURES as e:
                logger.debug("asked %s whether it lives: %r", self.group.peer_ids[member], e)
                await asyncio.sleep(asked + patience - now())
                unanswered = unanswered + 1 if traffic.heard_at < asked else 0
        self.silent[member].set()
        self.member_failed(member, reason_of(TimeoutError()))

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
                self.member_failed(sender, "did not begin to send in time")

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
            self.member_failed(index, reason_of(e))
            raise
        self._handlers.pop(task, None)
        if not intake.unfinished:
            self._reducer.delivered_everything(index)
        if await intake.wait_for_end(call, self.ended):
            self._note_complete(index)

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
            self._reducer.begin(sender, begin.weight)
            if begin.stripes > 1:
                self._timers.append(asyncio.get_running_loop().call_later(limit, self._give_up_if_partial, sender))
        intake = self._intakes[sender]
        intake.begun.add(begin.stripe)
        return intake

    def _give_up_if_partial(self, sender: int) -> None:
        intake = self._intakes[sender]
        if len(intake.begun) < intake.stripes:
            self.member_failed(sender, "did not begin to send on all its connections in time")
