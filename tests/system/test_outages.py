"""Trainers on machines of their own, whose cables are pulled: everybody finds back by itself."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import pytest

from tests.system.hosts import NEEDS_HOSTS, Network
from tests.system.swarm import START_LIMIT_SECONDS, Peer

pytestmark = [pytest.mark.xdist_group("hosts"), NEEDS_HOSTS, pytest.mark.timeout(400)]

TARGET, BATCH, PAUSE = 96, 8, 0.05
PEERS = 3
SECONDS_AWAY = 15.0
"""Longer than it takes to notice that the swarm is lost."""
SECONDS_UNTIL_BACK = 120.0
"""On a busy machine; on a quiet one 30 are enough."""
OPTIONS = ("--target-batch-size", TARGET, "--batch-size", BATCH, "--pause", PAUSE, "--mode", "synchronous")
OPTIONS += ("--matchmaking-time", 2, "--averaging-timeout", 10)


class Trainers:
    """Three that train together, each on a host of its own."""

    def __init__(self, network: Network) -> None:
        self.hosts = network.hosts
        self.peers: list[Peer] = []
        for number, host in enumerate(self.hosts):
            self.peers.append(host.start("keep_training.py", "--seed", number, *OPTIONS))
        address: list[str] = []
        for peer in self.peers:
            peer.wait_for("ready", START_LIMIT_SECONDS)
            peer.tell(json.dumps(address))
            address = [self.peers[0].wait_for("address", START_LIMIT_SECONDS)["address"]]

    def epoch(self, number: int) -> int:
        """The epoch that a trainer has reached."""
        epochs = self.peers[number].all("epoch")
        return epochs[-1]["epoch"] if epochs else 0

    def wait_until_together(self, limit: float) -> float:
        """Wait for an epoch for which all have averaged, and after which they are the same; returns the seconds."""
        began = time.monotonic()
        after = max(map(self.epoch, range(PEERS)))

        def is_common(event: dict[str, object]) -> bool:
            return event["epoch"] > after and event["members"] == PEERS

        while True:
            left = limit - (time.monotonic() - began)
            reached = self.peers[0].wait_for("epoch", left, is_common)
            others = [self._find(peer, reached["epoch"], left) for peer in self.peers[1:]]
            if all(other is not None and other["parameters"] == reached["parameters"] for other in others):
                return time.monotonic() - began
            after = reached["epoch"]

    def _find(self, peer: Peer, epoch: int, limit: float) -> dict[str, object] | None:
        event = peer.wait_for("epoch", limit, lambda event: event["epoch"] >= epoch)
        return event if event["epoch"] == epoch else None


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Network(PEERS) as network:
        trainers = Trainers(network)
        trainers.wait_until_together(START_LIMIT_SECONDS)
        yield trainers


@pytest.mark.slow_drill
def test_one_comes_back_after_its_cable_was_out(trainers: Trainers) -> None:
    """The first one, to whom nobody has named an initial peer."""
    away, others = trainers.hosts[0], trainers.peers[1:]
    before = max(map(trainers.epoch, range(PEERS)))
    away.pull_cable()
    for peer in others:  # they go on without it
        peer.wait_for("epoch", SECONDS_UNTIL_BACK, lambda event: event["epoch"] > before + 5 and event["members"] == 2)
    time.sleep(SECONDS_AWAY)  # an outage takes time
    away.plug_in()
    trainers.wait_until_together(SECONDS_UNTIL_BACK)


def test_all_come_back_after_all_cables_were_out(trainers: Trainers) -> None:
    for host in trainers.hosts:
        host.pull_cable()
    time.sleep(SECONDS_AWAY)
    for host in trainers.hosts:
        host.plug_in()
    trainers.wait_until_together(SECONDS_UNTIL_BACK)


def test_laptop_waking_in_another_network_comes_back(trainers: Trainers) -> None:
    laptop, peer = trainers.hosts[1], trainers.peers[1]
    peer.process.send_signal(signal.SIGSTOP)
    laptop.set_address(77)
    time.sleep(SECONDS_AWAY)
    peer.process.send_signal(signal.SIGCONT)
    trainers.wait_until_together(SECONDS_UNTIL_BACK)
