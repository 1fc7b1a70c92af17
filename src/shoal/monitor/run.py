"""What an observer knows of a run: its peers, what has happened, and the swarm as a whole, now and over time.

Everything here follows from records that peers have published, by pure computation. Records are claims: any of them may
be a lie. So the epoch of the swarm is a median, no peer counts for more than a hundred others in sums and means, and
beside each mean stands the median.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median, median_high
from typing import Any

from shoal.logs import counted, one_line
from shoal.monitor.history import History
from shoal.optim.progress import ProgressRecord
from shoal.optim.report import PeerReport
from shoal.p2p import PeerID

# Peers renew their records of progress every half minute, which then live a minute.
SILENT_SECONDS = 45.0
# For how long peers that are gone are shown.
SECONDS_SHOWN = 300.0
# A report that is older says nothing about the present.
REPORT_SECONDS = 90.0
MAX_PEERS, MAX_EVENTS, MAX_METRICS, MAX_VERSIONS = 20_000, 1000, 32, 8
# Of one kind in one second.
MAX_EVENTS_AT_ONCE = 8
MOST_TIMES_THE_MEDIAN = 100.0

SERIES = (
    *("throughput", "loss", "loss_median", "peers", "gone", "epoch"),
    *("step", "computing", "waiting", "averaging", "sent", "received", "failed"),
)
"""What the history has: samples per second, mean and median of the losses, peers that train and that are gone, the
swarm's epoch, seconds from step to step and their parts, bytes per second of all peers, and rounds that have failed."""


class PeerState(Enum):
    """What a peer is doing, as far as its records tell."""

    TRAINING = "training"
    BEHIND = "behind"
    """It is more than an epoch behind the swarm."""
    SILENT = "silent"
    """It has not renewed its record in time."""
    LOST = "lost"
    """Its record has expired, and it has not said goodbye."""
    LEFT = "left"
    """It has said goodbye."""

    @property
    def is_gone(self) -> bool:
        return self in (PeerState.LOST, PeerState.LEFT)


@dataclass
class PeerView:
    """One peer."""

    peer: PeerID
    record: ProgressRecord
    expiration: float
    report: PeerReport | None = None
    state: PeerState = PeerState.TRAINING
    gone_since: float = math.inf
    change: int = 0
    """Number of the last change of the run that concerned this peer."""
    sent_per_second: float = math.nan
    """NaN until it has reported twice."""
    received_per_second: float = math.nan

    @property
    def name(self) -> str:
        """The end of its id, which is what differs between peers."""
        return f"…{str(self.peer)[-8:]}"

    @property
    def epoch(self) -> int:
        return max(self.record.epoch, 0 if self.report is None else self.report.epoch)

    @property
    def samples_per_second(self) -> float:
        """By its report; without one, the speed of its computing, in which waiting does not count."""
        if self.state.is_gone:
            return 0.0
        return self.record.samples_per_second if self.report is None else self.report.samples_per_second

    @property
    def loss(self) -> float | None:
        return None if self.report is None else self.report.metrics.get("loss")

    @property
    def link(self) -> str:
        """How others reach it."""
        if self.report is not None and self.report.link:
            return one_line(self.report.link)
        if self.record.client_mode or not self.record.addresses:
            return "client"
        return "relayed" if all("p2p-circuit" in address for address in self.record.addresses) else "direct"


@dataclass(frozen=True)
class Event:
    """Something that has happened."""

    time: float
    kind: str
    """``joined``, ``left``, ``lost``, ``returned``, ``epoch``, ``failed`` or ``trouble``."""
    text: str
    peer: str = ""
    """Its whole id; empty if it concerns the swarm."""


