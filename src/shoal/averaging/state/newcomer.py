"""What a newcomer does: it finds donors in the DHT, chooses a version of the state, and takes it from several donors.

*The vote.* The newcomer asks all donors of the best rank at once which version they have, and takes the version that
most hosts have. It takes a large state from several donors of that version at once, a small one from a single donor.
Among donors of the same version, those that were fast before come first. Claims of donors about themselves are ignored.

A donor whose description is malformed or does not fit this peer has no vote, and is left out for a while.

*Slow downloads.* A download that is expected to take long gets help from other donors of the same version. If no donor
can help, the newcomer changes to another version that has as many votes and is expected to arrive sooner. It keeps the
chunks that it has, in case it returns. It never leaves a donor without having another one, so the last donor may be as
slow as it likes as long as it sends anything. If the donors of the best rank are slow, or do not even describe their
state, the next ones are asked, too.

*Objects.* :class:`StateDownloads` lives as long as its averager, and remembers donors (:class:`DonorMemory`). A
:class:`_DonorSearch` is one download. It makes one :class:`_Attempt` after another, each with a vote of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shoal.averaging.groups.settings import Trust
from shoal.averaging.messages import (
    PEER_FAILURES,
    DonorBusy,
    DownloadRequest,
    StateAnswer,
    StateChunk,
    StateHeader,
    StateRefused,
    reason_of,
)
from shoal.averaging.state.download import (
    SPEED_SECONDS,
    Download,
    GivenState,
    RateMeter,
    UnusableStateError,
    open_state,
    version_of,
)
from shoal.base.bounded import Bounded
from shoal.base.logs import Seldom, one_line
from shoal.base.tasks import cancel_and_wait, first_completed, run_in_worker
from shoal.compression.base import TensorMetadata
from shoal.dht.crypto import peer_of
from shoal.dht.key_sharding import any_place, key_at
from shoal.dht.validation import is_short_lived
from shoal.net.addresses import MAX_ADDRESSES_PER_PEER
from shoal.p2p import P2P, Call, PeerID, StubBase

logger = logging.getLogger(__name__)

Donor = tuple[float, PeerID]
"""A rank (lower is better) and a peer."""
CheckTensors = Callable[[Sequence[TensorMetadata]], object]
"""Raises ``ValueError`` if tensors with these descriptions are of no use to this peer."""
AcceptState = Callable[[StateHeader], Awaitable[bool]]
"""Whether to download the state that has won the vote; otherwise the donors are asked again. It may take seconds."""

# The most donors that are asked for their version, and the most from which a state is taken at once (chosen).
MAX_VOTERS, MAX_DONORS = 7, 4
# Smaller states are taken from one donor, unless it fails or is slow (chosen).
WORTH_SHARING_BYTES = 8 * 2**20
# After the first answer, the vote waits one second for others, and one second more for each 50 MB of the state
# (chosen), because an honest donor first has to copy it.
VOTE_SECONDS, VOTE_BYTES_PER_SECOND = 1.0, 50e6
# A version that has a smaller share of the hosts counts as one vote (chosen): a few liars may have agreed on it.
LEAST_SHARE_OF_VOTES = 1 / 3
# The least hosts of a majority that is believed (chosen). With fewer, it is open which side is right.
LEAST_HOSTS_TO_TELL = 3
# A download is slow if it is expected to take longer than its speed was measured: another donor then costs less than
# waiting.
SLOW_SECONDS = SPEED_SECONDS
# Seconds between two checks whether a download is slow (chosen).
CHECK_SECONDS = 1.0
# Busy donors are asked again after the first number of seconds at the earliest, and up to the second number in total
# (chosen): by then the swarm has moved on.
BUSY_PAUSE, BUSY_PATIENCE = 1.0, 60.0
# The assumed speed of an unknown donor, in bytes per second (chosen).
ASSUMED_SPEED = 1e6
# Seconds for which a donor whose state was refused is asked last. Chosen: a tracker forgets a peer after this time.
REFUSAL_SECONDS = 600.0
# Seconds for which a donor that offers an unusable state is not asked. Chosen: the time of two declarations.
REST_SECONDS = 60.0


class DonorLeft(Enum):
    """Why a state was not taken from a donor, or not to the end."""

    DIFFERS = "differs"
    """It refuses, because its settings differ from this peer's."""
    DOES_NOT_SHARE = "does not share"
    BUSY = "busy"
    """It serves as many others as it can."""
    OF_NO_USE = "of no use"
    """Its offer is malformed, or does not fit this peer."""
    REFUSED_VERSION = "has a version that was refused"
    """This peer's user does not want its version."""
    FAILED = "failed"
    """It could not be reached, fell silent, or sent something wrong."""
    SLOW = "slow"
    """Another version is expected to arrive sooner."""


