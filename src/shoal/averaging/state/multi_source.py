"""Which version of the state a newcomer takes, and from which donors.

*The vote.* The newcomer asks the donors of the best rank all at once which version they have. It takes the version that
most hosts show. A large state it takes from several donors of that version at once, a small one from a single donor.
Among donors of the same version, those that were quick before come first. What a donor claims about itself does not
count.

A donor whose description makes no sense, or does not fit this peer, has no vote. It is left out for a while.

*Slow downloads.* A download that is going to take long gets help from other donors of the same version. If no donor can
help, the newcomer changes to another version, but only to one that as many donors show and that is expected to be here
sooner. It keeps the chunks that have come, in case it returns. It never leaves a donor without having another one: the
last donor may take its time as long as it sends anything. If the donors of the best rank are slow, or do not even
describe their state, the next ones are asked, too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

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
from shoal.averaging.state.download import Download, GivenState, RateMeter, UnusableStateError, open_state, version_of
from shoal.base.logs import Seldom, one_line
from shoal.base.tasks import cancel_and_wait, first_completed, run_in_worker
from shoal.compression.base import TensorMetadata
from shoal.net.addresses import MAX_ADDRESSES_PER_PEER
from shoal.p2p import P2P, Call, PeerID, StubBase

logger = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")
Donor = tuple[float, PeerID]
"""A rank (lower is better) and a peer."""

# The most donors that are asked for their version, and the most from which a state is taken at once.
MAX_VOTERS, MAX_DONORS = 7, 4
# Smaller states are taken from one donor, unless it fails or is slow.
WORTH_SHARING_BYTES = 8 * 2**20
# After the first answer the vote waits a second for others, and one second more for each 50 MB of the state,
# because an honest donor first has to make a copy of it.
VOTE_SECONDS, VOTE_BYTES_PER_SECOND = 1.0, 50e6
# If a smaller share of the hosts shows a version, a few liars may have agreed on it. Then it counts as one vote.
LEAST_SHARE_OF_VOTES = 1 / 3
# With fewer hosts on one side nobody knows which one is right.
LEAST_HOSTS_TO_TELL = 3
# A download that is expected to take this many seconds more is slow: another donor then costs less than waiting. It is
# looked at once a second.
SLOW_SECONDS, CHECK_SECONDS = 10.0, 1.0


# The speed of an unknown donor, in bytes per second.
ASSUMED_SPEED = 1e6
# A donor whose state was no good is avoided for ten minutes: the time in which a tracker forgets a peer.
REFUSAL_SECONDS = 600.0

# One that offers what this peer can never use is not asked at all for a minute, the time of two declarations.
REST_SECONDS = 60.0

_MAX_REMEMBERED = 1024


class DonorLeft(Enum):
    """Why a state was not taken from a donor, or not to the end."""

    DIFFERS = "differs"
    """It refuses, because it has other settings than this peer."""
    DOES_NOT_SHARE = "does not share"
    BUSY = "busy"
    """It serves as many others as it can."""
    OF_NO_USE = "of no use"
    """What it offers makes no sense, or does not fit this peer."""
    REFUSED_VERSION = "has a version that was refused"
    """This peer's user does not want its version."""
    FAILED = "failed"
    """It could not be reached, fell silent, or sent something wrong."""
    SLOW = "slow"
    """Another version is expected to be here sooner."""


def _remember(known: dict[K, V], key: K, value: V) -> None:
    """Add an entry as the newest one, and drop the oldest if there are too many."""
    known.pop(key, None)
    known[key] = value
    if len(known) > _MAX_REMEMBERED:
        del known[next(iter(known))]


