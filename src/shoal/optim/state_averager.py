"""Steps the optimizer and averages parameters with other peers, in the foreground or in the background.

A call of :meth:`TrainingStateAverager.step` starts a *job*: an optimizer step, then a round of averaging. In the
background, a thread of the job changes copies of the parameters (unless ``reuse_tensors`` averages the model's own
tensors), and sets flags as it proceeds. The next call from the training thread waits for the flags that it depends on,
puts the results of finished jobs into the model, and forgets those jobs. So the model does not change in the middle of
a batch.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging import AveragingStage, RoundResult, StepControl
from shoal.base.logs import counted
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.joint_optimizer import log_failure
from shoal.optim.progress.records import PerformanceEMA
from shoal.optim.recovery.adopt import CheckState, StateHolder
from shoal.optim.setup.optimizer_state import (
    GradientCheck,
    TorchOptimizer,
    dump_optimizer_state,
    has_statistics,
    initialize_optimizer_state_,
    load_optimizer_state,
    noting_state,
    without_gradients,
    zero_gradients,
)
from shoal.optim.setup.schedules import LRSchedulerBase, catch_up
from shoal.optim.setup.training_setup import (
    OptimizerFactory,
    Parameters,
    ParamGroups,
    SchedulerFactory,
    prepare_training,
)
from shoal.optim.setup.training_state import (
    SharedBuffers,
    StateTensors,
    latest_epoch,
)

if TYPE_CHECKING:
    from shoal.dht import DHT

__all__ = [
    "ZERO_GRAD_SET_TO_NONE_DEFAULT",
    "CheckState",
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

# The default of torch 2.
ZERO_GRAD_SET_TO_NONE_DEFAULT = True


@dataclass(frozen=True)
class StepRequest:
    """The arguments of :meth:`TrainingStateAverager.step`."""

    optimizer_step: bool
    zero_grad: bool
    averaging_round: bool
    delay_optimizer_step: bool
    delay_averaging: bool
    wait_for_trigger: Callable[[], object] | None
    averaging_control: StepControl | None
    averaging_opts: Mapping[str, Any]
    set_to_none: bool
    grad_scaler: GradScaler | None
    left_alone: Callable[[], Sequence[torch.Tensor]]
    on_averaged: Callable[[RoundResult | None], object] | None

    @property
    def has_actions(self) -> bool:
        return self.optimizer_step or self.zero_grad or self.averaging_round

    def check(self, *, is_offloaded: bool, reuse_tensors: bool, custom_gradients: bool) -> None:
        """Raises:
        ValueError: arguments contradict each other, or the settings of the averager.
        """
        if self.delay_optimizer_step and not self.delay_averaging:
            raise ValueError("delay_optimizer_step=True requires delay_averaging=True: averaging comes after the step")
        if self.delay_optimizer_step and not is_offloaded:
            raise ValueError("delay_optimizer_step=True requires offload_optimizer=True")
        if self.averaging_control is not None and not self.averaging_round:
            raise ValueError("averaging_control is given, but averaging_round=False")
        if self.wait_for_trigger is not None:
            if not self.has_actions:
                raise ValueError("wait_for_trigger is given, but there is nothing to do after it")
            if not (reuse_tensors or custom_gradients):
                raise ValueError("wait_for_trigger requires reuse_tensors or custom_gradients")


@dataclass(eq=False)
class StateJob:
    """The work that one call has started, and its progress."""

    request: StepRequest
    epoch: int
    """The epoch that this work leads to."""
    control: StepControl | None = None
    optimizer_done: bool = False
    """The optimizer has made its step, but the user's parameters do not have it yet."""
    stepped: threading.Event = field(default_factory=threading.Event)
    """Set when this job no longer needs the optimizer."""
    averaging_started: bool = False
    averaging_done: bool = False
    """There are averages that have not been put into the model yet."""
    finished: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)

    def run_in_background(self, work: Callable[[StateJob], None]) -> None:
        """Do the rest in a thread. It is a daemon, so it does not keep the interpreter from exiting."""
        threading.Thread(target=self._run, args=(work,), name="shoal-state-job", daemon=True).start()

    def _run(self, work: Callable[[StateJob], None]) -> None:
        error: BaseException | None = None
        try:
            work(self)
        except BaseException as e:
            error = e
        self.finish(error)

    def finish(self, error: BaseException | None = None) -> None:
        """The job is done, or given up.

        Args:
            error: raised later in the training thread, when it would use the result.
        """
        self.stepped.set()
        if error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(error)

    def cancel(self) -> None:
        """Give up averaging. An optimizer step under way is completed."""
        if self.control is not None:
            self.control.cancel()


