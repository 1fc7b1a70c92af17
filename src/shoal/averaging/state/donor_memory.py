"""What a peer has seen of the donors of its downloads: who was quick, who was busy, and whose state was no good."""

from __future__ import annotations

import logging
from typing import TypeVar

from shoal.base.logs import Seldom
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)
K = TypeVar("K")
V = TypeVar("V")

# The speed of an unknown donor, in bytes per second.
ASSUMED_SPEED = 1e6
# A donor whose state was no good is avoided for so many seconds.
REFUSAL_SECONDS = 600.0

# One that offers what this peer can never use is not asked at all for so many seconds.
REST_SECONDS = 60.0

_MAX_REMEMBERED = 1024


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
        """Note that a donor has sent so many bytes in this time. Too small samples are ignored."""
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
