"""The runner's handle on a peer process, the messages between the two, and the record of a run.

Messages are lines of JSON over pipes: the runner writes commands to a peer's standard input and reads events from its
standard output. A peer leaves when its input ends, whether the runner closed it or died. A :class:`Story` holds
everything that happened in a run as plain data, for the viewer and the report.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path

import msgspec

RUN_ID = "shoal_demo"
SYNCHRONOUS = "synchronous"
METHODS = (SYNCHRONOUS, "diloco", "sparse")
"""Peers average gradients for each step; or they make many local steps between two exchanges, and send their progress
in 4 bits per value (diloco), or only its largest values (sparse)."""


class JoinSwarm(msgspec.Struct, tag=True):
    """The runner's first command: join the swarm; an empty list starts a new one."""

    initial_peers: list[str]


class Train(msgspec.Struct, tag=True):
    """The runner's other command: train until the swarm has completed ``last``, then measure and report."""

    last_epoch: int | None = None
    """``None``: until further notice."""


class TextReady(msgspec.Struct, tag=True):
    """The peer has loaded and cut the text, and waits for :class:`JoinSwarm`."""

    files: int
    unigram_entropy: float
    bigram_entropy: float


class SwarmJoined(msgspec.Struct, tag=True):
    """The peer is in the swarm, under these addresses."""

    peer_id: str
    addresses: list[str]


class Progress(msgspec.Struct, tag=True):
    """The peer's progress; sent several times per second."""

    epoch: int
    swarm_epoch: int
    """The swarm's epoch; a peer that is behind it downloads the state first."""
    samples: int
    """This peer's samples in averages that it took part in, and those gathered for the next one."""
    samples_per_second: float
    loss: float
    """Mean training loss since the last epoch, nats per byte."""
    held_out_loss: float | None
    """Loss on the held-out text, if it was measured since the last message."""
    bytes_sent: int
    bytes_received: int
    peers_seen: int
    """Number of peers that this one knows to be training, including itself."""


class EpochDone(msgspec.Struct, tag=True):
    """One step of the whole swarm."""

    epoch: int
    seconds: float
    """How long this peer waited for finding the group, averaging and the optimizer's step."""
    group_size: int
    """Number of peers that averaged together; 1 if this peer averaged with nobody."""


class Finished(msgspec.Struct, tag=True):
    """The last epoch is complete."""

    epoch: int
    samples: int
    """This peer's samples in averages that it took part in."""
    loss: float
    """Loss on the held-out text, measured on many more windows than during training."""
    parameters_sha256: str
    text: str
    """Written by the trained model."""
    synchronous_bytes: int = 0
    """Bytes that this peer would have sent for the same samples by averaging gradients; 0 if it did average them."""


AnyCommand = JoinSwarm | Train
AnyEvent = TextReady | SwarmJoined | Progress | EpochDone | Finished

_commands, _events = msgspec.json.Decoder(AnyCommand), msgspec.json.Decoder(AnyEvent)


