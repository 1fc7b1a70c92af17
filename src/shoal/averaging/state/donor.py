"""How a donor gives its state: it declares itself in the DHT, and has upload slots for a few newcomers at a time.

A newcomer that has hardly taken anything for a while may lose its slot to another one. It has if it is slower than the
slowest line in use, or than a quarter of the speed that its line reaches while bytes are being sent. A newcomer that
has asked for half of the state keeps its slot.

A peer has one slot; a new call of the same peer takes over the slot of its last call. If no slot is left, a newcomer
from a host without slots gets one from a host that has several.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterator
from typing import Any

from shoal.averaging.arguments import AveragerConfig
from shoal.averaging.groups.settings import Trust, contradiction_of
from shoal.averaging.messages import ChunkRequest, DonorBusy, DownloadRequest, StateChunk, StateHeader, StateRefused
from shoal.averaging.state.download import GetState, OwnedState, Snapshot
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.base.tasks import cancel_and_wait, first_completed, wait_at_most
from shoal.compression import NoCompression
from shoal.dht.crypto import tag_of
from shoal.dht.key_sharding import key_at, places_to_write
from shoal.dht.validation import SHORT_LIFETIME_SECONDS
from shoal.errors import NoAccessTokenError, ProtocolError
from shoal.p2p import P2P, Call, PeerID

logger = logging.getLogger(__name__)

# Declarations live for this many periods (chosen), so that a slow renewal leaves no gap.
DECLARATION_LIFETIME = 1.5
# The most seconds that a leaving donor waits for the nodes that keep its declaration (chosen): they may be frozen.
WITHDRAWAL_SECONDS = 0.5
# The least seconds of silence before a newcomer is given up. Derived: a window of 64 MiB takes a minute at 10 Mbit/s.
SILENCE_SECONDS = 60.0
# The most unsent bytes of a chunk on a slow line (chosen).
BACKLOG_BYTES = 2**16
# The most different parts of the state that are sent at a time (chosen).
MAX_PARTS = 32
# The most newcomers that a donor serves at a time (chosen).
MAX_DOWNLOADS = 8
# The most copies of its state that a donor keeps for them (chosen: each takes as much memory as the state).
MAX_SNAPSHOTS = 2
# Newcomers share a copy up to this age in seconds (chosen): a crowd that comes at once costs one copy.
SNAPSHOT_AGE = 0.5
# A newcomer that takes fewer bytes per second than an ISDN line (128 kbit/s) may lose its slot, measured over this many
# seconds (chosen).
SLOWEST = 16e3
SECONDS_TO_JUDGE = 30.0
# A newcomer that takes 20 MB/s in its first second is not watched (chosen): it is done soon.
_FAST, _SECONDS_TO_BE_FAST = 2e7, 1.0
# A newcomer should take at least this part of the speed that its line reaches (chosen).
_PART_OF_SHARE = 0.25
# A newcomer that has got the state announces within this many seconds that it takes part (chosen).
_ARRIVAL_SECONDS = 10.0


class StateSharing:
    """Offers this averager's state to others.

    Args:
        p2p: this peer.
        table: the distributed table.
        key: DHT key under which donors declare themselves.
        config: the options of the averager.
        get_state: returns the state to send; called in a worker thread.
        get_part: returns a part of the state by its name, or ``None`` to refuse it; called in a worker thread, too.
        trust: tells how many bits the keys of donors have.
    """

    def __init__(
        self,
        p2p: P2P,
        table: Any,
        key: str,
        config: AveragerConfig,
        get_state: GetState,
        get_part: Callable[[bytes], OwnedState | None],
        trust: Trust,
    ) -> None:
        self._p2p, self._table, self.key, self._config, self.trust = p2p, table, key, config, trust
        self.get_state, self._get_part = get_state, get_part
        self.allowed = False
        self.priority = 0.0
        # Others ignore declarations that live longer than SHORT_LIFETIME_SECONDS.
        self._period = min(config.declare_state_period, SHORT_LIFETIME_SECONDS / DECLARATION_LIFETIME)
        self._changed = asyncio.Event()
        self._is_declared = False
        take = functools.partial(Snapshot.take, lambda: self.get_state(), config.state_compression)
        self.slots = UploadSlots(take, self._host_of)
        """The newcomers that download from this peer."""
        # By name of a part that is being downloaded: the slots of its newcomers.
        self._slots_of_parts: dict[bytes, UploadSlots] = {}
        self._warn_seldom = Seldom(logger.warning)

    def set(self, *, allowed: bool | None = None, priority: float | None = None) -> None:
        """Change the offer; others see it as soon as the DHT has it."""
        self.allowed = self.allowed if allowed is None else allowed
        self.priority = self.priority if priority is None else priority
        self._changed.set()

    # --- declaring ----------------------------------------------------------------------------------------------------

    async def declare_forever(self) -> None:
        """Keep the declaration alive; runs until cancelled."""
        while True:
            self._changed.clear()
            allowed = self.allowed and self._p2p.is_callable
            if allowed or self._is_declared:
                try:
                    await self.declare(allowed)
                except NoAccessTokenError as e:
                    logger.debug("could not declare that this peer shares its state: %s", e)
            await wait_at_most(self._changed, self._period)

    async def declare(self, allowed: bool) -> None:
        """Declare in the table that this peer shares its state, or no longer does."""
        addresses = [str(address) for address in self._p2p.get_addresses(self._p2p.peer_id)]
        value = [self.priority, addresses] if allowed else None
        expiration = get_dht_time() + DECLARATION_LIFETIME * self._period
        self._is_declared, tag = allowed, tag_of(self._p2p.peer_id)
        places = places_to_write(self._p2p.peer_id.to_bytes(), self.trust.depth())
        keys = [key_at(self.key, place) for place in places]
        await asyncio.gather(*[self._table.store(key, value, expiration, subkey=tag) for key in keys])

    async def withdraw(self) -> None:
        """Withdraw the declaration. Peers that still ask are refused, and the declaration expires anyway."""
        if not self._is_declared:
            return
        try:
            async with asyncio.timeout(WITHDRAWAL_SECONDS):
                await self.declare(allowed=False)
        except TimeoutError:
            logger.debug("some nodes could not be told that this peer no longer shares its state")

    # --- serving ------------------------------------------------------------------------------------------------------

    async def serve(self, call: Call, request: DownloadRequest) -> None:
        """Send the state to a peer that asks for it, or refuse it.

        Raises:
            ProtocolError, P2PDaemonError, TimeoutError: the newcomer failed.
        """
        if contradiction := contradiction_of(self._config.agreement, request.agreement):
            seen_here = contradiction_of(request.agreement, self._config.agreement)
            self._warn_seldom("newcomer %s does not get the state: %s", call.remote, seen_here, about=call.remote)
            await call.send(StateRefused(contradiction), end=True)
            return
        now, part = asyncio.get_running_loop().time, request.part
        slots = self._slots_of(part) if self.allowed else None
        if slots is None:
            await call.send(StateRefused(), end=True)
            return
        slot = slots.find(call.remote, now(), trains=request.trains)
        if slot is None:
            await call.send(StateRefused() if part else self._turn_away(call.remote, now()), end=True)
            return
        sending = asyncio.ensure_future(self._send_to(call, slot))
        try:
            await first_completed(asyncio.shield(sending), slot.lost.wait())
            if sending.done():
                sending.result()
            elif slot.reason and not slot.has_all:  # otherwise it was only slow to hang up
                self._note_dropped(slot)
        finally:
            # If something was still being sent, this cuts the connection.
            await cancel_and_wait(sending)
            slots.leave(slot, now())
            if part and not slots.sharings:
                self._slots_of_parts.pop(part, None)

    def _slots_of(self, part: bytes) -> UploadSlots | None:
        """The slots for downloads of this part; ``None``: too many parts are being downloaded."""
        if not part:
            return self.slots
        if part not in self._slots_of_parts and len(self._slots_of_parts) >= MAX_PARTS:
            return None
        # This peer got its parts from others. A lossy codec would make peers differ.
        take = functools.partial(Snapshot.take, functools.partial(self._get_part, part), NoCompression())
        return self._slots_of_parts.setdefault(part, UploadSlots(take, self._host_of))

    def _host_of(self, peer: PeerID) -> Hashable:
        """The host of a newcomer, by the addresses from which it connected, not those that it announces."""
        return self._p2p.host_seen_of(peer)

    @property
    def is_busy(self) -> bool:
        """Whether a newcomer is downloading the state in order to train."""
        return any(slot.trains for slot in self.slots)

    def _note_dropped(self, slot: UploadSlot) -> None:
        self._p2p.metrics.newcomers_dropped += 1
        self._warn_seldom(
            "the slot of newcomer %s was given to another one: %s, and it has not got half of the state",
            slot.peer,
            slot.reason,
        )

    def _turn_away(self, peer: PeerID, now: float) -> DonorBusy:
        self._p2p.metrics.newcomers_turned_away += 1
        again_in = self.slots.again_in(now)
        self._warn_seldom(
            "too many newcomers download the state: newcomer %s is told to ask again in %.0f s", peer, again_in
        )
        return DonorBusy(again_in)

    async def _send_to(self, call: Call, slot: UploadSlot) -> None:
        snapshot = await asyncio.shield(slot.sharing.snapshot)
        if snapshot is None:
            await call.send(StateRefused(), end=True)
            return
        slot.begin(snapshot.chunks.count, asyncio.get_running_loop().time())
        try:
            await self.send_chunks(call, snapshot, slot)
        finally:
            call.connection.stream.limit_backlog(None)

    async def send_chunks(self, call: Call, snapshot: Snapshot, slot: UploadSlot) -> None:
        """Describe a state to a newcomer, then send each chunk that it asks for."""
        header = StateHeader(metadata=snapshot.metadata, tensors=snapshot.tensors, tensor_bytes=snapshot.tensor_bytes)
        now = asyncio.get_running_loop().time
        await call.send(header, snapshot.hashes)
        while True:
            async with asyncio.timeout(max(self._config.chunk_timeout, SILENCE_SECONDS)):
                request = await call.receive(ChunkRequest)
            if request is None:
                return
            if not 0 <= request.index < snapshot.chunks.count:
                raise ProtocolError(f"asked for chunk {request.index} of {snapshot.chunks.count}")
            if not slot.note_request(request.index):
                raise ProtocolError(f"asked for chunk {request.index} again")
            if slot.is_slow(now()):
                # Count bytes as sent only when the line has taken them. This costs time, so fast lines are exempt.
                call.connection.stream.limit_backlog(BACKLOG_BYTES)
            began_at, chunk = now(), snapshot.chunk(request.index)
            await call.send(StateChunk(index=request.index), *chunk)
            slot.note_sent(sum(map(len, chunk)), now() - began_at, now())


class Sharing:
    """A snapshot that some newcomers are downloading."""

    def __init__(self, taken_at: float, snapshot: asyncio.Future[Snapshot | None]) -> None:
        self.taken_at, self.snapshot = taken_at, snapshot
        self.slots: list[UploadSlot] = []


class UploadSlot:
    """One newcomer's download.

    Args:
        trains: whether it will train with the state; an archive only keeps it.
    """

    def __init__(self, peer: PeerID, sharing: Sharing, *, trains: bool = True) -> None:
        self.peer, self.sharing, self.trains = peer, sharing, trains
        self.lost = asyncio.Event()
        """Set when the slot was given to another newcomer."""
        self.reason = ""
        """Why the slot was lost, for the owner of the donor; empty: the newcomer has called again itself."""
        # When the newcomer could first ask for chunks; None while the snapshot is still being made.
        self._began_at: float | None = None
        self._chunks = 0
        self._given: set[int] = set()
        self._is_watched = False
        # One entry for each of the last seconds: its time, the bytes sent, and the seconds that sending took.
        self._sent: deque[tuple[float, int, float]] = deque()

    def begin(self, chunks: int, now: float) -> None:
        """Note that the newcomer can now ask for chunks, and how many there are."""
        self._chunks, self._began_at = chunks, now

    def note_request(self, chunk: int) -> bool:
        """Note a request for a chunk; returns whether it is the first one for this chunk."""
        is_new = chunk not in self._given
        self._given.add(chunk)
        return is_new

    def note_sent(self, nbytes: int, seconds: float, now: float) -> None:
        """Note that bytes were sent, and the seconds until the line had taken them."""
        since, before, took = self._sent[-1] if self._sent else (-1.0, 0, 0.0)
        if now - since < 1:
            self._sent[-1] = since, before + nbytes, took + seconds
            return
        self._sent.append((now, nbytes, seconds))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._sent and self._sent[0][0] < now - SECONDS_TO_JUDGE:
            self._sent.popleft()

    @property
    def has_all(self) -> bool:
        """Whether the newcomer has asked for all chunks."""
        return self._began_at is not None and len(self._given) >= self._chunks

    @property
    def has_half(self) -> bool:
        """Whether the newcomer has asked for half of the state."""
        return 2 * len(self._given) >= self._chunks

    def rate(self, now: float) -> float:
        """Bytes per second, over the last ``SECONDS_TO_JUDGE``."""
        if self._began_at is None:
            return 0.0
        self._forget(now)
        return sum(nbytes for _, nbytes, _ in self._sent) / max(min(SECONDS_TO_JUDGE, now - self._began_at), 1e-9)

    def is_slow(self, now: float) -> bool:
        """Whether the newcomer has just turned out to be slow; ``True`` only once.

        It may be judged from then on, so its bytes have to be counted exactly.
        """
        if self._is_watched or self._began_at is None or now - self._began_at < _SECONDS_TO_BE_FAST:
            return False
        self._is_watched = self.rate(now) < _FAST
        return self._is_watched

    def is_idle(self, now: float) -> bool:
        """Whether the newcomer has hardly taken anything for a while, and has asked for less than half of the state."""
        if self._began_at is None or now - self._began_at < SECONDS_TO_JUDGE or self.has_half:
            return False
        rate, seconds = self.rate(now), sum(seconds for _, _, seconds in self._sent)
        # The speed while something was being sent, which is the newcomer's share of the line.
        share = sum(nbytes for _, nbytes, _ in self._sent) / max(seconds, 1e-9)
        return rate < max(SLOWEST, _PART_OF_SHARE * share)

    def seconds_left(self, now: float) -> float:
        """The seconds after which this slot may be free."""
        if self._began_at is None:
            return 0.0
        left, since = self._chunks - len(self._given), now - self._began_at
        # By then the newcomer is either done, or old enough to be judged and to lose its slot.
        return min(left * since / max(1, len(self._given)), max(0.0, SECONDS_TO_JUDGE - since) or SECONDS_TO_JUDGE)


class UploadSlots:
    """The slots of all newcomers at a donor.

    Args:
        take: makes a snapshot.
        host_of: the host of a peer.
    """

    def __init__(
        self,
        take: Callable[[], Coroutine[Any, Any, Snapshot | None]],
        host_of: Callable[[PeerID], Hashable] = lambda peer: peer,
    ) -> None:
        self._take, self._host_of = take, host_of
        self.sharings: list[Sharing] = []
        # Newcomers that have downloaded a whole snapshot, and when.
        self._arriving: deque[tuple[PeerID, float]] = deque(maxlen=MAX_DOWNLOADS)

    def __iter__(self) -> Iterator[UploadSlot]:
        return (slot for sharing in self.sharings for slot in sharing.slots)

    def find(self, peer: PeerID, now: float, *, trains: bool = True) -> UploadSlot | None:
        """A slot for one more newcomer; ``None`` if there are too many already."""
        for slot in [slot for slot in self if slot.peer == peer and not slot.has_all]:
            self._take_away(slot, now)
        if not self._has_snapshot(peer, now):
            return None
        if sum(not slot.has_all for slot in self) >= MAX_DOWNLOADS:
            taken = list(self)
            reasons = {slot: self._reason_to_give_way(slot, peer, now, taken) for slot in taken}
            slots = [slot for slot, reason in reasons.items() if reason]
            if not slots:
                return None
            chosen = min(slots, key=lambda slot: (not slot.is_idle(now), slot.rate(now)))
            self._take_away(chosen, now, reasons[chosen])
        slot = UploadSlot(peer, self._sharing(now), trains=trains)
        slot.sharing.slots.append(slot)
        return slot

    def _has_snapshot(self, peer: PeerID, now: float) -> bool:
        """Whether there is a fresh copy or room for one. A copy without active newcomers is dropped to make room."""
        if self._is_fresh(now) or len(self.sharings) < MAX_SNAPSHOTS:
            return True
        for sharing in self.sharings:
            reasons, kept = {}, list(self)
            for slot in sharing.slots:
                reasons[slot] = self._reason_to_give_way(slot, peer, now, kept)
                kept.remove(slot)  # so that a network that has all these slots keeps one, and thus this copy
            if all(reason or slot.has_all for slot, reason in reasons.items()):
                for slot, reason in reasons.items():
                    self._take_away(slot, now, reason)
                return True
        return False

    def _reason_to_give_way(self, slot: UploadSlot, peer: PeerID, now: float, slots: list[UploadSlot]) -> str:
        """Why a newcomer may get one of these slots; empty: it may not."""
        if slot.is_idle(now):
            return f"it takes {slot.rate(now) / 1e3:.1f} kB/s of the state, far less than it could"
        hosts = [self._host_of(each.peer) for each in slots]
        is_one_of_several = hosts.count(self._host_of(slot.peer)) > 1 and self._host_of(peer) not in hosts
        return "its network has several" if is_one_of_several and not slot.has_half else ""

    def _is_fresh(self, now: float) -> bool:
        return bool(self.sharings) and now - self.sharings[-1].taken_at <= SNAPSHOT_AGE

    def _sharing(self, now: float) -> Sharing:
        if not self._is_fresh(now):
            self.sharings.append(Sharing(now, asyncio.ensure_future(self._take())))
        return self.sharings[-1]

    def _take_away(self, slot: UploadSlot, now: float, reason: str = "") -> None:
        slot.reason = reason
        slot.lost.set()
        self.leave(slot, now)

    def leave(self, slot: UploadSlot, now: float) -> None:
        """Free the slot of a newcomer that is gone, and drop its snapshot if no other newcomer uses it."""
        if slot.has_all and slot.trains:  # an archive gives its state to no peer while the run is alive
            self._arriving.append((slot.peer, now))
        sharing = slot.sharing
        if slot in sharing.slots:
            sharing.slots.remove(slot)
            if not sharing.slots:
                self.sharings.remove(sharing)

    def on_their_way(self, now: float) -> set[PeerID]:
        """Newcomers that are downloading, or have just got the whole state. Callable from any thread."""
        slots = [slot for sharing in list(self.sharings) for slot in list(sharing.slots) if slot.trains]
        arriving = {peer for peer, since in list(self._arriving) if now - since <= _ARRIVAL_SECONDS}
        return arriving.union(slot.peer for slot in slots)

    def again_in(self, now: float) -> float:
        """The seconds after which a newcomer that found no slot should come again."""
        return min([SECONDS_TO_JUDGE, *(slot.seconds_left(now) for slot in self)])
