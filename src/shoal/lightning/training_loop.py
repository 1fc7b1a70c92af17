"""Adapts Lightning's training loop to a swarm that decides when to step: schedules, clipping, the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from shoal.optim.joint_optimizer import JointOptimizer
from shoal.optim.ranks.several_processes import SeveralProcesses

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    import shoal
else:
    Callback = object


def move_optimizer(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Let an optimizer step copies of its parameters, in the same groups but on another device or of another type.

    The optimizer stays the same object with all its options and statistics, so its schedulers stay valid.
    """
    state = optimizer.state_dict()  # refers to parameters by number
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = list(given["params"])
    optimizer.state.clear()
    optimizer.load_state_dict(state)
    return optimizer


def joint_schedule(schedulers: Sequence[Any]) -> Callable[[torch.optim.Optimizer], Any] | None:
    """A ``scheduler_fn`` that returns the optimizer's existing schedulers as one; ``None`` if there are none."""
    if not schedulers:
        return None
    if len(schedulers) == 1:
        return lambda _: schedulers[0]
    return lambda _: torch.optim.lr_scheduler.ChainedScheduler(list(schedulers))


class GradientClipping:
    """Replaces ``clip_gradients`` in Lightning's precision plugin.

    Lightning clips before each of its own steps, when there are gradients of only some samples of this peer. This class
    remembers the settings, and clips when the optimizer really steps.
    """

    def __init__(self, precision_plugin: Any) -> None:
        self._precision_plugin = precision_plugin
        self._value = 0.0
        self._by_value = False
        self._handle: RemovableHandle | None = None

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip whenever this optimizer steps, with the latest settings from Lightning."""
        self._precision_plugin.clip_gradients = self._remember
        self._handle = optimizer.register_step_pre_hook(self._clip)

    def remove(self) -> None:
        """Restore the precision plugin's own method, and remove the hook from the optimizer."""
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


def progress_of(optimizer: shoal.Optimizer | SeveralProcesses | shoal.DiLoCo, samples_of_step: int) -> dict[str, float]:
    """The figures that are shown while training.

    Args:
        samples_of_step: samples in the latest step of this peer's optimizer.
    """
    if isinstance(optimizer, SeveralProcesses):
        news = optimizer.news
        return {"peers": news.num_peers, "global_epoch": news.global_epoch, "samples/s": news.samples_per_second}
    tracker, speed = optimizer.tracker, optimizer.tracker.local_progress.samples_per_second
    if not tracker.board.rule.adds_up:  # it counts steps
        speed *= samples_of_step
    return {
        "peers": max(1, tracker.global_progress.num_peers),
        "global_epoch": max(tracker.global_epoch, optimizer.local_epoch),
        "samples/s": speed,
    }


class SwarmProgress(Callback):
    """A callback that logs ``peers``, ``global_epoch`` and this peer's ``samples/s`` after each batch.

    It also reports the loss of the module's ``training_step`` to ``shoal monitor``.
    """

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the progress of the swarm."""
        values: dict[str, float] = trainer.strategy.swarm_progress()
        pl_module.log_dict(
            {name: float(value) for name, value in values.items()}, prog_bar=True, on_step=True, on_epoch=False
        )
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        for optimizer in trainer.strategy.optimizers:
            # Reading a loss waits for the device, so only those that are published are read.
            if isinstance(optimizer, (JointOptimizer, SeveralProcesses)) and optimizer.report_is_due:
                if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                    # Lightning has divided it by the number of batches whose gradients are added up.
                    optimizer.report(loss=loss.detach() * trainer.accumulate_grad_batches)
                else:
                    optimizer.report()
