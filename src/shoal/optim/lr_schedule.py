"""Learning rate schedules that follow the epochs of the swarm."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)

LRSchedulerBase = torch.optim.lr_scheduler.LRScheduler
"""Base class of torch's schedulers."""


def check_scheduler(scheduler: Any) -> None:
    """Only schedules that depend on nothing but the number of steps can be followed.

    Raises:
        ValueError: this one needs more.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau depends on a metric that differs between peers: use a schedule that depends on epochs"
        )


def catch_up(scheduler: Any, epoch: int) -> None:
    """Step the scheduler forward until it is at this epoch; it never goes back."""
    if position_of(scheduler) >= epoch:
        return
    # After a download the optimizer's steps were made by others; torch would take this for a mistake in the order.
    scheduler.optimizer._opt_called = True
    while position_of(scheduler) < epoch:
        scheduler.step()


def position_of(scheduler: Any) -> int:
    """How many steps the scheduler has made."""
    chained = getattr(scheduler, "_schedulers", None)
    return int(scheduler.last_epoch) if hasattr(scheduler, "last_epoch") or not chained else position_of(chained[0])


def dump_scheduler_state(scheduler: Any) -> dict[str, Any] | None:
    """State of a scheduler as plain values, without what cannot be sent."""
    return None if scheduler is None else _dump(scheduler.state_dict())


def _dump(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _dump(item) for key, item in value.items() if _can_be_sent(item)}
    if isinstance(value, (list, tuple)):
        return [_dump(item) if _can_be_sent(item) else None for item in value]
    if isinstance(value, torch.Tensor):
        return value.item()
    return value


def _can_be_sent(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (bool, int, float, list, tuple)) or (
        isinstance(value, Mapping)
        and not isinstance(value, Counter)
        and all(isinstance(key, (str, int)) for key in value)
    )


def load_scheduler_state(scheduler: Any, received: Any) -> None:
    """Take over what another peer's scheduler of the same kind has in motion.

    Only numbers that this scheduler has, too, are taken; anything else in the message is ignored.

    Args:
        received: from :func:`dump_scheduler_state`; ``None`` leaves the scheduler alone.
    """
    if scheduler is None or not isinstance(received, dict):
        return
    state = scheduler.state_dict()
    scheduler.load_state_dict({key: _merge(value, received.get(key)) for key, value in state.items()})
    own, theirs = state.get("base_lrs"), received.get("base_lrs")
    if own is not None and theirs is not None and list(map(float, own)) != theirs:
        logger.warning("the swarm's schedule starts from learning rates %s instead of %s: taken over", theirs, own)


def _merge(own: Any, given: Any) -> Any:
    """The given value where it has the form of the own one, else the own one."""
    if isinstance(own, Mapping) and not isinstance(own, Counter):
        return {key: _merge(value, given.get(key)) for key, value in own.items()} if isinstance(given, dict) else own
    if isinstance(own, (list, tuple)):
        if not isinstance(given, (list, tuple)) or len(given) != len(own):
            return own
        return type(own)(_merge(mine, theirs) for mine, theirs in zip(own, given, strict=True))
    if isinstance(own, bool) or isinstance(given, bool):
        return given if isinstance(own, bool) and isinstance(given, bool) else own
    if isinstance(own, int) and isinstance(given, int):
        return given
    if isinstance(own, float) and isinstance(given, (int, float)):
        return float(given)
    if isinstance(own, torch.Tensor) and own.numel() == 1 and isinstance(given, (int, float)):
        return torch.full_like(own, given)
    return own
