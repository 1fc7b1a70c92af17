"""Everything that happened in a run of the demo, as plain data: what the viewer shows and the report tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from statistics import median

from shoal.cli.demo.messages import EpochDone, Finished, Progress


class PeerState(str, Enum):
    """What a peer is doing."""

    STARTING = "starting"
    READY = "ready"
    DOWNLOADING = "downloading the state"
    TRAINING = "training"
    FINISHED = "finished"
    KILLED = "killed"
    FAILED = "failed"


@dataclass
class PeerStory:
    """One peer as the runner saw it. Times are seconds since training began."""

    number: int
    state: PeerState = PeerState.STARTING
    started: float = 0.0
    peer_id: str = ""
    caught_up: float | None = None
    """When it had the swarm's epoch for the first time."""
    progress: Progress | None = None
    epochs: list[tuple[float, EpochDone]] = field(default_factory=list)
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    """Time, epoch, held-out loss in nats per byte."""
    finished: Finished | None = None

    @property
    def name(self) -> str:
        return f"peer {self.number}"

    @property
    def alive(self) -> bool:
        return self.state not in (PeerState.KILLED, PeerState.FAILED)

    @property
    def held_out_loss(self) -> float | None:
        """The latest one, in nats per byte."""
        if self.finished is not None:
            return self.finished.loss
        return self.curve[-1][2] if self.curve else None


@dataclass
class Story:
    """A whole run."""

    planned_peers: int
    planned_seconds: float
    peers: dict[int, PeerStory] = field(default_factory=dict)
    files: int = 0
    unigram_entropy: float = float("nan")
    bigram_entropy: float = float("nan")
    now: float = 0.0
    killed: tuple[float, int] | None = None
    """When, and which peer."""
    joined: tuple[float, int] | None = None
    """When the newcomer's process was started, and its number."""
    stopped: float | None = None
    """When the last epoch was announced."""
    repeats: int = 0
    """How often the end was put off by an epoch because the peers did not agree bit for bit."""
    text: str = ""
    """Written by the trained model."""

    @property
    def living(self) -> list[PeerStory]:
        return [peer for peer in self.peers.values() if peer.alive]

    @property
    def epoch(self) -> int:
        """The furthest epoch that a peer told of."""
        done = (peer.epochs[-1][1].epoch for peer in self.peers.values() if peer.epochs)
        return max(done, default=0)

    @property
    def last_round(self) -> EpochDone | None:
        """The swarm's latest step, as the peer saw it that told of it last."""
        latest = [peer.epochs[-1] for peer in self.peers.values() if peer.epochs]
        return max(latest, key=lambda entry: entry[0])[1] if latest else None

    @property
    def peers_seen(self) -> int:
        return max((peer.progress.peers_seen for peer in self.living if peer.progress), default=0)

    def median_round(self) -> float | None:
        """Seconds that a step of the swarm usually takes, over all peers; None if there was none."""
        seconds = [done.seconds for peer in self.peers.values() for _, done in peer.epochs]
        return median(seconds) if seconds else None

    def rounds_after_kill(self, within: float = 15.0) -> list[float]:
        """Seconds of each step in the time after the kill: the slowest of the surviving peers counts."""
        if self.killed is None:
            return []
        slowest: dict[int, float] = {}
        for peer in self.living:
            for time, done in peer.epochs:
                if self.killed[0] < time <= self.killed[0] + within:
                    slowest[done.epoch] = max(slowest.get(done.epoch, 0.0), done.seconds)
        return [slowest[epoch] for epoch in sorted(slowest)]

    def identical(self) -> bool:
        """Whether all living peers ended at the same epoch with the same parameters, bit for bit."""
        ends = [(p.finished.epoch, p.finished.parameters_sha256) if p.finished else None for p in self.living]
        return None not in ends and len(set(ends)) == 1
