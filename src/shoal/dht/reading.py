"""Getting records: this node's own copies first, then a walk to the nodes nearest to the keys."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

from shoal.clock import DHTExpiration, get_dht_time
from shoal.dht.caching import CacheRefreshQueue
from shoal.dht.config import NodeConfig
from shoal.dht.lookup import Lookup
from shoal.dht.messages import MAX_KEYS_PER_FIND
from shoal.dht.protocol import DHTProtocol
from shoal.dht.records import NewRecord
from shoal.dht.routing import DHTID
from shoal.dht.search import PendingSearches, Search
from shoal.dht.traverse import Answer, Traversal


class Reader:
    """What a node does to get records.

    Args:
        protocol: asks other nodes and knows this one's records.
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
    ) -> dict[DHTID, Search]:
        """Begin a search for each key; those that this node can answer by itself are finished on return."""
        sufficient = get_dht_time() if sufficient_expiration_time is None else sufficient_expiration_time
        validator = self._protocol.record_validator
        searches = {key_id: Search(key_id, sufficient, validator, is_refresh, keep_copies) for key_id in key_ids}
        for search in searches.values():
            if self._config.reuse_get_requests:
                self.pending.join(search)
            for storage in (self._protocol.storage, self._protocol.cache):
                item = storage.get(search.key_id)
                if item is not None:
                    search.add_candidate(item.value, item.expiration_time, None)
                if search.is_satisfied:
                    self._end(search)
                    break
        return searches

    async def finish_searches(
        self, searches: Mapping[DHTID, Search], num_workers: int | None = None, beam_size: int | None = None
    ) -> None:
        """Walk until each search has found what it wants or there is nobody left to ask.

        A search whose future is cancelled stops alone; cancelling this stops them all.
        """
        unfinished = {key_id: search for key_id, search in searches.items() if not search.finished}
        lookup = Lookup(self._protocol)

        async def ask(node_id: DHTID, targets: list[DHTID]) -> dict[DHTID, Answer] | None:
            answers = await lookup.ask(node_id, targets)
            if answers is None:
                return None
            heard = {}
            for target, record in answers.items():
                search = unfinished[target]
                if record.value is None:
                    search.asked_in_vain[node_id] = None
                elif not search.finished:
                    search.add_candidate(record.value, record.expiration_time, node_id)
                heard[target] = Answer(record.neighbors, search.finished or search.is_satisfied)
            return heard

        def end(target: DHTID, nearest: list[DHTID]) -> None:
            self._end(unfinished[target], nearest, lookup)

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
        )
        for search in unfinished.values():
            search.future.add_done_callback(functools.partial(_finish_query, walk, search.key_id))
        try:
            await lookup.run(walk)
        finally:
            self.abandon(unfinished)

    def abandon(self, searches: Mapping[DHTID, Search]) -> None:
        """Cancel the searches that have not been finished."""
        for search in searches.values():
            self.pending.leave(search)
            search.future.cancel()

    def _end(self, search: Search, nearest: Sequence[DHTID] = (), lookup: Lookup | None = None) -> None:
        """Hand over a result, and keep copies of it where it may be wanted next."""
        if search.finished:  # cancelled, or another search for the same key was faster
            self.pending.leave(search)
            return
        search.finish()
        self.pending.share_result(search)
        if search.found is None:
            return
        if not search.is_refresh:
            hops = 0 if search.source is None or lookup is None else lookup.hops_to(search.source)
            self._protocol.p2p.metrics.hops_to_records[hops] += 1
        if search.source is None:
            self._plan_refresh(search)
        elif lookup is not None and search.keep_copies and self._is_news(search):
            self._spread_copies(search, nearest, lookup)

    def _plan_refresh(self, search: Search) -> None:
        cached_until = self._cached_expiration(search.key_id)
        if cached_until is not None and not search.is_refresh and self._config.cache_refresh_before_expiry:
            self.refresh_queue.schedule_before(search.key_id, cached_until)

    def _is_news(self, search: Search) -> bool:
        present = self._protocol.records.find(search.key_id)
        return present is None or present[1] < search.expiration_time

    def _spread_copies(self, search: Search, nearest: Sequence[DHTID], lookup: Lookup) -> None:
        assert search.found is not None
        copy = NewRecord.of_stored(search.key_id, search.found, search.expiration_time, in_cache=True)
        if self._config.cache_locally:
            self._protocol.records.keep(copy)
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
    """The future of a search is done, perhaps because its caller has cancelled it."""
    walk.finish(key_id)
