"""The distributed hash table: small facts with expirations, found by key without a server."""

import importlib
from types import ModuleType

from shoal.clock import DHTExpiration
from shoal.dht.dht import DHT
from shoal.dht.node import DEFAULT_NUM_WORKERS, DHTNode
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


def __getattr__(name: str) -> ModuleType:
    """Submodules that not every program needs load at first use: they take longer than all others together."""
    if name in ("crypto", "schema"):
        return importlib.import_module(f"shoal.dht.{name}")
    raise AttributeError(f"module 'shoal.dht' has no attribute {name!r}")
