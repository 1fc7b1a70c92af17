"""Values with expirations, under the import path that users know."""

from shoal.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS, DHTExpiration, get_dht_time
from shoal.dht.storage import HeapEntry, TimedStorage, ValueWithExpiration

__all__ = [
    "MAX_DHT_TIME_DISCREPANCY_SECONDS",
    "DHTExpiration",
    "HeapEntry",
    "TimedStorage",
    "ValueWithExpiration",
    "get_dht_time",
]
