"""Gradient clipping: what is clipped is the gradient of the whole swarm's step, not that of a part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class GradientClipping:
    """Takes the place of ``clip_gradients`` in Lightning's precision plugin.

    Lightning asks for clipping before each step of its own, when there are only the gradients of some samples of this
    peer. What was asked for is applied where the optimizer really steps.
    """

    def __init__(self, precision_plugin: Any) -> None:
        self._precision_plugin = precision_plugin
        self._value = 0.0
        self._by_value = False
        self._handle: RemovableHandle | None = None

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip whenever this optimizer steps, as was asked for last."""
        self._precision_plugin.clip_gradients = self._remember
        self._handle = optimizer.register_step_pre_hook(self._clip)

    def remove(self) -> None:
        """Give the precision plugin its own method back, and leave the optimizer alone."""
        del self._precision_plugin.clip_gradients
        if self._handle is not None:
            self._handle.remove()

    def _remember(self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        self._value, self._by_value = clip_val or 0.0, str(gradient_clip_algorithm).lower().endswith("value")

    def _clip(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._value <= 0:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._by_value:
            torch.nn.utils.clip_grad_value_(parameters, self._value)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, self._value)
