"""What peers of a run agree on, of one fragment: outer parameters, the state of their optimizer, and their version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.averaging.state.download import Layout, layout_of
from shoal.base.logs import quoted
from shoal.optim.diloco.outer_optimizer import OuterOptimizerFactory, make_outer_optimizer
from shoal.optim.setup.optimizer_state import (
    check_optimizer_state,
    dump_optimizer_state,
    initialize_optimizer_state_,
    load_optimizer_state,
    noting_state,
    statistics_of,
)
from shoal.optim.setup.schedules import (
    catch_up,
    check_received_schedule,
    check_scheduler,
    dump_scheduler_state,
    load_scheduler_state,
    scheduled_hyperparameters,
)
from shoal.optim.setup.training_setup import SchedulerFactory


class OuterState:
    """Outer parameters of a fragment, which an outer optimizer moves.

    They are float32 numbers on the CPU, whatever the model's are, and have gradients of their own: the model's
    gradients are never touched.

    Args:
        values: the outer parameters at the beginning of the run; taken over, not copied.
        factory: makes the outer optimizer.
        make_schedule: makes a schedule of its learning rate over versions; ``None``: the rate stays.

    Raises:
        TypeError, ValueError: one of them makes something else.
    """

    def __init__(
        self, values: torch.Tensor, factory: OuterOptimizerFactory, make_schedule: SchedulerFactory | None = None
    ) -> None:
        assert values.dtype == torch.float32, f"outer parameters are float32, got {values.dtype}"
        self.parameter = torch.nn.Parameter(values)
        self.optimizer = make_outer_optimizer(factory, self.parameter)
        initialize_optimizer_state_(self.optimizer)
        self.scheduler = None if make_schedule is None else make_schedule(self.optimizer)
        if self.scheduler is not None:
            check_scheduler(self.scheduler)
        self.version = 0
        """How many outer updates the parameters contain."""

    @property
    def values(self) -> torch.Tensor:
        """The outer parameters, without autograd. Do not change them."""
        return self.parameter.detach()

    def step(self, mean: torch.Tensor, left_alone: Sequence[slice] = ()) -> None:
        """Make an outer update.

        Args:
            mean: the mean of the peers' pseudo-gradients; it points away from where the peers have moved.
            left_alone: where parameters are that nobody has trained. These and their statistics stay as they are, as
                in torch those of parameters without gradients do.
        """
        per_value = [self.values] + [
            statistic
            for statistic in self.optimizer.state.get(self.parameter, {}).values()
            if isinstance(statistic, torch.Tensor) and statistic.shape == self.parameter.shape
        ]
        kept = [(tensor[where], tensor[where].clone()) for tensor in per_value for where in left_alone]
        self.parameter.grad = mean
        try:
            with noting_state(self.optimizer):
                self.optimizer.step()
        finally:
            self.parameter.grad = None
        with torch.no_grad():
            for place, before in kept:
                place.copy_(before)
        self.version += 1
        if self.scheduler is not None:
            catch_up(self.scheduler, self.version)

    # --- for newcomers and checkpoints --------------------------------------------------------------------------------

    def dump(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The state as plain values and tensors. The tensors are not copied."""
        metadata, tensors = dump_optimizer_state(self.optimizer)
        schedule = dump_scheduler_state(self.scheduler)
        return {"version": self.version, "optimizer": metadata, "scheduler": schedule}, [self.values, *tensors]

    @property
    def layout(self) -> Layout:
        """The shapes and types of the tensors of :meth:`dump`."""
        return layout_of([self.values, *statistics_of(self.optimizer)])

    def check(self, metadata: Any, tensors: list[torch.Tensor]) -> None:
        """Check that a state from :meth:`dump` of another peer fits.

        Raises:
            ValueError: it does not; nothing has been changed.
        """
        if not isinstance(metadata, Mapping) or not isinstance(version := metadata.get("version"), int) or version < 0:
            raise ValueError(f"the state of a fragment has no version: {quoted(metadata)}")
        if not tensors or tensors[0].shape != self.values.shape or tensors[0].dtype != torch.float32:
            raise ValueError(f"outer parameters must be {tuple(self.values.shape)} float32 numbers")
        for tensor in tensors:
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError("outer parameters, or the state of their optimizer, are not finite")
        check_optimizer_state(self.optimizer, metadata.get("optimizer"), tensors[1:])
        groups = metadata["optimizer"]["groups"]
        check_received_schedule(self.scheduler, metadata.get("scheduler"), groups, metadata["version"])

    def load(self, metadata: Any, tensors: list[torch.Tensor]) -> None:
        """Take over a state from :meth:`dump`. The tensors are copied.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        self.check(metadata, tensors)
        with torch.no_grad():
            self.values.copy_(tensors[0])
        scheduled = scheduled_hyperparameters(self.scheduler)
        load_optimizer_state(self.optimizer, metadata["optimizer"], tensors[1:], scheduled)
        load_scheduler_state(self.scheduler, metadata.get("scheduler"), of_others=True)
        self.version = metadata["version"]
