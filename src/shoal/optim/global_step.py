"""The step that all peers make together: average gradients, step, average parameters, go to the next epoch.

::

    declare the epoch over ─► round of gradients ─► optimizer step ─► round of parameters ─► announce the next epoch

Depending on the settings, the step and the rounds run in the background of the next epoch. If the round of gradients
fails although others can be reached, this peer keeps its gradients and trains on: the next batch tries again. Only if
nobody else is left does it step with its own gradients. A peer that trains alone first waits for others
that download its state (:mod:`shoal.optim.recovery.joiner_grace`).
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal.averaging import AveragingStage, RoundResult, StepControl
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.errors import AveragingError
from shoal.optim.history.window import last_epoch_in_first_round, last_epoch_in_second_round
from shoal.optim.progress_tracker import ProgressTracker
from shoal.optim.recovery.joiner_grace import SECONDS_BETWEEN_LOOKS, JoinerGrace, awaits_newcomers
from shoal.optim.round_watch import RoundWatch
from shoal.optim.setup.devices import copy_all
from shoal.optim.state_jobs import let_go, log_failure, usable
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.optim.consistency import ConsistencyCheck
    from shoal.optim.grad_averager import GradientAverager
    from shoal.optim.grad_scaler import GradScaler
    from shoal.optim.optimizer_settings import OptimizerSettings
    from shoal.optim.state_averager import TrainingStateAverager

logger = logging.getLogger(__name__)

TRYING_AGAIN = "gradients of epoch %d were not averaged (%s). Training on, to meet the others a little later"
LAST_RESORT = "gradients of epoch %d were not averaged (%s). Proceeding with local gradients"


# The group was not found, or did not come to an end.
_NO_ROUND = (AveragingError, TimeoutError, concurrent.futures.CancelledError)


class _TryAgain(Exception):
    """The round failed, and others can still be met: this peer trains on."""


@dataclass(frozen=True)
class GradientRound:
    """A round of gradients that this peer has begun."""

    control: StepControl | None
    """``None``: nobody else is expected."""
    has_samples: bool
    """Whether this peer has contributed samples."""
    own_mean: Sequence[torch.Tensor] | None
    """Takes the place of the average if the round fails; ``None``: it is still in the accumulators."""


@dataclass
class GlobalStep:
    """Makes global steps, and schedules their rounds in advance. Used only by the training thread."""

    settings: OptimizerSettings
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
        self.state_averager.on_averaged = self._note_averaged_parameters
        self._hold, self._tell_seldom = JoinerGrace(time.monotonic()), Seldom(logger.info)
        self._warn_once = Seldom(logger.warning, math.inf)

    # --- in advance ---------------------------------------------------------------------------------------------------

    def schedule_gradients(self) -> None:
        """If the next global step is near, begin to look for a group for its round of gradients.

        Its second round, for parameters, is not scheduled in advance: a peer that misses the first one would keep the
        others waiting.
        """
        averager = self.grad_averager
        assert averager is not None, "with local updates no gradients are averaged"
        when = self._when_to_average()
        if when is not None and not usable(self.scheduled_grads) and averager.is_ready_to_schedule:
            self.scheduled_grads = averager.schedule_step(gather=self.comparison.describe(), **when)
            self.scheduled_grads.keep_open = True

    def schedule_state(self) -> None:
        """The same for the round of parameters, where it is the first one."""
        when = self._when_to_average() if self._will_average_state() else None
        if when is not None and not usable(self.scheduled_state) and not self.state_averager.averaging_in_progress:
            self.scheduled_state = self.state_averager.schedule_step(gather=self._next_epoch, **when)
            self.scheduled_state.keep_open = True

    def _when_to_average(self) -> dict[str, float] | None:
        """When a round that is scheduled now should begin; ``None``: it is too early, or there is nobody to join."""
        now, due, patience = get_dht_time(), self.tracker.estimated_next_update_time, self.settings.matchmaking_time
        if due - now > patience or not self._expected_members():
            return None
        return self._when(due, now) if self.tracker.board.may_join_in_advance(patience) else None

    def _when(self, due: float, now: float) -> dict[str, float]:
        """A group starts as soon as it is complete; the scheduled time limits the wait for peers that do not come."""
        patience = self.settings.averaging_timeout
        latest = max(due, now) + self.settings.matchmaking_time
        # The group must begin before the time of the whole round is up.
        return {"scheduled_time": min(latest, now + 0.9 * patience), "timeout": patience}

    def _expected_members(self) -> set[PeerID]:
        """Other peers that will come to the first round of the next global step."""
        return self.tracker.expected_members(until_epoch=self._last_epoch)

    @property
    def _next_epoch(self) -> int:
        return self.state_averager.local_epoch + 1

    @property
    def _last_epoch(self) -> int:
        """A peer beyond this epoch does not come to this peer's first round."""
        return last_epoch_in_first_round(self.state_averager.local_epoch, overlaps=self.settings.overlaps)

    def _will_average_state(self) -> bool:
        """Whether the next epoch averages parameters. It must be the same in all peers, which wait for each other."""
        return self._next_epoch % self.settings.average_state_every == 0

    def _tell_of_long_batches(self) -> None:
        """A peer stops after the batch that ends nearest to the end of the epoch: up to half a batch after it."""
        seconds, patience = self.tracker.board.batch_time, self.settings.matchmaking_time
        if self.tracker.performance_ema.is_first_guess:
            return  # else a program that is slow to start would be warned of its batches
        if seconds / 2 > patience and self._expected_members():
            self._warn_once(
                "a batch takes this peer %.1f s, and others wait %.1f s at most, then go on alone. Give all peers "
                "matchmaking_time=%d or more, or this one smaller batches",
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
                self.tracker.declare_epoch_over(self.settings.matchmaking_time)
            if self.settings.delay_optimizer_step:
                # The previous step may still be reading the averaged gradients, which the next round overwrites.
                self.state_averager.finish_jobs(self.settings.averaging_timeout)
            mates: dict[PeerID, int] | None = None
            trigger: Callable[[], object] | None = None
            has_gradients, keeps_accumulators = self.grad_averager is not None, False
            if self.grad_averager is not None:
                begun, self.begun = self.begun or self._begin_gradient_round(self.grad_averager), None
                control, own_mean, has_gradients = begun.control, begun.own_mean, begun.has_samples
                if self.settings.delay_grad_averaging and own_mean is not None and control is not None:
                    trigger, has_gradients = functools.partial(self._finish_delayed_round, control, own_mean), True
                else:
                    try:
                        mates = self._finish_gradient_round(control, own_mean)
                    except _TryAgain:
                        self.tracker.train_on()
                        return False
                    self._give_gradients_to_optimizer(self.grad_averager, mates is not None, own_mean)
                    has_gradients = has_gradients or mates is not None
                # They have gradients of the next epoch already.
                keeps_accumulators = control is not None and own_mean is not None
                if control is None:
                    # Nobody is expected. A peer that appears now would have to average gradients first: do not wait.
                    mates = {}
            if mates is None:
                mates = dict.fromkeys(self._expected_members(), self.state_averager.local_epoch)
            self._update_state(mates, has_gradients, trigger, grad_scaler)
            if self.grad_averager is not None and not keeps_accumulators:
                self.grad_averager.reset_accumulated_grads_()
            self.tracker.update_epoch(self.state_averager.local_epoch, members=mates)
        return True

    def _wait_for_newcomers(self) -> None:
        """Alone, end no epoch while somebody downloads this peer's state: before that has arrived, it would be old."""
        while self._hold.lasts(time.monotonic(), has_reason=self._awaits_newcomers()):
            self._tell_seldom("this peer, which trains alone, waits for one that downloads its state")
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
        averager, settings = self.grad_averager, self.settings
        if averager is None or self.begun is not None or not self.tracker.is_awaited(settings.matchmaking_time):
            return False
        # Gradients that accumulate in place may have those of a batch that has not been counted yet. And a step in the
        # background may still be reading the averaged gradients; there this peer's thread hardly ever waits for others.
        if averager.reuse_grad_buffers or settings.delay_optimizer_step:
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
        resets = in_advance or self.settings.delay_grad_averaging
        if not expected:
            let_go([control], self.settings.averaging_timeout)
            averager.load_accumulators_into_averager_()
            return GradientRound(None, has_samples, None)
        own_mean = averager.own_mean() if resets else None
        if control is None or not self._in_time(control):
            let_go([control], self.settings.averaging_timeout)
            timeout = self.settings.averaging_timeout
            control = averager.schedule_step(gather=self.comparison.describe(), timeout=timeout)
        control.keep_open = False
        averager.step(control=control, reset_accumulators=resets, wait=False)
        if resets:
            averager.notify_used_averaged_gradients()
        # With delayed averaging, peers announce the next epoch during the round: that does not mean that they left it.
        if self.settings.delay_grad_averaging:
            RoundWatch(control, self.tracker, dict.fromkeys(expected, self._last_epoch))
        else:
            RoundWatch(control, self.tracker)
        return GradientRound(control, has_samples, own_mean)

    def _in_time(self, control: StepControl) -> bool:
        """Whether a scheduled step has a group, or enough time left to find one."""
        has_group = control.stage > AveragingStage.LOOKING_FOR_GROUP
        return usable(control) and (has_group or control.deadline - get_dht_time() > self.settings.matchmaking_time)

    def _finish_gradient_round(
        self, control: StepControl | None, own_mean: Sequence[torch.Tensor] | None
    ) -> dict[PeerID, int] | None:
        """Wait for the average.

        Args:
            own_mean: as in :class:`GradientRound`.

        Returns:
            The other members that have parameters, and their epochs. ``None`` if the round failed; then this peer uses
            its own mean gradient.

        Raises:
            _TryAgain: it failed, and this peer keeps its gradients for another round of this epoch.
        """
        if control is None:
            self.tracker.note_round(None)
            if self._can_try_again(own_mean):
                raise _TryAgain
            return None
        try:
            gathered = control.result(self.settings.averaging_timeout)
        except Exception as e:  # whatever has failed, training goes on
            control.cancel()
            self.tracker.note_round(None)
            # After any other error another round would end alike: if no member has gradients that count, for example.
            tries_again = isinstance(e, _NO_ROUND) and self._can_try_again(own_mean)
            log_failure(TRYING_AGAIN if tries_again else LAST_RESORT, self.state_averager.local_epoch, e)
            if tries_again:
                raise _TryAgain from None
            return None
        except BaseException:
            control.cancel()
            raise
        result = control.round
        assert result is not None, "a successful round says who took part"
        self.comparison.compare(gathered, self.tracker.dht.peer_id)
        self.tracker.note_round(result)
        if not any(result.weights):
            logger.debug("no member had gradients that count in epoch %d", self.state_averager.local_epoch)
            return None
        mates = set(result.peers) - {*result.failed_peers, *result.auxiliaries, self.tracker.dht.peer_id}
        return {peer: self.comparison.epoch_of(gathered.get(peer)) for peer in mates}

    def _can_try_again(self, own_mean: Sequence[torch.Tensor] | None) -> bool:
        """Whether there may be another round of this epoch. Not if the accumulators have gradients of the next one."""
        return own_mean is None and self.tracker.others_can_come()

    def _finish_delayed_round(self, control: StepControl, own_mean: Sequence[torch.Tensor]) -> None:
        """Wait for the average in the background. If the round fails, ``own_mean`` takes its place: the accumulators
        already have gradients of the next epoch."""
        assert self.grad_averager is not None
        if self._finish_gradient_round(control, own_mean) is None:
            self.grad_averager.use_own_mean(own_mean)

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

    def _update_state(
        self,
        mates: Mapping[PeerID, int],
        has_gradients: bool,
        trigger: Callable[[], object] | None,
        grad_scaler: GradScaler | None,
    ) -> None:
        """Step the optimizer and average parameters, each if it is time for it.

        Args:
            mates: the other peers that average parameters now, and their epochs before this step.
            has_gradients: there is an average, or this peer's own mean, to step with.
            trigger: in the background, waits until the gradients are there; ``None`` if they are.
            grad_scaler: as for :meth:`run`.
        """
        settings = self.settings
        control, self.scheduled_state = self.scheduled_state, None
        how = {"overlaps": settings.overlaps, "delay_state_averaging": settings.delay_state_averaging}
        last_epochs = {peer: last_epoch_in_second_round(epoch, **how) for peer, epoch in mates.items()}
        averages = self._will_average_state() and bool(self.tracker.still_expected(last_epochs))
        if self.grad_averager is None and self._will_average_state() and not averages:
            self.tracker.note_round(None)  # this round was due, and nobody else is there
        if control is not None and not (averages and self._in_time(control)):
            let_go([control], settings.averaging_timeout)
            control = None
        if averages:
            if control is None:
                options = {"gather": self._next_epoch, "timeout": settings.averaging_timeout}
                control = self.state_averager.schedule_step(**options)
            control.keep_open = False
            RoundWatch(control, self.tracker, last_epochs)
        self.state_averager.step(
            increment_epoch=True,
            optimizer_step=self.grad_averager is not None and has_gradients,
            delay_optimizer_step=settings.delay_optimizer_step and self.grad_averager is not None,
            averaging_round=averages,
            delay_averaging=settings.delay_state_averaging,
            averaging_control=control,
            wait_for_trigger=trigger,
            grad_scaler=grad_scaler,
            averaging_opts={"timeout": settings.averaging_timeout},
        )
