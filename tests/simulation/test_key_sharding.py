"""Peers of a swarm that is too large for one key know a sample of each other, and extrapolate the rest."""

from __future__ import annotations

import asyncio
from statistics import fmean, median

import msgspec
import pytest

from shoal.base.clock import get_dht_time
from shoal.dht import key_sharding as spread
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.exchange import MAX_MOVES, ProgressExchange
from shoal.optim.progress.records import PerformanceEMA, ProgressRecord, RefreshPolicy, endorse
from shoal.p2p import P2P
from shoal.testing import Host, Link, Network, SharedTable, run

LINK = Link(delay=(0.01, 0.05), jitter=0.005)
OWNERS_PER_KEY = 4
SPEED, SAMPLES = 2.0, 50


@pytest.fixture(autouse=True)
def small_keys(monkeypatch):
    """As with 64 owners in a key and sixteen times as many peers."""
    monkeypatch.setattr(spread, "OWNERS_PER_KEY", OWNERS_PER_KEY)
    monkeypatch.setattr(spread, "TOO_MANY", 2 * OWNERS_PER_KEY)
    monkeypatch.setattr(spread, "TOO_FEW", OWNERS_PER_KEY // 2)
    monkeypatch.setattr(spread, "HARDLY_ANY", 1)


class Peer:
    """The tracker of one peer, without its facade."""

    def __init__(self, host: Host, p2p: P2P, table: SharedTable) -> None:
        self.host, self.p2p, self.id = host, p2p, p2p.peer_id.to_bytes()
        self.tag = b"tag of " + self.id
        ema = PerformanceEMA(clock=host.dht_time)
        ema.update(1, interval=1 / SPEED)
        self.board = ProgressBoard(self.id, False, 10**9, RefreshPolicy(), ema, host.dht_time())
        self.exchange = ProgressExchange(
            table,
            p2p,
            "run",
            self.board,
            owner_tag=self.tag,
            endorsement=endorse(p2p.identity, self.tag),
            min_period=0.5,
            metadata_expiration=60.0,
        )

    @property
    def depth(self) -> int:
        return self.exchange.spread.depth


async def add_peers(network: Network, table: SharedTable, count: int) -> list[Peer]:
    peers = []
    for _ in range(count):
        host = network.add_host()
        peer = Peer(host, await host.run(P2P.create(transport=host.transport(), rng=host.rng)), table)
        await host.run(peer.exchange.start())
        peer.board.report(0, SAMPLES, host.dht_time())
        peer.exchange.report_due.set()
        peers.append(peer)
    return peers


async def stop(peers: list[Peer]) -> None:
    for peer in peers:
        await peer.host.run(peer.exchange.stop())


@pytest.mark.slow_drill
def test_peers_know_the_size_and_progress():
    async def main() -> None:
        network, table = Network(LINK), SharedTable(delay=0.05)
        peers = await add_peers(network, table, 60)
        await asyncio.sleep(150)
        now = get_dht_time()
        depths = [peer.depth for peer in peers]
        assert median(depths) >= 2, depths
        alive = {key: [e for e in found.values() if e.expiration_time > now] for key, found in table.records.items()}
        assert max(map(len, alive.values())) <= len(peers) / 2
        known = [len(peer.board.companions_to_call(now)) for peer in peers]
        assert min(known) >= 4, "nobody is alone"
        progress = [peer.board.global_progress(now) for peer in peers]
        assert fmean(each.num_peers for each in progress) == pytest.approx(len(peers), rel=0.3)
        assert fmean(each.samples_accumulated for each in progress) == pytest.approx(len(peers) * SAMPLES, rel=0.3)
        newcomer = (await add_peers(network, table, 1))[0]
        await asyncio.sleep(5)
        assert newcomer.depth >= 1
        assert len(newcomer.board.companions_to_call(get_dht_time())) >= 4

    run(main(), seed=1)


def test_nobody_writes_for_others_or_counts_twice(monkeypatch):
    async def main() -> None:
        network, table = Network(LINK), SharedTable(delay=0.05)
        peer, victim = await add_peers(network, table, 2)
        await asyncio.sleep(5)
        peer.exchange.spread.depth = 3
        now = get_dht_time()
        by_stranger, by_itself = endorse(peer.p2p.identity, b"stranger"), endorse(victim.p2p.identity, b"its own")
        forged = ProgressRecord(victim.id, 7, 1, 1.0, now + 1, False, endorsement=by_stranger)
        honest = ProgressRecord(victim.id, 0, 60, 1.0, now, False, endorsement=by_itself)
        key = spread.key_at("run_progress", peer.exchange.spread.place)
        for tag, record in ((b"stranger", forged), (b"its own", honest)):
            await table.store(key, record.to_dict(), now + 60, subkey=tag)
        found, seen = {}, {}
        await peer.exchange.read(peer.exchange.spread.place, 1, found, seen)
        assert {tag: record.epoch for tag, (record, _) in found.items()} == {victim.id: 0}
        assert seen == {b"its own": victim.id}
        for number in range(50):
            tag = b"tag %d" % number
            endorsed = msgspec.structs.replace(honest, endorsement=endorse(victim.p2p.identity, tag))
            await table.store(key, endorsed.to_dict(), now + 60, subkey=tag)
        counted = []
        monkeypatch.setattr(peer.exchange.spread, "learn", lambda place, depths: counted.append(depths))
        await peer.exchange.read(peer.exchange.spread.place, 1, {}, {})
        assert counted == [[0]], "one peer is one, however many tags it has"
        peer.exchange.spread.depth = 0
        await stop([peer, victim])

    run(main(), seed=2)


@pytest.mark.slow_drill
def test_simultaneous_peers_soon_agree_about_keys():
    async def main() -> None:
        network, table = Network(LINK), SharedTable(delay=0.05)
        peers = await add_peers(network, table, 60)
        readings = 0
        get = table.get

        async def count(*key: object, **how: object) -> object:
            nonlocal readings
            readings += 1
            return await get(*key, **how)

        await asyncio.sleep(85)
        depths = [peer.depth for peer in peers]
        assert sum(depth >= 3 for depth in depths) > 50, depths  # fifteen times as many as fit into one key
        table.get = count
        await asyncio.sleep(60)
        assert readings < 8 * len(peers), "and then everybody reads two keys in twenty seconds, as before"

    run(main(), seed=1)


@pytest.mark.parametrize("shown_by", ["the key itself", "the key above"])
def test_records_move_after_any_reading_shows_it(monkeypatch, shown_by):
    async def main() -> None:
        network, table = Network(LINK), SharedTable(delay=0.05)
        peer, another = await add_peers(network, table, 2)
        await asyncio.sleep(5)
        exchange = peer.exchange
        exchange.spread.depth = 1
        telling = exchange.spread.place if shown_by == "the key itself" else ""

        def learn(place: str, depths: list[int]) -> bool:
            if place == telling:
                exchange.spread.depth = 2
            return place == telling

        monkeypatch.setattr(exchange.spread, "learn", learn)
        await exchange.fetch(1)
        assert exchange.spread.depth == 2
        await asyncio.sleep(1)
        written = table.records[spread.key_at("run_progress", exchange.spread.place)][peer.tag]
        assert written.value["depth"] == 2
        exchange.spread.depth = 0
        await stop([peer, another])

    run(main(), seed=2)


@pytest.mark.parametrize(("sizes", "read_again_soon"), [((40, 60, 60), True), ((40, 44, 44), False)])
def test_who_sees_the_swarm_grow_reads_again_soon(monkeypatch, sizes, read_again_soon):
    async def main() -> None:
        network, table = Network(LINK), SharedTable(delay=0.05)
        peer, another = await add_peers(network, table, 2)
        await asyncio.sleep(5)
        left, moving = list(sizes), []

        async def read(place: str, holders: int, found: dict[bytes, object], seen: dict[bytes, bytes]) -> bool:
            seen.update((b"tag %d" % number, b"peer %d" % number) for number in range(left.pop(0)))
            return False

        def note(found: object, now: float, is_moving: bool = False) -> list[bytes]:
            moving.append(is_moving)
            return []

        await peer.exchange.stop()
        monkeypatch.setattr(peer.exchange, "read", read)
        monkeypatch.setattr(peer.board, "hear_many", note)
        for _ in sizes:
            await peer.host.run(peer.exchange.fetch(1))
        assert moving[1:] == [read_again_soon, False]
        await stop([another])

    run(main(), seed=4)


def test_alternating_peers_read_a_few_times_only(monkeypatch):
    async def main() -> None:
        network, table = Network(LINK), SharedTable(delay=0.05)
        peers = await add_peers(network, table, 10)
        await asyncio.sleep(100)
        peer, moving = peers[0], []
        hear_many = peer.board.hear_many

        def note(found: object, now: float, is_moving: bool = False) -> object:
            moving.append(is_moving)
            return hear_many(found, now, is_moving)

        def learn(place: str, depths: list[int]) -> bool:
            peer.exchange.spread.depth = 5 - peer.exchange.spread.depth
            return True

        monkeypatch.setattr(peer.board, "hear_many", note)
        monkeypatch.setattr(peer.exchange.spread, "learn", learn)
        peer.exchange.spread.depth = 2
        for _ in range(20):
            await peer.exchange.fetch(1)
        assert moving == [True] * MAX_MOVES + [False] * (20 - MAX_MOVES), "somebody makes up records"

    run(main(), seed=3)
