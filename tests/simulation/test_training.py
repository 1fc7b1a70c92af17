"""Simulated trainers: small swarms lose nothing, and whoever dies or comes costs the others nothing lasting."""

from __future__ import annotations

import asyncio

import pytest

from shoal.testing import Network, run
from tests.simulation.training import LINK, Course, Swarm

SPEED = 50.0
EPOCH_SECONDS = 20.0


def course_for(peers: int) -> Course:
    return Course(target_batch_size=round(peers * SPEED * EPOCH_SECONDS))


@pytest.mark.parametrize("peers", [2, 4])
def test_a_small_swarm_loses_nothing(peers):
    async def main() -> None:
        swarm = Swarm(Network(LINK), course_for(peers))
        trainers = [await swarm.add(SPEED) for _ in range(peers)]
        await asyncio.sleep(10 * EPOCH_SECONDS)
        assert swarm.goodput() > 0.85, "what counts not yet are the samples of the last epoch"
        assert min(trainer.epoch for trainer in trainers) >= 9
        assert all(trainer.record.group_sizes.keys() == {peers} for trainer in trainers)
        assert max(trainer.loss for trainer in trainers) < 0.2
        models = [trainer.parameters for trainer in trainers if trainer.epoch == trainers[0].epoch]
        assert max(float((model - models[0]).abs().max()) for model in models) < 1e-5, "the same steps"
        await swarm.close()

    run(main(), seed=1)


@pytest.mark.slow_drill
def test_one_dies_and_one_comes():
    async def main() -> None:
        swarm = Swarm(Network(LINK), course_for(4))
        trainers = [await swarm.add(SPEED) for _ in range(4)]
        await asyncio.sleep(5.3 * EPOCH_SECONDS)
        swarm.remove(trainers[0], silently=True)
        newcomer = await swarm.add(SPEED)
        await asyncio.sleep(6 * EPOCH_SECONDS)
        assert newcomer.record.downloads == 1
        assert abs(newcomer.epoch - trainers[1].epoch) <= 1
        assert newcomer.loss < 0.2
        assert all(trainer.record.failed <= 1 for trainer in swarm.living)
        assert swarm.goodput(swarm.living) > 0.8
        await swarm.dismiss(trainers[1])
        assert trainers[1] not in swarm.living
        await swarm.close()

    run(main(), seed=2)


def test_what_is_read_once_is_not_read_again_and_again():
    """A cached dictionary is fetched anew whenever its node stores an entry of its own, as every donor does."""

    async def main() -> None:
        swarm = Swarm(Network(LINK), course_for(3))
        for _ in range(3):
            await swarm.add(SPEED)
        await asyncio.sleep(2.5 * EPOCH_SECONDS)
        newcomer = await swarm.add(SPEED)
        await asyncio.sleep(2 * EPOCH_SECONDS)
        assert newcomer.record.downloads == 1
        assert newcomer.averager.state_sharing.allowed
        for trainer in swarm.living:
            assert len(trainer.node.protocol.cache) == len(trainer.node.cache_refresh_queue) == 0
        await swarm.close()

    run(main(), seed=3)
