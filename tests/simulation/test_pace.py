"""Peers of different speeds make epochs together: the end is foreseen, everybody comes, and nobody waits for long."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from statistics import median

import pytest
import torch

from shoal.averaging.control import StepControl
from shoal.averaging.node import AveragerNode
from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.exchange import ProgressExchange
from shoal.optim.progress.records import PerformanceEMA, RefreshPolicy
from shoal.testing import Host, Link, Network, SharedTable, run
from shoal.testing.averagers import start_averager
from tests.drills import mostly_drills

BATCH = 16
JITTER = 0.05
"""Standard deviation of the time that a batch takes, relative."""
EPOCHS, WARMUP = 12, 3
MATCHMAKING_SECONDS, AVERAGING_TIMEOUT = 5.0, 30.0
PATIENCE = 1000.0
LINK = Link(delay=(0.01, 0.05), jitter=0.005)


@dataclass
class Epoch:
    """What one peer has seen of an epoch, in DHT time."""

    began: float
    predicted: float = 0.0
    """Its end, as it was known after the first batch."""
    stopped: float = 0.0
    averaging: float = 0.0
    """It began to exchange gradients with the others."""
    samples: int = 0
    members: int = 0


@dataclass
class Peer:
    """The tracker and the averager of one peer, and what its training thread would do."""

    host: Host
    node: AveragerNode
    board: ProgressBoard
    exchange: ProgressExchange
    batch_seconds: float
    history: list[Epoch] = field(default_factory=list)

    async def train(self) -> None:
        while len(self.history) < EPOCHS:
            self.history.append(await self._make_epoch())

    async def _make_epoch(self) -> Epoch:
        epoch, board = Epoch(began=get_dht_time()), self.board
        control: StepControl | None = None
        while True:
            await asyncio.sleep(self.batch_seconds * max(0.1, self.host.rng.gauss(1, JITTER)))
            now = get_dht_time()
            epoch.samples += BATCH
            board.report(board.own.epoch, epoch.samples, now)
            self.exchange.report_due.set()
            end = board.end_of_epoch(now)
            epoch.predicted = epoch.predicted or end
            if control is None and board.introduced and end - now <= MATCHMAKING_SECONDS:
                control = self._look_for_group(end)
            if board.should_stop(now, MATCHMAKING_SECONDS):
                break
        epoch.stopped = now
        board.begin_update(now, MATCHMAKING_SECONDS)
        self.exchange.call_due.set()
        assert control is not None, "the end of the epoch was foreseen"
        control.keep_open = False
        self._tell_whom_to_wait_for(control)
        control.allow_allreduce()
        members = await asyncio.wrap_future(control)
        assert control.round is not None
        epoch.averaging, epoch.members = get_dht_time() - control.round.duration, len(members)
        others = {peer.to_bytes() for peer in members} - {board.own.peer_id}
        board.finish_update(board.own.epoch + 1, others, get_dht_time())
        self.exchange.call_due.set()
        return epoch

    def _look_for_group(self, end: float) -> StepControl:
        now = get_dht_time()
        control = StepControl(
            scheduled_time=end + MATCHMAKING_SECONDS,
            deadline=now + AVERAGING_TIMEOUT,
            data_for_gather=MSGPackSerializer.dumps(None),
        )
        control.keep_open = True
        self.host.spawn(self.node.run_step(control))
        return control

    def _tell_whom_to_wait_for(self, control: StepControl) -> None:
        def update() -> None:
            if not control.began_allreduce:
                control.expected_group_size = 1 + len(self.board.expected_members(get_dht_time()))

        self.board.on_change.append(update)
        control.add_done_callback(lambda _: self.board.on_change.remove(update))
        update()


async def start_peer(network: Network, table: SharedTable, batch_seconds: float, target: int) -> Peer:
    host = network.add_host()
    node = await start_averager(host, [torch.zeros(100)], table, min_matchmaking_time=MATCHMAKING_SECONDS)
    peer_id, p2p = node.p2p.peer_id.to_bytes(), node.p2p
    ema = PerformanceEMA(clock=host.dht_time)
    board = ProgressBoard(peer_id, False, target, RefreshPolicy(), ema, host.dht_time())
    settings = {"owner_tag": peer_id, "endorsement": b"", "min_period": 0.5, "metadata_expiration": 60.0}
    exchange = ProgressExchange(table, p2p, "run", board, **settings)
    await host.run(exchange.start())
    return Peer(host, node, board, exchange, batch_seconds)


def epochs_of_a_swarm(
    batch_seconds: list[float], target: int, seed: int, dies_at: float | None = None
) -> list[list[Epoch]]:
    """Each epoch after the first few, as its peers have seen it.

    Args:
        dies_at: seconds after the start at which one more peer dies, that is as fast as the first one.
    """

    async def main() -> list[Peer]:
        network, table = Network(LINK), SharedTable(delay=0.1)
        peers = [await start_peer(network, table, seconds, target) for seconds in batch_seconds]
        if dies_at is not None:
            victim = await start_peer(network, table, batch_seconds[0], target)
            victim.host.spawn(victim.train())
            asyncio.get_running_loop().call_later(dies_at, victim.host.crash)
        await asyncio.wait_for(asyncio.gather(*[peer.host.run(peer.train()) for peer in peers]), PATIENCE)
        for peer in peers:
            await peer.host.run(peer.exchange.stop())
        return peers

    return [list(epoch) for epoch in zip(*(peer.history for peer in run(main(), seed=seed)), strict=True)][WARMUP:]


pytestmark = pytest.mark.parametrize("seed", mostly_drills([1, 2, 3]))


def test_equal_peers_make_as_many_batches_as_there_must_be(seed):
    """Each is done with its last batch a little before or after the others, and hardly ever begins another one."""
    epochs = epochs_of_a_swarm([0.5] * 4, 256, seed)
    too_many = [sum(peer.samples for peer in epoch) - 256 for epoch in epochs]
    assert min(too_many) == 0
    assert sum(too_many) <= BATCH, "once in all epochs"
    assert all(peer.members == 4 for epoch in epochs for peer in epoch)


def test_a_steady_swarm_of_different_peers_keeps_its_pace(seed):
    batch_seconds = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    target = round(10.0 * sum(BATCH / seconds for seconds in batch_seconds))
    epochs = epochs_of_a_swarm(batch_seconds, target, seed)
    needs = [max(peer.stopped for peer in epoch) for epoch in epochs]
    errors = [
        abs(peer.predicted - need) / (need - peer.began)
        for epoch, need in zip(epochs, needs, strict=True)
        for peer in epoch
    ]
    assert median(errors) < 0.1, "the end of an epoch is known when it has hardly begun"
    for epoch, need in zip(epochs, needs, strict=True):
        assert {peer.members for peer in epoch} == {len(batch_seconds)}, "everybody comes"
        assert max(peer.averaging for peer in epoch) - need < 0.2, "the group is there when its last member is ready"
        assert sum(peer.samples for peer in epoch) == pytest.approx(target, rel=0.05)
        waited = [need - peer.stopped for peer in epoch]
        assert max(waited) < max(batch_seconds) * (1 + 4 * JITTER), "each stops at the batch nearest to the end"


def test_only_in_the_epoch_in_which_a_peer_dies_are_its_samples_missing(seed):
    """Until the end of that epoch nobody knows of it; the record, which stays for longer, does not count after that."""
    peers, batches, dies_at = 4, 20, 57.0
    target = BATCH * batches * (peers + 1)
    epochs = epochs_of_a_swarm([0.5] * peers, target, seed, dies_at)
    last = next(index for index, epoch in enumerate(epochs) if all(peer.members == peers for peer in epoch))
    assert 0 < last < len(epochs) - 3
    assert {peer.members for epoch in epochs[:last] for peer in epoch} == {peers + 1}
    share = target / (peers + 1)
    samples = [sum(peer.samples for peer in epoch) for epoch in epochs]
    assert samples[:last] == pytest.approx([target - share] * last, rel=0.05), "the others made the rest"
    assert samples[last] > 0.95 * (target - share)
    assert samples[last + 1 :] == pytest.approx([target] * len(samples[last + 1 :]), rel=0.05)
