"""State of optimizers and learning rate schedules: make it exist, take it apart for sending, put a received one in."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shoal.averaging.finite import first_not_finite

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


TorchOptimizer = torch.optim.Optimizer

# Parameters whose statistics are made together.
PART_BYTES = 2**26
# Statistics of torch's optimizers that a step with zero gradients changes, and their values before the first step.
_FRESH_VALUES = {"step": 0.0, "mu_product": 1.0, "exp_inf": 0.0}

_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr")
_SCHEDULED_WITH_MOMENTUM = ("momentum", "betas", "base_momentum", "max_momentum")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_PLAIN = (bool, int, float, str, bytes, type(None))


def has_statistics(optimizer: TorchOptimizer) -> bool:
    """Whether the optimizer keeps any tensors of its own."""
    return any(isinstance(value, torch.Tensor) for _, value in _leaves(optimizer.state_dict()["state"]))


@torch.no_grad()
def initialize_optimizer_state_(optimizer: TorchOptimizer) -> None:
    """Make the optimizer's statistics exist, with the values that they have before the first step.

    Parameters, gradients and hyper-parameters are afterwards what they were, and no hook is called. (Only the first
    step of SGD with ``dampening`` differs from that of an optimizer whose buffers do not exist yet.) Beside the
    statistics it takes memory for a few parameters at a time, twice their size.
    """
    groups = optimizer.param_groups
    try:
        with _without_hooks(optimizer):
            for group in groups:
                optimizer.param_groups = [group]
                _step_in_parts(optimizer, group)
    finally:
        optimizer.param_groups = groups
    for statistics in optimizer.state.values():
        for name, fresh in _FRESH_VALUES.items():
            if isinstance(statistics.get(name), torch.Tensor):
                statistics[name].fill_(fresh)
            elif name in statistics:
                statistics[name] = type(statistics[name])(fresh)


def _step_in_parts(optimizer: TorchOptimizer, group: dict[str, Any]) -> None:
    """Step with zero gradients, which leaves parameters as they are."""
    parameters, decay = group["params"], group.get("weight_decay")
    try:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
        for part in _parts(parameters):
            group["params"] = part
            _step_in_place(optimizer, part)
    finally:
        group["params"] = parameters
        if "weight_decay" in group:
            group["weight_decay"] = decay


def _parts(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The same ones in order, at most :data:`PART_BYTES` together, or one that is larger."""
    part: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        size += parameter.nbytes
        if part and size > PART_BYTES:
            yield part
            part, size = [], parameter.nbytes
        part.append(parameter)
    yield part


def _step_in_place(optimizer: TorchOptimizer, parameters: Sequence[torch.Tensor]) -> None:
    values = [p.detach().clone() for p in parameters]
    grads = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        optimizer.step()
    finally:
        for p, value, grad in zip(parameters, values, grads, strict=True):
            p.copy_(value)
            p.grad = grad


@contextlib.contextmanager
def _without_hooks(optimizer: TorchOptimizer) -> Iterator[None]:
    """Inside this context nobody is told of steps."""
    kept = {name: vars(optimizer)[name] for name in _HOOKS if name in vars(optimizer)}
    vars(optimizer).update({name: OrderedDict() for name in kept})
    try:
        yield
    finally:
        vars(optimizer).update(kept)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything that is no container, with where it is, in an order that does not depend on insertion."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=lambda key: (str(type(key)), key)):
            yield from _leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield path, value


def dump_optimizer_state(optimizer: TorchOptimizer) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Take the state of an optimizer apart.

    Returns:
        Plain values, and tensors; both are understood by :func:`load_optimizer_state` of an optimizer of the same kind.
    """
    state = optimizer.state_dict()
    leaves = list(_leaves(state["state"]))
    groups = [
        {name: _plain_copy(value) for name, value in group.items() if name != "params" and _is_plain(value)}
        for group in state["param_groups"]
    ]
    metadata = {
        "structure": _structure(leaves),
        "values": [value for _, value in leaves if not isinstance(value, torch.Tensor) and _is_plain(value)],
        "groups": groups,
    }
    return metadata, [value for _, value in leaves if isinstance(value, torch.Tensor)]


def _structure(leaves: Sequence[tuple[str, Any]]) -> str:
    """Names and kinds of all statistics as one short text, equal for optimizers that can exchange their states."""
    kinds = ((path, "tensor" if isinstance(value, torch.Tensor) else _is_plain(value)) for path, value in leaves)
    return hashlib.sha256("\n".join(f"{path} {kind}" for path, kind in kinds).encode()).hexdigest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _plain_copy(value: Any) -> Any:
    """A learning rate may be a tensor."""
    if isinstance(value, (list, tuple)):
        return [_plain_copy(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def check_optimizer_state(optimizer: TorchOptimizer, metadata: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Check that a received state fits this optimizer.

    Raises:
        ValueError: it does not; nothing has been changed.
    """
    if not isinstance(metadata, dict) or {"structure", "values", "groups"} - metadata.keys():
        raise ValueError("the optimizer state is malformed")
    leaves = list(_leaves(optimizer.state_dict()["state"]))
    own = [value for _, value in leaves if isinstance(value, torch.Tensor)]
    if metadata["structure"] != _structure(leaves):
        raise ValueError(f"the other peer's optimizer keeps other statistics than this {type(optimizer).__name__}")
    shapes, own_shapes = [tuple(t.shape) for t in tensors], [tuple(t.shape) for t in own]
    if shapes != own_shapes:
        raise ValueError(f"optimizer statistics have shapes {shapes}, expected {own_shapes}")
    if not isinstance(metadata["values"], list) or not isinstance(metadata["groups"], list):
        raise ValueError("the optimizer state is malformed")
    if len(metadata["groups"]) != len(optimizer.param_groups):
        raise ValueError(f"{len(metadata['groups'])} parameter groups, expected {len(optimizer.param_groups)}")


