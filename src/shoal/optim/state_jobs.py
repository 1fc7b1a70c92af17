"""Work that outlasts a call: rounds that were scheduled in advance, and jobs of a state averager in the background.

A :class:`StateJob` is an optimizer step and a round of averaging, started by one call. Its thread sets flags as it gets
on. The training thread waits for these flags, puts the results into the model, and forgets the job.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.averaging import AveragingStage, StepControl
from shoal.base.logs import words_of
from shoal.errors import ShoalError
from shoal.optim.grad_scaler import GradScaler

logger = logging.getLogger(__name__)


def usable(control: StepControl | None) -> bool:
    """Whether a scheduled step can still be used."""
    return control is not None and not control.done() and not control.triggered


def log_failure(message: str, epoch: int, error: Exception) -> None:
    """Warn that a round failed, with the reason in words. An unexpected error is logged with its traceback.

    Args:
        message: format of the message, with a place for the epoch and one for the reason.
        epoch: the epoch that the round ends.
        error: what the round raised.
    """
    reason, unexpected = words_of(error), False
    if isinstance(error, concurrent.futures.CancelledError):
        reason = "the others have left or gone on"
    elif isinstance(error, TimeoutError):
        reason = "it took too long"
    elif not isinstance(error, ShoalError):
        unexpected = True
    logger.warning(message, epoch, reason, exc_info=error if unexpected else None)


def let_go(controls: Iterable[StepControl | None], timeout: float) -> None:
    """Withdraw from scheduled steps without making their groups wait.

    A group that is complete already would wait for this peer, so this peer takes part in it with weight 0.

    Args:
        controls: the steps; ``None`` counts for nothing.
        timeout: the longest time to take part in all of them together, in seconds.
    """
    begun = []
    for control in controls:
        if control is None or control.done():
            continue
        if control.stage <= AveragingStage.LOOKING_FOR_GROUP:
            control.cancel()
            continue
        if not control.triggered:
            control.weight = 0.0
            control.allow_allreduce()
        begun.append(control)
    try:
        concurrent.futures.wait(begun, timeout)
    finally:
        for control in begun:
            control.cancel()


@dataclass
class StepRequest:
    """The arguments of a step of a :class:`~shoal.optim.state_averager.TrainingStateAverager`, checked."""

    optimizer_step: bool
    zero_grad: bool
    averaging_round: bool
    delay_optimizer_step: bool
    delay_averaging: bool
    wait_for_trigger: Callable[[], object] | None
    averaging_control: StepControl | None
    averaging_opts: Mapping[str, Any]
    set_to_none: bool
    grad_scaler: GradScaler | None = None

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
    """The work that one call has started, and how far it is."""

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


class StateJobs:
    """The jobs that are under way, or whose results have not been put into the model."""

    def __init__(self) -> None:
        self._jobs: list[StateJob] = []

    def __iter__(self) -> Iterator[StateJob]:
        return iter(self._jobs)

    def add(self, job: StateJob) -> None:
        """From now on this job counts."""
        self._jobs.append(job)

    @property
    def averaging(self) -> bool:
        """Whether a job is averaging right now."""
        return any(job.averaging_started and not job.finished.done() for job in self._jobs)

    def wait(self, timeout: float | None) -> None:
        """Wait for all jobs. After ``timeout`` seconds, averaging is given up."""
        running = [job for job in self._jobs if not job.finished.done()]
        _, late = concurrent.futures.wait([job.finished for job in running], timeout)
        if late:
            logger.warning("averaging in the background took longer than %s s and was cancelled", timeout)
            for job in running:
                job.cancel()
            concurrent.futures.wait(late)

    def wait_for_optimizer(self) -> None:
        """Wait until no job needs the optimizer and its gradients. Averaging may go on."""
        for job in self._jobs:
            job.stepped.wait()
        concurrent.futures.wait([job.finished for job in self._jobs if not job.request.averaging_round])

    def let_go_of_searches(self, patience: float) -> None:
        """Give up rounds that nobody has joined after ``patience`` seconds."""
        self.wait_for_optimizer()
        concurrent.futures.wait([job.finished for job in self._jobs], patience)
        for job in self._jobs:
            if job.control is not None and job.control.stage <= AveragingStage.LOOKING_FOR_GROUP:
                job.control.cancel()

    def finished(self) -> list[StateJob]:
        """The jobs that are done and have not been forgotten."""
        return [job for job in self._jobs if job.finished.done()]

    def forget(self, jobs: Collection[StateJob]) -> None:
        """The results of these jobs are in the model."""
        self._jobs = [job for job in self._jobs if job not in jobs]

    def cancel(self, patience: float | None = None) -> None:
        """Give up all averaging.

        Args:
            patience: seconds to wait until the jobs end; ``None``: do not wait.
        """
        for job in self._jobs:
            job.cancel()
        if patience is not None:
            concurrent.futures.wait([job.finished for job in self._jobs], patience)
