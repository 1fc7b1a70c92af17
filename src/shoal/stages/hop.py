"""How a microbatch gets to the next stage, and the way back. A driver does the same to get to the first stage.

One call leads through the next stage and all that follow it, because the peer there calls on in the same way::

    caller ► callee   Request                              while the caller still computes
    callee ► caller   Admission
    caller ► callee   tensors, over the channel            unless the callee has them already
    callee ► caller   News, any number                     which peers are ahead, and whether they wait for a step
    callee ► caller   the gradient of the tensors, over the channel
    callee ► caller   StageOutcome
    caller ► callee   end                                  everything that follows from the gradient is passed on

The microbatches of two peers share a :mod:`~shoal.stages.channel` for their tensors.

A peer that fails is replaced on the spot. The caller keeps what it has sent until the gradient is here. If a connection
breaks, it asks the same peer once more, which knows the microbatch. Otherwise, and after a silence, it chooses another
one, and tells it which peers are further ahead. These also know the microbatch, so that nothing is computed again but
one stage.

Both sides send heartbeats, so that the silence of either of them cuts the call.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import torch

from shoal.base.backoff import Backoffs
from shoal.base.bounded import Bounded
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.base.tasks import all_of, cancel_and_wait, first_completed, wait_at_most
from shoal.compression import CompressionBase
from shoal.errors import InterruptedDialError, ProtocolError, ShoalError, StreamClosedError
from shoal.metrics import Metrics
from shoal.net.transport import Count, Header, PeerIDBytes
from shoal.p2p import Call, PeerID
from shoal.serving.tensors import EXACT, tensors_of
from shoal.stages.channel import CALL_FAILURES, PULSES, Channel, Key, SilentPeerError, UnsendableError, lively
from shoal.stages.choice import MOST_MEASURED, Measurements, choose
from shoal.stages.directory import LIFETIME, MAX_STAGES, StageRecord
from shoal.stages.work import Acceptance

logger = logging.getLogger(__name__)

# The first and the longest pause before peers are chosen from again, when none can be asked now, in seconds. Chosen.
PAUSE, LONGEST_PAUSE = 0.05, 1.0
# Peers of a stage that may fail at one microbatch, before it is the microbatch that is at fault. Chosen.
MAX_FAILURES = 3
# How often in a row a peer is asked again after a connection to it has broken (chosen).
MAX_RETURNS = 8
# A peer that cannot be called is tried again after request_timeout, and later after at most as many of them (chosen).
MOST_RESTS = 4
# A microbatch that takes this many times as long as usual is given up. The weight of the newest one in what is usual.
# Both are chosen.
SLOW, ALPHA = 4.0, 0.1
# Calls to one peer at a time. Chosen: each takes a connection, and other calls need some of MAX_DIALLED_PER_PEER, too.
MOST_CALLS = 20

Route = Annotated[list[PeerIDBytes], msgspec.Meta(max_length=MAX_STAGES)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]


class Request(Header):
    """What a microbatch is, for the next stage."""

    driver: PeerIDBytes
    sequence: Count
    """Its number at its driver."""
    step: Count
    seed: Count
    """From which the stages draw their random numbers."""
    samples: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    trains: bool
    """Not for an evaluation."""
    stage: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)] = 0
    below: Route = msgspec.field(default_factory=list)
    """Peers of the stages after this one that may know the microbatch."""
    channel: Count = 0
    """The number of the channel that its tensors take."""


class StageReply(Header, tag=0):
    """What the callee says: one of the classes below."""


class Admission(StageReply, tag=1):
    """The answer to a request."""

    code: Acceptance
    epoch: Count
    """The first step that is not over at the callee."""


class News(StageReply, tag=2):
    """Something has changed on the way ahead."""

    route: Route
    """The peers that have the microbatch, of the stages after the callee's."""
    waits: bool = False
    """It waits for a step to be made, or for a peer. So that takes as long as it takes."""
    is_on: bool = False
    """The callee has computed it, and the stages after it have not."""


class FailureCause(IntEnum):
    """Why a microbatch has not come through."""

    NONE = 0
    LATE = 1
    """Its step is over at a stage. It can be sent again, with the label of the next one."""
    LOST = 2
    """It cannot be repaired. It can be sent again, as another microbatch."""
    NOT_FINITE = 3
    """A loss of it is not finite."""
    FAILED = 4
    """The callee cannot compute it; another peer of its stage may."""


class StageOutcome(StageReply, tag=3):
    """The microbatch has come through, or why not. In the first case, its losses and the gradient have been sent."""

    cause: FailureCause = FailureCause.NONE
    text: Text = ""
    epoch: Count = 0


