"""An optimizer whose steps all peers of a run make together. It holds the user's interface, counts batches, and decides
when to step and when to catch up; :class:`~shoal.optim.global_step.GlobalStep` makes the step."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging import Aggregation, DecentralizedAverager, RoundResult, StepControl
from shoal.averaging.state.download import State
from shoal.base import standby
from shoal.base.closeable import at_the_door
from shoal.base.logs import counted
from shoal.compression import CompressionBase
from shoal.optim.consistency import ConsistencyCheck, OtherTensors
from shoal.optim.global_step import GlobalStep
from shoal.optim.grad_averager import (
    GradientAverager,
    GradientAveragerFactory,
    check_has_no_momentum,
    make_averaged_grads,
)
from shoal.optim.grad_scaler import GradScaler, LossScaling
from shoal.optim.gradient_accumulator import MissingGradients
from shoal.optim.joint_optimizer import Auxiliary, JointOptimizer, option, uncompiled
from shoal.optim.options import DEFAULT_GRAD_AVERAGER, Options, resolved_by
from shoal.optim.progress.run_settings import (
    GRADIENT_OPTIONS,
    GROUPS,
    OPTIMIZER,
    STATE_OPTIONS,
    RunSettings,
    settings_of,
    settings_of_averager,
)
from shoal.optim.progress_tracker import LocalTrainingProgress, ProgressTracker
from shoal.optim.recovery.when import Synchronization
from shoal.optim.report import Reporting
from shoal.optim.setup.devices import BatchesAhead
from shoal.optim.setup.optimizer_state import TorchOptimizer, zero_gradients
from shoal.optim.setup.schedules import describe_schedule
from shoal.optim.setup.training_setup import (
    OptimizerFactory,
    Parameters,
    ParamGroups,
    SchedulerFactory,
    listed,
    main_groups,
    main_parameters,
)
from shoal.optim.setup.training_state import OWN
from shoal.optim.state_averager import ZERO_GRAD_SET_TO_NONE_DEFAULT, CheckState, TrainingStateAverager

if TYPE_CHECKING:
    from shoal.dht import DHT

logger = logging.getLogger(__name__)


class Optimizer(JointOptimizer):
    """Steps a model together with all peers of the same run. Use it in a ``with`` block, or call :meth:`shutdown`.

    Each peer accumulates gradients of its own batches. When all peers together have ``target_batch_size`` samples,
    they average their gradients, weighted by their samples, and all make the same step: one *epoch*. Peers may join and
    leave at any time: a newcomer downloads the state of another peer, a peer that is cut off continues with its own
    gradients, and a peer that has fallen behind downloads the state again.

    Args:
        dht: connected DHT of this peer.
        run_id: name of the training run; no dots.
        target_batch_size: samples of all peers together that make a step.
        batch_size_per_step: samples in each call of :meth:`step`; or give ``batch_size`` there.
        optimizer: a torch optimizer, or a function that makes one from parameter groups.
        params: parameters or groups; required with a function.
        scheduler: learning rate schedule over epochs, or a function that makes it.
        matchmaking_time: for how many seconds a group waits for members that do not come, and how many seconds before
            the end of an epoch peers begin to look for a group.
        averaging_timeout: a round of averaging is given up after this many seconds.
        allreduce_timeout: the same for the all-reduce alone; default: ``averaging_timeout``.
        next_chunk_timeout: a member is given up after this many seconds of silence; must be longer than a batch takes.
            Default: ``matchmaking_time``, but between a quarter and a third of ``averaging_timeout``.
        load_state_timeout: a download of the state is given up after this many seconds.
        reuse_grad_buffers: accumulate in ``parameter.grad`` itself; then never zero gradients.
        offload_optimizer: keep single precision parameters and optimizer statistics on the CPU. Default: yes, if
            ``optimizer`` is a function.
        delay_optimizer_step: step in the background, one step later; default: as ``delay_grad_averaging``.
        delay_grad_averaging: average gradients in the background, too.
        delay_state_averaging: average parameters in the background.
        average_state_every: average parameters only once in this many epochs.
        use_local_updates: step at once with local gradients, and average only parameters.
        client_mode: connect to others, but accept no connections; default: as in the DHT.
        auxiliary: help others to average, without own batches: call :meth:`step` without arguments now and then.
        grad_compression: codec for gradients.
        grad_averager: function that makes the gradient averager, see its ``get_factory``; ``None`` = local updates.
            Default: :class:`~shoal.optim.grad_averager.GradientAverager`, which averages exactly.
        grad_averager_factory: another name of ``grad_averager``.
        use_ext_grad_buffer: let newcomers download the gradient averager's buffers with the parameters, if it has any.
            Must be the same in all peers.
        state_averaging_compression: codec for averaging parameters.
        load_state_compression: codec for downloads of the state.
        average_opt_statistics: names of optimizer statistics that are averaged with the parameters.
        extra_tensors: further tensors that are averaged with the parameters.
        model: the module that the parameters belong to. Its buffers, and its parameters that the optimizer does not
            have, are averaged with the parameters, too, and given to newcomers; frozen parameters are not.
        check_state: can refuse a downloaded state, for example by the loss of a batch. It is called in the thread that
            calls ``step()``; see :class:`~shoal.optim.state_averager.TrainingStateAverager`.
        aggregation: how the gradients of all peers become one. ``None`` = their mean; with ``ClipToMedianNorm()``, for
            example, a minority of faulty or lying peers does not decide. See :mod:`shoal.averaging.aggregation`. Must
            be the same in all peers.
        state_aggregation: the same for parameters and what is averaged with them, such as ``TrimmedMean(0.3)``.
        peer_momentum: send momentum with this factor, such as 0.9, instead of gradients, so that small lies stand out,
            too. The optimizer must have no momentum of its own. Must be the same in all peers.
        frozen_base: names the frozen model beneath the parameters, such as by :func:`shoal.transformers.fingerprint`.
            It is not sent, and may have another precision in each peer: its values are not compared. A peer with
            another base joins no group and gets no state, and both sides are told.
        guard: how far others are believed. ``"members"``: the run trusts its members, and withstands strangers and
            faults. ``"open"``, for a run that anybody may join: what a peer claims is bounded by what it has delivered,
            which costs a fast newcomer its first rounds. The same in all peers.
        on_mismatch: what :meth:`step` does if this peer's settings are not those of its run: ``"raise"``
            :class:`~shoal.errors.SettingsMismatch`, or ``"warn"`` and continue.
        state_download_rate: the most bytes per second that this peer downloads of a state when it joins or catches up.
            Default: no limit.
        averager_opts: further options of both averagers.
        tracker_opts: further options of the progress tracker.
        performance_ema_alpha: weight of the newest measurement in the estimate of this peer's speed, from 0 to 1.
        shutdown_timeout: how long :meth:`shutdown` may take to leave the run in order, in seconds.
        verbose: log what happens at level INFO.

    Raises:
        ValueError, AssertionError: options contradict each other, something cannot be trained with others, or another
            Optimizer with this ``run_id`` is active on this DHT.
        TypeError: an option has a wrong type.
        ReactorError: the DHT is shut down.
    """

    kind = "Optimizer"
    options: Options
    # Options that programs read as attributes.
    target_batch_size: int = option("target_batch_size")
    batch_size_per_step: int | None = option("batch_size_per_step")
    status_loglevel: int = option("status_loglevel")
    matchmaking_time: float = option("matchmaking_time")
    averaging_timeout: float = option("averaging_timeout")
    allreduce_timeout: float = option("allreduce_timeout")
    next_chunk_timeout: float = option("next_chunk_timeout")
    load_state_timeout: float = option("load_state_timeout")
    shutdown_timeout: float = option("shutdown_timeout")
    average_state_every: int = option("average_state_every")
    reuse_grad_buffers: bool = option("reuse_grad_buffers")
    offload_optimizer: bool = option("offload_optimizer")
    use_ext_grad_buffer: bool = option("use_ext_grad_buffer")
    use_local_updates: bool = option("use_local_updates")
    delay_optimizer_step: bool = option("delay_optimizer_step")
    delay_grad_averaging: bool = option("delay_grad_averaging")
    delay_state_averaging: bool = option("delay_state_averaging")
    instead_of_a_copy = "save its state_dict()"

    @at_the_door
    @resolved_by(Options)
    def __init__(
        self,
        *,
        dht: DHT,
        run_id: str,
        target_batch_size: int,
        batch_size_per_step: int | None = None,
        optimizer: TorchOptimizer | OptimizerFactory,
        params: Parameters | ParamGroups | None = None,
        scheduler: Any | SchedulerFactory | None = None,
        matchmaking_time: float | None = 15.0,
        averaging_timeout: float | None = 60.0,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        load_state_timeout: float = 600.0,
        reuse_grad_buffers: bool = False,
        offload_optimizer: bool | None = None,
        delay_optimizer_step: bool | None = None,
        delay_grad_averaging: bool = False,
        delay_state_averaging: bool = True,
        average_state_every: int = 1,
        use_local_updates: bool = False,
        client_mode: bool | None = None,
        auxiliary: bool = False,
        grad_compression: CompressionBase | None = None,
        grad_averager: GradientAveragerFactory | None = DEFAULT_GRAD_AVERAGER,
        grad_averager_factory: GradientAveragerFactory | None = None,
        use_ext_grad_buffer: bool | None = None,
        state_averaging_compression: CompressionBase | None = None,
        load_state_compression: CompressionBase | None = None,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
        averager_opts: dict[str, Any] | None = None,
        tracker_opts: dict[str, Any] | None = None,
        performance_ema_alpha: float = 0.1,
        shutdown_timeout: float = 5,
        verbose: bool = False,
        model: torch.nn.Module | None = None,
        check_state: CheckState | None = None,
        aggregation: Aggregation | None = None,
        state_aggregation: Aggregation | None = None,
        peer_momentum: float = 0.0,
        frozen_base: str | None = None,
        guard: str = "members",
        on_mismatch: str = "raise",
        state_download_rate: float = math.inf,
    ) -> None:
        params, options = listed(params), self.options
        main = main_parameters(optimizer, params)
        remainder = self._find_remainder(model, main, extra_tensors)
        if frozen_base is not None:
            remainder.leave_at_home(frozen_base, buffers=model is None)
        extra = [] if model is None else remainder.take_what_changes()
        self._found_names = remainder.names
        self.be_the_only(f"an Optimizer with run_id {run_id!r}", dht)
        self.dht, self._closing = dht, threading.Event()
        self._scaling = LossScaling(in_place=options.reuse_grad_buffers)
        self._batches, self._missing = BatchesAhead(main), MissingGradients()
        self.tracker = self._make_progress_tracker(options.target_batch_size, **options.for_tracker())
        # Groups of one run end an epoch at different times.
        self.tracker.board.moves_together = not options.mode.overlaps and not options.draws_groups
        self.state_averager = self._make_state_averager(
            optimizer=optimizer,
            params=params,
            scheduler=scheduler,
            extra_tensors=[*extra_tensors, *(tensor for _, tensor in extra)],
            **options.for_state(),
        )
        self.state_averager.names["extra"] = [name for name, _ in extra]
        self.grad_averager: GradientAverager | None = None
        if options.mode.averages_gradients:
            factory = options.grad_averager_factory
            self.grad_averager = self._make_gradient_averager(factory, **options.for_gradients())
            self._connect_gradients(self.grad_averager)
        # Peers of different groups share no rounds although they train one model: rounds would not show a split.
        if not options.draws_groups:
            self.tracker.compare_rounds()
            self.state_averager.lineage_keeper = self.tracker
        self.state_averager.is_first = self.tracker.is_first
        self._comparison = ConsistencyCheck(self.state_averager, remainder, options.mode.averages_gradients)
        averagers = self.state_averager, self.grad_averager
        self.global_step = GlobalStep(options, *averagers, self.tracker, self._comparison, self._closing)
        if model is not None:
            self.name_parameters(model)
        searches = [each.schedule_step for each in reversed(averagers) if each is not None]
        self._auxiliary = Auxiliary(searches, options.averaging_timeout) if auxiliary else None
        timeouts = options.averaging_timeout, load_state_timeout
        self._synchronization = Synchronization(*averagers, self.tracker, self.global_step, *timeouts, self._closing)
        self._reporting = Reporting(dht, run_id, self.tracker, target_batch_size=options.target_batch_size)
        self._main_groups = main_groups(self.opt, self.state_averager.main_parameters)
        self._become_torch_optimizer(dict(self.opt.defaults))
        self._schema_hash = self._compute_schema_hash()
        self._begin()

    # --- its parts, which subclasses may make differently -------------------------------------------------------------

    def _make_progress_tracker(self, target_batch_size: int, **kwargs: Any) -> ProgressTracker:
        """Make the tracker, the first of the three parts. A subclass may start the parts, or leave that to this class.

        Args:
            target_batch_size: samples of all peers together that make an epoch.
            kwargs: options of the tracker, except those that follow from attributes of this optimizer.
        """
        options: dict[str, Any] = {"client_mode": self.options.client_mode, "start": False, **kwargs}
        return ProgressTracker(self.dht, self.options.run_id, target_batch_size, **options)

    def _make_state_averager(self, **kwargs: Any) -> TrainingStateAverager:
        """Make the averager that steps the optimizer and averages parameters.

        Args:
            kwargs: as above, of the averager.
        """
        is_offloaded, averages_gradients = self.options.offload_optimizer, self.options.mode.averages_gradients
        options = {
            "dht": self.dht,
            **self.options.for_averagers(),
            "prefix": f"{self.options.run_id}_state_averager",
            "offload_optimizer": is_offloaded,
            "custom_gradients": is_offloaded and averages_gradients,
            "status_loglevel": self.options.status_loglevel,
            **kwargs,
        }
        return TrainingStateAverager(**options)

    def _make_gradient_averager(self, factory: GradientAveragerFactory | None, **kwargs: Any) -> GradientAverager:
        """Make the averager of gradients, the last of the three. Not called with local updates.

        Args:
            factory: from the user's options; ``None``: :class:`~shoal.optim.grad_averager.GradientAverager`.
            kwargs: as above, of the averager.
        """
        trained = [parameter for parameter in self.state_averager.main_parameters if parameter.requires_grad]
        options = {
            "dht": self.dht,
            **self.options.for_averagers(),
            "prefix": f"{self.options.run_id}_grad_averager",
            "parameters": trained,
            "reuse_grad_buffers": self.options.reuse_grad_buffers,
        }
        if self.options.offload_optimizer:  # the averages must be as wide as the optimizer's copies of the parameters
            options["averaged_grads"] = make_averaged_grads(trained)
        return (factory or GradientAverager)(**{**options, **kwargs})

    def _connect_gradients(self, averager: GradientAverager) -> None:
        """Let gradients be averaged right where the optimizer reads them, if it has copies of the parameters.

        Raises:
            ValueError: the optimizer has momentum of its own beside that of the peers.
        """
        options, state = self.options, self.state_averager
        try:
            if averager.peer_momentum:
                check_has_no_momentum(state.optimizer)
        except ValueError:
            averager.shutdown()
            raise
        if options.batch_size_per_step is not None:
            averager.accumulator.expect_batches_of(options.batch_size_per_step)
        if options.use_ext_grad_buffer:
            state.shared_buffers = averager
        if options.offload_optimizer:
            for parameter, grad in zip(state.stepped_by(averager.parameters), averager.averaged_grads, strict=True):
                parameter.grad = grad

    def _find_remainder(
        self, model: torch.nn.Module | None, parameters: Sequence[torch.Tensor], extra: Sequence[torch.Tensor]
    ) -> OtherTensors:
        return OtherTensors.find(model, parameters, extra)

    def _averagers(self) -> Sequence[tuple[DecentralizedAverager, bool]]:
        found: list[DecentralizedAverager | None] = [self.state_averager, self.grad_averager]
        return [(each, each is self.grad_averager) for each in found if each is not None]

    def _describe(self) -> RunSettings:
        state, grads = self.state_averager, self.grad_averager
        shared: dict[str, Any] = {}
        if not self.options.auxiliary:
            shared = {
                "target_batch_size": self.options.target_batch_size,
                "guard": self.tracker.guard,
                "average_state_every": self.options.average_state_every,
                OPTIMIZER: type(self.opt).__name__,
                GROUPS: [len(group["params"]) for group in self.opt.param_groups],
                "scheduler": describe_schedule(self.scheduler),
            }
            if grads is not None:
                averager = settings_of_averager(state.node, STATE_OPTIONS)
                shared |= {name: averager[name] for name in STATE_OPTIONS.values()}
        names = state.names["parameters"] or self._found_names
        return settings_of(
            self.kind if grads is not None else f"{self.kind}(use_local_updates=True)",
            (grads or state).node,
            state.main_parameters,
            names,
            GRADIENT_OPTIONS if grads is not None else STATE_OPTIONS,
            shared=shared,
        )

    # --- training -----------------------------------------------------------------------------------------------------

    @at_the_door
    @uncompiled
    def step(
        self, closure: Callable[[], Any] | None = None, batch_size: int | None = None, grad_scaler: Any = None
    ) -> Any:
        """Add the gradients of a batch, and make the global step together with all peers when it is time.

        Args:
            closure: computes the loss and its gradients, if they have not been computed before.
            batch_size: number of samples in the batch, over which the loss is the mean; default:
                ``batch_size_per_step``. 0 = no new gradients: only take part in the global step if it is time.
            grad_scaler: the scaler of the loss, if there is one; a batch whose gradients overflow is dropped.

        Returns:
            The result of the closure.

        Raises:
            TypeError, ValueError: wrong arguments.
            SettingsMismatch: this peer's settings are not those of its run.
            ReactorError: this Optimizer or its DHT is shut down.
        """
        batch_size = self._begin_step(closure, batch_size, grad_scaler)
        if batch_size is None:
            return None
        scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self._note_thread()
        epoch = self.local_epoch
        loss, is_used = self._take_batch(batch_size, scaler, closure, self._catch_up)
        if not is_used:
            return loss
        # Look again whether the swarm is ahead: news may have arrived since the first look.
        if self.tracker.should_stop(self.options.matchmaking_time) and not self._catch_up():
            self._update_global_epoch(scaler)
        self._comparison.after_batch(epoch_began=self.local_epoch != epoch)
        return loss

    def _take_batch(
        self,
        batch_size: int,
        scaler: GradScaler | None,
        closure: Callable[[], Any] | None,
        is_behind: Callable[[], bool],
        may_change_model: bool = True,
    ) -> tuple[Any, bool]:
        """Everything in a step up to the question whether the epoch is over.

        Args:
            is_behind: whether this peer is behind the others, so that the batch must not count.
            may_change_model: as for :meth:`take_batch`.

        Returns:
            The result of the closure, and whether the batch is used.
        """
        self.state_averager.follow_parameters()
        if closure is None and self._lacks_gradients(batch_size):
            return None, False
        self._comparison.before_batch()
        # Between two batches: only here the results of background work may change the model.
        if may_change_model:
            self.state_averager.step(apply_delayed_updates=True)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if self._lacks_gradients(batch_size):
                return loss, False
        # If a round began while this thread was waiting elsewhere, this batch belongs to the next epoch.
        is_late = self.global_step.begun is not None
        is_used = self._accumulate(batch_size, scaler) if is_late else False
        if is_late:
            self._update_global_epoch(scaler)
        if is_behind():
            if self.grad_averager is not None and batch_size > 0:
                self._scaling.leave_out(self.grad_averager)
            return loss, False
        if not is_late:
            is_used = self._accumulate(batch_size, scaler)
        self._count_samples(batch_size, is_used)
        if is_used:
            self._maybe_schedule_gradient_averaging()
            self._maybe_schedule_state_averaging()
            if not self.options.mode.averages_gradients and batch_size > 0:
                self._make_local_step(scaler)
        return loss, is_used

    # --- for programs that know by themselves when an epoch is over ---------------------------------------------------

    def take_batch(self, batch_size: int, *, may_change_model: bool = True) -> bool:
        """Add the gradients of a batch, and leave the end of the epoch to :meth:`end_epoch`.

        A program that knows by itself when an epoch is over calls these two instead of :meth:`step`, with a ``rule``
        of its own in ``tracker_opts``. They may be called in different threads, but not at the same time. Only the
        first call of :meth:`catch_up` or of this method waits for the network.

        Args:
            batch_size: number of samples in the batch, over which the loss is the mean.
            may_change_model: put results of work in the background into the model; otherwise a later call does it.

        Returns:
            Whether the batch is used. It is not if it has no gradients, or if this peer is behind the others: then
            :meth:`catch_up` is needed.
        """
        self._begin_step(None, batch_size, None)
        return self._take_batch(batch_size, None, None, self._should_load_state_from_peers, may_change_model)[1]

    def _end_epoch_now(self) -> None:
        self._update_global_epoch()

    def go_to(self, epoch: int) -> None:
        """Take this epoch without making the steps before it, because nobody has a state of them any more."""
        self._check_open()
        with self.tracker.pause_updates():
            self._follow(epoch)
            self._synchronization.resume()

    def _follow(self, epoch: int) -> None:
        self.state_averager.local_epoch = epoch

    def _lacks_gradients(self, batch_size: int) -> bool:
        """Whether a batch has no gradients at all, so that it does not count, and the model must stay as it is."""
        if batch_size == 0:
            return False
        averager = self.grad_averager
        if averager is not None and averager.reuse_grad_buffers and averager.local_samples_accumulated:
            return False  # then they are gone, which is another mistake
        return self._missing.has_none(self.state_averager.main_parameters)

    def _catch_up(self) -> bool:
        if not self._should_load_state_from_peers():
            return False
        if self._synchronization.is_time():
            with self._reporting.joint_work(), standby.standing_by(self):
                loaded = self.load_state_from_peers()
                self._synchronization.note_attempt(loaded=loaded)
                if loaded:
                    self.tracker.announce()
        # This batch is lost: its time must not count for the next one.
        self.tracker.performance_ema.reset_timer()
        return True

    def _accumulate(self, batch_size: int, scaler: GradScaler | None) -> bool:
        """Add the gradients of a batch to those of this epoch, unless they have overflowed; returns whether it is
        used."""
        if self.grad_averager is None or batch_size == 0:
            return True
        return self._scaling.accumulate(self.grad_averager, self, batch_size, scaler)

    def _count_samples(self, batch_size: int, is_used: bool) -> None:
        if self.grad_averager is not None:
            samples = self.grad_averager.local_samples_accumulated
        else:
            progress = self.tracker.local_progress
            if batch_size > 0:
                self._missing.look(p for p in self.state_averager.main_parameters if p.requires_grad)
            samples = batch_size + (progress.samples_accumulated if progress.epoch == self.local_epoch else 0)
        self._batches.launched_one()
        self._reporting.count(batch_size if is_used else 0)
        self.tracker.report_local_progress(self.local_epoch, samples)

    def _make_local_step(self, scaler: GradScaler | None) -> None:
        if scaler is not None:
            self._scaling.unscale(self, scaler)
        delay = self.options.mode.delays_step
        self.state_averager.step(optimizer_step=True, delay_optimizer_step=delay, grad_scaler=scaler)

    def _update_global_epoch(self, grad_scaler: GradScaler | None = None) -> None:
        """Make the global step, and go to the next epoch, see :class:`~shoal.optim.global_step.GlobalStep`."""
        # This peer is about to tell others that it is ready, so the device must have finished its batches. This is
        # still time for computing, not for joint work.
        self._batches.finish()
        self._schema_hash = self._compute_schema_hash()  # a program may have exchanged parameters since the last step
        scaler = None if self.grad_averager is None else self._scaling.before_global_step(self, grad_scaler)
        own = self.local_progress.samples_accumulated
        with self._reporting.joint_work(), standby.standing_by(self):
            is_over = self.global_step.run(scaler)
        if not is_over:
            return
        # In rounds that average parameters, weights are not samples.
        self._note_step(
            0.0 if self.grad_averager is None else self._reporting.samples_of_round(self._latest_round, own)
        )
        is_same = self._schema_hash == self._compute_schema_hash()
        assert is_same, "the parameters of the optimizer were exchanged during a global step"
        self._synchronization.begin_epoch(with_others=self.tracker.had_others)
        logger.log(self.options.status_loglevel, "epoch %d begins", self.local_epoch)

    def _compute_schema_hash(self) -> int:
        """A hash that changes when parameters of the optimizer are replaced by others."""
        return hash(tuple(tuple(id(parameter) for parameter in group["params"]) for group in self.opt.param_groups))

    def _maybe_schedule_gradient_averaging(self) -> None:
        """If the next global step is near, begin to look for a group for its gradients."""
        if self.grad_averager is not None:
            self.global_step.schedule_gradients()

    def _maybe_schedule_state_averaging(self) -> None:
        """The same for its parameters, if gradients are not averaged."""
        if self.grad_averager is None:
            self.global_step.schedule_state()

    @property
    def _latest_round(self) -> RoundResult | None:
        return (self.grad_averager or self.state_averager).last_round

    def _note_step(self, samples: float) -> None:
        """A joint step with this many samples was made; 0: they are not counted."""
        self._reporting.note_step(samples)
        if samples:
            self.tracker.board.samples_of_last_step = round(samples)
            target, peers = self.tracker.target_batch_size, self.tracker.global_progress.num_peers
            logger.info("step %d: %d of %d samples, %s", self.local_epoch, samples, target, counted(peers, "peer"))

    # --- while the thread waits elsewhere -----------------------------------------------------------------------------

    def _is_awaited(self) -> bool:
        return self.global_step.begun is not None or self.tracker.is_awaited(self.options.matchmaking_time)

    def _begin_round_if_awaited(self) -> None:
        if self._auxiliary is None:
            self._batches.finish()
            self.global_step.begin_round_if_awaited()

    def _gradients_kept(self) -> contextlib.AbstractContextManager[None]:
        # The round needs gradients that accumulate in place.
        return contextlib.nullcontext() if self.options.reuse_grad_buffers else super()._gradients_kept()

    # --- keeping up with the swarm ------------------------------------------------------------------------------------

    def _should_load_state_from_peers(self) -> bool:
        """Whether this peer must download the state of another peer before it continues."""
        return self._synchronization.is_needed()

    def is_synchronized_with_peers(self) -> bool:
        """Whether this peer is at most one epoch behind."""
        return self._synchronization.is_close()

    def load_state_from_peers(self, **kwargs: Any) -> bool:
        """Download parameters, optimizer state, scheduler and epoch from another peer.

        Args:
            kwargs: options of the download, such as ``timeout`` in seconds.

        Returns:
            Whether there was a donor whose state fits and is not older than this one.
        """
        if not self._synchronization.download(**kwargs):
            return False
        logger.log(self.options.status_loglevel, "downloaded the state of epoch %d", self.local_epoch)
        return True

    def _take_names(self, model: torch.nn.Module) -> None:
        self.state_averager.name_parameters(model)

    def load_state(self, state: State) -> None:
        """Continue from a state in the form that peers share, such as one from an archive.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        self._synchronization.end_other_work()
        with self.tracker.pause_updates():
            self.state_averager.take_over(state)
            self._synchronization.start_over()

    # --- as a torch optimizer -----------------------------------------------------------------------------------------

    @property
    def opt(self) -> TorchOptimizer:
        """The optimizer that makes the steps."""
        return self.state_averager.optimizer

    @property
    def scheduler(self) -> Any | None:
        """The learning rate schedule; ``None`` if there is none."""
        return self.state_averager.scheduler

    @property
    def local_epoch(self) -> int:
        """How many global steps this peer has made."""
        return self.state_averager.local_epoch

    @property
    def local_progress(self) -> LocalTrainingProgress:
        """This peer's progress, as it reports it to the swarm."""
        return self.tracker.local_progress

    @property
    def use_gradient_averaging(self) -> bool:
        return self.grad_averager is not None

    @property
    def scheduled_grads(self) -> StepControl | None:
        """The round of gradients that was scheduled in advance; ``None`` if there is none."""
        return self.global_step.scheduled_grads

    @scheduled_grads.setter
    def scheduled_grads(self, control: StepControl | None) -> None:
        self.global_step.scheduled_grads = control

    @property
    def scheduled_state(self) -> StepControl | None:
        """The round of parameters that was scheduled in advance; ``None`` if there is none."""
        return self.global_step.scheduled_state

    @scheduled_state.setter
    def scheduled_state(self, control: StepControl | None) -> None:
        self.global_step.scheduled_state = control

    def _inner_groups(self) -> Sequence[Any]:
        return self._main_groups if self.options.offload_optimizer else tuple(self.opt.param_groups)

    def _inner_state(self) -> Any:
        return self.opt.state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells torch's gradient scalers not to unscale gradients that accumulate in place: they stay scaled."""
        return self.options.reuse_grad_buffers

    def zero_grad(self, set_to_none: bool = ZERO_GRAD_SET_TO_NONE_DEFAULT) -> None:
        """Forget the gradients of the last batch.

        Raises:
            ValueError: with ``reuse_grad_buffers=True``, where gradients accumulate and must not be zeroed.
        """
        if self.options.reuse_grad_buffers:
            raise ValueError("with reuse_grad_buffers=True gradients accumulate in place: never zero them yourself")
        zero_gradients(self.state_averager.main_parameters, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """A checkpoint from which this peer can resume the run. Save the model beside it.

        It is the state of the optimizer that makes the steps, with the epoch as ``state["local_epoch"]`` and in each
        parameter group. Under ``"shoal"`` it has the state of the scheduler, the averager's buffers, and the single
        precision parameters of an offloaded optimizer. Background work is finished first.
        """
        self.state_averager.finish_jobs(self.options.averaging_timeout)
        gradients = None if self.grad_averager is None else self.grad_averager.get_memory()
        return self.state_averager.make_checkpoint(gradients)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a checkpoint from :meth:`state_dict`. The argument is not changed.

        The checkpoint of a plain torch optimizer works, too; the epoch then stays as it is. If the swarm is ahead of
        the checkpoint, the next step downloads the swarm's state.

        Raises:
            ValueError: it is a checkpoint of another optimizer.
        """
        self._synchronization.end_other_work()
        with self.tracker.pause_updates():
            self.state_averager.load_checkpoint(state_dict)
            memory = state_dict.get(OWN, {}).get("gradients")
            if self.grad_averager is not None and memory is not None:
                try:
                    self.grad_averager.set_memory(memory)
                except ValueError as e:
                    logger.warning("the averager of gradients begins without its buffers in the checkpoint: %s", e)
            self._synchronization.resume()

    def __repr__(self) -> str:
        return f"Optimizer(run_id={self.options.run_id!r}, epoch={self.local_epoch}, opt={self.opt!r})"

    # --- the end ------------------------------------------------------------------------------------------------------

    def _takes_part(self) -> bool:
        return self.state_averager.is_alive()

    def _leave(self) -> None:
        """Finish the rounds that others wait for, and say goodbye."""
        try:
            if self._auxiliary is not None:
                self._auxiliary.let_go_of_rounds()
            # Before the goodbye, after which others would drop this peer from a round in the background.
            self._synchronization.end_other_work()
        finally:
            self.tracker.shutdown(self.state_averager.shutdown_timeout)
            if self.grad_averager is not None:
                # Both averagers end at the same time: each may have to wait for frozen peers.
                self.grad_averager.begin_shutdown()
            self.state_averager.shutdown()
            if self.grad_averager is not None:
                self.grad_averager.shutdown()
