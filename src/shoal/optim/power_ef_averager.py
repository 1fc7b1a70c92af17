"""PowerEF: a common estimate of the gradient, which is corrected by matrices of low rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging.finite import without_overflow
from shoal.optim.grad_averager import logger
from shoal.optim.low_rank import LowRankAverager, LowRankRound, LowRankState

if TYPE_CHECKING:
    from shoal.dht import DHT

__all__ = ["PowerEFGradientAverager"]

LEAST_RANK_BY_WIDTH = 1 / 16
"""With a lower rank, too much noise of earlier batches stays in the estimates: measured by ``benchmarks/ranks.py``."""


class PowerEFGradientAverager(LowRankAverager):
    """Averages the differences between gradients and a common estimate of them, by matrices of low rank.

    All peers have the same estimate of the average gradient. In each round they average the differences between their
    gradients and the estimate, as PowerSGD averages gradients. With the result they correct the estimate, which is then
    the average (error feedback as in EF21, Richtárik et al., 2021, https://arxiv.org/abs/2106.05203). No peer has a
    memory of its own. So nothing is lost when one leaves, and a newcomer has everything after its first round.

    On different machines the same computation may differ in the last bits. So every ``grad_averaging_interval`` rounds
    the members compare hashes of their estimates, and average the estimates first if they differ. The members agree on
    the number of a round before it begins.

    **Its limit**: a round corrects the estimate in ``averager_rank`` directions only, so noise of earlier batches
    stays in it for long. With a rank below a sixteenth of the model's width the loss suffers, and a warning says so.
    ``docs/gradients.md`` has measurements.

    Args:
        parameters: their gradients are averaged.
        averager_rank: a higher rank costs more bytes and is more exact. The same in all peers.
        dht: lets averagers find each other.
        prefix: name of the run.
        reuse_grad_buffers: accumulate in ``parameter.grad`` itself; then never zero gradients.
        accumulate_grads_on: device of the accumulators.
        client_mode: only connect to others; default: as the DHT.
        warn: warn when results are not used, accumulators are not reset, or the rank is too low.
        min_compression_ratio: a tensor is averaged as it is if compression would save less than this share. The same
            in all peers.
        averaged_grads: CPU tensors that receive the averages; default: new ones.
        grad_averaging_interval: check the estimates once in this many rounds. Must be the same in all peers.
        min_comprasion_ratio: old name of ``min_compression_ratio``.
        averager_kwargs: see :class:`~shoal.averaging.DecentralizedAverager`.
    """

    method = "PowerEF"

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        averager_rank: int,
        *,
        dht: DHT,
        prefix: str,
        reuse_grad_buffers: bool = False,
        accumulate_grads_on: torch.device | str | None = None,
        client_mode: bool | None = None,
        warn: bool = True,
        min_compression_ratio: float = 0.5,
        averaged_grads: Sequence[torch.Tensor] | None = None,
        grad_averaging_interval: int = 10,
        min_comprasion_ratio: float | None = None,
        **averager_kwargs: Any,
    ) -> None:
        if grad_averaging_interval < 1:
            raise ValueError(f"grad_averaging_interval must be at least 1, got {grad_averaging_interval}")
        self.synchronize_every = self.grad_averaging_interval = grad_averaging_interval
        super().__init__(
            parameters,
            averager_rank,
            dht=dht,
            prefix=prefix,
            reuse_grad_buffers=reuse_grad_buffers,
            accumulate_grads_on=accumulate_grads_on,
            client_mode=client_mode,
            warn=warn,
            min_compression_ratio=min_compression_ratio if min_comprasion_ratio is None else min_comprasion_ratio,
            averaged_grads=averaged_grads,
            **averager_kwargs,
        )
        width = max((min(m.rows, m.columns) for m in self._matrices), default=0)
        least_rank = math.ceil(width * LEAST_RANK_BY_WIDTH)
        if warn and averager_rank < least_rank:
            logger.warning(
                "PowerEF of rank %d is too inexact for matrices %d wide: use rank %d or more, PowerSGD, or the default",
                averager_rank, width, least_rank,
            )  # fmt: skip

    def _first_state(self) -> LowRankState:
        estimates = tuple(torch.zeros(m.rows, m.columns, dtype=m.dtype, device="cpu") for m in self._matrices)
        return LowRankState(self._first_bases, estimates)

    def _difference(self, position: int, gradient: torch.Tensor, state: LowRankState, weight: float) -> torch.Tensor:
        return gradient - state.estimates[position]

    def _results(self, work: LowRankRound) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        rounds = zip(work.state.estimates, work.left, work.right, strict=True)
        estimates = [without_overflow(torch.addmm(estimate, left, right.t())) for estimate, left, right in rounds]
        return estimates, tuple(estimates)
