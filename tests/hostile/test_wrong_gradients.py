"""What a member's wrong gradients do to a run: no guard looks at values, only a robust average limits them."""

from __future__ import annotations

import asyncio

import pytest
import torch

from benchmarks.robust_averages import train_without_network
from shoal.averaging import ClipToMedianNorm
from shoal.testing import Network, run
from tests.hostile.simulated import next_epoch
from tests.simulation.training import LINK, Course, Swarm, Trainer

PEERS, EPOCHS, RATE = 3, 8, 0.1


class Flipping(Trainer):
    """A member that sends its gradient with the opposite sign, and counts its samples honestly."""

    def gradient(self) -> torch.Tensor:
        return -super().gradient()


class Tripling(Trainer):
    """A member that sends three times its gradient."""

    def gradient(self) -> torch.Tensor:
        return 3 * super().gradient()


def loss_with(guard: str, member: type[Trainer]) -> float:
    """Of an honest peer, after some epochs of a run of three."""

    async def main() -> float:
        course = Course(target_batch_size=PEERS * 500, learning_rate=RATE, guard=guard)
        swarm = Swarm(Network(LINK), course)
        honest = [await swarm.add() for _ in range(PEERS - 1)]
        await swarm.add(make=member)
        await next_epoch(honest[0], EPOCHS)
        loss = honest[0].loss
        assert max(honest[0].record.group_sizes) == PEERS
        for host in swarm.network.hosts:
            host.crash()
        await asyncio.sleep(1.0)
        return loss

    return run(main(), seed=1, time_limit=1000)


@pytest.mark.parametrize("guard", ["members", "open"])
def test_no_guard_looks_at_values(guard: str) -> None:
    """A third of the samples pulls the other way: a step is a third as long. Three times as much: 5/3 as long."""
    # A model begins with a loss of 1, and each step takes a share of what is left.
    assert loss_with(guard, Trainer) == pytest.approx((1 - RATE) ** (2 * EPOCHS), rel=0.1)
    assert loss_with(guard, Flipping) == pytest.approx((1 - RATE / 3) ** (2 * EPOCHS), rel=0.1)
    assert loss_with(guard, Tripling) == pytest.approx((1 - 5 * RATE / 3) ** (2 * EPOCHS), rel=0.15)


@pytest.mark.parametrize("attack", ["labels", "growing"])
def test_a_robust_average_limits_one_liar_of_five(attack: str) -> None:
    """The figures of the documents, in a shorter run."""
    options = {"batch": 64, "steps": 60, "rate": 0.5, "momentum": 0.0, "seed": 1}
    options |= {"members": 5, "liars": 1, "wants_loss": True}
    peace = train_without_network(None, "none", **options)
    trusting = train_without_network(None, attack, **options)
    robust = train_without_network(ClipToMedianNorm(), attack, **options)
    assert not trusting <= 1.3 * peace, "or not a number"
    assert robust <= 2.2 * peace
    assert not trusting <= 1.2 * robust