@dataclass
class KnownDonor:
    """This peer's experience with a donor. Times are loop times."""

    speed: float | None = None
    """Bytes per second; ``None``: unknown."""
    left_out_until: float = -math.inf
    """It is not asked at all until then."""
    distrusted_until: float = -math.inf
    """It is asked after all others until then."""


class DonorMemory:
    """This peer's experience with donors in all its downloads."""

    def __init__(self) -> None:
        self._donors = Bounded[PeerID, KnownDonor]()
        self._unwanted = Bounded[bytes, None]()

    def of(self, peer: PeerID) -> KnownDonor:
        """The record of a donor, for reading."""
        return self._donors.get(peer) or KnownDonor()

    def _noting(self, peer: PeerID) -> KnownDonor:
        """The record of a donor, for changes."""
        self._donors[peer] = known = self.of(peer)
        return known

    def note_speed(self, peer: PeerID, nbytes: int, seconds: float) -> None:
        """Note how many bytes a donor has sent in this time. Samples that are too small are ignored."""
        if nbytes or seconds > 1:
            speed, known = nbytes / max(seconds, 1e-3), self._noting(peer)
            known.speed = speed if known.speed is None else (known.speed + speed) / 2

    def speed(self, peer: PeerID) -> float:
        """A donor's speed in bytes per second, assumed if it is unknown."""
        speed = self.of(peer).speed
        return ASSUMED_SPEED if speed is None else speed

    def leave_out(self, peer: PeerID, version: bytes | None, now: float) -> None:
        """See :meth:`StateDownloads.leave_out`."""
        if version is None:
            self._noting(peer).distrusted_until = now + REFUSAL_SECONDS
        else:
            self._noting(peer).left_out_until = now + REFUSAL_SECONDS
            self._unwanted[version] = None

    def rest(self, peer: PeerID, now: float) -> None:
        """Do not ask a donor for a while, because this peer can never use what it offers."""
        known = self._noting(peer)
        known.left_out_until = max(known.left_out_until, now + REST_SECONDS)

    def wants(self, version: bytes) -> bool:
        """Whether a version may be downloaded, because this peer's user has not refused it."""
        return version not in self._unwanted

    def ordered(self, ranks: Mapping[PeerID, float], now: float, random: Callable[[], float]) -> Iterator[Donor]:
        """The donors that may be asked, best first.

        Donors of the same rank are ordered by speed, then at random, so that newcomers spread over them.

        Args:
            ranks: a higher number is better.
        """
        asked = {peer: rank for peer, rank in ranks.items() if self.of(peer).left_out_until <= now}
        ranked = {peer: rank if self.of(peer).distrusted_until <= now else -1e300 for peer, rank in asked.items()}
        order = sorted((-rank, -self.speed(peer), random(), peer) for peer, rank in ranked.items())
        return ((rank, peer) for rank, _, _, peer in order)


@dataclass(frozen=True)
class DownloadOptions:
    """What a newcomer downloads, and from which donors."""

    max_bytes: int
    """Larger states are refused before any memory is taken."""
    chunk_timeout: float
    """A donor is given up after this many seconds of silence."""
    agreement: Mapping[str, str] = field(default_factory=dict)
    """Settings that must be the same in a donor and a newcomer, as far as both have them."""
    is_one_state: bool = True
    """Whether all healthy donors of an epoch have the same state. Those that average in several groups do not."""
    trains: bool = True
    """Whether this peer trains with what it downloads; an archive only keeps it."""
    rate: float = math.inf
    """The most bytes that are taken in a second."""


