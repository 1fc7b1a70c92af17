"""The distributed hash table: small facts with expirations, found by key without a server (Kademlia).

Nodes and keys have 160-bit ids, and their distance is XOR. A record is stored at the nodes nearest to its key::

    DHT (any thread) -> DHTNode -> store or get -> traverse -> protocol ~~ network ~~> protocol -> local_records

Read the files in this order:

- :mod:`~.dht` for programs, :mod:`~.node` for coroutines; its settings are in :mod:`~.config`.
- :mod:`~.store` and :mod:`~.get`: one store or get, step by step.
- :mod:`~.traverse`: the walk to the nodes nearest to a key. :mod:`~.routing`: ids, and the nodes that a node knows.
- :mod:`~.protocol`: the calls between nodes (ping, store, find), and whether a silent peer is gone or this machine
  offline. :mod:`~.records`: their messages.
- :mod:`~.local_records`: the records that a node keeps, in the containers of :mod:`~.storage`.
- :mod:`~.validation`: rules about records, and the reasons why nodes refuse some. :mod:`~.schema`: rules about types;
  :mod:`~.crypto`: signatures of owners.
- :mod:`~.joining`: how a node finds a swarm, and finds it again; and the DHT server mode.
- :mod:`~.key_sharding`: many keys for the records of a large swarm. :mod:`~.authorization`: a DHT for members only.
"""

import importlib
from types import ModuleType

from shoal.base.clock import DHTExpiration
from shoal.dht.dht import DHT
from shoal.dht.node import DEFAULT_NUM_WORKERS, DHTNode
from shoal.dht.routing import DHTID, DHTKey
from shoal.dht.storage import DHTValue, Subkey, ValueWithExpiration
from shoal.dht.validation import (
    CompositeValidator,
    DHTRecord,
    GetReport,
    Outcome,
    Reason,
    RecordValidatorBase,
    StoreReport,
)

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
    "GetReport",
    "Outcome",
    "Reason",
    "RecordValidatorBase",
    "StoreReport",
    "Subkey",
    "ValueWithExpiration",
]


def __getattr__(name: str) -> ModuleType:
    """Load a submodule at first use: few programs need it, and it takes longer than all others together."""
    if name == "schema":
        return importlib.import_module("shoal.dht.schema")
    raise AttributeError(f"module 'shoal.dht' has no attribute {name!r}")
