"""DHT time: one clock for the swarm, in Unix seconds.

All expiration times come from this clock. It is the machine's clock minus its offset, the seconds by which it is ahead
of the swarm. :class:`SwarmClock` measures the offset in the greetings of connections, so that a machine whose clock is
off by minutes takes part like any other. A process has one such clock for all its swarms, because the offset is that
of the machine; in a simulation, each simulated machine has one.

How an offset is found
    1. A peer that knows only the peers through which it joined adopts the time that most of them hold.
    2. If two thirds of all known clocks, including this machine's, agree, they are right. So the machines that NTP
       keeps right set the time, whichever came first.
    3. Otherwise the time is the one that most peers hold; this machine's time and its clock count as two peers.
    4. Without a majority nothing changes.

How it is applied
    At once in the first ten minutes after the first exchange, after a jump of the machine's clock, and after the swarm
    was lost and found. Later the time moves by at most a second per minute, so it never goes back. The exception is a
    difference of more than ``MAX_DHT_TIME_DISCREPANCY_SECONDS``, if most of the peers that report it have agreed with
    this machine before. If two or more of the known peers have contributed to averaging rounds, only these count. So a
    crowd of strangers cannot move the swarm to another time.

How time passes
    Between two exchanges, time passes as on a clock of the machine that is never set and keeps running while the
    machine sleeps. So if the machine's clock is set or jumps, the offset changes and not the DHT time, and other peers
    notice nothing. The user gets one line. The peers are asked for the time again, because the machine may have stood
    still (a paused virtual machine), so that its clock is right now. Only a peer that has met no others follows the
    clock of its machine.
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

from shoal.errors import set_the_clock

logger = logging.getLogger(__name__)

DHTExpiration = float

# Peers whose clocks differ by more than this many seconds cannot share expiration times safely. Inherited public name
# and value.
MAX_DHT_TIME_DISCREPANCY_SECONDS = 3.0
# How far the clocks of two peers may differ before their badges, requests and records are refused. Chosen.
TOLERANCE_SECONDS = 20 * MAX_DHT_TIME_DISCREPANCY_SECONDS
# Differences up to this, beyond the possible error of an exchange, are not corrected. Chosen: clocks with NTP differ by
# hundredths of a second.
UNNOTICEABLE_SECONDS = 0.25

WORTH_A_WARNING_SECONDS = 1.0  # chosen
# Least difference of two readings: half a microsecond. Derived: twice the spacing of floats near the present Unix time,
# so that two readings still differ after something is added to both.
SMALLEST_STEP = 2.0**-21
# Corrections apply at once for this long. Chosen: in a young swarm most clocks have met after a few minutes.
SETTLING_SECONDS = 600.0
# Later, seconds per second by which the time moves. Chosen: faster than any clock drifts, too slow to break a round.
CREEP = 1 / 60
# Peers whose clocks are remembered. Known peers keep their places, so a crowd of newcomers cannot outvote them. Chosen.
MAX_SOURCES = 32
# Older exchanges are forgotten. Chosen: connections, and so exchanges, are renewed every quarter of an hour.
MAX_AGE_SECONDS = 3600.0
# Slower exchanges are too inexact to be used.
MAX_ROUND_TRIP_SECONDS = MAX_DHT_TIME_DISCREPANCY_SECONDS


class _Sample(NamedTuple):
    """The result of the last exchange with a peer; all times are in seconds."""

    ahead_of_clock: float
    """How far this machine's clock is ahead of the peer's clock."""
    ahead_of_swarm: float
    """How far it is ahead of the time of the swarm as the peer knows it."""
    heard_at: float
    has_agreed: bool
    """Whether the peer has ever agreed with this machine about the time of the swarm."""
    is_mate: bool
    """Whether the peer has contributed to averaging rounds."""


class _Course(NamedTuple):
    """How far the machine's clock is ahead of the swarm; the value moves from ``begin`` to ``offset``."""

    wall_beyond_monotonic: float
    """How far the machine's wall clock is ahead of its monotonic clock. If that changes, the wall clock was set."""
    offset: float = 0.0
    begin: float = 0.0
    since: float = 0.0

    def at(self, now: float) -> float:
        """The value at this reading of the monotonic clock."""
        moved = CREEP * (now - self.since)
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
        """The last exchange with each peer."""
        self.on_jump: dict[Hashable, Callable[[], object]] = {}
        """Callbacks for jumps of the machine's clock, by the names of :meth:`add_own`; called in any thread."""
        self._met_at = -math.inf
        self._own: dict[Hashable, None] = {}
        self._joined_through: dict[Hashable, None] = {}
        # Since when corrections apply at once; ``None``: from the next exchange on.
        self._settles_since: float | None = None
        self._has_heard = False
        self._told_offset = 0.0

    # --- reading ------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Unix seconds. May be called from any thread."""
        # Like :meth:`_read`, with fewer calls, because each round asks for the time hundreds of times.
        wall, now, course = self._wall(), self._monotonic(), self._course
        if not -WORTH_A_WARNING_SECONDS < wall - now - course.wall_beyond_monotonic < WORTH_A_WARNING_SECONDS:
            wall, now, course = self._read()
        return wall - (course.offset if course.begin == course.offset else course.at(now))

    @property
    def offset(self) -> float:
        """Seconds by which the clock of this machine is ahead of the swarm; 0 if it is right."""
        _, now, course = self._read()
        return course.at(now)

    def _read(self) -> tuple[float, float, _Course]:
        """Both clocks of the machine, and the present course; notices if the wall clock has jumped."""
        course = self._course
        wall, now = self._wall(), self._monotonic()
        if abs(wall - now - course.wall_beyond_monotonic) > WORTH_A_WARNING_SECONDS:
            self._note_jump()
            course, now = self._course, self._monotonic()
            wall = now + course.wall_beyond_monotonic
        return wall, now, course

    def _read_at_once(self) -> tuple[float, float] | None:
        """Both clocks at one moment; ``None`` if this thread was delayed between the readings in every attempt."""
        for _ in range(5):
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
                return  # another thread has handled it, or this one was delayed between two readings
            self._course = course = course._replace(wall_beyond_monotonic=wall - now)
            self.settle_anew()
            if not course.offset and now - self._met_at > MAX_AGE_SECONDS:
                return  # without other peers, follow the machine's clock
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
        return bool(self.samples) and self._estimate(list(self.samples.values())) is None

    @property
    def is_joining(self) -> bool:
        """Whether the user has named peers of a swarm, but no peer has told the time yet."""
        return bool(self._joined_through) and not self._has_heard

    # --- exchanges with others ----------------------------------------------------------------------------------------

    def add_own(self, name: Hashable) -> None:
        """Ignore a peer that reads this same clock: its vote adds nothing."""
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
        if source not in self._own:  # a peer of this process is not heard, see add_own
            self._joined_through[source] = None

    def settle_anew(self) -> None:
        """Let corrections apply at once again: the time may be wrong, for example after an outage."""
        self._settles_since = None

    def hear(
        self, source: Hashable, swarm_time: float, their_offset: float, round_trip: float, *, is_mate: bool = False
    ) -> None:
        """Record an exchange with another peer that has just ended.

        Args:
            source: the peer.
            swarm_time: the time of the swarm as the peer knew it when it answered.
            their_offset: seconds by which the peer's own clock was ahead of that.
            round_trip: seconds that the exchange took, without the time that the peer needed to answer.
            is_mate: whether the peer has contributed to averaging rounds.
        """
        numbers = (swarm_time, their_offset, round_trip)
        if source in self._own or not all(map(math.isfinite, numbers)) or swarm_time <= 0:
            return
        if round_trip > MAX_ROUND_TRIP_SECONDS:
            return
        round_trip = max(0.0, round_trip)
        with self._lock:
            wall, now, course = self._read()
            self._met_at, self._has_heard = now, True
            # If the system slews its clock, the two clocks drift apart. That is no jump.
            self._course = course._replace(wall_beyond_monotonic=wall - now)
            if self._settles_since is None:
                self._settles_since = now
            for other, sample in list(self.samples.items()):
                if sample.heard_at < now - MAX_AGE_SECONDS:
                    del self.samples[other]
            former = self.samples.get(source)
            if former is not None or len(self.samples) < MAX_SOURCES:
                ahead, present = wall - (swarm_time + round_trip / 2), course.at(now)
                error = round_trip / 2 + UNNOTICEABLE_SECONDS
                of_clock, of_swarm = ahead - their_offset, ahead
                # A difference within the error of the exchange counts as none.
                of_clock = 0.0 if abs(of_clock) <= error else of_clock
                of_swarm = present if abs(of_swarm - present) <= error else of_swarm
                agrees = abs(of_swarm - present) <= MAX_DHT_TIME_DISCREPANCY_SECONDS
                has_agreed = agrees or (former is not None and former.has_agreed)
                self.samples[source] = _Sample(of_clock, of_swarm, now, has_agreed, is_mate)
            self._decide(now)

    # --- deciding -----------------------------------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        is_settling = self._settles_since is not None and now - self._settles_since <= SETTLING_SECONDS
        voters = list(self.samples.values())
        mates = [sample for sample in voters if sample.is_mate]
        # With only one mate all peers vote: between two clocks, it is unclear which one is wrong.
        voters = mates if len(mates) > 1 else voters
        estimate = self._estimate(voters)
        if estimate is not None:
            offset = 0.0 if abs(estimate) <= UNNOTICEABLE_SECONDS else estimate
            is_far = abs(offset - self._course.at(now)) > MAX_DHT_TIME_DISCREPANCY_SECONDS
            self._follow(offset, now, at_once=is_settling or (is_far and _have_changed_their_minds(voters, offset)))
        self._tell()

    def _estimate(self, voters: Sequence[_Sample]) -> float | None:
        """The offset with a majority, or ``None``."""
        clocks, opinions = [0.0, *(each.ahead_of_clock for each in voters)], [each.ahead_of_swarm for each in voters]
        if all(source in self._joined_through for source in self.samples):
            found = _agreement(opinions, len(opinions) // 2 + 1)
            return _agreement([0.0, *opinions], (len(opinions) + 1) // 2 + 1) if found is None else found
        found = _agreement(clocks, math.ceil(len(clocks) * 2 / 3)) if len(clocks) >= 3 else None
        if found is None:
            opinions += [0.0, self.offset]
            found = _agreement(opinions, len(opinions) // 2 + 1)
        return found

    def _follow(self, offset: float, now: float, *, at_once: bool) -> None:
        course, present = self._course, self._course.at(now)
        planned = present if at_once else course.offset
        if offset == planned or (offset and abs(offset - planned) <= UNNOTICEABLE_SECONDS):
            return
        self._course = course._replace(offset=offset, begin=offset if at_once else present, since=now)

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


def _have_changed_their_minds(voters: Sequence[_Sample], offset: float) -> bool:
    """Whether two thirds of the voters support this offset, and most of those agreed with this machine before."""
    for_it = [
        each
        for each in voters
        if min(abs(each.ahead_of_clock - offset), abs(each.ahead_of_swarm - offset)) <= MAX_DHT_TIME_DISCREPANCY_SECONDS
    ]
    return len(for_it) * 3 >= len(voters) * 2 and sum(each.has_agreed for each in for_it) * 2 > len(for_it)


def _agreement(offsets: Sequence[float], needed: int) -> float | None:
    """The median of the offsets that agree with the median of all; ``None`` if too few do."""
    middle = sorted(offsets)[(len(offsets) - 1) // 2]
    near = sorted(each for each in offsets if abs(each - middle) <= MAX_DHT_TIME_DISCREPANCY_SECONDS)
    return near[(len(near) - 1) // 2] if len(near) >= needed else None


class ProcessClock(SwarmClock):
    """The clock of a process, whose readings always increase.

    On Windows the machine's clock ticks only 64 times per second, so many events have the same reading. Yet a record
    that is stored after another one must expire later. If the machine's clock is set back by more than a moment, this
    one follows. Simulations use plain clocks, because there time passes only when nothing is left to do.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] | None = None) -> None:
        super().__init__(wall, monotonic)
        self._latest = -math.inf
        self._latest_lock = threading.Lock()

    def time(self) -> float:
        # As above, with one call less: an operation of the DHT asks for the time a dozen times.
        wall, steady, course = self._wall(), self._monotonic(), self._course
        if not -WORTH_A_WARNING_SECONDS < wall - steady - course.wall_beyond_monotonic < WORTH_A_WARNING_SECONDS:
            wall, steady, course = self._read()
        now = wall - (course.offset if course.begin == course.offset else course.at(steady))
        with self._latest_lock:
            if -UNNOTICEABLE_SECONDS < now - self._latest < SMALLEST_STEP:
                now = self._latest + SMALLEST_STEP
            self._latest = now
        return now

    def forget_threads(self) -> None:
        """Make new locks in a forked child, where the threads that held the old ones do not exist."""
        self._lock, self._latest_lock = threading.RLock(), threading.Lock()


clock_of_process = ProcessClock()
"""The clock of all peers in this process, outside of simulations."""
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
