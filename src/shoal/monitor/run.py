"""What an observer knows about a run: its peers, the events, and the swarm as a whole, now and over time.

Everything here is computed from the records that peers have published. Records are claims, and any of them may be a
lie. So the epoch of the swarm is a median, no peer counts for more than a hundred others in sums and means, and each
mean comes with the median.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median, median_high
from typing import Any

from shoal.base.logs import counted, one_line, short_id, shown_name
from shoal.monitor.history import History
from shoal.monitor.stages import StagesView, limited
from shoal.optim.progress.records import ProgressRecord
from shoal.optim.report import PeerReport, end_of_id
from shoal.p2p import PeerID
from shoal.stages.directory import StageRecord

# A peer is silent when its record is this old. Chosen: peers renew their records every half minute.
SILENT_SECONDS = 45.0
# How long a peer that is gone is still shown. Chosen.
SECONDS_SHOWN = 300.0
# An older report says nothing about the present. Chosen.
REPORT_SECONDS = 90.0
# Bounds, because anybody can invent peers, names and events. Chosen.
MAX_PEERS, MAX_EVENTS, MAX_METRICS, MAX_VERSIONS = 20_000, 1000, 32, 8
# The most user figures, besides the loss, to remember over time; and the most events of one kind per second. Chosen.
MAX_FIGURES_OVER_TIME, MAX_EVENTS_AT_ONCE = 12, 8

SERIES = (
    *("throughput", "loss", "loss_median", "peers", "gone", "epoch"),
    *("step", "computing", "waiting", "averaging", "sent", "received", "failed", "batch", "target", "samples"),
)
"""The figures in the history: samples per second, mean and median of the losses, the number of peers that train and
that are gone, the swarm's epoch, seconds from step to step and their parts, bytes per second of all peers, failed
rounds, the samples of the last step and their target, and all samples so far."""
FIGURE = "figure/"
"""Prefix of the user's other figures in the history."""


class PeerState(Enum):
    """What a peer is doing, as far as its records tell."""

    TRAINING = "training"
    BEHIND = "behind"
    """It was more than an epoch behind the swarm when it last reported."""
    SILENT = "silent"
    """It has not renewed its record in time, or does not answer."""
    LOST = "lost"
    """It has ended without a goodbye: its machine refuses connections, most others can no longer reach it, or its
    record has expired."""
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
    """The number of the last change of the run that concerned this peer."""
    sent_per_second: float = math.nan
    """NaN until it has reported twice."""
    received_per_second: float = math.nan
    figures: dict[str, float] = field(default_factory=dict)
    """The user's figures, as last reported."""
    lost_at: float = -math.inf
    """DHT time at which it was found to have ended; earlier records are no sign of life."""
    answers: bool | None = None
    """Whether it answers the monitor's own calls; ``None`` if it was not called."""
    _figures_told: dict[str, float] = field(default_factory=dict)

    @property
    def told_name(self) -> str:
        """The name that it gives itself, made harmless; empty if it has none."""
        return shown_name(self.record.name)

    @property
    def name(self) -> str:
        """The name that it gives itself, and the end of its id, because any peer can take any name."""
        told, end = self.told_name, short_id(str(self.peer))
        return f"{told} ({end})" if told else end

    @property
    def epoch(self) -> int:
        return max(self.record.epoch, 0 if self.report is None else self.report.epoch)

    @property
    def told_at(self) -> float:
        """DHT time at which it reported that epoch."""
        told: list[ProgressRecord | PeerReport] = [self.record, *([] if self.report is None else [self.report])]
        return max(each.time for each in told if each.epoch == self.epoch)

    @property
    def last_sign(self) -> float:
        """DHT time of its latest record or report."""
        return max(self.record.time, -math.inf if self.report is None else self.report.time)

    def take(self, report: PeerReport) -> None:
        """Note a report. Figures that are not in every report, such as those of a test, stay for a while.

        The loss does not: it is left out of a report when it is no longer a number.
        """
        self.report = report
        self._figures_told.update(dict.fromkeys(report.metrics, report.time))
        told = {**self.figures, **report.metrics}
        if "loss" not in report.metrics:
            self._figures_told.pop("loss", None)
        fresh = [name for name, at in self._figures_told.items() if at > report.time - REPORT_SECONDS]
        self.figures = {name: told[name] for name in fresh[-MAX_METRICS:]}
        self._figures_told = {name: self._figures_told[name] for name in self.figures}

    @property
    def samples_per_second(self) -> float:
        """Its speed by its report; without one, its computing speed, which does not count waiting."""
        if self.state.is_gone:
            return 0.0
        return self.record.samples_per_second if self.report is None else self.report.samples_per_second

    @property
    def loss(self) -> float | None:
        return None if self.report is None else self.figures.get("loss")

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
    """``joined``, ``left``, ``lost``, ``returned``, ``epoch``, ``failed``, ``trouble`` or ``goal``."""
    text: str
    peer: str = ""
    """The peer's whole id; empty if the event concerns the swarm."""
    number: int = 0
    """The number of events before it."""


