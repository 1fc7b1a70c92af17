"""Modules that make what goes from stage to stage small."""

from __future__ import annotations

import torch
from torch import nn


class LowRankBoundary(nn.Module):
    """A learned bottleneck between two stages: ``down`` to ``rank`` values for each token, ``up`` to ``width`` again.

    ``down`` is the last module of one stage, and ``up`` the first one of the next, so only ``rank`` values for each
    token travel between them, and as many of the gradient on the way back::

        first = lambda: nn.Sequential(*blocks[:4], LowRankBoundary(512, 64).down)
        second = lambda: nn.Sequential(LowRankBoundary(512, 64).up, *blocks[4:])

    ``down`` first normalizes its input; without that, a bottleneck costs far more loss. Clip gradients: without that,
    some runs with a bottleneck learn nothing. Both halves start as a projection onto one subspace: their first weights
    follow from the two sizes, not from torch's random numbers, so halves that different peers make fit together. The
    module itself is both in a row, for a model in one process.

    A bottleneck costs loss. ``benchmarks/boundaries.py`` measures how much, beside codecs. Bottlenecks between stages
    are one of the ways of SWARM (Ryabinin et al. 2023, arXiv 2301.11913). Protocol Models (Ramasinghe et al. 2025,
    arXiv 2506.01260) go further: they confine activations to one subspace in all stages, so that each can restore them.

    Args:
        width: values for each token in the model: the last dimension of its activations.
        rank: values for each token that are sent.

    Raises:
        ValueError: ``rank`` is not between 1 and ``width``.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        if not 1 <= rank <= width:
            raise ValueError(f"rank must be from 1 to the width of the model, {width}, got {rank}")
        values = torch.randn(width, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
        basis = torch.linalg.qr(values).Q.float()
        down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        with torch.no_grad():
            down.weight.copy_(basis.T)
            self.up.weight.copy_(basis)
        self.down = nn.Sequential(nn.LayerNorm(width), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both halves: shape ``[..., width]`` to ``[..., width]``."""
        out: torch.Tensor = self.up(self.down(x))
        return out
