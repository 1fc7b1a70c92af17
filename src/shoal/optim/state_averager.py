"""The training state: optimizer steps, averaging of parameters, and the state that newcomers download."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging import DecentralizedAverager, RoundResult, StepControl
from shoal.averaging.state.download import OwnedState
from shoal.facade import options_from
from shoal.logs import counted
from shoal.optim.devices import LaunchedWork
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.lineage import LineageKeeper
from shoal.optim.optimizer_state import (
    GradientCheck,
    LRSchedulerBase,
    catch_up,
    dump_optimizer_state,
    has_statistics,
    initialize_optimizer_state_,
    load_optimizer_state,
    zero_gradients,
)
from shoal.optim.progress import PerformanceEMA
from shoal.optim.state_jobs import StateJob, StateJobs, StepRequest, log_failure
from shoal.optim.training_setup import (
    OptimizerFactory,
    Parameters,
    ParamGroups,
    SchedulerFactory,
    TorchOptimizer,
    prepare_training,
)
from shoal.optim.training_state import (
    SharedBuffers,
    StateTensors,
    TrainingState,
    apply_state,
    check_epoch,
    describe_state,
    latest_epoch,
    load_checkpoint,
    make_checkpoint,
)
from shoal.reactor import in_thread

if TYPE_CHECKING:
    from shoal.dht import DHT

__all__ = [
    "ZERO_GRAD_SET_TO_NONE_DEFAULT",
    "LRSchedulerBase",
    "OptimizerFactory",
    "ParamGroups",
    "Parameters",
    "SchedulerFactory",
    "TorchOptimizer",
    "TrainingStateAverager",
    "dump_optimizer_state",
    "initialize_optimizer_state_",
    "load_optimizer_state",
]

logger = logging.getLogger(__name__)

# As in torch 2.
ZERO_GRAD_SET_TO_NONE_DEFAULT = True


class TrainingStateAverager(DecentralizedAverager):
    """Steps an optimizer, averages parameters with other peers, and shares all of it with newcomers.

    Args:
        dht: how averagers find each other.
        optimizer: an optimizer, or a function that makes one from parameter groups.
        params: parameters or groups; required with a function.
        scheduler: a learning rate scheduler, or a function that makes one; it follows ``local_epoch``.
        initialize_optimizer: make the optimizer's statistics exist at once; default: if there are none.
        offload_optimizer: the optimizer works on single precision copies of the parameters on the CPU.
        custom_gradients: somebody else fills the gradients of these copies.
        reuse_tensors: average the optimizer's own tensors instead of copies; default: with ``offload_optimizer``, but
            not with ``delta_rule_averaging``.
        delta_rule_averaging: apply what averaging has changed as a difference, so that steps made meanwhile survive.
        performance_ema_alpha: weight of the newest measurement of ``delay_before_averaging``.
        sync_epoch_when_averaging: adopt the largest epoch in the group.
        parameter_names: names for codecs; default: their numbers.
        average_opt_statistics: names of optimizer statistics that are averaged, too, such as ``"exp_avg_sq"``.
        extra_tensors: further tensors that are averaged and given to newcomers.
        shared_buffers: has tensors that are only given to newcomers.
        status_loglevel: level of messages about steps.
        averager_kwargs: see :class:`~shoal.averaging.DecentralizedAverager`.

    Raises:
        ValueError: arguments that contradict each other.
        AssertionError: a parameter is given twice.
    """

    instead_of_a_copy = "save its make_checkpoint(), which load_checkpoint() takes"

    def __init__(
        self,
        *,
        dht: DHT,
        optimizer: TorchOptimizer | OptimizerFactory,
        params: Parameters | ParamGroups | None = None,
        scheduler: Any | SchedulerFactory | None = None,
        initialize_optimizer: bool | None = None,
        offload_optimizer: bool = False,
        custom_gradients: bool = False,
        reuse_tensors: bool | None = None,
        delta_rule_averaging: bool = False,
        performance_ema_alpha: float = 0.1,
        sync_epoch_when_averaging: bool = False,
        parameter_names: Iterable[str] | None = None,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
        shared_buffers: SharedBuffers | None = None,
        status_loglevel: int = logging.DEBUG,
        **averager_kwargs: Any,
    ) -> None:
        if reuse_tensors is None:
            reuse_tensors = offload_optimizer and not delta_rule_averaging
        if reuse_tensors and delta_rule_averaging:
            raise ValueError("delta_rule_averaging=True needs copies of the tensors: it excludes reuse_tensors=True")
        if custom_gradients and not offload_optimizer:
            raise ValueError("custom_gradients=True has a meaning only with offload_optimizer=True")
        setup = prepare_training(optimizer, params, scheduler, parameter_names, offload_optimizer)
        self._setup, self.optimizer, self.scheduler = setup, setup.optimizer, setup.scheduler
        self.main_parameters, self.parameter_names = setup.main_parameters, setup.parameter_names
        self.optimizer_parameters = setup.optimizer_parameters
        """What the optimizer steps: the main parameters, which are the user's, or copies of them."""
        self.offload_optimizer, self.custom_gradients = offload_optimizer, custom_gradients
        self.reuse_tensors, self.delta_rule_averaging = reuse_tensors, delta_rule_averaging
        self.sync_epoch_when_averaging, self.status_loglevel = sync_epoch_when_averaging, status_loglevel
        if initialize_optimizer or (initialize_optimizer is None and not has_statistics(self.optimizer)):
            initialize_optimizer_state_(self.optimizer)
        self._contents = StateTensors(setup, average_opt_statistics, extra_tensors, reuse_tensors)
        self.extra_tensors = self._contents.extra_tensors
        self.shared_buffers = shared_buffers
        """Has tensors that are only given to newcomers."""
        # Held while the optimizer steps, so that newcomers never get half a step. Taken after the tensor lock.
        self._state_lock = threading.RLock()
        self._launched = LaunchedWork([*self.main_parameters, *self.optimizer_parameters])
        self._local_epoch = 0
        self._stepped_epoch = 0
        self._gradients = GradientCheck(self.parameter_names, self.optimizer_parameters)
        self._jobs = StateJobs()
        self.on_averaged: Callable[[RoundResult | None], object] | None = None
        """Called at the end of each round, in whatever thread, with what came of it; ``None``: it has failed."""
        self.lineage_keeper: LineageKeeper | None = None
        self.delay_before_averaging = PerformanceEMA(alpha=performance_ema_alpha)
        """Seconds from the start of a step to the start of its all-reduce."""
        averager_kwargs.setdefault("tensor_infos", self._contents.infos())
        super().__init__(self._contents.averaged, dht, **averager_kwargs)

    # --- what it holds ------------------------------------------------------------------------------------------------

    @property
    def local_epoch(self) -> int:
        """How many global steps this state contains, or will contain when the work in the background is done."""
        return self._local_epoch

    @local_epoch.setter
    def local_epoch(self, epoch: int) -> None:
        with self._state_lock:
            self._local_epoch = self._stepped_epoch = epoch
            if self.scheduler is not None:
                catch_up(self.scheduler, epoch)

    def learning_rates(self) -> tuple[int, list[float]] | None:
        """The epoch of the latest optimizer step, and the learning rate of each group since then.

        ``None`` while a step is at work, and for rates that are tensors, which may have to be fetched.
        """
        if not self._state_lock.acquire(blocking=False):
            return None
        try:
            rates = [group.get("lr") for group in self.optimizer.param_groups]
            numbers = [float(rate) for rate in rates if isinstance(rate, (int, float))]
            return (self._stepped_epoch, numbers) if len(numbers) == len(rates) else None
        finally:
            self._state_lock.release()

    @property
    def averaging_in_progress(self) -> bool:
        """Whether a job in the background is averaging right now."""
        return self._jobs.averaging

    def schedule_step(self, scheduled_time: float | None = None, **kwargs: Any) -> StepControl:
        """Begin to look for a group, in advance; give the control to :meth:`step` or cancel it."""
        control = super().step(scheduled_time=scheduled_time, wait=False, require_trigger=True, **kwargs)
        assert isinstance(control, StepControl)
        return control

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self,
        wait_for_delayed_updates: bool | None = None,
        apply_delayed_updates: bool = True,
        increment_epoch: bool = False,
        optimizer_step: bool = False,
        zero_grad: bool = False,
        delay_optimizer_step: bool = False,
        averaging_round: bool = False,
        delay_averaging: bool | None = None,
        averaging_control: StepControl | None = None,
        wait_for_trigger: Callable[[], object] | None = None,
        grad_scaler: GradScaler | None = None,
        set_to_none: bool = ZERO_GRAD_SET_TO_NONE_DEFAULT,
        averaging_opts: Mapping[str, Any] | None = None,
    ) -> None:
        """Do any of: finish earlier work, step the optimizer, average with peers; each in the background if wanted.

        Args:
            wait_for_delayed_updates: wait for work in the background that was started before; default: when it would
                collide with what is asked now.
            apply_delayed_updates: put results of finished work into the model.
            increment_epoch: this step leads to the next epoch.
            optimizer_step: step the optimizer, then the scheduler.
            zero_grad: zero the optimizer's gradients after that.
            delay_optimizer_step: do all this in the background.
            averaging_round: average with peers after that.
            delay_averaging: do the averaging in the background; default: as ``delay_optimizer_step``.
            averaging_control: from :meth:`schedule_step`.
            wait_for_trigger: called before anything else is done; if it raises, nothing is.
            grad_scaler: has unscaled the optimizer's gradients, and knows whether they are finite.
            set_to_none: how gradients are zeroed.
            averaging_opts: options of the round, and ``timeout`` for its result.

        Raises:
            ValueError: arguments that contradict each other.
        """
        request = options_from(
            StepRequest,
            locals(),
            delay_averaging=delay_optimizer_step if delay_averaging is None else delay_averaging,
            averaging_opts=dict(averaging_opts or {}),
        )
        request.check(
            is_offloaded=self.offload_optimizer,
            reuse_tensors=self.reuse_tensors,
            custom_gradients=self.custom_gradients,
        )
        collides = averaging_round or (request.has_actions and not self.delta_rule_averaging)
        wait = collides if wait_for_delayed_updates is None else wait_for_delayed_updates
        if collides and not (wait and apply_delayed_updates):
            raise ValueError("this step would collide with work in the background: wait for it and apply its results")
        if wait:
            self._jobs.wait(self._config.allreduce_timeout)
        elif request.has_actions:
            self._jobs.wait_for_optimizer()
        if apply_delayed_updates:
            self._apply_finished_jobs()
        if increment_epoch:
            with self._state_lock:  # a round in the background may just adopt an epoch
                self._local_epoch += 1
        if request.has_actions:
            self._run(StateJob(request, self._local_epoch, averaging_control))
        elif increment_epoch:
            self.local_epoch = self._local_epoch

    def _run(self, job: StateJob) -> None:
        request = job.request
        if not self.custom_gradients and (request.optimizer_step or request.zero_grad):
            self._contents.take_main_gradients()
        self._jobs.add(job)
        self._launched.mark()
        if request.delay_optimizer_step:
            job.run_in_background(self._step_and_average)
            return
        try:
            self._step_optimizer(job)
            self._apply_finished_jobs(job)
        except BaseException:
            job.cancel()
            job.finish()
            raise
        if request.delay_averaging and request.averaging_round:
            job.run_in_background(self._average)
            return
        try:
            self._average(job)
        finally:
            job.finish()
            self._apply_finished_jobs()

    def _step_and_average(self, job: StateJob) -> None:
        try:
            self._step_optimizer(job)
        except BaseException:
            job.cancel()
            raise
        self._average(job)

    def _step_optimizer(self, job: StateJob) -> None:
        """Wait for the trigger, then step optimizer and scheduler to the job's epoch."""
        request = job.request
        job_started = time.perf_counter()
        if request.wait_for_trigger is not None:
            request.wait_for_trigger()
        with self._optimizer_access(), self._state_access():
            if request.optimizer_step and request.grad_scaler is not None:
                with request.grad_scaler.running_global_step():
                    request.grad_scaler.step(self.optimizer)
            elif request.optimizer_step and self._gradients.are_sound(job.epoch):
                self.optimizer.step()
            if request.zero_grad:
                self.optimizer.zero_grad(set_to_none=request.set_to_none)
                if self.offload_optimizer:
                    zero_gradients(self.main_parameters, request.set_to_none)
            if self.scheduler is not None:
                catch_up(self.scheduler, job.epoch)
            self._stepped_epoch = max(self._stepped_epoch, job.epoch)
            job.optimizer_done = request.optimizer_step
        job.stepped.set()
        if request.averaging_round:
            self.delay_before_averaging.update(1, interval=max(1e-9, time.perf_counter() - job_started))

    @contextmanager
    def _state_access(self) -> Iterator[None]:
        """Alone with parameters and optimizer, and with all work done that others have launched on them."""
        with self._state_lock:
            self._launched.wait()
            try:
                yield
            finally:
                self._launched.mark()

    def _optimizer_access(self) -> AbstractContextManager[Any]:
        """Where the optimizer's tensors are themselves averaged, they must not change while that happens."""
        return self.get_tensors() if self.reuse_tensors else nullcontext()

    def _average(self, job: StateJob) -> None:
        """Average with peers; a failure is logged and leaves the local values."""
        request = job.request
        if not request.averaging_round:
            return
        job.averaging_started = True
        options = {"gather": job.epoch, **request.averaging_opts}
        patience = options.get("timeout")
        control = job.control
        is_used_up = control is not None and (control.triggered or (control.done() and not control.cancelled()))
        # A round that was called off is not begun anew: nobody would come.
        if control is None or is_used_up:
            control = job.control = self.schedule_step(**options)
        try:
            with self.get_tensors(), self._state_access():
                self._contents.load_into_averaged(remember=self.delta_rule_averaging)
            control.allow_allreduce()
            gathered = control.result(patience)
        except Exception as e:  # whatever it is, training goes on
            control.cancel()
            log_failure("parameters were not averaged in epoch %d: %s", job.epoch, e)
            if self.on_averaged is not None:
                self.on_averaged(None)
            return
        except BaseException:
            control.cancel()
            raise
        job.averaging_done = True
        if self.on_averaged is not None:
            self.on_averaged(control.round)
        logger.log(self.status_loglevel, "averaged parameters with %s", counted(len(gathered), "peer"))
        if self.sync_epoch_when_averaging:
            epoch = latest_epoch(gathered.values(), self.lineage_keeper)
            with self._state_lock:
                if epoch > self._local_epoch:
                    self.local_epoch = epoch

    # --- work in the background ---------------------------------------------------------------------------------------

    def _apply_finished_jobs(self, unfinished: StateJob | None = None) -> None:
        """Put results into the model: averages of finished jobs, and optimizer steps also of ``unfinished``.

        What went wrong in the background is raised here.
        """
        finished = self._jobs.finished()
        averaged = [job for job in finished if job.averaging_done]
        if averaged or any(job.optimizer_done for job in [*finished, unfinished] if job is not None):
            # a round in progress holds the tensors: local steps must not wait for it
            access = self.get_tensors() if averaged else self._optimizer_access()
            with access, self._state_access():
                if averaged:  # only one at a time averages
                    meanwhile = self.delta_rule_averaging and averaged[-1].request.delay_averaging
                    self._contents.take_averaged(as_difference=meanwhile)
                self._contents.update_main_parameters()
        for job in [*finished, unfinished]:
            if job is not None:
                job.optimizer_done = job.averaging_done = False
        self._jobs.forget(finished)
        for job in finished:
            job.finished.result()

    def let_go_of_searches(self) -> None:
        """Give up rounds in the background that should have begun by now, and that nobody has joined.

        Before this peer leaves, or takes over a state: the others may have left, or gone on.
        """
        self._jobs.let_go_of_searches(self._config.min_matchmaking_time + self._config.request_timeout)

    def finish_jobs(self, timeout: float | None = None) -> None:
        """Wait for everything in the background and put its results into the model."""
        self._jobs.wait(timeout)
        self._apply_finished_jobs()

    def shutdown(self) -> None:
        """Give up work in the background and leave. Idempotent."""
        self._jobs.cancel()
        super().shutdown()
        self._jobs.cancel(self.shutdown_timeout)

    # --- state --------------------------------------------------------------------------------------------------------

    def get_current_state(self) -> OwnedState:
        """What newcomers download: parameters, extra tensors, optimizer, scheduler and epoch, all of one moment."""
        with self._optimizer_access(), self._state_access():
            lineage = None if self.lineage_keeper is None else self.lineage_keeper.lineage
            return describe_state(
                self._setup, self.extra_tensors, self._buffers(), self._stepped_epoch, self.node.group_bits, lineage
            )

    def _buffers(self) -> list[torch.Tensor]:
        return [] if self.shared_buffers is None else self.shared_buffers.get_buffers()

    def load_state_from_peers(
        self, wait: bool = True, timeout: float | None = None, *, accept_older: bool = False
    ) -> Any:
        """Download the state of another peer and put it into the model, the optimizer and the scheduler.

        Args:
            wait: return the outcome; otherwise a future of it, which cannot be cancelled once the download has begun.
            timeout: seconds for the download.
            accept_older: also a state of an earlier epoch than this peer's.

        Returns:
            Whether there was a donor whose state fits and is not older than this one.
        """
        if not wait:
            return in_thread(partial(self.load_state_from_peers, timeout=timeout, accept_older=accept_older))
        downloaded = super().load_state_from_peers(timeout=timeout)
        if downloaded is None:
            logger.warning("nobody shares a training state: this peer keeps its own")
            return False
        return self._load_state(downloaded.metadata, downloaded.tensors, accept_older)

    def make_checkpoint(self, gradients: Any = None) -> dict[str, Any]:
        """What :meth:`load_checkpoint` needs to go on from here, but for the model. Tensors are not copied.

        Args:
            gradients: something to be kept with it, see :func:`~shoal.optim.training_state.make_checkpoint`.
        """
        return make_checkpoint(self._setup, self._local_epoch, gradients)

    def load_checkpoint(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the optimizer, the scheduler and the epoch; with an offloaded optimizer, the parameters, too.

        Args:
            state_dict: from :meth:`make_checkpoint`, or of a torch optimizer.

        Raises:
            ValueError: it does not fit.
        """
        with self.get_tensors(), self._state_access():
            epoch = load_checkpoint(self._setup, state_dict)
            self._contents.adopt_statistics()
            if epoch is not None:
                self.local_epoch = epoch

    def _load_state(self, metadata: Any, tensors: Sequence[torch.Tensor], accept_older: bool = False) -> bool:
        try:
            state = TrainingState.parse(metadata, tensors, self._setup, self.extra_tensors, self._buffers())
        except ValueError as e:
            logger.warning("a downloaded training state was refused: %s", e)
            return False
        with self.get_tensors(), self._state_access():
            try:
                check_epoch(state.epoch, self._local_epoch, accept_older, self.lineage_keeper)
                if self.shared_buffers is not None:
                    self.shared_buffers.set_buffers(state.buffers)
            except ValueError as e:
                logger.warning("a downloaded training state was refused: %s", e)
                return False
            apply_state(state, self._setup, self.extra_tensors)
            self._contents.load_into_averaged()
            self._contents.update_main_parameters()
            self.local_epoch = state.epoch
            if self.lineage_keeper is not None:
                self.lineage_keeper.adopt_lineage(state.lineage, state.epoch)
        return True
