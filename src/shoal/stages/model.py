"""``StagedModel``: a model in stages, as users hold it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shoal.base.clock import get_dht_time
from shoal.base.closeable import Facade, at_the_door
from shoal.base.logs import quoted, words_of
from shoal.base.reactor import AwaitableFuture, Portal
from shoal.base.tasks import BackgroundTasks, wait_at_most
from shoal.compression import CompressionBase
from shoal.dht.dht import check_dht
from shoal.errors import MicrobatchError, ReactorError
from shoal.optim.options import check_may_train, check_run_id
from shoal.optim.progress.records import count_of_samples
from shoal.optim.progress_tracker import FIRST_LOOK_SECONDS, ProgressTracker
from shoal.optim.setup.training_setup import OptimizerFactory
from shoal.serving.runtime import Runtime
from shoal.serving.task_pool import JobPool
from shoal.serving.tensors import EXACT, form_of, tensors_of
from shoal.stages.backup import StageBackups
from shoal.stages.choice import Measurements
from shoal.stages.compute import StageCompute
from shoal.stages.directory import StageDirectory, StageRecord
from shoal.stages.driver import Brought, Driver, Steps, TrackedDrivers
from shoal.stages.hop import Hop, Patience
from shoal.stages.host import StageHost, StageService
from shoal.stages.moving import finish, next_move, take_place, wait_for_first
from shoal.stages.placement import Move
from shoal.stages.steps import StageNorms, clip_by_global_norm, make_optimizer
from shoal.stages.work import Works

if TYPE_CHECKING:
    from shoal.dht import DHT

logger = logging.getLogger(__name__)

# So many microbatches in a row that were dropped end a loop: it is the model, the data or all peers of a stage. Chosen.
MOST_DROPPED = 10
# Seconds between two looks at what to declare of the own stages (chosen).
DECLARE_SECONDS = 2.0
# Seconds that a stage waits for the norms of others when it clips (chosen: as long as averaging may take).
NORM_SECONDS = 60.0

Microbatch = Any
"""``(inputs, labels)``, or ``(inputs, labels, extras)``."""
Stage = Callable[[], torch.nn.Module]
"""Makes the module of a stage."""


@dataclass(frozen=True)
class _Options:
    """What all parts of a :class:`StagedModel` need."""

    optimizer: OptimizerFactory
    target_batch_size: int
    compression: Sequence[CompressionBase]
    """By boundary: of what leaves stage 0, 1, …"""
    gradient_compression: Sequence[CompressionBase]
    max_staleness: int | None
    """``None`` = synchronous."""
    clip_grad_norm: float | None
    keep_graphs: int
    keep_outputs: int
    autocast: torch.dtype | None
    inner_batch_size: int | None
    optimizer_opts: Mapping[str, Any]
    patience: Patience
    in_flight: int
    seed: int


class StagedModel(Facade):
    """A model that is cut into stages, of which each peer holds one, or a few, or none.

    Microbatches travel from peer to peer through all stages and back. Any number of peers may hold the same stage: they
    average their gradients and make the same steps, as with :class:`~shoal.Optimizer`. Any peer may bring data. ::

        with shoal.StagedModel(dht=dht, run_id="gpt", stages=[make_embedding, make_blocks, make_head], stage="auto",
                               optimizer=partial(torch.optim.AdamW, lr=3e-4), target_batch_size=512) as model:
            for losses in model.train(microbatches):
                print(model.local_epoch, losses.mean())

    Args:
        dht: connected DHT of this peer.
        run_id: name of the training run; no dots.
        stages: for each stage, a function that makes its module. A peer calls those of its own stages only. The output
            of a stage is the input of the next one: a tensor, or a tuple or dictionary of arguments, nested as they
            like. The last one takes the labels as well, and returns one loss for each sample.
        stage: the stage that this peer holds, or a list of several; ``"auto"``: where it is needed most; ``None``: it
            only sends microbatches.
        optimizer: makes a torch optimizer from parameters, such as ``partial(torch.optim.AdamW, lr=3e-4)``.
        target_batch_size: samples of all drivers together that make a step.
        compression: codec of what stages send to the next one, or a list with one for each of the boundaries. Labels
            and integers are never rounded.
        gradient_compression: the same for the way back; default: as ``compression``.
        synchronous: each microbatch meets the parameters of its own step in all stages, as in a single process.
            Otherwise nobody waits for steps.
        max_staleness: by how many steps a microbatch may be late, if not ``synchronous``.
        clip_grad_norm: the largest norm of the gradients of all stages together.
        in_flight: microbatches of this driver that are on their way at a time; default: enough to keep all stages busy.
        keep_graphs: bytes of graphs that are kept on the device; what does not fit is computed again.
        keep_outputs: bytes of tensors that a stage keeps for repairs; beyond them it accepts nothing.
        autocast: compute in this type where torch considers that safe.
        inner_batch_size: train each stage with :class:`~shoal.DiLoCo`, whose inner steps have at least as many samples.
        optimizer_opts: further options of the optimizer of each stage.
        request_timeout: seconds without a sign of life after which a peer has failed.
        microbatch_timeout: seconds that stages may work on a microbatch.
        seed: from which the random numbers of this driver's microbatches follow; default: a random one.
        rebalance_every: with ``stage="auto"``, a peer of the richest stage moves to the poorest within about this many
            seconds, or within half a minute if that one has no peer left; ``None``: this peer stays where it is.
            Gradients that it has not averaged yet are in the next step, except if it moves to a stage without peers.
        backup: 1: while a stage has a single peer, one of a neighbouring stage keeps its state, as far as that is this
            peer's part; 0: it does not.
        backup_every: after how many steps such a copy is replaced by a newer one.
        backup_folder: where copies are kept; default: in memory.

    Raises:
        ValueError, TypeError: an option is impossible, or options contradict each other.
        NotAMemberError: the run is private, and this peer's token does not allow to train.
        ReactorError: the DHT is shut down.
    """

    instead_of_a_copy = "make another one with the same stages; it downloads their state"

    @at_the_door
    def __init__(
        self,
        *,
        dht: DHT,
        run_id: str,
        stages: Sequence[Stage],
        stage: str | int | Sequence[int] | None = "auto",
        optimizer: OptimizerFactory,
        target_batch_size: int,
        compression: CompressionBase | Sequence[CompressionBase] | None = None,
        gradient_compression: CompressionBase | Sequence[CompressionBase] | None = None,
        synchronous: bool = True,
        max_staleness: int = 1,
        clip_grad_norm: float | None = None,
        in_flight: int | None = None,
        keep_graphs: int = 2**30,
        keep_outputs: int = 2**30,
        autocast: torch.dtype | None = None,
        inner_batch_size: int | None = None,
        optimizer_opts: Mapping[str, Any] | None = None,
        request_timeout: float = 5.0,
        microbatch_timeout: float = 120.0,
        seed: int | None = None,
        rebalance_every: float | None = 300.0,
        backup: int = 1,
        backup_every: int = 10,
        backup_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        check_dht(dht)
        check_run_id(run_id)
        check_may_train(dht)
        self.dht, self.run_id, self.stages = dht, run_id, list(stages)
        count = len(self.stages)
        if not count or not all(callable(each) and not isinstance(each, torch.nn.Module) for each in self.stages):
            raise TypeError("stages must be a list of functions that make a module each, such as [make_a, make_b]")
        if not callable(optimizer):
            raise TypeError(
                "optimizer must be a function that makes one from parameters, such as partial(torch.optim.AdamW, "
                f"lr=3e-4), got {quoted(optimizer)}"
            )
        if not 0 < request_timeout < microbatch_timeout:
            raise ValueError(
                f"request_timeout must be shorter than microbatch_timeout, got {request_timeout}, {microbatch_timeout}"
            )
        if max_staleness < 0 or (in_flight is not None and in_flight < 1):
            raise ValueError(f"impossible: max_staleness={max_staleness}, in_flight={in_flight}")
        if (rebalance_every is not None and not rebalance_every > 0) or backup not in (0, 1):
            raise ValueError(
                f"rebalance_every must be seconds or None, and backup 0 or 1: got {rebalance_every!r}, {backup!r}"
            )
        codecs = _codecs("compression", compression, count)
        self.options = _Options(
            optimizer=optimizer,
            target_batch_size=count_of_samples("target_batch_size", target_batch_size),
            compression=codecs,
            gradient_compression=codecs
            if gradient_compression is None
            else _codecs("gradient_compression", gradient_compression, count),
            max_staleness=None if synchronous else max_staleness,
            clip_grad_norm=clip_grad_norm,
            keep_graphs=keep_graphs,
            keep_outputs=keep_outputs,
            autocast=autocast,
            inner_batch_size=inner_batch_size,
            optimizer_opts=optimizer_opts or {},
            patience=Patience(request_timeout, microbatch_timeout),
            in_flight=in_flight or 2 * count + 2,
            seed=random.getrandbits(48) if seed is None else seed,
        )
        wanted = _wanted_stages(stage, count)
        if dht.client_mode and wanted != []:
            raise ValueError("a peer that others cannot call cannot hold a stage: leave out client_mode, or stage=None")
        if len(wanted or ()) and clip_grad_norm is not None and inner_batch_size is not None:
            raise ValueError("clip_grad_norm needs the gradients of a step, which DiLoCo does not have: leave one out")
        self.be_the_only(f"a StagedModel with run_id {run_id!r}", dht)
        self.modules: dict[int, torch.nn.Module] = {}
        """The modules of this peer, by number of the stage. With ``stage="auto"``, that changes when the peer moves."""
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._runtimes: dict[torch.device, tuple[JobPool, Runtime]] = {}
        self._tracker: ProgressTracker | None = None
        self._driver: Driver | None = None
        self._backups: StageBackups | None = None
        self._moving: threading.Thread | None = None
        self._portal = Portal(f"StagedModel of run {run_id!r}")
        self._network = self._portal.call(_Network.start(self))
        self._portal.on_close(self._network.stop)
        try:
            if backup and wanted != []:
                backups = StageBackups(
                    dht, run_id, self._network.directory, backup_every=backup_every, folder=backup_folder
                )
                self._backups = backups
            for number in [self._portal.call(self._network.choose_stage())] if wanted is None else wanted:
                self._hold(number)
            if self._backups is not None:
                self._backups.start()
            if wanted is None and rebalance_every is not None:
                self._moving = threading.Thread(
                    target=self._keep_moving, args=[rebalance_every], name=f"stages of run {run_id}", daemon=True
                )
                self._moving.start()
        except BaseException:
            self.shutdown()
            raise

    # --- the stages of this peer --------------------------------------------------------------------------------------

    def _hold(self, number: int, *, instead_of: int | None = None) -> None:
        """Make the module and the optimizer of a stage, and begin to compute it for others."""
        # Nobody can offer a state and train, so the copy goes first; and the place is taken before another one is left.
        state = None if self._backups is None else self._backups.release(number)
        self._portal.call(self._network.announce(number))
        if instead_of is not None:
            self._leave(instead_of)
        module, options = self.stages[number](), self.options
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"stage {number} must make a torch.nn.Module, got {type(module).__name__}")
        own = {id(parameter) for parameter in module.parameters()}
        for other, known in self.modules.items():
            if any(id(parameter) in own for parameter in known.parameters()):
                raise ValueError(
                    f"stages {other} and {number} share a parameter: each stage is stepped by itself, so tied "
                    "parameters must be in one stage"
                )
        self.modules[number] = module
        optimizer = make_optimizer(
            self.dht,
            self.run_id,
            number,
            module,
            optimizer=options.optimizer,
            target_batch_size=options.target_batch_size,
            synchronous=options.max_staleness is None,
            inner_batch_size=options.inner_batch_size,
            **options.optimizer_opts,
        )
        try:
            if state is not None and optimizer is not None:
                optimizer.load_state(state)
            device = next((each.device for each in itertools.chain(module.parameters(), module.buffers())), None)
            jobs = self._jobs_of(device or torch.device("cpu"))
            self._portal.call(self._network.hold(number, module, optimizer, jobs))
            logger.info("this peer holds stage %d of run %r", number, self.run_id)
        except BaseException:
            if optimizer is not None:
                optimizer.shutdown()
            raise

    def _leave(self, number: int) -> None:
        """Hold a stage no more."""
        self._portal.call(self._network.leave(number))
        self.modules.pop(number, None)

    def _keep_moving(self, every: float) -> None:
        """Hold another stage whenever this peer is needed there more. Runs in a thread until this is shut down."""
        try:
            while self._network.is_auto:
                move = self._portal.call(self._network.wait_for_move(every))
                lost = self._portal.call(self._network.finish(move))
                logger.warning(
                    "this peer moves from stage %d to stage %d, which needs it more%s",
                    *(move.source, move.target, f"; the gradients of {lost} samples are lost" if lost else ""),
                )
                self._move(move)
        except (ReactorError, CancelledError):
            logger.debug("shut down during a move")
        except Exception:
            logger.exception("this peer holds no stage any more: start it again")

    def _move(self, move: Move) -> None:
        try:
            self._hold(move.target, instead_of=move.source)
        except (ReactorError, CancelledError):
            raise
        except Exception as e:
            logger.warning(
                "this peer cannot hold stage %d, so it returns to stage %d and stays there: %s: %s",
                *(move.target, move.source, type(e).__name__, words_of(e)),
            )
            self._network.is_auto = False
            self._leave(move.target)
            self._hold(move.source)

    def _jobs_of(self, device: torch.device) -> JobPool:
        """The computing thread of a device, which all stages there share."""
        if device not in self._runtimes:
            jobs = JobPool(f"stages of run {self.run_id!r}")
            runtime = Runtime({}, pools=[jobs])
            runtime.start()
            self._runtimes[device] = jobs, runtime
        return self._runtimes[device][0]

    @property
    def held(self) -> list[int]:
        """The stages that this peer holds."""
        return sorted(self.modules)

    @property
    def local_epoch(self) -> int:
        """The step that this peer is at, with its stages and as a driver."""
        steps = [host.epoch for host in self._network.service.hosts.values()]
        return min([*steps, *([] if self._driver is None else [self._driver.steps.step])], default=0)

    @at_the_door
    def serve(self) -> None:
        """Compute for others until Ctrl-C, or until this is shut down.

        Raises:
            ValueError: this peer holds no stage.
        """
        if not self.modules and self._moving is None:
            raise ValueError("this peer holds no stage: give stage='auto' or a number to compute for others")
        with contextlib.suppress(KeyboardInterrupt):
            while self.is_alive():
                self._closing.wait(0.5)

    # --- driving ------------------------------------------------------------------------------------------------------

    @at_the_door
    def train(self, microbatches: Iterable[Microbatch]) -> Iterator[torch.Tensor]:
        """Train on microbatches; several are on their way at a time.

        Args:
            microbatches: each is ``(inputs, labels)`` or ``(inputs, labels, extras)``, with ``extras`` by number of the
                stage: a dictionary of further arguments of its module. They travel to that stage only.

        Yields:
            The losses of the samples of each microbatch, in order. Those of one that was dropped are left out; the
            metrics count it.

        Raises:
            MicrobatchError: many in a row were dropped, or all of them.
        """
        self._begin_to_drive()
        return self._send(microbatches, trains=True)

    @at_the_door
    def evaluate(self, microbatches: Iterable[Microbatch]) -> Iterator[torch.Tensor]:
        """The same without gradients, and with the modules in ``eval()`` mode."""
        self._begin_to_drive()
        return self._send(microbatches, trains=False)

    @at_the_door
    def __call__(self, inputs: Any, labels: Any = None, extras: Mapping[int, Mapping[str, Any]] | None = None) -> Any:
        """The losses of one microbatch, for those who write their own loop: what comes before the first stage gets its
        gradients with ``losses.mean().backward()``. The stages have theirs already.

        Under ``torch.no_grad()`` it is an evaluation.

        Raises:
            MicrobatchError: the microbatch was dropped; the text says why.
        """
        self._begin_to_drive()
        trains = torch.is_grad_enabled()
        form = _parsed((inputs, labels, extras), len(self.stages))

        def send() -> Brought:
            return _result_of(self._submit(*form, trains=trains))

        leaves = [each for each in tensors_of(inputs) if each.requires_grad]
        needed = [each.requires_grad for each in tensors_of(inputs)]
        anchor = torch.zeros((), device="cpu", requires_grad=True)  # inputs may be integers: losses need a graph anyway
        losses: torch.Tensor = _Through.apply(send, needed, anchor, *leaves)  # type: ignore[no-untyped-call]
        return losses

    def _send(self, microbatches: Iterable[Microbatch], *, trains: bool) -> Iterator[torch.Tensor]:
        has_any, dropped, error = False, 0, None
        for future in self._in_order(microbatches, trains=trains):
            try:
                losses = _result_of(future).losses
            except MicrobatchError as e:
                dropped, error = dropped + 1, e
                if dropped < MOST_DROPPED:
                    continue
                break
            has_any, dropped = True, 0
            yield losses
        if error is not None and (dropped >= MOST_DROPPED or not has_any):
            raise MicrobatchError(f"nothing comes through, {dropped} times in a row: {error}") from error
        if trains and self.is_alive():  # what comes next may save the model, or end this peer
            self._portal.call(self._network.settle())

    def _in_order(self, microbatches: Iterable[Microbatch], *, trains: bool) -> Iterator[AwaitableFuture[Brought]]:
        """Send microbatches, and hand out what becomes of them in the same order."""
        waiting: deque[AwaitableFuture[Brought]] = deque()
        # If the caller stops early, what is on its way still comes through: stages count it all or not at all.
        for each in microbatches:
            waiting.append(self._submit(*_parsed(each, len(self.stages)), trains=trains))
            # One that takes long holds up the losses of those after it, but not them.
            while waiting and (waiting[0].done() or len(waiting) >= 2 * self.options.in_flight):
                yield waiting.popleft()
        yield from waiting

    def _submit(self, inputs: Any, labels: Any, extras: Any, *, trains: bool) -> AwaitableFuture[Brought]:
        assert self._driver is not None
        return self._portal.submit(self._driver.carry(inputs, labels, extras, trains=trains))

    def _begin_to_drive(self) -> None:
        with self._lock:
            self._portal.check_open()
            if self._driver is None:
                if self._tracker is None:  # otherwise this was interrupted the last time
                    target = self.options.target_batch_size
                    self._tracker = ProgressTracker(self.dht, self.run_id, target, start=True)
                tracker = self._tracker
                tracker.fetched_global_progress_this_epoch.wait(FIRST_LOOK_SECONDS)
                self._driver = self._portal.call(self._network.drive(tracker))
                tracker.announce()

    # --- the end ------------------------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        """Whether it works."""
        return not self._portal.closed

    def shutdown(self, timeout: float | None = None) -> None:
        """Leave the run. What this peer has in flight is repaired by others. Idempotent.

        Args:
            timeout: the longest time to wait for it, in seconds.
        """
        self._closing.set()
        if self._backups is not None:
            self._backups.stop()
        self._portal.close(timeout)
        if self._moving is not None:
            self._moving.join(timeout)
        if self._tracker is not None:
            self._tracker.shutdown(timeout)
        for _, runtime in self._runtimes.values():
            runtime.shutdown()
        self._runtimes.clear()


class _Network:
    """What a :class:`StagedModel` is in the event loop."""

    def __init__(self, model: StagedModel) -> None:
        p2p = model.dht.p2p
        self.run_id, self.count, self.options, self.p2p = model.run_id, len(model.stages), model.options, p2p
        self.directory = StageDirectory(model.dht.node, p2p, model.run_id, self.count)
        self.service = StageService(p2p, model.run_id, self.directory, self.options.patience)
        self._measured = Measurements()
        self._computes: dict[int, StageCompute] = {}
        self.is_auto = False
        """Whether it may move."""
        self._steps: Steps | None = None
        self._drivers: TrackedDrivers | None = None
        self._tasks = BackgroundTasks(logger, f"the StagedModel of run {model.run_id!r}")

    @classmethod
    async def start(cls, model: StagedModel) -> _Network:
        network = cls(model)
        network.directory.start()
        await network.service.start()
        network._tasks.spawn(network._keep_declaring())
        return network

    async def stop(self) -> None:
        """Leave: first nobody sends anything more."""
        await self._tasks.close()
        if self._steps is not None:
            await self._steps.stop()
        if self._drivers is not None:
            self._drivers.close()
        await self.directory.stop()
        await self.service.close(self.options.patience.request_timeout)
        # At the same time: a step that is being made ends only with its optimizer.
        hosts, computes = [*self.service.hosts.values()], [*self._computes.values()]
        await asyncio.gather(*(each.close() for each in hosts), *(each.close() for each in computes))

    def _hop_to(self, stage: int) -> Hop:
        codec = EXACT if stage == 0 else self.options.compression[stage - 1]
        shared = self.directory, self._measured, self.service, self.options.patience
        return Hop(stage, self.count, *shared, self.p2p.metrics, self.p2p.rng, codec)

    # --- stages -------------------------------------------------------------------------------------------------------

    async def choose_stage(self) -> int:
        """Take a place where one more peer is needed most."""
        self.is_auto = True
        return await take_place(self.directory, self.p2p.peer_id)

    async def announce(self, number: int) -> None:
        """Tell others that this peer is about to hold a stage, unless they know."""
        if self.p2p.peer_id not in self.directory.peers_of(number):
            await self.directory.mark(number, is_joining=True, serves_auto=self.is_auto, since=get_dht_time())
            await self.directory.declare(StageRecord(stage=number, epoch=0, rate=0.0))

    async def hold(self, number: int, module: torch.nn.Module, optimizer: Any, jobs: JobPool) -> None:
        """Begin to compute a stage for others, with the newest state."""
        options = self.options
        compute = StageCompute(
            number,
            self.count,
            module,
            optimizer,
            jobs,
            keep_graphs=options.keep_graphs,
            autocast=options.autocast,
            inner_batch_size=None if optimizer is None else options.inner_batch_size,
        )
        self._computes[number] = compute
        norms = None
        if options.clip_grad_norm is not None and optimizer is not None:
            norms = StageNorms(number, self.count, self.service.ask_norm, NORM_SECONDS)
            clip_by_global_norm(optimizer, options.clip_grad_norm, norms.gather)
        if not compute.epoch:
            await wait_for_first(self.directory, self.p2p.peer_id, number)
        await compute.join()
        host = StageHost(
            number,
            self.p2p.peer_id,
            self.directory,
            compute,
            Works(options.keep_outputs, options.patience.microbatch_timeout),
            None if number + 1 == self.count else self._hop_to(number + 1),
            options.patience,
            norms=norms,
            max_staleness=options.max_staleness,
            codec=EXACT if number == 0 else options.gradient_compression[number - 1],
        )
        host.start()
        self.service.hosts[number] = host
        await self.directory.mark(number, serves_auto=self.is_auto, since=get_dht_time())
        await self.directory.declare(host.record())
        self._watch()

    async def wait_for_move(self, every: float) -> Move:
        """Wait until this peer is to move to another stage."""
        return await next_move(self.directory, self.p2p.peer_id, every, self.p2p.rng)

    async def finish(self, move: Move) -> int:
        """Finish what there is of a stage that this peer is about to leave; returns the samples that are lost."""
        host, compute = self.service.hosts[move.source], self._computes[move.source]
        patience = self.options.patience.microbatch_timeout
        return await finish(self.directory, host, compute, move, patience)

    async def leave(self, number: int) -> None:
        """Hold a stage no more. Callers that still wait are told."""
        host, compute = self.service.hosts.pop(number, None), self._computes.get(number)
        await self.directory.withdraw(number)
        await asyncio.gather(*(each.close() for each in (host, compute) if each is not None))
        self._computes.pop(number, None)
        self._watch()

    def _watch(self) -> None:
        """Know the peers to which this one sends, and those that it tells about steps."""
        is_everywhere = self._steps is not None or self.options.clip_grad_norm is not None
        around = {number + side for number in self.service.hosts for side in (-1, 0, 1)}
        self.directory.watch([each for each in range(self.count) if is_everywhere or each in around])

    async def _keep_declaring(self) -> None:
        while True:
            for host in [*self.service.hosts.values()]:
                await self.directory.declare(host.record())
            await asyncio.sleep(DECLARE_SECONDS)

    # --- driving ------------------------------------------------------------------------------------------------------

    async def drive(self, tracker: ProgressTracker) -> Driver:
        """Begin to bring microbatches."""
        options = self.options
        self._drivers = TrackedDrivers(tracker)
        self._steps = Steps(
            self._drivers,
            options.target_batch_size,
            lambda step: self.service.close_step(step, self.count),
            is_synchronous=options.max_staleness is None,
        )
        self._watch()
        await self.directory.read_all()
        self._steps.start()
        return Driver(
            self.p2p.peer_id.to_bytes(),
            self._hop_to(0),
            self._steps,
            in_flight=options.in_flight,
            metrics=self.p2p.metrics,
            seed=options.seed,
            first=self.p2p.rng.getrandbits(48),  # another process with this identity may have been here before
        )

    async def settle(self) -> None:
        """Wait until the stages of this peer have made the steps that are over for all drivers."""
        assert self._steps is not None
        step, now = await self._steps.settle(), asyncio.get_running_loop().time
        until = now() + self.options.patience.microbatch_timeout
        for host in [*self.service.hosts.values()]:
            while host.epoch < step and not host.is_leaving and now() < until:
                await wait_at_most(host.changes.next, until - now())
            if host.epoch < step and not host.is_leaving:
                logger.warning("stage %d has not made step %d yet: do not save it before it has", host.stage, step - 1)


def _result_of(future: AwaitableFuture[Brought]) -> Brought:
    try:
        return future.result()
    except CancelledError:
        raise ReactorError("this StagedModel was shut down while microbatches were on their way") from None


class _Through(torch.autograd.Function):
    """All stages, as autograd sees them."""

    @staticmethod
    def forward(ctx: Any, send: Callable[[], Brought], needed: Sequence[bool], *leaves: torch.Tensor) -> torch.Tensor:
        brought = send()
        grads = [grad for grad, is_needed in zip(brought.grads, needed, strict=False) if is_needed]
        devices = [each.device for each in leaves[1:]]  # the first one is the anchor
        ctx.grads = [g if g is None else g.to(device) for g, device in zip(grads, devices, strict=False)]
        return brought.losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        [grad] = grad_outputs
        if not torch.equal(grad, grad[:1].expand_as(grad)):
            raise ValueError("the stages have used the mean of the losses: call losses.mean().backward()")
        scale = float(grad.sum())
        return None, None, None, *(each if each is None else each * scale for each in ctx.grads)


def _parsed(microbatch: Microbatch, count: int) -> tuple[Any, Any, Mapping[int, Mapping[str, Any]] | None]:
    """The inputs, the labels and the extras of a microbatch for so many stages.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(microbatch, tuple | list) or len(microbatch) not in (2, 3):
        raise TypeError(f"a microbatch must be (inputs, labels) or (inputs, labels, extras), got {type(microbatch)}")
    inputs, labels, extras = (*microbatch, None)[:3]
    form_of([inputs, labels, *(dict(each) for each in (extras or {}).values())])  # raises if it cannot be sent
    tensors = tensors_of(inputs)
    if not tensors or not tensors[0].dim() or not len(tensors[0]):
        got = f"the shape {tuple(tensors[0].shape)}" if tensors else "no tensor"
        raise ValueError(
            f"the first tensor of the inputs must have the samples of a microbatch as its first dimension, got {got}"
        )
    if beyond := [each for each in extras or {} if not 0 <= each < count]:
        raise ValueError(f"arguments for stage {beyond[0]!r}: there are stages 0 to {count - 1}")
    return inputs, labels, extras


def _codecs(
    name: str, given: CompressionBase | Sequence[CompressionBase] | None, count: int
) -> Sequence[CompressionBase]:
    if isinstance(given, Sequence):
        if len(given) != count - 1:
            raise ValueError(
                f"{name} must be one codec, or one for each of the {count - 1} boundaries, got {len(given)}"
            )
        return list(given)
    return [given or EXACT] * max(1, count - 1)


def _wanted_stages(stage: str | int | Sequence[int] | None, count: int) -> list[int] | None:
    """The stages that the user wants; ``None``: the one that is needed most."""
    if stage == "auto":
        return None
    wanted = [] if stage is None else [stage] if isinstance(stage, int) else [*stage]
    if isinstance(stage, str | bool) or not all(isinstance(each, int) and 0 <= each < count for each in wanted):
        raise ValueError(
            f"stage must be 'auto', a number from 0 to {count - 1}, a list of them, or None; got {stage!r}"
        )
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"stage {stage!r} names a stage twice")
    return wanted
