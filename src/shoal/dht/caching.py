"""What happens to the cache after a record was read or written."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Sequence

from shoal.clock import DHTExpiration, get_dht_time
from shoal.dht.routing import DHTID

logger = logging.getLogger(__name__)

Refresh = Callable[[Sequence[DHTID], DHTExpiration], Awaitable[None]]
"""Fetches keys anew; the second argument is the expiration that would be good enough."""


class CacheRefreshQueue:
    """Cached keys that were read, and when to fetch them again: shortly before they expire.

    Args:
        refresh: fetches keys.
        expiration_of: when the cached copy of a key expires, ``None`` if it is gone.
        lead: seconds before the expiration.
        batch_size: most keys fetched at once.
        spawn: runs a coroutine in the background.
    """

    def __init__(
        self,
        refresh: Refresh,
        expiration_of: Callable[[DHTID], DHTExpiration | None],
        lead: float,
        batch_size: int,
        spawn: Callable[..., object],
    ) -> None:
        self._refresh, self._expiration_of = refresh, expiration_of
        self._lead, self._batch_size, self._spawn = lead, batch_size, spawn
        self._due_times: dict[DHTID, DHTExpiration] = {}
        self._heap: list[tuple[DHTExpiration, DHTID]] = []
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self, key_id: DHTID, due_time: DHTExpiration) -> None:
        """Fetch a key at this time, or earlier if that was agreed before."""
        if self._due_times.get(key_id, float("inf")) <= due_time:
            return
        self._due_times[key_id] = due_time
        heapq.heappush(self._heap, (due_time, key_id))
        self._set_timer()

    def schedule_before(self, key_id: DHTID, expiration_time: DHTExpiration) -> None:
        """Fetch a key shortly before its cached copy expires."""
        self.schedule(key_id, expiration_time - self._lead)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and self._due_times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)  # rescheduled
        if self._heap:
            delay = max(0.0, self._heap[0][0] - get_dht_time())
            self._timer = asyncio.get_running_loop().call_later(delay, self._start_batch)

    def _start_batch(self) -> None:
        self._timer = None
        keys: list[DHTID] = []
        now = get_dht_time()
        while self._heap and self._heap[0][0] <= now and len(keys) < self._batch_size:
            due_time, key_id = heapq.heappop(self._heap)
            if self._due_times.get(key_id) == due_time:
                del self._due_times[key_id]
                keys.append(key_id)
        if keys:
            expirations = [e for e in map(self._expiration_of, keys) if e is not None]
            sufficient = max([now, *expirations]) + self._lead + 1
            self._spawn(self._refresh(keys, sufficient))
        self._set_timer()

    def clear(self) -> None:
        """Forget all plans."""
        self._due_times.clear()
        self._heap.clear()
        self._set_timer()

    def __len__(self) -> int:
        return len(self._due_times)

    def __contains__(self, key_id: object) -> bool:
        return key_id in self._due_times
