"""The training state: its tensors, the download that newcomers get, and checkpoints.

- :class:`StateTensors` moves values between the user's model, the optimizer and the tensors that are averaged.
- :func:`describe_state` copies the state for a newcomer; :class:`TrainingState` is such a copy, received and checked.
- A checkpoint is the state dictionary of the optimizer that makes the steps, with three additions: the entry
  ``"shoal"``, and the epoch both as ``state["local_epoch"]`` and in each parameter group. Torch's own tools for
  checkpoints keep only the last. A plain torch optimizer of the same kind can load the checkpoint, too, and ignores the
  additions.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shoal.averaging.finite import all_finite, first_not_finite, without_overflow
from shoal.averaging.majorities import PEERS_PER_LIAR
from shoal.averaging.state.download import OwnedState
from shoal.base.logs import Seldom, quoted
from shoal.compression import CompressionInfo, TensorRole
from shoal.compression.base import copies_of, room_for, stand_in
from shoal.optim.history.journal import Lineage, LineageKeeper
from shoal.optim.history.window import EPOCHS_AHEAD, is_behind
from shoal.optim.setup.devices import copies_beside_training, copy_all, copy_to_host
from shoal.optim.setup.optimizer_state import (
    check_optimizer_state,
    dump_optimizer_state,
    give_entries,
    has_statistics,
    initialize_optimizer_state_,
    is_packed,
    keep_mode,
    load_optimizer_state,
)
from shoal.optim.setup.schedules import dump_scheduler_state, load_scheduler_state, scheduled_hyperparameters
from shoal.optim.setup.training_setup import TrainingSetup
from shoal.p2p import PeerID


class StateTensors:
    """Knows which tensors are copies of which others, and moves values between them.

    Copies take memory only from :meth:`load_into_averaged` to :meth:`drop_copies`. At other times stand-ins without
    memory take their places.

    Args:
        setup: parameters and optimizer.
        average_opt_statistics: names of optimizer statistics that are averaged, too.
        extra_tensors: further tensors that are averaged and given to newcomers.
        reuse_tensors: average the optimizer's own tensors, and extra tensors on the CPU, instead of copies.

    Raises:
        ValueError: tensors to be averaged in place are not on the CPU, or there is no such statistic.
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
        # Indices of the averaged tensors that are copies.
        self._copied = not_here if reuse_tensors else list(range(len(local)))
        self.averaged = [tensor.detach() for tensor in local]
        """The tensors that are averaged. The averager uses this list itself."""
        for index in self._copied:
            self.averaged[index] = stand_in(local[index].shape, exchanged_type(local[index]))
        self.has_copies = False
        """Whether the copies have memory, and values."""
        self._before_averaging: list[torch.Tensor] | None = None

    def _check_statistics(self) -> None:
        state = self.setup.optimizer.state
        for name in self.average_opt_statistics:
            found = [
                statistics[name] for statistics in state.values() if isinstance(statistics.get(name), torch.Tensor)
            ]
            kind = type(self.setup.optimizer).__name__
            if not found:
                raise ValueError(f"average_opt_statistics: {kind} keeps no statistic {name!r}")
            codes = next((each for each in found if not each.is_floating_point() or is_packed(each)), None)
            if codes is not None:
                raise ValueError(
                    f"average_opt_statistics: {kind} keeps {name!r} as codes, and their mean has no meaning: leave it "
                    "out"
                )

    def statistics(self, name: str) -> list[torch.Tensor]:
        """One statistic of all parameters that have it, in the order of the parameters."""
        state = self.setup.optimizer.state
        return [state[p][name] for p in self.setup.optimizer_parameters if p in state and name in state[p]]

    def local(self) -> list[torch.Tensor]:
        """The optimizer's own tensors whose values are averaged, then the extra ones; in the order of ``averaged``."""
        statistics = [tensor for name in self.average_opt_statistics for tensor in self.statistics(name)]
        return [*self.setup.optimizer_parameters, *statistics, *self.extra_tensors]

    def infos(self) -> list[CompressionInfo]:
        """Descriptions of ``averaged`` for codecs."""
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
        """If the optimizer has new statistics that are averaged in place, move them into the averaged tensors."""
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
        """Before a round: bring the copies up to date.

        Args:
            remember: keep the loaded values for :meth:`take_averaged` with ``as_difference``.
        """
        if not self.has_copies:
            copies = room_for([self.averaged[index] for index in self._copied])
            for index, copy in zip(self._copied, copies, strict=True):
                self.averaged[index] = copy
            self.has_copies = True
        self._copy(from_local=True)
        self._before_averaging = copies_of(self.averaged) if remember else None

    def drop_copies(self) -> None:
        """After a round: free the memory of the copies."""
        for index in self._copied:
            self.averaged[index] = stand_in(self.averaged[index].shape, self.averaged[index].dtype)
        self.has_copies, self._before_averaging = False, None

    @torch.no_grad()
    def take_averaged(self, as_difference: bool = False) -> None:
        """After a round: write the results to the optimizer's tensors.

        Args:
            as_difference: add the change that averaging has made, so that local steps made meanwhile survive.
        """
        if not self.has_copies and self._copied:
            return
        if not as_difference or self._before_averaging is None:
            self._copy(from_local=False)
            return
        parameters = len(self.setup.optimizer_parameters)
        triples = zip(self.local(), self.averaged, self._before_averaging, strict=True)
        for index, (local, new, old) in enumerate(triples):
            (add_change if index < parameters else add_change_above_zero)(local, new, old)
        self._before_averaging = None

    def _copy(self, from_local: bool) -> None:
        local = self.local()
        ours, theirs = [self.averaged[i] for i in self._copied], [local[i] for i in self._copied]
        copy_all(*((ours, theirs) if from_local else (theirs, ours)))

    @torch.no_grad()
    def update_main_parameters(self) -> None:
        """Copy the optimizer's parameters to the user's model, unless they are the same tensors."""
        if self.setup.is_offloaded:
            copy_all(self.setup.main_parameters, self.setup.optimizer_parameters)

    @torch.no_grad()
    def take_main_gradients(self) -> None:
        """Copy the gradients of the user's model to the optimizer's parameters, unless they are the same tensors."""
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
    """Add the change from ``old`` to ``new`` to a tensor; where ``old`` was not finite, take the new value instead."""
    change = new - old
    if not all_finite(change):
        spoilt = ~old.isfinite()
        local[spoilt.to(local.device)] = new[spoilt].to(local.device, local.dtype)
        change = torch.where(spoilt, 0, without_overflow(change))
    local.add_(change.to(local.device))


