"""A node of the distributed hash table: the coroutines behind every get and store."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, overload

from shoal.base.clock import DHTExpiration, get_dht_time
from shoal.base.closeable import options_from
from shoal.dht.authorization import AuthorizerBase
from shoal.dht.config import DEFAULT_NUM_WORKERS, NodeConfig
from shoal.dht.crypto import with_signatures
from shoal.dht.get import CacheRefreshQueue, GetResult, PendingSearches, Reader
from shoal.dht.joining import Neighbours, Reunion, ServerMode, meet_neighbors, ping_initial_peers
from shoal.dht.protocol import KEEPERS, DHTProtocol
from shoal.dht.protocol import Blacklist as Blacklist
from shoal.dht.routing import DHTID, DHTKey
from shoal.dht.storage import DHTValue, Subkey
from shoal.dht.store import Writer, make_record
from shoal.dht.traverse import Lookup, PeerFinder
from shoal.dht.validation import GetReport, RecordValidatorBase, StoreReport
from shoal.errors import DHTError, NoAccessTokenError
from shoal.net.pasted import Target, wants_local
from shoal.p2p import P2P, Multiaddr, PeerID
from shoal.p2p.joining import parse_peer_addresses
from shoal.p2p.local_network import check_can_look_around
from shoal.peers.identity import split_peer_address

__all__ = ["DEFAULT_NUM_WORKERS", "DHTNode"]

logger = logging.getLogger(__name__)


class DHTNode:
    """A node. Made by :meth:`create`; lives in one event loop.

    Attributes:
        node_id: this node's id in the DHT.
        peer_id: this node's id on the network.
        protocol: calls other nodes and answers them; has the routing table, the storage and the cache.
        blacklist: peers that did not answer, which searches skip for a while.
    """

    def __init__(
        self, *, protocol: DHTProtocol, config: NodeConfig, owns_p2p: bool, _from_create: bool = False
    ) -> None:
        assert _from_create, "make a DHTNode with: await DHTNode.create(...)"
        self.protocol = protocol
        self.config = config
        self.node_id = protocol.node_id
        self.p2p = protocol.p2p
        self.peer_id: PeerID = protocol.p2p.peer_id
        self.blacklist = protocol.blacklist
        self.is_alive = True
        self._owns_p2p = owns_p2p
        self._neighbours: Neighbours | None = None
        self._server_mode = ServerMode(protocol)
        self._reader = Reader(protocol, config)
        self._writer = Writer(protocol, config, self._reader.refresh_queue)
        self.finder = PeerFinder(protocol)
        """Looks for the addresses of peers."""

    @classmethod
    async def create(
        cls,
        p2p: P2P | None = None,
        node_id: DHTID | None = None,
        initial_peers: Sequence[Multiaddr | str] | str | None = None,
        bucket_size: int = 20,
        num_replicas: int = 5,
        depth_modulo: int = 5,
        parallel_rpc: int | None = None,
        wait_timeout: float = 3,
        refresh_timeout: float | None = None,
        bootstrap_timeout: float | None = None,
        cache_locally: bool = True,
        cache_nearest: int = 1,
        cache_size: int | None = None,
        cache_refresh_before_expiry: float = 5,
        cache_on_store: bool = True,
        reuse_get_requests: bool = True,
        num_workers: int = DEFAULT_NUM_WORKERS,
        chunk_size: int = 16,
        blacklist_time: float = 5.0,
        backoff_rate: float = 2.0,
        client_mode: bool = False,
        record_validator: RecordValidatorBase | None = None,
        authorizer: AuthorizerBase | None = None,
        ensure_bootstrap_success: bool = True,
        strict: bool = True,
        **kwargs: Any,
    ) -> DHTNode:
        """Start a node and join a swarm, or start a new one.

        Args:
            p2p: the peer to work with; by default, the node creates one and shuts it down in the end.
            node_id: this node's id; by default it follows from the peer id, so that a peer id is enough to find it.
            initial_peers: addresses of peers of the swarm, as for :class:`DHT`.
            client_mode: use the DHT without being part of it: others never call this node.
            record_validator: decides which records may be stored and believed.
            authorizer: decides which nodes this node talks to; the same kind at every node of the swarm.
            kwargs: for :meth:`P2P.create`.

        The other parameters are explained in :class:`NodeConfig`.

        Raises:
            BootstrapError: no initial peer answered.
            ValidationError: the initial peers do not agree about the time; or they cannot reach this node, which
                ``force_reachability="public"`` has promised.
            ValueError, TypeError: an argument is invalid.
            ModuleNotFoundError: neighbours are wanted, and the package that finds them is not installed.
        """
        config = options_from(NodeConfig, locals())
        if not isinstance(authorizer, AuthorizerBase | None):
            raise TypeError(f"authorizer must derive from AuthorizerBase, got {authorizer!r}")
        if p2p is not None and kwargs:
            raise ValueError(f"{', '.join(kwargs)}: settings of P2P.create have no effect together with p2p")
        given = () if initial_peers is None else initial_peers
        targets, looks_around = parse_peer_addresses(given), wants_local(given)
        if looks_around:
            check_can_look_around()
        owns_p2p = p2p is None
        if p2p is None:
            kwargs.setdefault("startup_timeout", 8.0)
            # If neighbours are enough, the initial peers need not answer.
            reachable_at_start = initial_peers if ensure_bootstrap_success and not looks_around else None
            p2p = await P2P.create(initial_peers=reachable_at_start, client_mode=client_mode, **kwargs)
            if not p2p.client_mode and not kwargs.get("no_listen"):
                _say_where_it_listens(
                    await p2p.get_visible_maddrs(), is_open=authorizer is None and p2p.membership is None
                )
        may_keep_records = p2p.membership is None or bool(p2p.membership.own.roles & KEEPERS)
        try:
            protocol = DHTProtocol(
                p2p,
                DHTID.of_peer(p2p.peer_id) if node_id is None else node_id,
                config,
                client_mode=client_mode or p2p.client_mode or not may_keep_records,
                record_validator=with_signatures(record_validator, p2p.identity),
                authorizer=authorizer,
            )
            node = cls(protocol=protocol, config=config, owns_p2p=owns_p2p, _from_create=True)
        except BaseException:
            if owns_p2p:
                await p2p.shutdown()
            raise
        try:
            await node._join(targets, looks_around=looks_around)
        except BaseException:
            await node.shutdown()
            raise
        return node

    async def _join(self, targets: Sequence[Target], *, looks_around: bool) -> None:
        config = self.config
        loop = asyncio.get_running_loop()
        budget = config.wait_timeout if config.bootstrap_timeout is None else config.bootstrap_timeout
        deadline = loop.time() + budget
        await self.protocol.start()
        self.p2p.directory = self
        if looks_around:
            self._neighbours = Neighbours(self.protocol, self._server_mode)
            await self._neighbours.start()
        if targets:
            if await ping_initial_peers(
                self.protocol,
                targets,
                timeout=budget,
                must_succeed=config.ensure_bootstrap_success and not looks_around,
                strict=config.strict,
            ):
                await self._server_mode.settle()
            meeting_neighbors = self.protocol.spawn(meet_neighbors(self.protocol))
            await asyncio.wait([meeting_neighbors], timeout=max(0.0, deadline - loop.time()))
        if self._neighbours is not None and not len(self.protocol.routing_table):
            await self._neighbours.wait_for_first()
        if config.refresh_timeout is not None:
            self.protocol.spawn(self._refresh_stale_buckets(config.refresh_timeout))
        present = {} if self._neighbours is None else self._neighbours.network.present
        self.protocol.spawn(Reunion(self.protocol, self._server_mode, targets, present).run())

    async def _refresh_stale_buckets(self, period: float) -> None:
        """Search for random ids in buckets without recent news, so that they stay filled.

        A few live nodes are enough in far buckets, but a node has to know all of its neighbors.
        """
        while True:
            due = get_dht_time() - period
            stale = [bucket for bucket in self.protocol.routing_table.buckets if bucket.last_updated <= due]
            stale.sort(key=lambda bucket: bucket.last_updated)
            due_now = stale[: self.config.chunk_size]
            for bucket in due_now:
                bucket.last_updated = get_dht_time()
            far = [bucket for bucket in due_now if not bucket.has_in_range(self.node_id)]
            targets = [DHTID(self.p2p.rng.randrange(bucket.lower, bucket.upper)) for bucket in far]
            with suppress(NoAccessTokenError):  # it is tried again after a period
                if len(far) < len(due_now):
                    await meet_neighbors(self.protocol)
                await self.find_nearest_nodes(targets, k_nearest=self.config.num_replicas)
            oldest = min(bucket.last_updated for bucket in self.protocol.routing_table.buckets)
            await asyncio.sleep(max(oldest + period - get_dht_time(), 0.01 * period))

    async def shutdown(self) -> None:
        """Leave the swarm. Idempotent; searches in progress are cancelled."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._reader.refresh_queue.clear()
        if self._neighbours is not None:
            await self._neighbours.close()
        if self.p2p.directory is self:  # there may be another node on this peer by now
            self.p2p.directory = None
        await self.protocol.shutdown()
        if self._owns_p2p:
            await self.p2p.shutdown()

    # --- the directory of this peer -----------------------------------------------------------------------------------

    async def find_addresses(self, peer: PeerID) -> None:
        """Look for the addresses of a peer in the DHT."""
        await self.finder.find(peer)

    def dialable_peers(self) -> list[PeerID]:
        """The peers in the routing table: nearly all nodes that others can dial are relays."""
        return [peer for _, peer in self.protocol.routing_table]

    def note_reachability(self) -> None:
        """Note that others can call this peer in another way: it may become a node, or stop being one."""
        self._server_mode.look()

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise DHTError("this node is shut down: create a new one")

    # --- reading and writing the DHT ----------------------------------------------------------------------------------

    async def find_nearest_nodes(
        self,
        queries: Collection[DHTID],
        k_nearest: int | None = None,
        beam_size: int | None = None,
        num_workers: int | None = None,
        node_to_peer_id: Mapping[DHTID, PeerID] | None = None,
        exclude_self: bool = False,
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        """Find the nodes nearest to some ids.

        Args:
            queries: the ids.
            k_nearest: how many nodes to return for each id, ``bucket_size`` by default.
            beam_size: most nodes to ask; by default the larger of ``k_nearest`` and ``bucket_size``.
            num_workers: requests in flight.
            node_to_peer_id: nodes to start with, besides those of the routing table.
            exclude_self: leave this node out of the results; a client-mode node is always left out.

        Returns:
            For each id, the nodes and their peers, nearest first. Nodes that did not answer are left out.
        """
        self._check_alive()
        count = self.config.bucket_size if k_nearest is None else k_nearest
        lookup = Lookup(self.protocol, node_to_peer_id)
        results: dict[DHTID, dict[DHTID, PeerID]] = {}
        without_self = exclude_self or not self.protocol.is_node

        def note(target: DHTID, nearest: list[DHTID]) -> None:
            nodes = nearest if without_self else lookup.with_own(nearest, target)
            found: dict[DHTID, PeerID] = {}
            for node_id in nodes:
                peer = self.peer_id if node_id == self.node_id else lookup.peer_of(node_id)
                if peer is not None and len(found) < count:
                    found[node_id] = peer
            results[target] = found

        await lookup.find_nearest(
            dict.fromkeys(queries),
            note,
            num_workers=num_workers or self.config.num_workers,
            beam_size=beam_size or max(self.config.bucket_size, count),
            enough=count,
        )
        return {query: results[query] for query in queries}

    @overload
    async def get(
        self, key: DHTKey, latest: bool = False, *, explain: Literal[False] = False, **kwargs: Any
    ) -> GetResult: ...

    @overload
    async def get(self, key: DHTKey, latest: bool = False, *, explain: Literal[True], **kwargs: Any) -> GetReport: ...

    async def get(
        self, key: DHTKey, latest: bool = False, *, explain: bool = False, **kwargs: Any
    ) -> GetResult | GetReport:
        """Get the value of a key and its expiration, or ``None``.

        Args:
            key: the key under which the value was stored.
            latest: ask all nodes that may hold the key for the latest value, or for the union of a dictionary's
                entries; otherwise return the first unexpired value, which may be outdated or incomplete.
            explain: return a :class:`GetReport`, which also has the outcome at each node.
            kwargs: as for :meth:`get_many`.
        """
        if latest:
            kwargs["sufficient_expiration_time"] = math.inf
        key_id = DHTID.generate(source=key)
        results = await self.get_many_by_id([key_id], explain=explain, **kwargs)
        result: GetResult | GetReport = results[key_id]
        return result

    async def get_many(
        self, keys: Collection[DHTKey], sufficient_expiration_time: DHTExpiration | None = None, **kwargs: Any
    ) -> dict[DHTKey, Any]:
        """Get several values at once.

        Args:
            keys: hashable keys.
            sufficient_expiration_time: accept values that live at least until then (DHT time); by default, any value
                that has not expired. Infinity asks for the latest values.
            kwargs: as for :meth:`get_many_by_id`.

        Returns:
            For each key, ``None`` or the value with its expiration; with ``return_futures``, a future of that.
        """
        key_ids = {key: DHTID.generate(source=key) for key in keys}
        results = await self.get_many_by_id(list(key_ids.values()), sufficient_expiration_time, **kwargs)
        return {key: results[key_id] for key, key_id in key_ids.items()}

    async def get_many_by_id(
        self,
        key_ids: Collection[DHTID],
        sufficient_expiration_time: DHTExpiration | None = None,
        num_workers: int | None = None,
        beam_size: int | None = None,
        return_futures: bool = False,
        keep_copies: bool = True,
        most_entries: int = 0,
        explain: bool = False,
    ) -> dict[DHTID, Any]:
        """Like :meth:`get_many`, for keys that are hashed already.

        Args:
            key_ids: ids of keys.
            sufficient_expiration_time: as for :meth:`get_many`.
            num_workers: requests in flight until the nearest nodes have answered; then the rest are asked at once.
            beam_size: how many of the nearest nodes are asked before a key counts as missing. If it is less than
                ``num_replicas``, the first one to ask is drawn among the ``num_replicas`` nearest.
            return_futures: return at once; cancelling a future stops the search for its key.
            keep_copies: cache found values here and at a node near the key; not worth it for values that change often.
            most_entries: the most entries of a dictionary to ask each node for, drawn at random; 0: all.
            explain: return a :class:`GetReport` for each key, which also has the outcome at each node.
        """
        self._check_alive()
        if explain and return_futures:
            raise ValueError("explain needs the results: leave return_futures out")
        searches = self._reader.start_searches(
            key_ids, sufficient_expiration_time, keep_copies=keep_copies, most_entries=most_entries
        )
        if any(not search.finished for search in searches.values()):
            search_all = self._reader.finish_searches(searches, num_workers, beam_size)
            if return_futures:
                task = self.protocol.spawn(search_all)
                # A task that is cancelled before it starts would not abandon its searches itself.
                task.add_done_callback(lambda _: self._reader.abandon(searches))
            else:
                await search_all
        if return_futures:
            return {key_id: search.future for key_id, search in searches.items()}
        if explain:
            return {key_id: search.report() for key_id, search in searches.items()}
        return {key_id: search.future.result() for key_id, search in searches.items()}

    @overload
    async def store(
        self,
        key: DHTKey,
        value: DHTValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
        *,
        explain: Literal[False] = False,
        **kwargs: Any,
    ) -> bool: ...

    @overload
    async def store(
        self,
        key: DHTKey,
        value: DHTValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
        *,
        explain: Literal[True],
        **kwargs: Any,
    ) -> StoreReport: ...

    async def store(
        self,
        key: DHTKey,
        value: DHTValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
        *,
        explain: bool = False,
        **kwargs: Any,
    ) -> bool | StoreReport:
        """Store one value, or one entry of a dictionary.

        Args:
            key: the key under which others get it.
            value: anything that msgpack can pack.
            expiration_time: when it expires (DHT time), a day from now at most. A later expiration replaces an earlier
                one; a tie is refused.
            subkey: the entry's key inside the dictionary; ``None`` for a plain value.
            explain: return a :class:`StoreReport`, which also has the outcome at each node.
            kwargs: as for :meth:`store_many`.

        Returns:
            Whether most of the nodes that answered have accepted it.
        """
        self._check_alive()
        record = make_record(key, subkey, value, expiration_time, self.protocol.record_validator)
        [report] = await self._writer.store([record], **kwargs)
        return report if explain else bool(report)

    async def store_many(
        self,
        keys: Sequence[DHTKey],
        values: Sequence[DHTValue],
        expiration_time: DHTExpiration | Sequence[DHTExpiration],
        subkeys: Sequence[Subkey | None] | None = None,
        exclude_self: bool = False,
        await_all_replicas: bool = True,
        *,
        explain: bool = False,
        **kwargs: Any,
    ) -> dict[Any, Any]:
        """Store several values at once.

        Args:
            keys: one for each value; they may repeat with different subkeys.
            values: what to store.
            expiration_time: one for all values, or one for each.
            subkeys: one for each value, ``None`` for a plain value; or ``None`` if all are plain.
            exclude_self: store at other nodes only.
            await_all_replicas: wait for every node that should hold a value, not only for the first that answers.
            explain: return a :class:`StoreReport` for each value instead of a bool.
            kwargs: ``num_workers``, the number of requests in flight.

        Returns:
            By key, or by ``(key, subkey)`` where there is a subkey: whether most nodes that answered have accepted it.
        """
        self._check_alive()
        expirations = [expiration_time] * len(keys) if isinstance(expiration_time, (int, float)) else expiration_time
        names = [None] * len(keys) if subkeys is None else subkeys
        if not len(keys) == len(values) == len(expirations) == len(names):
            raise ValueError(
                f"{len(keys)} keys, {len(values)} values, {len(expirations)} expirations and {len(names)} subkeys "
                "do not belong together"
            )
        validator = self.protocol.record_validator
        records = [
            make_record(key, subkey, value, expires, validator)
            for key, subkey, value, expires in zip(keys, names, values, expirations, strict=True)
        ]
        reports = await self._writer.store(
            records, exclude_self=exclude_self, await_all_replicas=await_all_replicas, **kwargs
        )
        labels = [key if subkey is None else (key, subkey) for key, subkey in zip(keys, names, strict=True)]
        return dict(zip(labels, reports if explain else map(bool, reports), strict=True))

    # --- facts about this node ----------------------------------------------------------------------------------------

    @property
    def cache_refresh_queue(self) -> CacheRefreshQueue:
        """Cached keys that will be fetched again before they expire."""
        return self._reader.refresh_queue

    @property
    def pending_get_requests(self) -> PendingSearches:
        """Searches in progress, by key id."""
        return self._reader.pending

    @property
    def client_mode(self) -> bool:
        """Whether this node never serves the DHT; ``protocol.is_node`` tells whether it does at the moment."""
        return self.protocol.client_mode

    async def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        """Addresses to give to others as initial peers."""
        return await self.p2p.get_visible_maddrs(latest=latest)


def _say_where_it_listens(addresses: Sequence[Multiaddr], *, is_open: bool) -> None:
    admission = "anyone who reaches them may join" if is_open else "members may join"
    where = ", ".join(str(split_peer_address(address)[0]) for address in addresses)
    logger.info("listening at %s: %s; host_maddrs or SHOAL_HOST_MADDRS narrows it", where, admission)
