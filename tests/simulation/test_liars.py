"""Trainers in several groups, of which some lie about their progress: they cost the others an epoch, and no more."""

from __future__ import annotations

import asyncio
from statistics import median

import pytest

from shoal.testing import Network, run
from tests.drills import mostly_drills
from tests.simulation.liars import Boaster, Hasty, Prophet
from tests.simulation.training import LINK, Course, Swarm

PEERS, GROUP_SIZE = 12, 6
SPEED, EPOCH_SECONDS = 8.0, 20.0
FIRST_EPOCH = 2 * EPOCH_SECONDS
"""Nobody knows better then: all claims count, and it may end at once."""
EPOCHS = 5


@pytest.mark.parametrize("kinds", mostly_drills([(Boaster, Prophet), (Hasty, Hasty), (), (Boaster, Boaster)]))
def test_epochs_end_when_they_should(kinds):
    async def main() -> None:
        course = Course(round(PEERS * SPEED * EPOCH_SECONDS), group_size=GROUP_SIZE, guard="open")
        swarm = Swarm(Network(LINK), course)
        honest = [await swarm.add(SPEED) for _ in range(PEERS - len(kinds))]
        for kind in kinds:
            await swarm.add(SPEED, make=kind)
        await asyncio.sleep(FIRST_EPOCH)
        since, began_at = swarm.forget(), median(trainer.epoch for trainer in honest)
        await asyncio.sleep(EPOCHS * EPOCH_SECONDS)
        epochs = median(trainer.epoch for trainer in honest) - began_at
        # A lie ends an epoch after half of it at the earliest, and one was under way.
        assert EPOCHS - 2 <= epochs <= 2 * EPOCHS + 1
        assert swarm.goodput(honest, since=since) > 0.6
        await swarm.close()

    run(main(), seed=1)
