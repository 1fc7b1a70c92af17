"""Calls of a monitor: it sees within seconds that a peer has ended, and costs the peers next to nothing."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys

import msgspec
import pytest

import shoal
from shoal.base.clock import get_dht_time
from shoal.monitor.observer import Monitor, Observer
from shoal.monitor.prober import LEAST_PAUSE, MAX_KEPT, MOST_PAUSE, SECONDS_BETWEEN_CALLS, Prober, _Contact, _due
from shoal.monitor.run import PeerState, RunView
from shoal.testing import Network, run, start_dht_node
from tests.monitor.made_up import MadeUpPeer
from tests.optim.conftest import wait_until
from tests.simulation.training import LINK, RUN, Course, Swarm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("systems")]

TRAINING_PEER = """
import sys, time, torch, shoal
dht = shoal.DHT([sys.argv[1]], start=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
opt = shoal.Optimizer(dht=dht, run_id="run", target_batch_size=8, batch_size_per_step=8, optimizer=optimizer)
while True:
    opt.zero_grad()
    loss = model(torch.ones(8, 2)).square().mean()
    loss.backward()
    opt.step()
    opt.report(loss=loss)
    time.sleep(0.1)
"""
# Ctrl-C, as a user who stops the last peer of a run presses it.
INTERRUPTED = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"


class Watched:
    """A simulated swarm that a monitor watches, and calls."""

    async def begin(self, peers: int, prepare=lambda: None) -> None:
        network = Network(LINK)
        self.swarm = Swarm(network, Course(target_batch_size=1000))
        for _ in range(peers):
            await self.swarm.add()
        self.host, self.view = network.add_host(), RunView(RUN)
        prepare()
        nodes = [trainer.node for trainer in self.swarm.trainers]
        options = {"client_mode": True, "record_validator": self.swarm.validator}
        self.node = await start_dht_node(network, self.host, nodes, **options)
        observer = Observer(self.node, self.view)
        self.host.spawn(observer.watch())
        self.host.spawn(Prober(self.node, self.view, observer.look_for).watch())
        await self.until(lambda: sum(view.answers is True for view in self.view.peers.values()) == peers)

    async def until(self, condition) -> float:
        """Let seconds pass until a condition holds; returns how many."""
        began = asyncio.get_running_loop().time()
        while not condition():
            await asyncio.sleep(0.1)
            self.view.tick(get_dht_time())
        return asyncio.get_running_loop().time() - began

    def state(self, trainer) -> PeerState:
        return self.view.peers[trainer.node.peer_id].state


@pytest.mark.parametrize("seed", range(3))
def test_killed_peer_is_gone_within_four_seconds(seed):
    async def main() -> None:
        watched = Watched()
        await watched.begin(4)
        victim, *others = watched.swarm.trainers
        await asyncio.sleep(watched.swarm.network.rng.uniform(0, 2 * SECONDS_BETWEEN_CALLS))
        watched.swarm.remove(victim)
        assert await watched.until(lambda: watched.state(victim) is PeerState.LOST) < 4
        (event,) = [event for event in watched.view.events.since() if event.kind == "lost"]
        assert event.text.endswith("is lost, without a goodbye: its machine refuses connections")
        await asyncio.sleep(70)
        watched.view.tick(get_dht_time())
        assert [watched.state(trainer) for trainer in others] == [PeerState.TRAINING] * 3
        assert watched.state(victim) is PeerState.LOST, "records from before its end do not bring it back"
        await watched.swarm.close()

    run(main(), seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_goodbye_means_left(seed):
    """Its machine refuses connections before the record that it has withdrawn is read in turn."""

    async def main() -> None:
        watched = Watched()
        await watched.begin(2)
        leaving, staying = watched.swarm.trainers
        await asyncio.sleep(watched.swarm.network.rng.uniform(0, 2 * SECONDS_BETWEEN_CALLS))
        await watched.swarm.dismiss(leaving)
        leaving.host.crash()
        await watched.until(lambda: watched.state(leaving).is_gone)
        await asyncio.sleep(10)
        kinds = [event.kind for event in watched.view.events.since() if event.peer == str(leaving.node.peer_id)]
        assert [kind for kind in kinds if kind in ("left", "lost")] == ["left"]
        assert watched.state(staying) is PeerState.TRAINING
        await watched.swarm.close()

    run(main(), seed=seed)


def test_unresponsive_machine_is_silent_before_its_record_expires():
    async def main() -> None:
        watched = Watched()
        await watched.begin(3)
        victim = watched.swarm.trainers[0]
        watched.swarm.remove(victim, silently=True)
        assert await watched.until(lambda: watched.state(victim) is PeerState.SILENT) < 30
        await watched.swarm.close()

    run(main(), seed=1)


def test_calls_are_rare_while_all_is_well():
    async def main() -> None:
        watched = Watched()
        await watched.begin(2)
        metrics = watched.node.p2p.metrics
        handler = "DHTProtocol.rpc_ping"
        before = metrics.bytes_sent_by_handler[handler], metrics.connections_dialled
        await asyncio.sleep(180)
        sent = metrics.bytes_sent_by_handler[handler] - before[0]
        assert 0 < sent < 2 * 180 * 20, "twenty bytes a second for each peer"
        assert metrics.connections_dialled - before[1] <= 2, "connections are kept"
        await watched.swarm.close()

    run(main(), seed=2)


def test_closed_connections_back_off():
    contact, now = _Contact(called_at=100.0), 100.0
    assert _due(contact, is_connected=True) == 100 + SECONDS_BETWEEN_CALLS
    assert _due(contact, is_connected=False) == 100, "it may have ended"
    pauses = []
    for contact.vain in range(1, 9):
        pauses.append(_due(contact, is_connected=False) - now)
    assert pauses[:3] == [LEAST_PAUSE, 2 * LEAST_PAUSE, 4 * LEAST_PAUSE]
    assert pauses[-1] == MOST_PAUSE


def test_unresponsive_crowd_displaces_nobody():
    async def main() -> None:
        watched, rng = Watched(), random.Random(0)
        fakes = [MadeUpPeer(rng, 0) for _ in range(2 * MAX_KEPT)]

        def tell() -> None:
            now = get_dht_time()
            for number, fake in enumerate(fakes):
                record = fake.record(now, 0)
                record = msgspec.structs.replace(record, addresses=[f"/ip4/203.0.113.{number}/tcp/1"])
                watched.view.hear_progress(record, now + 600, now)

        await watched.begin(3, tell)
        victim = watched.swarm.trainers[0]
        watched.swarm.remove(victim)
        assert await watched.until(lambda: watched.state(victim) is PeerState.LOST) < 6
        await watched.swarm.close()

    run(main(), seed=3)


@pytest.mark.timeout(300)
def test_killed_process_is_gone_before_its_record_expires():
    with shoal.DHT(start=True) as dht, Monitor(dht, "run") as monitor:
        process = subprocess.Popen([sys.executable, "-c", TRAINING_PEER, str(dht.get_visible_maddrs()[0])])
        try:
            answers = lambda: [view for view in monitor.view.peers.values() if view.answers]  # noqa: E731
            wait_until(answers, "the peer answers")
            (peer,) = answers()
            process.kill()
            wait_until(lambda: peer.state is PeerState.LOST, "it is gone")
            assert peer.lost_at < peer.expiration
            monitor.check()
        finally:
            process.kill()
            process.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT for one process")
@pytest.mark.timeout(300)
def test_interrupted_last_peer_has_left():
    with shoal.DHT(start=True) as dht, Monitor(dht, "run") as monitor:
        script = INTERRUPTED + TRAINING_PEER
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(dht.get_visible_maddrs()[0])], stderr=subprocess.DEVNULL
        )
        try:
            answers = lambda: [view for view in monitor.view.peers.values() if view.answers]  # noqa: E731
            wait_until(answers, "the peer answers")
            (peer,) = answers()
            process.send_signal(signal.SIGINT)
            wait_until(lambda: peer.state.is_gone, "it is gone")
            assert peer.state is PeerState.LEFT
            monitor.check()
        finally:
            process.kill()
            process.wait()
