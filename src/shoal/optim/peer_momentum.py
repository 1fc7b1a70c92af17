"""Peers that send their momentum instead of their gradient.

An averaging rule that looks at one round alone cannot tell a small, patient lie from the noise of honest batches. A
peer's momentum is the mean of its last gradients. It has less noise, so the same lie stands out (Karimireddy et al.,
2021, https://arxiv.org/abs/2012.10333).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.averaging.finite import first_not_finite
from shoal.base.logs import quoted
from shoal.optim.setup.devices import copy_all


class PeerMomentum:
    """The momentum of one peer: m ← β · m + (1 - β) · gradient, once in each step; the first m is the gradient.

    Args:
        beta: β, from 0 to below 1.
        like: tensors with the shapes and types of the gradients.
    """

    def __init__(self, beta: float, like: Sequence[torch.Tensor]) -> None:
        self._beta = beta
        self._momentum = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in like]
        self._has_begun = False
        # How many batches the last counted gradient was the mean of; 0: none was counted in this step.
        self._batches = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The momentum; zeros before the first step. Do not change it."""
        return self._momentum

    @torch.no_grad()
    def replace(self, gradients: Sequence[torch.Tensor], batches: int) -> None:
        """Update the momentum with mean gradients, and overwrite them with it. If any is not finite, change nothing.

        Args:
            gradients: this peer's mean gradients of the present step.
            batches: over how many batches they are the mean. The same number as in the last call means the same
                gradients, which count only once.
        """
        if batches == 0 or first_not_finite(gradients) is not None:
            return
        if batches != self._batches:
            self._batches = batches
            if self._has_begun:
                torch._foreach_lerp_(self._momentum, list(gradients), 1 - self._beta)
            else:
                copy_all(self._momentum, gradients)
                self._has_begun = True
        copy_all(gradients, self._momentum)

    def next_step(self) -> None:
        """A new step begins: the next gradients are new ones, whatever their number of batches."""
        self._batches = 0

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Go on from the momentum of a checkpoint.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        shapes, own = [tuple(t.shape) for t in tensors], [tuple(t.shape) for t in self._momentum]
        if shapes != own:
            raise ValueError(f"the momentum has shapes {quoted(shapes)}, expected {quoted(own)}")
        copy_all(self._momentum, tensors)
        self._has_begun = any(bool(tensor.any()) for tensor in self._momentum)


def check_peer_momentum(beta: float) -> float:
    """Check the option ``peer_momentum`` and return it as a float.

    Raises:
        ValueError: it is not a number from 0 to below 1.
    """
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 <= beta < 1:
        raise ValueError(f"peer_momentum must be a number from 0 (off) to below 1, such as 0.9, got {beta!r}")
    return float(beta)


def check_has_no_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer has no momentum of its own: with peer momentum, its gradients are momentum already.

    Raises:
        ValueError: it has momentum.
    """
    for group in optimizer.param_groups:
        for name, value in _own_momentum(group).items():
            if float(value) != 0:
                raise ValueError(
                    f"with peer_momentum peers send momentum instead of gradients, so {type(optimizer).__name__} must "
                    f"have none of its own, but its {name} is {float(value):g}: set it to 0. As the momentum is a "
                    "mean, and not a sum, SGD takes about 1 / (1 - momentum) times the learning rate then"
                )


def _own_momentum(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: group[name] for name in ("momentum", "beta1") if group.get(name) is not None}
    betas = group.get("betas")
    return {**found, "betas[0]": betas[0]} if betas else found