class DonorMemory:
    """What this peer has seen of donors in all its downloads."""

    def __init__(self) -> None:
        self._speeds: dict[PeerID, float] = {}
        # By donor, the time until which it is not asked at all (left out), or only after all others (distrusted).
        self._left_out: dict[PeerID, float] = {}
        self._distrusted: dict[PeerID, float] = {}
        self._unwanted: dict[bytes, None] = {}
        self._told_busy: dict[PeerID, None] = {}
        self.warn_seldom = Seldom(logger.warning)

    def note_speed(self, donor: PeerID, nbytes: int, seconds: float) -> None:
        """Note how many bytes a donor has sent in this time. Too small samples are ignored."""
        if nbytes or seconds > 1:
            speed, known = nbytes / max(seconds, 1e-3), self._speeds.get(donor)
            _remember(self._speeds, donor, speed if known is None else (known + speed) / 2)

    def speed(self, donor: PeerID) -> float:
        """A donor's speed in bytes per second, assumed if it is unknown."""
        return self._speeds.get(donor, ASSUMED_SPEED)

    def leave_out(self, donor: PeerID, version: bytes | None, now: float) -> None:
        """See :meth:`~shoal.averaging.state.donor.StateSharing.leave_out`."""
        _remember(self._distrusted if version is None else self._left_out, donor, now + REFUSAL_SECONDS)
        if version is not None:
            _remember(self._unwanted, version, None)

    def rest(self, donor: PeerID, now: float) -> None:
        """Do not ask a donor for a while, because this peer can never use what it offers."""
        _remember(self._left_out, donor, max(self._left_out.get(donor, now), now + REST_SECONDS))

    def asks(self, donor: PeerID, now: float) -> bool:
        """Whether a donor may be asked."""
        return self._left_out.get(donor, now) <= now

    def ranked(self, donor: PeerID, rank: float, now: float) -> float:
        """The rank of a donor (higher is better); a distrusted one comes last."""
        return rank if self._distrusted.get(donor, now) <= now else -1e300

    def wants(self, version: bytes) -> bool:
        """Whether this peer's user has not refused a version."""
        return version not in self._unwanted

    def tells_busy(self, donor: PeerID) -> bool:
        """Whether this is the first report that a donor is busy; the user is told only once."""
        is_new = donor not in self._told_busy
        _remember(self._told_busy, donor, None)
        return is_new


class _Offer:
    """A donor's answer: the version that it has."""

    def __init__(self, donor: Donor, header: StateHeader, hashes: bytes) -> None:
        self.donor, self.header, self.hashes = donor, header, hashes
        self.version = version_of(header.tensors, header.tensor_bytes, hashes)
        self.total_bytes = sum(header.tensor_bytes)
        self.decision: asyncio.Future[Download | None] = asyncio.get_running_loop().create_future()
        """The download to which the donor shall contribute; ``None``: to none."""

    def decide(self, download: Download | None) -> None:
        """Let the donor contribute to a download, or to none. The first decision holds."""
        if not self.decision.done():
            self.decision.set_result(download)


@dataclass(frozen=True)
class Wish:
    """What a newcomer wants, and from whom it may take it."""

    p2p: P2P
    get_stub: Callable[[PeerID], StubBase]
    """Makes a stub of the averager protocol for a donor."""
    request: DownloadRequest
    max_bytes: int
    """Larger states are refused before any memory is taken."""
    chunk_timeout: float
    """A donor is given up after this many seconds of silence."""
    admits: Callable[[PeerID], bool]
    """Tells whether a peer that a donor has named may be asked."""
    most_voters: int = MAX_VOTERS
    """How many donors are asked for their version. One, if the versions of all differ anyway."""
    rate: float = math.inf
    """The most bytes that are taken in a second."""
    is_one_state: bool = True
    """Whether all donors of an epoch have the same state, if nothing is wrong with them."""
    check: Callable[[Sequence[TensorMetadata]], object] | None = None
    """Raises ``ValueError`` if tensors with these descriptions are of no use to this peer."""


