"""The distributed hash table: small facts with expirations, found by key without a server."""

from shoal.clock import DHTExpiration
from shoal.dht.config import DEFAULT_NUM_WORKERS
from shoal.dht.dht import DHT
from shoal.dht.node import DHTNode
from shoal.dht.routing import DHTID, DHTKey
from shoal.dht.storage import DHTValue, Subkey, ValueWithExpiration
from shoal.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase

__all__ = [
    "DEFAULT_NUM_WORKERS",
    "DHT",
    "DHTID",
    "CompositeValidator",
    "DHTExpiration",
    "DHTKey",
    "DHTNode",
    "DHTRecord",
    "DHTValue",
    "RecordValidatorBase",
    "Subkey",
    "ValueWithExpiration",
]
