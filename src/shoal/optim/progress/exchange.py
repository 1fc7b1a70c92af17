"""How peers learn of each other's progress: through records in the DHT, and by direct calls.

Each peer keeps a record in the DHT; peers find each other by these records. One reading transfers the records of all
peers, so readings are rare. A peer calls the peers that it knows directly: every few seconds, more often near the end
of the epoch, and at once with news that others wait for. It sends such news when it begins to take part, when others
estimate its progress wrongly, when it declares the epoch over, has reached the next one, or leaves. A call takes a few
dozen bytes. A failed call shows that a peer is gone, long before its record expires.

A peer also calls peers that it has met recently but that have no record. So hiding records cannot separate peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec

from shoal.averaging.groups.keys import Table
from shoal.base.backoff import Backoffs, TokenBuckets
from shoal.base.bounded import Bounded
from shoal.base.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time
from shoal.base.logs import Seldom
from shoal.base.tasks import cancel_and_wait, wait_at_most
from shoal.dht.key_sharding import TOO_MANY, KeySharding, key_at
from shoal.dht.validation import is_short_lived
from shoal.errors import BusyError, P2PDaemonError, P2PHandlerError, RefusedDialError, ShoalError, set_the_clock
from shoal.net.transport import Count, Moment
from shoal.optim.history.journal import MAX_LINEAGE_BYTES, Lineage
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.records import (
    HOLDERS_READ,
    MAX_ADDRESSES,
    MAX_CALLED,
    LocalTrainingProgress,
    ProgressRecord,
    Speed,
    is_endorsed,
    parse_record,
)
from shoal.optim.progress.run_list import RunList
from shoal.optim.progress.run_settings import DIGEST_BYTES, RunSettings
from shoal.p2p import P2P, Header, P2PContext, PeerID, ServicerBase

logger = logging.getLogger(__name__)

# The most records of one key that are read. Chosen: enough to know that the key must be divided. Its holders could not
# send all of them.
MOST_READ = 3 * TOO_MANY // 2
# Token bucket: this peer sends its settings to this many peers at once, and to as many again in this many seconds.
# Chosen: settings may take several hundred kilobytes.
SETTINGS_AT_ONCE, SETTINGS_SECONDS = 16, 10.0
# A peer that does not answer a direct call within this many seconds does not count as present. Chosen: tolerates slow
# machines.
CALL_TIMEOUT = 10.0
# The timeout of a second call to a peer that did not answer the first one, but has called itself meanwhile. Chosen.
SECOND_CALL_TIMEOUT = 5.0
# The most seconds that a newcomer waits for its calls to all others. Chosen: dead peers must not delay it.
INTRODUCTION_TIMEOUT = 3.0
# Attempts of a call, and the seconds between them. Chosen: a single refusal may be chance, but a killed process refuses
# every time.
DIAL_ATTEMPTS = 2
DIAL_PAUSE = 0.2
# The most peers of a large swarm that are called in a refresh. Chosen: bounds the traffic.
MAX_ASKED = 16
# How many of the DHT nodes that hold the records a newcomer asks. Chosen: more than usual, so that it misses no peer.
HOLDERS_READ_AT_START = 5
# Seconds that a goodbye may take. Chosen: the user waits for it. If it is lost, the record expires.
GOODBYE_TIMEOUT = 1.0
# In large swarms, the least seconds between two calls of the watchers. Chosen: they look at all peers.
SECONDS_BETWEEN_CHANGES = 0.5
# Peers without a record are called until this many seconds after they were last heard, and this many are remembered.
# Chosen: a record may be hidden, or may have expired in a long outage.
MEMORY_SECONDS, MAX_RECENT_PEERS = 600.0, 1024
# How many of these are called at a time, and the seconds until each is called again. Chosen: they may be dead.
LOST_AT_ONCE, SECONDS_BETWEEN_CALLS = 8, 10.0
# The least seconds between two records of this peer in the DHT. Chosen: calls bring news sooner.
NEWS_PERIOD = 10.0
# A reading is repeated soon if it led to other keys, or brought GROWTH times as many records as the one before; at most
# this many times in a row. Chosen: without a limit, made-up records could cause endless readings.
MAX_MOVES, GROWTH = 8, 5 / 4


class ProgressMessage(Header, array_like=True):
    """A peer's progress, sent in a call. It is an array without names, because every peer sends it to every other."""

    epoch: Count
    samples_accumulated: Count
    samples_per_second: Speed
    time: Moment
    client_mode: bool
    taking_part: bool = True
    """False while the sender has no samples, so that its numbers do not count."""
    ends_in: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)] | None = None
    """The sender has declared its epoch over and begins no more batches. By its estimate the others may continue for
    this many seconds; ``None`` if it still trains."""
    leaving: bool = False
    rounds: Annotated[bytes, msgspec.Meta(max_length=MAX_LINEAGE_BYTES)] | None = None
    """The rounds behind the sender's parameters; ``None`` to members of its last round, which know them."""
    is_donor: bool = False
    """The sender only has a state for others, and joins no round."""
    settings: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] | None = None
    """A hash of the sender's settings, if it does not know those of the receiver; see
    :mod:`~shoal.optim.progress.run_settings`."""
    in_advance: bool = False
    """The sender waits elsewhere, and has contributed in advance to the round of gradients that ends its epoch. It does
    not end the epoch before it is back."""

    @classmethod
    def of(cls, progress: LocalTrainingProgress, **more: Any) -> ProgressMessage:
        """A message with this progress, and with the remaining fields from ``more``."""
        return cls(
            progress.epoch,
            progress.samples_accumulated,
            progress.samples_per_second,
            progress.time,
            progress.client_mode,
            is_donor=progress.is_donor,
            **more,
        )

    def progress_of(self, peer: PeerID) -> LocalTrainingProgress:
        """The progress of the sender, whom the connection names: nobody can speak for another peer."""
        return LocalTrainingProgress(
            peer.to_bytes(),
            self.epoch,
            self.samples_accumulated,
            self.samples_per_second,
            self.time,
            self.client_mode,
            self.is_donor,
        )