class StateDownloads:
    """Downloads the states of others.

    Args:
        p2p: this peer.
        table: the distributed table.
        key: DHT key under which donors declare themselves.
        get_stub: makes a stub of the averager protocol for a donor.
        options: what to download, and from which donors.
        trust: ranks donors, and tells how many bits their keys have.
    """

    def __init__(
        self,
        p2p: P2P,
        table: Any,
        key: str,
        get_stub: Callable[[PeerID], StubBase],
        options: DownloadOptions,
        trust: Trust | None = None,
    ) -> None:
        self._p2p, self._table, self.key, self._get_stub = p2p, table, key, get_stub
        self._options, self.trust = options, trust or Trust()
        self._memory, self._warn_seldom = DonorMemory(), Seldom(logger.warning)
        self.contradictions: Mapping[PeerID, str] = {}
        """By donor that has refused in the last download because its settings differ: the differences, in words."""
        self.left: Mapping[PeerID, DonorLeft] = {}
        """By donor whose state was not taken in the last download: the reason."""

    def leave_out(self, donor: PeerID, version: bytes | None) -> None:
        """Avoid a donor for a while, because its state was refused.

        Args:
            donor: the donor; it is asked after all others.
            version: given if the state may be good for others, but this peer's user does not want it. Then this version
                is not downloaded again, and the donor is not asked at all for a while.
        """
        self._p2p.metrics.states_refused += 1
        self._memory.leave_out(donor, version, asyncio.get_running_loop().time())

    async def download(
        self,
        skip: Collection[PeerID] = (),
        part: bytes = b"",
        most_voters: int = MAX_VOTERS,
        check: CheckTensors | None = None,
        accepts: AcceptState | None = None,
    ) -> GivenState | None:
        """Download the state from the best donors that deliver one; ``None``: no donor does.

        Args:
            skip: donors that are not asked.
            part: the name of the wanted part; empty: all of the state.
            most_voters: how many donors are asked for their version. Use 1 if all versions differ anyway.
            check: refuses tensors before they are downloaded.
            accepts: may wait for another version than the present one.
        """
        loop, options = asyncio.get_running_loop(), self._options
        request = DownloadRequest(part=part, trains=options.trains, agreement=dict(options.agreement))
        patience_ends = loop.time() + BUSY_PATIENCE
        while True:
            donors = deque(await self.find_donors(skip))
            wanted = options, request, check, accepts, most_voters
            search = _DonorSearch(self._p2p, self._get_stub, *wanted, self._memory, self._warn_seldom, donors)
            state = await search.run()
            self.contradictions, self.left = search.contradictions, search.left
            if state is None and search.left:
                reasons = ", ".join(f"{peer} {reason.value}" for peer, reason in search.left.items())
                logger.debug("no donor gave its state: %s", reasons)
            pause = max(BUSY_PAUSE, search.again_in or 0.0)
            # A peer that wants only a part can do without it for now.
            if state is not None or part or search.again_in is None or loop.time() + pause > patience_ends:
                return state
            logger.info("the donors of the state are busy with others: asking again in %.0f s", pause)
            await asyncio.sleep(pause)

    async def find_donors(self, skip: Collection[PeerID] = ()) -> list[Donor]:
        """Donors, best first."""
        place = any_place(self.trust.depth(), self._p2p.rng)
        donors = await self._find_donors_at(place, skip)
        while place and not donors:  # donors that believe the swarm is smaller declare under shorter keys
            place = place[:-1]
            donors = await self._find_donors_at(place, skip)
        return donors

    async def _find_donors_at(self, place: str, skip: Collection[PeerID]) -> list[Donor]:
        found = await self._table.get(key_at(self.key, place), latest=True, keep_copies=False)
        if found is None or not isinstance(found.value, dict):
            return []
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
        ranks = self.trust.rank_donors(priorities)
        return list(self._memory.ordered(ranks, asyncio.get_running_loop().time(), self._p2p.rng.random))


