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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from shoal.averaging.messages import PEER_FAILURES, DownloadRequest, StateChunk, StateHeader, reason_of
from shoal.averaging.state.donor_memory import DonorMemory
from shoal.averaging.state.download import Download, GivenState, UnusableStateError, open_state, version_of
from shoal.averaging.state.rate_meter import RateMeter
from shoal.base.logs import one_line
from shoal.base.tasks import cancel_and_wait, first_completed, run_in_worker
from shoal.compression.base import TensorMetadata
from shoal.net.addresses import MAX_ADDRESSES_PER_PEER
from shoal.p2p import P2P, Call, PeerID, StubBase

logger = logging.getLogger(__name__)

Donor = tuple[float, PeerID]
"""A rank (lower is better) and a peer."""

# The most donors that are asked for their version, and the most from which a state is taken at once.
MAX_VOTERS, MAX_DONORS = 7, 4
# Smaller states are taken from one donor, unless it fails or is slow.
WORTH_SHARING_BYTES = 8 * 2**20
# After the first answer the vote waits so many seconds for others, and one second more for so many bytes of the state,
# because an honest donor first has to make a copy of it.
VOTE_SECONDS, VOTE_BYTES_PER_SECOND = 1.0, 50e6
# If a smaller share of the hosts shows a version, a few liars may have agreed on it. Then it counts as one vote.
LEAST_SHARE_OF_VOTES = 1 / 3
# With fewer hosts on one side nobody knows which one is right.
LEAST_HOSTS_TO_TELL = 3
# A download that is expected to take so many seconds more is slow; how often that is looked at.
SLOW_SECONDS, CHECK_SECONDS = 10.0, 1.0


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


