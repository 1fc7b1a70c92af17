"""The bottleneck between two stages: halves that different peers make fit together, and both learn."""

from __future__ import annotations

import pytest
import torch

from shoal.stages import LowRankBoundary


def test_halves_of_two_peers_begin_as_one_projection() -> None:
    torch.manual_seed(1)
    down = LowRankBoundary(32, 8).down
    torch.manual_seed(2)
    up = LowRankBoundary(32, 8).up
    x = torch.randn(3, 5, 32)
    sent = down(x)
    assert sent.shape == (3, 5, 8)
    kept, normal = up(sent), torch.nn.functional.layer_norm(x, (32,))
    torch.testing.assert_close((normal - kept) @ up.weight, torch.zeros(3, 5, 8), msg="what is lost is orthogonal")
    torch.testing.assert_close(LowRankBoundary(32, 32)(x), normal)


def test_learns_the_subspace_that_matters() -> None:
    torch.manual_seed(0)
    data = torch.nn.functional.layer_norm(torch.randn(256, 4) @ torch.randn(4, 16), (16,))
    boundary = LowRankBoundary(16, 4)
    optimizer = torch.optim.Adam(boundary.parameters(), lr=0.05)
    before = (boundary(data) - data).square().mean().item()
    for _ in range(200):
        optimizer.zero_grad()
        (boundary(data) - data).square().mean().backward()
        optimizer.step()
    assert (boundary(data) - data).square().mean().item() < 0.01 * before


@pytest.mark.parametrize("rank", [0, -1, 17])
def test_impossible_ranks_are_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank must be from 1 to the width of the model, 16, got {rank}"):
        LowRankBoundary(16, rank)