FROM_THE_FUTURE = "progress from the future"
"""The reason for a refusal; the sender looks for it in the answer."""
CLOCK_IS_AHEAD = "peer %s does not count this one, whose clock is ahead of its own. Turn on NTP here (%s), or there"
"""The message to the sender's user, with the peer and how to set the clock."""


def check_time(progress: LocalTrainingProgress, now: float) -> None:
    """Refuse a record from the future: no honest record could replace it.

    Raises:
        ValueError: it is from the future, by more than clocks may differ.
    """
    if progress.time > now + MAX_DHT_TIME_DISCREPANCY_SECONDS:
        raise ValueError(f"{FROM_THE_FUTURE}, by {progress.time - now:.1f} s")


class ProgressExchange(ServicerBase):
    """Keeps a :class:`ProgressBoard` and the swarm in agreement. Lives in one event loop.

    Args:
        node: the DHT.
        p2p: connections of this peer.
        prefix: name of the training run.
        board: this peer's knowledge of all peers, which is kept up to date.
        owner_tag: the subkey under which this peer writes.
        endorsement: this peer's signature of the subkey, see :mod:`shoal.optim.progress.schema`.
        min_period: least time between two records that this peer puts into the DHT, in seconds; see also
            :data:`NEWS_PERIOD`.
        metadata_expiration: seconds for which a record is valid.
    """

    def __init__(
        self,
        node: Table,
        p2p: P2P,
        prefix: str,
        board: ProgressBoard,
        *,
        owner_tag: bytes,
        endorsement: bytes,
        min_period: float,
        metadata_expiration: float,
    ) -> None:
        self._node, self._p2p, self._board = node, p2p, board
        self._owner_tag, self._endorsement = owner_tag, endorsement
        self._peers_by_tag: dict[Any, bytes] = {}
        self.key, self._run = f"{prefix}_progress", f"run {prefix!r}"
        self.spread = KeySharding(owner_tag)
        """The key of this peer's record: in a large swarm the records are sharded over several keys."""
        self._written_until: dict[str, float] = {}  # when this peer's record under each key expires
        self._moves = 0  # how many readings in a row were repeated soon
        self._min_period, self._metadata_expiration = min_period, metadata_expiration
        self.report_due, self.call_due = asyncio.Event(), asyncio.Event()
        """Set inside the loop: the first if there is news to publish, the second if others must be called."""
        self.introduced = asyncio.Event()
        """Set when all peers that can be called know that this one takes part."""
        self.on_fetch: Callable[[], object] | None = None
        """Called after each refresh of the others' progress during which this peer stayed at one epoch."""
        self._written: LocalTrainingProgress | None = None
        # The record above is in the DHT; this one is what the peers that can be called were told last.
        self._told = board.own
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: dict[PeerID, asyncio.Task[None]] = {}
        self._heard_at: Bounded[PeerID, float] = Bounded(4096)  # when calls in either direction last brought news
        self._call_again: set[PeerID] = set()
        self.runs: RunList | None = None
        """This peer's part in the list of runs; ``None``: this run is not listed."""
        self._answers = TokenBuckets(SETTINGS_AT_ONCE / SETTINGS_SECONDS, SETTINGS_AT_ONCE, most=1)
        self.recent_peers: Bounded[PeerID, None] = Bounded(MAX_RECENT_PEERS, seconds=MEMORY_SECONDS, now=get_dht_time)
        """Peers that can be called and were heard recently. They are called even without a record."""
        self._lost = Backoffs(SECONDS_BETWEEN_CALLS, SECONDS_BETWEEN_CALLS, get_dht_time)
        self._telling: asyncio.TimerHandle | None = None
        self._warn_once = Seldom(logger.warning, math.inf)

    @classmethod
    def handle_name(cls, method: str, namespace: str | None) -> str:
        """The name of the method on the wire. It is short, because it is a large part of a call."""
        return str(namespace) if method == "rpc_exchange_progress" else f"{namespace}.{method.removeprefix('rpc_')}"

    async def start(self) -> None:
        await self.add_p2p_handlers(self._p2p, namespace=self.key)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(work()) for work in (self._keep_publishing, self._keep_fetching, self._keep_calling)
        ]
        for task in self._tasks:
            task.add_done_callback(_tell_failure)

    def _tell_change(self) -> None:
        """Call the watchers. They look at all peers, so in a large swarm they are not called at every message."""
        if self._board.own.client_mode or not self._board.relies_on_records or not self._tasks:
            self._board.call_watchers()
        elif self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(SECONDS_BETWEEN_CHANGES, self._tell_all_changes)

    def _tell_all_changes(self) -> None:
        self._telling = None
        self._board.call_watchers()

    @property
    def is_alive(self) -> bool:
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    async def stop(self) -> None:
        """Say goodbye and stop. When this returns, the goodbye has been sent, or its time is up."""
        if not self._tasks:
            return
        tasks, self._tasks = [*self._tasks, *self._calls.values()], []
        # The handlers go first: the next tracker of this run may be about to register its own.
        await self.remove_p2p_handlers(self._p2p, namespace=self.key)
        await cancel_and_wait(*tasks)
        if self._board.published:
            calls = [self._call(peer, leaving=True) for peer in self._peers_to_call()]
            try:
                async with asyncio.timeout(GOODBYE_TIMEOUT):
                    await asyncio.gather(self._withdraw(), *calls, return_exceptions=True)
            except TimeoutError:
                logger.info("not everybody could be told that this peer leaves: its record will expire")
            self._board.published = False  # later messages, such as to averagers, must not look like a return

    # --- through the DHT ----------------------------------------------------------------------------------------------

    async def _keep_publishing(self) -> None:
        while True:
            await wait_at_most(self.report_due, self._metadata_expiration / 2)
            self.report_due.clear()
            now = get_dht_time()
            if self._others_are_wrong(now):
                self.call_due.set()
            if not self._is_news(now) or not self._board.wants_publishing(now):
                continue
            await self._publish()
            if not self._board.introduced:
                await self._introduce()
                if self.runs is not None:
                    self._tasks.append(asyncio.get_running_loop().create_task(self.runs.keep()))
                    self._tasks[-1].add_done_callback(_tell_failure)
            await asyncio.sleep(self._min_period)

    def _is_news(self, now: float) -> bool:
        """Whether the DHT needs a newer record of this peer."""
        written = self._written
        if written is None:
            return True
        age = now - written.time
        if age >= self._metadata_expiration / 2:
            return True
        return age >= NEWS_PERIOD and self._board.relies_on_records and self._board.is_misjudged(written)

    async def _introduce(self) -> None:
        """Find all peers that have published, and tell them that this one takes part.

        Each peer reads after it has published. So if two publish at the same time, at least one finds the other.
        """
        self._board.published = True
        await self.fetch(HOLDERS_READ_AT_START, is_moving=True)  # others may be joining at the same time
        calls = [self._call_soon(peer) for peer in self._peers_to_call()]
        if calls:
            await asyncio.wait(calls, timeout=INTRODUCTION_TIMEOUT)
        self._board.note_introduction(get_dht_time())
        self.introduced.set()

    async def _publish(self) -> None:
        own = self._written = msgspec.structs.replace(self._board.own, time=get_dht_time())
        addresses = [str(address) for address in self._p2p.get_addresses(self._p2p.peer_id)][:MAX_ADDRESSES]
        rounds = self._board.fork_tracker.lineage(get_dht_time()).pack()
        more: dict[str, Any] = {"endorsement": self._endorsement, "rounds": rounds, "depth": self.spread.depth}
        record = ProgressRecord(**own.to_dict(), addresses=addresses, name=self._p2p.name, **more)
        for place in self.spread.places_to_write():
            try:
                key, expiration = key_at(self.key, place), get_dht_time() + self._metadata_expiration
                self._written_until[key] = expiration
                if not await self._node.store(key, record.to_dict(), expiration, subkey=self._owner_tag):
                    logger.debug("the record of this peer's progress was not accepted by the DHT")
            except ShoalError as e:
                logger.warning("could not publish this peer's progress: %s", e)
        self._written_until = {key: until for key, until in self._written_until.items() if until > get_dht_time()}

    async def _withdraw(self) -> None:
        # The DHT keeps the entry that expires last: the goodbye must expire after all records of this peer.
        expiration = math.nextafter(get_dht_time() + self._metadata_expiration, math.inf)
        stores: list[Awaitable[object]] = [
            self._node.store(key, None, expiration, subkey=self._owner_tag) for key in self._written_until
        ]
        if self.runs is not None:
            stores.append(self.runs.withdraw())
        await asyncio.gather(*stores)

    async def _keep_fetching(self) -> None:
        while True:
            epoch = self._board.own.epoch
            if self._board.wants_reading(get_dht_time()):
                calls = await self.fetch(HOLDERS_READ)
                # Records may be half a minute old, and a newcomer must know the present epoch before it begins.
                if calls:
                    await asyncio.wait(calls, timeout=INTRODUCTION_TIMEOUT)
            else:
                await self._ask_others()
            if self.on_fetch is not None and epoch == self._board.own.epoch:
                self.on_fetch()
            # A random share of the pause, so that peers do not call each other at the same moment: one call is enough.
            await asyncio.sleep((self._board.next_fetch_time - get_dht_time()) * self._p2p.rng.uniform(0.75, 1.0))

    async def fetch(self, holders: int, is_moving: bool = False) -> list[asyncio.Task[None]]:
        """Read the records, and call the peers that were not known; returns these calls.

        Args:
            is_moving: read them again soon, as after a change of keys or growth of the swarm.
        """
        spread = self.spread
        found: dict[bytes, tuple[ProgressRecord, float]] = {}
        seen: dict[Any, bytes] = {}
        depth = spread.depth
        if await self.read(spread.place, holders, found, seen):
            await self.read(spread.place, holders, found, seen)
        beside = spread.place_beside(self._p2p.rng)
        if beside is not None:
            await self.read(beside, holders, found, seen)
        is_moving |= spread.depth != depth or 0 < GROWTH * len(self._peers_by_tag) < len(seen)
        self._moves = self._moves + 1 if is_moving else 0
        self._peers_by_tag = seen
        self._board.num_others = None if spread.size is None else max(0.0, spread.size - 1)
        strangers = self._board.hear_many(found.values(), get_dht_time(), 0 < self._moves <= MAX_MOVES)
        self._tell_change()
        rng = self._p2p.rng
        lost = [peer for peer in self.recent_peers if self._lost.is_due(peer) and not self._is_known(peer)]
        for peer in rng.sample(lost, min(len(lost), LOST_AT_ONCE)):
            self._lost.fail(peer)
            self._call_soon(peer)  # nobody waits for it
        return [self._call_soon(PeerID(peer)) for peer in rng.sample(strangers, min(len(strangers), MAX_CALLED))]

    async def read(
        self,
        place: str,
        holders: int,
        found: dict[bytes, tuple[ProgressRecord, float]],
        seen: dict[Any, bytes],
    ) -> bool:
        """Read the records under one key.

        Args:
            place: which key, see :mod:`shoal.dht.key_sharding`.
            holders: how many of the nodes that hold the records are asked.
            found: receives the latest record of each other peer, and when it expires.
            seen: receives the peers by their owner tags.

        Returns:
            Whether this peer's record now belongs under another key.
        """
        key = key_at(self.key, place)
        # If there are many records, ask one holder after the other: each sends only those that are new.
        workers = 1 if len(self._peers_by_tag) > MAX_ASKED else None
        try:
            how: dict[str, Any] = {"beam_size": holders, "num_workers": workers, "most_entries": MOST_READ}
            stored = await self._node.get(key, latest=True, keep_copies=False, **how)
        except ShoalError as e:
            logger.warning("could not read the swarm's progress: %s", e)
            return False
        entries = stored.value if stored is not None and isinstance(stored.value, dict) else {}
        # A record that lives longer than honest ones would outlive its peer, and nothing later could replace it.
        entries = {tag: item for tag, item in entries.items() if is_short_lived(item.expiration_time)}
        depths, now = dict[bytes, int](), get_dht_time()
        for tag, entry in entries.items():
            if entry.value is None:
                if (peer := self._peers_by_tag.get(tag)) is not None:
                    self._board.forget(peer, entry.expiration_time)
                    self.recent_peers.pop(PeerID(peer), None)
                continue
            try:
                record = parse_record(entry.value)
                check_time(record, now)
                # DHT nodes check owners under the first key, but not under the keys over which records are sharded.
                is_checked = not place or self._peers_by_tag.get(tag, seen.get(tag)) == record.peer_id
                if not is_checked and not is_endorsed(record, tag):
                    raise ValueError("a record in the name of another peer")
            except ValueError as e:
                logger.debug("skipped a malformed record under %s: %s", key, e)
                continue
            seen[tag] = record.peer_id
            depths[record.peer_id] = record.depth  # by peer, not by tag: a peer can make any number of tags
            if record.peer_id != self._board.own.peer_id:
                known = found.get(record.peer_id)
                if known is None or known[0].time < record.time:
                    for address in record.addresses:
                        with contextlib.suppress(ValueError):  # perhaps of a kind that this version does not know
                            self._p2p.add_addresses(PeerID(record.peer_id), [address])
                    found[record.peer_id] = (record, float(entry.expiration_time))
        if not self.spread.learn(place, list(depths.values())):
            return False
        # This peer is new and began with the first key, or the swarm has grown or shrunk: others look elsewhere.
        self._written = None
        self.report_due.set()
        return True

    def _is_known(self, peer: PeerID) -> bool:
        return self._board.time_of_record(peer.to_bytes()) is not None

    # --- directly -----------------------------------------------------------------------------------------------------

    async def _keep_calling(self) -> None:
        while await self.call_due.wait():
            self.call_due.clear()
            self._told = self._board.own
            for peer in self._peers_to_call() + self._unknown_mates():
                self._call_soon(peer)

    def _unknown_mates(self) -> list[PeerID]:
        """Members of this peer's latest round without a record: the DHT nodes that had their records may be dead."""
        mates = () if self._board.guard.is_large else map(PeerID, self._board.guard.latest)
        return [peer for peer in mates if peer != self._p2p.peer_id and not self._is_known(peer)]

    def _others_are_wrong(self, now: float) -> bool:
        """Whether the peers that can be called estimate this peer's progress wrongly by now."""
        board, told = self._board, self._told
        return board.introduced and board.is_misjudged(told) and now - told.time >= board.calling_period()

    async def _ask_others(self) -> None:
        """Call others to learn how far they are, which of them are gone, and which are back."""
        for record in self._board.companions_to_try_again(get_dht_time())[:MAX_ASKED]:
            self._call_soon(PeerID(record.peer_id))  # nobody waits for it
        records = self.some_of(self._board.companions_to_ask(get_dht_time()), MAX_ASKED)
        calls = [self._calls.get(peer) or self._call_soon(peer) for peer in (PeerID(each.peer_id) for each in records)]
        if calls:
            await asyncio.wait(calls, timeout=INTRODUCTION_TIMEOUT)
        self._board.plan_refresh(get_dht_time())

    async def ask_all(self, seconds: float, *, reads: bool = False) -> None:
        """Ask all others that can be called how far they are.

        Args:
            seconds: after this many, continue with the answers so far.
            reads: read their records first.
        """
        if reads:
            await self.fetch(HOLDERS_READ_AT_START)
        calls = [self._call_soon(peer) for peer in self._peers_to_call()]
        if calls:
            await asyncio.wait(calls, timeout=seconds)

    def _peers_to_call(self) -> list[PeerID]:
        records = self.some_of(self._board.companions_to_call(get_dht_time(), or_ended=False), MAX_CALLED)
        return [PeerID(record.peer_id) for record in records]

    def some_of(self, records: list[LocalTrainingProgress], most: int) -> list[LocalTrainingProgress]:
        """A sample of many peers. Half of it is from peers that were in rounds, which a crowd must not displace."""
        if len(records) <= MAX_CALLED:
            return records
        rng, is_known = self._p2p.rng, self._board.guard.has_met
        known = [record for record in records if is_known(record.peer_id)]
        chosen = {record.peer_id: record for record in rng.sample(known, min(len(known), most // 2))}
        rest = [record for record in records if record.peer_id not in chosen]
        return [*chosen.values(), *rng.sample(rest, most - len(chosen))]

    def _call_soon(self, peer: PeerID) -> asyncio.Task[None]:
        """Tell a peer the latest news. If a call to it is in flight, a second one follows."""
        if peer in self._calls:
            self._call_again.add(peer)
            return self._calls[peer]
        self._calls[peer] = task = asyncio.get_running_loop().create_task(self._call_until_told(peer))
        return task

    async def _call_until_told(self, peer: PeerID) -> None:
        try:
            await self._call(peer)
            await self._compare_settings(peer)
            while peer in self._call_again:
                self._call_again.discard(peer)
                await self._call(peer)
                await self._compare_settings(peer)
        finally:  # without awaiting anything: later news need a call of their own
            del self._calls[peer]

    async def _call(self, peer: PeerID, leaving: bool = False, timeout: float = CALL_TIMEOUT) -> None:
        """Tell a peer this one's progress, and hear its own."""
        called_at = get_dht_time()
        self._board.note_call(peer.to_bytes(), called_at)
        stub, is_refused, is_silent = self.get_stub(self._p2p, peer, namespace=self.key), False, False
        for attempt in range(DIAL_ATTEMPTS):
            try:
                reply = await stub.rpc_exchange_progress(self._message(peer, leaving), timeout=timeout)
                self._hear(peer, reply)
                return
            except P2PHandlerError as e:
                logger.debug("peer %s refused this peer's progress: %s", peer, e)
                if FROM_THE_FUTURE in str(e):
                    self._p2p.metrics.troubles["clocks that differ"] += 1
                    self._warn_once(CLOCK_IS_AHEAD, peer, set_the_clock())
                    self._p2p.compare_clocks()
                return  # the peer has answered, so it can be reached
            except P2PDaemonError as e:
                logger.debug("peer %s cannot be called: %s", peer, e)
                is_refused = isinstance(e, RefusedDialError)
                if (said_at := self._board.time_of_record(peer.to_bytes())) is not None:
                    self._p2p.note_uncalled(peer, e, company=self._run, sign_of_life=said_at)
                if attempt < DIAL_ATTEMPTS - 1:
                    await asyncio.sleep(DIAL_PAUSE)
            except (ShoalError, TimeoutError, ValueError) as e:
                logger.debug("peer %s gives no proper answer: %s: %s", peer, type(e).__name__, e)
                is_silent = isinstance(e, TimeoutError)
                break
        if is_silent and timeout == CALL_TIMEOUT and self._heard_at.get(peer, -math.inf) >= called_at:
            # The peer is alive, so this timeout does not count. Call again at once: others may be waiting for the peer.
            await self._call(peer, leaving, SECOND_CALL_TIMEOUT)
            return
        self._board.mark_unreachable(peer.to_bytes(), called_at, is_refused=is_refused)
        self._tell_change()

    def _message(self, to: PeerID, leaving: bool = False, *, is_asked: bool = False) -> ProgressMessage:
        board, now = self._board, get_dht_time()
        ends_in = board.seconds_to_end(now) if board.updating else None
        rounds = board.fork_tracker.news_for(to.to_bytes(), now)
        # A goodbye must be later than all records of this peer: older ones no longer count after it.
        own = msgspec.structs.replace(board.own, time=now) if leaving else board.own
        settings = None
        if self._board.company is not None and (is_asked or not self._board.company.knows(to.to_bytes())):
            settings = self._board.company.digest
        told = {"ends_in": ends_in, "leaving": leaving, "rounds": rounds, "settings": settings}
        told["in_advance"] = board.updating and board.contributed_in_advance
        return ProgressMessage.of(own, taking_part=board.published, **told)

    def _hear(self, peer: PeerID, message: ProgressMessage) -> None:
        """Take in what a peer says about itself.

        Raises:
            ValueError: its numbers are impossible.
        """
        now = get_dht_time()
        self._heard_at[peer] = now
        progress = message.progress_of(peer)
        try:
            check_time(progress, now)
        except ValueError:
            self._p2p.compare_clocks()  # one of the two clocks is wrong, perhaps this one
            raise
        if self._board.company is not None and message.settings is not None:
            was_first = not self._board.introduced
            self._board.company.hear_digest(progress.peer_id, message.settings, was_first=was_first)
        if message.leaving:
            self.recent_peers.pop(peer, None)
            self._p2p.book[peer].goodbye_at = progress.time
            self._board.forget(progress.peer_id, math.inf, progress.time)
            self._tell_change()
        elif message.taking_part:
            goodbye_at = self._p2p.book.find(peer).goodbye_at
            if goodbye_at is not None and goodbye_at < progress.time:  # otherwise the goodbye is newer
                self._p2p.book[peer].goodbye_at = None
            if not message.client_mode:
                self.recent_peers[peer] = None
                self._lost.succeed(peer)
            end = None if message.ends_in is None else now + message.ends_in
            lineage = None if message.rounds is None else Lineage.unpack(message.rounds)
            self._board.hear(
                progress, now + self._metadata_expiration, now, end=end, lineage=lineage, in_advance=message.in_advance
            )
            self._tell_change()

    async def rpc_exchange_progress(self, request: ProgressMessage, context: P2PContext) -> ProgressMessage:
        """Another peer tells its progress, and gets this one's in return."""
        self._hear(context.remote_id, request)
        return self._message(context.remote_id, is_asked=request.settings is not None)

    # --- settings -----------------------------------------------------------------------------------------------------

    async def _compare_settings(self, peer: PeerID) -> None:
        """If a peer has other settings, exchange them, so that both sides can tell what differs."""
        if self._board.company is None or not self._board.company.wants_settings_of(peer.to_bytes()):
            return
        stub = self.get_stub(self._p2p, peer, namespace=self.key)
        try:
            theirs = await stub.rpc_exchange_settings(self._board.company.own, timeout=CALL_TIMEOUT)
        except (ShoalError, TimeoutError) as e:  # the next call tries again
            logger.debug("peer %s has other settings, but did not send them: %s", peer, e)
            return
        self._hear_settings(peer, theirs)

    def _hear_settings(self, peer: PeerID, settings: RunSettings) -> None:
        assert self._board.company is not None
        self._board.company.hear_settings(peer.to_bytes(), settings, was_first=not self._board.introduced)
        self._board.call_watchers()

    async def rpc_exchange_settings(self, request: RunSettings, context: P2PContext) -> RunSettings:
        """Another peer tells its settings, and gets this one's in return.

        Raises:
            BusyError: too many peers have asked in the last seconds.
        """
        if self._board.company is None:
            raise ShoalError("this peer compares no settings")
        if not self._answers.take("all", asyncio.get_running_loop().time()):
            raise BusyError("too many peers ask for settings")
        self._hear_settings(context.remote_id, request)
        return self._board.company.own.shown_to(request)

    async def trains_the_same_model(self, peer: PeerID) -> bool:
        """Whether this peer may average with another one. It calls that peer first if its knowledge may be old."""
        fork_tracker, tag = self._board.fork_tracker, peer.to_bytes()
        # A mate shares this peer's last round. If it had changed sides since, it would have said so at once.
        is_known = tag in fork_tracker.mates
        if not is_known and fork_tracker.lineage(get_dht_time()).rounds and not self._board.is_client(tag):
            await asyncio.shield(self._call_soon(peer))
        verdict = self._board.verdict(get_dht_time())
        return tag not in verdict.losers and self._p2p.peer_id.to_bytes() not in verdict.losers


def _tell_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("this peer no longer follows the progress of others: make a new optimizer", exc_info=error)
