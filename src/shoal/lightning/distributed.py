"""Distributed utilities over ``torch.distributed``, for processes that train one model in lockstep, such as under DDP.

They have nothing to do with the swarm. In a peer with a single process there is no process group, and these functions
change nothing. Lightning need not be installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "AllGatherGrad",
    "all_gather_ddp_if_available",
    "distributed_available",
    "gather_all_tensors",
    "get_default_process_group_backend_for_device",
    "init_dist_connection",
    "rank_zero_only",
    "register_ddp_comm_hook",
    "sync_ddp",
    "sync_ddp_if_available",
    "tpu_distributed",
]

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# Launchers set these variables before a process group exists.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


class ClusterEnvironment(Protocol):
    """Where the processes of a group meet. Lightning's cluster environments have this interface."""

    main_address: str
    main_port: int

    def global_rank(self) -> int: ...

    def world_size(self) -> int: ...


# --- ranks and availability -------------------------------------------------------------------------------------------


def tpu_distributed() -> bool:
    """Whether several XLA workers train together."""
    if importlib.util.find_spec("torch_xla") is None:
        return False
    return int(importlib.import_module("torch_xla.runtime").world_size()) > 1


def distributed_available() -> bool:
    """Whether this process belongs to a process group."""
    return (dist.is_available() and dist.is_initialized()) or tpu_distributed()


def get_default_process_group_backend_for_device(device: torch.device) -> str:
    """``"nccl"`` for CUDA, else ``"gloo"``."""
    return "nccl" if device.type == "cuda" else "gloo"


def current_rank() -> int:
    """The rank in the process group; before there is one, the rank that the launcher has set; 0 without either.

    Raises:
        ValueError: the launcher has set a value that is not a number.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    name = next((name for name in _RANK_VARIABLES if name in os.environ), None)
    if name is None:
        return 0
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(
            f"the environment variable {name} must be the number of this process, such as 0, got {os.environ[name]!r}: "
            f"unset {name}, or start the program with a launcher that sets it, such as torchrun"
        ) from None


def rank_zero_only(fn: Callable[P, T]) -> Callable[P, T | None]:
    """Decorator: run the function only in the process of rank 0; in the others it returns ``None``.

    The rank is that of :func:`current_rank`.
    """

    @functools.wraps(fn)
    def run_on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return fn(*args, **kwargs) if current_rank() == 0 else None

    return run_on_rank_zero


_info = rank_zero_only(logger.info)
_debug = rank_zero_only(logger.debug)


def init_dist_connection(
    cluster_environment: ClusterEnvironment,
    torch_distributed_backend: str,
    global_rank: int | None = None,
    world_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Join the process group, unless this process has already joined one.

    Args:
        cluster_environment: tells where the processes meet, and the rank and number of processes if they are not given.
        torch_distributed_backend: ``"gloo"``, ``"nccl"``, …
        global_rank: of this process.
        world_size: number of processes.
        kwargs: further options of ``torch.distributed.init_process_group``.

    Raises:
        RuntimeError: torch was built without ``torch.distributed``.
    """
    if not dist.is_available():
        raise RuntimeError("this build of torch has no torch.distributed: it cannot train with several processes")
    if dist.is_initialized():
        logger.debug("the process group exists already")
        return
    rank = cluster_environment.global_rank() if global_rank is None else global_rank
    size = cluster_environment.world_size() if world_size is None else world_size
    os.environ["MASTER_ADDR"] = cluster_environment.main_address
    os.environ["MASTER_PORT"] = str(cluster_environment.main_port)
    logger.info("joining the process group as rank %d of %d", rank, size)
    dist.init_process_group(torch_distributed_backend, rank=rank, world_size=size, **kwargs)
    processes = f"{size} process" if size == 1 else f"{size} processes"
    _info("process group of %s with %s is complete", processes, torch_distributed_backend)


# --- gathering --------------------------------------------------------------------------------------------------------


def _check_membership(group: Any) -> None:
    """Check that this process is in the group; torch would only warn, and report sizes and ranks of -1.

    Raises:
        ValueError: this process is not in the group.
    """
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"process {dist.get_rank()} does not belong to the group: call this only in the processes that do"
        )


def _gather_equal(tensor: Tensor, group: Any) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


@torch.no_grad()
def gather_all_tensors(result: Tensor, group: Any | None = None) -> list[Tensor]:
    """Get the tensors of all processes of a group, in the order of their ranks in it.

    Args:
        result: this process' tensor. All must have the same type and number of dimensions; sizes may differ.
        group: the process group; default: all processes.

    Raises:
        ValueError: this process is not in the group.
    """
    _check_membership(group)
    result = result.contiguous()
    dist.barrier(group=group)
    if result.ndim == 0:
        return _gather_equal(result, group)
    sizes = _gather_equal(torch.tensor(result.shape, dtype=torch.int64, device=result.device), group)
    shapes = [tuple(size.tolist()) for size in sizes]
    if len(set(shapes)) == 1:
        return _gather_equal(result, group)
    padded = result.new_zeros([max(lengths) for lengths in zip(*shapes, strict=True)])
    padded[_corner(tuple(result.shape))] = result
    return [
        tensor[_corner(shape)].contiguous() for tensor, shape in zip(_gather_equal(padded, group), shapes, strict=True)
    ]


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    """The place of a tensor of this shape in a padded one."""
    return tuple(slice(length) for length in shape)


