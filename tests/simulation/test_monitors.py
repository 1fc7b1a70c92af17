"""Observers of a swarm: they see all of it, also where its records are divided, and cost it nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from shoal.base.clock import get_dht_time
from shoal.dht import ValueWithExpiration
from shoal.dht.crypto import tag_of
from shoal.dht.key_sharding import key_at, path_of, places_to_write
from shoal.monitor.observer import BYTES_PER_SECOND, MAX_KEYS, Observer
from shoal.monitor.prober import Prober
from shoal.monitor.run import RunView
from shoal.optim.progress.records import ProgressRecord, endorse
from shoal.optim.report import LIFETIME, PERIOD, PeerReport, key_of_reports
from shoal.p2p import Identity
from shoal.testing import Network, SharedTable, run, start_dht_node
from tests.simulation.training import LINK, RUN, Course, Swarm, Trainer

PEERS, SPEED, EPOCH_SECONDS, EPOCHS = 4, 50.0, 20.0, 6


class Reporter(Trainer):
    """Publishes its loss every five seconds."""

    reported = 0.0

    def report(self) -> None:
        super().report()
        now = get_dht_time()
        if now - self.reported >= PERIOD:
            self.reported = now
            value = PeerReport(now, self.epoch, self.record.made, 250, SPEED, {"loss": self.loss})
            key, tag = key_of_reports(RUN), tag_of(self.node.peer_id)
            self.host.spawn(self.node.store(key, msgspec.to_builtins(value), now + LIFETIME, subkey=tag))


async def reach(swarm: Swarm, epoch: int) -> float:
    """Wait until all are at an epoch; returns the time."""
    while min(trainer.epoch for trainer in swarm.trainers) < epoch:
        await asyncio.sleep(0.02)
    return asyncio.get_running_loop().time()


async def train(observers: int) -> tuple[float, list[Observer]]:
    """The goodput of a swarm whose peers can send 3 Mbit/s, after some epochs, and its observers."""
    network = Network(LINK)
    swarm = Swarm(network, Course(target_batch_size=round(PEERS * SPEED * EPOCH_SECONDS), values=20_000))

    def limit(host):
        host.uplink, host.downlink = 3e6 / 8, 25e6 / 8

    for _ in range(PEERS):
        await swarm.add(SPEED, make=Reporter, prepare=limit)
    watching = []
    for _ in range(observers):
        host = network.add_host()
        nodes = [trainer.node for trainer in swarm.trainers]
        node = await start_dht_node(network, host, nodes, client_mode=True, record_validator=swarm.validator)
        watching.append(Observer(node, RunView(RUN)))
        host.spawn(watching[-1].watch())
        host.spawn(Prober(node, watching[-1].view, watching[-1].look_for).watch())
    # From the end of an epoch to the end of another one: within an epoch it would matter when one looks.
    began = await reach(swarm, 2)
    used = sum(trainer.record.used for trainer in swarm.trainers)
    ended = await reach(swarm, 2 + EPOCHS)
    used = sum(trainer.record.used for trainer in swarm.trainers) - used
    goodput = used / (PEERS * SPEED * (ended - began))
    for observer in watching:
        observer.view.tick(get_dht_time())
    await swarm.close()
    return goodput, watching


@pytest.mark.timeout(300)
def test_five_observers_cost_a_swarm_nothing():
    alone, _ = run(train(0), seed=3)
    observed, observers = run(train(5), seed=3)
    assert observed > 0.99 * alone
    for observer in observers:
        summary = observer.view.summary
        assert summary.peers == summary.reporting == PEERS
        assert EPOCHS <= summary.epoch <= EPOCHS + 2
        assert summary.means["loss"] < 1
        assert observer.bytes_read < (EPOCHS + 3) * EPOCH_SECONDS * 2 * BYTES_PER_SECOND


def put(
    table: SharedTable, identity: Identity, depth: int, now: float, *, is_everywhere: bool = False, **changes: Any
) -> None:
    """Store a peer's records, as it would, under keys of this depth; a liar may store them under all keys above."""
    tag = tag_of(identity.peer_id)
    honest = {
        **{"peer_id": identity.peer_id.to_bytes(), "epoch": 5, "samples_accumulated": 0, "samples_per_second": 1.0},
        **{"time": now, "client_mode": False, "endorsement": endorse(identity, tag), "depth": depth},
    }
    record = ProgressRecord(**{**honest, **changes})
    places = [path_of(tag)[:bits] for bits in range(depth + 1)] if is_everywhere else places_to_write(tag, depth)
    for place in places:
        add(table, key_at("run_progress", place), tag, record.to_dict())
    report = PeerReport(now, 5, 10, 10, 2.0, {"loss": 1.0})
    add(table, key_at("run_reports", path_of(tag)[:depth]), tag, msgspec.to_builtins(report))


def add(table: SharedTable, key: str, tag: bytes, value: Any) -> None:
    entries = table.records.setdefault(key, {})
    entries[tag] = ValueWithExpiration(value, get_dht_time() + 60)


def test_divided_records_are_all_found():
    async def main() -> None:
        network, table, view = Network(LINK), SharedTable(), RunView("run")
        identities = [Identity.generate(network.rng) for _ in range(300)]
        for number, identity in enumerate(identities):
            put(table, identity, 2 + number % 2, get_dht_time())
        observer = Observer(table, view)
        while not view.is_complete:
            await observer.read_next()
        summary = view.tick(get_dht_time())
        assert summary.peers == summary.reporting == 300
        assert summary.throughput == 600

    run(main(), seed=1)


def test_liars_lead_an_observer_nowhere():
    async def main() -> None:
        network, table, view = Network(LINK), SharedTable(), RunView("run")
        for _ in range(40):
            put(table, Identity.generate(network.rng), 20, get_dht_time(), is_everywhere=True)
        victim, thief = Identity.generate(network.rng), Identity.generate(network.rng)
        put(table, thief, 0, get_dht_time(), peer_id=victim.peer_id.to_bytes())  # in the name of another peer
        put(table, Identity.generate(network.rng), 0, get_dht_time() + 1e6)  # from the future
        for junk in (b"", "text", 7, [1, 2], {"peer_id": b"x"}, {1: 2}, [[]] * 18):
            for key in ("run_progress", "run_reports"):
                add(table, key, f"junk {junk!r}".encode(), junk)
        observer = Observer(table, view)
        for _ in range(MAX_KEYS + 300):
            await observer.read_next()
        assert victim.peer_id not in view.peers
        assert len(view.peers) == 40
        assert observer.keys <= MAX_KEYS
        assert view.is_complete

    run(main(), seed=1)


def test_what_is_read_is_limited():
    """However many records there are under a key, it is read so rarely that those who hold it send little."""

    async def main() -> None:
        network, table, view = Network(LINK), SharedTable(), RunView("run")
        for _ in range(100):
            put(table, Identity.generate(network.rng), 0, get_dht_time())
        observer, began = Observer(table, view), get_dht_time()
        for _ in range(5):
            await asyncio.sleep(observer.next_due - get_dht_time())
            await observer.read_next()
        assert observer.bytes_read / (get_dht_time() - began) < 1.3 * BYTES_PER_SECOND

    run(main(), seed=1)