def to_line(message: AnyCommand | AnyEvent) -> bytes:
    """One message as a line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def command_from(line: bytes) -> AnyCommand:
    """Parse a command; raises ``msgspec.DecodeError`` if the line holds none."""
    command: AnyCommand = _commands.decode(line)
    return command


# Windows has process groups instead of sessions.
_NEW_GROUP: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)

Heard = tuple[int, "AnyEvent | None"]
"""A peer's number and its event; the event is ``None`` when the peer's output has ended."""


class PeerProcess:
    """The process of one peer, as seen from the runner.

    Args:
        number: the peer's number.
        shards: number of shards into which all peers cut the text.
        log: file for its standard error.
        heard: gets every event of the peer.
        method: how it trains, see :data:`METHODS`.
    """

    def __init__(
        self, number: int, shards: int, log: Path, heard: queue.Queue[Heard], method: str = SYNCHRONOUS
    ) -> None:
        self.number = number
        self.log = log
        with log.open("wb") as log_file:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "shoal.cli.demo.peer", str(number), str(shards), "--method", method],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                # Ctrl-C must reach only the runner, which then ends its peers in order.
                creationflags=_NEW_GROUP,
                start_new_session=not _NEW_GROUP,
            )
        self._reader = threading.Thread(target=self._listen, args=(heard,), name=f"hear peer {number}", daemon=True)
        self._reader.start()

    def _listen(self, heard: queue.Queue[Heard]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith(b"\n"):  # otherwise the peer died in the middle of a line
                heard.put((self.number, _events.decode(line)))
        heard.put((self.number, None))

    def tell(self, command: AnyCommand) -> None:
        """Send a command. A peer that has ended misses it; the runner learns of that through ``heard``."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # BrokenPipeError, or EINVAL on Windows
            self.process.stdin.write(to_line(command))
            self.process.stdin.flush()

    def kill(self) -> None:
        """End it at once, without a goodbye: by SIGKILL or the system's equivalent."""
        self.process.kill()

    def hang_up(self) -> None:
        """Close its input, which tells it to leave."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def wait(self, timeout: float) -> int | None:
        """Its exit status, or None if it is still there after ``timeout`` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def release(self) -> None:
        """Release the resources of a process that has ended."""
        self.process.wait()
        self._reader.join()
        self.hang_up()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def last_words(self, lines: int = 15) -> str:
        """The last lines of its standard error."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def end_all(processes: Iterable[PeerProcess], grace: float) -> None:
    """Ask every process to leave, and kill those that are still there after ``grace`` seconds."""
    processes = list(processes)
    for process in processes:
        process.hang_up()
    deadline = time.monotonic() + grace
    for process in processes:
        if process.wait(max(0.0, deadline - time.monotonic())) is None:
            process.kill()
    for process in processes:
        process.release()


class PeerActivity(str, Enum):
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
    """One peer as the runner sees it. Times are seconds since training began."""

    number: int
    state: PeerActivity = PeerActivity.STARTING
    started: float = 0.0
    peer_id: str = ""
    caught_up: float | None = None
    """When it first caught up with the swarm's epoch."""
    progress: Progress | None = None
    epochs: list[tuple[float, EpochDone]] = field(default_factory=list)
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    """Tuples of time, epoch and held-out loss in nats per byte."""
    finished: Finished | None = None

    @property
    def name(self) -> str:
        return f"peer {self.number}"

    @property
    def alive(self) -> bool:
        return self.state not in (PeerActivity.KILLED, PeerActivity.FAILED)

    @property
    def held_out_loss(self) -> float | None:
        """The latest measurement, in nats per byte."""
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
    """When a peer was killed, and its number."""
    joined: tuple[float, int] | None = None
    """When the newcomer's process was started, and its number."""
    stopped: float | None = None
    """When the last epoch was announced."""
    repeats: int = 0
    """How often the end was postponed by an epoch because the peers' parameters were not identical."""
    method: str = SYNCHRONOUS
    """How the peers train together."""

    @property
    def living(self) -> list[PeerStory]:
        return [peer for peer in self.peers.values() if peer.alive]

    @property
    def text(self) -> str:
        """Written by the trained model."""
        return next((peer.finished.text for peer in self.living if peer.finished), "")

    def bytes_sent(self) -> int:
        """Bytes sent by all living peers."""
        return sum(peer.progress.bytes_sent for peer in self.living if peer.progress)

    def synchronous_bytes(self) -> int:
        """Bytes that they would have sent by averaging gradients; 0 if they did average them."""
        return sum(peer.finished.synchronous_bytes for peer in self.living if peer.finished)

    @property
    def epoch(self) -> int:
        """The furthest epoch that a peer has reported."""
        done = (peer.epochs[-1][1].epoch for peer in self.peers.values() if peer.epochs)
        return max(done, default=0)

    @property
    def last_round(self) -> EpochDone | None:
        """The swarm's latest step, as the last peer reported it."""
        latest = [peer.epochs[-1] for peer in self.peers.values() if peer.epochs]
        return max(latest, key=lambda entry: entry[0])[1] if latest else None

    @property
    def peers_seen(self) -> int:
        return max((peer.progress.peers_seen for peer in self.living if peer.progress), default=0)

    def rounds(self) -> dict[int, tuple[float, float]]:
        """Each step of the swarm by epoch: when it was done, and the seconds it took after the last peer arrived.

        The last peer to arrive waits least, so this is the shortest wait of all peers.
        """
        found: dict[int, tuple[float, float]] = {}
        for peer in self.peers.values():
            for at, done in peer.epochs:
                latest, least = found.get(done.epoch, (at, done.seconds))
                found[done.epoch] = max(at, latest), min(done.seconds, least)
        return dict(sorted(found.items()))

    def pauses(self) -> list[tuple[float, float]]:
        """When each step but the first was done, and the seconds since the step before."""
        times = [at for at, _ in self.rounds().values()]
        return [(later, later - earlier) for earlier, later in pairwise(times)]

    def soon_after_kill(self, moments: Iterable[tuple[float, float]]) -> list[float]:
        """Filter values with their times: those from the 15 seconds after the kill."""
        if self.killed is None:
            return []
        return [value for at, value in moments if self.killed[0] < at <= self.killed[0] + 15]

    def identical(self) -> bool:
        """Whether all living peers ended at the same epoch with the same parameters, bit for bit."""
        ends = [(p.finished.epoch, p.finished.parameters_sha256) if p.finished else None for p in self.living]
        return None not in ends and len(set(ends)) == 1