class MultiSourceDownload:
    """One attempt to get a state from some donors.

    Args:
        p2p: this peer.
        get_stub: makes a stub of the averager protocol for a donor.
        memory: what this peer has seen of donors before.
        max_bytes: larger states are refused before any memory is taken.
        chunk_timeout: a donor is given up after so many seconds of silence.
        admits: tells whether a peer that a donor has named may be asked.
        part: names the part of the state that is wanted; empty: all of it.
        most_voters: so many donors are asked for their version. One, if the versions of all differ anyway.
        trains: whether this peer is going to train with the state.
        rate: so many bytes in a second are taken at most.
        is_one_state: whether all donors of an epoch have the same state, if nothing is wrong with them.
        check: raises ``ValueError`` if tensors with these descriptions are of no use to this peer.
    """

    def __init__(
        self,
        p2p: P2P,
        get_stub: Callable[[PeerID], StubBase],
        memory: DonorMemory,
        max_bytes: int,
        chunk_timeout: float,
        admits: Callable[[PeerID], bool],
        part: bytes = b"",
        most_voters: int = MAX_VOTERS,
        trains: bool = True,
        rate: float = math.inf,
        agreement: Mapping[str, str] | None = None,
        is_one_state: bool = True,
        check: Callable[[Sequence[TensorMetadata]], object] | None = None,
    ) -> None:
        self.check = check
        self.p2p, self.get_stub, self.memory = p2p, get_stub, memory
        self.is_one_state = is_one_state
        self.request = DownloadRequest(part=part, trains=trains, agreement=dict(agreement or {}))
        self.most_voters, self.rate = most_voters, rate
        self.contradictions: dict[PeerID, str] = {}
        """By donor that refuses because this peer differs from it: in what, in words."""
        self.max_bytes, self.chunk_timeout, self._admits = max_bytes, chunk_timeout, admits
        self.busy = False
        """Whether a donor has refused because it serves too many others."""
        self.again_in = 0.0
        """The seconds after which a busy donor may have a place, as it says; the least of all donors."""
        self.waiting: deque[Donor] = deque()
        """Donors that have not been asked yet, or may be asked again."""
        self.kept: dict[bytes, Download] = {}
        """By version: downloads that were left for another version."""
        self._named: dict[PeerID, float] = {}
        self._known: set[PeerID] = set()
        self._dials: dict[PeerID, asyncio.Future[None]] = {}

    async def run(self, donors: Iterable[Donor]) -> GivenState | None:
        """Download the version that most of the best donors show; ``None``: no donor has delivered a state."""
        self.waiting.extend(donors)
        self._known.update(peer for _, peer in self.waiting)
        try:
            while self.waiting or self._take_named():
                self._dial_next()
                state = await _Attempt(self).run()
                if state is not None:
                    return state
            return None
        finally:
            await cancel_and_wait(*self._dials.values())

    def _dial_next(self) -> None:
        """Dial the next donors at once, whatever their ranks: those that are dead cost the time of one together."""
        for _, peer in itertools.islice(self.waiting, MAX_VOTERS):
            if peer not in self._dials:
                self._dials[peer] = asyncio.ensure_future(self._dial(peer))

    async def _dial(self, peer: PeerID) -> None:
        # Not ``p2p.prepare``: it does not wait for a dial that is under way already, nor tell how that one ends.
        self.p2p.pool.release(await self.p2p.pool.acquire(peer), reusable=True)

    async def reach(self, peer: PeerID) -> None:
        """Wait for the connection to a donor, if it has been dialled.

        Raises:
            DialError: the donor cannot be reached.
        """
        if (dial := self._dials.get(peer)) is not None:
            await asyncio.shield(dial)

    def _take_named(self) -> bool:
        """When no donors are left to ask, turn to peers that busy donors have named; returns whether there are any."""
        self.waiting.extend((rank, peer) for peer, rank in self._named.items())
        self._named.clear()
        return bool(self.waiting)

    def note_refusal(self, donor: Donor, header: StateHeader) -> None:
        """Note that a donor has refused, and the other donors that a busy one names."""
        rank, peer = donor
        if header.contradiction:
            self.contradictions[peer] = reason = one_line(header.contradiction)
            self.memory.warn_seldom("donor %s refuses to give this peer its state: %s", peer, reason, about=peer)
            self.leave(peer, "differs")
            return
        if not header.busy:
            self.leave(peer, "does not share")
            return
        self.again_in = min(self.again_in, header.again_in) if self.busy else header.again_in
        self.busy = True
        self.leave(peer, "busy")
        if self.memory.tells_busy(peer):
            logger.warning(
                "donor %s serves as many others as it can: it says to come again in %.0f s", peer, header.again_in
            )
        for record in header.others:
            other = PeerID(record.peer_id)
            if other not in self._known and self._admits(other):
                try:
                    self.p2p.add_addresses(other, record.addresses[:MAX_ADDRESSES_PER_PEER])
                except ValueError:
                    continue
                self._known.add(other)
                self._named[other] = rank

    def leave_out(self, peer: PeerID, error: Exception) -> None:
        """Note that this peer can never use what a donor offers, and do not ask that donor for a while."""
        self.p2p.metrics.states_refused += 1
        self.memory.warn_seldom("the state of peer %s is of no use: %s", peer, error, about=peer)
        if not self.request.part:  # a donor that lacks a part of the state may still have a good state
            self.memory.rest(peer, asyncio.get_running_loop().time())
        self.leave(peer, "of no use")

    def leave(self, peer: PeerID, reason: str) -> None:
        """Note that a donor is not used, or not any more."""
        self.p2p.metrics.donors_left[reason] += 1
        logger.debug("donor %s is left: %s", peer, reason)


