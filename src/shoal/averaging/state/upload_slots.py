"""The newcomers that download from a donor: a few at a time, and none that holds a place without using it.

A newcomer may lose its place if another one wants it, but only if it has hardly taken anything for a while. It must be
slower than the slowest line in use, or than a quarter of the speed at which it takes bytes while it asks for some. A
newcomer that has asked for half of the state keeps its place.

A peer has one place: a new call of it takes the place of its last one. If there is no place left, a newcomer from a
host without any gets one of a host that has several.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator

from shoal.averaging.state.download import Snapshot
from shoal.p2p import PeerID

# The most newcomers that a donor serves at a time.
MAX_DOWNLOADS = 8
# The most copies of its state that a donor keeps for them.
MAX_SNAPSHOTS = 2
# Newcomers get the same copy if it is not older than this: a crowd that comes at once costs one copy.
SNAPSHOT_AGE = 0.5
# A newcomer that takes fewer bytes per second than an ISDN line carries may lose its place, measured over 30 s.
SLOWEST = 16e3
SECONDS_TO_JUDGE = 30.0
# A newcomer that takes 20 MB/s after its first second need not be watched: it is done soon.
_FAST, _SECONDS_TO_BE_FAST = 2e7, 1.0
# A newcomer should take at least this part of the speed that its line is offered.
_PART_OF_SHARE = 0.25
# The most newcomers that are remembered as holders of the state, and for how many seconds.
_MAX_HOLDERS, _HOLDER_SECONDS = 4, 300.0
# Within this many seconds, a newcomer that has got the state tells others that it takes part.
_ARRIVAL_SECONDS = 10.0
# The seconds after which a newcomer that finds no place is told to come again, at least and at most.
_SOONEST, _LATEST = 1.0, 30.0


class Sharing:
    """A snapshot that some newcomers are downloading."""

    def __init__(self, taken_at: float, snapshot: asyncio.Future[Snapshot | None]) -> None:
        self.taken_at, self.snapshot = taken_at, snapshot
        self.places: list[UploadSlot] = []


class UploadSlot:
    """One newcomer's download.

    Args:
        trains: whether it is going to train with the state; an archive only keeps it.
    """

    def __init__(self, peer: PeerID, sharing: Sharing, *, trains: bool = True) -> None:
        self.peer, self.sharing, self.trains = peer, sharing, trains
        self.lost = asyncio.Event()
        """Set when the place was given to another newcomer."""
        self.reason = ""
        """Why, for the owner of the donor; empty: it has called again itself."""
        # When the newcomer could first ask for chunks; None while the snapshot is still being made.
        self._began_at: float | None = None
        self._chunks = 0
        self._given: set[int] = set()
        self._is_watched = False
        # One entry for each of the last seconds: its time, the bytes that were sent, and the seconds that this took.
        self._sent: deque[tuple[float, int, float]] = deque()

    def begin(self, chunks: int, now: float) -> None:
        """Note that the newcomer can ask for chunks from now on, and how many there are."""
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

        From then on it may be judged, so its bytes have to be counted exactly.
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
        # The speed while something was being sent: what the line offers this newcomer beside all others.
        share = sum(nbytes for _, nbytes, _ in self._sent) / max(seconds, 1e-9)
        return rate < max(SLOWEST, _PART_OF_SHARE * share)

    def seconds_left(self, now: float) -> float:
        """The seconds after which this place may be free."""
        if self._began_at is None:
            return 0.0
        left, since = self._chunks - len(self._given), now - self._began_at
        # The newcomer is either done by then, or old enough to be judged and to lose its place.
        return min(left * since / max(1, len(self._given)), max(0.0, SECONDS_TO_JUDGE - since) or _LATEST)


class UploadSlots:
    """The places of all newcomers at a donor.

    Args:
        take: begins to make a snapshot.
        host_of: the host of a peer.
    """

    def __init__(
        self, take: Callable[[], asyncio.Future[Snapshot | None]], host_of: Callable[[PeerID], Hashable] = lambda p: p
    ) -> None:
        self._take, self._host_of = take, host_of
        self.sharings: list[Sharing] = []
        # Newcomers that have got a whole snapshot, and when.
        self._holders: deque[tuple[PeerID, float]] = deque(maxlen=_MAX_HOLDERS)

    def __iter__(self) -> Iterator[UploadSlot]:
        return (place for sharing in self.sharings for place in sharing.places)

    def find(self, peer: PeerID, now: float, *, trains: bool = True) -> UploadSlot | None:
        """A place for one more newcomer; ``None`` if there are too many already."""
        for place in [place for place in self if place.peer == peer and not place.has_all]:
            self._take_away(place, now)
        if not self._has_snapshot(peer, now):
            return None
        if sum(not place.has_all for place in self) >= MAX_DOWNLOADS:
            taken = list(self)
            reasons = {place: self._reason_to_give_way(place, peer, now, taken) for place in taken}
            places = [place for place, reason in reasons.items() if reason]
            if not places:
                return None
            chosen = min(places, key=lambda place: (not place.is_idle(now), place.rate(now)))
            self._take_away(chosen, now, reasons[chosen])
        place = UploadSlot(peer, self._sharing(now), trains=trains)
        place.sharing.places.append(place)
        return place

    def _has_snapshot(self, peer: PeerID, now: float) -> bool:
        """Whether there is a fresh copy or room for one. A copy that no newcomer really uses is dropped for it."""
        if self._is_fresh(now) or len(self.sharings) < MAX_SNAPSHOTS:
            return True
        for sharing in self.sharings:
            reasons, kept = {}, list(self)
            for place in sharing.places:
                reasons[place] = self._reason_to_give_way(place, peer, now, kept)
                kept.remove(place)  # so that a network of which all places are here keeps one, and with it this copy
            if all(reason or place.has_all for place, reason in reasons.items()):
                for place, reason in reasons.items():
                    self._take_away(place, now, reason)
                return True
        return False

    def _reason_to_give_way(self, place: UploadSlot, peer: PeerID, now: float, places: list[UploadSlot]) -> str:
        """Why a newcomer may get one of these places; empty: it may not."""
        if place.is_idle(now):
            return f"it takes {place.rate(now) / 1e3:.1f} kB/s of the state, which is far less than it is offered"
        hosts = [self._host_of(each.peer) for each in places]
        is_one_of_several = hosts.count(self._host_of(place.peer)) > 1 and self._host_of(peer) not in hosts
        return "its network has several" if is_one_of_several and not place.has_half else ""

    def _is_fresh(self, now: float) -> bool:
        return bool(self.sharings) and now - self.sharings[-1].taken_at <= SNAPSHOT_AGE

    def _sharing(self, now: float) -> Sharing:
        if not self._is_fresh(now):
            self.sharings.append(Sharing(now, self._take()))
        return self.sharings[-1]

    def _take_away(self, place: UploadSlot, now: float, reason: str = "") -> None:
        place.reason = reason
        place.lost.set()
        self.leave(place, now)

    def leave(self, place: UploadSlot, now: float) -> None:
        """Free the place of a newcomer that is gone, and drop its snapshot if no other newcomer uses it."""
        if place.has_all and place.trains:  # an archive gives the state to nobody while the run lives
            self._holders.append((place.peer, now))
        sharing = place.sharing
        if place in sharing.places:
            sharing.places.remove(place)
            if not sharing.places:
                self.sharings.remove(sharing)

    def holders(self, now: float) -> list[PeerID]:
        """Newcomers that have recently got the whole state of this donor, the latest first."""
        return list(dict.fromkeys(peer for peer, since in reversed(self._holders) if now - since <= _HOLDER_SECONDS))

    def on_their_way(self, now: float) -> set[PeerID]:
        """Newcomers that are downloading, or have just got the whole state. This may be called in any thread."""
        places = [place for sharing in list(self.sharings) for place in list(sharing.places) if place.trains]
        arriving = {peer for peer, since in list(self._holders) if now - since <= _ARRIVAL_SECONDS}
        return arriving.union(place.peer for place in places)

    def again_in(self, now: float) -> float:
        """The seconds after which a newcomer that found no place should come again."""
        return max(_SOONEST, min(_LATEST, *(place.seconds_left(now) for place in self), _LATEST))
