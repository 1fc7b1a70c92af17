"""The distributed hash table: small facts with expirations, found by key without a server (Kademlia).

- Nodes and keys have ids of 160 bits; the distance of two is their XOR. A node knows many nodes near to it and some of
  the others (:mod:`~.routing`).
- A walk asks the nearest nodes that it knows for nearer ones, until nobody knows any (:mod:`~.traverse`). On the way it
  learns who they are and where they can be called (:mod:`~.lookup`).
- What is stored goes to the nodes nearest to its key (:mod:`~.store`), and a get takes the newest that they have
  (:mod:`~.get`). There are three calls between nodes: ping, store, find (:mod:`~.protocol`).
- A node checks what it keeps and what it is told (:mod:`~.records`, :mod:`~.validation`): types (:mod:`~.schema`), and
  signatures that say who may write where (:mod:`~.crypto`). With an authorizer only members talk at all.
- Whoever is silent is suspected, and blamed only if others answer (:mod:`~.reception`). A node that has lost everybody
  looks for them for ever (:mod:`~.joining`).
- :mod:`~.node` is the table for coroutines; :class:`DHT` the same for any thread.
"""

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
