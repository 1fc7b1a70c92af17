"""DHT time: one clock for the swarm, in Unix seconds.

All expiration times come from this clock. It is the machine's clock minus its offset, the seconds by which it is ahead
of the swarm. :class:`SwarmClock` learns the offset from exchanges with other peers, so that a machine whose clock is
off by minutes takes part like any other. A process has one such clock for all its swarms, because the offset is that
of the machine; in a simulation, each simulated machine has one.

How an offset is found
    Each exchange with a peer measures two differences: to the peer's own clock, and to the peer's opinion of the time
    of the swarm. A peer has one vote, from its exchange with the shortest round trip.

    1. A peer that knows only the peers through which it joined adopts the time that most of them hold.
    2. If two thirds of all known clocks, including this machine's, agree, they are right. So the machines that NTP
       keeps right set the time, no matter who came first, and are themselves never corrected.
    3. Otherwise the time is the one that most peers hold, including this one. So there is a time even if most clocks
       are off by different amounts. No single peer is followed.
    4. Without a majority nothing changes.

How time passes
    Between two exchanges, time passes as on a clock of the machine that is never set and keeps running while the
    machine sleeps. So a machine's clock that somebody sets, or that jumps, changes the offset and not the DHT time:
    other peers notice nothing. The user gets one line, and the peers are asked for the time again, because it may be
    the machine that stood still (a virtual machine that was paused) and its clock that is right now. Only a peer that
    has met no others follows the clock of its machine.

How it is applied
    Differences below a quarter of a second are ignored: they may be measurement errors. Offsets found in the first
    seconds are applied at once. Later the time does not go back by small amounts, it slows down instead. It is set back
    only if it is more than ``MAX_DHT_TIME_DISCREPANCY_SECONDS`` ahead, because others then misjudge every record.
    When others have agreed with this machine for ten minutes, its time is settled. From then on it moves by at most a
    second per minute, so that a crowd of newcomers cannot take the swarm to another time. Only three things still move
    it at once: the machine's clock has jumped; this peer has lost the swarm and come back; or two thirds of the known
    peers say so, most of whom agreed with this machine before. If two or more of the known peers have delivered in
    averaging rounds, only these have a vote on a settled time: a crowd of strangers does not move it at all.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from shoal.base.bounded import Bounded
from shoal.errors import set_the_clock

logger = logging.getLogger(__name__)

DHTExpiration = float

# Peers whose clocks differ by more than this many seconds cannot share expiration times safely.
MAX_DHT_TIME_DISCREPANCY_SECONDS = 3.0
# Differences up to this are not corrected.
UNNOTICEABLE_SECONDS = 0.25

WORTH_A_WARNING_SECONDS = 1.0
# Least difference of two readings: half a microsecond, so that they still differ after something is added to both.
SMALLEST_STEP = 2.0**-21
# Corrections apply at once for so long after the first exchange: peers still report, and nothing depends on it yet.
SETTLING_SECONDS = 5.0
# Seconds per second by which this clock loses while it slows down, until it is not ahead any more.
SLOW_DOWN = 0.1
# The time is settled when this many others, or all known ones if they are fewer, have agreed with it for so long.
SETTLED_BY = 3
SETTLED_AFTER_SECONDS = 600.0
# Seconds per second by which a settled time moves.
CREEP = 1 / 60
# Peers whose clocks are remembered. Known peers keep their places, so a crowd of newcomers cannot outvote them.
MAX_SOURCES = 32
# Older samples are forgotten.
MAX_AGE_SECONDS = 3600.0
# Slower exchanges are too inexact to be used.
MAX_ROUND_TRIP_SECONDS = 3.0
# After this time a slow exchange replaces a quick one, because the clock may have drifted.
NEWER_IS_BETTER_SECONDS = 600.0
# How often both clocks are read, to get two readings of one moment.
READING_ATTEMPTS = 5
# Limits the weight of short round trips: otherwise one peer that claims to be near could outvote two that are not.
_SHORT_ROUND_TRIP = 0.4


class _Sample(NamedTuple):
    """The result of an exchange with a peer, in seconds."""

    ahead_of_clock: float
    """How far this machine's clock is ahead of the peer's clock."""
    ahead_of_swarm: float
    """How far it is ahead of the peer's opinion of the time of the swarm."""
    round_trip: float
    heard_at: float
    has_agreed: bool = False
    """Whether the peer has ever agreed with this machine about the time of the swarm."""
    is_mate: bool = False
    """Whether it has delivered in averaging rounds, when it was last heard."""


