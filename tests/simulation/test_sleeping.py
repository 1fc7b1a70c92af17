"""A laptop sleeps during training: nobody waits longer than for a member that falls silent, and it comes back."""

from __future__ import annotations

import asyncio

import pytest

from shoal.averaging.messages import ALIVE_PER_TIMEOUT
from shoal.optim.setup.training_setup import default_silence
from shoal.testing import Network, run
from tests.drills import mostly_drills
from tests.simulation.training import LINK, Course, Swarm, Trainer

SPEED, EPOCH_SECONDS = 50.0, 5.0
EPOCHS_BEFORE, ASLEEP, AWAKE = 6, 40.0, 60.0
MATCHMAKING, AVERAGING = 2.0, 60.0
QUICK = 0.5
"""Seconds for what takes a few round trips."""


class Sleeper(Trainer):
    """Its machine may stand still, so long after the end of a certain epoch; and it notes how long its steps take."""

    stands_still_after: float | None = None

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.fell_asleep = asyncio.Event()
        self.steps: list[tuple[float, float]] = []
        """When each began, and the seconds that it took."""

    def _sleep(self) -> None:
        self.host.freeze()
        self.fell_asleep.set()

    async def _make_global_step(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self.stands_still_after is not None and self.epoch == EPOCHS_BEFORE:
            loop.call_later(self.stands_still_after, self._sleep)
        await super()._make_global_step()
        self.steps.append((began, loop.time() - began))

    def worst_step(self, since: float, until: float) -> float:
        return max((seconds for began, seconds in self.steps if since <= began < until), default=0.0)


@pytest.mark.parametrize(
    "after", mostly_drills([0.05, 1.5, 0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 2.5, 3.5, 4.5], quick=2)
)
@pytest.mark.parametrize("peers", mostly_drills([4, 2]))
@pytest.mark.parametrize("leads", [True, False], ids=["the first", "the last"])
def test_others_go_on_while_a_laptop_sleeps_and_when_it_is_back(peers: int, leads: bool, after: float) -> None:
    """Whenever it falls asleep: in a round, between two, or while it looks for a group."""

    async def main() -> None:
        silence = default_silence(MATCHMAKING, AVERAGING)
        course = Course(
            target_batch_size=round(peers * SPEED * EPOCH_SECONDS),
            matchmaking_time=MATCHMAKING,
            averaging_timeout=AVERAGING,
            silence=silence,
        )
        swarm = Swarm(Network(LINK), course)
        trainers = [await swarm.add(SPEED, make=Sleeper) for _ in range(peers)]
        sleeper = trainers.pop(0 if leads else -1)
        assert isinstance(sleeper, Sleeper)
        sleeper.stands_still_after = after
        loop = asyncio.get_running_loop()
        await sleeper.fell_asleep.wait()
        began = loop.time()
        await asyncio.sleep(ASLEEP)
        sleeper.host.thaw()
        woke = loop.time()
        await asyncio.sleep(AWAKE)
        longest = silence + silence / ALIVE_PER_TIMEOUT + QUICK  # one more turn of questions, at the most
        for trainer in trainers:
            assert isinstance(trainer, Sleeper)
            assert trainer.worst_step(began - EPOCH_SECONDS, woke) < longest
            assert trainer.worst_step(woke, loop.time()) < course.matchmaking_time + QUICK
            assert abs(trainer.epoch - sleeper.epoch) <= 1
            assert trainer.record.group_sizes[peers] >= EPOCHS_BEFORE - 2 + AWAKE / EPOCH_SECONDS / 2
        for host in swarm.network.hosts:
            host.crash()
        await asyncio.sleep(1.0)

    run(main(), seed=1)