class AllGatherGrad(torch.autograd.Function):
    """Gather equally shaped tensors of all processes; gradients flow back to the process of each tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any | None = None) -> Tensor:
        """Stack the tensors of all processes: ``(processes of the group, *shape)``."""
        _check_membership(group)
        ctx.group = group
        return torch.stack(_gather_equal(tensor.contiguous(), group))

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of this process' tensor over all processes."""
        grad = torch.cat(grad_output).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, op=dist.ReduceOp.SUM, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


def all_gather_ddp_if_available(tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
    """Stack the tensors of all processes: ``(processes of the group, *shape)``; without a group, the tensor itself.

    Args:
        tensor: of the same shape in all processes.
        group: the process group; default: all processes.
        sync_grads: let gradients flow back to all processes.

    Raises:
        ValueError: this process is not in the group.
    """
    if not distributed_available():
        return tensor
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        stacked: Tensor = AllGatherGrad.apply(tensor, group)  # type: ignore[no-untyped-call]
    return stacked


# --- reducing ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sync_ddp(
    result: Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType | str | None = None
) -> Tensor:
    """Reduce the tensors of all processes, in place.

    Args:
        result: of the same shape in all processes.
        group: the process group; default: all processes.
        reduce_op: ``"sum"`` (default), ``"mean"`` or ``"avg"``, another operation's name, or the operation.

    Returns:
        The tensor with the result, which is the argument itself. Only the mean of integers is a new tensor, with
        fractions; the argument then holds the sum.

    Raises:
        ValueError: there is no such operation, or this process is not in the group.
    """
    divide, operation = _operation(reduce_op)
    _check_membership(group)
    dist.barrier(group=group)
    reduced = result.contiguous()
    dist.all_reduce(reduced, op=operation, group=group)
    if reduced is not result:
        result.copy_(reduced)
    if not divide:
        return result
    size = dist.get_world_size(group)
    return result.div_(size) if result.is_floating_point() or result.is_complex() else result / size


def _operation(reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType | str | None) -> tuple[bool, Any]:
    """Whether to divide by the size of the group afterwards, and the operation. Some backends have no means."""
    if reduce_op is None:
        return False, dist.ReduceOp.SUM
    if isinstance(reduce_op, str):
        name = reduce_op.upper()
        if name not in ("AVG", "MEAN") and not hasattr(dist.ReduceOp, name):
            raise ValueError(f"reduce_op {reduce_op!r} is unknown: use 'sum', 'mean', 'min', 'max' or 'product'")
        if name not in ("AVG", "MEAN"):
            return False, getattr(dist.ReduceOp, name)
        return True, dist.ReduceOp.SUM
    is_mean = reduce_op == dist.ReduceOp.AVG
    return is_mean, dist.ReduceOp.SUM if is_mean else reduce_op


def sync_ddp_if_available(
    result: Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType | str | None = None
) -> Tensor:
    """Like :func:`sync_ddp` if there is a process group; otherwise returns the tensor as it is."""
    return sync_ddp(result, group=group, reduce_op=reduce_op) if distributed_available() else result


# --- hooks of DDP -----------------------------------------------------------------------------------------------------


def register_ddp_comm_hook(
    model: DistributedDataParallel,
    ddp_comm_state: object | None = None,
    ddp_comm_hook: Callable[..., Any] | None = None,
    ddp_comm_wrapper: Callable[..., Any] | None = None,
    *,
    state: object | None = None,
) -> None:
    """Replace the way DDP averages gradients, such as by one of ``torch.distributed.algorithms.ddp_comm_hooks``.

    ::

        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        register_ddp_comm_hook(
            model,
            ddp_comm_state=powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=5000),
            ddp_comm_hook=powerSGD_hook.powerSGD_hook,
            ddp_comm_wrapper=default_hooks.fp16_compress_wrapper,
        )

    Args:
        model: not yet trained.
        ddp_comm_state: what the hook keeps between calls.
        ddp_comm_hook: called as ``hook(state, bucket)`` for each bucket of gradients when it is ready; returns a future
            with the bucket's new values. ``None``: DDP stays as it is.
        ddp_comm_wrapper: takes the hook and returns the hook to use.
        state: another name for ``ddp_comm_state``.

    Raises:
        ValueError: both ``state`` and ``ddp_comm_state`` are given.
    """
    if state is not None and ddp_comm_state is not None:
        raise ValueError("state and ddp_comm_state are two names of the same argument: give one")
    if ddp_comm_hook is None:
        return
    hook = ddp_comm_hook
    if ddp_comm_wrapper is not None:
        _info("DDP communication hook %s is wrapped by %s", _name(ddp_comm_hook), _name(ddp_comm_wrapper))
        hook = ddp_comm_wrapper(ddp_comm_hook)
    _debug("registering the DDP communication hook %s", _name(hook))
    model.register_comm_hook(state=state if ddp_comm_state is None else ddp_comm_state, hook=hook)


def _name(function: Callable[..., Any]) -> str:
    """The function's name, or its ``repr``: partial functions have no name."""
    return str(getattr(function, "__qualname__", None) or repr(function))
