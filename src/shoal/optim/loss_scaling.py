"""How scaled gradients are accumulated, and when they get their true size again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shoal.optim.grad_averager import GradientAverager
from shoal.optim.grad_scaler import GradScaler

if TYPE_CHECKING:
    from shoal.optim.optimizer import Optimizer

logger = logging.getLogger(__name__)


class LossScaling:
    """Keeps gradients of scaled losses apart from others. Used by the training thread alone.

    Args:
        in_place: gradients accumulate in ``parameter.grad``, where they stay scaled until the global step; otherwise
            they are unscaled when they are added to the accumulators.
    """

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place
        self._accumulated: GradScaler | None = None
        """Of the gradients that were accumulated last."""

    def accumulate(
        self, averager: GradientAverager, optimizer: Optimizer, batch_size: int, scaler: GradScaler | None
    ) -> bool:
        """Add the present gradients to those accumulated before.

        Returns:
            Whether they were added: if they have overflowed, they are dropped.

        Raises:
            ValueError: those before were scaled and these are not, or the other way round.
        """
        mixed = averager.local_times_accumulated > 0 and (scaler is None) != (self._accumulated is None)
        if self._in_place and mixed:
            raise ValueError("scaled and unscaled gradients cannot be accumulated together: give grad_scaler always")
        self._accumulated = scaler
        if scaler is not None and not scaler.are_grads_finite(optimizer):
            logger.debug("a batch is dropped: its gradients are not finite")
            if self._in_place:  # nobody can tell it from those before it
                averager.reset_accumulated_grads_()
            return False
        averager.accumulate_grads_(batch_size, 1.0 if scaler is None or self._in_place else scaler.get_scale())
        return True

    def before_global_step(self, optimizer: Optimizer, scaler: GradScaler | None) -> GradScaler | None:
        """Unscale what was accumulated, if that has not been done.

        Returns:
            The scaler that must hear of the optimizer's step.
        """
        if self._in_place:
            scaler = self._accumulated
            if scaler is not None:
                self.unscale(optimizer, scaler)
        elif scaler is not None:
            scaler.expect_unscaled(optimizer.opt)
        return scaler

    def unscale(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Give the gradients of the user's parameters their true size."""
        with scaler.running_global_step():
            scaler.unscale_(optimizer)
