"""Which peer holds which stage: records that others read, renew, and forget."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shoal.base.clock import get_dht_time
from shoal.dht.crypto import tag_of
from shoal.stages.directory import (
    LIFETIME,
    READING_SECONDS,
    RENEWAL_SECONDS,
    StageDirectory,
    StageRecord,
    key_of_stage,
    parse_stage_record,
    read_stage,
)
from shoal.testing import Link, Network, run, start_dht_nodes

RUN, STAGES = "run", 3


def record(stage, **values):
    return StageRecord(stage=stage, epoch=1, rate=2.0, **values)


async def start(network, count):
    nodes = await start_dht_nodes(network, count)
    directories = [StageDirectory(node, node.p2p, RUN, STAGES) for node in nodes]
    for directory in directories:
        directory.start()
    return nodes, directories


def test_a_peer_is_seen_renewed_moved_and_withdrawn():
    async def main():
        nodes, (sender, server, other) = await start(Network(Link(delay=0.02)), 3)
        peer = nodes[1].peer_id
        sender.watch([1])
        await asyncio.gather(server.declare(record(1)), other.declare(record(2)))
        await asyncio.sleep(READING_SECONDS + 1)
        seen = sender.peers_of(1)[peer]
        assert (seen.rate, seen.count, bool(seen.addresses)) == (2.0, STAGES, True)
        assert nodes[0].p2p.is_reachable(peer)
        assert not sender.peers_of(2)  # it does not send there, and has not read it
        assert {stage: len(peers) for stage, peers in (await sender.read_all()).items()} == {0: 0, 1: 1, 2: 1}

        await server.declare(record(1, queue=7))  # only numbers: they wait for the renewal
        await sender.read(1)
        assert sender.peers_of(1)[peer].queue == 0
        await asyncio.sleep(RENEWAL_SECONDS + READING_SECONDS)
        assert sender.peers_of(1)[peer].queue == 7
        await asyncio.sleep(2 * LIFETIME)
        assert peer in sender.peers_of(1)

        await server.declare(record(1, is_leaving=True, moves_to=2))  # news: at once
        await sender.read(1)
        assert not sender.peers_of(1)[peer].serves
        await server.withdraw(1)
        await server.declare(record(2, is_joining=True))
        await sender.read_all()
        assert peer not in sender.peers_of(1)
        assert sender.peers_of(2)[peer].is_joining
        await server.stop()
        assert {stage: len(peers) for stage, peers in (await sender.read_all()).items()} == {0: 0, 1: 0, 2: 1}
        await asyncio.gather(sender.stop(), other.stop())

    run(main())


def test_after_a_failure_the_stage_is_read_soon_and_the_dead_expire():
    async def main():
        network = Network(Link(delay=0.02))
        nodes, (sender, server, late, *others) = await start(network, 6)
        sender.watch([0])
        await server.declare(record(0))
        await asyncio.sleep(READING_SECONDS + 1)
        network.host_of(nodes[1].peer_id).power_off()
        await late.declare(record(0))
        sender.hasten(0)
        await asyncio.sleep(READING_SECONDS / 4)
        assert nodes[2].peer_id in sender.peers_of(0)
        await asyncio.sleep(LIFETIME)
        assert set(sender.peers_of(0)) == {nodes[2].peer_id}
        await asyncio.gather(*[each.stop() for each in (sender, late, *others)])

    run(main())


def test_forged_and_impossible_records_are_ignored(caplog):
    async def main():
        nodes, (reader, liar) = await start(Network(), 2)
        now, tag = get_dht_time(), tag_of(nodes[1].peer_id)

        async def store(value, subkey=tag, stage=0, seconds=LIFETIME):
            return await nodes[1].store(key_of_stage(RUN, stage), value, get_dht_time() + seconds, subkey=subkey)

        plain = msgspec.to_builtins(record(0, count=STAGES, time=now))
        assert await store(plain)
        assert [peer for peer, *_ in await read_stage(nodes[0], RUN, 0)] == [nodes[1].peer_id]
        assert not await store(plain, subkey=tag_of(nodes[0].peer_id))  # the name of another peer
        for number, bad in enumerate(({"stage": 1}, {"rate": -1.0}, {"rate": "much"}, {"queue": 2**60})):
            assert await store({**plain, **bad}, seconds=LIFETIME + number + 1)
            assert not await read_stage(nodes[0], RUN, 0), bad
        assert await store({**plain, "count": 4}, seconds=LIFETIME + 9)
        await reader.read(0)
        assert not reader.peers_of(0)
        await asyncio.gather(reader.stop(), liar.stop())

    run(main())
    assert "into 4 stages, this one into 3" in caplog.text


@pytest.mark.parametrize("values", [{"count": 0}, {"count": 2, "moves_to": 2}, {"count": 2, "time": 100.0}])
def test_a_record_must_make_sense(values):
    fine = {"stage": 0, "epoch": 1, "rate": 1.0, "count": 2}
    assert parse_stage_record(fine, 50.0).count == 2
    with pytest.raises(ValueError, match=r"stages|future"):
        parse_stage_record({**fine, **values}, 50.0)
