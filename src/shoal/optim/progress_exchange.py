"""How peers learn of each other's progress.

Records travel two ways. The DHT holds one for every peer, through which peers find each other. To read it brings the
records of all peers to each of them, so it is read rarely. Those that it knows a peer calls directly, which takes a
few dozen bytes: every few seconds, more often towards the end of the epoch, and at once when something happens that
they wait for: it takes part from now on, its progress is not what it was believed to be, it declares the epoch over, it
has reached the next epoch, it leaves. A call that fails says that the other one is gone, long before its record
expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec

from shoal.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time
from shoal.errors import P2PDaemonError, P2PHandlerError, ShoalError
from shoal.optim.lineage import MAX_LINEAGE_BYTES, Lineage
from shoal.optim.progress import (
    HOLDERS_READ,
    MAX_ADDRESSES,
    MAX_CALLED,
    LocalTrainingProgress,
    ProgressRecord,
    Speed,
    parse_record,
)
from shoal.p2p import P2P, Header, P2PContext, PeerID, ServicerBase
from shoal.p2p.transport import Count, Moment
from shoal.tasks import cancel_and_wait

if TYPE_CHECKING:
    from shoal.optim.progress_board import ProgressBoard

logger = logging.getLogger(__name__)

# Seconds within which another peer must answer a direct call, else it does not count as present.
CALL_TIMEOUT = 10.0
# Seconds for which a newcomer waits until everybody has heard of it.
INTRODUCTION_TIMEOUT = 3.0

DIAL_ATTEMPTS = 2
# Seconds between two attempts: one refusal may be chance, a process that was killed refuses every time.
DIAL_PAUSE = 0.2
# How many of the peers in larger swarms are called in passing.
MAX_ASKED = 16
# How many of the nodes that hold the records a newcomer asks for them: it must not miss anybody.
HOLDERS_READ_AT_START = 5

GOODBYE_TIMEOUT = 1.0
# Least seconds between two records of this peer in the DHT.
NEWS_PERIOD = 10.0


class ProgressMessage(Header, array_like=True):
    """A peer's progress, told directly. Everybody tells it everybody, so it is as short as can be."""

    epoch: Count
    samples_accumulated: Count
    samples_per_second: Speed
    time: Moment
    client_mode: bool
    taking_part: bool = True
    """False: the sender has no samples yet, its numbers say nothing about the swarm."""
    ends_in: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)] | None = None
    """The sender has declared its epoch over: it begins no more batches. The others may go on for so many seconds, by
    its estimate."""
    leaving: bool = False
    rounds: Annotated[bytes, msgspec.Meta(max_length=MAX_LINEAGE_BYTES)] | None = None
    """The rounds behind the sender's parameters. Who was with it in the last one knows them: ``None``."""

    @classmethod
    def of(cls, progress: LocalTrainingProgress, **more: Any) -> ProgressMessage:
        """Tell a progress, and whatever else there is to say."""
        return cls(
            progress.epoch,
            progress.samples_accumulated,
            progress.samples_per_second,
            progress.time,
            progress.client_mode,
            **more,
        )

    def progress_of(self, peer: PeerID) -> LocalTrainingProgress:
        """The progress of the peer that has sent this."""
        return LocalTrainingProgress(
            peer.to_bytes(),
            self.epoch,
            self.samples_accumulated,
            self.samples_per_second,
            self.time,
            self.client_mode,
        )


class Table(Protocol):
    """What is needed of a :class:`~shoal.dht.DHTNode`."""

    async def get(
        self, key: Any, latest: bool = False, *, beam_size: int | None = None, keep_copies: bool = True
    ) -> Any: ...
    async def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool: ...


