"""Storing records: find the nodes nearest to the keys, then bring the records there."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shoal.clock import DHTExpiration, get_dht_time
from shoal.dht.caching import CacheRefreshQueue
from shoal.dht.config import NodeConfig
from shoal.dht.lookup import Lookup
from shoal.dht.messages import MAX_VALUE_BYTES
from shoal.dht.protocol import DHTProtocol
from shoal.dht.publication import Publication
from shoal.dht.records import NewRecord, check_expiration, check_subkey
from shoal.dht.routing import DHTID, DHTKey
from shoal.dht.storage import DHTValue, DictionaryDHTValue, Subkey
from shoal.dht.validation import PLAIN_VALUE, DHTRecord, RecordValidatorBase
from shoal.serializer import MSGPackSerializer

logger = logging.getLogger(__name__)


class Writer:
    """What a node does to store records.

    Args:
        protocol: asks other nodes and knows this one's records.
        config: the node's settings.
        refresh_queue: told about cached records that are outdated now.
    """

    def __init__(self, protocol: DHTProtocol, config: NodeConfig, refresh_queue: CacheRefreshQueue) -> None:
        self._protocol, self._config = protocol, config
        self._refresh_queue = refresh_queue

    async def store(
        self,
        records: Sequence[NewRecord],
        *,
        exclude_self: bool = False,
        await_all_replicas: bool = True,
        num_workers: int | None = None,
    ) -> list[bool]:
        """Bring records to the nodes nearest to their keys.

        Returns:
            For each record, whether most of the nodes that answered keep it now.
        """
        publications: dict[DHTID, Publication] = {}
        places = []
        for record in records:
            publication = publications.setdefault(record.key_id, Publication(record.key_id, self._config.num_replicas))
            places.append((publication, publication.add(record)))
        lookup = Lookup(self._protocol)
        without_self = exclude_self or self._protocol.client_mode  # nobody could fetch it from a client

        async def store_at(node_id: DHTID, batch: Sequence[NewRecord]) -> list[bool] | None:
            if node_id == self._protocol.node_id:
                return [self._protocol.records.keep(record) for record in batch]
            peer = lookup.peer_of(node_id)
            if peer is None:
                return None
            return await self._protocol.call_store(peer, batch)

        def publish(key_id: DHTID, nearest: list[DHTID]) -> None:
            nodes = nearest if without_self else sorted([*nearest, self._protocol.node_id], key=key_id.xor_distance)
            self._protocol.spawn(publications[key_id].run(nodes, store_at))

        await lookup.find_nearest(
            publications,
            publish,
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

    def _update_cache(self, record: NewRecord, was_accepted: bool) -> None:
        """The cache must not go on to tell what this store has changed."""
        cached = self._protocol.cache.get(record.key_id)
        if record.subkey == PLAIN_VALUE:
            if was_accepted:
                self._protocol.records.keep(record._replace(in_cache=True))
            elif cached is not None and record.expiration_time >= cached.expiration_time:
                self._refresh_queue.schedule(record.key_id, get_dht_time())  # somebody has a later value
        elif cached is not None and isinstance(cached.value, DictionaryDHTValue):
            if was_accepted:
                self._protocol.records.keep(record._replace(in_cache=True))
            self._refresh_queue.schedule(record.key_id, get_dht_time())


def make_record(
    key: DHTKey,
    subkey: Subkey | None,
    value: DHTValue,
    expiration_time: DHTExpiration,
    validator: RecordValidatorBase | None,
) -> NewRecord:
    """Pack and sign what the application wants to store.

    Raises:
        TypeError, ValueError: it cannot be packed, is too large, or cannot expire then.
    """
    key_id = DHTID.generate(source=key)
    packed_subkey = PLAIN_VALUE
    if subkey is not None:
        packed_subkey = MSGPackSerializer.dumps(subkey)
        check_subkey(subkey, packed_subkey)
    expires = check_expiration(expiration_time)
    packed = MSGPackSerializer.dumps(value)
    if validator is not None:
        packed = validator.sign_value(DHTRecord(key_id.to_bytes(), packed_subkey, packed, expires))
    if len(packed) > MAX_VALUE_BYTES:
        raise ValueError(
            f"the value for key {key!r} takes {len(packed)} bytes, over the limit of {MAX_VALUE_BYTES}: "
            "the table is for small facts"
        )
    return NewRecord(key_id, packed_subkey, packed, expires)