class StageFailure(ShoalError):
    """A microbatch has not come through.

    Attributes:
        cause: why.
        epoch: the step that the stage is at, if it is ``LATE``.
    """

    def __init__(self, cause: FailureCause, text: str, epoch: int = 0) -> None:
        super().__init__(text)
        self.cause, self.epoch = cause, epoch


class PeerTurnedAway(ShoalError):
    """A peer does not take the microbatch now."""

    def __init__(self, code: Acceptance) -> None:
        super().__init__(code.name)
        self.code = code


class Result(NamedTuple):
    """What comes back."""

    losses: torch.Tensor
    grads: list[torch.Tensor | None]
    """One for each tensor of the inputs; empty for an evaluation."""


class Cargo(NamedTuple):
    """What is sent: the inputs of the next stage, and what stages further ahead need."""

    inputs: Any
    labels: Any
    extras: dict[str, dict[str, Any]]
    """By number of the stage: further arguments of its module."""


@dataclass(frozen=True)
class Patience:
    """How long others may take, in seconds."""

    request_timeout: float = 5.0
    """A peer that shows no sign of life for this long has failed."""
    microbatch_timeout: float = 120.0
    """A microbatch that nobody asks for any more is kept for this long, and a driver waits for one for this long. The
    time in which stages average, or have no peer, does not count."""

    def limit(self, stage: int, count: int) -> float:
        """How long a stage and all that follow it may work: the last one least, so that a repair begins there."""
        return self.microbatch_timeout * (count - stage) / count


class Peers(Protocol):
    """Knows which peers hold which stage."""

    def peers_of(self, stage: int) -> Mapping[PeerID, StageRecord]:
        """The peers of a stage, with the latest record of each."""

    def hasten(self, stage: int) -> None:
        """There is nobody to choose: look soon."""


class StageNetwork(Protocol):
    """Leads to stage peers, this one included."""

    def open_call(self, peer: PeerID, *, anew: bool) -> AbstractAsyncContextManager[Call]:
        """Call a peer for a microbatch; ``anew``: over a new connection."""

    def channel_to(self, peer: PeerID, *, anew: bool) -> AbstractAsyncContextManager[Channel]:
        """The channel for the tensors of microbatches; ``anew``: over a new connection, if there is none yet."""


class Changes:
    """Wakes all who wait for something to change."""

    def __init__(self) -> None:
        self.next = asyncio.Event()
        """Set at the next change."""

    def note(self) -> None:
        """Something has changed."""
        self.next.set()
        self.next = asyncio.Event()


class Hop:
    """The way from this peer to one stage.

    Args:
        stage: its number.
        count: the number of stages.
        peers: knows who holds it.
        measured: how fast these peers have been.
        network: leads to them.
        codec: of the tensors that are sent there, except labels and what else later stages need.
        rng: chooses among equal peers.
    """

    def __init__(
        self,
        stage: int,
        count: int,
        peers: Peers,
        measured: Measurements,
        network: StageNetwork,
        patience: Patience,
        metrics: Metrics,
        rng: random.Random,
        codec: CompressionBase = EXACT,
    ) -> None:
        self.stage, self.count, self._least_limit = stage, count, patience.limit(stage, count)
        # Seconds that this stage and all after it work on a microbatch, those included in which it waits for others.
        self._usual = 0.0
        self.peers, self.measured, self.network, self.patience = peers, measured, network, patience
        self.metrics, self.rng, self.codec = metrics, rng, codec
        self.warn_seldom = Seldom(logger.warning)
        self._now = asyncio.get_running_loop().time
        self.busy: Bounded[PeerID, float] = Bounded(MOST_MEASURED)
        """Until when peers have no room, as far as is known. No microbatch has to find that out again."""
        self.calls: Counter[PeerID] = Counter()
        """How many calls to each peer there are now."""
        # Peers that could not be called lately. No microbatch has to find that out again.
        first = patience.request_timeout
        self.rests = Backoffs(first, MOST_RESTS * first, asyncio.get_running_loop().time)

    def note_busy(self, peer: PeerID) -> None:
        """A peer has no room: there will be some when it has done its next pass."""
        record = self.peers.peers_of(self.stage).get(peer)
        seconds = 0.5 / record.rate if record is not None and record.rate > 0 else LONGEST_PAUSE
        self.busy[peer] = self._now() + min(max(seconds, PAUSE), LONGEST_PAUSE)

    @property
    def limit(self) -> float:
        """How many seconds this stage and all after it may work on a microbatch: what is slow is not dead."""
        return max(self._least_limit, SLOW * self._usual)

    def note_worked(self, seconds: float) -> None:
        """They have worked for this long, perhaps in vain."""
        self._usual += (ALPHA if self._usual else 1.0) * (seconds - self._usual)

    @asynccontextmanager
    async def carrying(self, request: Request, tell: Callable[[], object]) -> AsyncIterator[Passage]:
        """Bring a microbatch to the stage. At the end of the block, the peers ahead may forget it.

        Args:
            request: as for the stage before; from the driver, its ``below`` begins with this stage.
            tell: called when the passage has news.
        """
        passage = Passage(self, request, tell)
        running = asyncio.ensure_future(passage.run())
        try:
            yield passage
        finally:
            if passage.finish():
                await asyncio.wait([running], timeout=self.patience.request_timeout)
            await cancel_and_wait(running)