class TrainingStateAverager(StateHolder):
    """Steps an optimizer, averages parameters with other peers, and shares the whole state with newcomers.

    Args:
        dht: how averagers find each other.
        optimizer: an optimizer, or a function that makes one from parameter groups.
        params: parameters or groups; required with a function.
        scheduler: a learning rate scheduler, or a function that makes one; it follows ``local_epoch``.
        initialize_optimizer: create the optimizer's statistics at once; default: if there are none.
        offload_optimizer: the optimizer works on single precision copies of the parameters on the CPU.
        custom_gradients: the caller fills the gradients of these copies; otherwise they come from the parameters.
        reuse_tensors: average the optimizer's own tensors instead of copies. Default: yes with ``offload_optimizer``,
            unless with ``delta_rule_averaging``.
        delta_rule_averaging: add the change that averaging has made, so that steps made meanwhile survive.
        performance_ema_alpha: weight of the newest measurement of ``delay_before_averaging``, from 0 to 1.
        sync_epoch_when_averaging: adopt the largest epoch in the group.
        parameter_names: names of the parameters for codecs; default: their numbers.
        average_opt_statistics: names of optimizer statistics that are averaged, too, such as ``"exp_avg_sq"``.
        extra_tensors: further tensors that are averaged and given to newcomers.
        shared_buffers: source of tensors that are given to newcomers but not averaged.
        status_loglevel: level of log messages about steps.
        check_state: can refuse a downloaded state, for example by the loss of a batch. It is called without arguments
            when the whole state is in place: in the user's parameters, extra tensors, optimizer, scheduler and
            ``local_epoch``. It refuses by returning something false other than ``None``, or by raising
            :class:`~shoal.errors.StateRefusedError`. Then this peer's own state comes back, the donor and its state are
            left out, and the next donor is asked. Any other exception also restores the own state, and is raised.
            It runs in the thread that calls :meth:`load_state_from_peers` (with ``wait=False``, in a thread of its
            own). Meanwhile nobody averages with this peer or downloads its state: so the hook should be quick and must
            not call this averager. Changes that it makes to gradients and to the mode of modules stay.
        averager_kwargs: see :class:`~shoal.averaging.DecentralizedAverager`.

    Raises:
        ValueError: arguments contradict each other.
        AssertionError: a parameter is given twice.
    """

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
        check_state: CheckState | None = None,
        **averager_kwargs: Any,
    ) -> None:
        if reuse_tensors is None:
            reuse_tensors = offload_optimizer and not delta_rule_averaging
        if reuse_tensors and delta_rule_averaging:
            raise ValueError("delta_rule_averaging=True needs copies of the tensors: it excludes reuse_tensors=True")
        if custom_gradients and not offload_optimizer:
            raise ValueError("custom_gradients=True has a meaning only with offload_optimizer=True")
        setup = prepare_training(optimizer, params, scheduler, parameter_names, offload_optimizer)
        self.offload_optimizer, self.custom_gradients = offload_optimizer, custom_gradients
        self.delta_rule_averaging = delta_rule_averaging
        self.sync_epoch_when_averaging, self.status_loglevel = sync_epoch_when_averaging, status_loglevel
        if initialize_optimizer or (initialize_optimizer is None and not has_statistics(setup.optimizer)):
            initialize_optimizer_state_(setup.optimizer)
        contents = StateTensors(setup, average_opt_statistics, extra_tensors, reuse_tensors)
        self._gradients = GradientCheck(setup.parameter_names, setup.optimizer_parameters)
        # Under way, or with results that are not in the model yet.
        self._jobs: list[StateJob] = []
        # The type and device of each of the user's parameters.
        self._places = _places_of(setup.main_parameters)
        self.delay_before_averaging = PerformanceEMA(alpha=performance_ema_alpha)
        """Seconds from the start of a step to the start of its all-reduce."""
        super().__init__(contents, dht, shared_buffers, check_state, **averager_kwargs)

    def stepped_by(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the optimizer steps for these parameters of the user's: copies, if it is offloaded."""
        pairs = zip(self.main_parameters, self.optimizer_parameters, strict=True)
        stepped = {id(parameter): own for parameter, own in pairs}
        return [stepped[id(parameter)] for parameter in parameters]

    def follow_parameters(self) -> None:
        """If the user's parameters have got another type or device, such as by ``model.to(...)``, bring the statistics
        of the optimizer there.

        Raises:
            ValueError: that is not possible, because of what peers exchange.
        """
        places = _places_of(self.main_parameters)
        if places == self._places:
            return
        for number, (before, now) in enumerate(zip(self._places, places, strict=True)):
            width, exchanged = (torch.promote_types(dtype, torch.float32) for dtype in (now[0], before[0]))
            if before != now and (width != exchanged or (self.reuse_tensors and not self.offload_optimizer)):
                what = f"peers exchange it as {exchanged}" if width != exchanged else "it is averaged in place"
                name = self.names["parameters"][number] if self.names["parameters"] else f"number {number}"
                raise ValueError(
                    f"parameter {name} was of {before[0]} on {before[1]} when this optimizer was made, and is of "
                    f"{now[0]} on {now[1]} now, but {what}: call model.to(...) before you make the optimizer"
                )
        with self._optimizer_access(), self._state_access():
            if not self.offload_optimizer:
                # Torch brings what it loads to the type and device of its parameter.
                self.optimizer.load_state_dict(self.optimizer.state_dict())
            self._places = places

    @property
    def averaging_in_progress(self) -> bool:
        """Whether a job in the background is averaging right now."""
        return any(job.averaging_started and not job.finished.done() for job in self._jobs)

    def schedule_step(self, scheduled_time: float | None = None, **kwargs: Any) -> StepControl:
        """Begin to look for a group in advance. Give the control to :meth:`step`, or cancel it: others wait for it."""
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
        *,
        left_alone: Callable[[], Sequence[torch.Tensor]] = list,
        on_averaged: Callable[[RoundResult | None], object] | None = None,
    ) -> None:
        """Finish earlier work, step the optimizer and average with peers: each only if asked, each in the background
        if asked.

        Args:
            wait_for_delayed_updates: wait for earlier work in the background. Default: only if it would collide with
                this step.
            apply_delayed_updates: put the results of finished work into the model.
            increment_epoch: this step leads to the next epoch.
            optimizer_step: step the optimizer, then the scheduler.
            zero_grad: zero the optimizer's gradients after the step.
            delay_optimizer_step: do all of this in the background.
            averaging_round: average with peers after the step.
            delay_averaging: average in the background; default: as ``delay_optimizer_step``.
            averaging_control: from :meth:`schedule_step`; default: a new one.
            wait_for_trigger: called before anything else; if it raises, nothing is done.
            grad_scaler: has unscaled the optimizer's gradients, and knows whether they are finite.
            set_to_none: zero gradients by setting them to ``None``.
            averaging_opts: options of the round, and ``timeout`` for its result, in seconds.
            left_alone: called before the optimizer steps: the parameters that it must leave alone because nobody had a
                gradient of them.
            on_averaged: called with the result at the end of the round, in any thread; with ``None`` if it failed.

        Raises:
            ValueError: arguments contradict each other, or this step would collide with work in the background.
        """
        request = StepRequest(
            optimizer_step=optimizer_step,
            zero_grad=zero_grad,
            averaging_round=averaging_round,
            delay_optimizer_step=delay_optimizer_step,
            delay_averaging=delay_optimizer_step if delay_averaging is None else delay_averaging,
            wait_for_trigger=wait_for_trigger,
            averaging_control=averaging_control,
            averaging_opts=dict(averaging_opts or {}),
            set_to_none=set_to_none,
            grad_scaler=grad_scaler,
            left_alone=left_alone,
            on_averaged=on_averaged,
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
            self.wait_for_jobs(self._config.allreduce_timeout)
        elif request.has_actions:
            self._wait_for_optimizer()
        if apply_delayed_updates:
            self._apply_finished_jobs()
        if increment_epoch:
            with self._state_lock:  # a round in the background may be adopting an epoch at this moment
                self._local_epoch += 1
            self._forget_own_state()
        if request.has_actions:
            self._run(StateJob(request, self._local_epoch, averaging_control))
        elif increment_epoch:
            self.local_epoch = self._local_epoch

    def _run(self, job: StateJob) -> None:
        request = job.request
        if not self.custom_gradients and (request.optimizer_step or request.zero_grad):
            self._contents.take_main_gradients()
        self._jobs.append(job)
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
        """Wait for the trigger, then step the optimizer, and bring the scheduler to the job's epoch."""
        request = job.request
        job_started = time.perf_counter()
        if request.wait_for_trigger is not None:
            request.wait_for_trigger()
        left_alone = request.left_alone() if request.optimizer_step else ()
        with self._optimizer_access(), self._state_access():
            with without_gradients(left_alone), noting_state(self.optimizer):
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

    def _average(self, job: StateJob) -> None:
        """Average with peers. A failure is logged and leaves the local values as they are."""
        request = job.request
        if not request.averaging_round:
            return
        job.averaging_started = True
        options = {"gather": job.epoch, **request.averaging_opts}
        patience = options.get("timeout")
        control = job.control
        is_used_up = control is not None and (control.triggered or (control.done() and not control.cancelled()))
        # A cancelled control is kept, and fails below: a new round would find nobody.
        if control is None or is_used_up:
            control = job.control = self.schedule_step(**options)
        try:
            with self._lock.hold(), self._state_access():
                self._contents.load_into_averaged(remember=self.delta_rule_averaging)
            control.allow_allreduce()
            gathered = control.result(patience)
        except Exception as e:  # after any failure, training continues
            control.cancel()
            with self._lock.hold():
                self._contents.drop_copies()
            log_failure("parameters were not averaged in epoch %d: %s", job.epoch, e)
            if request.on_averaged is not None:
                request.on_averaged(None)
            return
        except BaseException:
            control.cancel()
            raise
        job.averaging_done = True
        if request.on_averaged is not None:
            request.on_averaged(control.round)
        logger.log(self.status_loglevel, "averaged parameters with %s", counted(len(gathered), "peer"))
        if self.sync_epoch_when_averaging:
            epoch = latest_epoch(gathered, self.lineage_keeper, self.node.p2p.metrics.troubles)
            with self._state_lock:
                if epoch > self._local_epoch:
                    self.local_epoch = epoch

    # --- work in the background ---------------------------------------------------------------------------------------

    def _apply_finished_jobs(self, unfinished: StateJob | None = None) -> None:
        """Put results into the model: averages and optimizer steps of finished jobs, and the step of ``unfinished``.

        An error of a job in the background is raised here.
        """
        finished = [job for job in self._jobs if job.finished.done()]
        averaged = [job for job in finished if job.averaging_done]
        if averaged or any(job.optimizer_done for job in [*finished, unfinished] if job is not None):
            # A round in progress holds the tensor lock. Local steps without averages must not wait for it.
            access = self._lock.hold() if averaged else self._optimizer_access()
            with access, self._state_access():
                if averaged:  # it is one job: jobs that average never overlap
                    meanwhile = self.delta_rule_averaging and averaged[-1].request.delay_averaging
                    self._contents.take_averaged(as_difference=meanwhile)
                    self._contents.drop_copies()
                self._contents.update_main_parameters()
        for job in [*finished, unfinished]:
            if job is not None:
                job.optimizer_done = job.averaging_done = False
        self._jobs = [job for job in self._jobs if job not in finished]
        for job in finished:
            job.finished.result()

    def let_go_of_searches(self) -> None:
        """Give up rounds in the background that nobody has joined although they should have begun by now.

        Called before this peer leaves or takes over a state: the others may have left or moved on.
        """
        self._wait_for_optimizer()
        patience = self._config.min_matchmaking_time + self._config.request_timeout
        concurrent.futures.wait([job.finished for job in self._jobs], patience)
        for job in self._jobs:
            if job.control is not None and job.control.stage <= AveragingStage.LOOKING_FOR_GROUP:
                job.control.cancel()

    def finish_jobs(self, timeout: float | None = None) -> None:
        """Wait for all work in the background, and put its results into the model.

        Args:
            timeout: after this many seconds, rounds that are still averaging are cancelled.
        """
        self.wait_for_jobs(timeout)
        self._apply_finished_jobs()

    def wait_for_jobs(self, timeout: float | None) -> None:
        """Wait for all work in the background, without putting its results into the model; see :meth:`finish_jobs`."""
        running = [job for job in self._jobs if not job.finished.done()]
        _, late = concurrent.futures.wait([job.finished for job in running], timeout)
        if late:
            logger.warning("averaging in the background took longer than %s s and was cancelled", timeout)
            for job in running:
                job.cancel()
            concurrent.futures.wait(late)

    def _wait_for_optimizer(self) -> None:
        """Wait until no job needs the optimizer and its gradients. Averaging may continue."""
        for job in self._jobs:
            job.stepped.wait()
        concurrent.futures.wait([job.finished for job in self._jobs if not job.request.averaging_round])

    def shutdown(self) -> None:
        """Give up work in the background and leave. Idempotent."""
        for job in self._jobs:
            job.cancel()
        super().shutdown()
        for job in self._jobs:
            job.cancel()
        concurrent.futures.wait([job.finished for job in self._jobs], self.shutdown_timeout)


def _places_of(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.dtype, torch.device]]:
    return [(parameter.dtype, parameter.device) for parameter in parameters]
