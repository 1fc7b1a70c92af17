"""Learning rate schedules and optimizers from ``configure_optimizers``, in a run where the swarm decides on steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.optim.optimizer_state import catch_up

if TYPE_CHECKING:
    import shoal


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
