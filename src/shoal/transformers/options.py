"""Refuses what cannot work with peers when the trainer is made, not at the first batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import SchedulerType, TrainingArguments

import shoal

# Options of shoal.Optimizer that the trainer fills in itself.
_FILLED_IN = frozenset(
    {"self", "dht", "run_id", "target_batch_size", "batch_size_per_step", "optimizer", "params", "model", "frozen_base"}
)
# Options that cannot work here, and why.
_EXCLUDED = {
    "reuse_grad_buffers": "the Trainer zeroes gradients after each local step: leave it out",
    "auxiliary": "a peer without data needs no Trainer: make a shoal.Optimizer(auxiliary=True) without one",
    **dict.fromkeys(
        ("offload_optimizer", "delay_optimizer_step", "delay_grad_averaging"),
        "the optimizer of the Trainer steps the model's own parameters: leave it out",
    ),
}
# Schedules that need no length of the run.
_ENDLESS = frozenset({SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP, SchedulerType.INVERSE_SQRT})


def check_arguments(args: TrainingArguments, grad_scaler: Any) -> None:
    """Check the arguments of a trainer.

    Raises:
        ValueError: something cannot work with peers.
    """
    if args.fp16 and not isinstance(grad_scaler, shoal.GradScaler):
        raise ValueError(
            f"fp16=True with grad_scaler={grad_scaler!r}: the usual scaler knows nothing of steps that many batches "
            "make together. Use bf16=True, or give grad_scaler=shoal.GradScaler()"
        )
    if grad_scaler is not None and not args.fp16:
        raise ValueError("grad_scaler is for fp16=True: leave it out")
    whole = "each peer holds the whole model: leave it out. If the model is too large, train adapters (LoRA)"
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if value := getattr(args, name, None):
            raise ValueError(f"{name}={value!r} splits a model over several devices, but {whole}")
    if args.n_gpu > 1:
        raise ValueError(
            f"n_gpu={args.n_gpu}: the Trainer would use DataParallel. A peer has one device: set "
            "CUDA_VISIBLE_DEVICES=0, and start one peer for each GPU"
        )
    if args.world_size > 1:
        raise ValueError(
            f"world_size={args.world_size}: this process is one of several of a launcher such as torchrun. Start each "
            "as a peer of its own, without the launcher"
        )
    if getattr(args, "auto_find_batch_size", False):
        raise ValueError("auto_find_batch_size=True restarts with each size: set per_device_train_batch_size")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.endswith("layerwise") or "lomo" in optimizer:
        raise ValueError(
            f"optim={optimizer!r} steps during backward, when there are only gradients of one batch of this peer: use "
            "optim='adamw_torch'"
        )


def check_schedule(args: TrainingArguments, swarm_steps: int | None, options: Mapping[str, Any]) -> None:
    """Check that the learning rate can follow the swarm.

    Raises:
        TypeError: ``swarm_steps`` is no whole number.
        ValueError: it cannot.
    """
    if swarm_steps is not None and (not isinstance(swarm_steps, int) or isinstance(swarm_steps, bool)):
        raise TypeError(f"swarm_steps must be a whole number of swarm steps, got {swarm_steps!r}")
    if swarm_steps is not None and swarm_steps < 1:
        raise ValueError(f"swarm_steps={swarm_steps}: give the number of swarm steps, at least 1")
    kind = SchedulerType(args.lr_scheduler_type)
    if options.get("scheduler") is not None:
        return
    if kind in (SchedulerType.REDUCE_ON_PLATEAU, getattr(SchedulerType, "GREEDY", None)):
        raise ValueError(
            f"lr_scheduler_type={kind.value!r} depends on a metric that differs between peers: use one that depends on "
            "steps alone, such as 'cosine'"
        )
    if swarm_steps is None and (kind not in _ENDLESS or 0 < args.warmup_steps < 1):
        raise ValueError(
            f"lr_scheduler_type={kind.value!r} with warmup_steps={args.warmup_steps} needs the length of the run: give "
            "swarm_steps=…, the number of steps that all peers make together, or use lr_scheduler_type='constant'"
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Check the names of further options of the swarm's optimizer.

    Raises:
        TypeError: an option does not exist.
        ValueError: an option cannot work here.
    """
    known = inspect.signature(shoal.Optimizer.__init__).parameters.keys() - _FILLED_IN
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"swarm_options has {unknown}; it takes these of shoal.Optimizer: {', '.join(sorted(known))}")
    for name in options.keys() & _EXCLUDED.keys():
        if options[name]:
            raise ValueError(f"swarm_options={{{name!r}: {options[name]!r}}}: {_EXCLUDED[name]}")


def check_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Check that the optimizer trains this model.

    Raises:
        ValueError: it has the parameters of another model, for example because the model was copied afterwards.
    """
    own = set(map(id, model.parameters()))
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise ValueError(
            f"optimizers=(…): {len(foreign)} of its parameters are not those of the model, which would not learn: make "
            "the optimizer from model.parameters() of the model that the trainer gets"
        )


def check_launch(accelerator: Any) -> None:
    """Check the settings of the environment, such as the file of ``accelerate config``.

    Raises:
        ValueError: there is more than one process or device.
    """
    kind = accelerator.distributed_type
    if kind != "NO":
        raise ValueError(
            f"accelerate is configured for {getattr(kind, 'value', kind)}, but a peer is one process that holds the "
            "whole model: start it with python instead of accelerate launch, once for each device"
        )


def check_optimizers(optimizer: Any, scheduler: Any) -> None:
    """Check the user's ``optimizers``.

    Raises:
        ValueError: there is a scheduler, or the optimizer is already shoal's.
    """
    if scheduler is not None:
        raise ValueError(
            "optimizers=(…, scheduler): it would count the batches of this peer. Give the arguments a "
            "lr_scheduler_type, or swarm_options={'scheduler': lambda opt: …}"
        )
    if isinstance(optimizer, shoal.Optimizer):
        raise ValueError("optimizers has a shoal.Optimizer, but SwarmTrainer makes one: give it the torch optimizer")
