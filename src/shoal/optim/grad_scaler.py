"""Loss scaling for half precision, when a step takes many batches of many peers.

Users hold a :class:`GradScaler`; the optimizer uses it through :class:`LossScaling`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from shoal.averaging.finite import first_not_finite
from shoal.base.closeable import Facade
from shoal.optim.setup.devices import local_part

if TYPE_CHECKING:
    from shoal.optim.grad_averager import GradientAverager

__all__ = ["GradScaler"]

logger = logging.getLogger(__name__)


class SwarmOptimizer(Facade, torch.optim.Optimizer):
    """Base of all optimizers that step with a swarm, in one process or several. :class:`~shoal.GradScaler` accepts only
    these."""

    steps_each_batch: bool = False
    """Whether it steps with the gradients of each batch, as a ``DiLoCo`` does."""


class GradScaler(TorchGradScaler):
    """Scales losses as ``torch.amp.GradScaler`` does, for a :class:`~shoal.Optimizer` or a :class:`~shoal.DiLoCo`.

    Use it like torch's: ``scaler.scale(loss).backward()``, ``scaler.step(opt)``, ``scaler.update()``. A batch whose
    gradients overflow is dropped, and the scale is reduced. Otherwise gradients stay scaled until the global step, and
    only then may the scale grow. If gradients do not accumulate in place (``reuse_grad_buffers=False``), torch's own
    scaler works, too.

    This class uses only public methods of torch's scaler.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: see ``torch.amp.GradScaler``.
        device: type of the device of the scale, ``"cuda"`` or ``"cpu"``; default: CUDA if there is any.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: str | None = None,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        # Optimizers may step in the background.
        self._lock = threading.RLock()
        self._in_global_step = False
        # Whether there was a global step since the last update.
        self._has_stepped = False
        # By id of an optimizer: whether its gradients were finite at the last check since the last update.
        self._finite: dict[int, bool] = {}
        # By id of an inner optimizer with unscaled gradients, until it steps: whether they are finite.
        self._unscaled: dict[int, bool] = {}
        # By id of an optimizer that steps with each batch, until the next update: whether they are finite.
        self._unscaled_batches: dict[int, bool] = {}

    @contextlib.contextmanager
    def running_global_step(self) -> Iterator[None]:
        """Context for a global step, in which the optimizer itself calls :meth:`unscale_` and :meth:`step`."""
        with self._lock:
            before, self._in_global_step = self._in_global_step, True
            try:
                yield
            finally:
                self._in_global_step = before

    def unscale_(self, optimizer: torch.optim.Optimizer) -> bool:  # type: ignore[override]
        """Check whether all gradients are finite; unscale them only inside a global step, or for a ``DiLoCo``.

        Returns:
            Whether gradients were unscaled.

        Raises:
            AssertionError: it is not a shoal.Optimizer or shoal.DiLoCo.
        """
        assert isinstance(optimizer, SwarmOptimizer), (
            f"expected a shoal.Optimizer or a shoal.DiLoCo, got {type(optimizer).__name__}"
        )
        if not self.is_enabled():
            return False
        if optimizer.steps_each_batch:
            self.unscale_batch(optimizer)
            return True
        with self._lock:
            finite = self.are_grads_finite(optimizer)
            if not self._in_global_step:
                return False
            grads = _gradients(optimizer)
            if grads:
                torch._foreach_mul_(grads, 1 / self.get_scale())
            joint: Any = optimizer
            self._unscaled[id(joint.opt)] = finite
            return True

    def unscale_batch(self, optimizer: torch.optim.Optimizer, *, ends: bool = False) -> bool:
        """Unscale the gradients of a batch with which the optimizer steps at once, unless that was done before.

        Args:
            ends: the optimizer steps now; the gradients after that are those of another batch.

        Returns:
            Whether they are finite.
        """
        with self._lock:
            finite = self._unscaled_batches.get(id(optimizer))
            if finite is None:
                finite = self._unscaled_batches[id(optimizer)] = self.are_grads_finite(optimizer)
                if finite and (grads := _gradients(optimizer)):
                    torch._foreach_mul_(grads, 1 / self.get_scale())
            if ends:
                del self._unscaled_batches[id(optimizer)]
            return finite

    def expect_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an inner optimizer's gradients are finite, and were unscaled without :meth:`unscale_`."""
        with self._lock:
            self._unscaled[id(optimizer)] = True

    def note_global_step(self) -> None:
        """Note that another process of this peer has made a global step with gradients of this one."""
        with self._lock:
            self._has_stepped = True

    def note_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that gradients of this batch are not finite in another process that shares the parameters."""
        with self._lock:
            self._finite[id(optimizer)] = False

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> bool:
        """Call ``optimizer.step``. A :class:`~shoal.Optimizer` then makes a global step if it is time for one.

        Returns:
            Whether this was the step of an inner optimizer inside a global step.

        Raises:
            RuntimeError: inside a global step, the gradients have not been unscaled.
        """
        if not self.is_enabled():
            optimizer.step(*args, **kwargs)
            return False
        # Without the lock: the step may wait for one in the background, which needs the lock.
        if not self._steps_inner():
            training: Any = optimizer
            training.step(*args, grad_scaler=self, **kwargs)
            return False
        finite = self._unscaled.pop(id(optimizer), None)
        if finite is None:
            raise RuntimeError("the gradients must be unscaled before the optimizer steps with them")
        if finite:
            optimizer.step(*args, **kwargs)
        else:
            logger.warning("the optimizer skips a step: its gradients are not finite")
        self._finite[id(optimizer)] = finite
        self._has_stepped = True
        return True

    def _steps_inner(self) -> bool:
        """Whether this thread is inside a global step; other threads wait here until it ends."""
        with self._lock:
            return self._in_global_step

    def update(self, new_scale: float | torch.Tensor | None = None) -> bool:  # type: ignore[override]
        """Adapt the scale if there was a global step or an overflow since the last update, or set a new scale.

        Returns:
            Whether the scale was adapted or set.
        """
        if not self.is_enabled():
            return False
        with self._lock:
            overflow = not all(self._finite.values())
            self._finite.clear()
            self._unscaled_batches.clear()
            if not self._has_stepped and not overflow and new_scale is None:
                return False
            if new_scale is None:
                self._adapt(overflow)
            else:
                super().update(new_scale)
            self._has_stepped = False
            return True

    def _adapt(self, overflow: bool) -> None:
        state = self.state_dict()
        steps = 0 if overflow else state["_growth_tracker"] + 1
        if overflow:
            # A scale of 0 could never grow again.
            state["scale"] = max(state["scale"] * self.get_backoff_factor(), torch.finfo(torch.float32).tiny)
        elif steps == self.get_growth_interval():
            steps, larger = 0, state["scale"] * self.get_growth_factor()
            # An infinite scale could never become finite again.
            if larger <= torch.finfo(torch.float32).max:
                state["scale"] = larger
        self.load_state_dict({**state, "_growth_tracker": steps})

    def are_grads_finite(self, optimizer: torch.optim.Optimizer, use_cached: bool = False) -> bool:
        """Whether all gradients of an optimizer are finite.

        Args:
            use_cached: use the result of a check since the last update, if there was one.
        """
        if not self.is_enabled():
            return True
        with self._lock:
            known = self._finite.get(id(optimizer)) if use_cached else None
            if known is None:
                known = self._finite[id(optimizer)] = first_not_finite(_gradients(optimizer)) is None
            return known


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients; of those that several processes share, the parts in this process."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [part for part in map(local_part, grads) if part.numel()]


class LossScaling:
    """Keeps gradients of scaled and unscaled losses apart. Only the training thread uses it.

    Args:
        in_place: gradients accumulate in ``parameter.grad``, where they stay scaled until the global step; otherwise
            they are unscaled when they are added to the accumulators.
    """

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place
        # The scaler of the most recently accumulated gradients.
        self._accumulated: GradScaler | None = None

    def accumulate(
        self, averager: GradientAverager, optimizer: SwarmOptimizer, batch_size: int, scaler: GradScaler | None
    ) -> bool:
        """Add the current gradients to those accumulated before.

        Returns:
            Whether they were added; gradients that have overflowed are dropped.

        Raises:
            ValueError: scaled and unscaled gradients would be mixed.
        """
        mixed = averager.local_times_accumulated > 0 and (scaler is None) != (self._accumulated is None)
        if self._in_place and mixed:
            raise ValueError("scaled and unscaled gradients cannot be accumulated together: always give grad_scaler")
        self._accumulated = scaler
        if scaler is not None and not scaler.are_grads_finite(optimizer):
            logger.debug("a batch is dropped: its gradients are not finite")
            self.leave_out(averager)
            return False
        averager.accumulate_grads_(batch_size, 1.0 if scaler is None or self._in_place else scaler.get_scale())
        return True

    def leave_out(self, averager: GradientAverager) -> None:
        """Do not count the latest batch, nor those before it from which its gradients cannot be separated."""
        if self._in_place:
            averager.reset_accumulated_grads_()

    def before_global_step(self, optimizer: SwarmOptimizer, scaler: GradScaler | None) -> GradScaler | None:
        """Unscale the accumulated gradients, if that has not been done.

        Returns:
            The scaler that must step the inner optimizer, if there is one.
        """
        if self._in_place:
            scaler = self._accumulated
            if scaler is not None:
                self.unscale(optimizer, scaler)
        elif scaler is not None:
            joint: Any = optimizer
            scaler.expect_unscaled(joint.opt)
        return scaler

    def unscale(self, optimizer: SwarmOptimizer, scaler: GradScaler) -> None:
        """Unscale the gradients of the user's parameters."""
        with scaler.running_global_step():
            scaler.unscale_(optimizer)
