"""Reads the records that the peers of a run publish in the DHT, one key at a time, in turn.

The records of a large swarm are spread over many keys (:mod:`shoal.dht.key_sharding`). The observer starts with the
first key, which holds a sample of all peers, and follows the deeper keys that peers name::

    run_progress ─► run_progress.0 ─► run_progress.01 ─► …     and with each key the reports:  run_reports.01
                  ─► run_progress.1

If the model of the run is cut into stages, the records of stage peers are read, too (:mod:`shoal.stages.directory`).

The pause before a key is read again grows with the size of its answer, so that the peers that hold it send an observer
at most two kilobytes per second. All keys together have a limit, too, and at most :data:`MAX_KEYS` are read, whatever
depth peers claim.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.averaging.groups.keys import Table
from shoal.base.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time
from shoal.base.closeable import Facade
from shoal.base.logs import Seldom
from shoal.base.reactor import Portal
from shoal.dht.crypto import peer_of
from shoal.dht.key_sharding import MAX_DEPTH, key_at, path_of
from shoal.dht.validation import is_short_lived
from shoal.errors import ShoalError
from shoal.monitor.prober import Prober
from shoal.monitor.run import RunView
from shoal.optim.progress.exchange import MOST_READ
from shoal.optim.progress.records import HOLDERS_READ, ProgressRecord, is_endorsed, parse_record
from shoal.optim.progress.run_list import describe_runs, read_runs
from shoal.optim.report import key_of_reports, parse_report
from shoal.p2p import PeerID
from shoal.stages.directory import BYTES_OF_RECORD as BYTES_OF_STAGE_RECORD
from shoal.stages.directory import read_stage

if TYPE_CHECKING:
    from shoal.dht import DHT

logger = logging.getLogger(__name__)

# Least seconds between two readings of a key. Chosen, like all numbers here.
PERIOD = 5.0
# The most bytes to read per second, of one key and of all keys. For comparison: an uplink of 3 Mbit/s sends 375 kB/s.
BYTES_PER_SECOND, BYTES_PER_SECOND_IN_ALL = 2_000.0, 200_000.0
# The size of a typical record with its signature.
BYTES_OF_RECORD = 600.0
# Bounds on what liars can make the observer read and remember.
MAX_KEYS, MAX_PEERS_REMEMBERED = 1024, 50_000
# While no stage is known, one of these is looked for at a time: the first stage may have no peer.
STAGES_TRIED, SECONDS_BETWEEN_TRIES = 4, 15.0
TICK_SECONDS = 1.0
# Seconds without a peer after which the user is told which runs exist.
SECONDS_BEFORE_HELP = 20.0


@dataclass
class _Place:
    """A key: the bits that it stands for, and when to read it next."""

    bits: str
    due: float
    was_read: bool = False


class Observer:
    """Keeps a view of a run up to date.

    Args:
        table: a node of the DHT, or a stand-in.
        view: the view to fill.
    """

    def __init__(self, table: Table, view: RunView) -> None:
        self.view, self._table = view, table
        self._progress, self._reports = f"{view.run}_progress", key_of_reports(view.run)
        self._places = {"": _Place("", 0.0)}
        # Cache of checked tags, because signatures take a while.
        self._peers_by_tag: dict[bytes, PeerID] = {}
        self._readings, self._warn_seldom = 0, Seldom(logger.warning)
        self.bytes_read = 0.0
        """Bytes read so far, estimated from the number of records."""

    async def name_other_runs(self) -> None:
        """If no peer is found after a while, list the runs that exist: the name may be mistyped."""
        await asyncio.sleep(SECONDS_BEFORE_HELP)
        if self.view.peers or self.view.stages.rows:
            return
        try:
            runs = await read_runs(self._table)
        except ShoalError as e:
            self._warn_seldom("the DHT cannot be read: %s", e)
            return
        with self.view.lock:
            if not self.view.peers:
                self.view.hear_of_runs(describe_runs(runs), get_dht_time())

    async def watch_stages(self) -> None:
        """Read the records of all stages, if there are any, until cancelled."""
        turn = 0
        while True:
            count, most, total = self.view.stages.count, 0.0, 0.0
            for stage in range(count) if count else [turn % STAGES_TRIED]:
                try:
                    read = await read_stage(self._table, self.view.run, stage)
                except ShoalError as e:
                    self._warn_seldom("the DHT cannot be read: %s", e)
                    continue
                with self.view.lock:
                    self.view.hear_stage(stage, read, get_dht_time())
                most, total = max(most, BYTES_OF_STAGE_RECORD * len(read)), total + BYTES_OF_STAGE_RECORD * len(read)
            self.bytes_read += total
            turn += 1
            least = PERIOD if self.view.stages.count else SECONDS_BETWEEN_TRIES
            await asyncio.sleep(max(least, most / BYTES_PER_SECOND, total / BYTES_PER_SECOND_IN_ALL))

    async def watch(self) -> None:
        """Read until cancelled."""
        while True:
            await asyncio.sleep(max(0.0, self.next_due - get_dht_time()))
            before = self.bytes_read
            await self.read_next()
            await asyncio.sleep((self.bytes_read - before) / BYTES_PER_SECOND_IN_ALL)

    @property
    def next_due(self) -> float:
        """DHT time of the next reading."""
        return min(place.due for place in self._places.values())

    @property
    def keys(self) -> int:
        """How many keys are read in turn."""
        return len(self._places)

    async def read_next(self) -> None:
        """Read the key that is due first: the progress of peers, and their reports."""
        place = min(self._places.values(), key=lambda place: place.due)
        records, read = await self._read_progress(place.bits)
        if any(record.depth <= len(place.bits) for record in records):
            read += await self._read_reports(place.bits)
        self.bytes_read += read * BYTES_OF_RECORD
        place.due = get_dht_time() + max(PERIOD, read * BYTES_OF_RECORD / BYTES_PER_SECOND)
        place.was_read = True
        self._go_down(place, records)
        self._readings += 1
        # Without this limit, liars could keep it looking for peers that do not exist.
        if self._readings > MAX_KEYS or all(each.was_read for each in self._places.values()):
            self.view.is_complete = True

    async def look_for(self, peer: PeerID) -> None:
        """Read the record of a peer at once: it may have been withdrawn since its key was last read."""
        paths = [path_of(tag) for tag, owner in self._peers_by_tag.items() if owner == peer]
        for path in paths:
            bits = max((bits for bits in self._places if path.startswith(bits)), key=len)
            _, read = await self._read_progress(bits)
            self.bytes_read += read * BYTES_OF_RECORD

    def _go_down(self, place: _Place, records: list[ProgressRecord]) -> None:
        below = [place.bits + bit for bit in "01"]
        if len(place.bits) < MAX_DEPTH and any(record.depth > len(place.bits) for record in records):
            for bits in below:
                if bits not in self._places and len(self._places) < MAX_KEYS:
                    self._places[bits] = _Place(bits, get_dht_time())
        elif place.bits and not records and not any(bits in self._places for bits in below):
            del self._places[place.bits]  # the key above leads to it again when a peer uses it

    async def _get(self, key: str) -> dict[Any, Any]:
        """The entries under a key; none if there are none, or it cannot be read."""
        how: dict[str, Any] = {"beam_size": HOLDERS_READ, "num_workers": 1, "most_entries": MOST_READ}
        try:
            found = await self._table.get(key, latest=True, keep_copies=False, **how)
        except ShoalError as e:
            self._warn_seldom("the DHT cannot be read: %s", e)
            return {}
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        return {tag: entry for tag, entry in entries.items() if is_short_lived(entry.expiration_time)}

    async def _read_progress(self, bits: str) -> tuple[list[ProgressRecord], int]:
        """The valid records under a key, and the number of all that were read."""
        entries, now = await self._get(key_at(self._progress, bits)), get_dht_time()
        valid: list[tuple[ProgressRecord, float]] = []
        gone: list[PeerID] = []
        for tag, entry in entries.items():
            if entry.value is None:
                if tag in self._peers_by_tag:
                    gone.append(self._peers_by_tag[tag])
                continue
            try:
                valid.append((self._check(entry.value, tag, bits, now), float(entry.expiration_time)))
            except ValueError as e:
                logger.debug("skipped a malformed record of progress: %s", e)
        with self.view.lock:
            for record, expiration in valid:
                self.view.hear_progress(record, expiration, now)
            # A restarted peer may have another tag: its former record is withdrawn, but the peer is there.
            for peer in set(gone) - {PeerID(record.peer_id) for record, _ in valid}:
                self.view.hear_goodbye(peer, now)
        return [record for record, _ in valid], len(entries)

    def _check(self, value: object, tag: object, bits: str, now: float) -> ProgressRecord:
        """Check one record.

        Raises:
            ValueError: it is malformed, has impossible numbers, or belongs to another time, key or peer.
        """
        record = parse_record(value)
        if record.time > now + MAX_DHT_TIME_DISCREPANCY_SECONDS:
            raise ValueError("a record from the future")
        if not isinstance(tag, bytes) or not path_of(tag).startswith(bits):
            raise ValueError("a record under a key where it does not belong")
        peer = PeerID(record.peer_id)
        if self._peers_by_tag.get(tag) != peer:
            if not is_endorsed(record, tag):
                raise ValueError("a record in the name of another peer")
            if len(self._peers_by_tag) >= MAX_PEERS_REMEMBERED:
                self._peers_by_tag.clear()
            self._peers_by_tag[tag] = peer
        return record

    async def _read_reports(self, bits: str) -> int:
        """Read the reports under a key; returns how many there were."""
        entries, now = await self._get(key_at(self._reports, bits)), get_dht_time()
        with self.view.lock:
            for tag, entry in entries.items():
                try:
                    self.view.hear_report(peer_of(tag), parse_report(entry.value), now)
                except ValueError as e:
                    logger.debug("skipped a malformed report: %s", e)
        return len(entries)


class Monitor(Facade):
    """Watches a run in the background until it is shut down.

    Args:
        dht: this process's DHT; one in client mode is enough.
        run_id: name of the run.
        goal_epochs: the epoch at which the run is to end; 0 if unknown.
    """

    def __init__(
        self,
        dht: DHT,
        run_id: str,
        *,
        goal_epochs: int = 0,
    ) -> None:
        self.dht, self.view = dht, RunView(run_id, goal_epochs=goal_epochs)
        self._portal = Portal(f"monitor of {run_id}")
        observer = Observer(dht.node, self.view)
        self._watching = self._portal.submit(self._watch(observer, Prober(dht.node, self.view, observer.look_for)))

    async def _watch(self, observer: Observer, prober: Prober) -> None:
        async def tick() -> None:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                with self.view.lock:
                    self.view.tick(get_dht_time())

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(observer.watch())
            tasks.create_task(observer.watch_stages())
            tasks.create_task(prober.watch())
            tasks.create_task(observer.name_other_runs())
            tasks.create_task(tick())

    def is_alive(self) -> bool:
        """Whether it is watching."""
        return not self._portal.closed and not self._watching.done()

    def check(self) -> None:
        """Raise the error that ended it, if there was one."""
        if self._watching.done() and not self._watching.cancelled():
            self._watching.result()

    def shutdown(self) -> None:
        """Stop watching. Idempotent; the DHT keeps running."""
        self._portal.close(None)
