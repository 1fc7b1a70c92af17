"""A mapping with a limit on its size and, if wanted, on the age of its entries.

What this peer remembers about others must not grow with their number, because anybody can invent peers. Every memory of
that kind is a :class:`Bounded`. With ``None`` as values it is an ordered set.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

MOST = 4096
"""The default number of entries. Chosen: more peers than any run has been tried with, in a few megabytes."""


class Bounded(MutableMapping[K, V], Generic[K, V]):
    """Keeps the entries that were set last; iterates from the oldest to the newest.

    Setting an entry makes it the newest. Reading does not, see :meth:`touch`.

    Args:
        most: the number of entries. When it is exceeded, the oldest one is evicted.
        seconds: the age at which an entry expires; needs ``now``.
        now: the time in seconds.
        on_evict: called with the key and the value of each entry that was evicted or has expired.
    """

    def __init__(
        self,
        most: int = MOST,
        *,
        seconds: float = math.inf,
        now: Callable[[], float] | None = None,
        on_evict: Callable[[K, V], object] | None = None,
    ) -> None:
        if most < 1 or (now is None) != (seconds == math.inf):
            raise ValueError(f"give a size of at least 1, and a clock only with an age: got {most}, {seconds}, {now}")
        self.most = most
        self._seconds, self._now, self._on_evict = seconds, now, on_evict
        # Each value with the time when it was set. Oldest first, so that expired entries come first as well.
        self._entries: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def __setitem__(self, key: K, value: V) -> None:
        self._expire()
        self._entries[key] = value, 0.0 if self._now is None else self._now()
        self._entries.move_to_end(key)
        while len(self._entries) > self.most:
            self._evict()

    def touch(self, key: K) -> None:
        """Make an entry the newest one; it expires as if it were set now."""
        self[key] = self[key]

    def __getitem__(self, key: K) -> V:
        if self._now is not None:  # the usual reads make no further call
            self._expire()
        return self._entries[key][0]

    @overload
    def get(self, key: K, /) -> V | None: ...
    @overload
    def get(self, key: K, /, default: V) -> V: ...
    @overload
    def get(self, key: K, /, default: T) -> V | T: ...
    def get(self, key: K, /, default: Any = None) -> Any:
        """The value of a key, or the default."""
        if self._now is not None:
            self._expire()
        entry = self._entries.get(key)
        return default if entry is None else entry[0]

    def __delitem__(self, key: K) -> None:
        del self._entries[key]

    def __contains__(self, key: object) -> bool:
        if self._now is not None:
            self._expire()
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        self._expire()
        return iter(self._entries)

    def __len__(self) -> int:
        self._expire()
        return len(self._entries)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"

    def _expire(self) -> None:
        if self._now is None:
            return
        oldest = self._now() - self._seconds
        while self._entries and next(iter(self._entries.values()))[1] <= oldest:
            self._evict()

    def _evict(self) -> None:
        key, (value, _) = self._entries.popitem(last=False)
        if self._on_evict is not None:
            self._on_evict(key, value)
