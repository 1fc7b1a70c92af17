"""Which peer holds which stage: a signed record of each stage peer in the DHT, and a table of the others' records.

Each stage has a key of its own, so that a sender reads only the stage that comes next::

    run_stages.0    run_stages.1    …      peer → StageRecord

A record lives under the owner tag of its peer, so that no other peer can write it. It is renewed every few seconds, and
at once when its peer comes, moves or leaves. The table is read again every few seconds, and soon after a peer that was
chosen from it has failed. Of a stage with hundreds of peers, each reading brings a random sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from statistics import median_low
from typing import Annotated, Any

import msgspec

from shoal.averaging.groups.keys import Table
from shoal.base.bounded import Bounded
from shoal.base.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time
from shoal.base.logs import Seldom, one_line
from shoal.base.tasks import BackgroundTasks, wait_at_most
from shoal.dht.crypto import peer_of, tag_of
from shoal.dht.validation import is_short_lived
from shoal.errors import ShoalError
from shoal.net.transport import Count, Moment
from shoal.optim.progress.records import MAX_ADDRESSES, Speed
from shoal.p2p import P2P, PeerID
from shoal.peers.identity import Name

logger = logging.getLogger(__name__)

# The most stages of a model. Chosen: far more than any model is cut into; bounds what a liar makes others read.
MAX_STAGES = 1024
StageNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]
# Seconds for which a record is valid, and between two records of a peer. Chosen: two renewals may be lost.
LIFETIME, RENEWAL_SECONDS = 30.0, 10.0
# Seconds between two readings of a stage; at least, after a peer from it has failed. Chosen.
READING_SECONDS, LEAST_READING_SECONDS = 5.0, 0.5
# The estimated size of a record with its signature, and what readings of one stage may cost in the long run. Chosen:
# up to a hundred peers are read every READING_SECONDS.
BYTES_OF_RECORD, BYTES_PER_SECOND = 400.0, 8_000.0
# The most records that a reading brings, and that are remembered of one stage. Chosen: a sample is enough to choose.
MOST_READ, MOST_REMEMBERED = 192, 1024
# How many of the nodes that hold the records are asked. Chosen: one may be dead.
HOLDERS_READ = 2
# Seconds between two looks at all stages, at least and for each stage. Chosen: peers renew their records as often.
LOOK_SECONDS, LOOK_SECONDS_PER_STAGE = 10.0, 1.0
# The most seconds that a leaving peer waits for the nodes that keep its records (chosen): they may be frozen.
WITHDRAWAL_SECONDS = 0.5


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer declares about a stage that it holds. :class:`StageDirectory` fills in the last four fields."""

    stage: StageNumber
    epoch: Count
    """The step whose parameters it has."""
    rate: Speed
    """Microbatches per second that it can do, forward and back; 0 if it has not done any yet."""
    queue: Count = 0
    """Microbatches that wait there for the device."""
    room: Count = 1
    """How many more it would accept now."""
    serves_auto: bool = False
    """It may be moved to another stage."""
    is_joining: bool = False
    """It has chosen this stage, and does not serve it yet: it may be downloading the state."""
    is_leaving: bool = False
    """It finishes what it has, and accepts nothing new."""
    moves_to: StageNumber | None = None
    """The stage that it is going to hold. It serves this one until it is leaving."""
    since: Moment = 0.0
    """DHT time at which it has begun to join or to move."""
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_STAGES)] = 0
    """The number of stages of the model."""
    time: Moment = 0.0
    """DHT time of the record."""
    addresses: Annotated[list[str], msgspec.Meta(max_length=MAX_ADDRESSES)] = []
    """Where others can call it."""
    name: Name = ""
    """The peer's name, for the monitor."""

    @property
    def serves(self) -> bool:
        """Whether it can be sent microbatches."""
        return not self.is_joining and not self.is_leaving

    def is_news_after(self, told: StageRecord) -> bool:
        """Whether others should hear of this record at once, and not with the next renewal."""
        own, others = (
            (each.is_joining, each.is_leaving, each.moves_to, each.serves_auto, each.since) for each in (self, told)
        )
        return own != others or (self.rate > 0) != (told.rate > 0)


_DEFAULTS = {each.name: each.default for each in msgspec.structs.fields(StageRecord)}


def key_of_stage(run_id: str, stage: int) -> str:
    """The DHT key of the records of a stage."""
    return f"{run_id}_stages.{stage}"


def name_of_stage(run_id: str, stage: int) -> str:
    """The run id of the optimizer of a stage."""
    return f"{run_id}_stage_{stage}"


def epochs_of(peers: Mapping[PeerID, StageRecord], but: PeerID | None = None) -> list[int]:
    """Of the peers of a stage that have its state."""
    return [record.epoch for peer, record in peers.items() if peer != but and not record.is_joining]


def reached_by_most(stages: Iterable[Mapping[PeerID, StageRecord]], default: int = 0) -> int:
    """The latest step that most peers of any one of these stages have reached.

    Args:
        default: the result if none of them has peers.
    """
    return max((median_low(epochs) for each in stages if (epochs := epochs_of(each))), default=default)