def add_change_above_zero(local: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> None:
    """Like :func:`add_change`, but no variance becomes negative.

    A variance may shrink both here and by averaging, together by more than its value. Then the smaller of the two
    results is taken.
    """
    is_variance = not any(bool((tensor < 0).any()) for tensor in (local, new, old))
    before = local.clone()
    add_change(local, new, old)
    if is_variance:
        local.copy_(torch.where(local < 0, torch.minimum(before, new.to(local.device, local.dtype)), local))


def exchanged_type(tensor: torch.Tensor) -> torch.dtype:
    """The type in which a tensor is averaged. Half precision becomes single precision, so that nothing is lost."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def copy_for_averaging(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, of the type in which the tensor is averaged."""
    return copy_to_host(tensor, exchanged_type(tensor))


# The largest integer up to which a float (IEEE 754 double) counts in ones.
MAX_EPOCH = 2**53
logger = logging.getLogger(__name__)
_warn_seldom = Seldom(logger.warning)
# Chosen: a run makes fewer epochs than this while a peer downloads a state. A later epoch is a lie, or of another run.
_EPOCHS_DURING_DOWNLOAD = 1000


class OlderStateError(ValueError):
    """A downloaded state is of an earlier epoch than this peer's own. That is no fault of the donor."""


class SharedBuffers(Protocol):
    """A source of further tensors that a newcomer needs. They may change at any time."""

    def get_buffers(self) -> list[torch.Tensor]:
        """The tensors as they are now. They must not be changed afterwards, only replaced by new ones."""
        ...

    def set_buffers(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take over the buffers of another peer.

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
    names: Mapping[str, Sequence[str]] | None = None,
) -> OwnedState:
    """Copy everything that a newcomer needs.

    Args:
        setup: parameters, optimizer and scheduler.
        extra_tensors: further tensors that are averaged.
        buffers: tensors that are not averaged.
        epoch: the epoch of the state.
        group_bits: the bucket of peers in which this peer looks for groups.
        lineage: the rounds behind the parameters.
        names: of parameters and of extra tensors, for archives; ``None``: they are left out.
    """
    optimizer_metadata, statistics = dump_optimizer_state(setup.optimizer)
    metadata = {
        "epoch": epoch,
        "group_bits": group_bits,
        "optimizer_metadata": optimizer_metadata,
        "scheduler": dump_scheduler_state(setup.scheduler),
        "rounds": b"" if lineage is None else lineage.pack(),
        "names": {kind: list(each) for kind, each in (names or {}).items()},
        "tensors": {
            "parameters": len(setup.optimizer_parameters),
            "extra": len(extra_tensors),
            "buffers": len(buffers),
        },
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
    """A downloaded state, taken apart."""

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
        """Check a state that another peer has sent, and take it apart.

        Args:
            metadata, tensors: from :func:`describe_state`.
            setup, extra_tensors, buffers: this peer's own, which it must fit.

        Raises:
            ValueError: it does not fit, or is malformed.
        """
        if not isinstance(metadata, dict):
            raise ValueError("its metadata are malformed")
        epoch = metadata.get("epoch")
        if not isinstance(epoch, int) or isinstance(epoch, bool) or not 0 <= epoch < MAX_EPOCH:
            raise ValueError(f"it has no valid epoch: {quoted(epoch)}")
        own = [*setup.optimizer_parameters, *extra_tensors, *buffers]
        if len(tensors) < len(own):
            raise ValueError(f"it has {len(tensors)} tensors, expected at least {len(own)}")
        for index, (mine, theirs) in enumerate(zip(own, tensors, strict=False)):
            if mine.shape != theirs.shape:
                raise ValueError(f"its tensor {index} has shape {tuple(theirs.shape)}, expected {tuple(mine.shape)}")
        if not isinstance(metadata.get("rounds", b""), bytes):
            raise ValueError(f"its rounds are malformed: {quoted(metadata['rounds'])}")
        state = cls.split(metadata, tensors, setup, len(extra_tensors), len(buffers))
        check_optimizer_state(setup.optimizer, state.optimizer_metadata, state.statistics)
        _, statistics = dump_optimizer_state(setup.optimizer)
        bad = first_spoilt([*own, *statistics], tensors)
        if bad is not None:
            kind = "parameter" if bad < len(setup.optimizer_parameters) else "tensor"
            raise ValueError(f"values of its {kind} {bad} are NaN or infinite, and this peer's are not")
        return state

    @classmethod
    def split(
        cls, metadata: Any, tensors: Sequence[torch.Tensor], setup: TrainingSetup, extra_tensors: int, buffers: int
    ) -> TrainingState:
        """Take a state apart without checks.

        Args:
            metadata, tensors: from :func:`describe_state`.
            setup: tells the number of parameters.
            extra_tensors, buffers: how many there are of each.
        """
        extra = len(setup.optimizer_parameters)
        buffer, statistic = extra + extra_tensors, extra + extra_tensors + buffers
        return cls(
            metadata["epoch"],
            tensors[:extra],
            tensors[extra:buffer],
            tensors[buffer:statistic],
            metadata.get("optimizer_metadata"),
            tensors[statistic:],
            metadata.get("scheduler"),
            Lineage.unpack(metadata.get("rounds", b"")),
        )


def first_spoilt(own: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> int | None:
    """Position of the first given tensor with a value that is not finite, where this peer's own values are finite.

    Where they are not finite either, the other state is not worse.
    """
    start = 0
    while (found := first_not_finite(given[start:])) is not None:
        start += found + 1
        if all_finite(own[start - 1]):
            return start - 1
    return None


def check_epoch(epoch: int, own: int, accept_older: bool, run: LineageKeeper | None) -> None:
    """Check whether a downloaded state of this epoch may be taken over.

    Args:
        epoch: the epoch of the state.
        own: this peer's epoch.
        accept_older: accept an earlier epoch than this peer's, too.
        run: knows how far the others are; ``None`` if that is not compared.

    Raises:
        OlderStateError: the state is older than this peer's own.
        ValueError: the run cannot have reached this epoch.
    """
    if is_behind(epoch, own) and not accept_older:
        raise OlderStateError(f"it is of epoch {epoch}, older than this peer's epoch {own}")
    if run is not None and is_behind(max(own, run.global_epoch), epoch, _EPOCHS_DURING_DOWNLOAD):
        raise ValueError(f"it is of epoch {epoch}, where the run, at epoch {run.global_epoch}, cannot be yet")


def latest_epoch(claimed: Mapping[PeerID, Any], run: LineageKeeper | None, troubles: Counter[str]) -> int:
    """The largest epoch that members of a group have claimed, without those that the run cannot have reached. Of three
    or more members one may lie, of ten or more a fifth. Liars must not push the others ahead with each round.

    Args:
        claimed: what each member gave in the round; it can be anything.
        run: knows how far the others are; ``None``: all epochs are believed.
        troubles: counts warnings; here, the members that are not believed.
    """
    epochs = {peer: epoch for peer, epoch in claimed.items() if isinstance(epoch, int) and not isinstance(epoch, bool)}
    limit, count = MAX_EPOCH if run is None else run.global_epoch + EPOCHS_AHEAD, len(epochs)
    liars = 0 if run is None or count < 3 else max(1, count // PEERS_PER_LIAR)
    for peer in [peer for peer, epoch in epochs.items() if epoch > limit]:
        troubles["epochs that cannot be"] += 1
        _warn_seldom(
            "peer %s says in a round that the next epoch is %s, and the run cannot be beyond epoch %d: this peer does "
            "not follow it",
            peer,
            quoted(epochs.pop(peer)),
            limit,
            about=peer,
        )
    return (sorted(epochs.values())[: count - liars] or [0])[-1]


@torch.no_grad()
def apply_state(state: TrainingState, setup: TrainingSetup, extra_tensors: Sequence[torch.Tensor]) -> None:
    """Put a downloaded state in place."""
    load_optimizer_state(
        setup.optimizer, state.optimizer_metadata, state.statistics, scheduled_hyperparameters(setup.scheduler)
    )
    copy_all(setup.optimizer_parameters, state.parameters)
    copy_all(extra_tensors, state.extra_tensors)
    keep_mode(setup.optimizer, state.optimizer_metadata)
    load_scheduler_state(setup.scheduler, state.scheduler, of_others=True)


EPOCH, OWN = "local_epoch", "shoal"


def make_checkpoint(setup: TrainingSetup, epoch: int, gradients: Any) -> dict[str, Any]:
    """A checkpoint: everything that is needed to continue from here, except the model. As in torch, tensors are not
    copied.

    Args:
        setup: parameters, optimizer and scheduler.
        epoch: this peer's epoch.
        gradients: state of the gradient averager.
    """
    state_dict = setup.optimizer.state_dict()
    own = {
        EPOCH: epoch,
        "scheduler": dump_scheduler_state(setup.scheduler),
        "parameters": [p.detach() for p in setup.optimizer_parameters] if setup.is_offloaded else [],
        "gradients": gradients,
    }
    groups = [{**group, EPOCH: epoch} for group in state_dict["param_groups"]]
    # Programs read the epoch as state["local_epoch"]. Torch's tools for checkpoints would take the key for a parameter.
    state = state_dict["state"] if _is_for_torch() else {**state_dict["state"], EPOCH: epoch}
    return {**state_dict, "state": state, "param_groups": groups, OWN: own}


def _is_for_torch() -> bool:
    """Whether torch's tools for distributed checkpoints ask for the checkpoint, rather than a program."""
    frame = sys._getframe(1)
    for _ in range(_MOST_CALLS_INSIDE):
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


# The most calls between an optimizer's state_dict() and make_checkpoint(). Chosen: what torch has today, and some more.
_MOST_CALLS_INSIDE = 6


def epoch_in(state_dict: Mapping[str, Any]) -> Any:
    """The epoch of a checkpoint; ``None``: it has none."""
    places = [state_dict.get(OWN) or {}, state_dict["state"], *state_dict["param_groups"]]
    return next((place[EPOCH] for place in places if place.get(EPOCH) is not None), None)


@torch.no_grad()
def load_checkpoint(setup: TrainingSetup, state_dict: Mapping[str, Any]) -> int | None:
    """Put a checkpoint in place: optimizer, scheduler, and the parameters of an offloaded optimizer.

    Args:
        setup: receives the state.
        state_dict: from :func:`make_checkpoint`, or of a torch optimizer. It is not changed.

    Returns:
        The epoch; ``None`` if the checkpoint has none.

    Raises:
        ValueError: it does not fit.
    """
    epoch, own = epoch_in(state_dict), state_dict.get(OWN) or {}
    if epoch is not None and not (isinstance(epoch, int) and 0 <= epoch < MAX_EPOCH):
        raise ValueError(f"a checkpoint cannot be of epoch {epoch!r}")
    parameters = own.get("parameters") or setup.main_parameters
    shapes, own_shapes = ([tuple(p.shape) for p in each] for each in (parameters, setup.main_parameters))
    if shapes != own_shapes:
        raise ValueError(
            f"the parameters in the checkpoint have shapes {quoted(shapes)}, expected {quoted(own_shapes)}"
        )
    plain = {key: state_dict[key] for key in state_dict if key != OWN}
    load_optimizer(setup.optimizer, setup.scheduler, plain, own.get("scheduler"))
    if setup.is_offloaded:
        copy_all(setup.optimizer_parameters, parameters)
        copy_all(setup.main_parameters, parameters)
    return epoch


def load_optimizer(
    optimizer: torch.optim.Optimizer, scheduler: Any, state_dict: Mapping[str, Any], position: Any
) -> None:
    """Put a checkpoint of an optimizer in place, and of its schedule, if there is one.

    Args:
        state_dict: of the optimizer. It may have an epoch, which is left out.
        position: of the schedule; ``None``: the checkpoint has none.

    Raises:
        ValueError: it does not fit.
    """
    names = scheduled_hyperparameters(scheduler)
    before = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    needs_statistics = has_statistics(optimizer)
    statistics = {key: value for key, value in state_dict["state"].items() if key != EPOCH}
    groups = [{key: value for key, value in group.items() if key != EPOCH} for group in state_dict["param_groups"]]
    optimizer.load_state_dict({**state_dict, "state": statistics, "param_groups": groups})
    give_entries(optimizer)
    if needs_statistics and not has_statistics(optimizer):
        initialize_optimizer_state_(optimizer)
    # A plain checkpoint has rates that a scheduler has changed, but not the position of that scheduler. This peer's
    # scheduler would change them again.
    if position is None:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)
    load_scheduler_state(scheduler, position)
