"""A driver: it sends microbatches into the first stage, and says when a step is over.

*Credits.* At most ``in_flight`` microbatches are on their way at a time. One that comes back makes room for the next.

*Steps.* All drivers together bring ``target_batch_size`` samples through in a step. Each tells the others its step, and
how many samples it has begun::

    step k: begin ──► the sum reaches the target ──► own microbatches come back ──► step k + 1 is reported
                                                                                          │ all report it
    step k + 1: begin ◄── stages are told that step k is over ◄───────────────────────────┘

So no microbatch of step k is on its way when a stage makes step k, and each one meets the parameters of its own step.
If steps are not synchronous, drivers report what has come back, and nobody waits for anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.base.tasks import BackgroundTasks, first_completed
from shoal.errors import MicrobatchError
from shoal.metrics import Metrics
from shoal.optim.progress_tracker import ProgressTracker
from shoal.serving.tensors import tensors_of
from shoal.stages.directory import reached_by_most
from shoal.stages.hop import Cargo, Changes, FailureCause, Hop, Request, StageFailure

logger = logging.getLogger(__name__)

# How often a microbatch is sent again before it is dropped. Chosen: more often, it is the microbatch that is at fault.
MAX_RESENT = 3
# The longest that a driver waits for the others' progress, in seconds (chosen: a long round trip, and a busy machine).
SECONDS_TO_ASK = 1.0


class DriverProgress(NamedTuple):
    """How far a driver is."""

    step: int
    samples: int
    """That it has begun in this step; if steps are not synchronous, that have come back."""


class Drivers(Protocol):
    """What the drivers of a run tell each other."""

    changes: Changes
    """Noted when another driver has told something, has come or has gone."""

    def report(self, progress: DriverProgress) -> None:
        """Tell the others how far this driver is."""

    def others(self) -> Sequence[DriverProgress]:
        """The latest of each other driver that is there."""

    async def ask(self) -> None:
        """Exchange the latest with all of them now."""


class TrackedDrivers:
    """Drivers that share a :class:`~shoal.optim.progress_tracker.ProgressTracker`. Lives in the event loop."""

    def __init__(self, tracker: ProgressTracker) -> None:
        self.changes = Changes()
        self._tracker, self._step = tracker, 0
        self._loop = asyncio.get_running_loop()
        tracker.watch(self._note)

    def _note(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.changes.note)

    def close(self) -> None:
        """Listen no more."""
        self._tracker.unwatch(self._note)

    def report(self, progress: DriverProgress) -> None:
        self._tracker.report_local_progress(progress.step, progress.samples)
        if progress.step != self._step:  # others wait for this
            self._step = progress.step
            self._tracker.look_after_others()

    async def ask(self) -> None:
        if self._tracker.exchange is not None:
            await self._tracker.exchange.ask_all(SECONDS_TO_ASK)

    def others(self) -> list[DriverProgress]:
        board, now = self._tracker.board, get_dht_time()
        with board.lock:
            records = [each.record for each in board.companions.values() if each.is_reachable(now)]
        return [DriverProgress(each.epoch, each.samples_accumulated) for each in records if not each.is_donor]


class Steps:
    """To which step microbatches belong, and when it is over.

    Args:
        drivers: the others.
        target: samples of all drivers together in a step.
        close: tells all stages that a step is over.
        is_synchronous: whether all microbatches of a step come back before the next one begins.
    """

    def __init__(
        self,
        drivers: Drivers,
        target: int,
        close: Callable[[int], Coroutine[Any, Any, None]],
        *,
        is_synchronous: bool = True,
    ) -> None:
        self.step = 0
        """The step of the next microbatch."""
        self._drivers, self._target, self._close, self._is_synchronous = drivers, target, close, is_synchronous
        self._samples = self._open = 0
        # The latest step at which a stage was seen.
        self._told = 0
        # Whether all drivers have come to this step.
        self._has_begun = False
        self._telling: asyncio.Task[None] | None = None
        self._changes = Changes()
        self._turn = asyncio.Lock()  # microbatches begin in the order in which they come
        self._tasks = BackgroundTasks(logger, "the steps of this driver")

    def start(self) -> None:
        """Begin to follow the other drivers."""
        self._tasks.spawn(self._follow())

    async def stop(self) -> None:
        """Follow them no more."""
        await self._tasks.close()

    async def _follow(self) -> None:
        while True:
            change = self._drivers.changes.next
            self._advance()
            await change.wait()

    def _is_full(self, others: Sequence[DriverProgress]) -> bool:
        same = sum(each.samples for each in others if each.step == self.step)
        return self._samples + same >= self._target or self._latest(others) > self.step

    def _latest(self, others: Sequence[DriverProgress]) -> int:
        """The latest step at which a driver or a stage is."""
        return max([self.step, self._told, *(each.step for each in others)])

    def _advance(self) -> None:
        """Go on to the next step if this one is over, and begin it when all drivers are there."""
        others = self._drivers.others()
        latest, is_over = self._latest(others), self._has_begun and self._is_full(others)
        if (is_over or latest > self.step) and (self._open == 0 or not self._is_synchronous):
            self.step = max(self.step + 1, latest)
            self._samples, self._has_begun = 0, False
            self._drivers.report(DriverProgress(self.step, 0))
        if not self._has_begun and (not self._is_synchronous or all(each.step >= self.step for each in others)):
            self._has_begun = True
            if self.step:
                self._telling = self._tasks.spawn(self._close(self.step - 1))
        self._changes.note()

    async def settle(self) -> int:
        """Wait until stages are told of the steps that are over for all drivers; returns the first that is not."""
        if self._telling is not None:
            await asyncio.wait([self._telling])
        return self.step if self._has_begun else self.step - 1

    async def begin(self, samples: int) -> int:
        """Begin a microbatch, as soon as there is room in a step; returns the step. Call :meth:`end` afterwards."""
        async with self._turn:
            while not await self._has_room(samples):
                own, others = self._changes.next, self._drivers.changes.next
                await first_completed(own.wait(), others.wait())
            self._open += 1
            if self._is_synchronous:
                self._count(samples)
            return self.step

    async def _has_room(self, samples: int) -> bool:
        """Whether a microbatch may begin. Beyond its fair share of a step, a driver asks the others before each one."""
        others = self._drivers.others()
        if self._has_begun and self._is_synchronous and others and not self._is_full(others):
            fair = self._target / (1 + len(others))
            if self._samples + samples > fair:
                await self._drivers.ask()
        return self._has_begun and not (self._is_synchronous and self._is_full(self._drivers.others()))

    def end(self, samples: int, *, has_come_back: bool) -> None:
        """A microbatch has come back, or is given up."""
        self._open -= 1
        if has_come_back and not self._is_synchronous:
            self._count(samples)
        self._advance()

    def _count(self, samples: int) -> None:
        self._samples += samples
        self._drivers.report(DriverProgress(self.step, self._samples))

    def catch_up(self, epoch: int) -> None:
        """A stage is at this step already."""
        self._told = max(self._told, epoch)
        self._advance()


class Brought(NamedTuple):
    """What a microbatch has brought."""

    losses: torch.Tensor
    grads: list[torch.Tensor | None]
    """Of the inputs, one for each tensor."""


class Driver:
    """Sends microbatches. Lives in one event loop.

    Args:
        peer: id of this peer.
        hop: the way to the first stage.
        in_flight: the most microbatches that are on their way at a time.
        seed: from which those of microbatches follow.
    """

    def __init__(
        self, peer: bytes, hop: Hop, steps: Steps, *, in_flight: int, metrics: Metrics, seed: int = 0, first: int = 0
    ) -> None:
        self.steps = steps
        self._peer, self._hop, self._metrics, self._seed = peer, hop, metrics, seed
        self._credits = asyncio.Semaphore(in_flight)
        self._sequence = first
        self._microbatches = 0
        self._warn_seldom = Seldom(logger.warning)

    async def carry(
        self,
        inputs: Any,
        labels: Any = None,
        extras: Mapping[int, Mapping[str, Any]] | None = None,
        *,
        trains: bool = True,
    ) -> Brought:
        """Bring a microbatch through all stages.

        Args:
            inputs: of the first stage.
            labels: for the last stage.
            extras: further arguments for stages, by their numbers.
            trains: not for an evaluation.

        Raises:
            MicrobatchError: it was dropped. The metrics count it.
        """
        tensors = tensors_of([inputs, labels])
        samples = len(tensors[0])
        cargo = Cargo(inputs, labels, {str(stage): dict(each) for stage, each in (extras or {}).items()})
        self._microbatches += 1
        seed = (self._seed + self._microbatches) % 2**53
        async with self._credits:
            if not trains:
                return await self._send_until_there(cargo, samples, self.steps.step, seed, trains=False)
            while True:
                step = await self.steps.begin(samples)
                has_come_back = False
                try:
                    brought = await self._send_until_there(cargo, samples, step, seed, trains=True)
                    has_come_back = True
                    return brought
                except StageFailure as e:  # it is late
                    late = e
                finally:
                    self.steps.end(samples, has_come_back=has_come_back)
                self._metrics.microbatches_resent["late"] += 1
                # A peer that says more than the records of most others is followed by one step only.
                reached = reached_by_most(map(self._hop.peers.peers_of, range(self._hop.count)))
                self.steps.catch_up(min(late.epoch, max(step + 1, reached)))

    async def _send_until_there(self, cargo: Cargo, samples: int, step: int, seed: int, *, trains: bool) -> Brought:
        for _ in range(MAX_RESENT + 1):
            self._sequence += 1
            request = Request(
                driver=self._peer,
                sequence=self._sequence,
                step=step,
                seed=seed,
                samples=samples,
                trains=trains,
            )
            try:
                async with self._hop.carrying(request, lambda: None) as passage:
                    losses, grads = await passage.through(cargo)
            except StageFailure as e:
                error = e
                if e.cause is FailureCause.LATE:
                    raise
                if e.cause is FailureCause.NOT_FINITE:
                    break
                self._metrics.microbatches_resent["lost"] += 1
                logger.debug("microbatch %d is sent again: %s", self._sequence, e)
                continue
            if losses.shape[:1] == (samples,) and bool(torch.isfinite(losses).all()):
                self._metrics.microbatches_done += 1
                return Brought(losses, grads)
            error = StageFailure(FailureCause.NOT_FINITE, f"not {samples} finite losses")
            break
        reason = error.cause.name.lower().replace("_", " ")
        self._metrics.microbatches_dropped[reason] += 1
        self._warn_seldom("a microbatch was dropped: %s", error)
        raise MicrobatchError(f"the microbatch was dropped: {error}")
