"""Shards a swarm's records over many keys, so that no key grows with the swarm, and estimates the size of the swarm.

A swarm of N peers keeps its records in 2^depth keys. The first bits of a hash of the owner select the key, and about 64
owners share one. The depth is not agreed: each peer follows its own estimate and writes its depth into its record::

    depth 0    run_progress                      every 2^depth-th peer writes here, too
    depth 1    run_progress.0    run_progress.1           every 2^(depth-1)-th
    ...
    depth      run_progress.0110                          every peer

Besides its own key, a peer writes to the key above with probability 1/2, to the next one above with 1/4, and so on; the
hash decides. So each key at any level holds a sample of about 64 of the peers below it, and an entry of depth d in a
key of level l stands for 2^(d-l) peers. Peers find each other this way even if their estimates differ. A newcomer
starts at the top and learns the depth there. A peer that is too high sees samples of the peers below. A peer that is
too low reads the key above its own every other time, and sees the peers there. A small swarm has depth 0 and one key.

Many sizes fit two depths. Then each peer follows the majority: it goes a step deeper if most others are there, and a
step back if hardly any other has followed.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from statistics import fmean, median_high, median_low
from typing import Annotated, NamedTuple

from msgspec import Meta

# Chosen: enough for 64 million peers.
MAX_DEPTH = 20
Depth = Annotated[int, Meta(ge=0, le=MAX_DEPTH)]

# Chosen: 64 records of progress fit into one answer of a few kilobytes. The shares below are measured: with them,
# simulated swarms of all sizes settle at a depth, and stay there (tests/dht/test_key_sharding.py).
OWNERS_PER_KEY = 64
# A depth fits if each key has at most TOO_MANY owners and at least TOO_FEW. The two are far apart, so that most sizes
# fit two depths, and a peer follows the majority. If its own depth does not fit, it moves if at least SOME of the
# others have. The first one moves only if the numbers are BEYOND these by more than the estimates vary. So no peer
# oscillates.
TOO_MANY, TOO_FEW = 2 * OWNERS_PER_KEY, OWNERS_PER_KEY // 2
BEYOND, SOME = 9 / 8, 1 / 8
# A peer that shares its key with fewer owners than this has gone deeper than the others, and goes back to them.
HARDLY_ANY = OWNERS_PER_KEY // 8
# If two depths fit the size of the swarm, a peer goes deeper if more than the first share of the others is deeper. It
# goes back if less than the second share is as deep as it is. In between it stays.
MOST_ARE_DEEPER, FEW_ARE_AS_DEEP = 1 / 2, 1 / 3
# The number of readings of other keys that a peer combines (chosen). It brings the estimates of all peers together,
# although some keys have more owners than others.
READINGS_ELSEWHERE = 3
_PATH_BITS = 32  # chosen: more than ``MAX_DEPTH``


def path_of(owner: bytes) -> str:
    """The bits that select an owner's key."""
    return f"{int.from_bytes(hashlib.blake2b(owner, digest_size=_PATH_BITS // 8).digest(), 'big'):0{_PATH_BITS}b}"


def key_at(name: str, place: str) -> str:
    """The key of the records called ``name`` whose owners have these bits."""
    return f"{name}.{place}" if place else name


def places_to_write(owner: bytes, depth: int) -> list[str]:
    """Bits of the keys in which an owner writes, its own first."""
    path = path_of(owner)
    return [path[: depth - step] for step in range(levels_above(owner, depth) + 1)]


def any_place(depth: int, rng: random.Random) -> str:
    """Bits of one of the keys of this depth."""
    return f"{rng.getrandbits(depth):0{depth}b}" if depth else ""


def levels_above(owner: bytes, depth: int) -> int:
    """How many keys above its own an owner writes to: at least one with probability 1/2, two with 1/4, ..."""
    number = int.from_bytes(hashlib.blake2b(owner, digest_size=4, person=b"levels").digest(), "big")
    trailing_zeros = (number & -number).bit_length() - 1 if number else _PATH_BITS
    return min(depth, trailing_zeros)


def estimate_owners(level: int, depths: Sequence[int]) -> float:
    """The estimated number of owners in all keys together, from the entries of one key.

    Args:
        level: the level of the key.
        depths: the depths of its entries. A depth is clipped to the median + 1, because it may be a lie.
    """
    return math.ldexp(sum(_represented(level, depths).values()), level)


def share_at(least: int, level: int, depths: Sequence[int]) -> float:
    """The estimated share of all owners whose depth is at least this, from the entries of one key; as above."""
    represented = _represented(level, depths)
    all_of_them = sum(represented.values())
    return sum(peers for depth, peers in represented.items() if depth >= least) / all_of_them if all_of_them else 0.0


