"""The mean gradient of many batches, weighted by their sizes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

logger = logging.getLogger(__name__)


class GradientAccumulator:
    """Adds up gradients of mean losses, so that every sample counts the same.

    Args:
        parameters: whose ``.grad`` is accumulated.
        reuse_grad_buffers: the sum is kept in ``.grad`` itself, where ``backward`` puts it unless gradients are zeroed.
            That takes no memory, but there every batch counts the same whatever its size.
        device: where the sums are kept; default: beside each parameter.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        reuse_grad_buffers: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.reuse_grad_buffers = reuse_grad_buffers
        self.samples = 0
        self.batches = 0
        self._first_batch_size = 0
        self._warned = False
        self._sums: list[torch.Tensor] | None = None
        if not reuse_grad_buffers:
            self._sums = [
                torch.zeros_like(p, device=p.device if device is None else device, dtype=_wide(p.dtype)).detach()
                for p in self.parameters
            ]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Where the sums are kept."""
        return self._grads() if self._sums is None else self._sums

    def _grads(self) -> list[torch.Tensor]:
        """Every parameter's ``.grad``; missing ones are made, full of zeros."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    @torch.no_grad()
    def add(self, batch_size: int) -> None:
        """Count the gradients in ``.grad`` as those of one more batch with a mean loss.

        Args:
            batch_size: number of samples in it.
        """
        if batch_size <= 0:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        if self.batches == 0:
            self._first_batch_size = batch_size
        self.samples += batch_size
        self.batches += 1
        if self._sums is None:
            if batch_size != self._first_batch_size and not self._warned:
                self._warned = True
                logger.warning(
                    "batches of %d and %d samples were accumulated with reuse_grad_buffers=True, where every batch "
                    "counts the same: use reuse_grad_buffers=False to weight them by their size",
                    self._first_batch_size,
                    batch_size,
                )
            return
        present = [(s, p.grad) for s, p in zip(self._sums, self.parameters, strict=True) if p.grad is not None]
        if present:
            sums = [s for s, _ in present]
            grads = [grad.to(s.device, non_blocking=True) for s, grad in present]
            torch._foreach_add_(sums, grads, alpha=batch_size / self._first_batch_size)

    @torch.no_grad()
    def write_mean(self, targets: Sequence[torch.Tensor]) -> None:
        """Put the mean gradient over all samples since the last reset into ``targets``; zeros if there were none."""
        if self.batches == 0:
            for target in targets:
                target.zero_()
            return
        in_units_of_the_first = self.batches if self._sums is None else self.samples / self._first_batch_size
        sources = self.buffers
        if all(s.dtype == t.dtype and s.device == t.device for s, t in zip(sources, targets, strict=True)):
            torch._foreach_copy_(list(targets), sources)
            torch._foreach_div_(list(targets), in_units_of_the_first)
        else:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source / in_units_of_the_first)

    @torch.no_grad()
    def reset(self) -> None:
        """Begin anew."""
        self.samples = self.batches = self._first_batch_size = 0
        present = self._sums
        if present is None:
            present = [p.grad for p in self.parameters if p.grad is not None]
        if present:
            torch._foreach_zero_(present)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Sums are kept in single precision at least."""
    return torch.promote_types(dtype, torch.float32)
