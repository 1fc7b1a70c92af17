"""Real trainers, each a process of its own, and what they say about themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from tests.system.swarm import Event, Peer

MATCHMAKING_SECONDS = 10.0
"""Far longer than an epoch takes, on a slow machine, too."""
OPTIONS = ["--epochs", 10**6, "--matchmaking-time", MATCHMAKING_SECONDS, "--averaging-timeout", 40]


@dataclass
class Scene:
    """Four honest trainers and an attacker."""

    trainers: list[Peer]
    attacker: Peer

    def epoch(self) -> int:
        """The last one that anybody has reached."""
        return max((event["epoch"] for peer in self.trainers for event in peer.all("epoch")), default=0)

    def epochs(self, count: int, patience: float = 120.0) -> list[list[Event]]:
        """Wait until everybody has made so many more epochs; what each trainer has said of each of them."""
        first = self.epoch() + 1
        ends = time.monotonic() + patience
        for peer in self.trainers:
            peer.wait_for("epoch", ends - time.monotonic(), lambda event: event["epoch"] >= first + count)
        of_peers = [{event["epoch"]: event for event in peer.all("epoch")} for peer in self.trainers]
        return [[each[epoch] for each in of_peers if epoch in each] for epoch in range(first, first + count)]

    def memory(self) -> list[int]:
        return [psutil.Process(peer.process.pid).memory_info().rss for peer in self.trainers]

    def cpu_seconds(self) -> float:
        times = [psutil.Process(peer.process.pid).cpu_times() for peer in self.trainers]
        return sum(each.user + each.system for each in times)

    def lines(self) -> list[list[str]]:
        """What the trainers have logged. The second half of a long line is indented, and does not count."""
        return [[line for line in peer.errors().splitlines() if not line.startswith("  ")] for peer in self.trainers]


def check_undisturbed(epochs: list[list[Event]], trainers: list[Peer]) -> None:
    """All of them are in all rounds, nobody else is, they have the same parameters, and wait for nobody in vain."""
    honest = sorted(peer.wait_for("peer_id", 1)["peer_id"] for peer in trainers)
    for reports in epochs:
        assert len(reports) == len(trainers), f"somebody left an epoch out: {reports}"
        assert len({report["parameters"] for report in reports}) == 1
        assert all(report["group"] == honest for report in reports), reports
    waits = [reports for reports in epochs if max(report["seconds"] for report in reports) >= MATCHMAKING_SECONDS]
    assert len(waits) <= 1, waits
