"""The optimizers that make the inner steps of one peer, and their learning rate schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging.finite import first_not_finite
from shoal.optim.gradient_accumulator import MissingGradients
from shoal.optim.setup.optimizer_state import (
    check_optimizer_state,
    dump_optimizer_state,
    has_statistics,
    initialize_optimizer_state_,
    load_optimizer_state,
    noting_state,
    without_hyperparameters,
)
from shoal.optim.setup.schedules import LRSchedulerBase, catch_up, dump_scheduler_state
from shoal.optim.setup.training_setup import Parameters, ParamGroups, names_in, prepare_training
from shoal.optim.setup.training_state import load_optimizer

if TYPE_CHECKING:
    from shoal.optim.grad_scaler import GradScaler

# The key of a checkpoint under which the states of a list of optimizers are.
_LIST = "optimizers"

InnerOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


def without_statistics(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint of :meth:`InnerOptimizers.state_dict` without what the optimizers remember of gradients."""
    if _LIST in state:
        return {_LIST: [{**each, "state": {}} for each in state[_LIST]]}
    return {**state, "state": {}}


class InnerOptimizers:
    """One or several optimizers, such as one for matrices and one for everything else.

    Args:
        optimizer: an optimizer, a list of them, or a function that makes one from parameter groups.
        params: parameters or groups for that function.
        scheduler: a schedule, or a function that makes one; it is called for each optimizer.

    Raises:
        TypeError, ValueError: they contradict each other, or cannot be trained with.
    """

    def __init__(
        self,
        optimizer: InnerOptimizer | Sequence[InnerOptimizer],
        params: Parameters | ParamGroups | None,
        scheduler: Any | None,
    ) -> None:
        self.is_list = isinstance(optimizer, Sequence)
        given: list[InnerOptimizer] = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        if not given:
            raise ValueError("optimizer is an empty list: give at least one optimizer")
        if len(given) > 1:
            if not all(isinstance(each, torch.optim.Optimizer) for each in given):
                raise ValueError(
                    "of a list of optimizers each must be made already: only a single one may be a function"
                )
            if isinstance(scheduler, LRSchedulerBase):
                raise ValueError("several optimizers need a function that makes a scheduler for each of them")
        setups = [prepare_training(each, params, scheduler, None, offload_optimizer=False) for each in given]
        self.optimizers = tuple(setup.optimizer for setup in setups)
        self.schedulers = tuple(setup.scheduler for setup in setups if setup.scheduler is not None)
        self.parameters = tuple(parameter for setup in setups for parameter in setup.main_parameters)
        names = [setup.given_names for setup in setups]
        self.names = tuple(itertools.chain(*names)) if all(names) else ()
        """Names of the parameters, for archives; empty if they came without names."""
        if len({id(parameter) for parameter in self.parameters}) < len(self.parameters):
            raise ValueError("a parameter is trained by two optimizers: give each of them its own")
        self._missing = MissingGradients()
        # Positions of the frozen parameters, which are in no fragment.
        self._frozen = [n for n, parameter in enumerate(self.parameters) if not parameter.requires_grad]

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Note the names of the parameters in the model, unless they came with names."""
        self.names = self.names or names_in(model, self.parameters)

    @property
    def param_groups(self) -> tuple[dict[str, Any], ...]:
        """All groups of all optimizers."""
        return tuple(group for optimizer in self.optimizers for group in optimizer.param_groups)

    def has_no_gradients(self) -> bool:
        """Whether a batch has no gradients at all, so that it does not count, and the model must stay as it is."""
        return self._missing.has_none(self.parameters)

    def step(self, trainer: torch.optim.Optimizer, scaler: GradScaler | None) -> bool:
        """Make an inner step with the gradients that are there.

        Args:
            trainer: the optimizer that the scaler knows.
            scaler: the scaler of the loss; ``None``: the loss is not scaled.

        Returns:
            Whether the step was made. It is not if any gradient has overflowed.

        Raises:
            ValueError: a parameter is trained that was frozen in the beginning.
        """
        if trained := [n for n in self._frozen if self.parameters[n].requires_grad]:
            which = self.names[trained[0]] if self.names else f"number {trained[0]}"
            raise ValueError(
                f"parameter {which} was frozen when this optimizer was made, so it is not exchanged, and peers would "
                "train it apart: make the optimizer while it requires gradients, and freeze it afterwards"
            )
        self._missing.look(parameter for parameter in self.parameters if parameter.requires_grad)
        if scaler is not None:
            if not scaler.unscale_batch(trainer, ends=True):
                return False
            scaler.note_global_step()
        for optimizer in self.optimizers:
            with noting_state(optimizer):
                optimizer.step()
        return True

    def move_schedules(self, position: int) -> None:
        """Bring the schedules forward to the position of the run. They never go back."""
        for scheduler in self.schedulers:
            catch_up(scheduler, position)

    @torch.no_grad()
    def forget_what_is_not_finite(self) -> None:
        """Replace the values of statistics that are not finite by zeros."""
        for optimizer in self.optimizers:
            for statistics in optimizer.state.values():
                for value in statistics.values():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        value.nan_to_num_(0.0, 0.0, 0.0)

    def dump_statistics(self) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
        """The statistics of all optimizers as plain values and tensors, for newcomers. The tensors are not copied."""
        dumped = [dump_optimizer_state(optimizer) for optimizer in self.optimizers]
        # Without hyper-parameters: each peer has its own, and its own schedule.
        described = [{**without_hyperparameters(metadata), "tensors": len(tensors)} for metadata, tensors in dumped]
        return described, [tensor for _, tensors in dumped for tensor in tensors]

    def load_statistics(self, described: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Take over the statistics of another peer.

        Raises:
            ValueError: they do not fit; nothing has been changed.
        """
        if not isinstance(described, (list, tuple)) or len(described) != len(self.optimizers):
            raise ValueError(f"the statistics are not those of {len(self.optimizers)} inner optimizers")
        left, parts = list(tensors), []
        for optimizer, metadata in zip(self.optimizers, described, strict=True):
            count = metadata.get("tensors") if isinstance(metadata, dict) else None
            if not isinstance(count, int) or not 0 <= count <= len(left):
                raise ValueError("the statistics of an inner optimizer have no tensors")
            if not has_statistics(optimizer):
                initialize_optimizer_state_(optimizer)
            parts.append((optimizer, metadata, left[:count]))
            del left[:count]
            check_optimizer_state(*parts[-1])
            if (bad := first_not_finite(parts[-1][2])) is not None:
                raise ValueError(f"statistic {bad} is not finite")
        for part in parts:
            load_optimizer_state(*part)

    def dump_schedules(self) -> list[Any]:
        """The state of each schedule, as plain values."""
        return [dump_scheduler_state(scheduler) for scheduler in self.schedulers]

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer; if a list of them was given, under ``"optimizers"`` the state of each."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return {_LIST: states} if self.is_list else states[0]

    def load_state_dict(self, given: Mapping[str, Any], schedules: Sequence[Any] | None) -> None:
        """Restore the result of :meth:`state_dict`, or the state of a plain optimizer.

        Args:
            given: it is not changed.
            schedules: from :meth:`dump_schedules`; ``None``: the schedules stay where they are.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        states = given.get(_LIST, [given])
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint has the state of {len(states)} inner optimizers, and this peer has "
                f"{len(self.optimizers)}: give optimizer= as when it was saved"
            )
        if schedules is not None and len(schedules) != len(self.schedulers):
            raise ValueError(
                f"the checkpoint has {len(schedules)} schedules, and this peer {len(self.schedulers)}: give scheduler= "
                "as when it was saved"
            )
        for number, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=True)):
            try:
                sizes = [len(group["params"]) for group in state["param_groups"]]
            except (KeyError, TypeError) as e:
                raise ValueError(f"the checkpoint has no state of an optimizer: {e!r} is missing") from e
            if sizes != (own := [len(group["params"]) for group in optimizer.param_groups]):
                raise ValueError(
                    f"inner optimizer {number} of the checkpoint has groups of {sizes} parameters, and this peer's has "
                    f"groups of {own}: it is of another model, or of another optimizer"
                )
        scheduled = {id(scheduler.optimizer): number for number, scheduler in enumerate(self.schedulers)}
        for optimizer, state in zip(self.optimizers, states, strict=True):
            place = scheduled.get(id(optimizer))
            scheduler = None if place is None else self.schedulers[place]
            position = None if place is None or schedules is None else schedules[place]
            plain = {name: state[name] for name in ("state", "param_groups")}
            load_optimizer(optimizer, scheduler, plain, position)
