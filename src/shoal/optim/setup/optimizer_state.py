"""State of optimizers: create it, take it apart for sending, and put a received one in place.

The state is sent as plain values and a list of tensors, both in a fixed order. A hash of the names of all statistics
shows whether two optimizers can exchange their states.

Some optimizers keep numbers of their own in parameter groups, beside the hyper-parameters: schedule-free ones a step
counter, Prodigy its estimate of the step size. These are state and travel with it; see :func:`state_names`.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import math
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shoal.averaging.finite import first_not_finite
from shoal.base.logs import one_line, quoted
from shoal.optim.setup.devices import is_dtensor

logger = logging.getLogger(__name__)

TorchOptimizer = torch.optim.Optimizer

# Statistics are created for this many bytes of parameters at a time. Chosen: bounds the extra memory.
PART_BYTES = 2**26
# A step with zero gradients creates the statistics, but changes these. Here are their values before the first step.
_FRESH_VALUES = {"step": 0.0, "mu_product": 1.0, "exp_inf": 0.0}

# The attributes in which a torch optimizer keeps its hooks. There is no public way to suspend them.
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Types of values that can be sent as they are.
_PLAIN = (bool, int, float, str, bytes, type(None))

# By optimizer: entries of its groups that its steps have made or changed and that are not in its defaults.
_made_by_steps: weakref.WeakKeyDictionary[TorchOptimizer, set[str]] = weakref.WeakKeyDictionary()
# The first part of the paths of tensors in groups; the paths of statistics begin with the number of their parameter.
_GROUPS = "groups"


# By class of optimizers.
_known_arguments: dict[type, frozenset[str]] = {}


def _arguments(kind: type[TorchOptimizer]) -> frozenset[str]:
    """The arguments of an optimizer's constructors, which are the user's hyper-parameters."""
    if kind not in _known_arguments:
        constructors = [vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each)]
        names = (name for each in constructors for name in inspect.signature(each).parameters)
        _known_arguments[kind] = frozenset(names)
    return _known_arguments[kind]


def state_names(optimizer: TorchOptimizer) -> frozenset[str]:
    """Names of the entries of parameter groups that are state of the optimizer, not hyper-parameters of the user.

    A hyper-parameter is an argument of the optimizer's constructor, or an entry that the user or a scheduler has added
    to a group. State is everything else in the defaults, and what the optimizer's steps add to groups or change there.
    """
    own = frozenset(optimizer.defaults) | _made_by_steps.get(optimizer, set())
    return own - _arguments(type(optimizer)) - {"params", "param_names"}


@contextlib.contextmanager
def noting_state(optimizer: TorchOptimizer) -> Iterator[None]:
    """Inside this context, where the optimizer steps, note what it changes in its groups, for :func:`state_names`."""
    known = _arguments(type(optimizer)).union(optimizer.defaults, ("params", "param_names"))
    before = [_versions(group, group.keys() - known) for group in optimizer.param_groups]
    yield
    for group, versions in zip(optimizer.param_groups, before, strict=True):
        after = _versions(group, group.keys() - known)
        if changed := {name for name, version in after.items() if versions.get(name) != version}:
            _made_by_steps.setdefault(optimizer, set()).update(changed)


def _versions(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """For each entry, a value that differs after a change. Tensors are not read, because that may take long."""
    values = {name: group[name] for name in names}
    return {n: (id(v), v._version) if isinstance(v, torch.Tensor) else v for n, v in values.items() if _may_travel(v)}


def _may_travel(value: Any) -> bool:
    """Whether a value can be state: a number or a tensor, or a list of numbers."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return _is_number(value) or isinstance(value, torch.Tensor)


def statistics_of(optimizer: TorchOptimizer) -> list[torch.Tensor]:
    """The tensors of its state, in the order of :func:`dump_optimizer_state`. They are not copied."""
    return [value for _, value in _all_leaves(optimizer) if isinstance(value, torch.Tensor)]


