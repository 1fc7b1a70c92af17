"""A stage peer: it computes one stage for others, and sends what comes out to the next stage.

What to do with a microbatch is decided by :class:`~shoal.stages.work.Works`; here it is done. Each work runs in a task
of its own, which outlives the calls that ask for it::

    Request ─► place ─► tensors ─► [door] ─► forward ─► next stage ─► backward ─► StageOutcome
                                      │                 reserved meanwhile
                                      └─ waits until the step of the microbatch begins

*Steps.* Drivers say when a step is over (:mod:`~shoal.stages.driver`). Then each holder of the stage makes it, as soon
as no microbatch of that step is under way here. A microbatch of the next step says that the step is over, too, so
nobody depends on a single message.

*Who is believed.* Anybody can say that a step is over. A peer that takes part, because it has brought a microbatch or
has a record for this stage or one beside it, ends a step that has samples here. It also ends one without samples, but
no second one until a stage beside has come as far. Whatever anybody says, a peer that lags follows most peers of
a stage beside it, and of its own. A peer that has had no microbatch yet has nothing else to go by: after some seconds,
it believes everybody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from statistics import median_low
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from shoal.base.bounded import Bounded
from shoal.base.logs import Seldom, words_of
from shoal.base.tasks import BackgroundTasks, cancel_and_wait, wait_at_most
from shoal.compression import CompressionBase
from shoal.errors import (
    BusyError,
    MicrobatchError,
    MicrobatchNotFiniteError,
    ProtocolError,
    ShoalError,
    StreamClosedError,
)
from shoal.metrics import Metrics
from shoal.net.connection import CallFailure, Connection, Hello
from shoal.net.memory import Piece, PipeEnd
from shoal.net.transport import Amount, Count, Header
from shoal.p2p import P2P, Call, P2PContext, PeerID, ServicerBase, patient
from shoal.serving.tensors import EXACT, tensors_of
from shoal.stages.channel import CALL_FAILURES, Channel, Channels, Key, UnsendableError, lively
from shoal.stages.compute import StageTask
from shoal.stages.directory import (
    LIFETIME,
    MOST_REMEMBERED,
    RENEWAL_SECONDS,
    StageNumber,
    StageRecord,
    epochs_of,
    reached_by_most,
)
from shoal.stages.hop import (
    Admission,
    Cargo,
    Changes,
    FailureCause,
    Hop,
    News,
    Patience,
    Peers,
    Request,
    Result,
    StageFailure,
    StageOutcome,
)
from shoal.stages.steps import MOST_STEPS, StageNorms
from shoal.stages.work import Acceptance, Door, MicrobatchID, Phase, Work, Works

logger = logging.getLogger(__name__)
T = TypeVar("T")

# How many peers of each stage a driver tells that a step is over; these tell the rest (chosen: one may be dead).
TOLD = 3
# A peer accepts what it does in this many seconds (chosen: tensors arrive in time).
SECONDS_OF_WORK = 2.0
# The pause before a step that failed is tried again, and before another look at what confirms a claim, in seconds
# (chosen).
STEP_PAUSE = 1.0
# How long a peer of another stage may take to tell a norm, because it still averages (chosen), and the pause before all
# are asked again, in seconds (chosen).
NORM_TIMEOUT, NORM_PAUSE = 5.0, 0.2
# The weight of the newest microbatch in the pace of this peer (chosen).
ALPHA = 0.1


class Arithmetic(Protocol):
    """What computes a stage: :class:`~shoal.stages.compute.StageCompute`, or a stand-in in a simulation."""

    @property
    def epoch(self) -> int:
        """The step whose parameters it has."""

    async def forward(self, task: StageTask, inputs: Any, extras: dict[str, Any]) -> Any:
        """The outputs."""

    async def losses(
        self, task: StageTask, inputs: Any, labels: Any, extras: dict[str, Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Of the last stage: one loss for each sample, and the gradients of the inputs. The samples count.

        Raises:
            MicrobatchNotFiniteError: a loss is not finite, and nothing has counted.
        """

    async def backward(self, task: StageTask, output_grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the inputs. The samples count."""

    def forget(self, task: StageTask) -> None:
        """Nothing more will be asked of this microbatch."""

    async def make_step(self) -> int:
        """Make the step with the holders of this stage, and return the new epoch."""

    async def go_to(self, step: int) -> None:
        """Take the label of a step without making those before it, because nobody has the state of this stage."""

    async def until_over(self) -> None:
        """Wait until another holder of this stage makes the step of this epoch, or has made it."""


class RunningWork:
    """A work and what runs for it."""

    def __init__(self, work: Work, request: Request, caller: PeerID) -> None:
        self.work, self.request, self.caller = work, request, caller
        self.task = StageTask(
            request.driver, request.sequence, request.step, request.seed, request.samples, trains=request.trains
        )
        self.running: asyncio.Task[None] | None = None
        self.cargo: Cargo | None = None
        self.news = News(route=[])
        self.outcome: StageOutcome | None = None
        self.result: Result | None = None
        self.changes = Changes()

    def tell(self, **news: Any) -> None:
        """There is news for the callers."""
        self.news = msgspec.structs.replace(self.news, **news)
        self.changes.note()

    def finish(self, outcome: StageOutcome, result: Result | None = None) -> None:
        """There is a result, or a reason why there is none."""
        self.outcome, self.result = outcome, result
        self.changes.note()


class Pace:
    """How many microbatches a device does per second while it has any."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self.waiting, self._since, self._spent, self._seconds = 0, 0.0, 0.0, 0.0

    async def measure(self, work: Awaitable[T], *, is_last: bool) -> T:
        """Wait for a pass; ``is_last`` if the microbatch is done with it."""
        self._since = self._since if self.waiting else self._now()
        self.waiting += 1
        try:
            return await work
        finally:
            self.waiting -= 1
            self._spent, self._since = self._spent + self._now() - self._since, self._now()
            if is_last:
                self._seconds += (ALPHA if self._seconds else 1.0) * (self._spent - self._seconds)
                self._spent = 0.0

    @property
    def rate(self) -> float:
        """Microbatches per second; 0 if there was none."""
        return 1 / self._seconds if self._seconds > 0 else 0.0


class StageHost:
    """Computes one stage for others. Lives in one event loop.

    Args:
        stage: its number.
        me: this peer.
        peers: knows which peers hold the stages around this one.
        compute: does the arithmetic.
        works: the table of works, with its bounds.
        next_hop: the way to the next stage; ``None`` at the last one.
        norms: those of the gradients of all stages, if they are clipped.
        max_staleness: see :class:`~shoal.stages.work.Door`; ``None`` = synchronous.
        codec: of the gradients that are sent back.
    """

    def __init__(
        self,
        stage: int,
        me: PeerID,
        peers: Peers,
        compute: Arithmetic,
        works: Works,
        next_hop: Hop | None,
        patience: Patience,
        *,
        norms: StageNorms | None = None,
        max_staleness: int | None = None,
        codec: CompressionBase = EXACT,
    ) -> None:
        self.stage, self.compute, self.works, self.next_hop, self.norms = stage, compute, works, next_hop, norms
        self._me, self._peers = me, peers
        self.epoch = compute.epoch
        """The step whose microbatches it computes: the last one that has been made completely."""
        self.is_leaving = False
        """It finishes what it has, and accepts nothing new."""
        self._patience, self._max_staleness, self._codec = patience, max_staleness, codec
        self._is_closed = False
        self._ways: dict[MicrobatchID, RunningWork] = {}
        # The last step that is known to be over. And what others say is over: by peer the step, and since when.
        self._closed = -1
        self._claims: Bounded[PeerID, tuple[int, float]] = Bounded(MOST_REMEMBERED)
        # Peers that have brought microbatches, and whether one has counted here since the last step.
        self._bringers: Bounded[PeerID, None] = Bounded(MOST_REMEMBERED)
        self._has_samples = False
        # The epoch after the last step without samples that was made because of somebody's word.
        self._unproven = 0
        self._pace = Pace()
        works.is_last = next_hop is None
        self._bound_waiting()
        # Noted when a work is over, and when a step is made.
        self.changes = Changes()
        self._tasks = BackgroundTasks(logger, f"stage {stage}")
        self._stepping: asyncio.Task[None] | None = None
        self._doubting: asyncio.Task[None] | None = None
        self._warn_seldom = Seldom(logger.warning)
        self._now = asyncio.get_running_loop().time

    @property
    def is_synchronous(self) -> bool:
        """Whether each microbatch meets the parameters of its own step."""
        return self._max_staleness is None

    @property
    def _next_step(self) -> int:
        """The first step that is not over. The step before it may still be made."""
        return max(self.epoch, self._closed + 1)

    def record(self, **more: Any) -> StageRecord:
        """What others should know of this peer."""
        return StageRecord(
            stage=self.stage,
            epoch=self.epoch,
            rate=self._pace.rate,
            queue=self._pace.waiting,
            room=self.works.room,
            is_leaving=self.is_leaving,
            **more,
        )

    def start(self) -> None:
        """Begin to follow the steps of the other holders."""
        self._tasks.spawn(self._follow())

    async def drain(self, seconds: float) -> None:
        """Accept nothing new, and wait until nobody waits for anything, but no longer than this."""
        self.is_leaving = True
        until = self._now() + seconds
        while any(work.callers for work in self.works) and self._now() < until:
            await wait_at_most(self.changes.next, until - self._now())

    async def close(self) -> None:
        """End everything. Callers that still wait are told, and choose another peer."""
        self.is_leaving = self._is_closed = True
        await self._tasks.close()
        for way in self._ways.values():
            way.changes.note()

    # --- calls --------------------------------------------------------------------------------------------------------

    async def carry(self, call: Call, request: Request, caller: PeerID, channel: Channel) -> None:
        """Serve one call for a microbatch, whose tensors take a channel."""
        code, way = self._admit(request, caller)
        is_served = False
        try:
            key = Key(self.stage, request.driver, request.sequence)
            with channel.expecting(key) if code is Acceptance.ACCEPTED else nullcontext() as arrival:
                await call.send(Admission(code=code, epoch=self._next_step), end=way is None)
                if way is not None:
                    async with lively(call, self._patience.request_timeout):
                        is_served = await self._answer(call, way, channel, arrival)
        finally:
            if way is not None:
                self._leave(way, is_served=is_served)

    def note_brought(self, *peers: PeerID) -> None:
        """These peers take part: they have brought a microbatch."""
        self._bringers.update(dict.fromkeys(peers))

    def _admit(self, request: Request, caller: PeerID) -> tuple[Acceptance, RunningWork | None]:
        identity = MicrobatchID(request.driver, request.sequence)
        if self.is_leaving and identity not in self._ways:
            return Acceptance.BUSY, None
        if self.is_synchronous and request.trains and request.step == self.epoch + 1:
            self.close_step(request.step - 1, caller)
        door = Door(self.epoch, self._closed, self._max_staleness)
        code, work = self.works.ask(identity, request.step, request.trains, door)
        if code is Acceptance.BEHIND:
            self.close_step(request.step - 1, caller)  # making the steps between brings this peer to the others
        if work is None:
            self._ways.pop(identity, None)  # one that has failed, if any
            return code, None
        way = self._ways.get(identity)
        if way is None or way.work is not work:
            way = self._ways[identity] = RunningWork(work, request, caller)
        elif code is Acceptance.ACCEPTED:
            way.request, way.caller = request, caller  # the hints of the newest caller are the best
        return code, way

    def _begin(self, way: RunningWork, arrived: Any) -> None:
        match arrived:
            case [inputs, labels, dict() as extras] if all(isinstance(each, dict) for each in extras.values()):
                cargo = Cargo(inputs, labels, extras)
            case _:
                raise ProtocolError("a microbatch is inputs, labels and extras")
        if self.works.receive(way.work, _nbytes(arrived)):
            way.cargo = cargo
            way.running = self._tasks.spawn(self._run(way))

    async def _answer(self, call: Call, way: RunningWork, channel: Channel, arrival: Awaitable[Any] | None) -> bool:
        """Tell the caller how its microbatch fares, until it says goodbye; returns whether it did.

        Args:
            arrival: of the tensors of the microbatch; ``None`` if they are here.
        """
        telling = asyncio.ensure_future(self._tell(call, way, channel, arrival))
        ending = asyncio.ensure_future(call.receive(Request))
        try:
            await asyncio.wait([telling, ending], return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                await telling
            if await ending is not None:
                raise ProtocolError("a second request in the call of a microbatch")
            return True
        finally:
            await cancel_and_wait(telling, ending)

    async def _tell(self, call: Call, way: RunningWork, channel: Channel, arrival: Awaitable[Any] | None) -> None:
        try:
            if arrival is not None:
                self._begin(way, await arrival)
                self.note_brought(call.remote, PeerID(way.request.driver))
            told = News(route=[])
            while way.outcome is None:
                change, news = way.changes.next, way.news
                if self._is_closed:
                    raise BusyError("this peer leaves")
                if news == told:
                    await change.wait()
                else:
                    await call.send(news)
                    told = news
            outcome = way.outcome
            if way.result is not None:
                losses, grads = way.result
                key = Key(self.stage, way.request.driver, way.request.sequence)
                try:
                    await channel.send(key, [losses, grads], lambda each: EXACT if each is losses else self._codec)
                except UnsendableError as e:
                    text = f"stage {self.stage} cannot send a gradient: {e}"
                    outcome = StageOutcome(FailureCause.LOST, text[:2000])
            await call.send(outcome, end=True)
        except StreamClosedError:
            call.connection.abort()  # if only the channel has broken, the caller asks once more
            raise

    def _leave(self, way: RunningWork, *, is_served: bool) -> None:
        if self.works.leave(way.work, self._now(), is_served=is_served):
            self._drop(way)
        elif not way.work.callers:
            asyncio.get_running_loop().call_later(self.works.patience, self._expire)

    def _expire(self) -> None:
        for work in self.works.expired(self._now()):
            self._drop(self._ways[work.identity])

    def _drop(self, way: RunningWork) -> None:
        """Nobody wants this work any more. Its task ends the calls to the stages after this one."""
        self.works.remove(way.work)
        if self._ways.get(way.work.identity) is way:
            del self._ways[way.work.identity]
        if way.running is not None:
            way.running.cancel()
        self.changes.note()

    # --- works --------------------------------------------------------------------------------------------------------

    async def _run(self, way: RunningWork) -> None:
        try:
            async with AsyncExitStack() as stack:
                result = await self._pass_through(way, stack)
                self.works.advance(way.work, Phase.DONE, _nbytes([*result]))
                way.finish(StageOutcome(), result)
                self.changes.note()
                await asyncio.Event().wait()  # the stages after this one keep what they have, until this is cancelled
        except StageFailure as e:
            self._fail(way, StageOutcome(e.cause, str(e)[:2000], e.epoch))
        except MicrobatchError as e:  # the sender's doing, or this peer lags
            is_finite = not isinstance(e, MicrobatchNotFiniteError)
            self._fail(way, StageOutcome(FailureCause.FAILED if is_finite else FailureCause.NOT_FINITE, str(e)[:2000]))
        except Exception as e:
            # Whatever the user's module raises concerns this microbatch alone.
            text = f"{type(e).__name__}: {words_of(e)}"
            self._warn_seldom(
                "stage %d cannot compute a microbatch: %s. If other peers of this stage can, mend this machine, "
                "otherwise the module or the data",
                *(self.stage, text),
                traceback_of=e,
            )
            self._fail(way, StageOutcome(FailureCause.FAILED, text[:2000]))
        finally:
            self.compute.forget(way.task)

    def _fail(self, way: RunningWork, outcome: StageOutcome) -> None:
        self.works.advance(way.work, Phase.FAILED, 0)
        way.finish(outcome)
        self.changes.note()

    async def _pass_through(self, way: RunningWork, stack: AsyncExitStack) -> Result:
        """Compute a microbatch, and bring it through the stages after this one in between."""
        cargo, task, works = way.cargo, way.task, self.works
        way.cargo = None
        assert cargo is not None
        inputs, labels, extras = cargo
        own, rest = extras.get(str(self.stage), {}), {key: v for key, v in extras.items() if key != str(self.stage)}
        del cargo
        await self._pass_door(way)
        if self.next_hop is None:
            if task.trains:
                works.advance(way.work, Phase.BACKWARD)
            both = self.compute.losses(task, inputs, labels, own)
            losses, grads = await self._measured(both, is_last=task.trains)
            self._has_samples |= task.trains
            return Result(losses, grads)
        ahead = self.next_hop.carrying(way.request, lambda: way.tell(route=passage.route, waits=passage.waits))
        # If others are computed or a step is made before it, a place ahead would be empty for too long.
        is_next = not self._pace.waiting and not way.news.waits
        if is_next:
            passage = await stack.enter_async_context(ahead)
        outputs = await self._measured(self.compute.forward(task, inputs, own), is_last=False)
        if not is_next:
            passage = await stack.enter_async_context(ahead)
        works.advance(way.work, Phase.WAITING, _nbytes([inputs, outputs, labels, rest]))
        way.tell(is_on=True, waits=passage.waits)
        del inputs
        onward, outputs = Cargo(outputs, labels, rest), None
        result = await passage.through(onward)
        del onward
        if task.trains:
            works.advance(way.work, Phase.BACKWARD)
            backward = self.compute.backward(task, result.grads)
            result = Result(result.losses, await self._measured(backward, is_last=True))
            self._has_samples = True
        return result

    async def _measured(self, computing: Awaitable[T], *, is_last: bool) -> T:
        try:
            return await self._pace.measure(computing, is_last=is_last)
        finally:
            self._bound_waiting()

    def _bound_waiting(self) -> None:
        """Take no more than what is computed soon; a peer that has done none yet may turn out to be slow.

        While one is computed, the next one is there; but not at peers that are slower than most of their stage: at the
        end of a step, all would wait for them.
        """
        rate, others = self._pace.rate, self._peers.peers_of(self.stage).values()
        is_slow = rate < median_low([each.rate for each in others] or [rate])
        self.works.most_waiting = max(1 if is_slow else 2, 1 + int(rate * SECONDS_OF_WORK))

    async def _pass_door(self, way: RunningWork) -> None:
        """Wait until the step of a microbatch has begun here.

        Raises:
            StageFailure: it is over.
        """
        step = way.request.step
        if not way.request.trains:
            if self.is_synchronous and self._is_stepping:  # it is computed afterwards, however long that takes
                way.tell(waits=True)
            return
        if self.is_synchronous and self.epoch < step:
            way.tell(waits=True)
            while self.epoch < step:
                change = self.changes.next
                self.close_step(step - 1, way.caller)
                await change.wait()
            way.tell(waits=False)
        if Door(self.epoch, self._closed, self._max_staleness).verdict(step) is Acceptance.LATE:
            step = self._next_step
            raise StageFailure(FailureCause.LATE, f"stage {self.stage} is at step {step}", step)

    # --- steps --------------------------------------------------------------------------------------------------------

    def close_step(self, step: int, teller: PeerID) -> bool:
        """A peer says that a step is over: make it when that is known, and no microbatch of it is under way here.

        Returns:
            Whether that is news and known at once.
        """
        said, since = self._claims.get(teller, (-1, 0.0))
        if step <= max(said, self._closed):
            return False
        # Honest peers may say the next step before this one is made here, but they do not run away.
        self._claims[teller] = step, since if said > self.epoch + MOST_STEPS else self._now()
        self._go_on()
        if step > self._closed and (self._doubting is None or self._doubting.done()):
            self._doubting = self._tasks.spawn(self._doubt())
        return step <= self._closed

    @property
    def _is_stepping(self) -> bool:
        return self._stepping is not None and not self._stepping.done()

    def _go_on(self) -> None:
        if not self._is_stepping and self._judge_claims():
            self._stepping = self._tasks.spawn(self._make_steps())

    def _judge_claims(self) -> bool:
        """Judge what others say about steps; returns whether that of this peer is over."""
        for peer, (step, _) in [*self._claims.items()]:
            if step < self.epoch:
                del self._claims[peer]
        if self.epoch <= self._closed or not self._claims:
            return self.epoch <= self._closed
        before, mates, after = (self._peers.peers_of(self.stage + side) for side in (-1, 0, 1))
        is_believed = any(peer in each for peer in self._claims for each in (self._bringers, before, mates, after))
        since = min(since for _, since in self._claims.values())
        # The own step counts among those of the other peers of this stage.
        around = reached_by_most([before, after], default=self.epoch)
        reached = max(around, median_low([*epochs_of(mates, but=self._me), self.epoch]))
        if reached > self.epoch:
            self._closed = reached - 1
        elif (is_believed and (self._has_samples or around >= self._unproven)) or (
            not self._bringers and self._now() - since > RENEWAL_SECONDS
        ):
            self._closed = self.epoch
            self._unproven = self._unproven if self._has_samples else self.epoch + 1
        return self.epoch <= self._closed

    async def _doubt(self) -> None:
        """Look again until all claims are confirmed, or have not been for so long that all records around are new."""
        while self._claims:
            await asyncio.sleep(STEP_PAUSE)
            for peer, (step, since) in [*self._claims.items()]:
                if step >= self.epoch and self._now() - since > LIFETIME:
                    del self._claims[peer]
                    self._warn_seldom(
                        "peer %s is not believed: it says that step %d is over, but stage %d is at step %d. A private "
                        "run keeps strangers out",
                        *(peer, step, self.stage, self.epoch),
                        about=peer,
                    )
                    self.changes.note()  # a microbatch that waits for this step says it again
            self._go_on()

    async def _follow(self) -> None:
        while True:
            await self.compute.until_over()
            epoch = self.epoch
            self._closed = max(self._closed, epoch)
            self._go_on()
            while self.epoch == epoch:
                await self.changes.next.wait()

    async def _make_steps(self) -> None:
        failed_at = -1
        while self._judge_claims():
            # Otherwise they would count when they are too old.
            await self._finish_works(self.epoch - (self._max_staleness or 0))
            before, lost_at = self.epoch, self._lost_at()
            over = max([self._closed, *(step for step, _ in self._claims.values())])
            is_anew = not before and not self._has_samples and not self._is_behind_mates()
            self._has_samples = False
            try:
                # Without synchronous steps, the stages around may be further without any state being lost.
                if lost_at > before + (1 if self._max_staleness is None else 2 + self._max_staleness):
                    await self.compute.go_to(lost_at)
                else:
                    await self.compute.make_step()
            except Exception as e:
                if failed_at == before:
                    self._warn_seldom(
                        "stage %d cannot make a step and goes on trying: %s: %s. If it does not succeed, restart this "
                        "peer",
                        *(self.stage, type(e).__name__, words_of(e)),
                    )
                logger.debug("traceback of the step", exc_info=e)
                failed_at = before
            self.epoch = self.compute.epoch
            if is_anew and over > 1 and self.epoch in (1, lost_at):  # it has found no state to download
                self._warn_seldom(
                    "STAGE %d BEGINS ANEW, WITH UNTRAINED PARAMETERS: step %d is over, and no peer has its state. If "
                    "there is an archive, revive it first",
                    *(self.stage, over),
                )
            if self.norms is not None:  # without synchronous steps, the last one may still be under way
                self.norms.settle(self.epoch - (1 if self.is_synchronous else 2))
            self.changes.note()
            if self.epoch == before:
                await asyncio.sleep(STEP_PAUSE)

    def _is_behind_mates(self) -> bool:
        return any(epoch > self.epoch for epoch in epochs_of(self._peers.peers_of(self.stage), but=self._me))

    def _lost_at(self) -> int:
        """The step at which the stages around this one are, if no peer has a later state of this one; otherwise 0."""
        if self._is_behind_mates():
            return 0
        around = [epoch for side in (-1, 1) for epoch in epochs_of(self._peers.peers_of(self.stage + side))]
        return min(self._closed + 1, median_low(around)) if around else 0

    async def _finish_works(self, step: int) -> None:
        """Wait until no microbatch of a step, or of one before, is under way. With synchronous steps, their drivers are
        done, so only orphans can be left; otherwise those that take too long are dropped, too."""
        until = self._now() + self._patience.request_timeout
        while self.works.holds(step) and self._now() < until:
            await wait_at_most(self.changes.next, until - self._now())
        for way in [way for way in self._ways.values() if way.work.trains and way.work.step <= step]:
            if way.outcome is None and way.running is not None:
                way.running.cancel()
                self._fail(way, StageOutcome(FailureCause.LATE, f"step {step} is over at stage {self.stage}", step + 1))


class CloseStep(Header):
    """A step is over."""

    stage: StageNumber
    step: Count
    spreads: bool
    """The callee tells the other peers of its stage."""


class Closed(Header):
    """The callee knows it now."""

    epoch: Count


class NormRequest(Header):
    """Asks for the norm of the gradients of a step, which is therefore over."""

    stage: StageNumber
    step: Count


class Norm(Header):
    """The squared norm of the averaged gradients of a stage."""

    value: Amount


class StageService(ServicerBase):
    """The stages of this peer, as others call them, and the way to those of others.

    Args:
        p2p: this peer.
        run_id: name of the run.
        peers: knows who holds which stage.
        patience: with the silence of others.
    """

    def __init__(self, p2p: P2P, run_id: str, peers: Peers, patience: Patience) -> None:
        self.p2p, self.run_id, self._peers = p2p, run_id, peers
        self.hosts: dict[int, StageHost] = {}
        self._channels = Channels(self._open_channel, p2p.rng, patience.request_timeout)
        self._tasks = BackgroundTasks(logger, f"the stages of run {run_id!r}")

    async def start(self) -> None:
        """Let others call."""
        await self.add_p2p_handlers(self.p2p, namespace=self.run_id)

    async def close(self, seconds: float) -> None:
        """Let others call no more. What is under way has so long to end; the hosts are to be closed afterwards."""
        await asyncio.gather(*(host.drain(seconds) for host in self.hosts.values()))
        await self.remove_p2p_handlers(self.p2p, namespace=self.run_id)
        await self._tasks.close()
        await self._channels.stop()

    def _host_of(self, stage: int) -> StageHost:
        if stage not in self.hosts:
            raise BusyError(f"stage {stage} is not here")
        return self.hosts[stage]

    @patient
    async def rpc_carry(self, call: Call, context: P2PContext) -> None:
        """Bring a microbatch through a stage and all that follow it; see :mod:`shoal.stages.hop`."""
        request = await call.receive(Request)
        if request is None:
            raise ProtocolError("a call for a microbatch without a request")
        host = self._host_of(request.stage)
        async with self._channels.of(context.remote_id, request.channel) as channel:
            await host.carry(call, request, context.remote_id, channel)

    @patient
    async def rpc_channel(self, call: Call, context: P2PContext) -> None:
        """Carry the tensors of a caller's microbatches; see :mod:`shoal.stages.channel`."""
        await self._channels.serve(call, context.remote_id)

    async def rpc_close(self, request: CloseStep, context: P2PContext) -> Closed:
        """A driver says that a step is over."""
        host = self._host_of(request.stage)
        if host.close_step(request.step, context.remote_id) and request.spreads:
            others = [peer for peer in self._peers.peers_of(request.stage) if peer != context.remote_id]
            self._tasks.spawn(self._tell(others, msgspec.structs.replace(request, spreads=False)))
        return Closed(epoch=host.epoch)

    async def rpc_norm(self, request: NormRequest, context: P2PContext) -> Norm:
        """A peer of another stage clips by the norm of all stages."""
        return Norm(value=await self._own_norm(request, context.remote_id))

    async def _own_norm(self, request: NormRequest, asker: PeerID) -> float:
        host = self._host_of(request.stage)
        if not host.epoch - MOST_STEPS <= request.step <= host.epoch + 1:
            raise BusyError(f"stage {request.stage} is at step {host.epoch} here")
        host.close_step(request.step, asker)
        # A stage without trained parameters has no norm.
        return 0.0 if host.norms is None else await host.norms.own(request.step)

    async def ask_norm(self, stage: int, step: int) -> float:
        """Ask a peer of another stage for the norm of its gradients, until one answers."""
        request = NormRequest(stage=stage, step=step)
        while stage not in self.hosts:
            peers = list(self._peers.peers_of(stage))
            for peer in self.p2p.rng.sample(peers, len(peers)):
                with suppress(*CALL_FAILURES):
                    stub = StageService.get_stub(self.p2p, peer, namespace=self.run_id)
                    answer: Norm = await stub.rpc_norm(request, timeout=NORM_TIMEOUT)
                    return answer.value
            self._peers.hasten(stage)
            await asyncio.sleep(NORM_PAUSE)
        return await self._own_norm(request, self.p2p.peer_id)

    async def close_step(self, step: int, count: int) -> None:
        """Tell all stages that a step is over."""
        requests = []
        for stage in range(count):
            peers = list(self._peers.peers_of(stage))
            told = self.p2p.rng.sample(peers, min(TOLD, len(peers)))
            requests.append((told, CloseStep(stage=stage, step=step, spreads=len(told) < len(peers))))
        await asyncio.gather(*(self._tell(told, request) for told, request in requests))

    async def _tell(self, peers: Iterable[PeerID], request: CloseStep) -> None:
        async def tell(peer: PeerID) -> None:
            if peer == self.p2p.peer_id:
                if request.stage in self.hosts:
                    self.hosts[request.stage].close_step(request.step, peer)
                return
            with suppress(*CALL_FAILURES):  # a peer that was not told learns it from the next microbatch
                await StageService.get_stub(self.p2p, peer, namespace=self.run_id).rpc_close(request, timeout=5.0)

        await asyncio.gather(*map(tell, peers))

    def open_call(self, peer: PeerID, *, anew: bool) -> AbstractAsyncContextManager[Call]:
        """Call a stage peer, which may be this one, for a microbatch."""
        return self._open(peer, "rpc_carry", anew)

    def channel_to(self, peer: PeerID, *, anew: bool) -> AbstractAsyncContextManager[Channel]:
        """The channel to a stage peer, which may be this one."""
        return self._channels.to(peer, anew=anew)

    def _open_channel(self, peer: PeerID, anew: bool) -> AbstractAsyncContextManager[Call]:
        return self._open(peer, "rpc_channel", anew)

    def _open(self, peer: PeerID, method: str, anew: bool) -> AbstractAsyncContextManager[Call]:
        if peer == self.p2p.peer_id:
            return call_itself(self.p2p, getattr(self, method))
        stub = StageService.get_stub(self.p2p, peer, namespace=self.run_id)
        if anew:
            stub.dial_anew()
        opening: AbstractAsyncContextManager[Call] = getattr(stub, method)()
        return opening


class _Pipe(PipeEnd):
    """One end of a connection of this peer to itself."""

    def send(self, piece: Piece) -> None:
        self._loop.call_soon(self.other.arrive, piece)


@asynccontextmanager
async def call_itself(p2p: P2P, handler: Callable[[Call, P2PContext], Awaitable[None]]) -> AsyncIterator[Call]:
    """Call a handler of this peer, which cannot be called over the network."""
    near, far = _Pipe(p2p.peer_id, None), _Pipe(p2p.peer_id, None)
    near.other, far.other = far, near
    connections = [Connection(end, Metrics(), Hello, lambda *_: None, p2p.header_memory) for end in (near, far)]

    async def serve() -> None:
        call = Call(connections[1])
        try:
            name = await connections[1].receive_open()
            await handler(call, P2PContext(name, p2p.peer_id, p2p.peer_id))
            await call.send_end()
        except ShoalError as e:
            with suppress(ShoalError):
                await call.send_failure(CallFailure.of_error(e))
        except BaseException:
            far.on_closed(None)
            far.close()
            raise

    serving = asyncio.ensure_future(serve())
    far.on_closed(serving.cancel)
    try:
        call = connections[0].open_call("local")
        yield call
        if call.sent_end:  # otherwise the end might be overtaken by that of the connection
            await asyncio.wait([serving], timeout=STEP_PAUSE)
    finally:
        near.abort()
        await cancel_and_wait(serving)


def _nbytes(structure: Any) -> int:
    return sum(each.nbytes for each in tensors_of(structure))
