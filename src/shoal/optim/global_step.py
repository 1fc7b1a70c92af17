"""The step that all peers make together: average gradients, step, average parameters, go to the next epoch.

::

    declare the epoch over ─► round of gradients ─► optimizer step ─► round of parameters ─► announce the next epoch

What to do is decided by the functions at the top, from values alone; :meth:`GlobalStep.run` does it, in this order.
Depending on the :class:`~shoal.optim.options.Mode`, the step and the rounds run in the background of the next epoch. If
the round of gradients fails although others can be reached, this peer keeps its gradients and trains on: the next batch
tries again. Only if nobody else is left does it step with its own gradients.

A peer that trains alone first waits for newcomers that download its state: :func:`awaits_newcomers`. Alone, a peer with
a small model may make ten epochs in a second. A download takes longer, so without the wait a newcomer would be behind
after each download, and start another. The wait is paid from the budget of :mod:`shoal.guard.budget`, no matter which
peer downloads.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal.averaging import AveragingStage, RoundResult, StepControl
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.errors import AveragingError
from shoal.optim.history.window import last_epoch_in_first_round, last_epoch_in_second_round
from shoal.optim.joint_optimizer import let_go, log_failure, usable, watch_search
from shoal.optim.progress_tracker import ProgressTracker
from shoal.optim.setup.devices import copy_all
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.optim.consistency import ConsistencyCheck
    from shoal.optim.grad_averager import GradientAverager
    from shoal.optim.grad_scaler import GradScaler
    from shoal.optim.options import Options
    from shoal.optim.state_averager import TrainingStateAverager

logger = logging.getLogger(__name__)

TRYING_AGAIN = "gradients of epoch %d were not averaged (%s). Training on, to meet the others a little later"
LAST_RESORT = "gradients of epoch %d were not averaged (%s). Proceeding with local gradients"

# A waiting peer checks this often whether it still has a reason to wait. Chosen: short beside any download.
SECONDS_BETWEEN_LOOKS = 0.05
# The group was not found, or did not finish.
_NO_ROUND = (AveragingError, TimeoutError, concurrent.futures.CancelledError)


def time_of_round(due: float, now: float, options: Options) -> dict[str, float]:
    """When the round of an epoch that ends at ``due`` should begin, and how long it may take.

    A group starts as soon as it is complete; the scheduled time limits the wait for peers that do not come.
    """
    patience = options.averaging_timeout
    latest = max(due, now) + options.matchmaking_time
    # The group must begin before the time of the whole round is up.
    return {"scheduled_time": min(latest, now + 0.9 * patience), "timeout": patience}


def averages_parameters(epoch: int, options: Options) -> bool:
    """Whether the step that leads to this epoch averages parameters. It must be the same in all peers, which wait for
    each other."""
    return epoch % options.average_state_every == 0


def tries_again(error: Exception | None, *, keeps_gradients: bool, others_can_come: bool) -> bool:
    """Whether a peer whose round of gradients failed trains on and tries once more, instead of stepping alone.

    Args:
        error: what the round raised; ``None``: there was no round, because nobody else was expected.
        keeps_gradients: they are still in the accumulators, and those of no other epoch.
        others_can_come: other peers at this epoch can be reached.
    """
    # After any other error another round would fail in the same way, for example if no member has gradients that count.
    return keeps_gradients and others_can_come and (error is None or isinstance(error, _NO_ROUND))


def awaits_newcomers(tracker: ProgressTracker, epoch: int, last_epoch: int, newcomers: Collection[PeerID]) -> bool:
    """Whether a peer that is done with its epoch has a reason to wait.

    Args:
        tracker: knows whether others train.
        epoch: this peer's epoch.
        last_epoch: a peer beyond this epoch does not join its first round.
        newcomers: the peers that download its state, or have just got it.
    """
    if not newcomers or tracker.gives_way_to is not None or tracker.global_epoch > epoch:
        return False
    return not tracker.expected_members(until_epoch=last_epoch)


@dataclass(frozen=True)
class GradientRound:
    """A round of gradients that this peer has begun."""

    control: StepControl | None
    """``None``: nobody else is expected."""
    has_samples: bool
    """Whether this peer has contributed samples."""
    own_mean: Sequence[torch.Tensor] | None
    """Takes the place of the average if the round fails; ``None``: it is still in the accumulators."""


@dataclass(frozen=True)
class Gradients:
    """What the optimizer steps with at the end of an epoch, and which peers step with the same."""

    are_there: bool
    """There is an average, or this peer's own mean."""
    mates: Mapping[PeerID, int] | None = None
    """The other members of the round, and their epochs before this step. ``None``: all peers that are expected."""
    wait: Callable[[], object] | None = None
    """In the background, waits for the average."""
    next_has_begun: bool = False
    """The accumulators have gradients of the next epoch."""


