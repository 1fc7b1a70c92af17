"""How a newcomer gets the state of the swarm: donors declare themselves in the DHT and serve newcomers.

A newcomer finds donors here. What it does with them is in :mod:`~.multi_source`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from shoal.averaging.groups.settings import contradiction_of
from shoal.averaging.messages import (
    MAX_OTHER_DONORS,
    ChunkRequest,
    DonorBusy,
    DownloadRequest,
    PeerAddresses,
    StateAnswer,
    StateChunk,
    StateHeader,
    StateRefused,
)
from shoal.averaging.state.download import GetState, GivenState, OwnedState, Snapshot
from shoal.averaging.state.multi_source import MAX_VOTERS, DonorLeft, DonorLog, DonorMemory, Wish, download_from
from shoal.averaging.state.upload_slots import UploadSlot, UploadSlots
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom, one_line
from shoal.base.tasks import cancel_and_wait, first_completed
from shoal.compression import CompressionBase, NoCompression
from shoal.compression.base import TensorMetadata
from shoal.dht.crypto import peer_of, tag_of
from shoal.dht.key_sharding import any_place, key_at, places_to_write
from shoal.dht.validation import SHORT_LIFETIME_SECONDS, is_short_lived
from shoal.errors import NoAccessTokenError, ProtocolError
from shoal.net.addresses import MAX_ADDRESSES_PER_PEER
from shoal.p2p import P2P, Call, PeerID, StubBase

logger = logging.getLogger(__name__)

# Declarations live for this many periods, so that a slow renewal leaves no gap.
DECLARATION_LIFETIME = 1.5
# A donor that leaves waits at most so long for the nodes that keep its declaration; they may be frozen.
WITHDRAWAL_SECONDS = 0.5
# How long a newcomer may send no request, at least: a window of 64 MiB takes a minute on a line of 10 Mbit/s.
SILENCE_SECONDS = 60.0
# The most bytes of a chunk that wait here for a slow line.
BACKLOG_BYTES = 2**16
# Busy donors are asked again after a second at the earliest, and for a minute in all: then the swarm has moved on.
BUSY_PAUSE, BUSY_PATIENCE = 1.0, 60.0
# The most different parts of the state that are sent at a time.
MAX_PARTS = 32


class StateSharing:
    """Offers this averager's state to others, and downloads theirs.

    Half of its fields are options that are set once, and the hooks of the optimizer that owns the state.

    Args:
        p2p: this peer.
        node: the distributed table.
        key: DHT key under which donors declare themselves.
        get_state: returns the state to send; called in a worker thread.
        codec: compresses the tensors of the state.
        declare_period: seconds between renewals of the declaration.
        chunk_timeout: the most seconds that a donor may send no new bytes.
        max_bytes: larger states are refused before any memory is taken.
        get_stub: makes a stub of the averager protocol for a peer.
        trains: whether this peer trains with what it downloads; an archive only keeps it.
        rate: the most bytes that are taken in a second.
        agreement: settings that must be the same in a donor and a newcomer, as far as both have them.
        is_one_state: whether all donors of an epoch have the same state, if nothing is wrong with them. Those that
            average in several groups do not.
    """

    def __init__(
        self,
        p2p: P2P,
        node: Any,
        key: str,
        get_state: GetState,
        codec: CompressionBase,
        *,
        declare_period: float,
        chunk_timeout: float,
        max_bytes: int,
        get_stub: Callable[[PeerID], StubBase],
        trains: bool = True,
        rate: float = math.inf,
        agreement: Mapping[str, str] | None = None,
        is_one_state: bool = True,
    ) -> None:
        self._agreement, self._is_one_state = dict(agreement or {}), is_one_state
        self.contradictions: Mapping[PeerID, str] = {}
        """By donor that has refused in the last download because this peer differs from it: in what, in words."""
        self.left: Mapping[PeerID, DonorLeft] = {}
        """By donor whose state was not taken in the last download: why."""
        self.allowed = False
        self.priority = 0.0
        self.rank_donors: Callable[[Iterable[PeerID]], dict[PeerID, float]] | None = None
        """Ranks donors: a higher number is better, and donors that are left out are not asked. ``None``: the priority
        that donors give themselves counts."""
        self._p2p, self._node, self.key = p2p, node, key
        self.get_state, self._codec = get_state, codec
        self._chunk_timeout, self._max_bytes = chunk_timeout, max_bytes
        self._trains, self._rate = trains, rate
        # Others ignore declarations that live longer than SHORT_LIFETIME_SECONDS.
        self._declare_period = min(declare_period, SHORT_LIFETIME_SECONDS / DECLARATION_LIFETIME)
        self._get_stub = get_stub
        self._warn_seldom = Seldom(logger.warning)
        self.depth: Callable[[], int] = lambda: 0
        """The number of bits in the keys under which donors are spread, see :mod:`shoal.dht.key_sharding`. One key is
        enough for some dozens of donors."""
        self._changed = asyncio.Event()
        self._is_declared = False
        self.places = UploadSlots(
            lambda: asyncio.ensure_future(Snapshot.take(self.get_state, self._codec)), self._host_of_newcomer
        )
        """The newcomers that download from this peer."""
        self.check: Callable[[bytes, Sequence[TensorMetadata]], object] | None = None
        """Raises ``ValueError`` if this peer has no use for tensors with these descriptions. Called before a download
        with the name of a part of the state, or an empty one for all of it. ``None``: anything may be of use."""
        self.get_part: Callable[[bytes], OwnedState | None] | None = None
        """Returns a part of the state by its name, or ``None`` to refuse it; called in a worker thread. ``None``: there
        are no parts."""
        # By name of a part that is being downloaded: who does so.
        self._places_of_parts: dict[bytes, UploadSlots] = {}
        self._memory = DonorMemory()

    def set(self, *, allowed: bool | None = None, priority: float | None = None) -> None:
        """Change the offer; others see it as soon as the DHT has it."""
        self.allowed = self.allowed if allowed is None else allowed
        self.priority = self.priority if priority is None else priority
        self._changed.set()

    # --- offering -----------------------------------------------------------------------------------------------------

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
            try:
                async with asyncio.timeout(self._declare_period):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def declare(self, allowed: bool) -> None:
        """Declare in the table that this peer shares its state, or no longer does."""
        addresses = [str(address) for address in self._p2p.get_addresses(self._p2p.peer_id)]
        value = [self.priority, addresses] if allowed else None
        expiration = get_dht_time() + DECLARATION_LIFETIME * self._declare_period
        self._is_declared, tag = allowed, tag_of(self._p2p.peer_id)
        places = places_to_write(self._p2p.peer_id.to_bytes(), self.depth())
        keys = [key_at(self.key, place) for place in places]
        await asyncio.gather(*[self._node.store(key, value, expiration, subkey=tag) for key in keys])

    async def withdraw(self) -> None:
        """Withdraw the declaration. Peers that still ask are refused, and the declaration expires anyway."""
        if not self._is_declared:
            return
        try:
            async with asyncio.timeout(WITHDRAWAL_SECONDS):
                await self.declare(allowed=False)
        except TimeoutError:
            logger.debug("not everybody could be told that this peer does not share its state any more")

    async def serve(self, call: Call, request: DownloadRequest) -> None:
        """Send the state to a peer that asks for it, or refuse it.

        Raises:
            ProtocolError, P2PDaemonError, TimeoutError: the newcomer failed.
        """
        if contradiction := contradiction_of(self._agreement, request.agreement):
            seen_here = contradiction_of(request.agreement, self._agreement)
            self._warn_seldom("newcomer %s does not get the state: %s", call.remote, seen_here, about=call.remote)
            await call.send(StateRefused(contradiction), end=True)
            return
        now, part = asyncio.get_running_loop().time, request.part
        places = self._places_of(part) if self.allowed else None
        place = None if places is None else places.find(call.remote, now(), trains=request.trains)
        if places is None or place is None:
            refusal = StateRefused() if part else self._refusal(call.remote, now())
            await call.send(refusal, end=True)
            return
        sending = asyncio.ensure_future(self._send_to(call, place))
        try:
            await first_completed(asyncio.shield(sending), place.lost.wait())
            if sending.done():
                sending.result()
            elif place.reason and not place.has_all:  # else it has only been slow to hang up
                self._note_dropped(place)
        finally:
            # If something was still being sent, this cuts the connection.
            await cancel_and_wait(sending)
            places.leave(place, now())
            if part and not places.sharings:
                self._places_of_parts.pop(part, None)

    def _places_of(self, part: bytes) -> UploadSlots | None:
        """The places of those that download the same part; ``None``: nobody else can be served."""
        if not part:
            return self.places
        is_known = part in self._places_of_parts
        if self.get_part is None or (not is_known and len(self._places_of_parts) >= MAX_PARTS):
            return None
        get_part = functools.partial(self.get_part, part)
        # Parts are what this peer has got from others: to lose anything of them would make peers differ.
        take = functools.partial(Snapshot.take, get_part, NoCompression())
        places = UploadSlots(lambda: asyncio.ensure_future(take()), self._host_of_newcomer)
        return self._places_of_parts.setdefault(part, places)

    def _host_of_newcomer(self, peer: PeerID) -> Hashable:
        """By the addresses from which it has connected, whatever it announces."""
        return self._p2p.host_seen_of(peer)

    @property
    def is_busy(self) -> bool:
        """Whether anybody is downloading the state in order to train."""
        return any(place.trains for place in self.places)

    def _note_dropped(self, place: UploadSlot) -> None:
        self._p2p.metrics.newcomers_dropped += 1
        self._warn_seldom(
            "the place of newcomer %s was given to another one: %s, and it has not got half of it",
            place.peer,
            place.reason,
        )

    def _refusal(self, peer: PeerID, now: float) -> StateAnswer:
        if not self.allowed:
            return StateRefused()
        self._p2p.metrics.newcomers_turned_away += 1
        again_in = self.places.again_in(now)
        self._warn_seldom(
            "too many newcomers download the state: newcomer %s is told to come again in %.0f s", peer, again_in
        )
        others = [PeerAddresses(each.to_bytes(), self._addresses_of(each)) for each in self.places.holders(now)]
        others = [record for record in others if record.addresses and record.peer_id != peer.to_bytes()]
        return DonorBusy(again_in, others[:MAX_OTHER_DONORS])

    def _addresses_of(self, peer: PeerID) -> list[str]:
        return [str(address) for address in self._p2p.get_addresses(peer)][:MAX_ADDRESSES_PER_PEER]

    async def _send_to(self, call: Call, place: UploadSlot) -> None:
        snapshot = await asyncio.shield(place.sharing.snapshot)
        if snapshot is None:
            await call.send(StateRefused(), end=True)
            return
        place.begin(snapshot.chunks.count, asyncio.get_running_loop().time())
        try:
            await self.send_chunks(call, snapshot, place)
        finally:
            call.connection.stream.limit_backlog(None)

    async def send_chunks(self, call: Call, snapshot: Snapshot, place: UploadSlot) -> None:
        """Describe a state to a newcomer, then send each chunk that it asks for."""
        header = StateHeader(metadata=snapshot.metadata, tensors=snapshot.tensors, tensor_bytes=snapshot.tensor_bytes)
        now = asyncio.get_running_loop().time
        await call.send(header, snapshot.hashes)
        while True:
            async with asyncio.timeout(max(self._chunk_timeout, SILENCE_SECONDS)):
                request = await call.receive(ChunkRequest)
            if request is None:
                return
            if not 0 <= request.index < snapshot.chunks.count:
                raise ProtocolError(f"asked for chunk {request.index} of {snapshot.chunks.count}")
            if not place.note_request(request.index):
                raise ProtocolError(f"asked for chunk {request.index} again")
            if place.is_slow(now()):
                # Bytes count as sent only when the line has taken them. That costs time, so fast lines are spared.
                call.connection.stream.limit_backlog(BACKLOG_BYTES)
            began_at, chunk = now(), snapshot.chunk(request.index)
            await call.send(StateChunk(index=request.index), *chunk)
            place.note_sent(sum(map(len, chunk)), now() - began_at, now())

    # --- fetching -----------------------------------------------------------------------------------------------------

    def leave_out(self, donor: PeerID, version: bytes | None) -> None:
        """Avoid a donor for a while, because its state was no good.

        Args:
            donor: the donor; it is asked after all others.
            version: given if the state may be good for others, but this peer's user does not want it. Then this version
                is not downloaded again, and the donor is not asked at all for that while.
        """
        self._p2p.metrics.states_refused += 1
        self._memory.leave_out(donor, version, asyncio.get_running_loop().time())

    async def download(
        self, skip: Collection[PeerID] = (), part: bytes = b"", most_voters: int = MAX_VOTERS
    ) -> GivenState | None:
        """Download the state from the best donors that deliver one; ``None``: no donor does.

        Args:
            skip: donors that are not asked.
            part: names the part that is wanted; empty: all of it.
            most_voters: how many donors are asked for their version.
        """
        loop = asyncio.get_running_loop()
        patience_ends = loop.time() + BUSY_PATIENCE
        check = None if self.check is None else functools.partial(self.check, part)
        request = DownloadRequest(part=part, trains=self._trains, agreement=self._agreement)
        limits = self._max_bytes, self._chunk_timeout, self._admits(skip), most_voters, self._rate
        wish = Wish(self._p2p, self._get_stub, request, *limits, self._is_one_state, check)
        while True:
            log = DonorLog(wish, self._memory, await self.find_donors(skip))
            state = await download_from(log, wish)
            self.contradictions, self.left = log.contradictions, log.left
            if state is None and log.left:
                reasons = ", ".join(f"{peer} {reason.value}" for peer, reason in log.left.items())
                logger.debug("no donor gave its state: %s", reasons)
            pause = max(BUSY_PAUSE, log.again_in or 0.0)
            # A peer that wants a part can do without it for now.
            if state is not None or part or log.again_in is None or loop.time() + pause > patience_ends:
                return state
            logger.info("the donors of the state are busy with others: asking again in %.0f s", pause)
            await asyncio.sleep(pause)

    def _admits(self, skip: Collection[PeerID]) -> Callable[[PeerID], bool]:
        """A test for peers that are not known as donors, but named by one: whether this peer may ask them."""

        def admits(peer: PeerID) -> bool:
            is_wanted = self.rank_donors is None or peer in self.rank_donors([peer])
            return is_wanted and peer != self._p2p.peer_id and peer not in skip

        return admits

    async def find_donors(self, skip: Collection[PeerID] = ()) -> list[tuple[float, PeerID]]:
        """Donors, best first. Donors of the same rank are ordered by speed, as far as this peer knows it.

        Returns:
            Pairs of a rank (lower is better) and a peer.
        """
        place = any_place(self.depth(), self._p2p.rng)
        donors = await self._find_donors_at(place, skip)
        while place and not donors:  # donors that believe the swarm is smaller declare under shorter keys
            place = place[:-1]
            donors = await self._find_donors_at(place, skip)
        return donors

    async def _find_donors_at(self, place: str, skip: Collection[PeerID]) -> list[tuple[float, PeerID]]:
        found = await self._node.get(key_at(self.key, place), latest=True, keep_copies=False)
        if found is None or not isinstance(found.value, dict):
            return []
        rng: random.Random = self._p2p.rng
        priorities: dict[PeerID, float] = {}
        for key, entry in found.value.items():
            if entry.value is None or not is_short_lived(entry.expiration_time):
                continue
            try:
                priority, addresses = entry.value
                peer, rank = peer_of(key), float(priority)
                if peer != self._p2p.peer_id and peer not in skip and not math.isnan(rank):
                    self._p2p.add_addresses(peer, addresses[:MAX_ADDRESSES_PER_PEER])
                    priorities[peer] = rank
            except (KeyError, TypeError, ValueError) as e:
                reason = one_line(str(e))
                self._warn_seldom("skipped a malformed record of a donor under %s: %s", self.key, reason)
        ranks = priorities if self.rank_donors is None else self.rank_donors(priorities)
        now, memory = asyncio.get_running_loop().time(), self._memory
        ranks = {peer: memory.ranked(peer, rank, now) for peer, rank in ranks.items() if memory.asks(peer, now)}
        # Donors that are equal otherwise come in random order, so that newcomers spread over them.
        donors = sorted((-rank, -memory.speed(peer), rng.random(), peer) for peer, rank in ranks.items())
        return [(rank, peer) for rank, _, _, peer in donors]
