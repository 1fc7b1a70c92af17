"""Small public names under the import path that users know; all of them live elsewhere."""

from shoal.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS, DHTExpiration, get_dht_time
from shoal.compression import TensorDescriptor
from shoal.dht.storage import TimedStorage, ValueWithExpiration
from shoal.optim.performance_ema import PerformanceEMA
from shoal.serializer import MSGPackSerializer, SerializerBase

__all__ = [
    "MAX_DHT_TIME_DISCREPANCY_SECONDS",
    "DHTExpiration",
    "MSGPackSerializer",
    "PerformanceEMA",
    "SerializerBase",
    "TensorDescriptor",
    "TimedStorage",
    "ValueWithExpiration",
    "get_dht_time",
]
