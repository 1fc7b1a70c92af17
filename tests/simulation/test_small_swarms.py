"""One to four honest peers: what protects a run against others costs them nothing, from the first epoch on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shoal.testing import Host, Network, run
from tests.drills import mostly_drills
from tests.simulation.training import LINK, Course, Swarm, Trainer

BATCH, BATCHES_OF_A_PEER, SPEED = 16, 40, 50.0
SLOW_BYTES_PER_SECOND = 16_000.0


def course_for(peers: int) -> Course:
    return Course(target_batch_size=peers * BATCHES_OF_A_PEER * BATCH, batch_size=BATCH, learning_rate=0.02)


async def until(trainer: Trainer, epoch: int) -> None:
    while trainer.epoch < epoch:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)


def in_swarm(peers: int, seed: int, then: Callable[[Swarm, list[Trainer]], Awaitable[None]]) -> None:
    """Start a swarm, do something with it, and end it."""

    async def main() -> None:
        swarm = Swarm(Network(LINK), course_for(peers))
        await then(swarm, [await swarm.add(SPEED) for _ in range(peers)])
        for host in swarm.network.hosts:
            host.crash()
        await asyncio.sleep(1.0)

    run(main(), seed=seed, time_limit=2000)


@pytest.mark.parametrize("peers", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", mostly_drills([1, 2, 3]))
def test_the_first_epochs_have_as_many_samples_as_they_must_have(peers: int, seed: int) -> None:
    async def count(swarm: Swarm, trainers: list[Trainer]) -> None:
        made = 0
        for epoch in (1, 2, 3):
            await until(trainers[0], epoch)
            before, made = made, sum(trainer.record.made - trainer.samples for trainer in trainers)
            # Whoever is done a moment before the end makes no batch for the last few samples of the others.
            assert abs(made - before - swarm.course.target_batch_size) <= (BATCH * peers / 2 if peers > 1 else 0)
            assert {trainer.epoch for trainer in trainers} == {epoch}
        sizes = {size for trainer in trainers for size in trainer.record.group_sizes}
        assert sizes == ({peers} if peers > 1 else set())
        assert not any(trainer.record.failed for trainer in trainers)
        assert len({trainer.loss for trainer in trainers}) == 1

    in_swarm(peers, seed, count)


@pytest.mark.parametrize("peers", mostly_drills([2, 4, 3], quick=2))
@pytest.mark.parametrize("silently", [False, True], ids=["its program ends", "its machine vanishes"])
def test_one_dies_and_the_others_go_on(peers: int, silently: bool) -> None:
    async def die(swarm: Swarm, trainers: list[Trainer]) -> None:
        await until(trainers[0], 3)
        swarm.remove(trainers[-1], silently=silently)
        left = trainers[:-1]
        await until(left[0], 5)
        assert all(trainer.record.failed <= 1 for trainer in left)
        since = swarm.forget()
        await until(left[0], 9)
        assert {trainer.epoch for trainer in left} == {9}
        assert len({trainer.loss for trainer in left}) == 1
        if len(left) > 1:
            assert swarm.goodput(left, since=since) > 0.85
            assert {size for trainer in left for size in trainer.record.group_sizes} == {peers - 1}
        else:
            assert left[0].record.alone == 4
        assert not any(trainer.record.failed for trainer in left)

    in_swarm(peers, 1, die)


def _have_a_slow_line(host: Host) -> None:
    host.uplink = host.downlink = SLOW_BYTES_PER_SECOND


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_one_joins_on_a_slow_line(peers: int) -> None:
    async def come(swarm: Swarm, trainers: list[Trainer]) -> None:
        await until(trainers[0], 3)
        newcomer = await swarm.add(SPEED, prepare=_have_a_slow_line)
        everybody = [*trainers, newcomer]
        await until(trainers[0], 7)
        since = swarm.forget()
        await until(trainers[0], 11)
        assert {trainer.epoch for trainer in everybody} == {11}
        assert {size for trainer in everybody for size in trainer.record.group_sizes} == {peers + 1}
        assert not any(trainer.record.failed or trainer.record.alone for trainer in everybody)
        assert swarm.goodput(everybody, since=since) > 0.85
        assert max(trainer.loss for trainer in everybody) == pytest.approx(trainers[0].loss, rel=0.01)

    in_swarm(peers, 1, come)
