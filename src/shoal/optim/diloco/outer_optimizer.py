"""The optimizers of the outer parameters: the user's, except that SGD makes the same bits on all machines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from shoal.optim.setup.training_setup import check_optimizer

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