class ProgressExchange(ServicerBase):
    """Keeps a :class:`ProgressBoard` and the swarm in agreement. Lives in one event loop.

    Args:
        node: the distributed table.
        p2p: this peer.
        prefix: name of the training run.
        board: what is known.
        owner_tag: the subkey under which this peer writes.
        endorsement: the peer's word for it, see :mod:`shoal.optim.progress_schema`.
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
        self._min_period, self._metadata_expiration = min_period, metadata_expiration
        self.report_due, self.call_due = asyncio.Event(), asyncio.Event()
        """Set inside the loop: there is news to publish; others must be told directly."""
        self.on_fetch: Callable[[], object] | None = None
        """Called after the others' progress has been found out while this peer stayed at one epoch."""
        self._written: LocalTrainingProgress | None = None
        # What stands in the DHT about this peer, and what those that can be called have been told.
        self._told = board.own
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: dict[PeerID, asyncio.Task[None]] = {}
        self._call_again: set[PeerID] = set()

    @classmethod
    def handle_name(cls, method: str, namespace: str | None) -> str:
        """There is one method. Its name on the wire is short, for it makes up a large part of a call."""
        return str(namespace)

    async def start(self) -> None:
        await self.add_p2p_handlers(self._p2p, namespace=self.key)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(work()) for work in (self._keep_publishing, self._keep_fetching, self._keep_calling)
        ]

    @property
    def is_alive(self) -> bool:
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    async def stop(self) -> None:
        """Say goodbye and end. The goodbye is bounded in time, and has been sent when this returns."""
        if not self._tasks:
            return
        tasks, self._tasks = [*self._tasks, *self._calls.values()], []
        # The next tracker may be on its way.
        await self.remove_p2p_handlers(self._p2p, namespace=self.key)
        await cancel_and_wait(*tasks)
        if self._board.published:
            calls = [self._call(peer, leaving=True) for peer in self._peers_to_call()]
            try:
                async with asyncio.timeout(GOODBYE_TIMEOUT):
                    await asyncio.gather(self._withdraw(), *calls, return_exceptions=True)
            except TimeoutError:
                logger.info("not everybody could be told that this peer leaves: its record will expire")

    # --- through the DHT ----------------------------------------------------------------------------------------------

    async def _keep_publishing(self) -> None:
        while True:
            await _wait_for(self.report_due, self._metadata_expiration / 2)
            self.report_due.clear()
            now = get_dht_time()
            if self._others_are_wrong(now):
                self.call_due.set()
            if not self._is_news(now) or not self._board.wants_publishing(now):
                continue
            await self._publish()
            if not self._board.introduced:
                await self._introduce()
            await _sleep(self._min_period)

    def _is_news(self, now: float) -> bool:
        """Whether somebody misses a record of this peer, or a newer one."""
        written = self._written
        if written is None:
            return True
        age = now - written.time
        if age >= self._metadata_expiration / 2:
            return True
        return age >= NEWS_PERIOD and self._board.relies_on_records and self._board.is_misjudged(written)

    async def _introduce(self) -> None:
        """Get to know everybody who has published, and make this peer known to them.

        Of two peers that publish at the same time at least one finds the other: each looks after it has published.
        """
        self._board.published = True
        await self._fetch(HOLDERS_READ_AT_START)
        calls = [self._call_soon(peer) for peer in self._peers_to_call()]
        if calls:
            await asyncio.wait(calls, timeout=INTRODUCTION_TIMEOUT)
        self._board.note_introduction(get_dht_time())

    async def _publish(self) -> None:
        own = self._written = msgspec.structs.replace(self._board.own, time=get_dht_time())
        addresses = [str(address) for address in self._p2p.get_addresses(self._p2p.peer_id)][:MAX_ADDRESSES]
        rounds = self._board.kinship.lineage(get_dht_time()).pack()
        record = ProgressRecord(**own.to_dict(), addresses=addresses, endorsement=self._endorsement, rounds=rounds)
        try:
            expiration = get_dht_time() + self._metadata_expiration
            if not await self._node.store(self.key, record.to_dict(), expiration, subkey=self._owner_tag):
                logger.debug("the record of this peer's progress was not accepted by the DHT")
        except ShoalError as e:
            logger.warning("could not publish this peer's progress: %s", e)

    async def _withdraw(self) -> None:
        expiration = math.nextafter(get_dht_time() + self._metadata_expiration, math.inf)
        await self._node.store(self.key, None, expiration, subkey=self._owner_tag)

    async def _keep_fetching(self) -> None:
        while True:
            epoch = self._board.own.epoch
            if self._board.wants_reading(get_dht_time()):
                calls = await self._fetch(HOLDERS_READ)
                # Records may be half a minute old: a newcomer must know the epoch before it begins.
                if calls:
                    await asyncio.wait(calls, timeout=INTRODUCTION_TIMEOUT)
            else:
                await self._ask_others()
            if self.on_fetch is not None and epoch == self._board.own.epoch:
                self.on_fetch()
            # not at the same moment as the others: of two peers it is enough if one calls
            await _sleep((self._board.next_fetch_time - get_dht_time()) * self._p2p.rng.uniform(0.75, 1.0))

    async def _fetch(self, holders: int) -> list[asyncio.Task[None]]:
        """Read the records, and call those that were not known: returns these calls."""
        entries: dict[Any, Any] = {}
        try:
            found = await self._node.get(self.key, latest=True, beam_size=holders, keep_copies=False)
            if found is not None and isinstance(found.value, dict):
                entries = found.value
        except ShoalError as e:
            logger.warning("could not read the swarm's progress: %s", e)
        now = get_dht_time()
        records = []
        for tag, entry in entries.items():
            if entry.value is None:
                if tag in self._peers_by_tag:
                    self._board.forget(self._peers_by_tag[tag], entry.expiration_time)
                continue
            try:
                record = parse_record(entry.value)
                _check_time(record, now)
            except ValueError as e:
                logger.debug("skipped a malformed record under %s: %s", self.key, e)
                continue
            self._peers_by_tag[tag] = record.peer_id
            if record.peer_id != self._board.own.peer_id:
                self._p2p.add_addresses(PeerID(record.peer_id), record.addresses)
                records.append((record, float(entry.expiration_time)))
        self._peers_by_tag = {tag: peer for tag, peer in self._peers_by_tag.items() if tag in entries}
        strangers = self._board.hear_many(records, now)
        called = self._p2p.rng.sample(strangers, min(len(strangers), MAX_CALLED))
        return [self._call_soon(PeerID(peer)) for peer in called]

    # --- directly -----------------------------------------------------------------------------------------------------

    async def _keep_calling(self) -> None:
        while True:
            await self.call_due.wait()
            self.call_due.clear()
            self._told = self._board.own
            for peer in self._peers_to_call():
                self._call_soon(peer)

    def _others_are_wrong(self, now: float) -> bool:
        """Whether those that can be called believe something of this peer's progress that is not so."""
        board, told = self._board, self._told
        return board.introduced and board.is_misjudged(told) and now - told.time >= board.calling_period()

    async def _ask_others(self) -> None:
        """Find out by calls how far the others are, and who is still there, or there again."""
        for record in self._board.companions_to_try_again(get_dht_time())[:MAX_ASKED]:
            self._call_soon(PeerID(record.peer_id))  # nobody waits for it
        records = self._board.companions_to_ask(get_dht_time())
        if len(records) > MAX_CALLED:
            records = self._p2p.rng.sample(records, MAX_ASKED)
        peers = [PeerID(record.peer_id) for record in records]
        calls = [self._calls.get(peer) or self._call_soon(peer) for peer in peers]
        if calls:
            await asyncio.wait(calls, timeout=INTRODUCTION_TIMEOUT)
        self._board.plan_refresh(get_dht_time())

    def _peers_to_call(self) -> list[PeerID]:
        records = self._board.companions_to_call(get_dht_time())
        if len(records) > MAX_CALLED:
            records = self._p2p.rng.sample(records, MAX_CALLED)
        return [PeerID(record.peer_id) for record in records]

    def _call_soon(self, peer: PeerID) -> asyncio.Task[None]:
        """Tell a peer the latest news; a peer that is being told older news gets a second call after that."""
        if peer in self._calls:
            self._call_again.add(peer)
            return self._calls[peer]
        task = asyncio.get_running_loop().create_task(self._call_until_told(peer))
        self._calls[peer] = task
        task.add_done_callback(lambda _: self._calls.pop(peer, None))
        return task

    async def _call_until_told(self, peer: PeerID) -> None:
        await self._call(peer)
        while peer in self._call_again:
            self._call_again.discard(peer)
            await self._call(peer)

    async def _call(self, peer: PeerID, leaving: bool = False) -> None:
        called_at = get_dht_time()
        self._board.note_call(peer.to_bytes(), called_at)
        stub = self.get_stub(self._p2p, peer, namespace=self.key)
        for attempt in range(DIAL_ATTEMPTS):
            try:
                reply = await stub.rpc_exchange_progress(self._message(peer, leaving), timeout=CALL_TIMEOUT)
                self._hear(peer, reply)
                return
            except P2PHandlerError as e:
                logger.debug("peer %s refused this peer's progress: %s", peer, e)
                return
            except P2PDaemonError as e:
                logger.debug("peer %s cannot be called: %s", peer, e)
                said_at = self._board.time_of_record(peer.to_bytes())
                if said_at is not None:
                    self._p2p.note_uncalled(peer, e, company=self._run, sign_of_life=said_at)
                if attempt < DIAL_ATTEMPTS - 1:
                    await _sleep(DIAL_PAUSE)
            except (TimeoutError, ValueError) as e:
                logger.debug("peer %s gives no proper answer: %s: %s", peer, type(e).__name__, e)
                break
        self._board.mark_unreachable(peer.to_bytes(), called_at)

    def _message(self, to: PeerID, leaving: bool = False) -> ProgressMessage:
        board, now = self._board, get_dht_time()
        ends_in = board.seconds_to_end(now) if board.updating else None
        rounds = board.kinship.news_for(to.to_bytes(), now)
        own = (
            msgspec.structs.replace(board.own, time=now) if leaving else board.own
        )  # no record is later than a goodbye
        return ProgressMessage.of(own, taking_part=board.published, ends_in=ends_in, leaving=leaving, rounds=rounds)

    def _hear(self, peer: PeerID, message: ProgressMessage) -> None:
        """Take note of what a peer says itself.

        Raises:
            ValueError: its numbers are impossible.
        """
        now = get_dht_time()
        progress = message.progress_of(peer)
        _check_time(progress, now)
        if message.leaving:
            self._board.forget(progress.peer_id, math.inf, progress.time)
        elif message.taking_part:
            end = None if message.ends_in is None else now + message.ends_in
            lineage = None if message.rounds is None else Lineage.unpack(message.rounds)
            self._board.hear(progress, now + self._metadata_expiration, now, end=end, lineage=lineage)

    async def rpc_exchange_progress(self, request: ProgressMessage, context: P2PContext) -> ProgressMessage:
        """Another peer tells its progress and is told this one's."""
        self._hear(context.remote_id, request)
        return self._message(context.remote_id)

    async def trains_the_same_model(self, peer: PeerID) -> bool:
        """Whether this peer may average with another one, which is asked if what is known of it may be old."""
        kinship, tag = self._board.kinship, peer.to_bytes()
        # If it has gone over to another side since, it has told that at once.
        is_known = tag in kinship.mates
        if not is_known and kinship.lineage(get_dht_time()).rounds and not self._board.is_client(tag):
            await asyncio.shield(self._call_soon(peer))
        verdict = self._board.verdict(get_dht_time())
        return tag not in verdict.losers and self._p2p.peer_id.to_bytes() not in verdict.losers


def _check_time(progress: LocalTrainingProgress, now: float) -> None:
    """Nothing later could replace what claims to come from the future.

    Raises:
        ValueError: this does.
    """
    if progress.time > now + MAX_DHT_TIME_DISCREPANCY_SECONDS:
        raise ValueError(f"progress from {progress.time - now:.1f} s in the future")


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _sleep(seconds: float) -> None:
    await asyncio.sleep(max(0.0, seconds))
