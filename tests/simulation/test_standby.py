"""Peers with two optimizers in one loop, in virtual time: none waits for a peer that waits in its other optimizer."""

from __future__ import annotations

import asyncio
import copy
import random
from dataclasses import replace

import pytest

from shoal.base.standby import SECONDS_BETWEEN_LOOKS
from shoal.testing import Host, Network, run, start_dht_node
from tests.drills import mostly_drills
from tests.simulation.training import LINK, Course, Record, Swarm, Trainer

SPEED = 100.0
"""Samples per second of a peer."""
SECONDS_TO_MEET = 20.0
COURSE = Course(batch_size=8, matchmaking_time=5.0)
EPOCHS = 12
Measured = list[tuple[float, Record]]
"""Of each peer's longest step, and what it has done in one of its runs."""


class First(Trainer):
    run = "first"


class Second(Trainer):
    run = "second"


class Pair:
    """A peer that steps two optimizers in turn, as a GAN does.

    Args:
        order: which is stepped first.
        speed: samples per second, relative to the usual one.
    """

    def __init__(self, swarm: Swarm, host: Host, node, order: tuple[int, int], speed: float) -> None:
        both = [make(swarm, host, node, speed * SPEED) for make in (First, Second)]
        self.host, self.node, self.trainers = host, node, [both[place] for place in order]
        self.longest_step = 0.0

    async def live(self) -> None:
        for trainer in self.trainers:
            assert trainer.tracker.exchange is not None
            await trainer.averager.start()
            await trainer.tracker.exchange.start()
            await trainer.tracker.has_looked.wait()
            trainer.record.began = asyncio.get_running_loop().time()
            trainer.averager.state_sharing.set(allowed=True, priority=trainer.epoch)
        while True:
            for trainer in self.trainers:
                await self.make_batch(trainer)

    async def make_batch(self, trainer: Trainer) -> None:
        await asyncio.sleep(trainer.seconds_of_a_batch())
        gradient = trainer.gradient()
        if trainer.begun is not None:  # the round has begun while this peer was waiting in the other optimizer
            await self.make_step(trainer)
        trainer.samples += trainer.course.batch_size
        trainer.record.made += trainer.course.batch_size
        trainer._sum += gradient * trainer.course.batch_size
        trainer.report()
        if trainer._is_behind():
            await trainer._catch_up()
            return
        trainer._look_for_group_in_time()
        if trainer.tracker.should_stop(trainer.course.matchmaking_time):
            await self.make_step(trainer)

    async def make_step(self, trainer: Trainer) -> None:
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        standing_by = loop.create_task(self.stand_by([each for each in self.trainers if each is not trainer]))
        try:
            await trainer._make_global_step()
        finally:
            standing_by.cancel()
        self.longest_step = max(self.longest_step, loop.time() - began)

    async def stand_by(self, others: list[Trainer]) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            for each in others:
                each.begin_round_if_awaited()

    async def leave(self) -> None:
        for trainer in self.trainers:
            assert trainer.tracker.exchange is not None
            await trainer.tracker.exchange.stop()
            await trainer.averager.close()
        await self.node.shutdown()


async def train_in_pairs(orders: list[tuple[int, int]], speeds: list[float], epoch_seconds: float) -> Measured:
    seconds = epoch_seconds / 2  # the rest of the time is for the other optimizer
    course = replace(COURSE, target_batch_size=round(sum(speeds) * SPEED * seconds))
    swarm, pairs = Swarm(Network(LINK), course), list[Pair]()
    for order, speed in zip(orders, speeds, strict=True):
        host = swarm.network.add_host()
        nodes = [each.node for each in pairs]
        node = await start_dht_node(swarm.network, host, nodes, record_validator=swarm.validator)
        pairs.append(Pair(swarm, host, node, order, speed))
        swarm.trainers += pairs[-1].trainers
        host.spawn(pairs[-1].live())
    await asyncio.sleep(SECONDS_TO_MEET + epoch_seconds)
    swarm.forget()
    for pair in pairs:
        pair.longest_step = 0.0
    await asyncio.sleep(EPOCHS * epoch_seconds)
    measured = [(pair.longest_step, copy.deepcopy(trainer.record)) for pair in pairs for trainer in pair.trainers]
    for pair in pairs:
        await pair.host.run(pair.leave())
        pair.host.crash()
    return measured


def check(measured: Measured, peers: int) -> None:
    for longest_step, record in measured:
        assert longest_step < COURSE.matchmaking_time / 2, "nobody waits for a peer that waits elsewhere"
        assert (record.failed, record.alone, record.downloads) == (0, 0, 0)
        assert set(record.group_sizes) == {peers}
        assert record.rounds >= 0.6 * EPOCHS, "a round takes a few tenths of a second on these lines"


@pytest.mark.parametrize("other", [(0, 1), (1, 0)], ids=["same order", "other order"])
@pytest.mark.parametrize("case", mostly_drills([(2, 1.0), (4, 5.0), (2, 5.0), (4, 1.0)]), ids=str)
def test_no_peer_waits_for_one_that_waits_in_its_other_optimizer(case, other):
    peers, epoch_seconds = case
    for seed in range(2):
        orders = [(0, 1), other] * (peers // 2)
        speeds = [random.Random(seed).uniform(0.5, 1.5) for _ in orders]
        check(run(train_in_pairs(orders, speeds, epoch_seconds), seed=seed), peers)