class EventLog:
    """The latest events. Epochs are kept apart, so that they do not push out the rest."""

    def __init__(self) -> None:
        self.count = 0
        """The number of all events so far."""
        self._rare: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._epochs: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._at_once: Counter[str] = Counter()

    def add(self, now: float, kind: str, text: str, peer: PeerID | None = None) -> None:
        """Add an event. If there are many of one kind in one second, the rest are only counted."""
        self._at_once[kind] += 1
        if self._at_once[kind] <= MAX_EVENTS_AT_ONCE:
            event = Event(now, kind, text, "" if peer is None else str(peer), self.count)
            (self._epochs if kind == "epoch" else self._rare).append(event)
            self.count += 1

    def tick(self, now: float) -> None:
        """A second is over: log how many events were left out."""
        crowds = {kind: count - MAX_EVENTS_AT_ONCE for kind, count in self._at_once.items()}
        self._at_once.clear()
        for kind, count in crowds.items():
            if count > 0:
                self.add(now, kind, f"and {count} more of this kind ({kind})")

    @property
    def rare(self) -> list[Event]:
        """All events but epochs."""
        return list(self._rare)

    def since(self, number: int = 0) -> list[Event]:
        """The events from this number on that are still remembered, the oldest first."""
        found = [event for event in (*self._rare, *self._epochs) if event.number >= number]
        return sorted(found, key=lambda event: event.number)

    def latest(self, count: int) -> list[Event]:
        """The latest epochs and the latest other events, this many of each."""
        found = [*list(self._rare)[-count:], *list(self._epochs)[-count:]]
        return sorted(found, key=lambda event: event.number)


@dataclass(frozen=True)
class Summary:
    """The swarm at one moment. It is one flat record because the page, the history and exporters read it by name."""

    time: float
    epoch: int
    peers: int
    """The number of peers that are there."""
    clients: int
    states: Mapping[str, int]
    throughput: float
    """Samples per second of all peers together."""
    means: Mapping[str, float]
    """Means of the users' figures, weighted by samples."""
    medians: Mapping[str, float]
    """Medians of the users' figures, in which each peer counts once."""
    step: float
    """Seconds from one joint step to the next, and the parts below: medians over peers. NaN if no peer reports it."""
    computing: float
    waiting: float
    """Seconds of waiting for other peers, and for a group."""
    averaging: float
    """The rest of the time in which peers do not compute."""
    sent: float
    """Bytes per second of all peers; NaN if no peer has reported it yet."""
    received: float
    failed: int
    """Failed rounds, as counted by the peers."""
    versions: Mapping[str, int]
    """The most frequent ones."""
    reporting: int
    """Peers that report."""
    batch: float = math.nan
    """Samples of the last step, of all peers together; the median over reports. NaN if no peer reports it."""
    target: float = math.nan
    """How many samples it should have had."""
    samples: float = math.nan
    """All samples reported to the monitor, including those of peers that are gone."""
    age: float = math.nan
    """Seconds since the oldest peer of the run began. NaN if no peer reports it."""
    goal: int = 0
    """The epoch at which the run is to end; 0 if the monitor was not told."""
    left: float = math.nan
    """Seconds until the goal at the present pace. NaN without a goal, or without a pace yet."""

    def values(self) -> dict[str, float]:
        """The values for the history."""
        told = {name: float(getattr(self, name)) for name in SERIES if hasattr(self, name)}
        gone = sum(count for state, count in self.states.items() if PeerState(state).is_gone)
        loss = self.means.get("loss", math.nan), self.medians.get("loss", math.nan)
        return {**told, "gone": float(gone), "loss": loss[0], "loss_median": loss[1]}


