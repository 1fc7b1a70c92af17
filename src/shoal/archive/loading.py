"""Loads an archive into a model and an optimizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from shoal.archive.store import Archive, Store
from shoal.base.logs import counted, quoted
from shoal.compression.base import plain_name
from shoal.optim import DiLoCo, Optimizer
from shoal.optim.joint_optimizer import JointOptimizer
from shoal.optim.setup.optimizer_state import (
    has_statistics,
    initialize_optimizer_state_,
    load_optimizer_state,
    without_hyperparameters,
)
from shoal.optim.setup.training_setup import unwrapped

logger = logging.getLogger(__name__)


def load_archive(
    path: str | os.PathLike[str],
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: int | None = None,
) -> Archive:
    """Load the newest good archive of a run.

    Args:
        path: the folder that ``shoal archive`` writes to, or its address; or one of the archives in it.
        model: receives the parameters and buffers that the archive has. Parameters are matched by name. If the archive
            has numbers instead, they are matched in the order of the model, if all shapes are right.
        optimizer: receives its state. A :class:`~shoal.Optimizer` or :class:`~shoal.DiLoCo` gets the whole state with
            its epoch, and continues from there; give it the model that it trains. A torch optimizer gets its
            statistics; its hyper-parameters, such as the learning rate, stay as they are.
        stage: of a run in stages, load this stage into its own module and optimizer. By default ``model`` is the whole
            model, ``torch.nn.Sequential(*stages)``.

    Returns:
        The archive, with its ``run_id``, ``epoch``, all ``tensors`` by name, and more.

    Raises:
        ArchiveError: there is no good archive.
        ValueError: the archive is of another model, or of another kind of optimizer. The model may be changed already.
    """
    archive = Store.open(path, stage)
    if archive.stages and optimizer is not None:
        raise ValueError(f"{archive.path} is of a run in stages, each with an optimizer of its own: give stage=")
    if model is not None:
        _load_model(archive, model)
    if isinstance(optimizer, JointOptimizer):
        if not isinstance(optimizer, (Optimizer, DiLoCo)) or optimizer.kind != archive.kind:
            raise ValueError(
                f"{archive.path} is of a run with a shoal.{archive.kind}, got a {type(optimizer).__name__}"
            )
        optimizer.load_state(archive.state)
    elif optimizer is not None:
        _load_statistics(archive, optimizer)
    return archive


@torch.no_grad()
def _load_model(archive: Archive, model: torch.nn.Module) -> None:
    model = unwrapped(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {plain_name(name): tensor for name, tensor in tensors.items()}
    given = {name: archive.tensors[name] for name in archive.names}
    if not archive.manifest.named:
        given = _by_number(archive, model, given)
    lacking = [name for name, tensor in own.items() if tensor.requires_grad and name not in given]
    unknown = [name for name in given if name not in own]
    if lacking or unknown:
        what = f"lacks {quoted(lacking[0])}" if lacking else f"has {quoted(unknown[0])}, which the model lacks"
        raise ValueError(f"{archive.path} is of another model: it {what} ({counted(len(lacking + unknown), 'name')})")
    _check_shapes(archive, list(given), [given[name] for name in given], [own[name] for name in given])
    for name, tensor in given.items():
        own[name].copy_(tensor)


def _by_number(archive: Archive, model: torch.nn.Module, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give the model's names, in its order, to parameters that have only numbers."""
    if archive.stages:
        raise ValueError(f"{archive.path} has parameters without names: load it stage by stage, with stage=")
    numbered = {int(name): tensor for name, tensor in given.items() if name.isdecimal()}
    tensors = [numbered[number] for number in sorted(numbered)]
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    if len(named) != len(tensors):
        named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if len(named) != len(tensors):
        raise ValueError(
            f"{archive.path} has {len(tensors)} parameters without names, and the model {len(named)}: it is of another "
            "model. Where optimizers are made from model.named_parameters(), archives have names"
        )
    _check_shapes(archive, list(named), tensors, list(named.values()))
    rest = {name: tensor for name, tensor in given.items() if not name.isdecimal()}
    return {**dict(zip(named, tensors, strict=True)), **rest}


def _check_shapes(
    archive: Archive, names: Sequence[str], given: Sequence[torch.Tensor], own: Sequence[torch.Tensor]
) -> None:
    for name, theirs, mine in zip(names, given, own, strict=True):
        if theirs.shape != mine.shape:
            raise ValueError(
                f"{archive.path} is of another model: {quoted(name)} has shape {tuple(theirs.shape)}, and in the model "
                f"{tuple(mine.shape)}"
            )


def _load_statistics(archive: Archive, optimizer: torch.optim.Optimizer) -> None:
    metadata, tensors = archive.state
    if archive.kind == "Optimizer":
        described, statistics = metadata["optimizer_metadata"], tensors[sum(metadata["tensors"].values()) :]
    else:
        inner: list[Any] = list(metadata.get("inner") or ())
        if len(inner) != 1:
            raise ValueError(f"{archive.path} has the statistics of {len(inner)} inner optimizers, not of one")
        described, statistics = inner[0], tensors[sum(each["tensors"] for each in metadata["fragments"]) :]
    if not has_statistics(optimizer):
        initialize_optimizer_state_(optimizer)
    # Without hyper-parameters, because the program that loads an archive has chosen its own.
    load_optimizer_state(optimizer, without_hyperparameters(described), statistics)
