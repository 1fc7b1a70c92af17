"""The problem of which all numbers are known: peer A pulls towards (1, 0), peer B towards (3, -2).

The loss is half the squared distance, the inner optimizer SGD with rate 0.5. So an inner step halves the distance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

A, B = torch.tensor([1.0, 0.0]), torch.tensor([3.0, -2.0])


@torch.no_grad()
def train(model: torch.Tensor, target: torch.Tensor, steps: int) -> None:
    """Make inner steps in place."""
    for _ in range(steps):
        model -= 0.5 * (model - target)


def near(values: torch.Tensor, expected: Sequence[float] | float) -> None:
    """Check values to one in a million."""
    torch.testing.assert_close(values.detach(), torch.tensor(expected), rtol=1e-6, atol=1e-6)