class _Attempt:
    """One vote, and the download of the version that it chose."""

    def __init__(self, gathering: MultiSourceDownload) -> None:
        self._gathering, self._waiting = gathering, gathering.waiting
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
            self._gathering.leave_out(voters[0][1] if self._source is None else self._source.donor[1], e)
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
        asked = [donor for donor in self._waiting if donor[0] == rank][: self._gathering.most_voters]
        for donor in asked:
            self._waiting.remove(donor)
            self._ask(donor)
        return asked

    def _ask(self, donor: Donor) -> None:
        self._asked[donor] = None
        self._tasks.append(asyncio.ensure_future(self._take_from(donor)))

    async def _take_from(self, donor: Donor) -> None:
        """Ask a donor for its version, and take part of a download from it if it is chosen."""
        gathering, peer = self._gathering, donor[1]
        try:
            await gathering.reach(peer)
            async with gathering.get_stub(peer).rpc_download_state() as call:
                await call.send(gathering.request)
                header, hashes = await open_state(call, gathering.max_bytes, gathering.chunk_timeout, gathering.check)
                if not header.allowed:
                    gathering.note_refusal(donor, header)
                    return
                offer = _Offer(donor, header, hashes)
                if not gathering.memory.wants(offer.version):
                    gathering.leave(peer, "has a version that was refused")
                    return
                self._note_offer(offer)
                download = await offer.decision
                if download is not None:
                    await self._fetch(download, call, peer)
                    return
                # The call ends properly, which keeps the connection: this peer may soon average with the donor.
                await call.send_end()
                async with asyncio.timeout(gathering.chunk_timeout):
                    await call.receive(StateChunk)
        except UnusableStateError as e:
            gathering.leave_out(peer, e)
        except PEER_FAILURES as e:
            gathering.leave(peer, "failed")
            warn = gathering.memory.warn_seldom  # anybody can declare any number of donors
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
            self._gathering.memory.note_speed(peer, arrivals.total, loop.time() - arrivals.began_at)
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
                ends_at = loop.time() + min(patience, self._gathering.chunk_timeout / 2)
            if loop.time() >= ends_at:
                return best
            await first_completed(self._news.wait(), timeout=ends_at - loop.time())

    def _votes(self) -> Counter[bytes]:
        """By version: the number of hosts that show it. Several peers on one host have one vote for a version."""
        host_of = self._gathering.p2p.host_of
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
        host_of = self._gathering.p2p.host_of
        pairs = {(offer.header.metadata, host_of(offer.donor[1])) for offer in same}
        metadata = Counter(shown for shown, _ in pairs)
        return min(same, key=lambda offer: (-metadata[offer.header.metadata], order[offer.donor]))

    def _is_certain(self, best: _Offer) -> bool:
        """Whether no other version can get more votes."""
        return 2 * self._votes()[best.version] > self._votes().total() + len(self._asked)

    def _tell_of_others(self, best: _Offer) -> None:
        """Who shows something else than most hosts of the same epoch, which has the same metadata."""
        votes = self._votes()
        is_clear = votes[best.version] >= LEAST_HOSTS_TO_TELL and 2 * votes[best.version] > votes.total()
        if not (self._gathering.is_one_state and is_clear):
            return
        for offer in self._offers:
            if offer.version != best.version and offer.header.metadata == best.header.metadata:
                self._gathering.p2p.metrics.troubles["states that differ"] += 1
                self._gathering.memory.warn_seldom(
                    "the state of donor %s is not that of %d other hosts, at the same epoch: it is not taken. Either "
                    "its machine computes otherwise or is broken, or it lies",
                    offer.donor[1],
                    votes[best.version],
                    about=offer.donor[1],
                )

    # --- the download -------------------------------------------------------------------------------------------------

    def _begin(self, offer: _Offer) -> None:
        kept, gathering = self._gathering.kept.pop(offer.version, None), self._gathering
        self._source = offer
        if kept is not None:
            kept.resume(offer.header)
        self._download = kept or Download(offer.header, offer.hashes, gathering.chunk_timeout, gathering.rate)
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
        self._gathering.kept[download.version], self._is_left = download, True
        for _, peer in self._active:
            logger.warning(
                "donor %s is left for %s: its state would take another %.0f s", peer, best.donor[1], min(seconds, 1e6)
            )
            self._gathering.leave(peer, "slow")
        return True

    def _seconds_from(self, donor: Donor) -> float:
        """The seconds that a donor's version is expected to take if it is downloaded from this donor."""
        offer = next(offer for offer in self._offers if offer.donor == donor)
        kept = self._gathering.kept.get(offer.version)
        missing = offer.total_bytes if kept is None else kept.missing_bytes
        return missing / max(self._gathering.memory.speed(donor[1]), 1e-9)

    async def _result(self) -> GivenState | None:
        if self._download is None or self._source is None or not self._download.finished.is_set():
            return None
        state = GivenState(*await run_in_worker(self._download.result))
        state.donor, state.version = self._source.donor[1], self._download.version
        return state
