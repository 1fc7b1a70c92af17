"""What cannot be trained together with others: refused at once, with what to do about it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

# Classes of parameters that are spread over processes. Whose module is not loaded, of that there is none.
_SHARDED = {
    "torch.distributed.tensor": "DTensor",
    "torch.distributed._tensor": "DTensor",
    "torch.distributed.fsdp._flat_param": "FlatParameter",
}

_SPARSE_MODULES = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def check_parameters(parameters: Sequence[torch.Tensor]) -> None:
    """All of them have a shape, and all of their values are here.

    Raises:
        TypeError, ValueError: not so.
    """
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"parameter {index} must be a tensor, got a {type(parameter).__name__}")
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {index} belongs to a lazy module and has no shape yet: run a batch through the model first"
            )
        if _is_sharded(parameter):
            raise ValueError(
                f"parameter {index} is a {type(parameter).__name__}, as FSDP and tensor parallelism make them: each "
                "peer must hold the whole model. For several processes with a copy each, use "
                "shoal.MultiProcessOptimizer"
            )
        if parameter.layout is not torch.strided:
            raise ValueError(f"parameter {index} has the layout {parameter.layout}: convert it with .to_dense()")


def _is_sharded(parameter: torch.Tensor) -> bool:
    modules = ((sys.modules.get(module), name) for module, name in _SHARDED.items())
    classes = tuple(getattr(module, name) for module, name in modules if hasattr(module, name))
    return isinstance(parameter, classes)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """One step of it is one use of averaged gradients.

    Raises:
        ValueError: not of this one.
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


def check_modules(modules: Iterable[Any]) -> None:
    """The modules that the parameters belong to make dense gradients.

    Raises:
        ValueError: one of them does not.
    """
    for module in modules:
        if isinstance(module, _SPARSE_MODULES) and module.sparse:
            raise ValueError(
                f"{module} makes sparse gradients, and averages of several peers are dense: make it with sparse=False"
            )


def check_gradients(gradients: Sequence[torch.Tensor]) -> None:
    """All of them are dense.

    Raises:
        ValueError: one is not.
    """
    for gradient in gradients:
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"a gradient of shape {tuple(gradient.shape)} is sparse, and averages of several peers are dense: make "
                "embeddings with sparse=False"
            )
