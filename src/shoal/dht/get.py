"""Getting records: this node's own copies first, then a walk to the nodes nearest to the keys.

A search merges the values of different nodes for one key until the result is good enough. Searches for the same key
share their results. Copies of the result are kept here and at nodes that had no value. A cached copy that was read is
fetched again shortly before it expires.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from shoal.base.clock import DHTExpiration, get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.config import NodeConfig
from shoal.dht.protocol import DHTProtocol
from shoal.dht.records import MAX_KEYS_PER_FIND, NewRecord, numbers_of_entries
from shoal.dht.routing import DHTID, ID_BITS
from shoal.dht.storage import DictionaryDHTValue, ExpiryHeap, StoredValue, ValueWithExpiration
from shoal.dht.traverse import Answer, Lookup, Traversal
from shoal.dht.validation import (
    PLAIN_VALUE,
    DHTRecord,
    GetReport,
    Outcome,
    Reason,
    RecordValidatorBase,
    has_owned_entries,
)
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)

GetResult = ValueWithExpiration[Any] | None
_OWN_COPY = Outcome(Reason.FOUND, "this peer's own copy")


class KeySearch:
    """One caller's search for one key.

    Args:
        key_id: the key.
        sufficient_expiration_time: stop at the first value that lives at least until then.
        validator: strips values before the application sees them.
        is_refresh: the result goes only into the cache; no caller waits for it.
        keep_copies: keep copies of the result here and at a node where it may be needed next.
        most_entries: as for :meth:`DHTNode.get_many_by_id`.
    """

    def __init__(
        self,
        key_id: DHTID,
        sufficient_expiration_time: DHTExpiration,
        validator: RecordValidatorBase,
        is_refresh: bool = False,
        keep_copies: bool = True,
        most_entries: int = 0,
    ) -> None:
        self.key_id = key_id
        self.sufficient_expiration_time = sufficient_expiration_time
        self.is_refresh, self.keep_copies, self.most_entries = is_refresh, keep_copies, most_entries
        self.future: asyncio.Future[GetResult] = asyncio.get_running_loop().create_future()
        self.found: StoredValue | None = None
        self.expiration_time: DHTExpiration = -math.inf
        self.source: DHTID | None = None
        """The node that gave the best value so far; ``None``: this node itself."""
        self.asked_in_vain: dict[DHTID, None] = {}
        """Nodes that answered but had no value."""
        self.outcomes: dict[PeerID, Outcome] = {}
        """The outcome at each node."""
        self._validator = validator
        self._owns_found = False

    @property
    def most(self) -> float:
        """The number of entries that the caller wants."""
        return self.most_entries or math.inf

    @property
    def finished(self) -> bool:
        """Whether the caller has the result, or has cancelled the search."""
        return self.future.done()

    @property
    def is_satisfied(self) -> bool:
        """Whether the value found so far lives long enough."""
        return self.found is not None and self.expiration_time >= self.sufficient_expiration_time

    def add_candidate(self, value: StoredValue, expiration_time: DHTExpiration, source: DHTID | None) -> None:
        """Consider a value that a node holds. Two dictionaries are merged; otherwise the later expiration wins.

        The exception: a dictionary that has entries with an owner always wins against a plain value.
        """
        if isinstance(value, DictionaryDHTValue) and not value:
            return  # all its entries are known here or have expired, so its expiration means nothing
        if isinstance(value, DictionaryDHTValue) and isinstance(self.found, DictionaryDHTValue):
            self._merge(value)
            if expiration_time > self.expiration_time:
                self.expiration_time, self.source = expiration_time, source
        elif self._is_better(value, expiration_time):
            self.found, self._owns_found = value, False
            self.expiration_time, self.source = expiration_time, source

    def _is_better(self, value: StoredValue, expiration_time: DHTExpiration) -> bool:
        """Whether a value should replace the present one; the two are not both dictionaries."""
        if self.found is not None and type(value) is not type(self.found):
            key = self.key_id.to_bytes()
            if has_owned_entries(self._validator, key, self.found):
                return False
            if has_owned_entries(self._validator, key, value):
                return True
        return expiration_time > self.expiration_time

    def _merge(self, other: DictionaryDHTValue[bytes]) -> None:
        assert isinstance(self.found, DictionaryDHTValue)
        # Copy first: the dictionary may be the very object in this node's storage.
        if not self._owns_found:
            self.found, self._owns_found = self.found.copy(), True
        for subkey, item in other.items():
            self.found.store(subkey, item.value, item.expiration_time)

    def known_entries(self) -> Iterable[int]:
        """The entries that need not be sent again."""
        if not isinstance(self.found, DictionaryDHTValue):
            return ()
        return numbers_of_entries(self.key_id, self.found.items()).values()

    def adopt(self, other: KeySearch) -> None:
        """Take over the result of another search for the same key."""
        self.found, self._owns_found = other.found, False
        self.expiration_time, self.source = other.expiration_time, other.source
        self.outcomes.update(other.outcomes)

    def report(self) -> GetReport:
        """The result with the outcome at each node; only when the search is finished."""
        return GetReport(self.future.result(), dict(self.outcomes))

    def finish(self) -> None:
        """Hand the result to the caller."""
        if not self.future.done():
            self.future.set_result(self._decode())

    def _decode(self) -> GetResult:
        if self.found is None or self.expiration_time < get_dht_time():
            return None
        if isinstance(self.found, bytes):
            decoded = self._decode_value(PLAIN_VALUE, self.found, self.expiration_time)
            return None if decoded is None else ValueWithExpiration(decoded[0], self.expiration_time)
        entries = {}
        for subkey, item in self.found.items():
            decoded = self._decode_value(MSGPackSerializer.dumps(subkey), item.value, item.expiration_time)
            if decoded is not None:
                entries[subkey] = ValueWithExpiration(decoded[0], item.expiration_time)
        return ValueWithExpiration(entries, self.expiration_time) if entries else None

    def _decode_value(self, subkey: bytes, value: bytes, expiration_time: DHTExpiration) -> tuple[Any] | None:
        """The value for the application, or ``None`` if it cannot be decoded."""
        value = self._validator.strip_value(DHTRecord(self.key_id.to_bytes(), subkey, value, expiration_time))
        try:
            return (MSGPackSerializer.loads(value),)
        except ValueError as e:
            logger.debug("a value of key %s cannot be decoded: %s", self.key_id, e)
            return None


class PendingSearches:
    """Lets searches for the same key share the first good result."""

    def __init__(self) -> None:
        self._by_key: dict[DHTID, list[KeySearch]] = {}

    def join(self, search: KeySearch) -> None:
        """Share results with this search from now on."""
        self._by_key.setdefault(search.key_id, []).append(search)

    def leave(self, search: KeySearch) -> None:
        """Stop sharing with this search."""
        searches = self._by_key.get(search.key_id, [])
        if search in searches:
            searches.remove(search)
        if not searches:
            self._by_key.pop(search.key_id, None)

    def share_result(self, search: KeySearch) -> None:
        """Remove a search that has ended, and give its result to every search that it satisfies."""
        self.leave(search)
        if search.found is None:
            return
        reached = max(search.expiration_time, search.sufficient_expiration_time)
        for other in list(self._by_key.get(search.key_id, ())):
            if other.sufficient_expiration_time <= reached and not other.finished and search.most >= other.most:
                other.adopt(search)
                other.finish()
                self.leave(other)

    def __getitem__(self, key_id: DHTID) -> list[KeySearch]:
        return self._by_key.get(key_id, [])

    def __len__(self) -> int:
        return len(self._by_key)


class Reader:
    """Gets records for a node.

    Args:
        protocol: asks other nodes and knows this node's records.
        config: the node's settings.
    """

    def __init__(self, protocol: DHTProtocol, config: NodeConfig) -> None:
        self._protocol, self._config = protocol, config
        self.pending = PendingSearches()
        self.refresh_queue = CacheRefreshQueue(
            self._refresh,
            self._cached_expiration,
            lead=config.cache_refresh_before_expiry,
            batch_size=config.chunk_size,
            spawn=protocol.spawn,
        )

    def start_searches(
        self,
        key_ids: Iterable[DHTID],
        sufficient_expiration_time: DHTExpiration | None = None,
        *,
        is_refresh: bool = False,
        keep_copies: bool = True,
        most_entries: int = 0,
    ) -> dict[DHTID, KeySearch]:
        """Start a search for each key; searches that this node can answer by itself are finished on return."""
        sufficient = get_dht_time() if sufficient_expiration_time is None else sufficient_expiration_time
        validator = self._protocol.record_validator
        how = (sufficient, validator, is_refresh, keep_copies, most_entries)
        searches = {key_id: KeySearch(key_id, *how) for key_id in key_ids}
        for search in searches.values():
            if self._config.reuse_get_requests:
                self.pending.join(search)
            for storage in (self._protocol.storage, self._protocol.cache):
                item = storage.get(search.key_id)
                if item is not None:
                    search.add_candidate(item.value, item.expiration_time, None)
                    search.outcomes[self._protocol.p2p.peer_id] = _OWN_COPY
                if search.is_satisfied:
                    self._end(search)
                    break
        return searches

    async def finish_searches(
        self, searches: Mapping[DHTID, KeySearch], num_workers: int | None = None, beam_size: int | None = None
    ) -> None:
        """Walk until each search is satisfied or there is no node left to ask.

        Cancelling the future of one search stops that search alone; cancelling this coroutine stops them all.
        """
        unfinished = {key_id: search for key_id, search in searches.items() if not search.finished}
        lookup = Lookup(self._protocol)

        async def ask(node_id: DHTID, targets: list[DHTID]) -> dict[DHTID, Answer] | None:
            known = [number for target in targets for number in unfinished[target].known_entries()]
            most = max(unfinished[target].most_entries for target in targets)
            answers = await lookup.ask(node_id, targets, known_entries=known, most_entries=most)
            if answers is None:
                return None
            heard, peer = {}, lookup.peer_of(node_id)
            for target, record in answers.items():
                search = unfinished[target]
                if peer is not None:
                    search.outcomes[peer] = record.outcome
                if record.value is None:
                    search.asked_in_vain[node_id] = None
                elif not search.finished:
                    search.add_candidate(record.value, record.expiration_time, node_id)
                heard[target] = Answer(record.neighbors, search.finished or search.is_satisfied)
            return heard

        def end(target: DHTID, nearest: list[DHTID]) -> None:
            self._end(unfinished[target], nearest, lookup)

        # If only some holders of a record are asked, they take turns in sending it.
        is_sample = beam_size is not None and beam_size < self._config.num_replicas
        walk = Traversal(
            unfinished,
            lookup.starting_nodes,
            ask,
            end,
            num_workers=num_workers or self._config.num_workers,
            beam_size=beam_size or self._config.bucket_size,
            own_id=self._protocol.node_id,
            queries_per_call=min(self._config.chunk_size, MAX_KEYS_PER_FIND),
            num_replicas=self._config.num_replicas,
            stall_after=self._protocol.stall_after,
            spawn=self._protocol.spawn,
            chosen=lookup.chosen,
            draw=self._protocol.p2p.rng.getrandbits(ID_BITS) if is_sample else None,
        )
        for search in unfinished.values():
            search.future.add_done_callback(functools.partial(_finish_query, walk, search.key_id))
        try:
            await lookup.run(walk)
        finally:
            self.abandon(unfinished)

    def abandon(self, searches: Mapping[DHTID, KeySearch]) -> None:
        """Cancel the searches that have not been finished."""
        for search in searches.values():
            self.pending.leave(search)
            search.future.cancel()

    def _end(self, search: KeySearch, nearest: Sequence[DHTID] = (), lookup: Lookup | None = None) -> None:
        """Hand the result to the caller, and keep copies of it where it may be needed next."""
        if search.finished:  # cancelled, or another search for the same key was faster
            self.pending.leave(search)
            return
        metrics = self._protocol.p2p.metrics
        search.outcomes.update(() if lookup is None else lookup.failures)
        for outcome in search.outcomes.values():
            if not outcome:
                metrics.gets_failed[outcome.reason] += 1
        search.finish()
        self.pending.share_result(search)
        if search.found is None:
            return
        if not search.is_refresh:
            hops = 0 if search.source is None or lookup is None else lookup.hops_to(search.source)
            metrics.hops_to_records[hops] += 1
        if search.source is None:
            self._plan_refresh(search)
        elif lookup is not None and search.keep_copies and self._is_news(search):
            self._distribute_copies(search, nearest, lookup)

    def _plan_refresh(self, search: KeySearch) -> None:
        cached_until = self._cached_expiration(search.key_id)
        if cached_until is not None and not search.is_refresh and self._config.cache_refresh_before_expiry:
            self.refresh_queue.schedule_before(search.key_id, cached_until)

    def _is_news(self, search: KeySearch) -> bool:
        present = self._protocol.records.find(search.key_id)
        return present is None or present[1] < search.expiration_time

    def _distribute_copies(self, search: KeySearch, nearest: Sequence[DHTID], lookup: Lookup) -> None:
        assert search.found is not None
        records = self._protocol.records
        copy = records.copy_for_others(search.key_id, search.found, search.expiration_time, in_cache=True)
        if self._config.cache_locally:
            records.keep(copy)
        without_it = [node_id for node_id in nearest if node_id in search.asked_in_vain]
        for node_id in without_it[: self._config.cache_nearest]:
            self._protocol.spawn(self._give_copy(lookup, node_id, copy))

    async def _give_copy(self, lookup: Lookup, node_id: DHTID, copy: NewRecord) -> None:
        peer = lookup.peer_of(node_id)
        if peer is not None:
            await self._protocol.call_store(peer, [copy])

    def _cached_expiration(self, key_id: DHTID) -> DHTExpiration | None:
        item = self._protocol.cache.get(key_id)
        return None if item is None else item.expiration_time

    async def _refresh(self, key_ids: Sequence[DHTID], sufficient_expiration_time: DHTExpiration) -> None:
        await self.finish_searches(self.start_searches(key_ids, sufficient_expiration_time, is_refresh=True))


def _finish_query(walk: Traversal, key_id: DHTID, _: object) -> None:
    """Stop walking for a key whose future is done, perhaps because its caller has cancelled it."""
    walk.finish(key_id)


Refresh = Callable[[Sequence[DHTID], DHTExpiration], Awaitable[None]]
"""Fetches keys again; the second argument is the expiration that is good enough."""


class CacheRefreshQueue:
    """Cached keys that were read, and when to fetch them again: shortly before they expire.

    Args:
        refresh: fetches keys.
        expiration_of: the expiration of the cached copy of a key, ``None`` if there is no copy.
        lead: seconds before the expiration.
        batch_size: most keys in one fetch.
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
        self._due_times: dict[DHTID, ValueWithExpiration[None]] = {}
        self._heap = ExpiryHeap(self._due_times)
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self, key_id: DHTID, due_time: DHTExpiration) -> None:
        """Fetch a key at this time, or earlier if it is already scheduled earlier."""
        planned = self._due_times.get(key_id)
        if planned is not None and planned.expiration_time <= due_time:
            return
        self._due_times[key_id] = ValueWithExpiration(None, due_time)
        self._heap.push(key_id, due_time)
        self._set_timer()

    def schedule_before(self, key_id: DHTID, expiration_time: DHTExpiration) -> None:
        """Fetch a key shortly before its cached copy expires."""
        self.schedule(key_id, expiration_time - self._lead)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        first = self._heap.first()
        if first is not None:
            delay = max(0.0, first.expiration_time - get_dht_time())
            self._timer = asyncio.get_running_loop().call_later(delay, self._start_batch)

    def _start_batch(self) -> None:
        self._timer = None
        keys: list[DHTID] = []
        now = get_dht_time()
        while len(keys) < self._batch_size and (first := self._heap.first()) is not None:
            if first.expiration_time > now:
                break
            del self._due_times[first.key]
            keys.append(first.key)
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