@dataclass
class GlobalStep:
    """Makes global steps, and schedules their rounds in advance. Used only by the training thread."""

    options: Options
    state_averager: TrainingStateAverager
    grad_averager: GradientAverager | None
    """``None``: the optimizer steps with local gradients, and only parameters are averaged."""
    tracker: ProgressTracker
    comparison: ConsistencyCheck
    closing: threading.Event
    """Set when the optimizer shuts down."""
    scheduled_grads: StepControl | None = None
    scheduled_state: StepControl | None = None
    begun: GradientRound | None = None
    """A round that began while the training thread was waiting elsewhere. The next step uses its result."""

    def __post_init__(self) -> None:
        self._tell_seldom = Seldom(logger.info)
        self._warn_once = Seldom(logger.warning, math.inf)

    # --- in advance ---------------------------------------------------------------------------------------------------

    def schedule_gradients(self) -> None:
        """If the next global step is near, begin to look for a group for its round of gradients.

        Its second round, for parameters, is not scheduled in advance: a peer that misses the first one would keep the
        others waiting.
        """
        averager, when = self.grad_averager, self._when_to_average()
        if averager is None or when is None:
            return
        if not usable(self.scheduled_grads) and averager.is_ready_to_schedule:
            self.scheduled_grads = averager.schedule_step(gather=self.comparison.describe(), **when)
            self.scheduled_grads.keep_open = True

    def schedule_state(self) -> None:
        """The same for the round of parameters, if that is the first round of the step."""
        when = self._when_to_average() if averages_parameters(self._next_epoch, self.options) else None
        if when is not None and not usable(self.scheduled_state) and not self.state_averager.averaging_in_progress:
            self.scheduled_state = self.state_averager.schedule_step(gather=self._next_epoch, **when)
            self.scheduled_state.keep_open = True

    def _when_to_average(self) -> dict[str, float] | None:
        """When a round scheduled now should begin; ``None``: it is too early, or there is nobody to join."""
        now, due, patience = get_dht_time(), self.tracker.estimated_next_update_time, self.options.matchmaking_time
        if due - now > patience or not self._expected_members():
            return None
        return time_of_round(due, now, self.options) if self.tracker.board.may_join_in_advance(patience) else None

    def _expected_members(self) -> set[PeerID]:
        """Other peers that will come to the first round of the next global step."""
        return self.tracker.expected_members(until_epoch=self._last_epoch)

    @property
    def _next_epoch(self) -> int:
        return self.state_averager.local_epoch + 1

    @property
    def _last_epoch(self) -> int:
        """A peer beyond this epoch does not come to this peer's first round."""
        return last_epoch_in_first_round(self.state_averager.local_epoch, overlaps=self.options.mode.overlaps)

    def _tell_of_long_batches(self) -> None:
        """A peer stops after the batch that ends nearest to the end of the epoch: up to half a batch after it."""
        seconds, patience = self.tracker.board.batch_time, self.options.matchmaking_time
        if self.tracker.performance_ema.is_first_guess or not self.tracker.board.rule.adds_up:
            return  # else a program that is slow to start, or that waits for others, would be warned of its batches
        if seconds / 2 > patience and self._expected_members():
            self._warn_once(
                "a batch takes this peer %.1f s, and others wait %.1f s at most, then continue without it. Give all "
                "peers matchmaking_time=%d or more, or this one smaller batches",
                seconds,
                patience,
                math.ceil(seconds / 2),
            )

    def let_go_of_rounds(self, timeout: float) -> None:
        """Withdraw from scheduled rounds without making others wait."""
        controls = self.scheduled_grads, self.scheduled_state, None if self.begun is None else self.begun.control
        self.scheduled_grads = self.scheduled_state = self.begun = None
        let_go(controls, timeout)

    # --- the step -----------------------------------------------------------------------------------------------------

    def run(self, grad_scaler: GradScaler | None = None) -> bool:
        """Bring this peer to the next epoch. It never raises because of other peers.

        Args:
            grad_scaler: knows whether the gradients are finite. They have been unscaled already.

        Returns:
            Whether the epoch is over. It is not if the round failed, and others can still be met.
        """
        with self.tracker.pause_updates():
            if self.begun is None:
                self._wait_for_newcomers()
                self._tell_of_long_batches()
                self.tracker.declare_epoch_over(self.options.matchmaking_time)
            if self.options.mode.delays_step:
                # The previous step may still be reading the averaged gradients, which the next round overwrites.
                self.state_averager.finish_jobs(self.options.averaging_timeout)
            gradients = Gradients(are_there=False)
            if self.grad_averager is not None:
                averaged = self._average_gradients(self.grad_averager)
                if averaged is None:
                    self.tracker.train_on()
                    return False
                gradients = averaged
            mates = gradients.mates
            if mates is None:
                mates = dict.fromkeys(self._expected_members(), self.state_averager.local_epoch)
            self._step_and_average_parameters(gradients, mates, grad_scaler)
            if self.grad_averager is not None and not gradients.next_has_begun:
                self.grad_averager.reset_accumulated_grads_()
            self.tracker.update_epoch(self.state_averager.local_epoch, members=mates)
        return True

    def _wait_for_newcomers(self) -> None:
        """While alone, end no epoch as long as a newcomer downloads this peer's state: it would arrive outdated."""
        while self.tracker.may_hold(has_reason=self._awaits_newcomers()):
            self._tell_seldom("this peer trains alone and waits for a newcomer that downloads its state")
            if self.closing.wait(SECONDS_BETWEEN_LOOKS):
                return

    def _awaits_newcomers(self) -> bool:
        newcomers = self.state_averager.newcomers()
        return awaits_newcomers(self.tracker, self.state_averager.local_epoch, self._last_epoch, newcomers)

    # --- gradients ----------------------------------------------------------------------------------------------------

    def begin_round_if_awaited(self) -> bool:
        """If others wait for this peer in a round of gradients, contribute what has been accumulated.

        Called in another thread, while the training thread waits elsewhere. The model stays as it is. Returns whether
        the round has begun; :meth:`run` must then be called at the next step.
        """
        averager, options = self.grad_averager, self.options
        if averager is None or self.begun is not None or not self.tracker.is_awaited(options.matchmaking_time):
            return False
        # Gradients that accumulate in place may have those of a batch that has not been counted yet. And a step in the
        # background may still be reading the averaged gradients; there this peer's thread hardly ever waits for others.
        if averager.reuse_grad_buffers or options.mode.delays_step:
            return False
        self.tracker.declare_epoch_over(in_advance=True)
        begun = self._begin_gradient_round(averager, in_advance=True)
        if begun.control is None:
            self.tracker.board.cancel_update()
            return False
        logger.debug("contributed to the round that ends epoch %d, in advance", self.state_averager.local_epoch)
        self.begun = begun
        return True

    def _begin_gradient_round(self, averager: GradientAverager, *, in_advance: bool = False) -> GradientRound:
        """Start averaging with all expected peers.

        Args:
            in_advance: the next batches go into the accumulators before the round is finished.
        """
        control, self.scheduled_grads = self.scheduled_grads, None
        has_samples, expected = averager.local_samples_accumulated > 0, self._expected_members()
        # Keep the accumulators for the case of a failure, unless the next batches go into them meanwhile.
        resets = in_advance or self.options.mode.delays_gradients
        if not expected:
            let_go([control], self.options.averaging_timeout)
            averager.load_accumulators_into_averager_()
            return GradientRound(None, has_samples, None)
        own_mean = averager.own_mean() if resets else None
        if control is None or not self._in_time(control):
            let_go([control], self.options.averaging_timeout)
            timeout = self.options.averaging_timeout
            control = averager.schedule_step(gather=self.comparison.describe(), timeout=timeout)
        control.keep_open = False
        averager.step(control=control, reset_accumulators=resets, wait=False)
        if resets:
            averager.notify_used_averaged_gradients()
        # With delayed averaging, peers announce the next epoch during the round. They have not left the round.
        if self.options.mode.delays_gradients:
            watch_search(control, self.tracker, dict.fromkeys(expected, self._last_epoch))
        else:
            watch_search(control, self.tracker)
        return GradientRound(control, has_samples, own_mean)

    def _in_time(self, control: StepControl) -> bool:
        """Whether a scheduled step has a group, or enough time left to find one."""
        has_group = control.stage > AveragingStage.LOOKING_FOR_GROUP
        return usable(control) and (has_group or control.deadline - get_dht_time() > self.options.matchmaking_time)

    def _average_gradients(self, averager: GradientAverager) -> Gradients | None:
        """Give the optimizer the average; ``None`` if there is none, and this peer keeps its gradients for another
        round of this epoch."""
        begun, self.begun = self.begun or self._begin_gradient_round(averager), None
        control, own_mean = begun.control, begun.own_mean
        if control is None:
            self.tracker.note_round(None)
            if self._tries_again(None, own_mean):
                return None
            self._give_gradients_to_optimizer(averager, False, own_mean)
            # A peer that appears now would have to average gradients first: do not wait for it.
            return Gradients(begun.has_samples, mates={})
        if self.options.mode.delays_gradients and own_mean is not None:
            wait = functools.partial(self._finish_delayed_round, averager, control, own_mean)
            return Gradients(True, wait=wait, next_has_begun=True)
        mates, again = self._finish_gradient_round(control, own_mean)
        if again:
            averager.notify_used_averaged_gradients()  # there are none
            return None
        self._give_gradients_to_optimizer(averager, mates is not None, own_mean)
        return Gradients(begun.has_samples or mates is not None, mates, next_has_begun=own_mean is not None)

    def _tries_again(self, error: Exception | None, own_mean: Sequence[torch.Tensor] | None) -> bool:
        keeps = own_mean is None
        return tries_again(error, keeps_gradients=keeps, others_can_come=keeps and self.tracker.others_can_come())

    def _finish_gradient_round(
        self, control: StepControl, own_mean: Sequence[torch.Tensor] | None
    ) -> tuple[dict[PeerID, int] | None, bool]:
        """Wait for the average.

        Args:
            own_mean: as in :class:`GradientRound`.

        Returns:
            The other members that have parameters, and their epochs; ``None`` if there is no average, and this peer
            uses its own mean gradient. And whether it keeps its gradients for another round of this epoch.
        """
        try:
            gathered = control.result(self.options.averaging_timeout)
        except Exception as e:  # after any failure, training continues
            control.cancel()
            self.tracker.note_round(None)
            again = self._tries_again(e, own_mean)
            message = TRYING_AGAIN if again else LAST_RESORT
            log_failure(message, self.state_averager.local_epoch, e, may_be_late=again)
            return None, again
        except BaseException:
            control.cancel()
            raise
        result = control.round
        if result is None:
            raise RuntimeError("a round has ended without a result: this is an error in shoal")
        self.comparison.compare(gathered, self.tracker.dht.peer_id)
        self.tracker.note_round(result)
        if not any(result.weights):
            logger.debug("no member had gradients that count in epoch %d", self.state_averager.local_epoch)
            return None, False
        mates = set(result.peers) - {*result.failed_peers, *result.auxiliaries, self.tracker.dht.peer_id}
        return {peer: self.comparison.epoch_of(gathered.get(peer)) for peer in mates}, False

    def _finish_delayed_round(
        self, averager: GradientAverager, control: StepControl, own_mean: Sequence[torch.Tensor]
    ) -> None:
        """Wait for the average in the background. If the round fails, ``own_mean`` takes its place: the accumulators
        have gradients of the next epoch."""
        mates, _ = self._finish_gradient_round(control, own_mean)
        if mates is None:
            averager.use_own_mean(own_mean)

    def _give_gradients_to_optimizer(
        self, averager: GradientAverager, averaged: bool, own_mean: Sequence[torch.Tensor] | None
    ) -> None:
        """Give the optimizer the average gradient; after a failed round, this peer's own mean."""
        averager.notify_used_averaged_gradients()
        # A round that fails late may have changed a part of the tensors.
        if not averaged and own_mean is not None:
            with averager.get_tensors() as tensors:
                copy_all(tensors, own_mean)
        elif not averaged:
            averager.load_accumulators_into_averager_()
        if self.state_averager.offload_optimizer:
            return  # there the averaged tensors are the optimizer's gradients
        without = set(averager.without_gradient())
        with averager.get_tensors() as means, torch.no_grad():
            pairs = [pair for n, pair in enumerate(zip(averager.parameters, means, strict=True)) if n not in without]
            for parameter, _ in pairs:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            copy_all([p.grad for p, _ in pairs if p.grad is not None], [grad for _, grad in pairs])
        averager.free_averages()

    # --- parameters ---------------------------------------------------------------------------------------------------

    def _note_averaged_parameters(self, result: RoundResult | None) -> None:
        """With local updates, these rounds end epochs; otherwise they make up for failed rounds of gradients."""
        if self.grad_averager is None:
            self.tracker.note_round(result, weights_are_samples=False)
        elif result is not None:
            self.tracker.note_repair(result)

    def _step_and_average_parameters(
        self, gradients: Gradients, mates: Mapping[PeerID, int], grad_scaler: GradScaler | None
    ) -> None:
        """Step the optimizer and average parameters, each if it is time for it.

        Args:
            mates: the other peers that average parameters now, and their epochs before this step.
            grad_scaler: as for :meth:`run`.
        """
        options, mode = self.options, self.options.mode
        control, self.scheduled_state = self.scheduled_state, None
        how = {"overlaps": mode.overlaps, "delay_state_averaging": mode.delays_state}
        last_epochs = {peer: last_epoch_in_second_round(epoch, **how) for peer, epoch in mates.items()}
        is_due = averages_parameters(self._next_epoch, options)
        averages = is_due and bool(self.tracker.still_expected(last_epochs))
        if is_due and not averages and not mode.averages_gradients:
            self.tracker.note_round(None)  # nobody else is there for the only round
        if control is not None and not (averages and self._in_time(control)):
            let_go([control], options.averaging_timeout)
            control = None
        if averages:
            if control is None:
                control = self.state_averager.schedule_step(gather=self._next_epoch, timeout=options.averaging_timeout)
            control.keep_open = False
            watch_search(control, self.tracker, last_epochs)
        self.state_averager.step(
            increment_epoch=True,
            optimizer_step=gradients.are_there,
            delay_optimizer_step=mode.delays_step and mode.averages_gradients,
            averaging_round=averages,
            delay_averaging=mode.delays_state,
            averaging_control=control,
            wait_for_trigger=gradients.wait,
            grad_scaler=grad_scaler,
            averaging_opts={"timeout": options.averaging_timeout},
            left_alone=self._parameters_without_gradient,
            on_averaged=self._note_averaged_parameters,
        )

    def _parameters_without_gradient(self) -> list[torch.Tensor]:
        """The optimizer's tensors for the parameters that no member of the last round had a gradient of."""
        if self.grad_averager is None:
            return []
        stepped = self.state_averager.stepped_by(self.grad_averager.parameters)
        return [stepped[index] for index in self.grad_averager.without_gradient()]