class DonorLog:
    """What came of the donors of one download.

    Args:
        wish: what is wanted.
        memory: what this peer has seen of donors before.
        donors: those that may be asked.
    """

    def __init__(self, wish: Wish, memory: DonorMemory, donors: Iterable[Donor]) -> None:
        self._wish, self.memory = wish, memory
        self.waiting: deque[Donor] = deque(donors)
        """Donors that have not been asked yet, or may be asked again."""
        self.left: dict[PeerID, DonorLeft] = {}
        """By donor whose state was not taken: why."""
        self.contradictions: dict[PeerID, str] = {}
        """By donor that refuses because this peer differs from it: in what, in words."""
        self.again_in: float | None = None
        """The seconds after which a busy donor may have a place, the least that any says. ``None``: none is busy."""
        self._named: dict[PeerID, float] = {}
        self._known = {peer for _, peer in self.waiting}

    def has_more(self) -> bool:
        """Whether donors are left to ask. If not, peers that busy donors have named are turned to."""
        if not self.waiting:
            self.waiting.extend((rank, peer) for peer, rank in self._named.items())
            self._named.clear()
        return bool(self.waiting)

    def note_refusal(self, donor: Donor, answer: StateAnswer) -> None:
        """Note that a donor has refused, and the other donors that a busy one names."""
        rank, peer = donor
        if isinstance(answer, StateRefused) and answer.contradiction:
            self.contradictions[peer] = reason = one_line(answer.contradiction)
            self.memory.warn_seldom("donor %s refuses to give this peer its state: %s", peer, reason, about=peer)
            self.leave(peer, DonorLeft.DIFFERS)
            return
        if not isinstance(answer, DonorBusy):
            self.leave(peer, DonorLeft.DOES_NOT_SHARE)
            return
        self.again_in = answer.again_in if self.again_in is None else min(self.again_in, answer.again_in)
        self.leave(peer, DonorLeft.BUSY)
        if self.memory.tells_busy(peer):
            logger.warning(
                "donor %s serves as many others as it can: it says to come again in %.0f s", peer, answer.again_in
            )
        for record in answer.others:
            other = PeerID(record.peer_id)
            if other not in self._known and self._wish.admits(other):
                try:
                    self._wish.p2p.add_addresses(other, record.addresses[:MAX_ADDRESSES_PER_PEER])
                except ValueError:
                    continue
                self._known.add(other)
                self._named[other] = rank

    def leave_out(self, peer: PeerID, error: Exception) -> None:
        """Note that this peer can never use what a donor offers, and do not ask that donor for a while."""
        self._wish.p2p.metrics.states_refused += 1
        self.memory.warn_seldom("the state of peer %s is of no use: %s", peer, error, about=peer)
        if not self._wish.request.part:  # a donor that lacks a part of the state may still have a good state
            self.memory.rest(peer, asyncio.get_running_loop().time())
        self.leave(peer, DonorLeft.OF_NO_USE)

    def leave(self, peer: PeerID, reason: DonorLeft) -> None:
        """Note that a donor is not used, or not any more."""
        self.left[peer] = reason
        self._wish.p2p.metrics.donors_left[reason.value] += 1
        logger.debug("donor %s is left: %s", peer, reason.value)


