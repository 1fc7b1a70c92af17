"""Notices batches without gradients: ``step()`` was called before ``backward()``, or ``zero_grad()`` between the two.

Such a batch counts as samples whose gradients are zero, so that the mean of all peers becomes smaller, and the model
learns slowly or nothing at all. Nothing else shows it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

logger = logging.getLogger(__name__)

# Gradients that are there, but zero, are looked for in the first batches only: it means to wait for the device.
BATCHES_READ = 3


class MissingGradients:
    """Looks at the gradients of each batch, and warns once."""

    def __init__(self) -> None:
        self._batches, self._has_told = 0, False

    @torch.no_grad()
    def look(self, parameters: Iterable[torch.Tensor], *, accumulated: int = 0) -> None:
        """A batch is about to be counted.

        Args:
            parameters: which should have gradients.
            accumulated: samples whose gradients are in ``.grad`` already.
        """
        if self._has_told:
            return
        self._batches += 1
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients and (self._batches > BATCHES_READ or any(map(_is_not_zero, gradients))):
            return
        self._has_told = True
        if accumulated:
            logger.warning(
                "the gradients of %d samples are gone: with reuse_grad_buffers=True they accumulate in the parameters, "
                "so never call zero_grad(), of the model neither",
                accumulated,
            )
        else:
            logger.warning(
                "step() counts a batch, but %s: call loss.backward() before step(), and zero_grad() after step() or "
                "before backward()",
                "all of its gradients are zero" if gradients else "no parameter has a gradient",
            )


def _is_not_zero(gradient: torch.Tensor) -> bool:
    # What other kinds of tensors hold cannot be read without others, or without copies.
    return type(gradient) not in (torch.Tensor, torch.nn.Parameter) or gradient.is_sparse or bool(gradient.any())
