"""Loss scaling for half precision, where many batches and many peers make one step."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler as TorchGradScaler
else:
    TorchGradScaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler

__all__ = ["GradScaler"]

logger = logging.getLogger(__name__)


class GradScaler(TorchGradScaler):
    """Scales losses as ``torch.amp.GradScaler`` does, for a :class:`~shoal.Optimizer`.

    Use it as torch's: ``scaler.scale(loss).backward()``, ``scaler.step(opt)``, ``scaler.update()``. A batch whose
    gradients overflow is dropped, and the scale is reduced. Otherwise gradients stay scaled until the global step, and
    only then the scale may grow. With gradients that are not accumulated in place
    (``reuse_grad_buffers=False``), torch's own scaler works, too.

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
        options: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "enabled": enabled,
        }
        if hasattr(torch.amp, "GradScaler"):
            options["device"] = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(**options)
        self._lock = threading.RLock()
        """Optimizers may step in the background."""
        self._in_global_step = False
        self._has_stepped = False
        """There was a global step since the last update."""
        self._unscaled: dict[int, dict[str, Any]] = {}
        """By id of an inner optimizer: what unscaling its gradients has found."""

    @contextlib.contextmanager
    def running_global_step(self) -> Iterator[None]:
        """Inside this context :meth:`unscale_` and :meth:`step` are meant by the optimizer itself."""
        with self._lock:
            before, self._in_global_step = self._in_global_step, True
            try:
                yield
            finally:
                self._in_global_step = before

    def unscale_(self, optimizer: torch.optim.Optimizer) -> bool:  # type: ignore[override]
        """Outside a global step: look whether all gradients are finite, and leave them scaled.

        Returns:
            Whether gradients were unscaled.

        Raises:
            AssertionError: not a shoal.Optimizer.
        """
        from shoal.optim.multi_process import MultiProcessOptimizer
        from shoal.optim.optimizer import Optimizer

        assert isinstance(optimizer, (Optimizer, MultiProcessOptimizer)), (
            f"expected a shoal.Optimizer, got {type(optimizer).__name__}"
        )
        if not self.is_enabled():
            return False
        with self._lock:
            if not self._in_global_step:
                self._check_inf_per_device(optimizer)
                return False
            super().unscale_(optimizer)
            found = dict(self._per_optimizer_states[id(optimizer)])
            if found["found_inf_per_device"]:
                self._unscaled[id(optimizer.opt)] = found
            else:  # no gradients at all
                self.expect_unscaled(optimizer.opt)
            return True

    def expect_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients with which an inner optimizer will step are finite and have been unscaled otherwise."""
        with self._lock:
            scale, _ = self._check_scale_growth_tracker("expect_unscaled")
            fine = {scale.device: torch.zeros((), dtype=torch.float32, device=scale.device)}
            self._unscaled[id(optimizer)] = {"found_inf_per_device": fine}

    def note_global_step(self) -> None:
        """Another process of this peer has made a global step with gradients of this one."""
        with self._lock:
            self._has_stepped = True

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> bool:
        """Call ``optimizer.step``; of a :class:`~shoal.Optimizer`, which makes a global step when it is time.

        Returns:
            Whether this was the step of an inner optimizer inside a global step.

        Raises:
            RuntimeError: inside a global step, before the gradients were unscaled.
        """
        if not self.is_enabled():
            optimizer.step(*args, **kwargs)
            return False
        if not self._steps_inner():  # not under the lock: it may wait for a step in the background
            training: Any = optimizer
            training.step(*args, grad_scaler=self, **kwargs)
            return False
        found = self._unscaled.pop(id(optimizer), None)
        if found is None:
            raise RuntimeError("the gradients must be unscaled before the optimizer steps with them")
        if self._all_zero(found["found_inf_per_device"]):
            optimizer.step(*args, **kwargs)
        else:
            logger.warning("the optimizer skips a step: its gradients are not finite")
        self._per_optimizer_states[id(optimizer)].update(found)
        self._has_stepped = True
        return True

    def _steps_inner(self) -> bool:
        """Whether this thread is inside a global step; others have to wait for that to end."""
        with self._lock:
            return self._in_global_step

    def update(self, new_scale: float | torch.Tensor | None = None) -> bool:  # type: ignore[override]
        """Adapt the scale, if there was a global step or an overflow since the last time.

        Returns:
            Whether there was.
        """
        if not self.is_enabled():
            return False
        with self._lock:
            states = self._per_optimizer_states.values()
            overflow = not all(self._all_zero(state["found_inf_per_device"]) for state in states)
            if not self._has_stepped and not overflow and new_scale is None:
                self._per_optimizer_states.clear()
                return False
            super().update(new_scale)
            self._has_stepped = False
            return True

    def are_grads_finite(self, optimizer: torch.optim.Optimizer, use_cached: bool = False) -> bool:
        """Whether all gradients of an optimizer are finite.

        Args:
            use_cached: believe what was found since the last update, if anything was.
        """
        if not self.is_enabled():
            return True
        with self._lock:
            known = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if not use_cached or not known:
                known = self._check_inf_per_device(optimizer)
            return self._all_zero(known)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Gradients in half precision are welcome: the optimizer may have its own copies."""
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    @staticmethod
    def _all_zero(found_infs: dict[torch.device, torch.Tensor]) -> bool:
        return not any(found.item() for found in found_infs.values())