class Passage:
    """One microbatch on its way through a stage and all that follow it; see :meth:`Hop.carrying`."""

    def __init__(self, hop: Hop, request: Request, tell: Callable[[], object]) -> None:
        self._hop, self._request, self._tell = hop, request, tell
        self.route: list[bytes] = []
        """The peers that have the microbatch now."""
        self.waits = False
        """Whether one of them waits for a step or for a peer, or this one does."""
        # The peer that may know the microbatch, and those of the stages after it.
        self._hinted: bytes | None = request.below[0] if request.below else None
        self._below = list(request.below[1:])
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self._cargo: asyncio.Future[Cargo] = loop.create_future()
        self._result: asyncio.Future[Result] = loop.create_future()
        self._over = asyncio.Event()
        # Whether there is a call that should be ended in order, whether the callee was reached, and whether it has
        # everything.
        self._is_calling = self._is_reached = self._is_sent = False
        self._sent_at = 0.0
        # Whether it was noted how long the peer took.
        self._is_noted = False
        # Since when a peer has been looked for; and since when no peer could be asked. 0 if one is found.
        self._looks_since = self._alone_since = 0.0
        # Until when peers are not asked again.
        self._rests: dict[PeerID, float] = {}

    async def through(self, cargo: Cargo) -> Result:
        """Send the tensors, and wait for what comes back.

        Raises:
            StageFailure: nothing comes back, because of the microbatch or because repairs have failed.
        """
        self._cargo.set_result(cargo)
        try:
            return await self._result
        finally:
            self._cargo = asyncio.get_running_loop().create_future()  # what was sent is not needed any more

    def finish(self) -> bool:
        """Nobody wants anything more of this passage; returns whether a call must still be ended."""
        self._over.set()
        return self._is_calling and self._is_sent

    async def run(self) -> None:
        """Bring the microbatch through, with as many attempts as it needs."""
        try:
            await self._try_peers()
        except StageFailure as e:
            self._fail(e)
        except Exception as e:
            logger.error("a defect on the way to stage %d", self._hop.stage, exc_info=e)
            self._fail(StageFailure(FailureCause.LOST, f"{type(e).__name__}: {e}"))

    def _fail(self, error: StageFailure) -> None:
        if not self._result.done():
            self._result.set_exception(error)
            self._result.exception()  # marks it as retrieved: the work may have ended before it asked

    async def _try_peers(self) -> None:
        hop, failures, returns = self._hop, 0, 0
        again: PeerID | None = None
        while True:
            peer = again or await self._choose()
            returns = returns + 1 if again else 0
            again, began = None, self._now()
            self._is_reached, self._is_sent, self._is_noted, self._sent_at = False, False, False, began
            hop.measured.note_sent(peer, get_dht_time())
            error: Exception | None = None
            try:
                await self._attempt(peer, anew=returns > 0)
                return
            except PeerTurnedAway as e:
                if e.code is Acceptance.BEHIND:
                    hop.measured.note_behind(peer, self._request.step, get_dht_time())
                    self._rests[peer] = self._now() + hop.patience.request_timeout
                else:
                    self._alone_since = 0.0
                    hop.note_busy(peer)
                continue
            except StageFailure as e:
                if e.cause is not FailureCause.FAILED:
                    raise
                error, failures = e, failures + 1
            except CALL_FAILURES as e:
                error = e
            finally:
                self._note_end(peer, self._now() - began, has_failed=error is not None)
            if isinstance(error, StageFailure) and (failures >= MAX_FAILURES or self._is_only(peer)):
                text = f"stage {hop.stage} cannot compute it (peers asked: {failures}), the last one says: {error}"
                raise StageFailure(FailureCause.LOST, text)
            # Perhaps only a connection is gone. Other errors show that the peer is.
            is_broken = isinstance(error, StreamClosedError) and self._is_reached
            is_unlucky = returns and isinstance(error, StreamClosedError | InterruptedDialError)
            is_gone = isinstance(error, SilentPeerError) and not self._is_only(peer)
            if (is_broken or is_unlucky) and not is_gone and returns < MAX_RETURNS:
                again = peer
            self._repair(peer, error, is_gone=again is None)

    def _note_end(self, peer: PeerID, seconds: float, *, has_failed: bool) -> None:
        """Note how an attempt has ended, if it was not noted when the peer had done its part."""
        measured, now = self._hop.measured, get_dht_time()
        if has_failed:
            if self._is_noted:
                measured.note_sent(peer, now)
            measured.note_failure(peer, seconds, now)
        elif not self._is_noted:
            measured.take_back(peer)

    def _note_done(self, peer: PeerID) -> None:
        if not self._is_noted:
            self._is_noted = True
            self._hop.busy.pop(peer, None)
            self._hop.measured.note_done(peer, self._now() - self._sent_at, get_dht_time())

    def _is_only(self, peer: PeerID) -> bool:
        """Whether there is no other peer that could try."""
        return not any(each != peer and each not in self._rests for each in self._hop.peers.peers_of(self._hop.stage))

    def _repair(self, peer: PeerID, error: Exception, *, is_gone: bool) -> None:
        """A call has failed. A peer that is gone is not asked again for a while."""
        logger.debug("a call to peer %s of stage %d has failed: %r", peer, self._hop.stage, error)
        if self.route:
            self._hop.metrics.hops_repaired["another peer" if is_gone else "same peer"] += 1
        if is_gone and isinstance(error, StageFailure):
            self._rests[peer] = self._now() + self._hop.patience.request_timeout
        elif is_gone:
            self._hop.rests.fail(peer)
        if is_gone:
            self._hop.peers.hasten(self._hop.stage)
            self._note([], waits=False)

    async def _choose(self) -> PeerID:
        hop, pause = self._hop, PAUSE
        self._looks_since = self._looks_since or self._now()
        while True:
            known, rests = hop.peers.peers_of(hop.stage), hop.rests
            busy = {p for p in known if hop.busy.get(p, 0.0) > self._now() or hop.calls[p] >= MOST_CALLS}
            resting = {p for p in known if self._rests.get(p, 0.0) > self._now() or not rests.is_due(p)}
            hinted, self._hinted = self._hinted, None
            if hinted is not None:
                return PeerID(hinted)
            # A peer at the step before is about to make this one.
            step, now = self._request.step - 1 if self._request.trains else None, get_dht_time()
            if self._is_stranded():
                step = None
            how: dict[str, Any] = {"step": step, "excluded": resting, "busy": busy}
            waited = self._now() - self._looks_since
            peer = choose(known, hop.measured, now=now, rng=hop.rng, waited=waited, **how)
            if peer is not None:
                if peer in hop.busy:  # one microbatch asks whether there is room now
                    hop.note_busy(peer)
                return peer
            self._note([], waits=True)
            self._alone_since = 0.0 if busy else self._alone_since or self._now()
            if not busy:
                hop.peers.hasten(hop.stage)
            if self._is_stranded():
                self._warn_of_waiting(known)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _warn_of_waiting(self, known: Iterable[PeerID]) -> None:
        hop, stage, step = self._hop, self._hop.stage, self._request.step
        if not any(hop.measured.of(peer).behind[0] >= step for peer in known):
            hop.warn_seldom(
                "no peer of stage %d can be reached: microbatches wait until there is one. Start another peer with "
                "stage=%d",
                *(stage, stage),
            )
        elif self._now() - self._alone_since > LIFETIME:  # before that, it may be about to take over the state
            hop.warn_seldom("the peers of stage %d do not get to step %d: restart the one that is behind", stage, step)

    def _is_stranded(self) -> bool:
        """Whether there was no peer for long. Then even one that is behind is asked: it learns that it has to go on."""
        return 0 < self._alone_since <= self._now() - self._hop.patience.request_timeout

    def _note(self, route: Sequence[bytes], waits: bool) -> None:
        if (self.route, self.waits) != (list(route), waits):
            self.route, self.waits = list(route), waits
            self._tell()

    async def _attempt(self, peer: PeerID, *, anew: bool) -> None:
        hop, key = self._hop, Key(self._hop.stage, self._request.driver, self._request.sequence)
        hop.calls[peer] += 1
        try:
            async with hop.network.channel_to(peer, anew=anew) as channel:
                with channel.expecting(key) as arrival:
                    await all_of(self._call(peer, channel, key, anew=anew), self._take(arrival, peer, channel))
        except CALL_FAILURES:
            if not self._result.done() and not self._over.is_set():
                raise
        finally:
            self._is_calling = False
            hop.calls -= Counter([peer])  # those without calls are forgotten

    async def _call(self, peer: PeerID, channel: Channel, key: Key, *, anew: bool) -> None:
        hop, below = self._hop, self._below
        request = msgspec.structs.replace(self._request, stage=hop.stage, below=below, channel=channel.number)
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(hop.patience.request_timeout):
                call = await stack.enter_async_context(hop.network.open_call(peer, anew=anew))
                await call.send(request)
                admission = await call.receive(StageReply)
                if not isinstance(admission, Admission):
                    raise ProtocolError(f"peer {peer} of stage {hop.stage} does not say whether it accepts")
                if admission.code not in (Acceptance.ACCEPTED, Acceptance.KNOWN):
                    await call.send_end()
                    self._turn_away(admission)
            self._is_reached, self._looks_since, self._alone_since = True, 0.0, 0.0
            hop.rests.succeed(peer)
            self._note([peer.to_bytes(), *self._below], waits=False)
            await stack.enter_async_context(lively(call, hop.patience.request_timeout))
            self._is_calling, self._is_sent = True, admission.code is Acceptance.KNOWN
            talking = [self._end(call), self._hear(call, peer)]
            await all_of(*talking, *([] if self._is_sent else [self._give(channel, key)]))

    def _turn_away(self, admission: Admission) -> None:
        stage = self._hop.stage
        if admission.code is Acceptance.LATE:
            raise StageFailure(FailureCause.LATE, f"stage {stage} is at step {admission.epoch}", admission.epoch)
        if admission.code is Acceptance.GONE:
            raise StageFailure(
                FailureCause.LOST, f"stage {stage} has counted it, and does not keep its gradient any more"
            )
        raise PeerTurnedAway(admission.code)

    async def _give(self, channel: Channel, key: Key) -> None:
        cargo = await asyncio.shield(self._cargo)
        self._sent_at = self._now()
        exact = {id(each) for each in tensors_of([cargo.labels, cargo.extras])}
        codec = self._hop.codec
        try:
            await channel.send(key, list(cargo), lambda tensor: EXACT if id(tensor) in exact else codec)
        except UnsendableError as e:
            text = f"what goes to stage {self._hop.stage} cannot be sent: {e}"
            raise StageFailure(FailureCause.LOST, text[:2000]) from e
        self._is_sent = True

    async def _take(self, arrival: asyncio.Future[Any], peer: PeerID, channel: Channel) -> None:
        """Take what comes back, unless nobody waits for it any more."""
        await first_completed(asyncio.shield(arrival), self._over.wait())
        if arrival.done():
            self._is_reached |= channel.has_begun  # if it breaks, perhaps only the connection is gone
            result = _checked(await arrival)
            self._note_done(peer)
            if not self._result.done():  # otherwise it is cancelled: nobody waits any more
                self._result.set_result(result)

    async def _hear(self, call: Call, peer: PeerID) -> None:
        has_come_through = False
        while (reply := await call.receive(StageReply)) is not None:
            if isinstance(reply, News):
                self._below = reply.route
                self._note([peer.to_bytes(), *self._below], reply.waits)
                if reply.is_on:
                    self._note_done(peer)
            elif isinstance(reply, StageOutcome) and reply.cause is FailureCause.NONE:
                has_come_through = True
            elif isinstance(reply, StageOutcome):
                raise StageFailure(reply.cause, reply.text, reply.epoch)
        if not (has_come_through or self._over.is_set()):
            raise ProtocolError(f"peer {peer} of stage {self._hop.stage} ends a call without an outcome")

    async def _end(self, call: Call) -> None:
        """Say goodbye when the passage is over, or the callee has worked for too long."""
        tick, worked = self._hop.patience.request_timeout / PULSES, 0.0
        while not await wait_at_most(self._over, tick) and worked < self._hop.limit:
            worked += tick if self._is_sent and not self.waits and not self._result.done() else 0.0
        if self._is_sent and (self._result.done() or not self._over.is_set()):
            self._hop.note_worked(worked)
        if not self._is_sent:
            raise StreamClosedError("there is nothing to be sent any more")
        await call.send_end()
        if not self._over.is_set():
            raise TimeoutError(f"stage {self._hop.stage} has worked for {worked:.0f} s without a result")


def _checked(arrived: Any) -> Result:
    match arrived:
        case [torch.Tensor() as losses, [*grads]] if all(g is None or isinstance(g, torch.Tensor) for g in grads):
            return Result(losses, grads)
    raise ProtocolError("what a stage sends back is not losses and gradients")