def _represented(level: int, depths: Sequence[int]) -> dict[int, float]:
    """By depth: the number of owners that the entries of one key stand for."""
    if not depths:
        return {}
    most = median_low(depths) + 1
    counts = Counter(min(depth, most) for depth in depths)
    return {depth: times * math.ldexp(1.0, max(0, depth - level)) for depth, times in counts.items()}


class _Reading(NamedTuple):
    """The content of one key, summarised.

    Attributes:
        size: the estimated number of owners.
        is_full: the key has far too many owners, so that perhaps not all were read, and there are more.
        deeper: the share of owners that are deeper than the reader.
        as_deep: the share of owners that are at least as deep.
    """

    size: float
    is_full: bool
    deeper: float
    as_deep: float


class KeySharding:
    """One owner's place among the keys, and its estimate of their depth.

    Args:
        owner: its hash chooses the key.
    """

    def __init__(self, owner: bytes) -> None:
        self._owner, self._path = owner, path_of(owner)
        self.depth = 0
        self._readings: dict[str, deque[_Reading]] = {}
        """Readings since the depth changed: the last of the own key and the key above, the last few of other keys."""
        self._looks_up = False

    @property
    def size(self) -> float | None:
        """Estimated number of owners; ``None`` while one key is enough for all of them."""
        return fmean(reading.size for reading in self._all_readings()) if self.depth and self._readings else None

    @property
    def place(self) -> str:
        """Bits of the own key."""
        return self._path[: self.depth]

    def places_to_write(self) -> list[str]:
        """Bits of the keys in which this owner writes, its own first."""
        return places_to_write(self._owner, self.depth)

    def place_beside(self, rng: random.Random) -> str | None:
        """Bits of the key to read besides the own one, in turn the key above and a random key.

        ``None`` if there is only one key.
        """
        if not self.depth:
            return None
        self._looks_up = not self._looks_up
        return self._path[: self.depth - 1] if self._looks_up else any_place(self.depth, rng)

    def learn(self, place: str, depths: Sequence[int]) -> bool:
        """Update the estimates, and if need be the depth, after a key has been read.

        Args:
            place: the bits of the key.
            depths: the depths of its entries, this owner's included.

        Returns:
            Whether the depth has changed.
        """
        kind = "here" if place == self.place else "above" if len(place) < self.depth else "elsewhere"
        level, keys, depth = len(place), 2**self.depth, self.depth
        kept = READINGS_ELSEWHERE if kind == "elsewhere" else 1
        shares = (share_at(depth + 1, level, depths), share_at(depth, level, depths))
        reading = _Reading(estimate_owners(level, depths), len(depths) > BEYOND * TOO_MANY, *shares)
        self._readings.setdefault(kind, deque(maxlen=kept)).append(reading)
        above, known = self._last("above"), self._all_readings()
        # A full key above may have more records than were read, so next to other readings it counts as infinite.
        sizes = [math.inf if each is above and each.is_full and len(known) > 1 else each.size for each in known]
        # Most keys must agree, and both if there are two, because one key may be full of invented entries.
        least, most = median_low(sizes), median_high(sizes)
        deeper = median_low(each.deeper for each in known)
        if above is not None:
            most = max(most, above.size)  # only the key above has the owners that are less deep
        if least > TOO_MANY * keys * (1.0 if deeper > SOME else BEYOND):
            # Jump to the depth of most others at once, but go beyond them only step by step, to keep them in sight.
            depth = max(depth + 1, min(_depth_for(least), median_low(depths)))
        elif above is not None:
            here = self._last("here") or above
            is_ahead = here.size < HARDLY_ANY * keys and above.size < TOO_MANY * keys / 2
            if is_ahead or most < TOO_FEW * keys / (1.0 if above.as_deep < 1 - SOME else BEYOND):
                depth = min(depth - 1, _depth_for(most))
            elif above.as_deep < FEW_ARE_AS_DEEP and most < TOO_MANY * keys / 2:
                depth -= 1
        if depth == self.depth and deeper > MOST_ARE_DEEPER and least > 2 * TOO_FEW * keys:
            depth += 1
        depth = min(MAX_DEPTH, max(0, depth))
        if depth == self.depth:
            return False
        self.depth, self._looks_up = depth, False
        self._readings.clear()
        return True

    def _last(self, kind: str) -> _Reading | None:
        readings = self._readings.get(kind)
        return readings[-1] if readings else None

    def _all_readings(self) -> list[_Reading]:
        return [reading for readings in self._readings.values() for reading in readings]


def _depth_for(owners: float) -> int:
    return round(min(MAX_DEPTH, math.log2(max(1.0, owners / OWNERS_PER_KEY))))
