"""A run that is made up: records as peers would publish them, the same for the same seed."""

from __future__ import annotations

import math
import random

from shoal.monitor.run import RunView
from shoal.optim.progress.records import ProgressRecord
from shoal.optim.report import PeerReport
from shoal.p2p import Identity, PeerID
from shoal.stages.directory import StageRecord

START = 1_700_000_000.0
STEP_SECONDS = 20.0
TARGET = 20_000


class NamedRecord(ProgressRecord, frozen=True):
    """The record of a peer that has a name."""

    name: str = ""


class MadeUpPeer:
    """One peer, whose loss falls."""

    def __init__(self, rng: random.Random, number: int, name: str = "") -> None:
        self.rng, self.number = rng, number
        self.peer: PeerID = Identity.generate(rng).peer_id
        self.speed = 40 * math.exp(rng.gauss(0, 0.6))
        self.failed = 0
        self.name = name

    def record(self, now: float, epoch: int, *, time: float | None = None) -> ProgressRecord:
        return NamedRecord(
            self.peer.to_bytes(),
            epoch,
            int(now % STEP_SECONDS * self.speed),
            self.speed * 1.2,
            now if time is None else time,
            self.number % 7 == 6,
            addresses=[] if self.number % 7 == 6 else ["/ip4/203.0.113.7/tcp/31337"],
            name=self.name,
        )

    def report(self, now: float, began: float, epoch: int) -> PeerReport:
        age = now - began
        self.failed += self.rng.random() < 0.0004
        return PeerReport(
            time=now,
            epoch=epoch,
            samples=int(age * self.speed),
            recent_samples=int(self.speed * 5),
            samples_per_second=self.speed * self.rng.uniform(0.9, 1.1),
            metrics={
                "loss": 2 + 3 * math.exp(-age / 300) + self.rng.gauss(0, 0.15),
                "accuracy": 1 - math.exp(-age / 400),
                **({"held-out loss": 2.2 + 3 * math.exp(-age / 300)} if self.name and self.rng.random() < 0.3 else {}),
            },
            step_seconds=STEP_SECONDS * self.rng.uniform(0.97, 1.03),
            joint_seconds=self.rng.uniform(2.5, 4),
            averaging_seconds=self.rng.uniform(1.2, 1.8),
            group_size=16,
            rounds=epoch,
            rounds_failed=self.failed,
            failure="the others have left or continued" if self.failed else "",
            troubles={"waited in vain": self.failed} if self.failed else {},
            bytes_sent=int(age * 4e5),
            bytes_received=int(age * 5e5),
            link=("public", "relayed", "public", "client")[self.number % 4],
            version="0.1.0",
            step_samples=int(TARGET * random.Random(epoch).uniform(0.85, 1.05)),
            step_target=TARGET,
            began=began,
        )


class MadeUpRun:
    """Feeds a view.

    Args:
        view: what is fed.
        peers: how many there are.
        now: the time at which they begin.
        with_extras: every third of them has a name, and tests its model now and then.
    """

    def __init__(
        self, view: RunView, peers: int, now: float = START, seed: int = 0, *, with_extras: bool = False
    ) -> None:
        rng = random.Random(seed)
        self.view, self.began, self.now = view, now, now
        names = [f"lab-{number}" if with_extras and number % 3 == 0 else "" for number in range(peers)]
        self.peers = [MadeUpPeer(rng, number, name) for number, name in enumerate(names)]

    @property
    def epoch(self) -> int:
        return int((self.now - self.began) / STEP_SECONDS)

    def pass_second(self, seconds: float = 1.0) -> None:
        """Time goes on, and every peer tells how far it is."""
        self.now += seconds
        with self.view.lock:
            for peer in self.peers:
                self.view.hear_progress(peer.record(self.now, self.epoch), self.now + 60.0, self.now)
                self.view.hear_report(peer.peer, peer.report(self.now, self.began, self.epoch), self.now)
            self.view.tick(self.now)
            self.view.is_complete = True


def made_up_stages(view: RunView, *rates: list[float], now: float = START, **values: object) -> list[list[PeerID]]:
    """Feed a view with the records of stages whose peers have these rates; returns the peers."""
    rng = random.Random(7)
    ids = [[Identity.generate(rng).peer_id for _ in each] for each in rates]
    for stage, (peers, each) in enumerate(zip(ids, rates, strict=True)):
        read = []
        for peer, rate in zip(peers, each, strict=True):
            more = {"queue": stage, "epoch": 4, "name": f"card-{len(read)}", **values}
            record = StageRecord(stage=stage, rate=rate, count=len(rates), time=now, **more)
            read.append((peer, record, now + 30.0))
        view.hear_stage(stage, read, now)
    view.tick(now)
    return ids
