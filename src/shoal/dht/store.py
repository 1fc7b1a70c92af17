"""Stores each record at the nodes that are nearest to its key."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.base.bounded import Bounded
from shoal.base.clock import DHTExpiration, get_dht_time
from shoal.base.logs import Seldom, quoted
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.config import NodeConfig
from shoal.dht.get import CacheRefreshQueue
from shoal.dht.protocol import NO_ANSWER, DHTProtocol
from shoal.dht.records import MAX_VALUE_BYTES, NewRecord
from shoal.dht.routing import DHTID, DHTKey
from shoal.dht.storage import DHTValue, DictionaryDHTValue, Subkey
from shoal.dht.traverse import Lookup
from shoal.dht.validation import (
    MAX_LIFETIME_SECONDS,
    PLAIN_VALUE,
    DHTRecord,
    Outcome,
    RecordValidatorBase,
    StoreReport,
    check_expiration,
    check_subkey,
    outcome_of_failure,
)
from shoal.errors import NoAccessTokenError
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)
warn_seldom = Seldom(logger.warning, seconds=MAX_LIFETIME_SECONDS)


@dataclass
class _Publication:
    """The records of one key, in flight to the nodes that should keep them."""

    key_id: DHTID
    records: list[NewRecord] = field(default_factory=list)
    outcomes: dict[PeerID, list[Outcome]] = field(default_factory=dict)
    """By node: the outcome for each record."""
    answers: int = 0
    """How many nodes have answered."""
    has_answer: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when one node has answered, or none will."""
    is_finished: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, peer: PeerID, outcomes: list[Outcome]) -> bool:
        """Note what a node did; returns whether it has answered."""
        self.outcomes[peer] = outcomes
        if not outcomes[0].answered:
            return False
        self.answers += 1
        self.has_answer.set()
        return True

    def restart(self) -> None:
        """Wait for answers again: no node has answered, but others will be asked."""
        self.has_answer.clear()
        self.is_finished.clear()

    def end(self) -> None:
        """Note that no node will answer any more."""
        self.has_answer.set()
        self.is_finished.set()


# The nodes found near a key count as the nearest ones for this many seconds, unless a nearer one becomes known. Chosen:
# a trainer stores its progress every few seconds.
WALK_LASTS_SECONDS = 30.0


@dataclass
class _Walk:
    """The nodes that were found near a key."""

    lookup: Lookup
    nearest: list[DHTID]
    ended_at: float


