"""A newcomer, and a peer that alone makes ten epochs a second: it waits for the newcomer, and not long for liars."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shoal.dht.joining import LONGEST_PAUSE_SECONDS
from shoal.guard.budget import LEAST_HOLD, LONGEST_HOLD
from shoal.testing import Host, Link, Network, run
from tests.drills import mostly_drills
from tests.simulation.training import Course, Swarm, Trainer

SPEED, EPOCH_SECONDS = 3200.0, 0.08
ROUND_TRIP = Link(delay=0.03)
# A small model: 200 kB, and lines on which it takes a second, or twelve.
VALUES, FAST, SLOW = 50_000, 250e3, 20e3


def in_network(then: Callable[[Swarm, Trainer], Awaitable[None]], *, seed: int = 1, uplink: float = FAST) -> None:
    """Start a peer, let it train alone for a while, do something, and end it."""

    async def main() -> None:
        course = Course(
            target_batch_size=round(SPEED * EPOCH_SECONDS),
            batch_size=64,
            matchmaking_time=2.0,
            values=VALUES,
            learning_rate=0.001,
        )
        swarm = Swarm(Network(ROUND_TRIP), course)
        alone = await swarm.add(SPEED, prepare=line_of(uplink))
        while alone.epoch < 50:
            await asyncio.sleep(0.5)
        await then(swarm, alone)
        for host in swarm.network.hosts:
            host.crash()
        await asyncio.sleep(1.0)

    run(main(), seed=seed, time_limit=2000)


def line_of(bytes_per_second: float) -> Callable[[Host], None]:
    def prepare(host: Host) -> None:
        host.uplink = host.downlink = bytes_per_second

    return prepare


async def seconds_to_first_round(newcomer: Trainer, most: float = 120.0) -> float:
    """How long it takes from the start of a newcomer to its first round with others; ``most`` if there is none."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not newcomer.record.rounds and loop.time() - began < most:
        await asyncio.sleep(0.1)
    return loop.time() - began


@pytest.mark.parametrize(("uplink", "bar"), [(FAST, 5.0), (SLOW, 40.0)], ids=["a second", "twelve seconds"])
@pytest.mark.parametrize("seed", mostly_drills([1, 2, 3]))
def test_a_newcomer_reaches_a_lone_peer_whose_epochs_are_shorter_than_its_download(
    uplink: float, bar: float, seed: int
) -> None:
    async def come(swarm: Swarm, alone: Trainer) -> None:
        newcomer = await swarm.add(SPEED, prepare=line_of(FAST))
        seconds = await seconds_to_first_round(newcomer)
        assert seconds < bar

    in_network(come, seed=seed, uplink=uplink)


class Visitor(Trainer):
    """Downloads the state again and again, and never trains."""

    async def live(self) -> None:
        await self.averager.start()
        while True:
            if await self.averager.state_downloads.download() is not None:
                self.record.downloads += 1
            await asyncio.sleep(0.5)


@pytest.mark.slow_drill
def test_visitors_that_never_come_cost_a_twentieth_of_the_time() -> None:
    async def visit(swarm: Swarm, alone: Trainer) -> None:
        visitors = [await swarm.add(SPEED, make=Visitor, prepare=line_of(FAST)) for _ in range(3)]
        await asyncio.sleep(120.0)
        assert alone.record.held < LONGEST_HOLD + 0.05 * 140.0, "what it has saved up, and a twentieth since"
        before, held = alone.record.made, alone.record.held
        await asyncio.sleep(60.0)
        assert min(visitor.record.downloads for visitor in visitors) > 6
        assert alone.record.held - held < 0.05 * 60.0 + LEAST_HOLD
        assert alone.record.made - before > 0.9 * 60 * SPEED

    in_network(visit)


@pytest.mark.parametrize("silently", mostly_drills([True, False]), ids=["its machine vanishes", "its program ends"])
def test_a_newcomer_that_dies_during_its_download_is_waited_for_once(silently: bool) -> None:
    async def die(swarm: Swarm, alone: Trainer) -> None:
        newcomer = await swarm.add(SPEED, prepare=line_of(FAST))
        while not alone.averager.state_sharing.is_busy:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        swarm.remove(newcomer, silently=silently)
        await asyncio.sleep(LONGEST_HOLD)
        # It had asked for all chunks, so it might have been there in a moment.
        assert alone.record.held < (LONGEST_HOLD + 1.0 if silently else 12.0)
        before = alone.epoch
        await asyncio.sleep(60.0)
        assert alone.epoch - before > 0.9 * 60.0 / EPOCH_SECONDS

    in_network(die)


# The longest pause between two attempts to find the others again, and a download.
SECONDS_TO_MEET_AGAIN = LONGEST_PAUSE_SECONDS + 10.0


@pytest.mark.parametrize("seed", mostly_drills([1, 2, 3, 4, 5, 6]))
def test_two_that_have_trained_alone_meet(seed: int) -> None:
    async def meet(swarm: Swarm, alone: Trainer) -> None:
        other = await swarm.add(SPEED, prepare=line_of(FAST))
        await seconds_to_first_round(other)
        swarm.network.partition([alone.host], [other.host])
        epochs = [trainer.record.alone for trainer in (alone, other)]
        await asyncio.sleep(60.0)
        assert all(trainer.record.alone > before for trainer, before in zip((alone, other), epochs, strict=True))
        swarm.network.heal()
        alone.record.rounds = other.record.rounds = 0
        seconds = [await seconds_to_first_round(trainer) for trainer in (alone, other)]
        assert sum(seconds) < SECONDS_TO_MEET_AGAIN

    in_network(meet, seed=seed)
