"""Learning rate schedules: keep them at the epoch of the swarm, and give them to newcomers.

A schedule makes one step in each epoch. A peer that has to catch up steps it several times. Over a long distance it
jumps instead, because other peers claim the epoch, and a liar could make it step for hours. Most schedules can compute
the learning rate of any epoch; see :func:`catch_up` for the others.
"""

from __future__ import annotations

import bisect
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import lr_scheduler

from shoal.base.logs import quoted

logger = logging.getLogger(__name__)

# Up to this many steps are made one by one. Chosen: this takes a few tenths of a second.
MOST_STEPS = 10_000

# Hyper-parameters that torch's schedulers change or read, without and with ``cycle_momentum``.
_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr")
_SCHEDULED_WITH_MOMENTUM = ("momentum", "betas", "base_momentum", "max_momentum")

# What changes in the state of torch's own schedules. All else comes from the user, such as the size of a step.
_MOVING = frozenset({"last_epoch", "_step_count", "_last_lr", "base_lrs", "T_cur", "T_i", "_schedulers"})
# Another peer's learning rate may be at most this many times this peer's largest. Chosen: more is a mistake, or a lie.
_LARGEST_RATIO = 1000.0

LRSchedulerBase = torch.optim.lr_scheduler.LRScheduler
"""Base class of torch's schedulers."""


