"""Weights: every sample counts the same, however many steps its peer has made; old contributions count less."""

from __future__ import annotations

import pytest
import torch

from shoal.optim.diloco.fragments import OuterState, default_outer_optimizer
from shoal.optim.diloco.messages import Effort, discount, usual_staleness
from tests.optim.diloco.quadratic import A, B, near, train


def test_the_mean_batch_counts_every_sample_once():
    """With a small inner rate the weighted mean points where the gradient of all samples does."""
    efforts, rate = [Effort(5, 15), Effort(2, 8)], 1e-4
    deltas = [effort.steps * rate * -target for effort, target in zip(efforts, (A, B), strict=True)]
    weights = [effort.weight("batch") for effort in efforts]
    assert weights == [3.0, 4.0]
    total = sum(weight * delta for weight, delta in zip(weights, deltas, strict=True))
    torch.testing.assert_close(total / rate, -15 * A - 8 * B)
    assert [effort.weight("samples") for effort in efforts] == [15.0, 8.0]


def test_efforts_add_up():
    assert Effort(2, 8) + Effort(1, 3) - Effort(2, 8) == Effort(1, 3)
    assert Effort().weight("batch") == Effort().weight("samples") == 0


def test_old_work_counts_less():
    state = OuterState(torch.zeros(2), default_outer_optimizer("pseudo_gradients"))
    a, b = torch.zeros(2), torch.zeros(2)

    def mean(*members: tuple[torch.Tensor, int]) -> torch.Tensor:
        found = sum(discount(usual_staleness, versions) * (state.values - own) for own, versions in members)
        assert isinstance(found, torch.Tensor)
        return found / len(members)

    train(a, A, 2)
    train(b, B, 2)
    before = state.values.clone()
    state.step(mean((a, 0)))
    near(state.values, (0.9975, 0))
    a, b = state.values.clone(), b + (state.values - before)
    near(b, (3.2475, -1.5))
    train(a, A, 2)
    train(b, B, 2)
    found = mean((a, 0), (b, 1))
    near(found, (-0.730804281, 0.662912607))
    state.step(found)
    near(state.values, (2.39471969, -0.881673768))
    a, b = state.values.clone(), state.values.clone()
    train(a, A, 2)
    train(b, B, 2)
    found = mean((a, 0), (b, 0))
    near(found, (0.29603977, 0.0887446742))
    state.step(found)
    near(state.values, (2.79807783, -1.37557563))


def test_an_impossible_discount_is_refused():
    assert discount(lambda versions: 7.0, 0) == 1.0
    with pytest.raises(ValueError, match="for 2 versions it gave 7"):
        discount(lambda versions: 7.0, 2)