@dataclass
class RunView:
    """A run as an observer sees it. All methods expect :attr:`lock` to be held if several threads use it."""

    run: str
    peers: dict[PeerID, PeerView] = field(default_factory=dict)
    goal_epochs: int = 0
    """The epoch at which the run is to end; 0 if unknown."""
    events: EventLog = field(default_factory=EventLog)
    history: History = field(default_factory=lambda: History(SERIES))
    stages: StagesView = field(default_factory=StagesView)
    """The stages, if its model is cut into stages."""
    summary: Summary | None = None
    """The summary of the last tick."""
    change: int = 0
    """The number of changes so far; each tick is one."""
    is_complete: bool = False
    """Whether all records have been read once. Until then, peers that are seen first have not just joined."""
    removed: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=MAX_PEERS))
    """Peers that are no longer shown, each with the number of the change that removed it."""
    is_full: bool = False
    """Whether there were too many peers to show all."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    # When the swarm reached each epoch; and the samples of each peer before its last start, and since.
    _epochs: list[tuple[float, int]] = field(default_factory=list)
    _samples: dict[PeerID, tuple[int, int]] = field(default_factory=dict)
    _epoch: int = 0

    # --- news ---------------------------------------------------------------------------------------------------------

    def hear_progress(self, record: ProgressRecord, expiration: float, now: float) -> None:
        """A record of progress was read."""
        peer = PeerID(record.peer_id)
        view = self.peers.get(peer)
        if view is None:
            if len(self.peers) >= MAX_PEERS:
                if not self.is_full:
                    self.is_full = True
                    self.events.add(now, "trouble", f"there are more than {MAX_PEERS} peers, and no more are shown")
                return
            self.peers[peer] = view = PeerView(peer, record, expiration, change=self.change)
            if self.is_complete:
                self.events.add(now, "joined", f"{view.name} has joined at epoch {record.epoch}", peer)
        elif record.time <= view.record.time:
            return
        elif record.time <= view.lost_at:
            view.record, view.expiration = record, expiration  # a record from before it ended
        else:
            if view.state.is_gone:
                view.answers = None
                self.events.add(now, "returned", f"{view.name} is back at epoch {record.epoch}", peer)
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
        view.take(report)
        view.change = self.change
        self._count_samples(peer, report.samples)
        if before is None:
            return
        seconds = report.time - before.time
        view.sent_per_second = max(0, report.bytes_sent - before.bytes_sent) / seconds
        view.received_per_second = max(0, report.bytes_received - before.bytes_received) / seconds
        if report.rounds_failed > before.rounds_failed:
            times = counted(report.rounds_failed - before.rounds_failed, "round")
            self.events.add(
                now, "failed", f"{view.name}: {times} failed: {one_line(report.failure) or 'no reason'}", peer
            )
        for kind, count in report.troubles.items():
            if count > before.troubles.get(kind, 0):
                self.events.add(now, "trouble", f"{view.name}: {one_line(kind)}", peer)

    def hear_of_runs(self, runs: Sequence[str], now: float) -> None:
        """No peer was found in this run; ``runs`` describes the runs that were found."""
        name = one_line(self.run)
        others = f"{', '.join(runs)}, none {name!r}" if runs else f"no run is listed here: nobody trains {name!r}"
        self.events.add(now, "trouble", f"{others}. Check --run; private runs are not listed")

    def hear_stage(self, stage: int, read: Iterable[tuple[PeerID, StageRecord | None, float]], now: float) -> None:
        """The records of a stage were read, see :func:`~shoal.stages.directory.read_stage`."""
        for peer, text in self.stages.hear(stage, read):
            self.events.add(now, "joined", text, peer)

    def hear_goodbye(self, peer: PeerID, now: float) -> None:
        """A peer has withdrawn its record. That counts even if it seemed to be lost."""
        view = self.peers.get(peer)
        if view is not None and view.state is not PeerState.LEFT:
            self._leave(view, PeerState.LEFT, f"{view.name} has left", now)

    def hear_answer(self, peer: PeerID) -> None:
        """A peer has answered a call of the monitor."""
        self._note_call(peer, answers=True)

    def hear_silence(self, peer: PeerID) -> None:
        """A peer does not answer. That says nothing if the monitor never had an answer from it."""
        self._note_call(peer, answers=False)

    def _note_call(self, peer: PeerID, *, answers: bool) -> None:
        view = self.peers.get(peer)
        if view is not None and (answers or view.answers) and view.answers is not answers:
            view.answers, view.change = answers, self.change

    def hear_refusal(self, peer: PeerID, now: float) -> None:
        """The machine of a peer says that nothing listens there any more: the peer has ended."""
        self._lose(peer, now, "its machine refuses connections")

    def _lose(self, peer: PeerID, now: float, reason: str) -> None:
        view = self.peers.get(peer)
        if view is not None and not view.state.is_gone:
            view.lost_at, view.answers = now, None
            self._leave(view, PeerState.LOST, f"{view.name} is lost, without a goodbye: {reason}", now)

    def _count_samples(self, peer: PeerID, samples: int) -> None:
        earlier, latest = self._samples.pop(peer, (0, 0))
        if samples < latest:  # it was started again
            earlier, latest = earlier + latest, 0
        self._samples[peer] = earlier, samples
        while len(self._samples) > 50_000:  # includes peers that are gone
            del self._samples[next(iter(self._samples))]

    def _leave(self, view: PeerView, state: PeerState, text: str, now: float) -> None:
        view.state, view.gone_since, view.change = state, now, self.change
        self.events.add(now, state.value, text, view.peer)

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> Summary:
        """Called once a second: find peers that are gone, and add the state of the swarm to the history."""
        self.events.tick(now)
        self.change += 1
        epoch = self._epoch_of_swarm()
        self._note_epoch(epoch, now)
        for text in self.stages.tick(self.change, now):
            self.events.add(now, "trouble", text)
        for peer in self._missed_by_most(now):
            self._lose(peer, now, "most others cannot reach it any more")
        for peer, view in list(self.peers.items()):
            if view.gone_since + SECONDS_SHOWN < now:
                del self.peers[peer]
                self.removed.append((self.change, str(peer)))
            elif not view.state.is_gone:
                self._judge(view, epoch, now)
        self.summary = summary = self._summarize(epoch, now)
        if epoch > self._epoch:
            if self._epoch and self.is_complete:
                self.events.add(now, "epoch", _words_of_epoch(summary))
                if self._epoch < self.goal_epochs <= epoch:
                    self.events.add(now, "goal", f"the run has reached its goal, epoch {self.goal_epochs}")
            self._epoch = epoch
        elif self._has_started_over():
            self.events.add(now, "trouble", f"the run has gone back from epoch {self._epoch} to {epoch}")
            self._epoch = epoch
        self.history.add(now, {**summary.values(), **_figures_over_time(summary)})
        return summary

    def _note_epoch(self, epoch: int, now: float) -> None:
        known = self._epochs
        if known and epoch < known[-1][1] - 1:  # the run has gone back
            known.clear()
        if not known or epoch > known[-1][1]:
            known.append((now if known else -math.inf, epoch))
        while len(known) > 2 and known[1][0] < now - 600.0:  # the pace is measured over ten minutes
            del known[0]

    def _epoch_at(self, time: float) -> int:
        """The epoch of the swarm at some time in the past."""
        at = bisect.bisect_right(self._epochs, time, key=lambda entry: entry[0])
        return self._epochs[max(0, at - 1)][1]

    def _seconds_left(self, epoch: int, step: float, now: float) -> float:
        """Seconds until the goal, at the pace of the last minutes, or else by the time of a step."""
        if not self.goal_epochs or not epoch:
            return math.nan
        if epoch >= self.goal_epochs:
            return 0.0
        # Without the first epoch that the monitor has seen, whose start is unknown.
        known = [(began, each) for began, each in self._epochs if began > -math.inf]
        if len(known) < 2:
            return (self.goal_epochs - epoch) * step
        (began, first), (latest, last) = known[0], known[-1]
        # An unusually long epoch counts while it lasts, too.
        pace = max((latest - began) / (last - first), (now - began) / (last - first + 1))
        return (self.goal_epochs - epoch - 1) * pace + max(0.0, pace - (now - latest))

    def _missed_by_most(self, now: float) -> list[PeerID]:
        """Peers that neither most of the reporting peers nor the monitor can reach any more."""
        there = [view for view in self.peers.values() if not view.state.is_gone]
        reports = [view.report for view in there if view.report is not None and now - view.report.time < SILENT_SECONDS]
        missed = Counter(end for report in reports for end in set(report.lost))
        found = list[PeerID]()
        for view in there if missed else ():
            if view.answers or 2 * missed[end := end_of_id(view.peer)] < len(reports):
                continue
            others = [report for report in reports if report is not view.report]
            # Reports of others from before its last sign of life do not count.
            votes = sum(end in report.lost and report.time > view.last_sign for report in others)
            if 2 * votes > len(others):
                found.append(view.peer)
        return found

    def _judge(self, view: PeerView, epoch: int, now: float) -> None:
        if view.expiration <= now:
            age = now - view.record.time
            self._leave(view, PeerState.LOST, f"{view.name} is lost, without a goodbye: silent for {age:.0f} s", now)
            return
        state = PeerState.TRAINING
        if now - view.record.time > SILENT_SECONDS or view.answers is False:
            state = PeerState.SILENT
        # Compare with the swarm's epoch at that time: being behind a while ago does not mean being behind now.
        elif view.epoch < min(epoch, self._epoch_at(view.told_at)) - 1:
            state = PeerState.BEHIND
        if state is not view.state:
            view.state, view.change = state, self.change
        if view.report is not None and now - view.report.time > REPORT_SECONDS:
            view.report, view.change = None, self.change

    def _has_started_over(self) -> bool:
        """Whether no peer is near the last known epoch, as when all were stopped and started again."""
        epochs = [view.epoch for view in self.peers.values() if not view.state.is_gone]
        return bool(epochs) and max(epochs) < self._epoch - 1

    def _epoch_of_swarm(self) -> int:
        epochs = [view.epoch for view in self.peers.values() if not view.state.is_gone]
        return median_high(epochs) if epochs else self._epoch

    def _summarize(self, epoch: int, now: float) -> Summary:
        there = [view for view in self.peers.values() if not view.state.is_gone]
        reporting = [view for view in there if view.report is not None]
        reports = [view.report for view in reporting if view.report is not None]
        means, medians = _means_of(reporting)
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
            throughput=sum(limited([view.samples_per_second for view in there])),
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
            batch=_median(float(report.step_samples) for report in reports if report.step_samples),
            target=_median(float(report.step_target) for report in reports if report.step_target),
            samples=_sum_of_known(float(sum(counts)) for counts in self._samples.values()),
            age=max(limited([now - report.began for report in reports if 0 < report.began < now]), default=math.nan),
            goal=self.goal_epochs,
            left=self._seconds_left(epoch, step, now),
        )

    # --- for the views ------------------------------------------------------------------------------------------------

    def rows_since(self, change: int) -> list[list[Any]]:
        """The rows of all peers that have changed since then, each with the values of :data:`COLUMNS`."""
        return [row_of(view) for view in self.peers.values() if view.change >= change]


COLUMNS = (
    *("peer", "state", "epoch", "samples", "samples/s", "loss", "sent", "received", "group", "step"),
    *("joint", "averaging", "rounds", "failed", "link", "version", "failure", "name"),
)
"""The columns of a peer's row."""


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
        return [*told, *[None] * 8, view.link, None, None, view.told_name]
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
        view.told_name,
    ]


