"""A mixture that balances its experts, as in Switch Transformers (https://arxiv.org/abs/2101.03961)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shoal.base.extras import nested_pack
from shoal.moe.expert import RemoteExpert
from shoal.moe.mixture import RemoteMixtureOfExperts, averaged, weighted


class RemoteSwitchMixtureOfExperts(RemoteMixtureOfExperts):
    """A mixture beside a residual connection, and a loss that is least when all experts are used equally.

    The weight of an expert is the probability that the gate gives it, which is not scaled up to one. So the gate learns
    even with one expert per sample. To each output with the shape of the input, the input is added: a sample that no
    expert answers stays as it is.

    Args:
        grid_size: how many numbers each dimension of the grid has.
        utilization_alpha: smoothing factor of the utilization; larger is smoother.
        grid_dropout: in training, each number of the grid takes part in a batch with this probability. One of each
            dimension always does.
        jitter_eps: in training, the input of the gate is multiplied by noise of this size.
        k_best, k_min, backward_k_min, allow_zero_outputs, kwargs: as for :class:`RemoteMixtureOfExperts`.
    """

    grid_utilization: torch.Tensor
    """For the numbers of all dimensions, one after another, the share of the answers that came from their experts."""

    def __init__(
        self,
        *,
        grid_size: Sequence[int],
        utilization_alpha: float = 0.9,
        grid_dropout: float = 1.0,
        jitter_eps: float = 1e-2,
        k_best: int = 1,
        k_min: int = 0,
        backward_k_min: int = 0,
        allow_zero_outputs: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            grid_size=grid_size,
            k_best=k_best,
            k_min=k_min,
            backward_k_min=backward_k_min,
            allow_zero_outputs=allow_zero_outputs,
            **kwargs,
        )
        self.utilization_alpha, self.grid_dropout, self.jitter_eps = utilization_alpha, grid_dropout, jitter_eps
        even = torch.cat([torch.full((size,), 1 / size, device=self.proj.weight.device) for size in grid_size])
        self.register_buffer("grid_utilization", even)

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        """The output, nested as those of the experts, and the loss that balances them.

        Args:
            input, args, kwargs: as for :meth:`RemoteMixtureOfExperts.forward`.
        """
        gate_input = averaged(input)
        if self.training and self.jitter_eps:
            gate_input = gate_input * torch.empty_like(gate_input).uniform_(1 - self.jitter_eps, 1 + self.jitter_eps)
        grid_scores = [self._without_dropped(each) for each in self.proj(gate_input).split(self.grid_size, dim=-1)]
        probabilities = [torch.softmax(each, dim=-1) for each in grid_scores]
        experts, mask, outputs = self._ask_experts(grid_scores, input, args, kwargs)
        self._note_utilization(experts, mask)
        values, _ = self.values_of(probabilities, experts)
        weights = values.prod(0) * mask
        mixed = [weighted(each, weights) for each in outputs]
        residual = [input + each if each.shape == input.shape else each for each in mixed]
        return nested_pack(residual, self.info["outputs_schema"]), self.balancing_loss(probabilities)

    def _without_dropped(self, scores: torch.Tensor) -> torch.Tensor:
        size = scores.shape[-1]
        if not self.training or self.grid_dropout >= 1:
            return scores
        draws = torch.rand(size, device=scores.device)
        return scores.masked_fill((draws >= self.grid_dropout) & (draws > draws.min()), -math.inf)

    @torch.no_grad()
    def _note_utilization(self, experts: Sequence[Sequence[RemoteExpert]], mask: torch.Tensor) -> None:
        if not mask.any():
            return
        numbers, _ = self.numbers_of(experts)
        answered = numbers[:, mask.cpu()]
        counts = [torch.bincount(each, minlength=size) for each, size in zip(answered, self.grid_size, strict=True)]
        share = torch.cat(counts).to(self.grid_utilization) / answered.shape[1]
        # Not in place: an earlier loss may still need the present values.
        self.grid_utilization = torch.lerp(self.grid_utilization, share, 1 - self.utilization_alpha)

    def balancing_loss(self, probabilities: Sequence[torch.Tensor]) -> torch.Tensor:
        """One for each dimension if it is used equally, and more if not.

        Args:
            probabilities: those of the gate, for each dimension a tensor of shape (samples, numbers).
        """
        used = torch.split(self.grid_utilization, [*self.grid_size])
        terms = [
            each.mean(0).mul(share.to(each.dtype)).mean() * each.shape[-1] ** 2
            for each, share in zip(probabilities, used, strict=True)
        ]
        return torch.stack(terms).sum()
