"""Normalizes the users' ``params``, ``optimizer`` and ``scheduler``, or refuses them and says what to do instead."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from shoal.compression.base import plain_name
from shoal.optim.setup.devices import copy_to_host, is_dtensor, is_flat_parameter
from shoal.optim.setup.optimizer_state import TorchOptimizer, give_entries
from shoal.optim.setup.schedules import LRSchedulerBase, check_scheduler

logger = logging.getLogger(__name__)

Parameters = Iterable[torch.Tensor]
ParamGroups = Iterable[dict[str, Any]]
OptimizerFactory = Callable[[Any], TorchOptimizer]
SchedulerFactory = Callable[[TorchOptimizer], Any]


def check_parameters(parameters: Sequence[torch.Tensor], may_be_sharded: bool = False) -> None:
    """Check that all parameters are dense tensors with a shape and all of their values in this process.

    Args:
        may_be_sharded: accept DTensors, of which this process has only a part.

    Raises:
        TypeError, ValueError: one of them is not.
    """
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"parameter {index} must be a tensor, got a {type(parameter).__name__}")
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {index} belongs to a lazy module and has no shape yet: run a batch through the model first"
            )
        if is_flat_parameter(parameter):
            raise ValueError(
                f"parameter {index} is a {type(parameter).__name__}, as FullyShardedDataParallel makes them: use "
                "fully_shard instead, which shoal.MultiProcessOptimizer can train"
            )
        if is_dtensor(parameter) and not may_be_sharded:
            raise ValueError(
                f"parameter {index} is a {type(parameter).__name__}, as fully_shard and tensor parallelism make them: "
                "here each process must hold the whole model. For models that are sharded, or copied, over several "
                "processes use shoal.MultiProcessOptimizer; for sharded ones over slow lines shoal.MultiProcessDiLoCo"
            )
        if parameter.layout is not torch.strided:
            raise ValueError(f"parameter {index} has the layout {parameter.layout}: convert it with .to_dense()")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer steps with dense gradients that were computed before, so that averages can be used.

    Raises:
        ValueError: it needs a closure or sparse gradients, or is in eval mode.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} evaluates the loss several times in each step, but the gradients of other peers are those of one "
            "evaluation: use an optimizer that can step without a closure, such as Adam or SGD"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"{name} needs sparse gradients, and averages of several peers are dense: use Adam, and sparse=False in "
            "embeddings"
        )
    modes = [getattr(optimizer, "train_mode", True), *(g.get("train_mode", True) for g in optimizer.param_groups)]
    if not all(modes):
        raise ValueError(
            f"{name} is in eval mode, in which it cannot step: call its train() before you give it to shoal. A "
            "function that makes it must do so, too"
        )


@dataclass
class TrainingSetup:
    """The parameters, and the optimizer and scheduler that train them."""

    main_parameters: tuple[torch.Tensor, ...]
    """Those of the user's model."""
    parameter_names: tuple[str, ...]
    optimizer_parameters: tuple[torch.Tensor, ...]
    """The parameters that the optimizer steps: the main parameters, or wide copies of them on the CPU."""
    optimizer: TorchOptimizer
    scheduler: Any | None
    given_names: tuple[str, ...] = ()
    """The names that came with the parameters, for archives of the run; empty if they have none."""

    @property
    def is_offloaded(self) -> bool:
        return self.optimizer_parameters is not self.main_parameters


def default_silence(matchmaking_time: float, averaging_timeout: float) -> float:
    """The default for the seconds of silence after which a member of a group is given up.

    It is generous, because a member may be in the middle of a batch when the round begins. But a member that sends no
    averages is given up after twice that, and then there must be time to average its part again.
    """
    return max(min(matchmaking_time, averaging_timeout / 3), averaging_timeout / 4)


def listed(params: Parameters | ParamGroups | None) -> list[Any] | None:
    """Turn iterators of parameters or groups into lists, which can be iterated more than once."""
    if params is None:
        return None
    return [{**item, "params": list(item["params"])} if isinstance(item, dict) else item for item in params]


