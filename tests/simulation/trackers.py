"""Trackers on a simulated network, each without its facade, and without anything that trains."""

from __future__ import annotations

import asyncio
from typing import Any

from shoal.dht.crypto import tag_of
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.exchange import ProgressExchange
from shoal.optim.progress.records import PerformanceEMA, RefreshPolicy
from shoal.optim.progress.schema import endorse
from shoal.p2p import P2P
from shoal.testing import Host, Network, SharedTable


class Tracked:
    """The tracker of one peer, without its facade."""

    def __init__(self, host: Host, p2p: P2P, table: Any) -> None:
        self.host, self.p2p, self.id = host, p2p, p2p.peer_id.to_bytes()
        ema = PerformanceEMA(clock=host.dht_time)
        ema.update(1, interval=1.0)
        self.board = ProgressBoard(self.id, p2p.client_mode, 10**9, RefreshPolicy(), ema, host.dht_time())
        tag = tag_of(p2p.peer_id)
        self.exchange = ProgressExchange(
            table,
            p2p,
            "run",
            self.board,
            owner_tag=tag,
            endorsement=endorse(p2p.identity, tag),
            min_period=0.5,
            metadata_expiration=60.0,
        )

    def report(self, samples: int) -> None:
        self.board.report(self.board.own.epoch, samples, self.host.dht_time())
        self.exchange.report_due.set()

    @property
    def expected(self) -> int:
        return 1 + len(self.board.expected_members(self.host.dht_time()))


async def start_trackers(network: Network, count: int, table: SharedTable) -> list[Tracked]:
    tracked = []
    for _ in range(count):
        host = network.add_host()
        tracked.append(Tracked(host, await host.run(P2P.create(transport=host.transport(), rng=host.rng)), table))
        await host.run(tracked[-1].exchange.start())
    return tracked


async def train(tracked: list[Tracked], seconds: int) -> None:
    for _ in range(seconds):
        for one in tracked:
            if one.host.is_up:
                one.report(one.board.own.samples_accumulated + 1)
        await asyncio.sleep(1)


def calls_of(tracked: list[Tracked]) -> int:
    return sum(one.p2p.metrics.calls_made + one.p2p.metrics.dials_failed for one in tracked)
