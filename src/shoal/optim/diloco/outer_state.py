"""What peers of a run agree on, of one fragment: outer parameters, the state of their optimizer, and their version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shoal.averaging.state.download import Layout, layout_of
from shoal.base.logs import quoted
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
from shoal.optim.setup.training_setup import SchedulerFactory, check_optimizer

logger = logging.getLogger(__name__)

OuterOptimizerFactory = Callable[[Any], torch.optim.Optimizer]


class SteadySGD(torch.optim.SGD):
    """SGD whose step is made of operations that round once.

    Torch's own step fuses multiplications and additions on some processors and not on others. All peers must end each
    step with the same bits, whatever their machines.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step with the gradients that the parameters have. There is no loss to evaluate again."""
        assert closure is None, "an outer step has no loss that a closure could compute"
        for group in self.param_groups:
            rate, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                change = grad.neg() if group["maximize"] else grad
                if decay:
                    change = change + parameter * decay
                if momentum:
                    change = self._with_momentum(parameter, change, group)
                parameter.sub_(change * rate)

    def _with_momentum(self, parameter: torch.Tensor, change: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        momentum, state = group["momentum"], self.state[parameter]
        buffer: torch.Tensor | None = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = change.clone()
        else:
            fresh = change * (1 - group["dampening"]) if group["dampening"] else change
            buffer.mul_(momentum).add_(fresh)
        return change + buffer * momentum if group["nesterov"] else buffer


def default_outer_optimizer(average: str, *, is_sparse: bool = False) -> OuterOptimizerFactory:
    """What is used unless the user chooses.

    Args:
        average: what peers average, ``"pseudo_gradients"`` or ``"parameters"``. With the latter much momentum ruins
            training.
        is_sparse: peers send few values only. These come late, and momentum would carry them further.
    """
    if average == "parameters":
        return partial(torch.optim.SGD, lr=0.7, momentum=0.5)
    if is_sparse:
        return partial(torch.optim.SGD, lr=0.7)
    return partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


# With more of it, averaging parameters and sparse messages have trained worse than one peer alone.
MOST_MOMENTUM = 0.5


def warn_of_momentum(optimizers: Iterable[torch.optim.Optimizer], average: str, *, is_sparse: bool) -> None:
    """Warn once of more momentum than this way of averaging can take."""
    most = max((group.get("momentum", 0.0) for each in optimizers for group in each.param_groups), default=0.0)
    if most > MOST_MOMENTUM and (is_sparse or average == "parameters"):
        logger.warning(
            "the outer optimizer has a momentum of %g, which ruins training with %s: use %g or less",
            most,
            "sparse messages" if is_sparse else "average='parameters'",
            MOST_MOMENTUM,
        )


def make_outer_optimizer(factory: OuterOptimizerFactory, parameter: torch.Tensor) -> torch.optim.Optimizer:
    """Let the user's function make an optimizer for one vector of outer parameters.

    Raises:
        TypeError, ValueError: it makes something else.
    """
    optimizer = factory([parameter])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"outer_optimizer must be a function that makes a torch optimizer from parameters, such as "
            f"functools.partial(torch.optim.SGD, lr=0.7): it returned a {type(optimizer).__name__}"
        )
    given = [each for group in optimizer.param_groups for each in group["params"]]
    if len(given) != 1 or given[0] is not parameter:
        raise ValueError("outer_optimizer must give its optimizer the parameters that it gets, and no others")
    check_optimizer(optimizer)
    if type(optimizer) is not torch.optim.SGD:
        return optimizer
    (group,) = optimizer.param_groups
    steady = SteadySGD([parameter], lr=group["lr"])
    steady.defaults.update(optimizer.defaults)
    steady.param_groups[0].update(group)
    return steady


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