def seconds_between_looks(count: int) -> float:
    """How often a peer reads the records of all stages."""
    return max(LOOK_SECONDS, LOOK_SECONDS_PER_STAGE * count)


async def stages_of(table: Table, run_id: str) -> dict[int, str]:
    """The run ids of the stages of a run by their numbers; empty if nobody holds the first stage or the second.

    Raises:
        ShoalError: the DHT cannot be read.
    """
    for stage in (0, 1):
        records = [record for _, record, _ in await read_stage(table, run_id, stage) if record is not None]
        if records:
            count = Counter(record.count for record in records).most_common(1)[0][0]
            return {number: name_of_stage(run_id, number) for number in range(count)}
    return {}


def parse_stage_record(value: object, now: float) -> StageRecord:
    """Decode and check a record that came from another peer.

    Raises:
        ValueError: it is malformed, has impossible numbers, or is from the future.
    """
    try:
        record = msgspec.convert(value, StageRecord, strict=True)
    except msgspec.ValidationError as e:
        raise ValueError(one_line(str(e))) from None
    if record.time > now + MAX_DHT_TIME_DISCREPANCY_SECONDS:
        raise ValueError(f"a record from the future, by {record.time - now:.1f} s")
    if max(record.stage, -1 if record.moves_to is None else record.moves_to) >= record.count:
        raise ValueError(f"it names a stage beyond the {record.count} stages that it says there are")
    return record


async def read_stage(table: Table, run_id: str, stage: int) -> list[tuple[PeerID, StageRecord | None, float]]:
    """Read the valid records of a stage: each with its peer and its expiration; ``None`` if it was withdrawn.

    Raises:
        ShoalError: the DHT cannot be read.
    """
    how: dict[str, Any] = {"beam_size": HOLDERS_READ, "num_workers": 1, "most_entries": MOST_READ}
    key, now = key_of_stage(run_id, stage), get_dht_time()
    stored = await table.get(key, latest=True, keep_copies=False, **how)
    entries = stored.value if stored is not None and isinstance(stored.value, dict) else {}
    read = list[tuple[PeerID, StageRecord | None, float]]()
    for tag, entry in entries.items():
        if not is_short_lived(entry.expiration_time):
            continue  # it would outlive its peer
        try:
            peer, record = peer_of(tag), None if entry.value is None else parse_stage_record(entry.value, now)
            if record is not None and record.stage != stage:
                raise ValueError(f"a record of stage {record.stage}")
        except ValueError as e:
            logger.debug("skipped a malformed record under %s: %s", key, e)
            continue
        read.append((peer, record, float(entry.expiration_time)))
    return read


