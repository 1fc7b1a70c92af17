"""Peers that find their stages together, through a DHT whose records reach them at different times."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from shoal.stages.directory import StageDirectory, StageRecord
from shoal.stages.hop import Changes
from shoal.stages.moving import STEP_SECONDS, decide_move, finish, next_move, take_place
from shoal.stages.placement import Move, move_of
from shoal.testing import Link, Network, run, start_dht_nodes

LINK = Link(delay=(0.02, 0.2), jitter=0.05)


async def start(count, stages):
    nodes = await start_dht_nodes(Network(LINK), count)
    directories = [StageDirectory(node, node.p2p, "run", stages) for node in nodes]
    for directory in directories:
        directory.start()
    return [node.peer_id for node in nodes], directories


async def serve(directory, stage, rate=1.0, **values):
    await directory.declare(StageRecord(stage=stage, epoch=1, rate=rate, serves_auto=True, **values))


async def places(directory):
    return {stage: len(peers) for stage, peers in (await directory.read_all()).items()}


async def stop(directories):
    await asyncio.gather(*[directory.stop() for directory in directories])


@pytest.mark.parametrize("stages", [3, 8])
def test_newcomers_that_come_together_take_all_stages(stages):
    async def main():
        peers, directories = await start(9, stages)
        taken = await asyncio.gather(*[take_place(each, peer) for each, peer in zip(directories, peers, strict=True)])
        counts = Counter(taken)
        assert len(counts) == stages
        assert max(counts.values()) - min(counts.values()) <= 2  # moves mend the rest
        assert await places(directories[0]) == dict(sorted(counts.items()))  # nobody is declared twice
        for directory, stage in zip(directories, taken, strict=True):
            await directory.mark(stage)
            await serve(directory, stage)
        await directories[0].read_all()
        assert all(not each.is_joining for each in directories[0].peers_of(taken[1]).values())
        await stop(directories)

    run(main())


@pytest.mark.parametrize("seed", range(3))
def test_four_and_one_become_three_and_two(seed):
    async def main():
        peers, directories = await start(5, 2)
        for number, directory in enumerate(directories):
            await serve(directory, int(number == 4))
        moved = []
        for step in range(4):
            moves = await asyncio.gather(
                *[decide_move(each, peer, step) for each, peer in zip(directories, peers, strict=True)]
            )
            for move in filter(None, moves):
                mover = directories[peers.index(move.peer)]
                await serve(mover, move.target)
                await mover.withdraw(move.source)
                moved.append((step, move.source, move.target))
        assert moved == [(0, 0, 1)]
        assert await places(directories[3]) == {0: 3, 1: 2}
        await stop(directories)

    run(main(), seed=seed)


def test_peers_that_decide_at_different_times_move_one_at_a_time():
    async def main():
        peers, directories = await start(9, 3)
        for number, directory in enumerate(directories):
            await serve(directory, max(0, number - 6), rate=1.0 + number % 3)
        loop, under_way = asyncio.get_running_loop(), []

        async def look_again_and_again(directory, peer, number):
            await asyncio.sleep(0.7 * number)
            for step in range(8):
                until = loop.time() + 30
                if move := await decide_move(directory, peer, step):
                    assert not under_way
                    under_way.append(move)
                    await asyncio.sleep(8)  # finishes what it has, and gets the state
                    await serve(directory, move.target, rate=1.0 + number % 3)
                    await directory.withdraw(move.source)
                    under_way.remove(move)
                await asyncio.sleep(until - loop.time())

        await asyncio.gather(*[look_again_and_again(*each) for each in zip(directories, peers, range(9), strict=True)])
        assert move_of(await directories[0].read_all(), 99) is None
        await stop(directories)

    run(main())


def test_a_move_that_another_peer_forestalls_is_taken_back():
    async def main():
        peers, directories = await start(4, 2)
        for number, directory in enumerate(directories):
            await serve(directory, int(number == 3))

        async def leave(number):
            await asyncio.sleep(2.0)  # after the decision, and before it is confirmed
            await directories[number].withdraw(0)

        decided = [decide_move(each, peer, 0) for each, peer in zip(directories, peers, strict=True)]
        first = asyncio.gather(*decided)
        await asyncio.sleep(1.5)
        await directories[0].read_all()
        (mover,) = [peer for peer, each in directories[0].peers_of(0).items() if each.moves_to is not None]
        assert directories[0].peers_of(0)[mover].serves  # it serves until it really leaves
        await asyncio.gather(*[leave(number) for number in range(3) if peers[number] != mover])
        assert await first == [None] * 4
        await directories[3].read_all()
        assert directories[3].peers_of(0)[mover].moves_to is None
        await stop(directories)

    run(main())


@pytest.mark.parametrize(("holders", "moves"), [((4, 1), 1), ((3, 2), 0), ((5,), 1), ((1, 1, 1), 0)])
def test_a_peer_moves_within_a_period_if_that_helps(holders, moves):
    is_lost = len(holders) == 1
    every = 600.0 if is_lost else 60.0

    async def main():
        stages = len(holders) + is_lost
        peers, directories = await start(sum(holders), stages)
        held = [stage for stage, count in enumerate(holders) for _ in range(count)]
        for directory, stage in zip(directories, held, strict=True):
            await serve(directory, stage)
        waiting = [
            asyncio.ensure_future(next_move(directory, peer, every, random.Random(number)))
            for number, (directory, peer) in enumerate(zip(directories, peers, strict=True))
        ]
        done, others = await asyncio.wait(waiting, timeout=60.0)  # a stage without peers is helped at once
        assert [each.result()[1:] for each in done] == [(0, 1)] * moves
        for each in others:
            each.cancel()
        await stop(directories)

    run(main())


def test_a_peer_whose_fellows_are_dead_does_not_leave_its_stage():
    async def main():
        peers, directories = await start(3, 2)
        for directory in directories:
            await serve(directory, 0)
        mover = peers.index(move_of(await directories[0].read_all(), 0).peer)
        for number, directory in enumerate(directories):
            if number != mover:
                await directory._tasks.close()  # dead: its record is not renewed, and stays for a while
        assert await decide_move(directories[mover], peers[mover], 0) is None
        assert directories[mover].peers_of(0)[peers[mover]].moves_to is None
        await stop(directories)

    run(main())


class Leaving:
    """A host that has a microbatch, and makes a step some seconds after it has begun to leave."""

    def __init__(self, seconds_of_work, step_after):
        self.is_leaving, self.epoch, self.changes, self.samples = False, 5, Changes(), 3
        self._work, self._step = seconds_of_work, step_after

    def record(self):
        return StageRecord(stage=0, epoch=self.epoch, rate=1.0, is_leaving=self.is_leaving)

    async def drain(self, seconds):
        await asyncio.sleep(min(seconds, self._work))
        asyncio.get_running_loop().call_later(self._step, self._make_step)

    def _make_step(self):
        self.epoch, self.samples = 6, 0
        self.changes.note()

    async def flush(self):
        """All of its samples wait for the step already."""

    async def end_step(self):
        """It is made at once."""


@pytest.mark.parametrize(
    ("is_lost", "step_after", "lost", "seconds"),
    [(False, 20.0, 0, 27.0), (False, 1e6, 3, 7.0 + STEP_SECONDS), (True, 20.0, 3, 0.0)],
    ids=["next-step", "no-step", "stage-without-peers"],
)
def test_a_peer_that_leaves_waits_for_the_step_with_its_gradients(is_lost, step_after, lost, seconds):
    async def main():
        peers, directories = await start(2, 2)
        await serve(directories[0], 0)
        await serve(directories[1], int(not is_lost))
        await directories[0].read_all()
        host, now = Leaving(7.0, step_after), asyncio.get_running_loop().time
        began = now()
        assert await finish(directories[0], host, host, Move(peers[0], 0, 1), 60.0) == lost
        assert now() - began == pytest.approx(seconds, abs=3.0)
        await directories[1].read_all()
        assert directories[1].peers_of(0)[peers[0]].is_leaving
        await stop(directories)

    run(main())
