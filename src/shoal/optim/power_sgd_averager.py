"""PowerSGD: gradients sent as matrices of low rank; what does not fit is sent later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.averaging.finite import without_overflow
from shoal.optim.low_rank import LowRankState
from shoal.optim.low_rank_averager import LowRankAverager, LowRankRound

__all__ = ["PowerSGDGradientAverager"]


class PowerSGDGradientAverager(LowRankAverager):
    """Averages gradients by PowerSGD (Vogels et al., 2019, https://arxiv.org/abs/1905.13727).

    Each large tensor of (rows, columns) costs rank · (rows + columns) values instead of rows · columns. What the
    approximation leaves out of a peer's gradients stays with this peer and is added to its next ones (error feedback),
    weighted by the samples from which it came. This memory is this peer's own: it is lost when the peer leaves.

    Args:
        parameters: whose gradients are averaged.
        averager_rank: 1 to 4 is usual; more costs more bytes and is more exact. The same in all peers.
        dht: how averagers find each other.
        prefix: name of the run.
        reuse_grad_buffers: accumulate in ``parameter.grad`` itself; never zero gradients then.
        accumulate_grads_on: device of the accumulators.
        client_mode: only connect to others; default: as the DHT.
        warn: tell when results are not used, or accumulators are not reset.
        min_compression_ratio: tensors of which less than this share would be saved are averaged as they are. The same
            in all peers.
        averaged_grads: CPU tensors that receive the averages; default: new ones.
        averager_kwargs: see :class:`~shoal.averaging.DecentralizedAverager`.
    """

    method = "PowerSGD"

    # For each compressed tensor: what was left out so far, summed over samples; ``None`` = nothing.
    _errors: list[torch.Tensor] | None = None

    def _difference(self, position: int, gradient: torch.Tensor, state: LowRankState, weight: float) -> torch.Tensor:
        if self._errors is None or weight == 0:
            return gradient.clone()
        return torch.add(gradient, self._errors[position], alpha=min(1 / weight, torch.finfo(gradient.dtype).max))

    @torch.no_grad()
    def _project(self, work: LowRankRound) -> None:
        super()._project(work)
        for difference, left, right in zip(work.differences, work.left, work.right, strict=True):
            difference.addmm_(left, right.t(), alpha=-1)  # what is left out

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
            raise ValueError(f"what was left out has shapes {shapes}, expected {own_shapes}")
        super().set_memory(tensors[:split])
        self._errors = errors or None