class _Offer:
    """A donor's answer: the version that it has."""

    def __init__(self, donor: Donor, header: StateHeader, hashes: bytes) -> None:
        self.donor, self.header, self.hashes = donor, header, hashes
        self.version = version_of(header.tensors, header.tensor_bytes, hashes)
        self.total_bytes = sum(header.tensor_bytes)
        self.decision: asyncio.Future[Download | None] = asyncio.get_running_loop().create_future()
        """The download that the donor contributes to; ``None``: none."""

    def decide(self, download: Download | None) -> None:
        """Let the donor contribute to a download, or to none. The first decision holds."""
        if not self.decision.done():
            self.decision.set_result(download)


@dataclass
class _DonorSearch:
    """One download: the request, and the outcome of each donor so far."""

    p2p: P2P
    get_stub: Callable[[PeerID], StubBase]
    options: DownloadOptions
    request: DownloadRequest
    check: CheckTensors | None
    accepts: AcceptState | None
    most_voters: int
    memory: DonorMemory
    warn_seldom: Seldom
    """Logs rarely, because anyone can declare any number of donors."""
    waiting: deque[Donor]
    """Donors that have not been asked yet, or may be asked again."""
    left: dict[PeerID, DonorLeft] = field(default_factory=dict)
    """By donor whose state was not taken: the reason."""
    contradictions: dict[PeerID, str] = field(default_factory=dict)
    """By donor that refuses because its settings differ: the differences, in words."""
    again_in: float | None = None
    """The least seconds after which a busy donor may have a free slot. ``None``: none is busy."""
    kept: dict[bytes, Download] = field(default_factory=dict)
    """By version: downloads that were left for another version."""
    dials: dict[PeerID, asyncio.Future[None]] = field(default_factory=dict)
    """Connections to the next donors, made ahead, so that all dead donors together cost the time of one."""

    async def run(self) -> GivenState | None:
        """Download the version that most of the best donors have; ``None``: no donor has delivered a state."""
        try:
            while self.waiting:
                for _, peer in itertools.islice(self.waiting, MAX_VOTERS):  # whatever their ranks
                    if peer not in self.dials:
                        self.dials[peer] = asyncio.ensure_future(self._dial(peer))
                state = await _Attempt(self).run()
                if state is not None:
                    return state
            return None
        finally:
            await cancel_and_wait(*self.dials.values())

    async def _dial(self, peer: PeerID) -> None:
        # Not ``p2p.prepare``: it neither waits for a dial that is in flight already nor reports its outcome.
        self.p2p.pool.release(await self.p2p.pool.acquire(peer), reusable=True)

    async def reach(self, peer: PeerID) -> None:
        """Wait for the connection to a donor, if it has been dialled.

        Raises:
            DialError: the donor cannot be reached.
        """
        if (dial := self.dials.get(peer)) is not None:
            await asyncio.shield(dial)

    def note_refusal(self, peer: PeerID, answer: StateAnswer) -> None:
        """Note that a donor has refused."""
        if isinstance(answer, StateRefused) and answer.contradiction:
            self.contradictions[peer] = reason = one_line(answer.contradiction)
            self.warn_seldom("donor %s refuses to give this peer its state: %s", peer, reason, about=peer)
            self.leave(peer, DonorLeft.DIFFERS)
        elif isinstance(answer, DonorBusy):
            self.again_in = answer.again_in if self.again_in is None else min(self.again_in, answer.again_in)
            self.warn_seldom(
                "donor %s serves as many others as it can: it says to ask again in %.0f s",
                *(peer, answer.again_in),
                about=peer,
            )
            self.leave(peer, DonorLeft.BUSY)
        else:
            self.leave(peer, DonorLeft.DOES_NOT_SHARE)

    def leave_out(self, peer: PeerID, error: Exception) -> None:
        """Note that this peer can never use a donor's state, and do not ask that donor for a while."""
        self.p2p.metrics.states_refused += 1
        self.warn_seldom("the state of peer %s is of no use: %s", peer, error, about=peer)
        if not self.request.part:  # a donor that lacks a part of the state may still have a good state
            self.memory.rest(peer, asyncio.get_running_loop().time())
        self.leave(peer, DonorLeft.OF_NO_USE)

    def leave(self, peer: PeerID, reason: DonorLeft) -> None:
        """Note that a donor is not used, or no longer used."""
        self.left[peer] = reason
        self.p2p.metrics.donors_left[reason.value] += 1
        logger.debug("donor %s is left: %s", peer, reason.value)


