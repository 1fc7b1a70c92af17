"""Everything that happened in a run of the demo, as plain data: what the viewer shows and the report tells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from shoal.cli.demo.messages import EpochDone, Finished, Progress


class PeerState(str, Enum):
    """What a peer is doing."""

    STARTING = "starting"
    READY = "ready"
    DOWNLOADING = "downloading"
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

    def rounds(self) -> dict[int, tuple[float, float]]:
        """Each step of the swarm by epoch: when it was done, and the seconds it took once the last peer had come to it.

        That is what the peer waited that waited least; the others were there earlier and waited for it, too.
        """
        found: dict[int, tuple[float, float]] = {}
        for peer in self.peers.values():
            for time, done in peer.epochs:
                latest, least = found.get(done.epoch, (time, done.seconds))
                found[done.epoch] = max(time, latest), min(done.seconds, least)
        return dict(sorted(found.items()))

    def pauses(self) -> list[tuple[float, float]]:
        """When each step but the first was done, and the seconds since the one before."""
        times = [time for time, _ in self.rounds().values()]
        return [(later, later - earlier) for earlier, later in pairwise(times)]

    def soon_after_kill(self, moments: Iterable[tuple[float, float]]) -> list[float]:
        """Of values that belong to moments, those of the 15 seconds after the kill."""
        if self.killed is None:
            return []
        return [value for time, value in moments if self.killed[0] < time <= self.killed[0] + 15]

    def identical(self) -> bool:
        """Whether all living peers ended at the same epoch with the same parameters, bit for bit."""
        ends = [(p.finished.epoch, p.finished.parameters_sha256) if p.finished else None for p in self.living]
        return None not in ends and len(set(ends)) == 1