def main_parameters(
    optimizer: TorchOptimizer | OptimizerFactory, params: list[Any] | None, may_be_sharded: bool = False
) -> list[torch.Tensor]:
    """The user's parameters, in the order in which :func:`prepare_training` has them.

    Args:
        optimizer, params: as the user gives them.
        may_be_sharded: see :func:`check_parameters`.

    Raises:
        TypeError, ValueError: they cannot be trained together with others.
    """
    if isinstance(optimizer, TorchOptimizer):
        check_optimizer(optimizer)
        groups = optimizer.param_groups
    else:
        groups, _ = _as_groups(params or ())
    main = [parameter for group in groups for parameter in group["params"]]
    check_parameters(main, may_be_sharded)
    return main


def with_parameters(params: list[Any], parameters: Sequence[torch.Tensor]) -> list[Any]:
    """The same ``params``, as parameters or groups, with names or without, with other parameters in the same order."""
    left = iter(parameters)

    def other(item: Any) -> Any:
        if isinstance(item, dict):
            return {**item, "params": [other(each) for each in item["params"]]}
        return (item[0], next(left)) if isinstance(item, tuple) else next(left)

    return [other(item) for item in params]


def prepare_training(
    optimizer: TorchOptimizer | OptimizerFactory,
    params: Parameters | ParamGroups | None,
    scheduler: Any | SchedulerFactory | None,
    parameter_names: Iterable[str] | None,
    offload_optimizer: bool,
    may_be_sharded: bool = False,
) -> TrainingSetup:
    """Check and combine the user's arguments.

    Raises:
        ValueError: the arguments contradict each other.
        AssertionError: a parameter is given twice.
    """
    if isinstance(optimizer, TorchOptimizer):
        groups = optimizer.param_groups
    elif callable(optimizer) and params is not None:
        groups, names = _as_groups(params)
        parameter_names = parameter_names if parameter_names is not None else names
    else:
        raise ValueError("give an optimizer instance, or a function that makes one together with params=")
    main = tuple(parameter for group in groups for parameter in group["params"])
    check_parameters(main, may_be_sharded)
    assert len({id(parameter) for parameter in main}) == len(main), "a parameter is given more than once"
    _warn_if_frozen(main)
    named = tuple(map(str, range(len(main)))) if parameter_names is None else tuple(map(plain_name, parameter_names))
    if len(named) != len(main):
        raise ValueError(f"{len(named)} parameter_names for {len(main)} parameters")
    if offload_optimizer and isinstance(optimizer, TorchOptimizer):
        raise ValueError(
            "offload_optimizer=True needs a function that makes the optimizer: it gets copies as parameters"
        )
    stepped = tuple(map(_wide_copy, main)) if offload_optimizer else main
    if not isinstance(optimizer, TorchOptimizer):
        if scheduler is not None and isinstance(scheduler, LRSchedulerBase):
            raise ValueError("a function that makes the optimizer needs a function that makes the scheduler, too")
        optimizer = optimizer(_with_parameters(groups, stepped))
        if not isinstance(optimizer, TorchOptimizer):
            raise TypeError(
                f"the function given as optimizer must return a torch optimizer, got a {type(optimizer).__name__}"
            )
    check_optimizer(optimizer)
    give_entries(optimizer)
    if offload_optimizer:
        _step_on_cpu(optimizer)
    if scheduler is not None and not isinstance(scheduler, LRSchedulerBase) and callable(scheduler):
        scheduler = scheduler(optimizer)
    if scheduler is not None:
        check_scheduler(scheduler)
    # A torch optimizer that was made from named parameters keeps the names in its groups.
    of_groups = [plain_name(name) for group in optimizer.param_groups for name in group.get("param_names", ())]
    given = tuple(of_groups) if parameter_names is None else named
    return TrainingSetup(main, named, stepped, optimizer, scheduler, given if len(given) == len(main) else ())


