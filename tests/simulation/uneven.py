"""Swarms of honest peers whose speeds differ, in virtual time: one machine may be 300 times as fast as the others."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

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
    """Epochs that somebody made alone."""
    epochs: int
    spread: int
    """How many epochs the last peer is behind the first one in the end."""
    longest_round: float
    """Seconds from the end of the last batch of an epoch to the first batch of the next one, on average of a peer."""
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
            since, first = swarm.forget(), max(t.epoch for t in trainers)
            await asyncio.sleep(epochs * epoch_seconds)
            # Samples of the epoch under way count as used, if they are of the run's epoch.
            last = max(t.epoch for t in trainers)
            for trainer in trainers:
                trainer.record.used += trainer.samples if trainer.epoch == last else 0
            return Outcome(
                swarm.goodput(since=since),
                sum(t.record.alone for t in trainers),
                last - first,
                last - min(t.epoch for t in trainers),
                statistics.mean(t.record.round_seconds / max(1, t.record.rounds) for t in trainers),
                tuple(sorted({str(record.msg)[:90] for record in log.records})),
            )

    return run(main(), seed=seed, time_limit=10_000)