class _Dials:
    """The connections to the next donors, made ahead: those that are dead cost the time of one together."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p
        self._dials: dict[PeerID, asyncio.Future[None]] = {}

    def begin(self, donors: Iterable[Donor]) -> None:
        """Dial donors, whatever their ranks."""
        for _, peer in itertools.islice(donors, MAX_VOTERS):
            if peer not in self._dials:
                self._dials[peer] = asyncio.ensure_future(self._dial(peer))

    async def _dial(self, peer: PeerID) -> None:
        # Not ``p2p.prepare``: it does not wait for a dial that is under way already, nor tell how that one ends.
        self._p2p.pool.release(await self._p2p.pool.acquire(peer), reusable=True)

    async def reach(self, peer: PeerID) -> None:
        """Wait for the connection to a donor, if it has been dialled.

        Raises:
            DialError: the donor cannot be reached.
        """
        if (dial := self._dials.get(peer)) is not None:
            await asyncio.shield(dial)

    async def close(self) -> None:
        await cancel_and_wait(*self._dials.values())


async def download_from(log: DonorLog, wish: Wish) -> GivenState | None:
    """Download the version that most of the best donors show; ``None``: no donor has delivered a state.

    Args:
        log: has the donors, and takes down what comes of them.
        wish: what is wanted.
    """
    dials, kept = _Dials(wish.p2p), dict[bytes, Download]()
    try:
        while log.has_more():
            dials.begin(log.waiting)
            state = await _Attempt(wish, log, dials, kept).run()
            if state is not None:
                return state
        return None
    finally:
        await dials.close()


class _Attempt:
    """One vote, and the download of the version that it chose.

    It has many fields, because one set of donors moves between these states: asked, offering, active, in reserve. The
    next donor to ask follows from all of them together.

    Args:
        kept: by version, downloads that were left for another version.
    """

    def __init__(self, wish: Wish, log: DonorLog, dials: _Dials, kept: dict[bytes, Download]) -> None:
        self._wish, self._log, self._dials, self._kept = wish, log, dials, kept
        self._waiting = log.waiting
        self._rank = self._waiting[0][0]
        self._offers: list[_Offer] = []
        # Donors that have been asked and have neither answered nor failed.
        self._asked: dict[Donor, None] = {}
        # Donors that deliver chunks.
        self._active: dict[Donor, None] = {}
        # Donors of the chosen version that are not needed yet.
        self._reserve: deque[Donor] = deque()
        self._download: Download | None = None
        self._source: _Offer | None = None
        self._is_slow = self._is_left = False
        # The number of additional donors that are wanted because the others are slow.
        self._extra = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()

    async def run(self) -> GivenState | None:
        """The state; ``None`` if it did not arrive. Then other donors may be left to ask."""
        try:
            voters = self._ask_best()
            offer = await self._vote(voters)
            if offer is None:
                return None
            self._rank = offer.donor[0]
            self._tell_of_others(offer)
            self._begin(offer)
            await self._look_after()
            return await self._result()
        except (ValueError, RuntimeError) as e:
            self._log.leave_out(voters[0][1] if self._source is None else self._source.donor[1], e)
            return None
        finally:
            await cancel_and_wait(*self._tasks)
            self._give_back()

    def _give_back(self) -> None:
        """Put donors of other versions back on the list, because they may be asked again."""
        version = None if self._download is None else self._download.version
        others = [offer.donor for offer in self._offers if offer.version != version]
        if self._is_left:
            # The donors for which the download was left come first.
            left = [offer.donor for offer in self._offers if offer.version == version]
            self._waiting.extendleft(reversed(sorted(others, key=lambda donor: self._seconds_from(donor))))
            self._waiting.extend(left)
            return
        merged = sorted([*self._waiting, *others], key=lambda donor: donor[0])
        self._waiting.clear()
        self._waiting.extend(merged)

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask_best(self) -> list[Donor]:
        """Ask the first donors that wait, as far as they have the same rank."""
        rank = self._waiting[0][0]
        asked = [donor for donor in self._waiting if donor[0] == rank][: self._wish.most_voters]
        for donor in asked:
            self._waiting.remove(donor)
            self._ask(donor)
        return asked

    def _ask(self, donor: Donor) -> None:
        self._asked[donor] = None
        self._tasks.append(asyncio.ensure_future(self._take_from(donor)))

    async def _take_from(self, donor: Donor) -> None:
        """Ask a donor for its version, and take part of a download from it if it is chosen."""
        wish, log, peer = self._wish, self._log, donor[1]
        try:
            await self._dials.reach(peer)
            async with wish.get_stub(peer).rpc_download_state() as call:
                await call.send(wish.request)
                header, hashes = await open_state(call, wish.max_bytes, wish.chunk_timeout, wish.check)
                if not isinstance(header, StateHeader):
                    log.note_refusal(donor, header)
                    return
                offer = _Offer(donor, header, hashes)
                if not log.memory.wants(offer.version):
                    log.leave(peer, DonorLeft.REFUSED_VERSION)
                    return
                self._note_offer(offer)
                download = await offer.decision
                if download is not None:
                    await self._fetch(download, call, peer)
                    return
                # The call ends properly, which keeps the connection: this peer may soon average with the donor.
                await call.send_end()
                async with asyncio.timeout(wish.chunk_timeout):
                    await call.receive(StateChunk)
        except UnusableStateError as e:
            log.leave_out(peer, e)
        except PEER_FAILURES as e:
            log.leave(peer, DonorLeft.FAILED)
            warn = log.memory.warn_seldom  # anybody can declare any number of donors
            warn("could not download the state of %s: %s", peer, reason_of(e), about=peer)
        finally:
            self._asked.pop(donor, None)
            self._active.pop(donor, None)
            self._news.set()

    def _note_offer(self, offer: _Offer) -> None:
        del self._asked[offer.donor]
        self._offers.append(offer)
        self._news.set()
        if self._download is not None:
            self._use(offer)

    def _use(self, offer: _Offer) -> None:
        """Decide about a donor that has answered: it contributes, is kept in reserve, or has another version."""
        assert self._download is not None
        if offer.version != self._download.version:
            offer.decide(None)
        elif len(self._active) < self._most_active():
            self._active[offer.donor] = None
            offer.decide(self._download)
        else:
            self._reserve.append(offer.donor)
            offer.decide(None)

    def _most_active(self) -> int:
        assert self._download is not None
        return (MAX_DONORS if self._download.total_bytes >= WORTH_SHARING_BYTES else 1) + self._extra

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
            self._log.memory.note_speed(peer, arrivals.total, loop.time() - arrivals.began_at)
            await cancel_and_wait(fetching)

    # --- the vote -----------------------------------------------------------------------------------------------------

    async def _vote(self, voters: list[Donor]) -> _Offer | None:
        """The offer to take: of the version that most donors show that answer in time; ``None``: none answers.

        Args:
            voters: the donors that have been asked. Those of the next rank are added if none of these answers soon.
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
                ends_at = loop.time() + min(patience, self._wish.chunk_timeout / 2)
            if loop.time() >= ends_at:
                return best
            await first_completed(self._news.wait(), timeout=ends_at - loop.time())

    def _votes(self) -> Counter[bytes]:
        """By version: the number of hosts that show it. Several peers on one host have one vote for a version."""
        host_of = self._wish.p2p.host_of
        pairs = {(offer.version, host_of(offer.donor[1])) for offer in self._offers}
        return Counter(version for version, _ in pairs)

    def _weights(self) -> dict[bytes, int]:
        votes = self._votes()
        least = LEAST_SHARE_OF_VOTES * votes.total()
        return {version: count if count >= least else 1 for version, count in votes.items()}

    def _best(self, voters: Collection[Donor]) -> _Offer | None:
        """An offer of the version with the most votes, with the metadata that most donors of that version show."""
        if not self._offers:
            return None
        order, weights = {donor: number for number, donor in enumerate(voters)}, self._weights()
        rank = min(offer.donor[0] for offer in self._offers)
        of_best_rank = [offer for offer in self._offers if offer.donor[0] == rank]
        first = min(of_best_rank, key=lambda offer: (-weights[offer.version], order[offer.donor]))
        same = [offer for offer in self._offers if offer.version == first.version]
        host_of = self._wish.p2p.host_of
        pairs = {(offer.header.metadata, host_of(offer.donor[1])) for offer in same}
        metadata = Counter(shown for shown, _ in pairs)
        return min(same, key=lambda offer: (-metadata[offer.header.metadata], order[offer.donor]))

    def _is_certain(self, best: _Offer) -> bool:
        """Whether no other version can get more votes."""
        return 2 * self._votes()[best.version] > self._votes().total() + len(self._asked)

    def _tell_of_others(self, best: _Offer) -> None:
        """Warn of donors whose state differs from that of most hosts of the same epoch, by their metadata."""
        votes = self._votes()
        is_clear = votes[best.version] >= LEAST_HOSTS_TO_TELL and 2 * votes[best.version] > votes.total()
        if not (self._wish.is_one_state and is_clear):
            return
        for offer in self._offers:
            if offer.version != best.version and offer.header.metadata == best.header.metadata:
                self._wish.p2p.metrics.troubles["states that differ"] += 1
                self._log.memory.warn_seldom(
                    "the state of donor %s is not that of %d other hosts, at the same epoch: it is not taken. Either "
                    "its machine computes otherwise or is broken, or it lies",
                    offer.donor[1],
                    votes[best.version],
                    about=offer.donor[1],
                )

    # --- the download -------------------------------------------------------------------------------------------------

    def _begin(self, offer: _Offer) -> None:
        kept, wish = self._kept.pop(offer.version, None), self._wish
        self._source = offer
        if kept is not None:
            kept.resume(offer.header)
        self._download = kept or Download(offer.header, offer.hashes, wish.chunk_timeout, wish.rate)
        for each in [offer, *(other for other in self._offers if other is not offer)]:
            self._use(each)

    async def _look_after(self) -> None:
        """Ask further donors for help as needed. Ends when the state is here, no donor is left, or another is better.

        "Better" means that another version is expected to be here sooner.
        """
        download = self._download
        assert download is not None
        while not download.finished.is_set():
            self._news.clear()
            helper = self._next_helper()
            if helper is not None:
                self._ask(helper)
            elif (not self._active and not self._asked) or (self._is_slow and self._is_better_left()):
                return
            elif self._is_slow and not self._asked and self._waiting:
                # No donor of this rank can help, and no version that is known would be here sooner.
                self._extra += 1
                self._ask(self._waiting.popleft())
            await first_completed(download.finished.wait(), self._news.wait(), timeout=CHECK_SECONDS)
            self._is_slow = download.seconds_left() > SLOW_SECONDS

    def _next_helper(self) -> Donor | None:
        """The next donor to ask for help; ``None``: none is needed, or none is left."""
        is_enough = len(self._active) + len(self._asked) >= self._most_active()
        if is_enough and (self._asked or not self._is_slow):
            return None
        # Donors of a worse rank are asked only if no other is left.
        is_last_hope = not self._active and not self._asked
        if not self._reserve and not (self._waiting and (self._waiting[0][0] == self._rank or is_last_hope)):
            return None
        self._extra += is_enough
        return (self._reserve or self._waiting).popleft()

    def _is_better_left(self) -> bool:
        """Whether another version with as many votes is expected to be here sooner; if so, leave this download."""
        download, weights = self._download, self._weights()
        assert download is not None
        rivals = [offer for offer in self._offers if weights[offer.version] >= weights[download.version]]
        rivals = [offer for offer in rivals if offer.version != download.version]
        if not rivals:
            return False
        best = min(rivals, key=lambda offer: self._seconds_from(offer.donor))
        seconds = download.seconds_left()
        if self._seconds_from(best.donor) >= seconds:
            return False
        self._kept[download.version], self._is_left = download, True
        for _, peer in self._active:
            logger.warning(
                "donor %s is left for %s: its state would take another %.0f s", peer, best.donor[1], min(seconds, 1e6)
            )
            self._log.leave(peer, DonorLeft.SLOW)
        return True

    def _seconds_from(self, donor: Donor) -> float:
        """The seconds that a donor's version is expected to take if it is downloaded from this donor."""
        offer = next(offer for offer in self._offers if offer.donor == donor)
        kept = self._kept.get(offer.version)
        missing = offer.total_bytes if kept is None else kept.missing_bytes
        return missing / max(self._log.memory.speed(donor[1]), 1e-9)

    async def _result(self) -> GivenState | None:
        if self._download is None or self._source is None or not self._download.finished.is_set():
            return None
        state = GivenState(*await run_in_worker(self._download.result))
        state.donor, state.version = self._source.donor[1], self._download.version
        return state
