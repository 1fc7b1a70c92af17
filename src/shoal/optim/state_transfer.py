"""The training state as one download: parameters, further tensors, optimizer, scheduler, epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shoal.averaging.state.snapshot import OwnedState
from shoal.compression import CompressionInfo, TensorRole
from shoal.optim.devices import copies_beside_training, copy_all
from shoal.optim.lineage import Lineage
from shoal.optim.lr_schedule import dump_scheduler_state, load_scheduler_state
from shoal.optim.optimizer_state import (
    check_optimizer_state,
    dump_optimizer_state,
    load_optimizer_state,
    scheduled_hyperparameters,
)
from shoal.optim.training_setup import TrainingSetup

MAX_EPOCH = 2**53


class SharedBuffers(Protocol):
    """Something else that a newcomer needs and that has its own idea of when it changes."""

    def get_buffers(self) -> list[torch.Tensor]:
        """Tensors that will not change any more."""
        ...

    def set_buffers(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take over those of another peer.

        Raises:
            ValueError: they do not fit; nothing has been changed.
        """
        ...


def describe_state(
    setup: TrainingSetup,
    extra_tensors: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    epoch: int,
    group_bits: str,
    lineage: Lineage | None = None,
) -> OwnedState:
    """Copy everything that a newcomer needs."""
    optimizer_metadata, statistics = dump_optimizer_state(setup.optimizer)
    metadata = {
        "epoch": epoch,
        "group_bits": group_bits,
        "optimizer_metadata": optimizer_metadata,
        "scheduler": dump_scheduler_state(setup.scheduler),
        "rounds": b"" if lineage is None else lineage.pack(),
    }
    groups: list[tuple[Sequence[torch.Tensor], Sequence[Any], TensorRole]] = [
        (setup.optimizer_parameters, setup.parameter_names, TensorRole.PARAMETER),
        (extra_tensors, range(len(extra_tensors)), TensorRole.UNSPECIFIED),
        (buffers, range(len(extra_tensors), len(extra_tensors) + len(buffers)), TensorRole.UNSPECIFIED),
        (statistics, range(len(statistics)), TensorRole.OPTIMIZER),
    ]
    tensors = copies_beside_training([tensor for members, _, _ in groups for tensor in members])
    keys_and_roles = [(key, role) for members, keys, role in groups for _, key in zip(members, keys, strict=True)]
    infos = [
        CompressionInfo.from_tensor(tensor, key=key, role=role)
        for tensor, (key, role) in zip(tensors, keys_and_roles, strict=True)
    ]
    return OwnedState(metadata, tensors, infos)


@dataclass
class TrainingState:
    """A downloaded state that fits."""

    epoch: int
    parameters: Sequence[torch.Tensor]
    extra_tensors: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    optimizer_metadata: Any
    statistics: Sequence[torch.Tensor]
    scheduler: Any
    lineage: Lineage

    @classmethod
    def parse(
        cls,
        metadata: Any,
        tensors: Sequence[torch.Tensor],
        setup: TrainingSetup,
        extra_tensors: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> TrainingState:
        """Check what another peer sent.

        Raises:
            ValueError: it is not a state of this training.
        """
        if not isinstance(metadata, dict):
            raise ValueError("its metadata are malformed")
        epoch = metadata.get("epoch")
        if not isinstance(epoch, int) or isinstance(epoch, bool) or not 0 <= epoch < MAX_EPOCH:
            raise ValueError(f"it has no valid epoch: {epoch!r}")
        own = [*setup.optimizer_parameters, *extra_tensors, *buffers]
        if len(tensors) < len(own):
            raise ValueError(f"it has {len(tensors)} tensors, expected at least {len(own)}")
        for index, (mine, theirs) in enumerate(zip(own, tensors, strict=False)):
            if mine.shape != theirs.shape:
                raise ValueError(f"its tensor {index} has shape {tuple(theirs.shape)}, expected {tuple(mine.shape)}")
        rounds = metadata.get("rounds", b"")
        if not isinstance(rounds, bytes):
            raise ValueError(f"its rounds are malformed: {rounds!r}")
        num_parameters = len(setup.optimizer_parameters)
        state = cls(
            epoch,
            tensors[:num_parameters],
            tensors[num_parameters : num_parameters + len(extra_tensors)],
            tensors[num_parameters + len(extra_tensors) : len(own)],
            metadata.get("optimizer_metadata"),
            tensors[len(own) :],
            metadata.get("scheduler"),
            Lineage.unpack(rounds),
        )
        check_optimizer_state(setup.optimizer, state.optimizer_metadata, state.statistics)
        return state


@torch.no_grad()
def apply_state(state: TrainingState, setup: TrainingSetup, extra_tensors: Sequence[torch.Tensor]) -> None:
    """Put a downloaded state in place."""
    load_optimizer_state(
        setup.optimizer, state.optimizer_metadata, state.statistics, scheduled_hyperparameters(setup.scheduler)
    )
    copy_all(setup.optimizer_parameters, state.parameters)
    copy_all(extra_tensors, state.extra_tensors)
    load_scheduler_state(setup.scheduler, state.scheduler)
