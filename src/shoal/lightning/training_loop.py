"""What Lightning's training loop meets where the swarm decides on steps: schedules, clipping, the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from shoal.optim.optimizer_state import catch_up

if TYPE_CHECKING:
    import shoal

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from shoal.lightning.strategy import HivemindStrategy
else:
    Callback = object


class HiveMindScheduler:
    """Stands for a scheduler where Lightning steps it, and moves it only when the swarm has made a step.

    The learning rate then is that of ``optimizer.local_epoch``, however often :meth:`step` is called. Everything else
    is read from the scheduler itself.

    Args:
        optimizer: whose epochs count.
        scheduler: a torch scheduler.
    """

    def __init__(self, optimizer: shoal.Optimizer | shoal.MultiProcessOptimizer, scheduler: Any) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler

    def step(self, epoch: int | None = None) -> None:
        """Catch up with the swarm.

        Args:
            epoch: ignored; Lightning's epochs are not those of the swarm.
        """
        catch_up(self.scheduler, self.optimizer.local_epoch)

    def state_dict(self) -> dict[str, Any]:
        """State of the scheduler itself."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scheduler itself."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet, as while it is being copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def move_optimizer(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Let an optimizer step other parameters: the same ones in the same groups, on another device or in another type.

    It stays the same object, with all its options and statistics, and schedulers that were made for it stay valid.
    """
    state = optimizer.state_dict()  # refers to parameters by number
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = list(given["params"])
    optimizer.state.clear()
    optimizer.load_state_dict(state)
    return optimizer


def forget_schedule(optimizer: torch.optim.Optimizer) -> None:
    """Undo what a scheduler has done to the learning rates, so that another one starts from the beginning."""
    for group in optimizer.param_groups:
        if "initial_lr" in group:
            group["lr"] = group.pop("initial_lr")


def joint_schedule(schedulers: Sequence[Any]) -> Callable[[torch.optim.Optimizer], Any] | None:
    """A function that hands out existing schedulers of the optimizer as a single one; ``None`` if there are none."""
    if not schedulers:
        return None
    if len(schedulers) == 1:
        return lambda _: schedulers[0]
    return lambda _: torch.optim.lr_scheduler.ChainedScheduler(list(schedulers))


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


class SwarmProgress(Callback):
    """A callback that logs ``peers``, ``global_epoch`` and this peer's ``samples/s`` after each batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what the swarm's tracker knows."""
        strategy: HivemindStrategy = trainer.strategy
        values = strategy.swarm_progress()
        pl_module.log_dict(
            {name: float(value) for name, value in values.items()}, prog_bar=True, on_step=True, on_epoch=False
        )
