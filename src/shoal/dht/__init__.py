"""The distributed hash table: small facts with expirations, found by key without a server (Kademlia).

- Nodes and keys have 160-bit ids; the distance of two ids is their XOR. A node knows many nodes near its own id and
  few far away (:mod:`~.routing`).
- A walk asks the nearest known nodes for nearer ones, until there are none (:mod:`~.traverse`). On the way it learns
  their peer ids and addresses (:mod:`~.lookup`).
- A record is stored at the nodes nearest to its key (:mod:`~.store`), and a get returns the newest that they have
  (:mod:`~.get`). Nodes have three calls: ping, store, find (:mod:`~.protocol`).
- A node checks all records that it keeps or reads (:mod:`~.records`, :mod:`~.validation`): types (:mod:`~.schema`), and
  signatures of owners (:mod:`~.crypto`). With an authorizer only members may call each other.
- A silent peer is blamed only if others answer (:mod:`~.connectivity`). A lost swarm is searched for
  (:mod:`~.joining`).
- :mod:`~.node` is the table for coroutines, :class:`DHT` the table for any thread.
"""

import importlib
from types import ModuleType

from shoal.base.clock import DHTExpiration
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
    """Load two submodules at first use: few programs need them, and they take longer than all others together."""
    if name in ("crypto", "schema"):
        return importlib.import_module(f"shoal.dht.{name}")
    raise AttributeError(f"module 'shoal.dht' has no attribute {name!r}")