@dataclass(frozen=True)
class Summary:
    """The swarm at one moment."""

    time: float
    epoch: int
    peers: int
    """That are there."""
    clients: int
    states: Mapping[str, int]
    throughput: float
    """Samples per second of all together."""
    means: Mapping[str, float]
    """Of the users' figures, weighted by samples."""
    medians: Mapping[str, float]
    """The same, each peer counted once."""
    step: float
    """Seconds from one joint step to the next; the median over peers, as the parts below. NaN if nobody reports it."""
    computing: float
    waiting: float
    """For others, and for a group."""
    averaging: float
    """Of the time in which peers do not compute."""
    sent: float
    """Bytes per second of all together; NaN if nobody has told it yet."""
    received: float
    failed: int
    """Rounds that have failed, as the peers have counted them."""
    versions: Mapping[str, int]
    """The most frequent ones."""
    reporting: int
    """Peers that report."""

    def values(self) -> dict[str, float]:
        """For the history."""
        told = {name: float(getattr(self, name)) for name in SERIES if hasattr(self, name)}
        gone = sum(count for state, count in self.states.items() if PeerState(state).is_gone)
        loss = self.means.get("loss", math.nan), self.medians.get("loss", math.nan)
        return {**told, "gone": float(gone), "loss": loss[0], "loss_median": loss[1]}


