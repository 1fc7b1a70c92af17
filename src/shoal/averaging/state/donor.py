"""How a newcomer gets the state of the swarm: who offers it, asking, sending, receiving."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from shoal.averaging.messages import PEER_FAILURES, ChunkRequest, DownloadRequest, StateChunk, StateHeader, reason_of
from shoal.averaging.state.download import Download, GetState, Snapshot, State, open_state, version_of
from shoal.clock import get_dht_time
from shoal.compression import CompressionBase
from shoal.dht.crypto import peer_of, tag_of
from shoal.errors import ProtocolError
from shoal.logs import one_line
from shoal.p2p import P2P, Call, PeerID, StubBase
from shoal.p2p.addresses import MAX_ADDRESSES_PER_PEER
from shoal.tasks import cancel_and_wait, first_completed, run_in_worker

logger = logging.getLogger(__name__)

# Declarations live for this many periods, so that a slow renewal leaves no gap.
DECLARATION_LIFETIME = 1.5
# Seconds for which a donor that leaves waits for those that keep its declaration; they may be frozen.
WITHDRAWAL_SECONDS = 0.5
# How many newcomers a donor serves at a time.
MAX_DOWNLOADS = 8
# How many copies of its state a donor keeps for them.
MAX_SNAPSHOTS = 2
# Seconds for which newcomers that come one after another are given the same copy.
SNAPSHOT_AGE = 0.5
# From how many donors a newcomer takes a state.
MAX_DONORS = 4
# Smaller states are taken from one donor, unless it fails.
WORTH_SHARING_BYTES = 8 * 2**20
# Seconds after which donors that are busy are asked again, and for how long.
BUSY_PAUSE, BUSY_PATIENCE = 1.0, 60.0


class _Sharing:
    """A snapshot that some newcomers are downloading."""

    def __init__(self, taken_at: float, snapshot: asyncio.Future[Snapshot]) -> None:
        self.taken_at, self.snapshot = taken_at, snapshot
        self.users = 0


class StateSharing:
    """Offers this averager's state to others and fetches theirs.

    Args:
        key: DHT key under which donors declare themselves.
        get_state: gives the state to send; called in a worker thread.
        chunk_timeout: seconds without the next piece after which a donor is given up.
        max_bytes: larger states are refused before any memory is taken.
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
    ) -> None:
        self.allowed = False
        self.priority = 0.0
        self.rank_donors: Callable[[Iterable[PeerID]], dict[PeerID, float]] | None = None
        """How much the state of each donor is wanted, the higher, the more; who is missing is not asked. ``None``: the
        priority that donors give themselves counts."""
        self._p2p, self._node, self._key = p2p, node, key
        self._get_state, self._codec = get_state, codec
        self._declare_period, self._chunk_timeout, self._max_bytes = declare_period, chunk_timeout, max_bytes
        self._get_stub = get_stub
        self._changed = asyncio.Event()
        self._is_declared = False
        self._sharings: list[_Sharing] = []

    def set(self, *, allowed: bool | None = None, priority: float | None = None) -> None:
        """Change what is offered; others see it as soon as the DHT has it."""
        self.allowed = self.allowed if allowed is None else allowed
        self.priority = self.priority if priority is None else priority
        self._changed.set()

    # --- offering -----------------------------------------------------------------------------------------------------

    async def declare_forever(self) -> None:
        """Keep the declaration alive; runs until cancelled."""
        while True:
            self._changed.clear()
            if self.allowed or self._is_declared:
                await self._declare(self.allowed)
            try:
                async with asyncio.timeout(self._declare_period):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _declare(self, allowed: bool) -> None:
        addresses = [str(address) for address in self._p2p.get_addresses(self._p2p.peer_id)]
        value = [self.priority, addresses] if allowed else None
        expiration = get_dht_time() + DECLARATION_LIFETIME * self._declare_period
        self._is_declared = allowed
        await self._node.store(self._key, value, expiration, subkey=tag_of(self._p2p.peer_id))

    async def withdraw(self) -> None:
        """Tell others not to ask any more; those who do all the same are refused, and the declaration expires."""
        if not self._is_declared:
            return
        try:
            async with asyncio.timeout(WITHDRAWAL_SECONDS):
                await self._declare(allowed=False)
        except TimeoutError:
            logger.debug("not everybody could be told that this peer does not share its state any more")

    async def serve(self, call: Call) -> None:
        """Send the state to a peer that asks for it, or refuse."""
        sharing = self._share() if self.allowed else None
        if sharing is None:
            await call.send(StateHeader(allowed=False, busy=self.allowed), end=True)
            return
        sharing.users += 1
        try:
            await self._send_chunks(call, await asyncio.shield(sharing.snapshot))
        finally:
            sharing.users -= 1
            if not sharing.users:
                self._sharings.remove(sharing)

    def _share(self) -> _Sharing | None:
        """A snapshot for one more newcomer, or ``None`` if there are too many already."""
        now = asyncio.get_running_loop().time()
        if sum(sharing.users for sharing in self._sharings) >= MAX_DOWNLOADS:
            return None
        if self._sharings and now - self._sharings[-1].taken_at <= SNAPSHOT_AGE:
            return self._sharings[-1]
        if len(self._sharings) >= MAX_SNAPSHOTS:
            return None
        taking = asyncio.ensure_future(Snapshot.take(self._get_state, self._codec))
        self._sharings.append(_Sharing(now, taking))
        return self._sharings[-1]

    async def _send_chunks(self, call: Call, snapshot: Snapshot) -> None:
        header = StateHeader(
            allowed=True, metadata=snapshot.metadata, tensors=snapshot.tensors, tensor_bytes=snapshot.tensor_bytes
        )
        await call.send(header, snapshot.hashes)
        while True:
            async with asyncio.timeout(self._chunk_timeout):
                request = await call.receive(ChunkRequest)
            if request is None:
                return
            if not 0 <= request.index < snapshot.chunks.count:
                raise ProtocolError(f"asked for chunk {request.index} of {snapshot.chunks.count}")
            await call.send(StateChunk(index=request.index), *snapshot.chunk(request.index))

    # --- fetching -----------------------------------------------------------------------------------------------------

    async def download(self) -> State | None:
        """The state of the best donors that deliver one, or ``None``."""
        patience_ends = asyncio.get_running_loop().time() + BUSY_PATIENCE
        while True:
            gathering = _Gathering(self._get_stub, self._max_bytes, self._chunk_timeout)
            donors = await self._find_donors()
            others = [peer for rank, peer in donors[1:MAX_DONORS] if rank == donors[0][0]]
            dialling = [asyncio.ensure_future(self._p2p.prepare(peer, 1)) for peer in others]
            try:
                state = await gathering.run(donors)
            finally:
                # A failure to reach one of them is told when it is asked.
                await cancel_and_wait(*dialling)
            if state is not None or not gathering.busy or asyncio.get_running_loop().time() >= patience_ends:
                return state
            logger.info("the donors of the state are busy with others: asking again")
            await asyncio.sleep(BUSY_PAUSE)

    async def _find_donors(self) -> list[tuple[float, PeerID]]:
        """Donors, the most wanted ones first; those of the same priority in random order, to spread the load.

        Returns:
            Pairs of rank, lower is better, and peer.
        """
        found = await self._node.get(self._key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return []
        rng: random.Random = self._p2p.rng
        priorities: dict[PeerID, float] = {}
        for key, entry in found.value.items():
            if entry.value is None:
                continue
            try:
                priority, addresses = entry.value
                peer, rank = peer_of(key), float(priority)
                if peer != self._p2p.peer_id and not math.isnan(rank):
                    self._p2p.add_addresses(peer, addresses[:MAX_ADDRESSES_PER_PEER])
                    priorities[peer] = rank
            except (TypeError, ValueError) as e:
                logger.warning("skipped a malformed record of a donor under %s: %s", self._key, one_line(str(e)))
        ranks = priorities if self.rank_donors is None else self.rank_donors(priorities)
        donors = sorted((-rank, rng.random(), peer) for peer, rank in ranks.items())
        return [(rank, peer) for rank, _, peer in donors]


class _Gathering:
    """One attempt to get a state from some donors."""

    def __init__(self, get_stub: Callable[[PeerID], StubBase], max_bytes: int, chunk_timeout: float) -> None:
        self._get_stub, self._max_bytes, self._chunk_timeout = get_stub, max_bytes, chunk_timeout
        self.busy = False
        """A donor had too many others to serve."""
        self._download: Download | None = None
        # Donors that have not been asked yet.
        self._waiting: deque[tuple[float, PeerID]] = deque()
        # Donors with another version than the one that is being downloaded.
        self._different: list[tuple[float, PeerID]] = []

    async def run(self, donors: Iterable[tuple[float, PeerID]]) -> State | None:
        """The state of the best donor that answers, taken from all that have the same one."""
        self._waiting.extend(donors)
        while self._waiting:
            state = await self._get_one_version(self._waiting.popleft())
            if state is not None:
                return state
            self._waiting, self._different = deque(sorted([*self._waiting, *self._different])), []
        return None

    async def _get_one_version(self, donor: tuple[float, PeerID]) -> State | None:
        self._download = None
        helpers: list[asyncio.Task[None]] = []
        try:
            await self._take_from(donor, helpers)
            await asyncio.gather(*helpers)
            return await self._finish()
        except (ValueError, RuntimeError) as e:
            logger.warning("the state of %s cannot be read: %s", donor[1], e)
            return None
        finally:
            await cancel_and_wait(*helpers)

    async def _finish(self) -> State | None:
        """If all donors that were asked have failed, anybody else might have the same version, too."""
        download = self._download
        if download is None:
            return None
        while self._waiting and not download.finished.is_set():
            await self._take_from(self._waiting.popleft())
        return await run_in_worker(download.result) if download.finished.is_set() else None

    async def _take_from(self, donor: tuple[float, PeerID], helpers: list[asyncio.Task[None]] | None = None) -> None:
        """Take what is missing from one donor; the first one says what there is to take."""
        rank, peer = donor
        try:
            async with self._get_stub(peer).rpc_download_state() as call:
                await call.send(DownloadRequest())
                header, hashes = await open_state(call, self._max_bytes, self._chunk_timeout)
                if not header.allowed:
                    self.busy = self.busy or header.busy
                    logger.debug("%s does not share its state%s", peer, ", it is busy" if header.busy else "")
                elif self._download is None:
                    self._download = Download(header, hashes, self._chunk_timeout)
                    if helpers is not None and self._download.total_bytes >= WORTH_SHARING_BYTES:
                        helpers.extend(asyncio.ensure_future(self._help(rank)) for _ in range(MAX_DONORS - 1))
                    await self._fetch(self._download, call)
                elif version_of(header.tensors, header.tensor_bytes, hashes) == self._download.version:
                    await self._fetch(self._download, call)
                else:
                    self._different.append(donor)
        except PEER_FAILURES as e:
            logger.warning("could not download the state of %s: %s", peer, reason_of(e))

    async def _fetch(self, download: Download, call: Call) -> None:
        """Fetch until everything is here, or the donor fails; a slow one is left when others have done the rest."""
        fetching = asyncio.ensure_future(download.fetch_from(call))
        try:
            await first_completed(asyncio.shield(fetching), download.finished.wait())
            if fetching.done():
                fetching.result()
                await call.send_end()
        finally:
            await cancel_and_wait(fetching)

    async def _help(self, rank: float) -> None:
        """Take from further donors of the same rank, one after another, as long as something is missing."""
        download = self._download
        while download is not None and not download.finished.is_set() and self._waiting and self._waiting[0][0] == rank:
            await self._take_from(self._waiting.popleft())