class StageDirectory:
    """This peer's records, and what it knows of the others'. Lives in one event loop.

    Args:
        table: the DHT.
        p2p: this peer, which learns the addresses of others.
        run_id: name of the run.
        count: the number of stages of the model.
    """

    def __init__(self, table: Table, p2p: P2P, run_id: str, count: int) -> None:
        if not 0 < count <= MAX_STAGES:
            raise ValueError(f"a model has 1 to {MAX_STAGES} stages, got {count}")
        self._table, self._p2p, self._run_id, self.count = table, p2p, run_id, count
        self._own: dict[int, StageRecord] = {}
        # By stage: what holds for its records until further notice.
        self._marks: dict[int, dict[str, Any]] = {}
        # By stage: the record that is in the DHT, and when it expires.
        self._written: dict[int, tuple[StageRecord, float]] = {}
        # By stage: the records of others, each with its expiration; and when the stage was last read.
        self._others: dict[int, Bounded[PeerID, tuple[StageRecord, float]]] = {}
        self._read_at: dict[int, float] = {}
        self._watched: set[int] = set()
        self._hurried: set[int] = set()
        self._wake = asyncio.Event()
        self._tasks = BackgroundTasks(logger, f"the directory of run {run_id!r}")
        self._warn_seldom = Seldom(logger.warning)

    def start(self) -> None:
        """Begin to renew the own records, and to read those of the watched stages."""
        self._tasks.spawn(self._keep_renewing())
        self._tasks.spawn(self._keep_reading())

    async def stop(self) -> None:
        """Withdraw the own records, and stop. If the DHT cannot be told in time, they expire."""
        await self._tasks.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WITHDRAWAL_SECONDS):
                await self.withdraw()

    # --- this peer ----------------------------------------------------------------------------------------------------

    async def declare(self, record: StageRecord) -> None:
        """Declare a stage of this peer. It may be called at any time: only news are written at once.

        The record is renewed until it is withdrawn.
        """
        if not 0 <= record.stage < self.count:
            raise ValueError(f"stage {record.stage} is none of the {self.count} stages: give one from 0")
        record = msgspec.structs.replace(record, **self._marks.get(record.stage, {}))
        self._own[record.stage] = record
        written, _ = self._written.get(record.stage, (None, 0.0))
        is_due = written is None or get_dht_time() - written.time >= RENEWAL_SECONDS
        if written is None or is_due or record.is_news_after(written):
            await self._write(record.stage)

    async def mark(self, stage: int, **values: Any) -> None:
        """Set fields of the record of a stage, in all that is declared until the next call, which unsets the others.

        So one part of a program can declare the numbers, and another one that the peer moves.
        """
        unset = {name: _DEFAULTS[name] for name in self._marks.get(stage, {}) if name != "since"}
        self._marks[stage] = values
        if stage in self._own:
            await self.declare(msgspec.structs.replace(self._own[stage], **{**unset, **values}))

    async def withdraw(self, stage: int | None = None) -> None:
        """Withdraw the record of a stage, or all of them."""
        stages = [*self._own] if stage is None else [stage]
        for each in stages:
            self._own.pop(each, None)
            self._marks.pop(each, None)
        written = [(each, self._written.pop(each)[1]) for each in stages if each in self._written]
        # The DHT keeps the entry that expires last.
        await asyncio.gather(*[self._store(each, None, math.nextafter(until, math.inf)) for each, until in written])

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_SECONDS / 2)
            for stage in [*self._own]:
                if stage in self._written and get_dht_time() - self._written[stage][0].time >= RENEWAL_SECONDS:
                    await self._write(stage)

    async def _write(self, stage: int) -> None:
        now = get_dht_time()
        until = max(now + LIFETIME, math.nextafter(self._written.get(stage, (None, 0.0))[1], math.inf))
        addresses = [str(address) for address in self._p2p.get_addresses(self._p2p.peer_id)][:MAX_ADDRESSES]
        more: dict[str, Any] = {"count": self.count, "time": now, "addresses": addresses, "name": self._p2p.name}
        self._own[stage] = record = msgspec.structs.replace(self._own[stage], **more)
        self._written[stage] = record, until
        await self._store(stage, msgspec.to_builtins(record), until)

    async def _store(self, stage: int, value: object, until: float) -> None:
        key, tag = key_of_stage(self._run_id, stage), tag_of(self._p2p.peer_id)
        try:
            if not await self._table.store(key, value, until, subkey=tag):
                logger.debug("the record of stage %d was not accepted by the DHT", stage)
        except ShoalError as e:
            self._warn_seldom("could not declare stage %d in the DHT: %s", stage, e)

    # --- others -------------------------------------------------------------------------------------------------------

    def watch(self, stages: Iterable[int]) -> None:
        """From now on, keep these stages fresh and no others: those to which this peer sends."""
        self._watched = set(stages)
        self._wake.set()

    def hasten(self, stage: int) -> None:
        """A peer that was chosen has failed, or there was none to choose: read this stage soon."""
        self._hurried.add(stage)
        self._wake.set()

    def peers_of(self, stage: int) -> dict[PeerID, StageRecord]:
        """The peers of a stage as far as known, this one included, with the latest record of each."""
        now = get_dht_time()
        found = {peer: record for peer, (record, until) in self._others.get(stage, {}).items() if until > now}
        return found | ({self._p2p.peer_id: self._own[stage]} if stage in self._own else {})

    async def read_all(self) -> dict[int, dict[PeerID, StageRecord]]:
        """Read all stages now, such as before a decision about who moves; returns the peers of each."""
        await asyncio.gather(*[self.read(stage) for stage in range(self.count)])
        return {stage: self.peers_of(stage) for stage in range(self.count)}

    async def read(self, stage: int) -> None:
        """Read the records of a stage now."""
        self._read_at[stage] = asyncio.get_running_loop().time()
        self._hurried.discard(stage)
        try:
            read = await read_stage(self._table, self._run_id, stage)
        except ShoalError as e:
            self._warn_seldom("cannot read which peers hold stage %d: %s", stage, e)
            return
        known = self._others.setdefault(stage, Bounded(MOST_REMEMBERED))
        for peer, record, until in read:
            if peer == self._p2p.peer_id:
                continue
            if record is None:
                if known.get(peer, (None, math.inf))[1] < until:
                    del known[peer]
            elif record.count != self.count:
                self._warn_seldom(
                    "peer %s cuts the model of run %r into %d stages, this one into %d: give both the same stages",
                    peer, self._run_id, record.count, self.count, about=peer,
                )  # fmt: skip
            elif known.get(peer, (None, -math.inf))[1] < until:
                known[peer] = record, until
                for address in record.addresses:
                    with contextlib.suppress(ValueError):  # perhaps of a kind that this version does not know
                        self._p2p.add_addresses(peer, [address])

    def _due(self) -> Iterator[tuple[float, int]]:
        """When each stage that is wanted is to be read next."""
        for stage in self._watched | self._hurried:
            cost = BYTES_OF_RECORD * len(self._others.get(stage, ())) / BYTES_PER_SECOND
            pause = LEAST_READING_SECONDS if stage in self._hurried else max(READING_SECONDS, cost)
            yield self._read_at.get(stage, -math.inf) + pause, stage

    async def _keep_reading(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            self._wake.clear()
            due, stage = min(self._due(), default=(math.inf, -1))
            if due > now():
                await wait_at_most(self._wake, min(due - now(), READING_SECONDS))
            else:
                await self.read(stage)