class Writer:
    """Stores records on behalf of a node.

    Peers store at the same keys repeatedly: a trainer reports its progress every few seconds, and one that looks for a
    group declares that and soon withdraws it. So this node does not walk again to a key that it has just written to,
    as long as all the nodes there answer.

    Args:
        protocol: asks other nodes, and has this node's records.
        config: the node's settings.
        refresh_queue: gets the cached records that are outdated now.
    """

    def __init__(self, protocol: DHTProtocol, config: NodeConfig, refresh_queue: CacheRefreshQueue) -> None:
        self._protocol, self._config, self._refresh_queue = protocol, config, refresh_queue
        self._walks: Bounded[DHTID, _Walk] = Bounded(64)  # a trainer writes to about ten keys

    async def store(
        self,
        records: Sequence[NewRecord],
        *,
        exclude_self: bool = False,
        await_all_replicas: bool = True,
        num_workers: int | None = None,
    ) -> list[StoreReport]:
        """Store records at the nodes nearest to their keys, and return a report for each."""
        publications: dict[DHTID, _Publication] = {}
        places = []
        for record in records:
            publication = publications.setdefault(record.key_id, _Publication(record.key_id))
            places.append((publication, len(publication.records)))
            publication.records.append(record)
        # Other nodes cannot fetch records from a client.
        without_self = exclude_self or not self._protocol.is_node

        def publish(walk: _Walk, key_id: DHTID) -> None:
            nodes = walk.nearest if without_self else walk.lookup.with_own(walk.nearest, key_id)
            publication = publications[key_id]
            self._protocol.spawn(self._publish(publication, nodes, walk)).add_done_callback(lambda _: publication.end())

        lookup, now = Lookup(self._protocol), asyncio.get_running_loop().time
        walks = {key_id: walk for key_id in publications if (walk := self._take_walk(key_id, now())) is not None}
        for key_id, walk in walks.items():
            publish(walk, key_id)
        for key_id in walks:
            await publications[key_id].has_answer.wait()
        unanswered = [publication for publication in publications.values() if not publication.answers]
        for publication in unanswered:
            publication.restart()
        if unanswered:
            await lookup.find_nearest(
                [publication.key_id for publication in unanswered],
                lambda key_id, nearest: publish(_Walk(lookup, nearest, now()), key_id),
                num_workers=num_workers or self._config.num_workers,
                beam_size=max(self._config.bucket_size, self._config.num_replicas),
                enough=self._config.num_replicas,
            )
        for publication in publications.values():
            await (publication.is_finished if await_all_replicas else publication.has_answer).wait()
        reports = [
            StoreReport({**lookup.failures, **{peer: each[position] for peer, each in publication.outcomes.items()}})
            for publication, position in places
        ]
        for record, report in zip(records, reports, strict=True):
            for outcome in report.nodes.values():
                if not outcome:
                    self._protocol.p2p.metrics.stores_failed[outcome.reason] += 1
            if self._config.cache_on_store:
                self._update_cache(record, was_accepted=bool(report))
        return reports

    def _take_walk(self, key_id: DHTID, now: float) -> _Walk | None:
        """The last walk to a key, unless it is old or a nearer node is known. It is kept again if all nodes answer."""
        walk = self._walks.pop(key_id, None)
        if walk is None or now - walk.ended_at > WALK_LASTS_SECONDS:
            return None
        nearest = self._protocol.routing_table.get_nearest_neighbors(key_id, self._config.num_replicas)
        return walk if {node_id for node_id, _ in nearest} <= set(walk.nearest) else None

    async def _publish(self, publication: _Publication, nodes: Iterable[DHTID], walk: _Walk) -> None:
        """Store the records of one key at the first of these nodes that answer.

        No more attempts are in flight than replicas are missing.
        """
        waiting, all_answered = deque(nodes), True
        in_flight: dict[asyncio.Task[bool], None] = {}
        try:
            while True:
                while waiting and publication.answers + len(in_flight) < self._config.num_replicas:
                    attempt = asyncio.ensure_future(self._store_at(waiting.popleft(), publication, walk.lookup))
                    in_flight[attempt] = None
                if not in_flight:
                    break
                await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                for attempt in [attempt for attempt in in_flight if attempt.done()]:
                    del in_flight[attempt]
                    all_answered &= attempt.result()
        finally:
            for attempt in in_flight:
                attempt.cancel()
        if all_answered and walk.nearest:
            self._walks[publication.key_id] = walk

    async def _store_at(self, node_id: DHTID, publication: _Publication, lookup: Lookup) -> bool:
        """Store the records of one key at a node; returns whether it has answered."""
        protocol, records = self._protocol, publication.records
        if node_id == protocol.node_id:
            return publication.note(protocol.p2p.peer_id, [protocol.records.keep(record) for record in records])
        peer = lookup.peer_of(node_id)
        if peer is None:
            return False
        try:
            return publication.note(peer, await protocol.store_at(peer, records))
        except NoAccessTokenError:
            raise
        except NO_ANSWER as e:
            return publication.note(peer, [outcome_of_failure(e)] * len(records))

    def _update_cache(self, record: NewRecord, *, was_accepted: bool) -> None:
        """Update or refresh the cached record that this store has changed."""
        cached = self._protocol.cache.get(record.key_id)
        if record.subkey == PLAIN_VALUE:
            if was_accepted:
                self._protocol.records.keep(record._replace(in_cache=True))
            elif cached is not None and record.expiration_time >= cached.expiration_time:
                # The replicas have a later value.
                self._refresh_queue.schedule(record.key_id, get_dht_time())
        elif cached is not None and isinstance(cached.value, DictionaryDHTValue):
            if was_accepted:
                self._protocol.records.keep(record._replace(in_cache=True))
            self._refresh_queue.schedule(record.key_id, get_dht_time())


def _within_a_day(key: DHTKey, expiration_time: float) -> float:
    """Limit an expiration to a day from now. This must happen before signing, because a signed record cannot change."""
    latest = get_dht_time() + MAX_LIFETIME_SECONDS
    if expiration_time > latest:
        warn_seldom(
            "the record for key %s would live %.0f s, over the limit of a day: store it again before that",
            quoted(key),
            expiration_time - get_dht_time(),
        )
    return min(expiration_time, latest)


def make_record(
    key: DHTKey,
    subkey: Subkey | None,
    value: DHTValue,
    expiration_time: DHTExpiration,
    validator: RecordValidatorBase,
) -> NewRecord:
    """Pack and sign a value that the application wants to store.

    Raises:
        TypeError, ValueError: it cannot be packed, is too large, or has an invalid expiration.
    """
    key_id = DHTID.generate(source=key)
    packed_subkey = PLAIN_VALUE
    if subkey is not None:
        packed_subkey = MSGPackSerializer.dumps(subkey)
        check_subkey(subkey, packed_subkey)
    expires = _within_a_day(key, check_expiration(expiration_time))
    packed = validator.sign_value(DHTRecord(key_id.to_bytes(), packed_subkey, MSGPackSerializer.dumps(value), expires))
    if len(packed) > MAX_VALUE_BYTES:
        raise ValueError(
            f"the value for key {key!r} takes {len(packed)} bytes, over the limit of {MAX_VALUE_BYTES}: "
            "the DHT is for small facts"
        )
    return NewRecord(key_id, packed_subkey, packed, expires)
