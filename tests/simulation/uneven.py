"""Swarms of honest peers whose speeds differ, in virtual time: one machine may be 300 times as fast as the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.averaging.control import RoundResult
from shoal.dht import DHTNode
from shoal.testing import Host, Link, Network, run
from tests.hostile.simulated import Log
from tests.simulation.training import LINK, Course, Swarm, Trainer

SLOW = 50.0
"""Samples per second of a slow peer."""
BATCHES_PER_EPOCH = 12
"""Of each peer, on average: a fast machine has larger batches, not shorter ones."""


class UnevenTrainer(Trainer):
    """A peer whose batches take as long as those of the others: a faster machine has larger ones."""

    def __init__(self, swarm: Swarm, host: Host, node: DHTNode, samples_per_second: float) -> None:
        super().__init__(swarm, host, node, samples_per_second)
        assert isinstance(swarm, UnevenSwarm)
        self.batch_size = max(1, round(samples_per_second * swarm.batch_seconds))


class UnevenSwarm(Swarm):
    """A swarm in which a batch takes the same time everywhere."""

    batch_seconds = 1.0


@dataclass(frozen=True)
class Outcome:
    """What honest peers have achieved from the second epoch on."""

    goodput: float
    alone: int
    """Epochs that somebody made alone although others were in them."""
    epochs: int
    spread: int
    """How many epochs the last peer is behind the first one in the end."""
    warnings: tuple[str, ...]


def train(
    speeds: Sequence[float], epoch_seconds: float, seed: int, *, epochs: int = 8, link: Link = LINK, pause: float = 0.0
) -> Outcome:
    """Train with peers of these speeds, which join in this order.

    Args:
        epoch_seconds: how long an epoch takes if nothing is lost.
        epochs: how many are counted, after the first one.
        pause: seconds between two peers that join.
    """

    async def main() -> Outcome:
        target = round(sum(speeds) * epoch_seconds)
        swarm = UnevenSwarm(Network(link), Course(target_batch_size=target, learning_rate=0.02))
        swarm.batch_seconds = epoch_seconds / BATCHES_PER_EPOCH
        with Log() as log:
            trainers = []
            for speed in speeds:
                trainers.append(await swarm.add(speed, make=UnevenTrainer))
                await asyncio.sleep(pause)
            loop = asyncio.get_running_loop()
            limit = loop.time() + 5 * epoch_seconds + 60
            while min(t.epoch for t in trainers) < 1 and loop.time() < limit:
                await asyncio.sleep(0.05)
            # From a step of all: what was made before it would count as used, but not as possible.
            first = 1 + max(t.epoch for t in trainers)
            while min(t.epoch for t in trainers) < first and loop.time() < limit:
                await asyncio.sleep(0.02)
            since = swarm.forget()
            # Up to a step, as the count began after one: else half of the epoch under way, one of few, is luck.
            limit = loop.time() + 3 * epochs * epoch_seconds
            while min(t.epoch for t in trainers) < first + epochs and loop.time() < limit:
                await asyncio.sleep(0.02)
            # Samples of the epoch under way count as used, if they are of the run's epoch.
            last = max(t.epoch for t in trainers)
            for trainer in trainers:
                trainer.record.used += trainer.samples if trainer.epoch == last else 0
            return Outcome(
                swarm.goodput(since=since),
                sum(t.record.alone_in_company for t in trainers),
                last - first,
                last - min(t.epoch for t in trainers),
                tuple(sorted({str(record.msg)[:90] for record in log.records})),
            )

    return run(main(), seed=seed, time_limit=10_000)


class BurstyTrainer(UnevenTrainer):
    """A peer whose speed changes now and then: by up to a hundred times."""

    def __init__(self, swarm: Swarm, host: Host, node: DHTNode, samples_per_second: float) -> None:
        super().__init__(swarm, host, node, samples_per_second)
        self._slowness = 1.0
        self.steps: list[float] = []
        """How many seconds each global step took."""
        self.longest_batch = 0.0

    def seconds_of_a_batch(self) -> float:
        rng = self.host.rng
        if rng.random() < 0.05:
            self._slowness = 10 ** rng.uniform(-1, 1)
        seconds = super().seconds_of_a_batch() * self._slowness
        self.longest_batch = max(self.longest_batch, seconds)
        return seconds

    async def _make_global_step(self) -> None:
        began = asyncio.get_running_loop().time()
        await super()._make_global_step()
        self.steps.append(asyncio.get_running_loop().time() - began)


@dataclass(frozen=True)
class Lives:
    """What happened to honest peers that come and go."""

    warnings: tuple[str, ...]
    alone_in_company: int
    longest_step: float
    longest_batch: float
    matchmaking_time: float


# They are true, and accuse nobody: all others, or a donor, have left, or this peer's batches are long.
OF_ITSELF = ("no peer has answered for", "a batch takes this peer", "could not download the state of")


def live_through_bursts(seed: int, *, epochs: int = 12) -> Lives:
    """Let two to five peers of random speeds come, leave, and become faster and slower."""
    rng = random.Random(seed)
    epoch_seconds = rng.choice([2.0, 5.0, 20.0])
    speeds = [SLOW * 10 ** rng.uniform(0, 2) for _ in range(rng.randint(2, 5))]
    course = Course(target_batch_size=round(sum(speeds) * epoch_seconds), learning_rate=0.02)

    async def main() -> Lives:
        swarm = UnevenSwarm(Network(LINK), course)
        swarm.batch_seconds = epoch_seconds / BATCHES_PER_EPOCH
        with Log() as log:
            for speed in speeds:
                await swarm.add(speed, make=BurstyTrainer)
                await asyncio.sleep(rng.choice([0.0, epoch_seconds * rng.random()]))
            ends_at = asyncio.get_running_loop().time() + epochs * epoch_seconds
            while asyncio.get_running_loop().time() < ends_at:
                await asyncio.sleep(epoch_seconds * rng.uniform(1, 4))
                await _let_one_come_or_go(swarm, rng, speeds)
            peers = [each for each in swarm.trainers if isinstance(each, BurstyTrainer)]
            return Lives(
                tuple(record.getMessage() for record in log.records if not str(record.msg).startswith(OF_ITSELF)),
                sum(each.record.alone_in_company for each in peers),
                max((step for each in peers for step in each.steps), default=0.0),
                max(each.longest_batch for each in peers),
                course.matchmaking_time,
            )

    return run(main(), seed=seed, time_limit=10_000)


async def _let_one_come_or_go(swarm: Swarm, rng: random.Random, speeds: Sequence[float]) -> None:
    what = rng.random()
    if what < 0.25 and len(swarm.living) > 1:
        leaving = rng.choice(swarm.living)
        if rng.random() < 0.5:
            swarm.remove(leaving)
        else:
            await swarm.dismiss(leaving)
    elif 0.25 <= what < 0.5 and len(swarm.living) < 5:
        await swarm.add(rng.choice(speeds), make=BurstyTrainer)


class BusyTrainer(Trainer):
    """A peer with batches of a millisecond, on a machine that does something else now and then."""

    def __init__(self, swarm: Swarm, host: Host, node: DHTNode, samples_per_second: float) -> None:
        super().__init__(swarm, host, node, samples_per_second)
        self.sizes: list[float] = []
        """How many samples each step had."""

    def seconds_of_a_batch(self) -> float:
        rng = self.host.rng
        pause = rng.uniform(0.02, 0.2) if rng.random() < 0.01 else 0.0
        return pause + self.batch_size / self.samples_per_second * rng.uniform(0.7, 1.3)

    def gradient(self) -> torch.Tensor:
        return torch.zeros(self.course.values)

    def _count(self, result: RoundResult, samples: int) -> None:
        super()._count(result, samples)
        self.sizes.append(sum(result.weights))


def sizes_of_steps(peers: int, epoch_seconds: float, epochs: int, seed: int) -> list[float]:
    """How many samples steps have on busy machines, as a share of how many they should have.

    Each machine makes 15,000 samples per second, half of what it could if it were idle, in batches of 32.
    """

    async def main() -> list[float]:
        course = Course(round(peers * 15_000 * epoch_seconds), batch_size=32, matchmaking_time=2.0)
        swarm = UnevenSwarm(Network(Link(delay=(0.001, 0.005), jitter=0.005)), course)
        trainers = [await swarm.add(30_000, make=BusyTrainer) for _ in range(peers)]
        await asyncio.sleep(2 + 1.5 * epochs * epoch_seconds)
        first = trainers[0]
        assert isinstance(first, BusyTrainer)
        return [size / course.target_batch_size for size in first.sizes[2 : 2 + epochs]]

    return run(main(), seed=seed, time_limit=10_000)
