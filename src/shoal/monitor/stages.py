"""The stages of a run whose model is cut into stages: which peers hold each, how fast they are, and the bottleneck.

The records are those by which the peers themselves choose each other (:mod:`shoal.stages.directory`). They are claims:
the number of stages and the epochs are medians, and no peer counts for more than a hundred others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from statistics import median, median_low

from shoal.base.bounded import Bounded
from shoal.base.logs import short_id, shown_name
from shoal.p2p import PeerID
from shoal.stages.directory import MOST_REMEMBERED, StageRecord

# A stage is the bottleneck if it does less than this part of what the median stage does (chosen).
BOTTLENECK = 0.95
# The most peers of a stage that are named one by one (chosen).
PEERS_NAMED = 64


def limited(values: Collection[float]) -> list[float]:
    """The values, clipped to a hundred times the median: one peer may claim anything."""
    positive = [value for value in values if value > 0]
    limit = 100.0 * median(positive) if positive else 0.0
    return [min(value, limit) for value in values] if positive else list(values)


@dataclass(frozen=True)
class StagePeer:
    """One peer of a stage."""

    peer: str
    name: str
    state: str
    """``serving``, ``joining`` or ``leaving``."""
    rate: float
    queue: int
    room: int
    epoch: int


@dataclass(frozen=True)
class StageRow:
    """One stage."""

    stage: int
    serving: int
    """Peers that take microbatches. Others are joining or leaving."""
    joining: int
    leaving: int
    rate: float | None
    """Microbatches per second that its peers can do together; ``None`` if none of them has told."""
    queue: int
    """Microbatches that wait at its peers."""
    epoch: int | None
    """The median over its peers."""
    is_bottleneck: bool
    peers: list[StagePeer]
    """At most :data:`PEERS_NAMED` of them, the fastest first."""


class StagesView:
    """The stages as an observer sees them. ``RunView.lock`` protects it."""

    def __init__(self) -> None:
        self.rows: list[StageRow] = []
        """The stages in order, as of the last tick; empty if the model is not cut into stages."""
        self.change = 0
        """The number of the last change of the run that concerned stages."""
        # By stage and peer: the latest record, and when it expires.
        self._records: dict[int, Bounded[PeerID, tuple[StageRecord, float]]] = {}
        self._read: set[int] = set()

    @property
    def count(self) -> int:
        """The number of stages, as most peers tell it; 0 if none is known."""
        told = [record.count for records in self._records.values() for record, _ in records.values()]
        return median_low(told) if told else 0

    def hear(self, stage: int, read: Iterable[tuple[PeerID, StageRecord | None, float]]) -> list[tuple[PeerID, str]]:
        """The records of a stage were read; returns the peers that have just begun to move, and that in words."""
        records = self._records.setdefault(stage, Bounded(MOST_REMEMBERED))
        self._read.add(stage)
        moving = []
        for peer, record, until in read:
            before, expires = records.get(peer, (None, 0.0))
            if until <= expires:
                continue
            if record is None:
                records.pop(peer, None)
                continue
            if record.is_leaving and record.moves_to is not None and before is not None and not before.is_leaving:
                name = shown_name(record.name) or short_id(str(peer))
                moving.append((peer, f"{name} moves from stage {stage} to stage {record.moves_to}"))
            records[peer] = record, until
        return moving

    def tick(self, change: int, now: float) -> list[str]:
        """Forget records that have expired; returns in words which stages have lost their last peer, or have one again.

        Args:
            change: the number of this change.
        """
        for stage, records in [*self._records.items()]:
            for peer in [peer for peer, (_, until) in records.items() if until <= now]:
                del records[peer]
            if not records:
                del self._records[stage]
        count = self.count or len(self.rows)
        if not self._read.issuperset(range(count)):
            return []  # a stage that was not read yet is not one without peers
        rows = _marked([self._row(stage) for stage in range(count)])
        changes = [
            f"stage {row.stage} has {'a peer again' if row.serving else 'no peer any more: microbatches wait for one'}"
            for before, row in zip(self.rows, rows, strict=False)
            if bool(before.serving) != bool(row.serving)
        ]
        if rows != self.rows:
            self.rows, self.change = rows, change
        return changes

    def _row(self, stage: int) -> StageRow:
        records = {peer: record for peer, (record, _) in self._records.get(stage, {}).items()}
        rates = dict(zip(records, limited([record.rate for record in records.values()]), strict=True))
        serving = [peer for peer, record in records.items() if record.serves]
        rate = sum(rates[peer] for peer in serving)
        fastest = sorted(records, key=lambda peer: (-rates[peer], str(peer)))[:PEERS_NAMED]
        return StageRow(
            stage=stage,
            serving=len(serving),
            joining=sum(record.is_joining for record in records.values()),
            leaving=sum(record.is_leaving for record in records.values()),
            rate=rate if rate > 0 or not serving else None,
            queue=sum(record.queue for record in records.values()),
            epoch=median_low(records[peer].epoch for peer in serving) if serving else None,
            is_bottleneck=False,
            peers=[_named(peer, records[peer], rates[peer]) for peer in fastest],
        )


def _named(peer: PeerID, record: StageRecord, rate: float) -> StagePeer:
    state = "leaving" if record.is_leaving else "joining" if record.is_joining else "serving"
    return StagePeer(str(peer), shown_name(record.name), state, rate, record.queue, record.room, record.epoch)


def _marked(rows: list[StageRow]) -> list[StageRow]:
    """The rows with the bottleneck marked, if there is one: stages that do about the same have none."""
    known = [row.rate for row in rows if row.rate is not None]
    if len(known) < 2:
        return rows
    least = min(known)
    is_one = least == 0 or least < BOTTLENECK * median(known)
    return [replace(row, is_bottleneck=is_one and row.rate == least) for row in rows]
