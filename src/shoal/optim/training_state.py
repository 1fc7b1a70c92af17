"""The training state: its tensors, the download that newcomers get, and checkpoints.

A checkpoint is the state dictionary of the optimizer that makes the steps, with ``state["local_epoch"]`` and one more
entry, ``"shoal"``. A plain torch optimizer of the same kind loads it, too, and ignores what it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shoal.averaging.finite import all_finite, first_not_finite, without_overflow
from shoal.averaging.state.download import OwnedState
from shoal.compression import CompressionInfo, TensorRole
from shoal.optim.devices import copies_beside_training, copy_all, copy_to_host
from shoal.optim.epochs import EPOCHS_AHEAD
from shoal.optim.lineage import Lineage, LineageKeeper
from shoal.optim.optimizer_state import (
    check_optimizer_state,
    dump_optimizer_state,
    dump_scheduler_state,
    has_statistics,
    initialize_optimizer_state_,
    load_optimizer_state,
    load_scheduler_state,
    scheduled_hyperparameters,
)
from shoal.optim.training_setup import TrainingSetup


class StateTensors:
    """Knows which tensors are copies of which, and moves values between them.

    Args:
        setup: parameters and optimizer.
        average_opt_statistics: names of optimizer statistics that are averaged, too.
        extra_tensors: further tensors that are averaged and given to newcomers.
        reuse_tensors: average the optimizer's own tensors instead of copies, and extra tensors that are on the CPU.

    Raises:
        ValueError: tensors that are averaged in place are not on the CPU, or there is no such statistic.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        average_opt_statistics: Sequence[str],
        extra_tensors: Sequence[torch.Tensor],
        reuse_tensors: bool,
    ) -> None:
        self.setup, self.reuse_tensors = setup, reuse_tensors
        self.extra_tensors = tuple(extra_tensors)
        self.average_opt_statistics = tuple(average_opt_statistics)
        self._check_statistics()
        local = self.local()
        not_here = [index for index, tensor in enumerate(local) if tensor.device.type != "cpu"]
        if reuse_tensors and any(index < len(local) - len(self.extra_tensors) for index in not_here):
            raise ValueError("reuse_tensors=True averages tensors in place: they must be on the CPU")
        # Which of the averaged tensors are copies.
        self._copied = not_here if reuse_tensors else list(range(len(local)))
        self.averaged = [tensor.detach() for tensor in local]
        for index in self._copied:
            self.averaged[index] = copy_for_averaging(local[index])
        self._before_averaging: list[torch.Tensor] | None = None

    def _check_statistics(self) -> None:
        state = self.setup.optimizer.state
        for name in self.average_opt_statistics:
            if not any(isinstance(statistics.get(name), torch.Tensor) for statistics in state.values()):
                raise ValueError(
                    f"average_opt_statistics: {type(self.setup.optimizer).__name__} keeps no statistic {name!r}"
                )

    def statistics(self, name: str) -> list[torch.Tensor]:
        """One statistic of all parameters that have it."""
        state = self.setup.optimizer.state
        return [state[p][name] for p in self.setup.optimizer_parameters if p in state and name in state[p]]

    def local(self) -> list[torch.Tensor]:
        """The tensors whose values are averaged, where the optimizer has them, in the order of ``averaged``."""
        statistics = [tensor for name in self.average_opt_statistics for tensor in self.statistics(name)]
        return [*self.setup.optimizer_parameters, *statistics, *self.extra_tensors]

    def infos(self) -> list[CompressionInfo]:
        """What codecs may know about ``averaged``."""
        setup = self.setup
        keyed: list[tuple[Any, TensorRole]] = [(name, TensorRole.PARAMETER) for name in setup.parameter_names]
        names = dict(zip(map(id, setup.optimizer_parameters), setup.parameter_names, strict=True))
        for statistic in self.average_opt_statistics:
            keyed += [
                ((names[id(p)], statistic), TensorRole.OPTIMIZER)
                for p in setup.optimizer_parameters
                if p in setup.optimizer.state and statistic in setup.optimizer.state[p]
            ]
        keyed += [(index, TensorRole.UNSPECIFIED) for index in range(len(self.extra_tensors))]
        return [
            CompressionInfo.from_tensor(tensor, key=key, role=role)
            for tensor, (key, role) in zip(self.averaged, keyed, strict=True)
        ]

    @torch.no_grad()
    def adopt_statistics(self) -> None:
        """The optimizer has got new statistics: put them where they are averaged, if that is in place."""
        if not self.reuse_tensors or not self.average_opt_statistics:
            return
        index = len(self.setup.optimizer_parameters)
        state = self.setup.optimizer.state
        for name in self.average_opt_statistics:
            for p in self.setup.optimizer_parameters:
                if p in state and name in state[p]:
                    self.averaged[index].copy_(state[p][name])
                    state[p][name] = self.averaged[index]
                    index += 1

    # --- moving values; the caller holds the locks --------------------------------------------------------------------

    @torch.no_grad()
    def load_into_averaged(self, remember: bool = False) -> None:
        """Before averaging: bring the copies up to date.

        Args:
            remember: keep what was loaded, for :meth:`take_averaged` with ``as_difference``.
        """
        self._copy(from_local=True)
        self._before_averaging = [tensor.clone() for tensor in self.averaged] if remember else None

    @torch.no_grad()
    def take_averaged(self, as_difference: bool = False) -> None:
        """After averaging: put the results where the optimizer has its tensors.

        Args:
            as_difference: add what averaging has changed, so that local steps made meanwhile survive.
        """
        if not as_difference or self._before_averaging is None:
            self._copy(from_local=False)
            return
        for local, new, old in zip(self.local(), self.averaged, self._before_averaging, strict=True):
            add_change(local, new, old)
        self._before_averaging = None

    def _copy(self, from_local: bool) -> None:
        local = self.local()
        ours, theirs = [self.averaged[i] for i in self._copied], [local[i] for i in self._copied]
        copy_all(*((ours, theirs) if from_local else (theirs, ours)))

    @torch.no_grad()
    def update_main_parameters(self) -> None:
        """Put the optimizer's parameters into the user's model, where they are not the same tensors."""
        if self.setup.is_offloaded:
            copy_all(self.setup.main_parameters, self.setup.optimizer_parameters)

    @torch.no_grad()
    def take_main_gradients(self) -> None:
        """Give the optimizer the gradients of the user's model, where they are not the same tensors."""
        if not self.setup.is_offloaded:
            return
        for main, stepped in zip(self.setup.main_parameters, self.setup.optimizer_parameters, strict=True):
            if main.grad is None:
                stepped.grad = None
            elif stepped.grad is None:
                stepped.grad = copy_to_host(main.grad, stepped.dtype)
            else:
                copy_all([stepped.grad], [main.grad])


