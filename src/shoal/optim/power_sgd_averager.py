"""PowerSGD: gradients as matrices of low rank, with error feedback (arXiv:1905.13727)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.averaging.finite import without_overflow
from shoal.base.logs import quoted
from shoal.optim.low_rank import LowRankAverager, LowRankRound, LowRankState

__all__ = ["PowerSGDGradientAverager"]


class PowerSGDGradientAverager(LowRankAverager):
    """Averages gradients by PowerSGD (Vogels et al., 2019, https://arxiv.org/abs/1905.13727).

    Each large tensor of (rows, columns) costs rank · (rows + columns) values instead of rows · columns. The part of a
    peer's gradients that the approximation leaves out stays with this peer and is added to its next gradients (error
    feedback), weighted by the samples that it came from. This memory is lost when the peer leaves.

    Args:
        parameters: their gradients are averaged.
        averager_rank: usually 1 to 4; a higher rank costs more bytes and is more exact. The same in all peers.
        dht: lets averagers find each other.
        prefix: name of the run.
        reuse_grad_buffers: accumulate in ``parameter.grad`` itself; then never zero gradients.
        accumulate_grads_on: device of the accumulators.
        client_mode: only connect to others; default: as the DHT.
        warn: warn when results are not used, or accumulators are not reset.
        min_compression_ratio: a tensor is averaged as it is if compression would save less than this share. The same
            in all peers.
        averaged_grads: CPU tensors that receive the averages; default: new ones.
        averager_kwargs: see :class:`~shoal.averaging.DecentralizedAverager`.
    """

    method = "PowerSGD"

    # For each compressed tensor, the part left out so far, summed over samples; ``None`` = nothing.
    _errors: list[torch.Tensor] | None = None

    def _difference(self, position: int, gradient: torch.Tensor, state: LowRankState, weight: float) -> torch.Tensor:
        if self._errors is None or weight == 0:
            return gradient.clone()
        return torch.add(gradient, self._errors[position], alpha=min(1 / weight, torch.finfo(gradient.dtype).max))

    @torch.no_grad()
    def _project(self, work: LowRankRound) -> None:
        super()._project(work)
        for difference, left, right in zip(work.differences, work.left, work.right, strict=True):
            difference.addmm_(left, right.t(), alpha=-1)  # D becomes the part that is left out

    def _results(self, work: LowRankRound) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        return [without_overflow(left @ right.t()) for left, right in zip(work.left, work.right, strict=True)], ()

    def _contributed(self, work: LowRankRound) -> None:
        if work.differences:
            torch._foreach_mul_(work.differences, min(work.weight, torch.finfo(torch.float32).max))
        self._errors = [without_overflow(difference) for difference in work.differences]

    def get_memory(self) -> list[torch.Tensor]:
        return [*super().get_memory(), *(self._errors or ())]

    def set_memory(self, tensors: Sequence[torch.Tensor]) -> None:
        split = len(super().get_memory())
        errors = [tensor.detach().clone() for tensor in tensors[split:]]
        shapes, own_shapes = [tuple(e.shape) for e in errors], [(m.rows, m.columns) for m in self._matrices]
        if errors and shapes != own_shapes:
            raise ValueError(f"what was left out has shapes {quoted(shapes)}, expected {quoted(own_shapes)}")
        super().set_memory(tensors[:split])
        self._errors = errors or None