class _Attempt:
    """One vote, and the download of the version that it chose.

    Donors move between these states: asked, offering, active, in reserve. The next one to ask depends on all of them.
    """

    def __init__(self, search: _DonorSearch) -> None:
        self._search, self._waiting = search, search.waiting
        self._rank = self._waiting[0][0]
        self._offers: list[_Offer] = []
        # Donors that have been asked and have neither answered nor failed.
        self._asked: dict[Donor, None] = {}
        # Donors that deliver chunks.
        self._active: dict[Donor, None] = {}
        # Donors of the chosen version that are not needed yet.
        self._reserve: deque[Donor] = deque()
        self._download: Download | None = None
        # The number of additional donors that are wanted because the others are slow.
        self._extra = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()

    async def run(self) -> GivenState | None:
        """The state; ``None`` if it did not arrive. Other donors may then be left to ask."""
        voters, source, is_left = self._ask_best(), None, False
        try:
            source = await self._vote(voters)
            if source is None:
                return None
            self._rank = source.donor[0]
            if self._search.accepts is not None and not await self._search.accepts(source.header):
                return None
            self._tell_of_others(source)
            download = self._begin(source)
            is_left = await self._look_after(download)
            if not download.finished.is_set():
                return None
            state = GivenState(*await run_in_worker(download.result))
            state.donor, state.version = source.donor[1], download.version
            return state
        except (ValueError, RuntimeError) as e:
            self._search.leave_out((voters[0] if source is None else source.donor)[1], e)
            return None
        finally:
            await cancel_and_wait(*self._tasks)
            self._give_back(is_left=is_left)

    def _give_back(self, *, is_left: bool) -> None:
        """Put donors of other versions back on the list, because they may be asked again.

        Args:
            is_left: the download was left for another version.
        """
        version = None if self._download is None else self._download.version
        others = [offer.donor for offer in self._offers if offer.version != version]
        if is_left:
            # The donors of the version that is preferred now come first.
            left = [offer.donor for offer in self._offers if offer.version == version]
            self._waiting.extendleft(reversed(sorted(others, key=lambda donor: self._seconds_from(donor))))
            self._waiting.extend(left)
            return
        merged = sorted([*self._waiting, *others], key=lambda donor: donor[0])
        self._waiting.clear()
        self._waiting.extend(merged)

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask_best(self) -> list[Donor]:
        """Ask the first waiting donors that have the same rank."""
        rank = self._waiting[0][0]
        asked = [donor for donor in self._waiting if donor[0] == rank][: self._search.most_voters]
        for donor in asked:
            self._waiting.remove(donor)
            self._ask(donor)
        return asked

    def _ask(self, donor: Donor) -> None:
        self._asked[donor] = None
        self._tasks.append(asyncio.ensure_future(self._take_from(donor)))

    async def _take_from(self, donor: Donor) -> None:
        """Ask a donor for its version, and take part of a download from it if it is chosen."""
        search, options, peer = self._search, self._search.options, donor[1]
        try:
            await search.reach(peer)
            async with search.get_stub(peer).rpc_download_state() as call:
                await call.send(search.request)
                header, hashes = await open_state(call, options.max_bytes, options.chunk_timeout, search.check)
                if not isinstance(header, StateHeader):
                    search.note_refusal(peer, header)
                    return
                offer = _Offer(donor, header, hashes)
                if not search.memory.wants(offer.version):
                    search.leave(peer, DonorLeft.REFUSED_VERSION)
                    return
                self._note_offer(offer)
                download = await offer.decision
                if download is not None:
                    await self._fetch(download, call, peer)
                    return
                # End the call properly to keep the connection: this peer may soon average with the donor.
                await call.send_end()
                async with asyncio.timeout(options.chunk_timeout):
                    await call.receive(StateChunk)
        except UnusableStateError as e:
            search.leave_out(peer, e)
        except PEER_FAILURES as e:
            search.leave(peer, DonorLeft.FAILED)
            search.warn_seldom("could not download the state of %s: %s", peer, reason_of(e), about=peer)
        finally:
            self._asked.pop(donor, None)
            self._active.pop(donor, None)
            self._news.set()

    def _note_offer(self, offer: _Offer) -> None:
        del self._asked[offer.donor]
        self._offers.append(offer)
        self._news.set()
        if self._download is not None:
            self._use(offer, self._download)

    def _use(self, offer: _Offer, download: Download) -> None:
        """Decide on a donor that has answered: it contributes, is kept in reserve, or has another version."""
        if offer.version != download.version:
            offer.decide(None)
        elif len(self._active) < self._most_active(download):
            self._active[offer.donor] = None
            offer.decide(download)
        else:
            self._reserve.append(offer.donor)
            offer.decide(None)

    def _most_active(self, download: Download) -> int:
        most = MAX_DONORS if download.total_bytes >= WORTH_SHARING_BYTES else 1
        return int(min(most, download.most_donors)) + self._extra

    async def _fetch(self, download: Download, call: Call, peer: PeerID) -> None:
        """Fetch from a donor until it fails or all chunks are here, even if this donor still owes some of them."""
        loop = asyncio.get_running_loop()
        arrivals = RateMeter(loop.time())
        fetching = asyncio.ensure_future(download.fetch_from(call, arrivals))
        try:
            await first_completed(asyncio.shield(fetching), download.finished.wait())
            if fetching.done():
                fetching.result()
                await call.send_end()
        finally:
            self._search.memory.note_speed(peer, arrivals.total, loop.time() - arrivals.began_at)
            await cancel_and_wait(fetching)

    # --- the vote -----------------------------------------------------------------------------------------------------

    async def _vote(self, voters: list[Donor]) -> _Offer | None:
        """The offer to take: one of the version with the most votes in time; ``None``: no donor answers.

        Args:
            voters: the donors that have been asked. Donors of the next rank are added if none of these answers soon.
        """
        loop, ends_at = asyncio.get_running_loop(), None
        asks_more_at = loop.time() + SLOW_SECONDS
        while True:
            self._news.clear()
            best = self._best(voters)
            if not self._asked or (best is not None and self._is_certain(best)):
                return best
            if best is None:
                if loop.time() >= asks_more_at and self._waiting:
                    voters += self._ask_best()
                    asks_more_at = loop.time() + SLOW_SECONDS
                await first_completed(self._news.wait(), timeout=asks_more_at - loop.time() if self._waiting else None)
                continue
            if ends_at is None:
                patience = VOTE_SECONDS + best.total_bytes / VOTE_BYTES_PER_SECOND
                ends_at = loop.time() + min(patience, self._search.options.chunk_timeout / 2)
            if loop.time() >= ends_at:
                return best
            await first_completed(self._news.wait(), timeout=ends_at - loop.time())

    def _votes(self) -> Counter[bytes]:
        """By version: the number of hosts that have it. Several peers on one host have one vote for a version."""
        host_of = self._search.p2p.host_of
        pairs = {(offer.version, host_of(offer.donor[1])) for offer in self._offers}
        return Counter(version for version, _ in pairs)

    def _weights(self) -> dict[bytes, int]:
        votes = self._votes()
        least = LEAST_SHARE_OF_VOTES * votes.total()
        return {version: count if count >= least else 1 for version, count in votes.items()}

    def _best(self, voters: Collection[Donor]) -> _Offer | None:
        """An offer of the version with the most votes, with the metadata that most donors of that version have."""
        if not self._offers:
            return None
        order, weights = {donor: number for number, donor in enumerate(voters)}, self._weights()
        rank = min(offer.donor[0] for offer in self._offers)
        of_best_rank = [offer for offer in self._offers if offer.donor[0] == rank]
        first = min(of_best_rank, key=lambda offer: (-weights[offer.version], order[offer.donor]))
        same = [offer for offer in self._offers if offer.version == first.version]
        host_of = self._search.p2p.host_of
        pairs = {(offer.header.metadata, host_of(offer.donor[1])) for offer in same}
        metadata = Counter(shown for shown, _ in pairs)
        return min(same, key=lambda offer: (-metadata[offer.header.metadata], order[offer.donor]))

    def _is_certain(self, best: _Offer) -> bool:
        """Whether no other version can get more votes."""
        return 2 * self._votes()[best.version] > self._votes().total() + len(self._asked)

    def _tell_of_others(self, best: _Offer) -> None:
        """Warn of donors whose state differs from that of most hosts of the same epoch, by their metadata."""
        search, votes = self._search, self._votes()
        is_clear = votes[best.version] >= LEAST_HOSTS_TO_TELL and 2 * votes[best.version] > votes.total()
        if not (search.options.is_one_state and is_clear):
            return
        for offer in self._offers:
            if offer.version != best.version and offer.header.metadata == best.header.metadata:
                search.p2p.metrics.troubles["states that differ"] += 1
                search.warn_seldom(
                    "the state of donor %s differs from that of %d other hosts of this epoch: it is not taken. Its "
                    "machine computes differently or is broken, or it lies",
                    offer.donor[1],
                    votes[best.version],
                    about=offer.donor[1],
                )

    # --- the download -------------------------------------------------------------------------------------------------

    def _begin(self, offer: _Offer) -> Download:
        kept, options = self._search.kept.pop(offer.version, None), self._search.options
        if kept is not None:
            kept.resume(offer.header)
        download = kept or Download(offer.header, offer.hashes, options.chunk_timeout, options.rate)
        self._download = download
        for each in [offer, *(other for other in self._offers if other is not offer)]:
            self._use(each, download)
        return download

    async def _look_after(self, download: Download) -> bool:
        """Ask more donors for help as needed. Ends when the state is here, or no donor is left, or another is better.

        Returns:
            Whether the download was left, because another version is expected to arrive sooner.
        """
        is_slow = False
        while not download.finished.is_set():
            self._news.clear()
            helper = self._next_helper(download, is_slow=is_slow)
            if helper is not None:
                self._ask(helper)
            elif not self._active and not self._asked:
                return False
            elif is_slow and self._leaves(download):
                return True
            elif is_slow and not self._asked and self._waiting:
                # No donor of this rank can help, and no known version would arrive sooner.
                self._extra += 1
                self._ask(self._waiting.popleft())
            await first_completed(download.finished.wait(), self._news.wait(), timeout=CHECK_SECONDS)
            is_slow = download.seconds_left() > SLOW_SECONDS
        return False

    def _next_helper(self, download: Download, *, is_slow: bool) -> Donor | None:
        """The next donor to ask for help; ``None``: no help is needed, or no donor is left."""
        is_enough = len(self._active) + len(self._asked) >= self._most_active(download)
        if is_enough and (self._asked or not is_slow):
            return None
        # Donors of a worse rank are asked only if no other is left.
        is_last_hope = not self._active and not self._asked
        if not self._reserve and not (self._waiting and (self._waiting[0][0] == self._rank or is_last_hope)):
            return None
        self._extra += is_enough
        return (self._reserve or self._waiting).popleft()

    def _leaves(self, download: Download) -> bool:
        """Leave a slow download if another version with as many votes is expected to arrive sooner."""
        weights = self._weights()
        rivals = [offer for offer in self._offers if weights[offer.version] >= weights[download.version]]
        rivals = [offer for offer in rivals if offer.version != download.version]
        if not rivals:
            return False
        best = min(rivals, key=lambda offer: self._seconds_from(offer.donor))
        seconds = download.seconds_left()
        if self._seconds_from(best.donor) >= seconds:
            return False
        self._search.kept[download.version] = download
        for _, peer in self._active:
            logger.warning(
                "donor %s is left for %s: its state would take another %.0f s", peer, best.donor[1], min(seconds, 1e6)
            )
            self._search.leave(peer, DonorLeft.SLOW)
        return True

    def _seconds_from(self, donor: Donor) -> float:
        """The seconds that a donor's version is expected to take if it is downloaded from this donor."""
        offer = next(offer for offer in self._offers if offer.donor == donor)
        kept = self._search.kept.get(offer.version)
        missing = offer.total_bytes if kept is None else kept.missing_bytes
        return missing / max(self._search.memory.speed(donor[1]), 1e-9)
