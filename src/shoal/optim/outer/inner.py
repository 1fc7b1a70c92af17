"""The optimizers that make the inner steps of one peer, and their learning rate schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.optim.optimizer_state import zero_gradients
from shoal.optim.schedules import LRSchedulerBase, catch_up
from shoal.optim.training_setup import Parameters, ParamGroups, prepare_training

if TYPE_CHECKING:
    from shoal.optim.grad_scaler import GradScaler

InnerOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


class InnerOptimizers:
    """One optimizer or several ones, such as one for matrices and one for everything else.

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
        if len({id(parameter) for parameter in self.parameters}) < len(self.parameters):
            raise ValueError("a parameter is trained by two optimizers: give each of them its own")

    @property
    def param_groups(self) -> tuple[dict[str, Any], ...]:
        """All groups of all optimizers."""
        return tuple(group for optimizer in self.optimizers for group in optimizer.param_groups)

    def step(self, trainer: torch.optim.Optimizer, scaler: GradScaler | None) -> bool:
        """Make an inner step with the gradients that are there.

        Args:
            trainer: the optimizer that the scaler knows.
            scaler: the scaler of the loss; ``None``: the loss is not scaled.

        Returns:
            Whether the step was made. It is not if any gradient has overflowed.
        """
        if scaler is not None:
            if not scaler.are_grads_finite(trainer):
                return False
            grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            torch._foreach_mul_(grads, 1 / scaler.get_scale())
            scaler.note_global_step()
        for optimizer in self.optimizers:
            optimizer.step()
        return True

    def move_schedules(self, position: int) -> None:
        """Bring the schedules to where the run is. They never go back."""
        for scheduler in self.schedulers:
            catch_up(scheduler, position)

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradients."""
        zero_gradients(self.parameters, set_to_none)

    @torch.no_grad()
    def forget_what_is_not_finite(self) -> None:
        """Replace statistics that are not finite by zeros."""
        for optimizer in self.optimizers:
            for statistics in optimizer.state.values():
                for value in statistics.values():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        value.nan_to_num_(0.0, 0.0, 0.0)

    def state_dict(self) -> Any:
        """The state of the optimizer; a list if a list of them was given."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return states if self.is_list else states[0]
