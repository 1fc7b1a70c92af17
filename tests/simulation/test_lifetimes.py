"""Records of progress, averagers and donors live an hour at most."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal import DHT
from shoal.base.clock import get_dht_time
from shoal.dht.crypto import tag_of
from shoal.dht.validation import SHORT_LIFETIME_SECONDS, is_short_lived
from shoal.optim.progress_tracker import ProgressTracker
from shoal.testing import Link, Network, SharedTable, run, start_averagers, start_step
from tests.simulation.trackers import start_trackers, train

LINK = Link(delay=0.01)


@pytest.mark.parametrize("ahead", [1800.0, 2 * SHORT_LIFETIME_SECONDS])
def test_a_step_may_be_scheduled_hours_ahead(ahead):
    async def main() -> None:
        network, table = Network(LINK), SharedTable(0.01)
        tensors = [torch.full((4,), float(index)) for index in range(2)]
        nodes = await start_averagers(network, [[tensor] for tensor in tensors], table)
        began, loop = get_dht_time(), asyncio.get_running_loop()
        steps = [start_step(network, node, timeout=3 * SHORT_LIFETIME_SECONDS) for node in nodes]
        for step in steps:
            step.scheduled_time = began + ahead
        before = loop.time()
        await asyncio.wait([asyncio.wrap_future(step) for step in steps])
        assert ahead - 1 < loop.time() - before < ahead + 10
        assert all(torch.equal(tensor, torch.full((4,), 0.5)) for tensor in tensors)
        [records] = table.records.values()
        assert all(is_short_lived(record.expiration_time) for record in records.values())

    run(main(), seed=1, time_limit=10**5)


def test_a_step_that_is_moved_to_an_earlier_time_does_not_wait():
    async def main() -> None:
        network, table = Network(LINK), SharedTable(0.01)
        nodes = await start_averagers(network, [[torch.zeros(4)], [torch.ones(4)]], table)
        steps = [start_step(network, node, timeout=3 * SHORT_LIFETIME_SECONDS) for node in nodes]
        for step in steps:
            step.scheduled_time = get_dht_time() + 2 * SHORT_LIFETIME_SECONDS
        await asyncio.sleep(60)
        for step in steps:
            step.scheduled_time = get_dht_time() + 5
        loop = asyncio.get_running_loop()
        before = loop.time()
        await asyncio.wait([asyncio.wrap_future(step) for step in steps])
        assert loop.time() - before < 10

    run(main(), seed=1, time_limit=10**5)


@pytest.mark.parametrize(("seconds", "is_believed"), [(3600, True), (3659, True), (3700, False), (86400, False)])
def test_what_lives_longer_is_ignored(seconds, is_believed):
    async def main() -> None:
        network, table = Network(LINK), SharedTable()
        nodes = await start_averagers(network, [[torch.zeros(4)], [torch.ones(4)]], table)
        tracked = await start_trackers(network, 2, table)
        await train(tracked, 3)
        liar = nodes[1].p2p.peer_id
        expiration = get_dht_time() + seconds
        keys = nodes[0].lanes[""].matchmaking.keys
        await table.store(keys.current_key, [], expiration, subkey=tag_of(liar))
        assert await keys.get_averagers(keys.current_key, only_active=True) == [(liar, expiration)] * is_believed
        downloads = nodes[0].state_downloads
        await table.store(downloads.key, [1.0, []], expiration, subkey=tag_of(liar))
        assert [peer for _, peer in await downloads.find_donors()] == [liar] * is_believed
        [*tags] = table.records["run_progress"]
        for tag in tags:
            await table.store("run_progress", None, expiration, subkey=tag)
        await tracked[0].exchange.fetch(1)
        assert tracked[0].expected == (1 if is_believed else 2)
        for one in tracked:
            await one.exchange.stop()

    run(main(), seed=1, time_limit=10**5)


def test_donors_and_trackers_that_would_live_longer_do_not(caplog):
    async def main() -> None:
        network, table = Network(LINK), SharedTable()
        [node] = await start_averagers(network, [[torch.zeros(4)]], table, declare_state_period=10**5)
        node.state_sharing.set(allowed=True)
        for _ in range(100):
            await asyncio.sleep(100)
            [record] = table.records[node.state_sharing.key].values()
            assert get_dht_time() < record.expiration_time < get_dht_time() + SHORT_LIFETIME_SECONDS + 1
        await node.close()

    run(main(), seed=1, time_limit=10**5)
    with DHT(start=True, client_mode=True) as dht:
        tracker = ProgressTracker(dht, "run", 100, metadata_expiration=10_000.0, start=False)
        assert tracker.metadata_expiration == SHORT_LIFETIME_SECONDS
    assert "metadata_expiration is 10000 s" in caplog.text
