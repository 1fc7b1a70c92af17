"""The search for one key: candidates from many nodes are merged until the best one is good enough."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from shoal.clock import DHTExpiration, get_dht_time
from shoal.dht.routing import DHTID
from shoal.dht.storage import DictionaryDHTValue, StoredValue, ValueWithExpiration
from shoal.dht.validation import PLAIN_VALUE, DHTRecord, RecordValidatorBase, has_owned_entries
from shoal.serializer import MSGPackSerializer

logger = logging.getLogger(__name__)

GetResult = ValueWithExpiration[Any] | None


class Search:
    """One caller's search for one key.

    Args:
        key_id: the key.
        sufficient_expiration_time: stop looking at the first value that lives at least this long.
        validator: knows what to strip from values before the application sees them.
        is_refresh: the result goes into the cache only, nobody waits for it.
        keep_copies: of what is found, here and at a node where it may be wanted next.
    """

    def __init__(
        self,
        key_id: DHTID,
        sufficient_expiration_time: DHTExpiration,
        validator: RecordValidatorBase | None,
        is_refresh: bool = False,
        keep_copies: bool = True,
    ) -> None:
        self.key_id = key_id
        self.sufficient_expiration_time = sufficient_expiration_time
        self.is_refresh, self.keep_copies = is_refresh, keep_copies
        self.future: asyncio.Future[GetResult] = asyncio.get_running_loop().create_future()
        self.found: StoredValue | None = None
        self.expiration_time: DHTExpiration = -math.inf
        self.source: DHTID | None = None
        """Which node told the best value so far; ``None`` is this node itself."""
        self.asked_in_vain: dict[DHTID, None] = {}
        """Nodes that answered and had nothing."""
        self._validator = validator
        self._owns_found = False

    @property
    def finished(self) -> bool:
        """The caller has the result, or does not want it any more."""
        return self.future.done()

    @property
    def is_satisfied(self) -> bool:
        """What was found lives long enough."""
        return self.found is not None and self.expiration_time >= self.sufficient_expiration_time

    def add_candidate(self, value: StoredValue, expiration_time: DHTExpiration, source: DHTID | None) -> None:
        """Consider what a node holds: dictionaries are united; otherwise the later expiration wins, except that a plain
        value never pushes aside what somebody owns."""
        if isinstance(value, DictionaryDHTValue) and isinstance(self.found, DictionaryDHTValue):
            self._unite_with(value)
            if expiration_time > self.expiration_time:
                self.expiration_time, self.source = expiration_time, source
        elif self._is_better(value, expiration_time):
            self.found, self._owns_found = value, False
            self.expiration_time, self.source = expiration_time, source

    def _is_better(self, value: StoredValue, expiration_time: DHTExpiration) -> bool:
        """Whether it should replace what was found, which is of the other kind or plain as well."""
        if self.found is not None and type(value) is not type(self.found):
            key = self.key_id.to_bytes()
            if has_owned_entries(self._validator, key, self.found):
                return False
            if has_owned_entries(self._validator, key, value):
                return True
        return expiration_time > self.expiration_time

    def _unite_with(self, other: DictionaryDHTValue[bytes]) -> None:
        assert isinstance(self.found, DictionaryDHTValue)
        if not self._owns_found:  # it may be the very object that lies in the storage of this node
            self.found, self._owns_found = self.found.copy(), True
        for subkey, item in other.items():
            self.found.store(subkey, item.value, item.expiration_time)

    def adopt(self, other: Search) -> None:
        """Take over what another search for the same key has found."""
        self.found, self._owns_found = other.found, False
        self.expiration_time, self.source = other.expiration_time, other.source

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
        """The value for the application, or ``None`` if it makes no sense."""
        if self._validator is not None:
            value = self._validator.strip_value(DHTRecord(self.key_id.to_bytes(), subkey, value, expiration_time))
        try:
            return (MSGPackSerializer.loads(value),)
        except ValueError as e:
            logger.debug("a value of key %s cannot be decoded: %s", self.key_id, e)
            return None


class PendingSearches:
    """Searches for the same key help each other: the first good result is everybody's."""

    def __init__(self) -> None:
        self._by_key: dict[DHTID, list[Search]] = {}

    def join(self, search: Search) -> None:
        """Share with others from now on."""
        self._by_key.setdefault(search.key_id, []).append(search)

    def leave(self, search: Search) -> None:
        """Stop sharing."""
        searches = self._by_key.get(search.key_id, [])
        if search in searches:
            searches.remove(search)
        if not searches:
            self._by_key.pop(search.key_id, None)

    def share_result(self, search: Search) -> None:
        """A search has come to its end: leave, and give what it found to everybody for whom that is enough."""
        self.leave(search)
        if search.found is None:
            return
        reached = max(search.expiration_time, search.sufficient_expiration_time)
        for other in list(self._by_key.get(search.key_id, ())):
            if other.sufficient_expiration_time <= reached and not other.finished:
                other.adopt(search)
                other.finish()
                self.leave(other)

    def __getitem__(self, key_id: DHTID) -> list[Search]:
        return self._by_key.get(key_id, [])

    def __len__(self) -> int:
        return len(self._by_key)