def details_of(view: PeerView, now: float) -> dict[str, Any]:
    """Everything known about a peer, beyond its row."""
    report = view.report
    told: dict[str, Any] = {
        "peer": str(view.peer),
        "name": view.told_name,
        "told": now - view.last_sign,
        "answers": view.answers,
        "donor": view.record.is_donor,
        "figures": {one_line(name): value for name, value in view.figures.items()},
    }
    if report is None:
        return told
    return told | {
        "age": now - report.began if report.began else None,
        "batch": report.step_samples or None,
        "sent_per_second": view.sent_per_second,
        "received_per_second": view.received_per_second,
        "troubles": {one_line(kind): count for kind, count in report.troubles.items()},
        "cannot_reach": len(report.lost),
    }


def _figures_over_time(summary: Summary) -> dict[str, float]:
    names = [name for name in summary.means if name != "loss"][:MAX_FIGURES_OVER_TIME]
    return {FIGURE + name: summary.means[name] for name in names}


def _words_of_epoch(summary: Summary) -> str:
    loss = summary.means.get("loss")
    parts = [f"epoch {summary.epoch}", counted(summary.peers, "peer")]
    parts += [] if math.isnan(summary.batch) else [f"{summary.batch:,.0f} samples"]
    parts += [] if math.isnan(summary.step) else [f"{summary.step:.1f} s from step to step"]
    parts += [] if loss is None else [f"loss {loss:.4g}"]
    return ", ".join(parts)


def _sum_of_known(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(limited(known)) if known else math.nan


def _median(values: Iterable[float]) -> float:
    known = list(values)
    return median(known) if known else math.nan


def _means_of(peers: list[PeerView]) -> tuple[dict[str, float], dict[str, float]]:
    """Means, weighted by samples, and medians over the reporting peers, of the figures that most of them have."""
    names = Counter(name for peer in peers for name in peer.figures)
    means, medians = dict[str, float](), dict[str, float]()
    weights = limited([float(max(1, peer.report.recent_samples)) for peer in peers if peer.report is not None])
    for name, _ in names.most_common(MAX_METRICS):
        pairs = [(peer.figures[name], w) for peer, w in zip(peers, weights, strict=True) if name in peer.figures]
        shown = one_line(name)
        medians[shown] = median(value for value, _ in pairs)
        means[shown] = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    return means, medians