@torch.no_grad()
def load_optimizer_state(
    optimizer: TorchOptimizer,
    metadata: Any,
    tensors: Sequence[torch.Tensor],
    scheduled: Sequence[str] = (),
) -> None:
    """Put a received state into an optimizer, in place.

    Args:
        metadata, tensors: from :func:`dump_optimizer_state`.
        scheduled: hyper-parameters that are taken over; the others stay this peer's own, with a warning if they differ.

    Raises:
        ValueError: the state does not fit; nothing has been changed.
    """
    check_optimizer_state(optimizer, metadata, tensors)
    state = optimizer.state
    given_tensors, given_values = iter(tensors), iter(metadata["values"])
    for index, parameter in _indexed_parameters(optimizer):
        if parameter in state:
            state[parameter] = _filled(state[parameter], given_tensors, given_values, f"/{index}")
    for number, (group, given) in enumerate(zip(optimizer.param_groups, metadata["groups"], strict=True)):
        _load_hyperparameters(group, given, scheduled, number)


def _indexed_parameters(optimizer: TorchOptimizer) -> list[tuple[int, torch.Tensor]]:
    """Parameters in the order in which ``_leaves`` walks through their statistics."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return sorted(enumerate(parameters), key=lambda item: item[0])


def _filled(value: Any, tensors: Iterator[torch.Tensor], values: Iterator[Any], path: str) -> Any:
    """The same structure with the given contents, tensors in place."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=lambda key: (str(type(key)), key)):
            value[key] = _filled(value[key], tensors, values, path)  # type: ignore[index]
        return value
    if isinstance(value, (list, tuple)):
        return type(value)([_filled(item, tensors, values, path) for item in value])
    if isinstance(value, torch.Tensor):
        return value.copy_(next(tensors))
    if _is_plain(value):
        given = next(values)
        return given if given is None or value is None else type(value)(given)
    return value


def scheduled_hyperparameters(scheduler: Any) -> tuple[str, ...]:
    """Which hyper-parameters a scheduler moves, so that a newcomer must take them over."""
    if scheduler is None:
        return ()
    parts = [scheduler, *getattr(scheduler, "_schedulers", ())]
    if any(getattr(part, "cycle_momentum", False) for part in parts):
        return _SCHEDULED + _SCHEDULED_WITH_MOMENTUM
    return _SCHEDULED


def _load_hyperparameters(group: dict[str, Any], given: Any, scheduled: Sequence[str], number: int) -> None:
    if not isinstance(given, dict):
        return
    for name, value in given.items():
        own = group.get(name)
        if name == "params" or name not in group or not _is_plain(own) or _plain_copy(own) == value:
            continue
        as_own = _like(own, value)
        if as_own is None:
            continue
        if name in scheduled:
            if isinstance(own, torch.Tensor):
                own.fill_(as_own)
            else:
                group[name] = as_own
        elif _plain_copy(own) != as_own:
            logger.warning(
                "parameter group %d: the swarm trains with %s = %r, this peer keeps its own %r",
                number,
                name,
                value,
                own,
            )


def _like(own: Any, value: Any) -> Any:
    """A received number, or list of numbers, in the form of this peer's own one; ``None`` if it is something else."""
    if isinstance(own, (list, tuple)):
        if isinstance(value, (list, tuple)) and len(value) == len(own) and all(map(_is_number, value)):
            return type(own)(map(float, value))
        return None
    return float(value) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def zero_gradients(parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
    """Forget gradients as ``torch.optim.Optimizer.zero_grad`` does."""
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.detach_().zero_()


class GradientCheck:
    """Whether an optimizer may step. If not, it skips the step, as with a gradient scaler.

    Args:
        names: of the parameters.
        parameters: what the optimizer steps.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._named = list(zip(names, parameters, strict=True))
        self._has_told = False

    def are_sound(self, epoch: int) -> bool:
        """Whether all gradients are finite; the first of several steps that are skipped is told."""
        named = [(name, parameter.grad) for name, parameter in self._named if parameter.grad is not None]
        bad = first_not_finite([grad for _, grad in named])
        if bad is not None:
            logger.log(
                logging.DEBUG if self._has_told else logging.WARNING,
                "the optimizer skips the step to epoch %d and stays as it is: the gradient of parameter %r has values "
                "that are NaN or infinite. Look at the data, the loss and the learning rate",
                epoch,
                named[bad][0],
            )
        self._has_told = bad is not None
        return bad is None
