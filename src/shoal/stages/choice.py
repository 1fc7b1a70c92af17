"""Which peer of a stage gets a microbatch: the one that is expected to complete it first.

Of a peer that this sender has not tried yet, only the record is known::

    expected = (queue + 1) / rate             the queue fades with the age of the record

Later, the sender's own measurements count. They include the line, and the waiting behind others' microbatches::

    expected = (own in flight + 1) × pace     pace: moving average of seconds / own in flight, for each that was done

So each sender sends a peer more until it takes as long as others do. The pace of a peer that is not chosen fades
towards its record, so that it is tried again. A microbatch waits for a fast peer that has no room, and takes a slow one
when it has waited for as long as that would have saved: near the end of a step, all wait for the last microbatch.

All of this is computed from arguments, without a clock or a network. All times are DHT times, because those of records
are.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

from shoal.base.bounded import Bounded
from shoal.p2p import PeerID
from shoal.stages.directory import RENEWAL_SECONDS, StageRecord

# The weight of the newest sample in the pace, and the seconds in which the pace fades by half (chosen).
ALPHA, HALF_LIFE_SECONDS = 0.2, 30.0
# A failed call counts as a sample of at least this many seconds (chosen): a refusal takes none, and is not fast.
FAILURE_SECONDS = 5.0
# Peers that this sender has not tried yet get at most this share of what it has in flight, and at least one microbatch
# in all (chosen).
UNTRIED_SHARE = 0.1
# Peers that are expected to need this much longer than the best one are as good (chosen): records are not that exact,
# and senders that all know the same records must not all choose the same peer.
TIE = 1.1
# The speed of a peer that tells none, if no other does, in microbatches per second (chosen).
UNKNOWN_RATE = 1.0
# A record tells that its peer is behind if it was made this many seconds after the step began. A peer that has said it
# is left out for as long (chosen).
BEHIND_SECONDS = 5.0
# Of a larger stage, a random sample of this many peers is compared (chosen): a choice takes about a millisecond.
MOST_COMPARED = 128
# The number of peers to remember (chosen).
MOST_MEASURED = 1024


@dataclass
class PeerTimes:
    """What a sender has seen of one peer."""

    sent: deque[tuple[float, int]] = field(default_factory=deque)
    """For each microbatch in flight: when it was sent, and how many were in flight then, itself included."""
    pace: float = 0.0
    """Seconds for each microbatch in flight."""
    at: float = 0.0
    """When the pace was last measured."""
    is_tried: bool = False
    behind: tuple[int, float] = (-1, 0.0)
    """The latest step for which it was not ready, and when."""

    def sent_after(self, time: float) -> int:
        """How many microbatches in flight were sent after this time."""
        return sum(sent > time for sent, _ in self.sent)


_NOTHING = PeerTimes()


class Measurements:
    """What one sender has seen of the peers to which it sends. The caller notes each microbatch once as sent, and then
    once as done, failed or taken back."""

    def __init__(self) -> None:
        self._seen: Bounded[PeerID, PeerTimes] = Bounded(MOST_MEASURED)
        self._began: Bounded[int, float] = Bounded(16)

    def of(self, peer: PeerID) -> PeerTimes:
        """What was seen of a peer; nothing yet if it is new."""
        return self._seen.get(peer, _NOTHING)

    def note_sent(self, peer: PeerID, now: float) -> None:
        """A place for a microbatch is being reserved."""
        sent = self._noted(peer).sent
        sent.append((now, len(sent) + 1))

    def note_done(self, peer: PeerID, seconds: float, now: float) -> None:
        """The peer has done its part of a microbatch, and has needed these seconds for it since it was sent."""
        seen = self._noted(peer)
        _, in_flight = seen.sent.popleft() if seen.sent else (now, 1)
        self._add_sample(seen, seconds / in_flight, now)

    def note_failure(self, peer: PeerID, seconds: float, now: float) -> None:
        """A call failed, or there was no answer for these seconds: a slow sample. It is no longer in flight."""
        self.take_back(peer)
        self._add_sample(self._noted(peer), max(seconds, FAILURE_SECONDS), now)

    def take_back(self, peer: PeerID) -> None:
        """What was noted as sent was not: the peer had no room, or the microbatch was given up for another reason."""
        if sent := self.of(peer).sent:
            sent.pop()

    def note_behind(self, peer: PeerID, step: int, now: float) -> None:
        """The peer has said that it does not have the parameters of this step yet."""
        self._noted(peer).behind = step, now

    def began(self, step: int, now: float) -> float:
        """When this sender first chose a peer for this step."""
        if step not in self._began:
            self._began[step] = now
        return self._began[step]

    def _noted(self, peer: PeerID) -> PeerTimes:
        self._seen[peer] = seen = self._seen.get(peer) or PeerTimes()
        return seen

    @staticmethod
    def _add_sample(seen: PeerTimes, pace: float, now: float) -> None:
        seen.pace += (ALPHA if seen.is_tried else 1.0) * (pace - seen.pace)
        seen.at, seen.is_tried = now, True


def expected_seconds(record: StageRecord, seen: PeerTimes, now: float, usual_rate: float = UNKNOWN_RATE) -> float:
    """Seconds until a peer is expected to have done a microbatch that is sent now.

    Args:
        usual_rate: the speed of a peer that does not tell its own.
    """
    later = seen.sent_after(record.time)
    told = record.queue * max(0.0, 1 - max(0.0, now - record.time) / RENEWAL_SECONDS)
    by_record = (later + max(told, len(seen.sent) - later) + 1) / (record.rate or usual_rate)
    weight = 0.5 ** (max(0.0, now - seen.at) / HALF_LIFE_SECONDS) if seen.is_tried else 0.0
    return float(weight * (len(seen.sent) + 1) * seen.pace + (1 - weight) * by_record)


def is_behind(record: StageRecord, seen: PeerTimes, step: int, began: float, now: float) -> bool:
    """Whether a peer cannot take microbatches of this step, as far as known. An old record does not count.

    Args:
        began: when the step began.
    """
    noted, at = seen.behind
    has_said_so = 0 <= noted <= step and now - at < BEHIND_SECONDS
    return record.epoch < step and (has_said_so or record.time > began + BEHIND_SECONDS)


def choose(
    candidates: Mapping[PeerID, StageRecord],
    measured: Measurements,
    *,
    now: float,
    rng: random.Random,
    step: int | None = None,
    excluded: Collection[PeerID] = (),
    busy: Collection[PeerID] = (),
    waited: float = 0.0,
) -> PeerID | None:
    """The peer of a stage that gets the next microbatch, or ``None`` while it is better to wait for one that is busy.

    Args:
        candidates: the records of the stage's peers.
        measured: what this sender has seen of them.
        now: DHT time.
        rng: decides between peers that are as good as each other.
        step: the step of the microbatch: peers that are behind it are left out. ``None``: any will do.
        excluded: peers that are left out, such as those that have failed with this microbatch.
        busy: those that have no room now.
        waited: the seconds for which the microbatch has waited for better peers.

    Returns:
        ``None`` if there is none.
    """
    began = now if step is None else measured.began(step, now)
    fit = {
        peer: (record, seen)
        for peer, record in candidates.items()
        if record.serves
        and peer not in excluded
        and not is_behind(record, seen := measured.of(peer), step or 0, began, now)
    }
    if len(fit) > MOST_COMPARED:
        fit = dict(rng.sample([*fit.items()], MOST_COMPARED))
    tried = {peer: each for peer, each in fit.items() if each[1].is_tried}
    untried = sum(len(seen.sent) for _, seen in fit.values() if not seen.is_tried)
    if tried and untried and untried + 1 > UNTRIED_SHARE * (1 + sum(len(seen.sent) for _, seen in fit.values())):
        fit = tried
    if not fit:
        return None
    usual = median([record.rate for record, _ in fit.values() if record.rate > 0] or [UNKNOWN_RATE])
    seconds = {peer: expected_seconds(record, seen, now, usual) for peer, (record, seen) in fit.items()}
    # If there is much to do, microbatches have waited for long, and all peers get some.
    limit = TIE * min(seconds.values()) + waited
    best = [peer for peer, each in seconds.items() if each <= limit and peer not in busy]
    return rng.choice(best) if best else None
