"""Stores each record at the nodes that are nearest to its key, and remembers which of them have agreed to keep it."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.base.clock import DHTExpiration, get_dht_time
from shoal.base.logs import Seldom, quoted
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.lookup import Lookup
from shoal.dht.records import MAX_VALUE_BYTES, NewRecord
from shoal.dht.routing import DHTID, DHTKey
from shoal.dht.storage import DHTValue, DictionaryDHTValue, Subkey
from shoal.dht.validation import (
    MAX_LIFETIME_SECONDS,
    PLAIN_VALUE,
    DHTRecord,
    RecordValidatorBase,
    check_expiration,
    check_subkey,
)

if TYPE_CHECKING:
    from shoal.dht.get import CacheRefreshQueue
    from shoal.dht.node import NodeConfig
    from shoal.dht.protocol import DHTProtocol

logger = logging.getLogger(__name__)
warn_seldom = Seldom(logger.warning, seconds=MAX_LIFETIME_SECONDS)

StoreAt = Callable[[DHTID, Sequence[NewRecord]], Awaitable["list[bool] | None"]]
"""Asks a node to keep records; returns ``None`` if it does not answer."""


class Publication:
    """The records of one key, on their way to ``num_replicas`` nodes.

    Args:
        key_id: id of the key.
        num_replicas: number of nodes that should answer; silent ones are replaced by the next nearest ones.
    """

    def __init__(self, key_id: DHTID, num_replicas: int) -> None:
        self.key_id = key_id
        self.records: list[NewRecord] = []
        self.answers: list[list[bool]] = []
        """Whether each replica keeps each record, in the order in which the answers came."""
        self.has_answer = asyncio.Event()
        """Set when one replica has answered, or none will."""
        self.is_finished = asyncio.Event()
        self._num_replicas = num_replicas

    def add(self, record: NewRecord) -> int:
        """Add a record; returns its position."""
        self.records.append(record)
        return len(self.records) - 1

    async def run(self, nodes: Iterable[DHTID], store_at: StoreAt) -> None:
        """Store at nodes in the given order, with no more attempts in flight than replicas are missing."""
        waiting = deque(nodes)
        in_flight: dict[asyncio.Task[list[bool] | None], None] = {}
        try:
            while True:
                while waiting and len(self.answers) + len(in_flight) < self._num_replicas:
                    attempt = asyncio.ensure_future(store_at(waiting.popleft(), self.records))
                    in_flight[attempt] = None
                if not in_flight:
                    return
                await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                for attempt in [attempt for attempt in in_flight if attempt.done()]:
                    del in_flight[attempt]
                    answer = attempt.result()
                    if answer is not None:
                        self.answers.append(answer)
                        self.has_answer.set()
        finally:
            for attempt in in_flight:
                attempt.cancel()

    def begin_anew(self) -> None:
        """Wait for answers again: nobody has given one, but others will be asked."""
        self.has_answer.clear()
        self.is_finished.clear()

    def end(self) -> None:
        """Nobody will answer any more, also if :meth:`run` was cancelled before it began."""
        self.has_answer.set()
        self.is_finished.set()

    def is_accepted(self, position: int) -> bool:
        """Whether most of the replicas that answered keep this record.

        A few may disagree without harm: a newcomer that accepts an outdated record, or a dishonest node.
        """
        votes = [answer[position] for answer in self.answers]
        return sum(votes) * 2 > len(votes)


# So long the nodes that were found near a key are taken for the nearest ones, unless a nearer one is heard of before.
WALK_LASTS_SECONDS = 30.0
MAX_WALKS = 64


@dataclass
class _Walk:
    """The nodes that were found near a key."""

    lookup: Lookup
    nearest: list[DHTID]
    ended_at: float


class Writer:
    """Stores records on behalf of a node.

    Who looks for a group declares that and withdraws it soon, and who trains reports progress every few seconds. So a
    key at which this node has just stored something is not walked to again, as long as all the nodes there answer.

    Args:
        protocol: asks other nodes, and has this node's records.
        config: the node's settings.
        refresh_queue: gets the cached records that are outdated now.
    """

    def __init__(self, protocol: DHTProtocol, config: NodeConfig, refresh_queue: CacheRefreshQueue) -> None:
        self._protocol, self._config = protocol, config
        self._refresh_queue = refresh_queue
        self._walks: OrderedDict[DHTID, _Walk] = OrderedDict()

    async def store(
        self,
        records: Sequence[NewRecord],
        *,
        exclude_self: bool = False,
        await_all_replicas: bool = True,
        num_workers: int | None = None,
    ) -> list[bool]:
        """Store records at the nodes nearest to their keys.

        Returns:
            For each record, whether most of the nodes that answered keep it now.
        """
        publications: dict[DHTID, Publication] = {}
        places = []
        for record in records:
            publication = publications.setdefault(record.key_id, Publication(record.key_id, self._config.num_replicas))
            places.append((publication, publication.add(record)))
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
            publication.begin_anew()
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
        accepted = [publication.is_accepted(position) for publication, position in places]
        if self._config.cache_on_store:
            for record, was_accepted in zip(records, accepted, strict=True):
                self._update_cache(record, was_accepted)
        return accepted

    def _take_walk(self, key_id: DHTID, now: float) -> _Walk | None:
        """The last walk to a key, unless it is old or a nearer node is known. It is kept again if all nodes answer."""
        walk = self._walks.pop(key_id, None)
        if walk is None or now - walk.ended_at > WALK_LASTS_SECONDS:
            return None
        nearest = self._protocol.routing_table.get_nearest_neighbors(key_id, self._config.num_replicas)
        return walk if {node_id for node_id, _ in nearest} <= set(walk.nearest) else None

    async def _publish(self, publication: Publication, nodes: Sequence[DHTID], walk: _Walk) -> None:
        """Store the records of one key at the first of these nodes that answer."""
        all_answer = bool(walk.nearest)

        async def store_at(node_id: DHTID, batch: Sequence[NewRecord]) -> list[bool] | None:
            nonlocal all_answer
            if node_id == self._protocol.node_id:
                return [self._protocol.records.keep(record) for record in batch]
            peer = walk.lookup.peer_of(node_id)
            accepted = None if peer is None else await self._protocol.call_store(peer, batch)
            all_answer &= accepted is not None
            return accepted

        await publication.run(nodes, store_at)
        if all_answer:
            self._walks[publication.key_id] = walk
            self._walks.move_to_end(publication.key_id)
            if len(self._walks) > MAX_WALKS:
                self._walks.popitem(last=False)

    def _update_cache(self, record: NewRecord, was_accepted: bool) -> None:
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
    """Limit an expiration to a day from now. This happens before signing, because nobody may alter a record later."""
    latest = get_dht_time() + MAX_LIFETIME_SECONDS
    if expiration_time > latest:
        warn_seldom(
            "the record for key %s shall live %.0f s: it lives a day. Store it again before that",
            quoted(key),
            expiration_time - get_dht_time(),
        )
    return min(expiration_time, latest)


def make_record(
    key: DHTKey,
    subkey: Subkey | None,
    value: DHTValue,
    expiration_time: DHTExpiration,
    validator: RecordValidatorBase | None,
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
    packed = MSGPackSerializer.dumps(value)
    if validator is not None:
        packed = validator.sign_value(DHTRecord(key_id.to_bytes(), packed_subkey, packed, expires))
    if len(packed) > MAX_VALUE_BYTES:
        raise ValueError(
            f"the value for key {key!r} takes {len(packed)} bytes, over the limit of {MAX_VALUE_BYTES}: "
            "the table is for small facts"
        )
    return NewRecord(key_id, packed_subkey, packed, expires)