def has_statistics(optimizer: TorchOptimizer) -> bool:
    """Whether the optimizer keeps any tensors of its own."""
    return any(isinstance(value, torch.Tensor) for _, value in _leaves(optimizer.state_dict()["state"]))


def give_entries(optimizer: TorchOptimizer) -> None:
    """Give each parameter an entry among the statistics, even if it is empty.

    Otherwise torch's tools for checkpoints step the optimizer, to let it make its statistics.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.setdefault(parameter, {})


@torch.no_grad()
def initialize_optimizer_state_(optimizer: TorchOptimizer) -> None:
    """Create the optimizer's statistics, with the values that they have before the first step.

    Parameters, gradients and groups are the same afterwards, and no hook is called. (One thing differs: with
    ``dampening``, the first step of SGD is not that of an optimizer whose buffers do not exist yet.) Besides the
    statistics it needs memory for a few parameters at a time, twice their size.
    """
    groups = optimizer.param_groups
    try:
        with _without_hooks(optimizer), _keeping_groups(optimizer):
            for group in groups:
                optimizer.param_groups = [group]
                with noting_state(optimizer):
                    _step_in_parts(optimizer, group)
    finally:
        optimizer.param_groups = groups
    for group in groups:
        for parameter in group["params"]:
            _make_fresh(optimizer, optimizer.state.get(parameter, {}), group)


def _make_fresh(optimizer: TorchOptimizer, statistics: dict[str, Any], group: Mapping[str, Any]) -> None:
    values = dict(_FRESH_VALUES)
    if isinstance(optimizer, torch.optim.ASGD):
        values |= {"eta": float(group["lr"]), "mu": 1.0, "ax": 0.0}
    for name, fresh in values.items():
        if isinstance(statistics.get(name), torch.Tensor):
            statistics[name].fill_(fresh)
        elif name in statistics:
            statistics[name] = type(statistics[name])(fresh)


@contextlib.contextmanager
def _keeping_groups(optimizer: TorchOptimizer) -> Iterator[None]:
    """After this context the groups have the entries that they had before, with the same values."""
    kept = [
        (group, {name: _copied(value) for name, value in group.items() if name != "params"})
        for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        for group, values in kept:
            for name in [name for name in group if name not in values and name != "params"]:
                del group[name]
            for name, (value, copy) in values.items():
                group[name] = value
                if isinstance(value, torch.Tensor):
                    value.copy_(copy)


def _copied(value: Any) -> tuple[Any, Any]:
    return value, value.clone() if isinstance(value, torch.Tensor) else None


def _step_in_parts(optimizer: TorchOptimizer, group: dict[str, Any]) -> None:
    """Step with zero gradients and without weight decay: this creates statistics. A few parameters at a time."""
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
    """Split parameters, in order, into parts of at most :data:`PART_BYTES`; a larger one is a part of its own."""
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
    """Inside this context the optimizer calls no hooks at its steps."""
    kept = {name: vars(optimizer)[name] for name in _HOOKS if name in vars(optimizer)}
    vars(optimizer).update({name: OrderedDict() for name in kept})
    try:
        yield
    finally:
        vars(optimizer).update(kept)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values that are not containers, with their paths. The order is the same in all peers: keys are sorted."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=lambda key: (str(type(key)), key)):
            yield from _leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    elif is_packed(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _leaves(getattr(value, name), f"{path}/{name}")
    else:
        yield path, value


def is_packed(value: Any) -> bool:
    """Whether a statistic is a wrapper around plain tensors, such as the codes and scales of an 8-bit optimizer."""
    return is_traceable_wrapper_subclass(value) and not is_dtensor(value)


def dump_optimizer_state(optimizer: TorchOptimizer) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Take the state of an optimizer apart.

    Returns:
        Plain values, and tensors. :func:`load_optimizer_state` takes both for an optimizer of the same kind. Among the
        values are the names of the tensors, such as ``"/3/exp_avg"`` for parameter 3, which only archives need.
    """
    leaves, own = _all_leaves(optimizer), state_names(optimizer)
    groups = [
        {name: _plain_copy(value) for name, value in group.items() if name != "params" and _is_plain(value)}
        for group in optimizer.param_groups
    ]
    metadata = {
        "structure": _structure(leaves),
        "names": [path for path, value in leaves if isinstance(value, torch.Tensor)],
        "values": [value for _, value in leaves if not isinstance(value, torch.Tensor) and _is_plain(value)],
        "groups": groups,
        # The entries of groups that are state. A newcomer that has not stepped yet cannot know all of them.
        "state_names": sorted(own),
    }
    return metadata, [value for _, value in leaves if isinstance(value, torch.Tensor)]


