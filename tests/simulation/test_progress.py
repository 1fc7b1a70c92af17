"""Peers over wide-area links, some of them failing, know of each other's progress at the right moment."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence

import pytest

from shoal.base.clock import get_dht_time
from shoal.guard.open import OpenGuard
from shoal.guard.policy import Members
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.exchange import DIAL_ATTEMPTS, ProgressExchange, ProgressMessage
from shoal.optim.progress.records import PerformanceEMA, RefreshPolicy
from shoal.p2p import P2P, P2PContext, PeerID
from shoal.testing import Host, Link, Network, run
from shoal.testing.averagers import SharedTable
from tests.drills import mostly_drills
from tests.simulation.trackers import start_trackers, train

WIDE_AREA = Link(delay=(0.05, 0.1), jitter=0.01, dial_failure=0.01)
PEERS = 24


class Peer:
    """The tracker of one peer, without its facade."""

    def __init__(self, host: Host, p2p: P2P, table: SharedTable, kind: type[ProgressExchange]) -> None:
        self.host, self.p2p, self.table, self.id = host, p2p, table, p2p.peer_id.to_bytes()
        self.now = host.dht_time
        ema = PerformanceEMA(clock=self.now)
        ema.update(1, interval=1.0)
        self.board = ProgressBoard(self.id, p2p.client_mode, 10**9, RefreshPolicy(), ema, self.now())
        self.exchange = kind(
            table,
            p2p,
            "run",
            self.board,
            owner_tag=self.id,
            endorsement=b"",
            min_period=0.5,
            metadata_expiration=60.0,
        )

    def report(self, samples: int) -> None:
        self.board.report(self.board.own.epoch, samples, self.now())
        self.exchange.report_due.set()

    def declare_over(self) -> None:
        self.board.begin_update(self.now(), patience=0)
        self.exchange.call_due.set()

    def next_epoch(self, members: set[bytes]) -> None:
        self.board.finish_update(self.board.own.epoch + 1, members, self.now())
        self.exchange.call_due.set()

    @property
    def expected(self) -> int:
        return 1 + len(self.board.expected_members(self.now()))


async def start_swarm(
    network: Network, clients: int = 0, count: int = PEERS, kinds: Sequence[type[ProgressExchange]] = ()
) -> list[Peer]:
    table = SharedTable(delay=0.2)
    peers = []
    for index in range(count):
        host = network.add_host()
        create = P2P.create(transport=host.transport(), rng=host.rng, client_mode=index < clients)
        kind = kinds[index] if index < len(kinds) else ProgressExchange
        peer = Peer(host, await host.run(create), table, kind)
        await host.run(peer.exchange.start())
        peers.append(peer)
    return peers


async def seconds_until(condition) -> float:
    started = get_dht_time()
    while not condition():
        await asyncio.sleep(0.01)
        assert get_dht_time() < started + 60
    return get_dht_time() - started


pytestmark = pytest.mark.parametrize("seed", mostly_drills([1, 2, 3]))


def test_a_crowd_that_begins_at_once_gets_to_know_each_other(seed):
    async def main() -> None:
        peers = await start_swarm(Network(WIDE_AREA))
        for peer in peers:
            peer.report(1)
        assert await seconds_until(lambda: all(p.board.introduced and p.expected == PEERS for p in peers)) < 5.0
        for peer in peers:
            await peer.exchange.stop()

    run(main(), seed=seed)


def test_the_end_of_an_epoch_is_known_within_a_round_trip(seed):
    async def main() -> None:
        peers = await start_swarm(Network(WIDE_AREA))
        for peer in peers:
            peer.report(1)
        await seconds_until(lambda: all(p.board.introduced and p.expected == PEERS for p in peers))
        peers[7].declare_over()
        others = [peer for peer in peers if peer is not peers[7]]
        assert await seconds_until(lambda: all(p.board.epoch_is_over(p.now()) for p in others)) < 1.0
        everybody = {peer.id for peer in peers}
        for peer in peers:
            peer.declare_over()
            peer.next_epoch(everybody - {peer.id})
        assert all(peer.expected == PEERS for peer in peers), "also before the others' news have arrived"
        assert await seconds_until(lambda: not any(p.board.epoch_is_over(p.now()) for p in peers)) < 1.0
        for peer in peers:
            await peer.exchange.stop()

    run(main(), seed=seed)


def test_peers_that_crash_or_leave_are_not_expected(seed):
    async def main() -> None:
        peers = await start_swarm(Network(WIDE_AREA))
        for peer in peers:
            peer.report(1)
        await seconds_until(lambda: all(p.board.introduced and p.expected == PEERS for p in peers))
        for peer in peers[:4]:
            peer.host.crash()
        for peer in peers[4:8]:
            await peer.exchange.stop()
        alive = peers[8:]
        assert all(peer.expected == PEERS - 4 for peer in alive), "goodbyes have arrived"
        for peer in alive:
            peer.declare_over()
        assert await seconds_until(lambda: all(p.expected == len(alive) for p in alive)) < 3.0
        for peer in alive:
            await peer.exchange.stop()

    run(main(), seed=seed)


def test_the_dead_are_not_called_with_each_piece_of_news(seed, caplog):
    seconds = 40

    async def main() -> None:
        dead, *alive = peers = await start_swarm(Network(WIDE_AREA), count=5)
        for peer in peers:
            peer.report(1)
        await seconds_until(lambda: all(p.board.introduced and p.expected == len(peers) for p in peers))
        dead.host.crash()
        with caplog.at_level(logging.DEBUG, "shoal.optim.progress.exchange"):
            for _ in range(seconds):
                for peer in alive:
                    peer.report(1)
                    peer.declare_over()
                    peer.next_epoch({other.id for other in alive if other is not peer})
                await asyncio.sleep(1)
        assert all(peer.expected == len(alive) for peer in alive)
        failures = caplog.text.count(f"peer {dead.p2p.peer_id} cannot be called")
        tries = 1 + seconds / RefreshPolicy().max_period
        assert len(alive) <= failures <= DIAL_ATTEMPTS * tries * len(alive)
        for peer in alive:
            await peer.exchange.stop()

    run(main(), seed=seed)


@pytest.mark.parametrize("guard", [Members, OpenGuard])
@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "alive"])
def test_nobody_is_accused_by_an_old_record_alone(
    seed: int, caplog: pytest.LogCaptureFixture, guard: type[Members], is_dead: bool
) -> None:
    """A run was stopped at epoch 38 and has begun again; the record of its last peer lives on for a while."""

    async def main() -> PeerID:
        network, table = Network(WIDE_AREA), SharedTable(delay=0.2)
        [old] = await start_trackers(network, 1, table)
        old.board.finish_update(38, set(), old.host.dht_time())
        old.report(1)
        await seconds_until(lambda: old.board.published)
        if is_dead:
            old.host.crash()
        newcomers = await start_trackers(network, 4, table)
        for one in newcomers:
            one.board.guard = guard(one.id, bytes, one.host.dht_time())
            one.board.note_round(dict.fromkeys([other.id for other in newcomers], 1.0), one.host.dht_time())
        for _ in range(100):
            await train(newcomers, 1)
            for one in newcomers:
                one.board.believed_epochs(one.host.dht_time())
        for one in newcomers if is_dead else [old, *newcomers]:
            await one.exchange.stop()
        return old.p2p.peer_id

    peer = run(main(), seed=seed)
    assert (f"peer {peer} says that it is at epoch 38" in caplog.text) == (not is_dead)


class TalksNonsense(ProgressExchange):
    """Answers with a progress that cannot be."""

    async def rpc_exchange_progress(self, request: ProgressMessage, context: P2PContext) -> ProgressMessage:
        return ProgressMessage(0, 0, -1.0, 0.0, False)


def test_who_answers_with_nonsense_breaks_no_call_to_others(seed, caplog):
    async def main() -> None:
        peers = await start_swarm(Network(WIDE_AREA), count=4, kinds=(TalksNonsense,))
        for peer in peers:
            peer.report(1)
        honest = peers[1:]
        await seconds_until(lambda: all(peer.board.introduced for peer in peers))
        for peer in peers:
            peer.declare_over()
        await asyncio.sleep(5)
        ids = {peer.id for peer in honest}
        assert all(ids - {peer.id} <= peer.board.expected_members(peer.now()) for peer in honest)
        for peer in peers:
            await peer.exchange.stop()

    run(main(), seed=seed)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_tracker_that_fails_says_so(seed, caplog):
    async def main() -> None:
        (peer,) = await start_swarm(Network(WIDE_AREA), count=1)
        peer.exchange.on_fetch = lambda: 1 / 0
        await seconds_until(lambda: not peer.exchange.is_alive)
        await peer.exchange.stop()

    run(main(), seed=seed)
    assert "this peer no longer follows the progress of others" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_clients_learn_in_the_end_what_others_are_told(seed):
    async def main() -> None:
        peers = await start_swarm(Network(WIDE_AREA), clients=6)
        for peer in peers:
            peer.report(1)
        await seconds_until(lambda: all(p.board.introduced and p.expected == PEERS for p in peers))
        for peer in peers[6:]:
            peer.next_epoch(set())
        clients = peers[:6]

        def know_the_epoch() -> bool:
            return all(client.board.global_progress(client.now()).epoch == 1 for client in clients)

        for peer in peers[6:]:
            peer.report(1)
        assert await seconds_until(know_the_epoch) < 15.0
        for peer in peers:
            await peer.exchange.stop()

    run(main(), seed=seed)


def test_records_are_renewed_before_they_expire(seed):
    async def main() -> None:
        peers = await start_swarm(Network(WIDE_AREA), clients=2, count=5)
        for second in range(200):
            for peer in peers:
                peer.report(1 + second)
            await asyncio.sleep(1)
        found = await peers[0].table.get("run_progress")
        assert set(found.value) == {peer.id for peer in peers}
        assert all(peer.expected == len(peers) for peer in peers), "clients among each other, too"
        for peer in peers:
            await peer.exchange.stop()

    run(main(), seed=seed)


def test_whose_clock_is_ahead_is_told_so(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Others do not count it. It may be too late to correct its time: they have agreed without it."""

    async def main() -> None:
        trackers = await start_trackers(Network(), 3, SharedTable())
        early = trackers[0]
        early.host.clock_offset = 4.0
        early.p2p.clock.hear = lambda *_, **__: 0.0  # type: ignore[method-assign]
        await train(trackers, 60)
        lines = [record.getMessage() for record in caplog.records if "does not count this one" in record.getMessage()]
        assert len(lines) == 1
        assert "NTP" in lines[0]
        assert early.p2p.metrics.troubles["clocks that differ"] > 1
        for tracked in trackers:
            await tracked.host.run(tracked.exchange.stop())

    run(main(), seed=seed)
