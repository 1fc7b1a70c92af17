"""Peers that find their stages together, through a DHT whose records reach them at different times."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from shoal.stages.directory import StageDirectory, StageRecord
from shoal.stages.moving import decide_move, take_place
from shoal.stages.placement import move_of
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
    await directory.read_all()
    return {stage: len(peers) for stage, peers in directory.all_peers().items()}


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
        await directories[0].read_all()
        assert move_of(directories[0].all_peers(), 99) is None
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
