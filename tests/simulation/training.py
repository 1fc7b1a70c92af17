"""Peers that train together on a simulated network: everything is real but the training itself and the time.

Each has a node of the table, a tracker, and an averager that also shares its state; only batches are made by waiting.
The loop is what :class:`shoal.Optimizer` does, written for virtual time: report batches, look for a group when the end
of the epoch is near, average gradients, step, catch up if the others are ahead. The model is one vector, and its loss
the squared distance from a vector of ones: whether a swarm has learned something shows at once.

::

    async def main() -> None:
        swarm = Swarm(Network(LINK), Course(target_batch_size=2000))
        trainers = [await swarm.add() for _ in range(20)]
        await asyncio.sleep(600)
        print(swarm.goodput(), trainers[0].loss)
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from shoal.averaging.control import RoundResult, StepControl
from shoal.averaging.node import AveragerNode
from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.base.tasks import wait_at_most
from shoal.dht import DHTNode
from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.dht.validation import AcceptedRecords, CompositeValidator
from shoal.errors import ShoalError, SimulationError
from shoal.optim.global_step import SECONDS_BETWEEN_LOOKS, awaits_newcomers
from shoal.optim.history.journal import Lineage
from shoal.optim.joint_optimizer import watch_search
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.exchange import ProgressExchange
from shoal.optim.progress.records import PerformanceEMA, RefreshPolicy
from shoal.optim.progress.schema import endorse
from shoal.optim.progress_tracker import FIRST_LOOK_SECONDS, SECONDS_TO_ASK, ProgressTracker, make_guard
from shoal.p2p import PeerID
from shoal.testing import Host, Link, Network, make_averager, start_dht_node

RUN = "training"
LINK = Link(delay=(0.01, 0.05), jitter=0.005)
NOISE = 0.5
"""Standard deviation of each value of the gradient of one sample."""
SECONDS_TO_LOOK_AROUND = 5.0
LOAD_PAUSE = 2.0


@dataclass(frozen=True)
class Course:
    """What is trained, and how; the same for all peers."""

    target_batch_size: int = 2000
    batch_size: int = 16
    matchmaking_time: float = 5.0
    averaging_timeout: float = 60.0
    group_size: int | None = None
    """Of a full group; ``None``: all peers are one group."""
    group_bits: str = ""
    values: int = 64
    """Of the model."""
    learning_rate: float = 0.1
    guard: str = "members"
    silence: float = 5.0
    """Seconds after which a silent member of a group is given up."""


@dataclass
class Record:
    """What one peer has done since it began to train."""

    began: float = math.nan
    ended: float = math.nan
    """Loop time at which it left or died; NaN: it is at work."""
    made: int = 0
    """Samples."""
    used: int = 0
    """Samples that were in a round with others."""
    rounds: int = 0
    failed: int = 0
    """Rounds that came to nothing."""
    alone: int = 0
    """Epochs that it made alone."""
    alone_in_company: int = 0
    """Of these, those that others were in, too, who could be reached."""
    lost_epochs: int = 0
    """Epochs that it skipped, because others were ahead and it took over their state."""
    downloads: int = 0
    group_sizes: Counter[int] = field(default_factory=Counter)
    held: float = 0.0
    """Seconds in which it waited for newcomers."""


class SimulatedTracker(ProgressTracker):
    """The tracker of a peer, without the thread behind its facade."""

    def __init__(self, node: DHTNode, board: ProgressBoard, exchange: ProgressExchange, course: Course) -> None:
        self.dht: Any = SimpleNamespace(peer_id=node.peer_id, node=node, p2p=node.p2p)
        self.prefix, self.target_batch_size, self.guard = exchange._run, course.target_batch_size, course.guard
        self.client_mode, self.performance_ema = board.own.client_mode, board.performance_ema
        self.status_loglevel = 10
        self.board = board
        self.fetched_global_progress_this_epoch = SimpleNamespace(set=self._note_fetch, clear=lambda: None)  # type: ignore[assignment]
        self.has_looked = asyncio.Event()
        self._in_pause = False
        self.exchange = exchange
        exchange.on_fetch = self._note_fetch

    def _note_fetch(self) -> None:
        self.has_looked.set()

    def _wake(self, *, calls: bool = False) -> None:
        assert self.exchange is not None
        self.exchange.report_due.set()
        if calls:
            self.exchange.call_due.set()

    def ask_others(self, seconds: float) -> None:
        """Here no thread can wait, see :meth:`Trainer._should_stop`."""

    def await_introduction(self) -> None:
        """Likewise."""

    def __del__(self) -> None:
        """There is no thread to end."""


class Trainer:
    """One peer. What a subclass may change: :meth:`seconds_of_a_batch`, :meth:`gradient`, :meth:`report`."""

    run = RUN

    def __init__(self, swarm: Swarm, host: Host, node: DHTNode, samples_per_second: float) -> None:
        self.swarm, self.course, self.host, self.node = swarm, swarm.course, host, node
        self.samples_per_second = samples_per_second
        self.batch_size = self.course.batch_size
        self.epoch, self.samples = 0, 0
        self.parameters = torch.zeros(self.course.values)
        self.averaged = torch.zeros(self.course.values)
        self.record = Record()
        self._sum = torch.zeros(self.course.values)
        self._control: StepControl | None = None
        self.begun: tuple[StepControl | None, torch.Tensor, int] | None = None
        """A round under way, with this peer's own mean gradient and the number of its samples."""
        self.tracker = self._make_tracker()
        self.tracker.board.moves_together = not self.course.group_size
        self.averager = self._make_averager()
        is_one_group = not self.course.group_size
        self.tracker.advise(self.averager, weighs_samples=True, trains_one=is_one_group)
        if is_one_group:
            self.tracker.compare_rounds()

    def _make_tracker(self) -> SimulatedTracker:
        node, course, loop = self.node, self.course, asyncio.get_running_loop()
        # From the seed, like all else: the place of a record follows from its owner's key.
        key = PrivateKey.from_bytes(hashlib.sha256(node.peer_id.to_bytes()).digest())
        signatures = SignatureValidator(key)
        node.protocol.record_validator.extend([signatures])
        ema = PerformanceEMA(alpha=0.1, clock=loop.time)
        board = ProgressBoard(
            node.peer_id.to_bytes(),
            node.client_mode,
            course.target_batch_size,
            RefreshPolicy(),
            ema,
            self.host.dht_time(),
            lambda peer: node.p2p.host_of(PeerID(peer)),
            make_guard=make_guard(course.guard),
        )
        tag = signatures.local_public_key
        exchange = ProgressExchange(
            node,
            node.p2p,
            self.run,
            board,
            owner_tag=tag,
            endorsement=endorse(node.p2p.identity, tag),
            min_period=0.5,
            metadata_expiration=60.0,
        )
        return SimulatedTracker(node, board, exchange, course)

    def _make_averager(self) -> AveragerNode:
        course = self.course
        return make_averager(
            self.node.p2p,
            [self.averaged],
            self.node,
            get_state=self._state,
            prefix=f"{self.run}_grad_averager",
            target_group_size=course.group_size,
            initial_group_bits=course.group_bits,
            min_matchmaking_time=course.matchmaking_time,
            sender_timeout=course.silence,
            reducer_timeout=2 * course.silence,
        )

    def _state(self) -> tuple[Any, list[torch.Tensor]]:
        metadata = {"epoch": self.epoch, "rounds": self.tracker.lineage.pack()}
        return metadata, [self.parameters.clone()]

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def loss(self) -> float:
        """Mean squared distance from what is to be learned."""
        return float((self.parameters - 1).square().mean())

    @property
    def speed(self) -> float:
        """Samples per second that it would make if it never had to wait."""
        return self.samples_per_second

    # --- what makes one peer different from others --------------------------------------------------------------------

    def seconds_of_a_batch(self) -> float:
        return self.batch_size / self.samples_per_second * self.host.rng.uniform(0.9, 1.1)

    def gradient(self) -> torch.Tensor:
        """The mean gradient of one batch."""
        seed = self.host.rng.getrandbits(48)
        noise = torch.randn(self.course.values, generator=torch.Generator().manual_seed(seed))
        return (self.parameters - 1) + noise * (NOISE / math.sqrt(self.batch_size))

    def report(self) -> None:
        """Tell the tracker how far this peer is."""
        self.tracker.report_local_progress(self.epoch, self.samples)

    # --- the life of a peer -------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Begin, and train for as long as the host is up."""
        assert self.tracker.exchange is not None
        await self.averager.start()
        await self.tracker.exchange.start()
        self.averager.state_sharing.set(allowed=False)
        try:
            async with asyncio.timeout(SECONDS_TO_LOOK_AROUND):
                await self.tracker.has_looked.wait()
        except TimeoutError:
            pass  # alone, or on a line that fails: begin at once
        self.record.began = asyncio.get_running_loop().time()
        if self._is_behind(strictly=True):
            await self._catch_up()
        self.averager.state_sharing.set(allowed=True, priority=self.epoch)
        while True:
            await self._train_one_epoch()

    async def leave(self) -> None:
        """Say goodbye to everybody, and end."""
        assert self.tracker.exchange is not None
        await self.tracker.exchange.stop()
        await self.averager.close()
        await self.node.shutdown()

    def _is_behind(self, *, strictly: bool = False) -> bool:
        tracker = self.tracker
        if tracker.gives_way_to is not None:
            return True
        behind = tracker.global_epoch - self.epoch
        if strictly:
            return behind > 0
        return behind > 1 or (behind == 1 and tracker.is_introduced and tracker.expected_group_size == 1)

    async def _catch_up(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.cancel()
        began = get_dht_time()
        sharing, gives_way = self.averager.state_sharing, self.tracker.gives_way_to is not None
        with self.tracker.pause_updates():
            if gives_way:  # if both sides do, neither may get the state of the other
                sharing.set(allowed=False)
            try:
                state = await self.averager.state_downloads.download()
            except ShoalError:
                state = None
            if gives_way:
                sharing.set(allowed=True)
            if state is None or (state[0]["epoch"] < self.epoch and not gives_way):
                self.tracker.note_vain_attempt(get_dht_time() - began)
                self.tracker.look_after_others()
                await asyncio.sleep(LOAD_PAUSE)
                return
            metadata, tensors = state
            self.record.downloads += 1
            self.record.lost_epochs += max(0, metadata["epoch"] - self.epoch) * (self.epoch > 0)
            self.parameters.copy_(tensors[0])
            self.epoch = max(metadata["epoch"], 0 if gives_way else self.tracker.global_epoch - 1)
            self.tracker.adopt_lineage(Lineage.unpack(metadata["rounds"]), self.epoch)
            self._sum.zero_()
            self.samples = 0
            self.tracker.update_epoch(self.epoch)
            self.tracker.announce()
        self.averager.state_sharing.set(priority=self.epoch)

    async def _train_one_epoch(self) -> None:
        while True:
            await asyncio.sleep(self.seconds_of_a_batch())
            self.samples += self.batch_size
            self.record.made += self.batch_size
            self._sum += self.gradient() * self.batch_size
            self.report()
            if self._is_behind():
                await self._catch_up()
                return
            self._look_for_group_in_time()
            if await self._should_stop():
                break
        await self._make_global_step()

    async def _should_stop(self) -> bool:
        """What :meth:`ProgressTracker.should_stop` does in a thread."""
        board, patience = self.tracker.board, self.course.matchmaking_time
        assert self.tracker.exchange is not None
        if board.ends_when_introduced(get_dht_time()):
            await wait_at_most(self.tracker.exchange.introduced, FIRST_LOOK_SECONDS)
        if not board.should_stop(get_dht_time(), patience):
            if board.should_ask(get_dht_time()):
                self.tracker.look_after_others()
            return False
        if board.rests_on_guesses(get_dht_time()):
            await self.tracker.exchange.ask_all(min(patience, SECONDS_TO_ASK))
            return board.should_stop(get_dht_time(), patience)
        return True

    def _look_for_group_in_time(self) -> None:
        tracker, now = self.tracker, get_dht_time()
        due, patience = tracker.estimated_next_update_time, self.course.averaging_timeout
        is_near = due - now <= self.course.matchmaking_time
        has_search = self._control is not None and not self._control.done()
        may_join = tracker.board.may_join_in_advance(self.course.matchmaking_time)
        if is_near and may_join and not has_search and tracker.expected_members(self.epoch):
            latest = max(due, now) + self.course.matchmaking_time
            self._control = self._begin_step(min(latest, now + 0.9 * patience))
            self._control.keep_open = True

    def _begin_step(self, scheduled_time: float) -> StepControl:
        control = StepControl(
            scheduled_time=scheduled_time,
            deadline=get_dht_time() + self.course.averaging_timeout,
            data_for_gather=MSGPackSerializer.dumps(self.epoch),
        )
        running = self.host.spawn(self.averager.run_step(control))
        control.add_done_callback(lambda step: running.cancel() if step.cancelled() else None)
        return control

    async def _make_global_step(self) -> None:
        course, tracker = self.course, self.tracker
        with tracker.pause_updates():
            if self.begun is None:
                await self._wait_for_newcomers()
                tracker.declare_epoch_over(course.matchmaking_time)
                self._begin_round()
            assert self.begun is not None
            (control, own_mean, samples), self.begun = self.begun, None
            mates = await self._finish_round(control, samples)
            if mates is None and tracker.others_can_come():
                tracker.train_on()
                self._sum += own_mean * samples
                self.samples += samples
                return
            self.record.alone += mates is None
            self.record.alone_in_company += mates is None and self._has_company()
            self.parameters -= course.learning_rate * (own_mean if mates is None else self.averaged)
            self.epoch += 1
            tracker.update_epoch(self.epoch, members=mates or ())
        self.averager.state_sharing.set(priority=self.epoch)

    def _has_company(self) -> bool:
        staying = [each for each in self.swarm.living if math.isnan(each.record.ended)]
        others = [each for each in staying if each is not self and each.tracker.is_introduced]
        return any(each.epoch == self.epoch for each in others)

    async def _wait_for_newcomers(self) -> None:
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        while self.tracker.may_hold(has_reason=self._is_awaited()):
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        self.record.held += loop.time() - began

    def _is_awaited(self) -> bool:
        newcomers = self.averager.state_sharing.slots.on_their_way(asyncio.get_running_loop().time())
        return awaits_newcomers(self.tracker, self.epoch, self.epoch, newcomers)

    def begin_round_if_awaited(self) -> None:
        """While this peer waits elsewhere, contribute to a round in which others wait for it."""
        if self.begun is None and self.tracker.is_awaited(self.course.matchmaking_time):
            self.tracker.declare_epoch_over(in_advance=True)
            self._begin_round()

    def _begin_round(self) -> None:
        """Begin to average with others. What this peer makes from now on counts in the next epoch."""
        own_mean, samples = self._sum / max(1, self.samples), self.samples
        self.begun = self._begin_to_average(own_mean), own_mean, samples
        self._sum = torch.zeros_like(self._sum)
        self.samples = 0

    def _begin_to_average(self, own_mean: torch.Tensor) -> StepControl | None:
        """Returns ``None`` if nobody else is expected."""
        control, self._control = self._control, None
        if not self.tracker.expected_members(self.epoch):
            if control is not None:
                control.cancel()
            return None
        if control is None or control.done() or control.deadline - get_dht_time() < self.course.matchmaking_time:
            if control is not None:
                control.cancel()
            control = self._begin_step(get_dht_time() + self.course.matchmaking_time)
        self.averaged.copy_(own_mean)
        control.weight = float(self.samples)
        control.keep_open = False
        watch_search(control, self.tracker)
        control.allow_allreduce()
        return control

    async def _finish_round(self, control: StepControl | None, samples: int) -> set[PeerID] | None:
        """Returns the other members, or ``None`` if the round came to nothing."""
        if control is None:
            self.tracker.note_round(None)
            return None
        try:
            async with asyncio.timeout(self.course.averaging_timeout):
                await asyncio.wrap_future(control)
        except (ShoalError, TimeoutError, asyncio.CancelledError):
            if not control.done() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                control.cancel()
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
            self.tracker.note_round(None)
            self.record.failed += 1
            return None
        result = control.round
        assert result is not None
        self.tracker.note_round(result)
        self._count(result, samples)
        return set(result.peers) - {*result.failed_peers, self.node.peer_id}

    def _count(self, result: RoundResult, samples: int) -> None:
        self.record.rounds += 1
        self.record.group_sizes[len(result.peers)] += 1
        if len(result.peers) - len(result.failed_peers) > 1:
            self.record.used += samples


TrainerFactory = Callable[["Swarm", Host, DHTNode, float], Trainer]


class Swarm:
    """All peers of one run.

    The nodes share one validator, so that a signature is checked once and not by everybody: it is the same code.
    """

    def __init__(self, network: Network, course: Course) -> None:
        self.network, self.course = network, course
        self.trainers: list[Trainer] = []
        """All that ever were."""
        signatures = SignatureValidator(PrivateKey())
        signatures.accepted = AcceptedRecords(2**18)
        self.validator = CompositeValidator([signatures])

    @property
    def living(self) -> list[Trainer]:
        """Those whose hosts are up."""
        return [trainer for trainer in self.trainers if trainer.host.is_up]

    async def add(
        self,
        samples_per_second: float = 50.0,
        *,
        make: TrainerFactory = Trainer,
        prepare: Callable[[Host], object] = lambda host: None,
        **options: Any,
    ) -> Trainer:
        """Start one more peer, which begins to train.

        Args:
            make: what kind of trainer it is.
            prepare: changes its host before anything runs there.
            options: for :meth:`DHTNode.create`.
        """
        host = self.network.add_host()
        prepare(host)
        nodes = [each.node for each in self.trainers]
        node = await start_dht_node(self.network, host, nodes, record_validator=self.validator, **options)
        trainer = make(self, host, node, samples_per_second)
        self.trainers.append(trainer)
        host.spawn(trainer.live())
        return trainer

    def remove(self, trainer: Trainer, *, silently: bool = False) -> None:
        """Let a peer die: its program ends, or the machine vanishes without a word."""
        trainer.record.ended = asyncio.get_running_loop().time()
        if silently:
            trainer.host.power_off()
        else:
            trainer.host.crash()

    async def dismiss(self, trainer: Trainer) -> None:
        """Let a peer leave in good order."""
        trainer.record.ended = asyncio.get_running_loop().time()
        try:
            await trainer.host.run(trainer.leave())
        except SimulationError:
            return
        finally:
            trainer.host.crash()

    async def close(self) -> None:
        """Let all leave in good order."""
        for trainer in self.living:
            await self.dismiss(trainer)

    def goodput(self, trainers: Iterable[Trainer] | None = None, *, since: float = 0.0) -> float:
        """Which share of the samples that peers could have made were averaged with others.

        Args:
            trainers: of whom; by default of all that ever were.
            since: those that began before this loop time are counted from then on, if :meth:`forget` was called then.
        """
        now, possible, used = asyncio.get_running_loop().time(), 0.0, 0
        for trainer in self.trainers if trainers is None else trainers:
            record = trainer.record
            if math.isnan(record.began):
                continue
            ended = now if math.isnan(record.ended) else record.ended
            possible += max(0.0, ended - max(record.began, since)) * trainer.speed
            used += record.used
        return used / possible if possible else 0.0

    def forget(self) -> float:
        """Begin to count anew: what was done before does not count. Returns the loop time."""
        for trainer in self.trainers:
            trainer.record = Record(began=trainer.record.began, ended=trainer.record.ended)
        return asyncio.get_running_loop().time()