def check_scheduler(scheduler: Any) -> None:
    """Check that a schedule depends only on the number of steps, so that all peers get the same learning rate.

    Raises:
        ValueError: it depends on something else.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau depends on a metric that differs between peers: use a schedule that depends on epochs"
        )


def catch_up(scheduler: Any, epoch: int) -> None:
    """Bring the scheduler forward to this epoch; it never goes back.

    Over at most :data:`MOST_STEPS` epochs it is stepped. The learning rates are then exactly those of a peer that was
    there all the time. Over more epochs it jumps: ``last_epoch`` is set, and the rates come from the schedule's closed
    form, the same up to rounding. Some schedules have no closed form, because each rate follows from the one before
    (``MultiplicativeLR``, some ``ChainedScheduler``, perhaps the user's own). These make a single step at the end of
    the jump, from the rates that the groups have at that time, for example those of a downloaded state.

    Raises:
        ValueError: the schedule ends before this epoch, as ``OneCycleLR`` does.
    """
    distance = epoch - position_of(scheduler)
    if distance <= 0:
        return
    # After a download, other peers have made the optimizer's steps. Torch would warn that the scheduler steps first.
    scheduler.optimizer._opt_called = True
    if distance > MOST_STEPS:
        logger.warning("the schedule jumps over %d epochs, to epoch %d", distance, epoch)
        _jump(scheduler, epoch)
        return
    while position_of(scheduler) < epoch:
        scheduler.step()


def take_back(scheduler: Any, epoch: int) -> None:
    """Bring the scheduler back to this epoch if it is ahead, such as after a checkpoint that counted other steps."""
    if position_of(scheduler) > epoch:
        scheduler.optimizer._opt_called = True
        _jump(scheduler, epoch)


class HasEpoch(Protocol):
    """An optimizer that steps with others."""

    @property
    def local_epoch(self) -> int:
        """How many steps it has made with them."""


class HiveMindScheduler:
    """Wraps a scheduler so that it advances only when the swarm has made a step, however often a trainer steps it.

    The learning rate is always that of ``optimizer.local_epoch``. A ``DiLoCo`` with ``sync_every`` advances it itself,
    with its inner steps. All other attributes are read from the scheduler.

    Args:
        optimizer: its ``local_epoch`` counts.
        scheduler: a torch scheduler.
    """

    def __init__(self, optimizer: HasEpoch, scheduler: Any) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler

    def step(self, epoch: int | None = None) -> None:
        """Catch up with the swarm.

        Args:
            epoch: ignored; the epochs of trainers are not those of the swarm.
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
        if name == "scheduler":  # not set yet, such as while the object is being copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)


# Functions whose constants cannot be read are compared by their factors at these epochs. Chosen: they span any run.
_SAMPLED_EPOCHS = (1, 10, 100, 1000, 10_000)


def describe_schedule(scheduler: Any) -> str:
    """The kind of a schedule and its constants. Peers with the same schedule get the same text."""
    if scheduler is None:
        return "none"
    name = type(scheduler).__name__
    if not _is_of_torch(scheduler):
        return name  # it is unknown what is constant in its state
    told = [describe_schedule(part) for part in getattr(scheduler, "_schedulers", ())]
    values = {"milestones": getattr(scheduler, "_milestones", None), **vars(scheduler)}
    for key, value in sorted(values.items()):
        if not key.startswith("_") and key not in _MOVING and key != "verbose" and _is_constant(value):
            told.append(f"{key}={_written(value)}")
    told += [_describe_function(function) for function in getattr(scheduler, "lr_lambdas", ())]
    return f"{name}({', '.join(told)})"


def _is_constant(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_constant(each) for each in value)
    if isinstance(value, (list, tuple)):
        return all(_is_constant(each) for each in value)
    return isinstance(value, (bool, int, float, str))


def _written(value: Any) -> str:
    if isinstance(value, Mapping):  # a counter of milestones
        return f"[{', '.join(_written(each) for each in sorted(value))}]"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_function(function: Any) -> str:
    """A function of the epoch: the arguments that were bound to it, or else its values."""
    if isinstance(function, functools.partial):
        bound: dict[Any, Any] = {**dict(enumerate(function.args)), **function.keywords}
        if bound and all(map(_is_constant, bound.values())):
            return ", ".join(f"{name}={_written(value)}" for name, value in bound.items())
    factors = list[str]()
    for epoch in _SAMPLED_EPOCHS:
        try:
            factors.append(f"{round(float(function(epoch)), 10):.5g}")  # rounding differs between machines
        except Exception:  # a function of the user's, which may know no such epoch
            factors.append("–")
    return f"factors {', '.join(factors)} at epochs {', '.join(map(str, _SAMPLED_EPOCHS))}"


def forget_schedule(optimizer: torch.optim.Optimizer) -> None:
    """Restore the initial learning rates, so that another scheduler starts from the beginning."""
    for group in optimizer.param_groups:
        if "initial_lr" in group:
            group["lr"] = group.pop("initial_lr")


def _jump(scheduler: Any, epoch: int) -> None:
    rates = _rates_at(scheduler, epoch)
    if rates is None:
        _set_position(scheduler, epoch - 1)
        scheduler.step()
        return
    _set_position(scheduler, epoch)
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def _rates_at(scheduler: Any, epoch: int) -> list[float] | None:
    """The learning rate of each group at any epoch; ``None`` if it can only be computed from the one before."""
    parts = getattr(scheduler, "_schedulers", None)
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        number = bisect.bisect_right(scheduler._milestones, epoch)
        return _rates_at(scheduler._schedulers[number], epoch - (scheduler._milestones[number - 1] if number else 0))
    if parts and all(type(part) in _FACTORS for part in parts):
        return _rates_of_chain([_rates_at(part, epoch) for part in parts], [part.base_lrs for part in parts])
    closed_form: Callable[[], list[float]] | None = getattr(scheduler, "_get_closed_form_lr", None)
    if closed_form is None:
        return None
    before, scheduler.last_epoch = scheduler.last_epoch, epoch
    try:
        return [float(rate) for rate in closed_form()]
    except OverflowError:
        return None
    finally:
        scheduler.last_epoch = before


# These multiply the rate by a factor that depends only on the epoch, so their factors can be multiplied in a chain.
_FACTORS = (
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.PolynomialLR,
)


def _rates_of_chain(rates: Sequence[list[float] | None], bases: Sequence[Sequence[float]]) -> list[float] | None:
    """The learning rates of a chain: the first base rate of each group, times the factors of all parts."""
    together = [float(base) for base in bases[0]]
    for of_part, of_base in zip(rates, bases, strict=True):
        if of_part is None:
            return None
        together = [
            whole * (rate / base if base else 1.0)
            for whole, rate, base in zip(together, of_part, map(float, of_base), strict=True)
        ]
    return together


def _set_position(scheduler: Any, epoch: int) -> None:
    """Set the scheduler and its parts to this number of steps without making them."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        number = bisect.bisect_right(scheduler._milestones, epoch)
        begins_at = scheduler._milestones[number - 1] if number else 0
        _set_position(scheduler._schedulers[number], epoch - begins_at)
    elif isinstance(scheduler, lr_scheduler.CosineAnnealingWarmRestarts):
        scheduler.step(epoch)  # it has more state than last_epoch, such as the length of the present cycle
    else:
        for part in getattr(scheduler, "_schedulers", ()):
            _set_position(part, epoch)
    if hasattr(scheduler, "last_epoch"):
        scheduler.last_epoch = epoch


def position_of(scheduler: Any) -> int:
    """How many steps the scheduler has made."""
    chained = getattr(scheduler, "_schedulers", None)
    return int(scheduler.last_epoch) if hasattr(scheduler, "last_epoch") or not chained else position_of(chained[0])


def dump_scheduler_state(scheduler: Any) -> dict[str, Any] | None:
    """State of a scheduler as plain values that can be sent to others; ``None`` without a scheduler."""
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


def load_scheduler_state(scheduler: Any, received: Any, *, of_others: bool = False) -> None:
    """Take over the state of another scheduler of the same kind.

    Only numbers that this scheduler has as well are taken over, so a message can put nothing else into it.

    Args:
        received: from :func:`dump_scheduler_state`; ``None`` leaves the scheduler alone.
        of_others: it is from another peer. Then a scheduler of torch keeps its own constants, and warns if they differ.
    """
    if scheduler is None or not isinstance(received, dict):
        return
    state = scheduler.state_dict()
    names = _MOVING if of_others and _is_of_torch(scheduler) else None
    merged = _merge(state, received, names)
    if names is not None and (other := {k: received.get(k) for k in state if merged[k] != _merge(state, received)[k]}):
        own_values = {name: state[name] for name in other}
        logger.warning("the swarm's schedule has %s, this peer keeps its own %s", quoted(other), own_values)
    scheduler.load_state_dict(merged)
    own, theirs = state.get("base_lrs"), received.get("base_lrs")
    if own is not None and theirs is not None and list(map(float, own)) != theirs:
        logger.warning(
            "the swarm's schedule starts from learning rates %s instead of %s: taken over", quoted(theirs), own
        )


def _merge(own: Any, given: Any, names: frozenset[str] | None = None) -> Any:
    """The received value if it has the same form as this scheduler's own one, else the own one.

    Args:
        names: only values of these names are taken over; ``None``: all.
    """
    if isinstance(own, Mapping) and not isinstance(own, Counter):
        theirs = given if isinstance(given, dict) else {}
        return {
            key: _merge(value, theirs.get(key), names) if names is None or key in names else value
            for key, value in own.items()
        }
    if isinstance(own, (list, tuple)):
        if not isinstance(given, (list, tuple)) or len(given) != len(own):
            return own
        return type(own)(_merge(mine, theirs, names) for mine, theirs in zip(own, given, strict=True))
    if isinstance(own, bool) or isinstance(given, bool):
        return given if isinstance(own, bool) and isinstance(given, bool) else own
    if isinstance(own, int) and isinstance(given, int):
        return given
    if isinstance(own, float) and isinstance(given, (int, float)):
        return float(given)
    if isinstance(own, torch.Tensor) and own.numel() == 1 and isinstance(given, (int, float)):
        return torch.full_like(own, given)
    return own


def check_received_schedule(scheduler: Any, received: Any, groups: Sequence[Any], epoch: int) -> None:
    """Check that the numbers of another peer's schedule, and its learning rates, are plausible.

    Args:
        received: from :func:`dump_scheduler_state`.
        groups: values of the other peer's parameter groups.
        epoch: of the state to which all this belongs.

    Raises:
        ValueError: they cannot.
    """
    if scheduler is None:
        return
    own_groups, names = scheduler.optimizer.param_groups, scheduled_hyperparameters(scheduler)
    own_rates = [own[name] for own in own_groups for name in _SCHEDULED if name in own]
    sound = [float(rate) for rate in own_rates if isinstance(rate, (int, float, torch.Tensor))]
    most = _LARGEST_RATIO * max([*sound, *map(float, getattr(scheduler, "base_lrs", ()))], default=0.0) or math.inf
    for own, given in zip(own_groups, groups, strict=False):
        for name in names if isinstance(given, dict) else ():
            largest = 1.0 if name in _SCHEDULED_WITH_MOMENTUM else most
            for value in _numbers(given.get(name)):
                if not 0 <= value <= largest:
                    raise ValueError(f"its {name} of {value:g} cannot be right: this peer has {own.get(name)}")
    for value in _numbers(_found_in(received, {"base_lrs", "_last_lr"})):
        if not 0 <= value <= most:
            raise ValueError(f"its schedule has a learning rate of {value:g}, which cannot be right")
    # A schedule may begin in its middle. For schedules of other packages, it is unknown what they count.
    latest = max(epoch, getattr(scheduler, "last_epoch", epoch)) if _is_of_torch(scheduler) else math.inf
    for value in _numbers(_found_in(received, {"last_epoch", "T_cur"})):
        if not -1 <= value <= latest:
            raise ValueError(f"its schedule is at step {value:g}, in epoch {epoch}")
    for value in _numbers(_found_in(received, {"T_i"})):
        if value < 1:
            raise ValueError(f"a cycle of its schedule has {value:g} steps")


def _is_of_torch(scheduler: Any) -> bool:
    return type(scheduler).__module__ == lr_scheduler.__name__


def _found_in(received: Any, names: Collection[str]) -> list[Any]:
    """All values of these names in a received schedule and its parts."""
    if isinstance(received, (list, tuple)):
        return [value for part in received for value in _found_in(part, names)]
    if not isinstance(received, dict):
        return []
    return [
        found
        for name, value in received.items()
        for found in ([value] if name in names else _found_in(value, names) if name == "_schedulers" else [])
    ]


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in a received value."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def scheduled_hyperparameters(scheduler: Any) -> tuple[str, ...]:
    """The hyper-parameters that a scheduler changes, which a newcomer must therefore take over."""
    if scheduler is None:
        return ()
    parts = [scheduler, *getattr(scheduler, "_schedulers", ())]
    if any(getattr(part, "cycle_momentum", False) for part in parts):
        return _SCHEDULED + _SCHEDULED_WITH_MOMENTUM
    return _SCHEDULED