def without_hyperparameters(metadata: dict[str, Any]) -> dict[str, Any]:
    """The result of :func:`dump_optimizer_state` without hyper-parameters, for a peer that has its own."""
    own = metadata.get("state_names", ())
    groups = [{name: value for name, value in group.items() if name in own} for group in metadata["groups"]]
    return {**metadata, "groups": groups}


def _all_leaves(optimizer: TorchOptimizer) -> list[tuple[str, Any]]:
    """All statistics, then state in parameter groups that is a tensor of several values; each with its path."""
    in_groups = [(path, group[name]) for path, group, name in _large(optimizer)]
    return [*_leaves(optimizer.state_dict()["state"]), *in_groups]


def _large(optimizer: TorchOptimizer) -> Iterator[tuple[str, dict[str, Any], str]]:
    own = sorted(state_names(optimizer))
    for number, group in enumerate(optimizer.param_groups):
        for name in own:
            if isinstance(group.get(name), torch.Tensor) and group[name].numel() != 1:
                yield f"/{_GROUPS}/{number}/{name}", group, name


def _structure(leaves: Sequence[tuple[str, Any]]) -> str:
    """A hash of the names and kinds of all statistics, equal for optimizers that can exchange their states."""
    kinds = ((path, "tensor" if isinstance(value, torch.Tensor) else _is_plain(value)) for path, value in leaves)
    return hashlib.sha256("\n".join(f"{path} {kind}" for path, kind in kinds).encode()).hexdigest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _plain_copy(value: Any) -> Any:
    """A copy without tensors: a hyper-parameter such as the learning rate may be one."""
    if isinstance(value, (list, tuple)):
        return [_plain_copy(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def check_optimizer_state(optimizer: TorchOptimizer, metadata: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Check that a received state fits this optimizer.

    Raises:
        ValueError: it does not fit.
    """
    if not isinstance(metadata, dict) or {"structure", "values", "groups"} - metadata.keys():
        raise ValueError("the optimizer state is malformed")
    leaves = _all_leaves(optimizer)
    own = statistics_of(optimizer)
    if metadata["structure"] != _structure(leaves):
        raise ValueError(f"the other peer's optimizer keeps other statistics than this {type(optimizer).__name__}")
    if len(tensors) != len(own):
        raise ValueError(f"it has {len(tensors)} tensors of optimizer statistics, expected {len(own)}")
    for index, (theirs, mine) in enumerate(zip(tensors, own, strict=True)):
        if not _can_replace(tuple(theirs.shape), tuple(mine.shape)):
            shape, expected = tuple(theirs.shape), tuple(mine.shape)
            raise ValueError(f"optimizer statistic {index} has shape {shape}, expected {expected}")
    if not isinstance(metadata["values"], list) or not isinstance(metadata["groups"], list):
        raise ValueError("the optimizer state is malformed")
    _check_values([value for _, value in leaves if not isinstance(value, torch.Tensor)], metadata["values"])
    if len(metadata["groups"]) != len(optimizer.param_groups):
        raise ValueError(f"{len(metadata['groups'])} parameter groups, expected {len(optimizer.param_groups)}")
    for number, (group, given) in enumerate(zip(optimizer.param_groups, metadata["groups"], strict=True)):
        for name, value in _given_state(optimizer, metadata, group, given).items():
            if not _is_same_kind(value, group.get(name)):
                raise ValueError(
                    f"parameter group {number} has {quoted(name)} = {quoted(value)}, and this peer's is of another "
                    f"kind: {quoted(group.get(name))}"
                )
            if not _is_finite(value) and _is_finite(_plain_copy(group.get(name, 0))):
                raise ValueError(
                    f"parameter group {number} has {quoted(name)} = {quoted(value)}, and this peer's is finite"
                )


def _can_replace(given: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether a statistic may replace one of another shape: for a parameter of zeros, Prodigy keeps a single zero
    instead of a copy."""
    return given == own or not given or not own


def _given_state(
    optimizer: TorchOptimizer, metadata: Mapping[str, Any], group: Mapping[str, Any], given: Any
) -> dict[str, Any]:
    """The entries of a received group that are state.

    The donor decides this only for entries that this peer does not have. Otherwise a donor could overwrite an entry of
    the user or a scheduler, such as ``max_lr``, with any value.
    """
    if not isinstance(given, dict):
        return {}
    theirs = metadata.get("state_names", ())
    told = {name for name in theirs if isinstance(name, str)} if isinstance(theirs, (list, tuple)) else set()
    names = state_names(optimizer) | (told - _arguments(type(optimizer)) - group.keys())
    return {name: value for name, value in given.items() if name in names and _may_travel(value)}


def _is_same_kind(value: Any, own: Any) -> bool:
    """Whether a received number or list can take the place of this peer's value; ``None``: it has none yet."""
    if own is None:
        return True
    if isinstance(own, (list, tuple)) or isinstance(value, (list, tuple)):
        return isinstance(own, (list, tuple)) and isinstance(value, (list, tuple))
    return not isinstance(own, torch.Tensor) or own.numel() == 1


def _is_finite(value: Any) -> bool:
    return all(map(_is_finite, value)) if isinstance(value, (list, tuple)) else math.isfinite(value or 0)


def _check_values(own: Sequence[Any], given: Sequence[Any]) -> None:
    """Check that received statistics that are not tensors can be converted to the types of this peer's own ones.

    Raises:
        ValueError: they cannot.
    """
    own = [value for value in own if _is_plain(value)]
    try:
        for value, theirs in zip(own, given, strict=True):
            _as_own(value, theirs)
    except (TypeError, ValueError, OverflowError) as e:
        raise ValueError(f"optimizer statistics are malformed: {one_line(str(e))}") from None


def _as_own(own: Any, given: Any) -> Any:
    return given if given is None or own is None else type(own)(given)


@torch.no_grad()
def load_optimizer_state(
    optimizer: TorchOptimizer,
    metadata: Any,
    tensors: Sequence[torch.Tensor],
    scheduled: Sequence[str] = (),
) -> None:
    """Put a received state into an optimizer, in place.

    Args:
        optimizer: receives the state.
        metadata, tensors: from :func:`dump_optimizer_state`.
        scheduled: hyper-parameters that are taken over. This peer keeps its own values of all others, and warns if they
            differ.

    Raises:
        ValueError: the state does not fit; nothing has been changed.
    """
    check_optimizer_state(optimizer, metadata, tensors)
    state = optimizer.state
    given_tensors, given_values = iter(tensors), iter(metadata["values"])
    for index, parameter in _indexed_parameters(optimizer):
        if parameter in state:
            state[parameter] = _filled(state[parameter], given_tensors, given_values, f"/{index}")
    for _, group, name in _large(optimizer):
        group[name].copy_(next(given_tensors))
    for number, (group, given) in enumerate(zip(optimizer.param_groups, metadata["groups"], strict=True)):
        received = _given_state(optimizer, metadata, group, given)
        _load_group_state(optimizer, group, received)
        own = state_names(optimizer)
        rest = {name: value for name, value in given.items() if name not in own} if isinstance(given, dict) else None
        _load_hyperparameters(group, rest, scheduled, number)


def _load_group_state(optimizer: TorchOptimizer, group: dict[str, Any], received: Mapping[str, Any]) -> None:
    if new := received.keys() - state_names(optimizer):
        _made_by_steps.setdefault(optimizer, set()).update(new)
    for name, value in received.items():
        own = group.get(name)
        if isinstance(own, torch.Tensor):
            own.fill_(value)
        else:
            group[name] = type(own)(value) if isinstance(own, (list, tuple)) else value


@torch.no_grad()
def keep_mode(optimizer: TorchOptimizer, metadata: Mapping[str, Any]) -> None:
    """Bring parameters from a donor in another mode into this optimizer's own mode.

    Schedule-free optimizers train and evaluate with different parameters, which ``train()`` and ``eval()`` convert.
    Call this when parameters and statistics are in place.
    """
    is_training = None
    for group, given in zip(optimizer.param_groups, metadata["groups"], strict=True):
        own, theirs = group.get("train_mode"), given.get("train_mode") if isinstance(given, dict) else None
        if isinstance(own, bool) and isinstance(theirs, bool) and own != theirs:
            group["train_mode"], is_training = theirs, own
    if is_training is not None:
        (optimizer.train if is_training else optimizer.eval)()  # type: ignore[attr-defined]


def _indexed_parameters(optimizer: TorchOptimizer) -> list[tuple[int, torch.Tensor]]:
    """Parameters with their numbers, in the order in which ``_leaves`` visits their statistics."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return sorted(enumerate(parameters), key=lambda item: item[0])


def _filled(value: Any, tensors: Iterator[torch.Tensor], values: Iterator[Any], path: str) -> Any:
    """The same structure, filled with the given values; tensors are changed in place."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=lambda key: (str(type(key)), key)):
            value[key] = _filled(value[key], tensors, values, path)  # type: ignore[index]
        return value
    if isinstance(value, (list, tuple)):
        return type(value)([_filled(item, tensors, values, path) for item in value])
    if is_packed(value):
        for name in value.__tensor_flatten__()[0]:
            _filled(getattr(value, name), tensors, values, path)
        return value
    if isinstance(value, torch.Tensor):
        given = next(tensors)
        if given.shape != value.shape:
            return given.to(value.device, value.dtype, copy=True)
        return value.copy_(given)
    if _is_plain(value):
        return _as_own(value, next(values))
    return value


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
                "parameter group %d: the swarm trains with %s = %s, this peer keeps its own %r",
                number,
                name,
                quoted(value),
                own,
            )


def _like(own: Any, value: Any) -> Any:
    """A received number, or list of numbers, in the form of this peer's own value; ``None`` if that is impossible."""
    if isinstance(own, (list, tuple)):
        if isinstance(value, (list, tuple)) and len(value) == len(own) and all(map(_is_number, value)):
            return type(own)(map(float, value))
        return None
    return float(value) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def zero_gradients(parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
    """Reset gradients as ``torch.optim.Optimizer.zero_grad`` does."""
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.detach_().zero_()


@contextlib.contextmanager
def without_gradients(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside this context these parameters have no gradients, so that an optimizer leaves them alone."""
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


class GradientCheck:
    """Decides whether an optimizer may step. As with a gradient scaler, it skips if a gradient is infinite or NaN.

    Args:
        names: names of the parameters.
        parameters: the parameters that the optimizer steps.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._named = list(zip(names, parameters, strict=True))
        self._has_told = False

    def are_sound(self, epoch: int) -> bool:
        """Whether all gradients are finite. Of several skipped steps in a row, only the first logs a warning."""
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