def _as_groups(params: Parameters | ParamGroups) -> tuple[list[dict[str, Any]], list[str] | None]:
    """The parameter groups, and the names if the parameters came with names."""
    given: list[Any] = list(params)
    if not given:
        raise ValueError("params is empty: there is nothing to train")
    are_groups = all(isinstance(item, dict) for item in given)
    groups = [{**group, "params": list(group["params"])} for group in given] if are_groups else [{"params": given}]
    pairs = [item for group in groups for item in group["params"]]
    if not all(isinstance(item, tuple) and len(item) == 2 for item in pairs):
        return groups, None
    named = [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups]
    return named, [plain_name(name) for name, _ in pairs]


def _with_parameters(groups: list[dict[str, Any]], parameters: tuple[torch.Tensor, ...]) -> list[dict[str, Any]]:
    """The same groups with other parameters in the same order."""
    left = iter(parameters)
    return [{**group, "params": [next(left) for _ in group["params"]]} for group in groups]


def _wide_copy(parameter: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return torch.nn.Parameter(copy_to_host(parameter, wide), requires_grad=parameter.requires_grad)


def _step_on_cpu(optimizer: TorchOptimizer) -> None:
    """Turn off ``capturable``: capturing steps in device graphs does not work on the CPU."""
    captured = [group for group in optimizer.param_groups if group.get("capturable")]
    for group in captured:
        group["capturable"] = False
    if captured:
        logger.warning(
            "capturable=True is ignored: this optimizer steps copies of the parameters on the CPU. With "
            "offload_optimizer=False it steps them on their device"
        )


def _warn_if_frozen(parameters: tuple[torch.Tensor, ...]) -> None:
    total = sum(parameter.numel() for parameter in parameters)
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    if frozen > total / 2:
        logger.warning(
            "%d of %d values do not require gradients, yet they are averaged: give only parameters that are trained",
            frozen,
            total,
        )


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module that was compiled, or that is trained by several processes or devices."""
    around = torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel
    while isinstance(model, around) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, around) else model._modules["_orig_mod"]  # type: ignore[assignment]
    return model


def names_in(model: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """The names of parameters in a model; empty if it lacks one of them."""
    known = {id(parameter): plain_name(name) for name, parameter in unwrapped(model).named_parameters()}
    found = tuple(known.get(id(parameter), "") for parameter in parameters)
    return found if all(found) else ()


class MainGroup(MutableMapping[str, Any]):
    """A parameter group with the user's parameters. All other entries are those of the optimizer's group.

    Args:
        optimizer: the optimizer, which has copies of the parameters.
        index: index of the group.
        parameters: the user's parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, index: int, parameters: list[torch.Tensor]) -> None:
        self._optimizer, self._index, self._parameters = optimizer, index, parameters

    @property
    def _group(self) -> dict[str, Any]:
        # Looked up each time, because loading a checkpoint replaces the group.
        return self._optimizer.param_groups[self._index]

    def __getitem__(self, name: str) -> Any:
        return self._parameters if name == "params" else self._group[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "params":
            raise ValueError("the parameters of a run in progress cannot be exchanged: all peers must have the same")
        self._group[name] = value

    def __delitem__(self, name: str) -> None:
        if name == "params":
            raise ValueError("the parameters of a run in progress cannot be removed: all peers must have the same")
        del self._group[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def __repr__(self) -> str:
        return repr(dict(self))


def main_groups(optimizer: torch.optim.Optimizer, main_parameters: Sequence[torch.Tensor]) -> tuple[MainGroup, ...]:
    """All groups of the optimizer, in order, with the user's parameters.

    Args:
        main_parameters: the user's parameters, in the order of the optimizer's.
    """
    left = iter(main_parameters)
    return tuple(
        MainGroup(optimizer, index, [next(left) for _ in group["params"]])
        for index, group in enumerate(optimizer.param_groups)
    )