@dataclass
class RunView:
    """A run as an observer sees it. All methods expect :attr:`lock` to be held if several threads use it."""

    run: str
    peers: dict[PeerID, PeerView] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    number_of_events: int = 0
    """That there ever were."""
    history: History = field(default_factory=lambda: History(SERIES))
    summary: Summary | None = None
    """Of the last tick."""
    change: int = 0
    """Number of changes so far; each tick is one."""
    is_complete: bool = False
    """Whether all records have been read once. Until then, peers that are seen first have not just joined."""
    removed: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=MAX_PEERS))
    """Peers that are not shown any more, each with the number of the change."""
    is_full: bool = False
    """Whether there were too many peers to show all."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _epoch: int = 0
    _told_at_once: Counter[str] = field(default_factory=Counter)

    # --- news ---------------------------------------------------------------------------------------------------------

    def hear_progress(self, record: ProgressRecord, expiration: float, now: float) -> None:
        """A record of progress was read."""
        peer = PeerID(record.peer_id)
        view = self.peers.get(peer)
        if view is None:
            if len(self.peers) >= MAX_PEERS:
                if not self.is_full:
                    self.is_full = True
                    self._tell(now, "trouble", f"there are more than {MAX_PEERS} peers, and no more are shown")
                return
            self.peers[peer] = view = PeerView(peer, record, expiration, change=self.change)
            if self.is_complete:
                self._tell(now, "joined", f"{view.name} has joined at epoch {record.epoch}", peer)
        elif record.time <= view.record.time:
            return
        else:
            if view.state.is_gone:
                self._tell(now, "returned", f"{view.name} is back at epoch {record.epoch}", peer)
                view.state, view.gone_since = PeerState.TRAINING, math.inf
            view.record, view.expiration, view.change = record, expiration, self.change

    def hear_report(self, peer: PeerID, report: PeerReport, now: float) -> None:
        """A report was read. Reports of peers without a record of progress do not count."""
        view = self.peers.get(peer)
        if view is None or report.time > now + SILENT_SECONDS:
            return
        before = view.report
        if before is not None and report.time <= before.time:
            return
        view.report, view.change = report, self.change
        if before is None:
            return
        seconds = report.time - before.time
        view.sent_per_second = max(0, report.bytes_sent - before.bytes_sent) / seconds
        view.received_per_second = max(0, report.bytes_received - before.bytes_received) / seconds
        if report.rounds_failed > before.rounds_failed:
            times = counted(report.rounds_failed - before.rounds_failed, "round")
            self._tell(now, "failed", f"{view.name}: {times} failed: {one_line(report.failure) or 'no reason'}", peer)
        for kind, count in report.troubles.items():
            if count > before.troubles.get(kind, 0):
                self._tell(now, "trouble", f"{view.name}: {one_line(kind)}", peer)

    def hear_of_runs(self, runs: Sequence[str], now: float) -> None:
        """Nobody was found in this run, but in these, in words."""
        name = one_line(self.run)
        others = f"{', '.join(runs)}, none {name!r}" if runs else f"no run is listed here: nobody trains {name!r}"
        self._tell(now, "trouble", f"{others}. Check --run; private runs are not listed")

    def hear_goodbye(self, peer: PeerID, now: float) -> None:
        """A peer has withdrawn its record."""
        view = self.peers.get(peer)
        if view is not None and not view.state.is_gone:
            self._leave(view, PeerState.LEFT, f"{view.name} has left", now)

    def _leave(self, view: PeerView, state: PeerState, text: str, now: float) -> None:
        view.state, view.gone_since, view.change = state, now, self.change
        self._tell(now, state.value, text, view.peer)

    def _tell(self, now: float, kind: str, text: str, peer: PeerID | None = None) -> None:
        self._told_at_once[kind] += 1
        if self._told_at_once[kind] <= MAX_EVENTS_AT_ONCE:
            self.events.append(Event(now, kind, text, "" if peer is None else str(peer)))
            self.number_of_events += 1

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> Summary:
        """A second has passed: see who is gone, and note the state of the swarm in the history."""
        self._say_what_was_left_out(now)
        self.change += 1
        epoch = self._epoch_of_swarm()
        for peer, view in list(self.peers.items()):
            if view.gone_since + SECONDS_SHOWN < now:
                del self.peers[peer]
                self.removed.append((self.change, str(peer)))
            elif not view.state.is_gone:
                self._judge(view, epoch, now)
        self.summary = summary = self._summarize(epoch, now)
        if epoch > self._epoch:
            if self._epoch and self.is_complete:
                self._tell(now, "epoch", _words_of_epoch(summary))
            self._epoch = epoch
        elif self._has_begun_anew():
            self._tell(now, "epoch", f"the run has gone back from epoch {self._epoch} to {epoch}")
            self._epoch = epoch
        self.history.add(now, summary.values())
        return summary

    def _say_what_was_left_out(self, now: float) -> None:
        crowds = {kind: count - MAX_EVENTS_AT_ONCE for kind, count in self._told_at_once.items()}
        self._told_at_once.clear()
        for kind, count in crowds.items():
            if count > 0:
                self._tell(now, kind, f"and {count} more of this kind ({kind})")

    def _judge(self, view: PeerView, epoch: int, now: float) -> None:
        if view.expiration <= now:
            age = now - view.record.time
            self._leave(view, PeerState.LOST, f"{view.name} is lost, without a goodbye: silent for {age:.0f} s", now)
            return
        state = PeerState.TRAINING
        if now - view.record.time > SILENT_SECONDS:
            state = PeerState.SILENT
        elif view.epoch < epoch - 1:
            state = PeerState.BEHIND
        if state is not view.state:
            view.state, view.change = state, self.change
        if view.report is not None and now - view.report.time > REPORT_SECONDS:
            view.report, view.change = None, self.change

    def _has_begun_anew(self) -> bool:
        """Whether no peer is near the epoch that was told last, as when all were stopped and started again."""
        epochs = [view.epoch for view in self.peers.values() if not view.state.is_gone]
        return bool(epochs) and max(epochs) < self._epoch - 1

    def _epoch_of_swarm(self) -> int:
        epochs = [view.epoch for view in self.peers.values() if not view.state.is_gone]
        return median_high(epochs) if epochs else self._epoch

    def _summarize(self, epoch: int, now: float) -> Summary:
        there = [view for view in self.peers.values() if not view.state.is_gone]
        reports = [view.report for view in there if view.report is not None]
        means, medians = _means_of(reports)
        steps = [report for report in reports if report.step_seconds > 0]
        joint = _median(min(report.joint_seconds, report.step_seconds) for report in steps)
        averaging = _median(min(report.averaging_seconds, report.joint_seconds) for report in steps)
        step = _median(report.step_seconds for report in steps)
        return Summary(
            time=now,
            epoch=epoch,
            peers=len(there),
            clients=sum(view.record.client_mode for view in there),
            states=Counter(view.state.value for view in self.peers.values()),
            throughput=sum(_limited([view.samples_per_second for view in there])),
            means=means,
            medians=medians,
            step=step,
            computing=step - joint,
            waiting=max(0.0, joint - averaging) if steps else math.nan,
            averaging=averaging,
            sent=_sum_of_known(view.sent_per_second for view in there),
            received=_sum_of_known(view.received_per_second for view in there),
            failed=sum(report.rounds_failed for report in reports),
            versions=dict(Counter(one_line(report.version) for report in reports).most_common(MAX_VERSIONS)),
            reporting=len(reports),
        )

    # --- for those who show it ----------------------------------------------------------------------------------------

    def rows_since(self, change: int) -> list[list[Any]]:
        """The rows of all peers that have changed since then, each with the values of :data:`COLUMNS`."""
        return [row_of(view) for view in self.peers.values() if view.change >= change]

    def events_since(self, number: int) -> list[Event]:
        """All events that are still remembered, but the first so many that there ever were."""
        missing = min(self.number_of_events - number, len(self.events))
        return [self.events[-count] for count in range(missing, 0, -1)]


COLUMNS = (
    *("peer", "state", "epoch", "samples", "samples/s", "loss", "sent", "received", "group", "step"),
    *("joint", "averaging", "rounds", "failed", "link", "version", "failure"),
)
"""What a row tells of a peer."""


def row_of(view: PeerView) -> list[Any]:
    """The values of :data:`COLUMNS`; ``None`` for those that are not known."""
    report = view.report
    told: list[Any] = [
        str(view.peer),
        view.state.value,
        view.epoch,
        view.record.samples_accumulated if report is None else report.samples,
        round(view.samples_per_second, 2),
        view.loss,
    ]
    if report is None:
        return [*told, *[None] * 8, view.link, None, None]
    return [
        *told,
        report.bytes_sent,
        report.bytes_received,
        report.group_size,
        report.step_seconds,
        report.joint_seconds,
        report.averaging_seconds,
        report.rounds,
        report.rounds_failed,
        view.link,
        one_line(report.version),
        one_line(report.failure),
    ]


def _words_of_epoch(summary: Summary) -> str:
    loss = summary.means.get("loss")
    parts = [f"epoch {summary.epoch}", counted(summary.peers, "peer")]
    parts += [] if math.isnan(summary.step) else [f"{summary.step:.1f} s from step to step"]
    parts += [] if loss is None else [f"loss {loss:.4g}"]
    return ", ".join(parts)


def _limited(values: list[float]) -> list[float]:
    """The values, none of which is larger than a hundred times the median: one peer may claim anything."""
    positive = [value for value in values if value > 0]
    if not positive:
        return values
    limit = MOST_TIMES_THE_MEDIAN * median(positive)
    return [min(value, limit) for value in values]


def _sum_of_known(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(_limited(known)) if known else math.nan


def _median(values: Iterable[float]) -> float:
    known = list(values)
    return median(known) if known else math.nan


def _means_of(reports: list[PeerReport]) -> tuple[dict[str, float], dict[str, float]]:
    """Means over peers, weighted by samples, and medians, of the figures that most peers report."""
    names = Counter(name for report in reports for name in report.metrics)
    means, medians = dict[str, float](), dict[str, float]()
    weights = _limited([float(max(1, report.recent_samples)) for report in reports])
    for name, _ in names.most_common(MAX_METRICS):
        pairs = [(r.metrics[name], w) for r, w in zip(reports, weights, strict=True) if name in r.metrics]
        shown = one_line(name)
        medians[shown] = median(value for value, _ in pairs)
        means[shown] = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    return means, medians