class _Vote(NamedTuple):
    offset: float
    round_trip: float


class _Course(NamedTuple):
    """How far the machine's clock is ahead of the swarm; the value moves from ``begin`` to ``offset``."""

    wall_beyond_monotonic: float
    """By how much the one clock of the machine is ahead of the other one. If that changes, the first one was set."""
    offset: float = 0.0
    begin: float = 0.0
    rate: float = 0.0
    """Seconds per second."""
    since: float = 0.0

    def at(self, now: float) -> float:
        """The value at this reading of the monotonic clock."""
        moved = self.rate * (now - self.since)
        return self.begin + max(-moved, min(moved, self.offset - self.begin))


def steady_clock() -> Callable[[], float]:
    """A clock in seconds that is never set and, unlike :func:`time.monotonic`, runs while the machine sleeps."""
    if sys.platform == "win32":
        return time.monotonic
    else:
        name = "CLOCK_BOOTTIME" if hasattr(time, "CLOCK_BOOTTIME") else "CLOCK_MONOTONIC"  # the latter on macOS
        return functools.partial(time.clock_gettime, getattr(time, name))


class SwarmClock:
    """The time of the swarm, as one machine knows it.

    Args:
        wall: the clock of the machine, Unix seconds.
        monotonic: seconds of a clock that is never set; default: :func:`steady_clock`.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] | None = None) -> None:
        self._wall, self._monotonic = wall, monotonic or steady_clock()
        self._lock = threading.RLock()  # any thread that asks for the time may find that the clock has jumped
        self._course = _Course(self._wall() - self._monotonic())
        self.samples: dict[Hashable, _Sample] = {}
        """What each source has told last."""
        self.on_jump: dict[Hashable, Callable[[], object]] = {}
        """Called, in any thread, after the machine's clock has jumped; by the names of :meth:`add_own`."""
        self._met_at = -math.inf
        self._own: dict[Hashable, None] = {}
        self._joined_through: dict[Hashable, None] = {}
        self._first_heard_at: float | None = None
        self._agreed_since: float | None = None
        self._is_settled = False
        self._told_offset = 0.0
        # Peers that tell another time than this settled clock, and since when; the first ones are forgotten.
        self._differing: Bounded[Hashable, float] = Bounded()

    # --- reading ------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Unix seconds. May be called from any thread."""
        wall, now, course = self._read()
        return wall - course.at(now)

    @property
    def offset(self) -> float:
        """Seconds by which the clock of this machine is ahead of the swarm; 0 if it is right."""
        _, now, course = self._read()
        return course.at(now)

    def _read(self) -> tuple[float, float, _Course]:
        """Both clocks of the machine, and what to make of them; notices that the first one has jumped."""
        course = self._course
        wall, now = self._wall(), self._monotonic()
        if abs(wall - now - course.wall_beyond_monotonic) > WORTH_A_WARNING_SECONDS:
            self._note_jump()
            course, now = self._course, self._monotonic()
            wall = now + course.wall_beyond_monotonic
        return wall, now, course

    def _read_at_once(self) -> tuple[float, float] | None:
        """Both clocks at one moment; ``None`` if this thread is held up each time between the two readings."""
        for _ in range(READING_ATTEMPTS):
            before, wall, now = self._monotonic(), self._wall(), self._monotonic()
            if now - before < UNNOTICEABLE_SECONDS:
                return wall, now
        return None

    def _note_jump(self) -> None:
        with self._lock:
            read, course = self._read_at_once(), self._course
            if read is None:
                return  # the next reading will show it
            wall, now = read
            jump = wall - now - course.wall_beyond_monotonic
            if abs(jump) <= WORTH_A_WARNING_SECONDS:
                return  # another thread has seen to it, or this one was held up between two readings
            self._course = course = course._replace(wall_beyond_monotonic=wall - now)
            self.settle_anew()
            if not course.offset and now - self._met_at > MAX_AGE_SECONDS:
                return  # the clock of the machine is all that there is
            self._course = course._replace(offset=course.offset + jump, begin=course.begin + jump)
            for source, sample in self.samples.items():
                self.samples[source] = sample._replace(
                    ahead_of_clock=sample.ahead_of_clock + jump, ahead_of_swarm=sample.ahead_of_swarm + jump
                )
            self._tell(jump)
            listeners = list(self.on_jump.values())
        for call in listeners:
            call()

    @property
    def sources(self) -> dict[Hashable, float]:
        """For each known peer, the seconds by which its time is ahead of the clock of this machine."""
        return {source: -sample.ahead_of_swarm for source, sample in self.samples.items()}

    @property
    def is_disputed(self) -> bool:
        """Whether there are peers to compare with, but no majority of them agrees."""
        return bool(self.samples) and self._estimate() is None

    @property
    def is_joining(self) -> bool:
        """Whether the user has named peers of a swarm, and nobody has told the time yet."""
        return bool(self._joined_through) and self._first_heard_at is None

    # --- exchanges with others ----------------------------------------------------------------------------------------

    def add_own(self, name: Hashable) -> None:
        """Ignore a peer that reads this very clock: its opinion adds nothing."""
        self._own[name] = None

    def remove_own(self, name: Hashable) -> None:
        """Forget a peer of :meth:`add_own` that is gone."""
        self._own.pop(name, None)
        self.on_jump.pop(name, None)

    def meet(self) -> None:
        """Note that there are other peers: from now on, the time does not jump with the clock of this machine."""
        self._met_at = self._monotonic()

    def join_through(self, source: Hashable) -> None:
        """Register a peer that the user has named; its time is adopted as long as no other peer is known."""
        if source not in self._own:  # nothing will be heard from these, see add_own
            self._joined_through[source] = None

    def hear(
        self, source: Hashable, swarm_time: float, their_offset: float, round_trip: float, *, is_mate: bool = False
    ) -> float:
        """Record an exchange with another peer that has just ended.

        Args:
            source: the peer.
            swarm_time: the time of the swarm in its opinion, when it answered.
            their_offset: seconds by which its own clock was ahead of that.
            round_trip: seconds that the exchange took, without the time that the peer needed to answer.
            is_mate: the peer has delivered in averaging rounds.

        Returns:
            By how many seconds the peer's time is later than the one that this peer and others have agreed about, if it
            keeps telling another one; else 0.
        """
        numbers = (swarm_time, their_offset, round_trip)
        if source in self._own or not all(map(math.isfinite, numbers)) or swarm_time <= 0:
            return 0.0
        if round_trip > MAX_ROUND_TRIP_SECONDS:
            return 0.0
        round_trip = max(0.0, round_trip)
        with self._lock:
            wall, now, course = self._read()
            self._met_at = now
            # Where the system only slows down or speeds up its clock, the two clocks drift apart. That is no jump.
            self._course = course._replace(wall_beyond_monotonic=wall - now)
            if self._first_heard_at is None:
                self._first_heard_at = now
            ahead = wall - (swarm_time + round_trip / 2)
            self._note(source, _Sample(ahead - their_offset, ahead, round_trip, now, is_mate=is_mate))
            self._note_agreement(now)
            new = self.samples.get(source)
            if new is not None and (self._course.offset or self._told_offset or not _is_unnoticeable(new)):
                self._decide(now)  # otherwise no correction is active, and the new sample asks for none
            return self._lasting_difference(source, self.offset - ahead, now)

    def _lasting_difference(self, source: Hashable, seconds: float, now: float) -> float:
        """Newcomers with wrong clocks have some time to adopt that of the swarm."""
        if not self._is_settled or abs(seconds) <= MAX_DHT_TIME_DISCREPANCY_SECONDS:
            self._differing.pop(source, None)
            return 0.0
        since = self._differing.setdefault(source, now)
        # Without anybody who agrees, it may be this machine that is wrong.
        is_right = any(abs(s.ahead_of_swarm - self.offset) <= UNNOTICEABLE_SECONDS for s in self.samples.values())
        return seconds if is_right and now - since >= SETTLING_SECONDS else 0.0

    def settle_anew(self) -> None:
        """Let the time be corrected at once again: after an outage, for example, it may be wrong."""
        self._agreed_since, self._is_settled = None, False

    def _note_agreement(self, now: float) -> None:
        agreeing, present = 0, self.offset
        for source, sample in self.samples.items():
            if abs(sample.ahead_of_swarm - present) <= MAX_DHT_TIME_DISCREPANCY_SECONDS:
                agreeing += 1
                if not sample.has_agreed:
                    self.samples[source] = sample._replace(has_agreed=True)
        if not agreeing or agreeing < min(SETTLED_BY, len(self.samples)):
            self._agreed_since = None
        elif self._agreed_since is None:
            self._agreed_since = now
        elif now - self._agreed_since >= SETTLED_AFTER_SECONDS:
            # It stays settled even if nobody agrees any more: otherwise attackers could unsettle it by disagreeing.
            self._is_settled = True

    def _decide(self, now: float) -> None:
        self._forget_what_is_older(now - MAX_AGE_SECONDS)
        estimate = self._estimate()
        if estimate is not None:
            self._follow(0.0 if abs(estimate) <= UNNOTICEABLE_SECONDS else estimate)
        self._tell()

    def _forget_what_is_older(self, oldest: float) -> None:
        for source, sample in list(self.samples.items()):
            if sample.heard_at < oldest:
                del self.samples[source]

    def _note(self, source: Hashable, new: _Sample) -> None:
        old = self.samples.get(source)
        if old is None and len(self.samples) >= MAX_SOURCES:
            self._forget_what_is_older(new.heard_at - MAX_AGE_SECONDS)
            if len(self.samples) >= MAX_SOURCES:
                return
        if old is not None and self._is_better(old, new):
            new = old._replace(ahead_of_swarm=new.ahead_of_swarm, is_mate=new.is_mate)
        self.samples[source] = new._replace(has_agreed=old is not None and old.has_agreed)

    @staticmethod
    def _is_better(old: _Sample, new: _Sample) -> bool:
        possible_error = (old.round_trip + new.round_trip) / 2 + UNNOTICEABLE_SECONDS
        is_same_clock = abs(old.ahead_of_clock - new.ahead_of_clock) < possible_error
        return (
            is_same_clock and old.round_trip < new.round_trip and new.heard_at - old.heard_at < NEWER_IS_BETTER_SECONDS
        )

    # --- deciding -----------------------------------------------------------------------------------------------------

    def _estimate(self) -> float | None:
        if all(source in self._joined_through for source in self.samples):
            found = self._agreement_of_opinions([])
            return self._agreement_of_clocks() if found is None else found
        found = self._agreement_of_clocks()
        if found is None and len(self._voters) > 1:
            found = self._agreement_of_opinions([_Vote(self.offset, 0.0)])
        if found is None and not self._is_settled:
            # The machine stood still, and its clock has been set since: it agrees with the only other one.
            only = next(iter(self.samples.values()))
            agree = max(abs(only.ahead_of_clock), abs(only.ahead_of_swarm)) <= MAX_DHT_TIME_DISCREPANCY_SECONDS
            found = 0.0 if len(self.samples) == 1 and agree else None
        return found

    @property
    def _voters(self) -> list[_Sample]:
        """Whose time counts. With one mate alone all vote: of two clocks, nobody can tell which one is wrong."""
        mates = [sample for sample in self.samples.values() if sample.is_mate] if self._is_settled else []
        return mates if len(mates) > 1 else list(self.samples.values())

    def _agreement_of_clocks(self) -> float | None:
        clocks = [_Vote(0.0, 0.0), *(_Vote(each.ahead_of_clock, each.round_trip) for each in self._voters)]
        return _agreement(clocks, math.ceil(len(clocks) * 2 / 3)) if len(clocks) >= 3 else None

    def _agreement_of_opinions(self, own: list[_Vote]) -> float | None:
        opinions = [*own, *(_Vote(each.ahead_of_swarm, each.round_trip) for each in self._voters)]
        return _agreement(opinions, len(opinions) // 2 + 1)

    def _follow(self, offset: float) -> None:
        course = self._course
        planned = course.offset
        if offset == planned or (offset and abs(offset - planned) <= UNNOTICEABLE_SECONDS):
            return
        present, now = self.offset, self._monotonic()
        rate = self._rate_towards(offset, present, now)
        self._course = _Course(course.wall_beyond_monotonic, offset, present if rate else offset, rate, now)

    def _rate_towards(self, offset: float, present: float, now: float) -> float:
        """Seconds per second by which the time moves; 0 = it moves at once."""
        if self._is_settled:
            if not self._have_changed_their_minds(offset):
                return CREEP
            self.settle_anew()
        is_new = self._first_heard_at is None or now - self._first_heard_at <= SETTLING_SECONDS
        goes_back_a_little = 0 < offset - present <= MAX_DHT_TIME_DISCREPANCY_SECONDS
        return SLOW_DOWN if goes_back_a_little and not is_new else 0.0

    def _have_changed_their_minds(self, offset: float) -> bool:
        """Whether two thirds of the voters support this offset, most of whom agreed with this machine before."""
        voters = self._voters
        for_it = [
            sample
            for sample in voters
            if min(abs(sample.ahead_of_clock - offset), abs(sample.ahead_of_swarm - offset))
            <= MAX_DHT_TIME_DISCREPANCY_SECONDS
        ]
        is_majority = len(for_it) * 3 >= len(voters) * 2
        return is_majority and sum(sample.has_agreed for sample in for_it) * 2 > len(for_it)

    def _tell(self, jump: float = 0.0) -> None:
        offset = self._course.offset
        if abs(offset - self._told_offset) < WORTH_A_WARNING_SECONDS:
            return
        self._told_offset = offset
        if abs(offset) < WORTH_A_WARNING_SECONDS:
            logger.warning("the clock of this machine agrees with the other peers now")
            return
        side = "ahead of" if offset > 0 else "behind"
        if jump:
            logger.warning(
                "the clock of this machine has jumped by %+.1f seconds. It is now %.1f seconds %s the time of the "
                "swarm (peers compared: %d). Turn on NTP (%s)",
                *(jump, abs(offset), side, len(self.samples), set_the_clock()),
            )
            return
        logger.warning(
            "the clock of this machine is %.1f seconds %s the time of the swarm (peers compared: %d). Turn on NTP "
            "(%s): only shoal corrects for that",
            *(abs(offset), side, len(self.samples), set_the_clock()),
        )


def _is_unnoticeable(sample: _Sample) -> bool:
    return max(abs(sample.ahead_of_clock), abs(sample.ahead_of_swarm)) <= UNNOTICEABLE_SECONDS


def _agreement(votes: Sequence[_Vote], needed: int) -> float | None:
    """Weighted median of the votes that agree; short round trips weigh most. ``None`` if too few votes agree."""
    middle = sorted(vote.offset for vote in votes)[(len(votes) - 1) // 2]
    near = sorted(vote for vote in votes if abs(vote.offset - middle) <= MAX_DHT_TIME_DISCREPANCY_SECONDS)
    if len(near) < needed:
        return None
    weights = [1 / (_SHORT_ROUND_TRIP + vote.round_trip) for vote in near]
    half, passed = sum(weights) / 2, 0.0
    for vote, weight in zip(near, weights, strict=True):
        passed += weight
        if passed >= half:
            return vote.offset
    return near[-1].offset


class ProcessClock(SwarmClock):
    """The clock of a process, whose readings always increase.

    On Windows the machine's clock ticks only 64 times per second, so much happens at the same reading. Yet a record
    that is stored after another one must expire later. If the machine's clock is set back by more than a moment, this
    one follows. Simulations use plain clocks, because there time passes only when nothing is left to do.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] | None = None) -> None:
        super().__init__(wall, monotonic)
        self._latest = -math.inf
        self._latest_lock = threading.Lock()

    def time(self) -> float:
        # As in the base class, with fewer calls: this is asked for hundreds of times in each round.
        wall, monotonic, course = self._wall(), self._monotonic(), self._course
        if not -WORTH_A_WARNING_SECONDS < wall - monotonic - course.wall_beyond_monotonic < WORTH_A_WARNING_SECONDS:
            wall, monotonic, course = self._read()
        now = wall - (course.at(monotonic) if course.rate else course.offset)
        with self._latest_lock:
            if -UNNOTICEABLE_SECONDS < now - self._latest < SMALLEST_STEP:
                now = self._latest + SMALLEST_STEP
            self._latest = now
        return now

    def forget_threads(self) -> None:
        """Make new locks in a forked child, where the threads that held the old ones do not exist."""
        self._lock, self._latest_lock = threading.RLock(), threading.Lock()


clock_of_process = ProcessClock()
"""What all peers of this process go by, outside of simulations."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=clock_of_process.forget_threads)


@functools.cache
def _has_clock(kind: Hashable) -> bool:
    """Whether loops of this kind have clocks of their own; cached, because a failed look takes long."""
    return hasattr(kind, "swarm_clock")


def get_clock() -> SwarmClock:
    """The caller's clock: that of the running loop if it has one, else that of this process."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return clock_of_process
    if not _has_clock(type(loop)):  # type: ignore[arg-type]  # mypy takes the hash of an instance for that of the class
        return clock_of_process
    clock: SwarmClock = loop.swarm_clock()  # type: ignore[attr-defined]
    return clock


def get_dht_time() -> float:
    """Current DHT time in Unix seconds. It is the same at all peers, whatever the clocks of their machines show."""
    return get_clock().time()
