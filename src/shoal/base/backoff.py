"""How often something may be done: pauses that double after failures, and token buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from shoal.base.bounded import MOST, Bounded


@dataclass(slots=True)
class Backoff:
    """A pause after each failure, which doubles with each further failure in a row.

    It reads no clock: the caller supplies all times, in seconds.

    Args:
        first: the pause after the first failure.
        longest: the longest pause.
        free: the number of failures in a row that cost only the first pause; after that it doubles.
    """

    first: float
    longest: float
    free: int = 1
    failures: int = 0
    """The number of failures in a row."""
    rests_until: float = -math.inf
    """When the next attempt is due."""

    @property
    def pause(self) -> float:
        """The pause that the next failure will cost."""
        # Beyond this number every pause has reached its limit, and a float would overflow.
        doublings = min(max(0, self.failures + 1 - self.free), 64)
        return min(self.first * 2.0**doublings, self.longest)

    def fail(self, now: float = 0.0) -> float:
        """An attempt has failed; returns the pause until the next one."""
        pause = self.pause
        self.failures += 1
        self.rests_until = now + pause
        return pause

    def succeed(self) -> None:
        """An attempt has succeeded: the next failure costs the first pause again."""
        self.failures, self.rests_until = 0, -math.inf

    def is_due(self, now: float) -> bool:
        """Whether another attempt may be made."""
        return now >= self.rests_until


class Backoffs:
    """A backoff for each key, such as a peer. It remembers the keys that failed last.

    Args:
        first, longest: see :class:`Backoff`.
        now: the time in seconds.
        most: the number of keys to remember.
    """

    def __init__(self, first: float, longest: float, now: Callable[[], float], most: int = MOST) -> None:
        self._first, self._longest, self._now = first, longest, now
        self._by_key: Bounded[Hashable, Backoff] = Bounded(most)

    def is_due(self, key: Hashable) -> bool:
        """Whether another attempt may be made."""
        backoff = self._by_key.get(key)
        return backoff is None or backoff.is_due(self._now())

    def fail(self, key: Hashable) -> None:
        """An attempt has failed."""
        backoff = self._by_key[key] = self._by_key.get(key) or Backoff(self._first, self._longest)
        backoff.fail(self._now())

    def succeed(self, key: Hashable) -> None:
        """An attempt has succeeded, or the past says nothing about the next one."""
        self._by_key.pop(key, None)

    def clear(self) -> None:
        """Forget all failures."""
        self._by_key.clear()


class TokenBuckets:
    """A token bucket for each key, such as a host: a burst at once, then a steady rate.

    Args:
        per_second: how fast a bucket fills.
        burst: what a full bucket holds; a new key has a full one.
        most: the number of keys to remember: those that spent last.
    """

    def __init__(self, per_second: float, burst: float, most: int = MOST) -> None:
        self._per_second, self._burst = per_second, burst
        # By key: the tokens that were left, and when.
        self._left: Bounded[Hashable, tuple[float, float]] = Bounded(most)

    def __len__(self) -> int:
        """The number of remembered keys."""
        return len(self._left)

    def is_exhausted(self, key: Hashable, now: float) -> bool:
        """Whether this key has to wait before it may spend more."""
        return self._left_at(key, now) < 1

    def spend(self, key: Hashable, now: float, amount: float = 1.0) -> None:
        """Take tokens, even if that makes the balance negative: then the wait is longer."""
        self._left[key] = (self._left_at(key, now) - amount, now)

    def take(self, key: Hashable, now: float) -> bool:
        """Spend one token unless the bucket is exhausted; returns whether it was spent."""
        if self.is_exhausted(key, now):
            return False
        self.spend(key, now)
        return True

    def _left_at(self, key: Hashable, now: float) -> float:
        left, since = self._left.get(key, (self._burst, now))
        return min(self._burst, left + (now - since) * self._per_second)