def add_change(local: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> None:
    """Add what averaging has changed; values that were not finite before it are replaced."""
    change = new - old
    if not all_finite(change):
        spoilt = ~old.isfinite()
        local[spoilt.to(local.device)] = new[spoilt].to(local.device, local.dtype)
        change = torch.where(spoilt, 0, without_overflow(change))
    local.add_(change.to(local.device))


def copy_for_averaging(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; half precision is averaged in single precision."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return copy_to_host(tensor, dtype)


MAX_EPOCH = 2**53
# A run makes no more epochs than this while somebody downloads a state.
_EPOCHS_DURING_DOWNLOAD = 1000


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
        bad = first_not_finite(tensors[: len(setup.optimizer_parameters)])
        if bad is not None and first_not_finite([own[bad]]) is None:
            raise ValueError(f"values of its parameter {bad} are NaN or infinite, and this peer's are not")
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


def check_epoch(epoch: int, own: int, accept_older: bool, run: LineageKeeper | None) -> None:
    """Whether a downloaded state of this epoch may be taken over.

    Args:
        own: this peer's epoch.
        accept_older: also an earlier one than that.
        run: knows how far the others are.

    Raises:
        ValueError: it may not.
    """
    if epoch < own and not accept_older:
        raise ValueError(f"it is of epoch {epoch}, older than this peer's epoch {own}")
    if run is not None and epoch > max(own, run.global_epoch) + _EPOCHS_DURING_DOWNLOAD:
        raise ValueError(f"it is of epoch {epoch}, where the run, at epoch {run.global_epoch}, cannot be yet")


def latest_epoch(claimed: Iterable[Any], run: LineageKeeper | None) -> int:
    """The largest epoch that members of a group have given, but for those where nobody can be.

    Args:
        run: knows how far the others are.
    """
    epochs = [epoch for epoch in claimed if isinstance(epoch, int) and not isinstance(epoch, bool)]
    limit = MAX_EPOCH if run is None else run.global_epoch + EPOCHS_AHEAD
    return max((epoch for epoch in epochs if epoch <= limit), default=0)


@torch.no_grad()
def apply_state(state: TrainingState, setup: TrainingSetup, extra_tensors: Sequence[torch.Tensor]) -> None:
    """Put a downloaded state in place."""
    load_optimizer_state(
        setup.optimizer, state.optimizer_metadata, state.statistics, scheduled_hyperparameters(setup.scheduler)
    )
    copy_all(setup.optimizer_parameters, state.parameters)
    copy_all(extra_tensors, state.extra_tensors)
    load_scheduler_state(setup.scheduler, state.scheduler)


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
    # It will catch up with the epoch; what it has done already must not be done twice.
    if own.get("scheduler") is None:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)
    load_scheduler_state(setup.scheduler, own.get("scheduler"))
    if setup.is_offloaded:
        copy_all(setup.optimizer_parameters, parameters)
        copy_all(setup.main_parameters, parameters)
    return epoch
