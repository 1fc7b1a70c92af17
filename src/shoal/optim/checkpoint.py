"""Checkpoints: the state of a torch optimizer, and beside it what a run needs to be resumed.

A checkpoint is the state dictionary of the optimizer that makes the steps, with ``state["local_epoch"]`` and one more
entry, ``"shoal"``. A plain torch optimizer of the same kind loads it, too, and ignores what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.optim.devices import copy_all
from shoal.optim.lr_schedule import dump_scheduler_state, load_scheduler_state
from shoal.optim.optimizer_state import has_statistics, initialize_optimizer_state_, scheduled_hyperparameters
from shoal.optim.state_transfer import MAX_EPOCH
from shoal.optim.training_setup import TrainingSetup

EPOCH, OWN = "local_epoch", "shoal"


def make_checkpoint(setup: TrainingSetup, epoch: int, gradients: Any) -> dict[str, Any]:
    """Everything that a run needs to go on from here, but for the model. Tensors are not copied, as in torch.

    Args:
        gradients: state of the gradient averager.
    """
    state_dict = setup.optimizer.state_dict()
    own = {
        "scheduler": dump_scheduler_state(setup.scheduler),
        "parameters": [p.detach() for p in setup.optimizer_parameters] if setup.is_offloaded else [],
        "gradients": gradients,
    }
    return {**state_dict, "state": {**state_dict["state"], EPOCH: epoch}, OWN: own}


@torch.no_grad()
def load_checkpoint(setup: TrainingSetup, state_dict: Mapping[str, Any]) -> int | None:
    """Put a checkpoint in place: optimizer, scheduler, and wide copies of the parameters if the optimizer has such.

    Args:
        state_dict: from :func:`make_checkpoint` or a torch optimizer; not changed.

    Returns:
        The epoch, if there is one in it.

    Raises:
        ValueError: it does not fit.
    """
    optimizer, statistics = setup.optimizer, dict(state_dict["state"])
    epoch, own = statistics.pop(EPOCH, None), state_dict.get(OWN) or {}
    if epoch is not None and not (isinstance(epoch, int) and 0 <= epoch < MAX_EPOCH):
        raise ValueError(f"a checkpoint cannot be of epoch {epoch!r}")
    parameters = own.get("parameters") or setup.main_parameters
    shapes, own_shapes = ([tuple(p.shape) for p in each] for each in (parameters, setup.main_parameters))
    if shapes != own_shapes:
        raise ValueError(f"the parameters in the checkpoint have shapes {shapes}, expected {own_shapes}")
    names = scheduled_hyperparameters(setup.scheduler)
    before = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    needs_statistics = has_statistics(optimizer)
    optimizer.load_state_dict({**{key: state_dict[key] for key in state_dict if key != OWN}, "state": statistics})
    if needs_statistics and not has_statistics(optimizer):
        initialize_optimizer_state_(optimizer)
    if own.get("scheduler") is None:  # it will catch up with the epoch; what it has done already must not be done twice
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)
    load_scheduler_state(setup.scheduler, own.get("scheduler"))
    if setup.is_offloaded:
        copy_all(setup.optimizer_parameters, parameters)
        copy_all(setup.main_parameters, parameters)
    return epoch
