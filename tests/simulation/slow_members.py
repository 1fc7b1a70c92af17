"""Swarms in virtual time with one member that others wait for: on a slow line, or late on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.averaging.node import AveragerNode
from shoal.dht import DHTNode
from shoal.testing import Host, Network, run
from tests.hostile.simulated import Log
from tests.simulation.training import LINK, Course, Swarm, Trainer

SPEED = 50.0
ROUNDS_TO_LEARN = 3
"""In these, the others find out what the member costs."""


@dataclass(frozen=True)
class Outcome:
    """What a swarm has achieved after it has had some rounds with the member."""

    goodput: float
    goodput_of_others: float
    rounds_with_it: int
    epochs_apart: int
    """How far the member is behind the others in the end."""
    told: tuple[int, ...]
    """The number of warnings that name it, by peer."""
    warnings: int


class QuickTrainer(Trainer):
    """A peer whose gradients cost the simulator nothing."""

    def __init__(self, swarm: Swarm, host: Host, node: DHTNode, samples_per_second: float) -> None:
        super().__init__(swarm, host, node, samples_per_second)
        self._nothing = torch.zeros(self.course.values)

    def gradient(self) -> torch.Tensor:
        return self._nothing


def train(
    seed: int,
    *,
    peers: int,
    epoch_seconds: float,
    values: int,
    fast_line: float,
    slow_line: float | None = None,
    lie: Callable[[AveragerNode], None] | None = None,
    epochs: int = 8,
) -> Outcome:
    """Train with one member on a slow line, or with one that lies.

    Args:
        values: of the model.
        fast_line, slow_line: bytes per second of each line.
        epochs: how many are counted, after those in which the others learn.
    """

    def with_line(bytes_per_second: float) -> Callable[[Host], None]:
        def prepare(host: Host) -> None:
            host.uplink = host.downlink = bytes_per_second

        return prepare

    async def main() -> Outcome:
        course = Course(
            round(peers * SPEED * epoch_seconds),
            batch_size=round(SPEED * epoch_seconds / 60),
            values=values,
            averaging_timeout=180.0,
            silence=30.0,
        )
        swarm = Swarm(Network(LINK), course)
        with Log() as log:
            lines = [fast_line if slow_line is None else slow_line, *[fast_line] * (peers - 1)]
            trainers = [await swarm.add(SPEED, make=QuickTrainer, prepare=with_line(line)) for line in lines]
            slow, *others = trainers
            if lie is not None:
                lie(slow.averager)
            await until(others[0], ROUNDS_TO_LEARN)
            since, first = swarm.forget(), others[0].epoch
            await until(others[0], first + epochs)
            for trainer in others:
                trainer.record.used += trainer.samples if trainer.epoch == first + epochs else 0
            messages = [record.getMessage() for record in log.records]
            named = [each for each in messages if str(slow.node.peer_id) in each]
            return Outcome(
                swarm.goodput(since=since),
                swarm.goodput(others, since=since),
                slow.record.rounds,
                others[0].epoch - slow.epoch,
                tuple(sum(each == line for each in named) for line in dict.fromkeys(named)),
                len(messages),
            )

    return run(main(), seed=seed, time_limit=20_000)


async def until(trainer: Trainer, epoch: int) -> None:
    while trainer.epoch < epoch:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # until all have begun the next one
